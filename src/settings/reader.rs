//! Reads parsed TOML into the tables in one pass. Records the locations of keys and collects mistakes.

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

/// The origin of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin<'a> {
    File(&'a Path),
    Set(usize),
}

/// Keys or values of other trainers, and the recipe keys with the same meaning.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OtherTrainerName {
    /// The names and the keys, divided by spaces.
    pub names: &'static str,
    pub keys: &'static str,
    /// Text after the keys in a message: their value, or a difference in meaning.
    pub note: &'static str,
}

impl OtherTrainerName {
    /// Returns the advice to use `keys`.
    fn advice(&self, keys: &[String]) -> String {
        let keys = match keys {
            [rest @ .., last] if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
            keys => keys.concat(),
        };
        format!("use {keys}{}", self.note)
    }

    /// Returns the recipe keys for this name in the table at `table`. The keys of this table are preferred:
    /// `learning_rate` in `[cold_start]` is `cold_start.optimizer.lr`, not `train.optimizer.lr`.
    fn keys_in(&self, table: &str, known: &[String]) -> Vec<String> {
        let root = table.split('.').next().unwrap_or_default();
        let of_table = |key: &str| {
            let own = join(root, key.split_once('.')?.1);
            known.contains(&own).then_some(own)
        };
        self.keys.split(' ').map(|key| of_table(key).unwrap_or_else(|| key.to_owned())).collect()
    }
}

impl std::fmt::Display for OtherTrainerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.advice(&self.keys_in("", &[])))
    }
}

/// Maximum number of mistakes that are listed. A text that is not a recipe would have very many.
const MISTAKES_MAX: usize = 100;

