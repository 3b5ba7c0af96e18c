//! What a RECIPE argument names: a recipe file, a recipe inside the binary, a run folder or a checkpoint.

use super::plan::{Plan, resolve, resolve_stored};
use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::integrity::Seal;
use crate::settings::{Mistakes, closest};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// The recipes inside the binary, by name.
pub const BUILT_IN: [(&str, &str); 14] = [
    ("quickstart", include_str!("../../recipes/quickstart.toml")),
    ("quickstart_cuda", include_str!("../../recipes/quickstart_cuda.toml")),
    ("quickstart_dense", include_str!("../../recipes/quickstart_dense.toml")),
    ("quickstart_lora", include_str!("../../recipes/quickstart_lora.toml")),
    ("quickstart_ppo", include_str!("../../recipes/quickstart_ppo.toml")),
    ("format_rules", include_str!("../../recipes/format_rules.toml")),
    ("gpt_oss_20b_lora", include_str!("../../recipes/gpt_oss_20b_lora.toml")),
    ("gsm8k", include_str!("../../recipes/gsm8k.toml")),
    ("gsm8k_qwen", include_str!("../../recipes/gsm8k_qwen.toml")),
    ("released", include_str!("../../recipes/released.toml")),
    ("retool", include_str!("../../recipes/retool.toml")),
    ("retool_ppo", include_str!("../../recipes/retool_ppo.toml")),
    ("retool_qwen", include_str!("../../recipes/retool_qwen.toml")),
    ("verify_if", include_str!("../../recipes/verify_if.toml")),
];

/// What messages call a recipe inside the binary, after its name.
pub(super) const INSIDE: &str = " (inside rloss)";

/// What a RECIPE argument names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecipeSource {
    /// A recipe file.
    File(PathBuf),
    /// A recipe inside the binary.
    BuiltIn { name: &'static str, text: &'static str },
    /// A run folder: its resolved recipe, and its last checkpoint.
    Run(PathBuf),
    /// One checkpoint of a run, with the run's recipe.
    Checkpoint { run: PathBuf, folder: PathBuf },
}

/// Finds out what `argument` names; a file or folder goes before a recipe inside the binary.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when nothing is there, or a folder that is neither a run's nor a checkpoint of one.
pub fn locate(argument: &Path) -> Result<RecipeSource> {
    let shown = argument.display();
    if argument.join("recipe.toml").is_file() {
        return Ok(RecipeSource::Run(argument.to_owned()));
    }
    if argument.is_dir() {
        let folder = std::path::absolute(argument).unwrap_or_else(|_| argument.to_owned());
        let run = folder.parent().and_then(Path::parent).filter(|run| run.join("recipe.toml").is_file());
        return match run {
            Some(run) if folder.join("config.json").is_file() => {
                Ok(RecipeSource::Checkpoint { run: run.to_owned(), folder })
            }
            _ if folder.join("config.json").is_file() => Err(bad_input!(
                "{shown}: holds a model and belongs to no run; name a recipe, and the model with --set model.path={shown}"
            )),
            _ => Err(bad_input!(
                "{shown}: this folder holds no recipe.toml, so it is not a run folder; name a recipe file or a run folder"
            )),
        };
    }
    if argument.exists() {
        return Ok(RecipeSource::File(argument.to_owned()));
    }
    let names = || BUILT_IN.iter().map(|(name, _)| *name);
    let asked = argument.to_str().unwrap_or_default();
    if let Some(&(name, text)) = BUILT_IN.iter().find(|(name, _)| *name == asked) {
        return Ok(RecipeSource::BuiltIn { name, text });
    }
    // `recipes/quickstart.toml` too, where there is no such file.
    let stem = argument.file_stem().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
    let meant = closest(stem, names()).map(|near| format!(" did you mean {near}?")).unwrap_or_default();
    Err(bad_input!(
        "{shown}: no such file or folder;{meant} name a recipe file, a run folder, or a recipe of the program: {}",
        names().collect::<Vec<_>>().join(", ")
    ))
}

impl RecipeSource {
    /// The file that holds the recipe; of one inside the binary, what messages call it.
    pub fn recipe_file(&self) -> PathBuf {
        match self {
            RecipeSource::File(file) => file.clone(),
            RecipeSource::BuiltIn { name, .. } => PathBuf::from(format!("{name}{INSIDE}")),
            RecipeSource::Run(folder) | RecipeSource::Checkpoint { run: folder, .. } => {
                folder.join("recipe.toml")
            }
        }
    }

    /// The name that the default run folder `runs/<stem>` takes.
    pub fn stem(&self) -> String {
        let path = match self {
            RecipeSource::BuiltIn { name, .. } => return (*name).to_owned(),
            RecipeSource::File(path)
            | RecipeSource::Run(path)
            | RecipeSource::Checkpoint { run: path, .. } => path,
        };
        let named = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let stem = match self {
            RecipeSource::File(_) => named.file_stem(),
            _ => named.file_name(),
        };
        stem.map_or("run".to_owned(), |stem| stem.to_string_lossy().into_owned())
    }

    /// Reads and resolves the recipe.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when the file cannot be read or the recipe has mistakes.
    pub fn resolve(&self, sets: &[String]) -> Result<Plan> {
        let file = self.recipe_file();
        let pinned = |plan: Result<Plan, Mistakes>| -> Result<Plan> {
            let mut plan = plan?;
            plan.recipe.task.pin_command();
            Ok(plan)
        };
        if let RecipeSource::BuiltIn { text, .. } = self {
            return pinned(resolve(&file, text, sets));
        }
        let text = bounded_file::read_text(&file, TOML_BYTES_MAX).map_err(|e| {
            bad_input!(
                "{}: cannot read the recipe: {e}; a recipe is a file of TOML, saved as UTF-8",
                file.display()
            )
        })?;
        let folder = match self {
            RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. } => run,
            RecipeSource::File(_) | RecipeSource::BuiltIn { .. } => {
                return pinned(resolve(&file, &text, sets));
            }
        };
        let plan = resolve_stored(&file, &text, sets);
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
