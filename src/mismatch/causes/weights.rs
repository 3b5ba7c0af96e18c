//! Mistakes that lie in the weights.

use crate::model::config::Config;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::parameters::Parameters;
use crate::model::rounding::WeightRounding;
use crate::ops::mxfp4::{BLOCK, MAGNITUDES};
use crate::ops::weight::Weight;
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::collections::HashMap;

/// A change of every tensor that it concerns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightEdit {
    ZeroSinks,
    SinksPerKvHead(usize),
    SinksOfLayer(usize),
    NoBias(usize),
    TiedHead,
    /// Q and K permuted within each head, so that half-split RoPE turns what were neighbours.
    InterleavedHeads,
    Quantised(Quantised),
    Mantissa(u32),
}

/// A group of biases that go missing together.
pub struct Biases {
    pub name: &'static str,
    pub words: &'static str,
    parts: &'static [&'static str],
}

pub const BIASES: [Biases; 6] = [
    Biases {
        name: "attention biases missing",
        words: "those of q, k, v and o are 0",
        parts: &["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"],
    },
    Biases {
        name: "attention biases missing",
        words: "those of q, k and v are 0",
        parts: &["q_proj.bias", "k_proj.bias", "v_proj.bias"],
    },
    Biases { name: "attention biases missing", words: "those of o are 0", parts: &["o_proj.bias"] },
    Biases { name: "router bias missing", words: "it is 0", parts: &["router.bias"] },
    Biases {
        name: "expert biases missing",
        words: "those of gate_up and down are 0",
        parts: &["gate_up_proj_bias", "down_proj_bias"],
    },
    Biases { name: "expert biases missing", words: "those of down are 0", parts: &["down_proj_bias"] },
];

/// A way to take a sink by KV head.
pub struct SinkRule {
    pub words: &'static str,
    /// The sink of `head`, of (query heads, KV heads).
    sink: fn(usize, (usize, usize)) -> usize,
}

pub const SINK_RULES: [SinkRule; 3] = [
    SinkRule { words: "query head h takes sink h / group", sink: |h, (heads, kv)| h / (heads / kv) },
    SinkRule { words: "query head h takes sink h mod KV heads", sink: |h, (_, kv)| h % kv },
    SinkRule {
        words: "query head h takes that of its group's first head",
        sink: |h, (heads, kv)| h / (heads / kv) * (heads / kv),
    },
];

/// Weights in a shorter form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantised {
    /// All tensors.
    Bf16,
    Fp8(Scope, SharedScale),
    Int8(Scope, SharedScale),
    /// Expert matrices; with the scale of the largest magnitude's own power of two, which cuts off what lies beyond 6, or with
    /// the next one where needed.
    Mxfp4 {
        cuts_off: bool,
    },
}

/// Which matrices are quantised. Embedding, router and head never are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Attention's and the experts'.
    Linear,
    Experts,
}

/// What shares a scale: the largest magnitude is the form's largest number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedScale {
    /// No scale: a plain cast.
    One,
    /// A matrix, or one expert's.
    Tensor,
    /// One output.
    Channel,
}

impl SharedScale {
    pub const ALL: [SharedScale; 3] = [SharedScale::One, SharedScale::Tensor, SharedScale::Channel];
}

impl Quantised {
    pub(super) fn name(self) -> &'static str {
        match self {
            Quantised::Bf16 => "bf16 weights",
            Quantised::Fp8(..) => "fp8 weights",
            Quantised::Int8(..) => "int8 weights",
            Quantised::Mxfp4 { .. } => "MXFP4 weights",
        }
    }

    pub(super) fn words(self) -> String {
        let (scope, scale) = match self {
            Quantised::Bf16 => return "every tensor is rounded".into(),
            Quantised::Mxfp4 { cuts_off: true } => {
                return "expert matrices in blocks of 32, what lies beyond 6 of their scale cut off".into();
            }
            Quantised::Mxfp4 { cuts_off: false } => return "expert matrices in blocks of 32".into(),
            Quantised::Fp8(scope, scale) | Quantised::Int8(scope, scale) => (scope, scale),
        };
        let scope = match scope {
            Scope::Linear => "attention and expert matrices",
            Scope::Experts => "expert matrices",
        };
        let scale = match scale {
            SharedScale::One => "without a scale",
            SharedScale::Tensor => "a scale a matrix",
            SharedScale::Channel => "a scale an output",
        };
        format!("{scope}, {scale}")
    }
}

/// Edits with what they read of other tensors.
pub struct WeightEdits {
    edits: Vec<WeightEdit>,
    config: Config,
    /// Sinks and embedding as they are, where an edit puts them elsewhere.
    others: HashMap<String, (ParameterSpec, Weight)>,
}

