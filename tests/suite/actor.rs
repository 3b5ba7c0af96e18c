//! The actor's verbs: gradients add up and are cleared by updates alone, versions in use do not change, and
//! several actors share one base.

use crate::tiny::{self, Gradients};
use rloss::actor::micro_batch::Sequence;
use rloss::actor::{
    Actor, BatchPart, Execution, Forward, GivenTargets, GradientNorm, OptimizerKind, OptimizerSettings,
    PassInput, PassSettings, PolicyColumns,
};
use rloss::chat::Chat;
use rloss::checkpoint::save::CompanionFiles;
use rloss::checkpoint::{BaseModel, ModelFiles};
use rloss::dist::RolloutWeightPlacement;
use rloss::harmony::HarmonyTokenizer;
use rloss::metrics::Progress;
use rloss::model::adapter::{Lora, default_targets};
use rloss::model::cache::CacheCapacity;
use rloss::model::config::WeightFormat;
use rloss::model::forward::ForwardOptions;
use rloss::ops::threads::Threads;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const LENGTHS: [usize; 6] = [30, 41, 12, 25, 60, 33];

/// A frozen actor of a tiny mixture-of-experts model.
fn actor(micro_batch_tokens: usize) -> Actor {
    let (model, parameters) = tiny::model(tiny::config(false), 3);
    let execution = Execution {
        threads: Threads::new(2).unwrap(),
        recompute_layers: false,
        micro_batch_tokens,
        cache_capacity: CacheCapacity::default(),
        prefix_tokens_max: 0,
        rollout_weights: RolloutWeightPlacement::Whole,
    };
    Actor::new(Arc::new(model), parameters, Arc::new(execution))
}

/// An actor that trains all weights.
fn trained(micro_batch_tokens: usize) -> Actor {
    let mut actor = actor(micro_batch_tokens);
    actor.start_optimizer(&settings(OptimizerKind::AdamW), false).unwrap();
    actor
}

/// An actor that trains an adapter of rank `rank` over `base`.
fn adapted(base: &Actor, rank: usize, on: &str, kind: OptimizerKind) -> Actor {
    let targets = default_targets(&base.model.config).into_iter().filter(|name| name.contains(on)).collect();
    let lora = Lora { rank, alpha: 2.0 * rank as f64, rslora: false, targets };
    let mut actor = base.with_adapter(lora, rank as u64).unwrap();
    let first = base.parameters.len();
    let trainable: Vec<bool> = (0..actor.parameters.len()).map(|index| index >= first).collect();
    actor.parameters.set_trainable(&trainable).unwrap();
    actor.start_optimizer(&settings(kind), false).unwrap();
    actor
}

fn settings(kind: OptimizerKind) -> OptimizerSettings {
    OptimizerSettings { kind, lr: 1e-2, momentum: 0.5, ..OptimizerSettings::default() }
}

fn pass() -> PassSettings {
    PassSettings {
        temperature: 0.9,
        load_balance_coefficient: 0.0,
        keeps_routed_experts: false,
        forward: ForwardOptions::default(),
    }
}

fn hidden(_: u64) -> Progress {
    Progress::hidden()
}

fn input(sequences: &[Sequence]) -> PassInput<'_> {
    PassInput { sequences: sequences.iter().collect(), ..PassInput::default() }
}

/// A loss whose gradient differs from target to target, and depends on the columns.
fn loss(part: &BatchPart, columns: &PolicyColumns) -> anyhow::Result<(PolicyColumns, usize)> {
    let gradient = |(index, log_prob): (usize, &f32)| {
        0.01 * ((part.targets.start + index) as f32 * 0.7).sin() + 0.001 * log_prob
    };
    let log_probs = columns.log_probs.iter().enumerate().map(gradient).collect();
    let entropies = vec![0.001; columns.entropies.len()];
    Ok((PolicyColumns { log_probs, entropies, divergences: None }, part.targets.len()))
}

fn step(actor: &mut Actor, input: &PassInput) -> Forward {
    actor.forward_backward(input, pass(), &loss, &hidden).unwrap().0
}

fn update(actor: &mut Actor) -> GradientNorm {
    actor.optim_step(&actor.update_settings(1, 10, None).unwrap()).unwrap()
}

/// All trained values.
fn weights(actor: &Actor) -> Vec<Vec<f32>> {
    let trained = (0..actor.parameters.len()).filter(|&index| actor.parameters.is_trained(index));
    trained.map(|index| tiny::values(actor.parameters.values(index).unwrap())).collect()
}

