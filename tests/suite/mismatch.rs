//! Arms break what their names say, causes are found, and another engine's rows are read.

use crate::tiny;
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::chat::{ChatFormat, ToolForm};
use rloss::engine::{Engine, EngineLimits};
use rloss::metrics::Console;
use rloss::mismatch::diagnose::{UnmodifiedModel, Verdict};
use rloss::mismatch::engine_log_probs::EngineLogProbs;
use rloss::mismatch::measure::AblationMeasurement;
use rloss::mismatch::output::ResultLine;
use rloss::mismatch::search::SearchSettings;
use rloss::model::ablations::Ablations;
use rloss::model::cache::CacheCapacity;
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::parameters::Parameters;
use rloss::model::policy_view::PolicyView;
use rloss::model::rounding::WeightRounding;
use rloss::ops::threads::Threads;
use rloss::rollout::{Hooks, Prompt, Rollout, RolloutPlan, RolloutSettings};
use rloss::settings::Choice;
use rloss::tasks::{TaskContext, TaskName, TaskSettings};
use rloss::trajectory::Trajectory;
use std::sync::Arc;

struct World {
    threads: Threads,
    model: Model,
    parameters: Parameters,
    console: Console,
}

impl World {
    fn new() -> Self {
        let (model, parameters) = tiny::model(tiny::config(true), 3);
        Self { threads: Threads::new(2).unwrap(), model, parameters, console: Console::silent() }
    }

    fn reference(&self) -> UnmodifiedModel<'_> {
        let Self { threads, model, parameters, console } = self;
        UnmodifiedModel { threads, model, parameters, earlier_weights: None, console }
    }

    /// Rollouts of the arithmetic task under `arms`.
    fn sample(&self, arms: &Ablations) -> Vec<Trajectory> {
        let recipe = rloss::recipe::Recipe { arms: arms.clone(), ..Default::default() };
        let plan = RolloutPlan::for_training(&RolloutSettings::default(), recipe.train.seed, 0);
        let task = rloss::tasks::build(
            &TaskSettings {
                name: TaskName::from_name("arithmetic_single").unwrap(),
                ..TaskSettings::default()
            },
            &TaskContext::default(),
        )
        .unwrap();
        let prompts: Vec<Prompt> =
            (0..6).map(|index| Prompt { index, problem: task.training_problem(1, index) }).collect();
        let policy = PolicyView::for_rollout(&self.model, &self.parameters, arms, recipe.train.seed).unwrap();
        let limits = EngineLimits {
            sequences_max: 64,
            cuda_graphs: false,
            cache_capacity: CacheCapacity::default(),
            prefix_tokens_max: 0,
        };
        let rollout = Rollout {
            engine: &Engine::new(&self.threads, policy, 0, limits).unwrap(),
            chat: &ChatFormat::Harmony.from_embedded().unwrap(),
            task: task.as_ref(),
            reward_min: 0.0,
            on_failure: Default::default(),
            reply_chars_max: None,
            interpreter: None,
            form: ToolForm::Call,
            system_prompt: &[],
            plan: &plan,
        };
        let rollouts = rollout
            .run(&prompts, 6, Hooks { keeps_parts: true, ..Hooks::until(&|| false) })
            .unwrap()
            .unwrap();
        rollouts.groups.into_iter().flat_map(|group| group.trajectories).collect()
    }

    fn line(&self, trajectories: &[Trajectory], sampled_under: &Ablations, arms: &Ablations) -> ResultLine {
        let trajectories: Vec<&Trajectory> = trajectories.iter().collect();
        let reference = self.reference();
        let measure =
            AblationMeasurement::new(reference, &trajectories, sampled_under, 0, 1.0, (0.2, 0.2), 500)
                .unwrap();
        measure.measure("row", arms).unwrap()
    }
}

fn value(line: &ResultLine, name: &str) -> f64 {
    line.metrics.iter().find(|(key, _)| key == name).and_then(|(_, v)| *v).unwrap()
}

fn arms(change: impl Fn(&mut Ablations)) -> Ablations {
    let mut arms = Ablations::default();
    change(&mut arms);
    arms
}

#[test]
fn every_arm_opens_the_gap_that_its_name_says() {
    let world = World::new();
    let clean = Ablations::default();
    let trajectories = world.sample(&clean);
    for (arm, words) in [
        (clean.clone(), "none: both forward passes have the same bits"),
        (
            arms(|a| a.no_sink_gradient = true),
            "both forward passes have the same bits; this ablation changes only the backward pass",
        ),
        (
            arms(|a| a.freeze_attention = true),
            "both forward passes have the same bits; this ablation changes only the backward pass",
        ),
        (arms(|a| a.second_forward_old_logprobs = true), "none: both forward passes have the same bits"),
    ] {
        let line = world.line(&trajectories, &clean, &arm);
        assert_eq!(value(&line, "mismatch/logprob_abs_diff_max"), 0.0, "{arm:?}");
        assert_eq!(value(&line, "mismatch/bit_equal_fraction"), 1.0, "{arm:?}");
        assert_eq!(value(&line, "mismatch/clip_fraction"), 0.0, "{arm:?}");
        assert_eq!(line.cause.as_deref(), Some(words), "{arm:?}");
    }
    for (arm, words) in [
        (arms(|a| a.no_train_sinks = true), "training: sinks missing"),
        (arms(|a| a.router_noise_rollout = 0.5), "rollout: "),
        (arms(|a| a.router_noise_train = 0.5), "training: "),
        (arms(|a| a.rollout_bf16 = true), "rollout: short mantissas: weights and activations of 7 bits"),
        (arms(|a| a.rollout_mxfp4 = true), "rollout: MXFP4 weights: expert matrices in blocks of 32"),
        (
            arms(|a| a.rollout_mantissa_bits = 3),
            "rollout: short mantissas: weights and activations of 3 bits",
        ),
    ] {
        let line = world.line(&trajectories, &clean, &arm);
        assert!(value(&line, "mismatch/logprob_abs_diff_max") > 1e-4, "{arm:?}");
        assert!(value(&line, "mismatch/bit_equal_fraction") < 0.5, "{arm:?}");
        assert_eq!(value(&line, "mismatch/first_divergent_layer"), 0.0, "{arm:?}");
        assert!(line.cause.as_ref().unwrap().starts_with(words), "{arm:?}: {:?}", line.cause);
    }
    let noisy = arms(|a| (a.router_noise, a.second_forward_old_logprobs) = (0.5, true));
    let line = world.line(&trajectories, &clean, &noisy);
    assert!(value(&line, "mismatch/clip_fraction") > 0.0);
    assert!(value(&line, "mismatch/routing_agreement") < 1.0);
}

