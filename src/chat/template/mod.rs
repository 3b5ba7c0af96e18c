//! A model's own chat template, in Jinja as transformers applies it.
//!
//! The engine is minijinja. What a template may take is bounded: its steps, the bytes that its operations
//! read and write, and its depth.

mod compile;
mod methods;
mod operations;
mod python;

pub use compile::TEMPLATE_BYTES_MAX;

use crate::panics::catch_panic;
use minijinja::machinery::{Instructions, Vm, make_string_output};
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use python::error;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable with the day that `strftime_now` tells, as `YYYY-MM-DD`.
pub const DATE: &str = "__date";
/// Maximum number of instructions of a rendering.
const STEPS_MAX: u64 = 2_000_000;
/// Maximum depth of macros in macros, in the engine's own unit: four a macro.
const DEPTH_MAX: usize = 400;

fn too_large() -> Error {
    Error::new(ErrorKind::OutOfFuel, "the template takes more work than is allowed")
}

fn engine_failed(why: &str) -> Error {
    error(format!("the template engine failed: {why}"))
}

fn too_deep() -> Error {
    error(format!("a value is more than {} levels deep", python::DEPTH_MAX))
}

/// A compiled template.
pub struct ChatTemplate {
    environment: &'static Environment<'static>,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// Why it cannot be compiled, with the line.
    pub fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        operations::install(&mut environment);
        environment.set_fuel(Some(STEPS_MAX));
        environment.set_recursion_limit(DEPTH_MAX);
        environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
        });
        environment.add_function("strftime_now", |state: &State, format: &str| {
            dated(state.lookup(DATE).unwrap_or_default().as_str().unwrap_or_default(), format)
        });
        environment.remove_global("debug");
        add_tests(&mut environment);
        let instructions = compile::compile(source).map_err(|error| told(&error))?;
        // The engine borrows its environment as long as its template. A process opens few models.
        Ok(Self { environment: Box::leak(Box::new(environment)), instructions, blocks: BTreeMap::new() })
    }

    /// Renders a conversation as transformers does: keys of messages that are null count as absent, and a
    /// thought has all three of its names. `variables` are those of the tokenizer and of the caller.
    ///
    /// # Errors
    /// The template's own error, or a bound, with the line.
    pub fn render(
        &self,
        messages: &[Json],
        tools: &[Json],
        generates: bool,
        variables: &Map<String, Json>,
    ) -> Result<String, String> {
        let mut context = json!({"documents": null, "tools": null, "add_generation_prompt": generates});
        for (name, value) in variables {
            context[name] = value.clone();
        }
        context["messages"] = messages.iter().map(normalized).collect();
        if !tools.is_empty() {
            context["tools"] = tools.into();
        }
        let mut text = String::new();
        let rendering = || {
            let context = python::from_json(&context)?;
            let mut output = make_string_output(&mut text);
            let machine = Vm::new(self.environment);
            machine.eval(&self.instructions, context, &self.blocks, &mut output, AutoEscape::None).map(drop)
        };
        let result = catch_panic(rendering).unwrap_or_else(|why| Err(engine_failed(&why)));
        result.map(|()| text).map_err(|error| told(&error))
    }
}

/// Returns an error's text, with the line of the template.
fn told(error: &Error) -> String {
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, None) => format!("it takes more than {STEPS_MAX} steps"),
        (ErrorKind::UndefinedError, None) => "a value is undefined".into(),
        (_, Some(detail)) => detail.to_owned(),
        (kind, None) => kind.to_string(),
    };
    if let Some(line) = error.line() { format!("line {line}: {what}") } else { what }
}

/// Returns a message without its null keys, and with all names of its thought.
fn normalized(message: &Json) -> Json {
    let Some(map) = message.as_object() else { return message.clone() };
    let given = map.iter().filter(|(_, value)| !value.is_null());
    let mut map: Map<String, Json> = given.map(|(key, value)| (key.clone(), value.clone())).collect();
    let names = ["reasoning_content", "thinking", "reasoning"];
    if let Some(thought) = names.iter().find_map(|name| map.get(*name).cloned()) {
        map.entry("thinking").or_insert_with(|| thought.clone());
        map.insert("reasoning_content".into(), thought);
    }
    Json::Object(map)
}

/// Adds the tests that Python decides in another way than the engine.
fn add_tests(environment: &mut Environment) {
    let is_sequence = |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    };
    environment.add_test("sequence", move |value: Value| is_sequence(&value));
    environment
        .add_test("iterable", move |value: Value| is_sequence(&value) || value.kind() == ValueKind::Iterable);
    environment
        .add_test("number", |value: Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    for name in ["eq", "equalto", "=="] {
        environment.add_test(name, |a: Value, b: Value| python::is_equal(&a, &b));
    }
    for name in ["ne", "!="] {
        environment.add_test(name, |a: Value, b: Value| !python::is_equal(&a, &b));
    }
}

/// Returns the day of now, in UTC.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let now = chrono::DateTime::from_timestamp(seconds as i64, 0).unwrap_or_default();
    now.format("%Y-%m-%d").to_string()
}

/// Returns a date `YYYY-MM-DD` in the form that `format` asks for; the time is midnight.
fn dated(date: &str, format: &str) -> Result<String, Error> {
    let parsed = chrono::NaiveDate::parse_from_str(date, "%Y-%m-%d");
    let parsed = parsed.map_err(|_| error(format!("{date:?} is no date YYYY-MM-DD")))?;
    let mut text = String::new();
    let written = fmt::Write::write_fmt(
        &mut text,
        format_args!("{}", parsed.and_time(chrono::NaiveTime::MIN).format(format)),
    );
    written.map(|()| text).map_err(|_| error(format!("strftime_now: {format:?} is no format of a date")))
}
