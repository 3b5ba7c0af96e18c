//! One update of the policy from a step's groups: advantages, old log-probs, loss, gradients, metrics.

use super::accumulate::Learner;
use super::batch::{MicroBatch, Sequence};
use super::forward_backward::{HeadGradient, PassOutput, PassSettings};
use super::gradients::Gradients;
use crate::metrics::Metrics;
use crate::model::forward::ForwardOptions;
use crate::policy::advantage::{GroupEstimator, group_advantages, reinforce_plus_plus};
use crate::policy::loss::{CispoClip, ClipRange, LossInput, Objective, PolicyLoss, PpoClip};
use crate::policy::offpolicy::{agreement_metrics, offpolicy_metrics, probs_diff_metrics};
use crate::policy::ratio::OldLogProb;
use crate::policy::{Aggregation, Normalizer, Sequences};
use crate::recipe::{self, Advantage, Loss, OldLogprob};
use crate::trajectory::{Group, Trajectory};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The update of one step, before the optimizer.
pub struct PolicyStep<'a> {
    pub learner: Learner<'a>,
    pub policy: &'a recipe::Policy,
    pub pass: PassSettings,
    /// An arm: the old log-probs come from a forward of their own, whatever `policy.old_logprob` says.
    pub second_forward: Option<ForwardOptions>,
    pub micro_batch_tokens: usize,
    /// The constant of [`recipe::Aggregation::Constant`].
    pub response_tokens_max: usize,
}

/// The trained tokens of a whole batch, sequence after sequence.
struct Targets {
    /// Start of each sequence, and the number of tokens.
    cu_seqlens: Vec<usize>,
    mask: Vec<bool>,
    rollout: Vec<f32>,
    advantages: Vec<f32>,
}

