//! The adapter of a run: when it begins to learn, and the base it stands on.

use super::Trainer;
use crate::atomic_file::replace_folder;
use crate::model::adapter::{BASE_FOLDER, Base};
use crate::model::config::Form;
use crate::model::parameters::VALUES;
use crate::model::save::{SHARD_BYTES_MAX, save};
use crate::recipe::Dtype;
use anyhow::{Context, Result};

impl Trainer {
    /// Puts the adapter beside the weights that a cold start has trained: from here on it alone learns.
    pub(super) fn begin_adapter(&mut self) -> Result<()> {
        let bench = &mut self.bench;
        let Some(adapter) = bench.adapter.as_ref().filter(|_| bench.parameters.adapter().is_none()) else {
            return Ok(());
        };
        let base_tensors = bench.parameters.len();
        adapter.attach(&mut bench.parameters, bench.plan.recipe.train.seed)?;
        bench.trainable = adapter.trainable_of_all(base_tensors);
        bench.parameters.learn(&bench.trainable)?;
        self.keep_base()
    }

    /// Writes the base into the run's folder where no other folder holds it; checkpoints name it.
    pub(super) fn keep_base(&mut self) -> Result<()> {
        let bench = &mut self.bench;
        if bench.parameters.adapter().is_none() || bench.base.is_some() {
            return Ok(());
        }
        // The weights have no more digits than that.
        let form = match bench.plan.recipe.model.dtype {
            Dtype::Bf16 | Dtype::Bf16Dot => Form::Bf16,
            Dtype::F32 => Form::F32,
        };
        let folder = self.folder.path.join(BASE_FOLDER);
        let base = bench.parameters.without_adapter();
        let write = || {
            replace_folder(&folder, |aside| {
                let config = &bench.model.config;
                let manifest = save(aside, config, form, &bench.companions, SHARD_BYTES_MAX, |spec| {
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
        bench.mesh().lead(write, |asked| base.answer(None, &asked))?;
        bench.base = Some(Base::of(&folder)?);
        Ok(())
    }
}
