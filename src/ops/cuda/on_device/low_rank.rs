//! Tests of low-rank corrections: a row alone, sums in f32, empty calls, refusals.

use super::{assert_refused, floats, numbers, output_and_gradients, to_gpu, trainable_parameter};
use crate::ops::cuda::open;
use crate::ops::{self, Dispatch, Parameter};
use candle_core::{DType, Device, Result, Tensor};

/// Returns a plan of `rows` sorted rows on a device.
fn plan(rows: usize, experts: usize, device: &Device) -> Dispatch {
    let routes = (0..rows).map(|i| (i * i % 5 % experts) as u32).collect();
    Dispatch::new(&Tensor::from_vec(routes, (rows, 1), device).unwrap(), experts).unwrap()
}

#[test]
fn a_row_alone_has_its_bits_and_sums_may_stay_f32() {
    let gpu = open(0).unwrap();
    let (rows, input, rank, output) = (200, 72, 16, 40);
    let (y, x) =
        (numbers(1, rows, output, 1.0).to_device(&gpu).unwrap(), to_gpu(&numbers(2, rows, input, 1.0), &gpu));
    let [a, b] = [(input, rank), (rank, output)]
        .map(|(k, n)| Parameter::constant(&to_gpu(&numbers(3, k, n, 0.3), &gpu)));
    let of = |y: &Tensor, first: usize, count: usize| {
        let rows = |x: &Tensor| x.narrow(0, first, count).unwrap().copy().unwrap();
        ops::add_low_rank(&rows(y), &rows(&x), [&a, &b], 2.0, None).unwrap()
    };
    let wide = of(&y, 0, rows);
    let narrow = of(&to_gpu(&y, &gpu), 0, rows);
    assert_eq!((wide.dtype(), narrow.dtype()), (DType::F32, DType::BF16));
    assert_eq!(floats(&wide.to_dtype(DType::BF16).unwrap()), floats(&narrow));
    for (first, count) in [(0, 1), (199, 1), (60, 100)] {
        assert_eq!(floats(&of(&y, first, count)), floats(&wide)[first * output..(first + count) * output]);
    }
}

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let zeros = |rows, width, dtype| Tensor::zeros((rows, width), dtype, &gpu).unwrap();
    let factors = |dtype| [(8, 4), (4, 16)].map(|(k, n)| Parameter::constant(&zeros(k, n, dtype)));
    let of = |y: &Tensor, x: &Tensor, [a, b]: &[Parameter; 2], plan: Option<&Dispatch>| -> Result<Tensor> {
        ops::add_low_rank(y, x, [a, b], 1.0, plan)
    };
    let right = factors(DType::BF16);
    let of_rows = |rows| (zeros(rows, 16, DType::BF16), zeros(rows, 8, DType::BF16));
    let (y, x) = of_rows(0);
    assert_eq!(of(&y, &x, &right, None).unwrap().dims(), [0, 16]);
    // An empty call in a graph: empty gradients are added.
    let [a, b] = [(8, 4), (4, 16)]
        .map(|(k, n)| trainable_parameter(&zeros(k, n, DType::BF16), &zeros(k, n, DType::F32)));
    let (_, gradients) =
        output_and_gradients(&[&y, &x], &y, |x| ops::add_low_rank(x[0], x[1], [&a.0, &b.0], 1.0, None));
    assert_eq!(gradients[1].dims(), [0, 8]);
    assert!([a.1, b.1].iter().all(|sum| floats(sum).iter().all(|x| *x == 0.0)));
    let (y, x) = of_rows(2);
    assert_refused(
        of(&y, &x, &factors(DType::F32), None),
        "low rank: the first factor [8, 4] is F32, expected BF16 on a GPU",
    );
    let wide = zeros(2, 8, DType::F32);
    assert_refused(of(&y, &wide, &right, None), "low rank: x [2, 8] is F32, expected BF16 on a GPU");
    assert_refused(of(&y, &x, &right, Some(&plan(3, 1, &gpu))), "add_low_rank: y [2, 16], x [2, 8]");
}
