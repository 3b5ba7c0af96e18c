//! Access to CPU storage, and the one way rows are shared out over threads.

use candle_core::{CpuStorage, Layout, Result, Storage, StorageRef, Tensor, bail};
use rayon::prelude::*;
use std::ops::Deref;

/// The contiguous f32 values of an op's argument.
pub fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("argument is not contiguous") };
    match storage {
        CpuStorage::F32(values) => Ok(&values[start..end]),
        other => {
            bail!("argument has dtype {:?}, expected F32", candle_core::backend::BackendStorage::dtype(other))
        }
    }
}

/// The contiguous f32 values of a CPU tensor, readable as a slice while held.
pub struct HostValues<'a> {
    storage: StorageRef<'a>,
    start: usize,
    end: usize,
}

/// Opens a CPU tensor for reading.
///
/// # Errors
/// When the tensor is not contiguous, not f32 or not on the CPU.
pub fn host_values(tensor: &Tensor) -> Result<HostValues<'_>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("tensor is not contiguous") };
    match &*storage {
        Storage::Cpu(CpuStorage::F32(_)) => Ok(HostValues { storage, start, end }),
        _ => bail!("expected an f32 tensor on the CPU"),
    }
}

impl Deref for HostValues<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => &values[self.start..self.end],
            _ => &[],
        }
    }
}

/// A fresh buffer whose contents the caller overwrites entirely.
pub fn buffer(len: usize) -> Vec<f32> {
    vec![0.0; len]
}

/// Work below this many multiply-adds is not worth handing to other threads.
const PARALLEL_WORK_MIN: usize = 1 << 16;

/// True when `work` (multiply-adds, roughly) should be spread over the current thread pool.
///
/// Inside a pool of one thread this is always false: that is how the trainer runs whole
/// micro-batches side by side without the ops competing for the same cores.
pub fn in_parallel(work: usize) -> bool {
    work >= PARALLEL_WORK_MIN && rayon::current_num_threads() > 1
}

/// Calls `f(row, values)` for every row of `out`, `width` long. `work` is the cost of one row in multiply-adds.
pub fn for_each_row(out: &mut [f32], width: usize, work: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if width == 0 || out.is_empty() {
        return;
    }
    let rows = out.len() / width;
    if in_parallel(rows * work) {
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

/// As [`for_each_row`] over two buffers at once: `f(row, values of a, values of b)`.
pub fn for_each_row_pair(
    (a, a_width): (&mut [f32], usize),
    (b, b_width): (&mut [f32], usize),
    work: usize,
    f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) {
    if a_width == 0 || b_width == 0 {
        return;
    }
    if in_parallel(a.len() / a_width * work) {
        let rows = a.par_chunks_exact_mut(a_width).zip(b.par_chunks_exact_mut(b_width));
        rows.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    } else {
        let rows = a.chunks_exact_mut(a_width).zip(b.chunks_exact_mut(b_width));
        rows.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    }
}
