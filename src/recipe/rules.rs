//! Rules over several keys: contradictions, missing files, and settings that are probably not intended.

mod adapter;
mod agent;
mod critic;
mod distill;
mod mcp;
mod policy;

use super::Recipe;
use super::key_scope::KeyScope;
use super::plan::is_in_table;
use crate::actor::{OptimizerKind, OptimizerSettings};
use crate::checkpoint::gguf::is_gguf;
use crate::checkpoint::hub;
use crate::interpreter::InterpreterKind;
use crate::model::settings::{Architecture, Tokenizer};
use crate::policy::advantage::Advantage;
use crate::settings::{Choice, KeyLocations, Mistake, SourceLocation, changed_entries};
use crate::table_file;
use crate::tasks::TaskName;
use std::path::{Path, PathBuf};

/// The mistakes and warnings of all rules.
#[derive(Default)]
pub(crate) struct Findings {
    pub mistakes: Vec<Mistake>,
    pub warnings: Vec<Mistake>,
}

/// Checks the whole recipe. A rule is skipped if it concerns one of the `unreliable_keys`, which have a
/// mistake already, or a key outside `scope`.
pub(crate) fn check(
    recipe: &Recipe,
    key_locations: &KeyLocations,
    unreliable_keys: &[String],
    scope: KeyScope,
) -> Findings {
    let mut rules = Rules { recipe, key_locations, unreliable_keys, scope, findings: Findings::default() };
    rules.check_model();
    rules.check_adapter();
    rules.check_chat();
    rules.check_task();
    rules.check_interpreter();
    rules.check_mcp();
    rules.check_rollout();
    rules.check_cold_start();
    rules.check_train();
    rules.check_policy();
    rules.check_distillation();
    rules.check_critic();
    rules.check_ablations();
    rules.check_eval();
    rules.findings
}

struct Rules<'a> {
    recipe: &'a Recipe,
    key_locations: &'a KeyLocations,
    unreliable_keys: &'a [String],
    scope: KeyScope,
    findings: Findings,
}

