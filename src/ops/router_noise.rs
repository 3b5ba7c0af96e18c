//! Normally distributed noise on router logits, for an ablation: `y_te = z_te + σ n_te`. The gradient of `z`
//! is the gradient of `y`.
//!
//! The random stream of a row depends on the seed, the pass, the layer, the position and the bits of the row.
//! So a row gets the same noise in every batch, and its result has the same bits. Rows of other sequences get
//! other noise.

use super::buffer::buffer;
use super::graph::{apply, contiguous};
use super::operation::{HostArgument, Operation};
use crate::random::{Purpose, stream};
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use rand::RngCore;
use std::sync::Arc;

/// Parameters of the noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterNoise {
    /// Standard deviation, above 0.
    pub std: f64,
    /// The seed of the run.
    pub seed: u64,
    pub pass: NoisyPass,
}

/// The pass that draws noise. Different passes draw independent noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoisyPass {
    Rollout = 0,
    Training = 1,
    /// The second forward pass, which computes only old log-probs.
    SecondForward = 2,
}

/// Returns `logits [T, E]` of layer `layer` plus noise. `positions [T]` are the positions of the rows.
///
/// # Errors
/// When the number of positions differs from the number of rows.
pub fn router_noise(
    logits: &Tensor,
    noise: RouterNoise,
    layer: usize,
    positions: &Arc<Vec<u32>>,
) -> Result<Tensor> {
    if positions.len() != logits.dim(0)? {
        bail!("router_noise: {} positions for logits {:?}", positions.len(), logits.dims());
    }
    apply([&contiguous(logits)?], AddNoise { noise, layer, positions: positions.clone() })
}

struct AddNoise {
    noise: RouterNoise,
    layer: usize,
    positions: Arc<Vec<u32>>,
}

impl Operation<1> for AddNoise {
    const NAME: &'static str = "router_noise";

    fn cpu(&self, [logits]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let experts = logits.shape().dims2()?.1;
        let (shape, logits) = (logits.shape().clone(), logits.values()?);
        let mut out = buffer(logits.len());
        let rows = logits.chunks_exact(experts).zip(out.chunks_exact_mut(experts));
        for ((row, out), &position) in rows.zip(self.positions.iter()) {
            let bits = row.iter().fold(0u64, |hash, z| {
                (hash ^ u64::from(z.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
            });
            let coordinates = [self.noise.pass as u64, self.layer as u64, u64::from(position), bits];
            let mut rng = stream(self.noise.seed, Purpose::RouterNoise, &coordinates);
            // Uniform in (0, 1] with 53 bits, for the Box–Muller transform (1958).
            let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64);
            for (out, z) in out.iter_mut().zip(row) {
                let radius = self.noise.std * (-2.0 * libm::log(uniform())).sqrt();
                *out = z + (radius * libm::cos(std::f64::consts::TAU * uniform())) as f32;
            }
        }
        Ok((CpuStorage::F32(out), shape))
    }

    fn backward(&self, [_]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([Some(grad.clone())])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn noisy(logits: &Tensor, noise: RouterNoise, layer: usize, positions: &[u32]) -> Vec<Vec<f32>> {
        router_noise(logits, noise, layer, &Arc::new(positions.to_vec())).unwrap().to_vec2().unwrap()
    }

    #[test]
    fn noise_is_normal_and_depends_on_the_row_alone() {
        let row = |seed: usize| (0..8).map(|i| ((i * 7 + seed) % 11) as f32).collect::<Vec<_>>();
        let logits = Tensor::new(vec![row(1), row(2), row(3)], &Device::Cpu).unwrap();
        let noise = RouterNoise { std: 0.5, seed: 3, pass: NoisyPass::Rollout };
        let one = logits.narrow(0, 1, 1).unwrap();
        let all = noisy(&logits, noise, 2, &[5, 6, 7]);
        let alone = noisy(&one, noise, 2, &[6]);
        assert_eq!(all[1], alone[0]);
        for (other, layer, position) in [
            (RouterNoise { pass: NoisyPass::Training, ..noise }, 2, 6),
            (RouterNoise { seed: 4, ..noise }, 2, 6),
            (noise, 3, 6),
            (noise, 2, 8),
        ] {
            assert_ne!(noisy(&one, other, layer, &[position])[0], alone[0]);
        }
        let many = Tensor::zeros((5000, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
        let positions: Vec<u32> = (0..5000).collect();
        let drawn = noisy(&many, noise, 0, &positions).concat();
        let square = drawn.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / drawn.len() as f64;
        assert!((square - 0.25).abs() < 0.01, "variance {square}");
    }
}
