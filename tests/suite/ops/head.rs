//! The head: log-probability and entropy of targets.

use super::{assert_close, check, floats, input};
use candle_core::{Device, Tensor, Var};
use rloss::ops::weight::Weight;
use rloss::ops::{self, log_prob};
use std::sync::Arc;

/// Log-probabilities, then entropies, in f64.
fn reference(h: &[f64], w: &[f64], targets: &[u32], vocabulary: usize, temperature: f64) -> Vec<f64> {
    let width = w.len() / vocabulary;
    let (mut log_probs, mut entropies) = (vec![], vec![]);
    for (h, &target) in h.chunks_exact(width).zip(targets) {
        let z: Vec<f64> = (0..vocabulary)
            .map(|j| (0..width).map(|c| h[c] * w[c * vocabulary + j]).sum::<f64>() / temperature)
            .collect();
        let highest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = highest + z.iter().map(|z| (z - highest).exp()).sum::<f64>().ln();
        log_probs.push(z[target as usize] - lse);
        entropies.push(z.iter().map(|z| -(z - lse).exp() * (z - lse)).sum::<f64>());
    }
    log_probs.extend(entropies);
    log_probs
}

#[test]
fn log_prob_and_entropy_have_the_values_and_gradients_of_their_formulas() {
    for (rows, width, vocabulary, temperature) in [(5, 7, 37, 1.0), (3, 4, 16, 0.7), (4, 6, 3, 1.6)] {
        let targets: Arc<Vec<u32>> =
            Arc::new((0..rows as u32).map(|r| (r * 11 + 2) % vocabulary as u32).collect());
        let (h, w) = (input(&[rows, width], 2.0, 20), input(&[width, vocabulary], 1.0, 21));
        check(
            &format!("log_prob {vocabulary} at {temperature}"),
            &[&h, &w],
            |v| {
                ops::log_prob_and_entropy(v[0], &Weight::Dense(v[1].0.clone()), &targets, temperature)
                    .unwrap()
            },
            |v| reference(&v[0], &v[1], &targets, vocabulary, temperature),
        );
    }
}

/// Gradients of the sum of both outputs, and the outputs.
fn run(h: &Var, w: &Var, targets: &[u32]) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let dw = w.zeros_like().unwrap().detach();
    let sink = Arc::new(super::Sink { buffers: vec![dw.clone()], added: Default::default() });
    let weight = ops::Parameter::with_gradient_sink(w, sink, 0);
    let out = ops::log_prob_and_entropy(h, &Weight::Dense(weight.clone()), &Arc::new(targets.to_vec()), 1.0)
        .unwrap();
    let store = out.sum_all().unwrap().backward().unwrap();
    (floats(&out), floats(store.get(h).unwrap()), floats(&dw))
}

/// A vocabulary so large that the head works in several chunks of rows.
#[test]
fn chunks_of_rows_change_nothing() {
    let (rows, vocabulary) = (10, 2_100_000);
    let (h, w) = (input(&[rows, 1], 1.0, 22), input(&[1, vocabulary], 3.0, 23));
    let targets: Vec<u32> = (0..rows as u32).map(|r| r * 199_991).collect();
    let (out, dh, dw) = run(&h, &w, &targets);
    let mut dw_summed = vec![0f64; vocabulary];
    for (row, &value) in floats(&h).iter().enumerate() {
        let alone = Var::from_vec(vec![value], (1, 1), &Device::Cpu).unwrap();
        let (out_alone, dh_alone, dw_alone) = run(&alone, &w, &targets[row..row + 1]);
        assert_eq!(out_alone, [out[row], out[rows + row]], "row {row}");
        assert_eq!(dh_alone, [dh[row]], "row {row}");
        dw_alone.iter().zip(&mut dw_summed).for_each(|(&g, sum)| *sum += g as f64);
    }
    assert_close("the weights' gradient", &dw, &dw_summed);
}

#[test]
fn extreme_logits_stay_finite() {
    let mut row = vec![-3e4f32, 0.0, 3e4, -1e9, 2.9e4];
    let stats = log_prob::row_stats(&mut row, 1.0);
    assert_eq!((stats.log_sum_exp, stats.entropy), (3e4, 0.0));
    let mut equal = vec![1e4f32; 50];
    let stats = log_prob::row_stats(&mut equal, 1.0);
    assert!((stats.entropy - 50f32.ln()).abs() < 1e-6);
    let h = Tensor::new(&[[1f32]], &Device::Cpu).unwrap();
    let w = Tensor::new(&[[1f32, 2.0]], &Device::Cpu).unwrap();
    assert!(
        ops::log_prob_and_entropy(&h, &Weight::Dense(ops::Parameter::constant(&w)), &Arc::new(vec![2]), 1.0)
            .is_err(),
        "2 is no token"
    );
}