impl Rules<'_> {
    /// Records a mistake at the first of `keys`. The mistake is dropped if one of `keys` is unreliable or
    /// outside the scope.
    fn refuse(&mut self, keys: &[&str], message: impl Into<String>) {
        if let Some(mistake) = self.finding(keys, message.into()) {
            self.findings.mistakes.push(mistake);
        }
    }

    /// Records a warning about a setting that is allowed.
    fn warn(&mut self, keys: &[&str], message: impl Into<String>) {
        if let Some(warning) = self.finding(keys, message.into()) {
            self.findings.warnings.push(warning);
        }
    }

    /// Checks patterns of parameter names. The message gives `example` as a valid pattern.
    fn check_patterns(&mut self, key: &str, patterns: &[String], example: &str) {
        if patterns.iter().any(String::is_empty) {
            let message =
                format!("an empty pattern matches no parameter; remove it, or write one such as {example:?}");
            self.refuse(&[key], message);
        }
    }

    fn finding(&self, keys: &[&str], message: String) -> Option<Mistake> {
        let is_reliable = |key: &&str| {
            self.scope.reads(key)
                && !self.unreliable_keys.iter().any(|unreliable| is_in_table(key, unreliable))
        };
        let key = keys.first()?;
        keys.iter().all(is_reliable).then(|| Mistake {
            location: self.key_locations.location_of(key),
            key: (*key).to_owned(),
            message,
        })
    }

    fn check_model(&mut self) {
        let model = &self.recipe.model;
        let Some(path) = &model.path else {
            if let Some(architecture) = &model.architecture {
                self.check_architecture(architecture);
            }
            if let Some(Tokenizer::Path(path)) = &model.tokenizer
                && !path.exists()
            {
                let message = format!(
                    "nothing at {}; name a tokenizer.json or its folder, or write \"embedded\"",
                    path.display()
                );
                self.refuse(&["model.tokenizer"], message);
            }
            return;
        };
        if model.architecture.is_some() {
            let message = "the model at model.path defines the architecture (config.json, or the header of \
                a GGUF file); remove one of the two";
            self.refuse(&["model.architecture", "model.path"], message);
        }
        if model.tokenizer.is_some() {
            let message = "the folder of model.path has its own tokenizer; remove one of the two";
            self.refuse(&["model.tokenizer", "model.path"], message);
        }
        if !(path.is_dir() || is_gguf(path) && path.exists()) {
            let message = format!(
                "no folder and no GGUF file at {}{}; set model.path to a folder with config.json, tokenizer.json and \
                 *.safetensors (without *.safetensors, the weights are random), or to a *.gguf file",
                path.display(),
                hub::advice(path)
            );
            self.refuse(&["model.path"], message);
        }
    }

    fn check_architecture(&mut self, architecture: &Architecture) {
        let a = architecture;
        for contradiction in a.sizes().contradictions() {
            let keys = contradiction.keys.map(|key| format!("model.architecture.{key}"));
            let message = format!("{} {}", contradiction.value, contradiction.what);
            self.refuse(&keys.each_ref().map(String::as_str), message);
        }
        let response = self.recipe.rollout.response_tokens_max;
        if response >= a.max_position_embeddings {
            self.refuse(
                &["rollout.response_tokens_max", "model.architecture.max_position_embeddings"],
                format!(
                    "{response} leaves no space for a prompt: the recipe names no model, and its [model.architecture] has a \
                     context of {} tokens; set model.path to your model, lower this key, or raise \
                     model.architecture.max_position_embeddings",
                    a.max_position_embeddings
                ),
            );
        }
    }

    fn check_chat(&mut self) {
        let chat = &self.recipe.chat;
        if let Some(month) = chat.knowledge_cutoff.as_ref().filter(|month| !is_date(month, 2)) {
            let message = format!("{month:?} is not a month; write it as YYYY-MM, such as \"2024-06\"");
            self.refuse(&["chat.knowledge_cutoff"], message);
        }
        if let Some(date) = &chat.current_date
            && !is_date(date, 3)
        {
            let message = format!("{date:?} is not a date; write it as YYYY-MM-DD, such as \"2025-06-28\"");
            self.refuse(&["chat.current_date"], message);
        }
    }

    fn check_task(&mut self) {
        let task = &self.recipe.task;
        let may_have_several_files = task.name.keys.contains(&"validation_files");
        let files = [
            ("task.train_file", &task.train_file, "task.train_rows_max", task.train_rows_max),
            (
                "task.validation_file",
                &task.validation_file,
                "task.validation_rows_max",
                task.validation_rows_max,
            ),
        ];
        for (key, file, rows_key, rows) in files {
            let has_other_files =
                may_have_several_files && key == "task.validation_file" && !task.validation_files.is_empty();
            match (task.name.reads_files, file) {
                (true, None) if has_other_files => {}
                (true, None) if task.name.keys.contains(&"rewards") && key == "task.validation_file" => {}
                (true, None) => self.refuse(
                    &[key, "task.name"],
                    format!(
                        "missing, and the task {} reads its problems from this file; set the key",
                        task.name
                    ),
                ),
                (true, Some(file)) => self.check_file(key, file),
                (false, Some(file)) if task.is_agent() => self.check_file(key, file),
                (false, Some(_)) => self.refuse(
                    &[key, "task.name"],
                    format!("the task {} generates its problems; remove the key", task.name),
                ),
                (false, None) => {}
            }
            // An agent without a file of held-out problems makes as many problems as this key says.
            let counts_problems = task.is_agent() && (file.is_some() || key == "task.validation_file");
            if !task.name.reads_files && !counts_problems && rows.is_some() {
                let message = format!("the task {} reads no file; remove the key", task.name);
                self.refuse(&[rows_key, "task.name"], message);
            }
        }
        if may_have_several_files {
            self.check_files("task.validation_files", &task.validation_files);
        }
        self.refuse_keys_of_other_tasks();
        self.check_reward_file();
        self.check_agent();
    }

    /// Refuses keys that only other tasks read.
    fn refuse_keys_of_other_tasks(&mut self) {
        let task = &self.recipe.task;
        for entry in changed_entries(task) {
            let key = entry.path();
            let readers = TaskName::all().into_iter().filter(|task| task.keys.contains(&key));
            let readers: Vec<&str> = readers.map(TaskName::name).collect();
            if !readers.is_empty() && !readers.contains(&task.name.name) {
                let message = format!(
                    "only the task {} uses this key, and task.name is {}; remove one of the two",
                    readers.join(" or "),
                    task.name
                );
                self.refuse(&[&format!("task.{key}"), "task.name"], message);
            }
        }
        let has_command = task.name.keys.contains(&"command") && !task.is_agent();
        if has_command && task.command.first().is_none_or(String::is_empty) {
            let message = "missing, and the task \"command\" runs this program; write a program and its \
                arguments, such as [\"python3\", \"my_task.py\"]";
            self.refuse(&["task.command", "task.name"], message);
        }
    }

    /// Checks the file of the reward functions.
    fn check_reward_file(&mut self) {
        let task = &self.recipe.task;
        match &task.file {
            Some(file) => self.check_file("task.file", file),
            None if task.name.keys.contains(&"file") => self.refuse(
                &["task.file", "task.name"],
                "missing, and the task \"python\" takes its reward functions from this file; name it, such as \"rewards.py\"",
            ),
            None => {}
        }
    }

    /// Checks that the files of a key exist.
    fn check_files<'f>(&mut self, key: &str, files: impl IntoIterator<Item = &'f PathBuf>) {
        files.into_iter().for_each(|file| self.check_file(key, file));
    }

    /// Checks that a file exists.
    fn check_file(&mut self, key: &str, file: &Path) {
        if file.is_dir() {
            let message = format!("{} is a folder; name a file{}", file.display(), files_in(file));
            self.refuse(&[key], message);
        } else if !table_file::files(file).is_ok_and(|files| files.iter().all(|file| file.is_file())) {
            let data = self.recipe.task.name.data;
            let remedy = match key {
                "task.train_file" | "task.validation_file" | "task.validation_files" if !data.is_empty() => {
                    format!("fetch the data with rloss fetch {data}, or name another file")
                }
                _ => "name an existing file".to_owned(),
            };
            let remedy = self.relative_path_hint(key, file).unwrap_or(remedy);
            self.refuse(&[key], format!("no file at {}; {remedy}", file.display()));
        }
    }

    /// Returns a remedy if the file of `key` exists relative to the recipe's folder, but not relative to the
    /// working directory.
    fn relative_path_hint(&self, key: &str, file: &Path) -> Option<String> {
        let SourceLocation::File { path, .. } = self.key_locations.location_of(key) else { return None };
        let folder = std::path::absolute(path).ok()?.parent()?.to_owned();
        let relative = file.strip_prefix(std::env::current_dir().ok()?).ok()?;
        folder.join(relative).is_file().then(|| {
            format!(
                "relative paths start at the working directory, but the file is in {}; run from that folder",
                folder.display()
            )
        })
    }

    fn check_interpreter(&mut self) {
        let interpreter = &self.recipe.interpreter;
        if interpreter.wall_clock_s <= interpreter.time_limit_s {
            let message = format!(
                "{} must be above interpreter.time_limit_s, {}: it is the second limit, which kills the worker if the first limit fails; raise interpreter.wall_clock_s",
                interpreter.wall_clock_s, interpreter.time_limit_s
            );
            self.refuse(&["interpreter.wall_clock_s", "interpreter.time_limit_s"], message);
        }
        if interpreter.scratch_mib > 0 && interpreter.kind == InterpreterKind::Embedded {
            let message = "only interpreter.kind = \"cpython\" can write files; set it to 0";
            self.refuse(&["interpreter.scratch_mib"], message);
        }
        if interpreter.dangerously_allow_unsandboxed {
            let message = "if the system has no sandbox, the model's code runs without one";
            self.warn(&["interpreter.dangerously_allow_unsandboxed"], message);
        }
    }

    fn check_rollout(&mut self) {
        let rollout = &self.recipe.rollout;
        let only_one = [
            ("rollout.top_k", rollout.top_k == 1, "1", "2 or more, or 0"),
            ("rollout.min_p", rollout.min_p == 1.0, "1", "less than 1"),
        ];
        for (key, keeps_one, value, remedy) in only_one {
            if keeps_one && self.recipe.train.steps > 0 {
                let message = format!(
                    "{value} keeps only the most likely token, so every log-probability is 0 and has no gradient; write \
                     {remedy}"
                );
                self.refuse(&[key, "train.steps"], message);
            }
        }
        let advantage = self.recipe.policy.advantage;
        let single_sample = match advantage {
            Advantage::Gdpo
            | Advantage::Grpo
            | Advantage::DrGrpo
            | Advantage::Rloo
            | Advantage::Maxrl
            | Advantage::Opo => Some("has its raw reward as advantage"),
            Advantage::GrpoBatchStd | Advantage::ReinforcePlusPlusBaseline => {
                Some("has no mean to compare with")
            }
            _ => None,
        };
        let train = &self.recipe.train;
        let samples =
            train.steps > 0 && train.trajectories.is_none() && self.scope != KeyScope::TrainStoredRun;
        // Without a policy loss, no advantage is used.
        let samples = samples && !self.only_distills();
        if let (1, Some(effect), true) = (rollout.samples_per_prompt, single_sample, samples) {
            let message = format!(
                "a group of one {effect} under {advantage}; give 2 or more, or an advantage without groups such as \
                 \"reinforce_plus_plus\""
            );
            self.refuse(&["rollout.samples_per_prompt", "policy.advantage"], message);
        }
    }

    fn check_cold_start(&mut self) {
        let cold_start = &self.recipe.cold_start;
        self.check_files("cold_start.train_file", &cold_start.train_file);
        self.check_files("cold_start.validation_file", &cold_start.validation_file);
        let (optimizer, steps) = (&cold_start.optimizer, cold_start.steps);
        self.check_optimizer("cold_start.optimizer", optimizer, "cold_start.steps", steps);
    }

    fn check_train(&mut self) {
        let train = &self.recipe.train;
        let (steps, epochs) = ("train.steps", "train.data_epochs");
        if train.data_epochs.is_some()
            && self.key_locations.is_written(steps)
            && !self.key_locations.is_from_base(steps)
        {
            self.refuse(&[epochs, steps], "both count the run's steps; remove one of the two");
        }
        self.check_optimizer("train.optimizer", &train.optimizer, "train.steps", train.steps);
        self.check_files("train.trajectories", &train.trajectories);
        self.check_patterns("train.freeze", &train.freeze, "*.self_attn.*");
    }

    fn check_optimizer(&mut self, table: &str, optimizer: &OptimizerSettings, steps_key: &str, steps: u64) {
        if optimizer.momentum > 0.0 && optimizer.kind != OptimizerKind::Sgd {
            let instead = if optimizer.kind == OptimizerKind::Muon { "muon_momentum" } else { "beta1" };
            let message = format!(
                "only kind = \"sgd\" has a momentum, but {table}.kind is \"{}\", which uses {instead} instead; remove one of \
                 the two",
                optimizer.kind
            );
            self.refuse(&[&format!("{table}.momentum"), &format!("{table}.kind")], message);
        }
        self.check_muon(table, optimizer);
        let warmup = optimizer.warmup_steps;
        if steps > 0 && warmup >= steps {
            let message = format!(
                "the learning-rate warm-up takes {warmup} step{}, but {steps_key} is only {steps}",
                if warmup == 1 { "" } else { "s" }
            );
            self.warn(&[&format!("{table}.warmup_steps"), steps_key], message);
        }
    }

    fn check_muon(&mut self, table: &str, optimizer: &OptimizerSettings) {
        let (kind, momentum) = (format!("{table}.kind"), format!("{table}.muon_momentum"));
        if optimizer.kind != OptimizerKind::Muon {
            if optimizer.muon_momentum != OptimizerSettings::default().muon_momentum {
                let message = format!(
                    "only kind = \"muon\" uses this key, and {kind} is \"{}\"; write \"muon\", or remove the key",
                    optimizer.kind
                );
                self.refuse(&[&momentum, &kind], message);
            }
        } else if self.recipe.adapter.is_some() {
            let message = "\"muon\" is for whole matrices, and an adapter trains their low-rank factors; \
                write \"adamw\", or remove [adapter]";
            self.refuse(&[&kind, "adapter"], message);
        }
    }

    fn check_ablations(&mut self) {
        for (name, description) in self.recipe.arms.list_enabled() {
            self.warn(&[&format!("arms.{name}")], format!("this ablation is enabled: {description}"));
        }
    }

    fn check_eval(&mut self) {
        let eval = &self.recipe.eval;
        for (i, &k) in eval.pass_at.iter().enumerate() {
            if k > eval.samples {
                let message = format!(
                    "pass@{k} needs at least {k} samples, but eval.samples is {}; raise it",
                    eval.samples
                );
                self.refuse(&["eval.pass_at", "eval.samples"], message);
            }
            if eval.pass_at[..i].contains(&k) {
                self.refuse(&["eval.pass_at"], format!("{k} is listed twice; remove one"));
            }
        }
        if eval.temperature == 0.0 && eval.samples > 1 {
            let message = format!(
                "at temperature 0 all {} samples of a problem are equal; write 1, or raise eval.temperature",
                eval.samples
            );
            self.refuse(&["eval.samples", "eval.temperature"], message);
        }
    }
}

/// Maximum number of files that a message lists for a folder.
const FILES_SHOWN_MAX: usize = 5;

/// Returns the data files in `folder`, as a part of a message.
fn files_in(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| [".jsonl", ".json", ".csv", ".parquet", ".gz"].iter().any(|kind| name.ends_with(kind)))
        .collect();
    names.sort();
    names.truncate(FILES_SHOWN_MAX);
    if names.is_empty() { " of rows".to_owned() } else { format!(" in that folder: {}", names.join(", ")) }
}

/// Returns whether `text` is the first `parts` parts of a valid date YYYY-MM-DD.
fn is_date(text: &str, parts: usize) -> bool {
    let day = if parts == 2 { format!("{text}-01") } else { text.to_owned() };
    let date: Option<toml::value::Datetime> = day.parse().ok();
    date.is_some_and(|date| date.date.is_some() && date.time.is_none())
}
