//! The command line: what the user may type, one error printer and the exit code.

use crate::commands;
use crate::commands::arguments::RunArgs;
use crate::error::{BadInput, EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED};
use crate::metrics::sanitize_terminal;
use clap::{Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;

#[derive(Parser)]
#[command(
    name = "rloss",
    version,
    about = "Reinforcement learning for GPT-OSS: one forward for rollout and training"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train as the recipe says: cold start, reinforcement learning, evaluations, checkpoints
    Train(commands::train::TrainArgs),
    /// Sample one step's prompts and write the trajectories with their log-probabilities
    Rollout(RunArgs),
    /// Measure success on held-out problems: mean@k, pass@k, majority@k with 95% intervals
    Eval(RunArgs),
    /// Compare rollout and training log-probs on the same tokens: every gap, and its likely cause
    CheckMismatch(commands::check_mismatch::CheckMismatchArgs),
    /// Write one self-contained HTML page with the curves of runs
    Report {
        /// Run folders, and the page goes into the first; or one folder of figures, see docs/FIGURES.md
        #[arg(required = true)]
        runs: Vec<PathBuf>,
    },
    /// Check that a run or a model still holds what was written; exit code 2 when it does not
    Verify(commands::verify::VerifyArgs),
    /// Check the CUDA kernels on this machine's GPU
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    GpuCheck(commands::gpu_check::GpuCheckArgs),
}

/// Runs the command line of this process and returns its exit code.
pub fn run() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            return match error.print() {
                // A closed pipe is nobody to report to.
                Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => EXIT_FAILED,
                _ if error.use_stderr() => EXIT_BAD_INPUT,
                _ => EXIT_DONE,
            };
        }
    };
    let result = match cli.command {
        Command::Train(args) => commands::train::run(&args),
        Command::Rollout(args) => commands::rollout::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::CheckMismatch(args) => commands::check_mismatch::run(&args),
        Command::Report { runs } => commands::report::run(&runs),
        Command::Verify(args) => commands::verify::run(&args),
        #[cfg(feature = "cuda")]
        Command::GpuCheck(args) => commands::gpu_check::run(&args),
    };
    result.unwrap_or_else(|error| {
        // Text from files may carry control characters.
        let text = sanitize_terminal(&format!("{error:#}")).into_owned();
        // A closed stderr is nobody to report to.
        let _ = writeln!(std::io::stderr(), "error: {text}");
        if error.chain().any(|cause| cause.is::<BadInput>()) { EXIT_BAD_INPUT } else { EXIT_FAILED }
    })
}
