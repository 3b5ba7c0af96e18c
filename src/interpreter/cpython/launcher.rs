//! The launcher between this binary and the fork server. It is a new process that confines itself and then
//! executes Python.
//!
//! Confinement allocates memory. A forked child must not allocate before exec if its parent has several
//! threads, so the launcher is a separate program.

use super::host::HostPython;
use crate::interpreter::embedded_worker::StartupReply;
use crate::interpreter::{confinement_error, frames, sandbox};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The first message that the launcher reads.
#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherHello {
    pub parent_id: u32,
    pub host: HostPython,
    pub scratch_mib: u64,
    pub dangerously_allow_unsandboxed: bool,
}

/// The program of the fork server: `server.py`.
const SERVER_PROGRAM: &str = include_str!("server.py");
/// The descriptor of the parent's socket, as `server.py` expects it.
const CONTROL: i32 = 3;
/// The descriptor of the snippets' landlock rules. It exists if snippets have a scratch folder.
pub const RULES_DESCRIPTOR: i32 = CONTROL + 1;
const HELLO_BYTES_MAX: usize = 1 << 20;

/// The complete environment of the server. It has a fixed hash seed, so that the order of sets depends only
/// on the code. Libraries use one thread, the home folder does not exist, and all versions of Python print
/// the same tracebacks.
const ENVIRONMENT: [(&str, &str); 8] = [
    ("HOME", "/nonexistent"),
    ("LC_ALL", "C.UTF-8"),
    ("MKL_NUM_THREADS", "1"),
    ("OMP_NUM_THREADS", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("PATH", "/nonexistent"),
    ("PYTHONHASHSEED", "0"),
    ("PYTHONNODEBUGRANGES", "1"),
];

/// Executes the fork server. Returns an exit code only if that fails.
pub fn main() -> i32 {
    i32::from(become_server().is_err())
}

fn become_server() -> Result<()> {
    let mut control = take_control()?;
    let hello: LauncherHello = serde_json::from_slice(&frames::read(&mut control, HELLO_BYTES_MAX)?)?;
    let confined =
        sandbox::confine_fork_server(hello.parent_id, &hello.host.files, CONTROL + 1, hello.scratch_mib);
    let welcome = match confined {
        Ok(active) => StartupReply::Ready(active),
        // One of the confinement steps creates the scratch folder, so all steps are required.
        Err(e) if hello.scratch_mib > 0 => StartupReply::Refused(format!("{e:#}")),
        Err(e) if hello.dangerously_allow_unsandboxed => {
            StartupReply::Ready(format!("NOT SANDBOXED ({e:#})"))
        }
        Err(e) => StartupReply::Refused(confinement_error(&e)),
    };
    frames::write(&mut control, &serde_json::to_vec(&welcome)?)?;
    if matches!(welcome, StartupReply::Refused(_)) {
        return Ok(());
    }
    // The arguments have `-s` instead of `-I`, which would also ignore the hash seed. In this environment
    // `-I` has no further effect.
    let arguments = ["-s", "-B", "-W", "ignore", "-X", "utf8", "-c", SERVER_PROGRAM];
    let error = Command::new(&hello.host.executable).args(arguments).env_clear().envs(ENVIRONMENT).exec();
    Err(error).context("executing Python")
}

/// Moves the parent's socket from standard input to [`CONTROL`]. Standard input and output become
/// `/dev/null`.
fn take_control() -> Result<File> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: calls on descriptors that this process owns. Only the returned File owns CONTROL. `null` is not
    // used again, even if its number is CONTROL.
    unsafe {
        let parent = libc::fcntl(libc::STDIN_FILENO, libc::F_DUPFD_CLOEXEC, CONTROL + 1);
        ensure!(parent >= 0, "fcntl");
        for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
            ensure!(libc::dup2(null.as_raw_fd(), stream) >= 0, "dup2");
        }
        if null.as_raw_fd() == CONTROL {
            std::mem::forget(null);
        }
        ensure!(libc::dup2(parent, CONTROL) >= 0, "dup2");
        Ok(File::from(OwnedFd::from_raw_fd(CONTROL)))
    }
}
