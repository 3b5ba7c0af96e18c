//! The gradients of a key-value head that several GPUs share, each with some of its query heads.
//!
//! A sum over the query heads of one GPU, rounded or not, and added to the sums of other GPUs has other bits
//! than one GPU's sum over all of them. So each GPU computes whole sums, for a share of the keys: the GPUs
//! gather what the kernel reads of all query heads.

use super::arguments::{from_storage, output};
use super::head_parts::unpack_heads;
use super::launch::kernel_set;
use super::sink_attention::{DeviceLaunchPlan, Inputs, OP};
use crate::ops::head_parts::HeadSplit;
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::plan::LaunchSequences;
use crate::ops::sink_attention::{Attention, KeySharing};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Layout, Result, Storage, bail};
use half::bf16;

/// Writes the gradients of this GPU's share of the keys to `dkv [T, 2, 1, D]`, and leaves the others as they
/// are. `rows` are queries and the output's gradient `[T, N, D]`, `numbers` the log-sum-exps and the dot
/// products of outputs and their gradients `[T, N]`, for the query heads of this GPU.
///
/// # Errors
/// When the GPU has more than one key-value head, memory runs out, or an exchange has failed.
pub(super) fn shared_key_gradients(
    attention: &Attention,
    sequences: &LaunchSequences,
    sharing: &dyn KeySharing,
    inputs: &Inputs,
    rows: [DeviceArgument; 2],
    numbers: [&CudaSlice<f32>; 2],
    dkv: &mut CudaSlice<bf16>,
) -> Result<()> {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    if kv_heads != 1 {
        bail!("sink_attention: {kv_heads} key-value heads are shared, not 1");
    }
    let device = rows[0].0.device();
    let (_, ranks) = sharing.place();
    let count = sequences.tokens() * heads;
    let numbers = joined(device, numbers)?;
    let layout = Layout::contiguous(2 * count);
    let gathered = sharing.gather(&[rows[0], rows[1], (&numbers, &layout)])?;
    let Ok([q, dout, numbers]) = <[CudaStorage; 3]>::try_from(gathered) else {
        bail!("sink_attention: 3 values were not gathered")
    };

    let split = HeadSplit { groups: 1, heads: ranks * heads, head_dim, ranks };
    let q = unpack_heads(&q, ranks * count * head_dim, &split)?;
    let dout = unpack_heads(&dout, ranks * count * head_dim, &split)?;
    let numbers = from_storage(numbers, (ranks, 2, sequences.tokens(), heads));
    let numbers = numbers.permute((1, 2, 0, 3))?.contiguous()?;
    let (numbers, layout) = numbers.storage_and_layout();
    let Storage::Cuda(numbers) = &*numbers else { bail!("sink_attention: log-sum-exps are not on the GPU") };
    let numbers = OP.view::<f32>(numbers, layout)?;
    let (lse, delta) = numbers.split_at(ranks * count);

    // The kernel does not read sinks: log-sum-exps include them.
    let whole = Attention { heads: ranks * heads, sinks: false, sink_gradient: false, ..*attention };
    let kernels = kernel_set(device, head_dim)?;
    let plan = DeviceLaunchPlan::for_share_of_keys(device, kernels, &whole, sequences, sharing.place())?;
    let (q, dout) = (q.as_cuda_slice::<bf16>()?.as_view(), dout.as_cuda_slice::<bf16>()?.as_view());
    plan.key_gradients(&Inputs { q: &q, ..*inputs }, [&lse, &delta], &dout, dkv)
}

/// Returns two arrays, one after the other.
fn joined(device: &CudaDevice, [a, b]: [&CudaSlice<f32>; 2]) -> Result<CudaStorage> {
    let mut both = output::<f32>(device, a.len() + b.len())?;
    device.memcpy_dtod(a, &mut both.slice_mut(..a.len()))?;
    device.memcpy_dtod(b, &mut both.slice_mut(a.len()..))?;
    Ok(CudaStorage::wrap_cuda_slice(both, device.clone()))
}
