//! Locates a log-prob mismatch: the positions, rows, tokens or experts of the differing targets.

use super::engine_log_probs::EngineLogProbs;
use std::collections::BTreeMap;

/// Minimum fraction of all differing targets that must be in a group. A group is a set of targets, such as
/// the targets of some rows or of one token. It locates the mismatch only if it meets this limit and the next
/// three.
const RECALL_MIN: f64 = 0.8;
/// Minimum fraction of the group's targets that must differ.
const PRECISION_MIN: f64 = 0.5;
/// Maximum fraction of differing targets outside the group, relative to the fraction inside.
const OUTSIDE_MAX: f64 = 0.25;
/// Minimum number of targets of a group.
const GROUP_TARGETS_MIN: usize = 3;

/// Row, position, token and experts of each target.
pub struct TargetPositions {
    /// Names of the rows.
    pub names: Vec<String>,
    /// Index of each target's row in `names`.
    pub rows: Vec<usize>,
    /// Position of each target in its row.
    pub positions: Vec<usize>,
    /// Routed experts at the position that predicts the target, `[layer][target]`.
    experts: Vec<Vec<Vec<u32>>>,
    pub tokens: Vec<u32>,
}

impl TargetPositions {
    /// Collects the positions and tokens of the targets of `observed`. `names`, `rows` and `experts` are the
    /// fields with the same names.
    pub fn collect(
        observed: &EngineLogProbs,
        names: Vec<String>,
        rows: Vec<usize>,
        experts: Vec<Vec<Vec<u32>>>,
    ) -> Self {
        let (mut positions, mut tokens) = (vec![], vec![]);
        for batch in observed.batches.iter().map(|batch| &batch.micro_batch) {
            positions.extend(batch.rows.iter().map(|&row| batch.positions[row as usize] as usize + 1));
            tokens.extend_from_slice(&batch.targets);
        }
        Self { names, rows, positions, experts, tokens }
    }

    /// Returns the routed experts of `target` at `layer`.
    pub fn experts(&self, layer: usize, target: usize) -> Option<&[u32]> {
        self.experts.get(layer)?.get(target).map(Vec::as_slice)
    }
}

/// The location of the mismatch.
#[derive(Debug, Clone, PartialEq)]
pub struct Location {
    /// Description, such as "positions from 513 on".
    pub description: String,
    /// Fraction of the targets inside the location that differ.
    pub differing_inside: f64,
    /// Fraction of the targets outside the location that differ.
    pub differing_outside: f64,
    /// Number of targets inside the location.
    pub targets: usize,
}

/// How many targets differ by more than a threshold, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct LocationResult {
    /// Number of targets that differ.
    pub differing: usize,
    /// Number of all targets.
    pub targets: usize,
    /// The location that holds most of the differing targets, if there is such a location.
    pub location: Option<Location>,
    /// The first few differing targets: name of the row, position, and difference in nats.
    pub first_differing: Vec<(String, usize, f64)>,
}

/// Locates the targets whose difference exceeds `threshold`, in nats.
pub fn locate(targets: &TargetPositions, differences: &[f64], threshold: f64) -> LocationResult {
    let differing: Vec<bool> = differences.iter().map(|difference| difference.abs() > threshold).collect();
    let total = differing.iter().filter(|differs| **differs).count();
    let mut best: Option<(f64, Location)> = None;
    let mut try_group = |description: &dyn Fn() -> String, inside: &[usize]| {
        if inside.len() < GROUP_TARGETS_MIN || inside.len() == differences.len() || total == 0 {
            return;
        }
        let hits = inside.iter().filter(|&&t| differing[t]).count();
        let outside = differences.len() - inside.len();
        let (precision, outside_rate) =
            (hits as f64 / inside.len() as f64, (total - hits) as f64 / outside as f64);
        let recall = hits as f64 / total as f64;
        if recall < RECALL_MIN || precision < PRECISION_MIN || outside_rate > OUTSIDE_MAX * precision {
            return;
        }
        // F1 score, in which precision and recall have equal weight.
        let score = 2.0 * precision * recall / (precision + recall);
        if best.as_ref().is_none_or(|(other, _)| score > *other) {
            let location = Location {
                description: description(),
                differing_inside: precision,
                differing_outside: outside_rate,
                targets: inside.len(),
            };
            best = Some((score, location));
        }
    };
    let group_by = |keys: &mut dyn Iterator<Item = usize>| -> BTreeMap<usize, Vec<usize>> {
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        keys.enumerate().for_each(|(target, key)| groups.entry(key).or_default().push(target));
        groups
    };
    // Groups by position: the targets before a boundary, and the targets from the boundary on.
    let longest = targets.positions.iter().copied().max().unwrap_or(0);
    for boundary in boundaries(targets, &differing, longest) {
        let side = |keep: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (0..differences.len()).filter(|&t| keep(targets.positions[t])).collect()
        };
        try_group(&|| format!("positions from {boundary} on"), &side(&|p| p >= boundary));
        try_group(&|| format!("positions before {boundary}"), &side(&|p| p < boundary));
    }
    let rows = group_by(&mut targets.rows.iter().copied());
    // A group of rows: all rows in which at least half of the targets differ.
    let (mut differing_rows, mut row_targets): (Vec<usize>, Vec<usize>) = (vec![], vec![]);
    for (row, targets) in &rows {
        if targets.iter().filter(|&&t| differing[t]).count() as f64 >= PRECISION_MIN * targets.len() as f64 {
            differing_rows.push(*row);
            row_targets.extend(targets);
        }
    }
    if differing_rows.len() < rows.len() {
        try_group(
            &|| {
                format!(
                    "row{} {}",
                    if differing_rows.len() == 1 { "" } else { "s" },
                    list_rows(&differing_rows, &targets.names)
                )
            },
            &row_targets,
        );
    }
    for (token, targets) in group_by(&mut targets.tokens.iter().map(|&token| token as usize)) {
        try_group(&|| format!("targets of token {token}"), &targets);
    }
    for (layer, layer_experts) in targets.experts.iter().enumerate() {
        let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (target, experts) in layer_experts.iter().enumerate() {
            experts.iter().for_each(|&expert| groups.entry(expert).or_default().push(target));
        }
        for (expert, targets) in groups {
            try_group(&|| format!("tokens that go through expert {expert} of layer {layer}"), &targets);
        }
    }
    let first_differing = (0..differences.len()).filter(|&t| differing[t]).take(5);
    LocationResult {
        differing: total,
        targets: differences.len(),
        location: best.map(|(_, location)| location),
        first_differing: first_differing
            .map(|t| (targets.names[targets.rows[t]].clone(), targets.positions[t], differences[t]))
            .collect(),
    }
}

