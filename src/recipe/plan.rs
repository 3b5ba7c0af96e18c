//! Resolution of a recipe: from its text to a complete and checked [`Plan`].

use super::Recipe;
use super::base;
use super::key_scope::KeyScope;
use super::other_trainers::{TABLES, find_name};
use super::removed_keys::{blank_removed_keys, removed_key_error};
use super::rules::{self, Findings};
use crate::bad_input;
use crate::chat::{SystemPromptSettings, ToolForm};
use crate::checkpoint::hub;
use crate::model::settings::{Architecture, Tokenizer};
use crate::policy::advantage::Advantage;
use crate::settings::{
    Entry, KeyLocations, Mistake, Mistakes, Origin, ParsedKey, Reader, SourceLocation, entries,
};
use crate::tasks::{OnFailure, Task, TaskSettings};
use std::path::Path;
use toml::Spanned;
use toml::de::DeTable;

/// A resolved recipe. Every default is filled in, every path is absolute, and there is no contradiction.
#[derive(Debug, Clone)]
pub struct Plan {
    pub recipe: Recipe,
    /// Settings that are allowed but probably not intended: one line each, with the location.
    pub warnings: Vec<String>,
    /// The keys that the command reads.
    pub scope: KeyScope,
    /// Whether this is the resolved recipe of a run folder, which also has the keys of its bases.
    is_of_run: bool,
    locations: KeyLocations,
}

/// Resolves the recipe `text` for a command that reads every key. See [`resolve_for`].
///
/// # Errors
/// The errors of [`resolve_for`].
pub fn resolve(path: &Path, text: &str, sets: &[String]) -> Result<Plan, Mistakes> {
    resolve_for(KeyScope::Train, path, text, sets)
}

/// Reads the recipe `text` of the file `path` and its bases, applies each `--set key=value`, and checks the
/// result.
///
/// # Errors
/// All mistakes at once: syntax, unknown key, wrong type, value out of range, contradiction, missing file. If
/// a base cannot be read, contradictions are not checked. Contradictions and missing files are ignored if
/// their keys are outside `scope`.
pub fn resolve_for(scope: KeyScope, path: &Path, text: &str, sets: &[String]) -> Result<Plan, Mistakes> {
    let mut recipe = Recipe::default();
    let known: Vec<String> = recipe.entries().iter().map(|entry| entry.path().to_owned()).collect();
    let (mut locations, mut mistakes, mut unreliable_keys) =
        (KeyLocations::new(path), Mistakes::default(), Vec::new());
    let mut read = |origin: Origin, text: &str, base_error: Option<&str>| {
        // A recipe for another task than its base's has no use for the keys of the base's task.
        if matches!(origin, Origin::File(_))
            && task_name(text).is_some_and(|name| name != recipe.task.name.name)
        {
            recipe.task = TaskSettings::default();
            locations.forget(|key| is_in_table(key, "task"));
        }
        let line_ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let mut reader = Reader {
            locations: &mut locations,
            mistakes: &mut mistakes,
            unreliable_keys: &mut unreliable_keys,
            known: &known,
            origin,
            text,
            removed_key: removed_key_error,
            other_trainer_key: find_name,
            other_trainer_tables: &TABLES,
            line_ends: &line_ends,
        };
        read_text(&mut recipe, &mut reader, base_error);
    };
    let mut set_mistakes = Vec::new();
    let bases = base::read_all(path, text);
    // The error belongs to the file that is read first: the last one of the chain.
    let mut error = bases.error.as_deref();
    for base in bases.chain.iter().rev() {
        read(Origin::File(&base.file), &base.text, error.take());
    }
    read(Origin::File(path), text, error);
    for (index, set) in sets.iter().enumerate() {
        match set_document(set) {
            Some(text) => read(
                Origin::Set(index),
                &text,
                Some(
                    "cannot be set here; write the base into the recipe file, or give that recipe as the argument",
                ),
            ),
            None => {
                let message = format!("{set:?} is not key=value; write it like --set train.steps=80");
                set_mistakes.push(Mistake {
                    location: SourceLocation::Set(index),
                    key: String::new(),
                    message,
                });
            }
        }
    }
    mistakes.listed.append(&mut set_mistakes);
    let is_set =
        |table: &str| sets.iter().filter_map(|set| override_key(set)).any(|key| is_in_table(key, table));
    // The steps of an override take the place of the recipe's epochs.
    if is_set("train.steps") && !is_set("train.data_epochs") {
        recipe.train.data_epochs = None;
    }
    if is_set("model.path") && !is_set("model.architecture") && !is_set("model.tokenizer") {
        // A folder replaces the recipe's model, for example by another checkpoint. It defines the whole
        // model.
        (recipe.model.architecture, recipe.model.tokenizer) = (None, None);
        if !is_set("model.adapter") {
            recipe.model.adapter = None;
        }
    } else if recipe.model.path.is_some() && !locations.is_from_base("model.path") {
        // A recipe's folder replaces the model of its base.
        if locations.is_from_base("model.architecture") {
            recipe.model.architecture = None;
        }
        if locations.is_from_base("model.tokenizer") {
            recipe.model.tokenizer = None;
        }
    }
    if let Some(path) = recipe.model.path.as_ref().filter(|path| !path.exists()) {
        recipe.model.path = hub::find(path).or_else(|| Some(path.clone()));
    }
    if recipe.model.path.is_none() {
        recipe.model.architecture.get_or_insert_with(Architecture::default);
        recipe.model.tokenizer.get_or_insert(Tokenizer::Embedded);
    }
    let embedded = recipe.model.tokenizer == Some(Tokenizer::Embedded);
    recipe.chat.system_message.get_or_insert(!embedded);
    recipe.task.fill_defaults();
    if recipe.policy.advantage == Advantage::Gae {
        recipe.critic.get_or_insert_default();
    }
    // If a base cannot be read completely, rules would report missing keys that the base may have.
    let is_in_base = |location: &SourceLocation| matches!(location, SourceLocation::File { path: file, .. } if file != path);
    let is_base_incomplete = bases.error.is_some()
        || mistakes.listed.iter().any(|mistake| mistake.key.is_empty() && is_in_base(&mistake.location));
    let findings = match is_base_incomplete {
        false => rules::check(&recipe, &locations, &unreliable_keys, scope),
        true => Findings::default(),
    };
    mistakes.listed.extend(findings.mistakes);
    let renamed = locations.is_written(CHAT_KEY_BEFORE).then(|| Mistake {
        location: locations.location_of(CHAT_KEY_BEFORE),
        key: CHAT_KEY_BEFORE.to_owned(),
        message: format!("this table is called [{CHAT_KEY}] now; the old name is read"),
    });
    if mistakes.listed.is_empty() {
        return Ok(Plan {
            recipe,
            warnings: renamed.iter().chain(&findings.warnings).map(Mistake::to_string).collect(),
            scope,
            is_of_run: false,
            locations,
        });
    }
    mistakes.listed.sort();
    Err(mistakes)
}

