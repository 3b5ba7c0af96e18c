//! Without Linux nothing here can confine a process.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a process may still do with files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    pub read: Vec<PathBuf>,
    pub execute: Vec<PathBuf>,
}

/// Always fails, which refuses the worker.
pub fn computing_process(_parent_id: u32, _memory_bytes: u64, _first_unused: i32) -> Result<String> {
    bail!("confinement needs Linux")
}
