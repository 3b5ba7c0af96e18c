//! Replies of a task program. Their keys, types and request ids are checked as strictly as a recipe.

use crate::chat::functions::check_functions;
use crate::harmony::{Message, messages_from_json};
use crate::settings::closest_word;
use crate::tasks::process::{check_tools_size, shorten};
use crate::tasks::{Problem, Reward};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The version of the protocol.
pub(super) const VERSION: u64 = 2;
/// Remedy for a program of version 1, whose answers have no ids.
const ADD_ID: &str = "write print(json.dumps({\"request_id\": ask[\"request_id\"], **reply}), flush=True)";

/// Maximum number of characters of a name.
const NAME_CHARS_MAX: usize = 100;
/// Maximum number of characters of a problem's id.
const ID_CHARS_MAX: usize = 1000;

/// Maximum number of characters of a request that an error shows.
const REQUEST_CHARS_MAX: usize = 400;

/// The keys of the answer to each request. `error` is allowed in every answer.
const KEYS: [(&str, &[&str]); 5] = [
    (
        "describe",
        &["version", "name", "validation_problems", "python", "tools", "functions", "turns", "rewards"],
    ),
    ("problem", &["prompt", "messages", "answer", "id"]),
    ("call", &["content"]),
    ("turn", &["content"]),
    ("reward", &["reward", "rewards", "success"]),
];

const ERROR: &str = "error";
/// Key of a request's id, which the answer repeats.
pub(super) const REQUEST_ID: &str = "request_id";

/// A program's answer without unknown keys. A key with the value null counts as absent.
pub(super) struct ProgramReply(Map<String, Value>);

impl ProgramReply {
    /// Returns the answer to `request`. The inner error is a failure that the program itself reports.
    ///
    /// # Errors
    /// For an answer to another request, and for an unknown key (the message names the most similar key).
    pub(super) fn new(request: &Value, answer: Value) -> Result<Result<Self>> {
        let Value::Object(mut answer) = answer else { bail!("the answer is not a JSON object") };
        let name = request["request"].as_str().unwrap_or_default();
        let has_content = answer.contains_key("content") || answer.contains_key(ERROR);
        answer.retain(|_, value| !value.is_null());
        match (&request[REQUEST_ID], answer.remove(REQUEST_ID)) {
            (_, None) => bail!("the answer has no `{REQUEST_ID}`, the id of its request; {ADD_ID}"),
            (asked, Some(answered)) if *asked != answered => {
                bail!("the answer belongs to request {answered}, not to {asked}")
            }
            (_, Some(_)) => {}
        }
        if !has_content && matches!(name, "call" | "turn") {
            bail!("the answer has no `content`; write null if there is none");
        }
        if let Some(error) = answer.get(ERROR) {
            let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
            return Ok(Err(anyhow!("the program reports an error: {text}")));
        }
        let known = KEYS.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, keys)| keys);
        if let Some(key) = answer.keys().find(|key| !known.contains(&key.as_str())) {
            match closest_word(key, known.iter().copied()) {
                Some(near) => bail!("unknown key `{key}` in the answer; did you mean `{near}`?"),
                None => bail!("unknown key `{key}` in the answer; it may have {}", known.join(", ")),
            }
        }
        Ok(Ok(Self(answer)))
    }

    /// Reads a problem. Its id is `default_id` if the answer has no id.
    pub(super) fn problem(mut self, default_id: &str) -> Result<Problem> {
        let messages = match (self.take("messages"), self.text("prompt")?) {
            (None, Some(prompt)) => vec![Message::user(prompt)],
            (None, None) => bail!("a problem has neither `prompt`, a string, nor `messages`"),
            (Some(_), Some(_)) => bail!("a problem has both `prompt` and `messages`"),
            (Some(messages), None) => messages_from_json(&messages, "the answer")?,
        };
        let id = self.text("id")?.unwrap_or_else(|| default_id.to_owned());
        let chars = id.chars().count();
        ensure!(
            chars <= ID_CHARS_MAX,
            "`id` of the answer has {chars} characters; at most {ID_CHARS_MAX} are allowed"
        );
        Ok(Problem { id, messages, answer: self.take("answer").unwrap_or(Value::Null) })
    }

    /// Returns the string under `content`, or `None` for null.
    pub(super) fn content(&self) -> Result<Option<String>> {
        self.text("content")
    }

    /// Reads a reward: one number, or one number for each name in `weights`. The reward is the weighted sum
    /// of the named numbers.
    pub(super) fn reward(&self, weights: &BTreeMap<String, f32>) -> Result<Reward> {
        let one = self.number("reward")?;
        let named = self.numbers("rewards")?;
        if let Some(name) = weights.keys().find(|name| !named.contains_key(*name)) {
            let others = named.keys().filter(|other| !weights.contains_key(*other)).map(String::as_str);
            if let Some(near) = closest_word(name, others) {
                bail!(
                    "`rewards` of the answer has `{near}`, which has no weight in `describe`; did you mean `{name}`?"
                );
            }
            bail!(
                "`rewards` of the answer has no `{name}`, but the answer to `describe` gives a weight for it"
            );
        }
        if let Some(name) = named.keys().find(|name| !weights.contains_key(*name)) {
            bail!("`rewards` of the answer has `{name}`; give its weight in `rewards` of `describe`");
        }
        let value = match (one, weights.is_empty()) {
            (Some(one), true) => one,
            (None, true) => bail!("the answer has no `reward`"),
            (None, false) => weights.iter().map(|(name, weight)| weight * named[name]).sum(),
            (Some(_), false) => {
                bail!(
                    "the answer has both `reward` and `rewards`; leave out `reward`, it is computed from `rewards`"
                )
            }
        };
        Ok(Reward { value, success: self.flag("success")?.unwrap_or(value > 0.0), named })
    }

    /// Removes and returns the value of `key`, if there is one.
    fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key)
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        self.read(key, "a string", |value| value.as_str().map(str::to_owned))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "a boolean", Value::as_bool)
    }

    fn count(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, "a whole number of at least 0", Value::as_u64)
    }

    fn number(&self, key: &str) -> Result<Option<f32>> {
        self.read(key, "a number", finite)
    }

    /// Returns the numbers under `key` by name. Empty if the key is absent.
    fn numbers(&self, key: &str) -> Result<BTreeMap<String, f32>> {
        let all = |value: &Value| {
            let numbers = value.as_object()?.iter();
            numbers.map(|(name, value)| Some((name.clone(), finite(value)?))).collect()
        };
        Ok(self.read(key, "an object of numbers, such as {\"right\": 1.0}", all)?.unwrap_or_default())
    }

    fn read<T>(&self, key: &str, kind: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let value = self.0.get(key);
        value
            .map(|value| read(value).with_context(|| format!("`{key}` of the answer is {value}, not {kind}")))
            .transpose()
    }
}

