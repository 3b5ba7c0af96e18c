//! Muon on the GPU: [`crate::ops::muon::muon`] with X, A and the polynomial of A rounded to bf16, as in the
//! author's reference. All other values are f32; the momentum has the CPU's bits.
//!
//! The products need no kernels of their own: with X = f·Y for a number f,
//!
//! ```text
//! A = f²·Y·Yᵀ,   B = A + c/b·A²,   Y ← Y + b/a·B·Y,   f ← a·f
//! ```
//!
//! is the iteration `X ← a·X + (b·A + c·A²)·X`.

use super::arguments::{Op, from_storage, output, tensor};
use super::launch::{kernel_params, launch};
use super::product::{Epilogue, product_with_epilogue, scaled_input_gradient};
use crate::ops::argument::Argument;
use crate::ops::muon::{COEFFICIENTS, ITERATIONS, Muon, SQUARES_CHUNK, matrices_at_once, matrix_shape};
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use candle_core::{DType, Device, Result, Tensor};
use half::bf16;

const OP: Op = Op("muon");
const MOMENTUM: Kernel = kernel("muon_momentum", "muon", 256, 0);
const SQUARES: Kernel = Kernel { function: "muon_squares", shared_bytes: 256 * size_of::<f64>(), ..MOMENTUM };
const NORM: Kernel = Kernel { function: "muon_norm", ..SQUARES };
const DIRECTION: Kernel = Kernel {
    function: "muon_direction",
    shared_bytes: (TILE * (TILE + 1) - 1) * size_of::<f32>(),
    ..MOMENTUM
};
const UPDATE: Kernel = Kernel { function: "muon_update", ..DIRECTION };
/// Number of values whose momentum one thread updates.
const VALUES: usize = 4;
/// Number of rows and of columns that one thread block processes.
const TILE: usize = 32;

kernel_params! {
    /// `MuonMomentum` of `kernels/muon.cuh`.
    struct MomentumParams {
        momentum: u64,
        gradient: u64,
        u: u64,
        count: i64,
        decay: f32,
        one_minus_decay: f32,
    }

    /// `Muon` of `kernels/muon.cuh`.
    struct Params {
        weights: u64,
        u: u64,
        x: u64,
        parts: u64,
        factors: u64,
        rows: i32,
        columns: i32,
        shrink: f32,
        rate: f32,
    }
}

/// Updates matrices `[rows, columns]` or `[E, rows, columns]`, as [`crate::ops::muon::muon`] does.
pub(in crate::ops) fn muon(
    weights: &Tensor,
    momentum: &Tensor,
    gradient: &Tensor,
    step: &Muon,
) -> Result<()> {
    muon_in_parts(weights, momentum, gradient, step, matrices_at_once(weights.dims()))
}

/// Updates at most `at_once` matrices at a time. The bits do not depend on it.
pub(super) fn muon_in_parts(
    weights: &Tensor,
    momentum: &Tensor,
    gradient: &Tensor,
    step: &Muon,
    at_once: usize,
) -> Result<()> {
    let (matrices, (rows, columns)) = matrix_shape(weights.dims())?;
    let tensors = [("weights", weights), ("the momentum", momentum), ("the gradient", gradient)];
    for (name, x) in tensors {
        Argument { op: OP.0, name, dtype: x.dtype(), layout: x.layout() }
            .check(DType::F32, weights.dims())?;
    }
    if weights.elem_count() == 0 {
        return Ok(());
    }
    for first in (0..matrices).step_by(at_once) {
        let part = |x: &Tensor| {
            x.reshape((matrices, rows, columns))?.narrow(0, first, at_once.min(matrices - first))
        };
        let u = muon_momentum(&part(momentum)?, &part(gradient)?, step)?;
        let y = orthogonalize(direction(u)?)?;
        apply(&part(weights)?, &y, step.shrink, rate_of_y(step, (rows, columns)))?;
    }
    Ok(())
}

/// Updates the momentum. Returns u, with the shape of the momentum.
fn muon_momentum(momentum: &Tensor, gradient: &Tensor, step: &Muon) -> Result<Tensor> {
    let opened = gradient.storage_and_layout();
    let (gradient, device) = OP.open_tensor::<f32>("the gradient", &opened, momentum.dims())?;
    let count = momentum.elem_count();
    let mut u = output::<f32>(device, count)?;
    OP.edit(momentum, |device, momentum: &mut CudaViewMut<f32>| {
        // SAFETY: all three buffers outlive the launch and have `count` values.
        unsafe {
            launch(device, &[(&MOMENTUM, count.div_ceil(MOMENTUM.threads * VALUES))], |at| MomentumParams {
                momentum: at.write(momentum),
                gradient: at.read(&gradient),
                u: at.write(&mut u),
                count: count as i64,
                decay: step.momentum,
                one_minus_decay: step.one_minus_momentum,
            })
        }
    })?;
    Ok(tensor(u, device, momentum.shape()))
}

