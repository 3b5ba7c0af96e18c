//! The policy's updates through the training pass: anchors, correction, reference, entropy, replay,
//! minibatches.

mod cut_answers;
mod distill;
mod off_policy_mask;
mod selection;
mod shared;
mod truncated;
mod variants;

use crate::tiny::{self, Gradients, Learned};
use rloss::actor::forward_backward::{PassOutput, PassSettings};
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::{Actor, Forward};
use rloss::checkpoint::reference;
use rloss::learner::TrainSettings;
use rloss::learner::batch::Batch;
use rloss::metrics::{Console, Metrics, Progress, Timings};
use rloss::model::parameters::Parameters;
use rloss::policy::advantage::Advantage;
use rloss::policy::correction::{ImportanceSampling, RejectOption};
use rloss::policy::divergence::KlEstimator;
use rloss::policy::loss::Loss;
use rloss::policy::ratio::OldLogProbSource;
use rloss::policy::{
    Aggregation, CorrectionSettings, KlPlacement, KlSettings, OverlongSettings, PolicySettings, RouterReplay,
};
use rloss::settings::Choice;
use rloss::trainer::gradient_norms::GradientNormLimits;
use rloss::trainer::observer::Stages;
use rloss::trainer::step::{PolicyStep, PolicyUpdate};
use rloss::trajectory::{Group, Trajectory};

fn loss(name: &str) -> Loss {
    Loss::from_name(name).unwrap()
}

const LENGTHS: [usize; 6] = [30, 41, 2, 25, 60, 33];

/// A policy and trajectories that it could just have sampled: log-probabilities and routes are its own.
struct Fixture {
    actor: Actor,
    groups: Vec<Group>,
    train: TrainSettings,
    timings: Timings,
    console: Console,
}

fn pass() -> PassSettings {
    tiny::pass_settings(0.9, 0.0)
}

impl Fixture {
    fn new() -> Self {
        Self::of(&tiny::sequences(272, &LENGTHS, 4))
    }

    /// Groups of three of `sequences`.
    fn of(sequences: &[Sequence]) -> Self {
        let (model, parameters) = tiny::model(tiny::config(false), 3);
        let actor = tiny::actor(model, parameters, 2, 64, false);
        let trajectories: Vec<Trajectory> =
            sequences.iter().enumerate().map(|(i, s)| trajectory(&actor, s, i)).collect();
        let groups =
            trajectories.chunks(3).map(|t| Group { trajectories: t.to_vec(), greedy: None }).collect();
        let (timings, console) = (Timings::new(), Console::silent());
        Self { actor, groups, train: TrainSettings::default(), timings, console }
    }

    /// The same policy and trajectories, with micro-batches of up to `tokens` tokens.
    fn with_micro_batches_of(&self, tokens: usize) -> Self {
        let (actor, groups, train) =
            (tiny::trained(&self.actor, tokens), self.groups.clone(), self.train.clone());
        Self { actor, groups, train, timings: Timings::new(), console: Console::silent() }
    }

    fn step<'a>(&'a self, policy: &'a PolicySettings, reference: Option<&'a Actor>) -> PolicyStep<'a> {
        PolicyStep {
            step: 1,
            reference,
            teacher: None,
            policy,
            train: &self.train,
            kl_coefficient: policy.kl.coefficient,
            pass: pass(),
            old_log_prob_forward: None,
            response_tokens_max: 72,
            reward_min: 0.0,
            reward_weights: const { &std::collections::BTreeMap::new() },
            norm_limits: GradientNormLimits::default(),
            stages: Stages { timings: &self.timings, console: &self.console },
        }
    }

    fn prepare(&self, step: &PolicyStep) -> anyhow::Result<(Batch, Option<Forward>, Metrics)> {
        step.prepare(&self.groups(), &self.actor, None)
    }

    fn prepared(&self, step: &PolicyStep) -> Batch {
        self.prepare(step).unwrap().0
    }

    /// An update, and its gradients alone.
    fn learned(&self, step: &PolicyStep, batch: &Batch) -> anyhow::Result<Option<Learned<PolicyUpdate>>> {
        let mut actor = tiny::trained(&self.actor, self.actor.execution.micro_batch_tokens);
        let update = step.gradients(batch, &mut actor)?;
        let gradients = Gradients::of(&actor.parameters);
        Ok(update.map(|output| Learned { output, gradients }))
    }

    fn update(&self, policy: &PolicySettings) -> Learned<PolicyUpdate> {
        let step = self.step(policy, Some(&self.actor));
        self.learned(&step, &self.prepared(&step)).unwrap().unwrap()
    }

    /// The metrics of `batch` against `forward`.
    fn mismatch_metrics(&self, batch: &Batch, forward: &Forward) -> Metrics {
        batch.mismatch_metrics(forward, self.actor.model.config.num_experts_per_tok).unwrap()
    }

    fn groups(&self) -> Vec<&Group> {
        self.groups.iter().collect()
    }

    fn trajectories(&mut self) -> impl Iterator<Item = &mut Trajectory> {
        self.groups.iter_mut().flat_map(|g| &mut g.trajectories)
    }
}

