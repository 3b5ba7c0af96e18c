//! Tests of ops in one launch: they have the bits of separate launches.

use super::{assert_refused, floats, numbers, output_and_gradients, to_gpu, trainable_parameter};
use crate::ops::cuda::{expert_swiglu, joined_product, open};
use crate::ops::fused::{
    add_and_norm, combine_and_add, expert_swiglu as swiglu_of_experts, joined_linear, linear_and_add,
    select_experts,
};
use crate::ops::mxfp4::BLOCK;
use crate::ops::packed_weights::PackedMatrix;
use crate::ops::weight::Weight;
use crate::ops::{self, Dispatch, Parameter};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

fn ids(x: &Tensor) -> Vec<u32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns f32 numbers on the GPU, `[rows, width]`.
fn wide(seed: u64, rows: usize, width: usize, gpu: &Device) -> Tensor {
    numbers(seed, rows, width, 1.0).to_device(gpu).unwrap()
}

/// Returns f32 numbers on the GPU, `[width]`.
fn vector(seed: u64, width: usize, gpu: &Device) -> Parameter {
    Parameter::constant(&wide(seed, 1, width, gpu).flatten_all().unwrap())
}

#[test]
fn a_sum_and_its_norm_are_those_of_two_launches() {
    let gpu = open(0).unwrap();
    for (rows, width) in [(0, 16), (1, 8), (3, 1032), (70, 40)] {
        let [x, y] = [1, 2].map(|seed| to_gpu(&numbers(seed, rows, width, 1.0), &gpu));
        let weight = vector(3, width, &gpu);
        let [sum, normed] = add_and_norm(&x, &y, &weight, 1e-5).unwrap();
        let expected = (&x + &y).unwrap();
        assert_eq!(bits(&sum), bits(&expected), "{rows} by {width}");
        assert_eq!(bits(&normed), bits(&ops::rms_norm(&expected, weight.values(), 1e-5).unwrap()));
    }
    let x = to_gpu(&numbers(1, 2, 16, 1.0), &gpu);
    let y = to_gpu(&numbers(1, 3, 16, 1.0), &gpu);
    assert_refused(add_and_norm(&x, &y, &vector(3, 16, &gpu), 1e-5), "what is added to x has shape [3, 16]");
}

#[test]
fn a_sum_and_its_norm_have_gradients() {
    let gpu = open(0).unwrap();
    let [x, y, dy] = [1, 2, 3].map(|seed| to_gpu(&numbers(seed, 5, 24, 1.0), &gpu));
    let weight = vector(4, 24, &gpu);
    let (normed, gradients) =
        output_and_gradients(&[&x, &y], &dy, |x| Ok(add_and_norm(x[0], x[1], &weight, 1e-5)?[1].clone()));
    let (expected, expected_gradients) = output_and_gradients(&[&x, &y], &dy, |x| {
        ops::rms_norm(&ops::graph::add(x[0], x[1])?, weight.values(), 1e-5)
    });
    assert_eq!(bits(&normed), bits(&expected));
    for (got, expected) in gradients.iter().zip(&expected_gradients) {
        assert_eq!(bits(got), bits(expected));
    }
}

#[test]
fn joined_products_are_those_of_a_launch_each() {
    let gpu = open(0).unwrap();
    for (rows, k, widths) in
        [(0, 8, vec![8, 8]), (1, 8, vec![8, 16, 8]), (5, 72, vec![13, 40]), (131, 40, vec![136, 8, 200])]
    {
        let x = to_gpu(&numbers(1, rows, k, 1.0), &gpu);
        let layers = widths.iter().enumerate().map(|(i, &n)| {
            let weight = Parameter::constant(&to_gpu(&numbers(2 + i as u64, k, n, 0.3), &gpu));
            (weight, Some(vector(7 + i as u64, n, &gpu)).filter(|_| i != 1))
        });
        let layers: Vec<_> = layers.collect();
        let layers: Vec<_> = layers.iter().map(|(weight, bias)| (weight, bias.as_ref())).collect();
        let got = joined_linear(&x, &layers).unwrap().unwrap();
        assert_eq!(got.len(), widths.len());
        for (got, (weight, bias)) in got.iter().zip(&layers) {
            let expected = ops::linear(&x, weight, *bias).unwrap();
            assert_eq!((got.dims(), bits(got)), (expected.dims(), bits(&expected)), "{rows} by {k}");
        }
    }
    let x = to_gpu(&numbers(1, 2, 8, 1.0), &gpu);
    let weight = Parameter::constant(&to_gpu(&numbers(2, 8, 8, 1.0), &gpu));
    let (trainable, _) = trainable_parameter(weight.values(), &wide(3, 8, 8, &gpu));
    assert!(joined_linear(&x, &[(&weight, None), (&trainable, None)]).unwrap().is_none());
    let w = weight.values();
    assert_refused(joined_product(&x, &[(w, None); 4]), "4 matrices, but at most 3 fit a launch");
    let tall = to_gpu(&numbers(2, 16, 8, 1.0), &gpu);
    assert_refused(joined_product(&x, &[(w, None), (&tall, None)]), "the weight has shape [16, 8]");
}

#[test]
fn a_product_and_a_residual_are_those_of_two_launches() {
    let gpu = open(0).unwrap();
    for (rows, k, n) in [(0, 8, 8), (1, 8, 8), (5, 72, 13), (131, 40, 136)] {
        let x = to_gpu(&numbers(1, rows, k, 1.0), &gpu);
        let residual = to_gpu(&numbers(2, rows, n, 1.0), &gpu);
        let weight = Parameter::constant(&to_gpu(&numbers(3, k, n, 0.3), &gpu));
        for bias in [None, Some(vector(4, n, &gpu))] {
            let got = linear_and_add(&x, &weight, bias.as_ref(), &residual).unwrap();
            let expected = (&residual + ops::linear(&x, &weight, bias.as_ref()).unwrap()).unwrap();
            assert_eq!(bits(&got), bits(&expected), "{rows} by {k} by {n}");
        }
    }
}

