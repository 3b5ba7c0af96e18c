//! Without Linux nothing here can confine a process.

use anyhow::{Result, bail};

/// Always fails, which refuses the worker.
pub fn computing_process(_parent_id: u32, _memory_bytes: u64, _first_unused: i32) -> Result<String> {
    bail!("confinement needs Linux")
}
