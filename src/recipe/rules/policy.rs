//! Rules of `[policy]`: consistency within the table, with the updates and with the rollout.

use super::Rules;
use crate::policy::advantage::Advantage;
use crate::policy::correction::{ImportanceSampling, WeightBound};
use crate::policy::divergence::KlEstimator;
use crate::policy::loss::{ClipCovSettings, KlCovSettings, Loss, SapoSettings, TokenWeights, VespoSettings};
use crate::policy::ratio::OldLogProbSource;
use crate::policy::{KlPlacement, RouterReplay};
use crate::settings::Choice;

impl Rules<'_> {
    pub(super) fn check_policy(&mut self) {
        let dual_clip = self.recipe.policy.dual_clip;
        if dual_clip != 0.0 && dual_clip <= 1.0 {
            let message = format!(
                "{dual_clip} would clip the ratio of on-policy samples; give more than 1, or 0 for no clip"
            );
            self.refuse(&["policy.dual_clip"], message);
        }
        self.check_clip_range();
        self.check_settings_of_other_losses();
        self.check_token_selection();
        self.check_rewards_of_maxrl();
        self.check_updates();
        self.check_staleness();
        self.check_partial_trajectories();
        self.check_importance();
        self.check_sequence_loss();
        self.check_rejection();
        self.check_router_replay();
        self.check_keys_without_a_switch();
        self.check_divergence();
        self.check_rewards();
        self.check_resampling();
        self.check_greedy_baseline();
    }

    fn check_clip_range(&mut self) {
        let policy = &self.recipe.policy;
        let weight_losses = Loss::all().into_iter().filter(|loss| loss.clips_weight).map(Loss::name);
        let weight_losses = weight_losses.collect::<Vec<_>>().join(" or ");
        for (key, value) in [("policy.clip_low", policy.clip_low), ("policy.clip_high", policy.clip_high)] {
            if value >= 1.0 && !policy.loss.clips_weight {
                let message = format!(
                    "{value} is out of range for the ratio of {}; give a number above 0 and below 1 (only {weight_losses}, which \
                     clips a weight, accepts larger ones)",
                    policy.loss
                );
                self.refuse(&[key, "policy.loss"], message);
            }
        }
    }

    /// Rejects the settings of losses other than the recipe's.
    fn check_settings_of_other_losses(&mut self) {
        let policy = &self.recipe.policy;
        let changed = [
            ("policy.sapo", "sapo", policy.sapo != SapoSettings::default()),
            ("policy.vespo", "vespo", policy.vespo != VespoSettings::default()),
            ("policy.clip_cov", "clip_cov", policy.clip_cov != ClipCovSettings::default()),
            ("policy.kl_cov", "kl_cov", policy.kl_cov != KlCovSettings::default()),
        ];
        for (table, reader, is_changed) in changed {
            if is_changed && policy.loss.name() != reader {
                let message = format!(
                    "only policy.loss = {reader:?} uses this table, and policy.loss is \"{}\"; write {reader:?}, or remove [{table}]",
                    policy.loss
                );
                self.refuse(&[table, "policy.loss"], message);
            }
        }
    }

    /// Checks losses that select tokens before the first update of a step.
    fn check_token_selection(&mut self) {
        let recipe = self.recipe;
        let policy = &recipe.policy;
        let uses_second_forward = recipe.arms.second_forward_old_logprobs;
        let is_detached = policy.old_logprob == OldLogProbSource::Detach && !uses_second_forward;
        if policy.loss.selects_tokens && is_detached {
            let message = format!(
                "\"{}\" selects tokens by their old log-probabilities before the first update, and \"detach\" computes \
                 these during it; write old_logprob = \"rollout\" or \"recompute\"",
                policy.loss
            );
            self.refuse(&["policy.old_logprob", "policy.loss"], message);
        }
        let range = &policy.clip_cov;
        if range.covariance_min >= range.covariance_max {
            let message = format!(
                "{} is not above the lower bound {}; give a larger number",
                range.covariance_max, range.covariance_min
            );
            self.refuse(&["policy.clip_cov.covariance_max", "policy.clip_cov.covariance_min"], message);
        }
    }

    /// Checks that MaxRL, which divides by a mean reward, has rewards of at least the task's least reward.
    fn check_rewards_of_maxrl(&mut self) {
        let recipe = self.recipe;
        if recipe.policy.advantage != Advantage::Maxrl {
            return;
        }
        let negative = [
            (
                "policy.kl.place",
                recipe.policy.kl.place == KlPlacement::Reward,
                "the divergence is subtracted from rewards",
            ),
            (
                "policy.overlong.buffer_tokens",
                recipe.policy.overlong.buffer_tokens > 0,
                "the penalty is subtracted from rewards",
            ),
        ];
        for (key, is_negative, why) in negative {
            if is_negative {
                let message = format!(
                    "\"maxrl\" needs rewards of at least that of a wrong answer, but {why} ({key}); write another advantage"
                );
                self.refuse(&["policy.advantage", key], message);
            }
        }
    }

    fn trajectories_per_step(&self) -> usize {
        let rollout = &self.recipe.rollout;
        rollout.prompts_per_step.saturating_mul(rollout.samples_per_prompt)
    }

    fn check_updates(&mut self) {
        let train = &self.recipe.train;
        self.check_minibatches("train.minibatches", train.minibatches);
        // The ablation computes the old log-probs by a separate forward pass.
        let uses_second_forward = self.recipe.arms.second_forward_old_logprobs;
        if self.recipe.policy.old_logprob == OldLogProbSource::Detach && !uses_second_forward {
            for (key, count) in [("train.minibatches", train.minibatches), ("train.epochs", train.epochs)] {
                if count > 1 {
                    let message = format!(
                        "{count} means several updates per step, and policy.old_logprob = \"detach\" would change the \
                         old log-probs with each update; write old_logprob = \"rollout\" or \"recompute\", or {key} = 1"
                    );
                    self.refuse(&[key, "policy.old_logprob"], message);
                }
            }
        }
    }

    /// Checks the keys that make steps train on samples of older weights.
    fn check_staleness(&mut self) {
        let recipe = self.recipe;
        let uses_second_forward = recipe.arms.second_forward_old_logprobs;
        let stale_keys = [
            ("rollout.lag_steps", recipe.rollout.lag_steps > 0),
            ("rollout.step_tokens_max", recipe.rollout.step_tokens_max > 0),
        ];
        for (key, _) in stale_keys.into_iter().filter(|(_, is_on)| *is_on) {
            if recipe.policy.old_logprob == OldLogProbSource::Detach && !uses_second_forward {
                let message = "older weights sample the tokens, and policy.old_logprob = \"detach\" takes \
                    their ratio as 1; write old_logprob = \"rollout\", or \"recompute\" with \
                    policy.correction.is";
                self.refuse(&[key, "policy.old_logprob"], message);
            }
            if recipe.train.trajectories.is_some() {
                let message =
                    "train.trajectories gives the data, so nothing is sampled; remove one of the two";
                self.refuse(&[key, "train.trajectories"], message);
            }
            let recomputes = recipe.policy.old_logprob == OldLogProbSource::Recompute;
            let has_weights = recipe.policy.correction.is != ImportanceSampling::None;
            if !recipe.policy.loss.has_ratio && !has_weights {
                let message = format!(
                    "older weights sample the tokens, and {} has no ratio, so nothing corrects this; set \
                     policy.correction.is",
                    recipe.policy.loss
                );
                self.warn(&[key, "policy.loss", "policy.correction.is"], message);
            } else if recomputes && !has_weights {
                let message = "older weights sample the tokens, and with old_logprob = \"recompute\" nothing \
                    corrects this; set policy.correction.is, or write old_logprob = \"rollout\"";
                self.warn(&[key, "policy.old_logprob", "policy.correction.is"], message);
            }
        }
    }

    /// Checks that no key needs whole trajectories if trajectories are partial.
    fn check_partial_trajectories(&mut self) {
        let recipe = self.recipe;
        if recipe.rollout.step_tokens_max == 0 {
            return;
        }
        if recipe.rollout.resample_rounds_max > 0 {
            let message = "dynamic sampling replaces groups within a step, and partial trajectories end in \
                later steps; write 0 for one of the two";
            self.refuse(&["rollout.step_tokens_max", "rollout.resample_rounds_max"], message);
        }
        if recipe.policy.advantage == Advantage::Remax {
            let message = "remax compares samples of one version of the weights with their greedy sample, \
                and several versions sample a partial trajectory; write 0, or another advantage";
            self.refuse(&["rollout.step_tokens_max", "policy.advantage"], message);
        }
    }

    /// Checks the number of minibatches. The step's trajectories are divided among them.
    pub(super) fn check_minibatches(&mut self, key: &str, count: usize) {
        let trajectories = self.trajectories_per_step();
        if count > trajectories {
            let message = format!(
                "{count} updates are more than the {trajectories} trajectories of a step; give at most that many"
            );
            self.refuse(&[key, "rollout.prompts_per_step", "rollout.samples_per_prompt"], message);
        }
    }

    fn check_importance(&mut self) {
        let correction = &self.recipe.policy.correction;
        if let Some(error) = WeightBound::bounds_error(&correction.threshold) {
            self.refuse(&["policy.correction.threshold"], error);
        }
        if correction.is == ImportanceSampling::None {
            if correction.normalize {
                let message =
                    "there are no weights to normalise; set policy.correction.is, or remove the key";
                self.refuse(&["policy.correction.normalize", "policy.correction.is"], message);
            }
            return;
        }
        // If the loss has no ratio, importance weights are the only correction.
        if self.recipe.policy.loss.has_ratio && self.recipe.policy.old_logprob == OldLogProbSource::Rollout {
            let message = "with old_logprob = \"rollout\" the loss's ratio is already relative to the \
                rollout, so weights would count the mismatch twice; write old_logprob = \"detach\" or \
                \"recompute\", or is = \"none\"";
            self.refuse(&["policy.correction.is", "policy.old_logprob", "policy.loss"], message);
        }
    }

    /// Checks that the loss can use importance weights of single tokens. Losses with one ratio per sequence
    /// cannot use them.
    fn check_sequence_loss(&mut self) {
        let policy = &self.recipe.policy;
        let correction = &policy.correction;
        if correction.is != ImportanceSampling::Token {
            return;
        }
        match policy.loss.token_weights {
            TokenWeights::None(why) => self.refuse(&["policy.correction.is", "policy.loss"], why),
            TokenWeights::Truncated(why) if correction.threshold.len() == 2 => {
                self.refuse(&["policy.correction.threshold", "policy.correction.is", "policy.loss"], why)
            }
            TokenWeights::Any | TokenWeights::Truncated(_) => {}
        }
    }

    fn check_rejection(&mut self) {
        let correction = &self.recipe.policy.correction;
        let (options, bounds) = (&correction.reject, &correction.reject_bounds);
        if options.len() != bounds.len() {
            let message = format!(
                "{} bounds for {} options of policy.correction.reject; give one array for each",
                bounds.len(),
                options.len()
            );
            self.refuse(&["policy.correction.reject_bounds", "policy.correction.reject"], message);
            return;
        }
        for (i, (&option, bounds)) in options.iter().zip(bounds).enumerate() {
            if options[..i].contains(&option) {
                self.refuse(&["policy.correction.reject"], format!("{option} is listed twice; remove one"));
            }
            if let Some(error) = option.bounds_error(bounds) {
                let message = format!("bounds of {option}: {error}");
                self.refuse(&["policy.correction.reject_bounds", "policy.correction.reject"], message);
            }
        }
    }

    fn check_router_replay(&mut self) {
        let policy = &self.recipe.policy;
        match policy.router_replay {
            RouterReplay::Rollout if !self.recipe.rollout.keep_routes => self.refuse(
                &["policy.router_replay", "rollout.keep_routes"],
                "the experts chosen during sampling are not kept; write rollout.keep_routes = true",
            ),
            RouterReplay::Recompute if policy.old_logprob != OldLogProbSource::Recompute => self.refuse(
                &["policy.router_replay", "policy.old_logprob"],
                "log-probabilities and experts must come from the same forward pass; write old_logprob = \"recompute\"",
            ),
            _ => {}
        }
    }

    /// Rejects a key that was written without the key that switches it on.
    fn check_keys_without_a_switch(&mut self) {
        let policy = &self.recipe.policy;
        let switches = [
            ("policy.kl.coefficient", "policy.kl.place", policy.kl.place == KlPlacement::None),
            (
                "policy.correction.threshold",
                "policy.correction.is",
                policy.correction.is == ImportanceSampling::None
                    && WeightBound::bounds_error(&policy.correction.threshold).is_none(),
            ),
            ("policy.overlong.penalty", "policy.overlong.buffer_tokens", policy.overlong.buffer_tokens == 0),
        ];
        for (key, switch, is_off) in switches {
            if is_off && self.key_locations.is_written(key) && !self.key_locations.is_written(switch) {
                let message = format!("has no effect without {switch}; set that too, or remove the key");
                self.refuse(&[key, switch], message);
            }
        }
    }

    fn check_divergence(&mut self) {
        let policy = &self.recipe.policy;
        if policy.kl.target.is_some() && policy.kl.place != KlPlacement::Reward {
            let message = format!(
                "controls the divergence in the reward, but policy.kl.place is \"{}\"; write place = \"reward\", or remove the key",
                policy.kl.place
            );
            self.refuse(&["policy.kl.target", "policy.kl.place"], message);
        }
        let trajectories = self.trajectories_per_step();
        if policy.kl.target.is_some() && policy.kl.horizon * 5.0 <= trajectories as f64 {
            self.refuse(
                &[
                    "policy.kl.horizon",
                    "policy.kl.target",
                    "rollout.prompts_per_step",
                    "rollout.samples_per_prompt",
                ],
                format!(
                    "with {} for a step of {trajectories} trajectories the coefficient could become 0 or negative; give more than \
                     a fifth of the trajectories",
                    policy.kl.horizon
                ),
            );
        }
        if policy.kl.place == KlPlacement::Loss && policy.kl.estimator == KlEstimator::K1 {
            let message = "in the loss, the gradient of k1 is 0 on average, so nothing holds the policy; \
                write \"k1+\", \"k2\" or \"k3\"";
            self.warn(&["policy.kl.estimator", "policy.kl.place"], message);
        }
        if policy.kl.place == KlPlacement::Reward && policy.kl.estimator.is_straight_through() {
            let message = "no gradient flows through a reward, so the + has no effect; remove it";
            self.refuse(&["policy.kl.estimator", "policy.kl.place"], message);
        }
    }

    fn check_rewards(&mut self) {
        let (policy, rollout) = (&self.recipe.policy, &self.recipe.rollout);
        if policy.overlong.buffer_tokens > rollout.response_tokens_max {
            let message = format!(
                "{} is more than the {} tokens of rollout.response_tokens_max; give at most that many",
                policy.overlong.buffer_tokens, rollout.response_tokens_max
            );
            self.refuse(&["policy.overlong.buffer_tokens", "rollout.response_tokens_max"], message);
        }
    }

    /// Checks the resampling of groups with equal rewards, which have no learning signal.
    fn check_resampling(&mut self) {
        let (rollout, advantage) = (&self.recipe.rollout, self.recipe.policy.advantage);
        if rollout.resample_rounds_max == 0 {
            return;
        }
        if self.only_distills() {
            let message = "the teacher teaches on every group, whatever its rewards; write 0";
            self.refuse(&["rollout.resample_rounds_max", "policy.distill.policy_loss_coefficient"], message);
        }
        if matches!(advantage, Advantage::ReinforcePlusPlus | Advantage::Remax | Advantage::Gae) {
            let message = format!(
                "under {advantage} a group with equal rewards has a learning signal too, because its baseline is not the \
                 group's mean; write 0, or another advantage"
            );
            self.refuse(&["rollout.resample_rounds_max", "policy.advantage"], message);
        }
        if self.recipe.train.trajectories.is_some() {
            let message = "train.trajectories gives the data, so nothing is sampled; remove one of the two";
            self.refuse(&["rollout.resample_rounds_max", "train.trajectories"], message);
        }
    }

    fn check_greedy_baseline(&mut self) {
        if self.recipe.policy.advantage == Advantage::Remax && self.recipe.train.trajectories.is_some() {
            let message = "remax needs a greedy sample for each prompt, but train.trajectories gives the \
                data and nothing is sampled; remove one of the two";
            self.refuse(&["policy.advantage", "train.trajectories"], message);
        }
    }
}