#[test]
fn selected_experts_are_those_of_six_launches() {
    let gpu = open(0).unwrap();
    // The last has too many routes for one block.
    for (tokens, experts, top_k) in
        [(1, 1, 1), (5, 4, 2), (131, 32, 4), (3, 128, 8), (0, 8, 2), (2050, 32, 4)]
    {
        // Many logits are equal.
        let logits = numbers(1, tokens, experts, 1.0).affine(4.0, 0.0).unwrap().round().unwrap();
        let logits = logits.to_device(&gpu).unwrap();
        let got = select_experts(&logits, top_k).unwrap();
        let routes = ops::route(&logits, top_k).unwrap();
        let plan = Dispatch::new(&routes, experts).unwrap();
        assert_eq!(ids(&got.routed_experts), ids(&routes), "{tokens} tokens, {top_k} of {experts}");
        assert_eq!(bits(&got.weights), bits(&ops::top_k_softmax(&logits, &routes).unwrap()));
        assert_eq!(ids(&got.plan.row_of().unwrap()), ids(&plan.row_of().unwrap()));
        assert_eq!(ids(&got.plan.token_of().unwrap()), ids(&plan.token_of().unwrap()));
        assert_eq!(ids(&got.plan.starts().unwrap()), ids(&plan.starts().unwrap()));
    }
    let logits = wide(1, 3, 4, &gpu);
    assert_refused(select_experts(&logits, 5).map(drop), "route: 5 of 4 experts");
}

/// Returns a plan for `tokens` tokens, with experts that have no tokens.
fn plan(tokens: usize, experts: usize, top_k: usize, gpu: &Device) -> Dispatch {
    let routes: Vec<u32> =
        (0..tokens * top_k).map(|i| ((i / top_k * 3 + i % top_k) % experts.min(5)) as u32).collect();
    Dispatch::new(&Tensor::from_vec(routes, (tokens, top_k), gpu).unwrap(), experts).unwrap()
}

#[test]
fn the_first_half_of_experts_is_that_of_three_launches() {
    let gpu = open(0).unwrap();
    // Few and many rows for the experts, with narrow and wide tiles.
    for (tokens, experts, top_k, k, n) in
        [(0, 4, 2, 32, 16), (1, 4, 2, 32, 16), (9, 8, 4, 64, 24), (150, 3, 2, 96, 136)]
    {
        let plan = plan(tokens, experts, top_k, &gpu);
        let x = to_gpu(&numbers(1, tokens, k, 1.0), &gpu);
        let bias = Parameter::constant(&wide(3, experts, n, &gpu));
        let w = numbers(2, experts * k, n, 0.3).reshape((experts, k, n)).unwrap();
        let dense = Weight::Dense(Parameter::constant(&to_gpu(&w, &gpu)));
        let scales: Vec<u8> = (0..experts * k / BLOCK * n).map(|i| 120 + (i % 7) as u8).collect();
        let blocks: Vec<u8> = (0..experts * k * n / 2).map(|i| (i * i % 251) as u8).collect();
        let packed = PackedMatrix::from_mxfp4(&blocks, &scales, [experts, k, n]).to_device(&gpu).unwrap();
        for weight in [dense, Weight::Packed(Arc::new(packed))] {
            for bias in [None, Some(&bias)] {
                let got = swiglu_of_experts(&x, &weight, bias, &plan, (1.5, 1.702)).unwrap();
                let sorted = ops::dispatch(&x, &plan).unwrap();
                let products = weight.grouped_matmul(&sorted, bias, &plan).unwrap();
                let expected = ops::swiglu(&products, 1.5, 1.702).unwrap();
                assert_eq!(got.dims(), expected.dims());
                assert_eq!(bits(&got), bits(&expected), "{tokens} tokens, {experts} experts");
            }
        }
    }
    let plan = plan(2, 4, 2, &gpu);
    let x = to_gpu(&numbers(1, 2, 8, 1.0), &gpu);
    let matrices = |experts: usize, n: usize| Tensor::zeros((experts, 8, n), DType::BF16, &gpu).unwrap();
    let refused = |weight: &Tensor| expert_swiglu(&x, weight, None, &plan, (7.0, 1.702));
    assert_refused(refused(&matrices(3, 16)), "the dispatch plan has 4 experts");
    assert_refused(refused(&matrices(4, 15)), "gate and up are pairs");
}

#[test]
fn combined_experts_and_a_residual_are_those_of_two_launches() {
    let gpu = open(0).unwrap();
    for (tokens, experts, top_k, width) in [(0, 4, 2, 16), (1, 4, 2, 8), (130, 8, 4, 1032)] {
        let plan = plan(tokens, experts, top_k, &gpu);
        let x = to_gpu(&numbers(1, tokens * top_k, width, 1.0), &gpu);
        let residual = to_gpu(&numbers(2, tokens, width, 1.0), &gpu);
        let weights = wide(3, tokens, top_k, &gpu);
        let got = combine_and_add(&x, &weights, &plan, &residual).unwrap();
        let expected = (&residual + ops::combine(&x, &weights, &plan).unwrap()).unwrap();
        assert_eq!(bits(&got), bits(&expected), "{tokens} tokens");
    }
}
