//! The parent's handle of a fork server. It starts the server confined, and makes it fork and reap processes.

use super::host::HostPython;
use super::launcher::{LauncherHello, RULES_DESCRIPTOR};
use crate::bad_input;
use crate::interpreter::embedded_worker::StartupReply;
use crate::interpreter::frames::{self, DeadlinePipe};
use crate::interpreter::process::{Spawner, set_nonblocking};
use crate::interpreter::{InterpreterSettings, InterpreterState, WORKER_ARGUMENT, lock, sandbox};
use crate::process_group::ProcessGroup;
use anyhow::{Context, Result};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Second worker argument. It selects the launcher of a fork server instead of the embedded interpreter.
pub const LAUNCHER_ARGUMENT: &str = "cpython";
/// Maximum start time. Python starts in tens of milliseconds and loads large packages in seconds. A busy
/// machine may need longer.
const START_S_MAX: u64 = 120;
/// Maximum time of a request. A fork or a kill takes milliseconds.
const ORDER_S_MAX: u64 = 30;
const WELCOME_BYTES_MAX: usize = 64 << 10;

/// The setup message for `server.py`.
#[derive(Serialize)]
struct Setup<'a> {
    preload: &'a [String],
    paths: &'a [String],
    /// The seccomp filter of snippets, in hexadecimal digits.
    filter: String,
    keep: bool,
    scratch: Option<Scratch>,
    dangerously_allow_unsandboxed: bool,
}

/// The file system that each snippet's process mounts for itself.
#[derive(Serialize)]
struct Scratch {
    place: &'static str,
    bytes: u64,
    inodes: u64,
    /// The descriptor that holds the landlock rules.
    rules: i32,
}

/// A running fork server. Dropping it kills its process group. The parent-death signal then ends its
/// snippets.
pub struct Server {
    control: Mutex<File>,
    group: ProcessGroup,
}

impl Server {
    /// Starts `program` as the launcher of a server. Also returns the active confinement and the version of
    /// Python.
    pub fn start(
        settings: &InterpreterSettings,
        host: &HostPython,
        program: &Path,
        spawner: &Spawner,
    ) -> Result<(Self, String)> {
        let place = || format!("starting {} as a Python server", host.executable.display());
        let (control, theirs) = UnixStream::pair().with_context(place)?;
        let mut command = Command::new(program);
        command.args([WORKER_ARGUMENT, LAUNCHER_ARGUMENT]);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut group = spawner.spawn(command).with_context(place)?;
        let errors = group.child.stderr.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        let server = Self { control: Mutex::new(File::from(OwnedFd::from(control))), group };
        set_nonblocking(&*lock(&server.control)).with_context(place)?;
        match server.introduce(settings, host) {
            Ok(active) => Ok((server, active)),
            Err(error) if error.is::<crate::error::BadInput>() => Err(error),
            Err(error) => Err(error.context(last_stderr_line(errors))).with_context(place),
        }
    }

    fn introduce(&self, settings: &InterpreterSettings, host: &HostPython) -> Result<String> {
        let control = lock(&self.control);
        let mut timed =
            DeadlinePipe { pipe: &control, deadline: Instant::now() + Duration::from_secs(START_S_MAX) };
        let unsandboxed = settings.dangerously_allow_unsandboxed;
        let hello = LauncherHello {
            parent_id: std::process::id(),
            host: host.clone(),
            scratch_mib: settings.scratch_mib,
            dangerously_allow_unsandboxed: unsandboxed,
        };
        frames::write(&mut timed, &serde_json::to_vec(&hello)?)?;
        let active = match serde_json::from_slice(&frames::read(&mut timed, WELCOME_BYTES_MAX)?)? {
            StartupReply::Ready(active) => active,
            StartupReply::Refused(why) => {
                return Err(bad_input!("this machine cannot confine the Python tool: {why}"));
            }
        };
        let with_scratch = settings.scratch_mib > 0;
        let filter = sandbox::snippet_filter(with_scratch)?;
        let setup = Setup {
            preload: &settings.preload,
            paths: &host.paths,
            filter: filter.iter().map(|byte| format!("{byte:02x}")).collect(),
            keep: settings.state == InterpreterState::Trajectory,
            scratch: with_scratch.then(|| Scratch {
                place: sandbox::SCRATCH_PATH,
                bytes: settings.scratch_mib << 20,
                inodes: settings.scratch_mib * sandbox::INODES_PER_MIB,
                rules: RULES_DESCRIPTOR,
            }),
            dangerously_allow_unsandboxed: unsandboxed,
        };
        frames::write(&mut timed, &serde_json::to_vec(&setup)?)?;
        let version = match serde_json::from_slice(&frames::read(&mut timed, WELCOME_BYTES_MAX)?)? {
            StartupReply::Ready(version) => version,
            StartupReply::Refused(why) => return Err(bad_input!("{why}")),
        };
        let used = sandbox::address_space_bytes(&self.group.id().to_string())?;
        let limit = used + (settings.memory_mib << 20);
        frames::write(&mut timed, &limit.to_le_bytes())?;
        Ok(format!("{version} ({}): {active}", host.executable.display()))
    }

    /// Forks a process that owns these descriptors (code, output, result). Returns the process id.
    ///
    /// The id is valid until [`Server::reap`] is called.
    pub fn fork(&self, descriptors: [BorrowedFd; 3]) -> io::Result<i32> {
        match self.order(b'f', 0, &descriptors)? {
            id if id > 0 => Ok(id),
            _ => Err(io::Error::other("the server could not fork")),
        }
    }

    /// Kills the snippet's process `id` and its group, waits for it, and returns its wait status.
    pub fn reap(&self, id: i32) -> io::Result<i32> {
        for target in [-id, id] {
            // SAFETY: a plain system call. The process is not reaped yet, so no other process can have its
            // id.
            unsafe { libc::kill(target, libc::SIGKILL) };
        }
        self.order(b'w', id, &[])
    }

    fn order(&self, letter: u8, number: i32, descriptors: &[BorrowedFd]) -> io::Result<i32> {
        let control = lock(&self.control);
        let [a, b, c, d] = number.to_le_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // The server is idle between requests, so the socket buffer has enough space.
        sendmsg(&*control, &[IoSlice::new(&[letter, a, b, c, d])], &mut ancillary, SendFlags::NOSIGNAL)?;
        let mut answer = [0; 4];
        let deadline = Instant::now() + Duration::from_secs(ORDER_S_MAX);
        DeadlinePipe { pipe: &control, deadline }.read_exact(&mut answer)?;
        Ok(i32::from_le_bytes(answer))
    }
}

/// Returns the last line that a failed start wrote to standard error.
fn last_stderr_line(errors: Option<File>) -> String {
    let mut text = Vec::new();
    if let Some(errors) = errors
        && set_nonblocking(&errors).is_ok()
    {
        // Limited in size, because the text is used only in the error message.
        let _ = errors.take(16 << 10).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    text.lines().last().unwrap_or("it wrote nothing to standard error").to_string()
}
