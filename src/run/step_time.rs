//! The time of a training step on this machine's processors, from products that are measured at startup.

use super::source::precision;
use crate::metrics::{format_count, format_duration};
use crate::model::config::Config;
use crate::model::names::ParameterSpec;
use crate::ops::packed_weights::{BlockType, PackedFormat, PackedMatrix, StoredRows};
use crate::ops::weight::Weight;
use crate::recipe::Recipe;
use anyhow::Result;
use candle_core::{Device, Tensor};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

/// Shape of the measured matrix, `[k, n]`.
const SHAPE: (usize, usize) = (1024, 2048);
/// Rows of a product of training.
const TRAINING_ROWS: usize = 256;

/// The part of a run that decides about the time of its products.
#[derive(Clone, Copy)]
pub struct StepProducts<'a> {
    pub recipe: &'a Recipe,
    pub config: &'a Config,
    pub specs: &'a [ParameterSpec],
    /// The type of blocks of a GGUF file that stay packed.
    pub blocks: Option<BlockType>,
    pub has_adapter: bool,
    pub recomputes_layers: bool,
}

impl StepProducts<'_> {
    /// Returns the time of a step of reinforcement learning whose answers all have the maximum length, as
    /// text. It is measured in a few tenths of a second, and has products by the weights alone. `None` for a
    /// recipe without such steps, and below a second.
    ///
    /// # Errors
    /// When a product fails.
    pub fn time(&self) -> Result<Option<String>> {
        let rollout = &self.recipe.rollout;
        let samples = rollout.prompts_per_step * rollout.samples_per_prompt;
        if self.recipe.train.steps == 0 || samples == 0 {
            return Ok(None);
        }
        let together = rollout.sequences_max.clamp(1, samples);
        let passes = rollout.response_tokens_max as f64 * samples as f64 / together as f64;
        let tokens = rollout.response_tokens_max as f64 * samples as f64;
        // Forward, the gradient of the input and, of trained weights, that of the weights.
        let products =
            2.0 + if self.has_adapter { 0.0 } else { 1.0 } + if self.recomputes_layers { 1.0 } else { 0.0 };
        let weights = self.weights_of_a_token();
        let sampling = passes * weights * self.seconds_per_weight(together)?;
        let training =
            tokens * products * weights * self.seconds_per_weight(TRAINING_ROWS)? / TRAINING_ROWS as f64;
        if sampling + training < 1.0 {
            return Ok(None);
        }
        Ok(Some(format!(
            "up to {} if every answer is as long as allowed: sampling {}, training {} ({} of {} tokens; products \
             measured here, without attention{})",
            format_duration(sampling + training),
            format_duration(sampling),
            format_duration(training),
            format_count(samples as u64, "sample"),
            rollout.response_tokens_max,
            if rollout.resample_rounds_max > 0 { " and extra rounds of sampling" } else { "" }
        )))
    }

    /// Returns the number of weights of the matrices that a token passes through.
    fn weights_of_a_token(&self) -> f64 {
        let share = self.config.num_experts_per_tok as f64 / self.config.num_local_experts.max(1) as f64;
        let head_is_embedding = self.config.tie_word_embeddings;
        let is_used = |spec: &&ParameterSpec| {
            spec.is_matrix() && (head_is_embedding || !spec.name.ends_with("embed_tokens.weight"))
        };
        let of = |spec: &ParameterSpec| {
            spec.element_count() as f64 * if spec.is_expert_matrix() { share } else { 1.0 }
        };
        self.specs.iter().filter(is_used).map(of).sum()
    }

    /// Measures the seconds of a product of `rows` rows, divided by the weights of its matrix.
    fn seconds_per_weight(&self, rows: usize) -> Result<f64> {
        let (k, n) = SHAPE;
        let weight = match self.blocks {
            Some(kind) => {
                let fill = |rows: StoredRows| {
                    rows.values
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, byte)| *byte = [0x5a, 0x23, 0x17][i % 3]);
                    Ok::<_, Infallible>(())
                };
                let Ok(matrix) = PackedMatrix::read(PackedFormat::Blocks(kind), [1, k, n], fill);
                Weight::Packed(Arc::new(matrix))
            }
            None => Weight::dense(&Tensor::full(0.5f32, (k, n), &Device::Cpu)?),
        };
        let weight = weight.with_precision(precision(self.recipe)).with_bf16_copies();
        let x = Tensor::full(0.5f32, (rows, k), &Device::Cpu)?;
        let mut least = f64::INFINITY;
        for _ in 0..4 {
            let start = Instant::now();
            weight.matmul(&x, None)?;
            least = least.min(start.elapsed().as_secs_f64());
        }
        Ok(least / (k * n) as f64)
    }
}
