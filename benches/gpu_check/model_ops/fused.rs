//! Ops that a GPU computes in one launch, compared with the CPU, and to the bit with separate launches.

use super::{
    F32_SUM, ONE_ROUNDING, Output, Rows, TWO_ROUNDINGS, Tolerance, activations, f32_rows, matrix, over_rows,
    row_wise, to_host_f32,
};
use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use rloss::ops::fused::{
    SelectedExperts, add_and_norm, combine_and_add, expert_swiglu, joined_linear, linear_and_add,
    select_experts,
};
use rloss::ops::weight::Weight;
use rloss::ops::{self, Dispatch, Parameter};

/// Clamp and gain of GPT-OSS's SwiGLU.
const UNIT: (f64, f64) = (7.0, 1.702);

/// Checks that one launch gave the bits of separate launches.
fn check_bits(what: &str, fused: &Tensor, separate: &Tensor) -> Result<()> {
    let bits =
        |x: &Tensor| -> Result<Vec<u32>> { Ok(to_host_f32(x)?.into_iter().map(f32::to_bits).collect()) };
    let (fused, separate) = (bits(fused)?, bits(separate)?);
    let differing = fused.iter().zip(&separate).filter(|(one, other)| one != other).count();
    ensure!(
        fused.len() == separate.len() && differing == 0,
        "{what}: {differing} of {} values differ from those of separate launches",
        separate.len()
    );
    Ok(())
}

/// Runs the ops of a layer's decode step.
pub(super) fn fused(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let (width, out) = (16, 8);
    let first = Rows { first: 0, end: 1 };
    let vector = |seed: u64, width: usize| -> Result<Parameter> {
        Ok(Parameter::constant(&f32_rows(seed, first, width, device)?.flatten_all()?))
    };
    let (x, y, norm) =
        (activations(1, rows, width, device)?, activations(2, rows, width, device)?, vector(3, width)?);
    let [sum, normed] = add_and_norm(&x, &y, &norm, 1e-5)?;
    check_bits("sum", &sum, &(&x + &y)?)?;
    check_bits("norm of a sum", &normed, &ops::rms_norm(&sum, norm.values(), 1e-5)?)?;

    let layers = [(4, 24), (5, 8), (6, 13)].map(|(seed, n)| -> Result<_> {
        Ok((Parameter::constant(&matrix(seed, &[width, n], device)?), vector(seed + 10, n)?))
    });
    let layers = layers.into_iter().collect::<Result<Vec<_>>>()?;
    let layers: Vec<_> = layers.iter().map(|(weight, bias)| (weight, Some(bias))).collect();
    let separate = layers.iter().map(|(weight, bias)| ops::linear(&x, weight, *bias));
    let separate = separate.collect::<candle_core::Result<Vec<_>>>()?;
    let joined = joined_linear(&x, &layers)?.unwrap_or_else(|| separate.clone());
    for (joined, separate) in joined.iter().zip(&separate) {
        check_bits("joined products", joined, separate)?;
    }

    let (weight, bias) = (Parameter::constant(&matrix(7, &[width, width], device)?), vector(8, width)?);
    let added = linear_and_add(&x, &weight, Some(&bias), &y)?;
    check_bits("product and residual", &added, &(&y + ops::linear(&x, &weight, Some(&bias))?)?)?;

    let mut outputs = vec![
        row_wise("norm of a sum, sum", &sum, ONE_ROUNDING)?,
        row_wise("norm of a sum, y", &normed, TWO_ROUNDINGS)?,
        row_wise("product and residual", &added, TWO_ROUNDINGS)?,
    ];
    for (i, joined) in joined.iter().enumerate() {
        outputs.push(row_wise(&format!("joined products, {i}"), joined, ONE_ROUNDING)?);
    }
    outputs.extend(experts(device, rows, (&x, out))?);
    Ok(outputs)
}

/// Runs the experts' ops for `x [T, H]`, whose outputs have the width `out`.
fn experts(device: &Device, rows: Rows, (x, out): (&Tensor, usize)) -> Result<Vec<Output>> {
    let (experts, top_k, width) = (4, 2, x.dim(1)?);
    let logits = (f32_rows(20, rows, experts, &Device::Cpu)? * 2.0)?.round()?.to_device(device)?;
    let SelectedExperts { routed_experts, plan, weights } = select_experts(&logits, top_k)?;
    let routes = ops::route(&logits, top_k)?;
    let separate = Dispatch::new(&routes, experts)?;
    check_bits("selected experts", &routed_experts, &routes)?;
    check_bits("weights of experts", &weights, &ops::top_k_softmax(&logits, &routes)?)?;

    let first = Rows { first: 0, end: experts };
    let weight = Weight::dense(&matrix(21, &[experts, width, 2 * out], device)?);
    let bias = Parameter::constant(&f32_rows(22, first, 2 * out, device)?);
    let active = expert_swiglu(x, &weight, Some(&bias), &plan, UNIT)?;
    // The plan of separate launches sorts as the one of one launch.
    let sorted = ops::dispatch(x, &separate)?;
    let products = weight.grouped_matmul(&sorted, Some(&bias), &separate)?;
    check_bits("experts' first half", &active, &ops::swiglu(&products, UNIT.0, UNIT.1)?)?;

    let residual = activations(23, rows, out, device)?;
    let combined = combine_and_add(&active, &weights, &plan, &residual)?;
    check_bits(
        "combine and residual",
        &combined,
        &(&residual + ops::combine(&active, &weights, &separate)?)?,
    )?;
    Ok(vec![
        row_wise("selected experts, routes", &routed_experts, Tolerance::BitEqual)?,
        row_wise("selected experts, weights", &weights, F32_SUM)?,
        over_rows("experts' first half", &active, TWO_ROUNDINGS)?,
        row_wise("combine and residual", &combined, TWO_ROUNDINGS)?,
    ])
}
