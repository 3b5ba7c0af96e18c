//! Covariances of log-probs and advantages, by which `clip_cov` and `kl_cov` select tokens (Cui et al. 2025,
//! arXiv 2505.22617).

use anyhow::Result;

use crate::policy::sequences::Sequences;

/// The inputs of a selection: the whole batch of a step, before its first update. Each slice has one value
/// per token.
#[derive(Debug, Clone, Copy)]
pub struct SelectionInput<'a> {
    pub sequences: Sequences<'a>,
    /// O: old log-probs.
    pub old_log_prob: &'a [f32],
    /// A: advantages.
    pub advantages: &'a [f32],
}

impl SelectionInput<'_> {
    /// Returns each valid token with its covariance (A − mean A)·(O − mean O), in token order. The means run
    /// over valid tokens. The mean of the covariances is the covariance of A and O.
    pub(super) fn covariances(&self) -> Result<Vec<(usize, f64)>> {
        let Self { sequences, old_log_prob, advantages } = self;
        sequences.check("old_log_prob", old_log_prob)?;
        sequences.check("advantages", advantages)?;
        let advantage = |t: usize| f64::from(advantages[t]);
        let log_prob = |t: usize| f64::from(old_log_prob[t]);
        let (mean_advantage, mean_log_prob) = (sequences.mean(advantage), sequences.mean(log_prob));
        let covariance = |t| (t, (advantage(t) - mean_advantage) * (log_prob(t) - mean_log_prob));
        Ok(sequences.all_valid_indices().map(covariance).collect())
    }

    /// Returns one flag per token; true for the tokens of `indices`.
    pub(super) fn flags(&self, indices: impl Iterator<Item = usize>) -> Vec<bool> {
        let mut flags = vec![false; self.sequences.tokens()];
        indices.for_each(|index| flags[index] = true);
        flags
    }
}

/// Returns how many of `tokens` tokens are selected: the fraction `fraction`, rounded down, but at least 1.
pub(super) fn selected_count(tokens: usize, fraction: f64) -> usize {
    ((fraction * tokens as f64) as usize).max(1)
}