fn trajectory(actor: &Actor, sequence: &Sequence, index: usize) -> Trajectory {
    let batches = MicroBatch::split(std::slice::from_ref(sequence), 1000);
    let output: PassOutput =
        tiny::runner(actor).forward(&batches, pass(), &Progress::hidden()).unwrap().remove(0);
    let mut found = output.columns.log_probs.iter().copied();
    let log_probs = sequence.mask.iter().map(|&m| if m { found.next().unwrap() } else { 0.0 }).collect();
    let layers: Vec<Vec<Vec<u32>>> =
        output.routed_experts.iter().map(|layer| layer.to_vec2().unwrap()).collect();
    let of_token = |t: usize| layers.iter().flat_map(|layer| &layer[t]).map(|&e| e as u16).collect();
    let mut routed_experts: Vec<Vec<u16>> = (0..sequence.tokens.len() - 1).map(of_token).collect();
    routed_experts.push(vec![]);
    Trajectory {
        prompt: index as u64 / 3,
        sample: index as u64 % 3,
        log_probs,
        routed_experts,
        reward: [1.0, 0.0, 0.5][index % 3] * (1.0 + index as f32),
        ..tiny::trajectory(sequence)
    }
}

fn values(update: &Learned<PolicyUpdate>) -> Vec<f32> {
    update.gradients.values.iter().flatten().flatten().copied().collect()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let gap = squares(&mut a.iter().zip(b).map(|(x, y)| x - y));
    (gap / squares(&mut b.iter().copied())).sqrt()
}

#[test]
fn on_fresh_data_every_anchor_and_correction_gives_the_same_bits() {
    let fixture = Fixture::new();
    for loss in ["ppo", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "sapo", "vespo"].map(loss) {
        let plain = fixture.update(&PolicySettings { loss, ..PolicySettings::default() });
        assert_eq!(plain.metrics.get("actor/pg_clipfrac"), Some(0.0));
        let correction = CorrectionSettings {
            is: ImportanceSampling::Token,
            threshold: vec![0.5, 2.0],
            normalize: true,
            reject: vec![RejectOption::SeqSumK3, RejectOption::TokenK1],
            reject_bounds: vec![vec![0.1], vec![1.1]],
            off_policy_mask: Some(1e-3),
        };
        let mut others = vec![];
        for old_logprob in [OldLogProbSource::Detach, OldLogProbSource::Rollout, OldLogProbSource::Recompute]
        {
            others.push(PolicySettings { loss, old_logprob, ..PolicySettings::default() });
        }
        if loss.name != "geo_mean" {
            // Its weights carry the formula's 1e-10.
            others.push(PolicySettings { loss, correction, ..PolicySettings::default() });
        }
        others.push(PolicySettings {
            loss,
            router_replay: RouterReplay::Rollout,
            ..PolicySettings::default()
        });
        let (old_logprob, router_replay) = (OldLogProbSource::Recompute, RouterReplay::Recompute);
        others.push(PolicySettings { loss, old_logprob, router_replay, ..PolicySettings::default() });
        for other in others {
            let update = fixture.update(&other);
            assert_eq!(plain.metrics, update.metrics, "{other:?}");
            assert!(values(&plain) == values(&update), "{other:?}");
        }
    }
}

#[test]
fn weights_are_bounded_and_rejected_tokens_leave_the_denominator() {
    let mut fixture = Fixture::new();
    // The first trajectory was three times likelier under training than at sampling, token by token.
    let first = fixture.trajectories().next().unwrap();
    first.log_probs.iter_mut().for_each(|l| *l -= 3f32.ln());
    let base = PolicySettings { loss: loss("reinforce"), ..PolicySettings::default() };
    let weighed = CorrectionSettings { is: ImportanceSampling::Token, ..CorrectionSettings::default() };
    let weighed = PolicySettings { correction: weighed, ..base.clone() };
    let (batch, _, metrics) = fixture.prepare(&fixture.step(&weighed, None)).unwrap();
    let tokens = batch.cu_seqlens[1];
    let weights = batch.weights.as_ref().unwrap();
    assert!(weights[..tokens].iter().all(|&w| w == 2.0) && weights[tokens..].iter().all(|&w| w == 1.0));
    let high = metrics.get("rollout_corr/rollout_is_ratio_fraction_high").unwrap();
    assert!((high - tokens as f64 / weights.len() as f64).abs() < 1e-12);

    let reject = |bound| CorrectionSettings {
        reject: vec![RejectOption::SeqMeanK1],
        reject_bounds: vec![vec![bound]],
        ..CorrectionSettings::default()
    };
    let rejecting = PolicySettings { correction: reject(2.0), ..base.clone() };
    let step = fixture.step(&rejecting, None);
    let batch = fixture.prepared(&step);
    assert!(batch.mask[..tokens].iter().all(|m| !m) && batch.mask[tokens..].iter().all(|&m| m));
    // The rest alone, with the same advantages, has the same gradient.
    let mut rest = batch.select(&[1, 2, 3, 4, 5]).into_owned();
    rest.mask.fill(true);
    let [thinned, alone] = [&batch, &rest].map(|batch| fixture.learned(&step, batch).unwrap().unwrap());
    assert!(distance(&values(&thinned), &values(&alone)) < 1e-5);

    fixture.trajectories().for_each(|t| t.log_probs.iter_mut().for_each(|l| *l -= 9.0));
    let step = fixture.step(&rejecting, None);
    assert!(fixture.learned(&step, &fixture.prepared(&step)).unwrap().is_none());
}

