//! The process's allocator: of the binary, and of the benchmarks that stand for it.

use std::ffi::{c_int, c_long};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay`, the same in all versions of the library.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

/// Keeps what is freed for what is allocated next, instead of giving it back to the system after a while: a pass allocates what
/// the pass before it freed, and the system clears every page it hands out again.
pub fn keep_memory() {
    // SAFETY: the library allows it at any time; it writes one number.
    unsafe { mi_option_set(PURGE_DELAY, -1) };
}
