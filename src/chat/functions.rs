//! Functions of a task in the format of GPT-OSS's published template: a namespace of TypeScript types.
//!
//! The output equals the template's output, including white space. openai-harmony renders functions
//! differently. [`crate::harmony::DeveloperContent`] follows openai-harmony.

use super::chatml::json_text;
use serde_json::Value;

/// Maximum length of an array's item type, in characters. A longer type becomes `any`.
const ITEM_CHARS_MAX: usize = 50;

/// Checks functions in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": …}}`.
///
/// # Errors
/// The number of the first invalid function (from 0) and the reason.
pub fn check_functions(functions: &[Value]) -> Result<(), String> {
    let named =
        |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-'));
    for (i, tool) in functions.iter().enumerate() {
        let function = &tool["function"];
        let wrong = |key: &Value, right: bool| !key.is_null() && !right;
        let reason = if tool["type"] != "function" || !function.is_object() {
            "write {\"type\": \"function\", \"function\": {...}}"
        } else if !function["name"].as_str().is_some_and(named) {
            "`function.name` must consist of letters, digits, _ and -"
        } else if wrong(&function["description"], function["description"].is_string()) {
            "`function.description` must be a string"
        } else if wrong(&function["parameters"], function["parameters"].is_object()) {
            "`function.parameters` must be a JSON schema, an object"
        } else if let Some(reason) = schema_error(&function["parameters"]) {
            reason
        } else {
            continue;
        };
        return Err(format!("tool {i}: {reason}"));
    }
    Ok(())
}

/// Returns why `schema`, an object or null, does not describe the arguments of a function.
fn schema_error(schema: &Value) -> Option<&'static str> {
    let is_schema = |value: &Value| value.is_object() || value.is_boolean();
    let (kind, properties, required) = (&schema["type"], &schema["properties"], &schema["required"]);
    let is_object = kind == "object" || kind.as_array().is_some_and(|kinds| kinds.contains(&"object".into()));
    if !kind.is_null() && !is_object {
        Some("`function.parameters.type` must be \"object\"")
    } else if !properties.is_null() && !properties.as_object().is_some_and(|all| all.values().all(is_schema))
    {
        Some("`function.parameters.properties` must be an object of JSON schemas")
    } else if !required.is_null()
        && !required.as_array().is_some_and(|names| names.iter().all(Value::is_string))
    {
        Some("`function.parameters.required` must be a list of names")
    } else {
        None
    }
}

/// Keywords of JSON Schema that a namespace does not show.
const HIDDEN_KEYWORDS: [&str; 3] = ["$ref", "anyOf", "allOf"];

/// Checks that a namespace can declare the parameters of `functions`.
///
/// # Errors
/// The first function whose schema has no `properties` but says in another way what the parameters are, with
/// the remedy. The model would see a function without parameters.
pub fn check_namespace(functions: &[Value]) -> Result<(), String> {
    for tool in functions {
        let (name, schema) = (&tool["function"]["name"], &tool["function"]["parameters"]);
        let keyword = HIDDEN_KEYWORDS.iter().chain(&["oneOf"]).find(|keyword| schema.get(keyword).is_some());
        if let (Some(keyword), true) = (keyword, schema["properties"].is_null()) {
            return Err(format!(
                "tool {name}: its parameters are written with `{keyword}`, which Harmony cannot show; write them as \
                 `properties`, or leave the tool out"
            ));
        }
    }
    Ok(())
}

/// Returns the parameters of `functions` whose schemas have keywords that a namespace does not show.
pub fn simplified_parameters(functions: &[Value]) -> Vec<String> {
    let mut found = vec![];
    for function in functions.iter().map(|tool| &tool["function"]) {
        for (parameter, schema) in function["parameters"]["properties"].as_object().into_iter().flatten() {
            let text = schema.to_string();
            if HIDDEN_KEYWORDS.iter().any(|keyword| text.contains(&format!("\"{keyword}\":"))) {
                found.push(format!("{}.{parameter}", function["name"].as_str().unwrap_or_default()));
            }
        }
    }
    found
}

