//! `[train]`, `[cold_start]`, `[critic]`, and their optimizers.

use crate::settings::{above, choice, from, table};
use std::path::PathBuf;

table! {
    /// Reinforcement learning.
    pub struct TrainSettings {
        /// Number of steps of reinforcement learning.
        pub steps: u64 = 80 => from(0.0).to(1e9),
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

table! {
    /// Optimizer and learning-rate schedule. Master weights are f32. Moments are f32 too, except with
    /// `adamw_8bit`.
    pub struct OptimizerSettings {
        /// Update rule.
        pub kind: OptimizerKind = OptimizerKind::AdamW,
        /// Learning rate after the learning-rate warm-up.
        pub lr: f64 = 1e-6 => above(0.0).to(10.0),
        /// Learning-rate schedule from the end of the learning-rate warm-up to the last step.
        pub schedule: Schedule = Schedule::Constant,
        /// Step at which the schedule ends; later steps keep its final learning rate. If absent, the schedule
        /// ends at the last step of the stage. A resume that adds steps keeps this end, unless it sets
        /// another.
        pub schedule_steps: Option<u64> = None => from(1.0).to(1e9),
        /// Final learning rate of the schedule, as a fraction of `lr`; for `linear` and `cosine`.
        pub lr_final_fraction: f64 = 0.0 => from(0.0).to(1.0),
        /// Learning-rate warm-up: number of steps in which the learning rate rises linearly to `lr`.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Decay of AdamW's first moment.
        pub beta1: f64 = 0.9 => from(0.0).below(1.0),
        /// Decay of AdamW's second moment.
        pub beta2: f64 = 0.999 => from(0.0).below(1.0),
        /// ε of AdamW, which is added to the square root of the second moment.
        pub eps: f64 = 1e-8 => from(1e-20).to(1.0),
        /// Momentum of SGD; 0 means no momentum.
        pub momentum: f64 = 0.0 => from(0.0).below(1.0),
        /// Momentum of Muon, which is Nesterov's.
        pub muon_momentum: f64 = 0.95 => from(0.0).below(1.0),
        /// Decoupled weight decay of all trained tensors, multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => from(0.0).to(100.0),
        /// Gradient clipping: maximum of the global gradient norm; 0 means no clipping.
        pub grad_norm_max: f64 = 1.0 => from(0.0).to(1e9),
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

choice! {
    /// Update rules.
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay (Loshchilov, Hutter 2019).
        AdamW = "adamw",
        /// AdamW with block-wise 8-bit moments (Dettmers et al. 2022): 2.03 bytes per value instead of 8.
        AdamW8Bit = "adamw_8bit",
        /// Gradient descent, with `momentum` if set.
        Sgd = "sgd",
        /// Muon (Jordan 2024) for the matrices of the layers, each expert's by itself, and AdamW for vectors,
        /// embedding and head: 4 bytes per value of a matrix. Updates are scaled as in Moonlight, so learning
        /// rate and weight decay are AdamW's. Without an adapter. Several GPUs exchange split matrices.
        Muon = "muon",
    }
}

choice! {
    /// Learning-rate schedules.
    pub enum Schedule {
        /// Constant `lr`.
        Constant = "constant",
        /// Linear from `lr` to `lr` times `lr_final_fraction`.
        Linear = "linear",
        /// Cosine from `lr` to `lr` times `lr_final_fraction`.
        Cosine = "cosine",
    }
}
