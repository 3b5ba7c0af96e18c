//! The recipe: the settings of every module in one TOML file. This module composes, reads, resolves and
//! reports mistakes; each table is declared in the module that uses it.

mod base;
mod foreign;
mod key_scope;
mod plan;
mod removed_keys;
mod rules;
mod source;

pub use key_scope::KeyScope;
pub use plan::{Plan, override_key, resolve, resolve_for, resolve_run_recipe, resume_differences};
pub use source::{BUILT_IN, RecipeSource, locate};

use crate::checkpoint::CheckpointSettings;
use crate::dist::ParallelSettings;
use crate::interpreter;
use crate::learner::{CriticSettings, SftWarmUpSettings, TrainSettings};
use crate::metrics::LoggingSettings;
use crate::model::ablations::Ablations;
use crate::model::settings::{AdapterSettings, DeviceKind, ModelSettings};
use crate::policy::PolicySettings;
use crate::rollout::{EvalSettings, RolloutSettings, SystemPromptSettings};
use crate::settings::table;
use crate::tasks::TaskSettings;

table! {
    /// A whole recipe: every table. [`resolve`] fills in the architecture and tokenizer of a model without
    /// a folder, and the keys that only some tasks read.
    pub struct Recipe {
        /// Where the run computes. A CPU's bits are not a GPU's.
        pub device: DeviceKind = DeviceKind::Auto,
        pub model: ModelSettings,
        pub adapter: Option<AdapterSettings>,
        pub harmony: SystemPromptSettings,
        pub task: TaskSettings,
        pub interpreter: interpreter::InterpreterSettings,
        pub rollout: RolloutSettings,
        pub cold_start: SftWarmUpSettings,
        pub train: TrainSettings,
        pub policy: PolicySettings,
        pub critic: Option<CriticSettings>,
        pub arms: Ablations,
        pub eval: EvalSettings,
        pub checkpoint: CheckpointSettings,
        pub parallel: ParallelSettings,
        pub logging: LoggingSettings,
    }
}
