//! Starts the binary, checks how it ended, and makes folders for runs.

use rloss::error::BadInput;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Returns a folder that is removed when dropped, and the paths `names` in it, which do not exist.
pub fn scratch<const N: usize>(names: [&str; N]) -> (TempDir, [PathBuf; N]) {
    let folder = TempDir::new().unwrap();
    let paths = names.map(|name| folder.path().join(name));
    (folder, paths)
}

/// A folder and a path in it that all tests of this process share: see [`shared`].
pub type Shared = OnceLock<(TempDir, PathBuf)>;

/// Returns the path `name` in a folder of its own. The first call makes it by `make`.
pub fn shared<'a>(shared: &'a Shared, name: &str, make: impl FnOnce(&Path)) -> &'a Path {
    let (_, path) = shared.get_or_init(|| {
        let (folder, [path]) = scratch([name]);
        make(&path);
        (folder, path)
    });
    path
}

/// The rows of a file of JSON lines.
#[track_caller]
pub fn json_lines(file: impl AsRef<Path>) -> Vec<Value> {
    text_of(file).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The text of a file.
#[track_caller]
pub fn text_of(file: impl AsRef<Path>) -> String {
    let file = file.as_ref();
    fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

/// The JSON value that a file holds.
#[track_caller]
pub fn json_of(file: impl AsRef<Path>) -> Value {
    serde_json::from_str(&text_of(file)).unwrap()
}

/// A path below the repository's root.
pub fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The binary, without input.
pub fn rloss() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rloss"));
    command.stdin(Stdio::null());
    // The key of this user's runs: the tests leave the user's own alone.
    command.env("XDG_CONFIG_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Settings of a command line.
pub trait Sets {
    /// Adds `--set` before each of `sets`.
    fn sets<S: AsRef<str>>(&mut self, sets: impl IntoIterator<Item = S>) -> &mut Self;
}

impl Sets for Command {
    fn sets<S: AsRef<str>>(&mut self, sets: impl IntoIterator<Item = S>) -> &mut Self {
        for set in sets {
            self.args(["--set", set.as_ref()]);
        }
        self
    }
}

/// How a process ended, and what it printed.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<std::process::Output> for Ended {
    fn from(output: std::process::Output) -> Self {
        let stdout = String::from_utf8(output.stdout).expect("UTF-8");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Self { code: output.status.code(), stdout, stderr }
    }
}

/// A process that is killed when dropped.
pub struct KilledOnDrop(pub Child);

impl KilledOnDrop {
    /// Starts `command`, and returns the process and what its standard error says behind `words`, up to the
    /// next `/`: the address of a server. What it says later is read and dropped.
    pub fn server(command: &mut Command, words: &str) -> (Self, String) {
        let mut child = Self(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.find_map(|line| Some(line.split_once(words)?.1.split('/').next()?.to_owned()));
        std::thread::spawn(move || lines.for_each(drop));
        (child, address.expect("the server tells its address"))
    }
}

impl Deref for KilledOnDrop {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for KilledOnDrop {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `command` to its end.
#[track_caller]
pub fn output(command: &mut Command) -> Ended {
    command.output().expect("the program starts").into()
}

/// Runs `command` and expects exit code 0.
#[track_caller]
pub fn done(command: &mut Command) -> Ended {
    let ended = output(command);
    assert_eq!(ended.code, Some(0), "{command:?}: {}", ended.stderr);
    ended
}

/// Runs `command`, expects exit code `code` and each of `words` in its standard error, which it returns.
#[track_caller]
pub fn ended(command: &mut Command, code: i32, words: &[&str]) -> String {
    let Ended { code: found, stderr: text, .. } = output(command);
    assert_eq!(found, Some(code), "{command:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{command:?}: {word:?} is not in: {text}");
    }
    text
}

/// Runs what must be refused as bad input, and expects each of `words` in its message, which it returns.
#[track_caller]
pub fn refused(command: &mut Command, words: &[&str]) -> String {
    ended(command, 2, words)
}

/// Expects bad input, and each of `parts` in its message.
#[track_caller]
pub fn bad_input<T>(result: anyhow::Result<T>, parts: &[&str]) -> String {
    let error = result.err().expect("must be refused");
    assert!(error.is::<BadInput>(), "not bad input: {error:#}");
    let text = error.to_string();
    assert_has(&text, parts);
    text
}

/// Expects each of `parts` in `text`.
#[track_caller]
pub fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}
