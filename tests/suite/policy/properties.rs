//! What holds for every batch.

use super::fixture::{AGGREGATIONS, Fixture, objectives, rng, whole_batch};
use super::*;
use rand::Rng;
use rand::seq::SliceRandom;
use rloss::policy::advantage::{
    dr_grpo, gae, grpo, grpo_batch_std, informative_groups, maxrl, reinforce_plus_plus, remax, rloo, whiten,
};
use rloss::policy::alarm::alarm;
use rloss::policy::correction::{CorrectionRules, correct};
use rloss::policy::loss::{LossInput, PolicyLoss};
use rloss::policy::off_policy::agreement_metrics;
use rloss::policy::ratio::OldLogProbSource;
use rloss::policy::shaping::OverlongPenalty;
use rloss::policy::{Aggregation, Sequences};

type OfGroups = fn(&[f32], &[usize]) -> anyhow::Result<Vec<f32>>;

/// Those under which a group of one keeps its reward.
const ESTIMATORS: [(&str, OfGroups); 3] = [("grpo", grpo), ("dr_grpo", dr_grpo), ("rloo", rloo)];

const BATCH_STD: (&str, OfGroups) = ("grpo_batch_std", grpo_batch_std);

#[test]
fn equal_rewards_give_exactly_zero() {
    for (name, estimate) in ESTIMATORS.into_iter().chain([BATCH_STD]) {
        for reward in [0.9, 0.6, 1.0 / 3.0, -0.1, 1e-30, 3e30, 0.0] {
            for size in 2..70 {
                let advantages = estimate(&vec![reward; size], &[size]).unwrap();
                assert!(advantages.iter().all(|&a| a == 0.0), "{name} {reward} × {size}");
            }
        }
    }
}

/// Tasks that give −1 to wrong answers were refused.
#[test]
fn maxrl_counts_the_least_reward_as_no_success() {
    let signed = maxrl(&[1.0, -1.0, -1.0, -1.0, -1.0, -1.0], &[4, 2], -1.0).unwrap();
    // Successes of 1 in 4: (1 − 1/4) / (1/4), and (0 − 1/4) / (1/4).
    for (found, expected) in signed.iter().zip([3.0, -1.0, -1.0, -1.0, 0.0, 0.0]) {
        assert!((found - expected).abs() <= 1e-5, "{signed:?}");
    }
    let error = maxrl(&[0.0, -0.5], &[2], 0.0).unwrap_err().to_string();
    assert!(error.contains("least reward, 0, as 0: response 1 of the batch has -0.5"), "{error}");
}

#[test]
fn permuting_samples_permutes_advantages() {
    let rng = &mut rng(1);
    for (name, estimate) in ESTIMATORS.into_iter().chain([BATCH_STD]) {
        for size in 2..17 {
            let rewards: Vec<f32> = (0..size).map(|_| rng.random_range(-1.0..1.0)).collect();
            let mut order: Vec<usize> = (0..size).collect();
            order.shuffle(rng);
            let shuffled: Vec<f32> = order.iter().map(|&i| rewards[i]).collect();
            let advantages =
                |rewards: &[f32]| estimate(&[rewards, &[5.0, 7.0]].concat(), &[size, 2]).unwrap();
            let plain = advantages(&rewards);
            let mut moved = advantages(&shuffled);
            moved.truncate(size);
            if name != BATCH_STD.0 {
                // The second group does not matter.
                assert_eq!(moved, estimate(&shuffled, &[size]).unwrap());
            }
            for (&from, moved) in order.iter().zip(moved) {
                assert!((plain[from] - moved).abs() <= 1e-6, "{name}: {} and {moved}", plain[from]);
            }
        }
    }
}

