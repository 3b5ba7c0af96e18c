//! A step's trajectories as columns. A column has one value for each trained token, sequence after sequence.
//! The columns are filled in before the first update of a step. Updates do not change them.

use crate::actor::micro_batch::Sequence;
use crate::actor::routed_experts::{RoutedExperts, agreement};
use crate::actor::{Forward, PassInput};
use crate::metrics::Metrics;
use crate::policy::Sequences;
use crate::policy::off_policy::{agreement_metrics, off_policy_metrics, probs_diff_metrics};
use crate::random::{Purpose, stream};
use crate::trajectory::{Group, Outcome, TokenStats, Trajectory};
use anyhow::Result;
use rand::seq::SliceRandom;
use std::borrow::Cow;
use std::sync::Arc;

/// A batch, or the minibatch of one update.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub sequences: Vec<Arc<Sequence>>,
    /// Start of each sequence in the columns, followed by the length of the columns.
    pub cu_seqlens: Vec<usize>,
    /// Log-probabilities stored at sampling.
    pub rollout_log_probs: Vec<f32>,
    /// Log-probabilities of a training forward pass before the first update, if the step runs one.
    pub training_log_probs: Option<Vec<f32>>,
    /// Log-probabilities of the frozen reference, if the recipe has a reference.
    pub reference_log_probs: Option<Vec<f32>>,
    /// The critic's values before its first update, if there is a critic.
    pub values: Option<Vec<f32>>,
    pub advantages: Vec<f32>,
    /// The targets of the critic.
    pub returns: Option<Vec<f32>>,
    /// False for a token that the rollout correction rejected. The loss does not cover such a token.
    pub mask: Vec<bool>,
    /// Importance weights of the rollout correction.
    pub weights: Option<Vec<f32>>,
    /// Whether the policy loss selected the token; `None` for a loss that selects no tokens.
    pub selected: Option<Vec<bool>>,
    /// Routed experts at sampling, one entry per sequence. Present if they are compared with the experts of
    /// training.
    pub rollout_experts: Option<Vec<RoutedExperts>>,
    /// Experts to replay in all later passes of the policy, one entry per sequence.
    pub replayed_experts: Option<Vec<RoutedExperts>>,
}

impl Batch {
    /// Creates a batch from `groups`. Of its columns, only the log-probabilities of sampling are filled in.
    pub fn new(groups: &[&Group]) -> Self {
        let (mut sequences, mut cu_seqlens, mut rollout_log_probs) = (vec![], vec![0], vec![]);
        for trajectory in groups.iter().flat_map(|g| &g.trajectories) {
            let Trajectory { mask, log_probs, .. } = trajectory;
            let trained = mask.iter().zip(log_probs).skip(1).filter(|(mask, _)| **mask);
            rollout_log_probs.extend(trained.map(|(_, &log_prob)| log_prob));
            cu_seqlens.push(rollout_log_probs.len());
            sequences.push(Arc::new(Sequence::from(trajectory)));
        }
        Self {
            mask: vec![true; rollout_log_probs.len()],
            sequences,
            cu_seqlens,
            rollout_log_probs,
            ..Self::default()
        }
    }

