//! One pass over the parsed text into the tables, keeping places and collecting mistakes.

use super::mistake::{Mistake, Mistakes, Place, Places};
use super::table::{Table, join};
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A key that was written: its path, the span of its name and its value.
pub(crate) struct Written<'a> {
    pub path: String,
    pub name: Range<usize>,
    pub value: &'a Spanned<DeValue<'a>>,
}

/// What a text is: the recipe's own, or one `--set`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    File,
    Set(usize),
}

/// Reads texts into a recipe, one after the other.
pub(crate) struct Reader<'a> {
    pub places: &'a mut Places,
    pub mistakes: &'a mut Mistakes,
    /// Keys whose value cannot be relied on: mistaken, or what an unknown key was meant to be.
    pub unsure: &'a mut Vec<String>,
    /// Every known path.
    pub known: &'a [String],
    pub origin: Origin,
    pub text: &'a str,
}

impl Reader<'_> {
    /// Reads the keys of a document into `recipe`.
    pub fn read_document(&mut self, recipe: &mut impl Table, document: &DeTable) {
        self.read_keys(recipe, "", document);
    }

    /// Reads a sub-table.
    pub fn read_table(&mut self, table: &mut impl Table, written: &Written) {
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

    fn read_keys(&mut self, table: &mut impl Table, path: &str, keys: &DeTable) {
        for (name, value) in keys {
            let written = Written { path: join(path, name.get_ref()), name: name.span(), value };
            if !table.read_key(name.get_ref(), &written, self) {
                self.refuse_unknown(path, &written);
            }
        }
    }

    /// Remembers where a key was written.
    pub fn accept(&mut self, written: &Written) {
        let place = self.place(written.name.start);
        self.places.note(&written.path, place);
    }

    /// Notes a mistake at a key.
    pub fn refuse(&mut self, written: &Written, what: String) {
        let place = self.place(written.name.start);
        self.places.note(&written.path, place.clone());
        self.unsure.push(written.path.clone());
        self.mistakes.0.push(Mistake { place, key: written.path.clone(), what });
    }

    /// Notes a mistake of syntax at a byte of the text.
    pub fn refuse_syntax(&mut self, at: usize, what: String) {
        let place = self.place(at);
        self.mistakes.0.push(Mistake { place, key: String::new(), what });
    }

    fn refuse_unknown(&mut self, table: &str, written: &Written) {
        let what = match self.suggest(table, &written.path) {
            Some(known) => {
                self.unsure.push(known.clone());
                format!("unknown key; did you mean {known}?")
            }
            None => {
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

    /// The known path that an unknown one was most likely meant to be: a slip of the pen in the same table,
    /// then the same name in another table, then a slip of the pen anywhere.
    fn suggest(&self, table: &str, unknown: &str) -> Option<String> {
        let name = |path: &'_ str| path.rsplit_once('.').map_or(0, |(table, _)| table.len() + 1);
        let written = &unknown[name(unknown)..];
        let siblings = self.known.iter().filter(|path| path[..name(path)].trim_end_matches('.') == table);
        let sibling = closest(written, siblings.map(|path| &path[name(path)..]));
        let namesake = || {
            let namesakes = || self.known.iter().filter(|path| &path[name(path)..] == written);
            namesakes()
                .find(|path| path.starts_with(&join(table, "")))
                .or_else(|| namesakes().next())
                .cloned()
        };
        let anywhere = || closest(unknown, self.known.iter().map(String::as_str)).map(str::to_owned);
        sibling.map(|key| join(table, key)).or_else(namesake).or_else(anywhere)
    }

    /// For `--set`: the text of a value, which may be a string without quotes.
    pub fn unquoted(&self, span: Range<usize>) -> Option<&str> {
        match self.origin {
            Origin::File => None,
            Origin::Set(_) => self.text.get(span),
        }
    }

    fn place(&self, at: usize) -> Place {
        match self.origin {
            Origin::Set(index) => Place::Set(index),
            Origin::File => {
                let before = self.text.as_bytes().iter().take(at);
                self.places.line(1 + before.filter(|&&byte| byte == b'\n').count())
            }
        }
    }
}

/// The nearest of `known`, if it is near enough to be what was meant.
pub(crate) fn closest<'k>(written: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    let slips_max = (written.chars().count() / 3).max(1);
    known
        .map(|known| (strsim::damerau_levenshtein(written, known), known))
        .filter(|(slips, _)| *slips <= slips_max)
        .min()
        .map(|(_, known)| known)
}
