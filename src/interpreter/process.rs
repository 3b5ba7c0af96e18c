//! The parent's handle of a worker process. A long-lived thread starts the process, messages have deadlines,
//! and a kill ends its whole process group.

use super::frames::{self, DeadlinePipe};
use crate::process_group::ProcessGroup;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Environment variable for mimalloc. By default, mimalloc reserves address space in units of 1 GiB, so a
/// limit on address space would not limit the memory in use. With this variable it reserves only what is
/// requested.
const ALLOCATOR: (&str, &str) = ("MIMALLOC_DISALLOW_ARENA_ALLOC", "1");

/// Environment variable with the library path. The loader of a GPU build needs it to start the binary,
/// although a worker uses none of those libraries.
#[cfg(any(feature = "cuda", feature = "nccl"))]
const LIBRARIES: &str = "LD_LIBRARY_PATH";

/// Maximum time to wait for the exit of a worker that did not reply.
const END_WAIT: Duration = Duration::from_millis(20);

/// Starts processes from one thread that lives as long as the pool.
///
/// A child gets its parent-death signal when the *thread* that started it ends. So a short-lived thread must
/// not start workers.
pub struct Spawner {
    requests: Option<mpsc::Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

type Request = (Command, mpsc::Sender<io::Result<Child>>);

impl Spawner {
    pub fn new() -> io::Result<Self> {
        let (requests, inbox) = mpsc::channel::<Request>();
        let thread = std::thread::Builder::new().name("interpreter-spawner".into()).spawn(move || {
            for (mut command, answer) in inbox {
                // The receiver waits for the reply, so it still exists.
                let _ = answer.send(command.spawn());
            }
        })?;
        Ok(Self { requests: Some(requests), thread: Some(thread) })
    }

    /// Starts `command` in `/`. Its environment holds only [`ALLOCATOR`] and the library path of a GPU build.
    pub fn spawn(&self, mut command: Command) -> io::Result<ProcessGroup> {
        command.env_clear().env(ALLOCATOR.0, ALLOCATOR.1).current_dir("/");
        #[cfg(any(feature = "cuda", feature = "nccl"))]
        command.envs(std::env::var_os(LIBRARIES).map(|folders| (LIBRARIES, folders)));
        // SAFETY: the function makes only plain system calls.
        unsafe { command.pre_exec(raise_oom_score) };
        let (answer, child) = mpsc::channel();
        let gone = || io::Error::other("the spawner thread has ended");
        let requests = self.requests.as_ref().ok_or_else(gone)?;
        requests.send((command, answer)).map_err(|_| gone())?;
        Ok(ProcessGroup { child: child.recv().map_err(|_| gone())?? })
    }
}

/// Makes the kernel end this process before other processes when memory runs out. A failure is ignored,
/// because some systems lack the file.
fn raise_oom_score() -> io::Result<()> {
    // SAFETY: plain system calls on constants and on a descriptor of this process.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            libc::write(file, c"1000".as_ptr().cast(), 4);
            libc::close(file);
        }
    }
    Ok(())
}

impl Drop for Spawner {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            // Joining the thread loses no error: if the thread panicked, the panic was already printed.
            let _ = thread.join();
        }
    }
}

/// A running worker whose standard streams are pipes. Dropping it kills its whole process group and reaps it.
pub struct Process {
    group: ProcessGroup,
    stdin: File,
    stdout: File,
    stderr: File,
}

impl Process {
    pub fn start(spawner: &Spawner, mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = spawner.spawn(command)?;
        let piped = || io::Error::other("a standard stream is not piped");
        let stderr = OwnedFd::from(group.child.stderr.take().ok_or_else(piped)?).into();
        let stdin = OwnedFd::from(group.child.stdin.take().ok_or_else(piped)?);
        let stdout = OwnedFd::from(group.child.stdout.take().ok_or_else(piped)?);
        let process = Self { group, stdin: stdin.into(), stdout: stdout.into(), stderr };
        set_nonblocking(&process.stdin)?;
        set_nonblocking(&process.stderr)?;
        Ok(process)
    }

    /// Sends one frame before `deadline`.
    pub fn send(&mut self, payload: &[u8], deadline: Instant) -> io::Result<()> {
        frames::write(&mut DeadlinePipe { pipe: &self.stdin, deadline }, payload)
    }

    /// Receives one frame of at most `bytes_max` bytes before `deadline`.
    pub fn receive(&mut self, bytes_max: usize, deadline: Instant) -> io::Result<Vec<u8>> {
        frames::read(&mut DeadlinePipe { pipe: &self.stdout, deadline }, bytes_max)
    }

    /// Kills the worker and its process group. Returns the worker's standard error and, if the worker had
    /// already ended, the exit status.
    pub fn kill(&mut self) -> (String, Option<ExitStatus>) {
        let ended = self.group.exit_status(END_WAIT);
        self.group.kill();
        let mut text = Vec::new();
        // The read is non-blocking and limited. The text only helps to find the cause of the death.
        let _ = (&mut self.stderr).take(4096).read_to_end(&mut text);
        (String::from_utf8_lossy(&text).into_owned(), ended)
    }
}

/// Makes reads and writes return immediately.
pub fn set_nonblocking(pipe: &impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_setfl(pipe, rustix::fs::OFlags::NONBLOCK)?)
}