/// Rows of one batch in another order: advantages of single tokens move with them.
#[test]
fn permuting_rows_permutes_advantages_of_tokens() {
    for seed in 0..10 {
        let batch = Fixture::new(seed);
        let mut order: Vec<usize> = (0..8).collect();
        order.shuffle(&mut rng(seed + 100));
        let span = |row: usize| batch.cu_seqlens[row]..batch.cu_seqlens[row + 1];
        let shuffled = |values: &[f32]| -> Vec<f32> {
            order.iter().flat_map(|&row| values[span(row)].to_vec()).collect()
        };
        let mask: Vec<bool> = order.iter().flat_map(|&row| batch.mask[span(row)].to_vec()).collect();
        let mut cu_seqlens = vec![0];
        order.iter().for_each(|&row| cu_seqlens.push(cu_seqlens.last().unwrap() + span(row).len()));
        let (plain, moved) = (batch.sequences(), Sequences::new(&cu_seqlens, &mask).unwrap());
        let rewards: Vec<f32> = (0..8).map(|row| row as f32 / 3.0).collect();
        let moved_rewards: Vec<f32> = order.iter().map(|&row| rewards[row]).collect();
        let (tokens, values) = (&batch.advantages, &batch.log_prob);
        let (moved_tokens, moved_values) = (shuffled(tokens), shuffled(values));
        type Estimate<'a> = &'a dyn Fn(&Sequences, &[f32], &[f32], &[f32]) -> Vec<f32>;
        let estimates: [(&str, Estimate); 4] = [
            ("reinforce_plus_plus", &|s, r, _, _| reinforce_plus_plus(s, r).unwrap().advantages),
            ("baseline", &|s, _, _, g| whiten(s, &s.broadcast(&dr_grpo(g, &[8]).unwrap()).unwrap()).unwrap()),
            ("remax", &|s, r, _, g| remax(s, r, g).unwrap().advantages),
            ("gae", &|s, r, v, _| whiten(s, &gae(s, r, v, 0.9, 0.8).unwrap().advantages).unwrap()),
        ];
        for (name, estimate) in estimates {
            let expected = shuffled(&estimate(&plain, tokens, values, &rewards));
            let found = estimate(&moved, &moved_tokens, &moved_values, &moved_rewards);
            for (token, (a, b)) in found.iter().zip(&expected).enumerate() {
                assert!((a - b).abs() <= 1e-6, "{name}, seed {seed}, token {token}: {a} for {b}");
            }
        }
    }
}

#[test]
fn the_standard_deviation_of_the_batch_scales_every_group_alike() {
    // Groups {1, 3} and {0, 8}: means 2 and 4, the batch's standard deviation is that of 1, 3, 0, 8.
    let std = (38f64 / 3.0).sqrt();
    let advantages = grpo_batch_std(&[1.0, 3.0, 0.0, 8.0], &[2, 2]).unwrap();
    for (advantage, centred) in advantages.iter().zip([-1.0, 1.0, -4.0, 4.0]) {
        assert!((f64::from(*advantage) - centred / (std + 1e-6)).abs() < 1e-6, "{advantages:?}");
    }
    // Rewards of 1 in groups of one became advantages of a million.
    assert_eq!(grpo_batch_std(&[1.0, 1.0], &[1, 1]).unwrap(), [1.0, 1.0]);
}

#[test]
fn a_group_of_one_keeps_its_reward_and_informative_groups_are_found() {
    for (_, estimate) in ESTIMATORS {
        let advantage = estimate(&[0.5], &[1]).unwrap()[0];
        assert!((advantage - 0.5).abs() < 1e-6);
    }
    let rewards = [1.0, 1.0, 0.0, 1.0, 0.5, 0.0];
    assert_eq!(informative_groups(&rewards, &[2, 2, 1, 1]).unwrap(), [false, true, true, false]);
}

