//! `[task]`: problems and their grader.

use super::limits::from;
use super::table::{choice, table};
use std::path::PathBuf;

table! {
    /// What is learned: problems, environment and reward.
    pub struct Task {
        /// Which task.
        pub name: TaskName = TaskName::Arithmetic,
        /// Training problems, for tasks that read files.
        pub train_file: Option<PathBuf> = None,
        /// Held-out problems, for tasks that read files.
        pub validation_file: Option<PathBuf> = None,
        /// Keep the first so many training rows; absent means all.
        pub train_rows_max: Option<usize> = None => from(1.0),
        /// Keep the first so many held-out rows; absent means all.
        pub validation_rows_max: Option<usize> = None => from(1.0),
    }
}

choice! {
    /// The tasks.
    pub enum TaskName {
        /// Three-number word problems, answered with the Python tool.
        Arithmetic = "arithmetic",
        /// Small additions and subtractions, worked without a tool.
        ArithmeticSingle = "arithmetic_single",
        /// Grade-school word problems from GSM8K's JSONL files, without a tool.
        Gsm8k = "gsm8k",
    }
}

impl TaskName {
    /// Whether the task makes its problems from `task.train_file` and `task.validation_file`.
    pub fn reads_files(self) -> bool {
        match self {
            TaskName::Arithmetic | TaskName::ArithmeticSingle => false,
            TaskName::Gsm8k => true,
        }
    }
}