/// Reads several texts into one recipe, in order.
pub(crate) struct Reader<'a> {
    pub locations: &'a mut KeyLocations,
    pub mistakes: &'a mut Mistakes,
    /// Keys whose value is unreliable: a key with a mistake, or the known key that an unknown key
    /// probably means.
    pub unreliable_keys: &'a mut Vec<String>,
    /// The path of every key.
    pub known: &'a [String],
    pub origin: Origin<'a>,
    pub text: &'a str,
    /// Returns the message for a removed key or value, with its remedy.
    pub removed_key: fn(&str, &DeValue) -> Option<String>,
    /// Returns the recipe keys that correspond to a key of another trainer. If a word is given, returns the
    /// recipe keys that correspond to this value of another trainer.
    pub other_trainer_key: fn(&str, Option<&str>) -> Option<OtherTrainerName>,
    /// Tables of other trainers that no recipe has.
    pub other_trainer_tables: &'a [&'static str],
    /// The end of each line of the text, as a byte offset.
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
                let message =
                    format!("found a value instead of a table; write [{}] and its keys below", written.path);
                self.refuse(written, message);
            }
        }
    }

    /// Reads the keys of the table at `path`. The recipe itself has the empty path.
    pub fn read_keys(&mut self, table: &mut impl Table, path: &str, keys: &DeTable) {
        for (name, value) in keys {
            let written =
                ParsedKey { path: join(path, &quote_key(name.get_ref())), name: name.span(), value };
            if let Some(message) = (self.removed_key)(&written.path, value.get_ref()) {
                self.refuse(&written, message);
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
    pub fn refuse(&mut self, written: &ParsedKey, message: String) {
        if self.mistakes.listed.len() >= MISTAKES_MAX {
            self.mistakes.omitted_count += 1;
            return;
        }
        let location = self.location(written.name.start);
        self.locations.record(&written.path, location.clone());
        self.unreliable_keys.push(written.path.clone());
        self.mistakes.listed.push(Mistake { location, key: written.path.clone(), message });
    }

    /// Records a syntax mistake at a byte of the text. Only the first mistake of each line is kept.
    pub fn refuse_syntax(&mut self, at: usize, message: String) {
        let (location, key) = (self.location(at), String::new());
        if !self.mistakes.listed.iter().any(|mistake| mistake.location == location && mistake.key.is_empty())
        {
            self.mistakes.listed.push(Mistake { location, key, message });
        }
    }

    fn refuse_unknown(&mut self, table: &str, name: &str, written: &ParsedKey) {
        if self.mistakes.listed.len() >= MISTAKES_MAX {
            return self.refuse(written, String::new());
        }
        let (other_trainer_name, suggested) =
            ((self.other_trainer_key)(name, None), self.suggest(table, name));
        // verl's [trainer] looks like a misspelling of [train], but is another table.
        let is_known_table = table.is_empty() && self.other_trainer_tables.contains(&name);
        let inner_keys = written.value.get_ref().as_table();
        let inner_keys = inner_keys.filter(|keys| is_known_table || self.has_other_trainer_key(keys));
        let is_other_table = suggested.is_none() || is_known_table;
        if let (None, true, Some(keys)) = (other_trainer_name, is_other_table, inner_keys) {
            return self.refuse_other_trainer_keys(&written.path, keys);
        }
        // If this table has a key with a similar name, that key is meant, not the key of another trainer.
        let is_sibling = |known: &String| !table.is_empty() && known.starts_with(&join(table, ""));
        let other_trainer_name = other_trainer_name.filter(|_| !suggested.as_ref().is_some_and(is_sibling));
        let message = match (other_trainer_name, suggested) {
            (Some(other_trainer_name), _) => {
                let keys = other_trainer_name.keys_in(table, self.known);
                let advice = other_trainer_name.advice(&keys);
                self.unreliable_keys.extend(keys);
                format!("unknown key; {advice}")
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
                let root = table.split('.').next().unwrap_or_default();
                if keys.is_empty() && self.other_trainer_tables.contains(&root) {
                    let message = format!(
                        "unknown key; [{root}] is a table of verl, and this key has no counterpart; remove it"
                    );
                    return self.refuse(written, message);
                }
                let holder = if table.is_empty() { "a recipe".to_owned() } else { format!("[{table}]") };
                format!("unknown key; {holder} has {}", keys.join(", "))
            }
        };
        self.refuse(written, message);
    }

    /// Rejects each of the `keys` of another trainer's `table`, and the keys of its sub-tables.
    fn refuse_other_trainer_keys(&mut self, table: &str, keys: &DeTable) {
        for (name, value) in keys {
            let inner = ParsedKey { path: join(table, &quote_key(name.get_ref())), name: name.span(), value };
            match value.get_ref().as_table().filter(|keys| self.has_other_trainer_key(keys)) {
                Some(keys) => self.refuse_other_trainer_keys(&inner.path, keys),
                None => self.refuse_unknown(table, name.get_ref(), &inner),
            }
        }
    }

    /// Returns whether `keys`, or a table below them, has a key of another trainer.
    fn has_other_trainer_key(&self, keys: &DeTable) -> bool {
        keys.iter().any(|(name, value)| {
            let keys = value.get_ref().as_table();
            (self.other_trainer_key)(name.get_ref(), None).is_some()
                || keys.is_some_and(|keys| self.has_other_trainer_key(keys))
        })
    }

    /// Returns the known path that an unknown one most likely means. The candidates, in order: a misspelling
    /// in the same table; the same name in another table, with sub-tables first; a misspelling in any table.
    fn suggest(&self, table: &str, name: &str) -> Option<String> {
        let path = join(table, name);
        if self.known.contains(&path) {
            // The name is a dotted path in quotes.
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
        // Paths in the same table were compared by their names. A comparison of whole paths would make
        // different names look similar.
        let others = self.known.iter().filter(|path| path.as_str() != table && split(path).0 != table);
        closest_word(&path, others.map(String::as_str)).map(str::to_owned)
    }

    /// Returns the text of a value from `--set`. Such a value may be a string without quotes.
    pub fn unquoted_text(&self, span: Range<usize>) -> Option<&str> {
        if let Origin::File(_) = self.origin { None } else { self.text.get(span) }
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

/// Formats a name as in TOML: in quotes unless it is a bare key. Control characters are escaped.
fn quote_key(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(bare) { name.to_owned() } else { format!("{name:?}") }
}

/// Splits a path into its table and its name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}
