//! The content of system and developer messages: parts, and the text that is rendered from them.

use super::message::{Message, Role};
use super::typescript::type_of;
use crate::bad_input;
use crate::settings::{Choice, choice};
use anyhow::Result;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

choice! {
    /// How long the model should reason.
    pub enum ReasoningEffort default Medium {
        Low = "low",
        Medium = "medium",
        High = "high",
    }
}

/// Ignores the case of the word, because files of other programs may capitalise it.
impl<'de> Deserialize<'de> for ReasoningEffort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let word = String::deserialize(deserializer)?;
        ReasoningEffort::from_name(&word.to_ascii_lowercase())
            .ok_or_else(|| D::Error::custom(format!("{word:?} is not \"low\", \"medium\" or \"high\"")))
    }
}

/// The channels that a system message allows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelConfig {
    pub valid_channels: Vec<String>,
    pub channel_required: bool,
}

/// One function of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolDescription {
    pub name: String,
    pub description: String,
    /// JSON Schema of the function's only argument, which is an object. `None` for a function without
    /// arguments.
    #[serde(default)]
    pub parameters: Option<Value>,
}

/// A tool: a namespace of functions. A tool without functions, such as Python, takes plain text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolNamespace {
    pub name: String,
    #[serde(default)]
    pub description: Option<String>,
    #[serde(default)]
    pub tools: Vec<ToolDescription>,
}

/// The parts of a system message. An absent part adds nothing to the text.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SystemContent {
    #[serde(default)]
    pub model_identity: Option<String>,
    #[serde(default)]
    pub reasoning_effort: Option<ReasoningEffort>,
    #[serde(default)]
    pub tools: Option<BTreeMap<String, ToolNamespace>>,
    /// The current date that the system message gives.
    #[serde(default)]
    pub conversation_start_date: Option<String>,
    #[serde(default)]
    pub knowledge_cutoff: Option<String>,
    #[serde(default)]
    pub channel_config: Option<ChannelConfig>,
}

impl SystemContent {
    /// Returns the message's text. `function_tools`: whether a developer message of the conversation has
    /// functions.
    pub fn text(&self, function_tools: bool) -> String {
        let mut top: Vec<String> = self.model_identity.iter().cloned().collect();
        top.extend(self.knowledge_cutoff.iter().map(|date| format!("Knowledge cutoff: {date}")));
        top.extend(self.conversation_start_date.iter().map(|date| format!("Current date: {date}")));
        let mut sections = Vec::new();
        if !top.is_empty() {
            sections.push(top.join("\n"));
        }
        sections.extend(self.reasoning_effort.map(|effort| format!("Reasoning: {}", effort.name())));
        sections.extend(self.tools.as_ref().and_then(tools_text));
        if let Some(config) = self.channel_config.as_ref().filter(|config| !config.valid_channels.is_empty())
        {
            let mut text = format!("# Valid channels: {}.", config.valid_channels.join(", "));
            if config.channel_required {
                text.push_str(" Channel must be included for every message.");
            }
            if function_tools {
                text.push_str("\nCalls to these tools must go to the commentary channel: 'functions'.");
            }
            sections.push(text);
        }
        sections.join("\n\n")
    }
}

/// The parts of a developer message.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeveloperContent {
    #[serde(default)]
    pub instructions: Option<String>,
    #[serde(default)]
    pub tools: Option<BTreeMap<String, ToolNamespace>>,
}

impl DeveloperContent {
    /// Returns the message's text.
    pub fn text(&self) -> String {
        let mut sections = Vec::new();
        if let Some(instructions) = &self.instructions {
            sections.push(format!("# Instructions\n\n{instructions}"));
        }
        sections.extend(self.tools.as_ref().and_then(tools_text));
        sections.join("\n\n")
    }

    /// Returns whether there are functions. If so, the system message must mention them.
    pub fn has_function_tools(&self) -> bool {
        let functions = self.tools.as_ref().and_then(|tools| tools.get("functions"));
        functions.is_some_and(|namespace| !namespace.tools.is_empty())
    }
}

fn tools_text(tools: &BTreeMap<String, ToolNamespace>) -> Option<String> {
    if tools.is_empty() {
        return None;
    }
    let sections = std::iter::once("# Tools".to_string()).chain(tools.values().map(namespace_text));
    Some(sections.collect::<Vec<_>>().join("\n\n"))
}

fn namespace_text(namespace: &ToolNamespace) -> String {
    let mut lines = vec![format!("## {}\n", namespace.name)];
    let description = namespace.description.as_deref().unwrap_or_default().lines();
    if namespace.tools.is_empty() {
        lines.extend(description.map(String::from));
        return lines.join("\n");
    }
    lines.extend(description.map(|line| format!("// {line}")));
    lines.push(format!("namespace {} {{\n", namespace.name));
    for tool in &namespace.tools {
        lines.extend(tool.description.lines().map(|line| format!("// {line}")));
        let arguments = match &tool.parameters {
            Some(schema) => format!("_: {}", type_of(schema, "")),
            None => String::new(),
        };
        lines.push(format!("type {} = ({arguments}) => any;\n", tool.name));
    }
    lines.push(format!("}} // namespace {}", namespace.name));
    lines.join("\n")
}