    /// Returns the input of a pass over the batch. Samples of a prompt share its rows.
    pub fn input(&self) -> PassInput<'_> {
        let sequences = self.sequences.iter().map(|sequence| &**sequence).collect();
        PassInput { sequences, shares_prefixes: true, ..PassInput::default() }
    }

    /// Returns the input of a pass of the policy, with the experts to replay.
    pub fn policy_input(&self) -> PassInput<'_> {
        PassInput { replay: self.replayed_experts.as_deref(), ..self.input() }
    }

    /// Takes the loss from the trajectories of `groups` that were cut at a limit of tokens.
    pub fn mask_truncated(&mut self, groups: &[&Group]) {
        let trajectories = groups.iter().flat_map(|group| &group.trajectories);
        for (trajectory, range) in trajectories.zip(self.cu_seqlens.windows(2)) {
            if trajectory.outcome == Outcome::TruncatedLength {
                self.mask[range[0]..range[1]].fill(false);
            }
        }
    }

    /// Returns the sequences, with rejected tokens masked out.
    ///
    /// # Errors
    /// When the columns have different lengths.
    pub fn masked_sequences(&self) -> Result<Sequences<'_>> {
        Sequences::new(&self.cu_seqlens, &self.mask)
    }

    /// Returns the sequence indices of each of the `count` minibatches of an epoch. A single minibatch has
    /// all sequences in order. For several minibatches, the sequences are shuffled and split evenly. The
    /// shuffle depends only on `seed`, `step` and `epoch`.
    pub fn minibatches(&self, count: usize, seed: u64, step: u64, epoch: u64) -> Vec<Vec<usize>> {
        let total = self.sequences.len();
        let count = count.clamp(1, total.max(1));
        let mut order: Vec<usize> = (0..total).collect();
        if count > 1 {
            order.shuffle(&mut stream(seed, Purpose::Shuffle, &[step, epoch]));
        }
        (0..count).map(|i| order[i * total / count..(i + 1) * total / count].to_vec()).collect()
    }

    /// Returns the minibatch of the sequences `indices`, in that order. Borrows the batch if the minibatch is
    /// the whole batch.
    pub fn select(&self, indices: &[usize]) -> Cow<'_, Self> {
        if indices.iter().copied().eq(0..self.sequences.len()) {
            return Cow::Borrowed(self);
        }
        let span = |s: &usize| self.cu_seqlens[*s]..self.cu_seqlens[*s + 1];
        let column = |values: &Vec<f32>| -> Vec<f32> {
            indices.iter().flat_map(|s| values[span(s)].iter().copied()).collect()
        };
        let flags = |flags: &Vec<bool>| -> Vec<bool> {
            indices.iter().flat_map(|s| flags[span(s)].iter().copied()).collect()
        };
        let select_experts = |experts: &Vec<RoutedExperts>| -> Vec<RoutedExperts> {
            indices.iter().map(|&s| experts[s].clone()).collect()
        };
        let sequences: Vec<_> = indices.iter().map(|&s| self.sequences[s].clone()).collect();
        let ends = indices.iter().scan(0, |end, s| {
            *end += span(s).len();
            Some(*end)
        });
        Cow::Owned(Self {
            cu_seqlens: std::iter::once(0).chain(ends).collect(),
            rollout_log_probs: column(&self.rollout_log_probs),
            training_log_probs: self.training_log_probs.as_ref().map(column),
            reference_log_probs: self.reference_log_probs.as_ref().map(column),
            values: self.values.as_ref().map(column),
            advantages: column(&self.advantages),
            returns: self.returns.as_ref().map(column),
            mask: flags(&self.mask),
            weights: self.weights.as_ref().map(column),
            selected: self.selected.as_ref().map(flags),
            rollout_experts: self.rollout_experts.as_ref().map(select_experts),
            replayed_experts: self.replayed_experts.as_ref().map(select_experts),
            sequences,
        })
    }

    /// Returns the `rollout_corr/`, `mismatch/` and `training/` metrics. They compare the log-probs and
    /// experts of sampling with `training`, the result of a forward pass before the first update. Rejected
    /// tokens are included. `top_k` is the number of experts per token and layer.
    ///
    /// # Errors
    /// When no token was sampled, or a log-probability is NaN.
    pub fn mismatch_metrics(&self, training: &Forward, top_k: usize) -> Result<Metrics> {
        let all = vec![true; self.rollout_log_probs.len()];
        let sequences = Sequences::new(&self.cu_seqlens, &all)?;
        let (rollout, log_probs) = (&self.rollout_log_probs, &training.columns.log_probs);
        let mut metrics = Metrics::new();
        for (name, value) in off_policy_metrics(&sequences, log_probs, Some(rollout))? {
            metrics.set(format!("rollout_corr/{name}"), value);
        }
        for group in [
            agreement_metrics(&sequences, log_probs, rollout)?,
            probs_diff_metrics(&sequences, log_probs, rollout)?,
        ] {
            group.into_iter().for_each(|(name, value)| metrics.set(name, value));
        }
        if let Some(rollout) = &self.rollout_experts {
            let agreement = agreement(rollout, &training.routed_experts, top_k);
            metrics.set("mismatch/routing_agreement", agreement);
        }
        Ok(metrics)
    }

    /// Returns statistics of each sequence, with one value for every token: the advantages and, with
    /// `training`, the log-prob differences. `training` holds the log-probs of a forward pass before the
    /// first update.
    pub fn token_stats(&self, training: Option<&[f32]>) -> Vec<TokenStats> {
        let sequence_stats = |(sequence, span): (&Arc<Sequence>, &[usize])| {
            // Tokens that are not trained get the value 0.
            let expand_to_tokens = |value: &dyn Fn(usize) -> f32| -> Vec<f32> {
                let mut column_indices = span[0]..span[1];
                let token = |(i, &mask): (usize, &bool)| {
                    if mask && i > 0 { column_indices.next().map_or(0.0, value) } else { 0.0 }
                };
                sequence.mask.iter().enumerate().map(token).collect()
            };
            TokenStats {
                advantages: expand_to_tokens(&|t| self.advantages[t]),
                log_prob_diffs: training
                    .map(|training| expand_to_tokens(&|t| training[t] - self.rollout_log_probs[t])),
            }
        };
        self.sequences.iter().zip(self.cu_seqlens.windows(2)).map(sequence_stats).collect()
    }
}
