//! Tests of top-k routing: one expert, replayed experts, empty calls, refusals.

use super::{assert_refused, floats, numbers, output_and_gradients};
use crate::ops::cuda::{open, top_k_softmax_backward};
use crate::ops::{Dispatch, load_balance, route, top_k_softmax};
use candle_core::{DType, Tensor};

#[test]
fn one_expert_takes_all() {
    let gpu = open(0).unwrap();
    let logits = numbers(1, 3, 1, 1.0).to_device(&gpu).unwrap();
    let dweights = numbers(2, 3, 1, 1.0).to_device(&gpu).unwrap();
    let op = |x: &[&Tensor]| top_k_softmax(x[0], &route(x[0], 1)?);
    let (weights, gradients) = output_and_gradients(&[&logits], &dweights, op);
    assert_eq!((floats(&weights), floats(&gradients[0])), (vec![1.0; 3], vec![0.0; 3]));
    let plan = Dispatch::new(&route(&logits, 1).unwrap(), 1).unwrap();
    let loss = load_balance(&logits, &plan, None).unwrap();
    assert!((floats(&loss)[0] - 1.0).abs() <= 4e-6, "{loss}");
}

#[test]
fn replayed_experts_that_do_not_exist_are_seen() {
    let gpu = open(0).unwrap();
    let logits = Tensor::new(&[[1f32, 2.0], [3.0, 3.0]], &gpu).unwrap();
    let routes = Tensor::new(&[[0u32, 2], [1, 0]], &gpu).unwrap();
    let weights = floats(&top_k_softmax(&logits, &routes).unwrap());
    assert!(weights[..2].iter().all(|w| w.is_nan()) && weights[2..] == [0.5, 0.5], "{weights:?}");
}

#[test]
fn no_tokens_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let empty = Tensor::zeros((0, 8), DType::F32, &gpu).unwrap();
    let routes = route(&empty, 2).unwrap();
    assert_eq!((routes.dims(), routes.dtype()), (&[0, 2][..], DType::U32));
    let dweights = Tensor::zeros((0, 2), DType::F32, &gpu).unwrap();
    let (weights, gradients) = output_and_gradients(&[&empty], &dweights, |x| top_k_softmax(x[0], &routes));
    assert_eq!((weights.dims(), gradients[0].dims()), (&[0, 2][..], &[0, 8][..]));

    let half = Tensor::zeros((3, 8), DType::BF16, &gpu).unwrap();
    assert_refused(route(&half, 2), "route: the logits [3, 8] is BF16, expected F32 on a GPU");
    let logits = Tensor::zeros((3, 8), DType::F32, &gpu).unwrap();
    assert_refused(route(&logits, 9), "route: 9 of 8 experts");
    let on_cpu = Tensor::zeros((3, 2), DType::U32, &candle_core::Device::Cpu).unwrap();
    assert_refused(top_k_softmax(&logits, &on_cpu), "top_k_softmax: the routes [3, 2] is not on the GPU");
    let weights = Tensor::zeros((3, 2), DType::F32, &gpu).unwrap();
    assert_refused(
        top_k_softmax_backward(&weights, &on_cpu.to_device(&gpu).unwrap(), &half, 8),
        "the weights' gradient has shape [3, 8], expected [3, 2]",
    );
}
