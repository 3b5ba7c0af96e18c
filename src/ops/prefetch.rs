//! Memory that will be read soon, asked for early: the processor's own look-ahead ends with a page, and begins anew where a
//! loop jumps.

/// Has the line around `from` brought into the nearest cache; any address will do.
#[inline(always)]
pub(super) fn prefetch<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it reads nothing that a program could see, and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// The same into the second cache: what much else is read before.
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
