//! `[policy]`: advantage, ratio, loss, rollout correction and divergence.

use super::advantage::Advantage;
use super::aggregation::Aggregation;
use super::correction::{
    CorrectionRules, ImportanceConfig, ImportanceSampling, RejectOption, RejectionRule, WeightBound,
};
use super::divergence::KlEstimator;
use super::loss::Loss;
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
        /// The log-probabilities that the importance ratio is taken against.
        pub old_logprob: OldLogprob = OldLogprob::Detach,
        /// The ratio is clipped below at 1 - `clip_low`. Below 1, but for `cispo`, where 1 means no lower bound.
        pub clip_low: f64 = 0.2 => above(0.0).to(1.0),
        /// The ratio is clipped above at 1 + `clip_high`. Below 1, but for `cispo`, whose bounds are on a weight.
        pub clip_high: f64 = 0.2 => above(0.0).to(1000.0),
        /// Bound of `ppo` on the ratio for negative advantages, more than 1; 0 means none.
        pub dual_clip: f64 = 3.0 => from(0.0).to(1e6),
        /// Weight of the entropy bonus, aggregated like the loss; 0 means none.
        pub entropy_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Whose experts the training forward uses; gradients still flow through the router's weights of them.
        pub router_replay: RouterReplay = RouterReplay::None,
        pub correction: CorrectionSettings,
        pub kl: KlSettings,
        pub overlong: OverlongSettings,
    }
}

table! {
    /// What is done about tokens whose training and rollout log-probabilities differ.
    pub struct CorrectionSettings {
        /// Importance weights of the loss.
        pub is: ImportanceSampling = ImportanceSampling::None,
        /// Bounds of the weights: one number truncates above it, a low and a high one give weight 0 outside.
        pub threshold: Vec<f64> = vec![2.0],
        /// Divide the weights by their mean over the batch.
        pub normalize: bool = false,
        /// Statistics that must stay within their bounds for a token to count; what fails leaves the loss and its denominators.
        pub reject: Vec<RejectOption> = Vec::new(),
        /// For each of `reject`: for k1 a low and a high bound on ρ, or one number u for 1/u to u; for k2 and k3 one upper bound.
        pub reject_bounds: Vec<Vec<f64>> = Vec::new(),
    }
}

impl CorrectionSettings {
    /// Whether weights or rejection are asked for.
    pub fn active(&self) -> bool {
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
                Some(ImportanceConfig { level, bound, batch_normalize: self.normalize })
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
    /// Divergence from a frozen reference: the model at the start of reinforcement learning.
    pub struct KlSettings {
        /// Where the divergence counts.
        pub place: KlPlace = KlPlace::None,
        /// Its estimator, with d = log-probability minus the reference's.
        pub estimator: KlEstimator = KlEstimator::K3,
        /// Its weight; with `target`, its weight at the first step.
        pub coefficient: f64 = 1e-3 => above(0.0).to(1e6),
        /// With `place = "reward"`: steer the divergence a token to this by the coefficient, which each step multiplies by
        /// 1 + clip(divergence / target - 1, -0.2, 0.2) * trajectories / `horizon` (Ziegler et al. 2019). Absent means a
        /// fixed coefficient.
        pub target: Option<f64> = None => above(0.0).to(1e6),
        /// Trajectories over which `target` steers.
        pub horizon: f64 = 1e4 => above(0.0).to(1e12),
    }
}

table! {
    /// Soft punishment of responses that near the length limit (DAPO). It shapes the advantage, not the reported reward.
    pub struct OverlongSettings {
        /// The punishment grows over this many tokens before `rollout.response_tokens_max`; 0 means none.
        pub buffer_tokens: usize = 0 => from(0.0).to(16777216.0),
        /// What a response at the limit loses.
        pub penalty: f64 = 1.0 => above(0.0).to(1e6),
    }
}

choice! {
    /// Where the divergence from the reference counts.
    pub enum KlPlace {
        /// Nowhere: no reference is kept.
        None = "none",
        /// Added to the loss, aggregated like it.
        Loss = "loss",
        /// Taken off each token's reward before advantages.
        Reward = "reward",
    }
}

choice! {
    /// Whose experts the training forward uses.
    pub enum RouterReplay {
        /// Its own.
        None = "none",
        /// Those chosen at sampling, in every training forward; needs `rollout.keep_routes`.
        Rollout = "rollout",
        /// Those chosen by the forward of `old_logprob = "recompute"`, in every update of the step.
        Recompute = "recompute",
    }
}
