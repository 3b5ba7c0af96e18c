//! Renders problems as prompts.

use super::{Rollout, SystemPromptSettings};
use crate::bad_input;
use crate::chat::{Chat, chatml, functions};
use crate::error::BadInput;
use crate::harmony::{Message, PYTHON_DESCRIPTION, Role, SystemSettings};
use crate::tasks::Problem;
use anyhow::{Context, Result};
use serde_json::Value;

/// A problem and its index within the step. The index selects the prompt's random streams, so they do not
/// depend on the order of prompts or on the process.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub index: u64,
    pub problem: Problem,
}

/// Default identity in the system message of GPT-OSS.
const OPENAI_IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.";
const KNOWLEDGE_CUTOFF: &str = "2024-06";

/// Returns the system and developer messages of the recipe. They describe the Python tool if the task has it,
/// and the task's own `tools`, in the format of the model's published template.
pub fn system_prompt(
    chat: &Chat,
    harmony: &SystemPromptSettings,
    uses_python: bool,
    tools: &[Value],
) -> Vec<Message> {
    match chat {
        Chat::Harmony(_) => harmony_system_prompt(harmony, uses_python, tools),
        Chat::ChatMl(_) if !harmony.system_message.unwrap_or(true) && tools.is_empty() => vec![],
        Chat::ChatMl(_) => {
            let text = chatml_identity(chat, harmony);
            let python = uses_python.then(chatml::python_function);
            let functions: Vec<Value> = python.into_iter().chain(tools.iter().cloned()).collect();
            let text = chatml::system_text(text.as_deref(), &functions);
            text.map(|text| Message::new(Role::System, text)).into_iter().collect()
        }
    }
}

/// Returns the text of ChatML's system message without functions; `None` for Harmony, and if it is empty.
pub fn chatml_identity(chat: &Chat, harmony: &SystemPromptSettings) -> Option<String> {
    let Chat::ChatMl(chat) = chat else { return None };
    // Qwen3's template adds no default identity.
    let default_identity = (!chat.has_thoughts()).then_some(chatml::QWEN_IDENTITY);
    let identity = harmony.model_identity.as_deref().or(default_identity);
    let identity = identity.filter(|_| harmony.system_message.unwrap_or(true));
    let text: Vec<&str> =
        [identity, harmony.developer_instructions.as_deref()].into_iter().flatten().collect();
    Some(text.join("\n\n")).filter(|text| !text.is_empty())
}

/// Returns the system and developer messages with `text` in place of the recipe's own text: of the developer
/// instructions of GPT-OSS, or of the whole text of ChatML's system message. Declarations of tools stay.
pub fn replaced_system_prompt(
    chat: &Chat,
    harmony: &SystemPromptSettings,
    text: &str,
    uses_python: bool,
    tools: &[Value],
) -> Vec<Message> {
    let text = Some(text.to_owned());
    let harmony = match chat {
        Chat::Harmony(_) => SystemPromptSettings { developer_instructions: text, ..harmony.clone() },
        Chat::ChatMl(_) => SystemPromptSettings {
            system_message: Some(true),
            model_identity: text,
            developer_instructions: None,
            ..harmony.clone()
        },
    };
    system_prompt(chat, &harmony, uses_python, tools)
}

