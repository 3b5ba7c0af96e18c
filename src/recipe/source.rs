//! What a RECIPE argument names: a recipe file, or a run folder.

use super::plan::{Plan, resolve};
use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::integrity::Seal;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// What a RECIPE argument names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecipeSource {
    /// A recipe file.
    File(PathBuf),
    /// A run folder: its resolved recipe, and its last checkpoint.
    Run(PathBuf),
}

/// Finds out what `argument` names.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when nothing is there, or a folder that holds no `recipe.toml`.
pub fn locate(argument: &Path) -> Result<RecipeSource> {
    let shown = argument.display();
    if argument.join("recipe.toml").is_file() {
        return Ok(RecipeSource::Run(argument.to_owned()));
    }
    if argument.is_dir() {
        return Err(bad_input!(
            "{shown}: this folder holds no recipe.toml, so it is not a run folder; name a recipe file or a run folder"
        ));
    }
    if !argument.exists() {
        return Err(bad_input!("{shown}: no such file or folder; name a recipe file or a run folder"));
    }
    Ok(RecipeSource::File(argument.to_owned()))
}

impl RecipeSource {
    /// The file that holds the recipe.
    pub fn recipe_file(&self) -> PathBuf {
        match self {
            RecipeSource::File(file) => file.clone(),
            RecipeSource::Run(folder) => folder.join("recipe.toml"),
        }
    }

    /// The name that the default run folder `runs/<stem>` takes.
    pub fn stem(&self) -> String {
        let (RecipeSource::File(path) | RecipeSource::Run(path)) = self;
        let named = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let stem = match self {
            RecipeSource::File(_) => named.file_stem(),
            RecipeSource::Run(_) => named.file_name(),
        };
        stem.map_or("run".to_owned(), |stem| stem.to_string_lossy().into_owned())
    }

    /// Reads and resolves the recipe.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when the file cannot be read or the recipe has mistakes.
    pub fn resolve(&self, sets: &[String]) -> Result<Plan> {
        let file = self.recipe_file();
        let text = bounded_file::read_text(&file, TOML_BYTES_MAX).map_err(|e| {
            bad_input!(
                "{}: cannot read the recipe: {e}; a recipe is a file of TOML, saved as UTF-8",
                file.display()
            )
        })?;
        let plan = resolve(&file, &text, sets);
        let RecipeSource::Run(folder) = self else { return Ok(plan?) };
        // A changed text may hold mistakes: that it was changed comes first.
        match Seal::of(&text, folder) {
            Seal::Whole => Ok(plan?),
            Seal::None => {
                let mut plan = plan?;
                plan.warnings
                    .push(format!("{} has no seal, so nobody can say whether it is whole", file.display()));
                Ok(plan)
            }
            Seal::Broken => Err(bad_input!(
                "{}: is not what the run wrote: it was cut or changed. Restore it (each checkpoint has a copy, trainer.toml); \
                 after a deliberate edit: rloss verify --accept {}",
                file.display(),
                folder.display()
            )),
        }
    }
}
