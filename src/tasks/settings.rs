//! `[task]`: problems and their grader.

use super::{
    TaskName, VALIDATION_PROBLEMS, answer, calculator, columns, command, gsm8k, python, retool, rows,
    verify_if,
};
use crate::bad_input;
use crate::metrics::Console;
use crate::settings::{above, choice, from, table};
use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default of `task.episode_timeout_s`.
const EPISODE_TIMEOUT_S: f64 = 600.0;
/// Default of `task.episodes_at_once`.
const EPISODES_AT_ONCE: usize = 64;

choice! {
    /// How training problems with too long prompts are treated.
    pub enum LongPrompts default Drop {
        /// They are left out, and their number is said.
        Drop = "drop",
        /// They are refused.
        Refuse = "refuse",
    }
}

choice! {
    /// How a trajectory is treated whose program, tool or grader failed.
    pub enum OnFailure default Drop {
        /// No step trains on it. Its group compares the others.
        Drop = "drop",
        /// It has the task's least reward, 0 for one's own task.
        Zero = "zero",
    }
}

table! {
    /// The task: problems, environment and reward.
    pub struct TaskSettings {
        /// The task's name.
        pub name: TaskName = TaskName::default(),
        /// Training problems, for tasks that read files: JSON lines, a JSON array, CSV or Parquet, gzipped or
        /// not. `*` and `?` in the name stand for several files.
        pub train_file: Option<PathBuf> = None,
        /// Held-out problems, for tasks that read files.
        pub validation_file: Option<PathBuf> = None,
        /// More held-out problems of `retool`. Each file is a separate set; its name in the metrics is the
        /// file's name.
        pub validation_files: Vec<PathBuf> = Vec::new(),
        /// Names of the task for columns of the files, such as `{ question = "prompt", answer =
        /// "reward_model.ground_truth" }`. Dots lead into structs. Rows in verl's form and conversational
        /// prompts of TRL need none.
        pub columns: BTreeMap<String, String> = BTreeMap::new(),
        /// How training problems are treated whose prompts are too long for `rollout.prompt_tokens_max` or
        /// the model's context.
        pub long_prompts: LongPrompts = LongPrompts::Drop,
        /// How a trajectory is treated whose program, tool or grader failed, by an error, the time limit, a
        /// reward that is not finite, or its end. The task `agent` always drops it.
        pub on_failure: OnFailure = OnFailure::Drop,
        /// Maximum number of training rows. The first rows are used. Absent means all rows.
        pub train_rows_max: Option<usize> = None => from(1.0),
        /// Maximum number of held-out rows per file. The first rows are used. Absent means all rows. For the
        /// task `agent` without a file, it is the number of held-out problems that the program makes; absent
        /// means none.
        pub validation_rows_max: Option<usize> = None => from(1.0),
        /// How `retool` compares an answer with the reference answer. Absent means `exact`.
        pub answer: Option<answer::AnswerEquality> = None,
        /// How `retool` asks for the answer, and so where it is read. Absent means `boxed`. With `gsm8k`,
        /// absent means verl's words, which ask for `####`.
        pub prompt: Option<retool::PromptFormat> = None,
        /// Level of `calculator`: 1 has nested expressions of three operations with numbers of four and five
        /// digits, and their remainders, 2 also word problems and dates, 3 longer expressions and numbers.
        /// Absent means 1.
        pub level: Option<usize> = None => from(1.0).to(3.0),
        /// Where `gsm8k` reads the answer. Absent means `flexible`.
        pub extraction: Option<gsm8k::Extraction> = None,
        /// How `verify_if` rewards the instructions that were followed. Absent means `share`.
        pub grading: Option<verify_if::Grading> = None,
        /// The file with the reward functions of the task `python`. It runs with your own rights, outside any
        /// sandbox.
        pub file: Option<PathBuf> = None,
        /// The reward functions of `file` and their weights, such as `{ correct = 1.0, format = 0.2 }`.
        /// Absent means the only function, or `compute_score`.
        pub rewards: BTreeMap<String, f64> = BTreeMap::new() => from(-1e6).to(1e6),
        /// Names of the functions of `rewards` that must all return more than 0 for a success. An empty list
        /// means those of the largest weight.
        pub success: Vec<String> = Vec::new(),
        /// The program of the task `command` or `agent` and its arguments; for `python`, the Python that runs
        /// `file`, by default `python3`. The program runs with your own
        /// rights, outside any sandbox. A word that names a file is a path relative to the working
        /// directory. A run stores the absolute path.
        pub command: Vec<String> = Vec::new(),
        /// Time limit of an answer from the program of the task `command` or `python`, in seconds. After it,
        /// the program is killed and restarted. Absent means 60.
        pub command_timeout_s: Option<f64> = None => above(0.0).to(86400.0),
        /// Number of processes of the task `command` or `python`. Each answers one request at a time. Absent
        /// means 4.
        pub command_processes: Option<usize> = None => from(1.0).to(4096.0),
        /// Maximum number of characters of a tool's reply from the program of the task `command`. The middle
        /// of a longer one is removed. The calls of a turn share them. Absent means 4096.
        pub command_output_chars_max: Option<usize> = None => from(64.0).to(1048576.0),
        /// Address and port of the server for the program of the task `agent`, such as `127.0.0.1:9000`.
        /// Absent means this machine alone and a free port. Without `command`, or if other machines reach it,
        /// it needs a secret token in the environment variable `RLOSS_SERVE_TOKEN`.
        pub serve_on: Option<String> = None,
        /// Time limit of an episode of the task `agent`, in seconds. An episode without a reward after it
        /// fails. Absent means 600.
        pub episode_timeout_s: Option<f64> = None => above(0.0).to(86400.0),
        /// Maximum number of open episodes of the task `agent`. Absent means 64.
        pub episodes_at_once: Option<usize> = None => from(1.0).to(4096.0),
    }
}

