//! The model of a run, with its weights.

use super::adapter::RunAdapter;
use super::family::unsupported_keys;
use super::memory::{ModelCommand, remaining_memory};
use super::source::{ModelSource, Placement, model_folder};
use super::startup::ErrorList;
use super::teacher::TeacherModel;
use crate::actor::Actor;
use crate::bad_input;
use crate::chat::Chat;
use crate::checkpoint::save::CompanionFiles;
use crate::checkpoint::{BaseFiles, BaseModel};
use crate::dist::Mesh;
use crate::metrics::Console;
use crate::model::config::Config;
use crate::model::names::parameter_specs;
use crate::model::parameters::Parameters;
use crate::recipe::{Plan, Recipe};
use anyhow::Result;
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;

/// The model and the weights that a command has read or initialized.
pub struct LoadedModel {
    /// The policy.
    pub actor: Actor,
    /// The tokenizer and other files that are copied into every checkpoint.
    pub companions: CompanionFiles,
    /// Whether the weights were drawn at random instead of read.
    pub random_weights: bool,
    /// Trainable flags of the policy's parameters, from `train.freeze`.
    pub trainable: Vec<bool>,
    /// Trainable flags of the critic's parameters, from `critic.freeze`. `None` without a critic.
    pub critic_trainable: Option<Vec<bool>>,
    /// The adapter that is trained, or that is part of the model.
    pub adapter: Option<RunAdapter>,
    /// The adapter's base, as checkpoints refer to it. `None` until a folder has the base.
    pub base: Option<BaseModel>,
    /// The base's files, if the command trains an adapter.
    pub base_files: Option<BaseFiles>,
    /// The teacher of distillation, if it is another model.
    pub teacher: Option<TeacherModel>,
}

impl LoadedModel {
    /// Returns the model's config.
    pub fn config(&self) -> &Config {
        &self.actor.model.config
    }

    /// Checks that no file of the adapter's base has changed.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the file.
    pub fn check_base_files(&mut self) -> Result<()> {
        match (&mut self.base_files, &self.base) {
            (Some(files), Some(base)) => files.check(base),
            _ => Ok(()),
        }
    }

    /// Returns the processes of the run.
    pub fn mesh(&self) -> &Arc<Mesh> {
        self.actor.mesh()
    }

    /// Rejects `plan` if it has keys that this model's family does not support. `plan` is another recipe for
    /// this model.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with every such key.
    pub fn check_family(&self, plan: &Plan, chat: &Chat) -> Result<()> {
        let mut errors = ErrorList::default();
        errors.extend(unsupported_keys(plan, self.config().family, chat));
        if errors.is_empty() { Ok(()) } else { Err(errors.into_error()) }
    }

    /// Reads frozen weights of the same architecture from `folder`: a Hugging Face folder, a checkpoint, or a
    /// run folder (its last checkpoint). Weights that do not fit in the remaining memory stay on disk, with a
    /// warning on `console`. `recipe` is the run's.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the folder has no weights, or weights of another architecture.
    pub fn load_weights(&self, recipe: &Recipe, folder: &Path, console: &Console) -> Result<Parameters> {
        self.load_weights_of(self.config(), recipe, folder, console)
    }

    /// Reads frozen weights of the architecture `config`, as [`Self::load_weights`] does.
    ///
    /// # Errors
    /// Errors of [`Self::load_weights`].
    pub fn load_weights_of(
        &self,
        config: &Config,
        recipe: &Recipe,
        folder: &Path,
        console: &Console,
    ) -> Result<Parameters> {
        let source = ModelSource::from_folder(&model_folder(folder)?)?.unpack_for_precision(recipe);
        let comparable =
            Config { max_position_embeddings: config.max_position_embeddings, ..source.config.clone() };
        if source.weights.is_none() || comparable != *config {
            return Err(bad_input!(
                "{}: has no weights of this architecture; name a folder of the same model at another step",
                folder.display()
            ));
        }
        let layers_on_demand =
            remaining_memory().is_some_and(|remaining| source.resident_bytes() > remaining.bytes);
        if layers_on_demand {
            console.print(&format!(
                "warning: {}: each layer is read from disk when it is needed",
                folder.display()
            ));
        }
        let frozen = vec![false; parameter_specs(config).len()];
        let placement = if layers_on_demand { Placement::OnDisk } else { Placement::Replicated };
        let backend = (self.mesh(), &Device::Cpu);
        source.parameters(recipe, &frozen, ModelCommand::Eval, backend, placement, console)
    }
}
