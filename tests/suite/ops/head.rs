//! The head: log-probability and entropy of targets.

use super::{assert_close, check, floats, input};
use candle_core::{Device, Tensor, Var};
use rloss::ops::token_set::{KeptTokens, TokenSet};
use rloss::ops::weight::Weight;
use rloss::ops::{self, log_prob};
use serde::Deserialize;
use std::sync::Arc;

/// Log-probabilities, then entropies, in f64.
fn reference(h: &[f64], w: &[f64], targets: &[u32], vocabulary: usize, temperature: f64) -> Vec<f64> {
    let all: Vec<u32> = (0..vocabulary as u32).collect();
    kept_reference(h, w, targets, &vec![all; targets.len()], vocabulary, temperature)
}

/// The same over the kept tokens of each row.
fn kept_reference(
    h: &[f64],
    w: &[f64],
    targets: &[u32],
    kept: &[Vec<u32>],
    vocabulary: usize,
    temperature: f64,
) -> Vec<f64> {
    let width = w.len() / vocabulary;
    let (mut log_probs, mut entropies) = (vec![], vec![]);
    for ((h, &target), kept) in h.chunks_exact(width).zip(targets).zip(kept) {
        let logit =
            |j: u32| (0..width).map(|c| h[c] * w[c * vocabulary + j as usize]).sum::<f64>() / temperature;
        let z: Vec<f64> = kept.iter().map(|&j| logit(j)).collect();
        let highest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = highest + z.iter().map(|z| (z - highest).exp()).sum::<f64>().ln();
        log_probs.push(logit(target) - lse);
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
                ops::log_prob_and_entropy(v[0], &Weight::Dense(v[1].0.clone()), &targets, None, temperature)
                    .unwrap()
            },
            |v| reference(&v[0], &v[1], &targets, vocabulary, temperature),
        );
    }
}

/// Sets of `counts` tokens, spread over the vocabulary; each contains its target.
fn sets(targets: &[u32], counts: &[usize], vocabulary: usize) -> Vec<Vec<u32>> {
    let set = |(&target, &count): (&u32, &usize)| {
        let mut ids: Vec<u32> = (0..count as u32)
            .map(|i| (target + i * vocabulary as u32 / count as u32) % vocabulary as u32)
            .collect();
        ids.sort_unstable();
        ids
    };
    targets.iter().zip(counts.iter().cycle()).map(set).collect()
}

#[test]
fn over_kept_tokens_values_and_gradients_are_those_of_their_formulas() {
    for (rows, width, vocabulary, temperature) in [(5, 7, 37, 1.0), (8, 4, 16, 0.7), (4, 6, 3, 1.6)] {
        let targets: Arc<Vec<u32>> =
            Arc::new((0..rows as u32).map(|r| (r * 11 + 2) % vocabulary as u32).collect());
        let kept = sets(&targets, &[1, 2, vocabulary / 2 + 1, vocabulary], vocabulary);
        let encoded: KeptTokens = Arc::new(kept.iter().map(|ids| Some(TokenSet::from_ids(ids))).collect());
        let (h, w) = (input(&[rows, width], 2.0, 20), input(&[width, vocabulary], 1.0, 21));
        check(
            &format!("log_prob over kept tokens of {vocabulary} at {temperature}"),
            &[&h, &w],
            |v| {
                let weight = Weight::Dense(v[1].0.clone());
                ops::log_prob_and_entropy(v[0], &weight, &targets, Some(&encoded), temperature).unwrap()
            },
            |v| kept_reference(&v[0], &v[1], &targets, &kept, vocabulary, temperature),
        );
    }
}

/// A case of `scripts/make_truncated_head.py`.
#[derive(Deserialize)]
struct TorchCase {
    temperature: f64,
    targets: Vec<u32>,
    kept: Vec<Option<Vec<u32>>>,
    h: Vec<f32>,
    w: Vec<f32>,
    gradient: Vec<f32>,
    log_probs: Vec<f64>,
    entropies: Vec<f64>,
    dh: Vec<f64>,
    dw: Vec<f64>,
}

