//! The ops whose rows do not meet: values and gradients on the GPU against the CPU's on the same numbers, and a row's bits.

use super::Verdicts;
use crate::ops;
use crate::random::{Purpose, stream};
use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;

/// What an op gave, by name. Gradients are those of the sum of its values.
type Seen = Vec<(&'static str, Vec<f32>)>;

const LIMIT: f64 = 7.0;
const ALPHA: f64 = 1.702;
const EPS: f64 = 1e-5;
/// How much larger than rounding to bf16 an error may be; half a step is at most 2⁻⁸ of a value.
const TIMES_PLAIN: f32 = 2.0;
const HALF_STEP: f32 = 1.0 / 256.0;
/// Of a tensor's largest value: what sums in f32 may leave.
const FLOOR: f32 = 1e-5;

/// Numbers that bf16 holds.
pub(super) fn numbers(seed: u64, rows: usize, width: usize, size: f32) -> Result<Tensor> {
    let mut rng = stream(seed, Purpose::Evaluation, &[]);
    let values: Vec<f32> = (0..rows * width).map(|_| size * rng.random_range(-3.0f32..3.0)).collect();
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?.to_dtype(DType::BF16)?)
}

pub(super) fn floats(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Every op on `device`, on the rows from `first` on.
fn seen(device: &Device, rows: usize, width: usize, first: usize) -> Result<Seen> {
    // The CPU's ops take f32.
    let held = |x: Tensor| -> Result<Var> {
        let x = x.narrow(0, first, rows - first)?.contiguous()?;
        let x = if device.is_cuda() { x } else { x.to_dtype(DType::F32)? };
        Ok(Var::from_tensor(&x.to_device(device)?)?)
    };
    let weight = numbers(3, 1, width, 1.0)?.to_dtype(DType::F32)?.flatten_all()?.to_device(device)?;
    let (gated, normed, weight) = (
        held(numbers(1, rows, width, 4.0)?)?,
        held(numbers(2, rows, width, 1.0)?)?,
        Var::from_tensor(&weight)?,
    );
    let swiglu = ops::swiglu(&gated, LIMIT, ALPHA)?;
    let rms_norm = ops::rms_norm(&normed, &weight, EPS)?;
    let (of_swiglu, of_rms_norm) = (swiglu.backward()?, rms_norm.backward()?);
    let mut seen = vec![("swiglu y", floats(&swiglu)?), ("rms_norm y", floats(&rms_norm)?)];
    for (name, gradients, of) in [
        ("swiglu dx", &of_swiglu, &gated),
        ("rms_norm dx", &of_rms_norm, &normed),
        ("rms_norm dweight", &of_rms_norm, &weight),
    ] {
        seen.push((name, gradients.get(of).map_or(Ok(vec![]), floats)?));
    }
    Ok(seen)
}

fn shapes(small: bool) -> &'static [(usize, usize)] {
    if small { &[(3, 16), (67, 264)] } else { &[(1, 8), (3, 16), (67, 264), (1000, 2880), (130, 5760)] }
}

pub(super) fn run(device: &Device, small: bool, verdicts: &mut Verdicts) {
    for &(rows, width) in shapes(small) {
        verdicts.check(&format!("oracle: ops of rows, {rows} of {width}"), || {
            let (got, exact) = (seen(device, rows, width, 0)?, seen(&Device::Cpu, rows, width, 0)?);
            Ok(within(&got, &exact))
        });
        verdicts.check(&format!("links: ops of rows, the last alone = of {rows} of {width}"), || {
            let (all, alone) = (seen(device, rows, width, 0)?, seen(device, rows, width, rows - 1)?);
            // The weight's gradient is a sum over rows.
            let rows = all.iter().zip(&alone).take(all.len() - 1);
            let other =
                rows.filter(|((_, all), (_, alone))| !all.ends_with(alone)).map(|((name, _), _)| *name);
            let other: Vec<_> = other.collect();
            Ok(if other.is_empty() { Ok("to the bit".into()) } else { Err(other.join(", ")) })
        });
    }
}

/// Every value as near as rounding to bf16 makes it, and the largest share of that.
fn within(got: &Seen, exact: &Seen) -> Result<String, String> {
    let mut worst: f32 = 0.0;
    for ((name, got), (_, exact)) in got.iter().zip(exact) {
        let floor = FLOOR * exact.iter().fold(0f32, |size, x| size.max(x.abs()));
        if got.len() != exact.len() {
            return Err(format!("{name}: {} values, not {}", got.len(), exact.len()));
        }
        for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
            let allowed = TIMES_PLAIN * HALF_STEP * exact.abs() + floor;
            let near = (got - exact).abs() <= allowed;
            if !near {
                return Err(format!("{name}: value {i} is {got:.6e}, exactly {exact:.6e}"));
            }
            worst = worst.max((got - exact).abs() / allowed);
        }
    }
    Ok(format!("errors at most {worst:.2} of what is allowed"))
}

/// What the file of seeded outputs has of them, the bits of f32 numbers by name.
pub(super) fn seeded(device: &Device) -> Result<Vec<(String, Vec<f32>)>> {
    let seen = seen(device, 5, 24, 0)?;
    Ok(seen.into_iter().map(|(name, values)| (name.replace(' ', "_"), values)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_off_is_named() {
        let exact = seen(&Device::Cpu, 3, 16, 0).unwrap();
        assert!(within(&exact, &exact).is_ok());
        for (index, (name, _)) in exact.iter().enumerate() {
            let mut other = exact.clone();
            // Away from what it is, whatever its sign.
            other[index].1[5] += 0.01 + 0.02 * other[index].1[5].abs();
            assert!(within(&other, &exact).unwrap_err().contains(name));
            other[index].1[5] = f32::NAN;
            assert!(within(&other, &exact).is_err());
        }
    }
}
