//! Tests of products by packed matrices: the results are bit for bit the products by the decoded matrices.

use super::{
    assert_refused, assert_rounded, floats, numbers, output_and_gradients, to_gpu, trainable_parameter,
};
use crate::ops::cuda::open;
use crate::ops::mxfp4::BLOCK;
use crate::ops::packed_weights::{PackedFormat, PackedMatrix, packed_grouped_linear, packed_linear};
use crate::ops::{self, Dispatch, Parameter};
use candle_core::{DType, Device, Tensor};
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// Returns random MXFP4 numbers. If `extreme` is true, they include the smallest scales and NaN.
fn matrix([experts, input, output]: [usize; 3], extreme: bool) -> PackedMatrix {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut blocks = vec![0u8; experts * input * output / 2];
    rng.fill_bytes(&mut blocks);
    let scale = |i| match i % 19 {
        0..3 if extreme => i as u8 % 3,
        3 if extreme => 255,
        _ => rng.random_range(120..127),
    };
    let scales: Vec<u8> = (0..experts * input / BLOCK * output).map(scale).collect();
    PackedMatrix::from_mxfp4(&blocks, &scales, [experts, input, output])
}

fn decode_matrix(matrix: &PackedMatrix, gpu: &Device) -> Tensor {
    let [experts, input, output] = matrix.shape();
    let values = matrix.decode().unwrap();
    let values = Tensor::from_vec(values, (experts, input, output), &Device::Cpu).unwrap();
    to_gpu(&if experts == 1 { values.squeeze(0).unwrap() } else { values }, gpu)
}

fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_packed_matrix_multiplies_as_the_decoded_one() {
    let gpu = open(0).unwrap();
    for (rows, k, n, extreme) in
        [(1, 32, 8, true), (19, 96, 13, false), (131, 160, 200, true), (300, 64, 72, false)]
    {
        let packed = matrix([1, k, n], extreme);
        let w = Parameter::constant(&decode_matrix(&packed, &gpu));
        let on_gpu = Arc::new(packed.to_device(&gpu).unwrap());
        let (x, dy) = (to_gpu(&numbers(1, rows, k, 1.0), &gpu), to_gpu(&numbers(2, rows, n, 1.0), &gpu));
        let b = numbers(3, 1, n, 1.0).flatten_all().unwrap().to_device(&gpu).unwrap();
        let held = b.ones_like().unwrap();
        let [(bias, sums), (same_bias, same_sums)] = [(); 2].map(|()| trainable_parameter(&b, &held));
        let (y, dx) = output_and_gradients(&[&x], &dy, |x| packed_linear(x[0], &on_gpu, Some(&bias)));
        let (exact, exact_dx) = output_and_gradients(&[&x], &dy, |x| ops::linear(x[0], &w, Some(&same_bias)));
        assert_eq!((bits(&y), bits(&dx[0])), (bits(&exact), bits(&exact_dx[0])), "{rows} by {k} by {n}");
        assert_eq!(bits(&sums), bits(&same_sums));
        let bare = packed_linear(&x, &on_gpu, None).unwrap();
        assert_eq!(bits(&bare), bits(&ops::linear(&x, &w, None).unwrap()));
        let back = on_gpu.to_device(&Device::Cpu).unwrap();
        assert!(back.bytes().unwrap() == packed.bytes().unwrap());
        if !extreme {
            let on_cpu = |x: &Tensor| x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
            let (b, packed) = (Parameter::constant(&on_cpu(&b)), Arc::new(packed));
            let (exact, exact_dx) = output_and_gradients(&[&on_cpu(&x)], &on_cpu(&dy), |x| {
                packed_linear(x[0], &packed, Some(&b))
            });
            assert_rounded(&y, &exact, 1e-3);
            assert_rounded(&dx[0], &exact_dx[0], 1e-3);
        }
    }
}

