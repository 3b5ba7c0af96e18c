//! `[train]`, `[cold_start]`, `[critic]`, and their optimizers.

use crate::settings::{above, choice, from, table};
use std::path::PathBuf;

table! {
    /// The reinforcement-learning stage.
    pub struct TrainSettings {
        /// Steps of reinforcement learning.
        pub steps: u64 = 80 => from(0.0).to(1e9),
        /// Seed of the run: every random number derives from it.
        pub seed: u64 = 0,
        /// Tokens packed into one micro-batch, the unit of a forward and backward. A longer trajectory
        /// becomes a micro-batch of its own. On a CPU, models of up to 256 MiB run micro-batches in parallel,
        /// and their number is made even.
        pub micro_batch_tokens: usize = 1280 => from(1.0).to(16777216.0),
        /// Optimizer updates per epoch. Trajectories are shuffled and split evenly; 1 keeps their order. With
        /// more than 1, a forward over the whole batch precedes the first update, and the mismatch is
        /// measured on it.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Epochs over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// Weight of the experts' load-balancing loss in reinforcement learning; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Activation checkpointing: keep each layer's input only and compute the layer again in the
        /// backward. It needs less memory and more time, and gives the same bits. Absent means: on, on a CPU,
        /// if the memory plan would otherwise take more than 90% of the available memory; on a GPU, if a
        /// micro-batch would keep more than 1 GiB.
        pub recompute_layers: Option<bool> = None,
        /// Frozen parameters: patterns over their names, in which `*` matches any characters.
        pub freeze: Vec<String> = Vec::new(),
        /// Trajectories to train on instead of sampling, as `rloss rollout` writes them. A step takes
        /// `rollout.prompts_per_step` groups, and starts again at the first after the last. Rewards and
        /// log-probabilities stay as stored: set `rollout.temperature` to the value they were sampled at.
        pub trajectories: Option<PathBuf> = None,
        /// Reaction to an update whose gradient norm is not finite. `"stop"` ends the run. `"skip"` leaves
        /// the weights unchanged and warns; it also skips a norm above 10 times the median of the last
        /// 32 steps. The sixth skipped step in a row ends the run.
        pub on_bad_step: OnBadStep = OnBadStep::Stop,
        /// Optimizer of this stage.
        pub optimizer: OptimizerSettings = OptimizerSettings::default(),
    }
}

table! {
    /// SFT warm-up before reinforcement learning. The loss covers assistant tokens only.
    pub struct ColdStartSettings {
        /// Steps; 0 means no warm-up.
        pub steps: u64 = 0 => from(0.0).to(1e9),
        /// Demonstrations per step.
        pub batch_size: usize = 32 => from(1.0).to(1e6),
        /// JSONL rows `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`. Absent means the task's
        /// own demonstrations.
        pub train_file: Option<PathBuf> = None,
        /// Held-out rows in the format of `train_file`, for the validation loss. Absent means the task's own
        /// held-out demonstrations.
        pub validation_file: Option<PathBuf> = None,
        /// Maximum number of held-out rows or demonstrations for the validation loss; the first ones are
        /// used.
        pub validation_rows_max: usize = 256 => from(1.0).to(1e6),
        /// Steps between validation losses; 0 means only after the last step.
        pub eval_every_steps: u64 = 0,
        /// Weight of the experts' load-balancing loss; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Optimizer of this stage.
        pub optimizer: OptimizerSettings = OptimizerSettings { lr: 1e-5, ..OptimizerSettings::default() },
    }
}

table! {
    /// The critic of `policy.advantage = "gae"`: a second model of the policy's architecture, with a head
    /// that gives one value per token. It starts from the policy's weights at the start of reinforcement
    /// learning. In every step it is fitted to the returns before the policy is updated.
    pub struct CriticSettings {
        /// Discount of later rewards, per token.
        pub gamma: f64 = 1.0 => from(0.0).to(1.0),
        /// GAE's λ: 1 uses the returns, 0 the critic's next value.
        pub lambda: f64 = 1.0 => from(0.0).to(1.0),
        /// First steps of reinforcement learning in which only the critic is trained.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Optimizer updates per epoch, as `train.minibatches` for the policy.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Epochs over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// Value clipping: a token gives no gradient once its value has moved toward its return by more than
        /// this within a step. 0 means no clipping.
        pub value_clip: f64 = 0.5 => from(0.0).to(1e6),
        /// Frozen parameters of the critic: patterns as in `train.freeze`. Its head is `score.weight` and
        /// `score.bias`.
        pub freeze: Vec<String> = Vec::new(),
        /// Optimizer of the critic.
        pub optimizer: OptimizerSettings = OptimizerSettings { lr: 1e-5, ..OptimizerSettings::default() },
    }
}

table! {
    /// Optimizer and learning-rate schedule. Master weights are f32, and so are moments, except with
    /// `adamw_8bit`.
    pub struct OptimizerSettings {
        /// Update rule.
        pub kind: OptimizerKind = OptimizerKind::AdamW,
        /// Learning rate after the warm-up.
        pub lr: f64 = 1e-6 => above(0.0).to(10.0),
        /// Learning-rate schedule between the warm-up and the last step.
        pub schedule: Schedule = Schedule::Constant,
        /// Step at which the schedule ends; later steps keep its final learning rate. Absent means the
        /// stage's last step. A resumed run with another `train.steps` keeps its schedule by this key.
        pub schedule_steps: Option<u64> = None => from(1.0).to(1e9),
        /// Learning rate of the last step, as a fraction of `lr`; for `linear` and `cosine`.
        pub lr_final_fraction: f64 = 0.0 => from(0.0).to(1.0),
        /// Steps in which the learning rate rises linearly to `lr`.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Decay of AdamW's first moment.
        pub beta1: f64 = 0.9 => from(0.0).below(1.0),
        /// Decay of AdamW's second moment.
        pub beta2: f64 = 0.999 => from(0.0).below(1.0),
        /// ε of AdamW, added to the square root of the second moment.
        pub eps: f64 = 1e-8 => from(1e-20).to(1.0),
        /// Momentum of SGD; 0 means none.
        pub momentum: f64 = 0.0 => from(0.0).below(1.0),
        /// Decoupled weight decay, multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => from(0.0).to(100.0),
        /// Gradient clipping: the maximum global norm; 0 means no clipping.
        pub grad_norm_max: f64 = 1.0 => from(0.0).to(1e9),
    }
}

choice! {
    /// Reactions to an update with a bad gradient.
    pub enum OnBadStep {
        /// End the run before the weights are damaged.
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
        /// AdamW with block-wise 8-bit moments (Dettmers et al. 2022): 2.03 bytes a value instead of 8.
        AdamW8Bit = "adamw_8bit",
        /// Gradient descent, with `momentum` if set.
        Sgd = "sgd",
    }
}

choice! {
    /// Learning-rate schedules.
    pub enum Schedule {
        /// Constant `lr`.
        Constant = "constant",
        /// Linear from `lr` to `lr_final_fraction` of it.
        Linear = "linear",
        /// Cosine from `lr` to `lr_final_fraction` of it.
        Cosine = "cosine",
    }
}
