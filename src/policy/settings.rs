//! `[policy]`: advantage, ratio, loss, rollout correction and divergence.

use super::advantage::Advantage;
use super::aggregation::Aggregation;
use super::correction::{
    CorrectionRules, ImportanceSampling, ImportanceSettings, RejectOption, RejectionRule, WeightBound,
};
use super::distill::{DistillSettings, TeacherSource};
use super::divergence::KlEstimator;
use super::loss::{ClipCovSettings, KlCovSettings, Loss, SapoSettings, VespoSettings};
use super::ratio::OldLogProbSource;
use crate::settings::{above, choice, from, table};
use anyhow::Result;

table! {
    /// Advantage, importance ratio and loss.
    pub struct PolicySettings {
        /// How rewards of a group become advantages.
        pub advantage: Advantage = Advantage::Grpo,
        /// How training treats answers that were cut at a limit of tokens.
        pub truncated: Truncated = Truncated::Train,
        /// The policy loss.
        pub loss: Loss = Loss::default(),
        /// How token losses become one number. `gspo` and `sapo` are published with
        /// `sequence_mean_token_mean`.
        pub aggregation: Aggregation = Aggregation::TokenMean,
        /// The log-probabilities in the denominator of the importance ratio.
        pub old_logprob: OldLogProbSource = OldLogProbSource::Detach,
        /// Lower clip of the ratio: 1 - `clip_low`. Must be below 1, except with `cispo`, where 1 means no
        /// lower bound. With `dppo_tv` and `dppo_kl` it bounds the divergence of tokens whose probability
        /// decreased.
        pub clip_low: f64 = 0.2 => above(0.0).to(1.0),
        /// Upper clip of the ratio: 1 + `clip_high`. Must be below 1, except with `cispo`, where it bounds a
        /// weight. With `dppo_tv` and `dppo_kl` it bounds the divergence of tokens whose probability
        /// increased.
        pub clip_high: f64 = 0.2 => above(0.0).to(1000.0),
        /// With `ppo`: upper bound of the ratio for negative advantages (dual clip). With `dppo_tv` and
        /// `dppo_kl`: upper bound of every ratio. Must exceed 1; 0 means no bound.
        pub dual_clip: f64 = 3.0 => from(0.0).to(1e6),
        /// Weight of the entropy bonus, which is aggregated like the loss; 0 means no bonus.
        pub entropy_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Which routed experts the training forward pass uses. The router's weights still get gradients.
        pub router_replay: RouterReplay = RouterReplay::None,
        pub correction: CorrectionSettings,
        pub kl: KlSettings,
        pub distill: Option<DistillSettings>,
        pub sapo: SapoSettings,
        pub vespo: VespoSettings,
        pub clip_cov: ClipCovSettings,
        pub kl_cov: KlCovSettings,
        pub overlong: OverlongSettings,
    }
}

impl PolicySettings {
    /// Returns whether training needs the frozen reference: the model at the start of reinforcement learning.
    pub fn needs_reference(&self) -> bool {
        let is_own_teacher =
            self.distill.as_ref().is_some_and(|distill| distill.teacher == TeacherSource::Policy);
        self.kl.place != KlPlacement::None || is_own_teacher
    }

    /// Returns the weight of the policy loss.
    pub fn loss_coefficient(&self) -> f64 {
        self.distill.as_ref().map_or(1.0, |distill| distill.policy_loss_coefficient)
    }
}

