//! Columns of rows: the names that a task reads, other names for them, and prompts of verl's and TRL's rows.

use super::rows::text;
use crate::harmony::{Message, Role, messages_from_json};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The key of a recipe that names columns.
pub const COLUMNS_KEY: &str = "task.columns";

/// Returns the value at `path`, names joined by dots, of a row.
pub fn value_at<'a>(row: &'a Value, path: &str) -> Option<&'a Value> {
    // A name may have dots itself.
    row.get(path).or_else(|| {
        let (first, rest) = path.split_once('.')?;
        value_at(row.get(first)?, rest)
    })
}

/// Returns `row` with the further names that `columns` gives its values: a name, and the path of the value.
///
/// # Errors
/// A path that the row lacks, with the names that it has.
pub fn with_columns<'a>(
    row: &'a Value,
    columns: &BTreeMap<String, String>,
) -> Result<Cow<'a, Value>, String> {
    let mut row = Cow::Borrowed(row);
    for (name, path) in columns {
        let value = value_at(&row, path).cloned().ok_or_else(|| {
            let names: Vec<&str> = row.as_object().into_iter().flatten().map(|(name, _)| &**name).collect();
            format!("{COLUMNS_KEY} names `{path}`, which is missing; the row has {}", names.join(", "))
        })?;
        if let Value::Object(values) = row.to_mut() {
            values.insert(name.clone(), value);
        }
    }
    Ok(row)
}

/// The question of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// A text. The task adds its instruction.
    Text(String),
    /// Messages with all instructions, as verl and TRL write them under `prompt`.
    Messages(Vec<Message>),
}

impl Question {
    /// Reads the question under `key` or, without it, under `prompt`: a text or messages.
    ///
    /// # Errors
    /// The row's mistake in a few words.
    pub fn read(row: &Value, key: &str) -> Result<Self, String> {
        let key = if row.get(key).is_none() && row.get(PROMPT).is_some() { PROMPT } else { key };
        match row.get(key) {
            Some(messages @ Value::Array(_)) => Ok(Self::Messages(prompt_messages(messages, key)?)),
            _ => Ok(Self::Text(text(row, key)?.trim().to_owned())),
        }
    }

    /// Returns the messages of the prompt; `prompt` adds the task's instruction to a text.
    pub fn messages(&self, prompt: impl Fn(&str) -> Message) -> Vec<Message> {
        match self {
            Self::Text(text) => vec![prompt(text)],
            Self::Messages(messages) => messages.clone(),
        }
    }

    /// Returns the text, or that of the last message, to find equal prompts.
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Messages(messages) => messages.last().map_or("", |message| &message.content),
        }
    }
}

/// Key of the prompt in rows of verl and TRL.
const PROMPT: &str = "prompt";

/// Reads the messages of a prompt. The last one must be the user's.
fn prompt_messages(messages: &Value, key: &str) -> Result<Vec<Message>, String> {
    let messages = messages_from_json(messages, key).map_err(|e| format!("{e:#}"))?;
    match messages.last().is_some_and(|last| last.role == Role::User) {
        true => Ok(messages),
        false => Err(format!("`{key}` does not end with a message of the user")),
    }
}

/// Returns the reference answer of a row: `answer`, or that of verl's rows.
pub fn reference(row: &Value) -> Option<&Value> {
    row.get("answer").or_else(|| value_at(row, "reward_model.ground_truth"))
}

/// Returns the reference answer of a problem as JSON. If it is a whole row, its prompt is left out.
pub fn shown_answer(answer: &Value) -> String {
    match answer {
        Value::Object(row) => {
            let is_prompt = |value: &Value| row.get(PROMPT) == Some(value);
            let shown = row.iter().filter(|(_, value)| !is_prompt(value));
            Value::Object(shown.map(|(name, value)| (name.clone(), value.clone())).collect()).to_string()
        }
        other => other.to_string(),
    }
}

/// Names of columns that other data sets have for a question and for its answer, the most telling first.
const QUESTIONS: &str = "question problem prompt query input instruction messages user text";
const ANSWERS: &str = "answer reward_model.ground_truth ground_truth solution final_answer expected_answer \
    reference target label output response";

/// Returns the columns to write into a recipe so that a task with these `names`, of the question and maybe of
/// the answer, reads `row`. Empty if it reads the row as it is.
///
/// # Errors
/// The name for which the row has no value, with the names that the row has.
pub fn propose_columns(row: &Value, names: &[&str]) -> Result<BTreeMap<String, String>, String> {
    let mut columns = BTreeMap::new();
    for (index, name) in names.iter().enumerate() {
        let (is_read, known) = match index {
            0 => (row.get(*name).or_else(|| row.get(PROMPT)).is_some(), QUESTIONS),
            _ => (reference(row).is_some(), ANSWERS),
        };
        if is_read {
            continue;
        }
        let is_there = |path: &&str| value_at(row, path).is_some_and(|value| !value.is_null());
        let path = known.split(' ').find(is_there).ok_or_else(|| {
            let names: Vec<&str> = row.as_object().into_iter().flatten().map(|(name, _)| &**name).collect();
            format!("no column for `{name}`; the rows have {}", names.join(", "))
        })?;
        columns.insert((*name).to_owned(), path.to_owned());
    }
    Ok(columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_are_proposed_for_rows_of_other_programs_and_none_for_those_that_are_read() {
        let propose = |row: Value| propose_columns(&row, &["question", "answer"]);
        let none = BTreeMap::new();
        assert_eq!(propose(json!({"question": "q", "answer": "4"})), Ok(none.clone()));
        let verl = json!({"data_source": "d", "prompt": [], "reward_model": {"ground_truth": "4"}});
        assert_eq!(propose(verl), Ok(none));
        let other = propose(json!({"id": 1, "input": "q", "target": "4"})).unwrap();
        assert_eq!(
            other.into_iter().collect::<Vec<_>>(),
            [("answer".into(), "target".into()), ("question".into(), "input".into())]
        );
        let missing = propose(json!({"a": "q", "b": "4"})).unwrap_err();
        assert_eq!(missing, "no column for `question`; the rows have a, b");
    }

    #[test]
    fn a_path_leads_into_structs_and_a_missing_one_is_named() {
        let row = json!({"a.b": 1, "a": {"b": 2, "c": {"d": 3}}});
        assert_eq!((value_at(&row, "a.b"), value_at(&row, "a.c.d")), (Some(&json!(1)), Some(&json!(3))));
        let columns = |path: &str| BTreeMap::from([("answer".to_owned(), path.to_owned())]);
        assert_eq!(with_columns(&row, &columns("a.c.d")).unwrap()["answer"], json!(3));
        let error = with_columns(&row, &columns("x.y")).unwrap_err();
        assert_eq!(error, "task.columns names `x.y`, which is missing; the row has a.b, a");
    }
}
