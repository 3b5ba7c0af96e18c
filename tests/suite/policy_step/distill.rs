//! Updates with a teacher.

use super::*;
use crate::{qwen2, tiny};
use rloss::actor::forward_backward::Pass;
use rloss::actor::teacher::{PromptChange, Teacher};
use rloss::model::config::Config;
use rloss::ops::cpu::edit;
use rloss::policy::distill::{DistillSettings, TeacherSource};

/// A teacher of another family and of other sizes, with the policy's vocabulary.
fn teacher() -> Actor {
    let config = Config { hidden_size: 32, intermediate_size: 48, ..qwen2::config(true) };
    let (model, parameters) = tiny::model(config, 8);
    tiny::actor(model, parameters, 2, 64, false)
}

fn policy(coefficient: f64, policy_loss_coefficient: f64) -> PolicySettings {
    let teacher = TeacherSource::Path("teacher".into());
    let distill = DistillSettings { teacher, coefficient, policy_loss_coefficient, system_prompt: None };
    PolicySettings { distill: Some(distill), ..PolicySettings::default() }
}

fn update(fixture: &Fixture, policy: &PolicySettings, teacher: &Actor) -> tiny::Learned<PolicyUpdate> {
    let teacher = Some(Teacher { actor: teacher, prompt: None });
    let step = PolicyStep { teacher, ..fixture.step(policy, None) };
    fixture.learned(&step, &fixture.prepared(&step)).unwrap().unwrap()
}

