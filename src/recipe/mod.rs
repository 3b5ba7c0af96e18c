//! The recipe: what the user asks for, as pure data. One file a TOML table, each a plain struct with defaults.

pub mod adapter;
pub mod arms;
mod base;
pub mod checkpoint;
pub mod cold_start;
pub mod correction;
pub mod critic;
pub mod device;
pub mod eval;
pub mod harmony;
pub mod interpreter;
mod limits;
pub mod logging;
mod mistake;
pub mod model;
pub mod optimizer;
pub mod parallel;
mod plan;
pub mod policy;
mod reader;
mod removed;
pub mod rollout;
mod rules;
mod scalar;
mod source;
mod table;
pub mod task;
pub mod train;

pub use adapter::AdapterConfig;
pub use arms::Arms;
pub use checkpoint::{Checkpoint, SavedDtype};
pub use cold_start::ColdStart;
pub use correction::{CorrectionConfig, ImportanceSampling, RejectOption};
pub use critic::CriticConfig;
pub use device::DeviceKind;
pub use eval::Eval;
pub use harmony::{Harmony, ReasoningEffort};
pub use interpreter::{InterpreterConfig, InterpreterKind, InterpreterState};
pub use logging::Logging;
pub use mistake::{Mistake, Mistakes, Place};
pub(crate) use model::architecture_limits;
pub use model::{Architecture, Contradiction, Dtype, Family, Init, ModelConfig, Sizes, Tokenizer, Yarn};
pub use optimizer::{OptimizerConfig, OptimizerKind, Schedule};
pub use parallel::{PackedWeights, Parallel, RolloutWeights};
pub use plan::{Plan, resolve, resolve_stored, resume_differences, set_key};
pub use policy::{
    Advantage, Aggregation, Kl, KlEstimator, KlPlace, Loss, OldLogprob, OverlongConfig, Policy, RouterReplay,
};
pub use rollout::RolloutConfig;
pub use source::{BUILT_IN, RecipeSource, locate};
pub use table::Entry;
pub use task::{AnswerEquality, Extraction, Grading, PromptForm, TaskConfig, TaskName};
pub use train::Train;

use table::table;

table! {
    /// A whole recipe: every table. [`resolve`] fills in the architecture and tokenizer of a model without a folder, and
    /// the keys that only some tasks read.
    pub struct Recipe {
        /// Where the run computes. A CPU's bits are not a GPU's.
        pub device: DeviceKind = DeviceKind::Auto,
        /// The model and its tokenizer: a folder, or an architecture with random weights.
        pub model: ModelConfig = ModelConfig::default(),
        /// A low-rank adapter (LoRA) that learns in place of the model's own weights, which stay as they are, packed or not. The
        /// reference of `policy.kl` is then the model without it, and the critic a second adapter with a head. Learning rates are
        /// about ten times those of full training.
        pub adapter: Option<AdapterConfig> = None,
        /// The system and developer messages put before every prompt. Nothing here depends on the day of the run.
        pub harmony: Harmony = Harmony::default(),
        /// What is learned: problems, environment and reward.
        pub task: TaskConfig = TaskConfig::default(),
        /// The Python tool, run in confined worker processes.
        pub interpreter: InterpreterConfig = InterpreterConfig::default(),
        /// How trajectories are sampled for training.
        pub rollout: RolloutConfig = RolloutConfig::default(),
        /// The supervised stage before reinforcement learning, on assistant tokens only.
        pub cold_start: ColdStart = ColdStart::default(),
        /// The reinforcement-learning stage.
        pub train: Train = Train::default(),
        /// Advantage, importance ratio and loss.
        pub policy: Policy = Policy::default(),
        /// The critic of `policy.advantage = "gae"`: a second model of the policy's architecture, which starts from the policy's
        /// weights at the start of reinforcement learning, with a head that gives each token one value. Every step it learns the
        /// returns before the policy is updated.
        pub critic: Option<CriticConfig> = None,
        /// Failures that can be switched on to be measured. All off in a healthy run.
        pub arms: Arms = Arms::default(),
        /// Success on held-out problems.
        pub eval: Eval = Eval::default(),
        /// What is saved, and when. The last step, and a stop by a signal, always save.
        pub checkpoint: Checkpoint = Checkpoint::default(),
        /// Threads and processes. No result depends on them.
        pub parallel: Parallel = Parallel::default(),
        /// What a run shows beside `metrics.jsonl`.
        pub logging: Logging = Logging::default(),
    }
}
