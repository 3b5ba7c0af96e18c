//! Tests that need a GPU, or the emulated driver: `eval "$(tests/cuda_driver/setup.sh)"`.

mod attention;
mod log_prob;
mod optimizer;
mod rows;
mod sampling;

use crate::ops;
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Numbers that bf16 holds, f32 on the CPU.
pub(super) fn numbers(seed: u64, rows: usize, width: usize, size: f32) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..rows * width).map(|_| size * rng.random_range(-3.0f32..3.0)).collect();
    let values = Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap();
    values.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap()
}

pub(super) fn up(x: &Tensor, gpu: &Device) -> Tensor {
    x.to_dtype(DType::BF16).unwrap().to_device(gpu).unwrap()
}

pub(super) fn floats(x: &Tensor) -> Vec<f32> {
    let x = x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Every value within twice what rounding to bf16 makes of it, and `floor`.
pub(super) fn assert_rounded(got: &Tensor, exact: &Tensor, floor: f32) {
    assert_eq!(got.dims(), exact.dims());
    for (i, (got, exact)) in floats(got).into_iter().zip(floats(exact)).enumerate() {
        assert!((got - exact).abs() <= exact.abs() / 128.0 + floor, "element {i}: {got}, exactly {exact}");
    }
}

/// What the CPU's op gives for `inputs`, and their gradients for `dy`.
pub(super) fn on_cpu(
    inputs: &[&Tensor],
    dy: &Tensor,
    op: impl Fn(&[&Tensor]) -> candle_core::Result<Tensor>,
) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let y = op(&vars.iter().map(Var::as_tensor).collect::<Vec<_>>()).unwrap();
    let gradients = ops::upstream(&y, dy).unwrap().backward().unwrap();
    (y.detach(), vars.iter().map(|var| gradients.get(var).unwrap().clone()).collect())
}
