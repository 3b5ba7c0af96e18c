//! Compares the GPU's outputs and gradients with the CPU's, for the optimizers and for all ops of models
//! except attention. Also compares the bits of a row that is computed alone with its bits in a batch.

mod fused;
mod optimizers;

use super::Verdicts;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;
use rloss::ops::graph::differentiate;
use rloss::ops::logits::SamplingParameters;
use rloss::ops::parameter::GradientSink;
use rloss::ops::rope::{RopeTable, Rotation};
use rloss::ops::weight::Weight;
use rloss::ops::{self, Dispatch, Parameter};
use rloss::random::{Purpose, stream};
use std::slice::from_ref;
use std::sync::Arc;

/// The maximum error of a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Tolerance {
    /// None: the bits must be equal.
    BitEqual,
    /// Twice the rounding error of bf16, plus this fraction of the tensor's largest value.
    Bf16Rounding(f32),
    /// This fraction of the tensor's largest value, for sums in f32.
    F32Sum(f32),
}

impl Tolerance {
    pub fn max_error(self, exact: f32, largest: f32) -> f32 {
        match self {
            Tolerance::BitEqual => 0.0,
            Tolerance::Bf16Rounding(share) => exact.abs() / 128.0 + share * largest,
            Tolerance::F32Sum(share) => share * largest,
        }
    }
}

/// Tolerance of an f32 sum that is rounded once to bf16.
const ONE_ROUNDING: Tolerance = Tolerance::Bf16Rounding(1e-5);
/// Tolerance of a result with two roundings to bf16: the values of an f32 sum were rounded, and so is the
/// sum.
const TWO_ROUNDINGS: Tolerance = Tolerance::Bf16Rounding(1.0 / 128.0);
const F32_SUM: Tolerance = Tolerance::F32Sum(1e-5);
/// Tolerance of a sum over experts.
const SHORT_SUM: Tolerance = Tolerance::F32Sum(4e-6);

/// An output or a gradient of an op. Upstream gradients are fixed.
#[derive(Debug, Clone)]
pub(super) struct Output {
    pub name: String,
    pub values: Vec<f32>,
    pub tolerance: Tolerance,
    /// Whether each row depends on only one input row.
    is_row_wise: bool,
    /// Whether some elements are masked, which makes them exactly zero.
    pub has_masked: bool,
}

impl Output {
    fn with_masked(self) -> Self {
        Self { has_masked: true, ..self }
    }
}

/// Returns an output in which each row depends on only one input row.
fn row_wise(name: &str, x: &Tensor, tolerance: Tolerance) -> Result<Output> {
    let values = to_host_f32(x)?;
    Ok(Output { name: name.into(), values, tolerance, is_row_wise: true, has_masked: false })
}

/// Returns an output that depends on all input rows.
fn over_rows(name: &str, x: &Tensor, tolerance: Tolerance) -> Result<Output> {
    Ok(Output { is_row_wise: false, ..row_wise(name, x, tolerance)? })
}

/// Draws values that bf16 represents exactly.
fn random_values(seed: u64, rows: usize, width: usize, size: f32) -> Result<Tensor> {
    let mut rng = stream(seed, Purpose::Evaluation, &[]);
    let values: Vec<f32> = (0..rows * width).map(|_| size * rng.random_range(-3.0f32..3.0)).collect();
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?.to_dtype(DType::BF16)?)
}

