//! Dense products by cuBLASLt, `x · W + b` by one algorithm whatever the number of rows, for which `gpu-check` has shown that a
//! row's bits are its own ([`crate::ops::dense_record`]).
//!
//! What lies row by row is, column by column, transposed: the library is asked for `yᵀ = Wᵀ · xᵀ`. Without a bias it rounds its f32
//! sums to bf16 itself; with one, which is f32, it adds that to the sums and they are rounded after it. It gets no workspace,
//! in which a sum could be made of parts.

use super::arguments::{Op, output};
use super::launch::Addresses;
use crate::ops::dense_record::{DenseShape, LtAlgorithm, ROWS_MAX};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaView, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage, WrapErr};
use candle_core::{DType, Device, Error, Layout, Result, Shape, bail};
use half::bf16;
use std::ffi::c_void;
use std::sync::Arc;

/// Algorithms that are asked for at a time.
const PROPOSALS_MAX: usize = 16;
/// What every operand's address is a multiple of, as that of own kernels' rows.
const ALIGNMENT: u64 = 16;

fn told<T>(result: std::result::Result<T, result::CublasError>) -> Result<T> {
    result.map_err(|error| Error::Msg(format!("cuBLASLt: {:?}", error.0)))
}

/// The library on one GPU.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    context: Arc<CudaContext>,
}

// SAFETY: the library lets several threads use a handle at a time.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// Opens it on `device`.
    ///
    /// # Errors
    /// The library's.
    pub fn open(device: &Device) -> Result<Arc<Self>> {
        let context = device.as_cuda_device()?.cuda_stream().context().clone();
        context.bind_to_thread().w()?;
        Ok(Arc::new(Self { handle: told(result::create_handle())?, context }))
    }

    /// The library's version.
    pub fn version() -> u64 {
        // SAFETY: it takes nothing.
        unsafe { sys::cublasLtGetVersion() as u64 }
    }

    /// The algorithms that the library would take for `rows` rows, the one that it thinks fastest first.
    ///
    /// # Errors
    /// The library's, but for its having none.
    pub fn proposed(&self, shape: DenseShape, rows: usize) -> Result<Vec<LtAlgorithm>> {
        self.context.bind_to_thread().w()?;
        // The bias's address is looked at for its alignment alone.
        let problem = Problem::new(shape, rows, ALIGNMENT)?;
        let preference = Owned(told(result::create_matmul_pref())?, result::destroy_matmul_pref);
        let workspace = 0u64;
        type Key = sys::cublasLtMatmulPreferenceAttributes_t;
        // SAFETY: the numbers live past the calls and have the sizes told.
        unsafe {
            let key = Key::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            told(result::set_matmul_pref_attribute(preference.0, key, (&raw const workspace).cast(), 8))?;
            for key in [
                Key::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Key::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Key::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Key::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                let bytes = ALIGNMENT as u32;
                told(result::set_matmul_pref_attribute(preference.0, key, (&raw const bytes).cast(), 4))?;
            }
        }
        // SAFETY: plain numbers, of which zeros are some; no more are written than there is room for.
        let (mut found, mut count) =
            ([unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; PROPOSALS_MAX], 0);
        let Problem { description, weight, x, y } = &problem;
        // SAFETY: all descriptions live past the call.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                weight.0,
                x.0,
                y.0,
                y.0,
                preference.0,
                PROPOSALS_MAX as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(vec![]);
        }
        told(status.result())?;
        let usable = |found: &&sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize == 0
        };
        let found = found.iter().take(count as usize).filter(usable);
        Ok(found.map(|found| LtAlgorithm(found.algo.data)).collect())
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // Nothing could be done about an error.
        let _ = self.context.bind_to_thread();
        // SAFETY: nobody else has it any more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// What the library made for a call.
struct Owned<T: Copy>(T, unsafe fn(T) -> std::result::Result<(), result::CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: it was made by the library, and is dropped once.
        let _ = unsafe { (self.1)(self.0) };
    }
}

/// A product as the library is told of it.
struct Problem {
    description: Owned<sys::cublasLtMatmulDesc_t>,
    weight: Owned<sys::cublasLtMatrixLayout_t>,
    x: Owned<sys::cublasLtMatrixLayout_t>,
    y: Owned<sys::cublasLtMatrixLayout_t>,
}

impl Problem {
    fn new(DenseShape { k, n, bias: biased }: DenseShape, rows: usize, bias: u64) -> Result<Self> {
        let (sums, numbers) = (sys::cudaDataType_t::CUDA_R_32F, sys::cudaDataType_t::CUDA_R_16BF);
        let description =
            told(result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sums))?;
        let description = Owned(description, result::destroy_matmul_desc);
        if biased {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            type Key = sys::cublasLtMatmulDescAttributes_t;
            let set = |key, value: *const c_void, bytes| {
                // SAFETY: the values live past the call and have the sizes told.
                told(unsafe { result::set_matmul_desc_attribute(description.0, key, value, bytes) })
            };
            set(Key::CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const epilogue).cast(), size_of_val(&epilogue))?;
            set(Key::CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const bias).cast(), size_of_val(&bias))?;
        }
        let layout = |kind, width: usize, rows: usize| {
            let made = result::create_matrix_layout(kind, width as u64, rows as u64, width as i64);
            told(made).map(|made| Owned(made, result::destroy_matrix_layout))
        };
        let of_y = if biased { sums } else { numbers };
        Ok(Self {
            description,
            weight: layout(numbers, n, k)?,
            x: layout(numbers, k, rows)?,
            y: layout(of_y, n, rows)?,
        })
    }
}

