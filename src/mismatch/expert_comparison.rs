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
    pub differ_by_layer: Vec<f64>,
    /// Share of targets with another set in any layer.
    pub differ: f64,
    /// Median |Δlogp| of targets with other experts in some layer, and of the remaining targets.
    pub medians: (f64, f64),
}

impl ExpertComparison {
    /// Compares the routed experts of `rows`; `None` if no row has any. `gaps` are those of the targets at
    /// `places`.
    pub fn from_rows(rows: &[TokenRow], places: &TargetPositions, gaps: &[f64]) -> Option<Self> {
        let layers = rows.iter().find_map(|row| row.routes.as_ref())?.layers;
        let mut differing = vec![0usize; layers];
        let (mut elsewhere, mut alike) = (vec![], vec![]);
        for (target, gap) in gaps.iter().enumerate() {
            let Some(routes) = &rows[places.rows[target]].routes else { continue };
            let mut same = true;
            for (layer, count) in differing.iter_mut().enumerate() {
                // The target is predicted from the position before it.
                let theirs = routes.at(places.positions[target] - 1, layer)?;
                let ours = places.experts(layer, target)?;
                if !ours.iter().all(|expert| theirs.contains(expert)) {
                    *count += 1;
                    same = false;
                }
            }
            if same { alike.push(*gap) } else { elsewhere.push(*gap) }
        }
        let targets = elsewhere.len() + alike.len();
        let share = |count: usize| count as f64 / targets.max(1) as f64;
        Some(Self {
            targets,
            differ_by_layer: differing.into_iter().map(share).collect(),
            differ: share(elsewhere.len()),
            medians: (
                DifferenceStats::from_differences(&elsewhere).median,
                DifferenceStats::from_differences(&alike).median,
            ),
        })
    }

    /// Returns the comparison as text.
    pub fn to_text(&self) -> String {
        let layers: Vec<String> =
            self.differ_by_layer.iter().map(|share| format!("{:.1}%", 100.0 * share)).collect();
        let (elsewhere, alike) = self.medians;
        let lives = match () {
            () if self.differ == 0.0 => "the gap is not one of routing",
            () if alike * 4.0 < elsewhere => "the gap lives on them",
            () => "the gap does not live on them alone",
        };
        format!(
            " Experts: {:.1}% of {} tokens went through others in some layer (by layer {}); {lives} (median |Δlogp| {} there, {} elsewhere).",
            100.0 * self.differ,
            self.targets,
            layers.join(", "),
            format_number(elsewhere),
            format_number(alike)
        )
    }

    /// Returns the comparison for `mismatch.json`.
    pub fn to_json(&self) -> Value {
        json!({
            "tokens": self.targets,
            "differ": self.differ,
            "differ_by_layer": self.differ_by_layer,
            "median_where_they_differ": self.medians.0,
            "median_elsewhere": self.medians.1,
        })
    }
}
