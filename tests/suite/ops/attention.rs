//! Attention with sinks against a plain f64 attention and its central differences.

use super::*;
use rloss::ops::SequenceRows;
use rloss::ops::sink_attention::{Attention, sink_attention};

pub(super) struct Case {
    pub(super) attention: Attention,
    /// Tokens of each sequence.
    pub(super) lengths: Vec<usize>,
}

impl Case {
    pub(super) fn new(
        (heads, kv_heads, head_dim): (usize, usize, usize),
        window: Option<usize>,
        lengths: &[usize],
    ) -> Self {
        let attention = Attention { heads, kv_heads, head_dim, window, sinks: true, sink_gradient: true };
        Self { attention, lengths: lengths.to_vec() }
    }

    /// Queries, keys beside values, sinks of the size of the scores.
    pub(super) fn inputs(&self, seed: u64) -> [Var; 3] {
        let Attention { heads, kv_heads, head_dim, .. } = self.attention;
        let tokens = self.lengths.iter().sum();
        [
            input(&[tokens, heads, head_dim], 2.0, seed),
            input(&[tokens, 2, kv_heads, head_dim], 2.0, seed + 1),
            input(&[heads], 1.5, seed + 2),
        ]
    }

    pub(super) fn run(&self, v: &[&Tensor]) -> Tensor {
        let mut cu_seqlens = vec![0];
        for length in &self.lengths {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + length);
        }
        sink_attention(
            v[0],
            v[1],
            v[2],
            &Arc::new(SequenceRows::from_cu_seqlens(&cu_seqlens)),
            self.attention,
        )
        .unwrap()
    }

    /// A softmax over the scores and one more logit, which is then dropped.
    pub(super) fn reference(&self, v: &[Vec<f64>]) -> Vec<f64> {
        let Attention { heads, kv_heads, head_dim: d, window, sinks, .. } = self.attention;
        let (q, kv, sink) = (&v[0], &v[1], &v[2]);
        let kv_row = 2 * kv_heads * d;
        let mut out = vec![0.0; q.len()];
        let mut start = 0;
        for &length in &self.lengths {
            for (i, h) in (0..length).flat_map(|i| (0..heads).map(move |h| (i, h))) {
                let at = ((start + i) * heads + h) * d;
                let (query, kv_head) = (&q[at..at + d], h / (heads / kv_heads));
                let first = window.map_or(0, |w| (i + 1).saturating_sub(w));
                let key = |j: usize| &kv[(start + j) * kv_row + kv_head * d..][..d];
                let value = |j: usize| &kv[(start + j) * kv_row + (kv_heads + kv_head) * d..][..d];
                let dot = |j: usize| query.iter().zip(key(j)).map(|(a, b)| a * b).sum::<f64>();
                let e: Vec<f64> = (first..=i).map(|j| (dot(j) / (d as f64).sqrt()).exp()).collect();
                let total = e.iter().sum::<f64>() + if sinks { sink[h].exp() } else { 0.0 };
                for (e, j) in e.iter().zip(first..) {
                    out[at..at + d].iter_mut().zip(value(j)).for_each(|(o, v)| *o += e / total * v);
                }
            }
            start += length;
        }
        out
    }

    fn check(&self, what: &str, seed: u64) {
        let [q, kv, sinks] = self.inputs(seed);
        check(what, &[&q, &kv, &sinks], |v| self.run(&tensors(v)), |v| self.reference(v));
    }
}

/// The cases: grouped heads, windows shorter and longer than a block of keys, one-token sequences.
fn cases() -> Vec<(&'static str, Case)> {
    vec![
        ("full, grouped, several sequences", Case::new((4, 2, 4), None, &[1, 5, 37])),
        ("window of 5", Case::new((4, 2, 4), Some(5), &[1, 37, 3])),
        ("window of 1", Case::new((2, 1, 2), Some(1), &[4, 1])),
        ("window across blocks", Case::new((2, 2, 3), Some(33), &[70])),
        ("odd head size, three a group", Case::new((6, 2, 5), Some(7), &[1, 1, 20])),
    ]
}

#[test]
fn values_and_gradients_are_those_of_a_plain_attention_with_sinks() {
    for (what, case) in cases() {
        case.check(what, 40);
    }
}

#[test]
fn without_sinks_it_is_a_plain_softmax_and_sinks_get_no_gradient() {
    for (what, mut case) in cases() {
        case.attention.sinks = false;
        case.check(what, 50);
        let [q, kv, sinks] = case.inputs(50);
        let (g, ..) = gradients(&[&q, &kv, &sinks], |v| case.run(&tensors(v)));
        assert!(g[2].iter().all(|&g| g == 0.0), "{what}");
    }
}

#[test]
fn without_their_gradient_sinks_still_count_and_nothing_else_changes() {
    for (what, mut case) in cases() {
        let [q, kv, sinks] = case.inputs(60);
        let (with, out, _) = gradients(&[&q, &kv, &sinks], |v| case.run(&tensors(v)));
        case.attention.sink_gradient = false;
        let (without, same_out, _) = gradients(&[&q, &kv, &sinks], |v| case.run(&tensors(v)));
        assert_eq!(out, same_out, "{what}");
        assert_eq!(with[..2], without[..2], "{what}");
        assert!(with[2].iter().all(|&g| g != 0.0), "{what}");
        assert!(without[2].iter().all(|&g| g == 0.0), "{what}");
    }
}

/// A sink far above or below every score: the output vanishes, or is that of a plain softmax. Never NaN.
#[test]
fn extreme_sinks_and_scores_stay_finite() {
    let case = Case::new((2, 1, 4), None, &[40]);
    let [q, kv, _] = case.inputs(70);
    for (sink, scale) in [(80f32, 1.0), (-80.0, 1.0), (300.0, 1.0), (-1e6, 1.0), (1.0, 30.0)] {
        let q = Var::from_tensor(&(q.as_tensor() * scale).unwrap()).unwrap();
        let sinks = Var::new(&[sink, sink], &candle_core::Device::Cpu).unwrap();
        let (g, out, _) = gradients(&[&q, &kv, &sinks], |v| case.run(&tensors(v)));
        assert!(out.iter().chain(g.iter().flatten()).all(|v| v.is_finite()), "sink {sink}");
        if sink == 300.0 {
            assert!(out.iter().all(|v| v.abs() < 1e-30), "sink {sink}");
        }
        if sink == -1e6 {
            let mut plain = Case::new((2, 1, 4), None, &[40]);
            plain.attention.sinks = false;
            assert_eq!(out, floats(&plain.run(&[&q, &kv, &sinks])), "sink {sink}");
        }
    }
}
