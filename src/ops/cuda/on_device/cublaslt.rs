//! Products by cuBLASLt's algorithms: values beside the CPU's, a row's bits at every number of rows by one that keeps the order of
//! additions and not by one that chooses it by their number, gradients that are those of the program's own kernels.

use super::{assert_refused, assert_rounded, differentiated, floats, learning, numbers, up};
use crate::ops::cuda::{CublasLt, LtProduct, open};
use crate::ops::dense_record::{DenseShape, LtAlgorithm, ROWS_MAX};
use crate::ops::{self, Parameter, linear_by};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

const SHAPES: [DenseShape; 2] =
    [DenseShape { k: 72, n: 24, bias: true }, DenseShape { k: 40, n: 136, bias: false }];

/// The algorithms that the library proposes; the emulated one's last adds in the order of k.
fn proposed(gpu: &Device, shape: DenseShape) -> Vec<LtProduct> {
    let library = CublasLt::open(gpu).unwrap();
    let proposed = library.proposed(shape, 16).unwrap();
    assert!(!proposed.is_empty());
    proposed.into_iter().map(|algorithm| LtProduct::new(&library, shape, algorithm)).collect()
}

fn parameters(gpu: &Device, shape: DenseShape) -> (Parameter, Option<Parameter>) {
    let bias = numbers(4, 1, shape.n, 1.0).flatten_all().unwrap().to_device(gpu).unwrap();
    let weight = up(&numbers(3, shape.k, shape.n, 0.3), gpu);
    (Parameter::frozen(&weight), shape.bias.then(|| Parameter::frozen(&bias)))
}

#[test]
fn an_algorithm_gives_the_cpus_values() {
    let gpu = open(0).unwrap();
    for shape in SHAPES {
        let (w, b) = (numbers(3, shape.k, shape.n, 0.3), numbers(4, 1, shape.n, 1.0).flatten_all().unwrap());
        let (w, b) = (Parameter::frozen(&w), shape.bias.then(|| Parameter::frozen(&b)));
        let (weight, bias) = parameters(&gpu, shape);
        for rows in [1, 7, 130] {
            let x = numbers(1, rows, shape.k, 1.0);
            let exact = ops::linear(&x, &w, b.as_ref()).unwrap();
            let product = proposed(&gpu, shape).remove(2);
            let y = linear_by(&up(&x, &gpu), &weight, bias.as_ref(), &product).unwrap();
            assert_eq!(y.dtype(), DType::BF16);
            assert_rounded(&y, &exact, 1e-4);
        }
    }
}

/// Rows, beyond what one call takes, and how many of their values differ from those of other numbers of rows.
fn changed(gpu: &Device, shape: DenseShape, product: &LtProduct) -> usize {
    let all = ROWS_MAX + 9;
    let (weight, bias) = parameters(gpu, shape);
    let x = up(&numbers(1, all, shape.k, 1.0), gpu);
    let of = |first: usize, rows: usize| {
        let x = x.narrow(0, first, rows).unwrap();
        floats(&linear_by(&x, &weight, bias.as_ref(), product).unwrap())
    };
    let whole = of(0, all);
    let stretches = [(0, 1500), (1, 2500), (3, ROWS_MAX), (ROWS_MAX, 9), (all - 1, 1)];
    let differ = stretches.map(|(first, rows)| {
        let same = &whole[first * shape.n..(first + rows) * shape.n];
        of(first, rows).iter().zip(same).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
    });
    differ.iter().sum()
}

#[test]
fn a_row_has_its_bits_by_the_last_algorithm_alone() {
    let gpu = open(0).unwrap();
    for shape in SHAPES {
        let proposed = proposed(&gpu, shape);
        let changed: Vec<usize> = proposed.iter().map(|product| changed(&gpu, shape, product)).collect();
        assert!(changed[..2].iter().all(|&changed| changed > 0) && changed[2] == 0, "{shape}: {changed:?}");
    }
}

#[test]
fn gradients_are_those_of_the_own_kernels() {
    let gpu = open(0).unwrap();
    for shape in SHAPES {
        let DenseShape { k, n, bias } = shape;
        let (x, dy) = (up(&numbers(1, 5, k, 1.0), &gpu), up(&numbers(2, 5, n, 1.0), &gpu));
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &gpu).unwrap();
        let product = proposed(&gpu, shape).remove(0);
        let gradients = [true, false].map(|by_product| {
            let (w, dw) = learning(&up(&numbers(3, k, n, 0.3), &gpu), &zeros(&[k, n]));
            let b = numbers(4, 1, n, 1.0).flatten_all().unwrap().to_device(&gpu).unwrap();
            let (b, db) = learning(&b, &zeros(&[n]));
            let added = bias.then_some(&b);
            let (_, dx) = differentiated(&[&x], &dy, |x| match by_product {
                true => linear_by(x[0], &w, added, &product),
                false => ops::linear(x[0], &w, added),
            });
            [floats(&dx[0]), floats(&dw), floats(&db)]
        });
        assert_eq!(gradients[0], gradients[1]);
    }
}

#[test]
fn what_does_not_fit_is_refused_and_no_rows_are_no_launch() {
    let gpu = open(0).unwrap();
    let [biased, bare] = SHAPES;
    let (weight, bias) = parameters(&gpu, biased);
    let product = proposed(&gpu, biased).remove(2);
    let x = up(&numbers(1, 3, biased.k, 1.0), &gpu);
    let none = x.narrow(0, 0, 0).unwrap();
    assert_eq!(linear_by(&none, &weight, bias.as_ref(), &product).unwrap().dims(), [0, biased.n]);
    let said = "an algorithm for [M, 72] · [72, 24] + bias, and no bias";
    assert_refused(linear_by(&x, &weight, None, &product), said);
    let (other, _) = parameters(&gpu, bare);
    let x = up(&numbers(1, 3, bare.k, 1.0), &gpu);
    let said = "linear: x has shape [3, 40], expected [3, 72]";
    assert_refused(linear_by(&x, &other, None, &product), said);
    let library: Arc<CublasLt> = CublasLt::open(&gpu).unwrap();
    assert_eq!(CublasLt::version(), 130_000);
    assert_eq!(library.proposed(bare, 1).unwrap().len(), 3);
    assert!(!library.proposed(bare, 1).unwrap().contains(&LtAlgorithm([0; 8])));
}
