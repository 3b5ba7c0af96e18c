//! The other ops of a dense model, and the optimizers: the GPU's values and gradients against the CPU's. Also
//! compares the bits of a row in different batches.

use super::Verdicts;
use crate::ops::adamw_8bit::{BLOCK, Moment, adamw_8bit};
use crate::ops::graph::differentiate;
use crate::ops::logits::SamplingParameters;
use crate::ops::optimizer::{AdamW, adamw, round_to_bf16, scale, sgd, sum_of_squares, update_momentum};
use crate::ops::parameter::GradientSink;
use crate::ops::rope::{RopeTable, Rotation};
use crate::ops::weight::Weight;
use crate::ops::{self, Dispatch, Parameter};
use crate::random::{Purpose, stream};
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;
use std::slice::from_ref;
use std::sync::Arc;

/// The tolerance of a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Tolerance {
    /// Equal bits.
    Same,
    /// Twice the error of rounding to bf16, plus this fraction of the largest value.
    Rounded(f32),
    /// This fraction of the largest value, for sums in f32.
    Sum(f32),
}

impl Tolerance {
    pub fn max_error(self, exact: f32, largest: f32) -> f32 {
        match self {
            Tolerance::Same => 0.0,
            Tolerance::Rounded(share) => exact.abs() / 128.0 + share * largest,
            Tolerance::Sum(share) => share * largest,
        }
    }
}

/// Tolerance of an f32 sum rounded once to bf16. `TWICE` allows a second rounding to bf16.
const ONCE: Tolerance = Tolerance::Rounded(1e-5);
const TWICE: Tolerance = Tolerance::Rounded(1.0 / 128.0);
const SUM: Tolerance = Tolerance::Sum(1e-5);

/// An output of an op. Gradients are for fixed upstream gradients.
#[derive(Debug, Clone)]
pub(super) struct Output {
    pub name: String,
    pub values: Vec<f32>,
    pub rule: Tolerance,
    /// True when each row depends only on the op's input row.
    by_row: bool,
}

fn by_row(name: &str, x: &Tensor, rule: Tolerance) -> Result<Output> {
    Ok(Output { name: name.into(), values: floats(x)?, rule, by_row: true })
}

fn over_rows(name: &str, x: &Tensor, rule: Tolerance) -> Result<Output> {
    Ok(Output { by_row: false, ..by_row(name, x, rule)? })
}

/// Draws numbers that bf16 represents exactly.
fn random_values(seed: u64, rows: usize, width: usize, size: f32) -> Result<Tensor> {
    let mut rng = stream(seed, Purpose::Evaluation, &[]);
    let values: Vec<f32> = (0..rows * width).map(|_| size * rng.random_range(-3.0f32..3.0)).collect();
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?.to_dtype(DType::BF16)?)
}

