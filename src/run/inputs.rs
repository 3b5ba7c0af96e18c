//! The inputs of a run and their digests: data files, task programs, tokenizer and chat template. A resume
//! compares them with `inputs.b3` in the run folder.
//!
//! `inputs.b3` names an input by its recipe key, so a moved file with the same content is the same input.

use crate::bad_input;
use crate::bounded_file::{self, DATA_BYTES_MAX};
use crate::checkpoint::save::template_in;
use crate::integrity::{Manifest, file_digest};
use crate::metrics::Console;
use crate::recipe::Recipe;
use crate::settings::Entry;
use anyhow::Result;
use blake3::{Hash, Hasher};
use flate2::read::MultiGzDecoder;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub const INPUTS_FILE: &str = "inputs.b3";

/// The recipe keys that name inputs, and whether their words are data files. The other keys are programs with
/// their arguments.
pub(super) const INPUT_KEYS: [(&str, bool); 9] = [
    ("model.tokenizer", true),
    ("task.train_file", true),
    ("task.validation_file", true),
    ("task.validation_files", true),
    ("task.command", false),
    ("tools.mcp.command", false),
    ("train.trajectories", true),
    ("cold_start.train_file", true),
    ("cold_start.validation_file", true),
];

/// Device, inode, length and times of the last changes. If they stay the same, so did the content.
type FileState = (u64, u64, u64, [i64; 4]);

/// The digests of a run's inputs.
#[derive(Default)]
pub struct Inputs {
    digests: Manifest,
    /// The path or the word of each input, for messages.
    words: BTreeMap<String, String>,
    /// The files that were read, with their states before.
    states: Vec<(PathBuf, FileState)>,
    /// The changes that the user accepted, for `warnings.jsonl`.
    pub(super) accepted: Option<String>,
}