/// Default description of the Python tool.
pub const PYTHON_DESCRIPTION: &str = "Runs the Python code of a message sent to python and answers with its output. \
    Use it to compute and to check your reasoning. The user sees neither code nor output.";

/// The system message that a recipe describes. It contains only what the recipe gives. By default, for
/// example, it has no date.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SystemSettings {
    pub model_identity: Option<String>,
    pub knowledge_cutoff: Option<String>,
    pub current_date: Option<String>,
    pub reasoning_effort: Option<ReasoningEffort>,
    /// Description of the Python tool, such as [`PYTHON_DESCRIPTION`]. `None` if the task has no Python tool.
    pub python_tool: Option<String>,
    /// Whether a developer message of the conversation has functions.
    pub function_tools: bool,
}

impl SystemSettings {
    /// Returns the system message. Its channels are `analysis`, `commentary` and `final`; each message needs
    /// one.
    pub fn message(&self) -> Message {
        let python = |text: &String| {
            let tool =
                ToolNamespace { name: "python".into(), description: Some(text.clone()), tools: Vec::new() };
            BTreeMap::from([("python".to_string(), tool)])
        };
        let content = SystemContent {
            model_identity: self.model_identity.clone(),
            reasoning_effort: self.reasoning_effort,
            tools: self.python_tool.as_ref().map(python),
            conversation_start_date: self.current_date.clone(),
            knowledge_cutoff: self.knowledge_cutoff.clone(),
            channel_config: Some(ChannelConfig {
                valid_channels: ["analysis", "commentary", "final"].map(String::from).to_vec(),
                channel_required: true,
            }),
        };
        Message::new(Role::System, content.text(self.function_tools))
    }
}

/// A message in a file. `content` is a string or a list of parts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileMessage {
    role: Role,
    name: Option<String>,
    recipient: Option<String>,
    channel: Option<String>,
    content_type: Option<String>,
    content: Value,
    weight: Option<f64>,
}

/// Returns whether `weight`, a key of OpenAI's fine-tuning files, leaves a message out of the loss.
///
/// # Errors
/// If the weight is neither 0 nor 1, or the message is not the assistant's.
pub(crate) fn has_no_loss(weight: Option<f64>, role: Role) -> Result<bool, String> {
    match weight {
        None => Ok(false),
        Some(_) if role != Role::Assistant => Err(format!(
            "\"weight\" in a message of role {}; only the assistant's messages have one",
            role.name()
        )),
        Some(weight) if weight == 0.0 || weight == 1.0 => Ok(weight == 0.0),
        Some(weight) => Err(format!("\"weight\" is {weight}; it must be 0 (no loss) or 1")),
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    Text { text: String },
    SystemContent(SystemContent),
    DeveloperContent(DeveloperContent),
}

/// Reads a conversation from JSON: a list of messages. A message's `content` is a string, or a list of parts
/// of type `text`, `system_content` (in system messages) or `developer_content` (in developer messages).
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) with `source_name`, the message's number (from 1) and the reason.
pub fn messages_from_json(messages: &Value, source_name: &str) -> Result<Vec<Message>> {
    let list = messages
        .as_array()
        .ok_or_else(|| bad_input!("{source_name}: \"messages\" must be a list of messages"))?;
    let mut read = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        let message = read_message(value).map_err(|e| bad_input!("{source_name}: message {}: {e}", i + 1))?;
        read.push(message);
    }
    let function_tools = read.iter().flat_map(|(_, parts)| parts).any(|part| match part {
        Part::DeveloperContent(content) => content.has_function_tools(),
        _ => false,
    });
    Ok(read.into_iter().map(|(message, parts)| assemble(message, &parts, function_tools)).collect())
}

fn assemble(message: FileMessage, parts: &[Part], function_tools: bool) -> Message {
    let texts = parts.iter().map(|part| match part {
        Part::Text { text } => text.clone(),
        Part::SystemContent(content) => content.text(function_tools),
        Part::DeveloperContent(content) => content.text(),
    });
    let FileMessage { role, name, recipient, channel, content_type, weight, .. } = message;
    let no_loss = weight == Some(0.0);
    let content = texts.collect::<String>();
    Message { name, recipient, channel, content_type, no_loss, ..Message::new(role, content) }
}

fn read_message(value: &Value) -> Result<(FileMessage, Vec<Part>), String> {
    // Libraries write every key of every message.
    let keys = value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let keys: serde_json::Map<_, _> = keys.map(|(key, value)| (key.clone(), value.clone())).collect();
    let message = FileMessage::deserialize(keys).map_err(|e| e.to_string())?;
    has_no_loss(message.weight, message.role)?;
    let parts = match &message.content {
        Value::String(text) => vec![Part::Text { text: text.clone() }],
        Value::Array(parts) => parts
            .iter()
            .map(Part::deserialize)
            .collect::<Result<_, _>>()
            .map_err(|e| format!("content: {e}"))?,
        _ => return Err("content must be a string or a list of parts".into()),
    };
    for part in &parts {
        let (kind, role) = match part {
            Part::Text { .. } => continue,
            Part::SystemContent(_) => ("system_content", Role::System),
            Part::DeveloperContent(_) => ("developer_content", Role::Developer),
        };
        if message.role != role {
            return Err(format!(
                "{kind} belongs in a {} message, not in one of role {}",
                role.name(),
                message.role.name()
            ));
        }
    }
    Ok((message, parts))
}
