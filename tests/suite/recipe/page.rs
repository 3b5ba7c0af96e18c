//! `docs/recipes.md`, from the declaration.

use rloss::learner::CriticSettings;
use rloss::model::settings::{AdapterSettings, Architecture, Tokenizer, Yarn};
use rloss::policy::distill::DistillSettings;
use rloss::recipe::Recipe;
use rloss::settings::Entry;
use rloss::tasks::ToolsSettings;

const HEAD: &str = "\
# Recipes

A recipe is a TOML file. Every key has a default, so a recipe has only the keys that differ from it. The
`recipe.toml` of a run folder is the resolved recipe, with every key. Training it again gives the same run,
unless a resume changed a key.

- `base = \"FILE\"`, before any table, names a recipe to start from. The keys of this recipe override the keys
  of its base. The path is relative to this recipe's folder. A name without a file, such as
  `base = \"gsm8k_qwen\"`, is a built-in recipe. A base may have a base. The resolved recipe has all their
  keys. A recipe with another `task.name` than its base takes no other key of the base's `[task]`.
- `rloss init NAME --from RECIPE --model FOLDER` writes such a recipe with sizes for this machine.
- `rloss schema > recipe.schema.json` writes the keys as JSON Schema. An editor with taplo completes and
  checks a recipe whose first line is `#:schema ./recipe.schema.json`.
- A command ignores contradictions and missing files in keys that it does not read: `rloss chat` needs no
  training data.
- For keys of TRL, PEFT and verl, the error message names the recipe's keys: [POLICY.md](POLICY.md).
- `--set key=value` overrides a key, and the last one wins: `--set train.seed=3`, `--set task.name=gsm8k`,
  `--set 'eval.pass_at=[1, 4]'`. A string needs no quotes there.
- `--set model.path=FOLDER` also removes `model.architecture`, `model.tokenizer` and `model.adapter`.
- Relative paths are relative to the working directory. The resolved recipe has absolute paths.
- All mistakes of a recipe are reported together before any work, as
  `file:line: key: what is wrong; what to do`.
- A run resumed with `--resume` may differ in `device`, `rollout.sequences_max`, `train.recompute_layers`,
  `train.steps`, `train.on_bad_step`, `schedule_steps` (but that of `[cold_start]`), `[eval]`,
  `[logging]`, `[parallel]` and `[checkpoint]`, and in nothing else. A new `train.steps` does not change the
  learning-rate schedule: the schedule ends at the same step as before. The run's recipe then has this step in
  `schedule_steps`.

This page is generated from the settings types in `src/`, and a test compares the two. To generate it again
after a change, run `UPDATE_EXPECT=1 cargo test --release recipes_page`.
";

/// The text of `docs/recipes.md`.
pub fn document() -> String {
    let mut recipe = Recipe::default();
    recipe.model.architecture = Some(Architecture { yarn: Some(Yarn::default()), ..Architecture::default() });
    recipe.model.tokenizer = Some(Tokenizer::Embedded);
    recipe.critic = Some(CriticSettings::default());
    recipe.tools = Some(ToolsSettings::default());
    recipe.adapter = Some(AdapterSettings::default());
    recipe.policy.distill = Some(DistillSettings::default());
    let mut text = HEAD.to_owned();
    let columns = "| key | value | default | |\n| --- | --- | --- | --- |\n";
    text.push_str(&format!("\n## Before any table\n\n{columns}"));
    let mut is_first_key = false;
    for entry in recipe.entries() {
        match entry {
            Entry::Table { path, doc, .. } => {
                text.push_str(&format!("\n## [{path}]\n\n{}\n", wrap(doc)));
                is_first_key = true;
            }
            Entry::Key { path, doc, kind, value, meanings, .. } => {
                let key = path.rsplit('.').next().unwrap_or(&path);
                if std::mem::take(&mut is_first_key) {
                    text.push_str(&format!("\n{columns}"));
                }
                let default = value.map_or("absent".to_owned(), |value| format!("`{value}`"));
                text.push_str(&format!(
                    "| `{key}` | {} | {default} | {} |\n",
                    values(&kind, &meanings),
                    cell(doc)
                ));
            }
        }
    }
    text
}

/// The type and range; for words, each with its meaning.
fn values(kind: &str, meanings: &[(&str, &str)]) -> String {
    if meanings.is_empty() {
        return kind.to_owned();
    }
    let words = meanings.iter().map(|(word, meaning)| match meaning.trim_end_matches('.') {
        "" => format!("`\"{word}\"`"),
        meaning => format!("`\"{word}\"`: {}", cell(meaning)),
    });
    words.collect::<Vec<_>>().join("<br>")
}

/// Breaks a paragraph into lines of at most 110 columns.
fn wrap(text: &str) -> String {
    let (mut lines, mut line) = (vec![], String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 110 {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join("\n")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
