//! The allocator of the binary and of the benchmarks. It keeps freed memory. When an allocation fails, it
//! prints a one-line error and exits.

use rloss::error::EXIT_FAILED;
use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_long};
use std::io::Write;

/// An allocator that prints a one-line error and exits when an allocation fails. No caller could continue
/// without the memory.
struct ExitingAllocator(mimalloc::MiMalloc);

#[global_allocator]
static ALLOCATOR: ExitingAllocator = ExitingAllocator(mimalloc::MiMalloc);

// SAFETY: each method forwards its arguments and returns mimalloc's result unchanged, or the process ends.
unsafe impl GlobalAlloc for ExitingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the same contract.
        check_pointer(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the same contract.
        check_pointer(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller upholds the same contract.
        check_pointer(unsafe { self.0.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.dealloc(pointer, layout) }
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
/// out.
pub fn retain_freed_memory() {
    // SAFETY: the library allows this call at any time. The call writes one number.
    unsafe { mi_option_set(PURGE_DELAY, -1) };
}

/// Runs before any allocation, therefore before `main`.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the loader calls each function of this section once. It passes arguments, which a C function may
// ignore.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = reserve_within_limit;

/// Makes mimalloc's arenas smaller if this process has a limited address space (`ulimit -v`).
#[cfg(target_os = "linux")]
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