impl PolicyStep<'_> {
    /// Gradients of the loss over all of `groups`, and what the step measured. Every micro-batch's loss is divided
    /// by the whole batch's count, so the split does not matter.
    ///
    /// # Errors
    /// When the batch holds no sampled token, or a log-probability is no number.
    pub fn gradients(&self, groups: &[Group]) -> Result<(Gradients, Metrics)> {
        let trajectories: Vec<&Trajectory> = groups.iter().flat_map(|g| &g.trajectories).collect();
        let sequences: Vec<Sequence> = trajectories
            .iter()
            .map(|t| Sequence { tokens: t.tokens.clone(), mask: t.mask.clone() })
            .collect();
        let targets = self.targets(groups, &trajectories)?;
        let batches = MicroBatch::split(&sequences, self.micro_batch_tokens);
        let spans = spans(&batches);
        let old = match self.policy.old_logprob {
            _ if self.second_forward.is_some() => OldLogProb::Recompute,
            OldLogprob::Detach => OldLogProb::Detach,
            OldLogprob::Rollout => OldLogProb::Rollout,
            OldLogprob::Recompute => OldLogProb::Recompute,
        };
        let pass = PassSettings { forward: self.second_forward.unwrap_or(self.pass.forward), ..self.pass };
        let recomputed = match old {
            OldLogProb::Recompute => Some(joined(&self.learner.forward(&batches, pass)?)),
            OldLogProb::Detach | OldLogProb::Rollout => None,
        };
        let objective = self.objective()?;
        let normalizer = self.normalizer(&targets)?;
        let losses: Vec<Mutex<Option<PolicyLoss>>> = batches.iter().map(|_| Mutex::new(None)).collect();
        let (gradients, outputs) =
            self.learner.accumulate(&batches, self.pass, &|index, log_prob, entropies| {
                let span = spans[index].clone();
                let recomputed = recomputed.as_ref().map(|r| &r[span.clone()]);
                let mask = &targets.mask[span.clone()];
                let input = LossInput {
                    sequences: Sequences::new(&batches[index].cu_targets, mask)?,
                    log_prob,
                    old_log_prob: old.select(log_prob, &targets.rollout[span.clone()], recomputed, 1)?,
                    advantages: &targets.advantages[span],
                    weights: None,
                };
                let loss = objective.loss(&input, &normalizer, sequences.len())?;
                let gradient = HeadGradient {
                    log_probs: loss.grad_log_prob.clone(),
                    entropies: vec![0.0; entropies.len()],
                };
                *losses[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(loss);
                Ok(gradient)
            })?;
        let metrics = self.metrics(&targets, &outputs, losses)?;
        Ok((gradients, metrics))
    }

    fn targets(&self, groups: &[Group], trajectories: &[&Trajectory]) -> Result<Targets> {
        let (mut cu_seqlens, mut rollout) = (vec![0], vec![]);
        for trajectory in trajectories {
            let sampled = trajectory.mask.iter().zip(&trajectory.logprobs).skip(1).filter(|(m, _)| **m);
            rollout.extend(sampled.map(|(_, &logprob)| logprob));
            cu_seqlens.push(rollout.len());
        }
        let mask = vec![true; rollout.len()];
        let sequences = Sequences::new(&cu_seqlens, &mask)?;
        let rewards: Vec<f32> = trajectories.iter().map(|t| t.reward).collect();
        let sizes: Vec<usize> = groups.iter().map(|g| g.trajectories.len()).collect();
        let of_group = |estimator| {
            let advantages = group_advantages(estimator, &rewards, &sizes)?;
            sequences.broadcast(&advantages)
        };
        let advantages = match self.policy.advantage {
            Advantage::Grpo => of_group(GroupEstimator::Grpo)?,
            Advantage::DrGrpo => of_group(GroupEstimator::DrGrpo)?,
            Advantage::Rloo => of_group(GroupEstimator::Rloo)?,
            Advantage::ReinforcePlusPlus => {
                let mut token_rewards = vec![0.0; rollout.len()];
                for (reward, end) in rewards.iter().zip(&cu_seqlens[1..]) {
                    if let Some(last) = end.checked_sub(1) {
                        token_rewards[last] = *reward;
                    }
                }
                reinforce_plus_plus(&sequences, &token_rewards, 1.0)?.advantages
            }
        };
        Ok(Targets { cu_seqlens, mask, rollout, advantages })
    }

    fn objective(&self) -> Result<Objective> {
        let p = self.policy;
        let range = ClipRange::new(p.clip_low, p.clip_high)?;
        Ok(match p.loss {
            Loss::Ppo => Objective::Ppo(PpoClip::new(range, (p.dual_clip > 0.0).then_some(p.dual_clip))?),
            Loss::Gspo => Objective::Gspo(range),
            Loss::Cispo => Objective::Cispo(CispoClip::new(p.clip_low, p.clip_high)?),
            Loss::Reinforce => Objective::Reinforce,
        })
    }

    fn normalizer(&self, targets: &Targets) -> Result<Normalizer> {
        let aggregation = match self.policy.aggregation {
            recipe::Aggregation::TokenMean => Aggregation::TokenMean,
            recipe::Aggregation::SequenceMeanTokenMean => Aggregation::SequenceMeanTokenMean,
            recipe::Aggregation::SequenceMeanTokenSum => Aggregation::SequenceMeanTokenSum,
            recipe::Aggregation::Constant => Aggregation::Constant { tokens: self.response_tokens_max },
        };
        let sequences = targets.cu_seqlens.windows(2).filter(|w| w[1] > w[0]).count();
        Normalizer::global(aggregation, targets.rollout.len(), sequences, 1)
    }

    fn metrics(
        &self,
        targets: &Targets,
        outputs: &[PassOutput],
        losses: Vec<Mutex<Option<PolicyLoss>>>,
    ) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        let mut loss_sum = 0.0;
        let mut means: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for loss in losses {
            let loss =
                loss.into_inner().unwrap_or_else(PoisonError::into_inner).context("a loss is missing")?;
            loss_sum += loss.loss;
            for mean in loss.metrics {
                let cell = means.entry(mean.name).or_default();
                *cell = (cell.0 + mean.sum, cell.1 + mean.tokens);
            }
        }
        metrics.set("actor/pg_loss", loss_sum);
        for (name, (sum, tokens)) in means {
            metrics.set(name, if tokens == 0.0 { 0.0 } else { sum / tokens });
        }
        let entropies = outputs.iter().flat_map(|o| &o.entropies).map(|&e| f64::from(e));
        metrics.set("actor/entropy", entropies.sum::<f64>() / targets.rollout.len() as f64);
        let spread = targets.advantages.iter().map(|&a| f64::from(a));
        metrics.set("critic/advantages/mean", spread.clone().sum::<f64>() / targets.advantages.len() as f64);
        metrics.set("critic/advantages/max", spread.clone().fold(f64::NEG_INFINITY, f64::max));
        metrics.set("critic/advantages/min", spread.fold(f64::INFINITY, f64::min));

        let sequences = Sequences::new(&targets.cu_seqlens, &targets.mask)?;
        let training = joined(outputs);
        for (name, value) in offpolicy_metrics(&sequences, &training, Some(&targets.rollout))? {
            metrics.set(format!("rollout_corr/{name}"), value);
        }
        for found in [
            agreement_metrics(&sequences, &training, &targets.rollout)?,
            probs_diff_metrics(&sequences, &training, &targets.rollout)?,
        ] {
            found.into_iter().for_each(|(name, value)| metrics.set(name, value));
        }
        Ok(metrics)
    }
}

/// Each micro-batch's stretch of the batch's targets.
fn spans(batches: &[MicroBatch]) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    batches
        .iter()
        .map(|batch| {
            let span = start..start + batch.targets.len();
            start = span.end;
            span
        })
        .collect()
}

fn joined(outputs: &[PassOutput]) -> Vec<f32> {
    outputs.iter().flat_map(|o| o.log_probs.iter().copied()).collect()
}
