//! Declarations of recipe tables. The module that uses a table declares its keys, defaults, limits and
//! documentation once.
//!
//! [`table!`] declares a table, [`choice!`] an enum whose values have names, and [`registry!`] a list of
//! entries that are selected by name. A [`Reader`] reads TOML into such tables. It collects every [`Mistake`]
//! with its key, file and line.

mod choice;
mod limits;
mod mistake;
mod reader;
mod scalar;
mod table;

pub use choice::{Choice, closest_word, did_you_mean};
pub(crate) use choice::{choice, registry};
pub(crate) use limits::{Limits, above, from};
pub(crate) use mistake::KeyLocations;
pub use mistake::{Mistake, Mistakes, SourceLocation};
pub(crate) use reader::{Origin, OtherTrainerName, ParsedKey, Reader};
pub(crate) use scalar::{ParsedValue, Scalar};
pub use table::Entry;
pub(crate) use table::{
    Field, KeyDoc, Table, changed_entries, default, entries, join, limits, list_table, table,
};
