//! The `table!` macro: declares a struct with its defaults, keys, ranges and documentation.

use super::{Limits, ParsedKey, Reader};

/// Declares a recipe table once.
///
/// `key: Type = default => limits,` declares a public field with its default and range. Without `= default`,
/// the type's default is used. Without `=> limits`, any value is allowed. A nested table is documented only
/// where its type is declared. Nested tables follow the other keys, as TOML requires.
macro_rules! table {
    ($(#[doc = $doc:literal])* pub struct $name:ident {
        $($(#[doc = $key_doc:literal])* pub $key:ident: $type:ty $(= $default:expr)? $(=> $limits:expr)?,)*
    }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $($(#[doc = $key_doc])* pub $key: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($key: $crate::settings::default!($($default)?),)* }
            }
        }

        impl $crate::settings::Table for $name {
            const DOC: &'static str = concat!($($doc),*);

            fn read_key(
                &mut self,
                key: &str,
                written: &$crate::settings::ParsedKey,
                reader: &mut $crate::settings::Reader,
            ) -> bool {
                use $crate::settings::{Field, limits};
                match key {
                    $(stringify!($key) => self.$key.read(limits!($($limits)?), written, reader),)*
                    _ => return false,
                }
                true
            }

            fn limits_of(key: &str) -> Option<$crate::settings::Limits> {
                use $crate::settings::limits;
                match key {
                    $(stringify!($key) => limits!($($limits)?),)*
                    _ => None,
                }
            }

            fn list_keys(&self, path: &str, present: bool, entries: &mut Vec<$crate::settings::Entry>) {
                use $crate::settings::{Field, KeyDoc, join, limits};
                $(self.$key.append_entries(
                    join(path, stringify!($key)),
                    KeyDoc { doc: concat!($($key_doc),*), limits: limits!($($limits)?), present },
                    entries,
                );)*
            }
        }

        impl $crate::settings::Field for $name {
            fn read(
                &mut self,
                _limits: Option<$crate::settings::Limits>,
                written: &$crate::settings::ParsedKey,
                reader: &mut $crate::settings::Reader,
            ) {
                reader.read_table(self, written);
            }

            fn append_entries(
                &self,
                path: String,
                key_doc: $crate::settings::KeyDoc,
                entries: &mut Vec<$crate::settings::Entry>,
            ) {
                $crate::settings::list_table(self, path, key_doc, entries);
            }
        }
    };
}

/// Returns the limits of a key, if there are any.
macro_rules! limits {
    () => {
        None
    };
    ($limits:expr) => {
        Some($limits)
    };
}

/// Returns the default of a key, or the default of its type.
macro_rules! default {
    () => {
        Default::default()
    };
    ($default:expr) => {
        $default
    };
}

pub(crate) use {default, limits, table};

/// A value of a key: a scalar, a list, a table, or an `Option` of these.
pub(crate) trait Field {
    /// Stores the written value. After a mistake, which goes to the reader, the previous value is kept.
    fn read(&mut self, limits: Option<Limits>, written: &ParsedKey, reader: &mut Reader);

    /// Appends this key and the keys below it, in the order of their declaration.
    fn append_entries(&self, path: String, key_doc: KeyDoc, entries: &mut Vec<Entry>);
}

/// A struct declared by [`table!`].
pub(crate) trait Table: Field {
    /// The table's documentation.
    const DOC: &'static str;

    /// Reads the key of this name. Returns false if there is no such key.
    fn read_key(&mut self, key: &str, written: &ParsedKey, reader: &mut Reader) -> bool;

    /// Returns the limits of the key of this name, if it has any.
    fn limits_of(key: &str) -> Option<Limits>;

    /// Lists the keys of this table at `path`. `present`: whether the recipe has the table.
    fn list_keys(&self, path: &str, present: bool, entries: &mut Vec<Entry>);
}

/// Documentation and limits of a key, from its declaration.
#[derive(Clone, Copy)]
pub(crate) struct KeyDoc {
    pub doc: &'static str,
    pub limits: Option<Limits>,
    /// Whether the table that holds the key is in the recipe.
    pub present: bool,
}

/// One entry of the declaration (a table or a key), with the recipe's value.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// A table. Its keys follow.
    Table { path: String, doc: &'static str, present: bool },
    /// A key: its type and range in words and as JSON Schema, its value as TOML if it has one, and its
    /// allowed words with their meanings.
    Key {
        path: String,
        doc: &'static str,
        kind: String,
        schema: serde_json::Value,
        value: Option<String>,
        meanings: Vec<(&'static str, &'static str)>,
    },
}

impl Entry {
    /// Returns the dotted path, such as `train.optimizer.lr`.
    pub fn path(&self) -> &str {
        match self {
            Entry::Table { path, .. } | Entry::Key { path, .. } => path,
        }
    }

    /// Returns the path and the documentation.
    pub(crate) fn into_key(self) -> (String, &'static str) {
        let (Entry::Table { path, doc, .. } | Entry::Key { path, doc, .. }) = self;
        (path, doc)
    }
}

/// Returns the keys of `table`. Paths are relative to the table.
pub(crate) fn entries(table: &impl Table) -> Vec<Entry> {
    let mut entries = Vec::new();
    table.list_keys("", true, &mut entries);
    entries
}

/// Returns the keys of `table` whose values differ from their defaults.
pub(crate) fn changed_entries<T: Table + Default>(table: &T) -> Vec<Entry> {
    let defaults = entries(&T::default());
    let pairs = entries(table).into_iter().zip(defaults);
    pairs.filter(|(entry, default)| entry != default).map(|(entry, _)| entry).collect()
}

/// Lists a table and its keys.
pub(crate) fn list_table<T: Table>(table: &T, path: String, key_doc: KeyDoc, entries: &mut Vec<Entry>) {
    let doc = if key_doc.doc.is_empty() { T::DOC } else { key_doc.doc }.trim();
    entries.push(Entry::Table { path: path.clone(), doc, present: key_doc.present });
    table.list_keys(&path, key_doc.present, entries);
}

impl<T: Field + Default> Field for Option<T> {
    fn read(&mut self, limits: Option<Limits>, written: &ParsedKey, reader: &mut Reader) {
        self.get_or_insert_default().read(limits, written, reader);
    }

    fn append_entries(&self, path: String, key_doc: KeyDoc, entries: &mut Vec<Entry>) {
        match self {
            Some(value) => value.append_entries(path, key_doc, entries),
            None => T::default().append_entries(path, KeyDoc { present: false, ..key_doc }, entries),
        }
    }
}

/// Returns the path of `key` in the table at `path`. The recipe itself has the empty path.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
