//! The load-balancing auxiliary loss on the GPU, in f32. Row counts are read from the plan in GPU memory.

use super::arguments::{Op, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::load_balance::LoadBalance;
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Device, Result, Shape, Tensor, bail};

const OP: Op = Op("load_balance");
/// Computes the number of (token, slot) pairs of each expert, divided by the number of tokens. Shared memory
/// has one count per thread.
const FRACTIONS: Kernel = kernel("load_balance_fractions", "load_balance", 128, 128 * size_of::<i64>());
const ROWS: Kernel = Kernel { function: "load_balance_rows", shared_bytes: 0, ..FRACTIONS };
/// Sums the loss over rows. Shared memory has one partial sum per thread.
const SUM: Kernel =
    Kernel { function: "load_balance_sum", threads: 256, shared_bytes: 256 * size_of::<f32>(), ..FRACTIONS };
const BACKWARD: Kernel = Kernel { function: "load_balance_backward", ..ROWS };
/// Number of threads per row.
const WARP: usize = 32;

kernel_params! {
    /// `LoadBalance` of `kernels/load_balance.cuh`.
    struct Params {
        logits: u64,
        token_of: u64,
        offsets: u64,
        sequences_per_row: u64,
        fractions: u64,
        of_rows: u64,
        loss: u64,
        dloss: u64,
        dlogits: u64,
        rows: i64,
        experts: i32,
        tokens: f32,
        scale: f32,
    }
}

/// The result of a launch, with its memory.
enum LaunchOutput<'a> {
    /// The losses, one per row, and their sum.
    Loss { of_rows: &'a mut CudaSlice<f32>, loss: &'a mut CudaSlice<f32> },
    /// The logits' gradient from the loss's gradient.
    Gradient { dloss: &'a CudaView<'a, f32>, dlogits: &'a mut CudaSlice<f32> },
}

/// Counts how often each expert is selected, then computes `wanted`.
///
/// # Safety
/// `of_rows` must have one number per row, `dlogits` one number per logit, and `loss` and `dloss` one number
/// each.
unsafe fn run(
    op: &LoadBalance,
    device: &CudaDevice,
    logits: &CudaView<f32>,
    (rows, experts): (usize, usize),
    wanted: LaunchOutput,
) -> Result<()> {
    let (tokens, of_experts) = (op.plan.tokens(), op.plan.expert_count());
    if tokens != rows || of_experts != experts {
        bail!(
            "load_balance: router logits [{rows}, {experts}], but the plan has {tokens} tokens and {of_experts} experts"
        );
    }
    let plan = [op.plan.token_of()?, op.plan.starts()?];
    let opened_plan = plan.each_ref().map(Tensor::storage_and_layout);
    let (token_of, _) = OP.open_tensor::<u32>("the plan", &opened_plan[0], plan[0].dims())?;
    let (starts, _) = OP.open_tensor::<u32>("the plan", &opened_plan[1], plan[1].dims())?;
    let sequences_per_row = op.sequences_per_row_on(&Device::Cuda(device.clone()))?;
    let opened_holders = sequences_per_row.as_ref().map(Tensor::storage_and_layout);
    let open_rows = |opened| OP.open_tensor::<u32>("the sequences per row", opened, &[rows]);
    let sequences_per_row = opened_holders.as_ref().map(open_rows).transpose()?;
    let mut fractions = output::<f32>(device, experts)?;
    let tokens = op.tokens(rows).max(1);
    let blocks = rows.div_ceil(ROWS.threads / WARP);
    let kernels: &[_] = match wanted {
        LaunchOutput::Loss { .. } => &[(&FRACTIONS, experts), (&ROWS, blocks), (&SUM, 1)],
        LaunchOutput::Gradient { .. } => &[(&FRACTIONS, experts), (&BACKWARD, blocks)],
    };
    // SAFETY: guaranteed by the caller. The launches read only memory that was written.
    unsafe {
        launch(device, kernels, |at| {
            let params = Params {
                logits: at.read(logits),
                token_of: at.read(&token_of),
                offsets: at.read(&starts),
                sequences_per_row: sequences_per_row.as_ref().map_or(0, |(sequences, _)| at.read(sequences)),
                fractions: at.write(&mut fractions),
                rows: rows as i64,
                experts: experts as i32,
                tokens: tokens as f32,
                scale: (experts as f64 / tokens as f64) as f32,
                ..Params::default()
            };
            match wanted {
                LaunchOutput::Loss { of_rows, loss } => {
                    Params { of_rows: at.write(of_rows), loss: at.write(loss), ..params }
                }
                LaunchOutput::Gradient { dloss, dlogits } => {
                    Params { dloss: at.read(dloss), dlogits: at.write(dlogits), ..params }
                }
            }
        })
    }
}

/// Returns the loss, which is a scalar.
pub(in crate::ops) fn load_balance_forward(
    op: &LoadBalance,
    logits: DeviceArgument,
) -> Result<(CudaStorage, Shape)> {
    let (rows, experts) = logits.1.shape().dims2()?;
    let (values, device) = OP.input::<f32>("the router logits", logits, &[rows, experts])?;
    let mut loss = device.alloc_zeros::<f32>(1)?;
    if rows > 0 {
        let mut of_rows = output::<f32>(device, rows)?;
        let wanted = LaunchOutput::Loss { of_rows: &mut of_rows, loss: &mut loss };
        // SAFETY: both buffers have the required sizes.
        unsafe { run(op, device, &values, (rows, experts), wanted)? };
    }
    Ok((CudaStorage::wrap_cuda_slice(loss, device.clone()), Shape::from(())))
}

/// Returns the gradient of the logits, given the gradient of the loss, which is a scalar on the GPU.
pub(in crate::ops) fn load_balance_backward(
    op: &LoadBalance,
    logits: &Tensor,
    dloss: &Tensor,
) -> Result<Tensor> {
    let (rows, experts) = logits.dims2()?;
    let opened = [logits, dloss].map(Tensor::storage_and_layout);
    let (logits, device) = OP.open_tensor::<f32>("the router logits", &opened[0], &[rows, experts])?;
    let (dloss, _) = OP.open_tensor::<f32>("the loss's gradient", &opened[1], &[])?;
    let mut dlogits = output::<f32>(device, rows * experts)?;
    if rows > 0 {
        let wanted = LaunchOutput::Gradient { dloss: &dloss, dlogits: &mut dlogits };
        // SAFETY: both buffers have the required sizes.
        unsafe { run(op, device, &logits, (rows, experts), wanted)? };
    }
    Ok(tensor(dlogits, device, (rows, experts)))
}
