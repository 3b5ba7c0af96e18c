//! Speed of the ops and of whole models.

pub mod attention;
pub mod model;
pub mod ops;
pub mod peers;
mod timing;

/// The cases that a part runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// A few of toy size.
    Small,
    /// The most telling ones.
    Short,
    /// All.
    Full,
}
