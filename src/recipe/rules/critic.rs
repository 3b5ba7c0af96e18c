//! Rules of `[critic]`: consistency with the advantage and with the run's length.

use super::Rules;
use crate::policy::advantage::Advantage;

impl Rules<'_> {
    pub(super) fn critic(&mut self) {
        let Some(critic) = &self.recipe.critic else { return };
        let (advantage, steps) = (self.recipe.policy.advantage, self.recipe.train.steps);
        if advantage != Advantage::Gae {
            self.refuse(
                &["critic", "policy.advantage"],
                format!(
                    "a critic's values are read by policy.advantage = \"gae\" alone, and it is \"{advantage}\"; write \
                     \"gae\", or remove [critic]"
                ),
            );
            return;
        }
        self.check_minibatches("critic.minibatches", critic.minibatches);
        if steps > 0 && critic.warmup_steps >= steps {
            self.warn(
                &["critic.warmup_steps", "train.steps"],
                format!(
                    "the policy never learns: only the critic does until step {}, and train.steps is {steps}",
                    critic.warmup_steps
                ),
            );
        }
        self.check_patterns("critic.freeze", &critic.freeze, "*.mlp.experts.*");
        self.optimizer("critic.optimizer", &critic.optimizer, "train.steps", steps);
    }
}
