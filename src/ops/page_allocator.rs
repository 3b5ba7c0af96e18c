//! Allocates the pages of a key-value cache on a device, and records which page belongs to which sequence.
//! The module has only host code.
//!
//! A page holds the keys and values of 64 consecutive positions, the block size of the attention kernels.
//! Cloned sequences share pages. A shared page is copied before it is written. A page is freed when no
//! sequence has it.

use super::sink_attention::kernels::BLOCK_KEYS;
use candle_core::{Result, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Number of positions per page.
pub const PAGE_POSITIONS: usize = BLOCK_KEYS;

/// The allocator of one cache's pages.
#[derive(Debug)]
pub struct PageAllocator {
    /// The free pages. Allocation takes the last page.
    free: Mutex<Vec<u32>>,
    total: usize,
}

/// A page in use. Dropping it frees the page.
#[derive(Debug)]
struct Page {
    index: u32,
    pages: Arc<PageAllocator>,
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pages.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

/// The pages of one sequence, in the order of positions. Clones share pages.
#[derive(Debug, Clone, Default)]
pub struct PagedSequence {
    /// `None` for a page that was freed, because its positions are outside the window of every later query.
    pages: Vec<Option<Arc<Page>>>,
    len: usize,
}

/// Consecutive new tokens in one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSpan {
    /// Index of the first token among all new tokens.
    pub token: usize,
    /// The cache row of the first token: page · 64 + index in the page.
    pub row: usize,
    /// Number of tokens of the span.
    pub rows: usize,
}

/// A copy of rows of a shared page, for a sequence that is about to write to this page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopiedRows {
    /// The first cache row to copy. It is copied to row `to`.
    pub from: usize,
    pub to: usize,
    pub rows: usize,
}

/// Changes to the cache for new tokens. First the copies are made, in order. Then the new tokens are written
/// to the spans in `runs`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CacheUpdate {
    pub copies: Vec<CopiedRows>,
    pub runs: Vec<PageSpan>,
}

impl PageAllocator {
    /// Returns an allocator with `total` free pages.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new((0..total as u32).rev().collect()), total })
    }

    /// Returns the number of free pages.
    pub fn free_pages(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns a sequence of `len` positions with arbitrary contents, for timings. Pages outside `window` are
    /// not allocated.
    ///
    /// # Errors
    /// When there are too few free pages.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn reserve(self: &Arc<Self>, len: usize, window: Option<usize>) -> Result<PagedSequence> {
        let hidden = window.map_or(0, |window| (len + 1).saturating_sub(window) / PAGE_POSITIONS);
        let own = self.take(len.div_ceil(PAGE_POSITIONS) - hidden, &[len])?;
        let own = own.into_iter().map(|page| Some(Arc::new(page)));
        Ok(PagedSequence { pages: (0..hidden).map(|_| None).chain(own).collect(), len })
    }

    /// Allocates pages for `counts[i]` new tokens at the end of `sequences[i]`. Allocates either for all
    /// sequences or for none. Returns the cache rows to which the keys and values of the new tokens must be
    /// written.
    ///
    /// # Errors
    /// When there are too few free pages. Nothing is changed then.
    pub fn extend(
        self: &Arc<Self>,
        sequences: &mut [&mut PagedSequence],
        counts: &[usize],
    ) -> Result<CacheUpdate> {
        if counts.len() != sequences.len() {
            let (a, b) = (counts.len(), sequences.len());
            bail!("key-value cache: {a} counts for {b} sequences; give one count per sequence");
        }
        let mut taken = self.take(pages_needed(sequences, counts), counts)?.into_iter();
        let mut update = CacheUpdate::default();
        let mut token = 0;
        for (sequence, &count) in sequences.iter_mut().zip(counts) {
            // This always succeeds, because the pages were counted above.
            if let Some(last) = sequence.written_page(count).filter(|last| Arc::strong_count(last) > 1)
                && let Some(own) = taken.next()
            {
                let rows = sequence.len % PAGE_POSITIONS;
                let (from, to) = (last.index as usize * PAGE_POSITIONS, own.index as usize * PAGE_POSITIONS);
                update.copies.push(CopiedRows { from, to, rows });
                sequence.pages.pop();
                sequence.pages.push(Some(Arc::new(own)));
            }
            let end = sequence.len + count;
            let missing = end.div_ceil(PAGE_POSITIONS) - sequence.pages.len();
            sequence.pages.extend(taken.by_ref().take(missing).map(|page| Some(Arc::new(page))));
            while sequence.len < end {
                let offset = sequence.len % PAGE_POSITIONS;
                let rows = (PAGE_POSITIONS - offset).min(end - sequence.len);
                let row = sequence.index(sequence.len / PAGE_POSITIONS) * PAGE_POSITIONS + offset;
                update.runs.push(PageSpan { token, row, rows });
                sequence.len += rows;
                token += rows;
            }
        }
        Ok(update)
    }

    fn take(self: &Arc<Self>, needed: usize, counts: &[usize]) -> Result<Vec<Page>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if needed > free.len() {
            bail!(
                "key-value cache too small: {} new tokens of {} sequences need {needed} more pages of {PAGE_POSITIONS} positions, and \
                 {} of {} are free; make the cache larger, or run fewer sequences at a time",
                counts.iter().sum::<usize>(),
                counts.len(),
                free.len(),
                self.total
            );
        }
        let rest = free.len() - needed;
        let indices = free.split_off(rest);
        Ok(indices.into_iter().rev().map(|index| Page { index, pages: self.clone() }).collect())
    }
}

