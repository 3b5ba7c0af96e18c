//! Rules of `[policy]`: consistency within it, with the updates and with the rollout.

use super::Rules;
use crate::policy::advantage::Advantage;
use crate::policy::correction::{ImportanceSampling, WeightBound};
use crate::policy::loss::{Loss, SapoSettings, TokenWeights, VespoSettings};
use crate::policy::ratio::OldLogProbSource;
use crate::policy::{KlPlacement, RouterReplay};
use crate::settings::Choice;

impl Rules<'_> {
    pub(super) fn policy(&mut self) {
        let dual_clip = self.recipe.policy.dual_clip;
        if dual_clip != 0.0 && dual_clip <= 1.0 {
            self.refuse(
                &["policy.dual_clip"],
                format!("{dual_clip} would bound the ratio where it is not yet off policy; give more than 1, or 0 for none"),
            );
        }
        self.clip_range();
        self.settings_of_other_losses();
        self.rewards_of_maxrl();
        self.updates();
        self.importance();
        self.sequence_loss();
        self.rejection();
        self.router_replay();
        self.divergence();
        self.rewards();
        self.resampling();
        self.greedy_baseline();
    }

    fn clip_range(&mut self) {
        let policy = &self.recipe.policy;
        let weight_losses = Loss::all().into_iter().filter(|loss| loss.clips_weight).map(Loss::name);
        let weight_losses = weight_losses.collect::<Vec<_>>().join(" or ");
        for (key, value) in [("policy.clip_low", policy.clip_low), ("policy.clip_high", policy.clip_high)] {
            if value >= 1.0 && !policy.loss.clips_weight {
                self.refuse(
                    &[key, "policy.loss"],
                    format!(
                        "{value} is out of range for the ratio of {}; give a number above 0 and below 1 (only {weight_losses}, which \
                         bounds a weight, takes more)",
                        policy.loss
                    ),
                );
            }
        }
    }

    /// Refuses the settings of a loss that is not the recipe's.
    fn settings_of_other_losses(&mut self) {
        let policy = &self.recipe.policy;
        let changed = [
            ("policy.sapo", "sapo", policy.sapo != SapoSettings::default()),
            ("policy.vespo", "vespo", policy.vespo != VespoSettings::default()),
        ];
        for (table, reader, is_changed) in changed {
            if is_changed && policy.loss.name() != reader {
                self.refuse(
                    &[table, "policy.loss"],
                    format!(
                        "policy.loss = {reader:?} alone reads it, and it is \"{}\"; write {reader:?}, or remove [{table}]",
                        policy.loss
                    ),
                );
            }
        }
    }

    /// MaxRL divides by a mean reward, which must not be negative.
    fn rewards_of_maxrl(&mut self) {
        let recipe = self.recipe;
        if recipe.policy.advantage != Advantage::Maxrl {
            return;
        }
        let negative = [
            (
                "task.name",
                recipe.task.name.has_negative_rewards,
                "this task's rewards of wrong answers are negative",
            ),
            (
                "policy.kl.place",
                recipe.policy.kl.place == KlPlacement::Reward,
                "the divergence is subtracted from rewards",
            ),
            (
                "policy.overlong.buffer_tokens",
                recipe.policy.overlong.buffer_tokens > 0,
                "the penalty makes rewards negative",
            ),
        ];
        for (key, is_negative, why) in negative {
            if is_negative {
                self.refuse(
                    &["policy.advantage", key],
                    format!(
                        "\"maxrl\" needs rewards of 0 and more, and {why} ({key}); write another advantage"
                    ),
                );
            }
        }
    }

    fn trajectories_per_step(&self) -> usize {
        let rollout = &self.recipe.rollout;
        rollout.prompts_per_step.saturating_mul(rollout.samples_per_prompt)
    }

    fn updates(&mut self) {
        let train = &self.recipe.train;
        self.check_minibatches("train.minibatches", train.minibatches);
        // The ablation computes the old log-probs by a forward of its own.
        let uses_second_forward = self.recipe.arms.second_forward_old_logprobs;
        if self.recipe.policy.old_logprob == OldLogProbSource::Detach && !uses_second_forward {
            for (key, count) in [("train.minibatches", train.minibatches), ("train.epochs", train.epochs)] {
                if count > 1 {
                    self.refuse(
                        &[key, "policy.old_logprob"],
                        format!(
                            "{count} makes several updates a step, and policy.old_logprob = \"detach\" would change the \
                             old log-probs with each; write old_logprob = \"rollout\" or \"recompute\", or {key} = 1"
                        ),
                    );
                }
            }
        }
    }

    /// Checks the number of minibatches, into which the step's trajectories are divided.
    pub(super) fn check_minibatches(&mut self, key: &str, count: usize) {
        let trajectories = self.trajectories_per_step();
        if count > trajectories {
            self.refuse(
                &[key, "rollout.prompts_per_step", "rollout.samples_per_prompt"],
                format!("{count} updates of a step's {trajectories} trajectories; give at most that many"),
            );
        }
    }

    fn importance(&mut self) {
        let correction = &self.recipe.policy.correction;
        if let Some(error) = WeightBound::bounds_error(&correction.threshold) {
            self.refuse(&["policy.correction.threshold"], error);
        }
        if correction.is == ImportanceSampling::None {
            if correction.normalize {
                self.refuse(
                    &["policy.correction.normalize", "policy.correction.is"],
                    "there are no weights to normalise; give policy.correction.is, or remove the key",
                );
            }
            return;
        }
        // Without a ratio in the loss, importance weights are the only correction.
        if self.recipe.policy.loss.has_ratio && self.recipe.policy.old_logprob == OldLogProbSource::Rollout {
            self.refuse(
                &["policy.correction.is", "policy.old_logprob", "policy.loss"],
                "with old_logprob = \"rollout\" the loss's own ratio is already against the rollout, and weights would count \
                 the mismatch twice; write old_logprob = \"detach\" or \"recompute\", or is = \"none\"",
            );
        }
    }

    /// Checks that the loss can use importance weights of single tokens. Losses with one ratio per sequence
    /// cannot.
    fn sequence_loss(&mut self) {
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

    fn rejection(&mut self) {
        let correction = &self.recipe.policy.correction;
        let (options, bounds) = (&correction.reject, &correction.reject_bounds);
        if options.len() != bounds.len() {
            self.refuse(
                &["policy.correction.reject_bounds", "policy.correction.reject"],
                format!(
                    "{} bounds for {} options of policy.correction.reject; give one array for each",
                    bounds.len(),
                    options.len()
                ),
            );
            return;
        }
        for (i, (&option, bounds)) in options.iter().zip(bounds).enumerate() {
            if options[..i].contains(&option) {
                self.refuse(&["policy.correction.reject"], format!("{option} is there twice; remove one"));
            }
            if let Some(error) = option.bounds_error(bounds) {
                self.refuse(
                    &["policy.correction.reject_bounds", "policy.correction.reject"],
                    format!("of {option}: {error}"),
                );
            }
        }
    }

    fn router_replay(&mut self) {
        let policy = &self.recipe.policy;
        match policy.router_replay {
            RouterReplay::Rollout if !self.recipe.rollout.keep_routes => self.refuse(
                &["policy.router_replay", "rollout.keep_routes"],
                "the experts chosen at sampling are not kept; write rollout.keep_routes = true",
            ),
            RouterReplay::Recompute if policy.old_logprob != OldLogProbSource::Recompute => self.refuse(
                &["policy.router_replay", "policy.old_logprob"],
                "log-probabilities and experts must come from the same pass; write old_logprob = \"recompute\"",
            ),
            _ => {}
        }
    }

    fn divergence(&mut self) {
        let policy = &self.recipe.policy;
        if policy.kl.target.is_some() && policy.kl.place != KlPlacement::Reward {
            self.refuse(
                &["policy.kl.target", "policy.kl.place"],
                format!(
                    "steers the divergence in the reward, and policy.kl.place is \"{}\"; write place = \"reward\", or remove the key",
                    policy.kl.place
                ),
            );
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
                    "{} against a step's {trajectories} trajectories would take the coefficient to 0 or below; give more than a \
                     fifth of them",
                    policy.kl.horizon
                ),
            );
        }
        if policy.kl.place == KlPlacement::Reward && policy.kl.estimator.is_straight_through() {
            self.refuse(
                &["policy.kl.estimator", "policy.kl.place"],
                "no gradient flows through a reward, so the + changes nothing; remove it",
            );
        }
    }

    fn rewards(&mut self) {
        let (policy, rollout) = (&self.recipe.policy, &self.recipe.rollout);
        if policy.overlong.buffer_tokens > rollout.response_tokens_max {
            self.refuse(
                &["policy.overlong.buffer_tokens", "rollout.response_tokens_max"],
                format!(
                    "{} is more than the {} tokens of rollout.response_tokens_max; give at most that many",
                    policy.overlong.buffer_tokens, rollout.response_tokens_max
                ),
            );
        }
    }

    /// Checks the resampling of groups without signal, which have equal rewards.
    fn resampling(&mut self) {
        let (rollout, advantage) = (&self.recipe.rollout, self.recipe.policy.advantage);
        if rollout.resample_rounds_max == 0 {
            return;
        }
        if matches!(advantage, Advantage::ReinforcePlusPlus | Advantage::Remax | Advantage::Gae) {
            self.refuse(
                &["rollout.resample_rounds_max", "policy.advantage"],
                format!(
                    "under {advantage} a group of equal rewards teaches too, for its baseline is not the group's mean; write 0, or \
                     another advantage"
                ),
            );
        }
        if self.recipe.train.trajectories.is_some() {
            self.refuse(
                &["rollout.resample_rounds_max", "train.trajectories"],
                "nothing is sampled where train.trajectories gives the data; remove one of the two",
            );
        }
    }

    fn greedy_baseline(&mut self) {
        if self.recipe.policy.advantage == Advantage::Remax && self.recipe.train.trajectories.is_some() {
            self.refuse(
                &["policy.advantage", "train.trajectories"],
                "remax needs a greedy sample of each prompt, and nothing is sampled where train.trajectories gives the data; \
                 remove one of the two",
            );
        }
    }
}
