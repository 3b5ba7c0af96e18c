//! The model card of an exported model: what the run trained, its results, its data and its recipe.

use super::run::Run;
use super::tables;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::checkpoint::hub::name_of_snapshot;
use crate::metrics::sanitize_line;
use anyhow::Result;
use std::path::Path;

/// Returns the card of a model that the run in `folder` trained, as Markdown with the front matter that model
/// hubs read. `library` is the library that loads the model: `peft` or `transformers`.
///
/// # Errors
/// [`crate::error::BadInput`] when a file of the run cannot be read.
pub fn model_card(folder: &Path, library: &str) -> Result<String> {
    let name = |path: &Path| {
        let name = path.file_name().map_or_else(|| path.as_os_str().to_owned(), |name| name.to_owned());
        sanitize_line(&name.to_string_lossy()).into_owned()
    };
    let title = name(std::fs::canonicalize(folder).as_deref().unwrap_or(folder));
    let run = Run::load_metrics(title.clone(), folder)?;
    let base = run.setting("model.path").filter(|path| !path.is_empty());
    let base = base.map(|path| name_of_snapshot(Path::new(&path)).unwrap_or_else(|| name(Path::new(&path))));
    let base = base.unwrap_or_else(|| "random weights".to_owned());
    let quoted = serde_json::Value::from(base.as_str());
    let mut card = format!(
        "---\nlibrary_name: {library}\nbase_model: {quoted}\ntags:\n- rloss\n- reinforcement-learning\n---\n\n# {title}\n\n\
         Trained from {base} with rloss {}.\n\n## Results\n\n| what | first | last |\n| --- | --- | --- |\n",
        env!("CARGO_PKG_VERSION")
    );
    for result in tables::results(&run) {
        card +=
            &format!("| {} | {} | {} |\n", result.name, result.first.as_deref().unwrap_or("–"), result.last);
    }
    card += "\n## Data\n\n";
    for key in ["task.name", "task.train_file", "task.validation_file", "task.command", "task.file"] {
        if let Some(value) = run.setting(key).filter(|value| !value.is_empty()) {
            card += &format!("- `{key}`: `{}`\n", sanitize_line(&value).replace('`', "'"));
        }
    }
    card += "\n## Commands\n\nWith the recipe below as `recipe.toml`:\n\n```bash\nrloss train recipe.toml --out runs/again\nrloss eval runs/again\n```\n";
    if let Ok(recipe) = bounded_file::read_text(&folder.join("recipe.toml"), TOML_BYTES_MAX) {
        // A recipe's texts may have fences of their own.
        let longest = recipe.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(longest.max(2) + 1);
        card += &format!("\n## Recipe\n\n{fence}toml\n{}\n{fence}\n", recipe.trim_end());
    }
    Ok(card)
}
