//! Every op's values and gradients against f64 references written here from the formulas.
//!
//! The gradient of `Σ c·op(x)` for random `c` is compared with central differences of the f64 reference,
//! whose own error is near 1e-9.

mod attention;
mod attention_chunks;
mod blocks;
mod distill;
mod experts;
mod gpu_launch;
mod head;
mod packed;
mod rows;
mod stock;

use candle_core::{Device, Tensor, Var};
use rand::Rng;
use rloss::ops::Parameter;
use rloss::ops::graph::differentiate;
use rloss::ops::parameter::GradientSink;
use rloss::random::{Purpose, stream};
use std::sync::{Arc, Mutex};

/// Of a tensor's largest value: a few dozen roundings of f32.
const BAR: f64 = 5e-6;

/// Uniform values in −1..1, times `scale`.
fn noise(len: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Problem, &[len as u64]);
    (0..len).map(|_| rng.random_range(-1f32..1.0) * scale).collect()
}

/// A differentiable input of uniform noise.
fn input(shape: &[usize], scale: f32, seed: u64) -> Var {
    Var::from_vec(noise(shape.iter().product(), scale, seed), shape, &Device::Cpu).unwrap()
}

/// An input of an op under test: a tensor to most, a parameter where the op takes one.
struct Input(Parameter);

impl std::ops::Deref for Input {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        self.0.values()
    }
}

/// The inputs of an op that takes no parameter.
fn tensors<'a>(inputs: &'a [&Input]) -> Vec<&'a Tensor> {
    inputs.iter().map(|input| &***input).collect()
}

/// Takes the gradients of parameters.
struct Sink {
    buffers: Vec<Tensor>,
    added: Mutex<Vec<usize>>,
}

impl GradientSink for Sink {
    fn add(
        &self,
        parameter: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        self.added.lock().unwrap().push(parameter);
        add(&self.buffers[parameter])
    }
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(what: &str, actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    // The floor is for values that are 0 because terms near 1 cancel.
    let size = expected.iter().fold(0.1, |m: f64, v| m.max(v.abs()));
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let difference = (a as f64 - e).abs();
        assert!(difference <= BAR * size, "{what} at {i}: {a} and not {e}, of at most {size}");
    }
}

/// Gradients of `Σ c·op(inputs)` with random `c`; also the output and `c`.
fn gradients(inputs: &[&Var], op: impl Fn(&[&Input]) -> Tensor) -> (Vec<Vec<f32>>, Vec<f32>, Vec<f32>) {
    let buffers = inputs.iter().map(|v| v.zeros_like().unwrap().detach()).collect();
    let sink = Arc::new(Sink { buffers, added: Mutex::default() });
    let learning =
        |(i, v): (usize, &&Var)| Input(Parameter::with_gradient_sink(v.as_tensor(), sink.clone(), i));
    let parameters: Vec<Input> = inputs.iter().enumerate().map(learning).collect();
    let leaves: Vec<&Tensor> = inputs.iter().map(|v| v.as_tensor()).collect();
    let c =
        |out: &Tensor| Tensor::from_vec(noise(out.elem_count(), 1.0, 77), out.shape(), &Device::Cpu).unwrap();
    let (out, found) = run_with_gradients(&leaves, c, || op(&parameters.iter().collect::<Vec<_>>()));
    let added = sink.added.lock().unwrap();
    let gradient = |(i, found): (usize, &Option<Tensor>)| match found {
        Some(gradient) => floats(gradient),
        None => {
            assert!(added.contains(&i), "input {i}: no gradient");
            floats(&sink.buffers[i])
        }
    };
    let gradients = found.iter().enumerate().map(gradient).collect();
    (gradients, floats(&out), floats(&c(&out)))
}

/// The output of `op`, and the gradients of `leaves` for the output's gradient `upstream`.
fn run_with_gradients(
    leaves: &[&Tensor],
    upstream: impl Fn(&Tensor) -> Tensor,
    op: impl FnOnce() -> Tensor,
) -> (Tensor, Vec<Option<Tensor>>) {
    let mut output = None;
    let found = differentiate(leaves, || {
        let out = op();
        output = Some(out.clone());
        let gradient = upstream(&out);
        candle_core::Result::Ok(vec![(out, gradient)])
    });
    (output.unwrap(), found.unwrap())
}

/// Compares values and gradients of `op` with those of `reference`, which gets the inputs in f64.
fn check(
    what: &str,
    inputs: &[&Var],
    op: impl Fn(&[&Input]) -> Tensor,
    reference: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    check_some(what, inputs, op, reference, usize::MAX);
}

/// As [`check`], with the gradient at about `places` places of every input, for references that take long.
fn check_some(
    what: &str,
    inputs: &[&Var],
    op: impl Fn(&[&Input]) -> Tensor,
    reference: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    places: usize,
) {
    let (gradients, out, c) = gradients(inputs, &op);
    let mut x: Vec<Vec<f64>> =
        inputs.iter().map(|v| floats(v).into_iter().map(f64::from).collect()).collect();
    assert_close(&format!("{what}: value"), &out, &reference(&x));
    for (i, gradient) in gradients.iter().enumerate() {
        // Odd, so that it meets every column.
        let step = (x[i].len() / places) | 1;
        let (gradient, differences): (Vec<f32>, Vec<f64>) = (0..x[i].len())
            .step_by(step)
            .map(|j| {
                let at = x[i][j];
                let h = 1e-5 * at.abs().max(1.0);
                let mut sum = |x_j: f64| -> f64 {
                    x[i][j] = x_j;
                    reference(&x).iter().zip(&c).map(|(y, &c)| y * c as f64).sum()
                };
                let slope = (sum(at + h) - sum(at - h)) / (2.0 * h);
                x[i][j] = at;
                (gradient[j], slope)
            })
            .unzip();
        assert_close(&format!("{what}: gradient of input {i}"), &gradient, &differences);
    }
}
