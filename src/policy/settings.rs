//! `[policy]`: advantage, ratio, loss, rollout correction and divergence.

use super::advantage::Advantage;
use super::aggregation::Aggregation;
use super::correction::{
    CorrectionRules, ImportanceSampling, ImportanceSettings, RejectOption, RejectionRule, WeightBound,
};
use super::divergence::KlEstimator;
use super::loss::{Loss, SapoSettings, VespoSettings};
use super::ratio::OldLogprob;
use crate::settings::{above, choice, from, table};
use anyhow::Result;

table! {
    /// Advantage, importance ratio and loss.
    pub struct PolicySettings {
        /// How rewards of a group become advantages.
        pub advantage: Advantage = Advantage::Grpo,
        /// The policy loss.
        pub loss: Loss = Loss::default(),
        /// How token losses become one number.
        pub aggregation: Aggregation = Aggregation::TokenMean,
        /// The log-probabilities in the denominator of the importance ratio.
        pub old_logprob: OldLogprob = OldLogprob::Detach,
        /// The ratio is clipped below at 1 - `clip_low`. Must be below 1, except with `cispo`, where 1 means
        /// no lower bound. With `dppo_tv` and `dppo_kl` it bounds the divergence where a probability fell.
        pub clip_low: f64 = 0.2 => above(0.0).to(1.0),
        /// The ratio is clipped above at 1 + `clip_high`. Must be below 1, except with `cispo`, where it
        /// bounds a weight. With `dppo_tv` and `dppo_kl` it bounds the divergence where a probability rose.
        pub clip_high: f64 = 0.2 => above(0.0).to(1000.0),
        /// Upper bound of `ppo` on the ratio for negative advantages, and of `dppo_tv` and `dppo_kl` on every
        /// ratio, above 1; 0 means none.
        pub dual_clip: f64 = 3.0 => from(0.0).to(1e6),
        /// Weight of the entropy bonus, aggregated like the loss; 0 means none.
        pub entropy_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Which routed experts the training forward pass uses. Gradients still flow through the router's
        /// weights.
        pub router_replay: RouterReplay = RouterReplay::None,
        pub correction: CorrectionSettings,
        pub kl: KlSettings,
        pub sapo: SapoSettings,
        pub vespo: VespoSettings,
        pub overlong: OverlongSettings,
    }
}

table! {
    /// Correction of tokens whose training and rollout log-probabilities differ.
    pub struct CorrectionSettings {
        /// Importance weights of the loss.
        pub is: ImportanceSampling = ImportanceSampling::None,
        /// Bounds of the weights: one number truncates weights above it; a low and a high one set weights
        /// outside to 0.
        pub threshold: Vec<f64> = vec![2.0],
        /// Divides the weights by their mean over the batch.
        pub normalize: bool = false,
        /// Statistics that must stay within their bounds. A rejected token leaves the loss and its
        /// denominators.
        pub reject: Vec<RejectOption> = Vec::new(),
        /// Bounds of each of `reject`. For k1: a low and a high bound on ρ, or one number u for 1/u to u. For
        /// k2 and k3: one upper bound.
        pub reject_bounds: Vec<Vec<f64>> = Vec::new(),
    }
}

impl CorrectionSettings {
    /// Whether the recipe asks for weights or rejection.
    pub fn is_active(&self) -> bool {
        self.is != ImportanceSampling::None || !self.reject.is_empty()
    }

    /// The rules with their bounds.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for bounds that are wrong.
    pub fn rules(&self) -> Result<CorrectionRules> {
        let importance = match self.is.level() {
            Some(level) => {
                let bound = WeightBound::new(&self.threshold)?;
                Some(ImportanceSettings { level, bound, batch_normalize: self.normalize })
            }
            None => None,
        };
        let rules = self.reject.iter().zip(&self.reject_bounds);
        let reject =
            rules.map(|(&option, bounds)| RejectionRule::new(option, bounds)).collect::<Result<_>>()?;
        Ok(CorrectionRules { importance, reject })
    }
}

table! {
    /// KL divergence from a frozen reference: the model at the start of reinforcement learning.
    pub struct KlSettings {
        /// Where the divergence is applied.
        pub place: KlPlacement = KlPlacement::None,
        /// Its estimator, with d = log-probability minus the reference's.
        pub estimator: KlEstimator = KlEstimator::K3,
        /// Its weight; with `target`, its weight at the first step.
        pub coefficient: f64 = 1e-3 => above(0.0).to(1e6),
        /// Target divergence a token, with `place = "reward"`. Each step multiplies the coefficient by 1 +
        /// clip(divergence / target - 1, -0.2, 0.2) * trajectories / `horizon` (Ziegler et al. 2019). Absent
        /// means a fixed coefficient.
        pub target: Option<f64> = None => above(0.0).to(1e6),
        /// Number of trajectories over which the coefficient adapts to `target`.
        pub horizon: f64 = 1e4 => above(0.0).to(1e12),
    }
}

table! {
    /// Soft penalty on responses near the length limit (DAPO). It changes the advantage, not the reported
    /// reward.
    pub struct OverlongSettings {
        /// The penalty grows linearly over this many tokens before `rollout.response_tokens_max`; 0 means
        /// none.
        pub buffer_tokens: usize = 0 => from(0.0).to(16777216.0),
        /// Penalty of a response at the limit.
        pub penalty: f64 = 1.0 => above(0.0).to(1e6),
    }
}

choice! {
    /// Where the divergence from the reference is applied.
    pub enum KlPlacement {
        /// Nowhere; there is no reference.
        None = "none",
        /// Added to the loss, aggregated like it.
        Loss = "loss",
        /// Subtracted from each token's reward before advantages.
        Reward = "reward",
    }
}

choice! {
    /// Which routed experts the training forward pass uses.
    pub enum RouterReplay {
        /// The forward pass's own.
        None = "none",
        /// The experts of sampling, in every training forward pass; needs `rollout.keep_routes`.
        Rollout = "rollout",
        /// The experts of the forward pass of `old_logprob = "recompute"`, in every update of the step.
        Recompute = "recompute",
    }
}
