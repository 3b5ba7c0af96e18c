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
        /// Tokens packed into one forward and backward; a longer trajectory makes a micro-batch of its own. Models of up to
        /// 256 MiB run them side by side on a CPU, and get an even number of them.
        pub micro_batch_tokens: usize = 1280 => from(1.0).to(16777216.0),
        /// Updates of a pass over the step's trajectories, which are shuffled and split evenly; 1 keeps their order. With more
        /// than 1 a forward over the whole batch comes before the first update: the mismatch is measured on all of it.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Passes over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// Weight of the load-balancing loss over experts in reinforcement learning; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Keep only each layer's input and compute the layer again in the backward: less memory, more work, same bits. Absent
        /// means: where the micro-batches that run side by side would keep more than 1 GiB.
        pub recompute_layers: Option<bool> = None,
        /// Parameters that stay as they are, as patterns over their names in which `*` stands for any characters.
        pub freeze: Vec<String> = Vec::new(),
        /// Train on these trajectories, as `rloss rollout` writes them, instead of sampling: `rollout.prompts_per_step` of
        /// their groups a step, from the first again after the last. Rewards and log-probabilities stay as stored, so give
        /// `rollout.temperature` the value they were sampled at. Absent means sampling.
        pub trajectories: Option<PathBuf> = None,
        /// Optimizer of this stage.
        pub optimizer: OptimizerSettings = OptimizerSettings::default(),
    }
}

table! {
    /// The supervised stage before reinforcement learning, on assistant tokens only.
    pub struct ColdStartSettings {
        /// Steps; 0 means no cold start.
        pub steps: u64 = 0 => from(0.0).to(1e9),
        /// Demonstrations of a step.
        pub batch_size: usize = 32 => from(1.0).to(1e6),
        /// JSONL rows `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`; absent means the task's own demonstrations.
        pub train_file: Option<PathBuf> = None,
        /// Held-out rows of the same form, on which the loss is measured; absent means the task's own held-out demonstrations.
        pub validation_file: Option<PathBuf> = None,
        /// Measure the loss on the first so many held-out rows or demonstrations.
        pub validation_rows_max: usize = 256 => from(1.0).to(1e6),
        /// Steps between measurements of the held-out loss; 0 means only after the last step.
        pub eval_every_steps: u64 = 0,
        /// Weight of the load-balancing loss over experts; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Optimizer of this stage.
        pub optimizer: OptimizerSettings = OptimizerSettings { lr: 1e-5, ..OptimizerSettings::default() },
    }
}

table! {
    /// The critic of `policy.advantage = "gae"`: a second model of the policy's architecture, which starts from the policy's
    /// weights at the start of reinforcement learning, with a head that gives each token one value. Every step it learns the
    /// returns before the policy is updated.
    pub struct CriticSettings {
        /// Discount of later rewards, a token.
        pub gamma: f64 = 1.0 => from(0.0).to(1.0),
        /// Weight of later errors of the critic: 1 trusts the returns, 0 the next value.
        pub lambda: f64 = 1.0 => from(0.0).to(1.0),
        /// First steps of reinforcement learning in which only the critic learns.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Updates of a pass over the step's trajectories, as `train.minibatches` of the policy.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Passes over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// A token whose value came nearer to its return by more than this within a step learns no more in it; 0 means no bound.
        pub value_clip: f64 = 0.5 => from(0.0).to(1e6),
        /// Parameters of the critic that stay as they are, as patterns like those of `train.freeze`; its head is
        /// `score.weight` and `score.bias`.
        pub freeze: Vec<String> = Vec::new(),
        /// Optimizer of the critic.
        pub optimizer: OptimizerSettings = OptimizerSettings { lr: 1e-5, ..OptimizerSettings::default() },
    }
}

table! {
    /// Optimizer and learning-rate schedule. Masters are f32, and moments but for those of `adamw_8bit`.
    pub struct OptimizerSettings {
        /// Update rule.
        pub kind: OptimizerKind = OptimizerKind::AdamW,
        /// Learning rate after the warm-up.
        pub lr: f64 = 1e-6 => above(0.0).to(10.0),
        /// Course of the learning rate between warm-up and last step.
        pub schedule: Schedule = Schedule::Constant,
        /// Step at which the course ends, after which the learning rate stays; absent means the stage's last one. A run resumed
        /// with another `train.steps` keeps its course by it.
        pub schedule_steps: Option<u64> = None => from(1.0).to(1e9),
        /// Learning rate of the last step, as a fraction of `lr`; for `linear` and `cosine`.
        pub lr_final_fraction: f64 = 0.0 => from(0.0).to(1.0),
        /// Steps over which the learning rate rises linearly to `lr`.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Decay of AdamW's first moment.
        pub beta1: f64 = 0.9 => from(0.0).below(1.0),
        /// Decay of AdamW's second moment.
        pub beta2: f64 = 0.999 => from(0.0).below(1.0),
        /// Added to the root of AdamW's second moment.
        pub eps: f64 = 1e-8 => from(1e-20).to(1.0),
        /// Decay of SGD's moving sum of gradients; 0 keeps none.
        pub momentum: f64 = 0.0 => from(0.0).below(1.0),
        /// Decoupled weight decay, multiplied by the learning rate.
        pub weight_decay: f64 = 0.0 => from(0.0).to(100.0),
        /// Gradients are scaled down to this global norm; 0 means no clipping.
        pub grad_norm_max: f64 = 1.0 => from(0.0).to(1e9),
    }
}

choice! {
    /// Update rules.
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay (Loshchilov, Hutter 2019).
        AdamW = "adamw",
        /// The same with moments of 8 bits, block by block (Dettmers et al. 2022): 2.03 bytes a value instead of 8.
        AdamW8Bit = "adamw_8bit",
        /// Gradient descent, plain or with `momentum`.
        Sgd = "sgd",
    }
}

choice! {
    /// Courses of the learning rate.
    pub enum Schedule {
        /// `lr` throughout.
        Constant = "constant",
        /// A straight line from `lr` to `lr_final_fraction` of it.
        Linear = "linear",
        /// Half a cosine from `lr` to `lr_final_fraction` of it.
        Cosine = "cosine",
    }
}
