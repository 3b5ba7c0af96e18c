//! Tests of the optimizer on a GPU or the emulated driver: every value is bit for bit that of the CPU.

use super::{floats, numbers};
use crate::ops::adamw_8bit::{BLOCK, Moment, adamw_8bit};
use crate::ops::cuda::open;
use crate::ops::optimizer::{AdamW, adamw, round_to_bf16, scale, sgd, sum_of_squares, update_momentum};
use candle_core::{DType, Device, Result, Tensor};

const STEP: AdamW = AdamW {
    shrink: 0.999,
    one_minus_beta1: 0.1,
    beta2: 0.95,
    one_minus_beta2: 0.05,
    rate: 0.0123,
    root_correction: 0.7,
    eps: 1e-8,
};

/// Returns f32 numbers that bf16 cannot represent.
fn wide(seed: u64, shape: (usize, usize)) -> Tensor {
    (numbers(seed, shape.0, shape.1, 1.0) / 3.0).unwrap()
}

fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

/// Runs `change` on copies of `tensors` on the CPU and on the GPU; all must have the same bits afterwards.
fn same(gpu: &Device, tensors: &[Tensor], change: impl Fn(&[Tensor]) -> Result<()>) {
    let [here, there] = [&Device::Cpu, gpu].map(|device| {
        let copies: Vec<Tensor> =
            tensors.iter().map(|x| x.copy().unwrap().to_device(device).unwrap()).collect();
        change(&copies).unwrap();
        copies
    });
    for (i, (here, there)) in here.iter().zip(&there).enumerate() {
        assert_eq!((here.dims(), here.dtype()), (there.dims(), there.dtype()));
        assert!(bits(here) == bits(there), "tensor {i} {:?}", here.dims());
    }
}

#[test]
fn updates_have_the_cpus_bits() {
    let gpu = open(0).unwrap();
    for shape in [(0, 3), (1, 1), (3, 85), (70, 101)] {
        let [weights, first, gradient] = [1, 2, 3].map(|seed| wide(seed, shape));
        let second = wide(4, shape).sqr().unwrap();
        same(&gpu, &[weights.clone(), first.clone(), second, gradient.clone()], |x| {
            adamw(&x[0], [&x[1], &x[2]], &x[3], &STEP)?;
            adamw(&x[0], [&x[1], &x[2]], &x[3], &STEP)
        });
        same(&gpu, &[weights.clone(), first, gradient], |x| {
            update_momentum(&x[1], &x[2], 0.9)?;
            sgd(&x[0], &x[1], 0.99, 0.1)
        });
        same(&gpu, &[(weights / 0.0).unwrap()], |x| scale(&x[0], 0.0));
        same(&gpu, &[wide(5, shape)], |x| scale(&x[0], 0.37));
    }
}

#[test]
fn updates_with_moments_of_8_bits_have_the_cpus_bits() {
    let gpu = open(0).unwrap();
    for shape in [(0usize, 3), (1, 5), (2, 256), (70, 131)] {
        let blocks = (shape.0 * shape.1).div_ceil(BLOCK);
        let codes = Tensor::zeros(shape, DType::U8, &Device::Cpu).unwrap();
        let scales = Tensor::zeros(blocks, DType::F32, &Device::Cpu).unwrap();
        let state = [wide(1, shape), codes.clone(), scales.clone(), codes, scales, wide(2, shape)];
        let next = wide(3, shape);
        same(&gpu, &state, |x| {
            let moments = [Moment { codes: &x[1], scales: &x[2] }, Moment { codes: &x[3], scales: &x[4] }];
            // First from zeros, then from arbitrary codes.
            adamw_8bit(&x[0], moments, &x[5], &STEP)?;
            adamw_8bit(&x[0], moments, &next.to_device(x[0].device())?, &STEP)
        });
    }
}

#[test]
fn rounding_writes_what_a_conversion_makes() {
    let gpu = open(0).unwrap();
    for shape in [(1, 1), (70, 101)] {
        let mut values = floats(&wide(6, shape));
        let edges =
            [f32::INFINITY, -0.0, 1.003_906_2, 1.011_718_8, 3.4e38, f32::MAX, 1e-40, f32::MIN_POSITIVE];
        values.iter_mut().zip(edges).for_each(|(value, edge)| *value = edge);
        let masters = Tensor::from_vec(values, shape, &gpu).unwrap();
        let copy = Tensor::ones(shape, DType::BF16, &gpu).unwrap();
        round_to_bf16(&copy, &masters).unwrap();
        assert_eq!(bits(&copy), bits(&masters.to_dtype(DType::BF16).unwrap()));
        let on_cpu = masters.to_device(&Device::Cpu).unwrap();
        assert_eq!(bits(&copy), bits(&on_cpu.to_dtype(DType::BF16).unwrap()));
    }
    let empty = |dtype| Tensor::zeros((0, 3), dtype, &gpu).unwrap();
    round_to_bf16(&empty(DType::BF16), &empty(DType::F32)).unwrap();
    let copy = Tensor::zeros(1, DType::BF16, &gpu).unwrap();
    round_to_bf16(&copy, &Tensor::new(&[f32::NAN], &gpu).unwrap()).unwrap();
    assert!(floats(&copy)[0].is_nan());
}

#[test]
fn a_sum_of_squares_is_the_cpus_but_for_its_order() {
    let gpu = open(0).unwrap();
    for shape in [(0, 3), (1, 1), (9, 1001), (5, 4096)] {
        let x = wide(7, shape);
        let exact = sum_of_squares(&x).unwrap();
        let got = sum_of_squares(&x.to_device(&gpu).unwrap()).unwrap();
        assert!((got - exact).abs() <= 1e-13 * exact, "{got}, on the CPU {exact}");
    }
}

#[test]
fn a_part_of_a_tensor_is_changed_alone() {
    let gpu = open(0).unwrap();
    let x = wide(8, (5, 7));
    same(&gpu, &[x], |x| scale(&x[0].narrow(0, 1, 2)?, 0.5));
}

#[test]
fn what_an_update_does_not_take_is_refused() {
    let gpu = open(0).unwrap();
    let refused = |result: Result<()>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let zeros = |shape: (usize, usize), dtype| Tensor::zeros(shape, dtype, &gpu).unwrap();
    let (x, half) = (zeros((2, 8), DType::F32), zeros((2, 8), DType::BF16));
    refused(sgd(&half, &x, 1.0, 1.0), "optimizer: weights [2, 8] is BF16, expected F32 on a GPU");
    refused(sgd(&x, &half, 1.0, 1.0), "the gradient [2, 8] is BF16, expected F32");
    refused(adamw(&x, [&half, &x], &x, &STEP), "the first moment [2, 8] is BF16, expected F32");
    refused(round_to_bf16(&x, &zeros((2, 8), DType::F32)), "the copy [2, 8] is F32, expected BF16");
    refused(
        scale(&zeros((8, 2), DType::F32).t().unwrap(), 1.0),
        "is not contiguous; call contiguous() first",
    );
    let here = Tensor::zeros((2, 8), DType::F32, &Device::Cpu).unwrap();
    refused(update_momentum(&x, &here, 1.0), "is not on the GPU; call to_device first");
    let codes = zeros((2, 8), DType::U8);
    let moment = |scales| Moment { codes: &codes, scales };
    let scales = Tensor::zeros(2, DType::F32, &gpu).unwrap();
    refused(adamw_8bit(&x, [moment(&scales); 2], &x, &STEP), "1 blocks, scales [2]");
}
