//! Rotary position embedding (RoPE), which pairs each value `a` of the first half of a head with the value
//! `b` of the second half. A pair is rotated by an angle `θ`: `[a cos θ − b sin θ, b cos θ + a sin θ]`.
//!
//! The backward pass of a rotation is the rotation by `−θ`. YaRN multiplies cosine and sine by a factor. The
//! tables contain the factor, so the backward pass applies it too.

use super::buffer::buffer;
use super::cpu::host_values;
use super::cuda::{rope_backward, rope_forward, rope_keys_backward, rope_keys_forward};
use super::device_copies::DeviceCopies;
use super::graph::{apply, contiguous, reshape};
use super::operation::{DeviceArgument, HostArgument, Operation};
use candle_core::{CpuStorage, CudaStorage, Device, Result, Shape, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;
use std::sync::Arc;

/// Number of positions of a table that one task computes.
const POSITIONS_PER_TASK: usize = 256;

/// The cosines and the sines of every position, `[positions][D/2]` each.
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    cosines: Vec<f32>,
    sines: Vec<f32>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    uploaded: DeviceCopies,
}

impl RopeTable {
    /// Returns the table of `positions` positions. `frequencies [D/2]` are in radians per position. Cosines
    /// and sines are multiplied by `attention_factor`, which is 1 for plain RoPE.
    ///
    /// Angles are rounded to f32, as in the reference implementation. Cosines and sines are computed in f64.
    pub fn new(frequencies: &[f32], positions: usize, attention_factor: f64) -> Self {
        let half = frequencies.len();
        let (mut cosines, mut sines) = (buffer(positions * half), buffer(positions * half));
        let length = (POSITIONS_PER_TASK * half).max(1);
        let tasks = cosines.par_chunks_mut(length).zip(sines.par_chunks_mut(length)).enumerate();
        tasks.for_each(|(task, (cosines, sines))| {
            for (i, (cosine, sine)) in cosines.iter_mut().zip(sines).enumerate() {
                let position = task * POSITIONS_PER_TASK + i / half;
                let angle = (position as f32 * frequencies[i % half]) as f64;
                *cosine = (angle.cos() * attention_factor) as f32;
                *sine = (angle.sin() * attention_factor) as f32;
            }
        });
        Self { half, cosines, sines, uploaded: DeviceCopies::default() }
    }

    /// Returns the number of positions.
    pub fn positions(&self) -> usize {
        self.cosines.len() / self.half.max(1)
    }

    /// Returns the number of pairs per head, `D/2`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) fn half_dim(&self) -> usize {
        self.half
    }

    /// Returns the cosines and sines on a device, `[2, positions, D/2]`. They are copied to the device once.
    ///
    /// # Errors
    /// When the copy fails.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn to_device(&self, device: &Device) -> Result<Tensor> {
        self.uploaded.get_or_copy(device, || {
            let both = [&self.cosines[..], &self.sines[..]].concat();
            Tensor::from_vec(both, (2, self.positions(), self.half), device)
        })
    }

    /// Rotates the heads of one row, `[heads][D]`, at `position`. If `back` is true, rotates by the negative
    /// angle.
    #[inline(always)]
    fn rotate(&self, position: usize, x: &[f32], out: &mut [f32], back: bool) {
        let half = self.half;
        let cosines = &self.cosines[position * half..(position + 1) * half];
        let sines = &self.sines[position * half..(position + 1) * half];
        for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
            let ((a, b), (out_a, out_b)) = (x.split_at(half), out.split_at_mut(half));
            let angles =
                cosines.iter().zip(sines).map(|(&cosine, &sine)| (cosine, if back { -sine } else { sine }));
            let pairs = a.iter().zip(b).zip(out_a.iter_mut().zip(out_b));
            for ((cosine, sine), ((a, b), (out_a, out_b))) in angles.zip(pairs) {
                *out_a = a * cosine - b * sine;
                *out_b = b * cosine + a * sine;
            }
        }
    }
}

/// The rotation of a batch: the shared table, and the position of each row.
#[derive(Debug, Clone)]
pub struct Rotation {
    pub table: Arc<RopeTable>,
    pub positions: Arc<Vec<u32>>,
    /// The last position plus one.
    end: usize,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    uploaded: Arc<DeviceCopies>,
}

impl Rotation {
    /// Returns the rotation of rows at `positions`.
    pub fn new(table: Arc<RopeTable>, positions: Vec<u32>) -> Self {
        let end = positions.iter().max().map_or(0, |&p| p as usize + 1);
        Self { table, positions: Arc::new(positions), end, uploaded: Arc::default() }
    }

    /// Returns the rotation with `uploaded [T]` as its positions on a GPU.
    pub fn with_device_positions(self, uploaded: &Tensor) -> Result<Self> {
        self.uploaded.get_or_copy(uploaded.device(), || Ok(uploaded.clone()))?;
        Ok(self)
    }

