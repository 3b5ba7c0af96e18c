//! Declarations of recipe tables. The module that uses a table declares its keys, defaults, limits and
//! documentation once.
//!
//! [`table!`] declares a table, [`choice!`] an enum whose values have names, [`registered!`] a list of
//! entries selected by name. A [`Reader`] reads TOML into such tables and collects every [`Mistake`] with
//! its key, file and line.

mod choice;
mod limits;
mod mistake;
mod reader;
mod scalar;
mod table;

pub use choice::{Choice, closest};
pub(crate) use choice::{choice, registered};
pub(crate) use limits::{Limits, above, from};
pub(crate) use mistake::Places;
pub use mistake::{Mistake, Mistakes, Place};
pub(crate) use reader::{ForeignName, Origin, Reader, Written};
pub(crate) use scalar::{Found, Scalar};
pub use table::Entry;
pub(crate) use table::{Field, Note, Table, changed, default, entries, join, limits, list_table, table};
