//! Confinement needs Linux. On other systems it always fails.

use anyhow::{Result, bail};

/// Always fails, so the worker does not start.
pub fn confine_worker(_parent_id: u32, _memory_bytes: u64, _first_unused: i32) -> Result<String> {
    bail!("confinement needs Linux")
}
