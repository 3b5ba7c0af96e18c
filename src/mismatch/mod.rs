//! How far two ways to compute the same log-probabilities are apart, and why.
//!
//! [`links`] is the proof that rollout and training are one forward, link by link. [`compare`] puts figures on a gap,
//! [`explain`] finds its likely cause, [`against`] reads another engine's rows, [`arms`] says what is to
//! be broken on purpose, [`measure`] breaks it, [`output`] shows what was found.

pub mod against;
pub mod arms;
pub mod compare;
pub mod explain;
pub mod links;
pub mod measure;
pub mod output;
pub mod passes;
