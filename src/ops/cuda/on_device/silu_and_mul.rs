//! Tests of SwiGLU without clamping: empty calls, refusals.

use super::{assert_refused, output_and_gradients};
use crate::ops::cuda::open;
use crate::ops::silu_and_mul;
use candle_core::{DType, Tensor};

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
