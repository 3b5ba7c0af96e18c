//! Methods of Python's texts, lists and dictionaries.

use super::operations::{charge, text_of};
use super::python::{error, is_equal};
use minijinja::value::{Rest, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// The name of the filter `title`, whose words differ from those of the method.
pub(super) const WORDS: &str = "title of words";

/// Returns whether Python counts a character as white space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Returns a text with HTML's special characters escaped.
pub(super) fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&#34;").replace('\'', "&#39;")
}

fn unknown(name: &str, kind: &str) -> Error {
    Error::new(ErrorKind::UnknownMethod, format!("the method {name:?} of a {kind} is not supported"))
}

fn without_arguments(name: &str, rest: &[Value]) -> Result<(), Error> {
    if rest.is_empty() { Ok(()) } else { Err(error(format!("{name}() takes no arguments here"))) }
}

/// Calls a method of a text, the first of `arguments`.
pub(super) fn text(state: &State, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let Some((value, rest)) = arguments.split_first() else { return Err(unknown(name, "text")) };
    let owned = value.as_str().is_none().then(|| text_of(state, value)).transpose()?;
    let text = owned.as_deref().or(value.as_str()).unwrap_or_default();
    charge(state, 4 * text.len())?;
    let is_stripped = |rest: &[Value]| -> Result<Box<dyn Fn(char) -> bool>, Error> {
        let (characters,): (Option<Value>,) = from_args(rest)?;
        match characters.filter(|characters| !characters.is_none()) {
            None => Ok(Box::new(is_space)),
            Some(characters) => {
                let set =
                    characters.as_str().ok_or_else(|| error(format!("{name}() takes a text")))?.to_owned();
                Ok(Box::new(move |c| set.contains(c)))
            }
        }
    };
    Ok(match name {
        "strip" => text.trim_matches(is_stripped(rest)?).into(),
        "lstrip" => text.trim_start_matches(is_stripped(rest)?).into(),
        "rstrip" => text.trim_end_matches(is_stripped(rest)?).into(),
        "split" | "rsplit" => {
            let parts = split(text, name == "rsplit", rest)?;
            charge(state, 32 * parts.len())?;
            Value::from_iter(parts)
        }
        "startswith" | "endswith" => {
            let (affix,): (Value,) = from_args(rest)?;
            let has = |affix: &Value| match affix.as_str() {
                Some(affix) if name == "startswith" => Ok(text.starts_with(affix)),
                Some(affix) => Ok(text.ends_with(affix)),
                None => Err(error(format!("{name}() takes a text"))),
            };
            match affix.as_str() {
                Some(_) => has(&affix)?.into(),
                None => {
                    let found: Vec<bool> =
                        affix.try_iter()?.map(|affix| has(&affix)).collect::<Result<_, _>>()?;
                    found.contains(&true).into()
                }
            }
        }
        "replace" => {
            let (from, to, count): (&str, Value, Option<i64>) = from_args(rest)?;
            let to = to.as_str().ok_or_else(|| error("replace() takes texts"))?;
            let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
            charge(state, text.matches(from).take(count).count().saturating_mul(to.len()))?;
            text.replacen(from, to, count).into()
        }
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(rest)?;
            let cut =
                if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            cut.unwrap_or(text).into()
        }
        "find" | "rfind" | "index" | "count" => {
            let (part,): (&str,) = from_args(rest)?;
            let at = if name == "rfind" { text.rfind(part) } else { text.find(part) };
            match at.map(|at| text[..at].chars().count() as i64) {
                _ if name == "count" => (text.matches(part).count() as i64).into(),
                None if name == "index" => return Err(error("index(): the text is not found")),
                at => at.unwrap_or(-1).into(),
            }
        }
        "join" => {
            let (list,): (Value,) = from_args(rest)?;
            let mut joined = String::new();
            for (index, item) in list.try_iter()?.enumerate() {
                let item = item.as_str().map(str::to_owned).ok_or_else(|| error("join() takes texts"))?;
                charge(state, text.len() + item.len())?;
                joined += if index > 0 { text } else { "" };
                joined += &item;
            }
            joined.into()
        }
        _ => {
            without_arguments(name, rest)?;
            let all = |is: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(is));
            match name {
                "upper" => text.to_uppercase().into(),
                "lower" => text.to_lowercase().into(),
                "capitalize" => {
                    let mut rest = text.chars();
                    let first = rest.next().map(|c| c.to_uppercase().collect::<String>());
                    (first.unwrap_or_default() + &rest.as_str().to_lowercase()).into()
                }
                "title" => title(text, |c| !c.is_alphabetic()).into(),
                WORDS => title(text, |c| c.is_whitespace() || "-({[<".contains(c)).into(),
                "splitlines" => Value::from_iter(text.lines()),
                "isdigit" | "isnumeric" | "isdecimal" => all(char::is_numeric),
                "isalpha" => all(char::is_alphabetic),
                "isalnum" => all(char::is_alphanumeric),
                "isspace" => all(is_space),
                "isupper" => {
                    (text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)).into()
                }
                "islower" => {
                    (text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)).into()
                }
                _ => return Err(unknown(name, "text")),
            }
        }
    })
}

