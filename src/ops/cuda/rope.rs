//! Rotary position embedding on the GPU. Heads are bf16, and the table is f32.

use super::arguments::{Op, VECTOR, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::rope::Rotation;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Device, Layout, Result, Shape, StorageRef, Tensor, bail};
use half::bf16;

const OP: Op = Op("rope");
const ROPE: Kernel = kernel("rope", "rope", 256, 0);
const APPEND: Kernel = Kernel { function: "rope_append", ..ROPE };

kernel_params! {
    /// `Rope` of `kernels/rope.cuh`.
    struct Params {
        x: u64,
        values: u64,
        out: u64,
        values_out: u64,
        cosines: u64,
        sines: u64,
        positions: u64,
        rows: i64,
        heads: i32,
        half: i32,
        x_stride: i32,
        out_stride: i32,
        direction: f32,
    }

    /// `RopeAppend` of `kernels/rope.cuh`.
    struct AppendParams {
        q: u64,
        k: u64,
        v: u64,
        q_out: u64,
        cache: u64,
        cosines: u64,
        sines: u64,
        positions: u64,
        slots: u64,
        rows: i64,
        heads: i32,
        kv_heads: i32,
        half: i32,
    }
}

/// Memory of rows to rotate, and of values to copy with them.
enum Rows<M> {
    /// Rows with only heads to rotate.
    Alone(M),
    /// Rows with keys, then values.
    Pairs(M),
    /// Rows of keys, and rows of values.
    Apart(M, M),
}

impl<M> Rows<M> {
    /// Returns the address of the rows to rotate, that of the values to copy or 0, and the elements between
    /// rows, of which `width` are rotated.
    fn places(self, width: usize, mut address: impl FnMut(M) -> u64) -> (u64, u64, i32) {
        match self {
            Rows::Alone(rows) => (address(rows), 0, width as i32),
            Rows::Pairs(rows) => {
                let rotated = address(rows);
                (rotated, rotated + (width * size_of::<bf16>()) as u64, 2 * width as i32)
            }
            Rows::Apart(rotated, copied) => (address(rotated), address(copied), width as i32),
        }
    }
}

/// Checks the number and the width of the rows to rotate.
fn check(rotation: &Rotation, (rows, width): (usize, usize)) -> Result<()> {
    let half = rotation.table.half_dim();
    if half == 0 || !half.is_multiple_of(VECTOR) || width > (i32::MAX / 2) as usize {
        let head_dim = 2 * half;
        bail!(
            "rope: heads of size {head_dim} in rows of {width} values are not supported on a GPU; use a head size that is a multiple of 16"
        );
    }
    if !width.is_multiple_of(2 * half) || rotation.positions.len() != rows {
        bail!(
            "rope: {rows} rows of {width}, {} positions and heads of {}",
            rotation.positions.len(),
            2 * half
        );
    }
    Ok(())
}

/// Returns the table and the positions of `rotation` on `device`.
fn angles(device: &CudaDevice, rotation: &Rotation) -> Result<[Tensor; 2]> {
    let place = Device::Cuda(device.clone());
    Ok([rotation.table.to_device(&place)?, rotation.device_positions(&place)?])
}

/// Checks and returns the locked tensors of [`angles`].
fn open_angles<'a>(
    opened: &'a [(StorageRef<'_>, &Layout); 2],
    rotation: &Rotation,
) -> Result<(CudaView<'a, f32>, CudaView<'a, u32>)> {
    let shape = [2, rotation.table.positions(), rotation.table.half_dim()];
    let (table, _) = OP.open_tensor::<f32>("the table", &opened[0], &shape)?;
    let (positions, _) = OP.open_tensor::<u32>("the positions", &opened[1], &[rotation.positions.len()])?;
    Ok((table, positions))
}

/// Rotates the rows of `width` values in `from`, and writes the result to `to`. Both have one row per
/// position of `rotation`.
fn run(
    device: &CudaDevice,
    rotation: &Rotation,
    width: usize,
    from: Rows<&CudaView<bf16>>,
    to: Rows<&mut CudaSlice<bf16>>,
    direction: f32,
) -> Result<()> {
    let (half, rows) = (rotation.table.half_dim(), rotation.positions.len());
    if rows == 0 {
        return Ok(());
    }
    let tensors = angles(device, rotation)?;
    let opened = tensors.each_ref().map(Tensor::storage_and_layout);
    let (table, positions) = open_angles(&opened, rotation)?;
    let blocks = (rows * (width / 2 / VECTOR)).div_ceil(ROPE.threads);
    // SAFETY: all buffers outlive the launch. The callers give memory with all rows, and `Rotation` has
    // checked that the table has every position.
    unsafe {
        launch(device, &[(&ROPE, blocks)], |at| {
            let (x, values, x_stride) = from.places(width, |memory| at.read(memory));
            let (out, values_out, out_stride) = to.places(width, |memory| at.write(memory));
            let cosines = at.read(&table);
            Params {
                x,
                values,
                out,
                values_out,
                cosines,
                sines: cosines + (table.len() / 2 * size_of::<f32>()) as u64,
                positions: at.read(&positions),
                rows: rows as i64,
                heads: (width / (2 * half)) as i32,
                half: half as i32,
                x_stride,
                out_stride,
                direction,
            }
        })
    }
}