fn to_host_f32(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// The input rows of an op: rows `first..end` of a batch.
#[derive(Clone, Copy)]
struct Rows {
    first: usize,
    end: usize,
}

impl Rows {
    /// Copies these rows of `x`.
    fn select(self, x: &Tensor) -> Result<Tensor> {
        Ok(x.narrow(0, self.first, self.end - self.first)?.copy()?)
    }

    /// Returns `id(row)` for each of these rows. `row` is the row's index in the batch.
    fn ids(self, id: impl Fn(usize) -> usize) -> Arc<Vec<u32>> {
        Arc::new((self.first..self.end).map(|row| id(row) as u32).collect())
    }
}

/// Moves activations or matrices to the device, in the device's dtype: f32 on the CPU, bf16 on a GPU.
fn to_model_dtype(x: &Tensor, device: &Device) -> Result<Tensor> {
    if device.is_cuda() { Ok(x.to_device(device)?) } else { Ok(x.to_dtype(DType::F32)?) }
}

fn activations(seed: u64, rows: Rows, width: usize, device: &Device) -> Result<Tensor> {
    to_model_dtype(&rows.select(&random_values(seed, rows.end, width, 1.0)?)?, device)
}

fn matrix(seed: u64, shape: &[usize], device: &Device) -> Result<Tensor> {
    let width = shape[shape.len() - 1];
    let rows = shape.iter().product::<usize>() / width;
    to_model_dtype(&random_values(seed, rows, width, 0.3)?.reshape(shape)?, device)
}

/// Draws rows that are f32 on every device.
fn f32_rows(seed: u64, rows: Rows, width: usize, device: &Device) -> Result<Tensor> {
    Ok(rows.select(&random_values(seed, rows.end, width, 1.0)?)?.to_dtype(DType::F32)?.to_device(device)?)
}

/// A gradient sink with one buffer.
struct GradientBuffer(Tensor);

impl GradientSink for GradientBuffer {
    fn add(
        &self,
        _: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        add(&self.0)
    }
}

/// Returns a trainable parameter with these `values`, and its gradient buffer, which is filled with 0.5.
pub(super) fn trainable_parameter(values: &Tensor) -> Result<(Parameter, Tensor)> {
    let buffer = Tensor::full(0.5f32, values.dims(), &Device::Cpu)?.to_device(values.device())?;
    let variable = Var::from_tensor(values)?;
    let sink = Arc::new(GradientBuffer(buffer.clone()));
    Ok((Parameter::with_gradient_sink(variable.as_tensor(), sink, 0), buffer))
}

/// Applies `op` to `inputs`. Returns its output, and the gradients of the inputs for the output gradient
/// `dy`.
fn run_with_backward(
    inputs: &[Tensor],
    dy: &Tensor,
    op: impl Fn(&[&Tensor]) -> candle_core::Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    // Kernels need aligned addresses, but a view may begin at any address in a larger tensor.
    let copies = inputs.iter().map(Tensor::force_contiguous).collect::<candle_core::Result<Vec<_>>>()?;
    let (inputs, mut y) = (copies.iter().collect::<Vec<_>>(), None);
    let gradients = differentiate(&inputs, || {
        let out = op(&inputs)?;
        y = Some(out.clone());
        let dy = dy.reshape(out.dims())?.force_contiguous()?;
        candle_core::Result::Ok(vec![(out, dy)])
    })?;
    let present = |gradient: Option<Tensor>| gradient.context("an input without a gradient");
    Ok((y.context("nothing was computed")?, gradients.into_iter().map(present).collect::<Result<_>>()?))
}

/// Runs a matrix product with a bias, and one in f32 without it.
fn linear(device: &Device, rows: Rows, k: usize, n: usize) -> Result<Vec<Output>> {
    let (w, dw) = trainable_parameter(&matrix(2, &[k, n], device)?)?;
    let (b, db) = trainable_parameter(&f32_rows(3, Rows { first: 0, end: 1 }, n, device)?.flatten_all()?)?;
    let (x, dy) = (activations(1, rows, k, device)?, activations(4, rows, n, device)?);
    let (y, dx) = run_with_backward(from_ref(&x), &dy, |x| ops::linear(x[0], &w, Some(&b)))?;
    let wide = ops::linear_f32(&x, &w.without_gradient(), None)?;
    let name = |what| format!("linear of {n}, {what}");
    Ok(vec![
        row_wise(&name("y"), &y, ONE_ROUNDING)?,
        row_wise(&name("y in f32"), &wide, F32_SUM)?,
        row_wise(&name("dx"), &dx[0], ONE_ROUNDING)?,
        over_rows(&name("dweight"), &dw, F32_SUM)?,
        over_rows(&name("dbias"), &db, F32_SUM)?,
    ])
}

/// Runs the dispatch of tokens to experts, the grouped matrix products, and the weighted sum of their
/// results. At most five experts have tokens.
fn experts(device: &Device, rows: Rows, [experts, top_k, width, out]: [usize; 4]) -> Result<Vec<Output>> {
    let routes = (rows.first..rows.end).flat_map(|row| (0..top_k).map(move |i| row * 3 + 2 * i));
    let routed_experts = Tensor::from_iter(routes.map(|i| (i % experts.min(5)) as u32), &Device::Cpu)?;
    let routed_experts = routed_experts.reshape(((), top_k))?.to_device(device)?;
    let plan = Dispatch::new(&routed_experts, experts)?;
    let (w, dw) = trainable_parameter(&matrix(2, &[experts, width, out], device)?)?;
    let (b, db) = trainable_parameter(&f32_rows(3, Rows { first: 0, end: experts }, out, device)?)?;
    let inputs = [activations(1, rows, width, device)?, f32_rows(4, rows, top_k, device)?];
    let sorted = ops::dispatch(&inputs[0], &plan)?;
    let (y, gradients) = run_with_backward(&inputs, &activations(5, rows, out, device)?, |x| {
        let sorted = ops::dispatch(x[0], &plan)?;
        ops::combine(&ops::grouped_linear(&sorted, &w, Some(&b), &plan)?, x[1], &plan)
    })?;
    Ok(vec![
        over_rows("experts, sorted rows", &sorted, Tolerance::BitEqual)?,
        row_wise("experts, y", &y, TWO_ROUNDINGS)?,
        row_wise("experts, dx", &gradients[0], TWO_ROUNDINGS)?,
        row_wise("experts, dweights of the sum", &gradients[1], Tolerance::F32Sum(1.0 / 128.0))?,
        over_rows("experts, dweight", &dw, Tolerance::F32Sum(1.0 / 128.0))?,
        over_rows("experts, dbias", &db, Tolerance::F32Sum(1.0 / 128.0))?,
    ])
}

/// Adds a low-rank correction, of an adapter's layer or of its experts.
fn low_rank(
    device: &Device,
    rows: Rows,
    [input, rank, out]: [usize; 3],
    experts: Option<usize>,
) -> Result<Vec<Output>> {
    let plan = experts.map(|experts| -> Result<_> {
        let routes = Tensor::new(rows.ids(|row| row * row % 5 % experts).to_vec(), device)?;
        Ok(Dispatch::new(&routes.reshape(((), 1))?, experts)?)
    });
    let plan = plan.transpose()?;
    let factor = |seed, first, second| match experts {
        Some(experts) => trainable_parameter(&matrix(seed, &[experts, first, second], device)?),
        None => trainable_parameter(&matrix(seed, &[first, second], device)?),
    };
    let ((a, da), (b, db)) = (factor(4, input, rank)?, factor(5, rank, out)?);
    let inputs = [activations(1, rows, out, device)?, activations(2, rows, input, device)?];
    let (z, gradients) = run_with_backward(&inputs, &activations(3, rows, out, device)?, |x| {
        ops::add_low_rank(x[0], x[1], [&a, &b], 0.7, plan.as_ref())
    })?;
    // Of experts, row i is the i-th of the sorted ones, whose expert depends on the batch.
    let by_row = |name: &str, x: &Tensor, tolerance| match experts {
        Some(_) => over_rows(name, x, tolerance),
        None => row_wise(name, x, tolerance),
    };
    Ok(vec![
        by_row("low rank, z", &z, TWO_ROUNDINGS)?,
        row_wise("low rank, dy", &gradients[0], Tolerance::BitEqual)?,
        by_row("low rank, dx", &gradients[1], TWO_ROUNDINGS)?,
        over_rows("low rank, da", &da, Tolerance::F32Sum(1.0 / 128.0))?,
        over_rows("low rank, db", &db, Tolerance::F32Sum(1.0 / 128.0))?,
    ])
}

/// Runs the router, for random and for equal logits, and the load-balancing loss.
fn router(device: &Device, rows: Rows, experts: usize, top_k: usize) -> Result<Vec<Output>> {
    let logits = (f32_rows(1, rows, experts, &Device::Cpu)? * 2.0)?.round()?.to_device(device)?;
    let routed_experts = ops::route(&logits, top_k)?;
    let (weights, dlogits) = run_with_backward(from_ref(&logits), &f32_rows(2, rows, top_k, device)?, |x| {
        ops::top_k_softmax(x[0], &routed_experts)
    })?;
    let plan = Dispatch::new(&routed_experts, experts)?;
    let sequences_per_row = rows.ids(|row| 1 + row % 5);
    let dloss = Tensor::new(0.75f32, device)?;
    let mut outputs = vec![
        row_wise("route", &routed_experts, Tolerance::BitEqual)?,
        row_wise("top k softmax, weights", &weights, SHORT_SUM)?,
        row_wise("top k softmax, dlogits", &dlogits[0], SHORT_SUM)?.with_masked(),
    ];
    let balances = [("load balance", None), ("load balance, rows held", Some(&sequences_per_row))];
    // If all experts are chosen, the loss's gradient is rounding alone.
    for (name, sequences_per_row) in balances.into_iter().filter(|_| top_k < experts) {
        let (loss, dlogits) = run_with_backward(from_ref(&logits), &dloss, |x| {
            ops::load_balance(x[0], &plan, sequences_per_row)
        })?;
        outputs.push(over_rows(&format!("{name}, loss"), &loss, SHORT_SUM)?);
        outputs.push(over_rows(&format!("{name}, dlogits"), &dlogits[0], F32_SUM)?);
    }
    Ok(outputs)
}

fn rope(device: &Device, rows: Rows, heads: usize, half: usize) -> Result<Vec<Output>> {
    let width = heads * 2 * half;
    let frequencies: Vec<f32> = (0..half).map(|i| 0.9f32.powi(i as i32)).collect();
    let positions = rows.ids(|row| row * 37 % 61).to_vec();
    let rotation = Rotation::new(Arc::new(RopeTable::new(&frequencies, 61, 1.25)), positions);
    let (k, v) = (activations(1, rows, width, device)?, activations(2, rows, width, device)?);
    let dy = activations(3, rows, width, device)?;
    let (y, dx) = run_with_backward(from_ref(&k), &dy, |x| ops::rope(x[0], heads, &rotation))?;
    let dy = activations(4, rows, 2 * width, device)?;
    let (kv, dkv) =
        run_with_backward(&[k, v], &dy, |x| ops::rope_keys_with_values(x[0], x[1], heads, &rotation))?;
    Ok(vec![
        row_wise("rope, y", &y, ONE_ROUNDING)?,
        row_wise("rope, dx", &dx[0], ONE_ROUNDING)?,
        row_wise("rope, keys and values", &kv, ONE_ROUNDING)?,
        row_wise("rope, dkeys", &dkv[0], ONE_ROUNDING)?,
        row_wise("rope, dvalues", &dkv[1], Tolerance::BitEqual)?,
    ])
}

/// Runs the embeddings. Half of the tokens have the same id.
fn embedding(device: &Device, rows: Rows, vocabulary: usize, width: usize) -> Result<Vec<Output>> {
    let ids = rows.ids(|row| if row % 2 == 1 { vocabulary - 1 } else { row * 31 % vocabulary });
    let dy = activations(1, rows, width, device)?;
    let (table, dtable) = trainable_parameter(&matrix(2, &[vocabulary, width], device)?)?;
    let (transposed, dtransposed) = trainable_parameter(&matrix(3, &[width, vocabulary], device)?)?;
    let (from_table, _) = run_with_backward(&[], &dy, |_| ops::embedding(&table, &ids))?;
    let (from_transposed, _) = run_with_backward(&[], &dy, |_| ops::tied_embedding(&transposed, &ids))?;
    let x = matrix(4, &[vocabulary, width], device)?;
    let (selected, dx) = run_with_backward(&[x], &dy, |x| ops::select_rows(x[0], &ids))?;
    Ok(vec![
        row_wise("embedding, y", &from_table, Tolerance::BitEqual)?,
        over_rows("embedding, dtable", &dtable, F32_SUM)?,
        row_wise("tied embedding, y", &from_transposed, Tolerance::BitEqual)?,
        over_rows("tied embedding, dtable", &dtransposed, F32_SUM)?,
        row_wise("selected rows, y", &selected, Tolerance::BitEqual)?,
        over_rows("selected rows, dx", &dx[0], ONE_ROUNDING)?.with_masked(),
    ])
}

fn silu_gated(device: &Device, rows: Rows, width: usize) -> Result<Vec<Output>> {
    let inputs = [activations(1, rows, width, device)?, activations(2, rows, width, device)?];
    let dy = activations(3, rows, width, device)?;
    let (y, gradients) = run_with_backward(&inputs, &dy, |x| ops::silu_and_mul(x[0], x[1]))?;
    Ok(vec![
        row_wise("silu_gated, y", &y, ONE_ROUNDING)?,
        row_wise("silu_gated, dgate", &gradients[0], ONE_ROUNDING)?,
        row_wise("silu_gated, dup", &gradients[1], ONE_ROUNDING)?,
    ])
}

/// Runs the SwiGLU of GPT-OSS's experts, and RMSNorm. In a large batch, rows are as wide as in a real model.
/// Upstream gradients are 1.
fn swiglu_and_norm(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let width = match rows.end {
        ..=5 => 24,
        6..=100 => 264,
        _ => 2880,
    };
    let ones = |width: usize| {
        to_model_dtype(&Tensor::ones((rows.end - rows.first, width), DType::BF16, &Device::Cpu)?, device)
    };
    let gated = to_model_dtype(&rows.select(&random_values(1, rows.end, width, 4.0)?)?, device)?;
    let weight = f32_rows(3, Rows { first: 0, end: 1 }, width, device)?.flatten_all()?;
    let (y, dx) = run_with_backward(&[gated], &ones(width / 2)?, |x| ops::swiglu(x[0], 7.0, 1.702))?;
    let inputs = [activations(2, rows, width, device)?, weight];
    let (normed, norm_gradients) =
        run_with_backward(&inputs, &ones(width)?, |x| ops::rms_norm(x[0], x[1], 1e-5))?;
    Ok(vec![
        row_wise("swiglu y", &y, ONE_ROUNDING)?,
        row_wise("rms_norm y", &normed, ONE_ROUNDING)?,
        row_wise("swiglu dx", &dx[0], ONE_ROUNDING)?.with_masked(),
        row_wise("rms_norm dx", &norm_gradients[0], ONE_ROUNDING)?,
        over_rows("rms_norm dweight", &norm_gradients[1], ONE_ROUNDING)?,
    ])
}

/// Computes the head's log-probabilities as in training, and samples from the same logits.
fn head(device: &Device, rows: Rows, width: usize, vocabulary: usize) -> Result<Vec<Output>> {
    let temperature = 0.8;
    let (w, dw) = trainable_parameter(&matrix(2, &[width, vocabulary], device)?)?;
    let targets = rows.ids(|row| row * 31 % vocabulary);
    let h = activations(1, rows, width, device)?;
    let weights = Weight::Dense(w.clone());
    // The upstream gradients: those of the log-probabilities, then those of the entropies.
    let upstream = f32_rows(3, rows, 2, &Device::Cpu)?.t()?.contiguous()?.to_device(device)?;
    let (y, dh) = run_with_backward(from_ref(&h), &upstream, |h| {
        ops::log_prob_and_entropy(h[0], &weights, &targets, None, temperature)
    })?;
    let y = y.to_device(&Device::Cpu)?.t()?.contiguous()?;
    let draws: Vec<(usize, f64)> =
        (rows.first..rows.end).map(|row| (row - rows.first, (0.618 * (row + 1) as f64).fract())).collect();
    let head = Weight::Dense(w.without_gradient());
    let mut outputs = vec![
        row_wise("head, log-probabilities and entropies", &y, F32_SUM)?,
        row_wise("head, dh", &dh[0], TWO_ROUNDINGS)?,
        over_rows("head, dweight", &dw, Tolerance::F32Sum(1.0 / 128.0))?,
    ];
    let tokens = |sampled: &[ops::logits::SampledToken]| -> Result<Tensor> {
        Ok(Tensor::from_iter(sampled.iter().map(|sampled| sampled.token as f32), &Device::Cpu)?)
    };
    let sampling = SamplingParameters::with_temperature(temperature);
    let logits = ops::logits(&h, &head, &sampling)?;
    let sampled = logits.draw(&sampling, &draws)?;
    let log_probs = Tensor::from_iter(sampled.iter().map(|sampled| sampled.log_prob), &Device::Cpu)?;
    let targets: Vec<_> = targets.iter().enumerate().map(|(row, &token)| (row, token)).collect();
    let target_log_probs = Tensor::new(logits.log_probs(&sampling, &targets)?, &Device::Cpu)?;
    let greedy = logits.draw(&SamplingParameters::with_temperature(0.0), &draws)?;
    outputs.extend([
        row_wise("sampling, tokens", &tokens(&sampled)?, Tolerance::BitEqual)?,
        row_wise("sampling, log-probabilities", &log_probs, Tolerance::F32Sum(1e-4))?,
        row_wise("sampling, log-probabilities of targets", &target_log_probs, F32_SUM)?,
        row_wise("sampling, likeliest tokens", &tokens(&greedy)?, Tolerance::BitEqual)?,
    ]);
    Ok(outputs)
}

/// Runs an op on rows of seeded inputs.
type OpRun = fn(&Device, Rows) -> Result<Vec<Output>>;
/// Cases whose outputs are in `kernels/seeded_outputs.txt` too. One width of a product is not a multiple of 8.
const SEEDED: [(&str, OpRun); 11] = [
    ("linear, 16 by 8", |device, rows| linear(device, rows, 16, 8)),
    ("linear, 8 by 13", |device, rows| linear(device, rows, 8, 13)),
    ("experts", |device, rows| experts(device, rows, [4, 2, 16, 8])),
    ("router and load balance", |device, rows| router(device, rows, 8, 3)),
    ("rope", |device, rows| rope(device, rows, 2, 8)),
    ("embedding", |device, rows| embedding(device, rows, 7, 16)),
    ("silu_gated", |device, rows| silu_gated(device, rows, 24)),
    ("swiglu and rms_norm", swiglu_and_norm),
    ("head and sampling", |device, rows| head(device, rows, 16, 37)),
    ("ops in one launch", fused::fused),
    ("optimizers", optimizers::optimizers),
];
/// Other shapes of these ops, and low-rank corrections.
const OTHERS: [(&str, OpRun); 24] = [
    ("linear, 72 by 13", |device, rows| linear(device, rows, 72, 13)),
    ("linear, 40 by 136", |device, rows| linear(device, rows, 40, 136)),
    ("linear, 64 by 1", |device, rows| linear(device, rows, 64, 1)),
    ("8 experts, 4 of a token", |device, rows| experts(device, rows, [8, 4, 40, 24])),
    ("3 experts, 2 of a token", |device, rows| experts(device, rows, [3, 2, 16, 8])),
    ("router, 2 of 4", |device, rows| router(device, rows, 4, 2)),
    ("router, 4 of 32", |device, rows| router(device, rows, 32, 4)),
    ("router, 8 of 128", |device, rows| router(device, rows, 128, 8)),
    ("router, 5 of 40", |device, rows| router(device, rows, 40, 5)),
    ("router, 40 of 40", |device, rows| router(device, rows, 40, 40)),
    ("rope, 3 heads of 16", |device, rows| rope(device, rows, 3, 8)),
    ("rope, 5 heads of 64", |device, rows| rope(device, rows, 5, 32)),
    ("embedding, one token", |device, rows| embedding(device, rows, 1, 8)),
    ("embedding, rows of 264", |device, rows| embedding(device, rows, 11, 264)),
    ("silu_gated, rows of 1", |device, rows| silu_gated(device, rows, 1)),
    ("silu_gated, rows of 10", |device, rows| silu_gated(device, rows, 10)),
    ("head, 8 tokens", |device, rows| head(device, rows, 8, 8)),
    ("head, 301 tokens", |device, rows| head(device, rows, 24, 301)),
    ("low rank, 8 by 1 by 8", |device, rows| low_rank(device, rows, [8, 1, 8], None)),
    ("low rank, 13 by 3 by 9", |device, rows| low_rank(device, rows, [13, 3, 9], None)),
    ("low rank, 72 by 8 by 13", |device, rows| low_rank(device, rows, [72, 8, 13], None)),
    ("low rank, 64 by 64 by 72", |device, rows| low_rank(device, rows, [64, 64, 72], None)),
    ("low rank, 6 experts", |device, rows| low_rank(device, rows, [24, 8, 16], Some(6))),
    ("low rank, 3 experts", |device, rows| low_rank(device, rows, [32, 16, 40], Some(3))),
];

pub(super) fn run(device: &Device, small: bool, verdicts: &mut Verdicts) {
    // Matrix products of few rows use narrow tiles, products of many rows use wide tiles. Experts use wide
    // tiles only from some hundred rows on.
    let counts: &[usize] = if small { &[3, 140] } else { &[1, 3, 67, 140, 1000] };
    for (name, op) in SEEDED.into_iter().chain(OTHERS) {
        for &count in counts {
            verdicts.check(&format!("oracle: {name}, {count} rows"), || {
                let rows = Rows { first: 0, end: count };
                Ok(compare(&op(device, rows)?, &op(&Device::Cpu, rows)?))
            });
        }
        let count = 140;
        verdicts.check(&format!("links: {name}, the last row alone = of {count}"), || {
            let batch = op(device, Rows { first: 0, end: count })?;
            let alone = op(device, Rows { first: count - 1, end: count })?;
            let differing = batch
                .iter()
                .zip(&alone)
                .filter(|(batch, alone)| batch.is_row_wise && !batch.values.ends_with(&alone.values));
            let differing: Vec<_> = differing.map(|(batch, _)| &*batch.name).collect();
            Ok(if differing.is_empty() { Ok("to the bit".into()) } else { Err(differing.join("; ")) })
        });
    }
}

/// Checks that every value is within the tolerance of its output. Returns the largest error as a fraction of
/// its tolerance.
fn compare(outputs: &[Output], expected: &[Output]) -> Result<String, String> {
    let mut worst: f32 = 0.0;
    for (output, expected) in outputs.iter().zip(expected) {
        let name = &output.name;
        if output.values.len() != expected.values.len() {
            return Err(format!("{name}: {} values, not {}", output.values.len(), expected.values.len()));
        }
        let largest = expected.values.iter().fold(0f32, |size, x| size.max(x.abs()));
        for (i, (&value, &exact)) in output.values.iter().zip(&expected.values).enumerate() {
            let (error, error_max) = ((value - exact).abs(), expected.tolerance.max_error(exact, largest));
            // The comparison is false for NaN, so NaN fails too.
            let is_within = error <= error_max;
            if !is_within {
                return Err(format!("{name}: value {i} is {value:.6e}, on the CPU {exact:.6e}"));
            }
            if error_max > 0.0 {
                worst = worst.max(error / error_max);
            }
        }
    }
    Ok(format!("largest error / allowed error = {worst:.2}"))
}

/// Returns the outputs for the file of seeded outputs: the outputs of every op on a few rows, and of a matrix
/// product with wide tiles.
pub(super) fn seeded_outputs(device: &Device) -> Result<Vec<Output>> {
    let mut outputs = vec![];
    for (_, op) in SEEDED {
        outputs.extend(op(device, Rows { first: 0, end: 5 })?);
    }
    let wide = linear(device, Rows { first: 0, end: 66 }, 16, 8)?.into_iter();
    outputs.extend(wide.map(|output| Output { name: format!("wide {}", output.name), ..output }));
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_off_is_named() {
        for (_, op) in SEEDED.into_iter().chain(OTHERS) {
            let exact = op(&Device::Cpu, Rows { first: 0, end: 3 }).unwrap();
            assert!(compare(&exact, &exact).is_ok());
            for (index, output) in exact.iter().enumerate() {
                let mut other = exact.clone();
                let largest = output.values.iter().fold(0f32, |size, x| size.max(x.abs()));
                // Increase the magnitude, whatever the sign is.
                let value = &mut other[index].values[0];
                *value += 0.001 + 0.01 * value.abs() + 2.5 * output.tolerance.max_error(*value, largest);
                assert!(compare(&other, &exact).unwrap_err().contains(&output.name), "{}", output.name);
                other[index].values[0] = f32::NAN;
                assert!(compare(&other, &exact).is_err());
            }
        }
    }
}
