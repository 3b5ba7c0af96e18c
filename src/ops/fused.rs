//! Sequences of ops that a GPU computes in one launch where no gradient is recorded, as in decode.
//!
//! The one kernel has the same roundings, so its results have the bits of the separate ops. On a CPU, and
//! where a gradient reaches an input, the separate ops run.

use super::cuda;
use super::experts::{Dispatch, combine, dispatch};
use super::graph::{add, contiguous, is_tracked};
use super::linear::linear;
use super::parameter::Parameter;
use super::rms_norm::rms_norm;
use super::router::{route, top_k_softmax};
use super::swiglu::swiglu;
use super::weight::Weight;
use candle_core::{Result, Tensor};

/// Returns whether one kernel may replace ops on `inputs`.
fn can_fuse(inputs: &[&Tensor]) -> bool {
    inputs.iter().all(|x| x.device().is_cuda() && !is_tracked(x))
}

/// Returns whether one kernel may replace linear layers of `x`.
fn can_fuse_linear(x: &Tensor, layers: &[(&Parameter, Option<&Parameter>)]) -> bool {
    let parameters = layers.iter().flat_map(|(weight, bias)| [Some(*weight), *bias]).flatten();
    can_fuse(&[x]) && parameters.into_iter().all(|parameter| can_fuse(&[parameter.values()]))
}

/// Returns `x + y` and its RMS norm with `weight [H]`, both `[T, H]`.
///
/// # Errors
/// Errors of [`rms_norm`], and when the shapes of `x` and `y` differ.
pub fn add_and_norm(x: &Tensor, y: &Tensor, weight: &Parameter, eps: f64) -> Result<[Tensor; 2]> {
    if can_fuse(&[x, y, weight.values()]) {
        return cuda::sum_norm([x, y, weight.values()], eps as f32);
    }
    let sum = add(x, y)?;
    let normed = rms_norm(&sum, &weight.graph_tensor()?, eps)?;
    Ok([sum, normed])
}

/// Returns the linear layers of `x [T, in]` with each of up to three matrices `[in, out]` and its bias, `[T,
/// out]`; `None` where each must run alone.
///
/// # Errors
/// When shapes disagree.
pub fn joined_linear(x: &Tensor, layers: &[(&Parameter, Option<&Parameter>)]) -> Result<Option<Vec<Tensor>>> {
    if !can_fuse_linear(x, layers) {
        return Ok(None);
    }
    let matrices = layers.iter().map(|&(weight, bias)| (weight.values(), bias.map(Parameter::values)));
    cuda::joined_product(&contiguous(x)?, &matrices.collect::<Vec<_>>()).map(Some)
}

/// Returns `residual [T, out]` plus the linear layer of `x [T, in]`.
///
/// # Errors
/// Errors of [`linear`], and when `residual` has another shape.
pub fn linear_and_add(
    x: &Tensor,
    weight: &Parameter,
    bias: Option<&Parameter>,
    residual: &Tensor,
) -> Result<Tensor> {
    if can_fuse(&[residual]) && can_fuse_linear(x, &[(weight, bias)]) {
        let inputs = [&contiguous(x)?, weight.values(), residual];
        return cuda::product_and_add("linear", inputs, bias.map(Parameter::values));
    }
    add(residual, &linear(x, weight, bias)?)
}

/// The experts of each token.
pub struct SelectedExperts {
    /// u32 `[T, K]`.
    pub routed_experts: Tensor,
    pub plan: Dispatch,
    /// `[T, K]`.
    pub weights: Tensor,
}

/// Selects the experts with the `K` largest of the `E` logits of each token, weights them by a softmax over
/// these logits, and sorts the tokens by expert.
///
/// # Errors
/// Errors of [`route`].
pub fn select_experts(logits: &Tensor, top_k: usize) -> Result<SelectedExperts> {
    let (tokens, experts) = logits.dims2()?;
    let selected: Option<[Tensor; 3]> =
        if can_fuse(&[logits]) && top_k <= experts { cuda::select_experts(logits, top_k)? } else { None };
    if let Some([routed_experts, weights, plan]) = selected {
        let plan = Dispatch::from_plan(plan, tokens, top_k, experts);
        return Ok(SelectedExperts { routed_experts, plan, weights });
    }
    let routed_experts = route(logits, top_k)?;
    let plan = Dispatch::new(&routed_experts, experts)?;
    let weights = top_k_softmax(logits, &routed_experts)?;
    Ok(SelectedExperts { routed_experts, plan, weights })
}

/// Returns the SwiGLU of the products of tokens `x [T, H]` by the matrices `[E, H, 2I]` of their experts:
/// `[T·K, I]`, sorted by `plan`. `limit` and `alpha` are those of [`swiglu`].
///
/// # Errors
/// When shapes disagree.
pub fn expert_swiglu(
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Parameter>,
    plan: &Dispatch,
    (limit, alpha): (f64, f64),
) -> Result<Tensor> {
    let bias_values = bias.map(Parameter::values);
    if can_fuse(&[x]) && bias_values.is_none_or(|bias| can_fuse(&[bias])) {
        let (x, unit) = (contiguous(x)?, (limit as f32, alpha as f32));
        match weight {
            Weight::Dense(matrix) if can_fuse(&[matrix.values()]) => {
                return cuda::expert_swiglu(&x, matrix.values(), bias_values, plan, unit);
            }
            Weight::Dense(_) => {}
            Weight::Packed(matrix) => {
                return cuda::packed_expert_swiglu(&x, matrix, bias_values, plan, unit);
            }
        }
    }
    swiglu(&weight.grouped_matmul(&dispatch(x, plan)?, bias, plan)?, limit, alpha)
}

/// Returns `residual [T, H]` plus the sum of the expert outputs `x [T·K, H]` of each token, weighted by
/// `weights [T, K]`.
///
/// # Errors
/// Errors of [`combine`], and when `residual` has another shape.
pub fn combine_and_add(x: &Tensor, weights: &Tensor, plan: &Dispatch, residual: &Tensor) -> Result<Tensor> {
    if can_fuse(&[x, weights, residual]) {
        return combine_rows_and_add(x, weights, &plan.row_of()?, residual);
    }
    add(residual, &combine(x, weights, plan)?)
}

/// Returns the result of [`combine_and_add`] for expert outputs `x [R, H]` in another order: `rows`, u32
/// `[T·K]`, has the row of each (token, slot). Only on a GPU. The result has no gradient.
///
/// # Errors
/// When shapes disagree. A row that does not exist is not checked.
pub fn combine_rows_and_add(
    x: &Tensor,
    weights: &Tensor,
    rows: &Tensor,
    residual: &Tensor,
) -> Result<Tensor> {
    cuda::combine_and_add([x, weights, residual], rows)
}
