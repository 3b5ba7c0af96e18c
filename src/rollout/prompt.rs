//! Problems to prompts.

use super::Rollout;
use crate::bad_input;
use crate::harmony::{DeveloperContent, Message, PYTHON_DESCRIPTION, RenderOptions, Role, SystemSettings};
use crate::recipe;
use crate::tasks::Problem;
use anyhow::{Context, Result};

/// A problem and its index within the step, from which its random streams derive: it keeps them in any order, and
/// when a step's prompts are shared out over processes.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub index: u64,
    pub problem: Problem,
}

impl Prompt {
    /// Problems numbered from 0.
    pub fn numbered(problems: impl IntoIterator<Item = Problem>) -> Vec<Prompt> {
        (0..).zip(problems).map(|(index, problem)| Prompt { index, problem }).collect()
    }
}

/// The system and developer messages that the recipe asks for; the Python tool is described when the task has it.
pub fn preamble(harmony: &recipe::Harmony, uses_python: bool) -> Vec<Message> {
    let mut messages = Vec::new();
    if harmony.system_message {
        let settings = SystemSettings {
            model_identity: Some(harmony.model_identity.clone()),
            knowledge_cutoff: Some(harmony.knowledge_cutoff.clone()),
            current_date: harmony.current_date.clone(),
            reasoning_effort: Some(harmony.reasoning_effort),
            python_tool: uses_python.then(|| PYTHON_DESCRIPTION.to_string()),
            function_tools: false,
        };
        messages.push(settings.message());
    }
    if let Some(instructions) = &harmony.developer_instructions {
        let content = DeveloperContent { instructions: Some(instructions.clone()), tools: None };
        messages.push(content.message());
    }
    messages
}

/// A prompt as the engine takes it.
pub(super) struct Rendered<'a> {
    pub index: u64,
    pub problem: &'a Problem,
    /// The conversation so far and the assistant's opening.
    pub tokens: Vec<u32>,
}

impl Rollout<'_> {
    pub(super) fn render<'p>(&self, prompt: &'p Prompt) -> Result<Rendered<'p>> {
        let problem = &prompt.problem;
        let mut messages = self.settings.preamble.clone();
        messages.extend_from_slice(&problem.messages);
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        let allowed = self.settings.prompt_tokens_max;
        // A text of megabytes would take seconds to tokenise, only to be refused.
        if !self.tokenizer.may_fit(bytes, allowed) {
            return Err(bad_input!(
                "problem {}: its prompt has {bytes} bytes, more than rollout.prompt_tokens_max = {allowed} tokens can hold; \
                 leave the problem out",
                problem.id
            ));
        }
        let tokens = self
            .tokenizer
            .render_conversation_for_completion(&messages, Role::Assistant, RenderOptions::default())
            .with_context(|| format!("problem {}", problem.id))?;
        let n = tokens.len();
        if n > allowed {
            return Err(bad_input!(
                "problem {}: its prompt has {n} tokens, more than rollout.prompt_tokens_max = {allowed}; raise the key or \
                 leave the problem out",
                problem.id
            ));
        }
        let context = self.policy.model.context_tokens_max();
        if n >= context {
            return Err(bad_input!(
                "problem {}: its prompt has {n} tokens and leaves no room in the model's context of {context}; leave the \
                 problem out or take a model with a longer context",
                problem.id
            ));
        }
        Ok(Rendered { index: prompt.index, problem, tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preamble_is_what_the_recipe_asks_for() {
        let mut harmony = recipe::Harmony::default();
        let messages = preamble(&harmony, true);
        assert_eq!(messages.len(), 1);
        let text = &messages[0].content;
        for part in [&harmony.model_identity, "Knowledge cutoff: 2024-06", "Reasoning: medium", "## python"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("Current date"));
        assert!(!preamble(&harmony, false)[0].content.contains("python"));
        harmony.system_message = false;
        harmony.developer_instructions = Some("Be brief.".into());
        let messages = preamble(&harmony, true);
        assert_eq!(messages, [Message::new(Role::Developer, "# Instructions\n\nBe brief.")]);
        harmony.developer_instructions = None;
        assert!(preamble(&harmony, true).is_empty());
    }
}
