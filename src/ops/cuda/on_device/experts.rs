//! Tests of experts: plans, selected experts, orders of rows.

use super::{assert_refused, floats, numbers, to_gpu};
use crate::ops::cuda::open;
use crate::ops::weight::Weight;
use crate::ops::{self, Dispatch, Parameter};
use candle_core::{DType, Device, Tensor};

#[test]
fn the_plan_is_the_cpus_and_a_token_alone_has_its_bits() {
    let gpu = open(0).unwrap();
    let (tokens, experts, top_k, width) = (300, 40, 4, 24);
    let routes: Vec<u32> =
        (0..tokens * top_k).map(|i| ((i / top_k * 7 + 9 * (i % top_k)) % experts) as u32).collect();
    let routes = Tensor::from_vec(routes, (tokens, top_k), &Device::Cpu).unwrap();
    let w = numbers(7, experts * width, 8, 0.3).reshape((experts, width, 8)).unwrap();
    let (x, b) = (numbers(5, tokens, width, 1.0), numbers(8, experts, 8, 1.0));
    let (w, b) = (Parameter::constant(&to_gpu(&w, &gpu)), Parameter::constant(&b.to_device(&gpu).unwrap()));
    let of = |first: usize, count: usize| {
        let rows = |x: &Tensor| x.narrow(0, first, count).unwrap().contiguous().unwrap();
        let plan = Dispatch::new(&rows(&routes).to_device(&gpu).unwrap(), experts).unwrap();
        let sorted = ops::dispatch(&to_gpu(&rows(&x), &gpu), &plan).unwrap();
        let product = ops::grouped_linear(&sorted, &w, Some(&b), &plan).unwrap();
        let shares = Tensor::ones((count, top_k), DType::F32, &gpu).unwrap();
        (floats(&ops::combine(&product, &shares, &plan).unwrap()), plan)
    };
    let (all, plan) = of(0, tokens);
    let host = Dispatch::new(&routes, experts).unwrap();
    let ids = |x: Tensor| x.to_device(&Device::Cpu).unwrap().to_vec1::<u32>().unwrap();
    assert_eq!(ids(plan.row_of().unwrap()), ids(host.row_of().unwrap()));
    assert_eq!(ids(plan.token_of().unwrap()), ids(host.token_of().unwrap()));
    assert_eq!(ids(plan.starts().unwrap()), ids(host.starts().unwrap()));
    for (first, count) in [(0, 1), (299, 1), (100, 70)] {
        assert_eq!(of(first, count).0, all[first * 8..(first + count) * 8]);
    }
}

#[test]
fn products_by_some_experts_have_the_bits_of_all_experts() {
    let gpu = open(0).unwrap();
    let (tokens, experts, top_k, width) = (150, 6, 2, 16);
    let routes: Vec<u32> =
        (0..tokens * top_k).map(|i| ((i / top_k * 5 + i % top_k) % experts) as u32).collect();
    let routes = Tensor::from_vec(routes, (tokens, top_k), &gpu).unwrap();
    let w = numbers(7, experts * width, 2 * width, 0.3).reshape((experts, width, 2 * width)).unwrap();
    let (w, b) = (to_gpu(&w, &gpu), numbers(8, experts, 2 * width, 1.0).to_device(&gpu).unwrap());
    let x = to_gpu(&numbers(5, tokens, width, 1.0), &gpu);
    let plan = Dispatch::new(&routes, experts).unwrap();
    let outputs = |first: usize, count: usize, plan: &Dispatch| {
        let own = |x: &Tensor| Parameter::constant(&x.narrow(0, first, count).unwrap());
        let (w, b) = (own(&w), own(&b));
        let fused =
            ops::fused::expert_swiglu(&x, &Weight::Dense(w.clone()), Some(&b), plan, (7.0, 1.7)).unwrap();
        let separate = ops::grouped_linear(&ops::dispatch(&x, plan).unwrap(), &w, Some(&b), plan).unwrap();
        [fused, separate]
    };
    let all = outputs(0, experts, &plan);
    let starts = plan.starts().unwrap().to_vec1::<u32>().unwrap();
    for (first, count) in [(0, 2), (2, 3), (5, 1), (1, 5)] {
        let own = plan.of_experts(first..first + count);
        assert_eq!(own.starts().unwrap().to_vec1::<u32>().unwrap(), starts[first..=first + count]);
        let rows = starts[first] as usize..starts[first + count] as usize;
        for (some, all) in outputs(first, count, &own).iter().zip(&all) {
            let width = all.dim(1).unwrap();
            let of_experts = rows.start * width..rows.end * width;
            assert_eq!(floats(some)[of_experts.clone()], floats(all)[of_experts], "{first}, {count}");
        }
    }
    // On a CPU a plan has all its experts.
    let host = Dispatch::new(&routes.to_device(&Device::Cpu).unwrap(), experts).unwrap();
    assert_refused(host.of_experts(0..2).counts(None), "products by experts 0..2 of a plan");
}

