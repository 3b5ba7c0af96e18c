//! The critic: its gradient through the whole stack, its estimate, its loss over minibatches.

use crate::tiny::{self, Gradients, Learned, learned};
use rloss::actor::forward_backward::{ColumnLoss, Pass, PassOutput, PassSettings};
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::{Actor, CriticColumns, OptimizerSettings, PolicyColumns, UpdateSettings};
use rloss::learner::batch::Batch;
use rloss::learner::critic::{Critic, add_value_gradients};
use rloss::learner::{CriticSettings, TrainSettings};
use rloss::metrics::{Console, Metrics, Progress, Timings};
use rloss::model::parameters::Parameters;
use rloss::policy::Sequences;
use rloss::policy::advantage::Advantage;
use rloss::policy::advantage::{gae, whiten};
use rloss::policy::divergence::KlEstimator;
use rloss::policy::value::explained_variance;
use rloss::policy::{Aggregation, KlPlacement, KlSettings, PolicySettings};
use rloss::trainer::gradient_norms::GradientNormLimits;
use rloss::trainer::observer::Stages;
use rloss::trainer::step::PolicyStep;
use rloss::trajectory::{Group, Trajectory};

const LENGTHS: [usize; 5] = [30, 41, 2, 25, 60];

/// The aggregation of the losses, and the maximum number of response tokens.
const AGGREGATION: (Aggregation, usize) = (Aggregation::TokenMean, 72);

struct Fixture {
    policy: Actor,
    critic: Critic,
    sequences: Vec<Sequence>,
}

fn pass() -> PassSettings {
    tiny::pass_settings(0.9, 0.0)
}

impl Fixture {
    fn new(settings: CriticSettings) -> Self {
        let (model, policy) = tiny::model(tiny::config(true), 3);
        let trainable = vec![true; policy.len() + 1];
        let policy = tiny::actor(model, policy, 2, 64, true);
        let critic = Critic::new(&policy, &trainable, &settings, 7, false).unwrap();
        Self { policy, critic, sequences: tiny::sequences(272, &LENGTHS, 4) }
    }

    /// The figures of one update by micro-batches of up to so many tokens, and its gradients.
    fn update_by(&self, micro_batch_tokens: usize, batch: &Batch) -> Option<Learned<Metrics>> {
        let mut actor = tiny::trained(&self.critic.actor, micro_batch_tokens);
        let output = add_value_gradients(&mut actor, &self.critic.settings, AGGREGATION, batch).unwrap()?;
        Some(Learned { output, gradients: Gradients::of(&actor.parameters) })
    }

    fn update(&self, batch: &Batch) -> Learned<Metrics> {
        self.update_by(64, batch).unwrap()
    }

    /// ½ the sum of squared distances from `targets`, and its gradient.
    fn squared(&self, targets: &[f32], recompute_layers: bool) -> (f64, Gradients) {
        let loss = std::cell::Cell::new(0.0);
        let squared = |CriticColumns { values }: &CriticColumns| {
            let errors: Vec<f32> = values.iter().zip(targets).map(|(v, t)| v - t).collect();
            loss.set(errors.iter().map(|&e| 0.5 * f64::from(e).powi(2)).sum());
            Ok(CriticColumns { values: errors })
        };
        let Actor { model, parameters, .. } = &self.critic.actor;
        let of = (&**model, &self.batch(), pass(), recompute_layers);
        let found = learned(parameters, of, |pass| {
            pass.forward_backward(&ColumnLoss { gradient: &squared, skips_zeros: false }, &|| ())
        });
        (loss.get(), found.gradients)
    }

    /// ½ the sum of squared distances from `targets`, by a forward alone.
    fn loss(&self, targets: &[f32]) -> f64 {
        let Actor { model, parameters, .. } = &self.critic.actor;
        let (weights, batch) = (&parameters.frozen_weights(None).unwrap(), &self.batch());
        let pass = Pass { model, weights, batch, settings: pass(), recompute_layers: true, teacher: None };
        let CriticColumns { values } = pass.forward(&|| ()).unwrap().columns;
        values.iter().zip(targets).map(|(v, t)| 0.5 * f64::from(v - t).powi(2)).sum()
    }

    /// All sequences, with the experts that the policy chooses: a step of any size leaves them as they are.
    fn batch(&self) -> MicroBatch {
        let mut batches = MicroBatch::split(&self.sequences, 100_000);
        let outputs = tiny::runner(&self.policy).forward(&batches, pass(), &Progress::hidden());
        let output: PassOutput = outputs.unwrap().remove(0);
        batches[0].replay = Some(output.routed_experts);
        batches.remove(0)
    }

