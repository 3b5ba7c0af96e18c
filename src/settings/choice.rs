//! Values that are chosen by a word: what a recipe's key may say, declared once, in the module that acts on it.

/// A value out of a list, each with its word.
pub trait Choice: Copy + 'static {
    /// Every value, in the order of the documentation.
    fn all() -> Vec<Self>;

    /// The word used in recipes.
    fn name(self) -> &'static str;

    /// What the word means, for the documentation; empty where the word says it.
    fn meaning(self) -> &'static str;

    /// The value of this word, if there is one.
    fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|value| value.name() == name)
    }
}

/// Declares an enum whose values are chosen by a word, with the meaning of each as its documentation.
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

/// Declares a value that is chosen by the name of an entry, and the modules that hold the entries: each has an `ENTRY`, which
/// says `name` and `meaning`. The list grows by a file and its line, where an enum would grow in every place that matches it.
/// `cargo fmt` finds no module that a macro declares: `just format` names their files.
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

/// The nearest of `known`, if it is near enough to be what was meant.
pub fn closest<'k>(written: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    let slips_max = (written.chars().count() / 3).max(1);
    known
        .map(|known| (strsim::damerau_levenshtein(written, known), known))
        .filter(|(slips, _)| *slips <= slips_max)
        .min()
        .map(|(_, known)| known)
}