impl WeightEdits {
    /// `edits` of `parameters`, a model of `config`.
    ///
    /// # Errors
    /// When a tensor that an edit reads is missing.
    pub fn new(edits: &[WeightEdit], config: &Config, parameters: &Parameters) -> Result<Self> {
        let reads = |spec: &&ParameterSpec| {
            edits.iter().any(|edit| match edit {
                WeightEdit::SinksOfLayer(_) => spec.role == TensorRole::Sinks,
                WeightEdit::TiedHead => spec.role == TensorRole::Embedding,
                _ => false,
            })
        };
        let found = |spec: &ParameterSpec| Ok((spec.name.clone(), (spec.clone(), parameters.read(spec)?)));
        let others = parameters.specs.iter().filter(reads).map(found).collect::<Result<_>>()?;
        Ok(Self { edits: edits.to_vec(), config: config.clone(), others })
    }

    /// Tensor `spec` after all edits; one that none concerns is shared.
    ///
    /// # Errors
    /// When an edit does not fit.
    pub fn apply(&self, spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
        self.edits.iter().try_fold(weight, |weight, edit| self.edited(*edit, spec, weight))
    }

    fn other(&self, name: &str) -> Result<Tensor> {
        let (spec, weight) = self.others.get(name).with_context(|| format!("no tensor {name}"))?;
        values_of(weight, spec)
    }

    fn edited(&self, edit: WeightEdit, spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
        let config = &self.config;
        Ok(Weight::dense(&match edit {
            WeightEdit::ZeroSinks if spec.role == TensorRole::Sinks => {
                values_of(&weight, spec)?.zeros_like()?
            }
            WeightEdit::SinksPerKvHead(rule) if spec.role == TensorRole::Sinks => {
                let (heads, kv) = (config.num_attention_heads, config.num_key_value_heads);
                let sink = |h| (SINK_RULES[rule].sink)(h, (heads, kv)) as u32;
                let order: Vec<u32> = (0..heads).map(sink).collect();
                taken(&values_of(&weight, spec)?, order)?
            }
            WeightEdit::SinksOfLayer(by) if spec.role == TensorRole::Sinks => {
                let layer = spec.layer.unwrap_or(0);
                let other = (layer + by) % config.num_hidden_layers;
                self.other(&spec.name.replace(&format!("layers.{layer}."), &format!("layers.{other}.")))?
            }
            WeightEdit::NoBias(group) if BIASES[group].parts.iter().any(|part| spec.name.ends_with(part)) => {
                values_of(&weight, spec)?.zeros_like()?
            }
            WeightEdit::TiedHead if spec.role == TensorRole::Head => {
                self.other("model.embed_tokens.weight")?.t()?.contiguous()?
            }
            WeightEdit::InterleavedHeads if ["q_proj", "k_proj"].iter().any(|p| spec.name.contains(p)) => {
                let values = values_of(&weight, spec)?;
                let half = config.head_dim / 2;
                let outputs = values.dim(candle_core::D::Minus1)?;
                // Half-split RoPE turns place i with i + half; there the neighbours 2i and 2i + 1 must lie.
                let place = |o: usize| {
                    let (head, i) = (o / config.head_dim * config.head_dim, o % config.head_dim);
                    (head + if i < half { 2 * i } else { 2 * (i - half) + 1 }) as u32
                };
                taken(&values, (0..outputs).map(place).collect())?
            }
            WeightEdit::Mantissa(bits) => return to_bits(bits).apply(spec, weight),
            WeightEdit::Quantised(quantised) => return quantise(quantised, spec, weight),
            _ => return Ok(weight),
        }))
    }
}

/// The tensor of `spec` in f32 on the host.
fn values_of(weight: &Weight, spec: &ParameterSpec) -> Result<Tensor> {
    Ok(weight.decoded(&spec.working_shape())?)
}

/// Places `order` of the last axis.
fn taken(values: &Tensor, order: Vec<u32>) -> Result<Tensor> {
    Ok(values.index_select(&Tensor::new(order, values.device())?, values.rank() - 1)?)
}

fn to_bits(bits: u32) -> WeightRounding {
    WeightRounding { mxfp4: false, bits: Some(bits) }
}

