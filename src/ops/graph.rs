//! Reverse-mode differentiation: the tape of a forward pass, and the backward pass over the tape.
//!
//! The backward pass of candle starts every gradient at zero, adds one edge of the graph at a time, and keeps
//! all outputs until the end. Here the first gradient of a tensor is used without an addition, and an output
//! is freed when its gradient has been propagated. The additions and their order are the same as in candle.
//! Outside of [`differentiate`], no op is recorded.

use super::buffer::buffer;
use super::cpu::{for_each_row, host_values};
use super::math;
use super::operation::{Operation, run};
use candle_core::{DType, Result, Shape, Tensor, TensorId, bail};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

thread_local! {
    /// The tape of this thread during [`differentiate`].
    static TAPE: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// The recorded computation, in the order of execution.
#[derive(Default)]
struct Tape {
    nodes: Vec<Node>,
    /// Tensors that gradients reach: leaves, and outputs computed from leaves or variables.
    tracked: HashSet<TensorId>,
    is_backward: bool,
}

/// A tensor and the operation that computed it.
struct Node {
    output: Tensor,
    source: Source,
}

/// The operation that computed a tensor, with its inputs.
enum Source {
    Operation(Box<dyn RecordedOp>),
    /// The sum of two tensors. Both inputs receive the gradient of the sum.
    Sum([Tensor; 2]),
    /// A reshape or a reordering in memory.
    Reshape(Tensor),
    /// A range of the first dimension, which starts at this index.
    Slice(Tensor, usize),
}

/// An operation applied to its inputs.
trait RecordedOp {
    /// Returns every input, with its gradient if it has one.
    fn gradients(&self, output: &Tensor, gradient: &Tensor) -> Result<Vec<(Tensor, Option<Tensor>)>>;
}

impl<O: Operation<N>, const N: usize> RecordedOp for (O, [Tensor; N]) {
    fn gradients(&self, output: &Tensor, gradient: &Tensor) -> Result<Vec<(Tensor, Option<Tensor>)>> {
        let (op, inputs) = self;
        let found = op.backward(inputs.each_ref(), output, &gradient.contiguous()?)?;
        Ok(inputs.iter().cloned().zip(found).collect())
    }
}

/// A guard that removes the tape of the thread when the pass ends, also after an error or a panic.
struct TapeGuard;

impl Drop for TapeGuard {
    fn drop(&mut self) {
        // The tape is taken out first, so that nodes are dropped after the borrow ends.
        let tape = TAPE.with_borrow_mut(Option::take);
        drop(tape);
    }
}

/// Returns the gradients of `leaves`, in their order. `forward` computes outputs from the leaves. It returns
/// each output together with the gradient of the loss with respect to this output. Both have the same shape.
///
/// Gradients of parameters go to their sinks. A leaf that no output depends on has no gradient. If a leaf is
/// listed twice, both entries are its gradient.
///
/// Only ops that `forward` applies through this module, on this thread, are differentiated.
///
/// # Errors
/// Errors of `forward` and of the ops. When shapes differ. When calls of this function are nested.
pub fn differentiate<E: From<candle_core::Error>>(
    leaves: &[&Tensor],
    forward: impl FnOnce() -> std::result::Result<Vec<(Tensor, Tensor)>, E>,
) -> std::result::Result<Vec<Option<Tensor>>, E> {
    if TAPE.with_borrow(Option::is_some) {
        return Err(candle_core::Error::Msg("differentiate: nested calls are not supported".into()).into());
    }
    let tracked = leaves.iter().map(|leaf| leaf.id()).collect();
    TAPE.set(Some(Tape { tracked, ..Tape::default() }));
    let _recording = TapeGuard;
    let roots = forward()?;
    let gradients = run_backward(roots)?;
    Ok(leaves.iter().map(|leaf| gradients.get(&leaf.id()).cloned()).collect())
}

/// Returns whether gradients reach `x`: `x` is a leaf or a variable, or was computed from a leaf or a
/// variable.
pub fn is_tracked(x: &Tensor) -> bool {
    x.track_op() || TAPE.with_borrow(|tape| tape.as_ref().is_some_and(|tape| tape.tracked.contains(&x.id())))
}

/// Returns whether the forward pass of [`differentiate`] runs on this thread.
pub fn is_recording() -> bool {
    TAPE.with_borrow(|tape| tape.as_ref().is_some_and(|tape| !tape.is_backward))
}

/// Records how `output` was computed, if one of `inputs` is tracked.
fn record_op(output: Tensor, inputs: &[&Tensor], source: impl FnOnce() -> Source) -> Tensor {
    if is_recording() && inputs.iter().any(|x| is_tracked(x)) {
        let source = source();
        TAPE.with_borrow_mut(|tape| {
            if let Some(tape) = tape {
                tape.tracked.insert(output.id());
                tape.nodes.push(Node { output: output.clone(), source });
            }
        });
    }
    output
}

/// Applies `op` to `x` without recording it, so no gradient reaches `x`.
///
/// # Errors
/// Errors of the op.
pub fn apply_without_gradient<O: Operation<1>>(x: &Tensor, op: O) -> Result<Tensor> {
    run(&op, [x])
}

/// Applies `op` to `inputs` and records it.
///
/// # Errors
/// Errors of the op.
pub fn apply<O: Operation<N>, const N: usize>(inputs: [&Tensor; N], op: O) -> Result<Tensor> {
    let output = run(&op, inputs)?;
    Ok(record_op(output, &inputs, || Source::Operation(Box::new((op, inputs.map(Tensor::clone))))))
}

/// Returns `x + y` for tensors of one shape. The sum is recorded.
///
/// # Errors
/// When shapes differ.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if !is_recording() {
        return x + y;
    }
    Ok(record_op(sum(x, y)?, &[x, y], || Source::Sum([x.clone(), y.clone()])))
}

