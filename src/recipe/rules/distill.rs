//! Rules of `[policy.distill]`.

use super::Rules;
use crate::checkpoint::gguf::is_gguf;
use crate::policy::KlPlacement;
use crate::policy::distill::TeacherSource;
use crate::recipe::plan::is_in_table;
use crate::settings::changed_entries;

/// Keys below `policy` that only the policy loss reads. A table stands for all of its keys.
const POLICY_LOSS_KEYS: &str = "advantage loss clip_low clip_high dual_clip correction.is \
    correction.threshold correction.normalize correction.off_policy_mask overlong sapo vespo clip_cov kl_cov";

impl Rules<'_> {
    /// Returns whether the divergence from a teacher is the only loss.
    pub(super) fn only_distills(&self) -> bool {
        self.recipe.policy.distill.as_ref().is_some_and(|distill| distill.is_only_loss())
    }

    pub(super) fn check_distillation(&mut self) {
        let recipe = self.recipe;
        let Some(distill) = &recipe.policy.distill else { return };
        match (&distill.teacher, &distill.system_prompt) {
            (TeacherSource::Policy, None) => self.refuse(
                &["policy.distill.system_prompt", "policy.distill.teacher"],
                "missing, and teacher = \"self\" is the policy under another system prompt; set the key, or name a teacher's \
                 folder in policy.distill.teacher",
            ),
            (TeacherSource::Path(path), _) if !(path.is_dir() || is_gguf(path) && path.exists()) => {
                let message = format!(
                    "no folder and no GGUF file at {}; name a model's folder, a GGUF file, a checkpoint or a run, or write \
                     \"self\"",
                    path.display()
                );
                self.refuse(&["policy.distill.teacher"], message);
            }
            _ => {}
        }
        if recipe.task.is_agent() && distill.system_prompt.is_some() {
            let message = "an agent's program writes the system prompts, so the teacher's cannot replace \
                them; remove the key, or use another task";
            self.refuse(&["policy.distill.system_prompt", "task.name"], message);
        }
        let rollout = &recipe.rollout;
        let truncations = [
            ("rollout.top_p", rollout.top_p < 1.0, "1"),
            ("rollout.top_k", rollout.top_k > 0, "0"),
            ("rollout.min_p", rollout.min_p > 0.0, "0"),
        ];
        for (key, is_set, off) in truncations {
            if is_set {
                let message = format!(
                    "the policy's distribution has only the kept tokens, and policy.distill compares the whole vocabulary; \
                     write {off}, or remove [policy.distill]"
                );
                self.refuse(&[key, "policy.distill"], message);
            }
        }
        if distill.is_only_loss() {
            self.refuse_keys_of_policy_losses();
        }
    }

    /// Refuses the keys that only the policy loss reads.
    fn refuse_keys_of_policy_losses(&mut self) {
        let recipe = self.recipe;
        let changed = changed_entries(&recipe.policy);
        let is_of_loss = |path: &&str| POLICY_LOSS_KEYS.split(' ').any(|key| is_in_table(path, key));
        let paths = changed.iter().map(|entry| entry.path()).filter(is_of_loss);
        let mut keys: Vec<String> = paths.map(|path| format!("policy.{path}")).collect();
        if recipe.policy.kl.place == KlPlacement::Reward {
            keys.push("policy.kl.place".to_owned());
        }
        for key in keys {
            let message = "only the policy loss reads this, and policy.distill.policy_loss_coefficient = 0 \
                removes that loss; remove one of the two";
            self.refuse(&[&key, "policy.distill.policy_loss_coefficient"], message);
        }
    }
}
