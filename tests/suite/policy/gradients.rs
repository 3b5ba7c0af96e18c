//! Every hand-derived gradient against central differences of its value.

use super::entropy::entropy;
use super::fixture::{AGGREGATIONS, Fixture, objectives, rng, whole_batch};
use super::load_balance::load_balance;
use super::trl::{TrlConfig, TrlObjective, trl};
use rand::Rng;
use rloss::policy::Aggregation;
use rloss::policy::divergence::{KlEstimator, kl_loss};
use rloss::policy::loss::{ClipRange, LossInput};
use rloss::policy::value::value_loss;

/// Exact in f32 on the fixture's grid; the truncation error of a central difference is of the order of its
/// square.
const STEP: f32 = 1.0 / 1024.0;

/// Compares `gradient` with differences of `value(token, step)` at every valid token, and with 0 elsewhere.
fn check(what: &str, mask: &[bool], gradient: &[f32], value: impl Fn(usize, f32) -> f64) {
    let mut moving = 0;
    for (token, &g) in gradient.iter().enumerate() {
        if !mask[token] {
            assert_eq!(g, 0.0, "{what}: token {token} is masked");
            continue;
        }
        let difference = (value(token, STEP) - value(token, -STEP)) / (2.0 * f64::from(STEP));
        let error = (f64::from(g) - difference).abs();
        assert!(error <= 1e-6 + 1e-5 * difference.abs(), "{what}: token {token}: {g} for {difference}");
        moving += usize::from(difference != 0.0);
    }
    assert!(moving > 5, "{what}: only {moving} tokens have a gradient");
}

#[test]
fn policy_losses_have_the_gradient_of_their_value() {
    for seed in 0..20 {
        let batch = Fixture::new(seed);
        for aggregation in AGGREGATIONS {
            let normalizer = whole_batch(aggregation, &batch.sequences());
            for (name, objective) in objectives() {
                // GSPO's token form is the derivative of the sequence's loss when its tokens weigh the same.
                let weighted = name != "gspo";
                let value = |batch: &Fixture| {
                    let weights = weighted.then_some(batch.weights.as_slice());
                    objective.loss(&LossInput { weights, ..batch.input() }, &normalizer, 8).unwrap()
                };
                check(
                    &format!("seed {seed} {name} {aggregation:?}"),
                    &batch.mask,
                    &value(&batch).grad_log_prob,
                    |token, step| {
                        let mut moved = batch.clone();
                        moved.log_prob[token] += step;
                        // A detached weight: the anchor moves along, which keeps the ratio.
                        if ["cispo", "dppo_tv", "dppo_kl", "vespo"].contains(&name) {
                            moved.old_log_prob[token] += step;
                        }
                        value(&moved).loss
                    },
                );
            }
        }
    }
}

#[test]
fn trl_losses_have_the_gradient_of_their_value() {
    let range = ClipRange::new(0.2, 0.28).unwrap();
    for seed in 0..20 {
        let batch = Fixture::new(seed);
        let reference: Vec<f32> = batch.old_log_prob.iter().map(|o| o - 0.25).collect();
        let normalizer = whole_batch(Aggregation::SequenceMeanTokenMean, &batch.sequences());
        for (objective, sequence_level) in [
            (TrlObjective::OutputClipper { range, delta: None }, false),
            (TrlObjective::OutputClipper { range, delta: Some(2.0) }, false),
            (TrlObjective::OutputClipper { range, delta: Some(2.0) }, true),
            (TrlObjective::Cispo { ratio_max: 1.28 }, false),
        ] {
            let detached = matches!(objective, TrlObjective::Cispo { .. });
            // Under the shift that keeps CISPO's ratio the reference would have to move too, so it goes
            // without.
            let kl = (!detached).then_some((0.5, reference.as_slice()));
            let config = TrlConfig { objective, sequence_level, kl };
            let value = |batch: &Fixture| trl(&batch.input(), &config, &normalizer).unwrap().0;
            let what = format!("seed {seed} {objective:?} {sequence_level}");
            check(&what, &batch.mask, &value(&batch).grad_log_prob, |token, step| {
                let mut moved = batch.clone();
                moved.log_prob[token] += step;
                if detached {
                    moved.old_log_prob[token] += step;
                }
                value(&moved).loss
            });
        }
    }
}