#[test]
fn a_fully_masked_row_changes_nothing() {
    for seed in 0..10 {
        let whole = Fixture::new(seed);
        // Row 5 is fully masked: take it out.
        let (before, after) = (whole.part(0..5), whole.part(6..8));
        let mut without = before.clone();
        let start = *before.cu_seqlens.last().unwrap();
        without.cu_seqlens.extend(after.cu_seqlens[1..].iter().map(|c| c + start));
        without.mask.extend(&after.mask);
        without.log_prob.extend(&after.log_prob);
        without.old_log_prob.extend(&after.old_log_prob);
        without.advantages.extend(&after.advantages);
        without.weights.extend(&after.weights);
        without.selected.extend(&after.selected);
        let row = whole.cu_seqlens[5]..whole.cu_seqlens[6];
        assert!(!row.is_empty());
        let shorten = |mut values: Vec<f32>| {
            values.drain(row.clone());
            values
        };
        for aggregation in AGGREGATIONS {
            for (name, objective) in objectives() {
                let loss = |batch: &Fixture| {
                    let normalizer = whole_batch(aggregation, &batch.sequences());
                    objective.loss(&batch.input(), &normalizer, 8).unwrap()
                };
                let (with, without) = (loss(&whole), loss(&without));
                assert_eq!(with.loss, without.loss, "{name} {aggregation:?}");
                assert_eq!(with.metrics, without.metrics);
                assert_eq!(shorten(with.grad_log_prob), without.grad_log_prob);
            }
        }
        let config = correction("token");
        let corrected = |b: &Fixture| correct(&b.sequences(), &b.log_prob, &b.old_log_prob, &config).unwrap();
        assert_eq!(
            shorten(corrected(&whole).weights.unwrap()),
            corrected(&without).weights.unwrap(),
            "the weights and their normalisation"
        );
        let whitened = |b: &Fixture| whiten(&b.sequences(), &b.advantages).unwrap();
        assert_eq!(shorten(whitened(&whole)), whitened(&without));
    }
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    for seed in 0..20 {
        let batch = Fixture::new(seed);
        let cut = 1 + rng(seed).random_range(0..7);
        for aggregation in AGGREGATIONS {
            let normalizer = whole_batch(aggregation, &batch.sequences());
            for (name, objective) in objectives() {
                let loss = |b: &Fixture| objective.loss(&b.input(), &normalizer, 8).unwrap();
                let (whole, first, second) =
                    (loss(&batch), loss(&batch.part(0..cut)), loss(&batch.part(cut..8)));
                assert!((whole.loss - first.loss - second.loss).abs() <= 1e-6, "{name} {aggregation:?}");
                assert_eq!(whole.grad_log_prob, [first.grad_log_prob, second.grad_log_prob].concat());
                for ((w, a), b) in whole.metrics.iter().zip(&first.metrics).zip(&second.metrics) {
                    assert!((w.sum - a.sum - b.sum).abs() <= 1e-6, "{}", w.name);
                    assert_eq!(w.tokens, a.tokens + b.tokens);
                }
            }
        }
    }
}

fn correction(is: &str) -> CorrectionRules {
    CorrectionRules {
        importance: verl::importance(is, "0.5_2.0", true).unwrap(),
        reject: verl::rules("token_k1,seq_mean_k3", Some("0.5_2.0,0.1")).unwrap(),
    }
}

/// On fresh data T = O = R, whatever the anchor's name.
#[test]
fn on_fresh_data_every_anchor_gives_the_same_gradient_and_nothing_is_clipped() {
    for seed in 0..10 {
        let fresh = Fixture::new(seed);
        let sequences = fresh.sequences();
        let recomputed = fresh.log_prob.clone();
        let rollout = fresh.log_prob.clone();
        for is in ["token", "sequence"] {
            let corrected = correct(&sequences, &fresh.log_prob, &rollout, &correction(is)).unwrap();
            assert_eq!(corrected.mask, fresh.mask, "nothing is rejected");
            for token in sequences.all_valid_indices() {
                assert_eq!(corrected.weights.as_ref().unwrap()[token], 1.0, "{is}");
            }
            assert_eq!(corrected.metrics["rollout_corr/rollout_is_eff_sample_size"].round(), 1.0);
            assert_eq!(corrected.metrics["rollout_corr/kl"], 0.0);
        }
        let agreement = agreement_metrics(&sequences, &fresh.log_prob, &rollout).unwrap();
        assert!(agreement.iter().all(|(name, &value)| value == f64::from(name.ends_with("fraction"))));
        let normalizer = whole_batch(Aggregation::TokenMean, &sequences);
        let none = vec![false; sequences.tokens()];
        for (name, objective) in objectives() {
            let losses: Vec<PolicyLoss> =
                [OldLogProbSource::Detach, OldLogProbSource::Rollout, OldLogProbSource::Recompute]
                    .map(|mode| {
                        let old_log_prob =
                            mode.select(&fresh.log_prob, &rollout, Some(&recomputed), 1).unwrap();
                        let (weights, selected) = (None, Some(none.as_slice()));
                        let input = LossInput { old_log_prob, weights, selected, ..fresh.input() };
                        objective.loss(&input, &normalizer, 8).unwrap()
                    })
                    .into();
            let bits =
                |loss: &PolicyLoss| -> Vec<u32> { loss.grad_log_prob.iter().map(|g| g.to_bits()).collect() };
            assert!(losses.iter().all(|loss| bits(loss) == bits(&losses[0])));
            assert!(losses[0].grad_log_prob.iter().any(|&g| g != 0.0));
            assert!(losses[0].metrics.iter().all(|m| m.sum == 0.0), "{:?}", losses[0].metrics);
            if name != "geo_mean" {
                // A ratio of exactly 1 leaves the plain policy gradient.
                for token in sequences.all_valid_indices() {
                    let plain = f64::from(fresh.advantages[token]) / sequences.valid_tokens() as f64;
                    assert!((f64::from(losses[0].grad_log_prob[token]) + plain).abs() < 1e-7);
                }
            }
        }
    }
}

