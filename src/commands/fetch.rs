//! `rloss fetch NAME`: fetches data sets and small models from their official sources.

use anyhow::{Context, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;
use std::process::Command;

/// The script has every address and checksum. It does not need the source tree.
const SCRIPT: &str = include_str!("../../scripts/fetch_data.sh");

/// The names that the script knows.
const NAMES: &str = "gsm8k aime math dapo-math ifeval o200k qwen2.5-0.5b-instruct qwen2.5-1.5b-instruct \
    qwen2.5-coder-0.5b-instruct all";

/// Arguments of `rloss fetch`.
#[derive(Args, Debug, Clone)]
pub struct FetchArgs {
    /// Names to fetch: data sets go to data/, models to models/, where recipes look for them; all: every data
    /// set
    #[arg(required = true, value_name = "NAME", value_parser = PossibleValuesParser::new(NAMES.split(' ')))]
    names: Vec<String>,
}

/// Runs the script, which needs bash and curl. Existing files are kept. Returns the script's exit code: 1,
/// after one line of error, if a file could not be fetched.
///
/// # Errors
/// When bash cannot be started.
pub fn run(args: &FetchArgs) -> Result<u8> {
    let status = Command::new("bash").args(["-c", SCRIPT, "rloss fetch"]).args(&args.names).status();
    let status = status.context("fetching needs bash and curl; bash cannot be started")?;
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
        let is_known = |name: &str| NAMES.split(' ').any(|known| known == name);
        for name in NAMES.split(' ') {
            assert!(SCRIPT.contains(&format!("    {name})")) || name == "all", "{name}");
        }
        for task in TaskName::all() {
            assert!(task.data.split_whitespace().all(is_known), "{}", task.data);
        }
        for (recipe, text) in BUILT_IN {
            let asked = text.lines().filter_map(|line| line.strip_prefix("#   rloss fetch "));
            for name in asked.flat_map(str::split_whitespace) {
                assert!(is_known(name), "{recipe}: {name}");
            }
        }
    }
}
