//! The page's tables: settings and results of each run, outcome counts, mismatch results.

use super::mismatch_chart;
use super::run::Run;
use crate::metrics::{CLOCK, Phase, Row, Warning, format_count, format_number};
use minijinja::{Value, context};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use std::collections::BTreeSet;

/// The first and the last value of a metric, as text. `first` is absent if there is one value alone.
#[derive(Serialize)]
pub(super) struct Change {
    pub name: String,
    pub first: Option<String>,
    pub last: String,
}

/// Returns the first and the last value of `metric`, and `name` with their steps. Returns only the last value
/// if there is no other one.
fn format_change(run: &Run, phase: Phase, metric: &str, name: &str) -> Option<Change> {
    let series = run.series(phase, metric);
    let (&(first_step, first), &(step, last)) = (series.first()?, series.last()?);
    let (first, steps) = match series.len() {
        1 => (None, format!("step {step}")),
        _ => (Some(format_number(first)), format!("step {first_step} → {step}")),
    };
    Some(Change { name: format!("{name}, {steps}"), first, last: format_number(last) })
}

/// Maximum number of steps at each end of a run whose rewards are averaged.
const REWARD_STEPS_MAX: usize = 10;

/// Returns the mean reward of the first and of the last steps, because the reward of one step is noisy.
fn format_reward_change(run: &Run) -> Option<Change> {
    let rewards: Vec<f64> =
        run.series(Phase::Rl, "critic/rewards/mean").iter().map(|point| point.1).collect();
    let steps = (rewards.len() / 2).clamp(1, REWARD_STEPS_MAX);
    let mean = |window: &[f64]| format_number(window.iter().sum::<f64>() / window.len() as f64);
    let last = mean(rewards.get(rewards.len().checked_sub(steps)?..)?);
    let first = (rewards.len() > 1).then(|| mean(&rewards[..steps]));
    let name = match (rewards.len(), steps) {
        (1, _) => "the only RL step".to_owned(),
        (_, 1) => "first → last RL step".to_owned(),
        _ => format!("first → last {}", format_count(steps as u64, "RL step")),
    };
    Some(Change { name, first, last })
}

/// Returns the changes of held-out success, the last value with its 95% interval. For merged seeds, the
/// interval is from the lowest to the highest seed.
fn held_out_changes(run: &Run) -> Vec<Change> {
    let change = |name: &&str| {
        let change = format_change(run, Phase::Eval, name, &held_out_name(name))?;
        let ends = ["low", "high"].map(|end| run.series(Phase::Eval, &format!("{name}/ci95_{end}")));
        let [Some(low), Some(high)] = ends.map(|series| series.last().map(|point| format_number(point.1)))
        else {
            return Some(change);
        };
        Some(Change { last: format!("{} ({low} to {high})", change.last), ..change })
    };
    names(run, is_held_out).iter().filter_map(change).collect()
}

/// Returns the results of a run: held-out success, reward and mismatch.
pub(super) fn results(run: &Run) -> Vec<Change> {
    let reward = format_reward_change(run)
        .map(|change| Change { name: format!("mean reward, {}", change.name), ..change });
    let mismatch = mismatch_of_steps(run).map(|last| Change {
        name: "largest mismatch between rollout and training".to_owned(),
        first: None,
        last,
    });
    held_out_changes(run).into_iter().chain(reward).chain(mismatch).collect()
}

const ABSENT: &str = "–";

/// Returns a row of the summary for each run.
pub(super) fn summary(runs: &[Run]) -> Vec<Value> {
    runs.iter().enumerate().map(|(i, run)| summarise(i, run)).collect()
}

fn summarise(i: usize, run: &Run) -> Value {
    let setting = |key| run.setting(key).filter(|text| !text.is_empty()).unwrap_or_else(|| ABSENT.into());
    let done = run.rows.iter().filter(|row| row.phase == Phase::Rl).map(|row| row.step).max().unwrap_or(0);
    let last = run.rows.iter().map(|row| row.step).max().unwrap_or(0);
    let steps = match run.sampling.as_deref() {
        Some("eval") => format!("evaluated after step {last}"),
        Some(_) => format!("samples of step {last}"),
        None => run.setting("train.steps").map_or_else(|| done.to_string(), |all| format!("{done} of {all}")),
    };
    context! {
        run => i,
        label => run.label,
        task => task(run).unwrap_or_else(|| setting("task.name")),
        model => model(run).unwrap_or_else(|| setting("model.path")),
        seed => if run.seeds.is_empty() { setting("train.seed") } else { run.seeds.clone() },
        steps,
        mismatch => mismatch_of_steps(run),
        folder => run.folder.display().to_string(),
        success => held_out_changes(run),
        reward => format_reward_change(run),
        time => wall_time(&run.rows),
    }
}

