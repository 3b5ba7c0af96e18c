//! Selects the charts, and gives their order and titles.

use super::alarms;
use super::plot::{Plot, Scale, Series};
use super::run::Run;
use super::tables::{held_out_name, is_held_out, is_interval_end};
use crate::metrics::{CLOCK, Phase};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A group of charts under one heading. Its field names are keys of the template.
#[derive(Serialize, Default)]
pub(super) struct Section {
    title: &'static str,
    /// Whether the section is collapsed when the page opens.
    folded: bool,
    charts: Vec<Chart>,
    /// Charts whose curves are exactly 0 at every step. The page only lists their titles in one line. But if
    /// the value 0 is an alarm or a result, the chart stays in `charts`.
    zeros: Vec<Chart>,
    /// Titles of charts without values.
    absent: Vec<&'static str>,
}

#[derive(Serialize)]
struct Chart {
    id: usize,
    title: String,
    metric: String,
    unit: &'static str,
    /// The metric's healthy range as text, if it has alarm limits.
    healthy: Option<String>,
    plot: Plot,
}

/// A chart that the report draws if a run has values for it. In a chart of several metrics, all curves but
/// the first metric's are dashed.
struct ChartSpec<'a> {
    title: &'a str,
    metrics: &'a [&'a str],
    unit: &'static str,
    scale: Scale,
}

const fn linear<'a>(title: &'a str, metrics: &'a [&'a str], unit: &'static str) -> ChartSpec<'a> {
    ChartSpec { title, metrics, unit, scale: Scale::Linear }
}

const fn log<'a>(title: &'a str, metrics: &'a [&'a str], unit: &'static str) -> ChartSpec<'a> {
    ChartSpec { title, metrics, unit, scale: Scale::LogWhenWide }
}

impl ChartSpec<'_> {
    /// Lays out the chart. Returns `None` if no run has a value.
    fn chart(&self, runs: &[Run], phase: Phase) -> Option<Chart> {
        let mut series = Vec::new();
        for (i, run) in runs.iter().enumerate() {
            for (nth, metric) in self.metrics.iter().enumerate() {
                let points = run.series(phase, metric);
                if points.is_empty() {
                    continue;
                }
                let interval_end = |end: &str| run.series(phase, &format!("{metric}/{end}"));
                let stem = metric.split_once('/').map_or(*metric, |(_, stem)| stem).replace(['_', '/'], " ");
                let name =
                    if nth > 0 { format!("{}, {stem} (dashed)", run.label) } else { run.label.clone() };
                let interval = (interval_end("ci95_low"), interval_end("ci95_high"));
                series.push(Series { run: i, name, dashed: nth > 0, points, interval });
            }
        }
        let mut plot = Plot::new(series, self.scale)?;
        let bounds = self.metrics.first().and_then(|metric| alarms::healthy_bounds(metric));
        let healthy = bounds.map(|(healthy, levels)| {
            plot.add_levels(&levels);
            healthy
        });
        let (title, metric) = (self.title.to_owned(), self.metrics.join(", "));
        Some(Chart { id: 0, title, metric, unit: self.unit, healthy, plot })
    }
}

const LEARNING: &[ChartSpec<'static>] = &[
    linear("Reward", &["critic/rewards/mean"], "mean reward"),
    linear("Response length", &["response_length/mean"], "tokens"),
    linear("Turns", &["num_turns/mean"], "turns per trajectory"),
    linear("KL to the teacher", &["actor/distill_kl"], "nats, aggregated like the loss"),
    linear("Loss of a client", &["tinker/loss"], "sum over tokens"),
];

const STABILITY: &[ChartSpec<'static>] = &[
    log("Gradient norm", &["actor/grad_norm"], "norm before clipping"),
    linear("Entropy", &["actor/entropy"], "nats per token"),
    linear("KL to the reference, in the loss", &["actor/kl_loss"], "nats, aggregated like the loss"),
    linear("KL to the reference, in the reward", &["actor/reward_kl_penalty"], "nats per token"),
    linear("Max log-ppl mismatch", &["mismatch/log_ppl_abs_diff_max"], "nats per token"),
    linear("KL, rollout to training", &["rollout_corr/kl"], "nats per token"),
    linear("Difference of probabilities", &["training/rollout_probs_diff_mean"], "mean per token"),
    linear("Staleness of trained tokens", &["staleness/steps/mean", "staleness/steps/max"], "training steps"),
    linear("Mismatch of the same weights", &["engine/logprob_abs_diff_max"], "nats per token, maximum"),
    linear("KL, old to new policy", &["actor/ppo_kl"], "nats per token"),
    linear("Clip fraction", &["actor/pg_clipfrac"], "share of tokens"),
];

const CRITIC: &[ChartSpec<'static>] = &[
    linear("Explained variance", &["critic/vf_explained_var"], "share of the returns' variance"),
    linear("Values and returns", &["critic/values/mean", "critic/returns/mean"], "mean over tokens"),
    log("Value loss", &["critic/vf_loss"], "half the squared error"),
    log("Gradient norm, critic", &["critic/grad_norm"], "norm before clipping"),
    linear("Clip fraction, critic", &["critic/vf_clipfrac"], "share of tokens"),
];

const SFT_WARM_UP: &[ChartSpec<'static>] = &[
    log("Loss", &["cold_start/loss", "cold_start/held_out_loss"], "nats per token"),
    log("Gradient norm, SFT warm-up", &["cold_start/grad_norm"], "norm before clipping"),
];

