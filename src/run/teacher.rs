//! The teacher of distillation: its files, its vocabulary and its system prompt.

use super::memory::{ModelCommand, TeacherInput};
use super::source::{ModelSource, Placement, model_folder};
use crate::actor::Actor;
use crate::actor::teacher::PromptChange;
use crate::chat::{Chat, replaced_system_prompt};
use crate::dist::Mesh;
use crate::harmony::Message;
use crate::metrics::Console;
use crate::model::config::Config;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::policy::distill::TeacherSource;
use crate::recipe::{Plan, Recipe};
use crate::vocabulary::Vocabulary;
use anyhow::{Context, Result};
use candle_core::Device;
use serde_json::Value;
use std::sync::Arc;

const TEACHER_KEY: &str = "policy.distill.teacher";
const PROMPT_KEY: &str = "policy.distill.system_prompt";

/// A teacher in memory, or on disk.
pub struct TeacherModel {
    pub actor: Actor,
    /// Digest of the config and the weights.
    pub digest: String,
}

/// The opened teacher of a recipe. Only the headers of its files are read.
pub(super) struct TeacherSettings {
    /// `None` if the policy is its own teacher.
    pub source: Option<ModelSource>,
    /// Whether the layers stay on disk.
    pub on_disk: bool,
}

impl TeacherSettings {
    /// Opens the teacher of `plan` for `command`. Returns `None` if the command does not distill.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the teacher has no weights, or another vocabulary than `policy`.
    pub fn open(plan: &Plan, policy: &ModelSource, command: ModelCommand) -> Result<Option<Self>> {
        let recipe = &plan.recipe;
        let distill = recipe.policy.distill.as_ref().filter(|_| command.trains() && recipe.train.steps > 0);
        let Some(distill) = distill else { return Ok(None) };
        let source = match &distill.teacher {
            TeacherSource::Policy => None,
            TeacherSource::Path(path) => {
                let refused = |reason: String| plan.mistake(TEACHER_KEY, reason);
                let open = || ModelSource::from_folder(&model_folder(path)?);
                let source = open().map_err(|error| refused(format!("{error:#}")))?;
                if source.weights.is_none() {
                    let reason =
                        format!("{} has no weights; name a folder with *.safetensors", path.display());
                    return Err(refused(reason).into());
                }
                let difference = vocabulary_difference(
                    (policy.chat.vocabulary(), &policy.config),
                    (source.chat.vocabulary(), &source.config),
                );
                if let Some(difference) = difference {
                    let reason = format!(
                        "{} has another vocabulary than the policy: {difference}; name a teacher whose tokens have the policy's ids",
                        path.display()
                    );
                    return Err(refused(reason).into());
                }
                Some(source.unpack_for_precision(recipe))
            }
        };
        Ok(Some(Self { source, on_disk: false }))
    }

    /// Returns the input of the memory plan. `policy` is the config of the policy. `prompt` changes the
    /// policy's prompts for the teacher, if it does not read them.
    pub fn memory_input<'a>(&'a self, policy: &'a Config, prompt: Option<&PromptChange>) -> TeacherInput<'a> {
        let source = self.source.as_ref();
        TeacherInput {
            config: source.map_or(policy, |source| &source.config),
            formats: source.map(|source| source.formats.as_slice()),
            adapter_bytes: source.map_or(0, ModelSource::adapter_bytes),
            on_disk: self.on_disk,
            added_tokens: prompt.map_or(0, PromptChange::added_tokens),
        }
    }

    /// Reads the model, its weights and their digest. Returns `None` if the policy is its own teacher.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file is damaged.
    pub fn load(
        &self,
        recipe: &Recipe,
        mesh: &Arc<Mesh>,
        console: &Console,
    ) -> Result<Option<(Model, Parameters, String)>> {
        let Some(source) = &self.source else { return Ok(None) };
        let frozen = vec![false; source.specs().len()];
        let placement = if self.on_disk { Placement::OnDisk } else { Placement::Replicated };
        let backend = (mesh, &Device::Cpu);
        let parameters =
            source.parameters(recipe, &frozen, ModelCommand::Eval, backend, placement, console)?;
        let model = Model::new(source.config.clone(), source.config.max_position_embeddings);
        Ok(Some((model, parameters, source.digest()?)))
    }
}

