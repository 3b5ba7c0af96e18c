//! Curves and readable trajectories from run folders, as one HTML page.
//!
//! ```text
//! run folder ─ run.rs ─> Run ─┬─ charts.rs: which metrics share a chart ─ plot.rs: scales, ticks, paths ─┐
//!                             ├─ alarms.rs: alarm levels beside the values ──────────────────────────────┤
//!                             ├─ tables.rs: summary, outcomes, mismatch ─────────────────────────────────┼─> page.html
//!                             │  └─ mismatch_chart.rs: the bars beside the mismatch table ───────────────┤
//!                             └─ conversation.rs: which trajectories to read ────────────────────────────┘
//! ```
//!
//! `figures/` draws curves of several seeds instead. The template escapes every value it is given, so geometry is computed here and markup stands there.

mod alarms;
mod charts;
mod conversation;
mod figures;
mod mismatch_chart;
mod plot;
mod run;
mod tables;

use crate::atomic_file::write_file;
use crate::metrics::sanitize_terminal;
use anyhow::Result;
use minijinja::{AutoEscape, Environment, Value, context, escape_formatter};
use run::Run;
use std::path::PathBuf;

/// Writes `report.html` into the first of `runs`, all of them overlaid, and returns its path.
/// The page holds everything it shows: it asks nothing of a network.
///
/// A folder with a `figures.toml` is a set of figures in place of a run: see `docs/FIGURES.md`.
///
/// # Errors
/// [`crate::error::BadInput`] when a folder is missing, has no `metrics.jsonl`, holds a line that
/// cannot be read, or is a set of figures beside other folders.
pub fn write_report(runs: &[PathBuf]) -> Result<PathBuf> {
    let first = runs.first().ok_or_else(|| crate::bad_input!("report: name at least one run folder."))?;
    if let Some(set) = runs.iter().find(|folder| folder.join(figures::FILE).is_file()) {
        if runs.len() > 1 {
            return Err(crate::bad_input!(
                "{}: holds {}, so it is a set of figures; report it by itself.",
                set.display(),
                figures::FILE
            ));
        }
        return figures::write(set, &mut environment());
    }
    let runs = Run::load_all(runs)?;
    let page = render(&runs)?;
    let path = first.join("report.html");
    write_file(&path, &page)?;
    Ok(path)
}

/// Escapes every value that a template shows.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(|out, state, value| match value.as_str() {
        // Control characters are shown as pictures; the page's own style and script pass.
        Some(text) if !value.is_safe() => {
            escape_formatter(out, state, &Value::from(sanitize_terminal(text).as_ref()))
        }
        _ => escape_formatter(out, state, value),
    });
    environment
}

fn render(runs: &[Run]) -> Result<String> {
    let mut environment = environment();
    environment.add_template("page.html", include_str!("page.html"))?;
    let (sections, data) = charts::sections(runs);
    let page = environment.get_template("page.html")?.render(context! {
        style => Value::from_safe_string(include_str!("page.css").to_owned()),
        script => Value::from_safe_string(include_str!("page.js").to_owned()),
        data => Value::from_safe_string(script_json(&data)),
        title => title(runs),
        runs => runs.iter().map(|run| &run.label).collect::<Vec<_>>(),
        summary => tables::summary(runs),
        sections,
        alarms => alarms::table(runs),
        outcomes => tables::outcomes(runs),
        mismatches => tables::mismatches(runs),
        conversations => conversation::view(runs),
    })?;
    Ok(page)
}

fn title(runs: &[Run]) -> String {
    match runs {
        [only] => only.label.clone(),
        runs => format!("{} runs", runs.len()),
    }
}

/// JSON that may stand inside a script element whatever strings it holds.
fn script_json(value: &serde_json::Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}
