//! The metrics of runs as CSV (RFC 4180).

use super::run::Run;
use std::collections::BTreeSet;

/// Returns a table with a line for each row of each run: run, phase, step, and every metric that a run
/// recorded. A metric that a row lacks is empty.
pub(super) fn metrics(runs: &[Run]) -> String {
    let rows = || runs.iter().flat_map(|run| run.rows.iter().map(move |row| (run, row)));
    let names: BTreeSet<&str> =
        rows().flat_map(|(_, row)| row.metrics.iter().map(|(name, _)| name)).collect();
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = String>| {
        text += &cells.map(|cell| quote(&cell)).collect::<Vec<_>>().join(",");
        text += "\r\n";
    };
    line(&mut ["run", "phase", "step"].into_iter().chain(names.iter().copied()).map(str::to_owned));
    for (run, row) in rows() {
        let place = [run.label.clone(), row.phase.name().to_owned(), row.step.to_string()];
        let value = |name: &&str| row.metrics.get(name).map(|value| value.to_string()).unwrap_or_default();
        line(&mut place.into_iter().chain(names.iter().map(value)));
    }
    text
}

/// Quotes a cell that has a comma, a quote or a line break.
fn quote(cell: &str) -> String {
    match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_owned(),
    }
}
