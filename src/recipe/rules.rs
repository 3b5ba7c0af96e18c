//! Rules over several keys: contradictions, missing files, and settings that are probably not intended.

mod adapter;
mod critic;
mod policy;

use super::Recipe;
use super::key_scope::KeyScope;
use super::plan::is_in_table;
use crate::checkpoint::gguf::is_gguf;
use crate::interpreter::InterpreterKind;
use crate::learner::{OptimizerKind, OptimizerSettings};
use crate::model::settings::{Architecture, Tokenizer};
use crate::policy::advantage::Advantage;
use crate::settings::{Choice, KeyLocations, Mistake, SourceLocation, changed_entries};
use crate::tasks::TaskName;
use std::path::Path;

/// The mistakes and warnings of all rules.
#[derive(Default)]
pub(crate) struct Findings {
    pub mistakes: Vec<Mistake>,
    pub warnings: Vec<Mistake>,
}

/// Checks the whole recipe. Rules over one of the `unreliable_keys` are skipped: these keys have a mistake
/// already. Rules over a key outside `scope` are skipped too.
pub(crate) fn check(
    recipe: &Recipe,
    key_locations: &KeyLocations,
    unreliable_keys: &[String],
    scope: KeyScope,
) -> Findings {
    let mut rules = Rules { recipe, key_locations, unreliable_keys, scope, findings: Findings::default() };
    rules.model();
    rules.adapter();
    rules.harmony();
    rules.task();
    rules.interpreter();
    rules.rollout();
    rules.cold_start();
    rules.train();
    rules.policy();
    rules.critic();
    rules.ablations();
    rules.eval();
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
    /// Records a mistake at the first of `keys`. The rule is skipped if one of `keys` is unreliable or
    /// outside the scope.
    fn refuse(&mut self, keys: &[&str], what: impl Into<String>) {
        if let Some(mistake) = self.finding(keys, what.into()) {
            self.findings.mistakes.push(mistake);
        }
    }

    /// Records a warning, for a setting that is allowed.
    fn warn(&mut self, keys: &[&str], what: impl Into<String>) {
        if let Some(warning) = self.finding(keys, what.into()) {
            self.findings.warnings.push(warning);
        }
    }

    /// Checks patterns of parameter names. `example` is a valid pattern, for the message.
    fn check_patterns(&mut self, key: &str, patterns: &[String], example: &str) {
        if patterns.iter().any(String::is_empty) {
            let what =
                format!("an empty pattern matches no parameter; remove it, or write one such as {example:?}");
            self.refuse(&[key], what);
        }
    }

    fn finding(&self, keys: &[&str], what: String) -> Option<Mistake> {
        let is_reliable = |key: &&str| {
            self.scope.reads(key)
                && !self.unreliable_keys.iter().any(|unreliable| is_in_table(key, unreliable))
        };
        let key = keys.first()?;
        keys.iter().all(is_reliable).then(|| Mistake {
            location: self.key_locations.of(key),
            key: (*key).to_owned(),
            what,
        })
    }

    fn model(&mut self) {
        let model = &self.recipe.model;
        let Some(path) = &model.path else {
            if let Some(architecture) = &model.architecture {
                self.architecture(architecture);
            }
            if let Some(Tokenizer::Path(path)) = &model.tokenizer
                && !path.exists()
            {
                self.refuse(
                    &["model.tokenizer"],
                    format!(
                        "nothing at {}; name a tokenizer.json or its folder, or write \"embedded\"",
                        path.display()
                    ),
                );
            }
            return;
        };
        if model.architecture.is_some() {
            self.refuse(
                &["model.architecture", "model.path"],
                "the folder of model.path says the architecture in its config.json; remove one of the two",
            );
        }
        if model.tokenizer.is_some() {
            self.refuse(
                &["model.tokenizer", "model.path"],
                "the folder of model.path has its own tokenizer; remove one of the two",
            );
        }
        if !(path.is_dir() || is_gguf(path) && path.exists()) {
            let what = format!(
                "no folder and no GGUF file at {}; pass --set model.path=FOLDER, a folder with config.json, tokenizer.json \
                 and, unless the weights are to be random, *.safetensors; or a file *.gguf",
                path.display()
            );
            self.refuse(&["model.path"], what);
        }
    }

    fn architecture(&mut self, architecture: &Architecture) {
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
                    "{response} leaves no room for a prompt: the recipe names no model, and the model of its \
                     [model.architecture] has a context of {} tokens; name yours with model.path, lower this key, or raise \
                     model.architecture.max_position_embeddings",
                    a.max_position_embeddings
                ),
            );
        }
    }

    fn harmony(&mut self) {
        let harmony = &self.recipe.harmony;
        if let Some(month) = harmony.knowledge_cutoff.as_ref().filter(|month| !is_date(month, 2)) {
            let what = format!("{month:?} is not a month; write it as YYYY-MM, such as \"2024-06\"");
            self.refuse(&["harmony.knowledge_cutoff"], what);
        }
        if let Some(date) = &harmony.current_date
            && !is_date(date, 3)
        {
            let what = format!("{date:?} is not a date; write it as YYYY-MM-DD, such as \"2025-06-28\"");
            self.refuse(&["harmony.current_date"], what);
        }
    }

    fn task(&mut self) {
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
                (true, None) => self.refuse(
                    &[key, "task.name"],
                    format!("missing, and the task {} reads its problems from it; name the file", task.name),
                ),
                (true, Some(file)) => self.check_file(key, file),
                (false, Some(_)) => self.refuse(
                    &[key, "task.name"],
                    format!("the task {} makes its own problems; remove the key", task.name),
                ),
                (false, None) => {}
            }
            if !task.name.reads_files && rows.is_some() {
                self.refuse(
                    &[rows_key, "task.name"],
                    format!("the task {} reads no rows; remove the key", task.name),
                );
            }
        }
        if may_have_several_files {
            for file in &task.validation_files {
                self.check_file("task.validation_files", file);
            }
        }
        self.refuse_keys_of_other_tasks();
    }

    /// Refuses keys that only other tasks read.
    fn refuse_keys_of_other_tasks(&mut self) {
        let task = &self.recipe.task;
        for entry in changed_entries(task) {
            let key = entry.path();
            let readers = TaskName::all().into_iter().filter(|task| task.keys.contains(&key));
            let readers: Vec<&str> = readers.map(TaskName::name).collect();
            if !readers.is_empty() && !readers.contains(&task.name.name) {
                let what = format!(
                    "only the task {} reads this, and task.name is {}; remove one of the two",
                    readers.join(" or "),
                    task.name
                );
                self.refuse(&[&format!("task.{key}"), "task.name"], what);
            }
        }
        let has_command = task.name.keys.contains(&"command");
        if has_command && task.command.first().is_none_or(String::is_empty) {
            let what = "missing, and the task command runs it; write a program and its arguments, such as \
                        [\"python3\", \"my_task.py\"]";
            self.refuse(&["task.command", "task.name"], what);
        }
    }

    /// Checks that a file exists.
    fn check_file(&mut self, key: &str, file: &Path) {
        if file.is_dir() {
            let what = format!("{} is a folder; name a file{}", file.display(), files_in(file));
            self.refuse(&[key], what);
        } else if !file.is_file() {
            let data = self.recipe.task.name.data;
            let remedy = match key {
                "task.train_file" | "task.validation_file" | "task.validation_files" if !data.is_empty() => {
                    format!("fetch the data with rloss fetch {data}, or name another file")
                }
                _ => "name a file that is there".to_owned(),
            };
            let remedy = self.beside_recipe(key, file).unwrap_or(remedy);
            self.refuse(&[key], format!("no file at {}; {remedy}", file.display()));
        }
    }

    /// Returns the remedy if the file of `key` lies relative to the recipe's folder, not to the working
    /// directory.
    fn beside_recipe(&self, key: &str, file: &Path) -> Option<String> {
        let SourceLocation::File { path, .. } = self.key_locations.of(key) else { return None };
        let folder = std::path::absolute(path).ok()?.parent()?.to_owned();
        let relative = file.strip_prefix(std::env::current_dir().ok()?).ok()?;
        folder.join(relative).is_file().then(|| {
            format!(
                "relative paths count from the working directory, and {} has it: run there",
                folder.display()
            )
        })
    }

    fn interpreter(&mut self) {
        let interpreter = &self.recipe.interpreter;
        if interpreter.wall_clock_s <= interpreter.time_limit_s {
            self.refuse(
                &["interpreter.wall_clock_s", "interpreter.time_limit_s"],
                format!(
                    "{} must be above interpreter.time_limit_s, {}: the kill is the backstop of the interpreter's own limit; raise it",
                    interpreter.wall_clock_s, interpreter.time_limit_s
                ),
            );
        }
        if interpreter.scratch_mib > 0 && interpreter.kind == InterpreterKind::Embedded {
            self.refuse(
                &["interpreter.scratch_mib"],
                "only kind = \"cpython\" can write files; set it to 0".to_owned(),
            );
        }
        if interpreter.dangerously_allow_unsandboxed {
            self.warn(
                &["interpreter.dangerously_allow_unsandboxed"],
                "where the system has no sandbox, code from the model runs without one",
            );
        }
    }

    fn rollout(&mut self) {
        let rollout = &self.recipe.rollout;
        let truncations = [
            ("rollout.top_p", rollout.top_p != 1.0, "1"),
            ("rollout.top_k", rollout.top_k != 0, "0"),
            ("rollout.min_p", rollout.min_p != 0.0, "0"),
        ];
        for (key, is_enabled, off) in truncations {
            if is_enabled {
                self.refuse(
                    &[key],
                    format!(
                        "sampling for training may not leave tokens out: after one update the kept set moves, and importance \
                         ratios become 0 or infinite; write {off}, and use the same key of [eval] for evaluation"
                    ),
                );
            }
        }
        let advantage = self.recipe.policy.advantage;
        let single_sample = match advantage {
            Advantage::Grpo | Advantage::DrGrpo | Advantage::Rloo | Advantage::Maxrl | Advantage::Opo => {
                Some("keeps its raw reward as advantage")
            }
            Advantage::GrpoBatchStd | Advantage::ReinforcePlusPlusBaseline => {
                Some("has no mean to be compared with")
            }
            _ => None,
        };
        let train = &self.recipe.train;
        let samples =
            train.steps > 0 && train.trajectories.is_none() && self.scope != KeyScope::TrainStoredRun;
        if let (1, Some(effect), true) = (rollout.samples_per_prompt, single_sample, samples) {
            self.refuse(
                &["rollout.samples_per_prompt", "policy.advantage"],
                format!(
                    "a group of one {effect} under {advantage}; give 2 or more, or an advantage without groups such as \
                     \"reinforce_plus_plus\""
                ),
            );
        }
    }

    fn cold_start(&mut self) {
        let cold_start = &self.recipe.cold_start;
        let files = [
            ("cold_start.train_file", &cold_start.train_file),
            ("cold_start.validation_file", &cold_start.validation_file),
        ];
        for (key, file) in files {
            if let Some(file) = file {
                self.check_file(key, file);
            }
        }
        self.optimizer("cold_start.optimizer", &cold_start.optimizer, "cold_start.steps", cold_start.steps);
    }

    fn train(&mut self) {
        let train = &self.recipe.train;
        self.optimizer("train.optimizer", &train.optimizer, "train.steps", train.steps);
        if let Some(file) = &train.trajectories {
            self.check_file("train.trajectories", file);
        }
        self.check_patterns("train.freeze", &train.freeze, "*.self_attn.*");
    }

    fn optimizer(&mut self, table: &str, optimizer: &OptimizerSettings, steps_key: &str, steps: u64) {
        if optimizer.momentum > 0.0 && optimizer.kind != OptimizerKind::Sgd {
            let what = format!(
                "only kind = \"sgd\" has a momentum, and {table}.kind is \"{}\", whose first moment decays by beta1; remove \
                 one of the two",
                optimizer.kind
            );
            self.refuse(&[&format!("{table}.momentum"), &format!("{table}.kind")], what);
        }
        let warmup = optimizer.warmup_steps;
        if steps > 0 && warmup >= steps {
            self.warn(
                &[&format!("{table}.warmup_steps"), steps_key],
                format!(
                    "the warm-up of {warmup} step{} does not end within the {steps} of {steps_key}",
                    if warmup == 1 { "" } else { "s" }
                ),
            );
        }
    }

    fn ablations(&mut self) {
        for (name, description) in self.recipe.arms.list_enabled() {
            self.warn(&[&format!("arms.{name}")], format!("a failure is switched on. {description}"));
        }
    }

    fn eval(&mut self) {
        let eval = &self.recipe.eval;
        for (i, &k) in eval.pass_at.iter().enumerate() {
            if k > eval.samples {
                self.refuse(
                    &["eval.pass_at", "eval.samples"],
                    format!(
                        "pass@{k} needs at least {k} samples, and eval.samples is {}; raise it",
                        eval.samples
                    ),
                );
            }
            if eval.pass_at[..i].contains(&k) {
                self.refuse(&["eval.pass_at"], format!("{k} is there twice; remove one"));
            }
        }
        if eval.temperature == 0.0 && eval.samples > 1 {
            self.refuse(
                &["eval.samples", "eval.temperature"],
                format!("at temperature 0 all {} samples of a problem are the same; write 1, or raise eval.temperature", eval.samples),
            );
        }
    }
}

/// Maximum number of files of a folder that a message names.
const FILES_SHOWN_MAX: usize = 5;

/// Returns the names of the data files in `folder` for a message.
fn files_in(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| [".jsonl", ".jsonl.gz"].iter().any(|kind| name.ends_with(kind)))
        .collect();
    names.sort();
    names.truncate(FILES_SHOWN_MAX);
    if names.is_empty() { " of JSON lines".to_owned() } else { format!(" in it: {}", names.join(", ")) }
}

/// Returns true when `text` is the first `parts` parts of a valid date YYYY-MM-DD.
fn is_date(text: &str, parts: usize) -> bool {
    let day = if parts == 2 { format!("{text}-01") } else { text.to_owned() };
    let date: Option<toml::value::Datetime> = day.parse().ok();
    date.is_some_and(|date| date.date.is_some() && date.time.is_none())
}
