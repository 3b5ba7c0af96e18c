//! Values and gradients against candle-nn's forms that are made of differentiable parts.
//!
//! Its fused forms (`rms_norm`, `rope`, `softmax_last_dim`) drop gradients in silence, which is why the
//! ops exist; one test holds that reason, so that a version that mends it is noticed.

use super::*;
use candle_core::D;
use candle_nn::{ops as stock, rotary_emb};
use rloss::ops;
use rloss::ops::rope::{RopeTable, Rotation};
use rloss::ops::weight::Weight;

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

/// As [`gradients`] for an op of candle's, by candle's backward pass.
fn candles_gradients(
    inputs: &[&candle_core::Var],
    op: impl Fn(&[&super::Input]) -> Tensor,
) -> (Vec<Vec<f32>>, Vec<f32>) {
    let given: Vec<_> =
        inputs.iter().map(|v| super::Input(ops::Parameter::variable(v.as_tensor()))).collect();
    let out = op(&given.iter().collect::<Vec<_>>());
    let c = Tensor::from_vec(super::noise(out.elem_count(), 1.0, 77), out.shape(), &Device::Cpu).unwrap();
    let store = (&out * c).unwrap().sum_all().unwrap().backward().unwrap();
    (inputs.iter().map(|v| floats(store.get(v.as_tensor()).unwrap())).collect(), floats(&out))
}

/// Compares values and every gradient of two ways to compute the same.
fn same(
    what: &str,
    inputs: &[&candle_core::Var],
    own: impl Fn(&[&super::Input]) -> Tensor,
    theirs: impl Fn(&[&super::Input]) -> Tensor,
) {
    let (own_gradients, own_values, _) = gradients(inputs, own);
    let (their_gradients, their_values) = candles_gradients(inputs, theirs);
    assert_close(&format!("{what}: value"), &own_values, &widened(&their_values));
    for (i, (own, theirs)) in own_gradients.iter().zip(&their_gradients).enumerate() {
        assert_close(&format!("{what}: gradient of input {i}"), own, &widened(theirs));
    }
}

#[test]
fn rms_norm_is_candles_slow_one() {
    let (x, w) = (input(&[6, 48], 0.5, 40), input(&[48], 1.0, 41));
    same(
        "rms_norm",
        &[&x, &w],
        |v| ops::rms_norm(v[0], v[1], 1e-5).unwrap(),
        |v| stock::rms_norm_slow(v[0], v[1], 1e-5).unwrap(),
    );
}

#[test]
fn rope_is_candles_slow_one() {
    let (tokens, heads, d) = (7, 3, 8);
    let frequencies = [1.0f32, 0.25, 0.04, 0.001];
    let table = Arc::new(RopeTable::new(&frequencies, tokens, 1.0));
    let rotation = Rotation::new(table, (0..tokens as u32).collect());
    let angles = Tensor::arange(0f32, tokens as f32, &Device::Cpu).unwrap().unsqueeze(1).unwrap();
    let angles = angles.broadcast_mul(&Tensor::new(&frequencies, &Device::Cpu).unwrap()).unwrap();
    let (cosines, sines) = (angles.cos().unwrap(), angles.sin().unwrap());
    let x = input(&[tokens, heads * d], 1.0, 42);
    same(
        "rope",
        &[&x],
        |v| ops::rope(v[0], heads, &rotation).unwrap(),
        |v| {
            let by_head = v[0].reshape((1, tokens, heads, d)).unwrap().transpose(1, 2).unwrap();
            let turned = rotary_emb::rope_slow(&by_head, &cosines, &sines).unwrap();
            turned.transpose(1, 2).unwrap().reshape((tokens, heads, d)).unwrap()
        },
    );
}

#[test]
fn log_probs_and_entropies_are_those_of_candles_log_softmax() {
    let (rows, width, vocabulary) = (6, 9, 41);
    let targets: Arc<Vec<u32>> = Arc::new((0..rows as u32).map(|r| r * 7 % vocabulary as u32).collect());
    let ids = Tensor::from_vec(targets.to_vec(), (rows, 1), &Device::Cpu).unwrap();
    let (h, w) = (input(&[rows, width], 1.5, 43), input(&[width, vocabulary], 1.0, 44));
    same(
        "log_prob_and_entropy",
        &[&h, &w],
        |v| ops::log_prob_and_entropy(v[0], &Weight::Dense(v[1].0.clone()), &targets, None, 1.0).unwrap(),
        |v| {
            let all = stock::log_softmax(&v[0].matmul(v[1]).unwrap(), D::Minus1).unwrap();
            let chosen = all.gather(&ids, 1).unwrap().squeeze(1).unwrap();
            let entropies = (all.exp().unwrap() * &all).unwrap().sum(1).unwrap().neg().unwrap();
            Tensor::stack(&[chosen, entropies], 0).unwrap()
        },
    );
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it shows why they are disallowed")]
fn candles_fused_forms_drop_gradients() {
    let (x, w) = (input(&[2, 4], 1.0, 45), input(&[4], 1.0, 46));
    for (name, out) in [
        ("rms_norm", stock::rms_norm(&x, &w, 1e-5).unwrap()),
        ("softmax_last_dim", stock::softmax_last_dim(&x).unwrap()),
    ] {
        assert_eq!(floats(&out).len(), 8);
        let store = out.sum_all().unwrap().backward().unwrap();
        assert!(store.get(&x).is_none(), "{name} has a gradient now: clippy.toml may allow it");
    }
}
