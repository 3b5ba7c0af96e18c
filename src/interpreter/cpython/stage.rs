//! The stage between this binary and the fork server: a fresh process that confines itself, then becomes Python.
//!
//! A process of its own, because nothing may be allocated between fork and exec of a threaded parent.

use super::host::Host;
use crate::interpreter::embedded_worker::Welcome;
use crate::interpreter::{confine, frames, refusal};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The first frame that the stage reads.
#[derive(Debug, Serialize, Deserialize)]
pub struct StageHello {
    pub parent_id: u32,
    pub host: Host,
    pub scratch_mib: u64,
    pub dangerously_allow_unsandboxed: bool,
}

/// The fork server: `server.py`.
const SERVER_PROGRAM: &str = include_str!("server.py");
/// The descriptor on which `server.py` expects its parent.
const CONTROL: i32 = 3;
/// The descriptor of the snippets' landlock rules, where they have a scratch.
pub const RULES: i32 = CONTROL + 1;
const HELLO_BYTES_MAX: usize = 1 << 20;

/// All that the server's environment holds: fixed hashes (the order of a set is then a function of the code), one
/// thread a library, no folder of the user, the same traceback from every version.
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

/// Becomes the fork server; returns the exit code when it could not.
pub fn main() -> i32 {
    i32::from(become_server().is_err())
}

fn become_server() -> Result<()> {
    let mut control = take_control()?;
    let hello: StageHello = serde_json::from_slice(&frames::read(&mut control, HELLO_BYTES_MAX)?)?;
    let confined = confine::python_server(hello.parent_id, &hello.host.files, CONTROL + 1, hello.scratch_mib);
    let welcome = match confined {
        Ok(active) => Welcome::Ready(active),
        // A scratch is set up by what confines.
        Err(e) if hello.scratch_mib > 0 => Welcome::Refused(format!("{e:#}")),
        Err(e) if hello.dangerously_allow_unsandboxed => Welcome::Ready(format!("NOT SANDBOXED ({e:#})")),
        Err(e) => Welcome::Refused(refusal(&e)),
    };
    frames::write(&mut control, &serde_json::to_vec(&welcome)?)?;
    if matches!(welcome, Welcome::Refused(_)) {
        return Ok(());
    }
    // `-I` would also ignore the hash seed; with this environment `-s` is what is left of it.
    let arguments = ["-s", "-B", "-W", "ignore", "-X", "utf8", "-c", SERVER_PROGRAM];
    let error = Command::new(&hello.host.executable).args(arguments).env_clear().envs(ENVIRONMENT).exec();
    Err(error).context("executing Python")
}

/// Moves the socket to the parent from standard input to [`CONTROL`]; input and output become `/dev/null`.
fn take_control() -> Result<File> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: calls on descriptors this process owns; CONTROL is owned by the returned File alone, and `null`, even
    // where it had that number, is not used again.
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
