//! The first half of experts in one launch, on the GPU: dispatch, the products by gate and up, and SwiGLU.
//! The result has the bits of separate launches.

use super::arguments::{Op, output, tensor};
use super::launch::{kernel_params, launch};
use super::product::{Sizes, Weight, tiling, with_packed, with_starts};
use crate::ops::experts::Dispatch;
use crate::ops::packed_weights::PackedMatrix;
use candle_core::{Result, Tensor, bail};
use half::bf16;

const OP: Op = Op("expert_swiglu");

kernel_params! {
    /// `ExpertSwiglu` of `kernels/product.cuh`.
    struct Params {
        x: u64,
        weight: u64,
        bias: u64,
        out: u64,
        token_of: u64,
        starts: u64,
        rows: i32,
        k: i32,
        n: i32,
        experts: i32,
        limit: f32,
        alpha: f32,
    }
}

/// Returns `swiglu(x · W + b)` of the tokens `x [T, H]` for their experts, `[T·K, I]` sorted by `plan`. `W
/// [E, H, 2I]` and `b [E, 2I]` have interleaved columns.
pub(in crate::ops) fn expert_swiglu(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    plan: &Dispatch,
    unit: (f32, f32),
) -> Result<Tensor> {
    let sizes = sizes(plan, weight.dims3()?)?;
    let opened = weight.storage_and_layout();
    let (weight, _) = OP.open_tensor::<bf16>("the weight", &opened, &sizes.matrix())?;
    run(&sizes, x, &Weight::Bf16(weight), bias, plan, unit)
}

/// Returns [`expert_swiglu`] for an MXFP4 matrix in GPU memory.
pub(in crate::ops) fn packed_expert_swiglu(
    x: &Tensor,
    weight: &PackedMatrix,
    bias: Option<&Tensor>,
    plan: &Dispatch,
    unit: (f32, f32),
) -> Result<Tensor> {
    let [experts, k, n] = weight.shape();
    let sizes = sizes(plan, (experts, k, n))?;
    with_packed(OP, weight, |weight| run(&sizes, x, weight, bias, plan, unit))
}

/// Returns the sizes of the product for all rows of `plan`.
fn sizes(plan: &Dispatch, (experts, k, n): (usize, usize, usize)) -> Result<Sizes> {
    if experts != plan.expert_count() || !n.is_multiple_of(2) {
        bail!(
            "{}: matrices [{experts}, {k}, {n}], but the dispatch plan has {} experts, and gate and up are pairs",
            OP.0,
            plan.expert_count()
        );
    }
    Sizes::new(OP, plan.rows(), [k, n], Some(&plan.starts()?))
}

fn run(
    sizes: &Sizes,
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Tensor>,
    plan: &Dispatch,
    (limit, alpha): (f32, f32),
) -> Result<Tensor> {
    let Sizes { rows, k, n, groups, .. } = *sizes;
    let opened = x.storage_and_layout();
    let (x, device) = OP.open_tensor::<bf16>("x", &opened, &[plan.tokens(), k])?;
    let opened = bias.map(Tensor::storage_and_layout);
    let bias = opened.as_ref().map(|bias| OP.open_tensor::<f32>("the bias", bias, &sizes.vector()));
    let bias = bias.transpose()?.map(|(bias, _)| bias);
    let token_of = plan.token_of()?;
    let opened = token_of.storage_and_layout();
    let (token_of, _) = OP.open_tensor::<u32>("the plan", &opened, &[rows])?;
    let mut out = output::<bf16>(device, rows * n / 2)?;
    with_starts(OP, Some(&plan.starts()?), |starts| {
        if rows * n == 0 {
            return Ok(());
        }
        let tiling = tiling(rows, groups);
        let [bf16, mxfp4] = &tiling.expert_swiglu;
        let kernel = if matches!(weight, Weight::Mxfp4(_)) { mxfp4 } else { bf16 };
        let blocks = sizes.row_tiles(tiling.rows) * n.div_ceil(tiling.columns);
        // SAFETY: all buffers outlive the launch and have the sizes in `params`. The plan names tokens of
        // `x`.
        unsafe {
            launch(device, &[(kernel, blocks)], |at| Params {
                x: at.read(&x),
                weight: weight.read(at),
                bias: bias.as_ref().map_or(0, |bias| at.read(bias)),
                out: at.write(&mut out),
                token_of: at.read(&token_of),
                starts: starts.map_or(0, |starts| at.read(starts)),
                rows: rows as i32,
                k: k as i32,
                n: n as i32,
                experts: groups as i32,
                limit,
                alpha,
            })
        }
    })?;
    Ok(tensor(out, device, (rows, n / 2)))
}
