//! The experts of a mixture-of-experts layer. Tokens are sorted by expert, and each expert multiplies all its
//! rows in one product.
//!
//! On a GPU rows and matrices are bf16. Trainable weights, biases and gradients are f32. Kernels read the row
//! counts in GPU memory, so the host does not wait for the counts.
//!
//! Memory does not grow with the number of experts, because there are `T·K` rows for any `E`. The expert
//! outputs of a token are added in slot order, so the sum does not depend on the batch.

use super::buffer::buffer;
use super::cpu::{
    HostIds, add_values, change, for_each_row, for_each_row_pair, gather_rows, host_ids, host_values,
    should_parallelize,
};
use super::cuda::{
    add_bias_gradient, add_weight_gradient, combine_backward, combine_forward, dispatch_backward,
    dispatch_forward, product_forward, product_input_gradient, sort_by_expert,
};
use super::graph::{apply, apply_without_gradient, contiguous};
use super::linear::sum_rows;
use super::math::dot;
use super::operation::{DeviceArgument, HostArgument, Operation, first_input_gradient};
use super::parameter::{GradientTarget, Parameter};
use super::product::{
    GemmThreads, Precision, StridedMatrix, backward_product, forward_product_by_copy, product,
};
use super::take_rows::take_rows;
use super::tiles::panels::Bf16Copies;
use candle_core::{CpuStorage, CudaStorage, DType, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::ops::Range;

/// A dispatch plan: the permutation that sorts (token, slot) pairs by expert. It is stored on the device of
/// the routed experts.
#[derive(Debug, Clone)]
pub struct Dispatch {
    tokens: usize,
    top_k: usize,
    /// The experts of the products: all experts of the plan, or those that a rank holds.
    experts: Range<usize>,
    /// If the tokens are those of several ranks, one rank after the other: for each rank that has some, the
    /// place of its first token of each expert, in token order, followed by the end of the last one's, u32
    /// `[E + 1]`.
    sources: Vec<Tensor>,
    /// Three concatenated u32 arrays. First the sorted row of each (token, slot), `[T][K]`. Then the token of
    /// each sorted row, `[T·K]`. Then the first sorted row of each expert, followed by `T·K`, `[E + 1]`.
    plan: Tensor,
}

impl Dispatch {
    /// Sorts the routed experts `routes [T, K]` (u32) by expert. The tokens of an expert keep their order.
    ///
    /// # Errors
    /// When a routed expert is not below `experts`.
    pub fn new(routes: &Tensor, experts: usize) -> Result<Self> {
        let (tokens, top_k) = routes.dims2()?;
        let plan = apply_without_gradient(&routes.contiguous()?, SortByExpert { top_k, experts })?;
        Ok(Self { tokens, top_k, experts: 0..experts, sources: vec![], plan })
    }

    /// Returns the plan for products by the matrices of `experts` alone. In the products, rows of other
    /// experts are undefined. Only on a GPU.
    pub fn of_experts(&self, experts: Range<usize>) -> Self {
        Self { experts, ..self.clone() }
    }

    /// Returns the plan for tokens of several ranks, with one expert each. `counts[rank]` has the number of
    /// tokens of each expert; the tokens of a rank are in the order of experts. The gradients of weights are
    /// then added rank after rank.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn with_sources(self, counts: Vec<Vec<usize>>) -> Result<Self> {
        let (mut first, mut sources) = (0, vec![]);
        for counts in counts.iter().filter(|counts| counts.iter().any(|count| *count > 0)) {
            let mut starts = vec![first as u32];
            for count in counts {
                first += count;
                starts.push(first as u32);
            }
            sources.push(Tensor::from_vec(starts, counts.len() + 1, self.plan.device())?);
        }
        Ok(Self { sources, ..self })
    }

    /// Returns a plan from the array `plan` of its ids.
    pub(super) fn from_plan(plan: Tensor, tokens: usize, top_k: usize, experts: usize) -> Self {
        Self { tokens, top_k, experts: 0..experts, sources: vec![], plan }
    }

    /// Returns `T·K`.
    pub(super) fn rows(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Returns the sorted row of each (token, slot), u32 `[T·K]`.
    ///
    /// # Errors
    /// When the plan cannot be read.
    pub fn row_of(&self) -> Result<Tensor> {
        self.plan.narrow(0, 0, self.rows())
    }

    /// Returns the token of each sorted row, `[T·K]`.
    pub(super) fn token_of(&self) -> Result<Tensor> {
        self.plan.narrow(0, self.rows(), self.rows())
    }

    /// Returns the first sorted row of each expert, followed by the end of the last one's, u32 `[E + 1]`.
    ///
    /// # Errors
    /// When the plan cannot be read.
    pub fn starts(&self) -> Result<Tensor> {
        self.plan.narrow(0, 2 * self.rows() + self.experts.start, self.experts.len() + 1)
    }

    /// Returns `T`.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns `E`.
    pub(super) fn expert_count(&self) -> usize {
        self.experts.len()
    }

    /// Returns the experts that have rows, each with the range of its rows. `rows` is the total number of
    /// rows.
    pub(super) fn groups(&self, rows: usize) -> Result<Vec<(usize, Range<usize>)>> {
        if rows != self.rows() {
            bail!("{rows} rows, but the dispatch plan has {}", self.rows());
        }
        Ok(self.host()?.experts().filter(|(_, at)| !at.is_empty()).collect())
    }

    /// Returns the groups of [`Self::groups`] with the rows of `tokens` alone. They are consecutive within an
    /// expert, because its rows are in token order.
    pub(super) fn groups_of_tokens(
        &self,
        rows: usize,
        tokens: &Range<usize>,
    ) -> Result<Vec<(usize, Range<usize>)>> {
        let (groups, host) = (self.groups(rows)?, self.host()?);
        let of_tokens = |(expert, at): (usize, Range<usize>)| {
            let own = &host.token_of()[at.clone()];
            let first_of = |token: usize| at.start + own.partition_point(|&other| (other as usize) < token);
            (expert, first_of(tokens.start)..first_of(tokens.end))
        };
        Ok(groups.into_iter().map(of_tokens).filter(|(_, at)| !at.is_empty()).collect())
    }

    /// Returns the number of rows of each expert, `[E]`, on the host. A row of token `t` counts
    /// `sequences_per_row[t]` times, or once for `None`.
    ///
    /// # Errors
    /// When the plan cannot be read.
    pub fn counts(&self, sequences_per_row: Option<&[u32]>) -> Result<Vec<usize>> {
        let host = self.host()?;
        let count = |at: Range<usize>| match sequences_per_row {
            None => at.len(),
            Some(sequences_per_row) => {
                host.token_of()[at].iter().map(|&token| sequences_per_row[token as usize] as usize).sum()
            }
        };
        Ok(host.experts().map(|(_, at)| count(at)).collect())
    }

    fn host(&self) -> Result<HostPlan<'_>> {
        if self.plan.elem_count() != 2 * self.rows() + self.experts.len() + 1 {
            bail!("products by experts {:?} of a plan are not supported on a CPU", self.experts);
        }
        Ok(HostPlan { ids: host_ids(&self.plan)?, rows: self.rows(), top_k: self.top_k })
    }
}

