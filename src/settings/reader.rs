//! Reads parsed text into the tables in one pass; records places and collects mistakes.

use super::{KeyLocations, Mistake, Mistakes, SourceLocation, Table, closest_word, join};
use std::ops::Range;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A written key: its path, the span of its name, and its value.
pub(crate) struct ParsedKey<'a> {
    pub path: String,
    pub name: Range<usize>,
    pub value: &'a Spanned<DeValue<'a>>,
}

/// The origin of a text: a recipe file, its base, or a `--set`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin<'a> {
    File(&'a Path),
    Set(usize),
}

/// A name of another trainer, and the keys that have its meaning here.
#[derive(Debug)]
pub(crate) struct ForeignName {
    pub name: &'static str,
    pub keys: &'static [&'static str],
    /// Text after the keys in a message: their value or a difference.
    pub note: &'static str,
}

impl std::fmt::Display for ForeignName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let keys = match self.keys {
            [rest @ .., last] if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
            keys => keys.concat(),
        };
        write!(f, "here it is {keys}{}", self.note)
    }
}

/// Maximum number of mistakes that are examined. A text that is not a recipe would have very many.
const MISTAKES_MAX: usize = 100;

/// Reads several texts into a recipe, in order.
pub(crate) struct Reader<'a> {
    pub locations: &'a mut KeyLocations,
    pub mistakes: &'a mut Mistakes,
    /// Keys with an unreliable value: one with a mistake, or the likely meaning of an unknown key.
    pub unreliable_keys: &'a mut Vec<String>,
    /// Every known path.
    pub known: &'a [String],
    pub origin: Origin<'a>,
    pub text: &'a str,
    /// Returns the mistake and the remedy for a removed key or value.
    pub removed: fn(&str, &DeValue) -> Option<String>,
    /// Returns what a key of another trainer is here, or a word of its values.
    pub foreign: fn(&str, Option<&str>) -> Option<&'static ForeignName>,
    /// The end of each line of the text, in bytes.
    pub line_ends: &'a [usize],
}