fn finite(value: &Value) -> Option<f32> {
    let number = value.as_bool().map(|flag| f64::from(u8::from(flag))).or_else(|| value.as_f64());
    number.map(|n| n as f32).filter(|n| n.is_finite())
}

/// A program's answer to `describe`.
pub(super) struct TaskDescription {
    pub name: String,
    pub validation_problems: u64,
    pub uses_python: bool,
    pub tools: Vec<Value>,
    pub has_function_tools: bool,
    pub has_user_turns: bool,
    /// Weights of the named rewards. Empty if there is only one reward.
    pub rewards: BTreeMap<String, f32>,
}

impl TaskDescription {
    pub(super) fn read(mut reply: ProgramReply) -> Result<Self> {
        match reply.count("version")? {
            Some(VERSION) => {}
            None => bail!("the answer has no `version`; add \"version\": {VERSION} to it"),
            Some(other) => bail!("`version` of the answer is {other}; write \"version\": {VERSION}"),
        }
        let named = |name: &str| {
            (1..=NAME_CHARS_MAX).contains(&name.len())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        let name = reply.text("name")?.unwrap_or_else(|| "command".to_owned());
        if !named(&name) {
            bail!(
                "`name` of the answer is {name:?}; write at most {NAME_CHARS_MAX} letters, digits and _ only"
            );
        }
        let tools = match reply.take("tools") {
            None => vec![],
            Some(Value::Array(tools)) => tools,
            Some(other) => bail!("`tools` of the answer is {other}, not a list"),
        };
        check_tools_size(&tools)?;
        check_functions(&tools).map_err(|reason| anyhow!("`tools` of the answer: {reason}"))?;
        let rewards = reply.numbers("rewards")?;
        if let Some(name) = rewards.keys().find(|name| !named(name)) {
            bail!(
                "`rewards` of the answer has {name:?}; write at most {NAME_CHARS_MAX} letters, digits and _ only"
            );
        }
        let flag = |key| Ok::<_, anyhow::Error>(reply.flag(key)?.unwrap_or(false));
        Ok(Self {
            name,
            validation_problems: reply.count("validation_problems")?.unwrap_or(0),
            uses_python: flag("python")?,
            has_function_tools: flag("functions")? || !tools.is_empty(),
            tools,
            has_user_turns: flag("turns")?,
            rewards,
        })
    }
}

/// Adds the request to `error`, shortened if it is long.
pub(super) fn with_request(error: anyhow::Error, request: &Value) -> anyhow::Error {
    let text = request.to_string();
    let shown: String = text.chars().take(REQUEST_CHARS_MAX).collect();
    let rest = if shown.len() < text.len() { "…" } else { "" };
    anyhow!("{}; the request was {shown}{rest}", shorten(&format!("{error:#}")))
}
