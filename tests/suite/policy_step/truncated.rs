//! Updates over the tokens that were kept at sampling.

use super::*;
use crate::tiny;
use rloss::actor::{OptimizerKind, OptimizerSettings};
use rloss::model::decoder_stack;
use rloss::model::policy_view::PolicyView;
use rloss::ops::token_set::TokenSet;
use rloss::rollout::SamplingParameters;

/// For each trained token of `sequences`, the tokens that top-p keeps under `actor`.
fn kept(actor: &Actor, sequences: &[Sequence]) -> Vec<Vec<Vec<u32>>> {
    let policy = PolicyView::without_ablations(&actor.model, &actor.parameters).unwrap();
    let sampling = SamplingParameters { top_p: 0.5, ..SamplingParameters::with_temperature(0.9) };
    let of_sequence = |sequence: &Sequence| {
        let batch = MicroBatch::split(std::slice::from_ref(sequence), 1000).remove(0);
        if batch.targets.is_empty() {
            return vec![];
        }
        let normed = policy.head_input(&batch, &mut decoder_stack::keep_nothing).unwrap();
        let logits = policy.weights.logits(&normed, &sampling).unwrap();
        let draws: Vec<(usize, f64)> = (0..batch.targets.len()).map(|row| (row, 0.5)).collect();
        let drawn = logits.draw_with_kept(&sampling, &draws).unwrap();
        drawn.into_iter().map(|(_, kept)| kept.unwrap().ids()).collect()
    };
    sequences.iter().map(of_sequence).collect()
}

/// Log-probabilities of the trained tokens under `actor`, over the sets of the trajectories.
fn log_probs(actor: &Actor, trajectories: &[Trajectory]) -> Vec<Vec<f32>> {
    let of_trajectory = |t: &Trajectory| {
        let batches = MicroBatch::split(&[Sequence::from(t)], 1000);
        let outputs = tiny::runner(actor).forward(&batches, pass(), &Progress::hidden());
        let output: PassOutput = outputs.unwrap().remove(0);
        output.columns.log_probs
    };
    trajectories.iter().map(of_trajectory).collect()
}

#[test]
fn no_ratio_is_0_or_infinite_after_updates_that_move_the_kept_set() {
    let sequences = tiny::sequences(272, &super::LENGTHS, 4);
    let mut fixture = Fixture::of(&sequences);
    let at_sampling = kept(&fixture.actor, &sequences);
    // The random tokens of the fixture count as sampled: each is added to the kept set of its position.
    let mut was_kept = vec![];
    for (t, kept) in fixture.groups.iter_mut().flat_map(|group| &mut group.trajectories).zip(&at_sampling) {
        t.kept_tokens = vec![None; t.tokens.len()];
        let trained = (1..t.tokens.len()).filter(|&i| t.mask[i]).collect::<Vec<_>>();
        for (i, ids) in trained.into_iter().zip(kept) {
            was_kept.push(ids.contains(&t.tokens[i]));
            let mut ids = ids.clone();
            if let Err(place) = ids.binary_search(&t.tokens[i]) {
                ids.insert(place, t.tokens[i]);
            }
            t.kept_tokens[i] = Some(TokenSet::from_ids(&ids));
        }
    }
    let trajectories: Vec<Trajectory> = fixture.groups.iter().flat_map(|g| g.trajectories.clone()).collect();
    let sampled = log_probs(&fixture.actor, &trajectories);
    for (t, log_probs) in fixture.groups.iter_mut().flat_map(|g| &mut g.trajectories).zip(&sampled) {
        let mut log_probs = log_probs.iter();
        for i in (1..t.tokens.len()).filter(|&i| t.mask[i]) {
            t.log_probs[i] = *log_probs.next().unwrap();
        }
    }
    let (_, moving) = tiny::model(tiny::config(false), 3);
    let mut moving = fixture.actor.beside(moving);
    let settings = OptimizerSettings { kind: OptimizerKind::AdamW, lr: 0.01, ..OptimizerSettings::default() };
    moving.start_optimizer(&settings, false).unwrap();
    let policy = PolicySettings { old_logprob: OldLogProbSource::Rollout, ..PolicySettings::default() };
    let train = TrainSettings { minibatches: 4, steps: 1, ..fixture.train.clone() };
    let step = PolicyStep { train: &train, ..fixture.step(&policy, None) };
    let (metrics, _) = step.run(&fixture.groups(), &mut moving, None).unwrap();
    assert_eq!(metrics.get("mismatch/logprob_abs_diff_max"), Some(0.0));
    assert!(metrics.iter().all(|(_, value)| value.is_finite()));

    let (old, new) = (sampled.concat(), log_probs(&moving, &trajectories).concat());
    let ratios: Vec<f32> = new.iter().zip(&old).map(|(new, old)| (new - old).exp()).collect();
    assert!(ratios.iter().all(|ratio| ratio.is_finite() && *ratio > 0.0), "{ratios:?}");
    assert!(ratios.iter().any(|ratio| (ratio - 1.0).abs() > 0.01), "the policy moved");
    // What top-p keeps now lacks tokens that were drawn: over that set their ratios would be 0.
    let is_kept_now = kept(&moving, &sequences).into_iter().zip(&trajectories).flat_map(|(kept, t)| {
        let tokens = t.tokens.iter().zip(&t.mask).skip(1).filter(|(_, mask)| **mask);
        tokens.zip(kept).map(|((token, _), ids)| ids.contains(token)).collect::<Vec<_>>()
    });
    let lost = was_kept.into_iter().zip(is_kept_now).filter(|(was, is)| *was && !is).count();
    assert!(lost > 0, "the kept set moved");
}
