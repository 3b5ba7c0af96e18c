//! What several commands take.

use clap::Args;
use std::path::PathBuf;

/// A recipe.
#[derive(Args, Debug, Clone)]
pub struct RecipeArgs {
    /// A recipe file, or a run folder (its resolved recipe and last checkpoint)
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// A recipe and where its results go.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// A recipe file, or a run folder (its resolved recipe and last checkpoint)
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Folder for the results [default: runs/<recipe's name>; of a run folder its eval/ or rollout/]
    #[arg(long)]
    pub out: Option<PathBuf>,
}
