//! Tool schemas (JSON Schema, OpenAPI dialect) rendered as TypeScript types, as GPT-OSS models expect.

use serde_json::Value;

/// Returns the type of `schema`; `indent` precedes every new line.
pub(super) fn type_of(schema: &Value, indent: &str) -> String {
    if let Some(variants) = schema["oneOf"].as_array() {
        return union_of(variants, indent);
    }
    if let Some(types) = schema["type"].as_array() {
        let names: Vec<&str> = types.iter().filter_map(Value::as_str).map(type_name).collect();
        if !names.is_empty() {
            return names.join(" | ");
        }
    }
    match schema["type"].as_str() {
        Some("object") => object_of(schema, indent),
        Some("string") => enum_of(schema).unwrap_or_else(|| "string".into()),
        Some(name @ ("number" | "integer" | "boolean")) => type_name(name).into(),
        Some("array") => match schema.get("items") {
            Some(items) => format!("{}[]", type_of(items, indent)),
            None => "Array<any>".into(),
        },
        _ => "any".into(),
    }
}

fn type_name(name: &str) -> &str {
    if name == "integer" { "number" } else { name }
}

fn enum_of(schema: &Value) -> Option<String> {
    let names = schema["enum"].as_array()?.iter().filter_map(Value::as_str);
    let names: Vec<String> = names.map(|name| format!("\"{name}\"")).collect();
    (!names.is_empty()).then(|| names.join(" | "))
}

fn with_null(schema: &Value, ty: String) -> String {
    let add = schema["nullable"].as_bool().unwrap_or(false) && !ty.contains("null");
    if add { format!("{ty} | null") } else { ty }
}

/// Returns `default: …`. Strings have quotes, unless the schema is an enumeration.
fn default_note(schema: &Value) -> Option<String> {
    let default = schema.get("default")?;
    let enumerated = schema["enum"].as_array().is_some_and(|values| !values.is_empty());
    Some(match default.as_str() {
        Some(text) if enumerated => format!("default: {text}"),
        Some(text) => format!("default: \"{text}\""),
        None => format!("default: {default}"),
    })
}

/// Returns the type of a schema with `oneOf` at the top level: one variant per line, each with its
/// description and default.
fn union_of(variants: &[Value], indent: &str) -> String {
    let mut out = String::new();
    for variant in variants {
        let ty = with_null(variant, type_of(variant, &format!("{indent}   ")));
        out.push_str(&format!("\n{indent} | {ty}"));
        let default = variant.get("default").map(|default| format!("default: {default}"));
        let notes: Vec<String> =
            variant["description"].as_str().map(String::from).into_iter().chain(default).collect();
        push_notes(&mut out, &notes);
    }
    out
}

fn push_notes(out: &mut String, notes: &[String]) {
    if !notes.is_empty() {
        out.push_str(" // ");
        out.push_str(&notes.join(" "));
    }
}

fn object_of(schema: &Value, indent: &str) -> String {
    let mut out = String::new();
    if let Some(description) = schema["description"].as_str() {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    out.push_str("{\n");
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (key, property) in schema["properties"].as_object().into_iter().flatten() {
        let mark = if required.contains(&key.as_str()) { "" } else { "?" };
        push_property(&mut out, &format!("{key}{mark}"), property, indent);
    }
    out.push_str(&format!("{indent}}}"));
    out
}

/// Adds one property: comments such as its title, description and examples, then the line `key: type,`.
fn push_property(out: &mut String, key: &str, property: &Value, indent: &str) {
    if let Some(title) = property["title"].as_str() {
        out.push_str(&format!("{indent}// {title}\n{indent}//\n"));
    }
    let variants = property["oneOf"].as_array();
    let description = property["description"].as_str();
    if let (Some(description), None) = (description, property.get("oneOf")) {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    let examples = property["examples"].as_array().filter(|examples| !examples.is_empty());
    if let Some(examples) = examples {
        out.push_str(&format!("{indent}// Examples:\n"));
        for example in examples.iter().filter_map(Value::as_str) {
            out.push_str(&format!("{indent}// - \"{example}\"\n"));
        }
    }
    if let Some(variants) = variants {
        return push_choice(out, key, property, variants, indent);
    }
    let ty = with_null(property, type_of(property, &format!("{indent}    ")));
    out.push_str(&format!("{indent}{key}: {ty},"));
    push_notes(out, &default_note(property).into_iter().collect::<Vec<_>>());
    out.push('\n');
}

/// Adds a property with `oneOf`: one variant per line. The property's description is written above the
/// variants, unless the first variant has the same description. A variant's description follows the variant.
/// It is omitted if it equals the property's description. The first variant's description is also omitted if
/// the property's description is written above.
fn push_choice(out: &mut String, key: &str, property: &Value, variants: &[Value], indent: &str) {
    let first = variants.first().and_then(|variant| variant["description"].as_str());
    let description = property["description"].as_str();
    let above = description.filter(|text| Some(*text) != first);
    if let Some(text) = above {
        out.push_str(&format!("{indent}// {text}\n"));
    }
    if let Some(note) = default_note(property) {
        out.push_str(&format!("{indent}// {note}\n"));
    }
    out.push_str(&format!("{indent}{key}:\n"));
    for (i, variant) in variants.iter().enumerate() {
        let ty = with_null(variant, type_of(variant, &format!("{indent}   ")));
        out.push_str(&format!("{indent} | {ty}"));
        let omits_description = i == 0 && above.is_some();
        let text =
            variant["description"].as_str().filter(|text| !omits_description && Some(*text) != description);
        push_notes(out, &text.map(String::from).into_iter().chain(default_note(variant)).collect::<Vec<_>>());
        out.push('\n');
    }
    out.push_str(&format!("{indent},\n"));
}
