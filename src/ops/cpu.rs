//! Access to the values of CPU tensors, and the distribution of rows over threads.

use super::buffer::buffer;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, StorageRef, Tensor, bail};
use rayon::prelude::*;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Deref;

/// An element type of CPU tensors whose values ops can read or change in place.
pub trait Element: Copy + 'static {
    const NAME: &'static str;

    fn slice(storage: &CpuStorage) -> Option<&[Self]>;

    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! element {
    ($type:ty, $variant:ident) => {
        impl Element for $type {
            const NAME: &'static str = stringify!($type);

            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                if let CpuStorage::$variant(values) = storage { Some(values) } else { None }
            }

            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                if let CpuStorage::$variant(values) = storage { Some(values) } else { None }
            }
        }
    };
}

element!(f32, F32);
element!(u32, U32);
element!(u8, U8);

/// The contiguous values of a CPU tensor, locked for reading. They dereference to a slice.
pub struct HostSlice<'a, T> {
    storage: StorageRef<'a>,
    start: usize,
    end: usize,
    element: PhantomData<T>,
}

pub type HostValues<'a> = HostSlice<'a, f32>;
pub type HostIds<'a> = HostSlice<'a, u32>;

fn host<T: Element>(tensor: &Tensor) -> Result<HostSlice<'_, T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("tensor is not contiguous") };
    match &*storage {
        Storage::Cpu(cpu) if T::slice(cpu).is_some() => {
            Ok(HostSlice { storage, start, end, element: PhantomData })
        }
        _ => bail!("expected a tensor of {} on the CPU", T::NAME),
    }
}

/// Locks a CPU tensor of f32 for reading.
///
/// # Errors
/// When the tensor is not contiguous, not f32 or not on the CPU.
pub fn host_values(tensor: &Tensor) -> Result<HostValues<'_>> {
    host(tensor)
}

/// Locks a CPU tensor of u32 ids for reading.
///
/// # Errors
/// When the tensor is not contiguous, not u32 or not on the CPU.
pub fn host_ids(tensor: &Tensor) -> Result<HostIds<'_>> {
    host(tensor)
}

/// Locks a CPU tensor of 8-bit codes for reading.
///
/// # Errors
/// When the tensor is not contiguous, not u8 or not on the CPU.
pub fn host_codes(tensor: &Tensor) -> Result<HostSlice<'_, u8>> {
    host(tensor)
}

/// Returns the tensor in host memory, with bf16 converted to f32. A tensor that is already in host memory is
/// not copied.
///
/// # Errors
/// When memory runs out.
pub fn to_host(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.to_device(&Device::Cpu)?;
    if tensor.dtype() == DType::BF16 { tensor.to_dtype(DType::F32) } else { Ok(tensor) }
}

impl<T: Element> Deref for HostSlice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &*self.storage {
            Storage::Cpu(cpu) => T::slice(cpu).map_or(&[], |values| &values[self.start..self.end]),
            _ => &[],
        }
    }
}

/// Calls `f` with the values of a contiguous f32 CPU tensor, which `f` may change in place.
///
/// # Errors
/// Errors of `f`, and when the tensor is not contiguous, not f32 or not on the CPU.
pub fn edit<R>(tensor: &Tensor, f: impl FnOnce(&mut [f32]) -> Result<R>) -> Result<R> {
    edit_elements(tensor, f)
}

/// Calls `f`, which cannot fail, with the values of a contiguous f32 CPU tensor. They may change in place.
///
/// # Errors
/// When the tensor is not contiguous, not f32 or not on the CPU.
pub fn change(tensor: &Tensor, f: impl FnOnce(&mut [f32])) -> Result<()> {
    edit(tensor, |values| {
        f(values);
        Ok(())
    })
}

/// Calls `f` with the values of a contiguous CPU tensor of 8-bit codes, which `f` may change in place.
///
/// # Errors
/// Errors of `f`, and when the tensor is not contiguous, not u8 or not on the CPU.
pub fn edit_codes<R>(tensor: &Tensor, f: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
    edit_elements(tensor, f)
}