/// Returns the largest log-perplexity mismatch of a sequence over all steps and seeds, as text.
fn mismatch_of_steps(run: &Run) -> Option<String> {
    let series = run.series(Phase::Rl, MISMATCH);
    let of_seeds = run.series(Phase::Rl, &format!("{MISMATCH}/ci95_high"));
    let values = series.iter().chain(&of_seeds).map(|point| point.1);
    let largest = values.reduce(|a, b| if b > a || b.is_nan() { b } else { a })?;
    let steps = format_count(series.len() as u64, "step");
    Some(match largest == 0.0 {
        true => format!("exactly 0 ({steps})"),
        false => format!("up to {} ({steps})", format_number(largest)),
    })
}

/// Returns the task of reward functions with the name of its file. For the task `command`, returns the file
/// names in its command.
fn task(run: &Run) -> Option<String> {
    let task = run.recipe.get("task")?;
    let name = |word: &toml::Value| {
        let word = word.as_str().unwrap_or_default().trim();
        let line = word.lines().next().unwrap_or_default();
        let cut = if line.len() < word.len() { " …" } else { "" };
        format!("{}{cut}", line.rsplit('/').next().unwrap_or_default())
    };
    if let Some(file) = task.get("file") {
        return Some(format!("{} {}", task.get("name")?.as_str()?, name(file)));
    }
    let words = task.get("command")?.as_array()?;
    (!words.is_empty()).then(|| words.iter().map(name).collect::<Vec<_>>().join(" "))
}

/// Returns a warning for a run in which most trajectories failed, so that rewards say nothing about the
/// policy.
pub(super) fn failure_warning(run: &Run) -> Option<String> {
    let shares = run.series(Phase::Rl, "trajectory/failed_fraction");
    let share = shares.iter().map(|(_, share)| share).sum::<f64>() / shares.len() as f64;
    (share > 0.5).then(|| {
        format!(
            "{}: {}% of the trajectories failed for reasons outside the policy: the task's program or the tool's workers. The \
             rewards say nothing about the model.",
            run.label,
            format_number(100.0 * share)
        )
    })
}

/// The metric of the column "Mismatch".
const MISMATCH: &str = "mismatch/log_ppl_abs_diff_max";

/// Maximum number of warnings of a run that the page shows.
const WARNINGS_MAX: usize = 100;

/// Returns the warnings of each run that has some. If there are very many, returns the last ones.
pub(super) fn warnings(runs: &[Run]) -> Vec<Value> {
    let reported = runs.iter().filter(|run| !run.warnings.is_empty());
    let of_run = |run: &Run| {
        let left_out = run.warnings.len().saturating_sub(WARNINGS_MAX);
        let line = |warning: &Warning| {
            context! { place => warning.step_text().unwrap_or_else(|| "start".to_owned()), text => warning.text }
        };
        let lines: Vec<Value> = run.warnings.iter().skip(left_out).map(line).collect();
        context! { run => run.curve, label => run.label, count => run.warnings.len(), lines, left_out }
    };
    reported.map(of_run).collect()
}

/// Returns a description such as `gpt-oss-20b: gpt_oss, 24 layers, 20,914,757,184 parameters`, from
/// `model.json`.
fn model(run: &Run) -> Option<String> {
    let facts = run.model.as_ref()?;
    let number = |key: &str| facts.get(key).and_then(Json::as_f64);
    let (all, learning) = (number("parameters")?, number("learning")?);
    let name = facts.get("name").and_then(Json::as_str).map(|name| format!("{name}: ")).unwrap_or_default();
    let frozen =
        if learning < all { format!(", {} trainable", format_number(learning)) } else { String::new() };
    Some(format!(
        "{name}{}, {}, {} parameters{frozen}",
        facts.get("model_type").and_then(Json::as_str)?,
        format_count(number("layers")? as u64, "layer"),
        format_number(all)
    ))
}

/// Returns whether `name` is a held-out success metric. The ends of a confidence interval do not count as
/// metrics, because they are drawn in the metric's chart.
pub(super) fn is_held_out(name: &str) -> bool {
    name.starts_with("val-core/") && !is_interval_end(name)
}

/// Shortens `val-core/gsm8k/acc/mean@4` to `gsm8k mean@4`.
pub(super) fn held_out_name(metric: &str) -> String {
    metric.trim_start_matches("val-core/").replace("/acc/", " ")
}

/// Returns whether `name` is an end of a 95% interval: `<metric>/ci95_low` or `<metric>/ci95_high`.
pub(super) fn is_interval_end(name: &str) -> bool {
    name.ends_with("/ci95_low") || name.ends_with("/ci95_high")
}

