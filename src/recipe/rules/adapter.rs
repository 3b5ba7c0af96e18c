//! Rules of `[adapter]`: consistency with the adapted model.

use super::Rules;

impl Rules<'_> {
    pub(super) fn adapter(&mut self) {
        let recipe = self.recipe;
        if let Some(folder) = &recipe.model.adapter {
            if recipe.model.path.is_none() {
                self.refuse(
                    &["model.adapter", "model.path"],
                    "an adapter adds to a model: name the folder of its base with model.path".to_owned(),
                );
            }
            if !folder.is_dir() {
                let what = format!(
                    "no folder at {}; name one with adapter_config.json, a checkpoint or a run folder",
                    folder.display()
                );
                self.refuse(&["model.adapter"], what);
            }
        }
        let Some(adapter) = &recipe.adapter else { return };
        if adapter.dropout != 0.0 {
            self.refuse(
                &["adapter.dropout"],
                "dropout makes training's forward another one than the rollout's, so that the importance ratio of fresh data \
                 is not 1; write 0",
            );
        }
        self.check_patterns("adapter.targets", &adapter.targets, "*.self_attn.*");
        if recipe.model.path.is_none() && adapter.cold_start {
            self.warn(
                &["adapter.cold_start", "model.path"],
                "the model is random and stays so, for the adapter alone learns; write false to train the model in a cold \
                 start first, or name a model with model.path",
            );
        }
        if !adapter.cold_start && recipe.cold_start.steps > 0 && recipe.model.adapter.is_some() {
            self.refuse(
                &["adapter.cold_start", "model.adapter"],
                "a cold start of the whole model would leave the adapter of model.adapter without its base; write true",
            );
        }
    }
}
