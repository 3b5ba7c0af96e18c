//! The low-rank correction of a product (LoRA, Hu et al. 2021): `y + s · (x · A) · B` with `x [T, in]`, `A
//! [in, r]`, `B [r, out]`. For experts: `A [E, in, r]`, `B [E, r, out]`, and rows sorted by expert.
//!
//! Backward pass: `du = s · dy · Bᵀ`, `dx = du · Aᵀ`, `dA = xᵀ · du`, `dB = (s · x · A)ᵀ · dy`. The gradient
//! of `y` is `dy`.
//!
//! On a GPU `x`, the factors, `s · x · A` and `du` are bf16. `y` is bf16 or f32. The gradients of the factors
//! are f32.

use super::buffer::buffer;
use super::cpu::{change, host_values};
use super::cuda::{low_rank_backward, low_rank_forward};
use super::experts::{Dispatch, run_expert_tasks};
use super::graph::{apply, contiguous, is_tracked};
use super::linear::to_bf16;
use super::operation::{DeviceArgument, HostArgument, Operation};
use super::parameter::{GradientTarget, Parameter};
use super::product::{GemmThreads, StridedMatrix, backward_product, forward_product, product};
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use std::ops::Range;

/// Computes `y + scale · (x · a) · b`. If `plan` is given, each row uses the factors of its expert.
/// Differentiable in all inputs.
///
/// # Errors
/// When shapes disagree.
pub fn add_low_rank(
    y: &Tensor,
    x: &Tensor,
    [a, b]: [&Parameter; 2],
    scale: f32,
    plan: Option<&Dispatch>,
) -> Result<Tensor> {
    let op = LowRank::new([y, x], [a, b], scale, plan)?;
    // A trainable factor is an input of the op, so the graph records the op even if no earlier layer is
    // trainable.
    let tracked = if is_tracked(b.values()) { b } else { a };
    apply([&contiguous(y)?, &contiguous(x)?, tracked.values()], op)
}

/// The factors `A` and `B` of consecutive tokens, and their scale.
pub struct TokenFactors<'a> {
    pub tokens: Range<usize>,
    pub factors: [&'a Parameter; 2],
    pub scale: f32,
}

/// Computes [`add_low_rank`] for the tokens of each of `parts` with its own factors, which may differ in
/// rank. Other tokens keep `y`. A row has the bits that `add_low_rank` gives it. Only on a CPU. The result
/// has no gradient.
///
/// # Errors
/// When shapes disagree.
pub fn add_low_rank_by_tokens(
    y: &Tensor,
    x: &Tensor,
    parts: &[TokenFactors],
    plan: Option<&Dispatch>,
) -> Result<Tensor> {
    let tokens = if let Some(plan) = plan { plan.tokens() } else { x.dim(0)? };
    let part = |part: &TokenFactors| {
        if part.tokens.end > tokens {
            bail!("add_low_rank: factors of tokens {:?} of {tokens}", part.tokens);
        }
        Ok((part.tokens.clone(), LowRank::new([y, x], part.factors, part.scale, plan)?))
    };
    let parts = parts.iter().map(part).collect::<Result<_>>()?;
    apply([&contiguous(y)?, &contiguous(x)?], LowRankByTokens { parts })
}

struct LowRank {
    /// A and B.
    values: [Tensor; 2],
    gradients: [Option<GradientTarget>; 2],
    /// The sizes in, r and out.
    shape: [usize; 3],
    scale: f32,
    plan: Option<Dispatch>,
}

/// Returns the rows `at` of a matrix with `width` columns.
fn rows<'v>(values: &'v [f32], at: &Range<usize>, width: usize) -> &'v [f32] {
    &values[at.start * width..at.end * width]
}

/// Returns matrix `index` of consecutive matrices with `size` values each.
fn nth(values: &[f32], index: usize, size: usize) -> &[f32] {
    &values[index * size..(index + 1) * size]
}

