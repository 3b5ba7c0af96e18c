//! The recipe: the settings of every module in one file of TOML. It composes, reads, resolves and reports mistakes; each table is
//! declared in the module that acts on it.

mod base;
mod plan;
mod removed;
mod rules;
mod source;

pub use plan::{Plan, resolve, resolve_stored, resume_differences, set_key};
pub use source::{BUILT_IN, RecipeSource, locate};

use crate::checkpoint::CheckpointSettings;
use crate::dist::ParallelSettings;
use crate::interpreter;
use crate::learner::{ColdStartSettings, CriticSettings, TrainSettings};
use crate::metrics::LoggingSettings;
use crate::model::arms::Arms;
use crate::model::settings::{AdapterSettings, DeviceKind, ModelSettings};
use crate::policy::PolicySettings;
use crate::rollout::{EvalSettings, PreambleSettings, RolloutSettings};
use crate::settings::table;
use crate::tasks::TaskSettings;

table! {
    /// A whole recipe: every table. [`resolve`] fills in the architecture and tokenizer of a model without a folder, and
    /// the keys that only some tasks read.
    pub struct Recipe {
        /// Where the run computes. A CPU's bits are not a GPU's.
        pub device: DeviceKind = DeviceKind::Auto,
        /// The model and its tokenizer: a folder, or an architecture with random weights.
        pub model: ModelSettings = ModelSettings::default(),
        /// A low-rank adapter (LoRA) that learns in place of the model's own weights, which stay as they are, packed or not. The
        /// reference of `policy.kl` is then the model without it, and the critic a second adapter with a head. Learning rates are
        /// about ten times those of full training.
        pub adapter: Option<AdapterSettings> = None,
        /// The system and developer messages put before every prompt. Nothing here depends on the day of the run.
        pub harmony: PreambleSettings = PreambleSettings::default(),
        /// What is learned: problems, environment and reward.
        pub task: TaskSettings = TaskSettings::default(),
        /// The Python tool, run in confined worker processes.
        pub interpreter: interpreter::Settings = interpreter::Settings::default(),
        /// How trajectories are sampled for training.
        pub rollout: RolloutSettings = RolloutSettings::default(),
        /// The supervised stage before reinforcement learning, on assistant tokens only.
        pub cold_start: ColdStartSettings = ColdStartSettings::default(),
        /// The reinforcement-learning stage.
        pub train: TrainSettings = TrainSettings::default(),
        /// Advantage, importance ratio and loss.
        pub policy: PolicySettings = PolicySettings::default(),
        /// The critic of `policy.advantage = "gae"`: a second model of the policy's architecture, which starts from the policy's
        /// weights at the start of reinforcement learning, with a head that gives each token one value. Every step it learns the
        /// returns before the policy is updated.
        pub critic: Option<CriticSettings> = None,
        /// Failures that can be switched on to be measured. All off in a healthy run.
        pub arms: Arms = Arms::default(),
        /// Success on held-out problems.
        pub eval: EvalSettings = EvalSettings::default(),
        /// What is saved, and when. The last step, and a stop by a signal, always save.
        pub checkpoint: CheckpointSettings = CheckpointSettings::default(),
        /// Threads and processes. No result depends on them.
        pub parallel: ParallelSettings = ParallelSettings::default(),
        /// What a run shows beside `metrics.jsonl`.
        pub logging: LoggingSettings = LoggingSettings::default(),
    }
}