/// The plan in host memory.
struct HostPlan<'a> {
    ids: HostIds<'a>,
    rows: usize,
    top_k: usize,
}

impl HostPlan<'_> {
    fn row_of(&self) -> &[u32] {
        &self.ids[..self.rows]
    }

    fn token_of(&self) -> &[u32] {
        &self.ids[self.rows..2 * self.rows]
    }

    fn offsets(&self) -> &[u32] {
        &self.ids[2 * self.rows..]
    }

    /// Returns an iterator over all experts and their ranges of sorted rows.
    fn experts(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.offsets().windows(2).map(|w| w[0] as usize..w[1] as usize).enumerate()
    }

    /// Returns every expert that has rows, with its range of rows and its part of `values`. An expert with n
    /// rows has `len(n)` values.
    fn active_experts<'v>(
        &self,
        mut values: &'v mut [f32],
        len: impl Fn(usize) -> usize,
    ) -> Vec<ExpertSlice<'v>> {
        let mut tasks = vec![];
        for (e, at) in self.experts().filter(|(_, at)| !at.is_empty()) {
            let (own, rest) = values.split_at_mut(len(at.len()));
            values = rest;
            tasks.push((e, at, own));
        }
        tasks
    }
}

/// An expert, its range of sorted rows, and its part of a buffer.
type ExpertSlice<'v> = (usize, Range<usize>, &'v mut [f32]);

/// Runs the tasks of all experts. `rows` returns the number of rows of a task. If there are enough tasks to
/// keep all threads busy, each task runs on one thread. Otherwise tasks run one after the other, and each may
/// use all threads. Both choices give the same bits.
pub(super) fn run_expert_tasks<T: Send>(
    mut tasks: Vec<T>,
    rows: impl Fn(&T) -> usize,
    work: usize,
    run: impl Fn(GemmThreads, T) + Sync,
) {
    if should_parallelize(work) && tasks.len() >= rayon::current_num_threads() {
        // Tasks run in descending order of size, so that no thread starts a large task last.
        tasks.sort_by_key(|task| Reverse(rows(task)));
        tasks.into_iter().par_bridge().for_each(|task| run(GemmThreads::CallingThread, task));
    } else {
        tasks.into_iter().for_each(|task| run(GemmThreads::Pool, task));
    }
}

