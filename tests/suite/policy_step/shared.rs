//! Groups whose samples share their prompts' rows.

use super::{Fixture, distance, pass};
use crate::tiny::{self, Gradients};
use rloss::recipe::{Policy, RouterReplay};
use rloss::train::batch::Sequence;
use rloss::train::policy_step::{PolicyStep, Update};

/// Two groups of three: prompts of 20 and 33 tokens.
fn sequences() -> Vec<Sequence> {
    let group = |prompt: usize, seed: u64| {
        let tokens = |length, seed| tiny::sequences(272, &[length], seed)[0].tokens.clone();
        let begin = tokens(prompt, seed);
        (1..4).map(move |i| {
            let tokens = [&begin[..], &tokens(7 * i, seed + i as u64)].concat();
            Sequence { mask: (0..tokens.len()).map(|t| t >= prompt).collect(), tokens }
        })
    };
    group(20, 100).chain(group(33, 200)).collect()
}

/// An update by micro-batches of up to so many rows: with 1, each sequence has one of its own, and nothing is shared.
fn update(fixture: &Fixture, replay: RouterReplay, micro_batch_tokens: usize) -> (Update, Vec<f32>) {
    let policy = Policy { router_replay: replay, ..Policy::default() };
    let step = PolicyStep { micro_batch_tokens, pass: pass(), ..fixture.step(&policy, None) };
    let experience = step.prepare(&fixture.groups()).unwrap();
    let update = step.gradients(&experience).unwrap().unwrap();
    let gap = step.gap_of(&experience, &update).unwrap();
    if replay == RouterReplay::None {
        assert_eq!(gap.get("mismatch/log_ppl_abs_diff_max"), Some(0.0));
        assert_eq!(gap.get("mismatch/routing_agreement"), Some(1.0));
    }
    let gradients = Gradients::of(&fixture.parameters).values;
    (update, gradients.into_iter().flatten().flatten().collect())
}

#[test]
fn a_groups_prompt_computed_once_gives_the_updates_log_probs_and_gradients() {
    let fixture = Fixture::of(&sequences());
    let (separate, gradients) = update(&fixture, RouterReplay::None, 1);
    for replay in [RouterReplay::None, RouterReplay::Rollout] {
        let (shared, of_shared) = update(&fixture, replay, 1000);
        assert_eq!(separate.log_probs, shared.log_probs);
        assert!(gradients != of_shared, "nothing was shared");
        assert!(distance(&gradients, &of_shared) < 1e-5);
    }
}

#[test]
fn rows_that_are_replayed_with_other_experts_are_not_shared() {
    let mut fixture = Fixture::of(&sequences());
    let trajectory = fixture.trajectories().nth(1).unwrap();
    let experts = &mut trajectory.routes[5][..2];
    let other = (0..4).find(|e| !experts.contains(e)).unwrap();
    experts[0] = other;
    let (separate, gradients) = update(&fixture, RouterReplay::Rollout, 1);
    let (shared, of_shared) = update(&fixture, RouterReplay::Rollout, 1000);
    assert_eq!(separate.log_probs, shared.log_probs);
    assert!(distance(&gradients, &of_shared) < 1e-5);
    let (plain, _) = update(&fixture, RouterReplay::None, 1000);
    assert!(plain.log_probs != shared.log_probs);
}
