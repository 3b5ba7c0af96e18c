//! One declaration a table: the struct, its defaults, its known keys, their ranges and their documentation.

/// Declares a recipe table once.
///
/// `key: Type = default => limits,` gives a public field, its default and, when `=> limits` is there, its range.
macro_rules! table {
    ($(#[doc = $doc:literal])* pub struct $name:ident {
        $($(#[doc = $key_doc:literal])* pub $key:ident: $type:ty = $default:expr $(=> $limits:expr)?,)*
    }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize)]
        pub struct $name {
            $($(#[doc = $key_doc])* pub $key: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($key: $default,)* }
            }
        }
    };
}

/// Declares the words that a key may take.
macro_rules! choice {
    ($(#[doc = $doc:literal])* pub enum $name:ident {
        $($(#[doc = $word_doc:literal])* $variant:ident = $word:literal,)*
    }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
        pub enum $name {
            $($(#[doc = $word_doc])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// Every value, in the order of the documentation.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The word used in recipes.
            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(crate) use {choice, table};