/// Returns the names of the run's metrics that `keep` accepts, sorted.
fn names(run: &Run, keep: impl Fn(&str) -> bool) -> BTreeSet<&str> {
    let names = run.rows.iter().flat_map(|row| row.metrics.iter()).map(|(name, _)| name);
    names.filter(|name| keep(name)).collect()
}

/// Returns the sum of `timing_s/step` over the rows. For a row without it, all `timing_s/…` of the row are
/// added.
fn wall_time(rows: &[Row]) -> String {
    let row_seconds = |row: &Row| {
        let is_stage = |name: &str| name.starts_with("timing_s/") && name != CLOCK;
        let stages = || row.metrics.iter().filter(|(name, _)| is_stage(name)).map(|(_, seconds)| seconds);
        row.metrics.get("timing_s/step").unwrap_or_else(|| stages().sum())
    };
    let seconds: f64 = rows.iter().map(row_seconds).sum();
    match seconds {
        s if !s.is_finite() || s <= 0.0 => ABSENT.to_owned(),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), (s % 60.0).floor()),
        s => format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), (s / 60.0 % 60.0).floor()),
    }
}

/// Returns the outcome counts: one row per metric, with the counts of each run's first and last RL step.
/// `None` if no run counted outcomes. Counts of tool calls are omitted if no run called a tool.
pub(super) fn outcomes(runs: &[Run]) -> Option<Value> {
    let is_count =
        |name: &str| (name.starts_with("outcome/") || name.starts_with("tool/")) && !is_interval_end(name);
    let mut all: BTreeSet<&str> = runs.iter().flat_map(|run| names(run, is_count)).collect();
    // If all counts of tool calls are 0, they carry no information.
    let is_zero = |name: &str| {
        let rows = runs.iter().flat_map(|run| &run.rows);
        rows.filter_map(|row| row.metrics.get(name)).all(|count| count == 0.0)
    };
    if all.iter().filter(|name| name.starts_with("tool/")).all(|name| is_zero(name)) {
        all.retain(|name| !name.starts_with("tool/"));
    }
    if all.is_empty() {
        return None;
    }
    let ends: Vec<[Option<&Row>; 2]> = runs.iter().map(first_and_last_step).collect();
    let each = |show: &dyn Fn(&Row) -> Option<String>| -> Vec<[String; 2]> {
        ends.iter().map(|pair| pair.map(|row| row.and_then(show).unwrap_or_else(|| ABSENT.into()))).collect()
    };
    let row =
        |&name: &&str| context! { name, cells => each(&|row| row.metrics.get(name).map(format_number)) };
    let rows: Vec<Value> = all.iter().map(row).collect();
    Some(context! { steps => each(&|row| Some(row.step.to_string())), rows })
}

fn first_and_last_step(run: &Run) -> [Option<&Row>; 2] {
    let mut steps = run.rows.iter().filter(|row| row.phase == Phase::Rl);
    let first = steps.next();
    [first, steps.next_back().or(first)]
}

/// Returns the `mismatch.json` of each run that has one.
pub(super) fn mismatches(runs: &[Run]) -> Vec<Value> {
    let with_file = runs.iter().filter_map(|run| Some((run, run.mismatch.as_ref()?)));
    with_file
        .map(|(run, file)| {
            let rows: Vec<_> =
                file["rows"].as_array().into_iter().flatten().filter_map(Json::as_object).collect();
            let mut header: Vec<&String> = Vec::new();
            for key in rows.iter().flat_map(|row| row.keys()) {
                if !header.contains(&key) {
                    header.push(key);
                }
            }
            let chart = mismatch_chart::chart(&rows);
            let cells = |row: &&Map<String, Json>| -> Vec<Value> {
                let cell = |key: &&String| cell(row.get(*key));
                header.iter().map(cell).map(|(text, number)| context! { text, number }).collect()
            };
            let rows: Vec<Vec<Value>> = rows.iter().map(cells).collect();
            let verdict = file.get("verdict").map(|verdict| cell(Some(verdict)).0);
            context! { run => run.curve, label => run.label, verdict, chart, header, rows }
        })
        .collect()
}

/// Returns a value's text, and whether it is a number. An absent value counts as a number.
fn cell(value: Option<&Json>) -> (String, bool) {
    match value {
        None | Some(Json::Null) => (ABSENT.into(), true),
        Some(Json::Number(number)) => {
            (number.as_f64().map_or_else(|| number.to_string(), format_number), true)
        }
        Some(Json::String(text)) => (text.clone(), false),
        Some(other) => (other.to_string(), false),
    }
}
