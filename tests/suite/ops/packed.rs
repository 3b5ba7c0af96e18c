//! Products with packed weights give the bits of products with the decoded ones.

use super::*;
use half::bf16;
use rand::RngCore;
use rloss::ops::mxfp4::BLOCK;
use rloss::ops::packed_weights::{PackedFormat, PackedMatrix, StoredRows};
use rloss::ops::product::{GemmThreads, StridedMatrix, forward_product, product};
use std::convert::Infallible;

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Problem, &[]);
    (0..len).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

fn packed(format: PackedFormat, shape: [usize; 3], seed: u64) -> PackedMatrix {
    let [experts, input, output] = shape;
    let mut rng = stream(seed, Purpose::Initialisation, &[]);
    match format {
        PackedFormat::Bf16 | PackedFormat::Bf16Rows => {
            // As a linear layer is stored: [out, in].
            let stored: Vec<bf16> =
                noise(experts * input * output, seed).into_iter().map(bf16::from_f32).collect();
            let read = |rows: StoredRows| {
                let start = (rows.expert * output + rows.columns.start) * input;
                let values = stored[start..].iter().flat_map(|value| value.to_le_bytes());
                rows.values.iter_mut().zip(values).for_each(|(to, byte)| *to = byte);
                Ok::<_, Infallible>(())
            };
            let Ok(packed) = PackedMatrix::read(format, shape, read);
            let decoded = packed.decode().unwrap();
            for (at, value) in stored.iter().enumerate().step_by(11) {
                let (expert, column, k) = (at / (input * output), at / input % output, at % input);
                assert_eq!(decoded[(expert * input + k) * output + column], value.to_f32());
            }
            packed
        }
        PackedFormat::Mxfp4 => {
            let mut blocks = vec![0u8; experts * input * output / 2];
            rng.fill_bytes(&mut blocks);
            let scales: Vec<u8> =
                (0..experts * input / BLOCK * output).map(|_| rng.random_range(118..126)).collect();
            let packed = PackedMatrix::from_mxfp4(&blocks, &scales, shape);
            let expected = rloss::ops::mxfp4::decode(&blocks, &scales, shape);
            assert!(same(&packed.decode().unwrap(), &expected), "{shape:?} decodes otherwise");
            packed
        }
        PackedFormat::Blocks(_) | PackedFormat::BlockRows(_) => unreachable!("see blocks.rs"),
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn shapes() -> Vec<(PackedFormat, usize, usize)> {
    let mut shapes = vec![];
    for n in [2, 3, 17, 63, 64, 65, 100, 129, 513, 600] {
        for k in [1, 2, 3, 36, 64, 511, 512, 513, 514, 515, 1030] {
            shapes.push((PackedFormat::Bf16, k, n));
        }
        for k in [32, 64, 512, 544, 1056] {
            shapes.push((PackedFormat::Mxfp4, k, n));
        }
    }
    shapes
}

fn pools() -> Vec<rayon::ThreadPool> {
    [1, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap()).into()
}

#[test]
fn the_forward_has_the_bits_of_the_decoded_matrix() {
    let pools = pools();
    for (format, k, n) in shapes() {
        let matrix = packed(format, [1, k, n], (k * 1000 + n) as u64);
        let decoded = matrix.decode().unwrap();
        for m in [1, 2, 3, 5, 6, 7, 13, 16, 17, 40] {
            let (x, bias) = (noise(m * k, 3), noise(m * n, 5));
            for accumulate in [false, true] {
                let mut expected = bias.clone();
                forward_product(GemmThreads::Pool, &mut expected, &x, &decoded, (m, k, n), accumulate);
                for pool in &pools {
                    let mut out = bias.clone();
                    pool.install(|| matrix.forward(0, &mut out, &x, accumulate).unwrap());
                    assert!(same(&out, &expected), "{format:?} m {m} k {k} n {n}");
                }
            }
        }
    }
}

#[test]
fn the_gradient_to_the_input_has_the_bits_of_the_decoded_matrix() {
    let pools = pools();
    for (format, k, n) in shapes() {
        let matrix = packed(format, [1, k, n], (k * 1000 + n) as u64);
        let decoded = matrix.decode().unwrap();
        for m in [1, 2, 7, 40] {
            let dy = noise(m * n, 3);
            for pool in &pools {
                let (mut dx, mut expected) = (vec![0f32; m * k], vec![0f32; m * k]);
                pool.install(|| {
                    product(
                        GemmThreads::Pool,
                        &mut expected,
                        StridedMatrix::row_major(&dy, n),
                        StridedMatrix::column_major(&decoded, n),
                        (m, n, k),
                        false,
                    );
                    matrix.input_gradient(0, &mut dx, &dy).unwrap();
                });
                assert!(same(&dx, &expected), "{format:?} m {m} k {k} n {n}");
            }
        }
    }
}

#[test]
fn experts_multiply_their_own_rows() {
    for format in [PackedFormat::Bf16, PackedFormat::Mxfp4] {
        let (k, n) = (64, 100);
        let matrix = packed(format, [5, k, n], 1);
        let decoded = matrix.decode().unwrap();
        let groups = [(0, 0..1), (2, 1..1), (3, 1..20), (4, 20..26)];
        let (x, mut expected) = (noise(26 * k, 2), noise(26 * n, 3));
        let mut out = expected.clone();
        matrix.forward_grouped(&mut out, &x, &groups, true).unwrap();
        for (expert, rows) in groups {
            let weight = &decoded[expert * k * n..(expert + 1) * k * n];
            let (x, out) = (&x[rows.start * k..rows.end * k], &mut expected[rows.start * n..rows.end * n]);
            forward_product(GemmThreads::Pool, out, x, weight, (rows.len(), k, n), true);
        }
        assert!(same(&out, &expected), "{format:?}");
    }
}

/// The released widths: hidden 2880, whose last chunk of k is 320, and the router's 32 columns.
#[test]
fn the_released_widths() {
    for (format, k, n) in
        [(PackedFormat::Mxfp4, 2880, 1152), (PackedFormat::Bf16, 2880, 32), (PackedFormat::Bf16, 2880, 512)]
    {
        let matrix = packed(format, [1, k, n], 9);
        let decoded = matrix.decode().unwrap();
        for m in [1, 4, 16, 70] {
            let x = noise(m * k, m as u64);
            let (mut out, mut expected) = (vec![0f32; m * n], vec![0f32; m * n]);
            matrix.forward(0, &mut out, &x, false).unwrap();
            forward_product(GemmThreads::Pool, &mut expected, &x, &decoded, (m, k, n), false);
            assert!(same(&out, &expected), "{format:?} m {m} k {k} n {n}");
        }
    }
}
