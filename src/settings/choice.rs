//! Values selected by a word in a recipe, declared once in the module that uses them.

/// A recipe value chosen by name from a fixed list.
pub trait Choice: Copy + 'static {
    /// Returns every value, in the order of the documentation.
    fn all() -> Vec<Self>;

    /// Returns the word used in recipes.
    fn name(self) -> &'static str;

    /// Returns the word's meaning for the documentation; empty if the word is self-explanatory.
    fn meaning(self) -> &'static str;

    /// Returns the value of this word, if there is one.
    fn from_name(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|value| value.name() == name)
    }
}

/// Declares an enum whose values are selected by a word. The values' doc comments give the meanings.
macro_rules! choice {
    ($(#[doc = $doc:literal])* pub enum $name:ident $(default $default:ident)? {
        $($(#[doc = $word_doc:literal])* $variant:ident = $word:literal,)*
    }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[doc = $word_doc])* $variant,)*
        }

        $(impl Default for $name {
            fn default() -> Self {
                $name::$default
            }
        })?

        impl $crate::settings::Choice for $name {
            fn all() -> Vec<Self> {
                vec![$($name::$variant,)*]
            }

            fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }

            fn meaning(self) -> &'static str {
                match self {
                    $($name::$variant => concat!($($word_doc),*).trim_ascii(),)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($crate::settings::Choice::name(*self))
            }
        }
    };
}

/// Declares a value selected by the name of an entry, and the modules of the entries. Each module has an
/// `ENTRY` with `name` and `meaning`. A new entry is one file and one line here; an enum would need a
/// change at every match. `cargo fmt` does not find modules declared by a macro: `just format` names their
/// files.
macro_rules! registered {
    (
        $(#[doc = $doc:literal])*
        pub struct $name:ident($entry:ty) default $default:ident;
        $($visible:vis mod $module:ident;)*
    ) => {
        $($visible mod $module;)*

        $(#[doc = $doc])*
        #[derive(Clone, Copy)]
        pub struct $name(&'static $entry);

        impl Default for $name {
            fn default() -> Self {
                $name(&$default::ENTRY)
            }
        }

        impl $crate::settings::Choice for $name {
            fn all() -> Vec<Self> {
                vec![$($name(&$module::ENTRY),)*]
            }

            fn name(self) -> &'static str {
                self.0.name
            }

            fn meaning(self) -> &'static str {
                self.0.meaning
            }
        }

        impl std::ops::Deref for $name {
            type Target = $entry;

            fn deref(&self) -> &$entry {
                self.0
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.0.name == other.0.name
            }
        }

        impl Eq for $name {}

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.0.name)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.0.name)
            }
        }
    };
}

pub(crate) use {choice, registered};

/// Returns the most similar word of `known`, if it is similar enough to be the intended one.
pub fn closest_word<'k>(written: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    let slips_max = (written.chars().count() / 3).max(1);
    known
        .map(|known| (strsim::damerau_levenshtein(written, known), known))
        .filter(|(slips, _)| *slips <= slips_max)
        .min()
        .map(|(_, known)| known)
}
