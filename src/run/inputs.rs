//! The inputs of a run and their digests: data files, task programs, tokenizer and chat template. A resume
//! compares them with `inputs.b3` in the run folder.
//!
//! `inputs.b3` names an input by its recipe key, so a moved file with the same content is the same input.

use crate::atomic_file::write_file;
use crate::bad_input;
use crate::checkpoint::ResumePoint;
use crate::integrity::{Manifest, file_digest};
use crate::metrics::{Console, Warning, append_warning};
use crate::recipe::Recipe;
use crate::settings::Entry;
use crate::table_file;
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const INPUTS_FILE: &str = "inputs.b3";

/// The ends of the recipe keys that name inputs: data files, or programs with their arguments.
const KEY_ENDS: [&str; 5] = ["_file", "task.file", "_files", ".trajectories", COMMAND];
const COMMAND: &str = ".command";
/// The end of the name of a program's argument that is a file. The program may write the file, so a change is
/// said and not refused.
const ARGUMENT: &str = " argument";
/// The files of a model's folder that define the text of conversations.
const MODEL_FILES: [&str; 4] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
];

/// The digests of a run's inputs.
#[derive(Default)]
pub struct Inputs {
    digests: Manifest,
    /// The path of each input, for messages.
    paths: BTreeMap<String, PathBuf>,
    /// The warning of a resume: accepted changes, or a folder without digests.
    pub warning: Option<String>,
}

impl Inputs {
    /// Reads the inputs of `recipe`. A file has the digest of its whole content, also if the run reads only
    /// its first rows.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    pub fn read(recipe: &Recipe, console: &Console) -> Result<Self> {
        let _stage = console.start_inner_stage("reading the digests of data and programs", 0);
        let model_file = |name: &str| {
            Some((name.to_owned(), recipe.model.path.as_ref()?.join(name))).filter(|(_, path)| path.is_file())
        };
        let of_model = MODEL_FILES.into_iter().filter_map(model_file);
        let mut inputs = Self::default();
        for (name, path) in of_model.chain(values(recipe).flat_map(|(key, value)| files(&key, &value))) {
            let shown = path.display();
            let digest = file_digest(&path, None)
                .map_err(|e| bad_input!("{name}: {shown}: cannot be read: {e}; make it readable"))?;
            inputs.digests.record(&name, digest);
            inputs.paths.insert(name, path);
        }
        Ok(inputs)
    }

    /// Reads the digests in the run folder `run`; `None` if an older version made the folder.
    fn stored(run: &Path) -> Result<Option<Manifest>> {
        let stored = Manifest::read_file(&run.join(INPUTS_FILE));
        stored.map_err(|e| bad_input!("{e:#}; restore the file, or remove it to resume without a comparison"))
    }

    /// Compares the inputs with those of the run in `run`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names every change, unless the user `accepts` changes.
    pub fn compare(&mut self, run: &Path, accepts: bool) -> Result<()> {
        let Some(before) = Self::stored(run)? else {
            self.warning = Some(format!(
                "the run had no {INPUTS_FILE}, so changes of data or programs before this resume are unknown; it has the file now"
            ));
            return Ok(());
        };
        let [refused, said] = [false, true].map(|of_arguments| self.changes(&before, of_arguments));
        if !refused.is_empty() && !accepts {
            return Err(bad_input!(
                "{}: the run started with other inputs: {}; restore them, or resume with --accept-changes, which the run \
                 records, or start another run with --out",
                run.display(),
                refused.join(", ")
            ));
        }
        let changes = [refused, said].concat().join(", ");
        self.warning = (!changes.is_empty()).then(|| format!("resumed with changed inputs: {changes}"));
        Ok(())
    }

    /// Checks that no input has changed since its digest was read. Called after the run has read them.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names every change.
    pub fn check_unchanged(&self, recipe: &Recipe, console: &Console) -> Result<()> {
        let changes = Self::read(recipe, console)?.changes(&self.digests, false).join(", ");
        match changes.is_empty() {
            true => Ok(()),
            false => Err(bad_input!("changed while the run started: {changes}; repeat the command")),
        }
    }

    /// Returns the inputs that differ from the digests `before`: arguments of programs that were files
    /// before, or all others.
    fn changes(&self, before: &Manifest, of_arguments: bool) -> Vec<String> {
        let new = self.digests.names().filter(|_| !of_arguments);
        let names: BTreeSet<&str> = before.names().chain(new).collect();
        let names = names.into_iter().filter(|name| name.ends_with(ARGUMENT) == of_arguments);
        let changed = names.filter(|name| before.get(name) != self.digests.get(name));
        let path = |name| self.paths.get(name).map_or("removed".into(), |path| path.display().to_string());
        changed.map(|name| format!("{name} ({})", path(name))).collect()
    }

    /// Writes the warning and then the digests into the folder of a run that starts, or resumes from `point`.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub(super) fn write(&self, run: &Path, point: Option<&ResumePoint>) -> Result<()> {
        if let Some(text) = self.warning.clone() {
            // A later resume keeps a warning that has a step.
            let (phase, step) = point.map(|point| (point.state.phase, point.state.step)).unzip();
            append_warning(run, &Warning { phase, step, text })?;
        }
        write_file(&run.join(INPUTS_FILE), &self.digests.text(INPUTS_FILE))
    }

    /// Returns overrides that give the recipe of the run in `run` the data files of `recipe`, because digests
    /// identify them. Held-out problems may be new.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the digests are damaged.
    pub(super) fn overrides(run: &Path, recipe: &Recipe) -> Result<Vec<String>> {
        let Some(before) = Self::stored(run)? else { return Ok(vec![]) };
        let is_data = |name: &str, key: &str| !key.ends_with(COMMAND) && name.split('[').next() == Some(key);
        let is_held_out = |key: &str| key.starts_with("task.validation_file");
        let stored = values(recipe)
            .filter(|(key, _)| is_held_out(key) || before.names().any(|name| is_data(name, key)));
        Ok(stored.map(|(key, value)| format!("{key}={value}")).collect())
    }
}

