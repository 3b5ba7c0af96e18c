//! `base = "FILE"`: a recipe that holds only what differs from another.

use super::source::{BUILT_IN, INSIDE};
use crate::bounded_file::{self, TOML_BYTES_MAX};
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The key, which stands outside every table.
pub(crate) const KEY: &str = "base";

/// The recipe under another one.
pub(crate) struct Base {
    pub file: PathBuf,
    pub text: String,
}

/// Reads the base that the recipe `text` of the file `path` names, if it names one.
///
/// # Errors
/// What is wrong with the key, and what to do.
pub(crate) fn read(path: &Path, text: &str) -> Result<Option<Base>, String> {
    let (document, _) = DeTable::parse_recoverable(text);
    let Some(value) = document.get_ref().get(KEY) else { return Ok(None) };
    let DeValue::String(name) = value.get_ref() else {
        return Err("found no string; give the path of a recipe, counted from this one's folder".to_owned());
    };
    // A recipe inside the binary has its base there.
    let stem = Path::new(name.as_ref()).file_stem();
    let built_in = BUILT_IN.iter().find(|(name, _)| stem.is_some_and(|stem| stem == *name));
    if let (true, Some((name, text))) = (path.to_string_lossy().ends_with(INSIDE), built_in) {
        return Ok(Some(Base { file: PathBuf::from(format!("{name}{INSIDE}")), text: (*text).to_owned() }));
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
