//! The metrics of runs as CSV (RFC 4180).

use super::run::Run;
use anyhow::Result;
use csv::{Terminator, WriterBuilder};
use std::collections::BTreeSet;

/// Returns a table with a line for each row of each run: run, phase, step, and every metric that a run
/// recorded. A metric that a row lacks is empty.
///
/// # Errors
/// Errors of the writer.
pub(super) fn metrics(runs: &[Run]) -> Result<String> {
    let rows = || runs.iter().flat_map(|run| run.rows.iter().map(move |row| (run, row)));
    let names: BTreeSet<&str> =
        rows().flat_map(|(_, row)| row.metrics.iter().map(|(name, _)| name)).collect();
    let mut table = WriterBuilder::new().terminator(Terminator::CRLF).from_writer(vec![]);
    table.write_record(["run", "phase", "step"].iter().chain(&names))?;
    for (run, row) in rows() {
        let place = [run.label.clone(), row.phase.name().to_owned(), row.step.to_string()];
        let value = |name: &&str| row.metrics.get(name).map(|value| value.to_string()).unwrap_or_default();
        table.write_record(place.into_iter().chain(names.iter().map(value)))?;
    }
    Ok(String::from_utf8(table.into_inner()?)?)
}
