//! Tests of row selection by id: empty calls, refusals.

use super::{
    assert_refused, floats, forward_and_backward, numbers, output_and_gradients, to_gpu, trainable_parameter,
};
use crate::ops::cuda::{add_rows, open};
use crate::ops::embedding::TokensById;
use crate::ops::{Parameter, embedding, select_rows};
use candle_core::{DType, Tensor};
use std::sync::Arc;

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let none = Arc::new(vec![]);
    let held = numbers(6, 3, 8, 1.0).to_device(&gpu).unwrap();
    let table = to_gpu(&numbers(7, 3, 8, 1.0), &gpu);
    let (parameter, sum) = trainable_parameter(&table, &held);
    let empty = Tensor::zeros((0, 8), DType::BF16, &gpu).unwrap();
    let (y, gradients) = forward_and_backward(&[parameter.values()], &empty, || embedding(&parameter, &none));
    // The table's gradient goes to the buffer only.
    assert!(gradients[0].is_none());
    assert_eq!((y.dims(), floats(&sum)), (&[0, 8][..], floats(&held)));
    let (y, gradients) = output_and_gradients(&[&empty], &empty, |x| select_rows(x[0], &none));
    assert_eq!((y.dims(), gradients[0].dims()), (&[0, 8][..], &[0, 8][..]));
    let (_, gradients) = output_and_gradients(&[&table], &empty, |x| select_rows(x[0], &none));
    assert_eq!(floats(&gradients[0]), [0.0; 24]);

    let one = Arc::new(vec![2]);
    let single = Tensor::zeros((3, 8), DType::F32, &gpu).unwrap();
    assert_refused(select_rows(&single, &one), "rows: the table [3, 8] is F32, expected BF16 on a GPU");
    let odd = Tensor::zeros((3, 12), DType::BF16, &gpu).unwrap();
    assert_refused(
        select_rows(&odd, &one),
        "rows of 12 values are not supported on a GPU; use a hidden size that is a multiple of 8",
    );
    assert_refused(select_rows(&table, &Arc::new(vec![3])), "row 3 of 3");
    assert_refused(
        embedding(&Parameter::constant(&table), &Arc::new(vec![3])),
        "token 3 in a vocabulary of 3",
    );
    let dy = Tensor::zeros((1, 8), DType::BF16, &gpu).unwrap();
    let by_id = TokensById::new(&[3]);
    assert_refused(
        add_rows(&held, &dy, &by_id),
        "id 3 is not below 3, the size of the gradient; give the gradient buffer",
    );
    assert_refused(add_rows(&numbers(8, 4, 8, 1.0), &dy, &by_id), "is not on the GPU; call to_device first");
}
