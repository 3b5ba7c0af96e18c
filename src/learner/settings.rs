//! `[train]`, `[cold_start]` and `[critic]`.

use crate::actor::OptimizerSettings;
use crate::settings::{above, choice, from, table};
use std::path::PathBuf;

table! {
    /// Reinforcement learning.
    pub struct TrainSettings {
        /// Number of steps of reinforcement learning.
        pub steps: u64 = 80 => from(0.0).to(1e9),
        /// Epochs over the rows of `task.train_file`, in place of `steps`. The resolved recipe has the steps.
        pub data_epochs: Option<f64> = None => above(0.0).to(1e6),
        /// Seed of the run. All random numbers of the run derive from this seed.
        pub seed: u64 = 0,
        /// Maximum number of tokens of a micro-batch, the unit of a forward and backward pass. A longer
        /// trajectory has a micro-batch of its own. On a CPU, micro-batches of models of up to 256 MiB run in
        /// parallel, and their number is made even if possible.
        pub micro_batch_tokens: usize = 1280 => from(1.0).to(16777216.0),
        /// Number of optimizer updates per epoch. With 1, trajectories keep their order. With more than 1,
        /// they are shuffled and split evenly. Then a forward pass over the whole batch runs before the first
        /// update, and its log-probabilities are used to measure the mismatch. More than 1, and more epochs
        /// than 1, need another `policy.old_logprob` than `"detach"`.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Number of epochs over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// Weight of the experts' load-balancing loss in reinforcement learning; 0 means no such loss.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Activation checkpointing: keep only the input of each layer, and compute the layer again in the
        /// backward pass. This needs less memory and more time, and does not change the result. If absent, it
        /// is enabled automatically: on a CPU, if the memory plan would otherwise need more than 90% of the
        /// available memory; on a GPU, if a micro-batch would keep more than 1 GiB.
        pub recompute_layers: Option<bool> = None,
        /// Frozen parameters: patterns for their names, in which `*` matches any characters.
        pub freeze: Vec<String> = Vec::new(),
        /// File of trajectories, written by `rloss rollout`. The run trains on these trajectories and samples
        /// none. A step uses `rollout.prompts_per_step` groups. After the last group, training continues with
        /// the first group. Rewards and log-probabilities keep their stored values: set `rollout.temperature`
        /// to the temperature of sampling. Tokens drawn with `top_p`, `top_k` or `min_p` are stored with the
        /// tokens that were kept, and need a CPU.
        pub trajectories: Option<PathBuf> = None,
        /// Reaction to an update whose gradient norm is not finite. `"stop"` ends the run. `"skip"` does not
        /// change the weights and prints a warning. It also skips an update whose norm exceeds 10 times the
        /// median of the last 32 steps. The sixth consecutive skipped step ends the run.
        pub on_bad_step: OnBadStep = OnBadStep::Stop,
        /// Optimizer of reinforcement learning.
        pub optimizer: OptimizerSettings = OptimizerSettings::default(),
    }
}

table! {
    /// SFT warm-up before reinforcement learning. The loss covers assistant tokens only.
    pub struct SftWarmUpSettings {
        /// Number of steps; 0 means no SFT warm-up.
        pub steps: u64 = 0 => from(0.0).to(1e9),
        /// Demonstrations per step.
        pub batch_size: usize = 32 => from(1.0).to(1e6),
        /// JSONL file with rows `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`. Assistant
        /// messages with `"weight": 0` are not learned. If absent, the demonstrations of `gsm8k` or of a
        /// generated task are used.
        pub train_file: Option<PathBuf> = None,
        /// Validation rows, in the format of `train_file`, for the validation loss. If absent, the task's
        /// validation demonstrations are used; with `train_file`, none.
        pub validation_file: Option<PathBuf> = None,
        /// Maximum number of validation rows or demonstrations; the first ones are used.
        pub validation_rows_max: usize = 256 => from(1.0).to(1e6),
        /// Number of steps between validation losses, also before the first step; 0 means none.
        pub eval_every_steps: u64 = 0,
        /// Weight of the experts' load-balancing loss; 0 means no such loss.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Optimizer of the SFT warm-up.
        pub optimizer: OptimizerSettings = OptimizerSettings { lr: 1e-5, ..OptimizerSettings::default() },
    }
}

table! {
    /// The critic of `policy.advantage = "gae"`: a second model of the policy's architecture, with a head
    /// that gives one value per token. It starts from the policy's weights at the start of reinforcement
    /// learning; with an adapter, from the base with an adapter of its own. In every step, the critic is
    /// updated on the returns before the policy is updated.
    pub struct CriticSettings {
        /// Discount of later rewards, per token.
        pub gamma: f64 = 1.0 => from(0.0).to(1.0),
        /// λ of GAE: 1 uses the returns, 0 uses only the critic's next value.
        pub lambda: f64 = 1.0 => from(0.0).to(1.0),
        /// Critic warm-up: number of first steps of reinforcement learning in which only the critic is
        /// updated.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Optimizer updates per epoch, like `train.minibatches` of the policy.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Number of epochs over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// Value clipping: a token has no gradient if its value has moved toward its return by more than this
        /// within a step. 0 means no clipping.
        pub value_clip: f64 = 0.5 => from(0.0).to(1e6),
        /// Frozen parameters of the critic: patterns as in `train.freeze`. The names of its head are
        /// `score.weight` and `score.bias`.
        pub freeze: Vec<String> = Vec::new(),
        /// Optimizer of the critic.
        pub optimizer: OptimizerSettings = OptimizerSettings { lr: 1e-5, ..OptimizerSettings::default() },
    }
}

choice! {
    /// Reactions to an update with a bad gradient norm.
    pub enum OnBadStep {
        /// End the run, so that the weights are not damaged.
        Stop = "stop",
        /// Skip the update.
        Skip = "skip",
    }
}
