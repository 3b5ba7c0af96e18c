//! Tests of the parts of heads on a GPU or the emulated driver, compared with the CPU.

use super::{assert_refused, floats, numbers, to_gpu};
use crate::ops::cuda::{open, pack_heads, unpack_heads};
use crate::ops::head_parts::HeadSplit;
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Storage, Tensor};
use half::bf16;

/// Calls `f` with the storage of `x`.
fn on_gpu<R>(
    x: &Tensor,
    f: impl FnOnce(&CudaStorage, &candle_core::Layout) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { panic!("not on a GPU") };
    f(storage, layout)
}

fn values(storage: CudaStorage, count: usize) -> Vec<f32> {
    floats(&Tensor::from_storage(Storage::Cuda(storage), count, BackpropOp::none(), false))
}

#[test]
fn parts_and_rows_are_the_cpus() {
    let gpu = open(0).unwrap();
    for (groups, heads, ranks) in
        [(1, 4, 2), (2, 2, 2), (2, 6, 3), (1, 8, 1), (2, 2, 4), (2, 1, 3), (1, 1, 4)]
    {
        for (rows, head_dim) in [(1, 8), (7, 64), (37, 16)] {
            let split = HeadSplit { groups, heads, head_dim, ranks };
            let x = numbers(1, rows, split.row_width(), 1.0);
            let packed = on_gpu(&to_gpu(&x, &gpu), |x, layout| pack_heads((x, layout), &split)).unwrap();
            let count = ranks * rows * split.part_width();
            let expected = split.pack(&floats(&x));
            assert_eq!(values(packed, count), expected.concat(), "{split:?}, {rows} rows");

            // Other values in each part, so that the order of additions shows.
            let parts = numbers(2, ranks, rows * split.part_width(), 100.0);
            let of_rank: Vec<Vec<f32>> = (0..ranks).map(|rank| floats(&parts.get(rank).unwrap())).collect();
            // A sum is rounded once.
            let expected: Vec<f32> =
                split.unpack(&of_rank).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
            let got = on_gpu(&to_gpu(&parts, &gpu), |parts, _| unpack_heads(parts, count, &split)).unwrap();
            assert_eq!(values(got, rows * split.row_width()), expected, "{split:?}, {rows} rows");
        }
    }
}

#[test]
fn a_sum_of_three_parts_is_rounded_once_and_in_rank_order() {
    let gpu = open(0).unwrap();
    let split = HeadSplit { groups: 1, heads: 1, head_dim: 8, ranks: 3 };
    for (parts, expected) in [([256.0, 1.0, 1.0], 258.0), ([16_777_216.0, 1.0, -16_777_216.0], 0.0)] {
        let x: Vec<f32> = parts.iter().flat_map(|&part| [part; 8]).collect();
        let x = Tensor::from_vec(x, 24, &candle_core::Device::Cpu).unwrap();
        let got = on_gpu(&to_gpu(&x, &gpu), |x, _| unpack_heads(x, 24, &split)).unwrap();
        assert_eq!(values(got, 8), [expected; 8], "{parts:?}");
    }
}

#[test]
fn a_view_is_packed_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let split = HeadSplit { groups: 1, heads: 2, head_dim: 8, ranks: 2 };
    let x = numbers(3, 5, 16, 1.0);
    let view = to_gpu(&x, &gpu).narrow(0, 2, 3).unwrap();
    let got = on_gpu(&view, |x, layout| pack_heads((x, layout), &split)).unwrap();
    assert_eq!(values(got, 48), split.pack(&floats(&x)[32..]).concat());
    let pack = |x: &Tensor, split: HeadSplit| on_gpu(x, |x, layout| pack_heads((x, layout), &split));
    let rows = to_gpu(&x, &gpu);
    assert_refused(pack(&rows, HeadSplit { heads: 3, head_dim: 16, ..split }), "has no rows of 48 values");
    assert_refused(pack(&rows, HeadSplit { heads: 5, ..split }), "5 heads cannot be split over 2 ranks");
    assert_refused(pack(&rows, HeadSplit { head_dim: 4, ..split }), "rows of 4 values are not supported");
    let single = Tensor::zeros((5, 16), DType::F32, &gpu).unwrap();
    assert_refused(pack(&single, split), "is F32, expected BF16 on a GPU");
}
