//! `rloss schema`: the JSON Schema of recipes. Editors use it to complete and check recipes.

use crate::recipe::Recipe;
use crate::run::sampling_folder::print_text;
use crate::settings::Entry;
use anyhow::Result;
use serde_json::{Value, json};

/// Prints the schema.
///
/// # Errors
/// When standard output cannot be written.
pub fn run() -> Result<()> {
    print_text(&format!("{}\n", serde_json::to_string_pretty(&schema(&Recipe::default().entries()))?))
}

/// Builds the schema from the declared keys. It allows no other keys in any table.
fn schema(entries: &[Entry]) -> Value {
    let mut schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "rloss recipe",
        "type": "object",
        "additionalProperties": false,
        "properties": { "base": {
            "type": "string",
            "description": "The recipe that this one differs from: a path relative to this file's folder, or the name of a \
                            built-in recipe.",
        } },
    });
    for entry in entries {
        let (mut value, doc) = match entry {
            Entry::Table { doc, .. } => {
                (json!({ "type": "object", "additionalProperties": false, "properties": {} }), doc)
            }
            Entry::Key { schema, doc, .. } => (schema.clone(), doc),
        };
        if let Entry::Key { value: Some(toml), .. } = entry
            && let Ok(default) = serde_json::from_str::<Value>(toml)
        {
            value["default"] = default;
        }
        value["description"] = (*doc).into();
        let place = entry.path().split('.').fold(&mut schema, |table, name| &mut table["properties"][name]);
        *place = value;
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::schema;
    use crate::recipe::{BUILT_IN, Recipe};
    use serde_json::{Value, json};

    /// Checks `value` against the keywords that the schema uses.
    fn check(schema: &Value, value: &Value, path: &str) -> Result<(), String> {
        let fail = |message: &str| Err(format!("{path}: {message}"));
        if let Some(words) = schema["enum"].as_array() {
            return if words.contains(value) { Ok(()) } else { fail("no such word") };
        }
        let is_type = match schema["type"].as_str().unwrap() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_u64(),
            "number" => value.is_number(),
            other => return fail(other),
        };
        if !is_type {
            return fail("wrong type");
        }
        for (name, value) in value.as_object().into_iter().flatten() {
            // A map takes any name.
            let of_map = schema.get("additionalProperties").filter(|below| below.is_object());
            let below = schema["properties"].get(name).or(of_map);
            let below = below.ok_or(format!("{path}.{name}: unknown"))?;
            check(below, value, &format!("{path}.{name}"))?;
        }
        for item in value.as_array().into_iter().flatten() {
            check(&schema["items"], item, path)?;
        }
        let outside = |key: &str, is: fn(f64, f64) -> bool| {
            schema[key].as_f64().zip(value.as_f64()).is_some_and(|(limit, value)| !is(value, limit))
        };
        let out_of_range = outside("minimum", |value, limit| value >= limit)
            || outside("exclusiveMinimum", |value, limit| value > limit)
            || outside("maximum", |value, limit| value <= limit)
            || outside("exclusiveMaximum", |value, limit| value < limit);
        if out_of_range { fail("out of range") } else { Ok(()) }
    }

    #[test]
    fn the_schema_accepts_every_built_in_recipe_and_rejects_mistakes() {
        let schema = schema(&Recipe::default().entries());
        let everything = include_str!("../../tests/suite/recipe/everything.toml");
        for (name, text) in BUILT_IN.into_iter().chain([("everything", everything)]) {
            let recipe: Value = toml::from_str(text).unwrap();
            assert_eq!(check(&schema, &recipe, name), Ok(()));
        }
        for (broken, what) in [
            (json!({"train": {"steps": "80"}}), "r.train.steps: wrong type"),
            (json!({"train": {"stepz": 80}}), "r.train.stepz: unknown"),
            (json!({"policy": {"clip_low": 0.0}}), "r.policy.clip_low: out of range"),
            (json!({"policy": {"loss": "dapo"}}), "r.policy.loss: no such word"),
        ] {
            assert_eq!(check(&schema, &broken, "r"), Err(what.to_owned()));
        }
    }
}