/// Reshapes `x`. The reshape is recorded.
///
/// # Errors
/// When the number of values differs.
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let output = x.reshape(shape.into())?;
    Ok(record_op(output, &[x], || Source::Reshape(x.clone())))
}

/// Returns the range `at` of the first dimension of `x`. The slice is recorded.
///
/// # Errors
/// When `x` is shorter.
pub fn slice(x: &Tensor, at: Range<usize>) -> Result<Tensor> {
    let output = x.narrow(0, at.start, at.len())?;
    Ok(record_op(output, &[x], || Source::Slice(x.clone(), at.start)))
}

/// Returns `x` in contiguous memory. A copy is recorded.
///
/// # Errors
/// When memory runs out.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    let output = x.contiguous()?;
    if x.is_contiguous() { Ok(output) } else { Ok(record_op(output, &[x], || Source::Reshape(x.clone()))) }
}

/// Returns `x + y`. On the CPU large sums use all threads of the pool.
fn sum(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() || x.dtype() != DType::F32 || !x.is_contiguous() || !y.is_contiguous() {
        return x + y;
    }
    if x.dims() != y.dims() {
        bail!("add: {:?} and {:?}", x.dims(), y.dims());
    }
    let (xs, ys) = (host_values(x)?, host_values(y)?);
    let (xs, ys): (&[f32], &[f32]) = (&xs, &ys);
    let width = x.dims().last().copied().unwrap_or(1);
    let mut out = buffer(xs.len());
    for_each_row(&mut out, width, width, |row, out| {
        let at = row * width..(row + 1) * width;
        math::add(&xs[at.clone()], &ys[at], out);
    });
    Tensor::from_vec(out, x.shape(), x.device())
}

/// The gradients accumulated so far, by tensor.
type Gradients = HashMap<TensorId, Tensor>;

