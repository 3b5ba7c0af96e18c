//! Which pages of a device's key-value cache belong to which sequence: accounts on the host, no device needed.
//!
//! A page holds the keys and values of 64 consecutive positions, the blocks in which the attention kernels read them.

use super::sink_attention::kernels::BLOCK_KEYS as PAGE;
use candle_core::{Result, bail};

/// The pages of one cache.
#[derive(Debug)]
pub struct Pages {
    /// Taken from the end.
    free: Vec<u32>,
    total: usize,
}

/// One sequence's pages, in the order of its positions.
#[derive(Debug, Default)]
pub struct PagedSequence {
    pages: Vec<u32>,
    len: usize,
}

/// `rows` consecutive new tokens that lie in one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First of them among all new tokens.
    pub token: usize,
    /// Its row in the cache: page · 64 + place.
    pub row: usize,
    /// Their number.
    pub rows: usize,
}

impl Pages {
    /// `total` pages, all free.
    pub fn new(total: usize) -> Self {
        Self { free: (0..total as u32).rev().collect(), total }
    }

    /// Pages that belong to no sequence.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes room for `counts[i]` new tokens at the end of `sequences[i]`, for all or for none of them.
    /// Returns where the new tokens' keys and values go.
    ///
    /// # Errors
    /// When the pages do not suffice; nothing has changed then.
    pub fn extend(&mut self, sequences: &mut [&mut PagedSequence], counts: &[usize]) -> Result<Vec<Run>> {
        if counts.len() != sequences.len() {
            let (a, b) = (counts.len(), sequences.len());
            bail!("key-value cache: new tokens for {a} sequences, {b} sequences; give one count a sequence");
        }
        let missing = |(s, &count): (&&mut PagedSequence, &usize)| {
            (s.len + count).div_ceil(PAGE).saturating_sub(s.pages.len())
        };
        let needed: usize = sequences.iter().zip(counts).map(missing).sum();
        if needed > self.free.len() {
            bail!(
                "key-value cache too small: {} new tokens of {} sequences need {needed} more pages of {PAGE} positions, and \
                 {} of {} are free; make the cache larger, or run fewer sequences at a time",
                counts.iter().sum::<usize>(),
                counts.len(),
                self.free.len(),
                self.total
            );
        }
        let (mut runs, mut token) = (vec![], 0);
        for (sequence, &count) in sequences.iter_mut().zip(counts) {
            let end = sequence.len + count;
            while sequence.pages.len() * PAGE < end {
                // Never none: counted above.
                sequence.pages.extend(self.free.pop());
            }
            while sequence.len < end {
                let place = sequence.len % PAGE;
                let rows = (PAGE - place).min(end - sequence.len);
                let row = sequence.pages[sequence.len / PAGE] as usize * PAGE + place;
                runs.push(Run { token, row, rows });
                sequence.len += rows;
                token += rows;
            }
        }
        Ok(runs)
    }

    /// Takes a sequence's pages back.
    pub fn release(&mut self, sequence: PagedSequence) {
        self.free.extend(sequence.pages.into_iter().rev());
    }
}

impl PagedSequence {
    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True before the first position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// `page_table` of the kernels, `[sequences, pages_max]`, and `pages_max`. Places past a sequence's end hold 0.
pub fn page_table(sequences: &[&mut PagedSequence]) -> (Vec<i32>, usize) {
    let pages_max = sequences.iter().map(|s| s.pages.len()).max().unwrap_or(0);
    let mut table = vec![0; sequences.len() * pages_max];
    for (s, sequence) in sequences.iter().enumerate() {
        for (p, &page) in sequence.pages.iter().enumerate() {
            table[s * pages_max + p] = page as i32;
        }
    }
    (table, pages_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_go_to_pages_in_order_and_a_full_cache_is_refused_whole() {
        let mut pages = Pages::new(4);
        let (mut a, mut b) = (PagedSequence::default(), PagedSequence::default());
        let runs = pages.extend(&mut [&mut a, &mut b], &[70, 1]).unwrap();
        let run = |token, row, rows| Run { token, row, rows };
        assert_eq!(runs, [run(0, 0, 64), run(64, 64, 6), run(70, 128, 1)]);
        assert_eq!(pages.extend(&mut [&mut a, &mut b], &[2, 63]).unwrap(), [run(0, 70, 2), run(2, 129, 63)]);
        assert_eq!(page_table(&[&mut a, &mut b]), (vec![0, 1, 2, 0], 2));

        let error = pages.extend(&mut [&mut a, &mut b], &[57, 1]).unwrap_err().to_string();
        assert!(error.contains("58 new tokens of 2 sequences need 2 more pages"), "{error}");
        assert!(error.contains("1 of 4 are free"), "{error}");
        assert_eq!((a.len(), b.len(), pages.free()), (72, 64, 1));

        pages.release(a);
        assert_eq!(pages.free(), 3);
        assert_eq!(pages.extend(&mut [&mut b], &[1]).unwrap(), [run(0, 0, 1)]);
        assert!(pages.extend(&mut [&mut b], &[]).unwrap_err().to_string().contains("one count a sequence"));
    }

    #[test]
    fn no_tokens_take_no_pages() {
        let (mut pages, mut a) = (Pages::new(0), PagedSequence::default());
        assert!(a.is_empty());
        assert_eq!(pages.extend(&mut [&mut a], &[0]).unwrap(), []);
        assert_eq!(page_table(&[&mut a]), (vec![], 0));
    }
}
