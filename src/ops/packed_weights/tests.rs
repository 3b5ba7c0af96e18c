//! Every kind of vectors decodes and multiplies alike.

use super::*;
use crate::random::{Purpose, stream};
use rand::{Rng, RngCore};

/// Returns a random matrix `[input, output]` in `format`. Its scales include 2^-127, and some of its
/// values are subnormal.
fn matrix(format: PackedFormat, input: usize, output: usize) -> PackedMatrix {
    let mut rng = stream(7, Purpose::Initialisation, &[input as u64, output as u64]);
    let shape = [1, input, output];
    match format {
        PackedFormat::Bf16 | PackedFormat::Bf16Rows => {
            let mut value = || half::bf16::from_f32(rng.random_range(-1.0f32..1.0)).to_le_bytes();
            let stored: Vec<u8> = (0..input * output).flat_map(|_| value()).collect();
            let fill = |_, to: &mut [u8]| {
                to.copy_from_slice(&stored);
                Ok::<_, Infallible>(())
            };
            let Ok(packed) = PackedMatrix::read_columns(shape, fill);
            packed
        }
        PackedFormat::Blocks(_) | PackedFormat::BlockRows(_) => {
            unreachable!("see tests/suite/ops/blocks.rs")
        }
        PackedFormat::Mxfp4 => {
            let mut blocks = vec![0u8; input * output / 2];
            rng.fill_bytes(&mut blocks);
            let scale = |_| {
                if rng.random_bool(0.1) { rng.random_range(0..3) } else { rng.random_range(118..128) }
            };
            let scales: Vec<u8> = (0..input / BLOCK * output).map(scale).collect();
            PackedMatrix::from_mxfp4(&blocks, &scales, shape)
        }
    }
}

#[test]
fn every_kind_of_vectors_decodes_and_multiplies_alike() {
    let kinds = match VectorInstructions::detect() {
        VectorInstructions::Avx512 => {
            vec![VectorInstructions::Avx512, VectorInstructions::Avx2, VectorInstructions::Plain]
        }
        VectorInstructions::Avx2 => vec![VectorInstructions::Avx2, VectorInstructions::Plain],
        VectorInstructions::Plain => vec![VectorInstructions::Plain],
    };
    for (format, input) in [
        (PackedFormat::Bf16, 37),
        (PackedFormat::Bf16, 700),
        (PackedFormat::Mxfp4, 64),
        (PackedFormat::Mxfp4, 608),
    ] {
        // Miri is ten thousand times slower, so it tests fewer shapes.
        if cfg!(miri) && input > 64 {
            continue;
        }
        let packed = matrix(format, input, 100);
        let x: Vec<f32> = (0..7 * input).map(|i| (i % 13) as f32 * 0.25 - 1.0).collect();
        for index in 0..2 {
            let panel = packed.panel(packed.bytes().unwrap(), 0, index);
            let expected: Vec<u32> = (0..input)
                .flat_map(|k| (0..panel.columns).map(move |c| panel.value(k, c).to_bits()))
                .collect();
            let mut products: Vec<Vec<u32>> = vec![];
            for vectors in &kinds {
                let mut tile = vec![0f32; input * PANEL_COLUMNS];
                vectors.decode(panel, 0..input, &mut tile, 0, PANEL_COLUMNS);
                let found: Vec<u32> = tile
                    .chunks(PANEL_COLUMNS)
                    .flat_map(|row| row[..panel.columns].iter().map(|value| value.to_bits()))
                    .collect();
                assert!(found == expected, "{vectors:?} {format:?} {input}, panel {index}");
                let mut out = vec![0.5f32; 7 * 100];
                let place = (OutputColumns::new(&mut out, 100), index * PANEL_COLUMNS);
                if vectors.skinny_gemm(panel, (&x, input), place, true) {
                    products.push(out.iter().map(|value| value.to_bits()).collect());
                }
            }
            assert!(products.windows(2).all(|pair| pair[0] == pair[1]), "{format:?} {input}, panel {index}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "no unsafe code, and minutes")]
fn no_tile_is_a_single_column() {
    for output in 2..1200 {
        let bytes = PackedStorage::Host(Arc::new(vec![]));
        let precision = Precision::F32;
        let format = PackedFormat::Bf16;
        let packed = PackedMatrix { format, experts: 1, input: 1, output, precision, bytes };
        for count in [1, 3, TILE_PANELS] {
            let tiles: Vec<Range<usize>> = packed.tiles(count).collect();
            assert_eq!((tiles[0].start, tiles[tiles.len() - 1].end), (0, packed.panels()));
            assert!(tiles.windows(2).all(|pair| pair[0].end == pair[1].start));
            let columns =
                |tile: &Range<usize>| (tile.end * PANEL_COLUMNS).min(output) - tile.start * PANEL_COLUMNS;
            assert!(tiles.iter().all(|tile| columns(tile) > 1), "{output} columns by {count}");
        }
    }
}
