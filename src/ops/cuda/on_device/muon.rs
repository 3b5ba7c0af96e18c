//! Tests of Muon on a GPU or the emulated driver. Momentum and matrices of zeros have the CPU's bits. Updates
//! are as close to the CPU's as the author's bf16 code is.

use super::{assert_refused, floats, numbers};
use crate::ops::cuda::muon::muon_in_parts;
use crate::ops::cuda::open;
use crate::ops::muon::{COEFFICIENTS, ITERATIONS, Muon, muon};
use candle_core::{DType, Device, Result, Tensor};

const STEP: Muon = Muon { shrink: 0.98, rate: 0.1, momentum: 0.9, one_minus_momentum: 0.1 };

/// Returns f32 numbers that bf16 cannot represent.
fn wide(seed: u64, shape: &[usize]) -> Tensor {
    let values = numbers(seed, 1, shape.iter().product(), 1.0).reshape(shape).unwrap();
    (values / 3.0).unwrap()
}

fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

fn distance(x: &[f32], y: &[f32]) -> f64 {
    norm(&x.iter().zip(y).map(|(x, y)| x - y).collect::<Vec<_>>())
}

/// Returns weights and momentum after two updates.
fn updated(device: &Device, [weights, momentum, one, other]: &[Tensor; 4]) -> [Tensor; 2] {
    let copy = |x: &Tensor| x.copy().unwrap().to_device(device).unwrap();
    let state = [copy(weights), copy(momentum)];
    for gradient in [one, other] {
        muon(&state[0], &state[1], &copy(gradient), &STEP).unwrap();
    }
    state
}

/// Orthogonalises a matrix as the author's code does: each operation is rounded to bf16.
fn reference(matrix: &Tensor) -> Result<Tensor> {
    let (rows, columns) = matrix.dims2()?;
    if rows > columns {
        return reference(&matrix.t()?.contiguous()?)?.t()?.contiguous();
    }
    let round = |x: Tensor| x.to_dtype(DType::BF16)?.to_dtype(DType::F32);
    let [a, b, c] = COEFFICIENTS.map(f64::from);
    let rounded = round(matrix.clone())?;
    let norm = norm(&floats(&rounded)) + 1e-7;
    let mut x = round((rounded / norm)?)?;
    for _ in 0..ITERATIONS {
        let gram = round(x.matmul(&x.t()?.contiguous()?)?)?;
        let square = round(gram.matmul(&gram)?)?;
        let polynomial = round((round((gram * b)?)? + round((square * c)?)?)?)?;
        x = round((round((&x * a)?)? + round(polynomial.matmul(&x)?)?)?)?;
    }
    Ok(x)
}