fn get(update: &PolicyUpdate, name: &str) -> f64 {
    update.metrics.get(name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn the_divergence_adds_to_the_policy_loss_and_log_probs_keep_their_bits() {
    let fixture = Fixture::new();
    let teacher = &teacher();
    let plain = fixture.update(&PolicySettings::default());
    let only = update(&fixture, &policy(1.0, 0.0), teacher);
    let both = update(&fixture, &policy(0.5, 2.0), teacher);
    for distilled in [&only, &both] {
        assert_eq!(distilled.forward.columns.log_probs, plain.forward.columns.log_probs);
        assert_eq!(get(distilled, "actor/entropy"), get(&plain, "actor/entropy"));
        assert_eq!(get(distilled, "actor/distill_kl"), get(&only, "actor/distill_kl"));
    }
    assert!(get(&only, "actor/distill_kl") > 0.1);
    assert_eq!(only.metrics.get("actor/pg_loss"), None);
    assert_eq!(get(&both, "actor/pg_loss"), get(&plain, "actor/pg_loss"));
    let expected: Vec<f32> =
        values(&plain).iter().zip(values(&only)).map(|(plain, only)| 2.0 * plain + 0.5 * only).collect();
    assert!(distance(&values(&both), &expected) < 1e-5, "{}", distance(&values(&both), &expected));
    // Replayed experts are the policy's own; the teacher has none.
    let replaying = PolicySettings { router_replay: RouterReplay::Rollout, ..policy(1.0, 0.0) };
    assert_eq!(values(&update(&fixture, &replaying, teacher)), values(&only));
    // The settings of the policy loss do not matter without it.
    let other = PolicySettings { loss: loss("reinforce"), ..policy(1.0, 0.0) };
    assert_eq!(values(&update(&fixture, &other, teacher)), values(&only));
}

/// A step along the gradient g changes the divergence by its length times |g|.
#[test]
fn the_gradient_of_the_whole_model_is_that_of_finite_differences() {
    let fixture = Fixture::new();
    let teacher = &teacher();
    let policy = policy(1.0, 0.0);
    let at = |fixture: &Fixture| update(fixture, &policy, teacher);
    let gradients = at(&fixture).gradients;
    let square = gradients.values.iter().flatten().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>();
    let shift = |length: f64| {
        for (index, gradient) in gradients.values.iter().enumerate() {
            let gradient = gradient.as_ref().unwrap();
            edit(fixture.actor.parameters.values(index).unwrap(), |values| {
                let step = (length / square.sqrt()) as f32;
                values.iter_mut().zip(gradient).for_each(|(value, g)| *value += step * g);
                Ok(())
            })
            .unwrap();
        }
        get(&at(&fixture), "actor/distill_kl")
    };
    let length = 2e-3;
    let (above, below) = (shift(length), shift(-2.0 * length));
    let measured = (above - below) / (2.0 * length);
    assert!((measured / square.sqrt() - 1.0).abs() < 2e-3, "{measured} and not {}", square.sqrt());
}

#[test]
fn the_policy_itself_as_teacher_gives_no_divergence_and_no_gradient() {
    let fixture = Fixture::new();
    let own = update(&fixture, &policy(1.0, 0.0), &fixture.actor);
    assert!(get(&own, "actor/distill_kl").abs() < 1e-7, "{}", get(&own, "actor/distill_kl"));
    let largest = values(&own).iter().fold(0f32, |largest, g| largest.max(g.abs()));
    assert!(largest < 1e-6, "{largest}");
}

#[test]
fn another_system_prompt_is_read_by_the_teacher_alone() {
    let sequence = |prompt: &[u32], rest: &[u32]| Sequence {
        tokens: [prompt, rest].concat(),
        mask: [vec![false; prompt.len() + 3], vec![true; rest.len() - 3]].concat(),
        kept_tokens: vec![],
    };
    let rests: Vec<Vec<u32>> = (0..6).map(|i| (0..20 + i).map(|t| (t * 7 + i / 3) % 272).collect()).collect();
    let of = |prompt: &[u32]| -> Vec<Sequence> { rests.iter().map(|rest| sequence(prompt, rest)).collect() };
    let (own, others) = ([5u32, 6, 7], [9u32, 8, 7, 6, 5]);
    let fixture = Fixture::of(&of(&own));
    let teacher_actor = &teacher();
    let change = PromptChange { policy: own.to_vec(), teacher: others.to_vec() };
    assert_eq!(change.added_tokens(), 2);
    let policy = policy(1.0, 0.0);
    let step = fixture.step(&policy, None);
    let batch = fixture.prepared(&step);
    let teacher = Teacher { actor: teacher_actor, prompt: Some(&change) };
    let sequences = batch.input().sequences;
    let limits = tiny::runner(&fixture.actor).limits(64);
    let micro_batches = MicroBatch::split_with_prefixes(&batch.sequences, limits, |_| usize::MAX);
    let passes = teacher.passes(&sequences, &micro_batches).unwrap();
    assert!(micro_batches.len() > 1);
    let (model, weights) = (&teacher_actor.model, &teacher_actor.parameters.pass_weights(None).unwrap());
    for (index, micro_batch) in micro_batches.iter().enumerate() {
        let rows = tiny::values(&passes.rows(index).unwrap().h);
        let expected: Vec<f32> = of(&others)[micro_batch.sequences.clone()]
            .iter()
            .flat_map(|sequence| {
                let batch = &MicroBatch::split(std::slice::from_ref(sequence), 1000)[0];
                let settings = pass();
                let pass = Pass { model, weights, batch, settings, recompute_layers: false, teacher: None };
                tiny::values(&pass.teacher_rows().unwrap().h)
            })
            .collect();
        assert_eq!(rows, expected);
    }
    let with_change = PolicyStep { teacher: Some(teacher), ..fixture.step(&policy, None) };
    let changed = fixture.learned(&with_change, &batch).unwrap().unwrap();
    let unchanged = update(&fixture, &policy, teacher_actor);
    assert_eq!(changed.forward.columns.log_probs, unchanged.forward.columns.log_probs);
    assert_ne!(get(&changed, "actor/distill_kl"), get(&unchanged, "actor/distill_kl"));

    let absent = PromptChange { policy: vec![1, 2], ..change.clone() };
    let teacher = Teacher { prompt: Some(&absent), ..teacher };
    let error = teacher.passes(&sequences, &micro_batches).err().unwrap().to_string();
    assert!(error.contains("does not begin with the system prompt"), "{error}");
}
