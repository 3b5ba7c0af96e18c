//! How far two ways to compute the same log-probabilities are apart, and why.
//!
//! [`links`] is the proof that rollout and training are one forward, link by link. [`compare`] puts figures
//! on a log-prob mismatch, [`diagnose`] finds its likely cause among [`causes`], [`against`] compares another
//! engine's rows, [`arms`] reads the ablations asked for, [`measure`] measures them, [`output`] shows the
//! result.

pub mod against;
pub mod arms;
pub mod causes;
pub mod compare;
pub mod diagnose;
pub mod distance;
pub mod export;
pub mod formats;
pub mod head;
pub mod links;
pub mod locate;
pub mod measure;
pub mod observed;
pub mod output;
pub mod page;
pub mod passes;
mod rounding;
pub mod routes;
pub mod rows;
mod search;
mod ties;
