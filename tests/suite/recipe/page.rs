//! `docs/recipes.md`, from the declaration.

use rloss::learner::CriticSettings;
use rloss::model::settings::{Architecture, Tokenizer, Yarn};
use rloss::recipe::Recipe;
use rloss::settings::Entry;

const HEAD: &str = "\
# Recipes

A recipe is a TOML file. Every key has a default, so a recipe holds only what differs from it. `recipe.toml` in a run
folder is the recipe as resolved, with every default written out; running it again is the same run, unless a resumed run
changed `[eval]` or `[checkpoint]` on its way.

- `base = \"FILE\"`, before any table, takes another recipe as the ground: what is written here counts over it. The path
  counts from this recipe's folder, and a base has no base of its own. The resolved recipe holds both.
- `--set key=value` sets a key over the file, and the last one counts: `--set train.seed=3`, `--set task.name=gsm8k`,
  `--set 'eval.pass_at=[1, 4]'`. A string needs no quotes there.
- `--set model.path=FOLDER` replaces the file's `model.architecture` and `model.tokenizer` as well: the folder has its own.
- Relative paths count from the working directory. The resolved recipe holds absolute ones.
- All mistakes are reported together before any work: `file:line: key: what is wrong; what to do`.
- A run that goes on with `--resume` may differ in `device`, `train.steps`, `schedule_steps`, `[eval]`, `[logging]`,
  `[parallel]` and `[checkpoint]`, and in nothing else. Another `train.steps` does not bend the learning rate's course: it ends where it
  did, and `schedule_steps` in the run's recipe then says where.

This page is written from the settings types of `src/`, and a test compares the two. After a change there:
`UPDATE_EXPECT=1 cargo test --release recipes_page`.
";

/// The text of `docs/recipes.md`.
pub fn document() -> String {
    let mut recipe = Recipe::default();
    recipe.model.architecture = Some(Architecture { yarn: Some(Yarn::default()), ..Architecture::default() });
    recipe.model.tokenizer = Some(Tokenizer::Embedded);
    recipe.critic = Some(CriticSettings::default());
    let mut text = HEAD.to_owned();
    let columns = "| key | value | default | |\n| --- | --- | --- | --- |\n";
    text.push_str(&format!("\n## Before any table\n\n{columns}"));
    for entry in recipe.entries() {
        match entry {
            Entry::Table { path, doc, .. } => {
                text.push_str(&format!("\n## [{path}]\n\n{doc}\n\n{columns}"));
            }
            Entry::Key { path, doc, kind, value, meanings } => {
                let key = path.rsplit('.').next().unwrap_or(&path);
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

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
