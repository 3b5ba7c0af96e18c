//! A child process in its own process group, which is killed as a whole, and the child's exit status.

use anyhow::{Context, Result};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The shell that kills a process group when this process ends.
const SHELL: &str = "/bin/sh";

/// A child process and its group. Dropping it kills the group and reaps the child.
pub struct ProcessGroup {
    pub child: Child,
}

impl ProcessGroup {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status of the child if the child ended by itself. Does not reap the child. Waits for
    /// the end up to `wait`, because the parent may see a closed pipe shortly before the child ends.
    pub fn exit_status(&self, wait: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            // SAFETY: zeroes are a valid siginfo_t, and the structure outlives the call.
            let (rc, info) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
                (libc::waitid(libc::P_PID, self.id(), &mut info, options), info)
            };
            // SAFETY: waitid has filled in the fields of a child, or has left zeroes.
            let (id, status) = unsafe { (info.si_pid(), info.si_status()) };
            if rc == 0 && id != 0 {
                let raw = if info.si_code == libc::CLD_EXITED { status << 8 } else { status };
                return Some(ExitStatus::from_raw(raw));
            }
            if start.elapsed() >= wait {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills the group and reaps the child.
    pub fn kill(&mut self) {
        if let Ok(pid) = i32::try_from(self.id()) {
            // SAFETY: a system call without pointers. The child is not reaped yet, so no other process has
            // its id.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        // Both calls fail only for a child that has ended or was reaped. Nothing is left to do then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a shell that waits for the end of this process and then kills process group `id`, that of a user's
/// program with its child processes.
///
/// # Errors
/// When the shell does not start.
pub fn watch(id: u32) -> Result<ProcessGroup> {
    let child = Command::new(SHELL)
        // Nothing is ever written to the shell, so its input ends only when this process does.
        .args(["-c", "read -r _; kill -s KILL -- \"-$1\"", "rloss-watch", &id.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| {
            format!("cannot start {SHELL}, which kills the program if this process is killed")
        })?;
    Ok(ProcessGroup { child })
}
