//! Tests of the auxiliary loss: beside another gradient, empty calls, refusals.

use super::{assert_close, assert_refused, numbers, output_and_gradients};
use crate::ops::cuda::open;
use crate::ops::graph::differentiate;
use crate::ops::{Dispatch, load_balance, route};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// In training, one backward pass starts from this loss and from the output of the head.
#[test]
fn it_is_differentiated_beside_another_gradient() {
    let gpu = open(0).unwrap();
    let of = |device: &Device| {
        let logits = numbers(2, 7, 4, 1.0);
        let plan = Dispatch::new(&route(&logits, 2).unwrap().to_device(device).unwrap(), 4).unwrap();
        let logits = logits.to_device(device).unwrap();
        let other = numbers(3, 7, 4, 1.0).to_device(device).unwrap();
        let gradients = differentiate(&[&logits], || {
            let half = Tensor::new(0.5f32, device)?;
            candle_core::Result::Ok(vec![
                (logits.clone(), other),
                (load_balance(&logits, &plan, None)?, half),
            ])
        });
        gradients.unwrap().remove(0).unwrap()
    };
    assert_close(&of(&gpu), &of(&Device::Cpu), 1e-6);
}

#[test]
fn no_rows_are_no_loss_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let plan_of =
        |tokens: usize| Dispatch::new(&Tensor::zeros((tokens, 2), DType::U32, &gpu).unwrap(), 8).unwrap();
    let empty = Tensor::zeros((0, 8), DType::F32, &gpu).unwrap();
    let dloss = Tensor::new(1f32, &gpu).unwrap();
    let (loss, gradients) =
        output_and_gradients(&[&empty], &dloss, |x| load_balance(x[0], &plan_of(0), None));
    assert_eq!((loss.to_scalar::<f32>().unwrap(), gradients[0].dims()), (0.0, &[0, 8][..]));

    let logits = Tensor::zeros((3, 8), DType::F32, &gpu).unwrap();
    assert_refused(
        load_balance(&logits, &plan_of(2), None),
        "logits [3, 8], but the plan has 2 tokens and 8 experts",
    );
    assert_refused(
        load_balance(&logits, &plan_of(3), Some(&Arc::new(vec![1; 2]))),
        "do not match the rows of `sequences_per_row`",
    );
    let half = logits.to_dtype(DType::BF16).unwrap();
    assert_refused(load_balance(&half, &plan_of(3), None), "the router logits [3, 8] is BF16, expected F32");
}
