//! `rloss fetch NAME`: fetches data sets and small models from their official places.

use anyhow::{Context, Result};
use clap::Args;
use std::process::Command;

/// The script holds every address and checksum, and runs without a copy of the source tree.
const SCRIPT: &str = include_str!("../../scripts/fetch_data.sh");

/// The names that the script knows.
const NAMES: [&str; 10] = [
    "gsm8k",
    "aime",
    "math",
    "dapo-math",
    "ifeval",
    "o200k",
    "qwen2.5-0.5b-instruct",
    "qwen2.5-1.5b-instruct",
    "qwen2.5-coder-0.5b-instruct",
    "all",
];

/// Arguments of `rloss fetch`.
#[derive(Args, Debug, Clone)]
pub struct FetchArgs {
    /// Names to fetch: data sets into data/, models into models/, where recipes look; all: every data set
    #[arg(required = true, value_name = "NAME", value_parser = NAMES)]
    names: Vec<String>,
}

/// Runs the script, which needs bash and curl. Files that are there stay. Returns its exit code: 1 after one
/// line of error when a file could not be fetched.
///
/// # Errors
/// When bash does not start.
pub fn run(args: &FetchArgs) -> Result<u8> {
    let status = Command::new("bash").args(["-c", SCRIPT, "rloss fetch"]).args(&args.names).status();
    let status = status.context("fetching needs bash and curl; bash does not start")?;
    Ok(status.code().map_or(1, |code| code as u8))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, SCRIPT};
    use crate::recipe::BUILT_IN;
    use crate::settings::Choice;
    use crate::tasks::TaskName;

    #[test]
    fn the_script_knows_every_name_and_what_the_recipes_ask_for() {
        for name in NAMES {
            assert!(SCRIPT.contains(&format!("    {name})")) || name == "all", "{name}");
        }
        for task in TaskName::all() {
            assert!(task.data.split_whitespace().all(|name| NAMES.contains(&name)), "{}", task.data);
        }
        for (recipe, text) in BUILT_IN {
            let asked = text.lines().filter_map(|line| line.strip_prefix("#   rloss fetch "));
            for name in asked.flat_map(str::split_whitespace) {
                assert!(NAMES.contains(&name), "{recipe}: {name}");
            }
        }
    }
}
