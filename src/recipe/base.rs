//! `base = "FILE"`: a recipe that has only its differences from another recipe, its base. A base may have a
//! base too.

use super::source::{BUILT_IN, BUILT_IN_SUFFIX};
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::settings::did_you_mean;
use std::path::{Component, Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The key at the top level of the file.
pub(crate) const BASE_KEY: &str = "base";

/// Maximum length of a chain of bases. A longer chain is treated as a cycle.
const BASES_MAX: usize = 16;

const REMEDY: &str =
    "give the path of a recipe, relative to this recipe's folder, or the name of a built-in recipe";

/// A recipe in a chain of bases.
pub(crate) struct Base {
    pub file: PathBuf,
    pub text: String,
}

/// The chain of a recipe's bases.
#[derive(Default)]
pub(crate) struct Bases {
    /// The recipe's base, then that base's own base, and so on.
    pub chain: Vec<Base>,
    /// The mistake in the last `base` key that was read, with its remedy.
    pub error: Option<String>,
}

/// Reads all bases of the recipe `text` in the file `path`.
pub(crate) fn read_all(path: &Path, text: &str) -> Bases {
    let mut bases = Bases::default();
    while bases.error.is_none() {
        let (path, text) = bases.chain.last().map_or((path, text), |base| (&*base.file, &*base.text));
        match read(path, text) {
            Ok(None) => break,
            Ok(Some(base)) if bases.chain.len() < BASES_MAX => bases.chain.push(base),
            Ok(Some(_)) => {
                bases.error =
                    Some("the chain of base recipes is circular or too long; remove a `base`".to_owned());
            }
            Err(error) => bases.error = Some(error),
        }
    }
    bases
}

/// Reads the base of the recipe `text` in the file `path`, if it has one.
fn read(path: &Path, text: &str) -> Result<Option<Base>, String> {
    let (document, _) = DeTable::parse_recoverable(text);
    let Some(value) = document.get_ref().get(BASE_KEY) else { return Ok(None) };
    let DeValue::String(name) = value.get_ref() else { return Err(format!("found no string; {REMEDY}")) };
    let built_in = |wanted: &str| {
        let (name, text) = BUILT_IN.iter().find(|(name, _)| *name == wanted)?;
        Some(Base { file: PathBuf::from(format!("{name}{BUILT_IN_SUFFIX}")), text: (*text).to_owned() })
    };
    // A built-in recipe has a built-in base. The base's name may be written with or without `.toml`.
    let stem = Path::new(name.as_ref()).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    if let (true, Some(base)) = (path.to_string_lossy().ends_with(BUILT_IN_SUFFIX), built_in(stem)) {
        return Ok(Some(base));
    }
    let file = without_parent_steps(path.parent().unwrap_or(Path::new("")).join(name.as_ref()));
    match bounded_file::read_text(&file, TOML_BYTES_MAX) {
        Ok(text) => Ok(Some(Base { file, text })),
        Err(_) if !file.exists() && built_in(name).is_some() => Ok(built_in(name)),
        Err(e) => {
            let suggestion = did_you_mean(stem, BUILT_IN.iter().map(|(name, _)| *name));
            Err(format!("cannot read {}: {e};{suggestion} {REMEDY}", file.display()))
        }
    }
}

/// Returns `path` without `..` where this is the same file: `a/../b` is not `b` if `a` is a symbolic link.
fn without_parent_steps(path: PathBuf) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        let is_name = matches!(clean.components().next_back(), Some(Component::Normal(_)));
        match component {
            Component::CurDir => {}
            Component::ParentDir if is_name => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    let is_same = std::fs::canonicalize(&clean)
        .is_ok_and(|file| std::fs::canonicalize(&path).is_ok_and(|own| own == file));
    if is_same { clean } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_shown_without_what_leads_back() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        std::fs::create_dir_all(at("a/b")).unwrap();
        std::fs::create_dir_all(at("far/away")).unwrap();
        for file in ["base.toml", "far/base.toml"] {
            std::fs::write(at(file), "").unwrap();
        }
        assert_eq!(without_parent_steps(at("a/b/../.././base.toml")), at("base.toml"));
        std::os::unix::fs::symlink(at("far/away"), at("link")).unwrap();
        // The parent of a link's target is another folder than that of the link.
        assert_eq!(without_parent_steps(at("link/../base.toml")), at("link/../base.toml"));
        assert_eq!(without_parent_steps(at("no/../base.toml")), at("no/../base.toml"));
        assert_eq!(without_parent_steps("../x/../base.toml".into()), Path::new("../x/../base.toml"));
    }
}