impl LowRank {
    fn new(
        [y, x]: [&Tensor; 2],
        [a, b]: [&Parameter; 2],
        scale: f32,
        plan: Option<&Dispatch>,
    ) -> Result<Self> {
        let (rows, input) = x.dims2()?;
        let (y_rows, output) = y.dims2()?;
        let (a_shape, b_shape) = (a.values().dims(), b.values().dims());
        let rank = a_shape.last().copied().unwrap_or(0);
        let experts = plan.map(Dispatch::expert_count);
        let wanted = |first: usize, second: usize| -> Vec<usize> {
            experts.into_iter().chain([first, second]).collect()
        };
        let planned = plan.is_none_or(|plan| plan.rows() == rows);
        if !planned || rows != y_rows || a_shape != wanted(input, rank) || b_shape != wanted(rank, output) {
            bail!("add_low_rank: y {:?}, x {:?}, a {a_shape:?}, b {b_shape:?}", y.dims(), x.dims());
        }
        Ok(Self {
            values: [a.values().detach(), b.values().detach()],
            gradients: [a.gradient(), b.gradient()],
            shape: [input, rank, output],
            scale,
            plan: plan.cloned(),
        })
    }

    /// Returns each expert that has rows, with the range of its rows. Without a plan all rows belong to
    /// expert 0.
    fn groups(&self, rows: usize) -> Result<Vec<(usize, Range<usize>)>> {
        if let Some(plan) = &self.plan { plan.groups(rows) } else { Ok(vec![(0, 0..rows)]) }
    }

    /// Returns the groups of [`Self::groups`] with the rows of `tokens` alone.
    fn groups_of_tokens(&self, rows: usize, tokens: &Range<usize>) -> Result<Vec<(usize, Range<usize>)>> {
        match &self.plan {
            Some(plan) => plan.groups_of_tokens(rows, tokens),
            None => Ok(vec![(0, tokens.clone())]),
        }
    }

    /// Returns the first row of each expert, in GPU memory.
    fn starts(&self) -> Result<Option<Tensor>> {
        self.plan.as_ref().map(Dispatch::starts).transpose()
    }

    /// Calls `run` for every group, with the rows of the group in `out`. Rows have `width` values. Groups are
    /// in the order of their rows; there may be rows of no group between them.
    fn each(
        &self,
        out: &mut [f32],
        width: usize,
        groups: &[(usize, Range<usize>)],
        work: usize,
        run: impl Fn(GemmThreads, usize, &Range<usize>, &mut [f32]) + Sync,
    ) {
        let (mut tasks, mut rest, mut row) = (Vec::with_capacity(groups.len()), out, 0);
        for (expert, at) in groups {
            let (own, others) = rest[(at.start - row) * width..].split_at_mut(at.len() * width);
            tasks.push((*expert, at, own));
            (rest, row) = (others, at.end);
        }
        run_expert_tasks(
            tasks,
            |(_, at, _)| at.len(),
            work,
            |spread, (expert, at, own)| {
                run(spread, expert, at, own);
            },
        );
    }

    /// Returns `s · x · A`, `[T, r]`. Rows of no group are undefined.
    fn down_projection(&self, x: &[f32], a: &[f32], groups: &[(usize, Range<usize>)]) -> Vec<f32> {
        let [input, rank, _] = self.shape;
        let mut u = buffer(x.len() / input.max(1) * rank);
        self.each(&mut u, rank, groups, row_count(groups) * input * rank, |spread, expert, at, u| {
            let (x, a) = (rows(x, at, input), nth(a, expert, input * rank));
            forward_product(spread, u, x, a, (at.len(), input, rank), false);
            u.iter_mut().for_each(|u| *u *= self.scale);
        });
        u
    }

    /// Adds `s · (x · A) · B` to the rows of `groups` in `out`.
    fn add_to(&self, out: &mut [f32], x: &[f32], groups: &[(usize, Range<usize>)]) -> Result<()> {
        let [_, rank, output] = self.shape;
        let (a, b) = (host_values(&self.values[0])?, host_values(&self.values[1])?);
        let u = self.down_projection(x, &a, groups);
        let (u, b): (&[f32], &[f32]) = (&u, &b);
        self.each(out, output, groups, row_count(groups) * rank * output, |spread, expert, at, out| {
            let (u, b) = (rows(u, at, rank), nth(b, expert, rank * output));
            forward_product(spread, out, u, b, (at.len(), rank, output), true);
        });
        Ok(())
    }
}

/// Returns the number of rows of all groups.
fn row_count(groups: &[(usize, Range<usize>)]) -> usize {
    groups.iter().map(|(_, at)| at.len()).sum()
}

/// The op of [`add_low_rank_by_tokens`]: the tokens of each part, with their factors.
struct LowRankByTokens {
    parts: Vec<(Range<usize>, LowRank)>,
}

