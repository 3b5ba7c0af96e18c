//! `[task]`: problems and their grader.

// The enums are declared by `choice!`, which derives no default.
#![allow(clippy::derivable_impls)]

use super::limits::{above, from};
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
        /// More held-out problems of `retool`: each file is a set of its own, named after it in the metrics.
        pub validation_files: Vec<PathBuf> = Vec::new(),
        /// Keep the first so many training rows; absent means all.
        pub train_rows_max: Option<usize> = None => from(1.0),
        /// Keep the first so many held-out rows of each file; absent means all.
        pub validation_rows_max: Option<usize> = None => from(1.0),
        /// How `retool` compares an answer with the right one.
        pub answer: Option<AnswerEquality> = None,
        /// How `retool` asks for the answer, and so where it looks for it.
        pub prompt: Option<PromptForm> = None,
        /// Where `gsm8k` looks for the answer.
        pub extraction: Option<Extraction> = None,
        /// How `verify_if` makes a reward of the instructions that were followed.
        pub grading: Option<Grading> = None,
        /// The program of the task `command` and its arguments. It runs with your own rights, outside any sandbox.
        pub command: Vec<String> = Vec::new(),
        /// Seconds after which a program of the task `command` that has not answered is killed and started again.
        pub command_timeout_s: Option<f64> = None => above(0.0).to(86400.0),
        /// Processes of the task `command`: as many requests are answered at a time.
        pub command_processes: Option<usize> = None => from(1.0).to(4096.0),
    }
}

impl Task {
    /// Fills in the defaults of the keys that the task reads; the keys of other tasks stay absent.
    pub(crate) fn fill_in(&mut self) {
        match self.name {
            TaskName::Arithmetic | TaskName::ArithmeticSingle | TaskName::FormatRules => {}
            TaskName::Gsm8k => {
                self.extraction.get_or_insert_default();
            }
            TaskName::Retool => {
                self.answer.get_or_insert_default();
                self.prompt.get_or_insert_default();
            }
            TaskName::VerifyIf => {
                self.grading.get_or_insert_default();
            }
            TaskName::Command => {
                self.command_timeout_s.get_or_insert(60.0);
                self.command_processes.get_or_insert(4);
            }
        }
    }
}

choice! {
    /// The tasks.
    pub enum TaskName {
        /// Three-number word problems, answered with the Python tool.
        Arithmetic = "arithmetic",
        /// Small additions and subtractions, worked without a tool.
        ArithmeticSingle = "arithmetic_single",
        /// A line in capitals, of so many words, with a given prefix: made up and checked by rule, without a tool.
        FormatRules = "format_rules",
        /// Grade-school word problems from GSM8K's JSONL files, without a tool.
        Gsm8k = "gsm8k",
        /// Competition mathematics with the Python tool, after ReTool.
        Retool = "retool",
        /// Checkable instructions of IFEval's form, without a tool.
        VerifyIf = "verify_if",
        /// Your own task: a program that gives problems and rewards over JSON lines, see TASKS.md.
        Command = "command",
    }
}

impl TaskName {
    /// Whether the task makes its problems from `task.train_file` and `task.validation_file`.
    pub fn reads_files(self) -> bool {
        match self {
            TaskName::Arithmetic | TaskName::ArithmeticSingle | TaskName::FormatRules | TaskName::Command => {
                false
            }
            TaskName::Gsm8k | TaskName::Retool | TaskName::VerifyIf => true,
        }
    }
}

choice! {
    /// How answers are compared.
    pub enum AnswerEquality {
        /// As strings, after the usual cleaning of LaTeX: the published grading.
        Exact = "exact",
        /// As mathematics: 1/2 is 0.5 is \frac{1}{2}.
        Equivalent = "equivalent",
    }
}

impl Default for AnswerEquality {
    fn default() -> Self {
        Self::Exact
    }
}

choice! {
    /// How a problem asks for its answer.
    pub enum PromptForm {
        /// ReTool's suffix: the answer is the last `\boxed{}`, near the end.
        Boxed = "boxed",
        /// DAPO's wrapper: the answer is on the last line, after `Answer:`.
        AnswerLine = "answer_line",
    }
}

impl Default for PromptForm {
    fn default() -> Self {
        Self::Boxed
    }
}

choice! {
    /// Where a number is looked for.
    pub enum Extraction {
        /// Only after the last `####`.
        Strict = "strict",
        /// After `####` or in `\boxed{}`, whichever comes last; without either the last number.
        Flexible = "flexible",
    }
}

impl Default for Extraction {
    fn default() -> Self {
        Self::Flexible
    }
}

choice! {
    /// How verdicts become a reward.
    pub enum Grading {
        /// The share of the instructions that were followed.
        Share = "share",
        /// 1 when all were followed, otherwise 0.
        All = "all",
    }
}

impl Default for Grading {
    fn default() -> Self {
        Self::Share
    }
}
