//! Resolution of a RECIPE argument: a recipe file, a built-in recipe, a run folder or a checkpoint.

use super::key_scope::KeyScope;
use super::plan::{Plan, resolve_for, resolve_run_recipe};
use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::checkpoint::gguf::is_gguf;
use crate::integrity::ChecksumStatus;
use crate::settings::did_you_mean;
use crate::tasks::absolute_words;
use anyhow::Result;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The built-in recipes by name.
pub const BUILT_IN: [(&str, &str); 20] = [
    ("quickstart", include_str!("../../recipes/quickstart.toml")),
    ("quickstart_cuda", include_str!("../../recipes/quickstart_cuda.toml")),
    ("quickstart_dense", include_str!("../../recipes/quickstart_dense.toml")),
    ("quickstart_lora", include_str!("../../recipes/quickstart_lora.toml")),
    ("quickstart_ppo", include_str!("../../recipes/quickstart_ppo.toml")),
    ("quickstart_qwen3_moe", include_str!("../../recipes/quickstart_qwen3_moe.toml")),
    ("format_rules", include_str!("../../recipes/format_rules.toml")),
    ("gpt_oss_20b_lora", include_str!("../../recipes/gpt_oss_20b_lora.toml")),
    ("gsm8k", include_str!("../../recipes/gsm8k.toml")),
    ("gsm8k_qwen", include_str!("../../recipes/gsm8k_qwen.toml")),
    ("calculator", include_str!("../../recipes/calculator.toml")),
    ("gsm8k_fence", include_str!("../../recipes/gsm8k_fence.toml")),
    ("gsm8k_qwen_lora", include_str!("../../recipes/gsm8k_qwen_lora.toml")),
    ("retool_fence", include_str!("../../recipes/retool_fence.toml")),
    ("released", include_str!("../../recipes/released.toml")),
    ("retool", include_str!("../../recipes/retool.toml")),
    ("retool_ppo", include_str!("../../recipes/retool_ppo.toml")),
    ("retool_qwen", include_str!("../../recipes/retool_qwen.toml")),
    ("retool_qwen_lora", include_str!("../../recipes/retool_qwen_lora.toml")),
    ("verify_if", include_str!("../../recipes/verify_if.toml")),
];

/// Suffix of a built-in recipe's name in messages.
pub(super) const BUILT_IN_SUFFIX: &str = " (inside rloss)";

/// The recipe that a RECIPE argument names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecipeSource {
    /// A recipe file.
    File(PathBuf),
    /// A built-in recipe.
    BuiltIn { name: &'static str, text: &'static str },
    /// A run folder: its resolved recipe and its last checkpoint.
    Run(PathBuf),
    /// One checkpoint of a run, with the run's recipe.
    Checkpoint { run: PathBuf, folder: PathBuf },
}

/// Finds what `argument` refers to. Files and folders take precedence over built-in recipes.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when nothing is found, or when a folder is neither a run folder nor a
/// checkpoint of a run.
pub fn locate(argument: &Path) -> Result<RecipeSource> {
    let shown = argument.display();
    let model_alone = || {
        bad_input!(
            "{shown}: a model that is not part of a run; name a recipe, and the model with --set model.path={shown}"
        )
    };
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
            _ if folder.join("config.json").is_file() => Err(model_alone()),
            _ => Err(bad_input!(
                "{shown}: this folder has no recipe.toml, so it is not a run folder; name a recipe file or a run folder"
            )),
        };
    }
    if is_gguf(argument) && argument.exists() {
        return Err(model_alone());
    }
    if argument.exists() {
        return Ok(RecipeSource::File(argument.to_owned()));
    }
    let names = || BUILT_IN.iter().map(|(name, _)| *name);
    let requested = argument.to_str().unwrap_or_default();
    if let Some(&(name, text)) = BUILT_IN.iter().find(|(name, _)| *name == requested) {
        return Ok(RecipeSource::BuiltIn { name, text });
    }
    // `recipes/quickstart.toml` means the built-in recipe if there is no such file.
    let stem = argument.file_stem().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
    let recipes = argument.with_extension("toml");
    let suggestion = match recipes.is_file() {
        true => format!(" did you mean {}?", recipes.display()),
        false => did_you_mean(stem, names()),
    };
    Err(bad_input!(
        "{shown}: no such file or folder;{suggestion} name a recipe file, a run folder, a model (`rloss fetch` downloads some), or a \
         built-in recipe: {}",
        names().collect::<Vec<_>>().join(", ")
    ))
}

