//! Products with packed weights at the released width, against the best rates of the machine in the same
//! run. Decode: bytes per second of products of one and sixteen rows against a plain read of memory.
//! Prefill: against the `gemm` crate's best rate. `cargo bench --bench packed`.

mod machine;
mod timing;

use candle_core::{Device, Tensor};
use machine::{least, product_rate, read_rate};
use rayon::prelude::*;
use rloss::ops::packed_weights::{BlockType, PackedFormat, PackedMatrix, StoredRows};
use rloss::ops::product::Precision;
use rloss::ops::weight::Weight;
use std::convert::Infallible;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use timing::medians;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn matrix(format: PackedFormat, shape: [usize; 3]) -> PackedMatrix {
    let fill = |rows: StoredRows| {
        // bf16 of small magnitude, or nibbles at a scale near 2^-7.
        let pattern = if format == PackedFormat::Bf16 { [0x12, 0x3c] } else { [0x5a, 0xc3] };
        rows.values.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern[i % 2]);
        rows.scales.fill(120);
        Ok::<_, Infallible>(())
    };
    let Ok(matrix) = PackedMatrix::read(format, shape, fill);
    matrix
}

/// Measures the products of one decode step with `m` rows by the given experts.
fn decode(name: &str, matrix: &PackedMatrix, experts: &[usize], m: usize, read: f64) {
    let [all, k, n] = matrix.shape();
    let bytes = matrix.size_bytes() / all * experts.len();
    let groups: Vec<(usize, Range<usize>)> =
        experts.iter().enumerate().map(|(at, expert)| (*expert, at * m..(at + 1) * m)).collect();
    let x = vec![0.5f32; experts.len() * m * k];
    let mut out = vec![0f32; experts.len() * m * n];
    // Reads other memory between the rounds, so that no cache holds the matrix.
    let seconds = (0..7)
        .map(|_| {
            let other = vec![1u8; 256 << 20];
            black_box(other.par_iter().map(|byte| u64::from(*byte)).sum::<u64>());
            let start = Instant::now();
            matrix.forward_grouped(black_box(&mut out), &x, &groups, false).unwrap();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    let rate = bytes as f64 / seconds;
    println!("{name:<34} {m:>5} {:>10.1} {:>9.2} {:>12.2}", bytes as f64 / 1e6, rate / 1e9, rate / read);
}

fn prefill(name: &str, matrix: &PackedMatrix, m: usize, library: f64) {
    let [experts, k, n] = matrix.shape();
    let groups: Vec<(usize, Range<usize>)> =
        (0..experts).map(|expert| (expert, expert * m..(expert + 1) * m)).collect();
    let x = vec![0.5f32; experts * m * k];
    let mut out = vec![0f32; experts * m * n];
    let seconds = least(3, || matrix.forward_grouped(black_box(&mut out), &x, &groups, false).unwrap());
    let rate = (experts * m * k * n) as f64 / seconds;
    println!("{name:<34} {m:>5} {:>10} {:>9.1} {:>12.2}", "", 2.0 * rate / 1e9, rate / library);
}

/// Measures products by blocks against those by the decoded matrix, as decode has them: with bf16 products, by
/// its bf16 copy.
fn blocks() {
    let shape @ [_, k, n] = [1, 1536, 8960];
    println!(
        "{:<8} {:<8} {:>5} {:>12} {:>12} {:>7}",
        "blocks", "products", "rows", "Gw/s packed", "decoded", "ratio"
    );
    let kinds = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q4K,
        BlockType::Q5K,
        BlockType::Q6K,
    ];
    for kind in kinds {
        let Ok(matrix) = PackedMatrix::read(PackedFormat::Blocks(kind), shape, |rows: StoredRows| {
            rows.values.iter_mut().enumerate().for_each(|(i, byte)| *byte = [0x5a, 0x23, 0x17][i % 3]);
            Ok::<_, Infallible>(())
        });
        let decoded = Tensor::from_vec(matrix.decode().unwrap(), (k, n), &Device::Cpu).unwrap();
        let matrix = Arc::new(matrix);
        for precision in [Precision::F32, Precision::Bf16Dot].into_iter().filter(|of| of.is_supported()) {
            let weights = [Weight::Packed(matrix.clone()), Weight::dense(&decoded)]
                .map(|w| w.with_precision(precision));
            let weights = weights.map(Weight::with_bf16_copies);
            for m in [1, 8, 32, 64] {
                let x = Tensor::full(0.5f32, (m, k), &Device::Cpu).unwrap();
                let other = vec![1u8; 64 << 20];
                let (packed, dense) = medians(
                    9,
                    || black_box(other.par_iter().map(|byte| u64::from(*byte)).sum::<u64>()),
                    |second, _| drop(black_box(weights[usize::from(second)].matmul(&x, None).unwrap())),
                );
                let rate = |seconds: f64| (k * n) as f64 / seconds / 1e9;
                println!(
                    "{:<8} {:<8} {m:>5} {:>12.1} {:>12.1} {:>7.2}",
                    format!("{kind:?}"),
                    if precision == Precision::F32 { "f32" } else { "bf16" },
                    rate(packed),
                    rate(dense),
                    dense / packed
                );
            }
        }
    }
}

fn main() {
    blocks();
    let (h, v) = (2880, 201_088);
    let gate_up = matrix(PackedFormat::Mxfp4, [8, h, 2 * h]);
    let down = matrix(PackedFormat::Mxfp4, [8, h, h]);
    let (q, o) = (matrix(PackedFormat::Bf16, [1, h, 4096]), matrix(PackedFormat::Bf16, [1, 4096, h]));
    let head = matrix(PackedFormat::Bf16, [1, h, v]);
    let read = read_rate();
    println!("memory is read at {:.2} GB/s by {} threads", read / 1e9, rayon::current_num_threads());
    println!("{:<34} {:>5} {:>10} {:>9} {:>12}", "decode", "rows", "MB", "GB/s", "of the read");
    for m in [1, 4, 16] {
        decode("experts' gate_up, 4 of them", &gate_up, &[0, 2, 5, 7], m, read);
        decode("experts' down, 4 of them", &down, &[0, 2, 5, 7], m, read);
        decode("attention's q", &q, &[0], m, read);
        decode("attention's o", &o, &[0], m, read);
        decode("head", &head, &[0], m, read);
    }
    let library = product_rate();
    println!("the library's best rate: {:.1} GFLOP/s", 2.0 * library / 1e9);
    println!(
        "{:<34} {:>5} {:>10} {:>9} {:>12}",
        "prefill of 512 tokens", "rows", "", "GFLOP/s", "of the best"
    );
    prefill("experts' gate_up, 8 by 64 rows", &gate_up, 64, library);
    prefill("experts' down, 8 by 64 rows", &down, 64, library);
    prefill("attention's q", &q, 512, library);
    prefill("attention's o", &o, 512, library);
    drop((gate_up, down, q, o));
    prefill("head, 83 rows a chunk", &head, 83, library);
}
