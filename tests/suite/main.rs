//! The integration tests: one binary, one module a room.

mod commands;
mod data;
mod harmony;
mod instructions;
mod interpreter;
mod metrics;
mod model;
mod policy;
mod recipe;
mod report;
mod rollout;
mod tasks;
mod train;
