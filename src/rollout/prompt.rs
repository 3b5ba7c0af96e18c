//! Renders problems as prompts.

use super::Rollout;
use crate::bad_input;
use crate::chat::Chat;
use crate::error::BadInput;
use crate::harmony::{Message, Role};
use crate::tasks::Problem;
use anyhow::{Context, Result};

/// A problem and its index within the step. The index selects the prompt's random streams, so they do not
/// depend on the order of prompts or on the process.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub index: u64,
    pub problem: Problem,
}

/// The limits that a prompt must meet.
pub struct PromptLimits<'a> {
    pub chat: &'a Chat,
    /// Messages before every problem: system prompt and developer message.
    pub system_prompt: &'a [Message],
    /// Whether the system prompt declares tools.
    pub has_tools: bool,
    /// `rollout.prompt_tokens_max`.
    pub prompt_tokens_max: usize,
    pub context_tokens_max: usize,
}

impl PromptLimits<'_> {
    /// Returns the maximum number of tokens of a prompt. One token of the context is left to sample.
    pub fn tokens_max(&self) -> usize {
        self.prompt_tokens_max.min(self.context_tokens_max.saturating_sub(1))
    }

    /// Returns a function that returns whether a problem's prompt keeps the limits.
    pub fn fits(&self) -> impl Fn(&Problem) -> bool {
        // A byte is at most one token, so most prompts need not be tokenised.
        let around = self.chat.render_prompt(&[self.system_prompt, &[Message::user("")]].concat());
        let around = around.map_or(usize::MAX, |tokens| tokens.len());
        let tokens_max = self.tokens_max();
        move |problem| match problem.messages.as_slice() {
            [only] if around.saturating_add(only.content.len()) <= tokens_max => true,
            // A prompt that cannot be rendered, an error with context, is not too long: using it is an error.
            _ => self.tokens(problem).err().is_none_or(|e| !e.is::<BadInput>() || e.chain().len() > 1),
        }
    }

    /// Returns the tokens of the problem's messages and of the header of the assistant's turn.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a prompt that is too long, naming its problem; any other error when the
    /// tokenizer cannot encode the prompt.
    pub fn tokens(&self, problem: &Problem) -> Result<Vec<u32>> {
        let messages = first_messages(self.chat, self.system_prompt, self.has_tools, problem);
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        let (id, prompt_tokens_max, context) = (&problem.id, self.prompt_tokens_max, self.context_tokens_max);
        // Tokenising megabytes of text takes seconds, and such a prompt is too long anyway.
        if !self.chat.vocabulary().may_fit(bytes, prompt_tokens_max) {
            return Err(bad_input!(
                "problem {id}: the prompt has {bytes} bytes, more than rollout.prompt_tokens_max = {prompt_tokens_max} tokens can hold; \
                 remove the problem"
            ));
        }
        let tokens = self.chat.render_prompt(&messages).with_context(|| format!("problem {id}"))?;
        let n = tokens.len();
        if n > prompt_tokens_max {
            return Err(bad_input!(
                "problem {id}: the prompt has {n} tokens{}, more than rollout.prompt_tokens_max = {prompt_tokens_max}; raise the key, or \
                 remove the problem",
                self.system_prompt_note()
            ));
        }
        if n >= context {
            return Err(bad_input!(
                "problem {id}: the prompt has {n} tokens{}, and the model's context has {context}, so no token can be sampled; shorten the prompt, \
                 or use a model with a longer context (max_position_embeddings in its config.json; without a folder, in [model.architecture])",
                self.system_prompt_note()
            ));
        }
        Ok(tokens)
    }

    /// Returns a note on the number of tokens before the problem. These tokens may make the prompt too long.
    fn system_prompt_note(&self) -> String {
        match self.chat.render_training(self.system_prompt).map_or(0, |rendered| rendered.tokens.len()) {
            0 => String::new(),
            n if self.has_tools => format!(
                " ({n} of them before the problem, for the messages of [chat] and the declarations of the task's tools; \
                 chat.system_message = false removes the system message, and shorter declarations need fewer tokens)"
            ),
            n => format!(
                " ({n} of them before the problem; [chat] sets these messages, and system_message = false removes the system message)"
            ),
        }
    }
}

/// Returns the messages before the first turn of `problem`. If its first message is a system message, this
/// takes the place of the recipe's own text. Declarations of tools stay.
pub fn first_messages(
    chat: &Chat,
    system_prompt: &[Message],
    has_tools: bool,
    problem: &Problem,
) -> Vec<Message> {
    let Some((first, rest)) = problem.messages.split_first().filter(|(first, _)| first.role == Role::System)
    else {
        return [system_prompt, &problem.messages].concat();
    };
    let of_recipe = system_prompt.iter();
    let (before, first): (Vec<Message>, Message) = match chat {
        Chat::ChatMl(_) => (of_recipe.filter(|_| has_tools).cloned().collect(), first.clone()),
        Chat::Harmony(_) => {
            let is_kept = |message: &&Message| has_tools || message.role == Role::System;
            let text = format!("# Instructions\n\n{}", first.content);
            (of_recipe.filter(is_kept).cloned().collect(), Message::new(Role::Developer, text))
        }
    };
    before.into_iter().chain([first]).chain(rest.iter().cloned()).collect()
}

/// A rendered prompt for the engine.
pub(super) struct RenderedPrompt<'a> {
    pub index: u64,
    pub problem: &'a Problem,
    /// Tokens of the prompt's messages, and of the header of the assistant's turn.
    pub tokens: Vec<u32>,
}

impl Rollout<'_> {
    /// Returns whether the system prompt may declare tools.
    pub(super) fn has_tools(&self) -> bool {
        self.interpreter.is_some() || !self.task.tools().is_empty()
    }

    pub(super) fn render<'p>(&self, prompt: &'p Prompt) -> Result<RenderedPrompt<'p>> {
        let limits = PromptLimits {
            chat: self.chat,
            system_prompt: self.system_prompt,
            has_tools: self.has_tools(),
            prompt_tokens_max: self.plan.settings.prompt_tokens_max,
            context_tokens_max: self.context_tokens_max(),
        };
        let problem = &prompt.problem;
        Ok(RenderedPrompt { index: prompt.index, problem, tokens: limits.tokens(problem)? })
    }
}