/// Makes the words of a command that name a file absolute. The first word, the program, is a path only if it
/// has a slash; otherwise the system searches for it.
pub(crate) fn absolute_words(command: &mut [String]) {
    for (index, word) in command.iter_mut().enumerate() {
        if (index > 0 || word.contains('/'))
            && Path::new(word).is_file()
            && let Ok(full) = std::path::absolute(&*word)
            && let Some(full) = full.to_str()
        {
            *word = full.to_owned();
        }
    }
}

impl TaskSettings {
    /// Makes the words of `command` that name a file absolute, so that the program starts from any folder.
    pub fn make_command_absolute(&mut self) {
        absolute_words(&mut self.command);
    }

    /// Returns whether a program of the user plays whole episodes.
    pub fn is_agent(&self) -> bool {
        self.name.keys.contains(&"serve_on")
    }

    /// Returns the address of `serve_on`; `None` if the key is absent.
    ///
    /// # Errors
    /// The reason if the key is not an address with a port.
    pub fn serve_address(&self) -> Result<Option<SocketAddr>, String> {
        let Some(text) = &self.serve_on else { return Ok(None) };
        let wrong =
            |_| format!("{text:?} is not an address with a port; write one such as \"127.0.0.1:9000\"");
        text.parse().map(Some).map_err(wrong)
    }

    /// Returns the time limit of an agent's episode.
    ///
    /// # Errors
    /// The reason if it is too long for a clock.
    pub fn episode_timeout(&self) -> Result<Duration, String> {
        let seconds = self.episode_timeout_s.unwrap_or(EPISODE_TIMEOUT_S);
        Duration::try_from_secs_f64(seconds).map_err(|error| format!("{error}; give seconds above 0"))
    }

    /// Returns the maximum number of open episodes of an agent.
    pub fn episodes_at_once(&self) -> usize {
        self.episodes_at_once.unwrap_or(EPISODES_AT_ONCE)
    }

