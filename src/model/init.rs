//! Random initialisation. Its values depend only on the config, the settings and the seed. They are
//! bit-identical on every machine.

use super::config::Config;
use super::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use super::storage::TensorStorage;
use crate::random::{Purpose, stream};
use crate::settings::{above, from, table};
use anyhow::Result;
use rand::RngCore;
use rayon::prelude::*;

table! {
    /// Random weights. A matrix has standard deviation d^-1/2, where d is its number of inputs. Output
    /// projections are also divided by sqrt(2 · layers). Biases are 0.
    pub struct InitSettings {
        /// Standard deviation of the embedding. Unused if the LM head shares the matrix.
        pub embedding_std: f64 = 0.5 => above(0.0).to(100.0),
        /// Factor for the LM head, whose standard deviation is this factor times d^-1/2.
        pub head_scale: f64 = 0.5 => above(0.0).to(100.0),
        /// Value of every attention sink in GPT-OSS. With 4, sinks take a large part of the attention; with
        /// 0, very little.
        pub sink: f64 = 4.0 => from(-20.0).to(20.0),
    }
}

/// Returns the spec and the f32 values of every parameter of `config`, in working layout and in
/// [`parameter_specs`] order.
///
/// Matrices are normally distributed with standard deviation fan-in^-1/2. Matrices that write to the residual
/// stream are also divided by sqrt(2 · layers) (Radford et al. 2019). Biases are 0, norms 1.
pub fn init(config: &Config, settings: &InitSettings, seed: u64) -> Result<Vec<(ParameterSpec, Vec<f32>)>> {
    config.check()?;
    let draw = |(index, spec): (usize, ParameterSpec)| {
        let matrix_std = (spec.fan_in() as f64).powf(-0.5);
        let count = spec.element_count();
        let normals = |std: f64| normals(seed, index as u64, std, count);
        let values = match spec.role {
            TensorRole::Embedding if config.tie_word_embeddings => normals(settings.head_scale * matrix_std),
            TensorRole::Embedding => normals(settings.embedding_std),
            TensorRole::InputProjection | TensorRole::Router => normals(matrix_std),
            TensorRole::OutputProjection => {
                normals(matrix_std / (2.0 * config.num_hidden_layers as f64).sqrt())
            }
            TensorRole::Head => normals(settings.head_scale * matrix_std),
            TensorRole::Bias => vec![0.0; count],
            TensorRole::Norm(_) => vec![1.0; count],
            TensorRole::Sinks => vec![settings.sink as f32; count],
            TensorRole::AdapterFactor => vec![0.0; count],
        };
        (spec, values)
    };
    let specs: Vec<_> = parameter_specs(config).into_iter().enumerate().collect();
    Ok(specs.into_par_iter().map(draw).collect())
}

/// Returns the tensors of a critic in [`value_model_specs`] order: the decoder stack and a new value head.
/// `stack` returns a tensor of the decoder stack. The weight of the head is normally distributed with
/// standard deviation 1 / (H + 1), so initial values are near 0. The bias is 0.
pub fn value_model(
    config: &Config,
    seed: u64,
    stack: impl Fn(&ParameterSpec) -> Result<TensorStorage>,
) -> impl Iterator<Item = Result<(ParameterSpec, TensorStorage)>> {
    // The first index of a random stream that no tensor of the policy uses.
    let stream_index = parameter_specs(config).len() as u64;
    let hidden = config.hidden_size;
    value_model_specs(config).into_iter().map(move |spec| {
        let values = match spec.name.as_str() {
            "score.weight" => TensorStorage::variable(
                &spec,
                normals(seed, stream_index, 1.0 / (hidden + 1) as f64, hidden),
            )?,
            "score.bias" => TensorStorage::variable(&spec, vec![0.0])?,
            _ => stack(&spec)?,
        };
        Ok((spec, values))
    })
}

/// Returns `count` draws from N(0, `std`²) by the method of Box and Muller (1958), computed in f64 and
/// rounded to f32.
///
/// Logarithm, sine and cosine come from the crate libm, because the functions of a platform may differ in the
/// last bit.
fn normals(seed: u64, index: u64, std: f64, count: usize) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Initialisation, &[index]);
    // Uniform in (0, 1], with 53 bits.
    let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64);
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let radius = std * (-2.0 * libm::log(uniform())).sqrt();
        let (sine, cosine) = libm::sincos(2.0 * std::f64::consts::PI * uniform());
        values.push((radius * cosine) as f32);
        values.push((radius * sine) as f32);
    }
    values.truncate(count);
    values
}