const MEMORY: &[&str] = &["perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"];
const SPEED: &[ChartSpec<'static>] = &[
    linear("Throughput", &["perf/throughput"], "tokens/s"),
    linear("Rollout time", &["timing_s/gen"], "seconds per step"),
    linear("GPU memory", MEMORY, "GB, maximum in a step"),
    linear("Step time", &["timing_s/step"], "seconds per step"),
];

/// The sections in the page's order, with the phase whose metrics they draw.
const SECTIONS: [(&str, Phase, &[ChartSpec<'static>]); 5] = [
    ("Learning", Phase::Rl, LEARNING),
    ("Stability", Phase::Rl, STABILITY),
    ("Critic", Phase::Rl, CRITIC),
    ("SFT warm-up", Phase::SftWarmUp, SFT_WARM_UP),
    ("Speed", Phase::Rl, SPEED),
];

/// Returns whether the value 0 at every step is an alarm for `metric`: it means that the run learned nothing.
fn is_alarm_at_zero(metric: &str) -> bool {
    is_held_out(metric)
        || named_reward(metric).is_some()
        || metric.ends_with("rewards/mean")
        || metric.ends_with("grad_norm")
}

/// Returns whether the value 0 at every step is a result for `metric`, which the page shows. The value 0 then
/// means that rollout and training agree.
fn is_result_at_zero(metric: &str) -> bool {
    ["mismatch/log_ppl_abs_diff_max", "engine/logprob_abs_diff_max"].contains(&metric)
}

/// Returns the page's sections, and the data for the page's script, which shows values under the pointer.
pub(super) fn sections(runs: &[Run]) -> (Vec<Section>, Value) {
    let mut drawn: BTreeSet<(Phase, String)> = BTreeSet::new();
    let mut sections: Vec<Section> = Vec::new();
    for (title, phase, specs) in SECTIONS {
        let mut section = Section { title, ..Section::default() };
        for spec in specs {
            drawn.extend(spec.metrics.iter().map(|metric| (phase, (*metric).to_owned())));
            match spec.chart(runs, phase) {
                Some(chart) => section.charts.push(chart),
                None => section.absent.push(spec.title),
            }
        }
        sections.push(section);
    }
    let recorded = recorded_metrics(runs);
    insert_reward_charts(runs, &recorded, &mut sections[0]);
    let others = recorded.iter().filter(|&(phase, metric)| {
        !drawn.contains(&(*phase, metric.clone()))
            && metric != CLOCK
            && !is_held_out(metric)
            && !is_interval_end(metric)
            && named_reward(metric).is_none()
    });
    let charts = others.filter_map(|(phase, metric)| {
        let title = if *phase == Phase::Rl { metric.clone() } else { format!("{metric} ({})", phase.name()) };
        log(&title, &[metric], "").chart(runs, *phase)
    });
    let title = "All other metrics";
    sections.push(Section { title, folded: true, charts: charts.collect(), ..Section::default() });
    sections.retain(|section| !section.charts.is_empty());
    for section in &mut sections {
        let (zeros, charts) = std::mem::take(&mut section.charts)
            .into_iter()
            .partition(|c| c.plot.is_zero() && !is_alarm_at_zero(&c.metric) && !is_result_at_zero(&c.metric));
        (section.zeros, section.charts) = (zeros, charts);
    }
    let data = number_charts(&mut sections);
    (sections, data)
}

/// Returns every pair of phase and metric that the runs recorded, sorted.
fn recorded_metrics(runs: &[Run]) -> BTreeSet<(Phase, String)> {
    let rows = runs.iter().flat_map(|run| &run.rows);
    rows.flat_map(|row| row.metrics.iter().map(|(name, _)| (row.phase, name.to_owned()))).collect()
}

/// Returns `<name>` if the metric is `reward/<name>/mean`, the mean of a reward that the task names.
fn named_reward(metric: &str) -> Option<&str> {
    metric.strip_prefix("reward/")?.strip_suffix("/mean")
}

/// Inserts the charts of held-out success and of named rewards after the reward's chart.
fn insert_reward_charts(runs: &[Run], recorded: &BTreeSet<(Phase, String)>, learning: &mut Section) {
    let held_out = recorded.iter().filter(|(_, metric)| is_held_out(metric));
    let mut charts: Vec<Chart> = held_out
        .filter_map(|(phase, metric)| {
            let title = format!("Held-out {}", held_out_name(metric));
            ChartSpec { scale: Scale::Unit, ..linear(&title, &[metric], "success") }.chart(runs, *phase)
        })
        .collect();
    if charts.is_empty() {
        learning.absent.push("Held-out success");
    }
    charts.extend(recorded.iter().filter_map(|(phase, metric)| {
        let title = format!("Reward {}", named_reward(metric)?);
        linear(&title, &[metric], "mean, unweighted").chart(runs, *phase)
    }));
    let at = learning.charts.iter().take_while(|chart| chart.title == "Reward").count();
    learning.charts.splice(at..at, charts);
}

/// Numbers the charts and collects their data. The data has only numbers, so that no text of a run reaches
/// the script.
fn number_charts(sections: &mut [Section]) -> Value {
    let mut data = Vec::new();
    for chart in sections.iter_mut().flat_map(|section| section.charts.iter_mut().chain(&mut section.zeros)) {
        chart.id = data.len();
        data.push(chart.plot.data());
    }
    json!(data)
}