fn gradients(actor: &Actor) -> Vec<f32> {
    Gradients::of(&actor.parameters).values.into_iter().flatten().flatten().collect()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    (sum(&mut a.iter().zip(b).map(|(a, b)| a - b)) / sum(&mut b.iter().copied())).sqrt()
}

#[test]
fn two_calls_are_one_call_that_is_split_there() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    for micro_batch_tokens in [40, 64, 1000] {
        let (mut two, mut split, mut one) =
            (trained(micro_batch_tokens), trained(micro_batch_tokens), trained(micro_batch_tokens));
        // The loss of the second call goes on where the first ended.
        let first = step(&mut two, &input(&sequences[..2]));
        let done = first.columns.log_probs.len();
        let shifted = |part: &BatchPart, columns: &PolicyColumns| {
            let targets = part.targets.start + done..part.targets.end + done;
            loss(&BatchPart { targets, ..part.clone() }, columns)
        };
        let (second, parts) =
            two.forward_backward(&input(&sequences[2..]), pass(), &shifted, &hidden).unwrap();
        assert_eq!(parts.iter().sum::<usize>(), second.columns.log_probs.len());
        let whole = step(&mut split, &PassInput { splits: &[2], ..input(&sequences) });
        let joined = [first.columns.log_probs, second.columns.log_probs].concat();
        assert_eq!(joined, whole.columns.log_probs);
        assert_eq!(gradients(&two), gradients(&split), "{micro_batch_tokens} tokens");
        step(&mut one, &input(&sequences));
        let relative = distance(&gradients(&two), &gradients(&one));
        assert!(relative < 1e-5, "{relative:e} with {micro_batch_tokens} tokens");
        let norms = [&mut two, &mut split].map(update);
        assert_eq!(norms[0], norms[1]);
        assert_eq!(weights(&two), weights(&split));
    }
}

#[test]
fn forward_touches_no_gradient_and_an_update_clears_them() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let mut actor = trained(64);
    step(&mut actor, &input(&sequences[..3]));
    let before = gradients(&actor);
    let forward: Forward = actor.forward(&input(&sequences), pass(), &hidden).unwrap();
    assert_eq!(gradients(&actor), before);
    assert!(forward.columns.log_probs.len() > 50 && before.iter().any(|&value| value != 0.0));
    assert!(matches!(update(&mut actor), GradientNorm::Applied(norm) if norm > 0.0));
    assert!(gradients(&actor).iter().all(|&value| value == 0.0));
}

#[test]
fn an_update_changes_no_version_in_use() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let mut actor = trained(64);
    let version = actor.snapshot(None).unwrap();
    let before: Forward = version.forward(&input(&sequences), pass(), &hidden).unwrap();
    step(&mut actor, &input(&sequences));
    update(&mut actor);
    let after: Forward = version.forward(&input(&sequences), pass(), &hidden).unwrap();
    let now: Forward = actor.forward(&input(&sequences), pass(), &hidden).unwrap();
    assert_eq!(before.columns, after.columns);
    assert_ne!(before.columns, now.columns);
    assert!(actor.snapshot(None).unwrap().optim_step(&actor.update_settings(1, 1, None).unwrap()).is_err());
}

#[test]
fn adapters_over_one_base_train_beside_one_another_as_each_alone() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let kinds = [
        (2, "proj", OptimizerKind::AdamW),
        (5, "experts", OptimizerKind::Sgd),
        (3, "o_proj", OptimizerKind::AdamW),
    ];
    let batches = [0..3, 2..5, 1..6, 0..6];
    let alone = |&(rank, on, kind): &(usize, &str, OptimizerKind)| {
        let mut actor = adapted(&actor(64), rank, on, kind);
        batches.iter().for_each(|range| {
            step(&mut actor, &input(&sequences[range.clone()]));
            update(&mut actor);
        });
        weights(&actor)
    };
    let alone: Vec<_> = kinds.iter().map(alone).collect();
    let base = actor(64);
    let mut actors: Vec<Actor> =
        kinds.iter().map(|&(rank, on, kind)| adapted(&base, rank, on, kind)).collect();
    // The base is in memory once.
    let place = |actor: &Actor, index: usize| {
        let name = &actor.parameters.specs[index].name;
        let (storage, _) = tiny::named(&actor.parameters, name).storage_and_layout();
        std::ptr::from_ref(&*storage).addr()
    };
    for index in 0..base.parameters.len() {
        assert!(actors.iter().all(|actor| place(actor, index) == place(&base, index)), "tensor {index}");
    }
    for range in &batches {
        // The gradients of all are there at the same time.
        actors.iter_mut().for_each(|actor| drop(step(actor, &input(&sequences[range.clone()]))));
        for actor in actors.iter_mut().rev() {
            update(actor);
        }
    }
    for ((actor, alone), kind) in actors.iter().zip(&alone).zip(kinds) {
        assert_eq!(&weights(actor), alone, "{kind:?}");
        assert!(alone.iter().flatten().any(|&value| value != 0.0));
    }
    // An actor goes, and the others go on.
    let gone = actors.remove(0);
    drop(gone);
    step(&mut actors[0], &input(&sequences));
    update(&mut actors[0]);
}

