//! CPython needs a sandbox, and the sandbox needs Linux. On other systems, starting it is an error.

use super::{Interpreter, InterpreterSettings, Reply, SessionId};
use crate::bad_input;
use crate::metrics::Console;
use anyhow::Result;
use std::path::PathBuf;

pub const LAUNCHER_ARGUMENT: &str = "cpython";

/// Never constructed on this system.
pub enum CPython {}

impl CPython {
    /// Returns an error, because this system has no sandbox for CPython.
    ///
    /// # Errors
    /// Always [`crate::error::BadInput`].
    pub fn new(_settings: InterpreterSettings, _program: PathBuf, _sessions_max: usize) -> Result<Self> {
        Err(bad_input!("interpreter.kind: \"cpython\" needs Linux; use \"embedded\""))
    }

    pub fn reporting_to(self, _console: &Console) -> Self {
        self
    }
}

impl Interpreter for CPython {
    fn call(&self, _session: SessionId, _code: &str) -> Reply {
        match *self {}
    }

    fn close(&self, _session: SessionId) {}

    fn sandbox_description(&self) -> String {
        match *self {}
    }
}

pub fn launcher_main() -> i32 {
    1
}
