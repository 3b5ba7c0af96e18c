//! The recipe's choice of loss, its terms beside the policy's, and their sum over micro-batches.

use crate::metrics::Metrics;
use crate::policy::CorrectionSettings;
use crate::policy::KlPlace;
use crate::policy::KlSettings;
use crate::policy::Normalizer;
use crate::policy::PolicySettings;
use crate::policy::correction::{CorrectionRules, ImportanceConfig, RejectionRule, WeightBound};
use crate::policy::divergence::kl_loss;
use crate::policy::loss::{LossFunction, LossInput, LossSettings, PolicyLoss, TokenMean};
use anyhow::Result;
use std::collections::BTreeMap;

/// The recipe's policy loss.
pub(super) fn objective(policy: &PolicySettings) -> Result<Box<dyn LossFunction>> {
    let &PolicySettings { clip_low, clip_high, dual_clip, .. } = policy;
    let dual_clip = (dual_clip > 0.0).then_some(dual_clip);
    (policy.loss.make)(&LossSettings { clip_low, clip_high, dual_clip })
}

/// The recipe's rollout correction.
pub(super) fn correction(correction: &CorrectionSettings) -> Result<CorrectionRules> {
    let importance = match correction.is.level() {
        Some(level) => {
            let bound = WeightBound::new(&correction.threshold)?;
            Some(ImportanceConfig { level, bound, batch_normalize: correction.normalize })
        }
        None => None,
    };
    let rules = correction.reject.iter().zip(&correction.reject_bounds);
    let reject = rules.map(|(&option, bounds)| RejectionRule::new(option, bounds)).collect::<Result<_>>()?;
    Ok(CorrectionRules { importance, reject })
}

/// A micro-batch's share of an update's loss. Shares add up.
pub(super) struct Share {
    /// The policy loss; its gradient takes in the other terms.
    pub policy: PolicyLoss,
    /// Divergence from the reference, before its coefficient.
    kl: f64,
}

impl Share {
    pub fn new(policy: PolicyLoss) -> Self {
        Self { policy, kl: 0.0 }
    }

    /// Adds the divergence from `reference`.
    pub fn add_kl(
        &mut self,
        input: &LossInput,
        reference: &[f32],
        kl: &KlSettings,
        normalizer: &Normalizer,
    ) -> Result<()> {
        let term = kl_loss(&input.sequences, input.log_prob, reference, kl.estimator, normalizer)?;
        self.kl = term.loss;
        for (sum, gradient) in self.policy.grad_log_prob.iter_mut().zip(&term.grad_log_prob) {
            *sum += (kl.coefficient * f64::from(*gradient)) as f32;
        }
        Ok(())
    }

    /// The gradient of −`coefficient` times the aggregated entropy, with respect to each token's entropy.
    pub fn entropy_gradient(
        &self,
        input: &LossInput,
        entropies: &[f32],
        coefficient: f64,
        normalizer: &Normalizer,
    ) -> Vec<f32> {
        if coefficient == 0.0 {
            return vec![0.0; entropies.len()];
        }
        normalizer.reduce(&input.sequences, |_, t| (f64::from(entropies[t]), -coefficient)).1
    }
}

/// An update's figures from its shares.
pub(super) fn metrics(policy: &PolicySettings, shares: Vec<Share>) -> Metrics {
    let mut metrics = Metrics::new();
    let mut means: BTreeMap<&str, TokenMean> = BTreeMap::new();
    for mean in shares.iter().flat_map(|s| &s.policy.metrics) {
        let whole = means.entry(mean.name).or_insert(TokenMean { sum: 0.0, tokens: 0.0, ..*mean });
        whole.sum += mean.sum;
        whole.tokens += mean.tokens;
    }
    means.into_iter().for_each(|(name, mean)| metrics.set(name, mean.value()));
    metrics.set("actor/pg_loss", shares.iter().map(|s| s.policy.loss).sum::<f64>());
    if policy.kl.place == KlPlace::Loss {
        metrics.set("actor/kl_loss", shares.iter().map(|s| s.kl).sum::<f64>());
    }
    metrics
}
