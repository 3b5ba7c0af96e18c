//! Best rates of the machine, measured in the same run as the benchmark that refers to them.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// Size of the memory to read, bytes: larger than any cache.
const STREAMED: usize = 1 << 30;

/// Returns the seconds of the fastest of `rounds` runs.
pub fn least(rounds: usize, mut run: impl FnMut()) -> f64 {
    run();
    (0..rounds)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Returns the bytes per second that all threads of the pool read together.
pub fn read_rate() -> f64 {
    let words = vec![1u64; STREAMED / 8];
    let sum = || {
        words
            .par_chunks(1 << 16)
            .map(|part| part.iter().fold(0u64, |sum, word| sum ^ word))
            .reduce(|| 0, |a, b| a ^ b)
    };
    STREAMED as f64
        / least(5, || {
            black_box(sum());
        })
}

/// Returns the best rate of the `gemm` crate over some large products on all threads, multiply-adds per
/// second.
pub fn product_rate() -> f64 {
    let threads = rayon::current_num_threads();
    let parallelism = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    [1024usize, 1536, 2048]
        .into_iter()
        .map(|size| {
            let (a, b) = (vec![0.5f32; size * size], vec![0.25f32; size * size]);
            let mut out = vec![0f32; size * size];
            let seconds = least(4, || {
                // SAFETY: three square matrices of this size.
                unsafe {
                    let n = size as isize;
                    let (a, b) = (a.as_ptr(), b.as_ptr());
                    let out = out.as_mut_ptr();
                    gemm::gemm(
                        size,
                        size,
                        size,
                        out,
                        1,
                        n,
                        false,
                        a,
                        1,
                        n,
                        b,
                        1,
                        n,
                        1.0,
                        1.0,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
            });
            (size * size * size) as f64 / seconds
        })
        .fold(0.0, f64::max)
}