    /// Returns the positions on a device, `[T]`. They are copied to the device once for all layers.
    ///
    /// # Errors
    /// When the copy fails.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn device_positions(&self, device: &Device) -> Result<Tensor> {
        self.uploaded
            .get_or_copy(device, || Tensor::from_slice(&self.positions, self.positions.len(), device))
    }

    /// Checks the number of rows and the head size of a tensor, and that the table has all positions.
    ///
    /// # Errors
    /// When `rows` differs from the number of positions, the head size differs from that of the table, or a
    /// position is beyond the table.
    pub fn check(&self, rows: usize, head_dim: usize) -> Result<()> {
        let end = self.end;
        if self.positions.len() != rows || head_dim != 2 * self.table.half || end > self.table.positions() {
            bail!(
                "rope: {rows} rows for {} positions up to {end}, head size {head_dim}; the table has {} positions for head size {}",
                self.positions.len(),
                self.table.positions(),
                2 * self.table.half
            );
        }
        Ok(())
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn rotate_rows(rotation: &Rotation, x: &[f32], width: usize, stride: usize, out: &mut [f32], back: bool) {
    for (row, &position) in rotation.positions.iter().enumerate() {
        let at = row * stride..row * stride + width;
        rotation.table.rotate(position as usize, &x[row * width..(row + 1) * width], &mut out[at], back);
    }
}

/// Rotates queries: `x [T, N·D]` → `[T, N, D]`. On a GPU `x` is bf16 and contiguous, and `D` is a multiple of
/// 16.
///
/// # Errors
/// When shapes disagree or a position is beyond the table. On a GPU also when a type, a layout or a size is
/// not supported.
pub fn rope(x: &Tensor, heads: usize, rotation: &Rotation) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let head_dim = width / heads;
    rotation.check(rows, head_dim)?;
    let op = RotateQueries { rotation: rotation.clone(), shape: (rows, heads, head_dim) };
    if x.device().is_cuda() {
        reshape(&apply([x], op)?, (rows, heads, head_dim))
    } else {
        apply([&contiguous(x)?], op)
    }
}

struct RotateQueries {
    rotation: Rotation,
    /// The output shape. The op returns this shape directly, because a reshape would be another node, whose
    /// gradient is copied.
    shape: (usize, usize, usize),
}

impl Operation<1> for RotateQueries {
    const NAME: &'static str = "rope";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let width = x.shape().dims()[1];
        let x = x.values()?;
        let mut out = buffer(x.len());
        rotate_rows(&self.rotation, x, width, width, &mut out, false);
        Ok((CpuStorage::F32(out), Shape::from(self.shape)))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        rope_forward(x, &self.rotation)
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let width = x.dim(1)?;
        if x.device().is_cuda() {
            return Ok([Some(rope_backward(grad, &self.rotation)?)]);
        }
        let mut dx = buffer(x.elem_count());
        rotate_rows(&self.rotation, &host_values(grad)?, width, width, &mut dx, true);
        Ok([Some(Tensor::from_vec(dx, x.shape(), x.device())?)])
    }
}

/// Rotates keys and concatenates them with values: `k [T, M·D]`, `v [T, M·D]` → `[T, 2, M, D]`, the format of
/// attention and its cache. Requirements on a GPU are those of [`rope`].
///
/// # Errors
/// When shapes disagree or a position is beyond the table. On a GPU also when a type, a layout or a size is
/// not supported.
pub fn rope_keys_with_values(k: &Tensor, v: &Tensor, heads: usize, rotation: &Rotation) -> Result<Tensor> {
    let (rows, width) = k.dims2()?;
    rotation.check(rows, width / heads)?;
    if k.dims() != v.dims() {
        bail!("rope_keys_with_values: keys {:?}, values {:?}", k.dims(), v.dims());
    }
    let shape = (rows, 2, heads, width / heads);
    let op = RotateKeys { rotation: rotation.clone(), shape };
    if k.device().is_cuda() {
        reshape(&apply([k, v], op)?, shape)
    } else {
        apply([&contiguous(k)?, &contiguous(v)?], op)
    }
}

struct RotateKeys {
    rotation: Rotation,
    /// As in [`RotateQueries`].
    shape: (usize, usize, usize, usize),
}

impl Operation<2> for RotateKeys {
    const NAME: &'static str = "rope_keys_with_values";

    fn cpu(&self, [k, v]: [HostArgument; 2]) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = k.shape().dims2()?;
        let mut out = buffer(2 * rows * width);
        rotate_rows(&self.rotation, k.values()?, width, 2 * width, &mut out, false);
        for (row, v) in out.chunks_exact_mut(2 * width).zip(v.values()?.chunks_exact(width)) {
            row[width..].copy_from_slice(v);
        }
        Ok((CpuStorage::F32(out), Shape::from(self.shape)))
    }

    fn cuda(&self, [k, v]: [DeviceArgument; 2]) -> Result<(CudaStorage, Shape)> {
        rope_keys_forward(k, v, &self.rotation)
    }

    fn backward(&self, [k, _]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (rows, width) = k.dims2()?;
        if k.device().is_cuda() {
            let [dk, dv] = rope_keys_backward(grad, &self.rotation)?;
            return Ok([Some(dk), Some(dv)]);
        }
        let grad = host_values(grad)?;
        let (mut rotated, mut dv) = (buffer(rows * width), buffer(rows * width));
        for (row, g) in grad.chunks_exact(2 * width).enumerate() {
            let at = row * width..(row + 1) * width;
            rotated[at.clone()].copy_from_slice(&g[..width]);
            dv[at].copy_from_slice(&g[width..]);
        }
        let mut dk = buffer(rows * width);
        rotate_rows(&self.rotation, &rotated, width, width, &mut dk, true);
        let device = k.device();
        Ok([
            Some(Tensor::from_vec(dk, (rows, width), device)?),
            Some(Tensor::from_vec(dv, (rows, width), device)?),
        ])
    }
}