#[test]
fn a_position_has_none_one_or_several_given_targets() {
    let sequences = tiny::sequences(272, &[20, 30], 4);
    let own = |sequence: &Sequence| {
        let positions: Vec<u32> =
            (1..sequence.tokens.len()).filter(|&i| sequence.mask[i]).map(|i| i as u32 - 1).collect();
        let tokens: Vec<u32> =
            positions.iter().map(|&position| sequence.tokens[position as usize + 1]).collect();
        GivenTargets { with_gradient: tokens.len(), positions, tokens }
    };
    let given: Vec<GivenTargets> = sequences.iter().map(own).collect();
    let mut actors = [trained(1000), trained(1000)];
    let masked = step(&mut actors[0], &input(&sequences));
    let same = step(&mut actors[1], &PassInput { targets: Some(&given), ..input(&sequences) });
    assert_eq!(masked.columns, same.columns);
    assert_eq!(gradients(&actors[0]), gradients(&actors[1]));
    // Three targets at one position, none at most others. Probabilities of all tokens add up to 1.
    let all = GivenTargets { positions: vec![4; 272], tokens: (0..272).collect(), with_gradient: 272 };
    let few = GivenTargets { positions: vec![0, 7, 7, 7, 28], tokens: vec![5, 1, 2, 2, 9], with_gradient: 5 };
    let targets = [all, few];
    let input = PassInput { targets: Some(&targets), ..input(&sequences) };
    let forward: Forward =
        trained(1000).forward(&input, PassSettings { temperature: 1.0, ..pass() }, &hidden).unwrap();
    let log_probs = &forward.columns.log_probs;
    assert_eq!(log_probs.len(), 277);
    let sum: f64 = log_probs[..272].iter().map(|&log_prob| f64::from(log_prob).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-4, "{sum}");
    assert_eq!(log_probs[274].to_bits(), log_probs[275].to_bits());
}

#[test]
fn what_does_not_fit_is_refused_before_the_first_backward_pass() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let mut actor = trained(64);
    step(&mut actor, &input(&sequences[..2]));
    let before = gradients(&actor);
    let mut wrong = sequences.clone();
    wrong[5].tokens[3] = 272;
    let long = tiny::sequences(272, &[20, 162], 4);
    let given = |positions: Vec<u32>, tokens: Vec<u32>| {
        let mut all = vec![GivenTargets::default(); sequences.len()];
        all[1] = GivenTargets { with_gradient: tokens.len(), positions, tokens };
        all
    };
    let beyond = given(vec![40], vec![1]);
    let unknown = given(vec![3], vec![272]);
    let uneven = given(vec![3, 4], vec![1]);
    let disordered = given(vec![4, 3], vec![1, 1]);
    let of = |targets| PassInput { targets: Some(targets), ..input(&sequences) };
    let calls = AtomicUsize::new(0);
    let counted = |part: &BatchPart, columns: &PolicyColumns| {
        calls.fetch_add(1, Ordering::Relaxed);
        loss(part, columns)
    };
    for (input, reason) in [
        (input(&wrong), "sequence 5: token 272 is not below 272"),
        (input(&long), "sequence 1: 161 tokens exceed the model's context of 160"),
        (of(&beyond), "sequence 1: a target at position 40 of 40"),
        (of(&unknown), "sequence 1: target 272 is not below 272"),
        (of(&uneven), "sequence 1: 2 positions for 1 targets"),
        (of(&disordered), "sequence 1: the positions of targets are not in order"),
        (of(&beyond[1..]), "targets for 5 of 6 sequences"),
    ] {
        let error = actor.forward_backward(&input, pass(), &counted, &hidden).map(drop).unwrap_err();
        assert_eq!(error.to_string(), reason);
        assert!(error.is::<rloss::error::BadInput>());
        assert_eq!(gradients(&actor), before, "{reason}");
    }
    assert_eq!(calls.into_inner(), 0);
}

