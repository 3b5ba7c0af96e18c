//! Recipe values that are selected by a word. Each set of words is declared once, in the module that uses it.

/// A recipe value that is chosen by name from a fixed list.
pub trait Choice: Copy + 'static {
    /// Returns every value, in the order of the documentation.
    fn all() -> Vec<Self>;

    /// Returns the word for the value in recipes.
    fn name(self) -> &'static str;

    /// Returns the word's meaning for the documentation. Empty if the word is self-explanatory.
    fn meaning(self) -> &'static str;

    /// Returns the value of the word `name`, if there is one.
    fn from_name(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|value| value.name() == name)
    }
}

/// Declares an enum whose values are selected by a word. The doc comment of a value gives the word's meaning.
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

/// Declares a type whose values are entries of a list, selected by name. Also declares the modules of the
/// entries. Each module has an `ENTRY` with `name` and `meaning`. A new entry needs one new file and one new
/// line; an enum would need a change at every match. `cargo fmt` does not find modules that a macro declares,
/// so `just format` names their files.
macro_rules! registry {
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

pub(crate) use {choice, registry};

/// Returns the word in `known` that is most similar to `written`; `None` if no word is similar.
pub fn closest_word<'k>(written: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    similar_words(written, known).first().copied()
}

/// Maximum number of names that [`did_you_mean`] proposes.
const PROPOSALS_MAX: usize = 3;

/// Returns ` did you mean a or b?` with names from `known`, or an empty string if none fits. A name fits if
/// it is similar to `written`, or if it contains all parts of `written` (`gsm8k_qwen_lora` for `gsm8k-lora`).
/// If a name has exactly the same parts, it is the only proposal.
pub fn did_you_mean<'k>(written: &str, known: impl Iterator<Item = &'k str> + Clone) -> String {
    fn parts(name: &str) -> impl Iterator<Item = &str> {
        name.split(['_', '-', '.']).filter(|part| !part.is_empty())
    }
    let has_parts = |name: &&str| {
        parts(written).next().is_some() && parts(written).all(|part| parts(name).any(|p| p == part))
    };
    let same_parts = known.clone().find(|name| parts(name).eq(parts(written)));
    let mut names: Vec<&str> = same_parts.into_iter().collect();
    if names.is_empty() {
        names.extend(similar_words(written, known.clone()));
        for name in known.filter(has_parts) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names.truncate(PROPOSALS_MAX);
    if names.is_empty() { String::new() } else { format!(" did you mean {}?", names.join(" or ")) }
}

/// Returns the words in `known` that are similar enough to `written`, the most similar word first.
fn similar_words<'k>(written: &str, known: impl Iterator<Item = &'k str>) -> Vec<&'k str> {
    let edits_max = (written.chars().count() / 3).max(1);
    let mut words: Vec<(usize, &str)> = known
        .map(|known| (strsim::damerau_levenshtein(written, known), known))
        .filter(|(edits, _)| *edits <= edits_max)
        .collect();
    words.sort_unstable();
    words.into_iter().map(|(_, known)| known).collect()
}

#[cfg(test)]
mod tests {
    use super::did_you_mean;

    #[test]
    fn similar_names_and_names_with_the_same_parts_are_proposed() {
        let known = ["quickstart", "quickstart_cuda", "quickstart_ppo", "gsm8k_qwen", "gsm8k_qwen_lora"];
        let meant = |written: &str| did_you_mean(written, known.into_iter());
        assert_eq!(meant("quikstart"), " did you mean quickstart?");
        assert_eq!(meant("quickstart"), " did you mean quickstart?");
        assert_eq!(meant("quickstart-cuda"), " did you mean quickstart_cuda?");
        assert_eq!(meant("gsm8k-lora"), " did you mean gsm8k_qwen_lora?");
        assert_eq!(meant("gsm8k_qwen_lra"), " did you mean gsm8k_qwen_lora or gsm8k_qwen?");
        assert_eq!((meant("nothing").as_str(), meant("").as_str()), ("", ""));
    }
}
