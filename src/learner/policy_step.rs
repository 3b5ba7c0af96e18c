//! The policy's updates from a step's groups: what is fixed before the first, then loss and gradients of each.

use super::batch::MicroBatch;
use super::batch_runner::BatchRunner;
use super::critic::CriticStep;
use super::experience::{Experience, Measured, Routes, Sampled, chosen_routes, joined, kept_routes, spans};
use super::forward_backward::{HeadGradient, PassOutput, PassSettings};
use super::objective::{self, Share, objective};
use crate::bad_input;
use crate::metrics::Metrics;
use crate::model::forward::ForwardOptions;
use crate::model::parameters::Parameters;
use crate::policy::PolicySettings;
use crate::policy::advantage::Advantage;
use crate::policy::advantage::{
    dr_grpo, grpo, grpo_batch_std, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo,
};
use crate::policy::correction::correct;
use crate::policy::kl_in_reward::kl_in_reward;
use crate::policy::loss::LossInput;
use crate::policy::ratio::OldLogprob;
use crate::policy::shaping::Overlong;
use crate::policy::{BatchSize, Normalizer, Sequences};
use crate::policy::{KlPlace, RouterReplay};
use crate::trajectory::{Group, Trajectory};
use anyhow::{Context, Result};
use std::sync::{Mutex, PoisonError};

/// How a step's trajectories become gradients.
pub struct PolicyStep<'a> {
    pub runner: BatchRunner<'a>,
    /// Weights of the frozen reference; `policy.kl` needs them.
    pub reference: Option<&'a Parameters>,
    /// What gives the values; the advantage `gae` needs it.
    pub critic: Option<CriticStep<'a>>,
    pub policy: &'a PolicySettings,
    /// Weight of the divergence in the reward at this step: `policy.kl.coefficient`, or what it was steered to.
    pub kl_coefficient: f64,
    pub pass: PassSettings,
    /// An arm: the old log-probs come from a forward of their own, whatever `policy.old_logprob` says.
    pub second_forward: Option<ForwardOptions>,
    pub micro_batch_tokens: usize,
    /// Updates that the step makes.
    pub updates: usize,
    /// The constant of [`crate::policy::Aggregation::Constant`], and the limit of overlong shaping.
    pub response_tokens_max: usize,
}

/// One update, before the optimizer; its gradients are in the runner's parameters.
pub struct Update {
    /// Means over the update's own tokens.
    pub metrics: Metrics,
    /// Log-probabilities of the update's forward, one a trained token.
    pub log_probs: Vec<f32>,
    /// The experts it chose, where those of sampling are known.
    routes: Vec<Routes>,
}