/// Returns the part of a developer message that declares `functions`.
pub fn render_namespace(functions: &[Value]) -> String {
    let mut out = "# Tools\n\n## functions\n\nnamespace functions {\n\n".to_owned();
    for tool in functions {
        let function = &tool["function"];
        if let Some(description) = function["description"].as_str() {
            out += &format!("// {description}\n");
        }
        out += &format!("type {} = ", function["name"].as_str().unwrap_or_default());
        let schema = &function["parameters"];
        match schema["properties"].as_object().filter(|properties| !properties.is_empty()) {
            Some(properties) => {
                out += "(_: {\n";
                properties
                    .iter()
                    .for_each(|(name, property)| push_parameter(&mut out, schema, name, property));
                out += "}) => any;\n\n";
            }
            None => out += "() => any;\n\n",
        }
    }
    out + "} // namespace functions"
}

fn push_parameter(out: &mut String, function: &Value, name: &str, schema: &Value) {
    if let Some(description) = text(schema, "description") {
        *out += &format!("// {description}\n");
    }
    *out += &format!("{name}{}: {}", optional_mark(function, name), type_of(schema));
    if let Some(default) = schema.get("default") {
        *out += &if !list(schema, "enum").is_empty() {
            format!(", // default: {}", python_str(default))
        } else if !list(schema, "oneOf").is_empty() {
            format!("// default: {}", python_str(default))
        } else {
            format!(", // default: {}", json_text(default))
        };
    }
    *out += ",\n";
}

fn type_of(schema: &Value) -> String {
    let nullable = if schema["nullable"] == true { " | null" } else { "" };
    let kind = schema["type"].as_str().unwrap_or_default();
    let (types, variants) = (list(schema, "type"), list(schema, "oneOf"));
    if kind == "array" {
        return format!("{}[]{nullable}", item_of(&schema["items"]));
    }
    if !types.is_empty() {
        return types.iter().map(python_str).collect::<Vec<_>>().join(" | ");
    }
    if !variants.is_empty() {
        return variants.iter().map(variant_of).collect::<Vec<_>>().join(" | \n");
    }
    match kind {
        "string" => match list(schema, "enum") {
            [] => format!("string{nullable}"),
            words => format!("\"{}\"", words.iter().map(python_str).collect::<Vec<_>>().join("\" | \"")),
        },
        "number" | "integer" => "number".into(),
        "boolean" => "boolean".into(),
        "object" => object_of(schema),
        _ => "any".into(),
    }
}

/// Returns the type of an array's items. It is `any` if `items` is absent or empty, or if the type is longer
/// than [`ITEM_CHARS_MAX`].
fn item_of(items: &Value) -> String {
    match items["type"].as_str() {
        Some("string") => return "string".into(),
        Some("number" | "integer") => return "number".into(),
        Some("boolean") => return "boolean".into(),
        _ if items.as_object().is_none_or(serde_json::Map::is_empty) => return "any".into(),
        _ => {}
    }
    let inner = type_of(items);
    if inner == "object | object" || inner.chars().count() > ITEM_CHARS_MAX { "any".into() } else { inner }
}

/// Returns one alternative of `oneOf`. The number of spaces before the default value is the same as in
/// the template.
fn variant_of(schema: &Value) -> String {
    let description = text(schema, "description").map(|text| format!("// {text}")).unwrap_or_default();
    let default = schema.get("default").map(|default| format!("{:20}// default: {}", "", json_text(default)));
    format!("{}{description}{}", type_of(schema), default.unwrap_or_default())
}

fn object_of(schema: &Value) -> String {
    let Some(properties) = schema["properties"].as_object().filter(|properties| !properties.is_empty())
    else {
        return "object".into();
    };
    let property = |(name, property): (&String, &Value)| {
        format!("{name}{}: \n{:16}{}", optional_mark(schema, name), "", type_of(property))
    };
    format!("{{\n{}}}", properties.iter().map(property).collect::<Vec<_>>().join(", "))
}

/// Returns `?` for a parameter that `schema` does not require.
fn optional_mark(schema: &Value, name: &str) -> &'static str {
    if list(schema, "required").iter().any(|required| required == name) { "" } else { "?" }
}

fn list<'a>(schema: &'a Value, key: &str) -> &'a [Value] {
    schema[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text<'a>(schema: &'a Value, key: &str) -> Option<&'a str> {
    schema[key].as_str().filter(|text| !text.is_empty())
}

/// Returns a value in the format of Python's `str`: strings have no quotes.
fn python_str(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Null => "None".into(),
        value => json_text(value),
    }
}
