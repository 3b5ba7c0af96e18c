//! Tests that need a GPU, or the emulated driver: `eval "$(tests/cuda_driver/setup.sh)"`.
//!
//! `benches/gpu_check` has the table of ops and shapes whose values are compared with the CPU's, and its test
//! runs it. Here is what an op has of its own: edges, bits, refusals.

mod attention;
mod decode;
mod embedding;
mod experts;
mod fused;
mod head;
mod head_parts;
mod load_balance;
mod log_prob;
mod low_rank;
mod muon;
mod optimizer;
mod packed_weights;
mod parameter;
mod rope;
mod router;
mod rows;
mod sampling;
mod shared_keys;
mod silu_and_mul;

use crate::ops;
use crate::ops::graph::differentiate;
use crate::ops::parameter::GradientSink;
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// Returns numbers that bf16 represents exactly, as f32 on the CPU.
pub(super) fn numbers(seed: u64, rows: usize, width: usize, size: f32) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..rows * width).map(|_| size * rng.random_range(-3.0f32..3.0)).collect();
    let values = Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap();
    values.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap()
}

pub(super) fn to_gpu(x: &Tensor, gpu: &Device) -> Tensor {
    x.to_dtype(DType::BF16).unwrap().to_device(gpu).unwrap()
}

pub(super) fn floats(x: &Tensor) -> Vec<f32> {
    let x = x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Checks that each value differs by at most twice the rounding error of bf16, plus `floor`.
pub(super) fn assert_rounded(got: &Tensor, exact: &Tensor, floor: f32) {
    assert_eq!(got.dims(), exact.dims());
    for (i, (got, exact)) in floats(got).into_iter().zip(floats(exact)).enumerate() {
        assert!((got - exact).abs() <= exact.abs() / 128.0 + floor, "element {i}: {got} instead of {exact}");
    }
}

/// Checks that each value differs by at most `error` times the largest exact value.
pub(super) fn assert_close(got: &Tensor, exact: &Tensor, error: f32) {
    assert_eq!((got.dims(), got.dtype()), (exact.dims(), DType::F32));
    let (got, exact) = (floats(got), floats(exact));
    let size = exact.iter().fold(0f32, |size, x| size.max(x.abs()));
    for (i, (got, exact)) in got.into_iter().zip(exact).enumerate() {
        assert!(
            (got - exact).abs() <= error * size,
            "element {i}: {got} instead of {exact}; the largest value is {size}"
        );
    }
}

pub(super) fn assert_refused<T>(result: candle_core::Result<T>, text: &str) {
    let error = result.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains(text), "{error}");
}

/// The gradient buffer of one parameter.
pub(super) struct Buffer(pub Tensor);

impl GradientSink for Buffer {
    fn add(
        &self,
        _: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        add(&self.0)
    }
}

/// Returns `values` as a trainable parameter, and its gradient buffer, which has the initial values `held`.
pub(super) fn trainable_parameter(values: &Tensor, held: &Tensor) -> (ops::Parameter, Tensor) {
    // The buffer is a copy, because additions in place must change no other tensor.
    let buffer = held.copy().unwrap();
    let variable = Var::from_tensor(values).unwrap();
    (ops::Parameter::with_gradient_sink(variable.as_tensor(), Arc::new(Buffer(buffer.clone())), 0), buffer)
}

/// Returns the output of `forward`, and the gradients of `leaves` for the output gradient `dy`.
pub(super) fn forward_and_backward(
    leaves: &[&Tensor],
    dy: &Tensor,
    forward: impl FnOnce() -> candle_core::Result<Tensor>,
) -> (Tensor, Vec<Option<Tensor>>) {
    let mut y = None;
    let gradients = differentiate(leaves, || {
        let out = forward()?;
        y = Some(out.clone());
        candle_core::Result::Ok(vec![(out, dy.clone())])
    });
    (y.unwrap(), gradients.unwrap())
}

/// Returns the output of the op for `inputs`, and the gradients of `inputs` for the output gradient `dy`.
/// Everything is computed on the device of the inputs.
pub(super) fn output_and_gradients(
    inputs: &[&Tensor],
    dy: &Tensor,
    op: impl Fn(&[&Tensor]) -> candle_core::Result<Tensor>,
) -> (Tensor, Vec<Tensor>) {
    let (y, gradients) = forward_and_backward(inputs, dy, || op(inputs));
    (y, gradients.into_iter().map(Option::unwrap).collect())
}
