//! Mistakes in a recipe. They are reported together, each with its location and its remedy.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The location of a written value. Mistakes are reported in the order of their locations.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceLocation {
    /// In the text of the recipe or its base. `line` is `None` for a key that is absent.
    File { path: PathBuf, line: Option<usize> },
    /// In the `--set` with this index.
    Set(usize),
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceLocation::File { path, line: Some(line) } => write!(f, "{}:{line}", path.display()),
            SourceLocation::File { path, line: None } => write!(f, "{}", path.display()),
            SourceLocation::Set(_) => f.write_str("--set"),
        }
    }
}

/// A mistake in a recipe.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mistake {
    pub location: SourceLocation,
    /// The key's dotted path. Empty for a syntax mistake.
    pub key: String,
    /// The mistake and its remedy.
    pub message: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.location)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// All mistakes in a recipe. If this is returned as an error, there is at least one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mistakes {
    /// The mistakes that are reported individually.
    pub listed: Vec<Mistake>,
    /// Number of further mistakes, which are only counted.
    pub omitted_count: usize,
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.listed.as_slice() {
            [only] => write!(f, "{only}"),
            all => {
                write!(f, "{} mistakes in the recipe:", all.len() + self.omitted_count)?;
                all.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))?;
                if self.omitted_count > 0 { write!(f, "\n  and {} more", self.omitted_count) } else { Ok(()) }
            }
        }
    }
}

/// The location of each written key.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyLocations {
    file: PathBuf,
    written: BTreeMap<String, SourceLocation>,
}

impl KeyLocations {
    pub fn new(file: &Path) -> KeyLocations {
        KeyLocations { file: file.to_owned(), written: BTreeMap::new() }
    }

    /// Records where `key` was written. A later location replaces an earlier one.
    pub fn record(&mut self, key: &str, location: SourceLocation) {
        self.written.insert(key.to_owned(), location);
    }

    /// Forgets where the keys were written for which `is_replaced` returns true.
    pub fn forget(&mut self, is_replaced: impl Fn(&str) -> bool) {
        self.written.retain(|key, _| !is_replaced(key));
    }

    /// Returns whether `key` itself was written.
    pub fn is_written(&self, key: &str) -> bool {
        self.written.contains_key(key)
    }

    /// Returns whether `key` or the table around it was written in a base of the file, and nowhere else.
    pub fn is_from_base(&self, key: &str) -> bool {
        matches!(self.location_of(key), SourceLocation::File { path, .. } if path != self.file)
    }

    /// Returns where `key` was written. If it was not written: the nearest table around it, or else the file.
    pub fn location_of(&self, key: &str) -> SourceLocation {
        let around = std::iter::successors(Some(key), |key| key.rsplit_once('.').map(|(table, _)| table));
        let mut written = around.filter_map(|key| self.written.get(key));
        written.next().cloned().unwrap_or(SourceLocation::File { path: self.file.clone(), line: None })
    }
}
