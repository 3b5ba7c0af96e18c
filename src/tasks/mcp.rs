//! Tools of an MCP server (Model Context Protocol) beside those of any task.
//!
//! Several processes of the server share the calls, and a process is restarted after a failure. So a reply
//! must not depend on earlier calls.

mod server;

use super::command::missing_files;
use super::process::shorten;
use super::settings::absolute_words;
use super::{Demonstration, Problem, Reward, Task, Transcript, ValidationSet};
use crate::bad_input;
use crate::chat::functions::check_functions;
use crate::chat::{PYTHON, function_name};
use crate::harmony::Message;
use crate::metrics::Console;
use crate::settings::{above, closest_word, from, table};
use anyhow::{Result, bail};
use serde_json::{Map, Value, json};
use server::McpServer;
use std::collections::{BTreeMap, BTreeSet};

table! {
    /// Tools of other programs, beside those of the task.
    pub struct ToolsSettings {
        pub mcp: McpSettings,
    }
}

table! {
    /// A server of the Model Context Protocol over stdio. The model may call its tools, except in `agent`.
    /// The program runs with your own rights, outside any sandbox. TASKS.md has the rules for it.
    pub struct McpSettings {
        /// The server's program and its arguments, such as `["uvx", "mcp-server-time"]`. A word that names a
        /// file is a path relative to the working directory. A run stores the absolute path.
        pub command: Vec<String> = Vec::new(),
        /// The server's tools that the model may call. Empty means all.
        pub allowed_tools: Vec<String> = Vec::new(),
        /// Time limit of each answer, also of the first one after the start, in seconds. After it, the
        /// process is killed and the trajectory fails.
        pub timeout_s: f64 = 60.0 => above(0.0).to(86400.0),
        /// Number of processes of the server. Each answers one call at a time, of any conversation.
        pub processes: usize = 4 => from(1.0).to(4096.0),
        /// Maximum number of characters of a reply. The middle of a longer one is removed. The calls of a
        /// turn share them.
        pub output_chars_max: usize = 4096 => from(64.0).to(1048576.0),
    }
}

impl McpSettings {
    /// Makes the words of `command` that name a file absolute, so that the program starts from any folder.
    pub fn make_command_absolute(&mut self) {
        absolute_words(&mut self.command);
    }
}

/// A task with the tools of an MCP server.
pub struct McpTask {
    inner: Box<dyn Task>,
    server: McpServer,
    /// The tools of the task and of the server.
    tools: Vec<Value>,
    /// The names of the server's tools.
    names: BTreeSet<String>,
    output_chars_max: usize,
    console: Console,
}

impl McpTask {
    /// Starts the server and adds its tools to those of `inner`. `console` shows the first failures of calls.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the server does not start or violates the protocol, and for a tool
    /// that cannot be declared or whose name is taken.
    pub fn start(inner: Box<dyn Task>, settings: &McpSettings, console: Console) -> Result<Self> {
        let command = settings.command.join(" ");
        let server = McpServer::new(settings)?;
        let listed = server.list_tools().map_err(|why| {
            bad_input!(
                "tools.mcp.command: {command}: {}; name a program that speaks the Model Context Protocol over stdio, and has \
                 tools (tools.mcp.timeout_s limits each of its answers){}",
                shorten(&format!("{why:#}")),
                missing_files(&settings.command)
            )
        })?;
        let own = select_tools(listed, &settings.allowed_tools)?;
        let taken: Vec<&str> = inner.tools().iter().filter_map(name_of).collect();
        let mut names = BTreeSet::new();
        for (index, tool) in own.iter().enumerate() {
            let name = name_of(tool).unwrap_or_default();
            let reason = if let Err(why) = check_functions(std::slice::from_ref(tool)) {
                let why = why.trim_start_matches("tool 0: ").replace("function.parameters", "inputSchema");
                why.replace("function.", "")
            } else if name == PYTHON {
                "this is the name of the Python tool".to_owned()
            } else if taken.contains(&name) {
                "the task has a tool of this name".to_owned()
            } else if !names.insert(name.to_owned()) {
                "the server lists two tools of this name".to_owned()
            } else {
                continue;
            };
            return Err(bad_input!(
                "tools.mcp.command: {command}: tool {index}, {}; rename the tool, or leave it out of tools.mcp.allowed_tools",
                shorten(&format!("{name:?}: {reason}"))
            ));
        }
        let tools = [inner.tools(), &own].concat();
        Ok(Self { inner, server, tools, names, output_chars_max: settings.output_chars_max, console })
    }

    /// Calls a tool. Returns the text of its result, or of the error that the server reports.
    fn call(&self, name: &str, arguments: &Map<String, Value>) -> Result<String> {
        let parameters = json!({ "name": name, "arguments": arguments });
        let text = match self.server.ask("tools/call", parameters)? {
            Ok(result) => result_text(&result)?,
            Err(text) => format!("Error: {text}"),
        };
        Ok(clip_reply(&text, self.output_chars_max))
    }
}

/// Returns the name of a function in OpenAI's format.
fn name_of(tool: &Value) -> Option<&str> {
    tool["function"]["name"].as_str()
}