#[test]
fn minibatches_cover_the_batch_once_and_add_up_to_it() {
    let fixture = Fixture::new();
    let policy = PolicySettings {
        old_logprob: OldLogProbSource::Rollout,
        aggregation: Aggregation::TokenSum,
        ..PolicySettings::default()
    };
    let train = TrainSettings { minibatches: 2, ..fixture.train.clone() };
    let step = PolicyStep { train: &train, ..fixture.step(&policy, None) };
    let batch = fixture.prepared(&step);
    assert_eq!(batch.minibatches(1, 7, 1, 0), [[0, 1, 2, 3, 4, 5]]);
    let parts = batch.minibatches(4, 7, 1, 0);
    assert_eq!(parts, batch.minibatches(4, 7, 1, 0));
    assert_ne!(parts, batch.minibatches(4, 7, 1, 1));
    assert_ne!(parts, batch.minibatches(4, 7, 2, 0));
    let mut all = parts.concat();
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3, 4, 5]);

    let whole = values(&fixture.learned(&step, &batch).unwrap().unwrap());
    let mut sum = vec![0.0; whole.len()];
    for part in parts {
        let update = fixture.learned(&step, &batch.select(&part)).unwrap().unwrap();
        sum.iter_mut().zip(values(&update)).for_each(|(s, g)| *s += g);
    }
    assert!(distance(&sum, &whole) < 1e-5);
    let detach = PolicySettings::default();
    let step = PolicyStep { train: &train, ..fixture.step(&detach, None) };
    let refused = fixture.learned(&step, &fixture.prepared(&step)).err().unwrap();
    assert!(format!("{refused:#}").contains("would change the old log-probs"), "{refused:#}");
}

#[test]
fn divergence_from_the_reference_is_zero_at_it_and_counts_in_loss_or_reward() {
    let fixture = Fixture::new();
    let (_, other) = tiny::model(tiny::config(false), 8);
    let other = fixture.actor.beside(other);
    let plain = fixture.update(&PolicySettings::default());
    let kl = |place, coefficient| PolicySettings {
        kl: KlSettings { place, estimator: KlEstimator::K2, coefficient, ..KlSettings::default() },
        ..PolicySettings::default()
    };
    let in_loss = kl(KlPlacement::Loss, 0.5);
    let at_it = fixture.update(&in_loss);
    assert_eq!(at_it.metrics.get("actor/kl_loss"), Some(0.0));
    assert!(values(&plain) == values(&at_it));
    let away = |policy: &PolicySettings| {
        let step = fixture.step(policy, Some(&other));
        let (batch, _, metrics) = fixture.prepare(&step).unwrap();
        (values(&fixture.learned(&step, &batch).unwrap().unwrap()), batch, metrics)
    };
    let (plain, (one, ..), (two, ..)) = (values(&plain), away(&in_loss), away(&kl(KlPlacement::Loss, 1.0)));
    let term = |with: &[f32]| -> Vec<f32> { with.iter().zip(&plain).map(|(a, b)| a - b).collect() };
    let twice: Vec<f32> = term(&one).iter().map(|g| 2.0 * g).collect();
    assert!(distance(&term(&two), &twice) < 1e-3);

    let without = away(&PolicySettings { advantage: Advantage::DrGrpo, ..PolicySettings::default() }).1;
    let in_reward = PolicySettings { advantage: Advantage::DrGrpo, ..kl(KlPlacement::Reward, 0.5) };
    let (_, with, metrics) = away(&in_reward);
    let at_it = fixture.prepared(&fixture.step(&in_reward, Some(&fixture.actor)));
    assert_eq!(at_it.advantages, without.advantages);
    assert_ne!(with.advantages, without.advantages);
    assert!(metrics.get("actor/reward_kl_penalty").is_some());
}

