//! The command line: its arguments, the only code that prints errors, and the exit code.

use crate::commands;
use crate::commands::arguments::RunArgs;
use crate::dist::launch::require_single_process;
use crate::error::{BadInput, EXIT_BAD_INPUT, EXIT_FAILED, EXIT_SUCCESS, ErrorOnOtherRank};
use crate::metrics::sanitize_terminal;
use crate::ops::cuda::unload_kernels;
use clap::{CommandFactory, Parser, Subcommand};
use std::io::Write;
use std::sync::LazyLock;
use std::time::Duration;

#[derive(Parser)]
#[command(
    name = "rloss",
    version = VERSION.as_str(),
    about = "Reinforcement learning for GPT-OSS and Qwen: one forward pass for rollout and training"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a commented recipe to start from: with a task program, or for your own model
    Init(commands::init::InitArgs),
    /// Train as the recipe says: SFT warm-up, reinforcement learning, evaluations, checkpoints
    Train(commands::train::TrainArgs),
    /// Fine-tune a model on conversations: the SFT warm-up of `train` alone
    Sft(commands::sft::SftArgs),
    /// Show the resolved recipe, the first prompt and the memory plan; train nothing
    Check(commands::check::CheckArgs),
    /// Chat with a model in the terminal; the model can use the tool of the recipe
    Chat(commands::chat::ChatArgs),
    /// Serve a model over OpenAI's HTTP interface: chats and completions
    Serve(commands::serve::ServeArgs),
    /// Sample from the prompts of one step and write the trajectories with their log-probabilities
    Rollout(commands::rollout::RolloutArgs),
    /// Measure success on validation problems: mean@k, pass@k, maj@k with 95% intervals
    Eval(RunArgs),
    /// Compare rollout and training log-probs on the same tokens; exit code 3 if they differ
    CheckMismatch(commands::check_mismatch::CheckMismatchArgs),
    /// Write a run's adapter in PEFT format, its merged model, or a GGUF file
    Export(commands::export::ExportArgs),
    /// Download a data set or a small model to the path that recipes expect
    Fetch(commands::fetch::FetchArgs),
    /// Print the JSON schema of recipes, for editors
    Schema,
    /// Write one self-contained HTML page with the curves of runs
    Report(commands::report::ReportArgs),
    /// Verify the files of a run or a model against their digests; exit code 2 if they differ
    Verify(commands::verify::VerifyArgs),
    /// Print a shell completion script
    Completions(commands::completions::CompletionsArgs),
}

/// The features that add capabilities to a build, and whether this build has them.
const FEATURES: [(&str, bool); 4] = [
    ("cuda", cfg!(feature = "cuda")),
    ("flash-attn", cfg!(feature = "flash-attn")),
    ("mpi", cfg!(feature = "mpi")),
    ("nccl", cfg!(feature = "nccl")),
];

/// The version with the features and, in a packaged build, the commit. Other builds omit the commit, because
/// every new commit would recompile the crate.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let features: Vec<&str> = FEATURES.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    let commit = option_env!("RLOSS_COMMIT").map(|commit| format!("; commit {commit}")).unwrap_or_default();
    format!("{} (features: {features}{commit})", env!("CARGO_PKG_VERSION"))
});

/// Delay before this process exits because of an error that another process prints. The other process exits
/// during the delay.
const REPORT_DELAY: Duration = Duration::from_millis(500);

/// Returns the command line: every subcommand with its arguments.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process and returns its exit code.
pub fn run() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            return match error.print() {
                // A closed pipe is not a failure: the reader of the output has ended.
                Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => EXIT_FAILED,
                _ if error.use_stderr() => EXIT_BAD_INPUT,
                _ => EXIT_SUCCESS,
            };
        }
    };
    let one_process = match &cli.command {
        Command::Train(_) | Command::Sft(_) | Command::CheckMismatch(_) => Ok(()),
        _ => require_single_process(&std::env::args().nth(1).unwrap_or_default()),
    };
    let success = |()| EXIT_SUCCESS;
    let result = one_process.and_then(|()| match cli.command {
        Command::Init(args) => commands::init::run(&args).map(success),
        Command::Train(args) => commands::train::run(&args),
        Command::Sft(args) => commands::sft::run(&args),
        Command::Check(args) => commands::check::run(&args).map(success),
        Command::Chat(args) => commands::chat::run(&args).map(success),
        Command::Serve(args) => commands::serve::run(&args).map(success),
        Command::Rollout(args) => commands::rollout::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::CheckMismatch(args) => commands::check_mismatch::run(&args),
        Command::Export(args) => commands::export::run(&args).map(success),
        Command::Fetch(args) => commands::fetch::run(&args),
        Command::Schema => commands::schema::run().map(success),
        Command::Report(args) => commands::report::run(&args).map(success),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Completions(args) => commands::completions::run(&args, command()).map(success),
    });
    // The kernels are in a static, which is never dropped.
    unload_kernels();
    result.unwrap_or_else(|error| {
        if let Some(other) = error.downcast_ref::<ErrorOnOtherRank>() {
            // A launcher kills all processes when one of them fails. So the process that prints the error
            // must be the first to exit.
            std::thread::sleep(REPORT_DELAY);
            return if other.is_bad_input { EXIT_BAD_INPUT } else { EXIT_FAILED };
        }
        // Text from files may carry control characters.
        let text = sanitize_terminal(&format!("{error:#}")).into_owned();
        // If stderr is closed, the message is lost: there is no other place for it.
        let word = console::style("error:").for_stderr().red().bold();
        let _ = writeln!(std::io::stderr(), "{word} {text}");
        if error.chain().any(|cause| cause.is::<BadInput>()) { EXIT_BAD_INPUT } else { EXIT_FAILED }
    })
}

#[cfg(test)]
mod tests {
    use super::FEATURES;
    use std::collections::BTreeSet;

    /// Features of Cargo.toml that are used by checks only.
    const CHECK_FEATURES: [&str; 2] = ["bench", "whole"];

    #[test]
    fn the_version_names_every_feature_that_a_build_can_have() {
        let manifest: toml::Table = toml::from_str(include_str!("../Cargo.toml")).unwrap();
        let declared = manifest["features"].as_table().unwrap().keys().map(String::as_str);
        let declared: BTreeSet<&str> = declared.filter(|name| !CHECK_FEATURES.contains(name)).collect();
        assert_eq!(declared, FEATURES.iter().map(|(name, _)| *name).collect());
    }
}
