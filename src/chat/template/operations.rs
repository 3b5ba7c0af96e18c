//! The operators, filters, tests and methods of templates: Python's, with a bound on all of them together.

use super::compile::ONE;
use super::python::{DEPTH_MAX, Writer, error, is_equal};
use super::{methods, too_deep, too_large};
use minijinja::value::{Kwargs, Object, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use std::cmp::Ordering::Less;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum bytes that the operations of a rendering may read and write, together.
const WORK_BYTES_MAX: usize = 64 << 20;
/// Bytes that count for each item of a list.
const ITEM_BYTES: usize = 32;
/// Filters of the engine that do what Jinja's do. Their work is bounded by their input.
const FILTERS: &str = "abs attr d default dictsort first float groupby int items last list map max min \
    reject rejectattr reverse round safe select selectattr sort sum unique indent";
/// Filters that are implemented here.
const OWN_FILTERS: &str = "trim replace upper lower capitalize title string tojson length count join escape \
    e";

/// The bytes that a rendering may still read and write.
#[derive(Debug)]
struct Work(AtomicUsize);

impl Object for Work {}

/// Counts `bytes` of work.
///
/// # Errors
/// When the rendering takes too much.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    let work = state.get_or_set_temp_object("work", || Work(AtomicUsize::new(WORK_BYTES_MAX)));
    let spend = |left: usize| left.checked_sub(bytes);
    work.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).map(drop).map_err(|_| too_large())
}

/// Returns the bytes that are left.
fn left(state: &State) -> usize {
    state.get_or_set_temp_object("work", || Work(AtomicUsize::new(WORK_BYTES_MAX))).0.load(Ordering::Relaxed)
}

/// Returns the bytes of a value, without those of the items in its items.
fn shallow_bytes(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => ITEM_BYTES * (1 + value.len().filter(|_| value.kind() != ValueKind::Iterable).unwrap_or(0)),
    }
}

/// Counts the work of reading a value and all that it holds.
///
/// # Errors
/// When that is too much, or the value is too deep.
fn charge_all(state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    charge(state, shallow_bytes(value))?;
    if depth > DEPTH_MAX {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Seq => value.try_iter()?.try_for_each(|item| charge_all(state, &item, depth + 1)),
        ValueKind::Map => {
            value.try_iter()?.try_for_each(|key| charge_all(state, &value.get_item(&key)?, depth + 1))
        }
        _ => Ok(()),
    }
}

/// Returns a result whose work is counted. A list that would be computed later is computed now.
fn counted(state: &State, value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        charge(state, shallow_bytes(&value))?;
        return Ok(value);
    }
    let item = |item: Value| charge(state, shallow_bytes(&item)).map(|()| item);
    Ok(Value::from(value.try_iter()?.map(item).collect::<Result<Vec<Value>, Error>>()?))
}

/// Returns the text of a value as Python's `str`.
pub(super) fn text_of(state: &State, value: &Value) -> Result<String, Error> {
    let mut writer = Writer::python(left(state));
    writer.value(value)?;
    charge(state, writer.text.len())?;
    Ok(writer.text)
}

/// Writes a value into the output.
fn format(out: &mut Output, state: &State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => {
            charge(state, text.len())?;
            out.write_str(text)
        }
        None => out.write_str(&text_of(state, value)?),
    };
    written.map_err(|_| error("the text cannot be written"))
}

fn undefined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() { Err(Error::from(ErrorKind::UndefinedError)) } else { Ok(()) }
}

fn items(value: &Value) -> Option<Vec<Value>> {
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    value.try_iter().ok().filter(|_| is_list).map(Iterator::collect)
}

fn unfit(operator: &str, a: &Value, b: &Value) -> Error {
    error(format!("{operator} does not take {} and {}", a.kind(), b.kind()))
}

fn numbers(a: &Value, b: &Value) -> Option<(f64, f64)> {
    let float = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    };
    Some((float(a)?, float(b)?))
}

fn integers(a: &Value, b: &Value) -> Option<(i128, i128)> {
    let whole = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        _ => value.is_integer().then(|| i128::try_from(value.clone()).ok()).flatten(),
    };
    Some((whole(a)?, whole(b)?))
}

