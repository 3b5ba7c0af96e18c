//! Rules of `[adapter]`: consistency with the adapted model.

use super::Rules;

impl Rules<'_> {
    pub(super) fn check_adapter(&mut self) {
        let recipe = self.recipe;
        // The folder is opened with the model: a run that resumes does not need it.
        if recipe.model.adapter.is_some() && recipe.model.path.is_none() {
            let message = "an adapter needs a base model: give its folder with model.path";
            self.refuse(&["model.adapter", "model.path"], message);
        }
        let Some(adapter) = &recipe.adapter else { return };
        if adapter.dropout != 0.0 {
            let message = "dropout makes the training forward pass differ from the rollout's, so the \
                importance ratio of on-policy data is not 1; write 0";
            self.refuse(&["adapter.dropout"], message);
        }
        self.check_patterns("adapter.targets", &adapter.targets, "*.self_attn.*");
        if recipe.model.path.is_none() && adapter.cold_start {
            let message = "the model stays random, because only the adapter is trained; write false to train \
                the whole model by SFT warm-up first, or name a model with model.path";
            self.warn(&["adapter.cold_start", "model.path"], message);
        }
        if !adapter.cold_start && recipe.cold_start.steps > 0 && recipe.model.adapter.is_some() {
            let message = "SFT warm-up would change the whole model, which is the base of the adapter in \
                model.adapter; write adapter.cold_start = true";
            self.refuse(&["adapter.cold_start", "model.adapter"], message);
        }
    }
}
