//! What other tools offer under a name of their own and the recipe's keys already say: docs/POLICY.md
//! lists it.

use super::fixture::{AGGREGATIONS, Fixture, whole_batch};
use super::trl::{TrlConfig, TrlObjective, trl};
use rloss::policy::Aggregation;
use rloss::policy::loss::{CispoClip, ClipRange, Gspo, LossFunction, LossInput, PpoClip};

/// Compares a loss of ours with one of TRL's, weights of single tokens included where `weighted`.
fn same(weighted: bool, objective: TrlObjective, sequence_level: bool, ours: &dyn LossFunction) {
    for (seed, aggregation) in (0..10).flat_map(|seed| AGGREGATIONS.map(|a| (seed, a))) {
        let batch = Fixture::new(seed);
        let normalizer = whole_batch(aggregation, &batch.sequences());
        let input = LossInput { weights: weighted.then_some(&batch.weights), ..batch.input() };
        let config = TrlConfig { objective, sequence_level, kl: None };
        let (theirs, _) = trl(&input, &config, &normalizer).unwrap();
        let ours = ours.loss(&input, &normalizer, 0).unwrap();
        let what = format!("{objective:?}, seed {seed}, {aggregation:?}");
        assert!((ours.loss - theirs.loss).abs() <= 1e-9, "{what}: {} for {}", ours.loss, theirs.loss);
        for (token, (a, b)) in ours.grad_log_prob.iter().zip(&theirs.grad_log_prob).enumerate() {
            assert!((a - b).abs() <= 1e-7 * (1.0 + b.abs()), "{what}, token {token}: {a} for {b}");
        }
    }
}

#[test]
fn the_two_sided_clip_is_the_dual_clip() {
    let range = ClipRange::new(0.2, 0.28).unwrap();
    for delta in [1.5, 3.0] {
        let clip = PpoClip::new(range, Some(delta)).unwrap();
        let theirs = TrlObjective::OutputClipper { range, delta: Some(delta) };
        same(true, theirs, false, &clip);
    }
    let clip = PpoClip::new(range, None).unwrap();
    let theirs = TrlObjective::OutputClipper { range, delta: None };
    same(true, theirs, false, &clip);
}

#[test]
fn importance_sampling_at_sequence_level_is_gspo() {
    let range = ClipRange::new(0.2, 0.28).unwrap();
    let theirs = TrlObjective::OutputClipper { range, delta: None };
    same(false, theirs, true, &Gspo(range));
}

#[test]
fn a_weight_bounded_above_only_is_cispo_with_an_open_lower_bound() {
    for ratio_max in [1.28, 5.0] {
        let clip = CispoClip::new(1.0, ratio_max - 1.0).unwrap();
        let theirs = TrlObjective::Cispo { ratio_max };
        same(true, theirs, false, &clip);
    }
}

/// `grpo` over sequences that all have tokens, `bnpo` and `dapo`, `dr_grpo`: TRL's divisors, written out.
#[test]
fn loss_types_are_aggregations() {
    let batch = Fixture::new(1);
    let sequences = batch.sequences();
    let rows: Vec<Vec<usize>> =
        sequences.token_ranges().map(|row| sequences.valid_indices(row).collect()).collect();
    let value = |token: usize| f64::from(batch.advantages[token]);
    let sums: Vec<f64> = rows.iter().map(|row| row.iter().map(|&t| value(t)).sum()).collect();
    let (tokens, with_tokens) = (sequences.valid_tokens() as f64, sequences.valid_sequences() as f64);
    let means: f64 = sums.iter().zip(&rows).map(|(sum, row)| sum / row.len().max(1) as f64).sum();
    let total: f64 = sums.iter().sum();
    for (aggregation, expected) in [
        (Aggregation::SequenceMeanTokenMean, means / with_tokens),
        (Aggregation::TokenMean, total / tokens),
        (Aggregation::Constant, total / (with_tokens * 16.0)),
    ] {
        let normalizer = whole_batch(aggregation, &sequences);
        let (found, _) = normalizer.reduce(&sequences, |_, token| (value(token), 0.0));
        assert!((found - expected).abs() < 1e-9, "{aggregation:?}: {found} for {expected}");
    }
}
