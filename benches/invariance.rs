//! Cost of batch invariance: the invariant product against the library's default, and a training step with
//! each. Ratios of medians over interleaved rounds, one thread. `cargo bench --features bench --bench
//! invariance`.

mod models;
mod timing;

use models::{SMALL, Shape, TINY, model, sequences};
use rloss::actor::forward_backward::{ColumnLoss, Pass, PassSettings};
use rloss::actor::gradients::{self, GradientSum};
use rloss::actor::micro_batch::MicroBatch;
use rloss::actor::{Columns, PolicyColumns};
use rloss::model::forward::ForwardOptions;
use rloss::ops::product::{GemmThreads, forward_product, library_default};
use std::hint::black_box;
use std::sync::atomic::Ordering;
use timing::medians;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn products() {
    println!("{:<26} {:>14} {:>12} {:>7}", "product m x k x n", "invariant (us)", "stock (us)", "ratio");
    for (m, k, n) in [
        (1, 64, 64),
        (32, 64, 128),
        (1024, 64, 128),
        (1, 512, 512),
        (32, 512, 1024),
        (1024, 512, 1024),
        (64, 2880, 2880),
    ] {
        let (x, w) = (vec![0.5f32; m * k], vec![0.25f32; k * n]);
        let mut out = vec![0f32; m * n];
        let repeats = (200_000_000 / (m * k * n)).clamp(1, 20_000);
        let (invariant, default) = medians(
            15,
            || (),
            |is_stock, ()| {
                for _ in 0..repeats {
                    if is_stock {
                        library_default::product(black_box(&mut out), &x, &w, (m, k, n), false);
                    } else {
                        forward_product(GemmThreads::Pool, black_box(&mut out), &x, &w, (m, k, n), false);
                    }
                }
            },
        );
        let us = 1e6 / repeats as f64;
        let name = format!("{m} x {k} x {n}");
        println!("{name:<26} {:>14.2} {:>12.2} {:>7.3}", invariant * us, default * us, invariant / default);
    }
}

fn step(name: &str, shape: Shape, count: usize, length: usize, rounds: usize) {
    let (model, parameters) = model(shape);
    let batch = &MicroBatch::split(&sequences(shape.vocabulary, count, length), usize::MAX)[0];
    let settings = PassSettings {
        temperature: 1.0,
        load_balance_coefficient: 0.0,
        keeps_routed_experts: true,
        forward: ForwardOptions::default(),
    };
    let loss = |columns: &PolicyColumns| {
        Ok(PolicyColumns { log_probs: vec![-1.0; columns.log_probs.len()], ..columns.zeros() })
    };
    let (invariant, default) = medians(
        rounds,
        || (),
        |is_stock, ()| {
            library_default::USE_LIBRARY_PRODUCT.store(is_stock, Ordering::Relaxed);
            gradients::clear(&parameters).expect("gradients");
            let sum = GradientSum::new(&parameters);
            let weights = &parameters.pass_weights(Some(&sum.pass_sink(0, None))).expect("weights");
            let model = &model;
            let pass = Pass { model, weights, batch, settings, recompute_layers: true, teacher: None };
            black_box(
                pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ())
                    .expect("pass"),
            );
        },
    );
    println!("{name:<26} {:>14.1} {:>12.1} {:>7.3}", invariant * 1e3, default * 1e3, invariant / default);
}

fn main() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).stack_size(64 << 20).build().expect("pool");
    pool.install(|| {
        products();
        println!("{:<26} {:>14} {:>12} {:>7}", "training step", "invariant (ms)", "stock (ms)", "ratio");
        step("tiny, 16 x 64 tokens", TINY, 16, 64, 41);
        step("small, 4 x 128 tokens", SMALL, 4, 128, 11);
    });
}
