//! The head: log-probability and entropy of targets.

use super::*;
use rloss::ops::head_adapter::HeadAdapter;
use rloss::ops::log_prob::HeadTargets;
use rloss::ops::token_set::{KeptTokens, TokenSet};
use rloss::ops::weight::Weight;
use rloss::ops::{self, log_prob};
use serde::Deserialize;

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

/// A case of `scripts/make_reference_values.py`.
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
        let upstream = tensor(&case.gradient, (2, rows));
        let (out, found) = super::run_with_gradients(
            &[h.as_tensor()],
            |_| upstream.as_tensor().clone(),
            || ops::log_prob_and_entropy(&h, &weight, &targets, Some(&kept), case.temperature).unwrap(),
        );
        let expected: Vec<f64> = case.log_probs.iter().chain(&case.entropies).copied().collect();
        for (what, got, expected) in [
            ("values", floats(&out), expected),
            ("dh", floats(found[0].as_ref().unwrap()), case.dh),
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
    let ones = |out: &Tensor| out.ones_like().unwrap();
    let (out, found) = super::run_with_gradients(&[h.as_tensor()], ones, || {
        ops::log_prob_and_entropy(h, &Weight::Dense(weight.clone()), &Arc::new(targets.to_vec()), None, 1.0)
            .unwrap()
    });
    (floats(&out), floats(found[0].as_ref().unwrap()), floats(&dw))
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

/// The parameter `values` with a gradient buffer of `sums`.
struct Buffers(Vec<Tensor>);

impl rloss::ops::parameter::GradientSink for Buffers {
    fn add(
        &self,
        parameter: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        add(&self.0[parameter])
    }
}

#[test]
fn a_heads_adapter_is_the_head_of_the_sum_and_rows_without_a_gradient_are_left_out() {
    let (rows, width, rank, vocabulary) = (9, 8, 3, 37);
    let tensor = |shape: (usize, usize), seed: u64| {
        let values = floats(&input(&[shape.0, shape.1], 1.0, seed));
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    let [h, w, a, b] = [
        tensor((rows, width), 1),
        tensor((width, vocabulary), 2),
        tensor((width, rank), 3),
        tensor((rank, vocabulary), 4),
    ];
    let targets: Arc<Vec<u32>> = Arc::new((0..rows as u32).map(|row| row * 4 % 37).collect());
    // Rows 2 and 5 have no gradient.
    let upstream: Vec<f32> = (0..2 * rows)
        .map(|i| if [2, 5].contains(&(i % rows)) { 0.0 } else { 0.3 - 0.1 * i as f32 })
        .collect();
    let run = |h: &Tensor, targets: &Arc<Vec<u32>>, upstream: &[f32], skips_zero_gradients: bool| {
        let zeros = |of: &Tensor| Var::zeros(of.shape(), candle_core::DType::F32, of.device()).unwrap();
        let buffers = [zeros(&a), zeros(&b)];
        let sink = Arc::new(Buffers(buffers.iter().map(|var| var.as_tensor().clone()).collect()));
        let factor = |values: &Tensor, index| {
            let values = Var::from_tensor(values).unwrap();
            rloss::ops::Parameter::with_gradient_sink(values.as_tensor(), sink.clone(), index)
        };
        let adapter = HeadAdapter { a: factor(&a, 0), b: factor(&b, 1), scale: 0.5 };
        let h = Var::from_tensor(h).unwrap();
        let targets = HeadTargets { tokens: targets, kept: None, skips_zero_gradients };
        let head = (&Weight::dense(&w), Some(&adapter));
        let gradient = |out: &Tensor| Tensor::from_vec(upstream.to_vec(), out.shape(), &Device::Cpu).unwrap();
        let (out, found) = super::run_with_gradients(&[h.as_tensor()], gradient, || {
            log_prob::adapted_log_prob_and_entropy(h.as_tensor(), head, targets, 0.7).unwrap()
        });
        let dh = floats(found[0].as_ref().unwrap());
        let [da, db] = buffers.map(|buffer| floats(buffer.as_tensor()));
        [floats(&out), dh, da, db]
    };
    let all = run(&h, &targets, &upstream, false);
    // The same head with the sum of both matrices, by candle's graph.
    let vars = [&h, &w, &a, &b].map(|tensor| Var::from_tensor(tensor).unwrap());
    let [vh, vw, va, vb] = vars.each_ref().map(Var::as_tensor);
    let sum = (vw + (va.matmul(vb).unwrap() * 0.5).unwrap()).unwrap();
    let z = (vh.matmul(&sum).unwrap() / 0.7).unwrap();
    let log_p = candle_nn::ops::log_softmax(&z, 1).unwrap();
    let ids = Tensor::from_vec(targets.to_vec(), (rows, 1), &Device::Cpu).unwrap();
    let own = log_p.gather(&ids, 1).unwrap().flatten_all().unwrap();
    let entropy = (log_p.exp().unwrap() * &log_p).unwrap().sum(1).unwrap().neg().unwrap();
    let expected = Tensor::stack(&[own, entropy], 0).unwrap();
    let gradient = Tensor::from_vec(upstream.clone(), (2, rows), &Device::Cpu).unwrap();
    let store = (&expected * gradient).unwrap().sum_all().unwrap().backward().unwrap();
    let of = |tensor: &Tensor| floats(store.get(tensor).unwrap());
    for (found, expected) in all.iter().zip([floats(&expected), of(vh), of(va), of(vb)]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5 + 1e-4 * expected.abs(), "{found} for {expected}");
        }
    }
    // Left out, the rows leave the bits of a batch without them.
    let skipped = run(&h, &targets, &upstream, true);
    let kept = [0, 1, 3, 4, 6, 7, 8];
    let few: Vec<u32> = kept.iter().map(|&row| targets[row]).collect();
    let rows_of_h: Vec<Tensor> = kept.iter().map(|&row| h.narrow(0, row, 1).unwrap()).collect();
    let both = [0, rows].map(|start| kept.map(|row| upstream[start + row])).concat();
    let alone = run(&Tensor::cat(&rows_of_h, 0).unwrap(), &Arc::new(few), &both, false);
    assert_eq!(skipped[0], all[0]);
    assert_eq!(skipped[2..], alone[2..]);
    let rows_of = |values: &[f32]| kept.map(|row| values[row * width..(row + 1) * width].to_vec()).concat();
    assert_eq!(rows_of(&skipped[1]), alone[1]);
    assert!(skipped[1][2 * width..3 * width].iter().all(|value| *value == 0.0));
}
