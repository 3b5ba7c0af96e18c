//! What the arms do to a forward: router noise and rounding. Each works on a row alone, so a perturbed row is the same
//! bits in any batch too, and rollout with an arm can be computed again on the same tokens.

use super::forward::ForwardOptions;
use super::mxfp4;
use super::names::ParameterSpec;
use super::weights::{Parameters, Resident};
use crate::bad_input;
use crate::random::{Purpose, stream};
use crate::recipe::Arms;
use anyhow::Result;
use candle_core::{Device, Tensor};
use rand::RngCore;

/// Normal noise on router logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterNoise {
    pub std: f64,
    /// The run's.
    pub seed: u64,
    pub pass: NoisyPass,
}

/// Which pass draws: two passes never share noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoisyPass {
    Rollout = 0,
    Training = 1,
    /// The forward that only gives old log-probs.
    SecondForward = 2,
}

impl RouterNoise {
    fn new(std: f64, seed: u64, pass: NoisyPass) -> Option<Self> {
        (std > 0.0).then_some(Self { std, seed, pass })
    }

    /// Noise for the logits `[T, E]` of layer `layer`. A row's stream is named by seed, pass, layer, position and the
    /// row's own bits: the same row gets the same noise wherever it is computed, another sequence gets other noise.
    pub(super) fn add(&self, logits: &Tensor, layer: usize, positions: &[u32]) -> Result<Tensor> {
        let (rows, experts) = logits.dims2()?;
        let mut noise = Vec::with_capacity(rows * experts);
        for (row, &position) in logits.to_vec2::<f32>()?.iter().zip(positions) {
            let bits = row.iter().fold(0u64, |hash, z| {
                (hash ^ u64::from(z.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
            });
            let place = [self.pass as u64, layer as u64, u64::from(position), bits];
            let mut rng = stream(self.seed, Purpose::RouterNoise, &place);
            let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64);
            noise.extend((0..experts).map(|_| {
                let radius = self.std * (-2.0 * libm::log(uniform())).sqrt();
                (radius * libm::cos(std::f64::consts::TAU * uniform())) as f32
            }));
        }
        Ok((logits + Tensor::from_vec(noise, (rows, experts), &Device::Cpu)?)?)
    }
}

impl ForwardOptions {
    /// The rollout's forward under `arms`.
    pub fn rollout(arms: &Arms, seed: u64) -> Self {
        Self {
            router_noise: RouterNoise::new(arms.rollout_noise(), seed, NoisyPass::Rollout),
            mantissa_bits: arms.rollout_bits(),
            ..Self::default()
        }
    }

    /// The training forward under `arms`.
    pub fn training(arms: &Arms, seed: u64) -> Self {
        Self {
            sinks: !arms.no_train_sinks,
            sink_gradient: !arms.no_sink_gradient,
            router_noise: RouterNoise::new(arms.train_noise(), seed, NoisyPass::Training),
            mantissa_bits: None,
        }
    }