/// Returns the keys of `recipe` that name inputs, with their values as TOML.
fn values(recipe: &Recipe) -> impl Iterator<Item = (String, String)> {
    let values = recipe.entries().into_iter().filter_map(|entry| match entry {
        Entry::Key { path, value, .. } => Some((path, value?)),
        Entry::Table { .. } => None,
    });
    values.filter(|(key, _)| KEY_ENDS.iter().any(|end| key.ends_with(end)))
}

/// Returns the files in the TOML `value` of `key`, each with a name: the key or, in a list, `key[index]`.
/// Of a command, the program and the first file after it, such as a script, are inputs. The others may be
/// outputs.
fn files(key: &str, value: &str) -> Vec<(String, PathBuf)> {
    let table: toml::Table = format!("v = {value}").parse().unwrap_or_default();
    let words = match table.get("v") {
        Some(toml::Value::Array(words)) => words.iter().collect(),
        word => Vec::from_iter(word),
    };
    let paths = words.iter().map(|word| PathBuf::from(word.as_str().unwrap_or_default()));
    let files: Vec<_> = (0..).zip(paths).filter(|(_, path)| path.is_absolute() && path.is_file()).collect();
    let script = files.iter().find(|(at, _)| *at > 0).map(|(at, _)| *at);
    let name = |at: usize| match value.starts_with('[') {
        false => key.to_owned(),
        true if key.ends_with(COMMAND) && at > 0 && Some(at) != script => format!("{key}[{at}]{ARGUMENT}"),
        true => format!("{key}[{at}]"),
    };
    // A name with * stands for several files.
    let first = words.first().and_then(|word| word.as_str());
    let pattern = first.filter(|word| files.is_empty() && word.contains(['*', '?']));
    let several = pattern.map(Path::new).filter(|path| path.is_absolute());
    let several = several.and_then(|path| table_file::files(path).ok()).unwrap_or_default();
    let of_several =
        |path: PathBuf| (format!("{key}[{}]", path.file_name().unwrap_or_default().to_string_lossy()), path);
    let files = files.iter().map(|(at, path)| (name(*at), path.clone()));
    files.chain(several.into_iter().map(of_several)).collect()
}
