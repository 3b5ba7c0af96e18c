//! `[policy]`: advantage, ratio and loss.

use super::correction::CorrectionConfig;
use super::limits::{above, from};
use super::table::table;
use crate::choice::choice;
pub use crate::policy::advantage::Advantage;
pub use crate::policy::aggregation::Aggregation;
pub use crate::policy::divergence::KlEstimator;
pub use crate::policy::loss::Loss;
pub use crate::policy::ratio::OldLogprob;

table! {
    /// Advantage, importance ratio and loss.
    pub struct Policy {
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
        /// What is done about tokens whose training and rollout log-probabilities differ.
        pub correction: CorrectionConfig = CorrectionConfig::default(),
        /// Divergence from a frozen reference: the model at the start of reinforcement learning.
        pub kl: Kl = Kl::default(),
        /// Soft punishment of responses that near the length limit (DAPO). It shapes the advantage, not the reported reward.
        pub overlong: OverlongConfig = OverlongConfig::default(),
    }
}

table! {
    /// Divergence from a frozen reference.
    pub struct Kl {
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
    /// Soft punishment of long responses.
    pub struct OverlongConfig {
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