/// Adds `gradient` to the gradient of `x`, if gradients reach `x`.
fn accumulate(gradients: &mut Gradients, x: &Tensor, gradient: Option<Tensor>) -> Result<()> {
    let Some(gradient) = gradient.filter(|_| is_tracked(x)) else { return Ok(()) };
    if gradient.dims() != x.dims() {
        bail!("a gradient of shape {:?} for a tensor of shape {:?}", gradient.dims(), x.dims());
    }
    let gradient =
        if let Some(before) = gradients.remove(&x.id()) { sum(&before, &gradient)? } else { gradient };
    gradients.insert(x.id(), gradient);
    Ok(())
}

/// Runs the backward pass from the last node to the first. Returns the gradients of the leaves.
fn run_backward(roots: Vec<(Tensor, Tensor)>) -> Result<Gradients> {
    let mut gradients = Gradients::new();
    for (root, gradient) in roots {
        accumulate(&mut gradients, &root, Some(gradient))?;
    }
    let next = || {
        TAPE.with_borrow_mut(|tape| {
            let tape = tape.as_mut()?;
            tape.is_backward = true;
            tape.nodes.pop()
        })
    };
    while let Some(Node { output, source }) = next() {
        let Some(gradient) = gradients.remove(&output.id()) else { continue };
        match source {
            Source::Operation(applied) => {
                for (x, dx) in applied.gradients(&output, &gradient)? {
                    accumulate(&mut gradients, &x, dx)?;
                }
            }
            Source::Sum([x, y]) => {
                accumulate(&mut gradients, &x, Some(gradient.clone()))?;
                accumulate(&mut gradients, &y, Some(gradient))?;
            }
            Source::Reshape(x) => {
                let dx = gradient.reshape(x.shape())?;
                accumulate(&mut gradients, &x, Some(dx))?;
            }
            Source::Slice(x, start) => {
                let after = x.dim(0)? - start - gradient.dim(0)?;
                let dx = gradient.pad_with_zeros(0, start, after)?;
                accumulate(&mut gradients, &x, Some(dx))?;
            }
        }
    }
    Ok(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;
    use candle_core::{Device, Var};

    fn noise(shape: &[usize], seed: u32) -> Tensor {
        let count: usize = shape.iter().product();
        let value =
            |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        Tensor::from_vec((0..count as u32).map(value).collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
    }

    fn floats(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// A mixed computation: a value used several times, a reshape, a range of the first dimension.
    fn compute(x: &Tensor, w: &Tensor) -> Result<Tensor> {
        let normed = ops::rms_norm(x, w, 1e-5)?;
        let gated = ops::swiglu(&normed, 7.0, 1.702)?;
        let folded = reshape(&normed, (12, 4))?;
        let gated = add(&slice(&folded, 0..6)?, &gated)?;
        let other = slice(&folded, 6..12)?;
        add(&ops::silu_and_mul(&gated, &other)?, &other)
    }

    /// [`compute`] by parts that candle differentiates.
    fn compute_by_candle(x: &Tensor, w: &Tensor) -> Result<Tensor> {
        let normed = candle_nn::ops::rms_norm_slow(&x.contiguous()?, w, 1e-5)?;
        let pairs = normed.reshape((6, 4, 2))?;
        let (gate, up) = (pairs.narrow(2, 0, 1)?.squeeze(2)?, pairs.narrow(2, 1, 1)?.squeeze(2)?);
        let gate = gate.clamp(f32::MIN, 7.0)?;
        let active = (&gate * candle_nn::ops::sigmoid(&(&gate * 1.702)?)?)?;
        let gated = (active * (up.clamp(-7f32, 7f32)? + 1.0)?)?;
        let folded = normed.reshape((12, 4))?;
        let gated = (folded.narrow(0, 0, 6)? + gated)?;
        let other = folded.narrow(0, 6, 6)?;
        (gated.silu()? * &other)? + other
    }

    #[test]
    fn gradients_are_those_of_candles_walk() {
        // Not contiguous.
        let x = noise(&[8, 6], 1).t().unwrap();
        let (w, dy) = (noise(&[8], 2), noise(&[6, 4], 3));
        let mut y = None;
        let own = differentiate(&[&x, &w], || {
            let out = compute(&x, &w)?;
            y = Some(out.clone());
            Result::Ok(vec![(out, dy.clone())])
        });
        let (vx, vw) = (Var::from_tensor(&x).unwrap(), Var::from_tensor(&w).unwrap());
        let out = compute_by_candle(&vx, &vw).unwrap();
        let theirs = (&out * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        let same = |own: &Tensor, theirs: &Tensor| {
            let pairs = floats(own).into_iter().zip(floats(theirs));
            pairs.into_iter().for_each(|(a, b)| assert!((a - b).abs() < 2e-6 * b.abs().max(1.0), "{a}, {b}"));
        };
        same(&y.unwrap(), &out);
        for (own, var) in own.unwrap().iter().zip([&vx, &vw]) {
            same(own.as_ref().unwrap(), theirs.get(var).unwrap());
        }
    }

    #[test]
    fn several_roots_add_up_and_what_none_depends_on_has_no_gradient() {
        let (x, unused, dy) = (noise(&[4, 8], 4), noise(&[3], 5), noise(&[4, 4], 6));
        let mut roots = vec![];
        let found = differentiate(&[&x, &unused], || {
            let y = ops::swiglu(&x, 7.0, 1.702)?;
            // A root may be a leaf or occur twice.
            roots = vec![(y.clone(), dy.clone()), (y, dy.clone()), (x.clone(), noise(&[4, 8], 7))];
            Result::Ok(roots.clone())
        });
        let [Some(dx), None] = &found.unwrap()[..] else { panic!("one gradient") };
        let once =
            differentiate(&[&x], || Result::Ok(vec![(ops::swiglu(&x, 7.0, 1.702)?, dy.clone())])).unwrap();
        let twice = (once[0].as_ref().unwrap() * 2.0).unwrap();
        let expected = (twice + noise(&[4, 8], 7)).unwrap();
        let difference =
            (dx - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(difference < 1e-6, "{difference}");
    }

    #[test]
    fn a_leaf_that_is_there_twice_has_its_gradient_twice() {
        let (x, dy) = (noise(&[2, 4], 10), noise(&[2, 4], 11));
        let found = differentiate(&[&x, &x], || Result::Ok(vec![(add(&x, &x)?, dy.clone())])).unwrap();
        let expected = floats(&(&dy * 2.0).unwrap());
        assert!(found.iter().all(|dx| floats(dx.as_ref().unwrap()) == expected));
    }

    #[test]
    fn a_pass_that_fails_leaves_nothing_behind() {
        let x = noise(&[2, 4], 8);
        let pass = |wrong: bool| {
            differentiate(&[&x], || {
                let y = ops::swiglu(&x, 7.0, 1.702)?;
                if wrong {
                    bail!("on purpose");
                }
                let dy = y.ones_like()?;
                Result::Ok(vec![(y, dy)])
            })
        };
        let first = floats(pass(false).unwrap()[0].as_ref().unwrap());
        assert!(pass(true).unwrap_err().to_string().contains("on purpose"));
        assert!(
            std::panic::catch_unwind(|| differentiate(&[], || -> Result<_> { panic!("on purpose") }))
                .is_err()
        );
        assert_eq!(floats(pass(false).unwrap()[0].as_ref().unwrap()), first);

        let within = differentiate(&[], || differentiate(&[], || Result::Ok(vec![])).map(|_| vec![]));
        assert!(within.unwrap_err().to_string().contains("nested calls"));
        let shapes = differentiate(&[&x], || Result::Ok(vec![(x.clone(), noise(&[4, 2], 9))]));
        assert!(
            shapes
                .unwrap_err()
                .to_string()
                .contains("a gradient of shape [4, 2] for a tensor of shape [2, 4]")
        );
    }
}
