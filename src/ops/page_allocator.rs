//! Page allocation of a device's key-value cache: which page belongs to which sequence. Host code only.
//!
//! A page holds the keys and values of 64 consecutive positions, the blocks that the attention kernels
//! read. Cloned sequences share pages. A shared page is copied before it is written, and freed when no
//! sequence holds it.

use super::sink_attention::kernels::BLOCK_KEYS;
use candle_core::{Result, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Positions per page.
pub const PAGE_POSITIONS: usize = BLOCK_KEYS;

/// The pages of one cache.
#[derive(Debug)]
pub struct PageAllocator {
    /// Free pages; allocation takes the last.
    free: Mutex<Vec<u32>>,
    total: usize,
}

/// A page in use.
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

/// One sequence's pages, in the order of its positions. Cloning shares them.
#[derive(Debug, Clone, Default)]
pub struct PagedSequence {
    /// `None` for positions that no query can see any more.
    pages: Vec<Option<Arc<Page>>>,
    len: usize,
}

/// `rows` consecutive new tokens of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSpan {
    /// Index of the first one among all new tokens.
    pub token: usize,
    /// Its row in the cache: page · 64 + index in the page.
    pub row: usize,
    /// Number of tokens.
    pub rows: usize,
}

/// Rows of a shared page to copy, for the sequence that is about to write there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopiedRows {
    /// First row in the cache, and its destination.
    pub from: usize,
    pub to: usize,
    pub rows: usize,
}

/// Changes to the cache for new tokens: first the copies in order, then the runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CacheUpdate {
    pub copies: Vec<CopiedRows>,
    pub runs: Vec<PageSpan>,
}

impl PageAllocator {
    /// Returns `total` free pages.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new((0..total as u32).rev().collect()), total })
    }

    /// Returns the number of pages that belong to no sequence.
    pub fn free_pages(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns a sequence of `len` positions with arbitrary contents, without the pages that `window`
    /// hides. For timings.
    ///
    /// # Errors
    /// When there are too few free pages.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn reserve(self: &Arc<Self>, len: usize, window: Option<usize>) -> Result<PagedSequence> {
        let hidden = window.map_or(0, |window| (len + 1).saturating_sub(window) / PAGE_POSITIONS);
        let own = self
            .take(len.div_ceil(PAGE_POSITIONS) - hidden, &[len])?
            .into_iter()
            .map(|page| Some(Arc::new(page)));
        Ok(PagedSequence { pages: (0..hidden).map(|_| None).chain(own).collect(), len })
    }

    /// Allocates pages for `counts[i]` new tokens at the end of `sequences[i]`, for all sequences or for
    /// none. Returns where the new tokens' keys and values go.
    ///
    /// # Errors
    /// When there are too few free pages; nothing has changed then.
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
        let mut growth = CacheUpdate::default();
        let mut token = 0;
        for (sequence, &count) in sequences.iter_mut().zip(counts) {
            // Always succeeds: the pages were counted above.
            if let Some(last) = sequence.written_page(count).filter(|last| Arc::strong_count(last) > 1)
                && let Some(own) = taken.next()
            {
                let rows = sequence.len % PAGE_POSITIONS;
                let (from, to) = (last.index as usize * PAGE_POSITIONS, own.index as usize * PAGE_POSITIONS);
                growth.copies.push(CopiedRows { from, to, rows });
                sequence.pages.pop();
                sequence.pages.push(Some(Arc::new(own)));
            }
            let end = sequence.len + count;
            let missing = end.div_ceil(PAGE_POSITIONS) - sequence.pages.len();
            sequence.pages.extend(taken.by_ref().take(missing).map(|page| Some(Arc::new(page))));
            while sequence.len < end {
                let place = sequence.len % PAGE_POSITIONS;
                let rows = (PAGE_POSITIONS - place).min(end - sequence.len);
                let row = sequence.index(sequence.len / PAGE_POSITIONS) * PAGE_POSITIONS + place;
                growth.runs.push(PageSpan { token, row, rows });
                sequence.len += rows;
                token += rows;
            }
        }
        Ok(growth)
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

/// Counts the pages needed for `counts[i]` new tokens of `sequences[i]`, copies of shared ones included.
fn pages_needed(sequences: &[&mut PagedSequence], counts: &[usize]) -> usize {
    // The number of sequences about to write each page; the last sequence that shares it keeps it.
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

    /// Returns true when it holds no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Frees pages that no query at or after `position` can see through `window`.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        let first_seen = (position + 1).saturating_sub(window) / PAGE_POSITIONS;
        self.pages.iter_mut().take(first_seen).for_each(|page| *page = None);
    }

    /// Returns the partly filled page that the next `count` tokens would write into, if there is one.
    fn written_page(&self, count: usize) -> Option<&Arc<Page>> {
        if count == 0 || self.len.is_multiple_of(PAGE_POSITIONS) { None } else { self.pages.last()?.as_ref() }
    }

    /// Returns the index of page `page` in the cache; 0 for a freed one, which nothing reads.
    fn index(&self, page: usize) -> usize {
        self.pages.get(page).and_then(Option::as_ref).map_or(0, |page| page.index as usize)
    }
}

/// Returns the kernels' `page_table`, `[sequences, pages_max]`, and `pages_max`, at least `width`. Entries
/// past a sequence's end and of freed pages are 0.
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
        let growth = pages.extend(sequences, counts).unwrap();
        assert_eq!(growth.copies, []);
        growth.runs
    }

    #[test]
    fn a_reserved_sequence_goes_on_where_a_window_left_it() {
        let pages = PageAllocator::new(4);
        // A query at 200 sees positions 73 to 199 through a window of 128: the first page is freed.
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
        // The prompt itself is kept, so both copy its six rows of the second page.
        let growth = pages.extend(&mut [&mut a, &mut b], &[1, 2]).unwrap();
        let copy = |to| CopiedRows { from: 64, to, rows: 6 };
        assert_eq!(growth.copies, [copy(128), copy(192)]);
        assert_eq!(growth.runs, [run(0, 134, 1), run(1, 198, 2)]);
        assert_eq!(page_table(&[&mut prompt, &mut a, &mut b], 0), (vec![0, 1, 0, 2, 0, 3], 2));
        assert_eq!(runs(&pages, &mut [&mut a], &[1]), [run(0, 135, 1)], "its own now");
        drop((a, b));
        assert_eq!(pages.free_pages(), 3);

        // The last holder of a page keeps it.
        let mut only = prompt.clone();
        let error = PageAllocator::new(0).extend(&mut [&mut only], &[1]).unwrap_err().to_string();
        assert!(error.contains("need 1 more pages"), "{error}");
        let growth = pages.extend(&mut [&mut prompt, &mut only], &[1, 1]).unwrap();
        assert_eq!((growth.copies.len(), growth.runs[1].row, pages.free_pages()), (1, 70, 2));
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
        // Keys 127 to 149 are seen at position 150 through 24: the page of 127 stays.
        let mut c = PagedSequence::default();
        runs(&pages, &mut [&mut c], &[150]);
        c.forget_before(150, 24);
        assert_eq!(pages.free_pages(), 1);
    }
}