/// Resolves the recipe of a run folder. An older version of the program may have written it.
///
/// # Errors
/// The errors of [`resolve_for`].
pub fn resolve_run_recipe(
    scope: KeyScope,
    path: &Path,
    text: &str,
    sets: &[String],
) -> Result<Plan, Mistakes> {
    let mut plan = resolve_for(scope, path, &blank_removed_keys(text), sets)?;
    // Runs before this key trained on failures, and a resume must not differ.
    if !plan.is_written("task.on_failure") {
        plan.recipe.task.on_failure = OnFailure::Zero;
    }
    Ok(Plan { is_of_run: true, ..plan })
}

/// The table of the system prompt, and its name before other families had it. Both are read.
const CHAT_KEY: &str = "chat";
const CHAT_KEY_BEFORE: &str = "harmony";

/// Maximum number of syntax mistakes that are reported individually.
const SYNTAX_ERRORS_MAX: usize = 10;

/// Reads the valid part of a text. Keys on a line with a syntax mistake are ignored.
fn read_text(recipe: &mut Recipe, reader: &mut Reader, base_error: Option<&str>) {
    let text = reader.text;
    let (document, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return read_document(recipe, reader, document.into_inner(), base_error);
    }
    let start = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
    let is_table = |key: &&String| reader.known.iter().any(|other| is_in_table(other, key) && other != *key);
    let tables: Vec<&str> =
        reader.known.iter().filter(|key| !key.contains('.')).filter(is_table).map(String::as_str).collect();
    let looks_like_recipe = document.get_ref().keys().any(|name| tables.contains(&name.get_ref().as_ref()));
    // Syntax mistakes in a recipe are reported individually. A text that is not a recipe counts as one
    // mistake.
    if let [first, rest @ ..] = errors.as_slice()
        && (rest.len() >= SYNTAX_ERRORS_MAX || (!rest.is_empty() && !looks_like_recipe))
    {
        let message = format!(
            "not TOML: {}, and {} more; is this a recipe? A recipe has tables such as [{}]",
            first.message(),
            rest.len(),
            tables.join("], [")
        );
        return reader.refuse_syntax(start(first), message);
    }
    for error in &errors {
        reader.refuse_syntax(start(error), format!("not TOML: {}", syntax_error(error, text)));
    }
    let broken: Vec<_> = reader.mistakes.listed.iter().map(|mistake| mistake.location.clone()).collect();
    let before = reader.mistakes.listed.len();
    read_document(recipe, reader, document.into_inner(), base_error);
    let read = reader.mistakes.listed.split_off(before);
    // Below an invalid table header, keys appear to be at the top level.
    let is_in_table_header = |at: usize| {
        let line = text.get(..at).map_or(0, |before| before.rfind('\n').map_or(0, |end| end + 1));
        text.get(line..).is_some_and(|line| line.trim_start().starts_with('['))
    };
    let header_is_invalid = errors.iter().map(start).any(is_in_table_header);
    let is_consequence = |mistake: &Mistake| {
        broken.contains(&mistake.location) || (header_is_invalid && !mistake.key.contains('.'))
    };
    reader.mistakes.listed.extend(read.into_iter().filter(|mistake| !is_consequence(mistake)));
}

