//! Tests of the head: additions to its gradient, the sampler's bits compared with training, refusals.

use super::{assert_refused, floats, forward_and_backward, numbers, to_gpu};
use crate::ops::cuda::open;
use crate::ops::logits::{SamplingParameters, device_logits_rows, logits_rows_max, sampled_rows_max};
use crate::ops::parameter::GradientSink;
use crate::ops::weight::Weight;
use crate::ops::{self, Parameter};
use candle_core::{DType, Device, Result, Tensor, Var};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const TEMPERATURE: f64 = 0.8;

fn targets(rows: usize, vocabulary: usize) -> Arc<Vec<u32>> {
    Arc::new((0..rows).map(|i| (i * 31 % vocabulary) as u32).collect())
}

/// A sink that counts how often a pass adds to a parameter.
struct CountingSink(AtomicUsize, Tensor);

impl GradientSink for CountingSink {
    fn add(&self, _: usize, add: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        add(&self.1)
    }
}

/// The gradient sum of training expects exactly one addition per pass: it refuses more, and waits for a
/// missing one.
#[test]
fn the_heads_gradient_is_added_once_a_pass_whatever_its_chunks() {
    let gpu = open(0).unwrap();
    let (width, vocabulary) = (8, 40);
    for rows in [0, 1, 3 * 128 + 5] {
        let sum = Tensor::zeros((width, vocabulary), DType::F32, &gpu).unwrap();
        let gradient_sink = Arc::new(CountingSink(AtomicUsize::new(0), sum));
        let w = Var::from_tensor(&to_gpu(&numbers(2, width, vocabulary, 0.3), &gpu)).unwrap();
        let head = Weight::Dense(Parameter::with_gradient_sink(&w, gradient_sink.clone(), 0));
        let h = to_gpu(&numbers(1, rows, width, 0.5), &gpu);
        let dy = Tensor::zeros((2, rows), DType::F32, &gpu).unwrap();
        forward_and_backward(&[&h], &dy, || {
            ops::log_prob_and_entropy(&h, &head, &targets(rows, vocabulary), None, 1.0)
        });
        assert_eq!(gradient_sink.0.load(Ordering::Relaxed), 1, "{rows} rows");
    }
}

#[test]
fn what_is_sampled_has_the_bits_that_training_computes() {
    let gpu = open(0).unwrap();
    let (rows, width, vocabulary) = (150, 32, 203);
    let (h, w) =
        (to_gpu(&numbers(1, rows, width, 0.5), &gpu), to_gpu(&numbers(2, width, vocabulary, 0.3), &gpu));
    let head = Weight::Dense(Parameter::constant(&w));
    let targets = targets(rows, vocabulary);
    let trained = floats(&ops::log_prob_and_entropy(&h, &head, &targets, None, TEMPERATURE).unwrap());
    // All rows at once use wide tiles; one or three rows use narrow ones.
    for count in [rows, 1, 3] {
        for first in (0..rows).step_by(count) {
            let part = h.narrow(0, first, count).unwrap().copy().unwrap();
            let sampling = SamplingParameters::with_temperature(TEMPERATURE);
            let logits = ops::logits(&part, &head, &sampling).unwrap();
            let asked: Vec<_> = (0..count).map(|row| (row, targets[first + row])).collect();
            assert_eq!(logits.log_probs(&sampling, &asked).unwrap(), trained[first..first + count]);
            for (row, drawn) in
                logits.draw(&sampling, &[(0, 0.3), (count - 1, 0.9)]).unwrap().iter().enumerate()
            {
                let row = [0, count - 1][row];
                assert_eq!(logits.log_probs(&sampling, &[(row, drawn.token)]).unwrap(), [drawn.log_prob]);
            }
        }
    }
}

#[test]
fn no_rows_have_no_log_probabilities_and_f32_weights_are_refused() {
    let gpu = open(0).unwrap();
    let w = Tensor::zeros((16, 40), DType::BF16, &gpu).unwrap();
    let h = Var::from_tensor(&Tensor::zeros((0, 16), DType::BF16, &gpu).unwrap()).unwrap();
    let head = Weight::Dense(Parameter::constant(&w));
    let y = ops::log_prob_and_entropy(&h, &head, &Arc::new(vec![]), None, 1.0).unwrap();
    assert_eq!(y.dims(), [2, 0]);
    let wide = Weight::Dense(Parameter::constant(&Tensor::zeros((16, 40), DType::F32, &gpu).unwrap()));
    let h = Tensor::zeros((1, 16), DType::BF16, &gpu).unwrap();
    let refusal = ops::log_prob_and_entropy(&h, &wide, &Arc::new(vec![0]), None, 1.0);
    assert_refused(refusal, "log_prob: the head [16, 40] is F32, expected BF16 on a GPU");
}

/// The sampler cut the head by the CPU's rows, so a step of many sequences read the whole head many times.
#[test]
fn the_sampler_takes_the_rows_of_the_device() {
    let gpu = open(0).unwrap();
    for vocabulary in [101, 201_088] {
        assert_eq!(sampled_rows_max(vocabulary, &gpu), device_logits_rows(vocabulary));
        assert_eq!(sampled_rows_max(vocabulary, &Device::Cpu), logits_rows_max(vocabulary));
    }
}