/// Splits at a separator, at most a number of times, from the start or from the end.
fn split<'t>(text: &'t str, from_end: bool, rest: &[Value]) -> Result<Vec<&'t str>, Error> {
    let (separator, most): (Option<Value>, Option<i64>) = from_args(rest)?;
    let most =
        most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
    let separator = separator.filter(|separator| !separator.is_none());
    let Some(separator) = &separator else {
        let words = text.split(is_space).filter(|word| !word.is_empty());
        return if most == usize::MAX {
            Ok(words.collect())
        } else {
            Err(error("split() needs a separator"))
        };
    };
    match separator.as_str() {
        Some("") | None => Err(error("the separator of a split must be a text")),
        Some(separator) if from_end => {
            let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
            parts.reverse();
            Ok(parts)
        }
        Some(separator) => Ok(text.splitn(most, separator).collect()),
    }
}

/// Returns a text with every word's first letter in upper case.
fn title(text: &str, is_between: fn(char) -> bool) -> String {
    let mut is_within = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match std::mem::replace(&mut is_within, !is_between(c)) {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
    }
    out
}

/// Calls a method of a dictionary; `None` if it has no such method.
pub(super) fn dict(name: &str, value: &Value, rest: &[Value]) -> Result<Option<Value>, Error> {
    let keys = || Ok::<Vec<Value>, Error>(value.try_iter()?.collect());
    let pair = |key: Value| Ok(Value::from(vec![key.clone(), value.get_item(&key)?]));
    Ok(Some(match name {
        "get" => {
            let (key, default): (Value, Option<Value>) = from_args(rest)?;
            let found = Some(value.get_item(&key)?).filter(|found| !found.is_undefined());
            found.or(default).unwrap_or(Value::from(()))
        }
        "keys" | "values" | "items" => {
            without_arguments(name, rest)?;
            match name {
                "keys" => Value::from(keys()?),
                "values" => {
                    let values = keys()?.into_iter().map(|key| value.get_item(&key));
                    Value::from(values.collect::<Result<Vec<Value>, Error>>()?)
                }
                _ => Value::from(keys()?.into_iter().map(pair).collect::<Result<Vec<Value>, Error>>()?),
            }
        }
        _ => return Ok(None),
    }))
}

/// Calls a method of a list.
pub(super) fn list(name: &str, value: &Value, rest: &[Value]) -> Result<Value, Error> {
    let Rest(wanted): Rest<Value> = Rest(rest.to_vec());
    let [wanted] = &wanted[..] else { return Err(unknown(name, "list")) };
    let mut equal = value.try_iter()?.enumerate().filter(|(_, item)| is_equal(item, wanted));
    match name {
        "count" => Ok(Value::from(equal.count())),
        "index" => equal.next().map(|(at, _)| Value::from(at)).ok_or_else(|| error("index(): no such item")),
        _ => Err(unknown(name, "list")),
    }
}