impl RecipeSource {
    /// Returns the file of the recipe. For a built-in recipe, returns its name in messages.
    pub fn recipe_file(&self) -> PathBuf {
        match self {
            RecipeSource::File(file) => file.clone(),
            RecipeSource::BuiltIn { name, .. } => PathBuf::from(format!("{name}{BUILT_IN_SUFFIX}")),
            RecipeSource::Run(folder) | RecipeSource::Checkpoint { run: folder, .. } => {
                folder.join("recipe.toml")
            }
        }
    }

    /// Returns the folder of the run that stored the recipe, if one did.
    pub fn run(&self) -> Option<&Path> {
        match self {
            RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. } => Some(run),
            RecipeSource::File(_) | RecipeSource::BuiltIn { .. } => None,
        }
    }

    /// Returns the stem of the default run folder `runs/<stem>`.
    pub fn stem(&self) -> String {
        let path = match self {
            RecipeSource::BuiltIn { name, .. } => return (*name).to_owned(),
            RecipeSource::File(path)
            | RecipeSource::Run(path)
            | RecipeSource::Checkpoint { run: path, .. } => path,
        };
        let full_path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let stem =
            if let RecipeSource::File(_) = self { full_path.file_stem() } else { full_path.file_name() };
        stem.map_or("run".to_owned(), |stem| stem.to_string_lossy().into_owned())
    }

    /// Reads and resolves the recipe for a command that reads every key.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when the file cannot be read or the recipe has mistakes.
    pub fn resolve(&self, sets: &[String]) -> Result<Plan> {
        self.resolve_for(KeyScope::Train, sets)
    }

    /// Reads and resolves the recipe for a command that reads the keys of `scope`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when the file cannot be read or the recipe has mistakes.
    pub fn resolve_for(&self, scope: KeyScope, sets: &[String]) -> Result<Plan> {
        let file = self.recipe_file();
        let text = match self {
            RecipeSource::BuiltIn { text, .. } => Cow::Borrowed(*text),
            _ => Cow::Owned(bounded_file::read_text(&file, TOML_BYTES_MAX).map_err(|e| {
                bad_input!(
                    "{}: cannot read the recipe: {e}; a recipe is a TOML file, saved as UTF-8",
                    file.display()
                )
            })?),
        };
        let Some(folder) = self.run() else {
            let mut plan = resolve_for(scope, &file, &text, sets)?;
            plan.recipe.task.make_command_absolute();
            plan.recipe.tools.iter_mut().for_each(|tools| tools.mcp.make_command_absolute());
            absolute_words(std::slice::from_mut(&mut plan.recipe.interpreter.python));
            return Ok(plan);
        };
        let scope = if scope == KeyScope::Train { KeyScope::TrainStoredRun } else { scope };
        let plan = resolve_run_recipe(scope, &file, &text, sets);
        // An edit of the text is reported before mistakes in the text.
        match ChecksumStatus::check(&text, folder) {
            ChecksumStatus::Valid | ChecksumStatus::Missing => Ok(plan?),
            ChecksumStatus::Invalid => Err(bad_input!(
                "{}: is not what the run wrote: it was truncated or changed. Restore it (each checkpoint has a copy, \
                 trainer.toml); after a deliberate edit: rloss verify --accept {}",
                file.display(),
                folder.display()
            )),
        }
    }
}