table! {
    /// Correction of tokens whose training and rollout log-probabilities differ. ρ is a token's training
    /// probability divided by its rollout probability.
    pub struct CorrectionSettings {
        /// Importance weights of the loss; not with `old_logprob = "rollout"`, except for `reinforce`.
        pub is: ImportanceSampling = ImportanceSampling::None,
        /// Bounds of the weights. One number truncates larger weights to it. Two numbers are a lower and an
        /// upper bound; weights outside become 0.
        pub threshold: Vec<f64> = vec![2.0],
        /// Whether the weights are divided by their mean over the batch.
        pub normalize: bool = false,
        /// Statistics that must stay within their bounds: k1 = −log ρ, k2 = ½ (log ρ)², k3 = ρ − 1 − log ρ. A
        /// rejected token counts neither in the loss nor in its denominators.
        pub reject: Vec<RejectOption> = Vec::new(),
        /// Bounds of each statistic in `reject`. For k1: a lower and an upper bound on ρ, or one number u,
        /// which means 1/u to u. For k2 and k3: one upper bound.
        pub reject_bounds: Vec<Vec<f64>> = Vec::new(),
        /// Off-policy sequence mask (DeepSeek-V3.2): a response has weight 0 if its advantage is negative and
        /// the mean of its rollout minus training log-probabilities exceeds this bound. It still counts in
        /// the denominators of the loss. The log-probabilities are those before the first update, so it masks
        /// only samples of older weights. If absent, no response is masked.
        pub off_policy_mask: Option<f64> = None => above(0.0).to(20.0),
    }
}

impl CorrectionSettings {
    /// Returns whether the recipe has weights, rejection or the off-policy sequence mask.
    pub fn is_active(&self) -> bool {
        self.is != ImportanceSampling::None || !self.reject.is_empty() || self.off_policy_mask.is_some()
    }

    /// Returns the rules with their bounds.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for invalid bounds.
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
    /// KL divergence from a frozen reference: the model before reinforcement learning, without an adapter.
    pub struct KlSettings {
        /// Where the divergence is applied.
        pub place: KlPlacement = KlPlacement::None,
        /// Estimator of the divergence, with d = log-probability minus the reference's log-probability.
        pub estimator: KlEstimator = KlEstimator::K3,
        /// Coefficient of the divergence. With `target`, the coefficient of the first step.
        pub coefficient: f64 = 1e-3 => above(0.0).to(1e6),
        /// Target of the divergence per token, with `place = "reward"`. Each step multiplies the coefficient
        /// by 1 + clip(divergence / target - 1, -0.2, 0.2) * trajectories / `horizon` (Ziegler et al. 2019).
        /// If absent, the coefficient is fixed.
        pub target: Option<f64> = None => above(0.0).to(1e6),
        /// Number of trajectories over which the coefficient adapts to `target`.
        pub horizon: f64 = 1e4 => above(0.0).to(1e12),
    }
}

table! {
    /// Soft penalty on responses near the length limit (DAPO). The penalty changes the advantage, but not the
    /// reported reward.
    pub struct OverlongSettings {
        /// The penalty grows linearly over this many tokens before `rollout.response_tokens_max`; 0 means no
        /// penalty.
        pub buffer_tokens: usize = 0 => from(0.0).to(16777216.0),
        /// Penalty of a response at the limit.
        pub penalty: f64 = 1.0 => above(0.0).to(1e6),
    }
}

choice! {
    /// How training treats answers that were cut at a limit of tokens.
    pub enum Truncated default Train {
        /// Trains on them like on others.
        Train = "train",
        /// They have no loss. Their rewards count in their group.
        Mask = "mask",
        /// Their reward is 0.
        Zero = "zero",
    }
}

choice! {
    /// Where the divergence from the reference is applied.
    pub enum KlPlacement {
        /// The divergence is not computed; there is no reference.
        None = "none",
        /// The divergence is added to the loss, aggregated like the loss.
        Loss = "loss",
        /// The divergence is subtracted from each token's reward, before advantages are computed.
        Reward = "reward",
    }
}

choice! {
    /// Which routed experts the training forward pass uses.
    pub enum RouterReplay {
        /// The router chooses the experts.
        None = "none",
        /// Every training forward pass uses the experts of sampling. Needs `rollout.keep_routes`.
        Rollout = "rollout",
        /// Every update of the step uses the experts of the forward pass of `old_logprob = "recompute"`.
        Recompute = "recompute",
    }
}
