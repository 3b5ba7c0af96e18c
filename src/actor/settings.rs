//! The settings of an optimizer.

use crate::settings::{above, choice, from, table};

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
        /// rate and weight decay are AdamW's. Without an adapter, and in one process.
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
