//! A table of the alarm limits, with each run's values.

use super::run::Run;
use crate::metrics::{Phase, format_number};
use crate::policy::alarm::{ALARMS, Alarm};
use minijinja::{Value, context};
use std::collections::BTreeSet;

/// Returns a row for each metric that has alarm limits and that a run recorded.
pub(super) fn table(runs: &[Run]) -> Vec<Value> {
    let row = |alarm: &'static Alarm| {
        let runs: Vec<Option<Value>> = runs.iter().map(|run| alarm_summary(alarm, run)).collect();
        let Alarm { metric, meaning, .. } = alarm;
        let recorded = runs.iter().any(Option::is_some);
        recorded.then(|| context! { metric, meaning, healthy => healthy_range(alarm), runs })
    };
    ALARMS.iter().filter_map(row).collect()
}

/// Returns the healthy range as text.
pub(super) fn healthy_range(alarm: &Alarm) -> String {
    let (low, high) = (format_number(alarm.low), format_number(alarm.high));
    match (alarm.low.is_finite(), alarm.high.is_finite()) {
        (true, false) => format!("{low} or more"),
        (false, true) => format!("{high} or less"),
        _ => format!("{low} to {high}"),
    }
}

/// Returns the finite bounds of `metric`'s healthy range, for a chart.
pub(super) fn healthy_bounds(metric: &str) -> Option<(String, Vec<f64>)> {
    let alarm = ALARMS.iter().find(|alarm| alarm.metric == metric)?;
    Some((
        healthy_range(alarm),
        [alarm.low, alarm.high].into_iter().filter(|level| level.is_finite()).collect(),
    ))
}

/// Returns the last value, the worst value with its step, and the number of steps that trigger the alarm.
/// The worst value is the one farthest outside the range or, if none is outside, the one nearest to a bound.
/// For several seeds, the last value is their mean, and the worst is that of any seed.
fn alarm_summary(alarm: &Alarm, run: &Run) -> Option<Value> {
    let means = run.series(Phase::Rl, alarm.metric);
    let &(_, last) = means.last()?;
    let ends = ["low", "high"].map(|end| run.series(Phase::Rl, &format!("{}/ci95_{end}", alarm.metric)));
    let points: Vec<(u64, f64)> = ends.into_iter().flatten().chain(means.iter().copied()).collect();
    // NaN counts as worse than any value.
    let excess =
        |value: f64| if value.is_nan() { f64::INFINITY } else { (value - alarm.high).max(alarm.low - value) };
    let &(worst_step, worst) = points.iter().max_by(|a, b| excess(a.1).total_cmp(&excess(b.1)))?;
    let value = |value: f64| context! { text => format_number(value), triggers => alarm.triggers_at(value) };
    let beyond = points.iter().filter(|(_, value)| alarm.triggers_at(*value)).map(|(step, _)| step);
    let beyond = format!("{} of {}", beyond.collect::<BTreeSet<_>>().len(), means.len());
    Some(context! { last => value(last), worst => value(worst), worst_step, beyond })
}
