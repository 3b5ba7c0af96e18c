//! Attention heads in one part for each rank, on the GPU. Values are bf16.

use super::arguments::{Op, VECTOR, output};
use super::launch::{kernel_params, launch};
use crate::ops::head_parts::HeadSplit;
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Layout, Result, bail};
use half::bf16;

const OP: Op = Op("head_parts");
const PACK: Kernel = kernel("pack_heads", "head_parts", 256, 0);
const UNPACK: Kernel = Kernel { function: "unpack_heads", ..PACK };

kernel_params! {
    /// `HeadParts` of `kernels/head_parts.cuh`.
    struct Params {
        from: u64,
        to: u64,
        rows: i64,
        groups: i32,
        heads: i32,
        ranks: i32,
        vectors: i32,
    }
}

/// Copies `rows` rows by `kernel` to a new tensor of `count` values.
fn run(
    split: &HeadSplit,
    kernel: &Kernel,
    x: DeviceArgument,
    (rows, count): (usize, usize),
) -> Result<CudaStorage> {
    let HeadSplit { groups, heads, head_dim, ranks } = *split;
    let (xs, device): (_, &CudaDevice) = OP.input::<bf16>("the heads", x, x.1.dims())?;
    if !heads.is_multiple_of(ranks) && !ranks.is_multiple_of(heads) {
        bail!("head_parts: {heads} heads cannot be split over {ranks} ranks");
    }
    OP.check_width(head_dim)?;
    OP.check_width(split.row_width().max(split.part_width()))?;
    let mut out = output::<bf16>(device, count)?;
    // SAFETY: both buffers outlive the launch, and the callers have checked their sizes.
    unsafe {
        launch(device, &[(kernel, (count / VECTOR).div_ceil(kernel.threads))], |at| Params {
            from: at.read(&xs),
            to: at.write(&mut out),
            rows: rows as i64,
            groups: groups as i32,
            heads: heads as i32,
            ranks: ranks as i32,
            vectors: (head_dim / VECTOR) as i32,
        })?
    };
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// Returns the parts `[S, T, G, n, D]` of all ranks, for rows `x [T, .., D]` with all heads.
///
/// # Errors
/// When `x` is not contiguous bf16, or its heads cannot be split.
pub fn pack_heads(x: DeviceArgument, split: &HeadSplit) -> Result<CudaStorage> {
    let rows = rows(x.1, split.row_width())?;
    run(split, &PACK, x, (rows, split.ranks * rows * split.part_width()))
}

/// Returns rows `[T, G, N, D]` with all heads, for the `parts [S·T·G·n·D]` of all ranks.
///
/// # Errors
/// As [`pack_heads`].
pub fn unpack_heads(parts: &CudaStorage, count: usize, split: &HeadSplit) -> Result<CudaStorage> {
    let layout = Layout::contiguous(count);
    let rows = rows(&layout, split.ranks * split.part_width())?;
    run(split, &UNPACK, (parts, &layout), (rows, rows * split.row_width()))
}

/// Returns the number of rows of `width` values.
fn rows(layout: &Layout, width: usize) -> Result<usize> {
    let count = layout.shape().elem_count();
    if width == 0 || !count.is_multiple_of(width) {
        bail!("head_parts: {:?} has no rows of {width} values", layout.dims());
    }
    Ok(count / width)
}
