//! Tests of row and column selection by id, on a GPU or the emulated driver, compared with the CPU.

use super::{
    assert_close, assert_refused, assert_rounded, floats, forward_and_backward, numbers,
    output_and_gradients, to_gpu, trainable_parameter,
};
use crate::ops::cuda::{add_rows, open};
use crate::ops::embedding::TokensById;
use crate::ops::{Parameter, embedding, select_rows, tied_embedding};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// Returns ids, half of which are equal.
fn ids(tokens: usize, vocabulary: u32) -> Arc<Vec<u32>> {
    let id = |t: u32| if t % 2 == 1 { vocabulary - 1 } else { t * 7919 % vocabulary };
    Arc::new((0..tokens as u32).map(id).collect())
}

type Lookup = fn(&Parameter, &Arc<Vec<u32>>) -> candle_core::Result<Tensor>;

#[test]
fn embeddings_give_the_cpus_values_and_add_their_gradient_in_place() {
    let gpu = open(0).unwrap();
    for (tokens, width, vocabulary) in [(1, 8, 1), (5, 16, 3), (67, 264, 11)] {
        let ids = ids(tokens, vocabulary as u32);
        let dy = numbers(1, tokens, width, 1.0);
        for (lookup, shape) in
            [(embedding as Lookup, (vocabulary, width)), (tied_embedding as Lookup, (width, vocabulary))]
        {
            let (table, held) = (numbers(2, shape.0, shape.1, 1.0), numbers(3, shape.0, shape.1, 1.0));
            let of = |device: &Device, table: &Tensor, dy: &Tensor| {
                let (parameter, sum) = trainable_parameter(table, &held.to_device(device).unwrap());
                let (y, gradients) =
                    forward_and_backward(&[parameter.values()], dy, || lookup(&parameter, &ids));
                // The table's gradient goes to the buffer only.
                assert!(gradients[0].is_none());
                (y, sum)
            };
            let (y, sum) = of(&Device::Cpu, &table, &dy);
            let (got, got_sum) = of(&gpu, &to_gpu(&table, &gpu), &to_gpu(&dy, &gpu));
            assert_eq!(floats(&got), floats(&y));
            assert_close(&got_sum, &sum, 1e-6);
        }
    }
}

#[test]
fn selected_rows_are_the_cpus_and_their_gradients_too() {
    let gpu = open(0).unwrap();
    for (count, rows, width) in [(1, 1, 8), (9, 5, 16), (70, 40, 264)] {
        let rows = ids(count, rows as u32);
        let x = numbers(4, 41, width, 1.0);
        let dy = numbers(5, count, width, 1.0);
        let op = |x: &[&Tensor]| select_rows(x[0], &rows);
        let (y, gradients) = output_and_gradients(&[&x], &dy, op);
        let (got, got_gradients) = output_and_gradients(&[&to_gpu(&x, &gpu)], &to_gpu(&dy, &gpu), op);
        assert_eq!(floats(&got), floats(&y));
        assert_rounded(&got_gradients[0], &gradients[0], 1e-5);
    }
}

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let none = Arc::new(vec![]);
    let held = numbers(6, 3, 8, 1.0).to_device(&gpu).unwrap();
    let table = to_gpu(&numbers(7, 3, 8, 1.0), &gpu);
    let (parameter, sum) = trainable_parameter(&table, &held);
    let empty = Tensor::zeros((0, 8), DType::BF16, &gpu).unwrap();
    let (y, _) = forward_and_backward(&[], &empty, || embedding(&parameter, &none));
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
