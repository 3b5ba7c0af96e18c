//! The settings in which the runs of a page differ.

use super::run::Run;
use minijinja::{Value, context};
use std::collections::{BTreeMap, BTreeSet};

/// Tables of the recipe that do not affect results. Their settings come last.
const WITHOUT_EFFECT: [&str; 3] = ["parallel", "logging", "checkpoint"];

/// Returns a row for each setting that is not the same in all `runs`: its key, and its value in each run. A
/// run without a recipe does not count.
pub(super) fn differing(runs: &[Run]) -> Vec<Value> {
    let settings = |run: &Run| {
        let mut settings = flatten(&run.recipe);
        if !run.seeds.is_empty() {
            settings.insert("train.seed".to_owned(), run.seeds.clone());
        }
        settings
    };
    let settings: Vec<BTreeMap<String, String>> = runs.iter().map(settings).collect();
    let known = || settings.iter().filter(|settings| !settings.is_empty());
    let keys: BTreeSet<&String> = known().flat_map(BTreeMap::keys).collect();
    let differs =
        |key: &&String| known().map(|settings| settings.get(*key)).collect::<BTreeSet<_>>().len() > 1;
    let mut keys: Vec<&String> = keys.into_iter().filter(differs).collect();
    keys.sort_by_key(|key| WITHOUT_EFFECT.iter().any(|table| key.split('.').next() == Some(table)));
    let row = |key: &String| {
        let value = |settings: &BTreeMap<String, String>| match settings.get(key) {
            Some(text) => text.clone(),
            None if settings.is_empty() => "no recipe".to_owned(),
            None => "–".to_owned(),
        };
        context! { key, values => settings.iter().map(value).collect::<Vec<_>>() }
    };
    keys.into_iter().map(row).collect()
}

/// Returns the values of `recipe` as text, by dotted key.
fn flatten(recipe: &toml::Table) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    let mut tables = vec![(String::new(), recipe)];
    while let Some((prefix, table)) = tables.pop() {
        for (key, value) in table {
            let key = format!("{prefix}{key}");
            match value {
                toml::Value::Table(inner) => tables.push((format!("{key}."), inner)),
                toml::Value::String(text) => drop(settings.insert(key, text.clone())),
                other => drop(settings.insert(key, other.to_string())),
            }
        }
    }
    settings
}
