//! The policy mathematics: reference vectors, gradients against finite differences, properties, refusals.

mod bad_input;
pub mod bypass;
mod entropy;
mod families;
mod fixture;
mod gradients;
mod load_balance;
mod properties;
mod sum_loss;
mod trl;
mod variants;
mod vectors;
pub mod verl;
