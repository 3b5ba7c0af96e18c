//! The messages before a conversation: system and developer messages of `[chat]`.

use super::{Chat, chatml, functions};
use crate::harmony::{Message, PYTHON_DESCRIPTION, ReasoningEffort, Role, SystemSettings};
use crate::settings::table;
use serde_json::Value;

/// Default identity in the system message of GPT-OSS.
const OPENAI_IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.";
const KNOWLEDGE_CUTOFF: &str = "2024-06";

table! {
    /// The system and developer messages before every prompt. They do not depend on the day of the run.
    pub struct SystemPromptSettings {
        /// Whether prompts begin with a system message. If false, the Python tool is not declared, and only
        /// `enable_thinking` and GPT-OSS's `developer_instructions` have an effect. The default is true; with
        /// the embedded vocabulary, whose tokens are bytes, it is false.
        pub system_message: Option<bool> = None,
        /// First line of the system message. If absent, it is the model family's default: `You are ChatGPT, a
        /// large language model trained by OpenAI.` for GPT-OSS, `You are Qwen, created by Alibaba Cloud. You
        /// are a helpful assistant.` for Qwen2, no line for Qwen3, and the text of a model's own template.
        pub model_identity: Option<String> = None,
        /// Knowledge cutoff in the system message, as `YYYY-MM`. If absent, it is `2024-06`. GPT-OSS only.
        pub knowledge_cutoff: Option<String> = None,
        /// Current date in the system message, as `YYYY-MM-DD`. If absent, there is no such line, or the day
        /// of the run's start. GPT-OSS, and a model's own template that tells the date.
        pub current_date: Option<String> = None,
        /// Reasoning effort in the system message. If absent, it is `medium`. GPT-OSS, and a model's own
        /// template that reads it.
        pub reasoning_effort: Option<ReasoningEffort> = None,
        /// Whether Qwen3 thinks before it answers. If false, an empty thought is inserted at the start of
        /// each of its turns. If absent, it is true. Qwen3, and a model's own template that reads it.
        pub enable_thinking: Option<bool> = None,
        /// Instructions in GPT-OSS's developer message, or at the end of ChatML's system message. If absent,
        /// there are no instructions.
        pub developer_instructions: Option<String> = None,
    }
}

/// Returns the system and developer messages of the recipe. They describe the Python tool if the task has it,
/// and the task's own `tools`, in the format of the model's published template.
pub fn system_prompt(
    chat: &Chat,
    settings: &SystemPromptSettings,
    uses_python: bool,
    tools: &[Value],
) -> Vec<Message> {
    match chat {
        Chat::Harmony(_) => harmony_system_prompt(settings, uses_python, tools),
        Chat::ChatMl(_) if !settings.system_message.unwrap_or(true) && tools.is_empty() => vec![],
        Chat::ChatMl(own) => {
            let text = chatml_identity(chat, settings);
            let python = uses_python.then(chatml::python_function);
            let functions: Vec<Value> = python.into_iter().chain(tools.iter().cloned()).collect();
            if own.has_own_template() {
                let text = text.map(|text| Message::new(Role::System, text));
                let declared = Message::new(Role::System, chatml::json_text(&functions.into()));
                let declared = Message { content_type: Some(chatml::DECLARATION.into()), ..declared };
                return text.into_iter().chain((declared.content != "[]").then_some(declared)).collect();
            }
            let text = chatml::system_text(text.as_deref(), &functions);
            text.map(|text| Message::new(Role::System, text)).into_iter().collect()
        }
    }
}

/// Returns the text of ChatML's system message without functions; `None` for Harmony, and if it is empty.
fn chatml_identity(chat: &Chat, settings: &SystemPromptSettings) -> Option<String> {
    let Chat::ChatMl(chat) = chat else { return None };
    // Qwen3's template adds no default identity.
    let has_default = !chat.has_thoughts() && !chat.has_own_template();
    let identity = settings.model_identity.as_deref().or(has_default.then_some(chatml::QWEN_IDENTITY));
    let identity = identity.filter(|_| settings.system_message.unwrap_or(true));
    let text: Vec<&str> =
        [identity, settings.developer_instructions.as_deref()].into_iter().flatten().collect();
    // An empty system message keeps a template's own text away.
    let is_given = chat.has_own_template() && !text.is_empty();
    Some(text.join("\n\n")).filter(|text| !text.is_empty() || is_given)
}

