//! Tests of row-wise ops on a GPU or the emulated driver, compared with the CPU on the same numbers.

use super::{assert_rounded, floats, numbers, output_and_gradients, to_gpu};
use crate::ops;
use crate::ops::cuda::{open, rms_norm_backward, swiglu_backward};
use crate::ops::graph::differentiate;
use candle_core::{DType, Tensor, Var};

#[test]
fn rms_norm_gives_the_cpus_values_and_gradients() {
    let gpu = open(0).unwrap();
    for (rows, width) in [(1, 8), (3, 64), (130, 264)] {
        let (x, dy, weight) =
            (numbers(3, rows, width, 1.0), numbers(4, rows, width, 1.0), numbers(5, 1, width, 1.0));
        let weight = weight.flatten_all().unwrap();
        let (y, gradients) = output_and_gradients(&[&x, &weight], &dy, |x| ops::rms_norm(x[0], x[1], 1e-5));
        let (x, dy, weight) = (to_gpu(&x, &gpu), to_gpu(&dy, &gpu), weight.to_device(&gpu).unwrap());
        assert_rounded(&ops::rms_norm(&x, &weight, 1e-5).unwrap(), &y, 1e-6);
        let (dx, dweight) = rms_norm_backward([&x, &weight, &dy], 1e-5, true).unwrap();
        assert_rounded(&dx, &gradients[0], 1e-5);
        // The weight's gradient stays f32.
        let (dweight, exact) = (floats(&dweight.unwrap()), floats(&gradients[1]));
        let size = exact.iter().fold(0f32, |size, x| size.max(x.abs()));
        assert!(dweight.iter().zip(&exact).all(|(a, b)| (a - b).abs() <= 1e-5 * size), "{dweight:?}");
        assert!(rms_norm_backward([&x, &weight, &dy], 1e-5, false).unwrap().1.is_none());
    }
}

#[test]
fn gradients_pass_through_a_graph() {
    let gpu = open(0).unwrap();
    let x = Var::from_tensor(&to_gpu(&numbers(7, 5, 16, 1.0), &gpu)).unwrap();
    let weight = Var::from_tensor(&Tensor::ones(16, DType::F32, &gpu).unwrap()).unwrap();
    let mut normed = None;
    let gradients = differentiate(&[&x, &weight], || {
        let out = ops::rms_norm(&x, &weight, 1e-5)?;
        normed = Some(out.clone());
        let y = ops::swiglu(&out, 7.0, 1.702)?;
        let ones = y.ones_like()?;
        candle_core::Result::Ok(vec![(y, ones)])
    });
    let (gradients, normed) = (gradients.unwrap(), normed.unwrap());
    let ones = Tensor::ones((5, 8), DType::BF16, &gpu).unwrap();
    let dnormed = swiglu_backward(&normed, &ones, 7.0, 1.702).unwrap();
    let (dx, dweight) = rms_norm_backward([&x, &weight, &dnormed], 1e-5, true).unwrap();
    assert_eq!(floats(gradients[0].as_ref().unwrap()), floats(&dx));
    assert_eq!(floats(gradients[1].as_ref().unwrap()), floats(&dweight.unwrap()));
}

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let empty = Tensor::zeros((0, 16), DType::BF16, &gpu).unwrap();
    let weight = Tensor::ones(16, DType::F32, &gpu).unwrap();
    assert_eq!(ops::swiglu(&empty, 7.0, 1.702).unwrap().dims(), [0, 8]);
    assert_eq!(ops::rms_norm(&empty, &weight, 1e-5).unwrap().dims(), [0, 16]);
    let grad = Tensor::zeros((0, 8), DType::BF16, &gpu).unwrap();
    assert_eq!(swiglu_backward(&empty, &grad, 7.0, 1.702).unwrap().dims(), [0, 16]);
    let (dx, dweight) = rms_norm_backward([&empty, &weight, &empty], 1e-5, true).unwrap();
    assert_eq!((dx.dims(), floats(&dweight.unwrap())), (&[0, 16][..], vec![0.0; 16]));

    let refused = |error: candle_core::Result<Tensor>, text: &str| {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let single = Tensor::zeros((2, 16), DType::F32, &gpu).unwrap();
    refused(ops::swiglu(&single, 7.0, 1.702), "swiglu: x [2, 16] is F32, expected BF16 on a GPU");
    let turned = Tensor::zeros((16, 4), DType::BF16, &gpu).unwrap().t().unwrap();
    refused(ops::swiglu(&turned, 7.0, 1.702), "is not contiguous");
    let odd = Tensor::zeros((2, 12), DType::BF16, &gpu).unwrap();
    let weight = Tensor::ones(12, DType::F32, &gpu).unwrap();
    refused(
        ops::rms_norm(&odd, &weight, 1e-5),
        "rows of 12 values are not supported on a GPU; use a hidden size that is a multiple of 8",
    );
}
