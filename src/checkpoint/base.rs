//! The base model of an adapter. The digest of its config and weights identifies it; its folder may move.

use super::gguf::{self, is_gguf};
use super::load::weight_files;
use super::peft;
use crate::bad_input;
use crate::error::shell_quote;
use crate::integrity::{Manifest, file_digest};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The subfolder of a run folder that holds the base model of an adapter, if no other folder holds it.
pub const BASE_FOLDER: &str = "base";

/// The base model of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// The folder or the GGUF file of the model.
    pub path: PathBuf,
    /// Digest of the config and the weights, in hexadecimal.
    pub digest: String,
    /// Whether the blocks of a GGUF file have their exact values. An older version rounded them to bf16; an
    /// adapter that it trained belongs to the rounded weights.
    #[serde(default)]
    pub exact_blocks: bool,
}

impl BaseModel {
    /// Returns the model in `folder`. If the folder has a manifest, digests are read from the manifest.
    /// Otherwise they are computed from the files.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Ok(Self { digest: digest(&path)?, path, exact_blocks: true })
    }

    /// Finds the folder or GGUF file of this model. `adapter` is the folder of the adapter. Candidates are
    /// the recorded path, then [`BASE_FOLDER`] in the adapter's run folder, then `user_path`. Returns the
    /// first candidate with the recorded digest.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when no candidate has that digest.
    pub fn find(&self, adapter: &Path, user_path: Option<&Path>) -> Result<PathBuf> {
        let in_run = adapter.parent().and_then(Path::parent).map(|run| run.join(BASE_FOLDER));
        let candidates = [Some(self.path.clone()), in_run, user_path.map(Path::to_owned)];
        let mut changed = None;
        let is_model = |path: &PathBuf| path.join("config.json").is_file() || is_gguf(path);
        for candidate in candidates.into_iter().flatten().filter(is_model) {
            if peft::is_adapter_folder(&candidate) {
                continue;
            }
            if digest(&candidate)? == self.digest {
                return Ok(candidate);
            }
            changed.get_or_insert(candidate);
        }
        let adapter_text = adapter.display();
        let remedy = format!(
            "name the right base with --set model.path=BASE --set model.adapter={}",
            shell_quote(&adapter_text.to_string())
        );
        Err(match changed {
            Some(path) => bad_input!(
                "{adapter_text}: its base was changed: the adapter was trained with another config or other weights than those of {}; {remedy}",
                path.display()
            ),
            None => bad_input!("{adapter_text}: its base {} is missing; {remedy}", self.path.display()),
        })
    }
}

/// The files of a base whose weights a run holds. They must not change while it trains an adapter for them.
pub struct BaseFiles {
    model: PathBuf,
    files: Vec<(PathBuf, FileState)>,
}

/// Size, inode and time of the last change of a file.
type FileState = (u64, u64, SystemTime);

impl BaseFiles {
    /// Records the state of the files of the model in `model`, a folder or a GGUF file.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    pub fn of(model: &Path) -> Result<Self> {
        let files = match is_gguf(model) {
            true => gguf::files(model)?,
            false => weight_files(model)?.into_iter().map(|name| model.join(name)).collect(),
        };
        let with_state = |path: PathBuf| file_state(&path).map(|state| (path, state));
        Ok(Self { model: model.to_owned(), files: files.into_iter().map(with_state).collect::<Result<_>>()? })
    }

    /// Checks that the files are as they were. A file with another time and the same content is accepted.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names a file that changed.
    pub fn check(&mut self, base: &BaseModel) -> Result<()> {
        let mut changed = None;
        for (path, state) in &mut self.files {
            let now = file_state(path)?;
            if now != *state {
                (changed, *state) = (Some(path.clone()), now);
            }
        }
        match changed {
            Some(path) if digest(&self.model)? != base.digest => Err(bad_input!(
                "{}: was changed while the run trains an adapter for its weights; restore the file and resume the run",
                path.display()
            )),
            _ => Ok(()),
        }
    }
}

fn file_state(path: &Path) -> Result<FileState> {
    let state = || {
        let metadata = std::fs::metadata(path)?;
        Ok((metadata.len(), metadata.ino(), metadata.modified()?))
    };
    state().map_err(|e: std::io::Error| {
        bad_input!(
            "{}: cannot be read: {e}; the run trains an adapter for its weights; restore the file and resume the run",
            path.display()
        )
    })
}

/// Returns the digest of the config and the weights in `folder`, or of a GGUF file, in hexadecimal.
fn digest(folder: &Path) -> Result<String> {
    let of_file = |file: &Path| {
        file_digest(file, None).map_err(|e| bad_input!("{}: cannot be read: {e}", file.display()))
    };
    if is_gguf(folder) {
        let mut all = blake3::Hasher::new();
        for file in gguf::files(folder)? {
            all.update(of_file(&file)?.as_bytes());
        }
        return Ok(all.finalize().to_hex().to_string());
    }
    let known = Manifest::read(folder)?.unwrap_or_default();
    let mut lines = String::new();
    for name in std::iter::once("config.json".to_owned()).chain(weight_files(folder)?) {
        let digest = known.get(&name).map_or_else(|| of_file(&folder.join(&name)), Ok)?;
        lines.push_str(&format!("{digest}  {name}\n"));
    }
    Ok(blake3::hash(lines.as_bytes()).to_hex().to_string())
}
