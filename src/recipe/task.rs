//! `[task]`: problems and their grader.

use super::limits::{above, from};
use super::table::table;
pub use crate::tasks::TaskName;
pub use crate::tasks::answer::AnswerEquality;
pub use crate::tasks::gsm8k::Extraction;
pub use crate::tasks::retool::PromptForm;
pub use crate::tasks::verify_if::Grading;
use std::path::{Path, PathBuf};

table! {
    /// What is learned: problems, environment and reward.
    pub struct TaskConfig {
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
        pub answer: Option<AnswerEquality> = None,
        /// How `retool` asks for the answer, and so where it looks for it.
        pub prompt: Option<PromptForm> = None,
        /// Where `gsm8k` looks for the answer.
        pub extraction: Option<Extraction> = None,
        /// How `verify_if` makes a reward of the instructions that were followed.
        pub grading: Option<Grading> = None,
        /// The program of the task `command` and its arguments. It runs with your own rights, outside any sandbox. A word that
        /// names a file is a path: a run keeps it absolute.
        pub command: Vec<String> = Vec::new(),
        /// Seconds after which a program of the task `command` that has not answered is killed and started again.
        pub command_timeout_s: Option<f64> = None => above(0.0).to(86400.0),
        /// Processes of the task `command`: as many requests are answered at a time.
        pub command_processes: Option<usize> = None => from(1.0).to(4096.0),
    }
}

impl TaskConfig {
    /// Makes the words of `command` that name a file absolute, so that a run's program starts from wherever the run is used. The
    /// program itself is a path where it has a slash, and else looked up by the system.
    pub(crate) fn pin_command(&mut self) {
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

    /// Fills in the defaults of the keys that the task reads; the keys of other tasks stay absent.
    pub(crate) fn fill_in(&mut self) {
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
            self.command_timeout_s.get_or_insert(60.0);
            self.command_processes.get_or_insert(4);
        }
    }
}
