//! The runs of one curve: several seeds of the same recipe.

use super::manifest;
use crate::bad_input;
use crate::metrics::Phase;
use crate::report::plot::{Points, Series};
use crate::report::run::Run;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// The lowest number of mantissa bits that rollout engines use in practice: the 7 stored bits of bf16.
const MANTISSA_BITS_REAL: i64 = 7;

/// The runs of one recipe.
pub(super) struct Curve {
    pub label: String,
    /// (seed, run), ordered by seed. Empty if there are no runs.
    pub seeds: Vec<(u64, Run)>,
}

impl Curve {
    /// Reads `<folder>/<recipe>/seed-*`.
    pub fn load(folder: &Path, curve: &manifest::CurveEntry) -> Result<Curve> {
        let folder = folder.join(&curve.recipe);
        let mut seeds = Vec::new();
        if folder.is_dir() {
            let unreadable = |e: std::io::Error| bad_input!("{}: cannot be listed ({e}).", folder.display());
            for entry in std::fs::read_dir(&folder).map_err(unreadable)? {
                let path = entry.map_err(unreadable)?.path();
                let name =
                    path.file_name().and_then(|name| name.to_str()).and_then(|n| n.strip_prefix("seed-"));
                if let Some(seed) = name.and_then(|seed| seed.parse().ok())
                    && path.join("metrics.jsonl").is_file()
                {
                    seeds.push((seed, Run::load_metrics(curve.label.clone(), &path)?));
                }
            }
        }
        seeds.sort_by_key(|(seed, _)| *seed);
        Ok(Curve { label: curve.label.clone(), seeds })
    }

    /// Returns whether an ablation of the runs causes larger errors than rollout engines make in practice:
    /// noise on the router's logits, or rollout weights with fewer mantissa bits than bf16.
    pub fn has_strong_ablation(&self) -> bool {
        let Some(arms) = self.seeds.first().and_then(|(_, run)| run.recipe.get("arms")) else { return false };
        let noise = ["router_noise", "router_noise_rollout", "router_noise_train"];
        let noisy =
            noise.iter().any(|key| arms.get(key).and_then(toml::Value::as_float).is_some_and(|s| s > 0.0));
        let bits = arms.get("rollout_mantissa_bits").and_then(toml::Value::as_integer).unwrap_or(0);
        noisy || (bits > 0 && bits < MANTISSA_BITS_REAL)
    }

    /// Returns the values of `metric` for each seed.
    pub fn values(&self, phase: Phase, metric: &str) -> Vec<Points> {
        self.seeds.iter().map(|(_, run)| run.series(phase, metric)).collect()
    }

    /// Returns the curve: the mean over the seeds, and a band from the smallest to the largest value. `floor`
    /// is the lower end of a log axis. On such an axis, the mean is the geometric one, and values below
    /// `floor` are replaced by `floor`.
    pub fn series(&self, index: usize, phase: Phase, metric: &str, floor: Option<f64>) -> Series {
        let mut steps: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for (step, value) in
            self.values(phase, metric).into_iter().flatten().filter(|(_, value)| value.is_finite())
        {
            steps.entry(step).or_default().push(floor.map_or(value, |floor| value.max(floor)));
        }
        let mean = |values: &[f64]| {
            let scaled = values.iter().map(|&v| if floor.is_some() { v.ln() } else { v });
            let mean = scaled.sum::<f64>() / values.len() as f64;
            if floor.is_some() { mean.exp() } else { mean }
        };
        let end = |pick: fn(f64, f64) -> f64| -> Points {
            let ends =
                steps.iter().filter_map(|(&step, values)| Some((step, values.iter().copied().reduce(pick)?)));
            if self.seeds.len() > 1 { ends.collect() } else { Vec::new() }
        };
        Series {
            run: index,
            name: self.label.clone(),
            dashed: false,
            points: steps.iter().map(|(&step, values)| (step, mean(values))).collect(),
            interval: (end(f64::min), end(f64::max)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Row;

    fn curve(seeds: &[&[(u64, f64)]]) -> Curve {
        let run = |values: &&[(u64, f64)]| Run {
            rows: values
                .iter()
                .map(|&(step, value)| Row {
                    step,
                    phase: Phase::Rl,
                    metrics: [("x", value)].into_iter().collect(),
                })
                .collect(),
            ..Run::default()
        };
        Curve { label: "c".into(), seeds: (0..).zip(seeds.iter().map(run)).collect() }
    }

    #[test]
    fn the_mean_is_over_the_seeds_that_have_the_step() {
        let curve = curve(&[&[(1, 1.0), (2, 5.0)], &[(1, 4.0), (2, f64::NAN)]]);
        let series = curve.series(3, Phase::Rl, "x", None);
        assert_eq!((series.run, series.points), (3, vec![(1, 2.5), (2, 5.0)]));
        assert_eq!(series.interval, (vec![(1, 1.0), (2, 5.0)], vec![(1, 4.0), (2, 5.0)]));
    }

    #[test]
    fn on_a_log_axis_the_mean_is_of_the_logarithm_above_the_floor() {
        let series = curve(&[&[(1, 0.0)], &[(1, 100.0)]]).series(0, Phase::Rl, "x", Some(0.01));
        assert!((series.points[0].1 - 1.0).abs() < 1e-12, "{:?}", series.points);
        assert_eq!(series.interval, (vec![(1, 0.01)], vec![(1, 100.0)]));
    }

    #[test]
    fn one_seed_has_no_band() {
        assert_eq!(curve(&[&[(1, 2.0)]]).series(0, Phase::Rl, "x", None).interval, (vec![], vec![]));
    }

    #[test]
    fn noise_and_a_mantissa_below_bf16_are_exaggerated() {
        let with = |arms: &str| {
            let mut curve = curve(&[&[(1, 2.0)]]);
            curve.seeds[0].1.recipe = format!("[arms]\n{arms}").parse().unwrap();
            curve.has_strong_ablation()
        };
        assert!(with("router_noise_train = 0.3") && with("rollout_mantissa_bits = 3"));
        assert!(!with("router_noise_train = 0.0\nrollout_mantissa_bits = 0\nno_train_sinks = true"));
        assert!(!with("rollout_mantissa_bits = 7") && !curve(&[]).has_strong_ablation());
    }
}
