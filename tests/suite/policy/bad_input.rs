//! Settings that cannot mean anything are refused with the reason.

use super::fixture::{Fixture, whole_batch};
use super::trl::{TrlConfig, TrlObjective, trl};
use super::verl::verl_rules;
use crate::cli::bad_input;
use rloss::policy::advantage::{gae, whiten};
use rloss::policy::correction::{RejectOption, RejectionRule, WeightBound};
use rloss::policy::kl_in_reward::KlController;
use rloss::policy::loss::{CispoClip, ClipRange, PpoClip};
use rloss::policy::ratio::OldLogProbSource;
use rloss::policy::shaping::OverlongPenalty;
use rloss::policy::value::value_loss;
use rloss::policy::{Aggregation, BatchSize, Normalizer, Sequences};
use rloss::settings::Choice;

#[track_caller]
fn refused<T>(result: anyhow::Result<T>, reason: &str) {
    bad_input(result, &[reason]);
}

#[test]
fn clip_ranges_outside_their_interval_are_refused() {
    for (low, high, reason) in [
        (0.0, 0.2, "low"),
        (1.0, 0.2, "low"),
        (0.2, -0.1, "high"),
        (0.2, 1.5, "between 0 and 1"),
        (f64::NAN, 0.2, "low"),
    ] {
        refused(ClipRange::new(low, high), reason);
    }
    let range = ClipRange::new(0.2, 0.28).unwrap();
    for dual in [0.5, 1.0, f64::NAN, f64::INFINITY] {
        refused(PpoClip::new(range, Some(dual)), "must exceed 1");
    }
    refused(CispoClip::new(1.5, 0.28), "low");
    refused(CispoClip::new(0.2, 0.0), "high");
    let batch = Fixture::new(0);
    let normalizer = whole_batch(Aggregation::TokenMean, &batch.sequences());
    for (objective, reason) in [
        (TrlObjective::OutputClipper { range, delta: Some(1.2) }, "delta"),
        (TrlObjective::Cispo { ratio_max: 0.0 }, "positive"),
    ] {
        let config = TrlConfig { objective, sequence_level: false, kl: None };
        refused(trl(&batch.input(), &config, &normalizer), reason);
    }
}

#[test]
fn bounds_of_the_correction_are_checked() {
    refused(WeightBound::new(&[2.0, 0.5]), "is above the upper bound");
    refused(WeightBound::new(&[0.0]), "positive");
    refused(WeightBound::new(&[-1.0, 2.0]), "give a positive bound");
    refused(WeightBound::new(&[1.0, 2.0, 3.0]), "a lower and an upper bound");

    use RejectOption::{SeqSumK2, TokenK1, TokenK3};
    refused(RejectionRule::new(TokenK1, &[0.5]), "empty");
    refused(RejectionRule::new(TokenK1, &[2.0, 0.5]), "is above the upper bound");
    refused(RejectionRule::new(TokenK1, &[0.0, 2.0]), "positive");
    refused(RejectionRule::new(TokenK1, &[f64::INFINITY]), "positive");
    refused(RejectionRule::new(TokenK1, &[]), "one bound on the ratio");
    refused(RejectionRule::new(SeqSumK2, &[0.5, 2.0]), "one upper bound");
    refused(RejectionRule::new(TokenK3, &[0.0]), "positive");
    for option in RejectOption::all() {
        assert_eq!(RejectionRule::new(option, &[2.0]).unwrap().option, option);
    }
}

/// verl bounds −log ρ, so its [0.5, 3] is [1/3, 2] on π_train/π_rollout.
#[test]
fn verl_bounds_on_k1_are_inverted() {
    let rule = |bounds: &[f64]| RejectionRule::new(RejectOption::TokenK1, bounds).unwrap();
    assert_eq!(verl_rules("token_k1", Some("0.5_4.0")).unwrap(), [rule(&[0.25, 2.0])]);
    assert_eq!(rule(&[2.0]), rule(&[0.5, 2.0]));
}

#[test]
fn other_settings_are_checked() {
    let mask = [true, true, false];
    let sequences = Sequences::new(&[0, 3], &mask).unwrap();
    let values = [0.0; 3];
    refused(Normalizer::new(Aggregation::Constant, BatchSize::from_sequences(&sequences, 0)), "at least 1");
    refused(gae(&sequences, &values, &values, 1.5, 1.0), "gamma");
    refused(gae(&sequences, &values, &values, 1.0, -0.1), "lambda");
    let single = [true, false, false];
    refused(whiten(&Sequences::new(&[0, 3], &single).unwrap(), &values), "at least two");
    refused(KlController::adaptive(0.1, 0.0, 100.0), "target");
    refused(OverlongPenalty::new(100, 0, 1.0), "buffer");
    refused(OverlongPenalty::new(100, 200, 1.0), "buffer");
    refused(OverlongPenalty::new(100, 20, -1.0), "penalty");
    let normalizer = whole_batch(Aggregation::TokenMean, &sequences);
    refused(value_loss(&sequences, &values, &values, &values, 0.0, &normalizer), "value clip");
    refused(OldLogProbSource::Detach.select(&values, &values, None, 4), "detach");
    refused(OldLogProbSource::Recompute.select(&values, &values, None, 1), "recompute");
}
