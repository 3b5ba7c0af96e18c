//! Tests of the head's rows of logits on a GPU or the emulated driver, compared with CPU and formulas.

use super::numbers;
use crate::ops::cuda::{logits_gradient, open, row_stats};
use crate::ops::log_prob;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;

/// Returns for all rows: scaled `z`, log-sum-exps, entropies, log-probabilities of the targets.
fn stats(gpu: &CudaDevice, z: &[f32], targets: &[u32], inverse_temperature: f32) -> [Vec<f32>; 4] {
    let rows = targets.len();
    let (mut z, ids) = (gpu.clone_htod(z).unwrap(), gpu.clone_htod(targets).unwrap());
    let empty = || gpu.alloc_zeros::<f32>(rows).unwrap();
    let (mut sums, mut entropy, mut log_prob) = (empty(), empty(), empty());
    let (mut sums_view, mut entropy_view) = (sums.as_view_mut(), entropy.as_view_mut());
    let targets = Some((&ids.as_view(), &mut log_prob.as_view_mut()));
    let of_rows = [&mut sums_view, &mut entropy_view];
    row_stats(gpu, &mut z.as_view_mut(), inverse_temperature, of_rows, targets).unwrap();
    [z, sums, entropy, log_prob].map(|x| gpu.clone_dtoh(&x).unwrap())
}

fn gradient(
    gpu: &CudaDevice,
    [z, sums, entropy, _]: &[Vec<f32>; 4],
    targets: &[u32],
    upstream: [&[f32]; 2],
    inverse_temperature: f32,
) -> Vec<f32> {
    let up = |x: &[f32]| gpu.clone_htod(x).unwrap();
    let (z, ids) = (up(z), gpu.clone_htod(targets).unwrap());
    let of_rows = [up(sums), up(entropy), up(upstream[0]), up(upstream[1])];
    let [a, b, c, d] = of_rows.each_ref().map(|x| x.as_view());
    let mut dz = gpu.alloc_zeros::<bf16>(z.len()).unwrap();
    let (z, ids) = (z.as_view(), ids.as_view());
    logits_gradient(gpu, &z, &ids, [&a, &b, &c, &d], inverse_temperature, &mut dz.as_view_mut()).unwrap();
    gpu.clone_dtoh(&dz).unwrap().into_iter().map(f32::from).collect()
}

fn near(got: f32, exact: f32, tolerance: f32, what: &str) {
    assert!((got - exact).abs() <= tolerance, "{what}: {got}, on the CPU {exact}");
}

#[test]
fn rows_of_logits_give_the_cpus_sums_and_gradient() {
    let device = open(0).unwrap();
    let gpu = device.as_cuda_device().unwrap();
    for (rows, width, inverse) in [(1, 1, 1.0), (3, 13, 0.5), (4, 2048, 1.25), (2, 9001, 1.0)] {
        let z = super::floats(&numbers(1, rows, width, 1.0));
        let targets: Vec<u32> = (0..rows).map(|row| ((row * 7919 + 5) % width) as u32).collect();
        let got = stats(gpu, &z, &targets, inverse);
        let (d_log_prob, d_entropy) = (numbers(2, 1, rows, 1.0), numbers(3, 1, rows, 0.3));
        let (d_log_prob, d_entropy) = (super::floats(&d_log_prob), super::floats(&d_entropy));
        let dz = gradient(gpu, &got, &targets, [&d_log_prob, &d_entropy], inverse);
        for row in 0..rows {
            let at = row * width..(row + 1) * width;
            let mut over = z[at.clone()].to_vec();
            let exact = log_prob::row_stats(&mut over, inverse);
            assert_eq!(got[0][at.clone()], over);
            near(got[1][row], exact.log_sum_exp, 1e-5, "log-sum-exp");
            near(got[2][row], exact.entropy, 3e-5, "entropy");
            let target = targets[row] as usize;
            near(got[3][row], over[target] - exact.log_sum_exp, 1e-5, "log-probability");
            assert_eq!(got[3][row], over[target] - got[1][row], "the sampler subtracts so too");
            for (i, &z) in over.iter().enumerate() {
                let log_p = z - exact.log_sum_exp;
                let p = log_p.exp();
                let slope = d_log_prob[row] + d_entropy[row] * (log_p + exact.entropy);
                let of_target = if i == target { d_log_prob[row] * inverse } else { 0.0 };
                let d = of_target - inverse * p * slope;
                near(dz[row * width + i], d, d.abs() / 128.0 + 1e-4 * p + 1e-5 * of_target.abs(), "dz");
            }
        }
    }
}

#[test]
fn a_row_of_logits_alone_has_the_bits_it_has_in_a_chunk() {
    let device = open(0).unwrap();
    let gpu = device.as_cuda_device().unwrap();
    let (rows, width) = (3, 1003);
    let z = super::floats(&numbers(4, rows, width, 1.0));
    let all = stats(gpu, &z, &[1, 2, 3], 0.7);
    let of_all = gradient(gpu, &all, &[1, 2, 3], [&[1.0, -0.5, 2.0], &[0.1, 0.2, -0.3]], 0.7);
    for row in 0..rows {
        let at = row * width..(row + 1) * width;
        let alone = stats(gpu, &z[at.clone()], &[row as u32 + 1], 0.7);
        let upstream = [&[[1.0, -0.5, 2.0][row]][..], &[[0.1, 0.2, -0.3][row]]];
        let of_alone = gradient(gpu, &alone, &[row as u32 + 1], upstream, 0.7);
        assert_eq!(all[0][at.clone()], alone[0]);
        for sums in 1..4 {
            assert_eq!(all[sums][row].to_bits(), alone[sums][0].to_bits());
        }
        assert_eq!(of_all[at], of_alone);
    }
}

#[test]
fn no_rows_of_logits_are_no_launch_and_lengths_that_disagree_are_refused() {
    let device = open(0).unwrap();
    let gpu = device.as_cuda_device().unwrap();
    let [z, ..] = stats(gpu, &[], &[], 1.0);
    assert!(z.is_empty());
    assert!(gradient(gpu, &Default::default(), &[], [&[], &[]], 1.0).is_empty());

    let mut z = gpu.alloc_zeros::<f32>(12).unwrap();
    let mut refused = |rows: usize, others: usize, text: &str| {
        let mut sums = gpu.alloc_zeros::<f32>(rows).unwrap();
        let mut entropy = gpu.alloc_zeros::<f32>(others).unwrap();
        let (mut sums, mut entropy) = (sums.as_view_mut(), entropy.as_view_mut());
        let error = row_stats(gpu, &mut z.as_view_mut(), 1.0, [&mut sums, &mut entropy], None).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(5, 5, "log_prob: 12 logits are not a whole number of 5 rows; give whole rows");
    refused(0, 0, "12 logits are not a whole number of 0 rows");
    refused(3, 2, "log_prob: 2 numbers for 3 rows; give one number per row");
}