/// Returns the `allowed` ones of a server's tools as functions in OpenAI's format.
///
/// # Errors
/// [`crate::error::BadInput`] for an allowed tool that the server does not have.
fn select_tools(listed: Vec<Value>, allowed: &[String]) -> Result<Vec<Value>> {
    let names: Vec<String> =
        listed.iter().map(|tool| tool["name"].as_str().unwrap_or_default().to_owned()).collect();
    if let Some(missing) = allowed.iter().find(|name| !names.contains(name)) {
        let near = closest_word(missing, names.iter().map(String::as_str));
        let near = near.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
        return Err(bad_input!(
            "tools.mcp.allowed_tools: the server has no tool {missing:?}{near}; it has {}",
            shorten(&names.join(", "))
        ));
    }
    let named = listed.into_iter().zip(names);
    let selected = named.filter(|(_, name)| allowed.is_empty() || allowed.contains(name));
    Ok(selected.map(|(tool, _)| function(tool)).collect())
}

/// Returns a server's tool as a function in OpenAI's format.
fn function(mut tool: Value) -> Value {
    let keys = [("name", "name"), ("description", "description"), ("inputSchema", "parameters")];
    let values = keys.into_iter().map(|(key, name)| (name.to_owned(), tool[key].take()));
    let function: Map<String, Value> = values.filter(|(_, value)| !value.is_null()).collect();
    json!({ "type": "function", "function": function })
}

/// Returns the text of a call's result, its parts in lines. A mark stands for a part that is no text, such as
/// `[image: image/png]`.
///
/// # Errors
/// When the result has no content.
fn result_text(result: &Value) -> Result<String> {
    let text = match (result["content"].as_array(), &result["structuredContent"]) {
        (Some(parts), structured) if !parts.is_empty() || structured.is_null() => {
            parts.iter().map(part_text).collect::<Vec<_>>().join("\n")
        }
        (_, Value::Null) => bail!("tools/call: the result has no list `content`"),
        (_, structured) => structured.to_string(),
    };
    let has_failed = result["isError"] == true && text.is_empty();
    Ok(if has_failed { "Error: the tool failed".to_owned() } else { text })
}

/// Returns the text of a part of a result.
fn part_text(part: &Value) -> String {
    let kind = part["type"].as_str().unwrap_or("unknown");
    let resource = &part["resource"];
    let text = match kind {
        "text" => part["text"].as_str(),
        "resource" => resource["text"].as_str(),
        _ => None,
    };
    let detail = [&part["mimeType"], &part["uri"], &resource["uri"]].into_iter().find_map(Value::as_str);
    match (text, detail) {
        (Some(text), _) => text.to_owned(),
        (None, Some(detail)) => format!("[{kind}: {detail}]"),
        (None, None) => format!("[{kind}]"),
    }
}

/// Removes the middle of a `text` of more than `chars_max` characters.
pub fn clip_reply(text: &str, chars_max: usize) -> String {
    let cut = text.chars().count().saturating_sub(chars_max);
    if cut == 0 {
        return text.to_owned();
    }
    let byte_of = |char| text.char_indices().nth(char).map_or(text.len(), |(byte, _)| byte);
    let (head, rest) = text.split_at(byte_of(chars_max / 2));
    let tail = rest.char_indices().nth(cut).map_or("", |(byte, _)| &rest[byte..]);
    format!("{head}\n[... {cut} characters cut ...]\n{tail}")
}

impl Task for McpTask {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        self.inner.training_problem(seed, index)
    }

    fn leave_out_training_problems(&mut self, fits: &dyn Fn(&Problem) -> bool) -> usize {
        self.inner.leave_out_training_problems(fits)
    }

    fn training_rows(&self) -> Option<usize> {
        self.inner.training_rows()
    }

    fn reward_weights(&self) -> BTreeMap<String, f32> {
        self.inner.reward_weights()
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        self.inner.validation_sets()
    }

    fn uses_python(&self) -> bool {
        self.inner.uses_python()
    }

    fn demonstration(&self, seed: u64, index: u64) -> Option<Demonstration> {
        self.inner.demonstration(seed, index)
    }

    fn held_out_demonstration(&self, index: u64) -> Option<Demonstration> {
        self.inner.held_out_demonstration(index)
    }

    fn next_user_message(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<Message>> {
        self.inner.next_user_message(problem, transcript)
    }

    fn tools(&self) -> &[Value] {
        &self.tools
    }

    fn answers_calls(&self) -> bool {
        true
    }

    fn reply_chars_max(&self) -> Option<usize> {
        self.inner.reply_chars_max().max(Some(self.output_chars_max))
    }

    /// Returns the text of the server's reply. The model also gets errors that the server reports for a call,
    /// and an error for arguments that are no JSON object.
    fn tool_reply(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<String>> {
        let called = transcript.messages.last().and_then(|m| Some((m.recipient.as_deref()?, &m.content)));
        let Some((recipient, arguments)) = called else { return Ok(None) };
        let name = function_name(recipient);
        if self.names.contains(name) {
            let Ok(Value::Object(arguments)) = serde_json::from_str(arguments) else {
                return Ok(Some("Error: the arguments are not a JSON object.".to_owned()));
            };
            return self.call(name, &arguments).map(Some).inspect_err(|error| {
                let error = shorten(&format!("{error:#}"));
                self.console
                    .report_failure(&format!("tools.mcp: problem {}, tool {name}: {error}", problem.id));
            });
        }
        if self.inner.answers_calls() { self.inner.tool_reply(problem, transcript) } else { Ok(None) }
    }

    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        self.inner.answer_text(transcript)
    }

    fn same_answer(&self, a: &str, b: &str) -> bool {
        self.inner.same_answer(a, b)
    }

    fn may_take_long(&self) -> bool {
        self.inner.may_take_long()
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        self.inner.reward(problem, transcript)
    }
}
