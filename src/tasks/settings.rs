//! `[task]`: problems and their grader.

use super::{TaskName, VALIDATION_PROBLEMS, answer, command, gsm8k, retool, rows, verify_if};
use crate::bad_input;
use crate::metrics::Console;
use crate::settings::{above, from, table};
use anyhow::Result;
use serde_json::Value;
use std::path::{Path, PathBuf};

table! {
    /// The task: problems, environment and reward.
    pub struct TaskSettings {
        /// Which task.
        pub name: TaskName = TaskName::default(),
        /// Training problems, for tasks that read files.
        pub train_file: Option<PathBuf> = None,
        /// Held-out problems, for tasks that read files.
        pub validation_file: Option<PathBuf> = None,
        /// More held-out problems of `retool`: each file is a set of its own, named after it in the metrics.
        pub validation_files: Vec<PathBuf> = Vec::new(),
        /// Keep the first so many training rows; absent means all.
        pub train_rows_max: Option<usize> = None => from(1.0),
        /// Keep the first so many held-out rows of each file; absent means all.
        pub validation_rows_max: Option<usize> = None => from(1.0),
        /// How `retool` compares an answer with the right one.
        pub answer: Option<answer::AnswerEquality> = None,
        /// How `retool` asks for the answer, and so where it looks for it.
        pub prompt: Option<retool::PromptFormat> = None,
        /// Where `gsm8k` looks for the answer.
        pub extraction: Option<gsm8k::Extraction> = None,
        /// How `verify_if` makes a reward of the instructions that were followed.
        pub grading: Option<verify_if::Grading> = None,
        /// The program of the task `command` and its arguments. It runs with your own rights, outside any
        /// sandbox. A word that names a file is a path, relative to the working directory: a run keeps it
        /// absolute.
        pub command: Vec<String> = Vec::new(),
        /// Seconds after which a program of the task `command` that has not answered is killed and started
        /// again.
        pub command_timeout_s: Option<f64> = None => above(0.0).to(86400.0),
        /// Processes of the task `command`: as many requests are answered at a time.
        pub command_processes: Option<usize> = None => from(1.0).to(4096.0),
    }
}

impl TaskSettings {
    /// Makes the words of `command` that name a file absolute, so that the program starts from any folder.
    /// The program itself is a path if it has a slash; otherwise the system finds it.
    pub fn pin_command(&mut self) {
        for (index, word) in self.command.iter_mut().enumerate() {
            if (index > 0 || word.contains('/'))
                && Path::new(word).is_file()
                && let Ok(full) = std::path::absolute(&*word)
                && let Some(full) = full.to_str()
            {
                *word = full.to_owned();
            }
        }
    }

    /// Fills in the defaults of the keys that the task reads; other tasks' keys stay absent.
    pub fn fill_defaults(&mut self) {
        let keys = self.name.keys;
        let reads = |key| keys.contains(&key);
        if reads("extraction") {
            self.extraction.get_or_insert_default();
        }
        if reads("answer") {
            self.answer.get_or_insert_default();
        }
        if reads("prompt") {
            self.prompt.get_or_insert_default();
        }
        if reads("grading") {
            self.grading.get_or_insert_default();
        }
        if reads("command") {
            self.command_timeout_s.get_or_insert(command::TIMEOUT_S);
            self.command_processes.get_or_insert(command::PROCESSES);
        }
    }

    /// Returns the training file and its rows, parsed by `parse`; no rows if the command reads none.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is missing in the recipe, and those of [`rows::read`].
    pub(super) fn training_rows<T>(
        &self,
        host: &TaskContext,
        form: &str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<(&Path, Vec<T>)> {
        if !host.reads_training {
            return Ok((self.train_file.as_deref().unwrap_or(Path::new("train")), vec![]));
        }
        let file = self.needed(&self.train_file, "task.train_file")?;
        Ok((file, rows::read(file, self.train_rows_max, form, parse)?))
    }

    /// Returns the validation file and its rows, as [`Self::training_rows`] does.
    ///
    /// # Errors
    /// As [`Self::training_rows`].
    pub(super) fn held_out_rows<T>(
        &self,
        host: &TaskContext,
        form: &str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<(&Path, Vec<T>)> {
        if !host.reads_held_out {
            return Ok((Path::new("validation"), vec![]));
        }
        let file = self.needed(&self.validation_file, "task.validation_file")?;
        Ok((file, rows::read(file, self.validation_rows_max, form, parse)?))
    }

    /// Returns the number of held-out problems of a task that generates its own.
    pub(super) fn generated_problem_count(&self) -> usize {
        self.validation_rows_max.unwrap_or(VALIDATION_PROBLEMS)
    }

    /// Returns the required file under `key`.
    fn needed<'a>(&self, file: &'a Option<PathBuf>, key: &str) -> Result<&'a Path> {
        let name = self.name;
        file.as_deref()
            .ok_or_else(|| bad_input!("{key}: missing; task `{name}` needs a JSON-lines file there"))
    }
}

/// The parts of a task that a command needs.
#[derive(Debug, Clone)]
pub struct TaskContext {
    /// Whether training problems are needed.
    pub reads_training: bool,
    /// Whether held-out problems are needed.
    pub reads_held_out: bool,
    /// Maximum number of held-out problems to request from the task `command`.
    pub validation_problems_max: usize,
    /// Where the task `command` reports failures.
    pub console: Console,
}

impl Default for TaskContext {
    fn default() -> Self {
        Self {
            reads_training: true,
            reads_held_out: true,
            validation_problems_max: VALIDATION_PROBLEMS,
            console: Console::plain(),
        }
    }
}
