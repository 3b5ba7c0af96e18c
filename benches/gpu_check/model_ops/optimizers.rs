//! Updates of weights, compared with the CPU: to the bit, except for Muon's updates.

use super::{F32_SUM, Output, Rows, Tolerance, f32_rows, over_rows, to_model_dtype};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use rloss::ops::adamw_8bit::{BLOCK, Moment, adamw_8bit};
use rloss::ops::muon::{Muon, muon};
use rloss::ops::optimizer::{AdamW, adamw, round_to_bf16, scale, sgd, sum_of_squares, update_momentum};

const STEP: AdamW = AdamW {
    shrink: 0.999,
    one_minus_beta1: 0.1,
    beta2: 0.95,
    one_minus_beta2: 0.05,
    rate: 0.0123,
    root_correction: 0.7,
    eps: 1e-8,
};

const MUON_STEP: Muon = Muon { shrink: 0.98, rate: 0.1, momentum: 0.9, one_minus_momentum: 0.1 };
/// Tolerance of Muon's update: a GPU rounds its matrices to bf16. Five iterations turn that into 1 to 2% of
/// the update's norm, and of single values into more.
const MUON_TOLERANCE: Tolerance = Tolerance::F32Sum(0.1);

/// Runs the optimizers. All values must be bitwise equal to the CPU's, except for Muon's updates.
pub(super) fn optimizers(device: &Device, rows: Rows) -> Result<Vec<Output>> {
    let values = |seed: u64, width: usize| -> Result<Tensor> {
        Ok((f32_rows(seed, rows, width, &Device::Cpu)? / 3.0)?)
    };
    let to_device = |x: Tensor| -> Result<Tensor> { Ok(x.to_device(device)?) };
    let [weights, first, gradient] = [1, 2, 3].map(|seed| values(seed, 8));
    let (weights, first, gradient) = (to_device(weights?)?, to_device(first?)?, to_device(gradient?)?);
    let second = to_device(values(4, 8)?.sqr()?)?;
    adamw(&weights, [&first, &second], &gradient, &STEP)?;
    let (sgd_weights, buffer) = (to_device(values(5, 8)?)?, to_device(values(6, 8)?)?);
    update_momentum(&buffer, &gradient, 0.9)?;
    sgd(&sgd_weights, &buffer, 0.99, 0.1)?;
    let scaled = to_device(values(7, 8)?)?;
    scale(&scaled, 0.37)?;
    let rounded = to_model_dtype(&Tensor::zeros(scaled.dims(), DType::BF16, &Device::Cpu)?, device)?;
    round_to_bf16(&rounded, &scaled)?;
    let squares = Tensor::new(sum_of_squares(&scaled)? as f32, &Device::Cpu)?;

    let weights_8bit = to_device(values(8, 53)?)?;
    let codes = [(); 2].map(|()| Tensor::zeros(weights_8bit.dims(), DType::U8, device));
    let scales =
        [(); 2].map(|()| Tensor::zeros(weights_8bit.elem_count().div_ceil(BLOCK), DType::F32, device));
    let ([m, v], [m_scales, v_scales]) = (codes, scales);
    let (m, v, m_scales, v_scales) = (m?, v?, m_scales?, v_scales?);
    // The first update starts from an empty state, the second one does not.
    for seed in [9, 10] {
        let moments = [Moment { codes: &m, scales: &m_scales }, Moment { codes: &v, scales: &v_scales }];
        adamw_8bit(&weights_8bit, moments, &to_device(values(seed, 53)?)?, &STEP)?;
    }
    let bit_equal = |name: &str, x: &Tensor| over_rows(name, x, Tolerance::BitEqual);
    // Weights of 0 make the whole update visible. One pair of matrices is wide or tall by the rows, one is
    // always tall.
    let mut muon_outputs = vec![];
    for (name, width) in [("muon", 24), ("muon, narrow", 2)] {
        let experts = |x: Tensor| -> Result<Tensor> { to_device(x.reshape((2, (), width))?) };
        let momentum = experts(values(11, 2 * width)?)?;
        let updated = momentum.zeros_like()?;
        muon(&updated, &momentum, &experts(values(12, 2 * width)?)?, &MUON_STEP)?;
        muon_outputs.push(bit_equal(&format!("{name}, momentum"), &momentum)?);
        muon_outputs.push(over_rows(&format!("{name}, update"), &updated, MUON_TOLERANCE)?);
    }
    let outputs = [
        bit_equal("adamw, weights", &weights)?,
        bit_equal("adamw, first moment", &first)?,
        bit_equal("adamw, second moment", &second)?,
        bit_equal("sgd, weights", &sgd_weights)?,
        bit_equal("momentum, buffer", &buffer)?,
        bit_equal("scale", &scaled)?,
        bit_equal("round to bf16", &rounded)?,
        over_rows("sum of squares", &squares, F32_SUM)?,
        bit_equal("adamw_8bit, weights", &weights_8bit)?,
        bit_equal("adamw_8bit, first codes", &m)?,
        bit_equal("adamw_8bit, first scales", &m_scales)?,
        bit_equal("adamw_8bit, second codes", &v)?,
        bit_equal("adamw_8bit, second scales", &v_scales)?,
    ];
    Ok(outputs.into_iter().chain(muon_outputs).collect())
}