    /// The trained tokens of the sequences.
    fn packed(&self) -> Batch {
        let groups = groups(self);
        Batch::new(&groups.iter().collect::<Vec<_>>())
    }

    fn values(&self) -> Vec<f32> {
        self.critic.values(&self.packed()).unwrap()
    }

    fn learnable(&self) -> Batch {
        let (values, mut batch) = (self.values(), self.packed());
        batch.advantages = vec![0.0; values.len()];
        batch.returns = Some(values.iter().enumerate().map(|(i, v)| v + 1.0 - (i % 3) as f32).collect());
        batch.values = Some(values);
        batch
    }
}

fn targets(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.7).sin()).collect()
}

fn targets_of(fixture: &Fixture) -> Vec<f32> {
    targets(fixture.values().len())
}

#[test]
fn a_new_critic_is_the_policys_trunk_with_a_small_head_of_its_own() {
    let fixture = Fixture::new(CriticSettings::default());
    let (critic, policy) = (&fixture.critic.actor.parameters, &fixture.policy.parameters);
    for (index, spec) in policy.specs.iter().enumerate().filter(|(_, spec)| spec.name != "lm_head.weight") {
        let position = critic.index_of(&spec.name).unwrap();
        let read = |p: &Parameters, i: usize| tiny::values(p.values(i).unwrap());
        assert_eq!(read(critic, position), read(policy, index), "{}", spec.name);
    }
    let head = tiny::values(tiny::named(critic, "score.weight"));
    let std = (head.iter().map(|w| w * w).sum::<f32>() / 64.0).sqrt();
    assert!(head.len() == 64 && (0.01..0.022).contains(&std), "{std} of 1/65");
    // Its own memory: what moves the critic leaves the policy as it is.
    let before = tiny::values(policy.values(0).unwrap());
    tiny::set(critic, 0, &vec![0.0; before.len()]);
    assert_eq!(tiny::values(policy.values(0).unwrap()), before);
}

#[test]
fn the_heads_gradient_is_the_hand_form() {
    let fixture = Fixture::new(CriticSettings::default());
    let targets = targets_of(&fixture);
    let values = fixture.values();
    let (_, gradients) = fixture.squared(&targets, true);
    let bias = fixture.critic.actor.parameters.index_of("score.bias").unwrap();
    let sum: f64 = values.iter().zip(&targets).map(|(v, t)| f64::from(v - t)).sum();
    assert!((f64::from(gradients.values[bias].as_ref().unwrap()[0]) - sum).abs() < 1e-4 * sum.abs().max(1.0));
    // V is linear in the head: its gradient times the weights, plus the bias's, is Σ (V − R)·V.
    let weight = fixture.critic.actor.parameters.index_of("score.weight").unwrap();
    let weights = tiny::values(fixture.critic.actor.parameters.values(weight).unwrap());
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum::<f64>();
    let errors: Vec<f32> = values.iter().zip(&targets).map(|(v, t)| v - t).collect();
    let along = product(gradients.values[weight].as_ref().unwrap(), &weights);
    assert!((along - product(&errors, &values)).abs() < 1e-4 * along.abs().max(0.1), "{along}");
}

#[test]
fn the_gradient_through_the_whole_trunk_is_that_of_differences() {
    let fixture = Fixture::new(CriticSettings::default());
    let targets = targets_of(&fixture);
    let parameters = &fixture.critic.actor.parameters;
    let (loss, gradients) = fixture.squared(&targets, false);
    let mut checked = 0;
    for (index, spec) in parameters.specs.iter().enumerate() {
        let gradient = gradients.values[index].as_ref().unwrap();
        let norm = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{}: no gradient", spec.name);
        let original = tiny::values(parameters.values(index).unwrap());
        let loss_at = |distance: f64| {
            let moved: Vec<f32> = original
                .iter()
                .zip(gradient)
                .map(|(w, &g)| (f64::from(*w) + distance * f64::from(g) / norm) as f32)
                .collect();
            tiny::set(parameters, index, &moved);
            fixture.loss(&targets)
        };
        // A step that changes the loss by up to a hundredth, and half of it: what is left is of the fourth
        // order.
        let h = (0.01 * loss / norm).min(0.1);
        let slope = |h: f64| (loss_at(h) - loss_at(-h)) / (2.0 * h);
        let slope = (4.0 * slope(h / 2.0) - slope(h)) / 3.0;
        loss_at(0.0);
        assert!((slope - norm).abs() < 0.01 * norm, "{}: gradient {norm}, differences {slope}", spec.name);
        checked += 1;
    }
    assert_eq!(checked, parameters.len());
}