/// Returns the message of a syntax error. For a duplicate key, the message names the key and the line of its
/// first occurrence.
fn syntax_error(error: &toml::de::Error, text: &str) -> String {
    let written = error.span().filter(|_| error.message() == "duplicate key");
    let Some(before) = written.as_ref().and_then(|span| text.get(..span.start)) else {
        return error.message().to_owned();
    };
    /// Returns the header `[table]` or the key on a line.
    fn subject(line: &str) -> Option<&str> {
        let line = line.trim();
        match line.starts_with('[') {
            true => line.find(']').map(|end| &line[..=end]),
            false => line.split_once('=').map(|(key, _)| key.trim()).filter(|key| !key.starts_with('#')),
        }
    }
    let (mut table, mut seen) = ("", vec![]);
    let last = before.matches('\n').count();
    for (number, line) in text.lines().enumerate().take(last + 1) {
        let Some(subject) = subject(line) else { continue };
        let is_header = subject.starts_with('[');
        seen.push((number, if is_header { "" } else { table }, subject));
        table = if is_header { subject } else { table };
    }
    let Some((_, around, name)) = seen.pop() else { return error.message().to_owned() };
    let first = seen.iter().find(|(_, table, subject)| (*table, *subject) == (around, name));
    let first = first.map(|(number, ..)| format!(", already on line {}", number + 1)).unwrap_or_default();
    format!("duplicate key {name}{first}; remove one of them")
}

/// Reads the tables of a document. The key `base` is accepted, or rejected with the message `base_error`.
fn read_document(recipe: &mut Recipe, reader: &mut Reader, mut document: DeTable, base_error: Option<&str>) {
    if let Some((name, value)) = document.remove_entry(base::BASE_KEY) {
        let key = ParsedKey { path: base::BASE_KEY.to_owned(), name: name.span(), value: &value };
        if let Some(error) = base_error { reader.refuse(&key, error.to_owned()) } else { reader.accept(&key) }
    }
    if let Some((name, value)) = document.remove_entry(CHAT_KEY_BEFORE) {
        let key = ParsedKey { path: CHAT_KEY_BEFORE.to_owned(), name: name.span(), value: &value };
        match document.contains_key(CHAT_KEY) {
            true => reader.refuse(&key, format!("[{CHAT_KEY}] is written too; move these keys there")),
            false => {
                reader.accept(&key);
                document.insert(Spanned::new(name.span(), CHAT_KEY.into()), value);
            }
        }
    }
    reader.read_keys(recipe, "", &document);
}

/// Returns the key of `key=value`.
pub fn override_key(set: &str) -> Option<&str> {
    set.split_once('=').map(|(key, _)| key.trim())
}