#[test]
fn a_failure_after_a_backward_pass_clears_the_gradients_and_says_so() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let failing = |part: &BatchPart, columns: &PolicyColumns| match part.sequences.contains(&5) {
        true => anyhow::bail!("the loss failed"),
        false => loss(part, columns),
    };
    for has_earlier in [false, true] {
        let mut actor = trained(64);
        if has_earlier {
            step(&mut actor, &input(&sequences[..2]));
        }
        let error = actor.forward_backward(&input(&sequences), pass(), &failing, &hidden).map(drop);
        let text = format!("{:#}", error.unwrap_err());
        assert!(text.contains("the loss failed"), "{text}");
        assert_eq!(text.contains("gradients since the last update were cleared"), has_earlier, "{text}");
        assert!(gradients(&actor).iter().all(|&value| value == 0.0));
    }
}

#[test]
fn a_norm_that_is_not_finite_is_a_result() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let mut actor = trained(64);
    let before = weights(&actor);
    let infinite = |_: &BatchPart, columns: &PolicyColumns| {
        let count = columns.log_probs.len();
        let (log_probs, entropies) = (vec![f32::INFINITY; count], vec![0.0; count]);
        Ok((PolicyColumns { log_probs, entropies, divergences: None }, ()))
    };
    actor.forward_backward(&input(&sequences), pass(), &infinite, &hidden).unwrap();
    assert!(matches!(update(&mut actor), GradientNorm::Skipped(norm) if !norm.is_finite()));
    assert_eq!((weights(&actor), actor.updates()), (before.clone(), 0));
    assert!(gradients(&actor).iter().all(|&value| value == 0.0));
    // A norm above the limit is skipped too.
    step(&mut actor, &input(&sequences));
    let limited = actor.update_settings(1, 10, Some(1e-9)).unwrap();
    assert!(matches!(actor.optim_step(&limited).unwrap(), GradientNorm::Skipped(norm) if norm > 1e-9));
    assert_eq!(weights(&actor), before);
    step(&mut actor, &input(&sequences));
    assert!(matches!(update(&mut actor), GradientNorm::Applied(_)));
    assert_ne!(weights(&actor), before);
}

#[test]
fn an_adapter_is_saved_and_loaded_with_and_without_its_optimizer() {
    let sequences = tiny::sequences(272, &LENGTHS, 4);
    let base = actor(64);
    let mut saved = adapted(&base, 4, "proj", OptimizerKind::AdamW);
    for range in [0..3, 3..6] {
        step(&mut saved, &input(&sequences[range]));
        update(&mut saved);
    }
    let folder = tempfile::tempdir().unwrap();
    let chat = Chat::Harmony(HarmonyTokenizer::from_embedded().unwrap());
    let companions = CompanionFiles::from_chat(&chat);
    let config = &base.model.config;
    let of_base = ModelFiles { config, format: WeightFormat::F32, companions: &companions, base: None };
    let base_folder = folder.path().join("base");
    base.save(&base_folder, &of_base, false).unwrap();
    let base_model = BaseModel::from_folder(&base_folder).unwrap();
    let files = ModelFiles { base: Some(&base_model), ..of_base };
    let (with, without) = (folder.path().join("with"), folder.path().join("without"));
    saved.save(&with, &files, true).unwrap();
    saved.save(&without, &files, false).unwrap();
    assert!(with.join("trainer.safetensors").exists() && !without.join("trainer.safetensors").exists());

    let fresh = || adapted(&base, 4, "proj", OptimizerKind::AdamW);
    let (mut continued, mut restarted) = (fresh(), fresh());
    step(&mut continued, &input(&sequences[..1]));
    continued.load(&with, Some(saved.updates())).unwrap();
    assert!(gradients(&continued).iter().all(|&value| value == 0.0));
    restarted.load(&without, None).unwrap();
    assert_eq!((weights(&continued), continued.updates()), (weights(&saved), 2));
    assert_eq!((weights(&restarted), restarted.updates()), (weights(&saved), 0));
    for actor in [&mut saved, &mut continued, &mut restarted] {
        step(actor, &input(&sequences));
        update(actor);
    }
    assert_eq!(weights(&continued), weights(&saved));
    assert_ne!(weights(&restarted), weights(&saved), "its moments began at 0");
    let mut other = adapted(&base, 3, "proj", OptimizerKind::AdamW);
    let error = other.load(&without, None).unwrap_err();
    assert!(error.to_string().contains("has another rank"), "{error}");
    assert!(trained(64).load(&without, None).unwrap_err().to_string().contains("has no adapter"));
    assert!(base.without_adapter().load(&without, None).unwrap_err().to_string().contains("frozen"));
}