#[test]
fn recomputed_layers_give_the_same_bits_as_the_whole_graph() {
    let fixture = Fixture::new(CriticSettings::default());
    let targets = targets_of(&fixture);
    let (whole, recomputed) = (fixture.squared(&targets, false), fixture.squared(&targets, true));
    assert_eq!(whole.0.to_bits(), recomputed.0.to_bits());
    assert_eq!(whole.1.values, recomputed.1.values);
}

#[test]
fn a_language_model_has_no_values() {
    let fixture = Fixture::new(CriticSettings::default());
    let [policy, critic] = [&fixture.policy, &fixture.critic.actor].map(tiny::runner);
    let batches = MicroBatch::split(&fixture.sequences, 64);
    assert!(policy.forward::<CriticColumns>(&batches, pass(), &Progress::hidden()).is_err());
    assert!(critic.forward::<PolicyColumns>(&batches, pass(), &Progress::hidden()).is_err());
}

#[test]
fn the_loss_does_not_depend_on_the_split_and_rejected_tokens_leave_it() {
    let fixture = Fixture::new(CriticSettings::default());
    let mut batch = fixture.learnable();
    let flat = |g: &Gradients| g.values.iter().flatten().flatten().copied().collect::<Vec<f32>>();
    let split = fixture.update(&batch);
    let whole = fixture.update_by(100_000, &batch).unwrap();
    let loss = |found: &Metrics| found.get("critic/vf_loss").unwrap();
    assert!((loss(&split) - loss(&whole)).abs() < 1e-6);
    for (a, b) in flat(&split.gradients).iter().zip(flat(&whole.gradients)) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
    // Returns are V + 1, V, V − 1 in turn.
    let squares: f64 = (0..batch.mask.len()).map(|i| (1.0 - (i % 3) as f64).powi(2)).sum();
    assert!((loss(&whole) - 0.5 * squares / batch.mask.len() as f64).abs() < 1e-4);
    (0..batch.mask.len()).for_each(|i| batch.mask[i] = i % 3 == 1);
    assert!(loss(&fixture.update(&batch)) < 1e-9);
    batch.mask.fill(false);
    assert!(fixture.update_by(64, &batch).is_none());
}

#[test]
fn a_value_that_came_nearer_by_more_than_the_clip_learns_no_more() {
    let with = |value_clip| Fixture::new(CriticSettings { value_clip, ..CriticSettings::default() });
    let update = |fixture: &Fixture, moved: f32| {
        let mut batch = fixture.learnable();
        // The step began `moved` away, and the return lies further the same way.
        let current = batch.values.clone().unwrap();
        batch.values = Some(current.iter().map(|v| v - moved).collect());
        batch.returns = Some(current.iter().map(|v| v + 1.0).collect());
        fixture.update(&batch)
    };
    let clipped = |found: &Metrics| found.get("critic/vf_clipfrac").unwrap();
    let norm = |found: &Learned<Metrics>| {
        found.gradients.values.iter().flatten().flatten().map(|g| g * g).sum::<f32>()
    };
    let bound = with(0.5);
    let (within, beyond) = (update(&bound, 0.4), update(&bound, 0.6));
    assert_eq!((clipped(&within), clipped(&beyond)), (0.0, 1.0));
    assert!(norm(&within) > 0.0);
    assert_eq!(norm(&beyond), 0.0);
    let free = update(&with(0.0), 0.6);
    assert_eq!(clipped(&free), 0.0);
    assert!(norm(&free) > 0.0);
}

fn groups(fixture: &Fixture) -> Vec<Group> {
    let trajectory = |(i, sequence): (usize, &Sequence)| Trajectory {
        prompt: i as u64,
        log_probs: sequence.mask.iter().map(|&m| if m { -2.0 } else { 0.0 }).collect(),
        reward: [1.0, -1.0, 0.5][i % 3],
        ..tiny::trajectory(sequence)
    };
    fixture
        .sequences
        .iter()
        .enumerate()
        .map(trajectory)
        .map(|t| Group { trajectories: vec![t], greedy: None })
        .collect()
}

