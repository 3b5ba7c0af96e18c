//! The policy mathematics: reference vectors, gradients against finite differences, properties, refusals.

mod bad_input;
mod families;
mod fixture;
mod gradients;
mod properties;
mod variants;
mod vectors;
pub mod verl;