    /// The forward that gives the old log-probs, where an arm asks for one.
    pub fn second_forward(arms: &Arms, seed: u64) -> Option<Self> {
        let noise = RouterNoise::new(arms.train_noise(), seed, NoisyPass::SecondForward);
        arms.second_forward_old_logprobs.then(|| Self { router_noise: noise, ..Self::training(arms, seed) })
    }
}

/// `x` with `bits` stored mantissa bits a value, to nearest, ties to even: 7 are bf16's, 3 those of FP8 E4M3.
/// The exponent keeps f32's range.
///
/// # Errors
/// When `x` is not an f32 tensor.
pub fn round_mantissa(x: &Tensor, bits: u32) -> Result<Tensor> {
    let mut values = x.flatten_all()?.to_vec1::<f32>()?;
    values.iter_mut().for_each(|v| *v = round_value(*v, bits));
    Ok(Tensor::from_vec(values, x.shape(), x.device())?)
}

fn round_value(value: f32, bits: u32) -> f32 {
    let dropped = 23 - bits.min(23);
    if dropped == 0 || !value.is_finite() {
        return value;
    }
    let raw = value.to_bits();
    let half = (1u32 << (dropped - 1)) - 1 + ((raw >> dropped) & 1);
    f32::from_bits(raw.saturating_add(half) & !((1 << dropped) - 1))
}

/// The weights that the rollout reads under `arms`: rounded, or the parameters themselves.
///
/// # Errors
/// [`crate::error::BadInput`] when `rollout_mxfp4` meets expert matrices that do not divide into its blocks.
pub fn rollout_weights(arms: &Arms, parameters: &Parameters) -> Result<Resident> {
    let bits = arms.rollout_bits();
    if bits.is_none() && !arms.rollout_mxfp4 {
        return parameters.detached();
    }
    parameters.mapped(&|spec, tensor| {
        let tensor = if arms.rollout_mxfp4 { to_mxfp4(spec, tensor)? } else { tensor.clone() };
        bits.map_or(Ok(tensor.clone()), |bits| round_mantissa(&tensor, bits))
    })
}

/// An expert matrix as MXFP4 holds it; any other tensor as it is.
fn to_mxfp4(spec: &ParameterSpec, tensor: &Tensor) -> Result<Tensor> {
    let expert = spec.name.ends_with("experts.gate_up_proj") || spec.name.ends_with("experts.down_proj");
    if !expert {
        return Ok(tensor.clone());
    }
    let shape: [usize; 3] = tensor.dims3()?.into();
    if !shape[1].is_multiple_of(mxfp4::BLOCK) {
        return Err(bad_input!(
            "arms.rollout_mxfp4: {} has {} inputs, which MXFP4's blocks of {} do not divide; leave the arm off",
            spec.name,
            shape[1],
            mxfp4::BLOCK
        ));
    }
    let (blocks, scales) = mxfp4::encode(&tensor.flatten_all()?.to_vec1::<f32>()?, shape);
    Ok(Tensor::from_vec(mxfp4::decode(&blocks, &scales, shape), tensor.shape(), tensor.device())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_bits_are_bf16_and_ties_go_to_even() {
        let mut rng = stream(1, Purpose::Initialisation, &[]);
        for _ in 0..10_000 {
            let value = f32::from_bits(rng.next_u32());
            if value.is_finite() && value.abs() < 1e38 {
                assert_eq!(round_value(value, 7), half::bf16::from_f32(value).to_f32(), "{value}");
            }
        }
        assert_eq!(round_value(1.0625, 3), 1.0);
        assert_eq!(round_value(1.1875, 3), 1.25);
        assert_eq!(round_value(0.3, 23), 0.3);
    }

    #[test]
    fn noise_is_normal_and_depends_on_the_row_alone() {
        let row = |seed: usize| (0..8).map(|i| ((i * 7 + seed) % 11) as f32).collect::<Vec<_>>();
        let logits = Tensor::new(vec![row(1), row(2), row(3)], &Device::Cpu).unwrap();
        let noise = RouterNoise { std: 0.5, seed: 3, pass: NoisyPass::Rollout };
        let all = noise.add(&logits, 2, &[5, 6, 7]).unwrap().to_vec2::<f32>().unwrap();
        let alone = noise.add(&logits.narrow(0, 1, 1).unwrap(), 2, &[6]).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(all[1], alone[0]);
        for (other, layer, position) in [
            (RouterNoise { pass: NoisyPass::Training, ..noise }, 2, 6),
            (RouterNoise { seed: 4, ..noise }, 2, 6),
            (noise, 3, 6),
            (noise, 2, 8),
        ] {
            let other = other.add(&logits.narrow(0, 1, 1).unwrap(), layer, &[position]).unwrap();
            assert_ne!(other.to_vec2::<f32>().unwrap()[0], alone[0]);
        }
        let many = Tensor::zeros((5000, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
        let positions: Vec<u32> = (0..5000).collect();
        let drawn = noise.add(&many, 0, &positions).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let square = drawn.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / drawn.len() as f64;
        assert!((square - 0.25).abs() < 0.01, "variance {square}");
    }
}