#[derive(Deserialize)]
struct TorchCases {
    rows: usize,
    width: usize,
    cases: Vec<TorchCase>,
}

#[test]
fn over_kept_tokens_values_and_gradients_are_torchs() {
    let TorchCases { rows, width, cases } =
        serde_json::from_str(include_str!("../../fixtures/truncated_head.json")).unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let tensor = |values: &[f32], shape: (usize, usize)| {
            Var::from_vec(values.to_vec(), shape, &Device::Cpu).unwrap()
        };
        let (h, w) = (tensor(&case.h, (rows, width)), tensor(&case.w, (width, case.w.len() / width)));
        let dw = w.zeros_like().unwrap().detach();
        let sink = Arc::new(super::Sink { buffers: vec![dw.clone()], added: Default::default() });
        let weight = Weight::Dense(ops::Parameter::with_gradient_sink(&w, sink, 0));
        let sets = case.kept.iter().map(|ids| ids.as_deref().map(TokenSet::from_ids)).collect();
        let (targets, kept): (_, KeptTokens) = (Arc::new(case.targets), Arc::new(sets));
        let out = ops::log_prob_and_entropy(&h, &weight, &targets, Some(&kept), case.temperature).unwrap();
        let upstream = tensor(&case.gradient, (2, rows));
        let store = (&out * upstream.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
        let expected: Vec<f64> = case.log_probs.iter().chain(&case.entropies).copied().collect();
        for (what, got, expected) in [
            ("values", floats(&out), expected),
            ("dh", floats(store.get(&h).unwrap()), case.dh),
            ("dw", floats(&dw), case.dw),
        ] {
            assert_eq!(got.len(), expected.len());
            let worst =
                got.iter().zip(&expected).map(|(got, e)| (f64::from(*got) - e).abs() / e.abs().max(1.0));
            let worst = worst.fold(0.0, f64::max);
            assert!(worst < 1e-5, "{what} at {}: {worst:e}", case.temperature);
        }
    }
}

#[test]
fn sets_that_do_not_fit_their_rows_are_errors() {
    let h = Tensor::new(&[[1f32], [2.0]], &Device::Cpu).unwrap();
    let w = Tensor::new(&[[1f32, 2.0, 3.0]], &Device::Cpu).unwrap();
    let weight = Weight::Dense(ops::Parameter::constant(&w));
    let error = |sets: Vec<Option<TokenSet>>| {
        let targets = Arc::new(vec![0, 2]);
        let result = ops::log_prob_and_entropy(&h, &weight, &targets, Some(&Arc::new(sets)), 1.0);
        result.unwrap_err().to_string()
    };
    let set = |ids: &[u32]| Some(TokenSet::from_ids(ids));
    assert!(error(vec![None]).contains("1 sets of kept tokens for 2 targets"));
    assert!(error(vec![None, set(&[0, 1])]).contains("do not fit the target 2"));
    assert!(error(vec![set(&[0, 3]), None]).contains("do not fit the target 0"));
}

/// Gradients of the sum of both outputs, and the outputs.
fn run(h: &Var, w: &Var, targets: &[u32]) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let dw = w.zeros_like().unwrap().detach();
    let sink = Arc::new(super::Sink { buffers: vec![dw.clone()], added: Default::default() });
    let weight = ops::Parameter::with_gradient_sink(w, sink, 0);
    let out =
        ops::log_prob_and_entropy(h, &Weight::Dense(weight.clone()), &Arc::new(targets.to_vec()), None, 1.0)
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
        ops::log_prob_and_entropy(
            &h,
            &Weight::Dense(ops::Parameter::constant(&w)),
            &Arc::new(vec![2]),
            None,
            1.0
        )
        .is_err(),
        "2 is no token"
    );
}