fn floats(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// The input rows of an op: rows `first..all`.
#[derive(Clone, Copy)]
struct Rows {
    all: usize,
    first: usize,
}

impl Rows {
    fn of(self, x: &Tensor) -> Result<Tensor> {
        Ok(x.narrow(0, self.first, self.all - self.first)?.copy()?)
    }

    /// Returns `id(row)` for each of these rows, counted from row 0 of all.
    fn ids(self, id: impl Fn(usize) -> usize) -> Arc<Vec<u32>> {
        Arc::new((self.first..self.all).map(|row| id(row) as u32).collect())
    }
}

/// Converts activations and matrices to the device's dtype: f32 on the CPU, bf16 on a GPU.
fn held(x: &Tensor, device: &Device) -> Result<Tensor> {
    if device.is_cuda() { Ok(x.to_device(device)?) } else { Ok(x.to_dtype(DType::F32)?) }
}

fn activations(seed: u64, rows: Rows, width: usize, device: &Device) -> Result<Tensor> {
    held(&rows.of(&random_values(seed, rows.all, width, 1.0)?)?, device)
}

fn matrix(seed: u64, shape: &[usize], device: &Device) -> Result<Tensor> {
    let width = shape[shape.len() - 1];
    held(&random_values(seed, shape.iter().product::<usize>() / width, width, 0.3)?.reshape(shape)?, device)
}

/// Draws f32 rows, on every device.
fn single(seed: u64, rows: Rows, width: usize, device: &Device) -> Result<Tensor> {
    Ok(rows.of(&random_values(seed, rows.all, width, 1.0)?)?.to_dtype(DType::F32)?.to_device(device)?)
}

struct Buffer(Tensor);

impl GradientSink for Buffer {
    fn add(
        &self,
        _: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        add(&self.0)
    }
}

/// Returns a trainable parameter of `values`, and its gradient buffer, filled with 0.5.
pub(super) fn trainable_parameter(values: &Tensor) -> Result<(Parameter, Tensor)> {
    let halves = Tensor::full(0.5f32, values.dims(), &Device::Cpu)?.to_device(values.device())?;
    let variable = Var::from_tensor(values)?;
    Ok((Parameter::with_gradient_sink(variable.as_tensor(), Arc::new(Buffer(halves.clone())), 0), halves))
}

/// Applies `op` to `inputs`. Returns its output, and the inputs' gradients for `dy`.
fn differentiated(
    inputs: &[Tensor],
    dy: &Tensor,
    op: impl Fn(&[&Tensor]) -> candle_core::Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    // A view into a larger tensor may begin at an address that kernels cannot read.
    let copies = inputs.iter().map(Tensor::force_contiguous).collect::<candle_core::Result<Vec<_>>>()?;
    let (inputs, mut y) = (copies.iter().collect::<Vec<_>>(), None);
    let gradients = differentiate(&inputs, || {
        let out = op(&inputs)?;
        y = Some(out.clone());
        let dy = dy.reshape(out.dims())?.force_contiguous()?;
        candle_core::Result::Ok(vec![(out, dy)])
    })?;
    let of = |gradient: Option<Tensor>| gradient.context("an input without a gradient");
    Ok((y.context("nothing was computed")?, gradients.into_iter().map(of).collect::<Result<_>>()?))
}

/// Products forward and backward, with narrow tiles for few rows. One width is not a multiple of 8.
fn linear(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let mut seen = vec![];
    for (k, n) in [(16, 8), (8, 13)] {
        let (w, dw) = trainable_parameter(&matrix(2, &[k, n], device)?)?;
        let (b, db) = trainable_parameter(&single(3, Rows { all: 1, first: 0 }, n, device)?.flatten_all()?)?;
        let (x, dy) = (activations(1, rows, k, device)?, activations(4, rows, n, device)?);
        let (y, dx) = differentiated(from_ref(&x), &dy, |x| ops::linear(x[0], &w, Some(&b)))?;
        let wide = ops::linear_f32(&x, &w.without_gradient(), None)?;
        let name = |what| format!("linear of {n}, {what}");
        seen.extend([
            by_row(&name("y"), &y, ONCE)?,
            by_row(&name("y in f32"), &wide, SUM)?,
            by_row(&name("dx"), &dx[0], ONCE)?,
            over_rows(&name("dweight"), &dw, SUM)?,
            over_rows(&name("dbias"), &db, SUM)?,
        ]);
    }
    Ok(seen)
}

/// Dispatch of tokens to experts, grouped products, and combine.
fn experts(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let (experts, top_k, width, out) = (4, 2, 16, 8);
    let routes = Tensor::from_iter(
        (rows.first..rows.all).flat_map(|row| [row * 3 % 4, (row * 3 + 2) % 4]).map(|expert| expert as u32),
        &Device::Cpu,
    )?;
    let routes = routes.reshape(((), top_k))?.to_device(device)?;
    let plan = Dispatch::new(&routes, experts)?;
    let (w, dw) = trainable_parameter(&matrix(2, &[experts, width, out], device)?)?;
    let (b, db) = trainable_parameter(&single(3, Rows { all: experts, first: 0 }, out, device)?)?;
    let inputs = [activations(1, rows, width, device)?, single(4, rows, top_k, device)?];
    let sorted = ops::dispatch(&inputs[0], &plan)?;
    let (y, gradients) = differentiated(&inputs, &activations(5, rows, out, device)?, |x| {
        let sorted = ops::dispatch(x[0], &plan)?;
        ops::combine(&ops::grouped_linear(&sorted, &w, Some(&b), &plan)?, x[1], &plan)
    })?;
    Ok(vec![
        over_rows("experts, sorted rows", &sorted, Tolerance::Same)?,
        by_row("experts, y", &y, TWICE)?,
        by_row("experts, dx", &gradients[0], TWICE)?,
        by_row("experts, dweights of the sum", &gradients[1], Tolerance::Sum(1.0 / 128.0))?,
        over_rows("experts, dweight", &dw, Tolerance::Sum(1.0 / 128.0))?,
        over_rows("experts, dbias", &db, Tolerance::Sum(1.0 / 128.0))?,
    ])
}

/// Routing, also with equal logits, and the load-balancing loss.
fn router(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let (experts, top_k) = (8, 3);
    let logits = (single(1, rows, experts, &Device::Cpu)? * 2.0)?.round()?.to_device(device)?;
    let routes = ops::route(&logits, top_k)?;
    let (weights, dlogits) = differentiated(from_ref(&logits), &single(2, rows, top_k, device)?, |x| {
        ops::top_k_softmax(x[0], &routes)
    })?;
    let plan = Dispatch::new(&routes, experts)?;
    let sequences_per_row = rows.ids(|row| 1 + row % 5);
    let dloss = Tensor::new(0.75f32, device)?;
    let mut seen = vec![
        by_row("route", &routes, Tolerance::Same)?,
        by_row("top k softmax, weights", &weights, SUM)?,
        by_row("top k softmax, dlogits", &dlogits[0], SUM)?,
    ];
    for (name, sequences_per_row) in
        [("load balance", None), ("load balance, rows held", Some(&sequences_per_row))]
    {
        let (loss, dlogits) =
            differentiated(from_ref(&logits), &dloss, |x| ops::load_balance(x[0], &plan, sequences_per_row))?;
        seen.push(over_rows(&format!("{name}, loss"), &loss, SUM)?);
        seen.push(over_rows(&format!("{name}, dlogits"), &dlogits[0], SUM)?);
    }
    Ok(seen)
}

fn rope(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let (heads, half) = (2, 8);
    let width = heads * 2 * half;
    let frequencies: Vec<f32> = (0..half).map(|i| 0.9f32.powi(i as i32)).collect();
    let positions = rows.ids(|row| row * 37 % 61).to_vec();
    let rotation = Rotation::new(Arc::new(RopeTable::new(&frequencies, 61, 1.25)), positions);
    let (k, v) = (activations(1, rows, width, device)?, activations(2, rows, width, device)?);
    let dy = activations(3, rows, width, device)?;
    let (y, dx) = differentiated(from_ref(&k), &dy, |x| ops::rope(x[0], heads, &rotation))?;
    let dy = activations(4, rows, 2 * width, device)?;
    let (kv, dkv) =
        differentiated(&[k, v], &dy, |x| ops::rope_keys_with_values(x[0], x[1], heads, &rotation))?;
    Ok(vec![
        by_row("rope, y", &y, ONCE)?,
        by_row("rope, dx", &dx[0], ONCE)?,
        by_row("rope, keys and values", &kv, ONCE)?,
        by_row("rope, dkeys", &dkv[0], ONCE)?,
        by_row("rope, dvalues", &dkv[1], Tolerance::Same)?,
    ])
}

/// Embedding; half of the tokens have the same id.
fn embedding(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let (vocabulary, width) = (7, 16);
    let ids = rows.ids(|row| if row % 2 == 1 { vocabulary - 1 } else { row * 31 % vocabulary });
    let dy = activations(1, rows, width, device)?;
    let (table, dtable) = trainable_parameter(&matrix(2, &[vocabulary, width], device)?)?;
    let (turned, dturned) = trainable_parameter(&matrix(3, &[width, vocabulary], device)?)?;
    let (of_rows, _) = differentiated(&[], &dy, |_| ops::embedding(&table, &ids))?;
    let (of_columns, _) = differentiated(&[], &dy, |_| ops::tied_embedding(&turned, &ids))?;
    let x = matrix(4, &[vocabulary, width], device)?;
    let (selected, dx) = differentiated(&[x], &dy, |x| ops::select_rows(x[0], &ids))?;
    Ok(vec![
        by_row("embedding, y", &of_rows, Tolerance::Same)?,
        over_rows("embedding, dtable", &dtable, SUM)?,
        by_row("tied embedding, y", &of_columns, Tolerance::Same)?,
        over_rows("tied embedding, dtable", &dturned, SUM)?,
        by_row("selected rows, y", &selected, Tolerance::Same)?,
        over_rows("selected rows, dx", &dx[0], ONCE)?,
    ])
}

fn silu_gated(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let inputs = [activations(1, rows, 24, device)?, activations(2, rows, 24, device)?];
    let dy = activations(3, rows, 24, device)?;
    let (y, gradients) = differentiated(&inputs, &dy, |x| ops::silu_and_mul(x[0], x[1]))?;
    Ok(vec![
        by_row("silu_gated, y", &y, ONCE)?,
        by_row("silu_gated, dgate", &gradients[0], ONCE)?,
        by_row("silu_gated, dup", &gradients[1], ONCE)?,
    ])
}

/// SwiGLU of GPT-OSS's experts, and RMSNorm. With many rows, rows are as wide as a model's. Gradients are
/// those of the sum.
fn swiglu_and_norm(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let width = match rows.all {
        ..=5 => 24,
        6..=100 => 264,
        _ => 2880,
    };
    let ones = |width: usize| {
        held(&Tensor::ones((rows.all - rows.first, width), DType::BF16, &Device::Cpu)?, device)
    };
    let gated = held(&rows.of(&random_values(1, rows.all, width, 4.0)?)?, device)?;
    let weight = single(3, Rows { all: 1, first: 0 }, width, device)?.flatten_all()?;
    let (y, dx) = differentiated(&[gated], &ones(width / 2)?, |x| ops::swiglu(x[0], 7.0, 1.702))?;
    let inputs = [activations(2, rows, width, device)?, weight];
    let (normed, of_norm) = differentiated(&inputs, &ones(width)?, |x| ops::rms_norm(x[0], x[1], 1e-5))?;
    Ok(vec![
        by_row("swiglu y", &y, ONCE)?,
        by_row("rms_norm y", &normed, ONCE)?,
        by_row("swiglu dx", &dx[0], ONCE)?,
        by_row("rms_norm dx", &of_norm[0], ONCE)?,
        over_rows("rms_norm dweight", &of_norm[1], ONCE)?,
    ])
}

/// Training's log-probabilities, and the sampler's draws from the same logits.
fn head(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let (width, vocabulary, temperature) = (16, 37, 0.8);
    let (w, dw) = trainable_parameter(&matrix(2, &[width, vocabulary], device)?)?;
    let targets = rows.ids(|row| row * 31 % vocabulary);
    let h = activations(1, rows, width, device)?;
    let weights = Weight::Dense(w.clone());
    // Upstream gradients of the log-probabilities, then of the entropies.
    let upstream = single(3, rows, 2, &Device::Cpu)?.t()?.contiguous()?.to_device(device)?;
    let (y, dh) = differentiated(from_ref(&h), &upstream, |h| {
        ops::log_prob_and_entropy(h[0], &weights, &targets, temperature)
    })?;
    let y = y.to_device(&Device::Cpu)?.t()?.contiguous()?;
    let draws: Vec<(usize, f64)> =
        (rows.first..rows.all).map(|row| (row - rows.first, (0.618 * (row + 1) as f64).fract())).collect();
    let head = Weight::Dense(w.without_gradient());
    let mut seen = vec![
        by_row("head, log-probabilities and entropies", &y, SUM)?,
        by_row("head, dh", &dh[0], TWICE)?,
        over_rows("head, dweight", &dw, Tolerance::Sum(1.0 / 128.0))?,
    ];
    let tokens = |drawn: &[ops::logits::SampledToken]| -> Result<Tensor> {
        Ok(Tensor::from_iter(drawn.iter().map(|drawn| drawn.token as f32), &Device::Cpu)?)
    };
    let sampling = SamplingParameters::with_temperature(temperature);
    let logits = ops::logits(&h, &head, &sampling)?;
    let drawn = logits.draw(&sampling, &draws)?;
    let log_probs = Tensor::from_iter(drawn.iter().map(|drawn| drawn.log_prob), &Device::Cpu)?;
    let targets: Vec<_> = targets.iter().enumerate().map(|(row, &token)| (row, token)).collect();
    let of_targets = Tensor::new(logits.log_probs(&sampling, &targets)?, &Device::Cpu)?;
    let greedy = logits.draw(&SamplingParameters::with_temperature(0.0), &draws)?;
    seen.extend([
        by_row("sampling, tokens", &tokens(&drawn)?, Tolerance::Same)?,
        by_row("sampling, log-probabilities", &log_probs, Tolerance::Sum(1e-4))?,
        by_row("sampling, log-probabilities of targets", &of_targets, SUM)?,
        by_row("sampling, likeliest tokens", &tokens(&greedy)?, Tolerance::Same)?,
    ]);
    Ok(seen)
}

const STEP: AdamW = AdamW {
    shrink: 0.999,
    one_minus_beta1: 0.1,
    beta2: 0.95,
    one_minus_beta2: 0.05,
    rate: 0.0123,
    root_correction: 0.7,
    eps: 1e-8,
};

/// Optimizers; each value has the CPU's bits.
fn optimizers(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let values =
        |seed: u64, width: usize| -> Result<Tensor> { Ok((single(seed, rows, width, &Device::Cpu)? / 3.0)?) };
    let there = |x: Tensor| -> Result<Tensor> { Ok(x.to_device(device)?) };
    let [weights, first, gradient] = [1, 2, 3].map(|seed| values(seed, 8));
    let (weights, first, gradient) = (there(weights?)?, there(first?)?, there(gradient?)?);
    let second = there(values(4, 8)?.sqr()?)?;
    adamw(&weights, [&first, &second], &gradient, &STEP)?;
    let (of_sgd, buffer) = (there(values(5, 8)?)?, there(values(6, 8)?)?);
    update_momentum(&buffer, &gradient, 0.9)?;
    sgd(&of_sgd, &buffer, 0.99, 0.1)?;
    let scaled = there(values(7, 8)?)?;
    scale(&scaled, 0.37)?;
    let rounded = held(&Tensor::zeros(scaled.dims(), DType::BF16, &Device::Cpu)?, device)?;
    round_to_bf16(&rounded, &scaled)?;
    let squares = Tensor::new(sum_of_squares(&scaled)? as f32, &Device::Cpu)?;

    let of_8_bits = there(values(8, 53)?)?;
    let codes = [(); 2].map(|()| Tensor::zeros(of_8_bits.dims(), DType::U8, device));
    let scales = [(); 2].map(|()| Tensor::zeros(of_8_bits.elem_count().div_ceil(BLOCK), DType::F32, device));
    let ([m, v], [m_scales, v_scales]) = (codes, scales);
    let (m, v, m_scales, v_scales) = (m?, v?, m_scales?, v_scales?);
    // From an empty state, then from a state with all codes.
    for seed in [9, 10] {
        let moments = [Moment { codes: &m, scales: &m_scales }, Moment { codes: &v, scales: &v_scales }];
        adamw_8bit(&of_8_bits, moments, &there(values(seed, 53)?)?, &STEP)?;
    }
    let same = |name: &str, x: &Tensor| over_rows(name, x, Tolerance::Same);
    Ok(vec![
        same("adamw, weights", &weights)?,
        same("adamw, first moment", &first)?,
        same("adamw, second moment", &second)?,
        same("sgd, weights", &of_sgd)?,
        same("momentum, buffer", &buffer)?,
        same("scale", &scaled)?,
        same("round to bf16", &rounded)?,
        over_rows("sum of squares", &squares, SUM)?,
        same("adamw_8bit, weights", &of_8_bits)?,
        same("adamw_8bit, first codes", &m)?,
        same("adamw_8bit, first scales", &m_scales)?,
        same("adamw_8bit, second codes", &v)?,
        same("adamw_8bit, second scales", &v_scales)?,
    ])
}

type Run = fn(&Device, Rows) -> Result<Vec<Output>>;
const OPS: [(&str, Run); 9] = [
    ("linear", linear),
    ("experts", experts),
    ("router and load balance", router),
    ("rope", rope),
    ("embedding", embedding),
    ("silu_gated", silu_gated),
    ("swiglu and rms_norm", swiglu_and_norm),
    ("head and sampling", head),
    ("optimizers", optimizers),
];

pub(super) fn run(device: &Device, small: bool, verdicts: &mut Verdicts) {
    // Few rows select narrow tiles of a product, many rows wide ones; experts need some hundred rows for wide
    // tiles.
    let counts: &[usize] = if small { &[3, 140] } else { &[1, 3, 67, 140, 1000] };
    for (name, op) in OPS {
        for &all in counts {
            verdicts.check(&format!("oracle: {name}, {all} rows"), || {
                let rows = Rows { all, first: 0 };
                Ok(within(&op(device, rows)?, &op(&Device::Cpu, rows)?))
            });
        }
        let all = 140;
        verdicts.check(&format!("links: {name}, the last row alone = of {all}"), || {
            let (together, alone) =
                (op(device, Rows { all, first: 0 })?, op(device, Rows { all, first: all - 1 })?);
            let other = together
                .iter()
                .zip(&alone)
                .filter(|(all, one)| all.by_row && !all.values.ends_with(&one.values));
            let other: Vec<_> = other.map(|(all, _)| &*all.name).collect();
            Ok(if other.is_empty() { Ok("to the bit".into()) } else { Err(other.join("; ")) })
        });
    }
}

/// Checks every value by its output's rule. Returns the largest error as a fraction of the tolerance.
fn within(got: &[Output], exact: &[Output]) -> Result<String, String> {
    let mut worst: f32 = 0.0;
    for (got, exact) in got.iter().zip(exact) {
        if got.values.len() != exact.values.len() {
            return Err(format!("{}: {} values, not {}", got.name, got.values.len(), exact.values.len()));
        }
        let largest = exact.values.iter().fold(0f32, |size, x| size.max(x.abs()));
        for (i, (&seen, &x)) in got.values.iter().zip(&exact.values).enumerate() {
            let (apart, allowed) = ((seen - x).abs(), exact.rule.max_error(x, largest));
            // NaN must fail.
            let near = apart <= allowed;
            if !near {
                return Err(format!("{}: value {i} is {seen:.6e}, exactly {x:.6e}", got.name));
            }
            if allowed > 0.0 {
                worst = worst.max(apart / allowed);
            }
        }
    }
    Ok(format!("errors at most {worst:.2} of what is allowed"))
}

/// Returns the outputs in the file of seeded outputs: few rows of every op, and a product with wide tiles.
pub(super) fn seeded_outputs(device: &Device) -> Result<Vec<Output>> {
    let mut seen = vec![];
    for (_, op) in OPS {
        seen.extend(op(device, Rows { all: 5, first: 0 })?);
    }
    let wide = linear(device, Rows { all: 66, first: 0 })?.into_iter().take(5);
    seen.extend(wide.map(|output| Output { name: format!("wide {}", output.name), ..output }));
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_off_is_named() {
        for (_, op) in OPS {
            let exact = op(&Device::Cpu, Rows { all: 3, first: 0 }).unwrap();
            assert!(within(&exact, &exact).is_ok());
            for (index, output) in exact.iter().enumerate() {
                let mut other = exact.clone();
                let largest = output.values.iter().fold(0f32, |size, x| size.max(x.abs()));
                // Increase the magnitude, for either sign.
                let value = &mut other[index].values[0];
                *value += 0.001 + 0.01 * value.abs() + 2.5 * output.rule.max_error(*value, largest);
                assert!(within(&other, &exact).unwrap_err().contains(&output.name), "{}", output.name);
                other[index].values[0] = f32::NAN;
                assert!(within(&other, &exact).is_err());
            }
        }
    }
}