/// A product that one of the library's algorithms makes.
#[derive(Clone)]
pub struct LtProduct {
    library: Arc<CublasLt>,
    shape: DenseShape,
    algorithm: LtAlgorithm,
}

impl LtProduct {
    pub fn new(library: &Arc<CublasLt>, shape: DenseShape, algorithm: LtAlgorithm) -> Self {
        Self { library: library.clone(), shape, algorithm }
    }

    /// Launches it for the rows of `x`, [`ROWS_MAX`] at a time, for no more were shown to leave a row its bits.
    fn launch<T: CudaDType + DeviceRepr>(
        &self,
        device: &CudaDevice,
        [x, weight]: [&CudaView<bf16>; 2],
        bias: Option<&CudaView<f32>>,
        rows: usize,
    ) -> Result<CudaStorage> {
        let DenseShape { k, n, .. } = self.shape;
        let mut out = output::<T>(device, rows * n)?;
        let stream = device.cuda_stream();
        self.library.context.bind_to_thread().w()?;
        let mut at = Addresses::new(&stream);
        let (x, weight, bias) = (at.read(x), at.read(weight), bias.map_or(0, |bias| at.read(bias)));
        let y = at.write(&mut out);
        if [x, weight, bias, y].iter().any(|address| address % ALIGNMENT != 0) {
            bail!(
                "cuBLASLt: an operand's address is no multiple of {ALIGNMENT}; call force_contiguous() first"
            );
        }
        for first in (0..rows).step_by(ROWS_MAX) {
            let count = ROWS_MAX.min(rows - first);
            let problem = Problem::new(self.shape, count, bias)?;
            let (x, y) =
                (x + (first * k * size_of::<bf16>()) as u64, y + (first * n * size_of::<T>()) as u64);
            let (one, zero) = (1f32, 0f32);
            let algorithm = sys::cublasLtMatmulAlgo_t { data: self.algorithm.0 };
            // SAFETY: the memory lives past the launch and has the sizes told; the library keeps nothing of the descriptions.
            let done = unsafe {
                result::matmul(
                    self.library.handle,
                    problem.description.0,
                    (&raw const one).cast(),
                    (&raw const zero).cast(),
                    weight as *const c_void,
                    problem.weight.0,
                    x as *const c_void,
                    problem.x.0,
                    y as *const c_void,
                    problem.y.0,
                    y as *mut c_void,
                    problem.y.0,
                    &raw const algorithm,
                    std::ptr::null_mut(),
                    0,
                    stream.cu_stream().cast(),
                )
            };
            done.map_err(|error| {
                Error::Msg(format!(
                    "cuBLASLt does not take the recorded algorithm for {count} rows of {} ({:?}); compute with \
                     model.dense_products = \"own\"",
                    self.shape, error.0
                ))
            })?;
        }
        drop(at);
        Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
    }
}

/// A storage as candle lends it.
type Lent<'a> = (&'a CudaStorage, &'a Layout);

/// `x · W + b`, `[T, out]` in bf16, by `product`.
pub(in crate::ops) fn lt_forward(
    op: &'static str,
    product: &LtProduct,
    x: Lent,
    weight: Lent,
    bias: Option<Lent>,
) -> Result<(CudaStorage, Shape)> {
    let (op, DenseShape { k, n, bias: biased }) = (Op(op), product.shape);
    let rows = x.1.shape().dims2()?.0;
    op.check("x", x, DType::BF16, &[rows, k])?;
    op.check("the weight", weight, DType::BF16, &[k, n])?;
    if biased != bias.is_some() {
        bail!("{}: an algorithm for {}, and {} bias", op.0, product.shape, if biased { "no" } else { "a" });
    }
    let (device, shape) = (x.0.device(), Shape::from((rows, n)));
    if rows == 0 {
        return Ok((CudaStorage::wrap_cuda_slice(output::<bf16>(device, 0)?, device.clone()), shape));
    }
    let operands = [&op.view::<bf16>(x.0, x.1)?, &op.view::<bf16>(weight.0, weight.1)?];
    let y = match bias {
        None => product.launch::<bf16>(device, operands, None, rows)?,
        Some(bias) => {
            op.check("the bias", bias, DType::F32, &[n])?;
            let bias = op.view::<f32>(bias.0, bias.1)?;
            let sums = product.launch::<f32>(device, operands, Some(&bias), rows)?;
            sums.to_dtype(&Layout::contiguous(shape.clone()), DType::BF16)?
        }
    };
    Ok((y, shape))
}
