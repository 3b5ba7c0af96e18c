//! Distillation: the reverse KL divergence from a teacher, on the policy's own samples.
//!
//! At each sampled position, with the policy's distribution p, the teacher's q, and both at the sampling
//! temperature: `KL = Σ_v p(v) (log p(v) − log q(v))` over the whole vocabulary. The samples and q are
//! constant, so the gradient flows through p alone. This is `generalized_jsd_loss` of TRL's `GKDTrainer` with
//! `beta = 1` (Agarwal et al. 2023, arXiv:2306.13649, on-policy, λ = 1), and the exact form of the one-sample
//! estimate of Lu et al., "On-Policy Distillation" (Thinking Machines, 2025).

use super::aggregation::Normalizer;
use super::sequences::Sequences;
use crate::settings::{Limits, ParsedValue, Scalar, above, from, table};
use anyhow::Result;
use std::path::PathBuf;

table! {
    /// Distillation: adds the reverse KL divergence from a teacher to the loss, on the policy's own samples
    /// and over the whole vocabulary. On a CPU with one process, without `top_p`, `top_k` and `min_p`.
    pub struct DistillSettings {
        /// The teacher. It has the policy's vocabulary, and may be of another family and packed: a model's
        /// folder, a GGUF file, a checkpoint or a run folder. If memory is short, its layers stay on disk.
        /// `"self"` is the policy before reinforcement learning, without its adapter, under another
        /// `system_prompt`.
        pub teacher: TeacherSource = TeacherSource::Policy,
        /// Weight of the divergence, which is aggregated like the loss.
        pub coefficient: f64 = 1.0 => above(0.0).to(1e6),
        /// Weight of the policy loss beside it. With 0, the divergence replaces the policy loss, and keys of
        /// losses and advantages are refused.
        pub policy_loss_coefficient: f64 = 1.0 => from(0.0).to(1e6),
        /// System prompt that the teacher reads in place of the policy's: the developer instructions of
        /// GPT-OSS, the whole text of ChatML's system message. If absent, the teacher reads the policy's
        /// prompts.
        pub system_prompt: Option<String> = None,
    }
}

/// Where the teacher's weights come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TeacherSource {
    /// The policy at the start of reinforcement learning.
    Policy,
    /// A model's folder or GGUF file.
    Path(PathBuf),
}

impl Scalar for TeacherSource {
    fn describe_type(limits: Option<Limits>) -> String {
        format!("\"self\" or {}", PathBuf::describe_type(limits))
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        match String::parse(found, limits)?.as_str() {
            "self" => Ok(TeacherSource::Policy),
            _ => PathBuf::parse(found, limits).map(TeacherSource::Path),
        }
    }

    fn schema(limits: Option<Limits>) -> serde_json::Value {
        PathBuf::schema(limits)
    }

    fn to_toml(&self) -> String {
        if let TeacherSource::Path(path) = self { path.to_toml() } else { "\"self\"".to_owned() }
    }
}

impl DistillSettings {
    /// Returns whether the divergence replaces the policy loss.
    pub fn is_only_loss(&self) -> bool {
        self.policy_loss_coefficient == 0.0
    }
}

/// Aggregates the divergences of all positions of a micro-batch like a policy loss. Returns this loss and
/// ∂loss/∂KL, one value per token; 0 where the mask is false. The terms of all micro-batches add up to the
/// term of the batch. The caller multiplies both by its coefficient.
///
/// # Errors
/// When the lengths disagree, or a divergence is not finite where the mask is true.
pub fn distill_loss(
    sequences: &Sequences,
    divergences: &[f32],
    normalizer: &Normalizer,
) -> Result<(f64, Vec<f32>)> {
    sequences.check("divergences", divergences)?;
    Ok(normalizer.reduce(sequences, |_, t| (f64::from(divergences[t]), 1.0)))
}
