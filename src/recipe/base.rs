//! `base = "FILE"`: a recipe that contains only its differences from another.

use super::source::{BUILT_IN, BUILT_IN_SUFFIX};
use crate::bounded_file::{self, TOML_BYTES_MAX};
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The key, at the top level of the file.
pub(crate) const KEY: &str = "base";

/// The recipe that another one is based on.
pub(crate) struct Base {
    pub file: PathBuf,
    pub text: String,
}

/// Reads the base of the recipe `text` in the file `path`, if it has one.
///
/// # Errors
/// The mistake of the key, and its remedy.
pub(crate) fn read(path: &Path, text: &str) -> Result<Option<Base>, String> {
    let (document, _) = DeTable::parse_recoverable(text);
    let Some(value) = document.get_ref().get(KEY) else { return Ok(None) };
    let DeValue::String(name) = value.get_ref() else {
        return Err("found no string; give the path of a recipe, counted from this one's folder".to_owned());
    };
    // A built-in recipe has a built-in base.
    let stem = Path::new(name.as_ref()).file_stem();
    let built_in = BUILT_IN.iter().find(|(name, _)| stem.is_some_and(|stem| stem == *name));
    if let (true, Some((name, text))) = (path.to_string_lossy().ends_with(BUILT_IN_SUFFIX), built_in) {
        return Ok(Some(Base {
            file: PathBuf::from(format!("{name}{BUILT_IN_SUFFIX}")),
            text: (*text).to_owned(),
        }));
    }
    let file = path.parent().unwrap_or(Path::new("")).join(name.as_ref());
    match bounded_file::read_text(&file, TOML_BYTES_MAX) {
        Ok(text) => Ok(Some(Base { file, text })),
        Err(e) => Err(format!(
            "cannot read {}: {e}; give the path of a recipe, counted from this one's folder",
            file.display()
        )),
    }
}
