//! Opens the model: its files, its adapter, and which tensors are trainable.

use super::errors::ErrorList;
use crate::chat::Chat;
use crate::checkpoint::peft::is_adapter_folder;
use crate::model::config::{Config, WeightFormat};
use crate::ops::head_parts::head_split_error;
use crate::ops::mxfp4;
use crate::ops::threads::Threads;
use crate::recipe::{KeyScope, Plan, Recipe};
use crate::run::adapter::RunAdapter;
use crate::run::family::unsupported_keys;
use crate::run::memory::{ModelCommand, TrainableInput};
use crate::run::source::ModelSource;
use crate::run::trainable_flags::{critic_trainable_flags, policy_trainable_flags};
use anyhow::Result;
use std::path::Path;

/// Opens the recipe's model or, if a run resumes from a `checkpoint` with an adapter, this adapter on its
/// base. Such a checkpoint also has the path of the base.
pub(super) fn open_source(
    recipe: &Recipe,
    checkpoint: Option<&Path>,
    threads: &Threads,
) -> Result<ModelSource> {
    match checkpoint.filter(|folder| is_adapter_folder(folder)) {
        Some(folder) => {
            let source = ModelSource::from_adapter(folder, recipe.model.path.as_deref())?;
            Ok(source.unpack_for_precision(recipe))
        }
        None => threads.run_on_all(|| ModelSource::open(recipe)),
    }
}

/// The tensors that a command trains.
pub struct Trainables {
    /// Trainable flags of the model's own tensors in the first stage of training.
    pub policy: Vec<bool>,
    /// Trainable flags of the critic's tensors. `None` without a critic.
    pub critic: Option<Vec<bool>>,
    /// The adapter that is trained, or that is part of the model.
    pub adapter: Option<RunAdapter>,
}

impl Trainables {
    /// Resolves the adapter and the trainable flags. Returns `None` after adding mistakes to `errors`.
    pub(super) fn open(
        plan: &Plan,
        source: &ModelSource,
        command: ModelCommand,
        errors: &mut ErrorList,
    ) -> Option<Self> {
        let existing = source.adapter.as_ref().map(|adapter| &adapter.lora);
        let adapter = RunAdapter::resolve(plan, &source.config, existing, command.trains());
        let adapter = errors.collect(adapter)?;
        let specs = source.specs();
        let policy = match &adapter {
            Some(adapter) if !adapter.factors.after_cold_start => Some(vec![false; specs.len()]),
            Some(adapter) => {
                let all = [&specs[..], &adapter.factors.specs].concat();
                errors.collect(policy_trainable_flags(plan, &all, &[])).map(|all| all[..specs.len()].to_vec())
            }
            None => errors.collect(policy_trainable_flags(plan, &specs, &[])),
        };
        let factors = adapter.as_ref().map(|adapter| &adapter.factors.specs[..]);
        let critic = errors.collect(critic_trainable_flags(plan, &source.config, factors));
        Some(Self { policy: policy?, critic: critic?, adapter })
    }

    /// Returns the part of the memory plan's input.
    pub fn memory_input(&self, recipe: &Recipe) -> TrainableInput {
        TrainableInput {
            policy: self.policy.clone(),
            // SFT alone has no critic.
            critic: self.critic.clone().filter(|_| recipe.train.steps > 0),
            adapter: self.adapter.as_ref().map(|adapter| adapter.factors.clone()),
        }
    }
}

/// Checks the recipe against the model.
pub(super) fn check_model(plan: &Plan, config: &Config, chat: &Chat, errors: &mut ErrorList) {
    errors.collect(check_budgets(plan, config));
    errors.collect(check_heads(plan, config));
    errors.extend(unsupported_keys(plan, config.family, chat));
}

/// Checks the recipe's token budget and checkpoint dtype against the model.
fn check_budgets(plan: &Plan, config: &Config) -> Result<()> {
    let context = config.max_position_embeddings;
    let response = plan.recipe.rollout.response_tokens_max;
    // In a chat, the end of the context ends an answer.
    if response >= context && plan.scope != KeyScope::Chat && plan.reads("rollout.response_tokens_max") {
        let source = match &plan.recipe.model.path {
            Some(path) => {
                format!(", the max_position_embeddings of {}", path.join("config.json").display())
            }
            None => String::new(),
        };
        let reason = format!(
            "{response} sampled tokens and a prompt do not fit in the model's context of {context} tokens{source}; lower this \
             key, or use a model with a longer context"
        );
        return Err(plan.mistake("rollout.response_tokens_max", reason).into());
    }
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let is_divisible = hidden % mxfp4::BLOCK == 0 && intermediate % mxfp4::BLOCK == 0;
    if plan.reads("checkpoint.dtype") && plan.recipe.checkpoint.dtype == WeightFormat::Mxfp4 && !is_divisible
    {
        let reason = format!(
            "MXFP4 needs sizes that are multiples of {}, but hidden_size = {hidden} and intermediate_size = {intermediate}; write \"bf16\"",
            mxfp4::BLOCK
        );
        return Err(plan.mistake("checkpoint.dtype", reason).into());
    }
    Ok(())
}

/// Checks that attention heads can be divided among the processes of a sequence-parallel group.
fn check_heads(plan: &Plan, config: &Config) -> Result<()> {
    let sequence = plan.recipe.parallel.sequence;
    match head_split_error(config.num_attention_heads, config.num_key_value_heads, sequence) {
        None => Ok(()),
        Some(error) => {
            let reason = format!("{sequence} {error}; write a divisor, or 1");
            Err(plan.mistake("parallel.sequence", reason).into())
        }
    }
}

/// Warns about a model without weights.
pub(super) fn warn_about_model(plan: &mut Plan, source: &ModelSource) {
    if let Some(folder) = &source.folder_without_weights {
        plan.warnings
            .push(format!("{} has no weights; the weights are initialized at random", folder.display()));
    }
}
