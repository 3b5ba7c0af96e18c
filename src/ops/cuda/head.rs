//! The LM head on the GPU. `h [R, H]` and `W [H, V]` are bf16. Logits are f32, and are computed in chunks of
//! rows.
//!
//! The sampler and the training pass compute logits by the same product with the same sums. So the
//! log-probability of a token has the same bits in sampling and in training.

use super::arguments::{Op, from_storage, output, tensor};
use super::log_prob::{logits_gradient, row_stats};
use super::product::{add_weight_gradient, product_forward, product_input_gradient};
use crate::ops::logits::device_logits_rows;
use crate::ops::operation::DeviceArgument;
use crate::ops::parameter::GradientTarget;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{DType, Result, Shape, Tensor};
use half::bf16;

const OP: Op = Op("log_prob");
/// Returns `h · W` in f32 for rows `h [m, H]`.
fn product(h: DeviceArgument, weight: &Tensor) -> Result<CudaStorage> {
    let opened = weight.storage_and_layout();
    let weight = OP.gpu_storage("the head", &opened, DType::BF16, weight.dims())?;
    Ok(product_forward(OP.0, h, weight, None, None, DType::F32)?.0)
}

/// Returns the logits divided by the temperature, `[R, V]`, and their log-sum-exps, `[R]`.
pub(in crate::ops) fn head_logits(
    h: &Tensor,
    weight: &Tensor,
    inverse_temperature: f32,
) -> Result<[Tensor; 2]> {
    let (rows, vocabulary) = (h.dim(0)?, weight.dim(1)?);
    let opened = h.storage_and_layout();
    let h = OP.gpu_storage("h", &opened, DType::BF16, h.dims())?;
    let device = h.0.device();
    let mut z = product(h, weight)?;
    let [mut log_sum_exp, mut entropy] = [output::<f32>(device, rows)?, output::<f32>(device, rows)?];
    let sums = [&mut log_sum_exp.as_view_mut(), &mut entropy.as_view_mut()];
    row_stats(device, &mut z.as_cuda_slice_mut::<f32>()?.as_view_mut(), inverse_temperature, sums, None)?;
    Ok([from_storage(z, (rows, vocabulary)), tensor(log_sum_exp, device, rows)])
}

/// Returns `[2, R]`: the log-probabilities of `targets` in the first row, and the entropies in the second
/// row.
pub(in crate::ops) fn head_forward(
    h: DeviceArgument,
    weight: &Tensor,
    targets: &[u32],
    inverse_temperature: f32,
) -> Result<(CudaStorage, Shape)> {
    let (device, rows) = (h.0.device(), targets.len());
    let chunk = device_logits_rows(weight.dim(1)?);
    let ids = upload_ids(device, targets)?;
    let mut out = output::<f32>(device, 2 * rows)?;
    let mut log_sum_exp = output::<f32>(device, chunk.min(rows))?;
    for start in (0..rows).step_by(chunk) {
        let m = chunk.min(rows - start);
        let mut z = product((h.0, &h.1.narrow(0, start, m)?), weight)?;
        let (mut log_probs, mut entropies) = out.split_at_mut(rows);
        let sums = [&mut log_sum_exp.slice_mut(..m), &mut entropies.slice_mut(start..start + m)];
        let log_prob = &mut log_probs.slice_mut(start..start + m);
        let of_targets = Some((&ids.slice(start..start + m), log_prob));
        let z = &mut z.as_cuda_slice_mut::<f32>()?.as_view_mut();
        row_stats(device, z, inverse_temperature, sums, of_targets)?;
    }
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((2, rows))))
}

/// Adds the gradient of the weight if the weight is trainable. Returns the gradient of `h` if `h_learns` is
/// true. `gradient [2, R]` is the gradient of the output of [`head_forward`].
pub(in crate::ops) fn head_backward(
    [h, weight, gradient]: [&Tensor; 3],
    targets: &[u32],
    inverse_temperature: f32,
    learns: Option<&GradientTarget>,
    h_learns: bool,
) -> Result<Option<Tensor>> {
    let ((rows, width), vocabulary) = (h.dims2()?, weight.dim(1)?);
    let chunk = device_logits_rows(vocabulary);
    let opened = [h, gradient].map(Tensor::storage_and_layout);
    let of_h = OP.gpu_storage("h", &opened[0], DType::BF16, &[rows, width])?;
    let (gradient, _) = OP.open_tensor::<f32>("the output's gradient", &opened[1], &[2, rows])?;
    let device = of_h.0.device();
    let ids = upload_ids(device, targets)?;
    // Computes the gradient of the logits `[m, V]` of each chunk, and passes it to `use_it` together with the
    // rows of `h`.
    let each_chunk = |use_it: &mut dyn FnMut(Tensor, Tensor) -> Result<()>| {
        for start in (0..rows).step_by(chunk) {
            let m = chunk.min(rows - start);
            let mut z = product((of_h.0, &of_h.1.narrow(0, start, m)?), weight)?;
            let z = z.as_cuda_slice_mut::<f32>()?;
            let mut log_sum_exp = output::<f32>(device, m)?;
            let mut entropy = output::<f32>(device, m)?;
            let sums = [&mut log_sum_exp.as_view_mut(), &mut entropy.as_view_mut()];
            row_stats(device, &mut z.as_view_mut(), inverse_temperature, sums, None)?;
            let mut dz = output::<bf16>(device, m * vocabulary)?;
            let of_rows = [
                &log_sum_exp.as_view(),
                &entropy.as_view(),
                &gradient.slice(start..start + m),
                &gradient.slice(rows + start..rows + start + m),
            ];
            let target = &ids.slice(start..start + m);
            let dz_view = &mut dz.as_view_mut();
            logits_gradient(device, &z.as_view(), target, of_rows, inverse_temperature, dz_view)?;
            use_it(tensor(dz, device, (m, vocabulary)), h.narrow(0, start, m)?)?;
        }
        Ok(())
    };
    let mut dh = vec![];
    let mut add_dh = |dz: &Tensor| -> Result<()> {
        if h_learns {
            dh.push(product_input_gradient(OP.0, dz, weight, None)?);
        }
        Ok(())
    };
    match learns {
        None => each_chunk(&mut |dz, _| add_dh(&dz))?,
        // One call of `add` covers all chunks, because a pass may call `add` only once per use of a
        // parameter.
        Some(learns) => learns.add(|dw| {
            each_chunk(&mut |dz, h| {
                add_dh(&dz)?;
                add_weight_gradient(OP.0, dw, &h, &dz, None)
            })
        })?,
    }
    match (h_learns, dh.len()) {
        (false, _) => Ok(None),
        (true, 0) => Ok(Some(h.zeros_like()?)),
        (true, 1) => Ok(dh.pop()),
        (true, _) => Ok(Some(Tensor::cat(&dh, 0)?)),
    }
}

/// Copies ids to the GPU. An empty list also gets an allocation.
fn upload_ids(device: &CudaDevice, ids: &[u32]) -> Result<CudaSlice<u32>> {
    device.clone_htod(if ids.is_empty() { &[0][..] } else { ids })
}
