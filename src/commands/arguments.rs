//! Arguments that several commands share.

use crate::recipe::BUILT_IN;
use clap::Args;
use std::path::PathBuf;

/// Returns the help text of a RECIPE argument.
pub fn recipe_help() -> String {
    let names = BUILT_IN.map(|(name, _)| name).join(", ");
    format!(
        "A recipe file; a built-in recipe: {names}; a run folder (its resolved recipe and last checkpoint); or a checkpoint \
         of a run (not for `train`)"
    )
}

/// The RECIPE argument and its options.
#[derive(Args, Debug, Clone)]
pub struct RecipeArgs {
    #[arg(help = recipe_help())]
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    pub trust: bool,
}

/// The RECIPE argument, its options, and the folder for results.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    #[arg(help = recipe_help())]
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Folder for the results [default: runs/<recipe's name>; for a run folder, the folder itself]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    pub trust: bool,
}