    /// Fills in the defaults of the keys that the task reads. The keys of other tasks stay absent.
    pub fn fill_defaults(&mut self) {
        let keys = self.name.keys;
        let reads = |key| keys.contains(&key);
        if reads("level") {
            self.level.get_or_insert(calculator::LEVEL);
        }
        if reads("extraction") {
            self.extraction.get_or_insert_default();
        }
        if reads("answer") {
            self.answer.get_or_insert_default();
            self.prompt.get_or_insert_default();
        }
        if reads("grading") {
            self.grading.get_or_insert_default();
        }
        if reads("serve_on") {
            self.episode_timeout_s.get_or_insert(EPISODE_TIMEOUT_S);
            self.episodes_at_once.get_or_insert(EPISODES_AT_ONCE);
        }
        if reads("command_processes") {
            self.command_timeout_s.get_or_insert(command::TIMEOUT_S);
            self.command_processes.get_or_insert(command::PROCESSES);
        }
        if reads("file") && self.command.is_empty() {
            self.command.push(python::PYTHON.to_owned());
        }
        if reads("command_output_chars_max") {
            self.command_output_chars_max.get_or_insert(command::OUTPUT_CHARS_MAX);
        }
    }

    /// Returns the training file and its rows, parsed by `parse`. No rows if the command does not need them.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the recipe has no such file, and the errors of [`rows::read`].
    pub(super) fn training_rows<T>(
        &self,
        context: &TaskContext,
        example: &str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<(&Path, Vec<T>)> {
        if !context.reads_training {
            return Ok((self.train_file.as_deref().unwrap_or(Path::new("train")), vec![]));
        }
        let file = self.required_file(&self.train_file, "task.train_file")?;
        Ok((file, self.read_rows(file, self.train_rows_max, example, parse)?))
    }

    /// Returns the validation file and its rows, parsed by `parse`. No rows if the command does not need
    /// them.
    ///
    /// # Errors
    /// The errors of [`Self::training_rows`].
    pub(super) fn held_out_rows<T>(
        &self,
        context: &TaskContext,
        example: &str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<(&Path, Vec<T>)> {
        if !context.reads_held_out {
            return Ok((Path::new("validation"), vec![]));
        }
        let file = self.required_file(&self.validation_file, "task.validation_file")?;
        Ok((file, self.read_rows(file, self.validation_rows_max, example, parse)?))
    }

    /// Reads rows of `path` as [`rows::read`] does, with the names of `columns`.
    ///
    /// # Errors
    /// The errors of [`rows::read`], and a row without a column that `columns` names.
    pub(super) fn read_rows<T>(
        &self,
        path: &Path,
        rows_max: Option<usize>,
        example: &str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<Vec<T>> {
        rows::read(path, rows_max, example, |row| parse(&*columns::with_columns(row, &self.columns)?))
    }

    /// Returns the file of `key`, which must be present.
    fn required_file<'a>(&self, file: &'a Option<PathBuf>, key: &str) -> Result<&'a Path> {
        let name = self.name;
        file.as_deref().ok_or_else(|| bad_input!("{key}: missing; the task `{name}` needs a file of rows"))
    }
}

/// Requirements of a command for the task that it builds.
#[derive(Debug, Clone)]
pub struct TaskContext {
    /// Whether the command needs training problems.
    pub reads_training: bool,
    /// Whether the command needs held-out problems.
    pub reads_held_out: bool,
    /// Maximum number of held-out problems to request from the task `command`.
    pub validation_problems_max: usize,
    /// `rollout.turns_max`, if the command samples.
    pub turns_max: Option<usize>,
    /// `train.steps`, for reward functions that ask for it.
    pub steps: u64,
    /// The console for failures of the task `command`.
    pub console: Console,
}

impl Default for TaskContext {
    fn default() -> Self {
        Self {
            reads_training: true,
            reads_held_out: true,
            validation_problems_max: VALIDATION_PROBLEMS,
            turns_max: None,
            steps: 0,
            console: Console::plain(),
        }
    }
}
