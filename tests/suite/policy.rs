//! The policy mathematics: reference vectors, gradients against finite differences, and properties.

mod families;
mod vectors;
