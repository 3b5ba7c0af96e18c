//! `rloss report RUN...`

use crate::error::EXIT_DONE;
use crate::report::write_report;
use anyhow::Result;
use std::io::Write;
use std::path::PathBuf;

/// Writes the page and says where it is.
///
/// # Errors
/// Those of [`write_report`].
pub fn run(runs: &[PathBuf]) -> Result<u8> {
    let page = write_report(runs)?;
    // The page is there whether or not somebody listens.
    let _ = writeln!(std::io::stdout(), "{}", page.display());
    Ok(EXIT_DONE)
}
