//! The base of an adapter: where it lies, and how it is known again, which is by what its files hold and never by a name.

use super::load::weight_files;
use super::peft;
use crate::bad_input;
use crate::error::shell_quote;
use crate::integrity::{Manifest, file_digest};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The folder of a run that holds a base which no other folder does.
pub const BASE_FOLDER: &str = "base";

/// The model that an adapter belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Its folder.
    pub path: PathBuf,
    /// The digest of its config and weights, hexadecimal.
    pub digest: String,
}

impl Base {
    /// The model in `folder`, whose files are read unless a manifest has their digests.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    pub fn of(folder: &Path) -> Result<Self> {
        let path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Ok(Self { digest: digest(&path)?, path })
    }

    /// The folder that holds the base of the adapter in `adapter`: where it was, in the run that the adapter is a checkpoint of, or
    /// where `named` says. The first whose files are those that the adapter was trained on.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when none is.
    pub fn find(&self, adapter: &Path, named: Option<&Path>) -> Result<PathBuf> {
        let in_run = adapter.parent().and_then(Path::parent).map(|run| run.join(BASE_FOLDER));
        let places = [Some(self.path.clone()), in_run, named.map(Path::to_owned)];
        let mut changed = None;
        for place in places.into_iter().flatten().filter(|place| place.join("config.json").is_file()) {
            if peft::holds_adapter(&place) {
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

/// The digest of the config and the weights in `folder`, hexadecimal.
fn digest(folder: &Path) -> Result<String> {
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
