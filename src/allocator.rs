//! The allocator of the binary and of the benchmarks. It keeps freed memory. When an allocation fails, it
//! prints a one-line error and exits.

#[path = "allocator/large_blocks.rs"]
mod large_blocks;

use rloss::error::EXIT_FAILED;
use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_long};
use std::io::Write;

/// An allocator that prints a one-line error and exits when an allocation fails. No caller could continue
/// without the memory.
struct ExitingAllocator(mimalloc::MiMalloc);

#[global_allocator]
static ALLOCATOR: ExitingAllocator = ExitingAllocator(mimalloc::MiMalloc);

// SAFETY: each method returns mimalloc's result for its arguments or a large block, or the process ends.
unsafe impl GlobalAlloc for ExitingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(block) = large::alloc(layout, false) {
            return check_pointer(block, layout.size());
        }
        // SAFETY: the caller upholds the same contract.
        check_pointer(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if let Some(block) = large::alloc(layout, true) {
            return check_pointer(block, layout.size());
        }
        // SAFETY: the caller upholds the same contract.
        check_pointer(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if large::may_be(layout.size()) || large::may_be(size) {
            // SAFETY: the caller upholds the same contract.
            return unsafe { self.realloc_large(pointer, layout, size) };
        }
        // SAFETY: the caller upholds the same contract.
        check_pointer(unsafe { self.0.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if large::free(pointer, layout.size()) {
            return;
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.dealloc(pointer, layout) }
    }
}

impl ExitingAllocator {
    /// Resizes a block that is large before or after.
    ///
    /// # Safety
    /// As [`GlobalAlloc::realloc`].
    unsafe fn realloc_large(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if let Some(block) = large::resize(pointer, layout.size(), size) {
            return check_pointer(block, size);
        }
        // SAFETY: the caller guarantees a valid layout for `size`, and that `pointer` has `layout`.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            new.copy_from_nonoverlapping(pointer, layout.size().min(size));
            self.dealloc(pointer, layout);
            new
        }
    }
}

/// The large blocks of this process. A function returns `None` or false for a block of mimalloc.
mod large {
    use super::large_blocks::{LARGE_BYTES_MIN, LargeBlocks};
    use std::alloc::Layout;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Maximum alignment of a block: the smallest page of any processor, in bytes.
    const ALIGNMENT_MAX: usize = 4096;

    static ARE_USED: AtomicBool = AtomicBool::new(false);
    static BLOCKS: Mutex<LargeBlocks> = Mutex::new(LargeBlocks::new());

    fn blocks() -> MutexGuard<'static, LargeBlocks> {
        BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses large blocks from now on.
    pub fn begin() {
        ARE_USED.store(true, Ordering::Relaxed);
    }

    /// Returns whether a block of `size` bytes may be a large block.
    pub fn may_be(size: usize) -> bool {
        size >= LARGE_BYTES_MIN && ARE_USED.load(Ordering::Relaxed)
    }

    pub fn alloc(layout: Layout, zeroed: bool) -> Option<*mut u8> {
        let is_large = may_be(layout.size()) && layout.align() <= ALIGNMENT_MAX;
        is_large.then(|| blocks().alloc(layout.size(), zeroed))
    }

    pub fn free(pointer: *mut u8, size: usize) -> bool {
        may_be(size) && blocks().free(pointer)
    }

    /// Resizes a large block that stays one.
    pub fn resize(pointer: *mut u8, old: usize, size: usize) -> Option<*mut u8> {
        (old.min(size) >= LARGE_BYTES_MIN).then(|| blocks().resize(pointer, size))?
    }
}

/// Returns `pointer`. Exits if `pointer` is null, which means that the allocation of `bytes` bytes failed.
/// The parent process of a Python tool's worker recognises the first words of the error line.
fn check_pointer(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() {
        let mut line = [0; 160];
        let mut rest = &mut line[..];
        let _ = writeln!(
            rest,
            "error: memory allocation of {bytes} bytes was refused; free memory, raise the limit (ulimit -v), or make the model or batches smaller"
        );
        let length = 160 - rest.len();
        // SAFETY: the buffer outlives the call. `_exit` runs no destructor, which might allocate.
        unsafe {
            libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), length);
            libc::_exit(i32::from(EXIT_FAILED));
        }
    }
    pointer
}

/// Number of the option `mi_option_purge_delay`, which is the same in all versions of mimalloc.
const PURGE_DELAY: c_int = 15;

/// Number of the option `mi_option_arena_reserve`: the address space that mimalloc reserves per arena, in
/// KiB. The default is 1 GiB.
const ARENA_RESERVE: c_int = 23;
const ARENA_RESERVE_MAX: u64 = 1 << 30;
/// Number of arenas that must fit in a limited address space (`ulimit -v`). With arenas of 1 GiB, a limit of
/// one or two GiB would leave no memory for threads.
const ARENAS_MIN: u64 = 16;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

/// Keeps freed memory for later allocations. By default mimalloc returns it to the system after a delay. But
/// each pass allocates as much as the previous pass freed, and the system clears every page that it hands
/// out. A worker of the Python tool does not call this function: its sandbox limits the system calls.
pub fn retain_freed_memory() {
    // SAFETY: the library allows this call at any time. The call writes one number.
    unsafe { mi_option_set(PURGE_DELAY, -1) };
    large::begin();
}

/// Runs before any allocation, therefore before `main`.
#[used]
// SAFETY: the loader calls each function of this section once. It passes arguments, which a C function may
// ignore.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = reserve_within_limit;

/// Makes mimalloc's arenas smaller if this process has a limited address space (`ulimit -v`).
extern "C" fn reserve_within_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure outlives the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
    if known && limit.rlim_cur != libc::RLIM_INFINITY {
        let bytes = (limit.rlim_cur / ARENAS_MIN).min(ARENA_RESERVE_MAX);
        // SAFETY: as in `retain_freed_memory`.
        unsafe { mi_option_set(ARENA_RESERVE, (bytes >> 10) as c_long) };
        // Makes all threads share one arena of glibc's `malloc`. By default glibc reserves 128 MiB of address
        // space for each thread that calls it.
        #[cfg(target_env = "gnu")]
        // SAFETY: the library allows this call at any time. The call writes one number.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 1)
        };
    }
}