/// Returns up to two positions at which differences may begin or end. All rows are counted together.
fn boundaries(targets: &TargetPositions, differing: &[bool], longest: usize) -> Vec<usize> {
    // For each position: number of differing targets, number of all targets.
    let mut counts = vec![(0usize, 0usize); longest + 2];
    for (position, differing) in targets.positions.iter().zip(differing) {
        counts[*position].0 += usize::from(*differing);
        counts[*position].1 += 1;
    }
    let differing_count: usize = counts.iter().map(|count| count.0).sum();
    let targets_count: usize = counts.iter().map(|count| count.1).sum();
    // The fraction of the differing targets that are before a boundary, minus the fraction of all targets
    // that are before it. This value is lowest where differences begin, and highest where they end.
    let (mut differing_before, mut targets_before) = (0usize, 0usize);
    let ((mut lowest, mut begin), (mut highest, mut end)) = ((0.0f64, 0usize), (0.0f64, 0usize));
    for (position, (differing, targets)) in counts.iter().enumerate() {
        let excess = differing_before as f64 / differing_count.max(1) as f64
            - targets_before as f64 / targets_count.max(1) as f64;
        if excess < lowest {
            (lowest, begin) = (excess, position);
        }
        if excess > highest {
            (highest, end) = (excess, position);
        }
        differing_before += differing;
        targets_before += targets;
    }
    vec![begin, end].into_iter().filter(|&boundary| boundary > 1).collect()
}

fn list_rows(rows: &[usize], names: &[String]) -> String {
    let shown: Vec<&str> = rows.iter().take(8).map(|&row| names[row].as_str()).collect();
    let hidden_count = rows.len().saturating_sub(shown.len());
    if hidden_count == 0 { shown.join(", ") } else { format!("{} and {hidden_count} more", shown.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets() -> TargetPositions {
        let rows = 8;
        let length = 100;
        let targets = rows * length;
        TargetPositions {
            names: (1..=rows).map(|row| row.to_string()).collect(),
            rows: (0..targets).map(|t| t / length).collect(),
            positions: (0..targets).map(|t| t % length + 1).collect(),
            experts: vec![(0..targets).map(|t| vec![(t % 5) as u32, 5 + (t % 3) as u32]).collect()],
            tokens: (0..targets).map(|t| (t * 7 % 11) as u32).collect(),
        }
    }

    #[test]
    fn a_mismatch_is_located_where_it_was_put() {
        let targets = targets();
        let located = |differing: &dyn Fn(usize) -> bool| {
            let differences: Vec<f64> = (0..800).map(|t| if differing(t) { -0.5 } else { 1e-5 }).collect();
            locate(&targets, &differences, 1e-3)
        };
        let description = |result: LocationResult| result.location.map(|l| l.description).unwrap_or_default();
        assert_eq!(description(located(&|t| t % 100 >= 59)), "positions from 60 on");
        assert_eq!(description(located(&|t| t % 100 < 20)), "positions before 21");
        assert_eq!(description(located(&|t| t / 100 == 2 || t / 100 == 6)), "rows 3, 7");
        assert_eq!(description(located(&|t| t % 5 == 3)), "tokens that go through expert 3 of layer 0");
        assert_eq!(description(located(&|t| t * 7 % 11 == 4)), "targets of token 4");
        let scattered = located(&|t| t * 31 % 97 == 5);
        assert_eq!(scattered.location, None);
        assert_eq!((scattered.differing, scattered.first_differing.len()), (8, 5));
    }
}
