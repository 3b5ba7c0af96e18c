//! The parent's handle of a snippet's process. It sends code, reads output, and enforces limits.

use super::server::Server;
use crate::interpreter::frames::{self, DeadlinePipe};
use crate::interpreter::output::{OutputClipper, Utf8Decoder};
use crate::interpreter::process::set_nonblocking;
use crate::trajectory::CallOutcome;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Exit code of a process that ran out of memory and could not report it. Must be equal to the one in
/// server.py.
pub const OUT_OF_MEMORY: i32 = 72;

/// A process that runs the code of one call or one trajectory. Dropping it kills and reaps the process.
pub struct SnippetProcess {
    server: Arc<Server>,
    id: i32,
    ended: bool,
    /// A descriptor of the process. It stays valid even if the process id is reused.
    handle: OwnedFd,
    code: File,
    output: File,
    result: File,
}

/// The limits of a call.
#[derive(Debug, Clone, Copy)]
pub struct CallLimits {
    /// CPU time that this call may use.
    pub cpu: Duration,
    /// Wall-clock time that this call may use.
    pub wall: Duration,
    pub output_chars_max: usize,
}

impl SnippetProcess {
    pub fn start(server: &Arc<Server>) -> io::Result<Self> {
        let (their_code, code) = io::pipe()?;
        let (output, their_output) = io::pipe()?;
        let (result, their_result) = io::pipe()?;
        let file = |owned: OwnedFd| -> io::Result<File> {
            let file = File::from(owned);
            set_nonblocking(&file)?;
            Ok(file)
        };
        let (code, output, result) = (file(code.into())?, file(output.into())?, file(result.into())?);
        let id = server.fork([their_code.as_fd(), their_output.as_fd(), their_result.as_fd()])?;
        let process = Pid::from_raw(id).ok_or(io::ErrorKind::NotFound)?;
        let handle = match pidfd_open(process, PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(error) => {
                server.reap(id)?;
                return Err(error.into());
            }
        };
        Ok(Self { server: Arc::clone(server), id, ended: false, handle, code, output, result })
    }

    /// Runs `code`. Returns its printed output, followed by its last value or its exception.
    ///
    /// After [`CallOutcome::Answered`] and [`CallOutcome::Raised`] the process can run more code. After
    /// [`CallOutcome::MemoryLimit`] it can run more code if it is still alive. After every other outcome it
    /// must be dropped.
    pub fn run(&mut self, code: &[u8], limits: CallLimits) -> (CallOutcome, String) {
        let deadline = Instant::now() + limits.wall;
        let mut clip = OutputClipper::new(limits.output_chars_max);
        let cpu_before = self.cpu_time().unwrap_or_default();
        self.signal(Signal::CONT);
        let outcome = match frames::write(&mut DeadlinePipe { pipe: &self.code, deadline }, code) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => CallOutcome::ToolTimeout,
            Err(_) => CallOutcome::WorkerDied,
            Ok(()) => self.collect_output(deadline, cpu_before + limits.cpu, &mut clip),
        };
        (outcome, clip.finish())
    }

    /// Stops the process until the next [`SnippetProcess::run`], so that no timer set by its code fires in
    /// the meantime.
    pub fn suspend(&self) {
        self.signal(Signal::STOP);
    }

    fn signal(&self, signal: Signal) {
        // This fails if the process has ended, which the pipes report.
        let _ = pidfd_send_signal(&self.handle, signal);
    }

    /// Collects output until the call ends, the process has used the CPU time `cpu_end`, or the `deadline`
    /// passes.
    fn collect_output(
        &mut self,
        deadline: Instant,
        cpu_end: Duration,
        clip: &mut OutputClipper,
    ) -> CallOutcome {
        let mut pieces = Utf8Decoder::default();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let wall_left = deadline.saturating_duration_since(Instant::now());
            if wall_left.is_zero() {
                return CallOutcome::ToolTimeout;
            }
            // A process that has ended has no CPU clock. Its pipes report the end.
            let cpu_left = self.cpu_time().map_or(wall_left, |used| cpu_end.saturating_sub(used));
            if cpu_left.is_zero() {
                return CallOutcome::TimeLimit;
            }
            if self.read_output(&mut buffer, &mut pieces, clip) {
                continue;
            }
            let mut verdict = [0];
            match self.result.read(&mut verdict) {
                Ok(0) => return CallOutcome::WorkerDied,
                Ok(_) => {
                    // The process writes all output before the result, so all of it can be read now.
                    while Instant::now() < deadline && self.read_output(&mut buffer, &mut pieces, clip) {}
                    clip.push(&pieces.finish());
                    return match verdict {
                        [b'A'] => CallOutcome::Answered,
                        [b'R'] => CallOutcome::Raised,
                        [b'M'] => CallOutcome::MemoryLimit,
                        _ => CallOutcome::WorkerDied,
                    };
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(wall_left.min(cpu_left)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return CallOutcome::WorkerDied,
            }
        }
    }

    /// Reads some output. Returns false if there is none now.
    fn read_output(&mut self, buffer: &mut [u8], pieces: &mut Utf8Decoder, clip: &mut OutputClipper) -> bool {
        match self.output.read(buffer) {
            Ok(length) if length > 0 => {
                clip.push(&pieces.push(buffer.get(..length).unwrap_or_default()));
                true
            }
            _ => false,
        }
    }

    /// Waits for a result or for output, at most `at_most`, rounded up to a millisecond.
    fn wait(&self, at_most: Duration) {
        let entry = |pipe: &File| libc::pollfd { fd: pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut both = [entry(&self.result), entry(&self.output)];
        // If the code has closed its output, poll returns at once. The sleep below keeps the parent from
        // looping without a pause.
        let ms = i32::try_from(at_most.as_millis()).unwrap_or(i32::MAX).saturating_add(1);
        // SAFETY: two valid entries, which outlive the call.
        let ready = unsafe { libc::poll(both.as_mut_ptr(), 2, ms) };
        let [result, output] = both;
        if ready > 0 && result.revents == 0 && output.revents & libc::POLLIN == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the CPU time of this process so far.
    fn cpu_time(&self) -> Option<Duration> {
        let mut clock = 0;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: both structures outlive the calls. No other process can have the id until this process is
        // reaped.
        let known = unsafe {
            libc::clock_getcpuclockid(self.id, &mut clock) == 0 && libc::clock_gettime(clock, &mut time) == 0
        };
        let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
        known.then(|| Duration::new(seconds, nanos))
    }

    /// Ends the process. Returns its exit status if the process had already ended.
    pub fn stop(mut self) -> Option<ExitStatus> {
        // A process that has ended keeps its exit code, although it is killed before it is reaped.
        self.end().ok().map(ExitStatus::from_raw)
    }

    fn end(&mut self) -> io::Result<i32> {
        match std::mem::replace(&mut self.ended, true) {
            true => Err(io::ErrorKind::NotFound.into()),
            false => self.server.reap(self.id),
        }
    }
}

impl Drop for SnippetProcess {
    fn drop(&mut self) {
        // This fails if the process has already ended, or if the server has died. The death of the server
        // ends its snippets too.
        let _ = self.end();
    }
}
