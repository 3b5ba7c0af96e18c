//! Merges an adapter into its matrices, for other programs that do not read adapters. This program never
//! computes with merged weights.

use crate::model::adapter::{HEAD, Lora};
use crate::model::config::Config;
use crate::model::names::{Layout, ParameterSpec, TensorRole};
use crate::model::parameters::Parameters;
use crate::ops::cpu::host_values;
use crate::ops::product::{GemmThreads, forward_product};
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};

/// Returns the config of the merged model. A tied head with an adapter becomes a matrix of its own.
pub fn merged_config(config: &Config, parameters: &Parameters) -> Config {
    let adapts_head = parameters.adapter().is_some_and(|lora| lora.targets.iter().any(|name| name == HEAD));
    Config { tie_word_embeddings: config.tie_word_embeddings && !adapts_head, ..config.clone() }
}

/// Returns the tensor of `spec`, a tensor of [`merged_config`], in f32 with its adapter merged: `W + s · A ·
/// B`, where `s` is the adapter's scale. A tensor without an adapter is returned unchanged.
///
/// # Errors
/// When the tensor does not exist.
pub fn merge(parameters: &Parameters, spec: &ParameterSpec) -> Result<Tensor> {
    let own = parameters.index_of(&spec.name).map(|index| &parameters.specs[index]);
    let embedding = || parameters.specs.iter().find(|spec| spec.role == TensorRole::Embedding);
    let own = own.or_else(embedding).with_context(|| format!("no tensor {}", spec.name))?;
    let mut base = parameters.read_weight(own)?.decode(&own.working_shape())?;
    if own.layout == Layout::Transposed && spec.layout == Layout::AsStored {
        // The embedding of a head that was tied.
        base = base.t()?.contiguous()?;
    }
    let Some(lora) = parameters.adapter().filter(|lora| lora.targets.contains(&spec.name)) else {
        return Ok(base.detach());
    };
    let factor = |name: &str| -> Result<&Tensor> {
        parameters.values(parameters.index_of(name).with_context(|| format!("no tensor {name}"))?)
    };
    let [a, b] = Lora::factor_names(&spec.name);
    let (a, b) = (factor(&a)?, factor(&b)?);
    let (rank, output) = (lora.rank, *spec.working_shape().last().context("no columns")?);
    let scaled: Vec<f32> = host_values(a)?.iter().map(|value| value * lora.scale()).collect();
    let b = host_values(b)?;
    let mut values = base.flatten_all()?.to_vec1::<f32>()?;
    drop(base);
    let matrices = b.len() / (rank * output).max(1);
    let (rows, size) = (scaled.len() / matrices / rank, values.len() / matrices);
    for (index, values) in values.chunks_exact_mut(size).enumerate() {
        let a = &scaled[index * rows * rank..(index + 1) * rows * rank];
        let b = &b[index * rank * output..(index + 1) * rank * output];
        forward_product(GemmThreads::Pool, values, a, b, (rows, rank, output), true);
    }
    Ok(Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?)
}
