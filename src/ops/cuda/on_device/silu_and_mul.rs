//! Tests of SwiGLU without clamping on a GPU or the emulated driver, compared with the CPU.

use super::{assert_refused, assert_rounded, numbers, output_and_gradients, to_gpu};
use crate::ops::cuda::open;
use crate::ops::silu_and_mul;
use candle_core::{DType, Tensor};

#[test]
fn silu_gated_gives_the_cpus_values_and_gradients() {
    let gpu = open(0).unwrap();
    for (rows, width) in [(1, 1), (3, 10), (67, 48)] {
        let [gate, up_, dy] = [1, 2, 3].map(|seed| numbers(seed, rows, width, 2.0));
        let op = |x: &[&Tensor]| silu_and_mul(x[0], x[1]);
        let (y, gradients) = output_and_gradients(&[&gate, &up_], &dy, op);
        let (got, got_gradients) =
            output_and_gradients(&[&to_gpu(&gate, &gpu), &to_gpu(&up_, &gpu)], &to_gpu(&dy, &gpu), op);
        assert_rounded(&got, &y, 1e-6);
        assert_rounded(&got_gradients[0], &gradients[0], 1e-5);
        assert_rounded(&got_gradients[1], &gradients[1], 1e-5);
    }
}

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let empty = Tensor::zeros((0, 16), DType::BF16, &gpu).unwrap();
    let (y, gradients) = output_and_gradients(&[&empty, &empty], &empty, |x| silu_and_mul(x[0], x[1]));
    assert_eq!((y.dims(), gradients[1].dims()), (&[0, 16][..], &[0, 16][..]));
    let single = Tensor::zeros((2, 16), DType::F32, &gpu).unwrap();
    assert_refused(silu_and_mul(&single, &single), "silu_gated: gate [2, 16] is F32, expected BF16 on a GPU");
    let whole = Tensor::zeros((2, 16), DType::BF16, &gpu).unwrap();
    let turned = Tensor::zeros((16, 2), DType::BF16, &gpu).unwrap().t().unwrap();
    assert_refused(silu_and_mul(&whole, &turned), "silu_gated: up [2, 16] with strides");
}