/// Returns a whole number as a value, in the engine's usual type if it fits.
fn whole(number: Option<i128>) -> Result<Value, Error> {
    let number = number.ok_or_else(|| error("a number is too large"))?;
    Ok(i64::try_from(number).map_or_else(|_| Value::from(number), Value::from))
}

fn add(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    undefined(&a)?;
    undefined(&b)?;
    charge(state, shallow_bytes(&a) + shallow_bytes(&b))?;
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        if !a.is_safe() && !b.is_safe() {
            return Ok(Value::from([left, right].concat()));
        }
        // Jinja escapes what is added to a text that is marked as safe.
        charge(state, 6 * (left.len() + right.len()))?;
        let escaped = |value: &Value, text: &str| {
            if value.is_safe() { text.to_owned() } else { methods::escaped(text) }
        };
        return Ok(Value::from_safe_string(escaped(&a, left) + &escaped(&b, right)));
    }
    if let (Some(left), Some(right)) = (items(&a), items(&b)) {
        return Ok(Value::from([left, right].concat()));
    }
    match (integers(&a, &b), numbers(&a, &b)) {
        (Some((x, y)), _) => whole(x.checked_add(y)),
        (_, Some((x, y))) => Ok(Value::from(x + y)),
        _ => Err(unfit("+", &a, &b)),
    }
}

fn multiply(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    let (a, b) = if b.as_str().is_some() || items(&b).is_some() { (b, a) } else { (a, b) };
    let times = || b.is_integer().then(|| b.as_i64()).flatten().map(|times| times.max(0) as usize);
    let repeated = |times: usize| charge(state, shallow_bytes(&a).saturating_mul(times));
    match (a.as_str(), items(&a), times()) {
        (Some(text), _, Some(times)) => repeated(times).map(|()| Value::from(text.repeat(times))),
        (_, Some(list), Some(times)) => {
            repeated(times).map(|()| Value::from_iter(std::iter::repeat_n(list, times).flatten()))
        }
        _ => match (integers(&a, &b), numbers(&a, &b)) {
            (Some((x, y)), _) => whole(x.checked_mul(y)),
            (_, Some((x, y))) => Ok(Value::from(x * y)),
            _ => Err(unfit("*", &a, &b)),
        },
    }
}

fn concatenate(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    Ok(Value::from(text_of(state, &a)? + &text_of(state, &b)?))
}

fn equals(state: &State, a: Value, b: Value) -> Result<bool, Error> {
    if a.kind() == b.kind() {
        charge_all(state, &a, 0)?;
    }
    Ok(is_equal(&a, &b))
}

fn less(state: &State, a: Value, b: Value) -> Result<bool, Error> {
    charge(state, shallow_bytes(&a))?;
    match (a.as_str(), b.as_str(), numbers(&a, &b)) {
        (Some(a), Some(b), _) => Ok(a < b),
        (.., Some((x, y))) => Ok(x.partial_cmp(&y) == Some(Less)),
        _ => Err(unfit("<", &a, &b)),
    }
}

fn contains(state: &State, value: Value, container: Value) -> Result<bool, Error> {
    match container.as_str() {
        Some(text) => {
            charge(state, text.len())?;
            let part = value.as_str().ok_or_else(|| unfit("in", &value, &container))?;
            Ok(text.contains(part))
        }
        None if container.kind() == ValueKind::Map => {
            let is_key = !matches!(value.kind(), ValueKind::Seq | ValueKind::Map);
            Ok(is_key && container.get_item(&value).is_ok_and(|found| !found.is_undefined()))
        }
        None if container.is_undefined() => Ok(false),
        None => {
            charge_all(state, &container, 0)?;
            let list = items(&container).ok_or_else(|| unfit("in", &value, &container))?;
            Ok(list.iter().any(|item| is_equal(item, &value)))
        }
    }
}

fn item(state: &State, value: Value, key: Value) -> Result<Value, Error> {
    undefined(&value)?;
    charge(state, value.as_str().map_or(ITEM_BYTES, str::len))?;
    Ok(value.get_item(&key).unwrap_or(Value::UNDEFINED))
}