/// An arm of the rollout, computed again on its tokens, is what that rollout stored, bit for bit.
#[test]
fn a_rollout_under_an_arm_is_computed_again_to_the_last_bit() {
    let world = World::new();
    for arm in [
        arms(|a| a.router_noise = 0.3),
        arms(|a| a.rollout_bf16 = true),
        arms(|a| (a.rollout_mxfp4, a.rollout_mantissa_bits) = (true, 5)),
    ] {
        let trajectories = world.sample(&arm);
        let stored = world.line(&trajectories, &arm, &arm);
        let again = world.line(&trajectories, &Ablations::default(), &arm);
        assert!(value(&stored, "mismatch/logprob_abs_diff_max") > 0.0);
        assert_eq!(stored, again, "{arm:?}");
    }
}

/// Log-probs of random sequences by the model with `change`, at `temperature`.
fn observed(world: &World, model: &Model, forward: ForwardOptions, temperature: f64) -> EngineLogProbs {
    let mut sequences: Vec<Sequence> = tiny::sequences(272, &[90, 120, 40, 150], 5);
    sequences.iter_mut().for_each(|s| s.mask.iter_mut().skip(1).for_each(|m| *m = true));
    let batches = MicroBatch::split(&sequences, 200);
    let policy = PolicyView { forward, ..PolicyView::without_ablations(model, &world.parameters).unwrap() };
    let log_probs = policy.all_log_probs(&world.threads, &batches, temperature, &|_| ()).unwrap();
    EngineLogProbs::from_samples(batches, 1.0, log_probs)
}

#[test]
fn causes_are_recognised_and_a_temperature_is_estimated() {
    let world = World::new();
    let plain = ForwardOptions::default();
    let found = |observed: EngineLogProbs| {
        world.reference().diagnose(&observed, &SearchSettings::silent()).unwrap().verdict
    };
    let named = |verdict: Verdict| match verdict {
        Verdict::Explained(cause) => cause.description(),
        other => panic!("{other:?}"),
    };
    assert_eq!(found(observed(&world, &world.model, plain, 1.0)), Verdict::Agrees);
    let no_sinks = ForwardOptions { sinks: false, ..plain };
    let words = "sinks missing: the attention leaves them out of the softmax";
    assert_eq!(named(found(observed(&world, &world.model, no_sinks, 1.0))), words);
    let mut no_yarn = world.model.config.clone();
    no_yarn.rope.yarn = None;
    let words = "RoPE without YaRN: plain frequencies; cosine and sine without the attention factor";
    assert_eq!(named(found(observed(&world, &Model::new(no_yarn, 160), plain, 1.0))), words);
    let words = "another temperature: the log-probs have 0.700 times the stated temperature";
    assert_eq!(named(found(observed(&world, &world.model, plain, 0.7))), words);
}

/// What is found when an engine in bf16, which keeps so many bits of activations, computes the model.
fn found_in_bf16(world: &World, activation_bits: u32) -> Verdict {
    let forward = ForwardOptions { mantissa_bits: Some(activation_bits), ..ForwardOptions::default() };
    let rounding = WeightRounding { mxfp4: false, bits: Some(7) };
    let weights = Arc::new(world.parameters.frozen_weights(Some(&rounding.weight_change())).unwrap());
    let plain = observed(world, &world.model, ForwardOptions::default(), 1.0);
    let batches: Vec<MicroBatch> = plain.batches.into_iter().map(|batch| batch.micro_batch).collect();
    let policy = PolicyView { model: &world.model, weights, forward };
    let log_probs = policy.all_log_probs(&world.threads, &batches, 1.0, &|_| ()).unwrap();
    world
        .reference()
        .diagnose(&EngineLogProbs::from_samples(batches, 1.0, log_probs), &SearchSettings::silent())
        .unwrap()
        .verdict
}

/// Weights of f32 that an engine in bf16 rounds: this was called "bf16 weights", as they make most of the
/// gap.
#[test]
fn bf16_weights_are_no_mistake_of_an_engine_in_bf16() {
    let world = World::new();
    for activation_bits in [6, 8] {
        assert_eq!(found_in_bf16(&world, activation_bits), Verdict::Rounding);
    }
    let in_f32 = found_in_bf16(&world, 23);
    assert_eq!(in_f32.to_text(), "bf16 weights: every tensor is rounded");
    assert!(matches!(in_f32, Verdict::Explained(_)));
}
