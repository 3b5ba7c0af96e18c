//! Rules of `[critic]`: consistency with the advantage and with the run's length.

use super::Rules;
use crate::policy::advantage::Advantage;

impl Rules<'_> {
    pub(super) fn check_critic(&mut self) {
        let Some(critic) = &self.recipe.critic else { return };
        let (advantage, steps) = (self.recipe.policy.advantage, self.recipe.train.steps);
        if advantage != Advantage::Gae {
            let message = format!(
                "only policy.advantage = \"gae\" uses a critic, and policy.advantage is \"{advantage}\"; write \"gae\", or \
                 remove [critic]"
            );
            self.refuse(&["critic", "policy.advantage"], message);
            return;
        }
        self.check_minibatches("critic.minibatches", critic.minibatches);
        if steps > 0 && critic.warmup_steps >= steps {
            let message = format!(
                "the policy is never trained: only the critic is trained in the first {} steps, and train.steps is {steps}",
                critic.warmup_steps
            );
            self.warn(&["critic.warmup_steps", "train.steps"], message);
        }
        self.check_patterns("critic.freeze", &critic.freeze, "*.mlp.experts.*");
        self.check_optimizer("critic.optimizer", &critic.optimizer, "train.steps", steps);
    }
}