impl Operation<2> for LowRankByTokens {
    const NAME: &'static str = "low rank by tokens";

    fn cpu(&self, [y, x]: [HostArgument; 2]) -> Result<(CpuStorage, Shape)> {
        let (mut out, rows) = (y.values()?.to_vec(), x.shape().dims2()?.0);
        for (tokens, part) in &self.parts {
            part.add_to(&mut out, x.values()?, &part.groups_of_tokens(rows, tokens)?)?;
        }
        Ok((CpuStorage::F32(out), y.shape().clone()))
    }
}

impl Operation<3> for LowRank {
    const NAME: &'static str = "low rank";

    fn cpu(&self, [y, x, _]: [HostArgument; 3]) -> Result<(CpuStorage, Shape)> {
        let mut out = y.values()?.to_vec();
        self.add_to(&mut out, x.values()?, &self.groups(x.shape().dims2()?.0)?)?;
        Ok((CpuStorage::F32(out), y.shape().clone()))
    }

    fn cuda(&self, [y, x, _]: [DeviceArgument; 3]) -> Result<(CudaStorage, Shape)> {
        let starts = self.starts()?;
        low_rank_forward(y, x, self.values.each_ref(), self.scale, starts.as_ref())
    }

    fn backward(&self, [y, x, _]: [&Tensor; 3], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [input, rank, output] = self.shape;
        let count = x.dim(0)?;
        if x.device().is_cuda() {
            let (rows, gradients) = ([x, &to_bf16(grad)?], self.gradients.each_ref().map(Option::as_ref));
            let starts = self.starts()?;
            let dx = low_rank_backward(rows, self.values.each_ref(), gradients, self.scale, starts.as_ref())?;
            return Ok([is_tracked(y).then(|| grad.clone()), dx, None]);
        }
        let (xs, dy) = (host_values(x)?, host_values(grad)?);
        let (a, b) = (host_values(&self.values[0])?, host_values(&self.values[1])?);
        let (xs, dy, a, b): (&[f32], &[f32], &[f32], &[f32]) = (&xs, &dy, &a, &b);
        let groups = self.groups(count)?;
        let mut du = buffer(count * rank);
        self.each(&mut du, rank, &groups, count * rank * output, |spread, expert, at, du| {
            let (dy, b) = (rows(dy, at, output), nth(b, expert, rank * output));
            backward_product(spread, du, dy, b, (at.len(), output, rank));
            du.iter_mut().for_each(|du| *du *= self.scale);
        });
        let du = &du;
        let dx = if is_tracked(x) {
            let mut dx = buffer(count * input);
            self.each(&mut dx, input, &groups, count * rank * input, |spread, expert, at, dx| {
                let (du, a) = (rows(du, at, rank), nth(a, expert, input * rank));
                backward_product(spread, dx, du, a, (at.len(), rank, input));
            });
            Some(Tensor::from_vec(dx, (count, input), x.device())?)
        } else {
            None
        };
        // Adds leftᵀ · right, computed over the rows of `expert`, to the gradient of this expert's matrix.
        let add = |gradient: &GradientTarget, (left, k): (&[f32], usize), (right, n): (&[f32], usize)| {
            gradient.add(|sum| {
                change(sum, |sum| {
                    let mut tasks: Vec<_> = vec![];
                    let mut groups = groups.iter().peekable();
                    for (expert, sum) in sum.chunks_exact_mut(k * n).enumerate() {
                        if let Some((_, at)) = groups.next_if(|(own, _)| *own == expert) {
                            tasks.push((at, sum));
                        }
                    }
                    run_expert_tasks(
                        tasks,
                        |(at, _)| at.len(),
                        count * k * n,
                        |spread, (at, sum)| {
                            let left = StridedMatrix::column_major(rows(left, at, k), k);
                            let right = StridedMatrix::row_major(rows(right, at, n), n);
                            product(spread, sum, left, right, (k, at.len(), n), true);
                        },
                    );
                })
            })
        };
        if let Some(gradient) = &self.gradients[0] {
            add(gradient, (xs, input), (du, rank))?;
        }
        if let Some(gradient) = &self.gradients[1] {
            add(gradient, (&self.down_projection(xs, a, &groups), rank), (dy, output))?;
        }
        Ok([is_tracked(y).then(|| grad.clone()), dx, None])
    }
}