#[test]
fn packed_experts_multiply_as_decoded_ones() {
    let gpu = open(0).unwrap();
    for (tokens, experts, top_k, k, n) in [(1, 4, 2, 32, 16), (9, 8, 4, 64, 24), (150, 3, 2, 96, 136)] {
        let routes: Vec<u32> =
            (0..tokens * top_k).map(|i| ((i / top_k * 3 + i % top_k) % experts.min(5)) as u32).collect();
        let routes = Tensor::from_vec(routes, (tokens, top_k), &gpu).unwrap();
        let plan = Dispatch::new(&routes, experts).unwrap();
        let packed = matrix([experts, k, n], false);
        let w = Parameter::constant(&decode_matrix(&packed, &gpu));
        let packed = Arc::new(packed.to_device(&gpu).unwrap());
        let rows = tokens * top_k;
        let (x, dy) = (to_gpu(&numbers(1, rows, k, 1.0), &gpu), to_gpu(&numbers(2, rows, n, 1.0), &gpu));
        let b = numbers(3, experts, n, 1.0).to_device(&gpu).unwrap();
        let [(bias, sums), (same_bias, same_sums)] = [(); 2].map(|()| trainable_parameter(&b, &b));
        let (y, dx) =
            output_and_gradients(&[&x], &dy, |x| packed_grouped_linear(x[0], &packed, Some(&bias), &plan));
        let (exact, exact_dx) =
            output_and_gradients(&[&x], &dy, |x| ops::grouped_linear(x[0], &w, Some(&same_bias), &plan));
        assert_eq!((bits(&y), bits(&dx[0])), (bits(&exact), bits(&exact_dx[0])));
        assert_eq!(bits(&sums), bits(&same_sums));
    }
}

#[test]
fn no_rows_are_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let packed = matrix([1, 32, 8], false);
    let on_gpu = Arc::new(packed.to_device(&gpu).unwrap());
    let none = Tensor::zeros((0, 32), DType::BF16, &gpu).unwrap();
    assert_eq!(packed_linear(&none, &on_gpu, None).unwrap().dims(), [0, 8]);
    let plan = Dispatch::new(&Tensor::zeros((0, 2), DType::U32, &gpu).unwrap(), 1).unwrap();
    let bias = Parameter::constant(&Tensor::zeros((1, 8), DType::F32, &gpu).unwrap());
    assert_eq!(packed_grouped_linear(&none, &on_gpu, Some(&bias), &plan).unwrap().dims(), [0, 8]);
    let one = Tensor::zeros((1, 32), DType::BF16, &gpu).unwrap();
    assert_refused(packed_grouped_linear(&one, &on_gpu, Some(&bias), &plan), "x [1, 32], weight [1, 32, 8]");
    let two = Dispatch::new(&Tensor::zeros((1, 1), DType::U32, &gpu).unwrap(), 2).unwrap();
    assert_refused(
        packed_grouped_linear(&one, &on_gpu, Some(&bias), &two),
        "the dispatch plan has 2 experts",
    );
    let host = Arc::new(packed);
    assert_refused(
        packed_linear(&one, &host, None),
        "packed matrix [1, 32, 8] is not on the GPU; call to_device first",
    );
    let wide = Tensor::zeros((1, 32), DType::F32, &gpu).unwrap();
    assert_refused(packed_linear(&wide, &on_gpu, None), "x [1, 32] is F32, expected BF16 on a GPU");
    // Functions that only the host supports.
    let lies =
        "packed matrix [1, 32, 8] is on a GPU, which can only multiply by it; call to_device(&Device::Cpu)";
    let x = Tensor::zeros((1, 32), DType::F32, &Device::Cpu).unwrap();
    assert_refused(packed_linear(&x, &on_gpu, None), lies);
    assert_refused(on_gpu.decode(), lies);
    assert_refused(on_gpu.experts(0..1), lies);
    assert_refused(on_gpu.bytes(), lies);
    let bf16 =
        PackedMatrix::from_bytes(PackedFormat::Bf16, [1, 2, 3], vec![0; PackedFormat::Bf16.bytes([1, 2, 3])]);
    assert_refused(
        bf16.to_device(&gpu),
        "packed matrix [1, 2, 3]: bf16 is not packed on a GPU; use a dense bf16 tensor there",
    );
}
