//! Causes in experts, norms and the head's matrix.

use super::{Cause, Change, F32_RUN, RELOADED_WEIGHTS, WeightEdit, missing_biases, rope::other_values};
use crate::model::config::{Config, SWIGLU_ALPHA};
use crate::model::layers_on_demand::WeightChange;
use crate::model::names::TensorRole;
use crate::ops::weight::Weight;
use anyhow::Context;
use std::sync::Arc;

const RMS_EPSILONS: [f64; 8] = [0.0, 1e-8, 1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 1e-3];

pub(super) fn causes(config: &Config) -> Vec<Cause> {
    let mut causes = vec![];
    if config.family.has_swiglu_limit {
        causes.extend([
            Cause::in_forward("SwiGLU limit missing", "gate and up are not clamped", F32_RUN, |variant| {
                variant.config.swiglu_limit = f64::from(f32::MAX);
            }),
            Cause::in_forward(
                "SwiGLU alpha missing",
                format!("the sigmoid's gain is 1, not {SWIGLU_ALPHA}"),
                F32_RUN,
                |variant| variant.forward.swiglu_alpha = 1.0,
            ),
        ]);
    }
    if config.family.has_experts {
        causes.extend([
            Cause::in_forward(
                "softmax before top-k",
                "the weights of the chosen experts come from a softmax over all experts",
                F32_RUN,
                |variant| variant.forward.softmax_before_top_k = true,
            ),
            missing_biases("router bias missing", "it is 0", &["router.bias"]),
            missing_biases(
                "expert biases missing",
                "the biases of gate_up and down are 0",
                &["gate_up_proj_bias", "down_proj_bias"],
            ),
            missing_biases("expert biases missing", "the biases of down are 0", &["down_proj_bias"]),
        ]);
    }
    causes.extend(other_values(&RMS_EPSILONS, config.rms_norm_eps).map(|epsilon| {
        let detail = format!("rms_norm_eps is {epsilon:e}");
        Cause::in_forward("other RMS epsilon", detail, F32_RUN, move |variant| {
            variant.config.rms_norm_eps = epsilon;
        })
    }));
    if !config.tie_word_embeddings {
        causes.push(tied_head());
    }
    causes
}

fn tied_head() -> Cause {
    let edit: WeightEdit = Arc::new(|parameters| {
        let mut specs = parameters.specs.iter();
        let spec = specs.find(|spec| spec.role == TensorRole::Embedding).context("no embedding")?.clone();
        let embedding = parameters.read_weight(&spec)?;
        let change: WeightChange = Arc::new(move |changed_spec, weight| match changed_spec.role {
            TensorRole::Head => {
                Ok(Weight::dense(&embedding.decode(&spec.working_shape())?.t()?.contiguous()?))
            }
            _ => Ok(weight),
        });
        Ok(change)
    });
    Cause::new("tied head", "the embedding is used as lm_head", RELOADED_WEIGHTS, Change::Weights(edit))
}