impl PolicyStep<'_> {
    /// Everything that is fixed before the first update. A forward is spent only where `old_logprob = "recompute"`,
    /// the correction, or a divergence in the reward under `"detach"` needs one; those of the correction and of the
    /// anchor are one and the same.
    ///
    /// # Errors
    /// When the batch holds no sampled token, or a log-probability is no number.
    pub fn prepare(&self, groups: &[&Group]) -> Result<Experience> {
        let trajectories: Vec<&Trajectory> = groups.iter().flat_map(|g| &g.trajectories).collect();
        let measured = self.measure(&trajectories)?;
        let mut experience = self.advantages(groups, &trajectories, measured)?;
        self.correct(&mut experience)?;
        Ok(experience)
    }

    /// The passes before the first update.
    fn measure(&self, trajectories: &[&Trajectory]) -> Result<Measured> {
        let (config, policy) = (&self.runner.model.config, self.policy);
        let mut measured = Measured { sampled: Sampled::new(trajectories), ..Measured::default() };
        if policy.kl.place != KlPlace::None {
            let parameters = self.reference.context("policy.kl without a reference")?;
            let runner = BatchRunner { parameters, ..self.runner };
            measured.reference = Some(joined(&runner.forward(&self.batches(&measured)?, self.pass)?));
        }
        let kept = kept_routes(trajectories, config.num_hidden_layers, config.num_experts_per_tok);
        if policy.router_replay == RouterReplay::Rollout {
            measured.replay = Some(kept?);
        } else {
            measured.sampled.kept_routes = kept.ok();
        }
        let anchor = self.anchor();
        let anchor_in_reward = policy.kl.place == KlPlace::Reward && anchor == OldLogprob::Detach;
        if anchor == OldLogprob::Recompute || policy.correction.active() || anchor_in_reward {
            let batches = self.batches(&measured)?;
            let forward = self.second_forward.unwrap_or(self.pass.forward);
            let outputs = self.runner.forward(&batches, PassSettings { forward, ..self.pass })?;
            let found = self.compare(&measured, &batches, &outputs)?;
            measured.metrics.extend(found);
            measured.training = Some(joined(&outputs));
            if policy.router_replay == RouterReplay::Recompute {
                measured.replay = Some(chosen_routes(&batches, &outputs)?);
            }
        }
        if let Some(critic) = &self.critic {
            measured.values = Some(critic.values(&measured.sequences)?);
        }
        Ok(measured)
    }

    /// Gradients of the loss over `experience`, or the part of it that one update takes. Every micro-batch's loss is
    /// divided by the whole update's count, so the split does not matter. `None` when every token was rejected.
    ///
    /// # Errors
    /// When a pass fails, or a log-probability is no number.
    pub fn gradients(&self, experience: &Experience) -> Result<Option<Update>> {
        let tokens = experience.tokens()?;
        if tokens.valid_tokens() == 0 {
            return Ok(None);
        }
        let batches = self.batches(experience)?;
        let spans = spans(&batches);
        let old = self.anchor();
        let objective = objective(self.policy)?;
        let normalizer = self.normalizer(&tokens)?;
        let shares: Vec<Mutex<Option<Share>>> = batches.iter().map(|_| Mutex::new(None)).collect();
        let outputs = self.runner.accumulate(&batches, self.pass, &|index, log_prob, entropies| {
            let span = spans[index].clone();
            let part = |column: &'_ Option<Vec<f32>>| column.as_ref().map(|c| c[span.clone()].to_vec());
            let (training, reference) = (part(&experience.training), part(&experience.reference));
            let weights = part(&experience.weights);
            let rollout = &experience.rollout[span.clone()];
            let input = LossInput {
                sequences: Sequences::new(&batches[index].cu_targets, &experience.mask[span.clone()])?,
                log_prob,
                old_log_prob: old.select(log_prob, rollout, training.as_deref(), self.updates)?,
                advantages: &experience.advantages[span],
                weights: weights.as_deref(),
            };
            let policy = objective.loss(&input, &normalizer, tokens.len())?;
            let mut share = Share::new(policy);
            if let (KlPlace::Loss, Some(reference)) = (self.policy.kl.place, &reference) {
                share.add_kl(&input, reference, &self.policy.kl, &normalizer)?;
            }
            let coefficient = self.policy.entropy_coefficient;
            let entropies = share.entropy_gradient(&input, entropies, coefficient, &normalizer);
            let gradient = HeadGradient { log_probs: share.policy.grad_log_prob.clone(), entropies };
            *shares[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(share);
            Ok(gradient)
        })?;
        let shares = shares
            .into_iter()
            .map(|s| s.into_inner().unwrap_or_else(PoisonError::into_inner).context("a loss is missing"))
            .collect::<Result<Vec<_>>>()?;
        let mut metrics = objective::metrics(self.policy, shares);
        self.note(experience, &outputs, &batches, &mut metrics);
        let log_probs = joined(&outputs);
        let routes = self.routes(experience, &batches, &outputs)?;
        Ok(Some(Update { metrics, log_probs, routes }))
    }

    /// The gap between training and rollout over all of `experience`, from a forward of its own. Needed where the first
    /// update takes only a part of the batch and nothing else asked for a forward before it. Also that forward's
    /// log-probabilities.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn gap(&self, experience: &Experience) -> Result<(Metrics, Vec<f32>)> {
        let batches = self.batches(experience)?;
        let outputs = self.runner.forward(&batches, self.pass)?;
        Ok((self.compare(experience, &batches, &outputs)?, joined(&outputs)))
    }

    /// The gap between rollout and the forward of `update`, which must be the step's first, over the tokens it took.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn gap_of(&self, experience: &Experience, update: &Update) -> Result<Metrics> {
        let top_k = self.runner.model.config.num_experts_per_tok;
        experience.compare(&update.log_probs, &update.routes, top_k)
    }

    fn compare(
        &self,
        experience: &Measured,
        batches: &[MicroBatch],
        outputs: &[PassOutput],
    ) -> Result<Metrics> {
        let top_k = self.runner.model.config.num_experts_per_tok;
        experience.compare(&joined(outputs), &self.routes(experience, batches, outputs)?, top_k)
    }

    /// The experts that a forward chose, if there is something to compare them with.
    fn routes(
        &self,
        experience: &Measured,
        batches: &[MicroBatch],
        outputs: &[PassOutput],
    ) -> Result<Vec<Routes>> {
        match experience.kept_routes {
            Some(_) => chosen_routes(batches, outputs),
            None => Ok(vec![]),
        }
    }

    fn batches(&self, experience: &Measured) -> Result<Vec<MicroBatch>> {
        let top_k = self.runner.model.config.num_experts_per_tok;
        experience.batches(
            self.runner.cut(self.micro_batch_tokens),
            self.runner.shared_positions_max(),
            top_k,
        )
    }

    fn anchor(&self) -> OldLogprob {
        if self.second_forward.is_some() { OldLogprob::Recompute } else { self.policy.old_logprob }
    }

    /// Weights and the thinned mask, from the forward before the first update.
    fn correct(&self, experience: &mut Experience) -> Result<()> {
        let config = objective::correction(&self.policy.correction)?;
        if let (true, Some(training)) = (self.policy.correction.active(), &experience.training) {
            let correction = correct(&experience.tokens()?, training, &experience.rollout, &config)?;
            let metrics = &mut experience.measured.metrics;
            correction.metrics.into_iter().for_each(|(name, value)| metrics.set(name, value));
            experience.weights = correction.weights;
            experience.mask = correction.mask;
        }
        Ok(())
    }

    /// The advantages of all tokens; with them the experience is whole.
    fn advantages(
        &self,
        groups: &[&Group],
        trajectories: &[&Trajectory],
        mut measured: Measured,
    ) -> Result<Experience> {
        let mut rewards: Vec<f32> = trajectories.iter().map(|t| t.reward).collect();
        let shaping = self.shaping()?;
        if let Some(overlong) = &shaping {
            let shaped: Vec<f32> = trajectories.iter().map(|t| overlong.reward(t.sampled_tokens())).collect();
            let sum: f64 = shaped.iter().map(|&s| f64::from(s)).sum();
            measured.metrics.set("critic/overlong_reward/mean", sum / rewards.len().max(1) as f64);
            rewards.iter_mut().zip(&shaped).for_each(|(reward, shaped)| *reward += shaped);
        }
        let all = vec![true; measured.rollout.len()];
        let sequences = Sequences::new(&measured.cu_seqlens, &all)?;
        let (penalties, mut found) = self.reward_penalties(&measured, &sequences)?;
        let mut returns = None;
        let sizes: Vec<usize> = groups.iter().map(|g| g.trajectories.len()).collect();
        let per_token = || token_rewards(&sequences, &rewards, penalties.clone());
        let whole = || -> Result<Vec<f32>> {
            let penalties = sequences.scores(&penalties)?;
            Ok(rewards.iter().zip(&penalties).map(|(reward, penalty)| reward + penalty).collect())
        };
        type OfGroups = fn(&[f32], &[usize]) -> Result<Vec<f32>>;
        let of_groups = |estimate: OfGroups| sequences.broadcast(&estimate(&whole()?, &sizes)?);
        let advantages = match self.policy.advantage {
            Advantage::Grpo => of_groups(grpo)?,
            Advantage::DrGrpo => of_groups(dr_grpo)?,
            Advantage::GrpoBatchStd => of_groups(grpo_batch_std)?,
            Advantage::Rloo => of_groups(rloo)?,
            Advantage::ReinforcePlusPlus => reinforce_plus_plus(&sequences, &per_token())?.advantages,
            Advantage::ReinforcePlusPlusBaseline => {
                reinforce_plus_plus_baseline(&sequences, &whole()?, &sizes)?
            }
            Advantage::Remax => {
                remax(&sequences, &per_token(), &greedy_rewards(groups, shaping.as_ref())?)?.advantages
            }
            Advantage::Gae => {
                let (critic, values) = self.critic.zip(measured.values.as_ref()).context("no critic")?;
                let estimate = critic.estimate(&sequences, &per_token(), values)?;
                found.extend(estimate.metrics);
                returns = Some(estimate.returns);
                estimate.advantages
            }
        };
        let spread = || advantages.iter().map(|&a| f64::from(a));
        found.set("critic/advantages/mean", spread().sum::<f64>() / advantages.len() as f64);
        found.set("critic/advantages/max", spread().fold(f64::NEG_INFINITY, f64::max));
        found.set("critic/advantages/min", spread().fold(f64::INFINITY, f64::min));
        measured.metrics.extend(found);
        Ok(Experience { measured, mask: all, advantages, returns, weights: None })
    }

    fn shaping(&self) -> Result<Option<Overlong>> {
        let settings = &self.policy.overlong;
        if settings.buffer_tokens == 0 {
            return Ok(None);
        }
        Overlong::new(self.response_tokens_max, settings.buffer_tokens, settings.penalty).map(Some)
    }

    /// What the divergence from the reference takes off each token's reward, 0 without one in the reward, and its figures.
    /// It is measured between the reference and the anchor O.
    fn reward_penalties(&self, experience: &Measured, sequences: &Sequences) -> Result<(Vec<f32>, Metrics)> {
        let (nothing, mut metrics) = (vec![0.0; sequences.tokens()], Metrics::new());
        let (KlPlace::Reward, Some(reference)) = (self.policy.kl.place, &experience.reference) else {
            return Ok((nothing, metrics));
        };
        let training = experience.training.as_deref().unwrap_or(&experience.rollout);
        let anchor = self.anchor().select(training, &experience.rollout, Some(training), 1)?;
        let divergence = self.policy.kl.estimator;
        let penalised =
            kl_in_reward(sequences, &nothing, anchor, reference, divergence, self.kl_coefficient)?;
        metrics.set("actor/reward_kl_penalty", penalised.kl);
        metrics.set("actor/reward_kl_penalty_coeff", self.kl_coefficient);
        Ok((penalised.rewards, metrics))
    }

    /// Denominators of one update, after any rejection.
    fn normalizer(&self, tokens: &Sequences) -> Result<Normalizer> {
        Normalizer::new(self.policy.aggregation, BatchSize::of(tokens, self.response_tokens_max))
    }

    fn note(
        &self,
        experience: &Experience,
        outputs: &[PassOutput],
        batches: &[MicroBatch],
        metrics: &mut Metrics,
    ) {
        let entropies = outputs.iter().flat_map(|o| &o.entropies).map(|&e| f64::from(e));
        metrics.set("actor/entropy", entropies.sum::<f64>() / experience.rollout.len() as f64);
        if self.pass.load_balance > 0.0 {
            let tokens: usize = batches.iter().map(|b| b.tokens.len()).sum();
            let shares = outputs.iter().zip(batches).map(|(o, b)| o.load_balance * b.tokens.len() as f64);
            metrics.set("actor/load_balance", shares.sum::<f64>() / tokens.max(1) as f64);
        }
    }
}

/// Rewards token by token: a response's own on its last token, `penalties` on each.
fn token_rewards(sequences: &Sequences, rewards: &[f32], penalties: Vec<f32>) -> Vec<f32> {
    let mut of_tokens = penalties;
    for (reward, row) in rewards.iter().zip(sequences.rows()) {
        if let Some(last) = row.last() {
            of_tokens[last] += *reward;
        }
    }
    of_tokens
}

/// The reward of each prompt's greedy sample, once for every trajectory of its group, shaped as theirs are.
fn greedy_rewards(groups: &[&Group], shaping: Option<&Overlong>) -> Result<Vec<f32>> {
    let of_group = |group: &&Group| -> Result<Vec<f32>> {
        let Some(greedy) = &group.greedy else {
            return Err(bad_input!(
                "policy.advantage = \"remax\" needs a greedy sample of every prompt, and these trajectories have none; \
                 sample them anew"
            ));
        };
        let shaped = shaping.map_or(0.0, |overlong| overlong.reward(greedy.sampled_tokens()));
        Ok(vec![greedy.reward + shaped; group.trajectories.len()])
    };
    Ok(groups.iter().map(of_group).collect::<Result<Vec<_>>>()?.concat())
}
