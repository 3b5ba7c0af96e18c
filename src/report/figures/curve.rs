//! The runs behind one curve: several seeds of one recipe.

use super::manifest;
use crate::bad_input;
use crate::metrics::Phase;
use crate::report::plot::{Points, Series};
use crate::report::run::Run;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// From so many stored mantissa bits on, a rollout's rounding is one that machines make: bf16 has 7.
const MANTISSA_BITS_REAL: i64 = 7;

/// One recipe's runs.
pub(super) struct Curve {
    pub label: String,
    /// (seed, run), in the order of the seeds; empty when none has been run.
    pub seeds: Vec<(u64, Run)>,
}

impl Curve {
    /// Reads `<folder>/<recipe>/seed-*`.
    pub fn load(folder: &Path, curve: &manifest::Curve) -> Result<Curve> {
        let folder = folder.join(&curve.recipe);
        let mut seeds = Vec::new();
        if folder.is_dir() {
            let entries = std::fs::read_dir(&folder)
                .map_err(|e| bad_input!("{}: cannot be listed ({e}).", folder.display()))?;
            for path in entries.flatten().map(|entry| entry.path()) {
                let name = path.file_name().and_then(|name| name.to_str()).and_then(|n| n.strip_prefix("seed-"));
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

    /// Whether an arm of the runs is stronger than what is met in practice: noise on the router's logits, or a rollout
    /// with a mantissa shorter than bf16's.
    pub fn exaggerated(&self) -> bool {
        let Some(arms) = self.seeds.first().and_then(|(_, run)| run.recipe.get("arms")) else { return false };
        let noise = ["router_noise", "router_noise_rollout", "router_noise_train"];
        let noisy = noise.iter().any(|key| arms.get(key).and_then(toml::Value::as_float).is_some_and(|s| s > 0.0));
        let bits = arms.get("rollout_mantissa_bits").and_then(toml::Value::as_integer).unwrap_or(0);
        noisy || (bits > 0 && bits < MANTISSA_BITS_REAL)
    }

    /// The values of `metric` for each seed.
    pub fn values(&self, phase: Phase, metric: &str) -> Vec<Points> {
        self.seeds.iter().map(|(_, run)| run.series(phase, metric)).collect()
    }

    /// The mean over the seeds, on a log axis that of the logarithm, between the smallest and the largest value.
    /// On a log axis what is below `floor` stands at it.
    pub fn series(&self, index: usize, phase: Phase, metric: &str, floor: Option<f64>) -> Series {
        let mut steps: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for (step, value) in self.values(phase, metric).into_iter().flatten().filter(|(_, value)| value.is_finite()) {
            steps.entry(step).or_default().push(floor.map_or(value, |floor| value.max(floor)));
        }
        let mean = |values: &[f64]| {
            let scaled = values.iter().map(|&v| if floor.is_some() { v.ln() } else { v });
            let mean = scaled.sum::<f64>() / values.len() as f64;
            if floor.is_some() { mean.exp() } else { mean }
        };
        let end = |pick: fn(f64, f64) -> f64| -> Points {
            let ends = steps.iter().filter_map(|(&step, values)| Some((step, values.iter().copied().reduce(pick)?)));
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
