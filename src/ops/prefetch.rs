//! Memory prefetch. It helps where the hardware prefetcher stops: at the end of a page, and where a loop
//! jumps.

/// Prefetches the cache line of `from` into the L1 cache. Any address is valid.
#[inline(always)]
pub(super) fn prefetch<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no visible effect and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// Prefetches the cache line of `from` into the L2 cache, for data that is used later.
#[inline(always)]
pub(super) fn prefetch_second<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}
