//! The softmax over chunks of keys at absolute positions, and the merging of chunks.
//!
//! The softmax of a chunk does not depend on other chunks, so chunks can be computed one after the other or
//! in parallel. In both cases chunks are merged in ascending order, so the bits are equal.

use super::Attention;
use crate::ops::kv_cache::BLOCK;
use crate::ops::math::exp;
use std::ops::RangeInclusive;

/// Number of keys per chunk, a multiple of [`BLOCK`].
pub(super) const CHUNK: usize = 512;

/// The softmax state of a query over some of its keys. The sum `O = Σ_j e^{S_j − maximum} v_j` is stored
/// separately.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Softmax {
    /// The maximum of the scores and the sink. It is always finite.
    pub maximum: f32,
    /// `Σ_j e^{S_j − maximum}` without the sink. [`Softmax::finish`] adds the sink.
    pub total: f32,
}

impl Softmax {
    /// Returns the softmax state before the first key.
    #[inline(always)]
    pub fn new(sink: f32) -> Self {
        Self { maximum: sink, total: 0.0 }
    }

    /// Merges the softmax state and the sum `chunk_o` of the next chunk. A chunk without keys changes
    /// nothing: its factor is exactly 0, and the factor of the previous state is exactly 1.
    #[inline(always)]
    pub fn merge(&mut self, o: &mut [f32], chunk: Self, chunk_o: &[f32]) {
        let maximum = if chunk.maximum > self.maximum { chunk.maximum } else { self.maximum };
        let (shrink, chunk_shrink) = (exp(self.maximum - maximum), exp(chunk.maximum - maximum));
        self.maximum = maximum;
        self.total = self.total.mul_add(shrink, chunk.total * chunk_shrink);
        for (x, &y) in o.iter_mut().zip(chunk_o) {
            *x = x.mul_add(shrink, y * chunk_shrink);
        }
    }

    /// Adds the sink to the total and divides `o` by the total. Returns the log-sum-exp.
    #[inline(always)]
    pub fn finish(self, o: &mut [f32], sink: f32) -> f32 {
        let total = self.total + exp(sink - self.maximum);
        for x in o {
            *x /= total;
        }
        self.maximum + total.ln()
    }
}

/// Returns the chunks with at least one key that is visible to the query at `position`.
#[inline(always)]
pub(super) fn chunks(attention: &Attention, position: usize) -> RangeInclusive<usize> {
    attention.first_key(position) / CHUNK..=position / CHUNK
}

/// Returns the blocks of `chunk` with at least one key that is visible to the query at `position`.
#[inline(always)]
pub(super) fn blocks(attention: &Attention, position: usize, chunk: usize) -> RangeInclusive<usize> {
    let first = attention.first_key(position).max(chunk * CHUNK) / BLOCK;
    let last = position.min((chunk + 1) * CHUNK - 1) / BLOCK;
    first..=last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::sink_attention::NO_SINK;

    #[test]
    fn a_chunk_without_a_seen_key_leaves_no_trace_before_or_after_the_others() {
        for (sink, maximum) in [(NO_SINK, 0.3), (0.7, 0.7), (-80.0, 250.0), (300.0, 300.0)] {
            let (seen, seen_o) = (Softmax { maximum, total: 1.7e-3 }, [1.5, -3e-39, 0.0, 2e30]);
            let (hidden, hidden_o) = (Softmax::new(sink), [0.0; 4]);
            let (mut softmax, mut o) = (seen, seen_o);
            softmax.merge(&mut o, hidden, &hidden_o);
            assert_eq!((softmax, o), (seen, seen_o));
            let (mut softmax, mut o) = (hidden, hidden_o);
            softmax.merge(&mut o, seen, &seen_o);
            assert_eq!((softmax, o), (seen, seen_o));
        }
    }

    #[test]
    fn the_sink_is_counted_once_however_many_chunks_there_are() {
        for count in 1..5 {
            let mut softmax = Softmax::new(1.0);
            let mut o = [0.0];
            for _ in 0..count {
                softmax.merge(&mut o, Softmax { maximum: 1.0, total: 2.0 }, &[6.0]);
            }
            let all = count as f32;
            assert_eq!(softmax.finish(&mut o, 1.0), 1.0 + (2.0 * all + 1.0).ln());
            assert_eq!(o, [6.0 * all / (2.0 * all + 1.0)]);
        }
    }

    #[test]
    fn the_blocks_of_the_chunks_are_those_with_a_seen_key() {
        let attention = |window| Attention {
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            window,
            sinks: true,
            sink_gradient: true,
        };
        for window in [None, Some(1), Some(31), Some(512), Some(513), Some(700)] {
            for position in [0, 31, 32, 510, 511, 512, 513, 1023, 1024, 1025, 2000] {
                let attention = attention(window);
                let walked: Vec<usize> = chunks(&attention, position)
                    .flat_map(|chunk| blocks(&attention, position, chunk))
                    .collect();
                let seen: Vec<usize> = (attention.first_key(position) / BLOCK..=position / BLOCK).collect();
                assert_eq!(walked, seen, "window {window:?}, position {position}");
            }
        }
    }
}
