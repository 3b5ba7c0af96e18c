//! The integration tests: one binary, one module a room.

mod commands;
mod commands_eval;
mod critic;
mod data;
mod dense;
mod figures;
mod harmony;
mod instructions;
mod interpreter;
mod metrics;
mod mismatch;
mod model;
mod model_config;
mod model_files;
mod one_forward;
mod ops;
mod policy;
mod policy_step;
mod recipe;
mod report;
mod rollout;
mod tasks;
mod tidy;
mod tiny;
mod train;
mod verify_if;
