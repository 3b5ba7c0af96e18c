//! Rules of the task `agent`.

use super::Rules;
use crate::policy::RouterReplay;
use crate::policy::advantage::Advantage;

impl Rules<'_> {
    /// Checks the keys of the task `agent`, and refuses what its episodes cannot give.
    pub(super) fn check_agent(&mut self) {
        let task = &self.recipe.task;
        if !task.is_agent() {
            return;
        }
        if task.command.is_empty() && task.serve_on.is_none() {
            let message = "missing: write the program that plays the episodes and its arguments, such as \
                           [\"python3\", \"my_agent.py\"]; or start the program yourself, and set task.serve_on";
            self.refuse(&["task.command", "task.name"], message);
        }
        if let Err(why) = task.serve_address() {
            self.refuse(&["task.serve_on"], why);
        }
        if self.recipe.policy.advantage == Advantage::Remax {
            let message = "remax needs a greedy sample of every prompt, and an agent's episodes have none; write another \
                           advantage, such as \"grpo\"";
            self.refuse(&["policy.advantage", "task.name"], message);
        }
        if self.recipe.rollout.keep_routes || self.recipe.policy.router_replay == RouterReplay::Rollout {
            let message = "an agent's episodes keep no routed experts; write keep_routes = false and another policy.router_replay";
            self.refuse(&["rollout.keep_routes", "policy.router_replay", "task.name"], message);
        }
        if self.recipe.rollout.lag_steps > 0 {
            let message = "an agent's episodes are sampled by the weights of their step; write 0";
            self.refuse(&["rollout.lag_steps", "task.name"], message);
        }
        if self.recipe.rollout.step_tokens_max > 0 {
            let message = "an agent's episodes cannot pause, because their program would wait; write 0";
            self.refuse(&["rollout.step_tokens_max", "task.name"], message);
        }
        let message = "an agent's program decides how episodes go: this run is a function of its recipe only as far as the \
                       program is";
        self.warn(&["task.name"], message);
    }
}