#[test]
fn outputs_in_any_order_have_the_bits_of_the_sorted_ones() {
    let gpu = open(0).unwrap();
    let (tokens, top_k, width) = (70, 2, 16);
    let routes: Vec<u32> = (0..tokens * top_k).map(|i| (i * i % 5) as u32).collect();
    let plan = Dispatch::new(&Tensor::from_vec(routes, (tokens, top_k), &gpu).unwrap(), 5).unwrap();
    let sorted = to_gpu(&numbers(1, tokens * top_k, width, 1.0), &gpu);
    let residual = to_gpu(&numbers(2, tokens, width, 1.0), &gpu);
    let shares = numbers(3, tokens, top_k, 0.3).to_device(&gpu).unwrap();
    let expected = floats(&ops::fused::combine_and_add(&sorted, &shares, &plan, &residual).unwrap());
    let by_slot = ops::take_rows(&sorted, &plan.row_of().unwrap()).unwrap();
    let slots = Tensor::arange(0, (tokens * top_k) as u32, &gpu).unwrap();
    let found = ops::fused::combine_rows_and_add(&by_slot, &shares, &slots, &residual).unwrap();
    assert_eq!(floats(&found), expected);
    // On a CPU take_rows checks the rows.
    let x = numbers(1, 3, 8, 1.0);
    let rows = |rows: Vec<u32>| Tensor::from_vec(rows, 2, &Device::Cpu).unwrap();
    let taken = floats(&ops::take_rows(&x, &rows(vec![2, 0])).unwrap());
    assert_eq!(taken, [&floats(&x)[16..], &floats(&x)[..8]].concat());
    assert_refused(ops::take_rows(&x, &rows(vec![0, 3])), "take_rows: row 3 of 3");
}

#[test]
fn nothing_to_do_is_no_launch_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let routes = Tensor::zeros((0, 2), DType::U32, &gpu).unwrap();
    let plan = Dispatch::new(&routes, 3).unwrap();
    assert_eq!(plan.starts().unwrap().to_vec1::<u32>().unwrap(), [0; 4]);
    let x = Tensor::zeros((0, 16), DType::BF16, &gpu).unwrap();
    let w = Parameter::constant(&Tensor::zeros((3, 16, 8), DType::BF16, &gpu).unwrap());
    let b = Parameter::constant(&Tensor::zeros((3, 8), DType::F32, &gpu).unwrap());
    let sorted = ops::dispatch(&x, &plan).unwrap();
    let product = ops::grouped_linear(&sorted, &w, Some(&b), &plan).unwrap();
    let shares = Tensor::zeros((0, 2), DType::F32, &gpu).unwrap();
    assert_eq!(ops::combine(&product, &shares, &plan).unwrap().dims(), [0, 8]);
    let one = Tensor::zeros((2, 16), DType::F32, &gpu).unwrap();
    let matrix = Parameter::constant(&Tensor::zeros((16, 8), DType::BF16, &gpu).unwrap());
    assert_refused(ops::linear(&one, &matrix, None), "linear: x [2, 16] is F32, expected BF16 on a GPU");
    let wide = Parameter::constant(&Tensor::zeros((16, 8), DType::F32, &gpu).unwrap());
    let x = Tensor::zeros((2, 16), DType::BF16, &gpu).unwrap();
    assert_refused(ops::linear(&x, &wide, None), "linear: the weight [16, 8] is F32, expected BF16 on a GPU");
    let odd = Tensor::zeros((1, 12), DType::BF16, &gpu).unwrap();
    let plan = Dispatch::new(&Tensor::zeros((1, 1), DType::U32, &gpu).unwrap(), 1).unwrap();
    assert_refused(
        ops::dispatch(&odd, &plan),
        "rows of 12 values are not supported on a GPU; use a hidden size that is a multiple of 8",
    );
}
