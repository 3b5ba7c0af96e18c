//! Selection of rows and columns by id on the GPU. Values are bf16. The f32 gradient of a table is added in
//! place.

use super::arguments::{Op, VECTOR, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::embedding::TokensById;
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Result, Shape, Tensor, bail};
use half::bf16;

const OP: Op = Op("rows");
const TAKE_ROWS: Kernel = kernel("take_rows", "embedding", 256, 0);
const TAKE_COLUMNS: Kernel = Kernel { function: "take_columns", ..TAKE_ROWS };
/// Number of columns that a block sums: eight per lane.
const SUM_COLUMNS: usize = 256;
const ADD_ROWS: Kernel =
    Kernel { function: "add_rows", shared_bytes: 256 / 32 * SUM_COLUMNS * size_of::<f32>(), ..TAKE_ROWS };
const ADD_COLUMNS: Kernel = Kernel { function: "add_columns", ..ADD_ROWS };
const SUM_ROWS: Kernel = Kernel { function: "sum_rows", ..ADD_ROWS };

kernel_params! {
    /// `Taken` of `kernels/embedding.cuh`.
    struct TakeParams {
        table: u64,
        ids: u64,
        out: u64,
        tokens: i64,
        columns: i64,
        width: i32,
    }

    /// `SumsById` of `kernels/embedding.cuh`.
    struct SumParams {
        dy: u64,
        order: u64,
        starts: u64,
        ids: u64,
        table: u64,
        out: u64,
        columns: i64,
        width: i32,
    }
}

/// Returns rows `ids` of `table`. All rows must exist.
pub(in crate::ops) fn take_rows(table: DeviceArgument, ids: &[u32]) -> Result<(CudaStorage, Shape)> {
    let width = table.1.shape().dims2()?.1;
    take(&TAKE_ROWS, table, ids, width, 0)
}

/// Returns columns `ids` of `table` as rows. All columns must exist.
pub(in crate::ops) fn take_columns(table: DeviceArgument, ids: &[u32]) -> Result<(CudaStorage, Shape)> {
    let (width, columns) = table.1.shape().dims2()?;
    take(&TAKE_COLUMNS, table, ids, width, columns)
}

fn take(
    kernel: &Kernel,
    table: DeviceArgument,
    ids: &[u32],
    width: usize,
    columns: usize,
) -> Result<(CudaStorage, Shape)> {
    let (values, device) = OP.input::<bf16>("the table", table, table.1.dims())?;
    OP.check_width(width)?;
    let mut out = output::<bf16>(device, ids.len() * width)?;
    if !ids.is_empty() {
        let on_device = device.clone_htod(ids)?;
        let vectors = ids.len() * (width / VECTOR);
        // SAFETY: all buffers outlive the launch, and the caller has checked that every id exists in the
        // table.
        unsafe {
            launch(device, &[(kernel, vectors.div_ceil(kernel.threads))], |at| TakeParams {
                table: at.read(&values),
                ids: at.read(&on_device),
                out: at.write(&mut out),
                tokens: ids.len() as i64,
                columns: columns as i64,
                width: width as i32,
            })?
        };
    }
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((ids.len(), width))))
}

/// Adds each row of `dy` to the row of `table [V, H]` that the row's id selects.
pub(in crate::ops) fn add_rows(table: &Tensor, dy: &Tensor, by_id: &TokensById) -> Result<()> {
    let (rows, width) = table.dims2()?;
    add(&ADD_ROWS, table, dy, by_id, (rows, width, 0))
}

/// Adds each row of `dy` to the column of `table [H, V]` that the row's id selects.
pub(in crate::ops) fn add_columns(table: &Tensor, dy: &Tensor, by_id: &TokensById) -> Result<()> {
    let (width, columns) = table.dims2()?;
    add(&ADD_COLUMNS, table, dy, by_id, (columns, width, columns))
}

fn add(
    kernel: &Kernel,
    table: &Tensor,
    dy: &Tensor,
    by_id: &TokensById,
    (offsets, width, columns): (usize, usize, usize),
) -> Result<()> {
    let opened = dy.storage_and_layout();
    let (dy, _) = OP.open_tensor::<bf16>("the output's gradient", &opened, &[by_id.order.len(), width])?;
    OP.edit::<f32, ()>(table, |device, table| {
        // SAFETY: the table has `offsets` rows or columns with `width` values.
        unsafe { sum(kernel, device, &dy, by_id, (offsets, columns, width), SumPlace::Table(table)) }
    })
}

/// Returns the gradient of `x [rows, H]`, given the gradient `dy` of the selected rows.
pub(in crate::ops) fn sum_rows(dy: &Tensor, by_id: &TokensById, rows: usize) -> Result<Tensor> {
    let width = dy.dims2()?.1;
    let opened = dy.storage_and_layout();
    let (dy, device) =
        OP.open_tensor::<bf16>("the output's gradient", &opened, &[by_id.order.len(), width])?;
    let mut dx = device.alloc_zeros::<bf16>(rows * width)?;
    // SAFETY: `dx` has `rows` rows with `width` values.
    unsafe { sum(&SUM_ROWS, device, &dy, by_id, (rows, 0, width), SumPlace::Rows(&mut dx))? };
    Ok(tensor(dx, device, (rows, width)))
}

/// The destination of sums: a table of f32 that they are added to, or rows of bf16.
enum SumPlace<'a, 'b> {
    Table(&'a mut CudaViewMut<'b, f32>),
    Rows(&'a mut CudaSlice<bf16>),
}

/// Launches `kernel` with one block for each pair of an id and a range of 256 columns.
///
/// # Safety
/// `to` must have `offsets` rows or columns of `width` values.
unsafe fn sum(
    kernel: &Kernel,
    device: &CudaDevice,
    dy: &CudaView<bf16>,
    by_id: &TokensById,
    (offsets, columns, width): (usize, usize, usize),
    to: SumPlace,
) -> Result<()> {
    OP.check_width(width)?;
    let TokensById { ids, starts, order } = by_id;
    let Some(&last) = ids.last() else { return Ok(()) };
    if last as usize >= offsets {
        bail!(
            "rows: id {last} is not below {offsets}, the size of the gradient; give the gradient buffer of the table"
        );
    }
    let lists = device.clone_htod(&[&order[..], starts, ids].concat())?;
    let blocks = ids.len() * width.div_ceil(SUM_COLUMNS);
    // SAFETY: guaranteed by the caller. Every id is below `offsets`.
    unsafe {
        launch(device, &[(kernel, blocks)], |at| {
            let (table, out) = match to {
                SumPlace::Table(table) => (at.write(table), 0),
                SumPlace::Rows(rows) => (0, at.write(rows)),
            };
            let order_at = at.read(&lists);
            let starts_at = order_at + size_of_val(&order[..]) as u64;
            SumParams {
                dy: at.read(dy),
                order: order_at,
                starts: starts_at,
                ids: starts_at + size_of_val(&starts[..]) as u64,
                table,
                out,
                columns: columns as i64,
                width: width as i32,
            }
        })
    }
}
