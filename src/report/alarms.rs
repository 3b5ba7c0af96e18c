//! The alarm levels beside what each run came to.

use super::run::Run;
use crate::metrics::{Phase, format_number};
use crate::policy::alarm::{ALARMS, Alarm};
use serde::Serialize;

/// A metric with a level.
#[derive(Serialize)]
pub(super) struct AlarmRow {
    metric: &'static str,
    meaning: &'static str,
    /// Such as `-0.1 to 0.1`.
    healthy: String,
    /// One a run; `None` where it did not record the metric.
    runs: Vec<Option<Reading>>,
}

#[derive(Serialize)]
struct Reading {
    last: Value,
    /// The value farthest out, or nearest to a bound, and its step.
    worst: Value,
    worst_step: u64,
    /// `3 of 80`.
    beyond: String,
}

#[derive(Serialize)]
struct Value {
    text: String,
    rings: bool,
}

/// The levels of every metric that a run recorded.
pub(super) fn table(runs: &[Run]) -> Vec<AlarmRow> {
    let row = |alarm: &'static Alarm| AlarmRow {
        metric: alarm.metric,
        meaning: alarm.meaning,
        healthy: healthy(alarm),
        runs: runs.iter().map(|run| reading(alarm, &run.series(Phase::Rl, alarm.metric))).collect(),
    };
    ALARMS.iter().map(row).filter(|row| row.runs.iter().any(Option::is_some)).collect()
}

/// The range that counts as healthy, in words.
pub(super) fn healthy(alarm: &Alarm) -> String {
    let (low, high) = (format_number(alarm.low), format_number(alarm.high));
    match (alarm.low.is_finite(), alarm.high.is_finite()) {
        (true, false) => format!("{low} or more"),
        (false, true) => format!("{high} or less"),
        _ => format!("{low} to {high}"),
    }
}

/// The ends of the healthy range of `metric` that a chart can show.
pub(super) fn levels(metric: &str) -> Option<(String, Vec<f64>)> {
    let alarm = ALARMS.iter().find(|alarm| alarm.metric == metric)?;
    Some((healthy(alarm), [alarm.low, alarm.high].into_iter().filter(|level| level.is_finite()).collect()))
}

fn reading(alarm: &Alarm, points: &[(u64, f64)]) -> Option<Reading> {
    let &(_, last) = points.last()?;
    // What is no number is worse than any.
    let excess = |value: f64| match value.is_nan() {
        true => f64::INFINITY,
        false => (value - alarm.high).max(alarm.low - value),
    };
    let &(worst_step, worst) = points.iter().max_by(|a, b| excess(a.1).total_cmp(&excess(b.1)))?;
    let value = |value: f64| Value { text: format_number(value), rings: alarm.triggers_at(value) };
    let beyond = points.iter().filter(|(_, value)| alarm.triggers_at(*value)).count();
    let beyond = format!("{beyond} of {}", points.len());
    Some(Reading { last: value(last), worst: value(worst), worst_step, beyond })
}
