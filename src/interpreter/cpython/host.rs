//! The Python of this machine: its executable and its folders.

use crate::bad_input;
use crate::interpreter::sandbox::AllowedFiles;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const HOST_PROGRAM: &str = include_str!("host.py");

/// A Python interpreter and its folders, as this Python reports them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostPython {
    /// The executable. In a virtual environment, it is the environment's executable.
    pub executable: PathBuf,
    #[serde(flatten)]
    pub files: AllowedFiles,
    /// Folders whose paths are removed from the text of exceptions, longest path first.
    pub paths: Vec<String>,
}

impl HostPython {
    /// Finds out where `python` is installed. `python` is a path, or a name on the `PATH`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when `python` cannot be run or is older than Python 3.9.
    pub fn find(python: &Path) -> Result<Self> {
        let named = python.display();
        let remedy = "install Python 3.9 or newer, or name one with `interpreter.python`";
        let mut command = Command::new(python);
        // A preloaded library would be missing in the sandbox, and snippets would get access to its folder.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"LD_")) {
            command.env_remove(name);
        }
        let asked = command.args(["-I", "-B", "-c", HOST_PROGRAM]).stdin(Stdio::null()).output();
        let output =
            asked.map_err(|e| bad_input!("interpreter.python: {named} cannot be run ({e}): {remedy}"))?;
        serde_json::from_slice(&output.stdout).map_err(|_| {
            let errors = String::from_utf8_lossy(&output.stderr);
            let last = errors.lines().last().unwrap_or("it wrote something else");
            bad_input!("interpreter.python: {named} is not a working Python ({last}): {remedy}")
        })
    }
}
