//! Matrix products on the GPU and their gradients. Rows `x [T, in]` are multiplied by one matrix `[in, out]`,
//! or each row by the matrix of its group in `[E, in, out]`.
//!
//! Rows, matrices and gradients of activations are bf16. Sums, biases and gradients of parameters are f32. A
//! matrix may be packed as MXFP4. The result is then bit for bit that of the decoded matrix.

use super::arguments::{Op, from_storage, output, tensor};
use super::launch::{Addresses, kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::packed_weights::PackedMatrix;
use crate::ops::sink_attention::kernels::Kernel;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaView, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::{DType, Result, Shape, Tensor, bail};
use half::bf16;

/// A tile shape of `kernels/product.cuh`, and the kernels that compute such tiles.
pub(super) struct Tiling {
    pub rows: usize,
    pub columns: usize,
    to_bf16: Kernel,
    to_f32: Kernel,
    /// The kernel that multiplies by an MXFP4 matrix. Its result is bf16.
    of_mxfp4: Kernel,
    /// The kernel that multiplies by up to three matrices.
    pub joined: Kernel,
    /// The kernels of the first half of experts, for bf16 and for MXFP4 matrices.
    pub expert_swiglu: [Kernel; 2],
}

const fn kernel(function: &'static str, threads: usize, shared_bytes: usize) -> Kernel {
    Kernel { function, file: "product", threads, shared_bytes }
}

/// Number of values of k per step of a tile.
const STEP: usize = 64;
const WIDE_BYTES: usize = 3 * (128 + 128) * STEP * 2;
const NARROW_BYTES: usize = 6 * (16 + 64) * STEP * 2;
/// Size of an MXFP4 block, in bytes. A block has 64 columns of 32 values of k: one scale per column, and two
/// values per byte.
const BLOCK_BYTES: usize = 64 * (1 + 16);
const WIDE_MXFP4_BYTES: usize = 2 * 128 * STEP * 2 + 4 * (128 * STEP * 2 + 4 * BLOCK_BYTES);
const NARROW_MXFP4_BYTES: usize = 2 * 64 * STEP * 2 + 6 * (16 * STEP * 2 + 2 * BLOCK_BYTES);
const WIDE: Tiling = Tiling {
    rows: 128,
    columns: 128,
    to_bf16: kernel("product_forward", 256, WIDE_BYTES),
    to_f32: kernel("product_forward_f32", 256, WIDE_BYTES),
    of_mxfp4: kernel("product_forward_mxfp4", 256, WIDE_MXFP4_BYTES),
    joined: kernel("product_joined", 256, WIDE_BYTES),
    expert_swiglu: [
        kernel("expert_swiglu", 256, WIDE_BYTES),
        kernel("expert_swiglu_mxfp4", 256, WIDE_MXFP4_BYTES),
    ],
};
const NARROW: Tiling = Tiling {
    rows: 16,
    columns: 64,
    to_bf16: kernel("product_forward_narrow", 128, NARROW_BYTES),
    to_f32: kernel("product_forward_narrow_f32", 128, NARROW_BYTES),
    of_mxfp4: kernel("product_forward_narrow_mxfp4", 128, NARROW_MXFP4_BYTES),
    joined: kernel("product_joined_narrow", 128, NARROW_BYTES),
    expert_swiglu: [
        kernel("expert_swiglu_narrow", 128, NARROW_BYTES),
        kernel("expert_swiglu_narrow_mxfp4", 128, NARROW_MXFP4_BYTES),
    ],
};
const INPUT_GRADIENT: Kernel = kernel("product_input_gradient", 256, WIDE_BYTES);
const INPUT_GRADIENT_MXFP4: Kernel = kernel("product_input_gradient_mxfp4", 256, WIDE_MXFP4_BYTES);
const WEIGHT_GRADIENT: Kernel = kernel("product_weight_gradient", 256, WIDE_BYTES);
const BIAS_COLUMNS: usize = 64;
const BIAS_GRADIENT: Kernel = kernel("product_bias_gradient", 512, 16 * BIAS_COLUMNS * size_of::<f32>());
/// Maximum number of rows per group for narrow tiles. Wide and narrow tiles give the same bits.
const NARROW_ROWS_MAX: usize = 64;

kernel_params! {
    /// `Product` of `kernels/product.cuh`.
    struct Params {
        x: u64,
        weight: u64,
        bias: u64,
        addend: u64,
        dy: u64,
        out: u64,
        starts: u64,
        rows: i32,
        k: i32,
        n: i32,
        groups: i32,
        scale: f32,
        residual: u64,
    }
}

/// The sizes of a product of `rows` rows by one matrix `[k, n]`, or by one such matrix per group.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub rows: usize,
    pub k: usize,
    pub n: usize,
    pub groups: usize,
    grouped: bool,
}