#[test]
fn gae_with_gamma_and_lambda_one_is_reward_to_go_minus_value() {
    let batch = Fixture::new(7);
    let sequences = batch.sequences();
    let result = gae(&sequences, &batch.advantages, &batch.log_prob, 1.0, 1.0).unwrap();
    let to_go = reinforce_plus_plus(&sequences, &batch.advantages).unwrap().returns;
    for token in sequences.all_valid_indices() {
        assert!((result.returns[token] - to_go[token]).abs() < 1e-5);
        assert!((result.advantages[token] - (to_go[token] - batch.log_prob[token])).abs() < 1e-5);
    }
    assert!(sequences.mask.iter().zip(&result.returns).all(|(&valid, &r)| valid || r == 0.0));
}

#[test]
fn rejected_tokens_leave_numerator_and_denominator() {
    let mut batch = Fixture::new(8);
    let rules = verl::rules("token_k1", Some("0.8_1.25")).unwrap();
    let config = CorrectionRules { importance: None, reject: rules };
    let kept = correct(&batch.sequences(), &batch.log_prob, &batch.old_log_prob, &config).unwrap().mask;
    let rejected = batch.mask.iter().zip(&kept).filter(|(before, after)| *before != *after).count();
    assert!(rejected > 0 && kept.contains(&true));
    batch.mask = kept;
    let normalizer = whole_batch(Aggregation::TokenMean, &batch.sequences());
    let (mean, gradient) = normalizer.reduce(&batch.sequences(), |_, _| (1.0, 1.0));
    assert!((mean - 1.0).abs() < 1e-12, "a mean of ones over the tokens that stayed");
    assert!(gradient.iter().zip(&batch.mask).all(|(&g, &kept)| (g != 0.0) == kept));
}

#[test]
fn overlong_shaping_falls_linearly_inside_the_buffer() {
    let overlong = OverlongPenalty::new(100, 20, 0.5).unwrap();
    let rewards = [0, 80, 90, 100, 120].map(|tokens| overlong.reward(tokens));
    assert_eq!(rewards, [0.0, 0.0, -0.25, -0.5, -0.5]);
}

#[test]
fn alarms_ring_beyond_their_levels_only() {
    assert!(alarm("rollout_corr/kl", 0.1).is_none() && alarm("rollout_corr/kl", -0.11).is_some());
    assert!(alarm("rollout_corr/rollout_is_eff_sample_size", 0.29).is_some());
    assert!(alarm("rollout_corr/chi2_token", f64::NAN).is_some());
    assert!(alarm("actor/grad_norm", 1e9).is_none());
}

#[test]
fn tokens_outside_the_mask_may_hold_anything_but_valid_ones_must_be_finite() {
    let mut batch = Fixture::new(9);
    let normalizer = whole_batch(Aggregation::TokenMean, &batch.sequences());
    for (_, objective) in objectives() {
        let loss = objective.loss(&batch.input(), &normalizer, 8).unwrap();
        assert!(loss.loss.is_finite() && loss.grad_log_prob.iter().all(|g| g.is_finite()));
    }
    let token = batch.cu_seqlens[1] - 1;
    batch.log_prob[token] = f32::NAN;
    for (_, objective) in objectives() {
        let error = objective.loss(&batch.input(), &normalizer, 8).unwrap_err().to_string();
        assert!(error.contains("log_prob") && error.contains("sequence 0"), "{error}");
    }
    assert!(Sequences::new(&[0, 2], &[true]).is_err());
    assert!(Sequences::new(&[0, 2, 1], &[true]).is_err());
    assert!(Sequences::new(&[], &[]).is_err());
}