/// Checks that sequences of `tokens` tokens, without the tokens that the system prompt adds, fit in the
/// context of `teacher`.
///
/// # Errors
/// [`crate::error::BadInput`] when they do not fit.
pub(super) fn check_context(plan: &Plan, teacher: TeacherInput, tokens: usize) -> Result<()> {
    let TeacherInput { config, added_tokens, .. } = teacher;
    let (needed, context) = (tokens + added_tokens, config.max_position_embeddings);
    if needed <= context {
        return Ok(());
    }
    let key = if added_tokens > 0 { PROMPT_KEY } else { TEACHER_KEY };
    let reason = format!(
        "the teacher's context has {context} tokens, and its longest sequence {needed}, {added_tokens} of them added by its \
         system prompt; lower rollout.response_tokens_max or rollout.prompt_tokens_max"
    );
    Err(plan.mistake(key, reason).into())
}

/// Returns the change of the prompts for the teacher of `recipe`. `policy` are the policy's system and
/// developer messages. `None` if the teacher reads the policy's prompts.
///
/// # Errors
/// When a message cannot be rendered.
pub(super) fn prompt_change(
    recipe: &Recipe,
    chat: &Chat,
    policy: &[Message],
    (uses_python, tools): (bool, &[Value]),
) -> Result<Option<PromptChange>> {
    let text = recipe.policy.distill.as_ref().and_then(|distill| distill.system_prompt.as_deref());
    let Some(text) = text else { return Ok(None) };
    let teacher = replaced_system_prompt(chat, &recipe.chat, text, uses_python, tools);
    if chat.has_own_template() {
        // A template may write a system message of its own, so the prompts are compared from their ends.
        let whole = |messages: &[Message]| chat.render_prompt(&[messages, &[Message::user("x")]].concat());
        let (mut policy, mut teacher) = (whole(policy)?, whole(&teacher)?);
        let common = policy.iter().rev().zip(teacher.iter().rev()).take_while(|(a, b)| a == b).count();
        policy.truncate(policy.len() - common);
        teacher.truncate(teacher.len() - common);
        return Ok(Some(PromptChange { policy, teacher }));
    }
    Ok(Some(PromptChange { policy: prefix(chat, policy)?, teacher: prefix(chat, &teacher)? }))
}

/// Returns the tokens of `messages` before a user's message.
fn prefix(chat: &Chat, messages: &[Message]) -> Result<Vec<u32>> {
    let user = [Message::user("x")];
    let (whole, rest) = (chat.render_prompt(&[messages, &user].concat())?, chat.render_prompt(&user)?);
    Ok(whole.strip_suffix(rest.as_slice()).context("a prompt without its last message")?.to_vec())
}

/// Describes how the teacher's vocabulary differs from the policy's. `None` if every token of the policy has
/// its id in the teacher's vocabulary. The teacher may have more tokens, and more rows of padding.
fn vocabulary_difference(
    (policy, policy_config): (&Vocabulary, &Config),
    (teacher, teacher_config): (&Vocabulary, &Config),
) -> Option<String> {
    let (own, others) = (policy_config.vocab_size, teacher_config.vocab_size);
    let text = |bytes: &[u8]| format!("{:?}", String::from_utf8_lossy(bytes));
    let differs = |id: &u32| match (policy.token_bytes(*id), teacher.token_bytes(*id)) {
        (Some(own), Some(other)) => own != other || policy.is_special(*id) != teacher.is_special(*id),
        // GGUF files name the rows of padding.
        (Some(own), None) => !own.starts_with(b"[PAD"),
        (None, _) => false,
    };
    if let Some(id) = (0..policy.vocab_size() as u32).find(differs) {
        let own = policy.token_bytes(id).map_or_else(String::new, text);
        let other = teacher.token_bytes(id).map_or_else(|| "no token".to_owned(), text);
        return Some(format!("id {id} is {own} for the policy and {other} for the teacher"));
    }
    (others < own).then(|| format!("the policy has {own} rows of logits, the teacher {others}"))
}