impl Sizes {
    /// Returns the sizes of a product by one matrix `[k, n]`, or by one such matrix per group of `starts`.
    pub fn new(op: Op, rows: usize, [k, n]: [usize; 2], starts: Option<&Tensor>) -> Result<Self> {
        let groups = starts.map_or(Ok(1), |starts| starts.dims1().map(|len| len.saturating_sub(1)))?;
        let grouped = starts.is_some();
        if [rows, k, n, groups].iter().any(|&size| size > i32::MAX as usize) {
            bail!(
                "{}: {rows} rows and {groups} matrices [{k}, {n}] are not supported on a GPU; use smaller batches",
                op.0
            );
        }
        Ok(Self { rows, k, n, groups, grouped })
    }

    pub fn matrix(&self) -> Vec<usize> {
        if self.grouped { vec![self.groups, self.k, self.n] } else { vec![self.k, self.n] }
    }

    pub fn vector(&self) -> Vec<usize> {
        if self.grouped { vec![self.groups, self.n] } else { vec![self.n] }
    }

    /// Returns the maximum number of row tiles, for any division of the rows into groups.
    pub fn row_tiles(&self, tile_rows: usize) -> usize {
        self.rows.div_ceil(tile_rows) + if self.grouped { self.groups } else { 0 }
    }

    fn params(&self) -> Params {
        let [rows, k, n, groups] = [self.rows, self.k, self.n, self.groups].map(|size| size as i32);
        Params { rows, k, n, groups, scale: 1.0, ..Params::default() }
    }

    fn is_empty(&self) -> bool {
        self.rows * self.k * self.n * self.groups == 0
    }
}

/// Returns the last two dimensions of a matrix, or of one matrix per group.
fn matrix(dims: &[usize]) -> Result<[usize; 2]> {
    match *dims {
        [k, n] | [_, k, n] => Ok([k, n]),
        _ => bail!("product: weight {dims:?} is neither a matrix nor one matrix per expert"),
    }
}

/// Calls `f` with the offsets of the groups, u32 `[E + 1]`: the first row of each group, then the number of
/// rows. Without groups, calls `f` with `None`.
pub(super) fn with_starts<R>(
    op: Op,
    starts: Option<&Tensor>,
    f: impl FnOnce(Option<&CudaView<u32>>) -> Result<R>,
) -> Result<R> {
    let Some(starts) = starts else { return f(None) };
    let opened = starts.storage_and_layout();
    f(Some(&op.open_tensor("the groups' first rows", &opened, starts.dims())?.0))
}

/// The matrices of a product, after the checks.
pub(super) enum Weight<'a> {
    Bf16(CudaView<'a, bf16>),
    Mxfp4(CudaView<'a, u8>),
}

impl<'a> Weight<'a> {
    pub fn read<'m>(&'m self, at: &mut Addresses<'_, 'm>) -> u64 {
        match self {
            Weight::Bf16(weight) => at.read(weight),
            Weight::Mxfp4(weight) => at.read(weight),
        }
    }
}

/// The epilogue of `x · W`: sums are multiplied by `scale`, then `bias` and `addend` are added. The result is
/// rounded to bf16 before `residual` is added.
pub(super) struct Epilogue<'a> {
    pub scale: f32,
    pub bias: Option<DeviceArgument<'a>>,
    /// `[T, out]`, in the output type.
    pub addend: Option<DeviceArgument<'a>>,
    /// `[T, out]`, for an output in bf16.
    pub residual: Option<DeviceArgument<'a>>,
}

impl Default for Epilogue<'_> {
    fn default() -> Self {
        Self { scale: 1.0, bias: None, addend: None, residual: None }
    }
}