/// Returns every `step`-th item from `start` to `stop`, as Python's slices.
fn slice(state: &State, value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let whole = |value: &Value| match value.is_none() || value.is_undefined() {
        true => Ok(None),
        false => value.as_i64().map(Some).ok_or_else(|| error("a slice takes whole numbers")),
    };
    let step = whole(&step)?.unwrap_or(1);
    charge(
        state,
        shallow_bytes(&value).saturating_mul(if value.as_str().is_some() { ITEM_BYTES } else { 1 }),
    )?;
    let list = match value.as_str() {
        Some(text) => text.chars().map(Value::from).collect(),
        None => items(&value).ok_or_else(|| error(format!("{} has no slices", value.kind())))?,
    };
    let length = list.len() as i64;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |at: Option<i64>, default: i64| {
        at.map_or(default, |at| (if at < 0 { at.saturating_add(length) } else { at }).clamp(low, high))
    };
    let (first, end) = if step > 0 { (low, high) } else { (high, low) };
    let (mut at, end) = (place(whole(&start)?, first), place(whole(&stop)?, end));
    let mut taken = vec![];
    if step == 0 {
        return Err(error("the step of a slice is 0"));
    }
    while if step > 0 { at < end } else { at > end } {
        taken.extend(list.get(at as usize).cloned());
        at = at.saturating_add(step);
    }
    Ok(match value.as_str() {
        Some(_) => Value::from(taken.iter().filter_map(Value::as_str).collect::<String>()),
        None => Value::from(taken),
    })
}

/// Returns a value that may be iterated, as a list if it is none.
fn iterable(state: &State, value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Undefined | ValueKind::String => {
            charge(state, shallow_bytes(&value))?;
            Ok(value)
        }
        ValueKind::Iterable => counted(state, value),
        kind => Err(error(format!("{kind} is not iterable"))),
    }
}

/// Returns an attribute whose name is also that of a method of dictionaries: the method, which is true and
/// cannot be written.
fn attribute(value: Value, name: &str) -> Result<Value, Error> {
    undefined(&value)?;
    match value.kind() {
        ValueKind::Map => Ok(Value::from_function(|| ())),
        _ => Ok(value.get_attr(name).unwrap_or(Value::UNDEFINED)),
    }
}

/// Applies the filter whose name is the last argument.
fn filter(state: &State, Rest(mut arguments): Rest<Value>) -> Result<Value, Error> {
    let name = arguments.pop().unwrap_or_default();
    apply(state, name.as_str().unwrap_or_default(), &arguments)
}

fn apply(state: &State, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    arguments.iter().try_for_each(|value| charge(state, shallow_bytes(value)))?;
    let Some(value) = arguments.first().cloned() else { return Err(error("a filter without a value")) };
    match name {
        "trim" => return methods::text(state, "strip", arguments),
        "title" => return methods::text(state, methods::WORDS, arguments),
        "replace" | "upper" | "lower" | "capitalize" => {
            return methods::text(state, name, arguments);
        }
        "string" => return Ok(if value.as_str().is_some() { value } else { text_of(state, &value)?.into() }),
        "tojson" => {
            let (_, options): (Value, Kwargs) = from_args(arguments)?;
            let mut writer = Writer::json(left(state), &options)?;
            charge_all(state, &value, 0)?;
            writer.value(&value)?;
            charge(state, writer.text.len())?;
            return Ok(writer.text.into());
        }
        "length" | "count" => {
            let length = value.len().or(value.is_undefined().then_some(0));
            return length.map(Value::from).ok_or_else(|| error(format!("{} has no length", value.kind())));
        }
        "join" => return join(state, arguments),
        "escape" | "e" => {
            let text = text_of(state, &value)?;
            charge(state, 6 * text.len())?;
            let text = if value.is_safe() { text } else { methods::escaped(&text) };
            return Ok(Value::from_safe_string(text));
        }
        "indent" if arguments.get(1).and_then(Value::as_i64).is_some_and(|width| width > 64) => {
            return Err(error("an indentation of more than 64"));
        }
        "indent" => charge(state, 64 * shallow_bytes(&value))?,
        "sort" | "unique" | "min" | "max" | "groupby" => {
            (0..20).try_for_each(|_| charge_all(state, &value, 0))?;
        }
        name if FILTERS.split(' ').all(|known| known != name) => {
            return Err(Error::new(
                ErrorKind::UnknownFilter,
                format!("the filter {name:?} is not supported"),
            ));
        }
        _ => {}
    }
    counted(state, state.apply_filter(name, arguments)?)
}

