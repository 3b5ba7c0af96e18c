//! The mistakes that startup has found so far.

use crate::bad_input;
use anyhow::Result;

/// Collects the messages of errors.
#[derive(Default)]
pub struct ErrorList(Vec<String>);

impl ErrorList {
    /// Returns the value of `result`, or adds its error to the list.
    pub fn collect<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(format!("{error:#}"))).ok()
    }

    /// Adds messages to the list.
    pub fn extend(&mut self, messages: Vec<String>) {
        self.0.extend(messages);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Combines all messages into one error, in the format of the mistakes in a recipe.
    pub fn into_error(self) -> anyhow::Error {
        match self.0.as_slice() {
            [only] => bad_input!("{only}"),
            all => bad_input!("{} mistakes:\n  {}", all.len(), all.join("\n  ")),
        }
    }
}
