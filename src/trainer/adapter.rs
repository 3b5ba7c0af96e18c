//! The adapter of a run: when it begins to learn, and the base it stands on.

use super::Trainer;
use crate::atomic_file::replace_folder;
use crate::checkpoint::save::{SHARD_BYTES_MAX, save};
use crate::checkpoint::{BASE_FOLDER, Base};
use crate::model::config::Form;
use crate::model::parameters::VALUES;
use crate::model::settings::Dtype;
use anyhow::{Context, Result};

impl Trainer {
    /// Puts the adapter beside the weights that a cold start has trained: from here on it alone learns.
    pub(super) fn begin_adapter(&mut self) -> Result<()> {
        let context = &mut self.context;
        let Some(adapter) = context.adapter.as_ref().filter(|_| context.parameters.adapter().is_none())
        else {
            return Ok(());
        };
        let base_tensors = context.parameters.len();
        adapter.attach(&mut context.parameters, context.plan.recipe.train.seed)?;
        context.trainable = adapter.trainable_of_all(base_tensors);
        context.parameters.learn(&context.trainable)?;
        self.keep_base()
    }

    /// Writes the base into the run's folder where no other folder holds it; checkpoints name it.
    pub(super) fn keep_base(&mut self) -> Result<()> {
        let context = &mut self.context;
        if context.parameters.adapter().is_none() || context.base.is_some() {
            return Ok(());
        }
        // The weights have no more digits than that.
        let form = match context.plan.recipe.model.dtype {
            Dtype::Bf16 | Dtype::Bf16Dot => Form::Bf16,
            Dtype::F32 => Form::F32,
        };
        let folder = self.folder.path.join(BASE_FOLDER);
        let base = context.parameters.without_adapter();
        let write = || {
            replace_folder(&folder, |aside| {
                let config = &context.model.config;
                let manifest = save(aside, config, form, &context.companions, SHARD_BYTES_MAX, |spec| {
                    let index =
                        base.position(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
                    match base.packed(index) {
                        None => base.whole(index, VALUES),
                        Some(packed) => packed.decoded(spec),
                    }
                })?;
                manifest.write(aside)
            })
        };
        context.mesh().lead(write, |asked| base.answer(None, &asked))?;
        context.base = Some(Base::of(&folder)?);
        Ok(())
    }
}
