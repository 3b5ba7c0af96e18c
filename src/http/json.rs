//! Bodies in JSON. A value can be a hundred times as large as its text, so its memory is counted first.

use super::budget::{Budget, Share};
use super::{HttpRequest, MEMORY_WAIT, SPENT};
use memmap2::MmapMut;
use serde_json::Value;
use std::ops::Deref;
use std::sync::Arc;

/// Maximum bytes of an element of a list: its value, three times because the list grows by doubling and is
/// copied, and the text of a number.
const ELEMENT_BYTES: usize = 3 * size_of::<Value>() + 24;
/// Maximum bytes of an entry of an object: as an element, with its key, its hash and its place in the table.
const ENTRY_BYTES: usize = ELEMENT_BYTES + 168;
/// Number of copies of the texts: the value's, the messages', and up to three while one grows.
const TEXT_COPIES: usize = 5;

/// A request's body, with its share of the memory. [`HttpRequest::json`] takes it.
#[derive(Debug)]
pub(super) struct RequestBody {
    /// The allocator keeps what is freed, for each thread. A mapping returns to the system.
    pub map: MmapMut,
    /// Number of bytes that are used.
    pub length: usize,
    pub _share: Share,
    /// The budget of the value.
    pub values: Arc<Budget>,
}

/// A parsed body. Its memory returns to the budget when it is dropped.
#[derive(Debug)]
pub struct Json {
    value: Value,
    _share: Share,
}

impl Deref for Json {
    type Target = Value;

    fn deref(&self) -> &Value {
        &self.value
    }
}

impl HttpRequest {
    /// Parses the body, and frees its bytes. A later call finds an empty body.
    ///
    /// # Errors
    /// Status and message for a body that is no JSON, that would take too much memory, or for which no memory
    /// becomes free.
    pub fn json(&self) -> Result<Json, (&'static str, String)> {
        let no_json = |error| ("400 Bad Request", format!("the body is not valid JSON: {error}"));
        let body = self.body.take().ok_or_else(|| no_json("it is empty".to_owned()))?;
        let text = body.map.get(..body.length).unwrap_or_default();
        let (needed, whole) = (parsed_bytes_max(text), body.values.bytes);
        if needed > whole {
            let why = format!(
                "the JSON would take up to {needed} bytes of memory, more than {whole}; send fewer values in a request"
            );
            return Err(("413 Content Too Large", why));
        }
        let share = body.values.take(needed, MEMORY_WAIT);
        let share = share.ok_or_else(|| (SPENT.status, SPENT.message.to_owned()))?;
        let value = serde_json::from_slice(text).map_err(|error| no_json(error.to_string()))?;
        Ok(Json { value, _share: share })
    }
}

/// Returns the maximum memory of `text` once it is parsed. In every object an entry has a colon; in every
/// list, an element follows the bracket or a comma.
fn parsed_bytes_max(text: &[u8]) -> usize {
    let (mut bytes, mut in_text, mut is_escaped) = (TEXT_COPIES * text.len(), false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b':' => bytes += ENTRY_BYTES,
            b',' => bytes += ELEMENT_BYTES,
            // The smallest list has space for four elements.
            b'[' => bytes += 4 * size_of::<Value>(),
            _ => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_memory_of_a_value_is_counted_from_its_text() {
        let values = |text: &str| parsed_bytes_max(text.as_bytes()) - TEXT_COPIES * text.len();
        for (text, expected) in [
            ("", 0),
            ("\"a:,[\"", 0),
            (r#""\",[:\\""#, 0),
            ("[0,1]", 4 * size_of::<Value>() + ELEMENT_BYTES),
            (r#"{"a": "b\\", "c": 1}"#, 2 * ENTRY_BYTES + ELEMENT_BYTES),
        ] {
            assert_eq!(values(text), expected, "{text}");
        }
    }

    /// Objects of 7 bytes took 400 bytes each, so 24 bodies of 4 MB took gigabytes.
    #[test]
    fn bug_a_body_that_grows_when_it_is_parsed_is_refused() {
        let request = |text: String, values: &Arc<Budget>| {
            let mut map = MmapMut::map_anon(text.len()).unwrap();
            map.copy_from_slice(text.as_bytes());
            let share = Budget::new(0).take(0, Duration::ZERO).unwrap();
            let body = RequestBody { map, length: text.len(), _share: share, values: values.clone() };
            HttpRequest { body: Some(body).into(), ..HttpRequest::default() }
        };
        let many = format!("[{}0]", "{\"\":0},".repeat(100_000));
        assert_eq!(request(many, &Budget::new(32 << 20)).json().unwrap_err().0, "413 Content Too Large");
        let values = Budget::new(1 << 10);
        let small = request("[1]".to_owned(), &values);
        let parsed = small.json().unwrap();
        assert_eq!(*parsed, serde_json::json!([1]));
        // Its memory is taken until the value is dropped.
        assert!(values.take(1 << 10, Duration::ZERO).is_none());
        drop(parsed);
        assert!(values.take(1 << 10, Duration::ZERO).is_some());
        assert_eq!(small.json().unwrap_err().0, "400 Bad Request");
    }
}
