//! Speed of the ops and of whole models on a GPU: `cargo bench --features cuda --bench gpu_speed -- PARTS`.
//! `scripts/gpu_check.sh` carries it to a machine without Rust and keeps its tables.

#[path = "../../src/allocator.rs"]
mod allocator;
mod attention;
mod model;
mod ops;
mod peers;
mod timing;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use rloss::bad_input;
use rloss::error::{BadInput, EXIT_BAD_INPUT, EXIT_FAILED};
use rloss::ops::cuda::{Gpu, open_gpu, unload_kernels};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
struct Arguments {
    /// Parts to run [default: speed and model]
    #[arg(value_enum, default_values = ["speed", "model"])]
    parts: Vec<Part>,
    /// Cases of toy size, with checks of the measurement itself
    #[arg(long)]
    small: bool,
    /// The most telling cases only, for a first call of minutes
    #[arg(long, conflicts_with = "small")]
    short: bool,
    /// Index of the GPU
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Times of other attention implementations, written by scripts/attention_peers.py in the same run
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Flag that cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Part {
    /// TFLOP/s and GB/s
    Speed,
    /// Launches attention and products once, for a profiler
    Profile,
    /// Tokens per second of whole models with gpt-oss-20b's shape
    Model,
}

/// The cases that a part runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// A few of toy size.
    Small,
    /// The most telling ones.
    Short,
    /// All.
    Full,
}

fn run(arguments: &Arguments) -> Result<()> {
    let peers = arguments.peers.as_deref().map(peers::read).transpose()?;
    let Gpu { device, .. } = open_gpu(arguments.device).map_err(|error| bad_input!("gpu_speed: {error}"))?;
    let gpu = device.as_cuda_device()?;
    let extent = match (arguments.small, arguments.short) {
        (true, _) => Extent::Small,
        (_, true) => Extent::Short,
        _ => Extent::Full,
    };
    for part in &arguments.parts {
        match part {
            Part::Speed => {
                attention::run(gpu, extent, peers.as_ref())?;
                ops::run(&device, arguments.small)?;
            }
            Part::Profile => {
                attention::launch_once(gpu, arguments.small)?;
                ops::launch_once(&device, arguments.small)?;
            }
            Part::Model => model::run(&device, extent)?,
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    allocator::retain_freed_memory();
    // As in the program: the elementwise ops of candle would use their own pool of threads.
    // SAFETY: no other thread is running yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    rloss::panics::install_panic_hook(EXIT_FAILED);
    let result = run(&Arguments::parse());
    unload_kernels();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            let is_bad_input = error.chain().any(|cause| cause.is::<BadInput>());
            ExitCode::from(if is_bad_input { EXIT_BAD_INPUT } else { EXIT_FAILED })
        }
    }
}