fn quantise(quantised: Quantised, spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
    let linear = spec.is_expert_matrix() || spec.name.contains("_proj.weight");
    let concerns = |scope| match scope {
        Scope::Linear => linear,
        Scope::Experts => spec.is_expert_matrix(),
    };
    Ok(Weight::dense(&match quantised {
        Quantised::Bf16 => return to_bits(7).apply(spec, weight),
        Quantised::Mxfp4 { cuts_off: false } => {
            return WeightRounding { mxfp4: true, bits: None }.apply(spec, weight);
        }
        Quantised::Mxfp4 { cuts_off: true } if spec.is_expert_matrix() => {
            mxfp4_cut_off(&values_of(&weight, spec)?)?
        }
        Quantised::Fp8(scope, scale) if concerns(scope) => {
            scaled(&values_of(&weight, spec)?, scale, FP8_MAX, fp8)?
        }
        Quantised::Int8(scope, scale) if concerns(scope) => {
            let round = |x: f32| x.round_ties_even().clamp(-128.0, 127.0);
            scaled(&values_of(&weight, spec)?, scale, 127.0, round)?
        }
        _ => return Ok(weight),
    }))
}

/// Blocks of 32 inputs at the power of two that puts the largest magnitude in 4..8; magnitudes round to the nearest of the
/// form's eight, ties to the even index, and so those beyond 6 to 6.
fn mxfp4_cut_off(tensor: &Tensor) -> Result<Tensor> {
    let [_, inputs, outputs]: [usize; 3] = tensor.dims3()?.into();
    let mut values = tensor.flatten_all()?.to_vec1::<f32>()?;
    for matrix in values.chunks_exact_mut(inputs * outputs) {
        for block in matrix.chunks_exact_mut(BLOCK * outputs) {
            for output in 0..outputs {
                let places = (0..BLOCK).map(|i| i * outputs + output);
                let largest = places.clone().fold(0f32, |m, at| m.max(block[at].abs()));
                let exponent = ((largest.to_bits() >> 23) as i32 - 127 - 2).clamp(-127, 127);
                let scale = f32::powi(2.0, exponent);
                places.for_each(|at| block[at] = nearest_magnitude(block[at] / scale) * scale);
            }
        }
    }
    Ok(Tensor::from_vec(values, tensor.shape(), tensor.device())?)
}

fn nearest_magnitude(x: f32) -> f32 {
    let mut best = 0;
    for (index, magnitude) in MAGNITUDES.iter().enumerate() {
        let (new, old) = ((x.abs() - magnitude).abs(), (x.abs() - MAGNITUDES[best]).abs());
        if new < old || new == old && index % 2 == 0 {
            best = index;
        }
    }
    MAGNITUDES[best].copysign(x)
}

/// The largest number of E4M3.
const FP8_MAX: f32 = 448.0;

/// The nearest number of E4M3, ties to even; beyond the largest, that.
fn fp8(x: f32) -> f32 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    // Three bits of mantissa, and below 2^-6 the spacing of subnormals.
    let exponent = ((x.abs().to_bits() >> 23) as i32 - 127).max(-6);
    let quantum = f32::powi(2.0, exponent - 3);
    ((x / quantum).round_ties_even() * quantum).clamp(-FP8_MAX, FP8_MAX)
}

/// `round` of every value over its scale, times the scale. `tensor` is `[in, out]` or `[E, in, out]`.
fn scaled(tensor: &Tensor, scale: SharedScale, largest: f32, round: fn(f32) -> f32) -> Result<Tensor> {
    let dims = tensor.dims().to_vec();
    let (inputs, outputs) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let mut values = tensor.flatten_all()?.to_vec1::<f32>()?;
    for matrix in values.chunks_exact_mut(inputs * outputs) {
        let mut scales = vec![0f32; outputs];
        for row in matrix.chunks_exact(outputs) {
            scales.iter_mut().zip(row).for_each(|(s, x)| *s = s.max(x.abs()));
        }
        match scale {
            SharedScale::One => scales.fill(largest),
            SharedScale::Tensor => {
                let highest = scales.iter().fold(0f32, |m, s| m.max(*s));
                scales.fill(highest);
            }
            SharedScale::Channel => {}
        }
        scales.iter_mut().for_each(|s| *s = if *s > 0.0 { *s / largest } else { 1.0 });
        for row in matrix.chunks_exact_mut(outputs) {
            row.iter_mut().zip(&scales).for_each(|(x, s)| *x = round(*x / s) * s);
        }
    }
    Ok(Tensor::from_vec(values, dims, tensor.device())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_rounds_to_the_nearest_of_its_numbers() {
        for (x, nearest) in [
            (0.0, 0.0),
            (1.0, 1.0),
            (1.06, 1.0),
            (1.0625, 1.0),
            (1.1875, 1.25),
            (500.0, 448.0),
            (-17.0, -16.0),
            (-19.0, -20.0),
            (0.001, 0.001953125),
            (0.0009, 0.0),
            (0.01, 0.009765625),
        ] {
            assert_eq!(fp8(x), nearest, "{x}");
        }
    }
}
