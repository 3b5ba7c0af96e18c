//! Groups whose samples share their prompts' rows.

use super::*;

/// Two groups of three: prompts of 20 and 33 tokens.
fn sequences() -> Vec<Sequence> {
    let group = |prompt: usize, seed: u64| {
        let tokens = |length, seed| tiny::sequences(272, &[length], seed)[0].tokens.clone();
        let begin = tokens(prompt, seed);
        (1..4).map(move |i| {
            let tokens = [&begin[..], &tokens(7 * i, seed + i as u64)].concat();
            Sequence { mask: (0..tokens.len()).map(|t| t >= prompt).collect(), tokens, kept_tokens: vec![] }
        })
    };
    group(20, 100).chain(group(33, 200)).collect()
}

/// An update by micro-batches of up to so many rows, its gradients, and the share of rows that chose
/// sampling's experts. With 1 each sequence has a micro-batch of its own, and nothing is shared.
fn update(
    fixture: &Fixture,
    replay: RouterReplay,
    micro_batch_tokens: usize,
) -> (Learned<PolicyUpdate>, Vec<f32>, Option<f64>) {
    let policy = PolicySettings { router_replay: replay, ..PolicySettings::default() };
    let fixture = fixture.with_micro_batches_of(micro_batch_tokens);
    let step = fixture.step(&policy, None);
    let batch = fixture.prepared(&step);
    let update = fixture.learned(&step, &batch).unwrap().unwrap();
    let agreement = fixture.mismatch_metrics(&batch, &update.forward).get("mismatch/routing_agreement");
    let gradients = values(&update);
    (update, gradients, agreement)
}

#[test]
fn a_groups_prompt_computed_once_gives_the_updates_log_probs_and_gradients() {
    let fixture = Fixture::of(&sequences());
    let (separate, gradients, agreement) = update(&fixture, RouterReplay::None, 1);
    assert_eq!(agreement, Some(1.0));
    for replay in [RouterReplay::None, RouterReplay::Rollout] {
        let (shared, of_shared, agreement) = update(&fixture, replay, 1000);
        // What is replayed is not compared.
        assert_eq!(agreement, (replay == RouterReplay::None).then_some(1.0));
        assert_eq!(separate.forward.columns.log_probs, shared.forward.columns.log_probs);
        assert!(gradients != of_shared, "nothing was shared");
        assert!(distance(&gradients, &of_shared) < 1e-5);
    }
}

#[test]
fn rows_that_are_replayed_with_other_experts_are_not_shared() {
    let mut fixture = Fixture::of(&sequences());
    let trajectory = fixture.trajectories().nth(1).unwrap();
    let experts = &mut trajectory.routed_experts[5][..2];
    let other = (0..4).find(|e| !experts.contains(e)).unwrap();
    experts[0] = other;
    let (separate, gradients, _) = update(&fixture, RouterReplay::Rollout, 1);
    let (shared, of_shared, _) = update(&fixture, RouterReplay::Rollout, 1000);
    assert_eq!(separate.forward.columns.log_probs, shared.forward.columns.log_probs);
    assert!(distance(&gradients, &of_shared) < 1e-5);
    let (plain, _, agreement) = update(&fixture, RouterReplay::None, 1000);
    assert!(agreement < Some(1.0));
    assert!(plain.forward.columns.log_probs != shared.forward.columns.log_probs);
}
