//! The base model of an adapter. It is identified by the digest of its files, not by its name.

use super::gguf::{self, is_gguf};
use super::load::weight_files;
use super::peft;
use crate::bad_input;
use crate::error::shell_quote;
use crate::integrity::{Manifest, file_digest};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The run's subfolder for a base model that is in no other folder.
pub const BASE_FOLDER: &str = "base";

/// The base model of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// The folder or the GGUF file of the model.
    pub path: PathBuf,
    /// Digest of config and weights, hexadecimal.
    pub digest: String,
}

impl BaseModel {
    /// Returns the model in `folder`. Digests come from its manifest if it has one, else its files are
    /// read.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Ok(Self { digest: digest(&path)?, path })
    }

    /// Finds the folder of the base of the adapter in `adapter`. It tries the recorded folder, then the
    /// adapter's run, then `user_path`. The first folder with the recorded digest is returned.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when no folder has that digest.
    pub fn find(&self, adapter: &Path, user_path: Option<&Path>) -> Result<PathBuf> {
        let in_run = adapter.parent().and_then(Path::parent).map(|run| run.join(BASE_FOLDER));
        let places = [Some(self.path.clone()), in_run, user_path.map(Path::to_owned)];
        let mut changed = None;
        let holds_model = |place: &PathBuf| place.join("config.json").is_file() || is_gguf(place);
        for place in places.into_iter().flatten().filter(holds_model) {
            if peft::is_adapter_folder(&place) {
                continue;
            }
            if digest(&place)? == self.digest {
                return Ok(place);
            }
            changed.get_or_insert(place);
        }
        let shown = adapter.display();
        let remedy = format!(
            "name the right one with --set model.path=BASE --set model.adapter={}",
            shell_quote(&shown.to_string())
        );
        Err(match changed {
            Some(place) => bad_input!(
                "{shown}: its base was changed: config or weights of {} are not those that the adapter was trained on; {remedy}",
                place.display()
            ),
            None => bad_input!("{shown}: its base {} is gone; {remedy}", self.path.display()),
        })
    }
}

/// Returns the digest of the config and the weights in `folder`, or of a GGUF file, hexadecimal.
fn digest(folder: &Path) -> Result<String> {
    if is_gguf(folder) {
        let mut all = blake3::Hasher::new();
        for file in gguf::files(folder)? {
            let digest = file_digest(&file, None);
            let digest = digest.map_err(|e| bad_input!("{}: cannot be read: {e}", file.display()))?;
            all.update(digest.as_bytes());
        }
        return Ok(all.finalize().to_hex().to_string());
    }
    let known = Manifest::read(folder)?.unwrap_or_default();
    let mut lines = String::new();
    for name in std::iter::once("config.json".to_owned()).chain(weight_files(folder)?) {
        let path = folder.join(&name);
        let digest = match known.get(&name) {
            Some(digest) => digest,
            None => {
                file_digest(&path, None).map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?
            }
        };
        lines.push_str(&format!("{digest}  {name}\n"));
    }
    Ok(blake3::hash(lines.as_bytes()).to_hex().to_string())
}
