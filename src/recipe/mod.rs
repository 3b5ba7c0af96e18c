//! The recipe: what the user asks for, as pure data. One file a TOML table, each a plain struct with defaults.

pub mod arms;
pub mod checkpoint;
pub mod cold_start;
pub mod eval;
pub mod harmony;
pub mod interpreter;
pub mod limits;
pub mod logging;
pub mod model;
pub mod optimizer;
pub mod parallel;
pub mod policy;
pub mod rollout;
mod table;
pub mod task;
pub mod train;

pub use arms::Arms;
pub use checkpoint::Checkpoint;
pub use cold_start::ColdStart;
pub use eval::Eval;
pub use harmony::{Harmony, ReasoningEffort};
pub use interpreter::{Interpreter, InterpreterKind, InterpreterState};
pub use logging::Logging;
pub use model::{Architecture, Dtype, Init, Model, Tokenizer, Yarn};
pub use optimizer::{Optimizer, OptimizerKind, Schedule};
pub use parallel::Parallel;
pub use policy::{Advantage, Aggregation, Loss, OldLogprob, Policy};
pub use rollout::Rollout;
pub use task::{Task, TaskName};
pub use train::Train;

use table::table;

table! {
    /// A whole recipe.
    pub struct Recipe {
        /// The model and its tokenizer.
        pub model: Model = Model::default(),
        /// System and developer messages.
        pub harmony: Harmony = Harmony::default(),
        /// Problems and grader.
        pub task: Task = Task::default(),
        /// The Python tool.
        pub interpreter: Interpreter = Interpreter::default(),
        /// Sampling for training.
        pub rollout: Rollout = Rollout::default(),
        /// The supervised stage.
        pub cold_start: ColdStart = ColdStart::default(),
        /// The reinforcement-learning stage.
        pub train: Train = Train::default(),
        /// Advantage and loss.
        pub policy: Policy = Policy::default(),
        /// Failures to measure.
        pub arms: Arms = Arms::default(),
        /// Evaluation.
        pub eval: Eval = Eval::default(),
        /// Checkpoints.
        pub checkpoint: Checkpoint = Checkpoint::default(),
        /// Threads and processes.
        pub parallel: Parallel = Parallel::default(),
        /// Logs.
        pub logging: Logging = Logging::default(),
    }
}
