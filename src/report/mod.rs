//! Makes one HTML page from run folders: charts, tables and trajectories.
//!
//! ```text
//! run folder ─ run.rs ─> Run ─┬─ charts.rs: metrics of a chart ─ plot.rs: scales, ticks, paths ┐
//!                             ├─ alarms.rs: alarm limits beside the values ────────────────────┤
//!                             ├─ settings.rs: settings that differ ────────────────────────────┤
//!                             ├─ tables.rs: summary, outcomes, mismatch ───────────────────────┼─> page.html
//!                             │  └─ mismatch_chart.rs: bars for the mismatch table ────────────┤
//!                             ├─ conversation.rs: selected trajectories ───────────────────────┤
//!                             └─ trajectories.rs: all of them, packed for the page's viewer ───┘
//! ```
//!
//! `card.rs` makes the model card of an export, `csv.rs` a table of the metrics.
//! Runs that differ only in their seed share a curve (`seeds.rs`).
//! `content_policy.rs` allows only the page's own script.
//!
//! The Rust code computes the geometry. The template has the markup and escapes every value.

mod alarms;
mod card;
mod charts;
mod content_policy;
mod conversation;
mod csv;
mod mismatch_chart;
mod plot;
mod run;
mod seeds;
mod settings;
mod tables;
mod trajectories;

pub use card::model_card;

use crate::atomic_file::write_file;
use crate::metrics::{WARNINGS_FILE, current_stage, sanitize_line, sanitize_terminal};
use anyhow::Result;
use content_policy::content_policy;
use minijinja::{AutoEscape, Environment, Value, context, escape_formatter};
use run::Run;
use std::path::{Path, PathBuf};

/// Writes one page for all `runs` and returns its path. The path is `out`, if given, or `report.html` in
/// `out` if `out` is a folder. Otherwise it is `report.html` in the run's folder or, for several runs,
/// `report-N-runs-DIGEST.html` in the first run's folder. The page needs no network. If `out` ends with
/// `.csv`, writes the metrics as a table instead.
///
/// # Errors
/// [`crate::error::BadInput`] when a folder is missing or given twice, has no `metrics.jsonl`, or has a line
/// that cannot be read. Also when `out` has another ending.
pub fn write_report(runs: &[PathBuf], out: Option<&Path>) -> Result<PathBuf> {
    let first = runs.first().ok_or_else(|| crate::bad_input!("report: name at least one run folder."))?;
    let is_folder = |out: &Path| out.is_dir() || out.as_os_str().as_encoded_bytes().ends_with(b"/");
    let is_csv = match out.filter(|out| !is_folder(out)).and_then(|out| out.extension()?.to_str()) {
        None | Some("html" | "htm") => false,
        Some("csv") => true,
        Some(other) => {
            return Err(crate::bad_input!(
                "--out: a report is a page (.html) or its metrics (.csv), not .{other}; name such a file, or a folder that ends with /"
            ));
        }
    };
    let page = if is_csv { csv::metrics(&Run::load_all(runs, false)?)? } else { page(runs, false)? };
    let Some(out) = out else {
        let path = first.join(match runs.len() {
            1 => "report.html".to_owned(),
            several => format!("report-{several}-runs-{}.html", checksum(runs)),
        });
        write_file(&path, &page)?;
        return Ok(path);
    };
    let path = if is_folder(out) { out.join("report.html") } else { out.to_owned() };
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("")))
        .map_err(anyhow::Error::from)
        .and_then(|()| write_file(&path, &page))
        .map_err(|e| {
            crate::bad_input!("{}: cannot be written: {e:#}; name another file with --out", path.display())
        })?;
    Ok(path)
}

/// Returns a checksum of the set of runs, for the page's file name.
fn checksum(runs: &[PathBuf]) -> String {
    let mut hash = crc32fast::Hasher::new();
    for run in runs {
        let full = std::fs::canonicalize(run).unwrap_or_else(|_| run.clone());
        hash.update(full.as_os_str().as_encoded_bytes());
        hash.update(b"\n");
    }
    format!("{:08x}", hash.finalize())
}

/// Returns the page of `runs`. If `for_server`, the page requests updates from its server, and a run may
/// begin later.
///
/// # Errors
/// The errors of [`write_report`].
pub fn page(runs: &[PathBuf], for_server: bool) -> Result<String> {
    render(Run::load_all(runs, for_server)?, for_server)
}

