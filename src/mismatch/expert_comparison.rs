//! Compares the engine's routed experts with ours: the share of tokens with other experts by layer, and
//! whether these tokens have the log-prob mismatch.

use super::distance::DifferenceStats;
use super::locate::TargetPositions;
use super::rows::TokenRow;
use crate::metrics::format_number;
use serde_json::{Value, json};

/// Shares of targets with other experts than ours, if routed experts are known.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertComparison {
    pub targets: usize,
    /// Share of targets with another set of experts, by layer.
    pub differing_by_layer: Vec<f64>,
    /// Share of targets with another set in any layer.
    pub differing_share: f64,
    /// Median |Δlogp|: first of targets routed to different experts in at least one layer, then of all other
    /// targets.
    pub medians: (f64, f64),
}

impl ExpertComparison {
    /// Compares the routed experts of `rows`; `None` if no row has any. `differences` are those of the
    /// targets at `targets`.
    pub fn from_rows(rows: &[TokenRow], targets: &TargetPositions, differences: &[f64]) -> Option<Self> {
        let layers = rows.iter().find_map(|row| row.routes.as_ref())?.layers;
        let mut differing = vec![0usize; layers];
        let (mut with_other_experts, mut with_same_experts) = (vec![], vec![]);
        for (target, difference) in differences.iter().enumerate() {
            let Some(routes) = &rows[targets.rows[target]].routes else { continue };
            let mut same = true;
            for (layer, count) in differing.iter_mut().enumerate() {
                // The target is predicted from the position before it.
                let theirs = routes.at(targets.positions[target] - 1, layer)?;
                let ours = targets.experts(layer, target)?;
                if !ours.iter().all(|expert| theirs.contains(expert)) {
                    *count += 1;
                    same = false;
                }
            }
            if same { with_same_experts.push(*difference) } else { with_other_experts.push(*difference) }
        }
        let targets = with_other_experts.len() + with_same_experts.len();
        let share = |count: usize| count as f64 / targets.max(1) as f64;
        Some(Self {
            targets,
            differing_by_layer: differing.into_iter().map(share).collect(),
            differing_share: share(with_other_experts.len()),
            medians: (
                DifferenceStats::from_differences(&with_other_experts).median,
                DifferenceStats::from_differences(&with_same_experts).median,
            ),
        })
    }

    /// Returns the comparison as text.
    pub fn to_text(&self) -> String {
        let layers: Vec<String> =
            self.differing_by_layer.iter().map(|share| format!("{:.1}%", 100.0 * share)).collect();
        let (with_other_experts, with_same_experts) = self.medians;
        let relation = match () {
            () if self.differing_share == 0.0 => "the mismatch does not come from routing",
            () if with_same_experts * 4.0 < with_other_experts => "the mismatch is on these tokens",
            () => "the mismatch is not on these tokens alone",
        };
        format!(
            " Experts: the engine routed {:.1}% of {} tokens to other experts in some layer (by layer {}); {relation} (median |Δlogp| {} on them, {} on the others).",
            100.0 * self.differing_share,
            self.targets,
            layers.join(", "),
            format_number(with_other_experts),
            format_number(with_same_experts)
        )
    }

    /// Returns the comparison for `mismatch.json`.
    pub fn to_json(&self) -> Value {
        json!({
            "tokens": self.targets,
            "differ": self.differing_share,
            "differ_by_layer": self.differing_by_layer,
            "median_where_they_differ": self.medians.0,
            "median_elsewhere": self.medians.1,
        })
    }
}
