//! Compares the engine's routed experts with this model's. Shows how many tokens have different experts in
//! each layer, and whether the log-prob mismatch is on those tokens.

use super::distance::DifferenceStats;
use super::locate::TargetPositions;
use super::rows::TokenRow;
use crate::metrics::format_number;
use serde_json::{Value, json};

/// How often the engine's routed experts differ from this model's.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertComparison {
    /// Number of targets whose routed experts are known.
    pub targets: usize,
    /// Fraction of targets with a different set of experts, for each layer.
    pub differing_by_layer: Vec<f64>,
    /// Fraction of targets with a different set of experts in at least one layer.
    pub differing_share: f64,
    /// Median |Δlogp| of the targets with different experts in at least one layer.
    pub median_differing: f64,
    /// Median |Δlogp| of the targets with the same experts in all layers.
    pub median_same: f64,
}

impl ExpertComparison {
    /// Compares the routed experts of `rows`; `None` if no row has routed experts. `targets` and
    /// `differences` have one entry per target.
    pub fn from_rows(rows: &[TokenRow], targets: &TargetPositions, differences: &[f64]) -> Option<Self> {
        let layers = rows.iter().find_map(|row| row.routed_experts.as_ref())?.layers;
        let mut differing_counts = vec![0usize; layers];
        let (mut differing_differences, mut same_differences) = (vec![], vec![]);
        for (target, difference) in differences.iter().enumerate() {
            let Some(experts) = &rows[targets.rows[target]].routed_experts else { continue };
            let mut same = true;
            for (layer, count) in differing_counts.iter_mut().enumerate() {
                // The target is predicted at the position before it.
                let engine_experts = experts.get(targets.positions[target] - 1, layer)?;
                let model_experts = targets.experts(layer, target)?;
                if !model_experts.iter().all(|expert| engine_experts.contains(expert)) {
                    *count += 1;
                    same = false;
                }
            }
            if same { same_differences.push(*difference) } else { differing_differences.push(*difference) }
        }
        let targets = differing_differences.len() + same_differences.len();
        let share = |count: usize| count as f64 / targets.max(1) as f64;
        Some(Self {
            targets,
            differing_by_layer: differing_counts.into_iter().map(share).collect(),
            differing_share: share(differing_differences.len()),
            median_differing: DifferenceStats::from_differences(&differing_differences).median,
            median_same: DifferenceStats::from_differences(&same_differences).median,
        })
    }

    /// Returns the comparison as text.
    pub fn to_text(&self) -> String {
        let layers: Vec<String> =
            self.differing_by_layer.iter().map(|share| format!("{:.1}%", 100.0 * share)).collect();
        let relation = match () {
            () if self.differing_share == 0.0 => "the mismatch does not come from routing",
            () if self.median_same * 4.0 < self.median_differing => "the mismatch is on these tokens",
            () => "the mismatch is not on these tokens alone",
        };
        format!(
            " Experts: the engine routed {:.1}% of {} tokens to other experts in at least one layer (by layer {}); {relation} (median |Δlogp| {} on these tokens, {} on the other tokens).",
            100.0 * self.differing_share,
            self.targets,
            layers.join(", "),
            format_number(self.median_differing),
            format_number(self.median_same)
        )
    }

    /// Returns the comparison for `mismatch.json`.
    pub fn to_json(&self) -> Value {
        json!({
            "tokens": self.targets,
            "differ": self.differing_share,
            "differ_by_layer": self.differing_by_layer,
            "median_where_they_differ": self.median_differing,
            "median_elsewhere": self.median_same,
        })
    }
}