fn harmony_system_prompt(harmony: &SystemPromptSettings, uses_python: bool, tools: &[Value]) -> Vec<Message> {
    let mut messages = Vec::new();
    if harmony.system_message.unwrap_or(true) {
        let or_default =
            |text: &Option<String>, default: &str| Some(text.clone().unwrap_or_else(|| default.into()));
        let settings = SystemSettings {
            model_identity: or_default(&harmony.model_identity, OPENAI_IDENTITY),
            knowledge_cutoff: or_default(&harmony.knowledge_cutoff, KNOWLEDGE_CUTOFF),
            current_date: harmony.current_date.clone(),
            reasoning_effort: Some(harmony.reasoning_effort.unwrap_or_default()),
            python_tool: uses_python.then(|| PYTHON_DESCRIPTION.to_string()),
            function_tools: !tools.is_empty(),
        };
        messages.push(settings.message());
    }
    let instructions = harmony.developer_instructions.iter().map(|text| format!("# Instructions\n\n{text}"));
    let tools = (!tools.is_empty()).then(|| functions::render_namespace(tools));
    let sections: Vec<String> = instructions.chain(tools).collect();
    if !sections.is_empty() {
        messages.push(Message::new(Role::Developer, sections.join("\n\n")));
    }
    messages
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
            _ => self.tokens(problem).err().is_none_or(|error| !error.is::<BadInput>()),
        }
    }

    /// Returns the tokens of the problem's messages and of the header of the assistant's turn.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a prompt that is too long, naming its problem; any other error when the
    /// tokenizer cannot encode the prompt.
    pub fn tokens(&self, problem: &Problem) -> Result<Vec<u32>> {
        let messages = [self.system_prompt, &problem.messages].concat();
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
                " ({n} of them before the problem, for the messages of [harmony] and the declarations of the task's tools; \
                 harmony.system_message = false removes the system message, and shorter declarations need fewer tokens)"
            ),
            n => format!(
                " ({n} of them before the problem; [harmony] sets these messages, and system_message = false removes the system message)"
            ),
        }
    }
}

/// A rendered prompt for the engine.
pub(super) struct RenderedPrompt<'a> {
    pub index: u64,
    pub problem: &'a Problem,
    /// Tokens of the prompt's messages, and of the header of the assistant's turn.
    pub tokens: Vec<u32>,
}

impl Rollout<'_> {
    pub(super) fn render<'p>(&self, prompt: &'p Prompt) -> Result<RenderedPrompt<'p>> {
        let limits = PromptLimits {
            chat: self.chat,
            system_prompt: self.system_prompt,
            has_tools: self.interpreter.is_some() || !self.task.tools().is_empty(),
            prompt_tokens_max: self.plan.settings.prompt_tokens_max,
            context_tokens_max: self.context_tokens_max(),
        };
        let problem = &prompt.problem;
        Ok(RenderedPrompt { index: prompt.index, problem, tokens: limits.tokens(problem)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::chatml::ChatMl;
    use crate::harmony::HarmonyTokenizer;

    #[test]
    fn the_preamble_is_what_the_recipe_asks_for() {
        let chat = Chat::Harmony(HarmonyTokenizer::from_embedded().unwrap());
        let system_prompt =
            |harmony: &SystemPromptSettings, python| system_prompt(&chat, harmony, python, &[]);
        let mut harmony = SystemPromptSettings::default();
        let messages = system_prompt(&harmony, true);
        assert_eq!(messages.len(), 1);
        let text = &messages[0].content;
        for part in [OPENAI_IDENTITY, "Knowledge cutoff: 2024-06", "Reasoning: medium", "## python"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("Current date"));
        assert!(!system_prompt(&harmony, false)[0].content.contains("python"));
        harmony.system_message = Some(false);
        harmony.developer_instructions = Some("Be brief.".into());
        let messages = system_prompt(&harmony, true);
        assert_eq!(messages, [Message::new(Role::Developer, "# Instructions\n\nBe brief.")]);
        harmony.developer_instructions = None;
        assert!(system_prompt(&harmony, true).is_empty());
    }

    #[test]
    fn chatml_has_a_system_message_or_none() {
        let chat = Chat::ChatMl(ChatMl::from_embedded().unwrap());
        let mut harmony = SystemPromptSettings::default();
        let [message] = &system_prompt(&chat, &harmony, false, &[])[..] else { panic!("one message") };
        assert_eq!(*message, Message::new(Role::System, chatml::QWEN_IDENTITY));
        harmony.model_identity = Some("Compute.".into());
        let [message] = &system_prompt(&chat, &harmony, true, &[])[..] else { panic!("one message") };
        assert!(message.content.starts_with("Compute.\n\n# Tools") && message.content.contains("\"code\""));
        harmony.developer_instructions = Some("Call python.".into());
        let [message] = &system_prompt(&chat, &harmony, true, &[])[..] else { panic!("one message") };
        assert!(message.content.starts_with("Compute.\n\nCall python.\n\n# Tools"), "{}", message.content);
        harmony.system_message = Some(false);
        assert!(system_prompt(&chat, &harmony, true, &[]).is_empty());
    }
}
