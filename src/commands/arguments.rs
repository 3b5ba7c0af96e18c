//! Arguments that several commands share.

use crate::recipe::BUILT_IN;
use clap::Args;
use std::path::PathBuf;

/// Returns the help text of a RECIPE argument.
pub fn recipe_help() -> String {
    let names = BUILT_IN.map(|(name, _)| name).join(", ");
    format!(
        "A recipe file; a recipe of the program: {names}; a run folder (its resolved recipe and last checkpoint); or, but for \
         train, one of a run's checkpoints"
    )
}

/// The recipe argument.
#[derive(Args, Debug, Clone)]
pub struct RecipeArgs {
    #[arg(help = recipe_help())]
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Start the programs that a run folder of somebody else names
    #[arg(long)]
    pub trust: bool,
}

/// The recipe argument and the folder for results.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    #[arg(help = recipe_help())]
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Folder for the results [default: runs/<recipe's name>; for a run folder, its eval/ or rollout/]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Start the programs that a run folder of somebody else names
    #[arg(long)]
    pub trust: bool,
}
