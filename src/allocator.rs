//! The process's allocator: of the binary, and of the benchmarks that stand for it. It keeps what is freed, and says in one
//! line that memory was refused.

use rloss::error::EXIT_FAILED;
use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_long};
use std::io::Write;

/// The allocator, which ends the process in one line where it would abort: no caller gets on without its memory.
struct Refusing(mimalloc::MiMalloc);

#[global_allocator]
static ALLOCATOR: Refusing = Refusing(mimalloc::MiMalloc);

// SAFETY: every call is passed on as it came, and what comes back is passed back, or the process ends.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { self.0.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(pointer, layout) }
    }
}

/// `pointer`, or the end of the process when the system refused it `bytes`. The interpreter's parent knows the first words.
fn or_end(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() {
        let mut line = [0; 160];
        let mut rest = &mut line[..];
        let _ = writeln!(
            rest,
            "error: memory allocation of {bytes} bytes was refused; free memory, raise its limit (ulimit -v), or make the model or batches smaller"
        );
        let length = 160 - rest.len();
        // SAFETY: the buffer outlives the call; no destructor, which might allocate, runs any more.
        unsafe {
            libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), length);
            libc::_exit(i32::from(EXIT_FAILED));
        }
    }
    pointer
}

/// `mi_option_purge_delay`, the same in all versions of the library.
const PURGE_DELAY: c_int = 15;

/// `mi_option_arena_reserve`, KiB of address space that the library takes at a time: 1 GiB unless told
/// otherwise.
const ARENA_RESERVE: c_int = 23;
const ARENA_RESERVE_MAX: u64 = 1 << 30;
/// Pieces that a limited address space (`ulimit -v`) holds at least. With pieces of 1 GiB a limit between one
/// and two GiB left no room for threads.
const ARENAS_MIN: u64 = 16;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

/// Keeps what is freed for what is allocated next, instead of giving it back to the system after a while: a pass allocates what
/// the pass before it freed, and the system clears every page it hands out again.
pub fn keep_memory() {
    // SAFETY: the library allows it at any time; it writes one number.
    unsafe { mi_option_set(PURGE_DELAY, -1) };
}

/// Before anything is allocated, and so before `main`.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the loader calls what is listed there, once, with arguments that C lets a function leave out.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = reserve_within_limit;

/// Makes what the library takes at a time a small part of the address space that this process may have.
#[cfg(target_os = "linux")]
extern "C" fn reserve_within_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure outlives the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
    if known && limit.rlim_cur != libc::RLIM_INFINITY {
        let bytes = (limit.rlim_cur / ARENAS_MIN).min(ARENA_RESERVE_MAX);
        // SAFETY: as in `keep_memory`.
        unsafe { mi_option_set(ARENA_RESERVE, (bytes >> 10) as c_long) };
    }
}
