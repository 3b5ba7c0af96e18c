//! Products of the same rows by several matrices in one launch, on the GPU. Each result has the bits of its
//! own launch.

use super::arguments::{Op, output, tensor};
use super::launch::{kernel_params, launch};
use super::product::tiling;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{Result, Tensor, bail};
use half::bf16;

const OP: Op = Op("joined_linear");
/// Maximum number of matrices.
const MATRICES_MAX: usize = 3;

kernel_params! {
    /// `JoinedMatrix` of `kernels/product.cuh`.
    struct Matrix {
        weight: u64,
        bias: u64,
        out: u64,
        n: i32,
        end: i32,
    }

    /// `JoinedProduct` of `kernels/product.cuh`.
    struct Params {
        x: u64,
        first: Matrix,
        second: Matrix,
        third: Matrix,
        rows: i32,
        k: i32,
    }
}

/// The tensors of one matrix, after the checks.
struct Checked<'a> {
    weight: CudaView<'a, bf16>,
    bias: Option<CudaView<'a, f32>>,
    n: usize,
}

/// Returns `x · W + b`, `[T, out]` in bf16, for each of up to three matrices `W [in, out]` with their biases.
pub(in crate::ops) fn joined_product(
    x: &Tensor,
    matrices: &[(&Tensor, Option<&Tensor>)],
) -> Result<Vec<Tensor>> {
    let (rows, k) = x.dims2()?;
    let opened = x.storage_and_layout();
    let (x, device) = OP.open_tensor::<bf16>("x", &opened, &[rows, k])?;
    if matrices.len() > MATRICES_MAX {
        bail!("{}: {} matrices, but at most {MATRICES_MAX} fit a launch", OP.0, matrices.len());
    }
    let opened: Vec<_> = matrices
        .iter()
        .map(|(weight, bias)| (weight.storage_and_layout(), bias.map(Tensor::storage_and_layout)))
        .collect();
    let checked = opened.iter().zip(matrices).map(|((weight, bias), (shape, _))| {
        let n = shape.dim(1)?;
        let (weight, _) = OP.open_tensor::<bf16>("the weight", weight, &[k, n])?;
        let bias = bias.as_ref().map(|bias| OP.open_tensor::<f32>("the bias", bias, &[n])).transpose()?;
        Ok(Checked { weight, bias: bias.map(|(bias, _)| bias), n })
    });
    let checked = checked.collect::<Result<Vec<_>>>()?;
    if [rows, k].iter().chain(checked.iter().map(|matrix| &matrix.n)).any(|&size| size > i32::MAX as usize) {
        bail!("{}: {rows} rows of {k} are not supported on a GPU; use smaller batches", OP.0);
    }
    let outputs = checked.iter().map(|matrix| output::<bf16>(device, rows * matrix.n));
    let mut outputs = outputs.collect::<Result<Vec<_>>>()?;
    if rows > 0 {
        multiply(device, (&x, rows, k), &checked, &mut outputs)?;
    }
    let sizes = checked.iter().map(|matrix| (rows, matrix.n));
    Ok(outputs.into_iter().zip(sizes).map(|(out, shape)| tensor(out, device, shape)).collect())
}

/// Launches the products of `rows` rows `x [rows, k]`.
fn multiply(
    device: &CudaDevice,
    (x, rows, k): (&CudaView<bf16>, usize, usize),
    matrices: &[Checked],
    outputs: &mut [CudaSlice<bf16>],
) -> Result<()> {
    let tiling = tiling(rows, 1);
    let tiles: usize = matrices.iter().map(|matrix| matrix.n.div_ceil(tiling.columns)).sum();
    // SAFETY: all buffers outlive the launch and have the sizes in `params`. No block has a tile after those
    // of the last matrix.
    unsafe {
        launch(device, &[(&tiling.joined, tiles * rows.div_ceil(tiling.rows))], |at| {
            let mut end = 0;
            let mut params = [Matrix::default(); MATRICES_MAX];
            for ((param, matrix), out) in params.iter_mut().zip(matrices).zip(outputs) {
                end += matrix.n.div_ceil(tiling.columns);
                *param = Matrix {
                    weight: at.read(&matrix.weight),
                    bias: matrix.bias.as_ref().map_or(0, |bias| at.read(bias)),
                    out: at.write(out),
                    n: matrix.n as i32,
                    end: end as i32,
                };
            }
            let [first, second, third] = params;
            Params { x: at.read(x), first, second, third, rows: rows as i32, k: k as i32 }
        })
    }
}