#[test]
fn divergences_have_the_gradient_of_their_value_or_of_k2() {
    let batch = Fixture::new(3);
    let sequences = batch.sequences();
    let normalizer = whole_batch(Aggregation::TokenMean, &sequences);
    // A gap of 0 is a kink of the absolute value.
    let reference: Vec<f32> = batch.old_log_prob.iter().map(|o| o - 0.03125).collect();
    for (estimator, straight) in [
        (KlEstimator::K1, Some(KlEstimator::K1StraightThrough)),
        (KlEstimator::Abs, Some(KlEstimator::AbsStraightThrough)),
        (KlEstimator::K2, None),
        (KlEstimator::K3, Some(KlEstimator::K3StraightThrough)),
    ] {
        let loss = |estimator, log_prob: &[f32]| {
            kl_loss(&sequences, log_prob, &reference, estimator, &normalizer).unwrap()
        };
        let (value, gradient) = loss(estimator, &batch.log_prob);
        check(&format!("{estimator:?}"), &batch.mask, &gradient, |token, step| {
            let mut moved = batch.log_prob.clone();
            moved[token] += step;
            loss(estimator, &moved).0
        });
        let Some(straight) = straight else { continue };
        let (_, k2_gradient) = loss(KlEstimator::K2, &batch.log_prob);
        assert_eq!(loss(straight, &batch.log_prob), (value, k2_gradient));
    }
}

#[test]
fn the_value_loss_has_the_gradient_of_its_value() {
    let batch = Fixture::new(4);
    let sequences = batch.sequences();
    let normalizer = whole_batch(Aggregation::TokenMean, &sequences);
    let returns: Vec<f32> = batch.advantages.iter().map(|a| a - 1.0).collect();
    let loss = |values: &[f32]| {
        value_loss(&sequences, values, &batch.old_log_prob, &returns, 0.25, &normalizer).unwrap()
    };
    let result = loss(&batch.log_prob);
    assert!(result.clipped.value() > 0.0 && result.clipped.value() < 1.0);
    check("value", &batch.mask, &result.grad_values, |token, step| {
        let mut moved = batch.log_prob.clone();
        moved[token] += step;
        loss(&moved).loss
    });
}

#[test]
fn the_entropy_has_the_gradient_of_its_value() {
    const VOCABULARY: usize = 7;
    let batch = Fixture::new(5);
    let sequences = batch.sequences();
    let normalizer = whole_batch(Aggregation::SequenceMeanTokenMean, &sequences);
    let rng = &mut rng(6);
    let logits: Vec<f32> =
        (0..sequences.tokens() * VOCABULARY).map(|_| rng.random_range(-3.0..3.0)).collect();
    let value = |logits: &[f32]| entropy(&sequences, logits, VOCABULARY, &normalizer).unwrap();
    let result = value(&logits);
    let mask: Vec<bool> = batch.mask.iter().flat_map(|&m| [m; VOCABULARY]).collect();
    check("entropy", &mask, &result.grad_logits, |i, step| {
        let mut moved = logits.clone();
        moved[i] += step;
        value(&moved).entropy
    });
    let impossible = [0.0, f32::NEG_INFINITY, 0.0];
    let one = [true];
    let single = rloss::policy::Sequences::new(&[0, 1], &one).unwrap();
    let result = entropy(&single, &impossible, 3, &normalizer).unwrap();
    assert!((f64::from(result.token_entropy[0]) - 2f64.ln()).abs() < 1e-6);
    assert!(result.grad_logits.iter().all(|g| g.abs() < 1e-6));
}

#[test]
fn the_load_balancing_loss_is_k_when_even_and_most_when_one_expert_takes_all() {
    let even = load_balance(&[4, 4, 4, 4], &[0.25; 4], 8).unwrap();
    assert_eq!((even.loss, even.grad_mean_probability), (2.0, vec![2.0; 4]));
    let all = load_balance(&[8, 0, 0, 0], &[1.0, 0.0, 0.0, 0.0], 8).unwrap();
    assert_eq!(all.loss, 4.0);
    assert!(load_balance(&[1], &[0.5, 0.5], 1).is_err() && load_balance(&[0], &[1.0], 0).is_err());
}