struct SortByExpert {
    top_k: usize,
    experts: usize,
}

impl Operation<1> for SortByExpert {
    const NAME: &'static str = "sort_by_expert";

    fn cpu(&self, [routes]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let routes = routes.ids()?;
        let mut offsets = vec![0u32; self.experts + 1];
        for &e in routes {
            match offsets.get_mut(e as usize + 1) {
                Some(count) => *count += 1,
                None => bail!("dispatch: expert {e} of {}", self.experts),
            }
        }
        for e in 0..self.experts {
            offsets[e + 1] += offsets[e];
        }
        let mut next = offsets.clone();
        let mut plan = vec![0u32; 2 * routes.len()];
        let (row_of, token_of) = plan.split_at_mut(routes.len());
        for (i, &e) in routes.iter().enumerate() {
            let row = next[e as usize];
            next[e as usize] += 1;
            row_of[i] = row;
            token_of[row as usize] = (i / self.top_k) as u32;
        }
        plan.extend(offsets);
        let len = plan.len();
        Ok((CpuStorage::U32(plan), Shape::from(len)))
    }

    fn cuda(&self, [routes]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        sort_by_expert(routes, self.experts)
    }
}

/// Returns the rows of `x [T, H]` in expert order, `[T·K, H]`. In the backward pass, the gradient of a token
/// is the sum over its slots, in slot order.
///
/// # Errors
/// When `x` has another number of tokens.
pub fn dispatch(x: &Tensor, plan: &Dispatch) -> Result<Tensor> {
    if x.dim(0)? != plan.tokens {
        bail!("dispatch: x {:?}, but the dispatch plan has {} tokens", x.dims(), plan.tokens);
    }
    apply([&contiguous(x)?], DispatchRows { plan: plan.clone() })
}

struct DispatchRows {
    plan: Dispatch,
}

impl Operation<1> for DispatchRows {
    const NAME: &'static str = "dispatch";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let width = x.shape().dims2()?.1;
        let plan = self.plan.host()?;
        let rows = plan.token_of();
        let out = gather_rows(x.values()?, rows, width);
        Ok((CpuStorage::F32(out), Shape::from((rows.len(), width))))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        dispatch_forward(x, &self.plan.token_of()?)
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (tokens, width) = x.dims2()?;
        if x.device().is_cuda() {
            return Ok([Some(dispatch_backward(grad, &self.plan.row_of()?, self.plan.top_k)?)]);
        }
        let g = host_values(grad)?;
        let plan = self.plan.host()?;
        let (g, row_of): (&[f32], _) = (&g, plan.row_of());
        let mut dx = buffer(tokens * width);
        for_each_row(&mut dx, width, plan.top_k * width, |t, dx| {
            dx.fill(0.0);
            for &row in &row_of[t * plan.top_k..(t + 1) * plan.top_k] {
                let g = &g[row as usize * width..(row as usize + 1) * width];
                dx.iter_mut().zip(g).for_each(|(d, &g)| *d += g);
            }
        });
        Ok([Some(Tensor::from_vec(dx, (tokens, width), x.device())?)])
    }
}

/// Computes `y_r = x_r · W[e(r)] + b[e(r)]`, where `e(r)` is the expert of row r: `x [T·K, in]`, `weight [E,
/// in, out]`, optional `bias [E, out]` → `[T·K, out]`.
///
/// # Errors
/// When shapes disagree.
pub fn grouped_linear(
    x: &Tensor,
    weight: &Parameter,
    bias: Option<&Parameter>,
    plan: &Dispatch,
) -> Result<Tensor> {
    let (w, b) = (weight.values(), bias.map(Parameter::values));
    let ((rows, k), (experts, w_k, n)) = (x.dims2()?, w.dims3()?);
    if rows != plan.rows()
        || k != w_k
        || b.is_some_and(|b| b.dims() != [experts, n])
        || experts != plan.expert_count()
    {
        bail!("grouped_linear: x {:?}, weight {:?}, bias {:?}", x.dims(), w.dims(), b.map(Tensor::dims));
    }
    let (precision, copies) = (weight.precision(), weight.bf16_copies().cloned());
    let (weight, bias) = (weight.gradient(), bias.and_then(Parameter::gradient));
    let op = GroupedLinear { plan: plan.clone(), weight, bias, copies, precision };
    if let Some(b) = b { apply([&contiguous(x)?, w, b], op) } else { apply([&contiguous(x)?, w], op) }
}