/// Returns `x · W + b`, `[T, out]`. `out` is the output type: bf16, or f32 for sums that are not rounded.
pub(in crate::ops) fn product_forward(
    op: &'static str,
    x: DeviceArgument,
    weight: DeviceArgument,
    bias: Option<DeviceArgument>,
    starts: Option<&Tensor>,
    out: DType,
) -> Result<(CudaStorage, Shape)> {
    product_with_epilogue(Op(op), x, weight, starts, &Epilogue { bias, ..Epilogue::default() }, out)
}

/// Returns `residual [T, out]` plus `x · W + b`, which is rounded first.
pub(in crate::ops) fn product_and_add(
    op: &'static str,
    [x, weight, residual]: [&Tensor; 3],
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let op = Op(op);
    let opened = [x, weight, residual].map(Tensor::storage_and_layout);
    let x = op.gpu_storage("x", &opened[0], DType::BF16, x.dims())?;
    let weight = op.gpu_storage("the weight", &opened[1], DType::BF16, weight.dims())?;
    let residual = op.gpu_storage("the residual", &opened[2], DType::BF16, residual.dims())?;
    let opened = bias.map(Tensor::storage_and_layout);
    let bias = match (bias, &opened) {
        (Some(bias), Some(opened)) => Some(op.gpu_storage("the bias", opened, DType::F32, bias.dims())?),
        _ => None,
    };
    let epilogue = Epilogue { bias, residual: Some(residual), ..Epilogue::default() };
    let (storage, shape) = product_with_epilogue(op, x, weight, None, &epilogue, DType::BF16)?;
    Ok(from_storage(storage, shape))
}

/// Returns `x · W` after the epilogue `epilogue`. [`product_forward`] is the case with only a bias.
pub(super) fn product_with_epilogue(
    op: Op,
    x: DeviceArgument,
    weight: DeviceArgument,
    starts: Option<&Tensor>,
    epilogue: &Epilogue,
    out: DType,
) -> Result<(CudaStorage, Shape)> {
    let sizes = Sizes::new(op, x.1.shape().dims2()?.0, matrix(weight.1.dims())?, starts)?;
    op.check("the weight", weight, DType::BF16, &sizes.matrix())?;
    let weights = Weight::Bf16(op.view::<bf16>(weight.0, weight.1)?);
    multiply(op, sizes, x, &weights, starts, epilogue, out)
}

/// Returns `x · W + b` for an MXFP4 matrix in GPU memory, `[T, out]` in bf16.
pub(in crate::ops) fn packed_forward(
    op: &'static str,
    x: DeviceArgument,
    weight: &PackedMatrix,
    bias: Option<DeviceArgument>,
    starts: Option<&Tensor>,
) -> Result<(CudaStorage, Shape)> {
    let op = Op(op);
    let [_, k, n] = weight.shape();
    let sizes = Sizes::new(op, x.1.shape().dims2()?.0, [k, n], starts)?;
    with_packed(op, weight, |weight| {
        multiply(op, sizes, x, weight, starts, &Epilogue { bias, ..Epilogue::default() }, DType::BF16)
    })
}

/// Calls `f` with the bytes of a packed matrix in GPU memory.
pub(super) fn with_packed<R>(
    op: Op,
    weight: &PackedMatrix,
    f: impl FnOnce(&Weight) -> Result<R>,
) -> Result<R> {
    let bytes = weight.device_tensor()?;
    let opened = bytes.storage_and_layout();
    f(&Weight::Mxfp4(op.open_tensor("the packed weight", &opened, &[weight.size_bytes()])?.0))
}

fn multiply(
    op: Op,
    sizes: Sizes,
    x: DeviceArgument,
    weight: &Weight,
    starts: Option<&Tensor>,
    epilogue: &Epilogue,
    out: DType,
) -> Result<(CudaStorage, Shape)> {
    let Sizes { rows, k, n, .. } = sizes;
    op.check("x", x, DType::BF16, &[rows, k])?;
    if let Some(bias) = epilogue.bias {
        op.check("the bias", bias, DType::F32, &sizes.vector())?;
    }
    if let Some(addend) = epilogue.addend {
        op.check("what is added to", addend, out, &[rows, n])?;
    }
    if let Some(residual) = epilogue.residual {
        op.check("the residual", residual, DType::BF16, &[rows, n])?;
    }
    let tiling = tiling(rows, sizes.groups);
    let storage = with_starts(op, starts, |starts| {
        let operands = Operands { op, x, weight, starts, epilogue };
        match (weight, out) {
            (Weight::Mxfp4(_), _) => forward::<bf16>(&sizes, &operands, (tiling, &tiling.of_mxfp4)),
            (_, DType::BF16) => forward::<bf16>(&sizes, &operands, (tiling, &tiling.to_bf16)),
            _ => forward::<f32>(&sizes, &operands, (tiling, &tiling.to_f32)),
        }
    })?;
    Ok((storage, Shape::from((rows, n))))
}

