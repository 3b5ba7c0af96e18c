//! Arguments that several commands share.

use crate::bad_input;
use crate::checkpoint::gguf::is_gguf;
use crate::checkpoint::hub;
use crate::recipe::{BUILT_IN, RecipeSource, locate};
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};

/// Returns the help text of a RECIPE argument.
pub fn recipe_help() -> String {
    let names = BUILT_IN.map(|(name, _)| name).join(", ");
    format!(
        "A recipe file; a built-in recipe: {names}; a run folder (its resolved recipe and last checkpoint); or, except \
         for `train`, a checkpoint of a run"
    )
}

/// Returns the recipe that `path` names; `None` if `path` is a model folder or a GGUF file.
///
/// # Errors
/// [`crate::error::BadInput`] when `path` names neither a recipe nor a model.
pub(super) fn locate_recipe_or_model(path: &Path) -> Result<Option<RecipeSource>> {
    let source = locate(path);
    let is_model = || path.join("config.json").is_file() || hub::find(path).is_some();
    if is_gguf(path) || source.is_err() && is_model() { Ok(None) } else { source.map(Some) }
}

/// Returns the name of a folder, or of a file without its extension.
pub(super) fn name_of(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Returns the absolute form of `path` as text for a recipe. An error says that this file or folder, `what`,
/// must be renamed.
pub(super) fn absolute_path_text(path: &Path, what: &str) -> Result<String> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| bad_input!("{}: a path in a recipe must be UTF-8; rename the {what}", path.display()))
}

/// The RECIPE argument and its options.
#[derive(Args, Debug, Clone)]
pub struct RecipeArgs {
    #[arg(help = recipe_help())]
    pub recipe: PathBuf,
    /// Replace a recipe's value, such as --set train.seed=1
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
    /// Replace a recipe's value, such as --set train.seed=1
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Folder for the results [default: runs/NAME; eval and rollout: runs/NAME-COMMAND, or in the
    /// folder of a run COMMAND/CHECKPOINT]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    pub trust: bool,
}