const GROUPED: &str = "grouped_linear";

struct GroupedLinear {
    plan: Dispatch,
    weight: Option<GradientTarget>,
    bias: Option<GradientTarget>,
    copies: Option<Bf16Copies>,
    precision: Precision,
}

/// Inputs: `x`, the weight and an optional bias.
impl<const N: usize> Operation<N> for GroupedLinear {
    const NAME: &'static str = GROUPED;

    fn cpu(&self, inputs: [HostArgument; N]) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (inputs[0], inputs[1]);
        let ((rows, k), (_, _, n)) = (x.shape().dims2()?, w.shape().dims3()?);
        let b = inputs.get(2).map(HostArgument::values).transpose()?;
        let (x, w) = (x.values()?, w.values()?);
        let plan = self.plan.host()?;
        let mut out = buffer(rows * n);
        let tasks = plan.active_experts(&mut out, |rows| rows * n);
        run_expert_tasks(
            tasks,
            |(_, at, _)| at.len(),
            rows * k * n,
            |spread, (e, at, out)| {
                if let Some(b) = b {
                    out.chunks_exact_mut(n).for_each(|out| out.copy_from_slice(&b[e * n..(e + 1) * n]));
                }
                let (x, w) = (&x[at.start * k..at.end * k], &w[e * k * n..(e + 1) * k * n]);
                let threads = spread.with_precision(self.precision);
                let w = (w, self.copies.as_ref(), e);
                forward_product_by_copy(threads, out, x, w, (at.len(), k, n), b.is_some());
            },
        );
        Ok((CpuStorage::F32(out), Shape::from((rows, n))))
    }

    fn cuda(&self, inputs: [DeviceArgument; N]) -> Result<(CudaStorage, Shape)> {
        let starts = Some(&self.plan.starts()?);
        product_forward(GROUPED, inputs[0], inputs[1], inputs.get(2).copied(), starts, DType::BF16)
    }

    fn backward(&self, inputs: [&Tensor; N], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        let (x, w) = (inputs[0], inputs[1]);
        let ((rows, k), (experts, _, n)) = (x.dims2()?, w.dims3()?);
        if x.device().is_cuda() {
            return Ok(first_input_gradient(Some(self.backward_on_device(x, w, grad)?)));
        }
        let (xs, ws, dy) = (host_values(x)?, host_values(w)?, host_values(grad)?);
        let plan = self.plan.host()?;
        let (xs, ws, dy): (&[f32], &[f32], &[f32]) = (&xs, &ws, &dy);
        let work = rows * k * n;
        let mut dx = buffer(rows * k);
        let tasks = plan.active_experts(&mut dx, |rows| rows * k);
        run_expert_tasks(
            tasks,
            |(_, at, _)| at.len(),
            work,
            |spread, (e, at, dx)| {
                let (dy, w) = (&dy[at.start * n..at.end * n], &ws[e * k * n..(e + 1) * k * n]);
                backward_product(spread.with_precision(self.precision), dx, dy, w, (at.len(), n, k));
            },
        );
        if let Some(weight) = &self.weight {
            weight.add(|dw| {
                change(dw, |dw| {
                    let tasks = plan.experts().zip(dw.chunks_exact_mut(k * n));
                    let tasks = tasks.filter(|((_, at), _)| !at.is_empty()).collect();
                    run_expert_tasks(
                        tasks,
                        |((_, at), _)| at.len(),
                        work,
                        |spread, ((_, at), dw)| {
                            let x = StridedMatrix::column_major(&xs[at.start * k..at.end * k], k);
                            let dy = StridedMatrix::row_major(&dy[at.start * n..at.end * n], n);
                            product(spread.with_precision(self.precision), dw, x, dy, (k, at.len(), n), true);
                        },
                    );
                })
            })?;
        }
        if let Some(bias) = &self.bias {
            let mut sums = buffer(experts * n);
            let tasks = plan.experts().zip(sums.chunks_exact_mut(n));
            run_expert_tasks(
                tasks.collect(),
                |((_, at), _)| at.len(),
                rows * n,
                |spread, ((_, at), sums)| {
                    sums.copy_from_slice(&sum_rows(spread, &dy[at.start * n..at.end * n], n));
                },
            );
            bias.add(|db| add_values(db, &sums))?;
        }
        Ok(first_input_gradient(Some(Tensor::from_vec(dx, (rows, k), x.device())?)))
    }
}

