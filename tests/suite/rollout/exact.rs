//! What is stored at sampling is what training computes, and nothing about the batch shows in it.

use super::*;
use rloss::actor::PolicyColumns;
use rloss::actor::forward_backward::{Pass, PassSettings};
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::trajectory::Trajectory;

/// The training forward over trajectories: log-probabilities of the sampled tokens and experts of every
/// input.
fn training_forward(
    world: &World,
    trajectories: &[&Trajectory],
    temperature: f64,
) -> Vec<(Vec<f32>, Vec<Vec<u16>>)> {
    let sequence = |t: &&Trajectory| Sequence::from(*t);
    let sequences: Vec<_> = trajectories.iter().map(sequence).collect();
    let mut results = vec![];
    for batch in &MicroBatch::split_with_prefixes(&sequences, 1000, |_| usize::MAX) {
        let settings = PassSettings {
            temperature,
            load_balance_coefficient: 0.0,
            keeps_routed_experts: true,
            forward: world.policy.forward,
        };
        let (model, weights) = (world.policy.model, &world.parameters.frozen_weights(None).unwrap());
        let pass = Pass { model, weights, batch, settings, recompute_layers: true, teacher: None };
        let pass = pass.forward::<PolicyColumns>(&|| ()).unwrap();
        let layers: Vec<Vec<Vec<u32>>> =
            pass.routed_experts.iter().map(|layer| layer.to_vec2().unwrap()).collect();
        for i in 0..batch.sequences.len() {
            let rows = &batch.cu_targets[i..i + 2];
            let experts = |t: usize| layers.iter().flat_map(|layer| &layer[t]).map(|&e| e as u16).collect();
            results.push((
                pass.columns.log_probs[rows[0]..rows[1]].to_vec(),
                batch.sequence_rows.row_indices(i).into_iter().map(experts).collect(),
            ));
        }
    }
    results
}

fn check_against_training(world: &World, rollouts: &Rollouts, temperature: f64) {
    let trajectories: Vec<_> = rollouts.trajectories().collect();
    let training = training_forward(world, &trajectories, temperature);
    for (t, (log_probs, routes)) in trajectories.iter().zip(&training) {
        let n = t.tokens.len();
        assert_eq!((t.mask.len(), t.log_probs.len(), t.routed_experts.len()), (n, n, n));
        let stored = |i: &usize| if t.mask[*i] { Some(t.log_probs[*i].to_bits()) } else { None };
        let stored: Vec<u32> = (0..n).filter_map(|i| stored(&i)).collect();
        assert_eq!(stored, log_probs.iter().map(|l| l.to_bits()).collect::<Vec<_>>());
        assert_eq!(t.routed_experts[..n - 1], routes[..]);
        assert!(t.routed_experts[n - 1].is_empty(), "the last token is never fed");
        assert!((0..n).all(|i| t.mask[i] || t.log_probs[i] == 0.0));
        let sampled: Vec<usize> = t.turns.iter().flat_map(|turn| turn.start..turn.end).collect();
        assert!(sampled.iter().all(|&i| t.mask[i]) && sampled.len() == t.sampled_tokens());
    }
}

#[test]
fn stored_log_probs_and_routes_are_the_training_forwards_to_the_last_bit() {
    for (yarn, temperature) in [(false, 1.0), (true, 0.7), (false, 1.9)] {
        let mut world = World::new(tiny::config(yarn), 2);
        world.plan.settings.keep_routes = true;
        world.plan.settings.temperature = temperature;
        world.plan.settings.sequences_max = 7;
        let (task, tool) = (Questions::new(), echo());
        let rollouts = sample(world.rollout(&task, Some(&tool)), &Questions::prompts(12), 6);
        check_against_training(&world, &rollouts, temperature);
        let turns: usize = rollouts.trajectories().map(|t| t.turns.len()).sum();
        assert!(turns > 100, "insertions must happen: {turns} turns of 72 trajectories");
        let longest = rollouts.trajectories().map(|t| t.tokens.len()).max().unwrap();
        assert!(longest > 100, "windows and blocks of keys must be crossed: {longest} tokens");
    }
}