/// Returns the faster tiles for `rows` rows in `groups` groups.
pub(super) fn tiling(rows: usize, groups: usize) -> &'static Tiling {
    if rows <= NARROW_ROWS_MAX * groups { &NARROW } else { &WIDE }
}

/// The inputs of a forward pass, after the checks.
struct Operands<'a> {
    op: Op,
    x: DeviceArgument<'a>,
    weight: &'a Weight<'a>,
    starts: Option<&'a CudaView<'a, u32>>,
    epilogue: &'a Epilogue<'a>,
}

fn forward<T: CudaDType + DeviceRepr + ValidAsZeroBits>(
    sizes: &Sizes,
    operands: &Operands,
    (tiling, kernel): (&Tiling, &Kernel),
) -> Result<CudaStorage> {
    let Operands { op, x, weight, starts, epilogue } = *operands;
    let device = x.0.device();
    let mut out = output::<T>(device, sizes.rows * sizes.n)?;
    if sizes.rows * sizes.n > 0 {
        let x = op.view::<bf16>(x.0, x.1)?;
        let bias = epilogue.bias.map(|(storage, layout)| op.view::<f32>(storage, layout)).transpose()?;
        let addend = epilogue.addend.map(|(storage, layout)| op.view::<T>(storage, layout)).transpose()?;
        let residual =
            epilogue.residual.map(|(storage, layout)| op.view::<bf16>(storage, layout)).transpose()?;
        let blocks = sizes.row_tiles(tiling.rows) * sizes.n.div_ceil(tiling.columns);
        // SAFETY: all buffers outlive the launch and have the sizes in `params`.
        unsafe {
            launch(device, &[(kernel, blocks)], |at| Params {
                x: at.read(&x),
                weight: weight.read(at),
                bias: bias.as_ref().map_or(0, |bias| at.read(bias)),
                addend: addend.as_ref().map_or(0, |addend| at.read(addend)),
                out: at.write(&mut out),
                starts: starts.map_or(0, |starts| at.read(starts)),
                scale: epilogue.scale,
                residual: residual.as_ref().map_or(0, |residual| at.read(residual)),
                ..sizes.params()
            })?
        };
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// Returns `dy · Wᵀ`, `[T, in]` in bf16.
pub(in crate::ops) fn product_input_gradient(
    op: &'static str,
    dy: &Tensor,
    weight: &Tensor,
    starts: Option<&Tensor>,
) -> Result<Tensor> {
    scaled_input_gradient(op, dy, weight, starts, 1.0)
}

/// Returns `scale · dy · Wᵀ`, `[T, in]` in bf16.
pub(super) fn scaled_input_gradient(
    op: &'static str,
    dy: &Tensor,
    weight: &Tensor,
    starts: Option<&Tensor>,
    scale: f32,
) -> Result<Tensor> {
    let op = Op(op);
    let sizes = Sizes::new(op, dy.dim(0)?, matrix(weight.dims())?, starts)?;
    let opened = weight.storage_and_layout();
    let weight = op.gpu_storage("the weight", &opened, DType::BF16, &sizes.matrix())?;
    let weight = Weight::Bf16(op.view(weight.0, weight.1)?);
    input_gradient(op, &sizes, dy, &weight, starts, scale)
}

/// Returns `dy · Wᵀ` for an MXFP4 matrix in GPU memory, `[T, in]` in bf16.
pub(in crate::ops) fn packed_input_gradient(
    op: &'static str,
    dy: &Tensor,
    weight: &PackedMatrix,
    starts: Option<&Tensor>,
) -> Result<Tensor> {
    let op = Op(op);
    let [_, k, n] = weight.shape();
    let sizes = Sizes::new(op, dy.dim(0)?, [k, n], starts)?;
    with_packed(op, weight, |weight| input_gradient(op, &sizes, dy, weight, starts, 1.0))
}

fn input_gradient(
    op: Op,
    sizes: &Sizes,
    dy: &Tensor,
    weight: &Weight,
    starts: Option<&Tensor>,
    scale: f32,
) -> Result<Tensor> {
    let opened = dy.storage_and_layout();
    let (dy, device) = op.open_tensor::<bf16>("the output's gradient", &opened, &[sizes.rows, sizes.n])?;
    let mut dx = output::<bf16>(device, sizes.rows * sizes.k)?;
    let kernel = match weight {
        Weight::Bf16(_) => &INPUT_GRADIENT,
        Weight::Mxfp4(_) => &INPUT_GRADIENT_MXFP4,
    };
    with_starts(op, starts, |starts| {
        if sizes.rows * sizes.k == 0 {
            return Ok(());
        }
        let blocks = sizes.row_tiles(WIDE.rows) * sizes.k.div_ceil(WIDE.columns);
        // SAFETY: all buffers outlive the launch and have the sizes in `params`.
        unsafe {
            launch(device, &[(kernel, blocks)], |at| Params {
                weight: weight.read(at),
                dy: at.read(&dy),
                out: at.write(&mut dx),
                starts: starts.map_or(0, |starts| at.read(starts)),
                scale,
                ..sizes.params()
            })
        }
    })?;
    Ok(tensor(dx, device, (sizes.rows, sizes.k)))
}

/// Adds `xᵀ · dy` to `sum` in place. Each group is summed over its own rows.
pub(in crate::ops) fn add_weight_gradient(
    op: &'static str,
    sum: &Tensor,
    x: &Tensor,
    dy: &Tensor,
    starts: Option<&Tensor>,
) -> Result<()> {
    let op = Op(op);
    let sizes = Sizes::new(op, x.dim(0)?, matrix(sum.dims())?, starts)?;
    let opened = [x, dy].map(Tensor::storage_and_layout);
    let (x, _) = op.open_tensor::<bf16>("x", &opened[0], &[sizes.rows, sizes.k])?;
    let (dy, _) = op.open_tensor::<bf16>("the output's gradient", &opened[1], &[sizes.rows, sizes.n])?;
    check_sum(op, sum, &sizes.matrix())?;
    let blocks = sizes.groups * sizes.k.div_ceil(WIDE.rows) * sizes.n.div_ceil(WIDE.columns);
    add_to(op, sum, &sizes, starts, (&WEIGHT_GRADIENT, blocks), (Some(&x), &dy))
}

/// Adds the column sums of `dy` to `sum` in place. Each group is summed over its own rows.
pub(in crate::ops) fn add_bias_gradient(
    op: &'static str,
    sum: &Tensor,
    dy: &Tensor,
    starts: Option<&Tensor>,
) -> Result<()> {
    let op = Op(op);
    let (rows, n) = dy.dims2()?;
    let sizes = Sizes::new(op, rows, [1, n], starts)?;
    let opened = dy.storage_and_layout();
    let (dy, _) = op.open_tensor::<bf16>("the output's gradient", &opened, &[rows, n])?;
    check_sum(op, sum, &sizes.vector())?;
    let blocks = sizes.groups * n.div_ceil(BIAS_COLUMNS);
    add_to(op, sum, &sizes, starts, (&BIAS_GRADIENT, blocks), (None, &dy))
}

fn check_sum(op: Op, sum: &Tensor, shape: &[usize]) -> Result<()> {
    if sum.dims() != shape {
        bail!("{}: a gradient {shape:?} for a parameter {:?}", op.0, sum.dims());
    }
    Ok(())
}

/// Launches a kernel that adds its result from `x` and `dy` to `sum`.
fn add_to(
    op: Op,
    sum: &Tensor,
    sizes: &Sizes,
    starts: Option<&Tensor>,
    (kernel, blocks): (&Kernel, usize),
    (x, dy): (Option<&CudaView<bf16>>, &CudaView<bf16>),
) -> Result<()> {
    if sizes.is_empty() {
        return Ok(());
    }
    with_starts(op, starts, |starts| {
        op.edit::<f32, _>(sum, |device, sum| {
            // SAFETY: all buffers outlive the launch and have the sizes in `params`.
            unsafe {
                launch(device, &[(kernel, blocks)], |at| Params {
                    x: x.map_or(0, |x| at.read(x)),
                    dy: at.read(dy),
                    out: at.write(sum),
                    starts: starts.map_or(0, |starts| at.read(starts)),
                    ..sizes.params()
                })
            }
        })
    })
}
