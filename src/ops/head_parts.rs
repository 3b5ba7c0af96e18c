//! Attention heads in one part for each of several ranks: what sequence parallelism sends and receives.
//!
//! A row has `G` groups of heads: one of queries, or one of keys and one of values. If there are fewer heads
//! than ranks, several ranks share a head. Then [`HeadSplit::unpack`] returns the sum of their values, in
//! rank order. On a GPU values are bf16; a sum is computed in f32 and rounded once.

use super::buffer::buffer;

/// How the heads of rows are split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadSplit {
    /// `G`: 1 for queries, 2 for keys with values.
    pub groups: usize,
    /// The number of heads of a group, `N`. It divides the number of ranks, or is a multiple of it.
    pub heads: usize,
    /// The size of a head, `D`.
    pub head_dim: usize,
    /// The number of ranks, `S`.
    pub ranks: usize,
}

impl HeadSplit {
    /// Returns the number of heads of a group that each rank has, `n`.
    pub fn own_heads(&self) -> usize {
        (self.heads / self.ranks).max(1)
    }

    /// Returns the first head of rank `rank`.
    pub fn first_head(&self, rank: usize) -> usize {
        rank * self.heads / self.ranks
    }

    /// Returns the number of values of a row with all heads, `G·N·D`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn row_width(&self) -> usize {
        self.groups * self.heads * self.head_dim
    }

    /// Returns the number of values of a row in a rank's part, `G·n·D`.
    pub fn part_width(&self) -> usize {
        self.groups * self.own_heads() * self.head_dim
    }

    /// Returns the part `[T, G, n, D]` of each rank, for rows `x [T, G, N, D]` in host memory.
    pub fn pack(&self, x: &[f32]) -> Vec<Vec<f32>> {
        let (group, own) = (self.heads * self.head_dim, self.own_heads() * self.head_dim);
        let part = |rank: usize| {
            let first = self.first_head(rank) * self.head_dim;
            x.chunks_exact(group).flat_map(|group| group[first..first + own].iter().copied()).collect()
        };
        (0..self.ranks).map(part).collect()
    }

    /// Returns rows `[T, G, N, D]` for the part `[T, G, n, D]` of each rank, in host memory.
    pub fn unpack(&self, parts: &[Vec<f32>]) -> Vec<f32> {
        let (group, own) = (self.heads * self.head_dim, self.own_heads() * self.head_dim);
        let mut out = buffer(parts.first().map_or(0, Vec::len) / own * group);
        for (rank, part) in parts.iter().enumerate() {
            let first = self.first_head(rank) * self.head_dim;
            let is_shared = rank > 0 && self.first_head(rank - 1) == self.first_head(rank);
            for (from, to) in part.chunks_exact(own).zip(out.chunks_exact_mut(group)) {
                let to = &mut to[first..first + own];
                match is_shared {
                    false => to.copy_from_slice(from),
                    true => to.iter_mut().zip(from).for_each(|(sum, x)| *sum += x),
                }
            }
        }
        out
    }
}

/// Returns the reason why heads cannot be split over `ranks` processes; `None` if they can be split.
pub fn head_split_error(heads: usize, kv_heads: usize, ranks: usize) -> Option<String> {
    let divides = |a: usize, b: usize| b != 0 && a.is_multiple_of(b);
    (!divides(heads, ranks)).then(|| format!("does not divide the {heads} attention heads")).or_else(|| {
        let fits = divides(kv_heads, ranks) || divides(ranks, kv_heads);
        (!fits).then(|| format!("neither divides the {kv_heads} key-value heads nor is a multiple of them"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_go_round_in_stretches_and_few_key_value_heads_are_on_several_ranks() {
        let heads = |groups, heads, ranks| {
            let split = HeadSplit { groups, heads, head_dim: 1, ranks };
            // One row whose values are the indices of the heads.
            let row: Vec<f32> = (0..groups * heads).map(|head| head as f32).collect();
            split.pack(&row)
        };
        assert_eq!(heads(1, 4, 2), [[0.0, 1.0], [2.0, 3.0]]);
        assert_eq!(heads(1, 2, 4), [[0.0], [0.0], [1.0], [1.0]]);
        assert_eq!(heads(2, 2, 4), [[0.0, 2.0], [0.0, 2.0], [1.0, 3.0], [1.0, 3.0]]);
        assert_eq!(head_split_error(64, 8, 16), None);
        assert!(head_split_error(12, 2, 8).unwrap().contains("12 attention heads"));
        assert!(head_split_error(12, 4, 6).unwrap().contains("4 key-value heads"));
    }

    #[test]
    fn parts_become_rows_again_and_shared_heads_are_added_in_rank_order() {
        for (groups, heads, ranks) in [(1, 6, 3), (2, 4, 2), (2, 3, 3), (1, 1, 1)] {
            let split = HeadSplit { groups, heads, head_dim: 4, ranks };
            let x: Vec<f32> = (0..5 * split.row_width()).map(|i| i as f32).collect();
            let parts = split.pack(&x);
            assert!(parts.iter().all(|part| part.len() == 5 * split.part_width()));
            assert_eq!(split.unpack(&parts), x);
        }
        let split = HeadSplit { groups: 1, heads: 1, head_dim: 1, ranks: 3 };
        // In the order of ranks, 1 is lost beside 2²⁴; in the opposite order it is not.
        let large = (1 << 24) as f32;
        assert_eq!(split.unpack(&[vec![large], vec![1.0], vec![-large]]), [0.0]);
    }
}