fn join(state: &State, arguments: &[Value]) -> Result<Value, Error> {
    let (options, given) = match arguments.split_last() {
        Some((last, given)) if last.is_kwargs() => (Kwargs::try_from(last.clone())?, given),
        _ => (Kwargs::from_iter(std::iter::empty::<(&str, Value)>()), arguments),
    };
    let value = given.first().cloned().unwrap_or_default();
    let between = given.get(1).cloned().or(options.get::<Option<Value>>("d")?);
    let between = between.map_or(Ok(String::new()), |between| text_of(state, &between))?;
    let attribute = options.get::<Option<Value>>("attribute")?;
    let mut text = String::new();
    for (index, item) in iterable(state, value)?.try_iter()?.enumerate() {
        let item = attribute.as_ref().map_or(Ok(item.clone()), |key| item.get_item(key))?;
        charge(state, between.len())?;
        text += if index > 0 { &between } else { "" };
        text += &text_of(state, &item)?;
    }
    Ok(text.into())
}

/// Applies the test whose name is the last argument.
fn test(state: &State, Rest(mut arguments): Rest<Value>) -> Result<bool, Error> {
    let name = arguments.pop().unwrap_or_default();
    let name = name.as_str().unwrap_or_default();
    if matches!(name, "eq" | "equalto" | "==" | "ne" | "!=" | "in" | "sameas") {
        arguments.iter().try_for_each(|value| charge_all(state, value, 0))?;
    } else {
        arguments.iter().try_for_each(|value| charge(state, shallow_bytes(value)))?;
    }
    state.perform_test(name, &arguments)
}

/// Calls the method whose name is the last argument.
fn method(state: &State, Rest(mut arguments): Rest<Value>) -> Result<Value, Error> {
    let name = arguments.pop().unwrap_or_default();
    let name = name.as_str().unwrap_or_default();
    arguments.iter().try_for_each(|value| charge(state, shallow_bytes(value)))?;
    let Some((value, rest)) = arguments.split_first() else { return Err(error("a method without a value")) };
    let result = match value.kind() {
        ValueKind::String => return methods::text(state, name, &arguments),
        ValueKind::Map => match methods::dict(name, value, rest)? {
            Some(result) => result,
            None => value.call_method(state, name, rest)?,
        },
        ValueKind::Seq => methods::list(name, value, rest)?,
        ValueKind::Undefined => return Err(Error::from(ErrorKind::UndefinedError)),
        _ => value.call_method(state, name, rest)?,
    };
    counted(state, result)
}

/// Adds the operations to an environment.
pub(super) fn install(environment: &mut Environment) {
    environment.set_formatter(format);
    environment.add_filter("+", add);
    environment.add_filter("*", multiply);
    environment.add_filter("~", concatenate);
    environment.add_filter("==", equals);
    environment.add_filter("<", less);
    environment.add_filter("in", contains);
    environment.add_filter("item", item);
    environment.add_filter("slice", slice);
    environment.add_filter("iterable", iterable);
    environment
        .add_filter("nested", |state: &State, value: Value| charge_all(state, &value, 0).map(|()| value));
    environment.add_filter("attribute", attribute);
    environment.add_filter("filter", filter);
    for name in OWN_FILTERS.split(' ') {
        let own = move |state: &State, Rest(arguments): Rest<Value>| apply(state, name, &arguments);
        environment.add_filter(name, own);
    }
    environment.add_global(ONE, 1);
    environment.add_filter("test", test);
    environment.add_filter("method", method);
}