#[test]
fn advantages_are_gae_of_the_rewards_at_the_end_less_the_divergence() {
    let settings = CriticSettings { gamma: 0.9, lambda: 0.8, ..CriticSettings::default() };
    let fixture = Fixture::new(settings);
    let groups = groups(&fixture);
    let groups: Vec<&Group> = groups.iter().collect();
    let (_, other) = tiny::model(tiny::config(true), 5);
    let other = fixture.policy.beside(other);
    for place in [KlPlacement::None, KlPlacement::Reward] {
        let kl = KlSettings { place, estimator: KlEstimator::K1, ..KlSettings::default() };
        let policy = PolicySettings { advantage: Advantage::Gae, kl, ..PolicySettings::default() };
        let step = PolicyStep {
            step: 1,
            reference: Some(&other),
            teacher: None,
            policy: &policy,
            train: &TrainSettings::default(),
            kl_coefficient: 0.5,
            pass: pass(),
            old_log_prob_forward: None,
            response_tokens_max: 72,
            reward_min: -1.0,
            reward_weights: const { &std::collections::BTreeMap::new() },
            norm_limits: GradientNormLimits::default(),
            stages: Stages { timings: &Timings::new(), console: &Console::silent() },
        };
        let (found, _, metrics) = step.prepare(&groups, &fixture.policy, Some(&fixture.critic)).unwrap();
        let values = fixture.values();
        assert_eq!(found.values.as_ref(), Some(&values));
        let mut rewards = vec![0.0; values.len()];
        if let (Some(training), Some(reference)) = (&found.training_log_probs, &found.reference_log_probs) {
            rewards = training.iter().zip(reference).map(|(t, r)| (-0.5 * f64::from(t - r)) as f32).collect();
        }
        assert_eq!(rewards.iter().any(|&r| r != 0.0), place == KlPlacement::Reward);
        for (span, group) in found.cu_seqlens.windows(2).zip(&groups) {
            if span[1] > span[0] {
                rewards[span[1] - 1] += group.trajectories[0].reward;
            }
        }
        let mask = vec![true; values.len()];
        let sequences = Sequences::new(&found.cu_seqlens, &mask).unwrap();
        let expected = gae(&sequences, &rewards, &values, 0.9, 0.8).unwrap();
        let near = |found: &[f32], expected: &[f32]| {
            assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-5), "{place:?}");
        };
        near(found.returns.as_ref().unwrap(), &expected.returns);
        near(&found.advantages, &whiten(&sequences, &expected.advantages).unwrap());
        let explained = explained_variance(&sequences, &values, &expected.returns).unwrap();
        let gap = metrics.get("critic/vf_explained_var").unwrap() - explained.unwrap();
        assert!(gap.abs() < 1e-5);
        let mean = expected.returns.iter().map(|&r| f64::from(r)).sum::<f64>() / values.len() as f64;
        assert!((metrics.get("critic/returns/mean").unwrap() - mean).abs() < 1e-5);
        assert!(step.prepare(&groups, &fixture.policy, None).is_err());
    }
}

#[test]
fn a_critic_learns_its_returns() {
    let optimizer = OptimizerSettings { lr: 3e-3, ..OptimizerSettings::default() };
    let mut fixture =
        Fixture::new(CriticSettings { value_clip: 0.0, optimizer, ..CriticSettings::default() });
    let mut batch = fixture.learnable();
    let count = batch.mask.len();
    batch.returns = Some((0..count).map(|i| if i < count / 2 { 1.0 } else { -1.0 }).collect());
    let returns = batch.returns.clone().unwrap();
    let explained = |fixture: &Fixture| {
        let values = fixture.values();
        explained_variance(&batch.masked_sequences().unwrap(), &values, &returns).unwrap().unwrap()
    };
    assert!(explained(&fixture) < 0.1);
    for update in 1..=60 {
        let Critic { settings, actor } = &mut fixture.critic;
        add_value_gradients(actor, settings, AGGREGATION, &batch).unwrap().unwrap();
        let update = actor.update_settings(update, 60, None).unwrap();
        actor.optim_step(&UpdateSettings { grad_norm_max: 0.0, ..update }).unwrap();
    }
    assert!(explained(&fixture) > 0.9, "{}", explained(&fixture));
}

#[test]
fn explained_variance_is_one_for_a_prophet_and_zero_for_a_constant() {
    let (cu_seqlens, mask) = ([0, 2, 5], [true, true, false, true, true]);
    let sequences = Sequences::new(&cu_seqlens, &mask).unwrap();
    let returns = [1.0, -1.0, f32::NAN, 0.5, 3.0];
    let explained =
        |values: &[f32], returns: &[f32]| explained_variance(&sequences, values, returns).unwrap();
    assert_eq!(explained(&returns, &returns), Some(1.0));
    // An error that is the same everywhere is not a variance.
    assert_eq!(explained(&returns.map(|r| r - 0.25), &returns), Some(1.0));
    assert_eq!(explained(&[0.25; 5], &returns), Some(0.0));
    assert_eq!(explained(&returns.map(|r| -r), &returns), Some(-3.0));
    assert_eq!(explained(&returns, &[0.1; 5]), None);
    assert!(explained_variance(&sequences, &[f32::NAN; 5], &returns).is_err());
}
