//! Contradictions of `[policy]` with itself, with the updates and with the rollout.

use super::Rules;
use crate::recipe::{ImportanceSampling, KlEstimator, KlPlace, OldLogprob, RejectOption, RouterReplay};

impl Rules<'_> {
    pub(super) fn policy(&mut self) {
        let dual_clip = self.recipe.policy.dual_clip;
        if dual_clip != 0.0 && dual_clip <= 1.0 {
            self.refuse(
                &["policy.dual_clip"],
                format!("{dual_clip} would bound the ratio where it is not yet off policy; give more than 1, or 0 for none"),
            );
        }
        self.updates();
        self.importance();
        self.rejection();
        self.router_replay();
        self.rewards();
    }

    fn updates(&mut self) {
        let (train, rollout) = (&self.recipe.train, &self.recipe.rollout);
        let trajectories = rollout.prompts_per_step.saturating_mul(rollout.samples_per_prompt);
        if train.minibatches > trajectories {
            self.refuse(
                &["train.minibatches", "rollout.prompts_per_step", "rollout.samples_per_prompt"],
                format!(
                    "{} updates of a step's {trajectories} trajectories; give at most that many",
                    train.minibatches
                ),
            );
        }
        // The arm fixes the anchor by a forward of its own.
        let moves = !self.recipe.arms.second_forward_old_logprobs;
        if self.recipe.policy.old_logprob == OldLogprob::Detach && moves {
            for (key, count) in [("train.minibatches", train.minibatches), ("train.epochs", train.epochs)] {
                if count > 1 {
                    self.refuse(
                        &[key, "policy.old_logprob"],
                        format!(
                            "{count} makes several updates a step, and policy.old_logprob = \"detach\" would move the ratio's \
                             anchor with each; write old_logprob = \"rollout\" or \"recompute\", or {key} = 1"
                        ),
                    );
                }
            }
        }
    }

    fn importance(&mut self) {
        let correction = &self.recipe.policy.correction;
        if correction.is == ImportanceSampling::None {
            if correction.normalize {
                self.refuse(
                    &["policy.correction.normalize", "policy.correction.is"],
                    "there are no weights to normalise; give policy.correction.is, or remove the key",
                );
            }
            return;
        }
        if self.recipe.policy.old_logprob == OldLogprob::Rollout {
            self.refuse(
                &["policy.correction.is", "policy.old_logprob"],
                "with old_logprob = \"rollout\" the loss's own ratio is already against the rollout, and weights would count \
                 the gap twice; write old_logprob = \"detach\" or \"recompute\", or is = \"none\"",
            );
        }
        let wrong = match *correction.threshold.as_slice() {
            [max] if max > 0.0 => None,
            [low, high] if low >= 0.0 && high > 0.0 && low <= high => None,
            [low, high] if low > high => {
                Some(format!("the bounds are reversed, {low} above {high}; swap them"))
            }
            [_] | [_, _] => Some("a ratio is positive; give a positive bound".to_owned()),
            _ => Some("give one number, or a low and a high one".to_owned()),
        };
        if let Some(wrong) = wrong {
            self.refuse(&["policy.correction.threshold"], wrong);
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
            if let Some(wrong) = wrong_bounds(option, bounds) {
                self.refuse(
                    &["policy.correction.reject_bounds", "policy.correction.reject"],
                    format!("of {option}: {wrong}"),
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
            RouterReplay::Recompute if policy.old_logprob != OldLogprob::Recompute => self.refuse(
                &["policy.router_replay", "policy.old_logprob"],
                "log-probabilities and experts must come from the same pass; write old_logprob = \"recompute\"",
            ),
            _ => {}
        }
    }

    fn rewards(&mut self) {
        let (policy, rollout) = (&self.recipe.policy, &self.recipe.rollout);
        let straight = [KlEstimator::K1Straight, KlEstimator::AbsStraight, KlEstimator::K3Straight];
        if policy.kl.place == KlPlace::Reward && straight.contains(&policy.kl.estimator) {
            self.refuse(
                &["policy.kl.estimator", "policy.kl.place"],
                "no gradient flows through a reward, so the + changes nothing; remove it",
            );
        }
        if policy.overlong.buffer_tokens > rollout.response_tokens_max {
            self.refuse(
                &["policy.overlong.buffer_tokens", "rollout.response_tokens_max"],
                format!(
                    "{} is more than the {} tokens of rollout.response_tokens_max; give at most that many",
                    policy.overlong.buffer_tokens, rollout.response_tokens_max
                ),
            );
        }
        if rollout.resample_rounds_max > 0 && self.recipe.train.trajectories.is_some() {
            self.refuse(
                &["rollout.resample_rounds_max", "train.trajectories"],
                "nothing is sampled where train.trajectories gives the data; remove one of the two",
            );
        }
        if rollout.resample_rounds_max > 0 && rollout.samples_per_prompt == 1 {
            self.refuse(
                &["rollout.resample_rounds_max", "rollout.samples_per_prompt"],
                "the rewards of a group of one are always equal; give 2 or more samples, or 0 rounds",
            );
        }
    }
}

/// What is wrong with the bounds of a rejection option, if anything.
fn wrong_bounds(option: RejectOption, bounds: &[f64]) -> Option<String> {
    let signed = option.name().ends_with("k1");
    if bounds.iter().any(|&bound| bound <= 0.0) {
        return Some(format!("{bounds:?} must be positive"));
    }
    match (signed, bounds) {
        (true, &[bound]) if bound < 1.0 => Some(format!(
            "one bound u stands for 1/u to u, which is empty for {bound}; give 1 or more, or two bounds"
        )),
        (true, &[low, high]) if low > high => {
            Some(format!("the bounds are reversed, {low} above {high}; swap them"))
        }
        (true, [_] | [_, _]) | (false, [_]) => None,
        (true, _) => Some("give one bound on the ratio, or a low and a high one".to_owned()),
        (false, _) => Some("never negative, so give one upper bound".to_owned()),
    }
}