/// Returns the system and developer messages with `text` in place of the recipe's own text: of the developer
/// instructions of GPT-OSS, or of the whole text of ChatML's system message. Declarations of tools stay.
pub fn replaced_system_prompt(
    chat: &Chat,
    settings: &SystemPromptSettings,
    text: &str,
    uses_python: bool,
    tools: &[Value],
) -> Vec<Message> {
    system_prompt(chat, &settings.with_text(chat, Some(text.to_owned())), uses_python, tools)
}

impl SystemPromptSettings {
    /// Returns the settings with `text` in place of the recipe's own text: of the developer instructions of
    /// GPT-OSS, or of the whole text of ChatML's system message. `None` removes the text.
    pub fn with_text(&self, chat: &Chat, text: Option<String>) -> Self {
        match chat {
            Chat::Harmony(_) => Self { developer_instructions: text, ..self.clone() },
            Chat::ChatMl(_) => Self {
                system_message: Some(text.is_some()),
                model_identity: text,
                developer_instructions: None,
                ..self.clone()
            },
        }
    }
}

fn harmony_system_prompt(
    settings: &SystemPromptSettings,
    uses_python: bool,
    tools: &[Value],
) -> Vec<Message> {
    let mut messages = Vec::new();
    if settings.system_message.unwrap_or(true) {
        let or_default =
            |text: &Option<String>, default: &str| Some(text.clone().unwrap_or_else(|| default.into()));
        let settings = SystemSettings {
            model_identity: or_default(&settings.model_identity, OPENAI_IDENTITY),
            knowledge_cutoff: or_default(&settings.knowledge_cutoff, KNOWLEDGE_CUTOFF),
            current_date: settings.current_date.clone(),
            reasoning_effort: Some(settings.reasoning_effort.unwrap_or_default()),
            python_tool: uses_python.then(|| PYTHON_DESCRIPTION.to_string()),
            function_tools: !tools.is_empty(),
        };
        messages.push(settings.message());
    }
    let instructions = settings.developer_instructions.iter().map(|text| format!("# Instructions\n\n{text}"));
    let tools = (!tools.is_empty()).then(|| functions::render_namespace(tools));
    let sections: Vec<String> = instructions.chain(tools).collect();
    if !sections.is_empty() {
        messages.push(Message::new(Role::Developer, sections.join("\n\n")));
    }
    messages
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
            |settings: &SystemPromptSettings, python| system_prompt(&chat, settings, python, &[]);
        let mut settings = SystemPromptSettings::default();
        let messages = system_prompt(&settings, true);
        assert_eq!(messages.len(), 1);
        let text = &messages[0].content;
        for part in [OPENAI_IDENTITY, "Knowledge cutoff: 2024-06", "Reasoning: medium", "## python"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("Current date"));
        assert!(!system_prompt(&settings, false)[0].content.contains("python"));
        settings.system_message = Some(false);
        settings.developer_instructions = Some("Be brief.".into());
        let messages = system_prompt(&settings, true);
        assert_eq!(messages, [Message::new(Role::Developer, "# Instructions\n\nBe brief.")]);
        settings.developer_instructions = None;
        assert!(system_prompt(&settings, true).is_empty());
    }

    #[test]
    fn chatml_has_a_system_message_or_none() {
        let chat = Chat::ChatMl(ChatMl::from_embedded().unwrap());
        let mut settings = SystemPromptSettings::default();
        let [message] = &system_prompt(&chat, &settings, false, &[])[..] else { panic!("one message") };
        assert_eq!(*message, Message::new(Role::System, chatml::QWEN_IDENTITY));
        settings.model_identity = Some("Compute.".into());
        let [message] = &system_prompt(&chat, &settings, true, &[])[..] else { panic!("one message") };
        assert!(message.content.starts_with("Compute.\n\n# Tools") && message.content.contains("\"code\""));
        settings.developer_instructions = Some("Call python.".into());
        let [message] = &system_prompt(&chat, &settings, true, &[])[..] else { panic!("one message") };
        assert!(message.content.starts_with("Compute.\n\nCall python.\n\n# Tools"), "{}", message.content);
        settings.system_message = Some(false);
        assert!(system_prompt(&chat, &settings, true, &[]).is_empty());
    }
}
