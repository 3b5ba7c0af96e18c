//! Checks and measures a GPU: `cargo run --release --features cuda --example gpu_check -- PARTS`.
//! `scripts/gpu_check.sh` carries it to a machine without Rust, runs each part and keeps the tables.
//!
//! Every check prints a row of one Markdown table. A failed check does not end its part, because the other
//! results are still useful.

#[path = "../../src/allocator.rs"]
mod allocator;
mod bitwise_equality;
mod cpu_reference;
mod instruction;
mod instruction_properties;
mod model_ops;
#[cfg(test)]
mod on_device;
mod primitives;
mod problem;
mod seeded_outputs;
mod speed;

use anyhow::Result;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use clap::{Parser, ValueEnum};
use rloss::bad_input;
use rloss::error::{BadInput, EXIT_BAD_INPUT, EXIT_FAILED, EXIT_SUCCESS};
use rloss::ops::cuda::{Gpu, kernel_set, open_gpu, unload_kernels};
use rloss::ops::sink_attention::kernels::HEAD_DIMS;
use speed::Extent;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Parser, Default)]
struct Arguments {
    /// Parts to run
    #[arg(value_enum, required_unless_present = "write_seeded")]
    parts: Vec<Part>,
    /// Cases of toy size, for compute-sanitizer and for the emulated driver
    #[arg(long)]
    small: bool,
    /// Of speed and model the most telling cases only, for a first call of minutes
    #[arg(long, conflicts_with = "small")]
    short: bool,
    /// Only write a file with the outputs that the part "seeded" compares
    #[arg(long, value_name = "FILE")]
    write_seeded: Option<PathBuf>,
    /// Index of the GPU
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Times of other attention implementations, written by scripts/attention_peers.py in the same run
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Part {
    /// Prints the device's name and its kernels
    Device,
    /// Compares every instruction of kernels/primitives.cuh with its emulation on the CPU
    Primitives,
    /// Compares every op's outputs for small seeded inputs with the outputs of the emulated driver
    Seeded,
    /// Checks that the tensor cores have the properties on which the equality of rows depends
    Facts,
    /// Compares outputs and gradients of all ops with those of the CPU
    Oracle,
    /// Checks bitwise equality: decode and training, split and serial decode, alone and in a batch, two runs
    Links,
    /// Tests NCCL with one rank, which sends to itself
    #[cfg(feature = "nccl")]
    Nccl,
    /// TFLOP/s and GB/s
    Speed,
    /// Launches attention and products once, for a profiler
    Profile,
    /// Tokens per second of whole models with gpt-oss-20b's shape
    Model,
}

/// The result of a check: `Ok` or `Err` with the measured values, or an error that stopped the check.
type CheckResult = Result<Result<String, String>>;

/// Counts the results of checks, and prints each when it is known.
#[derive(Default)]
struct Verdicts {
    passed: usize,
    failed: usize,
}

impl Verdicts {
    /// Prints one row of the table. `Ok` (passed) and `Err` (failed) have the measured values.
    fn print_row(&mut self, name: &str, verdict: Result<String, String>) {
        let (word, measured) = match verdict {
            Ok(measured) => {
                self.passed += 1;
                ("passed", measured)
            }
            Err(measured) => {
                self.failed += 1;
                ("**FAILED**", measured)
            }
        };
        println!("| {name} | {word} | {} |", measured.replace('|', "/").replace('\n', " "));
    }

    /// Runs `check` and prints its row. A check that returns an error counts as failed.
    fn check(&mut self, name: &str, check: impl FnOnce() -> CheckResult) {
        let verdict = check().unwrap_or_else(|error| Err(format!("stopped: {error:#}")));
        self.print_row(name, verdict);
    }
}

/// Runs the requested parts. The exit code is 1 if a check failed.
fn run(arguments: &Arguments) -> Result<u8> {
    let &Arguments { small, short, .. } = arguments;
    let peers = arguments.peers.as_deref().map(speed::peers::read).transpose()?;
    let start = Instant::now();
    let Gpu { device, .. } = open_gpu(arguments.device).map_err(|error| bad_input!("gpu_check: {error}"))?;
    let opened = start.elapsed();
    if let Some(path) = &arguments.write_seeded {
        return seeded_outputs::write(&device, path).map(|()| EXIT_SUCCESS);
    }
    let gpu = device.as_cuda_device()?;
    let extent = match (small, short) {
        (true, _) => Extent::Small,
        (_, true) => Extent::Short,
        _ => Extent::Full,
    };
    let mut verdicts = Verdicts::default();
    for part in &arguments.parts {
        match part {
            Part::Device => print_device(gpu, opened)?,
            Part::Primitives => primitives::run(gpu, &mut verdicts)?,
            Part::Seeded => seeded_outputs::run(&device, &mut verdicts)?,
            Part::Facts => instruction_properties::run(gpu, &mut verdicts),
            Part::Oracle => {
                cpu_reference::run(&device, small, &mut verdicts);
                model_ops::run(&device, small, &mut verdicts);
            }
            Part::Links => bitwise_equality::run(&device, small, &mut verdicts),
            #[cfg(feature = "nccl")]
            Part::Nccl => verdicts.check("NCCL: one rank sends to itself", || {
                let bytes_max = if small { 1 << 16 } else { 1 << 28 };
                let version = rloss::dist::check_nccl_alone(arguments.device, bytes_max)?;
                Ok(Ok(format!("version {version}, parts of 1 to {bytes_max} bytes")))
            }),
            Part::Speed => {
                speed::attention::run(gpu, extent, peers.as_ref())?;
                speed::ops::run(&device, small)?;
            }
            Part::Profile => {
                speed::attention::launch_once(gpu, small)?;
                speed::ops::launch_once(&device, small)?;
            }
            Part::Model => speed::model::run(&device, extent)?,
        }
    }
    if verdicts.passed + verdicts.failed > 0 {
        eprintln!("gpu_check: {} passed, {} failed", verdicts.passed, verdicts.failed);
    }
    Ok(if verdicts.failed == 0 { EXIT_SUCCESS } else { EXIT_FAILED })
}

/// Prints the device's rows. `opened` is the time of opening it, in which the driver loads all kernels. On a
/// new machine the driver also compiles candle's.
fn print_device(gpu: &CudaDevice, opened: Duration) -> Result<()> {
    let stream = gpu.cuda_stream();
    let context = stream.context();
    let (major, minor) = context.compute_capability().w()?;
    println!("| device | {} | compute capability {major}.{minor} |", context.name().w()?);
    println!("| memory | {} MiB | |", context.total_mem().w()? >> 20);
    println!("| attention kernels | {} | |", kernel_set(gpu, HEAD_DIMS[0])?.name);
    println!("| opened, with all kernels loaded | {:.2} s | |", opened.as_secs_f64());
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
    ExitCode::from(result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        let is_bad_input = error.chain().any(|cause| cause.is::<BadInput>());
        if is_bad_input { EXIT_BAD_INPUT } else { EXIT_FAILED }
    }))
}