/// Returns the number of pages for `counts[i]` new tokens of `sequences[i]`, copies of shared pages included.
fn pages_needed(sequences: &[&mut PagedSequence], counts: &[usize]) -> usize {
    // For each page: the number of sequences that will write to it, and the number of sequences that share
    // it. The last sequence that shares a page writes to it without a copy.
    let mut written: HashMap<*const Page, (usize, usize)> = HashMap::new();
    let mut needed = 0;
    for (sequence, &count) in sequences.iter().zip(counts) {
        needed += (sequence.len + count).div_ceil(PAGE_POSITIONS).saturating_sub(sequence.pages.len());
        if let Some(page) = sequence.written_page(count) {
            written.entry(Arc::as_ptr(page)).or_insert((0, Arc::strong_count(page))).0 += 1;
        }
    }
    needed + written.values().map(|&(writers, sharers)| writers.min(sharers - 1)).sum::<usize>()
}

impl PagedSequence {
    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the sequence has no positions.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Frees pages whose keys are outside the `window` of every query at or after `position`.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        let first_seen = (position + 1).saturating_sub(window) / PAGE_POSITIONS;
        self.pages.iter_mut().take(first_seen).for_each(|page| *page = None);
    }

    /// Returns the partly filled page into which the next `count` tokens would be written, if there is one.
    fn written_page(&self, count: usize) -> Option<&Arc<Page>> {
        if count == 0 || self.len.is_multiple_of(PAGE_POSITIONS) { None } else { self.pages.last()?.as_ref() }
    }

    /// Returns the number of pages, freed ones included.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// Returns the index, in the cache, of page number `page` of the sequence; `None` for a freed page.
    pub fn page(&self, page: usize) -> Option<i32> {
        // Indices fit i32, because rows do.
        self.pages.get(page).and_then(Option::as_ref).map(|page| page.index as i32)
    }

    /// Returns the index of [`Self::page`]. Returns 0 for a freed page, which no kernel reads.
    fn index(&self, page: usize) -> usize {
        self.page(page).unwrap_or(0) as usize
    }
}

/// Number of entries of a page table in 16 bytes, the unit in which decode sends entries.
pub const TABLE_VECTOR: usize = 4;

/// Returns the number of entries per sequence of decode's page table, for sequences of up to `tokens`
/// positions.
pub fn table_width(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_POSITIONS).max(1).next_multiple_of(TABLE_VECTOR)
}