fn edit_elements<T: Element, R>(tensor: &Tensor, f: impl FnOnce(&mut [T]) -> Result<R>) -> Result<R> {
    let edit = Edit { f: Cell::new(Some(f)), result: Cell::new(None), element: PhantomData };
    tensor.inplace_op1(&edit)?;
    edit.result.into_inner().ok_or_else(|| candle_core::Error::Msg("edit: nothing was edited".into()))
}

/// A closure wrapped as an op, because candle gives only ops mutable access to a storage.
struct Edit<T, F, R> {
    f: Cell<Option<F>>,
    result: Cell<Option<R>>,
    element: PhantomData<T>,
}

impl<T: Element, F: FnOnce(&mut [T]) -> Result<R>, R> InplaceOp1 for Edit<T, F, R> {
    fn name(&self) -> &'static str {
        "edit"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("tensor is not contiguous") };
        let (Some(values), Some(f)) = (T::slice_mut(storage), self.f.take()) else {
            bail!("expected a tensor of {} on the CPU", T::NAME)
        };
        self.result.set(Some(f(&mut values[start..end])?));
        Ok(())
    }
}

/// Computes `sum ← sum + x`, elementwise.
///
/// # Errors
/// When the tensor is not contiguous, not f32 or not on the CPU.
pub fn add_values(sum: &Tensor, x: &[f32]) -> Result<()> {
    change(sum, |sum| sum.iter_mut().zip(x).for_each(|(s, x)| *s += x))
}

/// Minimum number of multiply-adds for which several threads are used.
const PARALLEL_WORK_MIN: usize = 1 << 16;

/// Returns whether work of about `work` multiply-adds should use the current thread pool.
///
/// Always false in a pool of one thread. The trainer runs several micro-batches in parallel in such pools, so
/// their ops do not compete for cores.
pub fn should_parallelize(work: usize) -> bool {
    work >= PARALLEL_WORK_MIN && rayon::current_num_threads() > 1
}

/// Calls `f(row, values)` for every row of `out`. A row has `width` values and takes about `work`
/// multiply-adds.
pub fn for_each_row(out: &mut [f32], width: usize, work: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if width == 0 || out.is_empty() {
        return;
    }
    let rows = out.len() / width;
    if should_parallelize(rows * work) {
        let chunk = rows.div_ceil(4 * rayon::current_num_threads()).max(1);
        out.par_chunks_mut(chunk * width).enumerate().for_each(|(c, rows)| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                f(c * chunk + i, row);
            }
        });
    } else {
        for (i, row) in out.chunks_exact_mut(width).enumerate() {
            f(i, row);
        }
    }
}

/// Returns the rows `rows` of `values`, each `width` long, concatenated.
pub fn gather_rows(values: &[f32], rows: &[u32], width: usize) -> Vec<f32> {
    let row = |row: u32| &values[row as usize * width..(row as usize + 1) * width];
    let len = rows.len() * width;
    if should_parallelize(len) {
        let mut out = buffer(len);
        for_each_row(&mut out, width, width, |i, out| out.copy_from_slice(row(rows[i])));
        return out;
    }
    let mut out = Vec::with_capacity(len);
    rows.iter().for_each(|&r| out.extend_from_slice(row(r)));
    out
}

/// Calls `f(row, values of a, values of b)` for every row of two buffers, as [`for_each_row`] does for one.
pub fn for_each_row_pair<B: Send>(
    (a, a_width): (&mut [f32], usize),
    (b, b_width): (&mut [B], usize),
    work: usize,
    f: impl Fn(usize, &mut [f32], &mut [B]) + Sync,
) {
    if a_width == 0 || b_width == 0 {
        return;
    }
    if should_parallelize(a.len() / a_width * work) {
        let rows = a.par_chunks_exact_mut(a_width).zip(b.par_chunks_exact_mut(b_width));
        rows.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    } else {
        let rows = a.chunks_exact_mut(a_width).zip(b.chunks_exact_mut(b_width));
        rows.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    }
}