/// Rotates `q [T, N·D]`, and appends rotated `k [T, M·D]` with `v [T, M·D]` to the rows `slots [T]` of
/// `cache`, which has rows of `2·M·D`. Returns the rotated queries.
///
/// # Safety
/// Every slot must be a row of `cache`. Rows with the same slot must have the same keys and values.
pub(super) unsafe fn rope_append(
    [q, k, v]: [&Tensor; 3],
    rotation: &Rotation,
    cache: &mut CudaSlice<bf16>,
    slots: &CudaView<i32>,
) -> Result<CudaSlice<bf16>> {
    let ((rows, q_width), kv_width) = (q.dims2()?, k.dim(1)?);
    let opened = [q, k, v].map(Tensor::storage_and_layout);
    let (q, device) = OP.open_tensor::<bf16>("q", &opened[0], &[rows, q_width])?;
    let (k, _) = OP.open_tensor::<bf16>("k", &opened[1], &[rows, kv_width])?;
    let (v, _) = OP.open_tensor::<bf16>("v", &opened[2], &[rows, kv_width])?;
    check(rotation, (rows, q_width))?;
    check(rotation, (rows, kv_width))?;
    if slots.len() != rows || !cache.len().is_multiple_of(2 * kv_width) {
        bail!("rope: {rows} rows of {kv_width} for {} slots of a cache of {}", slots.len(), cache.len());
    }
    let half = rotation.table.half_dim();
    let tensors = angles(device, rotation)?;
    let opened = tensors.each_ref().map(Tensor::storage_and_layout);
    let (table, positions) = open_angles(&opened, rotation)?;
    let mut out = output::<bf16>(device, rows * q_width)?;
    let blocks = (rows * ((q_width + kv_width) / 2 / VECTOR)).div_ceil(APPEND.threads);
    // SAFETY: all buffers outlive the launch, `Rotation` has checked that the table has every position, and
    // the caller guarantees the slots.
    unsafe {
        launch(device, &[(&APPEND, blocks)], |at| {
            let cosines = at.read(&table);
            AppendParams {
                q: at.read(&q),
                k: at.read(&k),
                v: at.read(&v),
                q_out: at.write(&mut out),
                cache: at.write(cache),
                cosines,
                sines: cosines + (table.len() / 2 * size_of::<f32>()) as u64,
                positions: at.read(&positions),
                slots: at.read(slots),
                rows: rows as i64,
                heads: (q_width / (2 * half)) as i32,
                kv_heads: (kv_width / (2 * half)) as i32,
                half: half as i32,
            }
        })?;
    }
    Ok(out)
}

/// Rotates `x [T, N·D]`.
pub(in crate::ops) fn rope_forward(x: DeviceArgument, rotation: &Rotation) -> Result<(CudaStorage, Shape)> {
    let (rows, width) = x.1.shape().dims2()?;
    let (xs, device) = OP.input::<bf16>("x", x, &[rows, width])?;
    check(rotation, (rows, width))?;
    let mut out = output::<bf16>(device, rows * width)?;
    run(device, rotation, width, Rows::Alone(&xs), Rows::Alone(&mut out), 1.0)?;
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((rows, width))))
}

/// Returns the gradient of `x`, given the gradient `dy [T, N·D]` of the rotated `x`.
pub(in crate::ops) fn rope_backward(dy: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    let (rows, width) = dy.dims2()?;
    let opened = dy.storage_and_layout();
    let (dys, device) = OP.open_tensor::<bf16>("the output's gradient", &opened, &[rows, width])?;
    check(rotation, (rows, width))?;
    let mut dx = output::<bf16>(device, rows * width)?;
    run(device, rotation, width, Rows::Alone(&dys), Rows::Alone(&mut dx), -1.0)?;
    Ok(tensor(dx, device, (rows, width)))
}

/// Returns rotated keys concatenated with values, `[T, 2·M·D]`.
pub(in crate::ops) fn rope_keys_forward(
    k: DeviceArgument,
    v: DeviceArgument,
    rotation: &Rotation,
) -> Result<(CudaStorage, Shape)> {
    let (rows, width) = k.1.shape().dims2()?;
    let (ks, device) = OP.input::<bf16>("k", k, &[rows, width])?;
    let (vs, _) = OP.input::<bf16>("v", v, &[rows, width])?;
    check(rotation, (rows, width))?;
    let mut out = output::<bf16>(device, 2 * rows * width)?;
    run(device, rotation, width, Rows::Apart(&ks, &vs), Rows::Pairs(&mut out), 1.0)?;
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((rows, 2 * width))))
}

/// Returns the gradients of keys and of values, given the gradient `dkv [T, 2·M·D]` of both.
pub(in crate::ops) fn rope_keys_backward(dkv: &Tensor, rotation: &Rotation) -> Result<[Tensor; 2]> {
    let (rows, width) = (dkv.dim(0)?, dkv.dim(1)? / 2);
    let opened = dkv.storage_and_layout();
    let (dkvs, device) = OP.open_tensor::<bf16>("the output's gradient", &opened, &[rows, 2 * width])?;
    check(rotation, (rows, width))?;
    let mut dk = output::<bf16>(device, rows * width)?;
    let mut dv = output::<bf16>(device, rows * width)?;
    run(device, rotation, width, Rows::Pairs(&dkvs), Rows::Apart(&mut dk, &mut dv), -1.0)?;
    Ok([tensor(dk, device, (rows, width)), tensor(dv, device, (rows, width))])
}
