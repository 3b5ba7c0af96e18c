//! The greedy baseline, the steered divergence, bypass, and what is measured over a whole batch.

use super::*;
use crate::policy::bypass::{BypassLoss, bypass};
use crate::policy::verl;
use rloss::policy::correction::CorrectionRules;
use rloss::policy::loss::{ClipRange, PpoClip};

fn get(metrics: &Metrics, name: &str) -> f64 {
    metrics.get(name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn remax_measures_each_response_against_its_prompts_greedy_one() {
    let mut fixture = Fixture::new();
    for group in &mut fixture.groups {
        let mut greedy = group.trajectories[0].clone();
        greedy.reward = 0.25;
        group.greedy = Some(greedy);
    }
    for overlong in [OverlongSettings::default(), OverlongSettings { buffer_tokens: 72, penalty: 1.0 }] {
        let policy = PolicySettings {
            advantage: Advantage::Remax,
            overlong: overlong.clone(),
            ..PolicySettings::default()
        };
        let batch = fixture.prepared(&fixture.step(&policy, None));
        let shaped =
            |tokens: usize| -(tokens as f32) / 72.0 * if overlong.buffer_tokens > 0 { 1.0 } else { 0.0 };
        let mut rows = batch.cu_seqlens.windows(2);
        for group in &fixture.groups {
            let baseline = 0.25 + shaped(group.trajectories[0].sampled_tokens());
            for trajectory in &group.trajectories {
                let row = rows.next().unwrap();
                let expected = trajectory.reward + shaped(trajectory.sampled_tokens()) - baseline;
                for advantage in &batch.advantages[row[0]..row[1]] {
                    assert!((advantage - expected).abs() < 1e-6, "{advantage} for {expected}");
                }
            }
        }
    }
    fixture.groups[1].greedy = None;
    let policy = PolicySettings { advantage: Advantage::Remax, ..PolicySettings::default() };
    let refused = fixture.prepare(&fixture.step(&policy, None)).map(drop).expect_err("no baseline");
    assert!(format!("{refused:#}").contains("needs a greedy sample"), "{refused:#}");
}

/// In the reward the divergence is that between anchor and reference, and its weight is the step's own.
#[test]
fn the_divergence_in_the_reward_is_the_anchors_and_has_the_steps_weight() {
    let mut fixture = Fixture::new();
    // With the model itself as reference, only log-probabilities of the rollout can differ from it.
    fixture.trajectories().for_each(|t| t.log_probs.iter_mut().for_each(|l| *l -= 0.5));
    let policy = |old_logprob| PolicySettings {
        advantage: Advantage::DrGrpo,
        old_logprob,
        kl: KlSettings { place: KlPlacement::Reward, estimator: KlEstimator::K1, ..KlSettings::default() },
        // A forward before the update, which must not become the anchor of "rollout".
        correction: CorrectionSettings {
            reject: vec![RejectOption::TokenK2],
            reject_bounds: vec![vec![100.0]],
            ..CorrectionSettings::default()
        },
        ..PolicySettings::default()
    };
    for (old_logprob, kl) in [
        (OldLogProbSource::Detach, 0.0),
        (OldLogProbSource::Recompute, 0.0),
        (OldLogProbSource::Rollout, -0.5),
    ] {
        let policy = policy(old_logprob);
        let step = PolicyStep { kl_coefficient: 0.125, ..fixture.step(&policy, Some(&fixture.actor)) };
        let (batch, _, metrics) = fixture.prepare(&step).unwrap();
        assert!((get(&metrics, "actor/reward_kl_penalty") - kl).abs() < 1e-6, "{old_logprob}");
        assert_eq!(get(&metrics, "actor/reward_kl_penalty_coeff"), 0.125);
        let penalty = |t: usize| -0.125 * kl * (batch.cu_seqlens[t + 1] - batch.cu_seqlens[t]) as f64;
        let rewards: Vec<f64> = fixture.groups[0].trajectories.iter().map(|t| f64::from(t.reward)).collect();
        let shifted: Vec<f64> = rewards.iter().enumerate().map(|(t, r)| r + penalty(t)).collect();
        let expected = shifted[0] - shifted.iter().sum::<f64>() / 3.0;
        assert!((f64::from(batch.advantages[0]) - expected).abs() < 1e-4, "{old_logprob}");
    }
}

/// Bypass (verl): the rollout's log-probabilities are the anchor, and the correction is of the current
/// ones against them.
#[test]
fn bypass_is_the_anchor_rollout_with_a_correction() {
    let mut fixture = Fixture::new();
    for (index, trajectory) in fixture.trajectories().enumerate() {
        let shift = [0.0, 0.125, -0.25, 0.5, -0.03125, 0.0625][index];
        let bend = |(t, l): (usize, &mut f32)| *l += shift * [1.0, -0.5, 0.25][t % 3];
        trajectory.log_probs.iter_mut().enumerate().for_each(bend);
    }
    let rejecting = CorrectionSettings {
        reject: vec![RejectOption::SeqMeanK2, RejectOption::TokenK1],
        reject_bounds: vec![vec![0.02], vec![0.8, 1.25]],
        ..CorrectionSettings::default()
    };
    let rules = verl::rules("seq_mean_k2,token_k1", Some("0.02,0.8_1.25")).unwrap();
    let clip = PpoClip::new(ClipRange::new(0.2, 0.2).unwrap(), Some(3.0)).unwrap();
    let weighing = CorrectionSettings { is: ImportanceSampling::Sequence, ..rejecting.clone() };
    for (loss, correction, is, theirs) in [
        (loss("ppo"), rejecting, "none", BypassLoss::PpoClip(clip)),
        (loss("reinforce"), weighing, "sequence", BypassLoss::Reinforce),
    ] {
        let policy = PolicySettings {
            loss,
            correction,
            old_logprob: OldLogProbSource::Rollout,
            ..PolicySettings::default()
        };
        let step = fixture.step(&policy, None);
        let (batch, _, of_batch) = fixture.prepare(&step).unwrap();
        let rejected = batch.mask.iter().filter(|kept| !**kept).count();
        assert!(rejected > 0 && rejected < batch.mask.len());
        let update = fixture.learned(&step, &batch).unwrap().unwrap();
        let whole = vec![true; batch.mask.len()];
        let sequences = rloss::policy::Sequences::new(&batch.cu_seqlens, &whole).unwrap();
        let config = CorrectionRules {
            importance: verl::importance(is, "2.0", false).unwrap(),
            reject: rules.clone(),
        };
        let (current, rollout) = (&update.forward.columns.log_probs, &batch.rollout_log_probs);
        let (expected, metrics) =
            bypass(&sequences, current, rollout, &batch.advantages, &config, &theirs, Aggregation::TokenMean)
                .unwrap();
        assert!((get(&update.metrics, "actor/pg_loss") - expected.loss).abs() < 1e-9, "{loss}");
        for mean in expected.metrics {
            assert!((get(&update.metrics, mean.name) - mean.value()).abs() < 1e-9, "{loss}: {}", mean.name);
        }
        for (name, value) in metrics {
            assert_eq!(get(&of_batch, &name), value, "{loss}: {name}");
        }
    }
}

/// One wrong log-probability anywhere shows, whichever part of the batch the first update takes.
#[test]
fn the_gap_is_that_of_the_whole_batch_when_updates_take_parts() {
    let mut fixture = Fixture::new();
    fixture.trajectories().last().unwrap().log_probs.iter_mut().for_each(|l| *l -= 2.0);
    let policy = PolicySettings { old_logprob: OldLogProbSource::Rollout, ..PolicySettings::default() };
    let train = TrainSettings { minibatches: 6, ..fixture.train.clone() };
    let step = PolicyStep { train: &train, ..fixture.step(&policy, None) };
    let (batch, forward, _) = fixture.prepare(&step).unwrap();
    let gap = fixture.mismatch_metrics(&batch, &forward.unwrap());
    let first = batch.select(&[0]);
    let update = fixture.learned(&step, &first).unwrap().unwrap();
    let of_first = fixture.mismatch_metrics(&first, &update.forward);
    assert_eq!(get(&of_first, "mismatch/bit_equal_fraction"), 1.0);
    let tokens = batch.rollout_log_probs.len() as f64;
    let last = (batch.cu_seqlens[6] - batch.cu_seqlens[5]) as f64;
    assert_eq!(get(&gap, "mismatch/bit_equal_fraction"), (tokens - last) / tokens);
    assert!((get(&gap, "rollout_corr/kl") + 2.0 * last / tokens).abs() < 1e-6);
    assert!((get(&gap, "mismatch/log_ppl_abs_diff_max") - 2.0).abs() < 1e-5);
    // The same as what an update of the whole batch shows of itself.
    let whole = fixture.learned(&step, &batch).unwrap().unwrap();
    assert_eq!(gap, fixture.mismatch_metrics(&batch, &whole.forward));
    // An update of the whole batch needs no forward before it.
    assert!(fixture.prepare(&fixture.step(&policy, None)).unwrap().1.is_none());
}

#[test]
fn micro_batches_of_any_size_give_the_loss_and_gradient_of_the_batch() {
    let fixture = Fixture::new();
    for aggregation in [Aggregation::TokenMean, Aggregation::SequenceMeanTokenMean] {
        let policy = PolicySettings { aggregation, ..PolicySettings::default() };
        let update = |micro_batch_tokens| {
            let fixture = fixture.with_micro_batches_of(micro_batch_tokens);
            let step = fixture.step(&policy, None);
            fixture.learned(&step, &fixture.prepared(&step)).unwrap().unwrap()
        };
        let whole = update(1000);
        for micro_batch_tokens in [1, 64, 100] {
            let split = update(micro_batch_tokens);
            let loss = |update: &super::PolicyUpdate| get(&update.metrics, "actor/pg_loss");
            assert!((loss(&split) - loss(&whole)).abs() < 1e-6);
            assert!(distance(&values(&split), &values(&whole)) < 1e-6, "{micro_batch_tokens}");
        }
    }
}

/// A trajectory without a sampled token, such as one whose prompt fills the context, leaves the gradient
/// as it was.
#[test]
fn a_trajectory_without_sampled_tokens_changes_nothing() {
    let mut fixture = Fixture::new();
    // Advantages that do not depend on the group, whose mean the row would move.
    let policy = PolicySettings { advantage: Advantage::ReinforcePlusPlus, ..PolicySettings::default() };
    // One micro-batch: of several, the row would move the cuts, and with them the last digits of sums.
    let update = |fixture: &Fixture| {
        let fixture = fixture.with_micro_batches_of(100_000);
        let step = fixture.step(&policy, None);
        fixture.learned(&step, &fixture.prepared(&step)).unwrap().unwrap()
    };
    let without = update(&fixture);
    let mut masked = fixture.groups[0].trajectories[0].clone();
    masked.mask.fill(false);
    masked.log_probs.fill(0.0);
    fixture.groups[1].trajectories.push(masked);
    let with = update(&fixture);
    assert_eq!(with.metrics, without.metrics);
    assert_eq!(with.forward.columns.log_probs, without.forward.columns.log_probs);
    assert!(distance(&values(&with), &values(&without)) < 1e-6);
}

/// Where sampling kept its experts, the share that training chooses too is measured; replayed ones agree
/// by construction.
#[test]
fn experts_kept_at_sampling_are_compared_with_those_of_training() {
    let mut fixture = Fixture::new();
    let recompute = PolicySettings { old_logprob: OldLogProbSource::Recompute, ..PolicySettings::default() };
    let agreement = |fixture: &Fixture, policy: &PolicySettings| {
        let step = fixture.step(policy, None);
        let (batch, forward, _) = fixture.prepare(&step).unwrap();
        let update = fixture.learned(&step, &batch).unwrap().unwrap();
        let agreement = |forward| fixture.mismatch_metrics(&batch, forward).get("mismatch/routing_agreement");
        let found = agreement(&update.forward);
        if let Some(before) = &forward {
            assert_eq!(agreement(before), found);
        }
        found
    };
    assert_eq!(agreement(&fixture, &recompute), Some(1.0));
    let fed: usize = fixture.groups.iter().flat_map(|g| &g.trajectories).map(|t| t.tokens.len() - 1).sum();
    // Another order is the same set; another expert is not. The route of a token holds two experts a layer.
    let routes = &mut fixture.groups[0].trajectories[1].routed_experts;
    let layers = routes[3].len() / 2;
    routes[2].swap(0, 1);
    let other = (0..4).find(|expert| !routes[3][..2].contains(expert)).unwrap();
    routes[3][0] = other;
    let expected = 1.0 - 1.0 / (fed * layers) as f64;
    for policy in [&PolicySettings::default(), &recompute] {
        let found = agreement(&fixture, policy).unwrap();
        assert!((found - expected).abs() < 1e-12, "{found} for {expected}");
    }
    let replay = PolicySettings { router_replay: RouterReplay::Rollout, ..PolicySettings::default() };
    assert_eq!(agreement(&fixture, &replay), None);
    fixture.trajectories().for_each(|t| t.routed_experts.clear());
    assert_eq!(agreement(&fixture, &PolicySettings::default()), None);
}
