//! What every command that runs a model needs: the preflight, the folder, evaluation, sampling into a folder, signals.

pub mod adapter;
pub mod collect;
pub mod context;
mod device;
pub mod evaluation;
pub mod export;
mod family;
mod freeze;
pub mod header;
mod links;
pub mod memory;
pub mod preflight;
pub mod processes;
pub mod run_folder;
pub mod signals;
pub mod source;
