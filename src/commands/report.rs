//! `rloss report RUN...`

use crate::error::EXIT_DONE;
use crate::report::write_report;
use crate::run::collect::show;
use anyhow::Result;
use std::path::PathBuf;

/// Writes the page and says where it is.
///
/// # Errors
/// Those of [`write_report`].
pub fn run(runs: &[PathBuf]) -> Result<u8> {
    let page = write_report(runs)?;
    show(&format!("{}\n", page.display()))?;
    Ok(EXIT_DONE)
}
