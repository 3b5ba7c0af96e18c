//! The start of reinforcement learning: the adapter, the critic, the frozen reference and the KL coefficient.

use super::Trainer;
use crate::actor::Actor;
use crate::actor::teacher::Teacher;
use crate::checkpoint::{BASE_FOLDER, BaseFiles, BaseModel, ModelFiles, ResumePoint, reference};
use crate::learner::critic::Critic;
use crate::model::config::WeightFormat;
use crate::model::settings::Dtype;
use crate::policy::KlSettings;
use crate::policy::kl_in_reward::KlController;
use crate::run::environment::Environment;
use crate::run::loaded::LoadedModel;
use crate::run::teacher::TeacherModel;
use anyhow::Result;

impl Trainer {
    /// Attaches the adapter after the SFT warm-up. From then on, only the adapter is trainable.
    pub(super) fn attach_adapter(&mut self) -> Result<()> {
        let LoadedModel { actor, adapter, trainable, .. } = &mut self.loaded;
        let Some(adapter) = adapter.as_ref().filter(|_| actor.parameters.adapter().is_none()) else {
            return Ok(());
        };
        *trainable = adapter.trainable_flags(actor.parameters.len());
        *actor = actor.with_adapter(adapter.lora.clone(), self.environment.recipe().train.seed)?;
        actor.parameters.set_trainable(trainable)?;
        self.save_base_model()
    }

    /// Writes the base model into the run's folder, unless another folder already holds it. Checkpoints refer
    /// to the base model.
    pub(super) fn save_base_model(&mut self) -> Result<()> {
        let loaded = &self.loaded;
        if loaded.actor.parameters.adapter().is_none() || loaded.base.is_some() {
            return Ok(());
        }
        // The format has the precision of the weights, so nothing is rounded.
        let format = match self.environment.plan.recipe.model.dtype {
            Dtype::Bf16 | Dtype::Bf16Dot => WeightFormat::Bf16,
            Dtype::F32 => WeightFormat::F32,
        };
        let folder = self.observer.folder.path.join(BASE_FOLDER);
        let (config, companions) = (loaded.config(), &loaded.companions);
        let files = ModelFiles { config, format, companions, base: None };
        loaded.actor.without_adapter().save(&folder, &files, false)?;
        self.loaded.base_files = Some(BaseFiles::of(&folder)?);
        self.loaded.base = Some(BaseModel::from_folder(&folder)?);
        Ok(())
    }

    /// Creates the recipe's critic from the policy's current weights, or restores it from the checkpoint.
    /// Returns `None` if the recipe has no critic.
    pub(super) fn critic(&self, resume_point: Option<&ResumePoint>) -> Result<Option<Critic>> {
        let loaded = &self.loaded;
        let recipe = self.environment.recipe();
        let (Some(settings), Some(trainable)) = (&recipe.critic, &loaded.critic_trainable) else {
            return Ok(None);
        };
        let round = recipe.model.dtype.is_bf16();
        let mut critic = Critic::new(&loaded.actor, trainable, settings, recipe.train.seed, round)?;
        if let Some(ResumePoint { folder, state, .. }) = resume_point {
            critic.actor.load(folder, Some(state.critic_updates))?;
        }
        Ok(Some(critic))
    }

    /// Sets the reference model. If the model has an adapter, the reference is the model without the adapter.
    /// Otherwise the reference has the weights from the start of reinforcement learning; a resumed run reads
    /// them from a file.
    pub(super) fn set_reference(&mut self, resume_point: Option<&ResumePoint>) -> Result<()> {
        if !self.environment.recipe().policy.needs_reference() {
            return Ok(());
        }
        let actor = &self.loaded.actor;
        let (config, parameters) = (self.loaded.config(), &actor.parameters);
        if parameters.adapter().is_some() {
            self.reference = Some(actor.without_adapter());
            return Ok(());
        }
        let run = &self.observer.folder.path;
        let (reference, digest) = match resume_point {
            Some(resume_point) => {
                (reference::read(run, config, parameters)?, resume_point.state.reference_digest)
            }
            None => {
                let reference = reference::copy(config, parameters)?;
                let mut digest = None;
                let write = || {
                    digest = Some(reference::write(run, &reference)?);
                    Ok(())
                };
                parameters.mesh().run_on_rank_zero(write, |request| reference.serve(None, &request))?;
                (reference, digest)
            }
        };
        (self.reference, self.reference_digest) = (Some(actor.beside(reference)), digest);
        Ok(())
    }

    /// Checks that the teacher is the one that the run began with.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the checkpoint has the digest of another teacher.
    pub(super) fn check_teacher(&self, resume_point: &ResumePoint) -> Result<()> {
        let digests = (&self.loaded.teacher, &resume_point.state.teacher_digest);
        let (Some(teacher), Some(digest)) = digests else { return Ok(()) };
        if teacher.digest == *digest {
            return Ok(());
        }
        let reason = "holds another model now than at the start of the run; restore it, or start a new run";
        Err(self.environment.plan.mistake("policy.distill.teacher", reason.to_owned()).into())
    }

    /// Creates the controller of the KL coefficient. It starts with the recipe's coefficient; in a resumed
    /// run, it starts with `adapted_coefficient`.
    pub(super) fn kl_controller(kl: &KlSettings, adapted_coefficient: Option<f64>) -> Result<KlController> {
        match kl.target {
            None => Ok(KlController::fixed(kl.coefficient)),
            Some(target) => {
                KlController::adaptive(adapted_coefficient.unwrap_or(kl.coefficient), target, kl.horizon)
            }
        }
    }
}

/// Returns the teacher of distillation: the recipe's model, or the reference. `None` if the recipe has no
/// teacher.
pub(super) fn teacher<'a>(
    model: Option<&'a TeacherModel>,
    environment: &'a Environment,
    reference: Option<&'a Actor>,
) -> Option<Teacher<'a>> {
    environment.recipe().policy.distill.as_ref()?;
    let actor = if let Some(teacher) = model { &teacher.actor } else { reference? };
    Some(Teacher { actor, prompt: environment.teacher_prompt.as_ref() })
}
