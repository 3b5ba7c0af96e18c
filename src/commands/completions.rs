//! `rloss completions SHELL`: prints the shell completions of this program.

use crate::run::sampling_folder::print_text;
use anyhow::Result;
use clap::Args;
use clap_complete::Shell;

/// Arguments of `rloss completions`.
#[derive(Args, Debug, Clone)]
pub struct CompletionsArgs {
    /// The shell. Use `source <(rloss completions bash)`, or write the output to the folder in which the
    /// shell looks for completions
    shell: Shell,
}

/// Prints the completions of `command`.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(args: &CompletionsArgs, mut command: clap::Command) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "rloss", &mut text);
    print_text(&String::from_utf8_lossy(&text))
}