#[test]
fn forced_conversations_with_tool_output_and_long_prompts_agree_with_training_too() {
    let mut world = World::roomy();
    world.plan.settings.keep_routes = true;
    world.plan.settings.prompt_tokens_max = 2000;
    world.plan.settings.response_tokens_max = 400;
    let task = Questions { follow_ups: vec!["And now?".into()] };
    let tool = Scripted(|_, code: &str| (CallOutcome::Answered, code.repeat(40)));
    let script = Script::new(
        &world,
        &[
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=python<|channel|>analysis<|message|>7*12<|call|>",
            "<|channel|>final<|message|>84<|return|>",
            "<|channel|>final<|message|>ok<|return|>",
        ],
    );
    let mut prompts = Questions::prompts(5);
    prompts[1].problem.messages[0].content = "long ".repeat(300);
    prompts[3].problem.messages[0].content = "longer ".repeat(200);
    let rollouts = play(world.rollout(&task, Some(&tool)), &script, &prompts, 3).unwrap();
    check_against_training(&world, &rollouts, 1.0);
    assert!(rollouts.trajectories().all(|t| t.success && t.turns.len() == 3));
    let counts = rollouts.counts();
    assert_eq!(counts.tool_calls, 15);
    let fed: usize = rollouts.trajectories().map(|t| t.tokens.len()).sum();
    let shared: usize = rollouts.groups.iter().map(|g| 2 * g.trajectories[0].prompt_tokens).sum();
    assert_eq!(counts.prefilled_tokens + counts.sampled_tokens, fed - shared);
}

#[test]
fn results_do_not_depend_on_threads_batch_size_or_order() {
    let run = |threads: usize, sequences_max: usize, reverse: bool| {
        let mut world = World::new(tiny::config(false), threads);
        world.plan.settings.keep_routes = true;
        world.plan.settings.sequences_max = sequences_max;
        let (task, tool) = (Questions::new(), echo());
        let mut prompts = Questions::prompts(9);
        if reverse {
            prompts.reverse();
        }
        let mut rollouts = sample(world.rollout(&task, Some(&tool)), &prompts, 5);
        if reverse {
            rollouts.groups.reverse();
            rollouts.messages.reverse();
        }
        rollouts
    };
    let base = run(1, 64, false);
    for (i, group) in base.groups.iter().enumerate() {
        for (j, t) in group.trajectories.iter().enumerate() {
            assert_eq!((t.prompt, t.sample, t.step), (i as u64, j as u64, 3));
        }
    }
    for (threads, sequences_max, reverse) in [
        (1, 1, false),
        (1, 3, true),
        (2, 64, false),
        (2, 3, false),
        (3, 1, true),
        (4, 64, true),
        (4, 5, false),
    ] {
        let other = run(threads, sequences_max, reverse);
        assert!(base == other, "{threads} threads, {sequences_max} sequences, reversed: {reverse}");
    }
}

#[test]
fn seed_step_purpose_prompt_and_sample_each_change_the_draws() {
    let tokens = |change: &dyn Fn(&mut RolloutPlan)| {
        let mut world = World::new(tiny::config(false), 1);
        change(&mut world.plan);
        let prompts = [
            Prompt { index: 0, ..Questions::prompts(1).remove(0) },
            Prompt { index: 1, ..Questions::prompts(1).remove(0) },
        ];
        let rollouts = sample(world.rollout(&Questions::new(), None), &prompts, 2);
        rollouts.trajectories().map(|t| t.tokens.clone()).collect::<Vec<_>>()
    };
    let base = tokens(&|_| ());
    assert_eq!(base, tokens(&|_| ()));
    let mut seen = base;
    seen.extend(tokens(&|s| s.seed = 6));
    seen.extend(tokens(&|s| s.step = 4));
    seen.extend(tokens(&|s| s.purpose = Purpose::Evaluation));
    let distinct: std::collections::HashSet<_> = seen.iter().collect();
    assert_eq!(distinct.len(), 16);
}

#[test]
fn greedy_rollouts_are_the_argmax_whatever_the_seed() {
    let run = |seed| {
        let mut world = World::new(tiny::config(false), 2);
        world.plan.settings.temperature = 0.0;
        world.plan.seed = seed;
        sample(world.rollout(&Questions::new(), None), &Questions::prompts(3), 2)
    };
    let (a, b) = (run(1), run(2));
    assert_eq!(a, b);
    for group in &a.groups {
        assert_eq!(group.trajectories[0].tokens, group.trajectories[1].tokens);
    }
    assert!(a.trajectories().all(|t| t.log_probs.iter().all(|&l| l == 0.0)));
}

/// The weights of a large vocabulary are past the bound for one engine a thread, and a batch's logits past
/// theirs.
#[test]
fn one_engine_on_all_threads_gives_what_an_engine_a_thread_gives() {
    let run = |threads: usize| {
        let mut world = World::new(Config { vocab_size: 201_088, ..tiny::config(false) }, threads);
        world.plan.settings.response_tokens_max = 3;
        world.plan.settings.sequences_max = 100;
        sample(world.rollout(&Questions::new(), Some(&echo())), &Questions::prompts(25), 4)
    };
    let (alone, together) = (run(1), run(6));
    assert_eq!(alone.counts().sampled_tokens, 300);
    assert!(alone == together);
}