/// Returns whether `key` is `table` or a key below it.
pub(super) fn is_in_table(key: &str, table: &str) -> bool {
    key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns `task.name` of a recipe's text, if it can be read.
fn task_name(text: &str) -> Option<String> {
    let recipe: toml::Table = text.parse().ok()?;
    Some(recipe.get("task")?.get("name")?.as_str()?.to_owned())
}

/// Converts `key=value` to a TOML document. `None` if that fails. A value that is not TOML becomes a
/// string, so that strings need no quotes.
fn set_document(set: &str) -> Option<String> {
    let (key, value) = set.split_once('=')?;
    if key.trim_start().starts_with(['[', '#']) || DeTable::parse(&format!("{key}=0")).is_err() {
        return None;
    }
    let one_line = !value.contains(['\n', '\r']);
    let is_toml = one_line && DeTable::parse(set).is_ok();
    Some(if is_toml {
        set.to_owned()
    } else {
        format!("{key}={}", toml::Value::String(value.trim().to_owned()))
    })
}

impl From<Mistake> for anyhow::Error {
    fn from(mistake: Mistake) -> anyhow::Error {
        bad_input!("{mistake}")
    }
}

impl From<Mistakes> for anyhow::Error {
    fn from(mistakes: Mistakes) -> anyhow::Error {
        bad_input!("{mistakes}")
    }
}

impl Plan {
    /// Returns the recipe as TOML with every default. The text resolves to the same recipe.
    pub fn to_toml(&self) -> String {
        self.recipe.to_toml()
    }

    /// Returns whether a base of the recipe or, in a run folder, its resolved recipe sets `key`, and no
    /// override does.
    pub fn is_inherited(&self, key: &str) -> bool {
        match self.is_of_run {
            true => matches!(self.locations.location_of(key), SourceLocation::File { .. }),
            false => self.locations.is_from_base(key),
        }
    }

    /// Returns whether the command reads `key`.
    pub fn reads(&self, key: &str) -> bool {
        self.scope.reads(key)
    }

    /// Returns whether `key` itself was written.
    pub fn is_written(&self, key: &str) -> bool {
        self.locations.is_written(key)
    }

    /// Returns a mistake with the location of `key`, for mistakes that are found after resolution: in the
    /// model, the data or the machine.
    pub fn mistake(&self, key: &str, message: String) -> Mistake {
        Mistake { location: self.locations.location_of(key), key: key.to_owned(), message }
    }
}

impl Recipe {
    /// Returns whether the recipe trains, by SFT warm-up or by reinforcement learning.
    pub fn trains(&self) -> bool {
        self.train.steps > 0 || self.cold_start.steps > 0
    }

    /// Returns whether `task` has the Python tool.
    pub fn uses_python(&self, task: &dyn Task) -> bool {
        match self.interpreter.form {
            ToolForm::Call => task.uses_python(),
            ToolForm::Fence | ToolForm::CodeTags => true,
            ToolForm::None => false,
        }
    }

    /// Returns whether the system prompt declares the Python tool in the chat format.
    pub fn declares_python(&self, task: &dyn Task) -> bool {
        self.interpreter.form == ToolForm::Call && task.uses_python()
    }

    /// Returns the settings of the system prompt, with the text that offers the tool in another form.
    pub fn prompt_settings(&self) -> SystemPromptSettings {
        let form = self.interpreter.form;
        let offer = self.interpreter.instructions.as_deref().or(form.instructions());
        let own = self.chat.developer_instructions.as_deref();
        let text: Vec<&str> =
            own.into_iter().chain(offer.filter(|text| form.runs_text() && !text.is_empty())).collect();
        let developer_instructions = (!text.is_empty()).then(|| text.join("\n\n"));
        SystemPromptSettings { developer_instructions, ..self.chat.clone() }
    }

    /// Returns the maximum number of characters of all replies to the calls of a turn of `task`. `has_python`
    /// tells whether the task has the Python tool. `None` without tools.
    pub fn reply_chars_max(&self, task: &dyn Task, has_python: bool) -> Option<usize> {
        let python = has_python.then_some(self.interpreter.output_chars_max);
        python.max(task.reply_chars_max())
    }

    /// Returns every table and key, in the order of declaration, with this recipe's values.
    pub fn entries(&self) -> Vec<Entry> {
        entries(self)
    }

    /// Returns the recipe as TOML with every value.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for entry in self.entries() {
            match entry {
                Entry::Table { path, present: true, .. } => {
                    let gap = if text.is_empty() { "" } else { "\n" };
                    text.push_str(&format!("{gap}[{path}]\n"));
                }
                Entry::Key { path, value: Some(value), .. } => {
                    let key = path.rsplit('.').next().unwrap_or(&path);
                    text.push_str(&format!("{key} = {value}\n"));
                }
                Entry::Table { present: false, .. } | Entry::Key { value: None, .. } => {}
            }
        }
        text
    }
}

/// Returns the keys in which a run and its continuation differ. Some keys may differ and are left out:
/// `train.steps`, `train.on_bad_step`, the ends of schedules, evaluation, logging, parallelism, checkpoints,
/// device, and the keys that only save memory.
pub fn resume_differences(old: &Plan, new: &Plan) -> Vec<String> {
    let may_differ = |key: &str| {
        const KEYS: &str = "device rollout.sequences_max train.recompute_layers train.steps \
            train.on_bad_step train.optimizer.schedule_steps critic.optimizer.schedule_steps";
        // The default of this key depends on the model's vocabulary, which is read later.
        let is_default = key == "chat.system_message" && !new.is_written(key);
        is_default
            || KEYS.split(' ').any(|other| other == key)
            || ["eval.", "logging.", "parallel.", "checkpoint."].iter().any(|table| key.starts_with(table))
    };
    let pairs = old.recipe.entries().into_iter().zip(new.recipe.entries());
    pairs
        .filter(|(old, new)| matches!(old, Entry::Key { .. }) && old != new)
        .map(|(old, _)| old.path().to_owned())
        .filter(|key| !may_differ(key))
        .collect()
}
