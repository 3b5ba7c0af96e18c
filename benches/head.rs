//! The language-model head at the real vocabulary size: log-probabilities and entropies of 1,024 rows,
//! forward and backward. Prints one JSON line, seconds of every round and peak memory.
//! `cargo bench --bench head -- [THREADS]`.

#[path = "../src/allocator.rs"]
mod allocator;

use candle_core::{Device, Result, Tensor, Var};
use rand::Rng;
use rloss::ops::graph::differentiate;
use rloss::ops::log_prob_and_entropy;
use rloss::ops::parameter::{GradientSink, Parameter};
use rloss::ops::weight::Weight;
use rloss::random::{Purpose, stream};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

const ROWS: usize = 1024;
const HIDDEN: usize = 64;
const VOCABULARY: usize = 201_088;
const ROUNDS: usize = 5;

/// The head's gradient buffer, one for all rounds.
struct Sum(Tensor);

impl GradientSink for Sum {
    fn add(&self, _: usize, add: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()> {
        add(&self.0)
    }
}

fn noise(shape: (usize, usize), width: f32) -> Result<Tensor> {
    let mut rng = stream(0, Purpose::Problem, &[]);
    let values: Vec<f32> = (0..shape.0 * shape.1).map(|_| rng.random_range(-width..width)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

fn main() -> Result<()> {
    allocator::retain_freed_memory();
    let threads = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(2);
    let pool =
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(candle_core::Error::wrap)?;
    let h = noise((ROWS, HIDDEN), 1.0)?;
    let w = Var::from_tensor(&noise((HIDDEN, VOCABULARY), 0.25)?)?;
    let sum = Arc::new(Sum(Tensor::zeros((HIDDEN, VOCABULARY), candle_core::DType::F32, &Device::Cpu)?));
    let head = Weight::Dense(Parameter::with_gradient_sink(w.as_tensor(), sum, 0));
    let targets = Arc::new((0..ROWS).map(|i| (i * 193 % VOCABULARY) as u32).collect());
    let gradient = Tensor::from_vec([vec![-1f32; ROWS], vec![0.0; ROWS]].concat(), (2, ROWS), &Device::Cpu)?;
    let mut seconds = vec![];
    for round in 0..=ROUNDS {
        let start = Instant::now();
        pool.install(|| -> Result<()> {
            let pass = || {
                Result::Ok(vec![(log_prob_and_entropy(&h, &head, &targets, None, 1.0)?, gradient.clone())])
            };
            black_box(differentiate(&[&h], pass)?);
            Ok(())
        })?;
        if round > 0 {
            seconds.push((start.elapsed().as_secs_f64() * 1e4).round() / 1e4);
        }
    }
    // SAFETY: the struct is plain numbers, and the call fills all of it.
    let peak = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage.ru_maxrss * 1024
    };
    println!("{}", serde_json::json!({ "peer": "rloss", "head_s": seconds, "peak_bytes": peak }));
    Ok(())
}
