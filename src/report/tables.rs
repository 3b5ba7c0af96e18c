//! The page's tables: what each run is and came to, outcome counts, mismatch results.

use super::mismatch_chart::{self, MismatchChart};
use super::run::Run;
use crate::metrics::{Phase, Row, format_number};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeSet;

/// One run in the summary.
#[derive(Serialize)]
pub(super) struct Summary<'a> {
    run: usize,
    label: &'a str,
    task: String,
    model: String,
    seed: String,
    /// `80 of 80`.
    steps: String,
    /// Each held-out metric's first and last value.
    success: Vec<Change>,
    reward: Option<Change>,
    time: String,
}

/// A metric's first and last value.
#[derive(Serialize)]
struct Change {
    name: String,
    first: String,
    last: String,
}

impl Change {
    fn of(run: &Run, phase: Phase, metric: &str) -> Option<Change> {
        let series = run.series(phase, metric);
        let (first, last) = (series.first()?.1, series.last()?.1);
        Some(Change { name: metric.to_owned(), first: format_number(first), last: format_number(last) })
    }
}

const ABSENT: &str = "–";

pub(super) fn summary(runs: &[Run]) -> Vec<Summary<'_>> {
    runs.iter().enumerate().map(|(i, run)| summarise(i, run)).collect()
}

fn summarise(i: usize, run: &Run) -> Summary<'_> {
    let setting = |key| run.setting(key).filter(|text| !text.is_empty()).unwrap_or_else(|| ABSENT.into());
    let done = run.rows.iter().filter(|row| row.phase == Phase::Rl).map(|row| row.step).max().unwrap_or(0);
    let steps = run.setting("train.steps").map_or_else(|| done.to_string(), |all| format!("{done} of {all}"));
    let held_out = names(run, is_held_out);
    let success = held_out.iter().filter_map(|name| {
        let change = Change::of(run, Phase::Eval, name)?;
        Some(Change { name: held_out_name(name), ..change })
    });
    Summary {
        run: i,
        label: &run.label,
        task: task(run).unwrap_or_else(|| setting("task.name")),
        model: model(run).unwrap_or_else(|| setting("model.path")),
        seed: if run.seeds.is_empty() { setting("train.seed") } else { run.seeds.clone() },
        steps,
        success: success.collect(),
        reward: Change::of(run, Phase::Rl, "critic/rewards/mean"),
        time: wall_time(&run.rows),
    }
}

/// A program that is the task, by the names of its files.
fn task(run: &Run) -> Option<String> {
    let words = run.recipe.get("task")?.get("command")?.as_array()?;
    let name = |word: &toml::Value| {
        let word = word.as_str().unwrap_or_default().trim();
        let line = word.lines().next().unwrap_or_default();
        let cut = if line.len() < word.len() { " …" } else { "" };
        format!("{}{cut}", line.rsplit('/').next().unwrap_or_default())
    };
    (!words.is_empty()).then(|| words.iter().map(name).collect::<Vec<_>>().join(" "))
}

/// Says of a run most of whose trajectories failed that they did: their rewards tell nothing of the policy.
pub(super) fn failures(run: &Run) -> Option<String> {
    let shares = run.series(Phase::Rl, "trajectory/failed_fraction");
    let share = shares.iter().map(|(_, share)| share).sum::<f64>() / shares.len() as f64;
    (share > 0.5).then(|| {
        format!(
            "{}: {}% of the trajectories failed, whatever the policy did: the task's program or the tool's workers. The rewards \
             say nothing of the model.",
            run.label,
            format_number(100.0 * share)
        )
    })
}

/// `gpt-oss-20b: gpt_oss, 24 layers, 20,914,757,184 parameters`, from the run's `model.json`.
fn model(run: &Run) -> Option<String> {
    let facts = run.model.as_ref()?;
    let number = |key: &str| facts.get(key).and_then(Value::as_f64);
    let (all, learning) = (number("parameters")?, number("learning")?);
    let name = facts.get("name").and_then(Value::as_str).map(|name| format!("{name}: ")).unwrap_or_default();
    let frozen = if learning < all { format!(", {} learn", format_number(learning)) } else { String::new() };
    Some(format!(
        "{name}{}, {} layers, {} parameters{frozen}",
        facts.get("model_type").and_then(Value::as_str)?,
        format_number(number("layers")?),
        format_number(all)
    ))
}

/// A held-out success metric; the ends of its confidence interval are drawn with it, not by themselves.
pub(super) fn is_held_out(name: &str) -> bool {
    name.starts_with("val-core/") && !is_interval_end(name)
}

/// `val-core/gsm8k/acc/mean@4` as `gsm8k mean@4`.
pub(super) fn held_out_name(metric: &str) -> String {
    metric.trim_start_matches("val-core/").replace("/acc/", " ")
}