impl Inputs {
    /// Reads the inputs of `recipe`. A word of a program that names no file has the digest of its text.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    pub fn read(recipe: &Recipe, console: &Console) -> Result<Self> {
        let _stage = console.start_inner_stage("reading the digests of data and programs", 0);
        let mut inputs = Self::default();
        for entry in recipe.entries() {
            let Entry::Key { path: key, value: Some(value), .. } = &entry else { continue };
            let Some((_, is_data)) = INPUT_KEYS.iter().find(|(name, _)| name == key) else { continue };
            for (name, word) in named_words(key, value) {
                let mut path = PathBuf::from(&word);
                if path.is_dir() && path.join("tokenizer.json").is_file() {
                    path.push("tokenizer.json");
                }
                match path.is_absolute() && path.is_file() {
                    true => inputs.add_file(&name, &path, *is_data)?,
                    false => inputs.add(&name, blake3::hash(word.as_bytes()), word),
                }
            }
        }
        if let Some(model) = recipe.model.path.as_ref().filter(|model| model.is_dir()) {
            let tokenizer = model.join("tokenizer.json");
            if tokenizer.is_file() {
                inputs.add_file("tokenizer.json", &tokenizer, false)?;
            }
            if let Some(template) = template_in(model) {
                inputs.add("chat_template", blake3::hash(&template), model.display().to_string());
            }
        }
        Ok(inputs)
    }

    fn add(&mut self, name: &str, digest: Hash, word: String) {
        self.digests.record(name, digest);
        self.words.insert(name.to_owned(), word);
    }

    /// Adds the whole file, also if the run reads only its first rows. A data file ending in `.gz` has the
    /// digest of its unpacked content.
    fn add_file(&mut self, name: &str, path: &Path, is_data: bool) -> Result<()> {
        let unreadable =
            |e: io::Error| bad_input!("{name}: {}: cannot be read: {e}; make it readable", path.display());
        self.states.push((path.to_owned(), state(path).map_err(unreadable)?));
        let is_packed = is_data && path.extension().is_some_and(|end| end == "gz");
        // A file with a damaged end may have all rows that the run reads.
        let unpacked = if is_packed { unpacked_digest(path).ok() } else { None };
        let digest = unpacked.map_or_else(|| file_digest(path, None), Ok).map_err(unreadable)?;
        self.add(name, digest, path.display().to_string());
        Ok(())
    }

    /// Checks that no file has changed since its digest was read. Called after the run has read the files.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the first file that has changed.
    pub fn check_unchanged(&self) -> Result<()> {
        match self.states.iter().find(|(path, before)| state(path).ok() != Some(*before)) {
            None => Ok(()),
            Some((path, _)) => Err(bad_input!(
                "{}: was changed while the run started; repeat the command when the file is complete",
                path.display()
            )),
        }
    }

    /// Returns the content of `inputs.b3`.
    pub fn text(&self) -> String {
        self.digests.text(INPUTS_FILE)
    }

    /// Reads the digests in the run folder `run`; `None` if an older version made the folder.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is damaged.
    pub fn stored(run: &Path) -> Result<Option<Manifest>> {
        Manifest::read_file(&run.join(INPUTS_FILE)).map_err(|error| {
            bad_input!("{error:#}; restore the file, or remove it to resume without a comparison")
        })
    }

    /// Compares the inputs with those of the run in `run`. Returns lines for the console. Without stored
    /// digests, `warnings` gets a line.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names every change, unless the user `accepts` changes.
    pub(super) fn compare(
        &mut self,
        run: &Path,
        accepts: bool,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<String>> {
        let shown = run.display();
        let Some(before) = Self::stored(run)? else {
            warnings.push(format!(
                "{shown}: has no {INPUTS_FILE}, so nobody can tell whether data or programs changed before this resume; it gets \
                 the file now"
            ));
            return Ok(vec![]);
        };
        let place = |name: &str| self.words.get(name).map(|word| format!(" ({word})")).unwrap_or_default();
        let change = |name: &str| match (before.get(name), self.digests.get(name)) {
            (Some(old), Some(new)) if old == new => None,
            (Some(_), Some(_)) => Some(format!("{name}{} was changed", place(name))),
            (None, _) => Some(format!("{name}{} was added", place(name))),
            (_, None) => Some(format!("{name} was removed")),
        };
        let added = self.digests.names().filter(|name| before.get(name).is_none());
        let changes: Vec<String> = before.names().chain(added).filter_map(change).collect();
        if changes.is_empty() {
            return Ok(vec![]);
        }
        let changes = changes.join("; ");
        if !accepts {
            return Err(bad_input!(
                "{shown}: the run started with other inputs: {changes}. Restore them; or resume with --accept-changes, which \
                 {shown} records; or start another run with --out"
            ));
        }
        let line = format!("resumed with changed inputs: {changes}");
        self.accepted = Some(line.clone());
        Ok(vec![format!("warning: {line}")])
    }

    /// Returns overrides that give the recipe of the run in `run` the paths of `recipe`, because the digests
    /// identify the inputs.
    ///
    /// # Errors
    /// The errors of [`Self::stored`].
    pub(super) fn overrides(run: &Path, recipe: &Recipe) -> Result<Vec<String>> {
        let Some(before) = Self::stored(run)? else { return Ok(vec![]) };
        let is_stored = |key: &str| before.names().any(|name| name.split('[').next() == Some(key));
        let of = |entry: Entry| match entry {
            Entry::Key { path, value: Some(value), .. } => Some((path, value)),
            _ => None,
        };
        let keys = recipe.entries().into_iter().filter_map(of);
        let keys = keys.filter(|(key, _)| INPUT_KEYS.iter().any(|(name, _)| name == key) && is_stored(key));
        Ok(keys.map(|(key, value)| format!("{key}={value}")).collect())
    }
}

/// Returns the words in the TOML `value` of `key`, each with a name: the key or, in a list, `key[index]`.
fn named_words(key: &str, value: &str) -> Vec<(String, String)> {
    let text = |value: &toml::Value| value.as_str().unwrap_or_default().to_owned();
    let table: toml::Table = format!("v = {value}").parse().unwrap_or_default();
    match table.get("v") {
        Some(toml::Value::Array(words)) => {
            let named = |(index, word)| (format!("{key}[{index}]"), text(word));
            words.iter().enumerate().map(named).collect()
        }
        Some(word) => vec![(key.to_owned(), text(word))],
        None => vec![],
    }
}

/// Returns the digest of an unpacked file, up to the maximum that a run reads.
fn unpacked_digest(path: &Path) -> io::Result<Hash> {
    let file = BufReader::new(bounded_file::open(path, u64::MAX)?);
    let unpacked = MultiGzDecoder::new(file).take(DATA_BYTES_MAX);
    Ok(Hasher::new().update_reader(unpacked)?.finalize())
}

fn state(path: &Path) -> io::Result<FileState> {
    let file = fs::metadata(path)?;
    Ok((
        file.dev(),
        file.ino(),
        file.len(),
        [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()],
    ))
}
