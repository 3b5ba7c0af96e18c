//! Mistakes of a recipe, reported all at once, each with its place and its remedy.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where a value was written. The order is that of the report.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceLocation {
    /// In the text of the recipe or its base; no line for a key that is absent.
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

/// A mistake.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mistake {
    pub location: SourceLocation,
    /// The key's dotted path; empty for a mistake of syntax.
    pub key: String,
    /// The mistake and its remedy.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.location)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)
    }
}

/// All mistakes of a recipe; as an error it is never empty. Beyond a maximum they are only counted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mistakes(pub Vec<Mistake>, pub usize);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [only] => write!(f, "{only}"),
            all => {
                write!(f, "{} mistakes in the recipe:", all.len() + self.1)?;
                all.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))?;
                if self.1 > 0 { write!(f, "\n  and {} more", self.1) } else { Ok(()) }
            }
        }
    }
}

/// The place of each written key.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyLocations {
    file: PathBuf,
    written: BTreeMap<String, SourceLocation>,
}

impl KeyLocations {
    pub fn new(file: &Path) -> KeyLocations {
        KeyLocations { file: file.to_owned(), written: BTreeMap::new() }
    }

    /// Records where `key` was written last.
    pub fn record(&mut self, key: &str, location: SourceLocation) {
        self.written.insert(key.to_owned(), location);
    }

    /// Returns where `key` was written, or else the nearest table around it, or else the file.
    pub fn of(&self, key: &str) -> SourceLocation {
        let around = std::iter::successors(Some(key), |key| key.rsplit_once('.').map(|(table, _)| table));
        let mut written = around.filter_map(|key| self.written.get(key));
        written.next().cloned().unwrap_or(SourceLocation::File { path: self.file.clone(), line: None })
    }
}
