//! The environment of a run: where its conversations and rewards come from.

use super::data_inputs::{self, DataInputs};
use crate::actor::micro_batch::Sequence;
use crate::actor::teacher::PromptChange;
use crate::agents::AgentSession;
use crate::chat::{Chat, ConversationRenderer, SystemPromptSettings};
use crate::harmony::Message;
use crate::interpreter::Interpreter;
use crate::model::config::Config;
use crate::model::forward::ForwardOptions;
use crate::recipe::{Plan, Recipe};
use crate::rollout::{Prompt, PromptLimits, RolloutPlan, first_messages};
use crate::tasks::{Problem, Task, ValidationSet};
use std::sync::Arc;

/// The recipe with its chat format, task and tools. It has no weights.
pub struct Environment {
    pub plan: Plan,
    /// The tokenizer and the chat format.
    pub chat: Chat,
    pub task: Box<dyn Task>,
    /// The server and the program of the task `agent`, if this command plays its episodes.
    pub agent: Option<AgentSession>,
    /// The Python tool. `None` if the task does not use it.
    pub interpreter: Option<Box<dyn Interpreter>>,
    /// The system and developer messages before every prompt.
    pub system_prompt: Vec<Message>,
    /// The settings of the system prompt.
    pub prompt_settings: SystemPromptSettings,
    /// Number of training problems that were left out because their prompts are too long.
    pub long_problems: usize,
    /// The rows of `cold_start.train_file`, if the command trains on them.
    pub sft_rows: Option<Arc<[Sequence]>>,
    /// The teacher's system prompt, if it is not the policy's.
    pub teacher_prompt: Option<PromptChange>,
}

impl Environment {
    /// Returns the resolved recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.plan.recipe
    }

    /// Returns the renderer that turns conversations into training examples. `config` is the model's.
    pub fn renderer(&self, config: &Config) -> ConversationRenderer<'_> {
        ConversationRenderer {
            chat: &self.chat,
            system_prompt: &self.system_prompt,
            settings: &self.prompt_settings,
            uses_python: self.recipe().declares_python(self.task.as_ref()),
            context_tokens_max: config.max_position_embeddings,
            vocabulary: config.vocab_size,
        }
    }

    /// Returns whether the system prompt declares tools.
    pub fn has_tools(&self) -> bool {
        self.recipe().declares_python(self.task.as_ref()) || !self.task.tools().is_empty()
    }

    /// Returns the messages before the first turn of `problem`.
    pub fn first_messages(&self, problem: &Problem) -> Vec<Message> {
        first_messages(&self.chat, &self.system_prompt, self.has_tools(), problem)
    }

    /// Returns the limits that a prompt of this run must keep. `context_tokens_max` is the model's context.
    pub fn prompt_limits(&self, context_tokens_max: usize) -> PromptLimits<'_> {
        PromptLimits {
            chat: &self.chat,
            system_prompt: &self.system_prompt,
            has_tools: self.has_tools(),
            prompt_tokens_max: self.recipe().rollout.prompt_tokens_max,
            context_tokens_max,
        }
    }

    /// Returns the inputs with which the run's data is opened. `config` is the model's; `on_cpu`: whether the
    /// run computes on the CPU.
    pub fn data_inputs<'a>(&'a self, config: &'a Config, on_cpu: bool) -> DataInputs<'a> {
        DataInputs {
            plan: &self.plan,
            task: self.task.as_ref(),
            renderer: self.renderer(config),
            prompt_limits: self.prompt_limits(config.max_position_embeddings),
            config,
            on_cpu,
            sft_rows: self.sft_rows.as_ref(),
        }
    }

    /// Returns [`data_inputs::training_prompts`] of this run.
    pub fn training_prompts(&self, step: u64, round: u64, count: usize) -> Vec<Prompt> {
        data_inputs::training_prompts(self.recipe(), self.task.as_ref(), (step, round), count)
    }

    /// Returns [`data_inputs::validation_prompts`] of this run.
    pub fn validation_prompts(&self) -> Vec<(&ValidationSet, Vec<Prompt>)> {
        data_inputs::validation_prompts(self.recipe(), self.task.as_ref())
    }

    /// Returns the plan of step `step`'s training rollout.
    pub fn training_rollout(&self, step: u64) -> RolloutPlan {
        let recipe = self.recipe();
        RolloutPlan::for_training(&recipe.rollout, recipe.train.seed, step)
    }

    /// Returns the plan of the evaluation after step `step`.
    pub fn evaluation_rollout(&self, step: u64) -> RolloutPlan {
        let recipe = self.recipe();
        RolloutPlan::for_evaluation(&recipe.rollout, &recipe.eval, recipe.train.seed, step)
    }

    /// Returns the options of the training forward pass, with the ablations applied.
    pub fn training_forward(&self) -> ForwardOptions {
        ForwardOptions::for_training(&self.recipe().arms, self.recipe().train.seed)
    }

    /// Describes the sandbox of the Python tool, for the run folder. `None` without a tool.
    pub fn sandbox_description(&self) -> Option<String> {
        self.interpreter.as_ref().map(|interpreter| interpreter.sandbox_description())
    }
}