#[test]
fn the_reference_reads_back_bit_for_bit_and_stays_when_the_model_moves() {
    let (model, parameters) = tiny::model(tiny::config(false), 3);
    let frozen = reference::copy(&model.config, &parameters).unwrap();
    let folder = tempfile::tempdir().unwrap();
    reference::write(folder.path(), &frozen).unwrap();
    let before: Vec<Vec<f32>> = all_values(&parameters);
    tiny::set(&parameters, 0, &vec![0.0; before[0].len()]);
    assert_eq!(before, all_values(&frozen));
    assert_eq!(before, all_values(&reference::read(folder.path(), &model.config, &parameters).unwrap()));
    let missing = reference::read(&folder.path().join("none"), &model.config, &parameters).err().unwrap();
    assert!(format!("{missing:#}").contains("reference.safetensors"), "{missing:#}");
}

fn all_values(parameters: &Parameters) -> Vec<Vec<f32>> {
    (0..parameters.len()).map(|i| tiny::values(parameters.values(i).unwrap())).collect()
}

#[test]
fn the_entropy_bonus_raises_the_entropy() {
    let fixture = Fixture::new();
    // Experts are held fixed: the entropy jumps where the choice of one flips.
    let router_replay = RouterReplay::Rollout;
    let policy = |entropy_coefficient| PolicySettings {
        entropy_coefficient,
        router_replay,
        ..PolicySettings::default()
    };
    let plain = fixture.update(&policy(0.0));
    let with = fixture.update(&policy(1.0));
    // −∂H/∂w, so the change of H along the step must be −ε|d|².
    let direction: Vec<Option<Vec<f32>>> = with
        .gradients
        .values
        .iter()
        .zip(&plain.gradients.values)
        .map(|(a, b)| Some(a.as_ref()?.iter().zip(b.as_ref()?).map(|(x, y)| x - y).collect()))
        .collect();
    let squares: f64 = direction.iter().flatten().flatten().map(|&d| f64::from(d).powi(2)).sum();
    let step = 0.004 / squares.sqrt();
    let entropy_at = |scale: f64| {
        for (index, direction) in direction.iter().enumerate() {
            let Some(direction) = direction else { continue };
            let moved = tiny::values(fixture.actor.parameters.values(index).unwrap());
            let moved: Vec<f32> =
                moved.iter().zip(direction).map(|(w, d)| w + (scale * f64::from(*d)) as f32).collect();
            tiny::set(&fixture.actor.parameters, index, &moved);
        }
        fixture.update(&policy(0.0)).metrics.get("actor/entropy").unwrap()
    };
    let (below, above) = (entropy_at(-step), entropy_at(2.0 * step));
    let slope = (above - below) / (2.0 * step);
    assert!((slope + squares).abs() < 0.05 * squares, "{slope} against {}", -squares);
}

#[test]
fn replayed_experts_are_used_instead_of_the_routers_choice() {
    let mut fixture = Fixture::new();
    let policy = PolicySettings { router_replay: RouterReplay::Rollout, ..PolicySettings::default() };
    let own = fixture.update(&policy);
    fixture.trajectories().flat_map(|t| &mut t.routed_experts).for_each(|r| {
        r.chunks_exact_mut(2).for_each(|pair| {
            // The two experts that were not chosen.
            let others: Vec<u16> = (0..4).filter(|e| !pair.contains(e)).collect();
            pair.copy_from_slice(&others);
        });
    });
    let other = fixture.update(&policy);
    assert_ne!(own.forward.columns.log_probs, other.forward.columns.log_probs);
    fixture.trajectories().for_each(|t| t.routed_experts.clear());
    let step = fixture.step(&policy, None);
    assert!(fixture.prepare(&step).is_err());
}

#[test]
fn long_responses_lose_reward() {
    let fixture = Fixture::new();
    let policy = |buffer_tokens| PolicySettings {
        advantage: Advantage::DrGrpo,
        overlong: OverlongSettings { buffer_tokens, penalty: 1.0 },
        ..PolicySettings::default()
    };
    let (without, with) = (policy(0), policy(70));
    let prepare = |policy| fixture.prepare(&fixture.step(policy, None)).unwrap();
    let ((without, ..), (with, _, metrics)) = (prepare(&without), prepare(&with));
    let sampled: Vec<f64> = with.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as f64).collect();
    let expected = sampled.iter().map(|&n| -((n - 2.0).max(0.0) / 70.0)).sum::<f64>() / 6.0;
    assert!((metrics.get("critic/overlong_reward/mean").unwrap() - expected).abs() < 1e-6);
    assert_ne!(without.advantages, with.advantages);
}
