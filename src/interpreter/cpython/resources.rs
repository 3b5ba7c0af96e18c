//! Resources of live trajectories: file descriptors and system calls. They are checked before the first
//! trajectory.

use crate::bad_input;
use anyhow::Result;
use std::io;

/// Descriptors per session: three pipes and one process.
const DESCRIPTORS_OF_A_SESSION: u64 = 4;
/// Descriptors for all other uses: models, data, servers.
const OTHER_DESCRIPTORS: u64 = 256;

/// Raises the soft limit of open files, so that `sessions` trajectories can be live at the same time.
///
/// # Errors
/// [`crate::error::BadInput`] when the hard limit is too low.
pub fn raise_file_limit(sessions: usize) -> Result<()> {
    let needed = DESCRIPTORS_OF_A_SESSION * sessions as u64 + OTHER_DESCRIPTORS;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid structure that outlives the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 || limit.rlim_cur >= needed {
        return Ok(());
    }
    if limit.rlim_max < needed {
        return Err(bad_input!(
            "interpreter.state: {sessions} trajectories may be live at the same time, each with {DESCRIPTORS_OF_A_SESSION} open files, but the \
             hard limit is {} (ulimit -Hn); raise it, or lower rollout.prompts_per_step, rollout.samples_per_prompt or \
             eval.problems_max",
            limit.rlim_max
        ));
    }
    limit.rlim_cur = needed;
    // SAFETY: a valid structure that outlives the call.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } {
        0 => Ok(()),
        _ => Err(bad_input!(
            "the limit of open files cannot be raised to {needed}: {}",
            io::Error::last_os_error()
        )),
    }
}

/// Checks that a descriptor can refer to a process and send signals to it. Every snippet's process needs
/// this.
///
/// # Errors
/// [`crate::error::BadInput`] when the kernel, or a filter around this process, denies the calls.
pub fn probe_pidfds() -> Result<()> {
    // SAFETY: plain system calls; this function owns the descriptor. Signal 0 only checks.
    unsafe {
        let own = libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0);
        let sent = match own {
            fd if fd >= 0 => libc::syscall(libc::SYS_pidfd_send_signal, fd, 0, std::ptr::null::<u8>(), 0),
            failed => failed,
        };
        let error = io::Error::last_os_error();
        if own >= 0 {
            libc::close(own as i32);
        }
        match sent {
            0 => Ok(()),
            _ => Err(bad_input!(
                "interpreter.kind: \"cpython\" needs the calls pidfd_open and pidfd_send_signal, which fail here ({error}); use Linux \
                 5.3 or newer without a filter against them, or \"embedded\""
            )),
        }
    }
}