/// The error is the distance to the CPU's f32 result, of the result's norm. The author's code rounds at more
/// places, so its error is the bound.
#[test]
fn an_update_is_as_close_to_the_cpus_as_the_authors_bf16_code() {
    let gpu = open(0).unwrap();
    for shape in [[1, 6], [5, 12], [12, 5], [64, 64], [40, 136], [136, 40], [130, 200], [200, 130]] {
        let gradient = wide(1, &shape);
        let zeros = Tensor::zeros(shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
        let step = Muon { momentum: 0.0, one_minus_momentum: 1.0, ..STEP };
        // From weights of 0, an update is a multiple of the direction.
        let update = |device: &Device| {
            let [w, m, g] = [&zeros, &zeros, &gradient].map(|x| x.copy().unwrap().to_device(device).unwrap());
            muon(&w, &m, &g, &step).unwrap();
            floats(&w)
        };
        let (found, exact) = (update(&gpu), update(&Device::Cpu));
        let rate = -step.rate_of((shape[0], shape[1])) as f32;
        let plain: Vec<f32> = floats(&reference(&gradient).unwrap()).iter().map(|x| rate * x).collect();
        let error = |x: &[f32]| distance(x, &exact) / norm(&exact);
        let (found, plain) = (error(&found), error(&plain));
        println!("muon, {shape:?}: off by {found:.1e}, the author's code by {plain:.1e}");
        assert!(found <= plain, "{shape:?}: {found:e}, {plain:e}");
    }
}

#[test]
fn the_momentum_has_the_cpus_bits_and_repeats_have_one() {
    let gpu = open(0).unwrap();
    for shape in [vec![33, 65], vec![70, 140], vec![140, 70], vec![3, 24, 40], vec![3, 40, 24], vec![2, 9, 5]]
    {
        let tensors = [1, 2, 3, 4].map(|seed| wide(seed, &shape));
        let [weights, momentum] = updated(&gpu, &tensors);
        let exact = updated(&Device::Cpu, &tensors);
        assert!(bits(&momentum) == bits(&exact[1]), "{shape:?}");
        let (found, exact, before) = (floats(&weights), floats(&exact[0]), floats(&tensors[0]));
        assert!(distance(&found, &exact) <= 0.03 * distance(&exact, &before), "{shape:?}");
        let again = updated(&gpu, &tensors);
        assert!(bits(&again[0]) == bits(&weights) && bits(&again[1]) == bits(&momentum), "{shape:?}");
    }
}

/// The bits of a matrix depend neither on the other matrices nor on the number updated at a time.
#[test]
fn each_matrix_is_updated_by_itself() {
    let gpu = open(0).unwrap();
    for shape in [[5, 24, 40], [5, 33, 9]] {
        let [weights, momentum, gradient] = [1, 2, 3].map(|seed| wide(seed, &shape));
        let by = |at_once: usize, part: Option<usize>| {
            let tensors = [&weights, &momentum, &gradient].map(|x| {
                let x = part.map_or(x.clone(), |matrix| x.get(matrix).unwrap());
                x.copy().unwrap().to_device(&gpu).unwrap()
            });
            muon_in_parts(&tensors[0], &tensors[1], &tensors[2], &STEP, at_once).unwrap();
            [bits(&tensors[0]), bits(&tensors[1])]
        };
        let all = by(5, None);
        for at_once in [1, 2] {
            assert!(by(at_once, None) == all, "{shape:?}, {at_once} at a time");
        }
        let size = shape[1] * shape[2];
        for matrix in [0, 4] {
            let [w, m] = by(1, Some(matrix));
            let place = matrix * size..(matrix + 1) * size;
            assert!(w == all[0][place.clone()] && m == all[1][place], "{shape:?}, matrix {matrix}");
        }
    }
}

#[test]
fn a_gradient_of_zeros_only_shrinks_the_weights() {
    let gpu = open(0).unwrap();
    let zeros = Tensor::zeros((40, 33), DType::F32, &gpu).unwrap();
    let before = wide(1, &[40, 33]);
    let weights = before.copy().unwrap().to_device(&gpu).unwrap();
    muon(&weights, &zeros.copy().unwrap(), &zeros, &STEP).unwrap();
    let shrunk: Vec<u32> = floats(&before).iter().map(|w| (w * STEP.shrink).to_bits()).collect();
    assert!(bits(&weights) == shrunk);
    let empty = Tensor::zeros((0, 3), DType::F32, &gpu).unwrap();
    muon(&empty, &empty.copy().unwrap(), &empty, &STEP).unwrap();
}

#[test]
fn what_an_update_by_muon_does_not_take_is_refused() {
    let gpu = open(0).unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &gpu).unwrap();
    let (x, half) = (zeros(&[2, 8], DType::F32), zeros(&[2, 8], DType::BF16));
    assert_refused(muon(&half, &x, &x, &STEP), "muon: weights [2, 8] is BF16, expected F32 on a GPU");
    assert_refused(muon(&x, &half, &x, &STEP), "the momentum [2, 8] is BF16, expected F32");
    assert_refused(muon(&x, &x, &half, &STEP), "the gradient [2, 8] is BF16, expected F32");
    assert_refused(muon(&x, &zeros(&[8, 2], DType::F32), &x, &STEP), "the momentum has shape [8, 2]");
    let vector = zeros(&[8], DType::F32);
    assert_refused(muon(&vector, &vector, &vector, &STEP), "[8] is the shape of no matrix");
    let here = Tensor::zeros((2, 8), DType::F32, &Device::Cpu).unwrap();
    assert_refused(muon(&x, &x, &here, &STEP), "is not on the GPU; call to_device first");
    assert_refused(muon(&x, &here, &x, &STEP), "is not on the GPU; call to_device first");
}
