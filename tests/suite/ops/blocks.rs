//! Matrices of GGUF blocks: every product and lookup by packed blocks has the bits of the decoded matrix.

use super::*;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};
use rloss::checkpoint::gguf::TensorType;
use rloss::ops::packed_weights::{BlockType, PackedFormat, PackedMatrix, packed_columns, packed_rows};
use rloss::ops::product::{GemmThreads, Precision, backward_product, forward_product};
use std::convert::Infallible;

/// Returns random stored blocks of finite values.
fn random_blocks(dtype: &TensorType, kind: BlockType, values: usize, rng: &mut SmallRng) -> Vec<u8> {
    let mut bytes = vec![0; dtype.bytes_of(values)];
    for block in bytes.chunks_exact_mut(dtype.bytes) {
        loop {
            rng.fill_bytes(block);
            // Scales of every size and sign, and often those of a real file.
            for place in [0, 2, 208].into_iter().filter(|at| at + 2 <= dtype.bytes) {
                if rng.random_bool(0.1) {
                    continue;
                }
                block[place + 1] = block[place + 1] & 0x80 | rng.random_range(0x10..0x24);
            }
            if kind.is_finite(block) {
                break;
            }
        }
    }
    bytes
}

/// Packs stored blocks `[experts, output, input]`.
fn packed(
    format: PackedFormat,
    shape: [usize; 3],
    stored: &[u8],
    row_bytes: usize,
    rows: usize,
) -> Arc<PackedMatrix> {
    let Ok(matrix) = PackedMatrix::read(format, shape, |of| {
        let start = (of.expert * rows + of.columns.start) * row_bytes;
        of.values.copy_from_slice(&stored[start..start + of.values.len()]);
        Ok::<_, Infallible>(())
    });
    Arc::new(matrix)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn types() -> impl Iterator<Item = (&'static TensorType, BlockType)> {
    TensorType::ALL.iter().filter_map(|dtype| Some((dtype, dtype.packed?)))
}

#[test]
fn products_by_blocks_have_the_bits_of_the_decoded_matrix() {
    let mut rng = SmallRng::seed_from_u64(3);
    let pools: Vec<_> =
        [1, 2, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap()).into();
    assert_eq!(types().count(), 8);
    for (dtype, kind) in types() {
        let k_unit = kind.values();
        for (k, n) in
            [(k_unit, 2), (3 * 256, 70), (512, 64), (1280, 131), (544usize.next_multiple_of(k_unit), 33)]
        {
            let stored = random_blocks(dtype, kind, k * n, &mut rng);
            let mut rows = vec![0.0; k * n];
            dtype.decode(&stored, &mut rows);
            let w: Vec<f32> = (0..k * n).map(|at| rows[at % n * k + at / n]).collect();
            let matrix = packed(PackedFormat::Blocks(kind), [1, k, n], &stored, dtype.bytes_of(k), n);
            assert_eq!(bits(&matrix.decode().unwrap()), bits(&w), "{} {k} by {n}", dtype.name);
            assert!(matrix.size_bytes() >= stored.len());
            let mut noise = |len| -> Vec<f32> { (0..len).map(|_| rng.random_range(-1f32..1.0)).collect() };
            let (x, bias, dy) = (noise(70 * k), noise(70 * n), noise(70 * n));
            for precision in [Precision::F32, Precision::Bf16Dot].into_iter().filter(|of| of.is_supported()) {
                let (matrix, config) =
                    (matrix.with_precision(precision), GemmThreads::Pool.with_precision(precision));
                for pool in &pools {
                    for m in [1, 2, 3, 7, 12, 13, 31, 64, 70] {
                        for accumulate in [false, true] {
                            let mut expected = bias[..m * n].to_vec();
                            let mut found = expected.clone();
                            pool.install(|| {
                                forward_product(
                                    config,
                                    &mut expected,
                                    &x[..m * k],
                                    &w,
                                    (m, k, n),
                                    accumulate,
                                );
                                matrix.forward(0, &mut found, &x[..m * k], accumulate).unwrap();
                            });
                            let name = dtype.name;
                            assert!(
                                bits(&found) == bits(&expected),
                                "{name} {precision:?} {m} rows, {k} by {n}"
                            );
                        }
                        let (mut expected, mut found) = (vec![0.0; m * k], vec![0.5; m * k]);
                        pool.install(|| {
                            backward_product(config, &mut expected, &dy[..m * n], &w, (m, n, k));
                            matrix.input_gradient(0, &mut found, &dy[..m * n]).unwrap();
                        });
                        assert!(
                            bits(&found) == bits(&expected),
                            "{} {precision:?} gradient, {m} rows",
                            dtype.name
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn experts_of_blocks_multiply_their_rows() {
    let mut rng = SmallRng::seed_from_u64(4);
    for (dtype, kind) in types() {
        let (experts, k, n) = (5, 256, 66);
        let stored = random_blocks(dtype, kind, experts * k * n, &mut rng);
        let matrix = packed(PackedFormat::Blocks(kind), [experts, k, n], &stored, dtype.bytes_of(k), n);
        let x: Vec<f32> = (0..640 * k).map(|_| rng.random_range(-1f32..1.0)).collect();
        let groups = [(0, 0..3), (2, 3..4), (3, 4..4), (4, 4..640)];
        let mut found = vec![0.0; 640 * n];
        matrix.forward_grouped(&mut found, &x, &groups, false).unwrap();
        for (expert, rows) in groups {
            let mut alone = vec![0.0; rows.len() * n];
            matrix.forward(expert, &mut alone, &x[rows.start * k..rows.end * k], false).unwrap();
            assert!(bits(&found[rows.start * n..rows.end * n]) == bits(&alone), "{} {expert}", dtype.name);
            let one = matrix.experts(expert..expert + 1).unwrap();
            let mut of_one = vec![0.0; rows.len() * n];
            one.forward(0, &mut of_one, &x[rows.start * k..rows.end * k], false).unwrap();
            assert!(bits(&of_one) == bits(&alone), "{} {expert}", dtype.name);
        }
    }
}

#[test]
fn lookups_in_blocks_have_the_values_of_the_file() {
    let mut rng = SmallRng::seed_from_u64(5);
    for (dtype, kind) in types() {
        let (rows, width) = (77, 512);
        let stored = random_blocks(dtype, kind, rows * width, &mut rng);
        let mut values = vec![0.0; rows * width];
        dtype.decode(&stored, &mut values);
        let table =
            packed(PackedFormat::BlockRows(kind), [1, rows, width], &stored, dtype.bytes_of(width), rows);
        let tied = packed(PackedFormat::Blocks(kind), [1, width, rows], &stored, dtype.bytes_of(width), rows);
        assert_eq!(table.shape(), [1, rows, width]);
        assert_eq!(bits(&table.decode().unwrap()), bits(&values), "{}", dtype.name);
        let ids = [76, 0, 63, 64, 3, 3];
        for precision in [Precision::F32, Precision::Bf16Dot] {
            let round = |value: f32| match precision {
                Precision::F32 => value,
                Precision::Bf16Dot => half::bf16::from_f32(value).to_f32(),
            };
            let expected: Vec<u32> = ids
                .iter()
                .flat_map(|&id| values[id as usize * width..][..width].iter().map(|v| round(*v).to_bits()))
                .collect();
            let found = packed_rows(&table.with_precision(precision), &ids).unwrap();
            assert_eq!(bits(&found.flatten_all().unwrap().to_vec1().unwrap()), expected, "{}", dtype.name);
            let found = packed_columns(&tied.with_precision(precision), &ids).unwrap();
            assert_eq!(bits(&found.flatten_all().unwrap().to_vec1().unwrap()), expected, "{}", dtype.name);
        }
        let rounded: Vec<u32> =
            values.iter().map(|value| half::bf16::from_f32(*value).to_f32().to_bits()).collect();
        assert_eq!(bits(&table.to_bf16().unwrap().decode().unwrap()), rounded, "{}", dtype.name);
    }
}