/// Returns the folders of `runs` in which no run has begun.
pub fn awaited(runs: &[PathBuf]) -> Vec<&Path> {
    runs.iter().map(PathBuf::as_path).filter(|folder| !run::has_begun(folder)).collect()
}

/// Returns a checksum that changes when a source file of the page of `runs` changes. It covers the lengths
/// and modification times of these files.
pub fn state_digest(runs: &[PathBuf]) -> String {
    let mut hash = crc32fast::Hasher::new();
    for run in runs {
        let mut files = ["metrics.jsonl", "mismatch.json", "trajectories", WARNINGS_FILE]
            .map(|name| run.join(name))
            .to_vec();
        // A folder's modification time changes with each new file.
        files.push(run.join("recipe.toml"));
        files.extend(run::evaluation_folders(run));
        for file in files {
            let metadata = std::fs::metadata(&file).ok();
            let modified = metadata.as_ref().and_then(|metadata| metadata.modified().ok());
            hash.update(format!("{:?} {:?}", metadata.map(|metadata| metadata.len()), modified).as_bytes());
        }
    }
    format!("{:08x}", hash.finalize())
}

/// Returns the current stage of each run in `runs` that is in progress. With several runs, each text begins
/// with the run's folder.
pub fn stages_under_way(runs: &[PathBuf]) -> Vec<String> {
    let stage = |run: &PathBuf| {
        let stage = sanitize_line(&current_stage(run)?).into_owned();
        Some(if runs.len() > 1 { format!("{}: {stage}", run.display()) } else { stage })
    };
    runs.iter().filter_map(stage).collect()
}

/// Returns a template environment that escapes every value.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(|out, state, value| match value.as_str() {
        // Control characters become visible symbols. The page's own style and script are not escaped.
        Some(text) if !value.is_safe() => {
            escape_formatter(out, state, &Value::from(sanitize_terminal(text).as_ref()))
        }
        _ => escape_formatter(out, state, value),
    });
    environment
}

fn render(mut runs: Vec<Run>, for_server: bool) -> Result<String> {
    let curves = seeds::merge_seeds(&mut runs);
    let (runs, curves) = (runs.as_slice(), curves.as_slice());
    let browser = trajectories::pack(runs)?;
    let mut environment = environment();
    environment.add_template("page.html", include_str!("page.html"))?;
    let (sections, data) = charts::sections(curves);
    let (style, follow) = (include_str!("page.css"), if for_server { include_str!("follow.js") } else { "" });
    let script = format!("{}{}{follow}", include_str!("page.js"), include_str!("browser.js"));
    let page = environment.get_template("page.html")?.render(context! {
        policy => Value::from_safe_string(content_policy(style, &script, for_server)),
        style => Value::from_safe_string(style.to_owned()),
        script => Value::from_safe_string(script),
        data => Value::from_safe_string(script_json(&data)),
        for_server,
        title => title(runs),
        runs => curves.iter().map(|run| &run.label).collect::<Vec<_>>(),
        empty => runs.iter().filter(|run| run.rows.is_empty()).map(|run| &run.label).collect::<Vec<_>>(),
        failed => runs.iter().filter_map(tables::failure_warning).collect::<Vec<_>>(),
        warnings => tables::warnings(runs),
        summary => tables::summary(curves),
        differing => settings::differing(curves),
        given => if runs.len() > 1 { tables::summary(runs) } else { vec![] },
        sections,
        alarms => alarms::table(curves),
        outcomes => tables::outcomes(curves),
        mismatches => tables::mismatches(runs),
        conversations => conversation::conversation_views(runs),
        browser => browser.as_ref().map(serde_json::to_value).transpose()?.map(|value| {
            Value::from_safe_string(script_json(&value))
        }),
        left_out => browser.as_ref().and_then(|browser| browser.left_out.clone()),
    })?;
    Ok(page)
}

fn title(runs: &[Run]) -> String {
    match runs {
        [only] => only.label.clone(),
        runs => format!("{} runs", runs.len()),
    }
}

/// Returns `value` as JSON for a script element: no string in the JSON can end the element.
fn script_json(value: &serde_json::Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}