/// Returns the `page_table` of the kernels, `[sequences, pages_max]`, and `pages_max`, which is at least
/// `width`. Entries of freed pages and past the end of a sequence are 0.
pub fn page_table(sequences: &[&mut PagedSequence], width: usize) -> (Vec<i32>, usize) {
    let pages_max = sequences.iter().map(|s| s.pages.len()).max().unwrap_or(0).max(width);
    let row = |sequence: &&mut PagedSequence| -> Vec<i32> {
        (0..pages_max).map(|page| sequence.index(page) as i32).collect()
    };
    (sequences.iter().flat_map(row).collect(), pages_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(token: usize, row: usize, rows: usize) -> PageSpan {
        PageSpan { token, row, rows }
    }

    fn runs(
        pages: &Arc<PageAllocator>,
        sequences: &mut [&mut PagedSequence],
        counts: &[usize],
    ) -> Vec<PageSpan> {
        let update = pages.extend(sequences, counts).unwrap();
        assert_eq!(update.copies, []);
        update.runs
    }

    #[test]
    fn a_reserved_sequence_goes_on_where_a_window_left_it() {
        let pages = PageAllocator::new(4);
        // With a window of 128, keys 73 to 199 are visible to a query at 200, so the first page is freed.
        let mut reserved = pages.reserve(200, Some(128)).unwrap();
        assert_eq!((reserved.len(), pages.free_pages()), (200, 1));
        let mut grown = PagedSequence { len: 200, ..PagedSequence::default() };
        grown.pages = vec![Some(Arc::new(Page { index: 0, pages: pages.clone() })); 4];
        grown.forget_before(200, 128);
        let forgotten = |of: &PagedSequence| of.pages.iter().map(Option::is_none).collect::<Vec<_>>();
        assert_eq!(forgotten(&reserved), forgotten(&grown));
        assert_eq!(pages.extend(&mut [&mut reserved], &[56]).unwrap().runs.len(), 1);
        assert!(pages.reserve(200, None).is_err());
    }

    #[test]
    fn tokens_go_to_pages_in_order_and_a_full_cache_is_refused_whole() {
        let pages = PageAllocator::new(4);
        let (mut a, mut b) = (PagedSequence::default(), PagedSequence::default());
        let found = runs(&pages, &mut [&mut a, &mut b], &[70, 1]);
        assert_eq!(found, [run(0, 0, 64), run(64, 64, 6), run(70, 128, 1)]);
        assert_eq!(runs(&pages, &mut [&mut a, &mut b], &[2, 63]), [run(0, 70, 2), run(2, 129, 63)]);
        assert_eq!(page_table(&[&mut a, &mut b], 0), (vec![0, 1, 2, 0], 2));

        let error = pages.extend(&mut [&mut a, &mut b], &[57, 1]).unwrap_err().to_string();
        assert!(error.contains("58 new tokens of 2 sequences need 2 more pages"), "{error}");
        assert!(error.contains("1 of 4 are free"), "{error}");
        assert_eq!((a.len(), b.len(), pages.free_pages()), (72, 64, 1));

        drop(a);
        assert_eq!(pages.free_pages(), 3);
        assert_eq!(runs(&pages, &mut [&mut b], &[1]).len(), 1);
        assert!(pages.extend(&mut [&mut b], &[]).unwrap_err().to_string().contains("one count per sequence"));
    }

    #[test]
    fn no_tokens_take_no_pages() {
        let (pages, mut a) = (PageAllocator::new(0), PagedSequence::default());
        assert!(a.is_empty());
        assert_eq!(runs(&pages, &mut [&mut a], &[0]), []);
        assert_eq!(page_table(&[&mut a], 0), (vec![], 0));
    }

    #[test]
    fn samples_of_a_group_share_their_prompt_and_copy_the_page_they_write_in() {
        let (pages, mut prompt) = (PageAllocator::new(5), PagedSequence::default());
        runs(&pages, &mut [&mut prompt], &[70]);
        let (mut a, mut b) = (prompt.clone(), prompt.clone());
        assert_eq!(pages.free_pages(), 3, "clones take nothing");
        // The prompt stays alive, so both sequences copy its six rows of the second page.
        let update = pages.extend(&mut [&mut a, &mut b], &[1, 2]).unwrap();
        let copy = |to| CopiedRows { from: 64, to, rows: 6 };
        assert_eq!(update.copies, [copy(128), copy(192)]);
        assert_eq!(update.runs, [run(0, 134, 1), run(1, 198, 2)]);
        assert_eq!(page_table(&[&mut prompt, &mut a, &mut b], 0), (vec![0, 1, 0, 2, 0, 3], 2));
        assert_eq!(runs(&pages, &mut [&mut a], &[1]), [run(0, 135, 1)], "its own now");
        drop((a, b));
        assert_eq!(pages.free_pages(), 3);

        // The last sequence that has a page writes to it without a copy.
        let mut only = prompt.clone();
        let error = PageAllocator::new(0).extend(&mut [&mut only], &[1]).unwrap_err().to_string();
        assert!(error.contains("need 1 more pages"), "{error}");
        let update = pages.extend(&mut [&mut prompt, &mut only], &[1, 1]).unwrap();
        assert_eq!((update.copies.len(), update.runs[1].row, pages.free_pages()), (1, 70, 2));
    }

    #[test]
    fn a_full_page_is_shared_for_good() {
        let (pages, mut prompt) = (PageAllocator::new(3), PagedSequence::default());
        runs(&pages, &mut [&mut prompt], &[64]);
        let mut a = prompt.clone();
        assert_eq!(runs(&pages, &mut [&mut prompt, &mut a], &[1, 1]), [run(0, 64, 1), run(1, 128, 1)]);
    }

    #[test]
    fn pages_behind_the_window_are_free_when_nobody_sees_them() {
        let (pages, mut a) = (PageAllocator::new(4), PagedSequence::default());
        runs(&pages, &mut [&mut a], &[150]);
        let b = a.clone();
        a.forget_before(150, 20);
        assert_eq!(pages.free_pages(), 1, "the other still sees them");
        drop(b);
        assert_eq!(pages.free_pages(), 3);
        assert_eq!(page_table(&[&mut a], 0), (vec![0, 0, 2], 3));
        // With a window of 24, keys 127 to 149 are visible at position 150, so the page of key 127 stays.
        let mut c = PagedSequence::default();
        runs(&pages, &mut [&mut c], &[150]);
        c.forget_before(150, 24);
        assert_eq!(pages.free_pages(), 1);
    }
}
