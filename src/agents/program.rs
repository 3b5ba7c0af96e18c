//! The user's program: its process group, its environment, its output.

use crate::bad_input;
use crate::metrics::Console;
use crate::panics::lock;
use crate::process_group::{ProcessGroup, watch};
use anyhow::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io::{PipeReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Maximum bytes of the program's output that are kept. Later output is dropped.
const OUTPUT_BYTES_MAX: u64 = 16 << 20;
/// Bytes of the newest output that an error message shows.
const TAIL_BYTES: usize = 600;
/// Wait for the last output of a program that has ended.
const END_WAIT: Duration = Duration::from_millis(300);

/// Where the program's output goes.
pub(super) struct ProgramOutput {
    /// The file in the run's folder; standard error without one.
    path: Option<PathBuf>,
    file: Option<File>,
    bytes: u64,
    tail: Vec<u8>,
    console: Console,
}

impl ProgramOutput {
    pub fn new(console: Console) -> Self {
        Self { path: None, file: None, bytes: 0, tail: vec![], console }
    }

    /// Sends the output to the end of the file at `path`.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn log_to(&mut self, path: PathBuf) -> Result<()> {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("opening {}", path.display()))?;
        self.bytes = file.metadata().map_or(0, |metadata| metadata.len());
        (self.file, self.path) = (Some(file), Some(path));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL_BYTES));
        let space = OUTPUT_BYTES_MAX.saturating_sub(self.bytes);
        let kept = bytes.get(..space.min(bytes.len() as u64) as usize).unwrap_or_default();
        let was_full = space == 0;
        self.bytes += kept.len() as u64;
        // A full disk or a closed standard error does not end the run.
        let _ = match &mut self.file {
            Some(file) => file.write_all(kept),
            None => std::io::stderr().write_all(kept),
        };
        if !was_full && self.bytes >= OUTPUT_BYTES_MAX {
            let mebibytes = OUTPUT_BYTES_MAX >> 20;
            self.console.print(&format!(
                "warning: agent: the program's output has reached {mebibytes} MiB; further output is dropped"
            ));
        }
    }
}

/// The program of a run. It is started when it is first needed.
pub(super) struct Program {
    command: Vec<String>,
    environment: Vec<(&'static str, String)>,
    output: Arc<Mutex<ProgramOutput>>,
    /// The process group, and the watcher that kills it when this process ends.
    process: Option<(ProcessGroup, ProcessGroup)>,
    /// Number of finished episodes at the last start.
    pub finished_before: u64,
    /// Number of starts in a row without a finished episode.
    pub fruitless_starts: u64,
}

impl Program {
    /// Returns a program that is not started. `command` is the program and its arguments.
    pub fn new(
        command: Vec<String>,
        environment: Vec<(&'static str, String)>,
        output: Arc<Mutex<ProgramOutput>>,
    ) -> Self {
        Self { command, environment, output, process: None, finished_before: 0, fruitless_starts: 0 }
    }

    /// Checks that the program is a file, or is found on the `PATH`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] if it is not.
    pub fn check(&self) -> Result<()> {
        let program = self.command.first().map(String::as_str).unwrap_or_default();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_found = match program.contains('/') {
            true => Path::new(program).is_file(),
            false => std::env::split_paths(&path).any(|folder| folder.join(program).is_file()),
        };
        if is_found { Ok(()) } else { Err(cannot_start(program, "there is no such program")) }
    }

    /// Starts the program if it does not run.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when it cannot be started.
    pub fn start(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let (program, arguments) = self.command.split_first().context("no program to run")?;
        let (reader, writer) = std::io::pipe().context("a pipe for the program's output")?;
        let child = Command::new(program)
            .args(arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("a pipe for the program's output")?)
            .stderr(writer)
            // A group of its own is killed as a whole, and does not receive the terminal's Ctrl-C.
            .process_group(0)
            .spawn()
            .map_err(|error| cannot_start(program, &error.to_string()))?;
        let group = ProcessGroup { child };
        let watcher = watch(group.id())?;
        let output = self.output.clone();
        let copy = std::thread::Builder::new().name("agent-output".into());
        copy.spawn(move || copy_output(reader, &output)).context("cannot start a thread")?;
        self.process = Some((group, watcher));
        Ok(())
    }

    /// Returns the exit status of a program that has ended by itself, and removes it.
    pub fn take_ended(&mut self) -> Option<ExitStatus> {
        let status = self.process.as_ref()?.0.exit_status(Duration::ZERO)?;
        self.process = None;
        Some(status)
    }

    /// Waits for the program's end up to `wait`, then kills its process group.
    pub fn end(&mut self, wait: Duration) {
        if let Some((group, _watcher)) = self.process.take() {
            group.exit_status(wait);
        }
    }

    /// Describes the newest output, as the end of a message.
    pub fn last_output(&self) -> String {
        std::thread::sleep(END_WAIT);
        let output = lock(&self.output);
        let place = output.path.as_ref().map(|path| format!("; all of it is in {}", path.display()));
        match String::from_utf8_lossy(&output.tail).trim() {
            "" => "it printed nothing".to_owned(),
            tail => format!("its last output: {tail}{}", place.unwrap_or_default()),
        }
    }
}

fn cannot_start(program: &str, why: &str) -> anyhow::Error {
    bad_input!("task.command: cannot start {program:?}: {why}; name an installed program, or its path")
}

fn copy_output(mut reader: PipeReader, output: &Mutex<ProgramOutput>) {
    let mut bytes = [0; 8192];
    while let Ok(count) = reader.read(&mut bytes)
        && let Some(bytes) = bytes.get(..count).filter(|bytes| !bytes.is_empty())
    {
        lock(output).write(bytes);
    }
}
