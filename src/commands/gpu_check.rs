//! `rloss gpu-check`, a hidden command: checks that need a GPU. `benches/gpu_speed` measures.
//! scripts/gpu_check.sh runs each part of both and keeps their tables.
//!
//! Every part prints rows of one Markdown table. A failed check does not end the part, because the other
//! results are still useful.

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

use crate::error::{EXIT_FAILED, EXIT_SUCCESS};
use crate::ops::cuda::Gpu;
use crate::ops::sink_attention::kernels::HEAD_DIMS;
use crate::{bad_input, ops};
use anyhow::Result;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `gpu-check`.
#[derive(Args, Debug, Clone, Default)]
pub struct GpuCheckArgs {
    /// Parts to check [default: all of them]. Speed, profile and model are in the bench gpu_speed
    #[arg(value_enum)]
    pub parts: Vec<Part>,
    /// Small cases only, for compute-sanitizer
    #[arg(long)]
    pub small: bool,
    /// Only write a file with the outputs that the part "seeded" compares
    #[arg(long, value_name = "FILE")]
    pub write_seeded: Option<PathBuf>,
    /// Index of the GPU
    #[arg(long, default_value_t = 0)]
    pub device: usize,
}

/// A part of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
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
}

/// The result of a check: `Ok` or `Err` with the measured values, or an error that stopped the check.
type CheckResult = Result<Result<String, String>>;

/// Counts the results of checks, and prints each when it is known.
#[derive(Debug, Default)]
pub struct Verdicts {
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
///
/// # Errors
/// When the kernels support no GPU of this machine.
pub fn run(args: &GpuCheckArgs) -> Result<u8> {
    let start = Instant::now();
    let Gpu { device, .. } =
        ops::cuda::open_gpu(args.device).map_err(|error| bad_input!("gpu-check: {error}"))?;
    let opened = start.elapsed();
    if let Some(path) = &args.write_seeded {
        return seeded_outputs::write(&device, path).map(|()| EXIT_SUCCESS);
    }
    let gpu = device.as_cuda_device()?;
    let parts = if args.parts.is_empty() { Part::value_variants().to_vec() } else { args.parts.clone() };
    let mut verdicts = Verdicts::default();
    for part in parts {
        match part {
            Part::Device => print_device(gpu, opened)?,
            Part::Primitives => primitives::run(gpu, &mut verdicts)?,
            Part::Seeded => seeded_outputs::run(&device, &mut verdicts)?,
            Part::Facts => instruction_properties::run(gpu, &mut verdicts),
            Part::Oracle => {
                cpu_reference::run(&device, args.small, &mut verdicts);
                model_ops::run(&device, args.small, &mut verdicts);
            }
            Part::Links => bitwise_equality::run(&device, args.small, &mut verdicts),
            #[cfg(feature = "nccl")]
            Part::Nccl => verdicts.check("NCCL: one rank sends to itself", || {
                let bytes_max = if args.small { 1 << 16 } else { 1 << 28 };
                let version = crate::dist::check_nccl_alone(args.device, bytes_max)?;
                Ok(Ok(format!("version {version}, parts of 1 to {bytes_max} bytes")))
            }),
        }
    }
    eprintln!("gpu-check: {} passed, {} failed", verdicts.passed, verdicts.failed);
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
    println!("| attention kernels | {} | |", ops::cuda::kernel_set(gpu, HEAD_DIMS[0])?.name);
    println!("| opened, with all kernels loaded | {:.2} s | |", opened.as_secs_f64());
    Ok(())
}
