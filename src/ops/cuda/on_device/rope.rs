//! Tests of rotary position embedding: copies of its table, empty calls, refusals.

use super::{assert_refused, output_and_gradients};
use crate::ops::cuda::open;
use crate::ops::rope::{RopeTable, Rotation};
use crate::ops::{rope, rope_keys_with_values};
use candle_core::{DType, Tensor};
use std::sync::Arc;

fn rotation(half: usize, positions: Vec<u32>) -> Rotation {
    let frequencies: Vec<f32> = (0..half).map(|i| 0.9f32.powi(i as i32)).collect();
    Rotation::new(Arc::new(RopeTable::new(&frequencies, 61, 1.25)), positions)
}

fn positions(rows: usize) -> Vec<u32> {
    (0..rows).map(|row| (row * 37 % 61) as u32).collect()
}

#[test]
fn table_and_positions_are_copied_once_to_each_device() {
    let (first, second) = (open(0).unwrap(), open(0).unwrap());
    let rotation = rotation(8, positions(5));
    let copies =
        || [rotation.table.to_device(&first).unwrap(), rotation.clone().device_positions(&first).unwrap()];
    assert_eq!(copies().map(|copy| copy.id()), copies().map(|copy| copy.id()));
    for device in [&first, &second] {
        assert!(rotation.device_positions(device).unwrap().device().same_device(device));
    }
    assert_eq!(format!("{rotation:?}").matches("DeviceCopies").count(), 2);
}

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let empty = Tensor::zeros((0, 32), DType::BF16, &gpu).unwrap();
    let none = rotation(8, vec![]);
    let dempty = empty.reshape((0, 2, 16)).unwrap();
    let (y, gradients) = output_and_gradients(&[&empty], &dempty, |x| rope(x[0], 2, &none));
    assert_eq!((y.dims(), gradients[0].dims()), (&[0, 2, 16][..], &[0, 32][..]));
    let dkv = Tensor::zeros((0, 2, 2, 16), DType::BF16, &gpu).unwrap();
    let (y, gradients) =
        output_and_gradients(&[&empty, &empty], &dkv, |x| rope_keys_with_values(x[0], x[1], 2, &none));
    assert_eq!((y.dims(), gradients[1].dims()), (&[0, 2, 2, 16][..], &[0, 32][..]));

    let two = rotation(8, vec![3, 4]);
    let single = Tensor::zeros((2, 32), DType::F32, &gpu).unwrap();
    assert_refused(rope(&single, 2, &two), "rope: x [2, 32] is F32, expected BF16 on a GPU");
    let turned = Tensor::zeros((32, 2), DType::BF16, &gpu).unwrap().t().unwrap();
    assert_refused(rope(&turned, 2, &two), "is not contiguous");
    let whole = Tensor::zeros((2, 32), DType::BF16, &gpu).unwrap();
    assert_refused(rope_keys_with_values(&whole, &turned, 2, &two), "rope: v [2, 32] with strides");
    let narrow = Tensor::zeros((2, 24), DType::BF16, &gpu).unwrap();
    assert_refused(
        rope(&narrow, 2, &rotation(6, vec![3, 4])),
        "heads of size 12 in rows of 24 values are not supported on a GPU; use a head size that is a multiple of 16",
    );
    assert_refused(rope(&whole, 2, &rotation(8, vec![3, 61])), "positions up to 62");
}