impl Reader<'_> {
    /// Reads a sub-table.
    pub fn read_table(&mut self, table: &mut impl Table, written: &ParsedKey) {
        match written.value.get_ref() {
            DeValue::Table(keys) => {
                self.accept(written);
                self.read_keys(table, &written.path, keys);
            }
            _ => {
                let what = format!(
                    "found a value where a table belongs; write [{}] and its keys below",
                    written.path
                );
                self.refuse(written, what);
            }
        }
    }

    /// Reads the keys of the table at `path`; the recipe itself is at the empty path.
    pub fn read_keys(&mut self, table: &mut impl Table, path: &str, keys: &DeTable) {
        for (name, value) in keys {
            let written = ParsedKey { path: join(path, &shown(name.get_ref())), name: name.span(), value };
            if let Some(what) = (self.removed)(&written.path, value.get_ref()) {
                self.refuse(&written, what);
            } else if !table.read_key(name.get_ref(), &written, self) {
                self.refuse_unknown(path, name.get_ref(), &written);
            }
        }
    }

    /// Records where a key was written.
    pub fn accept(&mut self, written: &ParsedKey) {
        let location = self.location(written.name.start);
        self.locations.record(&written.path, location);
    }

    /// Records a mistake at a key.
    pub fn refuse(&mut self, written: &ParsedKey, what: String) {
        if self.mistakes.0.len() >= MISTAKES_MAX {
            self.mistakes.1 += 1;
            return;
        }
        let location = self.location(written.name.start);
        self.locations.record(&written.path, location.clone());
        self.unreliable_keys.push(written.path.clone());
        self.mistakes.0.push(Mistake { location, key: written.path.clone(), what });
    }

    /// Records a mistake of syntax at a byte of the text; only the first one of a line.
    pub fn refuse_syntax(&mut self, at: usize, what: String) {
        let (location, key) = (self.location(at), String::new());
        if !self.mistakes.0.iter().any(|mistake| mistake.location == location && mistake.key.is_empty()) {
            self.mistakes.0.push(Mistake { location, key, what });
        }
    }

    fn refuse_unknown(&mut self, table: &str, name: &str, written: &ParsedKey) {
        if self.mistakes.0.len() >= MISTAKES_MAX {
            return self.refuse(written, String::new());
        }
        let (foreign, suggested) = ((self.foreign)(name, None), self.suggest(table, name));
        let foreign_keys = written.value.get_ref().as_table().filter(|keys| self.holds_foreign(keys));
        if let (None, None, Some(keys)) = (foreign, &suggested, foreign_keys) {
            return self.refuse_foreign(&written.path, keys);
        }
        let what = match (foreign, suggested) {
            (Some(foreign), _) => {
                self.unreliable_keys.extend(foreign.keys.iter().map(|key| (*key).to_owned()));
                format!("unknown key; {foreign}")
            }
            (None, Some(known)) => {
                self.unreliable_keys.push(known.clone());
                format!("unknown key; did you mean {known}?")
            }
            (None, None) => {
                let inside = self.known.iter().filter_map(|key| match table {
                    "" => Some(key.as_str()),
                    table => key.strip_prefix(table)?.strip_prefix('.'),
                });
                let keys: Vec<&str> = inside.filter(|key| !key.contains('.')).collect();
                let holder = if table.is_empty() { "a recipe".to_owned() } else { format!("[{table}]") };
                format!("unknown key; {holder} has {}", keys.join(", "))
            }
        };
        self.refuse(written, what);
    }

    /// Refuses each of the `keys` of another trainer's `table`, and those of its tables.
    fn refuse_foreign(&mut self, table: &str, keys: &DeTable) {
        for (name, value) in keys {
            let inner = ParsedKey { path: join(table, &shown(name.get_ref())), name: name.span(), value };
            match value.get_ref().as_table().filter(|keys| self.holds_foreign(keys)) {
                Some(keys) => self.refuse_foreign(&inner.path, keys),
                None => self.refuse_unknown(table, name.get_ref(), &inner),
            }
        }
    }

    /// Returns whether a key of another trainer is in `keys` or in a table below.
    fn holds_foreign(&self, keys: &DeTable) -> bool {
        keys.iter().any(|(name, value)| match value.get_ref() {
            DeValue::Table(keys) => self.holds_foreign(keys),
            _ => (self.foreign)(name.get_ref(), None).is_some(),
        })
    }

    /// Returns the known path that an unknown one most likely means. Candidates in order: a misspelling in
    /// the same table; the same name in another table, preferably a subtable; a misspelling anywhere.
    fn suggest(&self, table: &str, name: &str) -> Option<String> {
        let path = join(table, name);
        if self.known.contains(&path) {
            // A dotted path inside quotes.
            return Some(path);
        }
        let siblings = self.known.iter().map(|path| split(path)).filter(|(around, _)| *around == table);
        if let Some(sibling) = closest_word(name, siblings.map(|(_, name)| name)) {
            return Some(join(table, sibling));
        }
        let namesakes = || self.known.iter().filter(|path| split(path).1 == name);
        let below = namesakes().find(|path| path.starts_with(&join(table, "")));
        if let Some(namesake) = below.or_else(|| namesakes().next()) {
            return Some(namesake.clone());
        }
        // Paths in the same table were compared by their names; comparing whole paths would hide the
        // difference.
        let others = self.known.iter().filter(|path| path.as_str() != table && split(path).0 != table);
        closest_word(&path, others.map(String::as_str)).map(str::to_owned)
    }

    /// For `--set`: returns the text of a value, which may be a string without quotes.
    pub fn unquoted_text(&self, span: Range<usize>) -> Option<&str> {
        match self.origin {
            Origin::File(_) => None,
            Origin::Set(_) => self.text.get(span),
        }
    }

    fn location(&self, at: usize) -> SourceLocation {
        match self.origin {
            Origin::Set(index) => SourceLocation::Set(index),
            Origin::File(path) => {
                let line = 1 + self.line_ends.partition_point(|&end| end < at);
                SourceLocation::File { path: path.to_owned(), line: Some(line) }
            }
        }
    }
}

/// Formats a name as in TOML: in quotes unless it is bare. Control characters are escaped.
fn shown(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(bare) { name.to_owned() } else { format!("{name:?}") }
}

/// Splits a path into table and name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}