/// Returns u, divided by its norm: X, `[E, rows, columns]`, transposed for tall matrices.
fn direction(u: Tensor) -> Result<Tensor> {
    let (matrices, rows, columns) = u.dims3()?;
    let opened = u.storage_and_layout();
    let (u, device) = OP.open_tensor::<f32>("u", &opened, &[matrices, rows, columns])?;
    let chunks = matrices * (rows * columns).div_ceil(SQUARES_CHUNK);
    let mut x = output::<bf16>(device, matrices * rows * columns)?;
    let (mut parts, mut factors) = (output::<f64>(device, chunks)?, output::<f32>(device, matrices)?);
    // SAFETY: all buffers outlive the launches and have the sizes in `params`. Each launch reads what
    // the launches before it have filled.
    unsafe {
        launch(
            device,
            &[(&SQUARES, chunks), (&NORM, matrices), (&DIRECTION, tiles([matrices, rows, columns]))],
            |at| Params {
                u: at.read(&u),
                x: at.write(&mut x),
                parts: at.write(&mut parts),
                factors: at.write(&mut factors),
                rows: rows as i32,
                columns: columns as i32,
                ..Params::default()
            },
        )?
    };
    Ok(tensor(x, device, (matrices, rows.min(columns), rows.max(columns))))
}

fn tiles([matrices, rows, columns]: [usize; 3]) -> usize {
    matrices * rows.div_ceil(TILE) * columns.div_ceil(TILE)
}

/// Returns f after `iterations` iterations.
fn factor_after(iterations: usize) -> f64 {
    (0..iterations).fold(1.0, |factor, _| factor * f64::from(COEFFICIENTS[0]))
}

/// Returns the learning rate of Y, for matrices of this shape.
fn rate_of_y(step: &Muon, shape: (usize, usize)) -> f32 {
    (step.rate_of(shape) * factor_after(ITERATIONS)) as f32
}

/// Moves the singular values of each matrix close to 1. Returns Y `[E, rows, columns]` in bf16. The result is
/// f·Y.
fn orthogonalize(x: Tensor) -> Result<Tensor> {
    let (matrices, rows, columns) = x.dims3()?;
    let starts = Tensor::from_iter((0..=matrices).map(|matrix| (matrix * rows) as u32), &Device::Cpu)?;
    let starts = starts.to_device(x.device())?;
    let [a, b, c] = COEFFICIENTS.map(f64::from);
    let mut y = x;
    for iteration in 0..ITERATIONS {
        let factor = factor_after(iteration);
        let by_rows = y.reshape((matrices * rows, columns))?;
        let gram = scaled_input_gradient(OP.0, &by_rows, &y, Some(&starts), (factor * factor) as f32)?;
        let square = gram.reshape((matrices, rows, rows))?;
        let polynomial = add_product(&gram, &gram, &square, &starts, c / b)?;
        drop((gram, square));
        y = add_product(&by_rows, &polynomial, &y, &starts, b / a)?.reshape((matrices, rows, columns))?;
    }
    Ok(y)
}

/// Returns `addend + scale · x · W`, rounded once to bf16. Each matrix of `W [E, k, n]` has its own rows of
/// `x [T, k]` and of `addend [T, n]`.
fn add_product(addend: &Tensor, x: &Tensor, weight: &Tensor, starts: &Tensor, scale: f64) -> Result<Tensor> {
    let opened = [addend, x, weight].map(Tensor::storage_and_layout);
    let argument = |i: usize, name| OP.gpu_storage(name, &opened[i], DType::BF16, opened[i].1.dims());
    let (addend, x, weight) = (argument(0, "the addend")?, argument(1, "x")?, argument(2, "the matrix")?);
    let epilogue = Epilogue { scale: scale as f32, addend: Some(addend), ..Epilogue::default() };
    let (storage, shape) = product_with_epilogue(OP, x, weight, Some(starts), &epilogue, DType::BF16)?;
    Ok(from_storage(storage, shape))
}

/// Computes `w ← shrink · w − rate · X`.
fn apply(weights: &Tensor, x: &Tensor, shrink: f32, rate: f32) -> Result<()> {
    let (matrices, rows, columns) = weights.dims3()?;
    let opened = x.storage_and_layout();
    let (x, _) = OP.open_tensor::<bf16>("the direction", &opened, opened.1.dims())?;
    OP.edit(weights, |device, weights: &mut CudaViewMut<f32>| {
        // SAFETY: both buffers outlive the launch and have the sizes in `params`.
        unsafe {
            launch(device, &[(&UPDATE, tiles([matrices, rows, columns]))], |at| Params {
                weights: at.write(weights),
                x: at.read(&x),
                rows: rows as i32,
                columns: columns as i32,
                shrink,
                rate,
                ..Params::default()
            })
        }
    })
}
