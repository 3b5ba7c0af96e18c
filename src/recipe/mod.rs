//! The recipe: the settings of every module in one TOML file. This module reads the file, resolves it, and
//! reports its mistakes. Each table is declared in the module that uses the table.

mod base;
mod key_scope;
mod other_trainers;
mod plan;
mod removed_keys;
mod rules;
mod source;

pub use key_scope::KeyScope;
pub use plan::{Plan, override_key, resolve, resolve_for, resolve_run_recipe, resume_differences};
pub use source::{BUILT_IN, RecipeSource, locate};

use crate::chat::SystemPromptSettings;
use crate::checkpoint::CheckpointSettings;
use crate::dist::ParallelSettings;
use crate::interpreter;
use crate::learner::{CriticSettings, SftWarmUpSettings, TrainSettings};
use crate::metrics::LoggingSettings;
use crate::model::ablations::Ablations;
use crate::model::settings::{AdapterSettings, DeviceKind, ModelSettings};
use crate::policy::PolicySettings;
use crate::rollout::{EvalSettings, RolloutSettings};
use crate::settings::table;
use crate::tasks::{TaskSettings, ToolsSettings};

table! {
    /// A whole recipe: every table. For a model without a folder, [`resolve`] fills in the architecture and
    /// the tokenizer. It also fills in the keys that only some tasks read.
    pub struct Recipe {
        /// Device of the run. Results on a CPU and on a GPU are not bitwise equal.
        pub device: DeviceKind = DeviceKind::Auto,
        pub model: ModelSettings,
        pub adapter: Option<AdapterSettings>,
        pub chat: SystemPromptSettings,
        pub task: TaskSettings,
        pub tools: Option<ToolsSettings>,
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
