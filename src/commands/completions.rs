//! `rloss completions SHELL`: what makes a shell complete this program's commands.

use crate::error::EXIT_DONE;
use anyhow::Result;
use clap::Args;
use clap_complete::Shell;
use std::io::Write;

/// What `rloss completions` takes.
#[derive(Args, Debug, Clone)]
pub struct CompletionsArgs {
    /// Which shell: `source <(rloss completions bash)`, or put what it prints where the shell looks for it
    shell: Shell,
}

/// Prints the completions of `command`.
///
/// # Errors
/// None: a closed pipe is nobody to report to.
pub fn run(args: &CompletionsArgs, mut command: clap::Command) -> Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "rloss", &mut text);
    let _ = std::io::stdout().write_all(&text);
    Ok(EXIT_DONE)
}
