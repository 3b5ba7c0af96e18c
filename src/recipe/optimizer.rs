//! `[train.optimizer]` and `[cold_start.optimizer]`.

use super::limits::{above, from};
use super::table::table;
use crate::choice::choice;

table! {
    /// Optimizer and learning-rate schedule. Masters are f32, and moments but for those of `adamw_8bit`.
    pub struct OptimizerConfig {
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
