//! The table of removed keys and values. A recipe with a removed key is rejected, and the message names the
//! replacement. In the recipe of an older run folder, a removed key is ignored if the run stays the same.

use toml::de::DeValue;

/// A removed key, or a removed value of a key.
struct RemovedKey {
    /// The dotted path.
    key: &'static str,
    /// The removed value. `None` if the key itself is removed.
    value: Option<&'static str>,
    /// The value (TOML) that gives today's behaviour. In a stored recipe, a line with this value is ignored.
    ignorable_value: &'static str,
    /// The replacement, as the end of a message.
    remedy: &'static str,
}

const REMOVED: [RemovedKey; 2] = [
    RemovedKey {
        key: "model.dense_products",
        value: None,
        ignorable_value: "\"own\"",
        remedy: "matrix products on a GPU always use the built-in kernels; remove the key",
    },
    RemovedKey {
        key: "parallel.rollout_weights",
        value: Some("by_layer"),
        ignorable_value: "\"by_layer\"",
        remedy: "give \"by_expert\", \"whole\" or \"auto\"",
    },
];

/// Returns the error message with its remedy, if `key` or its `value` is removed.
pub(super) fn removed_key_error(key: &str, value: &DeValue) -> Option<String> {
    let matches = |removed: &&RemovedKey| {
        removed.key == key && removed.value.is_none_or(|word| value.as_str() == Some(word))
    };
    let RemovedKey { value, remedy, .. } = REMOVED.iter().find(matches)?;
    Some(match value {
        None => format!("this key was removed; {remedy}"),
        Some(word) => format!("{word:?} was removed; {remedy}"),
    })
}

/// Blanks the lines of a run folder's recipe whose removed key or value has no effect on the run. The other
/// lines keep their numbers.
pub(super) fn blank_removed_keys(recipe: &str) -> String {
    let mut table = "";
    let mut text = String::with_capacity(recipe.len());
    for line in recipe.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            table = name;
        }
        let is_neutral = line.split_once(" = ").is_some_and(|(name, value)| {
            let is_key = |removed: &RemovedKey| removed.key.rsplit_once('.') == Some((table, name));
            REMOVED.iter().any(|removed| is_key(removed) && removed.ignorable_value == value)
        });
        if !is_neutral {
            text.push_str(line);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::recipe::KeyScope;
    use crate::recipe::plan::{resolve, resolve_run_recipe};
    use std::path::Path;

    #[test]
    fn a_removed_key_is_refused_in_a_recipe_and_read_in_a_run_folder_where_it_changes_nothing() {
        let file = Path::new("r.toml");
        let refused = |text: &str| resolve(file, text, &[]).unwrap_err().to_string();
        for (written, said) in [
            (
                "[model]\ndtype = \"f32\"\ndense_products = \"own\"\n",
                "r.toml:3: model.dense_products: this key was removed; ",
            ),
            (
                "[parallel]\nrollout_weights = \"by_layer\"\n",
                "r.toml:2: parallel.rollout_weights: \"by_layer\" was removed; give \"by_expert\", \"whole\" or \"auto\"",
            ),
        ] {
            let message = refused(written);
            assert!(message.starts_with(said), "{message}");
            assert_eq!(message.lines().count(), 1, "{message}");
            let stored = resolve_run_recipe(KeyScope::Train, file, written, &[]).unwrap();
            // Older runs trained on failures.
            let expected = resolve(file, "task.on_failure = \"zero\"", &[]).unwrap();
            assert_eq!(stored.recipe, expected.recipe);
        }
        let other = "[model]\ndense_products = \"record.toml\"\n";
        assert_eq!(
            resolve_run_recipe(KeyScope::Train, file, other, &[]).unwrap_err().to_string(),
            refused(other)
        );
    }
}