impl GroupedLinear {
    fn backward_on_device(&self, x: &Tensor, w: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let starts = self.plan.starts()?;
        let is_trained = self.weight.is_some() || self.bias.is_some();
        // In token order, the rows of a rank and an expert are together, as they were on the rank.
        let in_token_order = match is_trained && !self.plan.sources.is_empty() {
            true => Some([take_rows(x, &self.plan.row_of()?)?, take_rows(dy, &self.plan.row_of()?)?]),
            false => None,
        };
        let ([x, dy_of_weight], sources) = match &in_token_order {
            Some([x, dy]) => ([x, dy], &self.plan.sources[..]),
            None => ([x, dy], std::slice::from_ref(&starts)),
        };
        if let Some(weight) = &self.weight {
            let add = |dw: &Tensor, starts| add_weight_gradient(GROUPED, dw, x, dy_of_weight, Some(starts));
            weight.add(|dw| sources.iter().try_for_each(|starts| add(dw, starts)))?;
        }
        if let Some(bias) = &self.bias {
            let add = |db: &Tensor, starts| add_bias_gradient(GROUPED, db, dy_of_weight, Some(starts));
            bias.add(|db| sources.iter().try_for_each(|starts| add(db, starts)))?;
        }
        product_input_gradient(GROUPED, dy, w, Some(&starts))
    }
}

/// Computes `y_t = Σ_k w_tk · x_{row(t, k)}` in slot order: `x [T·K, H]`, `weights [T, K]` → `[T, H]`.
///
/// # Errors
/// When shapes disagree.
pub fn combine(x: &Tensor, weights: &Tensor, plan: &Dispatch) -> Result<Tensor> {
    if x.dim(0)? != plan.rows() || weights.dims() != [plan.tokens, plan.top_k] {
        bail!("combine: x {:?}, weights {:?}", x.dims(), weights.dims());
    }
    apply([&contiguous(x)?, &contiguous(weights)?], Combine { plan: plan.clone() })
}

struct Combine {
    plan: Dispatch,
}

impl Operation<2> for Combine {
    const NAME: &'static str = "combine";

    fn cpu(&self, [x, w]: [HostArgument; 2]) -> Result<(CpuStorage, Shape)> {
        let width = x.shape().dims2()?.1;
        let (x, w) = (x.values()?, w.values()?);
        let (tokens, top_k) = (self.plan.tokens, self.plan.top_k);
        let plan = self.plan.host()?;
        let row_of = plan.row_of();
        let mut out = buffer(tokens * width);
        for_each_row(&mut out, width, top_k * width, |t, out| {
            out.fill(0.0);
            let slots = t * top_k..(t + 1) * top_k;
            for (&row, &weight) in row_of[slots.clone()].iter().zip(&w[slots]) {
                let row = row as usize;
                let x = &x[row * width..(row + 1) * width];
                out.iter_mut().zip(x).for_each(|(o, &x)| *o += weight * x);
            }
        });
        Ok((CpuStorage::F32(out), Shape::from((tokens, width))))
    }

    fn cuda(&self, [x, w]: [DeviceArgument; 2]) -> Result<(CudaStorage, Shape)> {
        combine_forward(x, w, &self.plan.row_of()?)
    }

    fn backward(&self, [x, w]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (rows, width) = x.dims2()?;
        let top_k = self.plan.top_k;
        if x.device().is_cuda() {
            let (dx, dw) = combine_backward([x, w, grad], &self.plan.row_of()?)?;
            return Ok([Some(dx), Some(dw)]);
        }
        let (xs, ws, g) = (host_values(x)?, host_values(w)?, host_values(grad)?);
        let plan = self.plan.host()?;
        let (xs, ws, g): (&[f32], &[f32], &[f32]) = (&xs, &ws, &g);
        let mut slot_of = vec![0; rows];
        plan.row_of().iter().enumerate().for_each(|(slot, &row)| slot_of[row as usize] = slot);
        let (mut dx, mut dw_of_row) = (buffer(rows * width), buffer(rows));
        for_each_row_pair((&mut dx, width), (&mut dw_of_row, 1), 2 * width, |row, dx, dw| {
            let (slot, x) = (slot_of[row], &xs[row * width..(row + 1) * width]);
            let g = &g[slot / top_k * width..(slot / top_k + 1) * width];
            dw[0] = dot(g, x);
            dx.iter_mut().zip(g).for_each(|(d, &g)| *d = ws[slot] * g);
        });
        let dw: Vec<f32> = plan.row_of().iter().map(|&row| dw_of_row[row as usize]).collect();
        let device = x.device();
        Ok([
            Some(Tensor::from_vec(dx, (rows, width), device)?),
            Some(Tensor::from_vec(dw, w.shape(), device)?),
        ])
    }
}