/// `<metric>/ci95_low` and `<metric>/ci95_high`: the ends of the metric's 95% interval.
pub(super) fn is_interval_end(name: &str) -> bool {
    name.ends_with("/ci95_low") || name.ends_with("/ci95_high")
}

/// The run's metric names that `keep` keeps, ordered.
fn names(run: &Run, keep: impl Fn(&str) -> bool) -> BTreeSet<&str> {
    run.rows
        .iter()
        .flat_map(|row| row.metrics.iter())
        .map(|(name, _)| name)
        .filter(|name| keep(name))
        .collect()
}

/// Sum over the rows of `timing_s/step`; a row without it counts all its `timing_s/…`.
fn wall_time(rows: &[Row]) -> String {
    let of_row = |row: &Row| {
        let stages = || row.metrics.iter().filter(|(name, _)| name.starts_with("timing_s/")).map(|(_, s)| s);
        row.metrics.get("timing_s/step").unwrap_or_else(|| stages().sum())
    };
    let seconds: f64 = rows.iter().map(of_row).sum();
    match seconds {
        s if !s.is_finite() || s <= 0.0 => ABSENT.to_owned(),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), (s % 60.0).floor()),
        s => format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), (s / 60.0 % 60.0).floor()),
    }
}

/// Outcome counts: one row a metric, and for each run the first and the last RL step's count.
#[derive(Serialize)]
pub(super) struct Outcomes {
    /// (first step, last step) of each run.
    steps: Vec<[String; 2]>,
    rows: Vec<OutcomeRow>,
}

#[derive(Serialize)]
struct OutcomeRow {
    name: String,
    cells: Vec<[String; 2]>,
}

/// `None` when no run counted outcomes.
pub(super) fn outcomes(runs: &[Run]) -> Option<Outcomes> {
    let is_count = |name: &str| name.starts_with("outcome/") || name.starts_with("tool/");
    let all: BTreeSet<&str> = runs.iter().flat_map(|run| names(run, is_count)).collect();
    if all.is_empty() {
        return None;
    }
    let ends: Vec<[Option<&Row>; 2]> = runs.iter().map(first_and_last_step).collect();
    let each = |show: &dyn Fn(&Row) -> Option<String>| -> Vec<[String; 2]> {
        ends.iter().map(|pair| pair.map(|row| row.and_then(show).unwrap_or_else(|| ABSENT.into()))).collect()
    };
    let rows = all.iter().map(|&name| OutcomeRow {
        name: name.to_owned(),
        cells: each(&|row| row.metrics.get(name).map(format_number)),
    });
    Some(Outcomes { steps: each(&|row| Some(row.step.to_string())), rows: rows.collect() })
}

fn first_and_last_step(run: &Run) -> [Option<&Row>; 2] {
    let mut steps = run.rows.iter().filter(|row| row.phase == Phase::Rl);
    let first = steps.next();
    [first, steps.next_back().or(first)]
}

/// One run's `mismatch.json`.
#[derive(Serialize)]
pub(super) struct Mismatch<'a> {
    run: usize,
    label: &'a str,
    verdict: Option<String>,
    chart: Option<MismatchChart>,
    header: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

#[derive(Serialize)]
struct Cell {
    text: String,
    number: bool,
}

pub(super) fn mismatches(runs: &[Run]) -> Vec<Mismatch<'_>> {
    let with_file = runs.iter().filter_map(|run| Some((run, run.mismatch.as_ref()?)));
    with_file
        .map(|(run, file)| {
            let rows: Vec<_> =
                file["rows"].as_array().into_iter().flatten().filter_map(Value::as_object).collect();
            let mut header: Vec<String> = Vec::new();
            for key in rows.iter().flat_map(|row| row.keys()) {
                if !header.contains(key) {
                    header.push(key.clone());
                }
            }
            let chart = mismatch_chart::chart(&rows);
            let rows = rows.iter().map(|row| header.iter().map(|key| cell(row.get(key))).collect()).collect();
            let verdict = file.get("verdict").map(|verdict| cell(Some(verdict)).text);
            Mismatch { run: run.curve, label: &run.label, verdict, chart, header, rows }
        })
        .collect()
}

fn cell(value: Option<&Value>) -> Cell {
    match value {
        None | Some(Value::Null) => Cell { text: ABSENT.into(), number: true },
        Some(Value::Number(number)) => {
            let text = number.as_f64().map_or_else(|| number.to_string(), format_number);
            Cell { text, number: true }
        }
        Some(Value::String(text)) => Cell { text: text.clone(), number: false },
        Some(other) => Cell { text: other.to_string(), number: false },
    }
}
