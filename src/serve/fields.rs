//! The fields of a request's body. [`FIELDS`] has what the server does with each; docs/SERVING.md tells it.

use super::api_error::ApiError;
use crate::settings::closest_word;
use serde_json::{Map, Value};

type Found<T> = Result<Option<T>, ApiError>;

/// Maximum number of likeliest tokens that are reported for each token.
pub(crate) const TOP_MAX: i64 = 20;

/// Maximum bytes of an unknown name for which similar names are searched.
const NAME_BYTES_MAX: usize = 64;

/// The endpoint, which decides the form of a request and of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Chat,
    Text,
}

/// The server's treatment of a field. A null counts as absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The server reads the field, and refuses what it cannot obey.
    Obeyed,
    /// No value changes an answer.
    WithoutMeaning,
    /// Any value but this one, which changes no answer, is refused. The value is JSON; `n` is that of `n`.
    RefusedUnless(&'static str),
}

use Form::{Chat, Text};
use Rule::{Obeyed, RefusedUnless, WithoutMeaning};

/// The known fields. Any other is refused by its name, as OpenAI does.
const FIELDS: [(&[Form], Rule, &str); 20] = [
    (
        &[Chat, Text],
        Obeyed,
        "model n seed temperature top_p top_k min_p max_tokens max_completion_tokens stop stop_token_ids stream \
         stream_options logprobs return_token_ids",
    ),
    (&[Chat], Obeyed, "messages tools tool_choice parallel_tool_calls top_logprobs reasoning_effort"),
    (&[Text], Obeyed, "prompt echo ignore_eos"),
    (
        &[Chat, Text],
        WithoutMeaning,
        "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention \
         prompt_cache_options cache_prompt request_id rid session_id custom_labels add_special_tokens \
         spaces_between_special_tokens",
    ),
    (&[Chat], WithoutMeaning, "prediction"),
    (
        &[Chat, Text],
        RefusedUnless("false"),
        "use_beam_search early_stopping watermarking include_stop_str_in_output no_stop_trim \
         return_tokens_as_token_ids return_hidden_states return_routed_experts return_token_offsets \
         return_cached_tokens_details",
    ),
    (
        &[Chat],
        RefusedUnless("false"),
        "echo ignore_eos continue_final_message return_prompt_text return_prompt_token_ids return_meta_info",
    ),
    (&[Chat, Text], RefusedUnless("true"), "skip_special_tokens"),
    (
        &[Chat],
        RefusedUnless("true"),
        "add_generation_prompt include_reasoning separate_reasoning stream_reasoning",
    ),
    (&[Chat, Text], RefusedUnless("0"), "frequency_penalty presence_penalty min_tokens priority"),
    (&[Chat, Text], RefusedUnless("1"), "repetition_penalty length_penalty"),
    (&[Chat, Text], RefusedUnless("n"), "best_of"),
    (&[Chat, Text], RefusedUnless("{}"), "logit_bias"),
    (&[Chat], RefusedUnless("{}"), "chat_template_kwargs mm_processor_kwargs media_io_kwargs"),
    (&[Chat, Text], RefusedUnless("[]"), "bad_words"),
    (&[Chat], RefusedUnless("[]"), "functions documents"),
    (&[Chat, Text], RefusedUnless("{\"type\": \"text\"}"), "response_format"),
    (&[Chat], RefusedUnless("[\"text\"]"), "modalities"),
    (&[Chat], RefusedUnless("\"medium\""), "verbosity"),
    (&[Text], RefusedUnless("\"\""), "suffix"),
];

/// Returns the fields of `form` with their rules.
fn fields_of(form: Form) -> impl Iterator<Item = (&'static str, Rule)> {
    let rows = FIELDS.iter().filter(move |(forms, ..)| forms.contains(&form));
    rows.flat_map(|&(_, rule, names)| names.split_whitespace().map(move |name| (name, rule)))
}

/// The fields of a JSON object. A null counts as absent.
pub(crate) struct Fields<'v> {
    map: &'v Map<String, Value>,
}

impl<'v> Fields<'v> {
    pub fn new(body: &'v Value) -> Result<Self, ApiError> {
        let map = body.as_object();
        let map = map.ok_or_else(|| ApiError::invalid(None, "the body is not a JSON object".to_owned()))?;
        Ok(Self { map })
    }

    /// Refuses what the server does not support in a request of this form. `told` names fields that the
    /// caller reports in another way.
    pub fn check(&self, form: Form, told: &[&str]) -> Result<(), ApiError> {
        let is_given = |(name, value): &(&String, &Value)| !value.is_null() && !told.contains(&name.as_str());
        for (name, value) in self.map.iter().filter(is_given) {
            let remedy = match fields_of(form).find(|(known, _)| known == name) {
                Some((_, Obeyed | WithoutMeaning)) => continue,
                Some((_, RefusedUnless(neutral))) if self.is_neutral(value, neutral) => continue,
                Some((_, RefusedUnless(neutral))) => format!("leave it out, or give {neutral}"),
                None if name.len() > NAME_BYTES_MAX => "leave it out".to_owned(),
                None => match closest_word(name, fields_of(form).map(|(known, _)| known)) {
                    Some(near) => format!("did you mean {near:?}? Otherwise leave it out"),
                    None => "leave it out".to_owned(),
                },
            };
            return Err(ApiError::invalid(Some(name), format!("{name:?} is not supported: {remedy}")));
        }
        Ok(())
    }

    fn is_neutral(&self, value: &Value, neutral: &str) -> bool {
        let neutral = match neutral {
            "n" => self.value("n").cloned().unwrap_or_else(|| 1.into()),
            text => serde_json::from_str(text).unwrap_or_default(),
        };
        match (value.as_f64(), neutral.as_f64()) {
            (Some(value), Some(neutral)) => value == neutral,
            _ => *value == neutral,
        }
    }

    pub fn value(&self, name: &'static str) -> Option<&'v Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(&self, name: &'static str, what: &str, read: impl Fn(&'v Value) -> Option<T>) -> Found<T> {
        let Some(value) = self.value(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| ApiError::invalid(Some(name), format!("{name:?} must be {what}")))
    }

    pub fn text(&self, name: &'static str) -> Found<&'v str> {
        self.read(name, "a text", Value::as_str)
    }

    pub fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        self.flag_or(name, false)
    }

    /// Returns a flag whose default is `default`.
    pub fn flag_or(&self, name: &'static str, default: bool) -> Result<bool, ApiError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub fn list(&self, name: &'static str) -> Found<&'v [Value]> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// Returns a number from `low` to `high`.
    pub fn number(&self, name: &'static str, low: f64, high: f64) -> Found<f64> {
        let what = format!("a number from {low} to {high}");
        self.read(name, &what, |value| value.as_f64().filter(|number| (low..=high).contains(number)))
    }

    /// Returns a whole number from `low` to `high`.
    pub fn whole(&self, name: &'static str, low: i64, high: i64) -> Found<i64> {
        let what = format!("a whole number from {low} to {high}");
        let read = |value: &Value| value.as_i64().filter(|number| (low..=high).contains(number));
        self.read(name, &what, read)
    }

    /// Refuses field `name`, unless its value is one that `is_neutral` allows.
    pub fn refuse(&self, name: &'static str, is_neutral: impl Fn(&Value) -> bool) -> Result<(), ApiError> {
        match self.value(name).is_none_or(is_neutral) {
            true => Ok(()),
            false => Err(ApiError::invalid(Some(name), format!("{name:?} is not supported: leave it out"))),
        }
    }

    /// Returns the maximum number of new tokens, at least `low`. It has an old and a new name.
    pub fn new_tokens_max(&self, low: i64) -> Found<usize> {
        let (old, new) = ("max_tokens", "max_completion_tokens");
        let field = |name| self.whole(name, low, i64::from(i32::MAX));
        match (field(old)?, field(new)?) {
            (Some(a), Some(b)) if a != b => {
                let why = format!("{old:?} = {a} and {new:?} = {b} contradict each other; give one of them");
                Err(ApiError::invalid(Some(old), why))
            }
            (a, b) => Ok(b.or(a).map(|tokens| tokens as usize)),
        }
    }

    /// Returns whether the client wants a stream, and whether its last event has the usage.
    pub fn stream(&self) -> Result<(bool, bool), ApiError> {
        let (streams, name) = (self.flag("stream")?, "stream_options");
        let wrong = |why: &str| Err(ApiError::invalid(Some(name), format!("{name:?} {why}")));
        let Some(options) = self.value(name) else { return Ok((streams, false)) };
        let Ok(options) = Self::new(options) else { return wrong("must be an object") };
        // Obfuscation pads events against eavesdroppers. The server pads none.
        let known = ["include_usage", "include_obfuscation", "continuous_usage_stats"];
        if let Some(other) = options.map.keys().find(|key| !known.contains(&key.as_str())) {
            return wrong(&format!("has the unknown key {other:?}"));
        }
        if options.flag("continuous_usage_stats")? {
            return wrong("has \"continuous_usage_stats\", which is not supported: leave it out");
        }
        if streams { Ok((true, options.flag("include_usage")?)) } else { wrong("needs \"stream\": true") }
    }

    /// Returns whether the model's calls are calls. Otherwise they are text.
    pub fn takes_calls(&self) -> bool {
        self.value("tool_choice").is_none_or(|choice| choice != "none")
    }

    /// Returns how many of the likeliest tokens a chat's log-probabilities have; `None` if it wants none.
    pub fn chat_log_probs(&self) -> Found<usize> {
        match (self.flag("logprobs")?, self.whole("top_logprobs", 0, TOP_MAX)?) {
            (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => {
                let why = "\"top_logprobs\" needs \"logprobs\": true".to_owned();
                Err(ApiError::invalid(Some("top_logprobs"), why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Returns the words in backticks.
    fn words(cell: &str) -> Vec<&str> {
        cell.split('`').skip(1).step_by(2).collect()
    }

    /// A field that only one of page and code knows, or about which they differ, fails this test.
    #[test]
    fn the_page_has_the_rules_of_the_code() {
        let page = include_str!("../../docs/SERVING.md");
        let (_, section) = page.split_once("## Fields").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let (mut told, mut refused) = (BTreeSet::new(), BTreeSet::new());
        for line in section.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let forms: &[Form] = match cells[2] {
                "both" => &[Chat, Text],
                "chat" => &[Chat],
                "completions" => &[Text],
                other => panic!("{other}"),
            };
            for (&form, name) in
                forms.iter().flat_map(|form| words(cells[1]).into_iter().map(move |n| (form, n)))
            {
                let is_new = match cells[3] {
                    "refused" => refused.insert((form as u8, name)),
                    rule => told.insert((form as u8, name, rule.to_owned())),
                };
                assert!(is_new, "{name} has two rows");
            }
        }
        let mut known = BTreeSet::new();
        for form in [Chat, Text] {
            for (name, rule) in fields_of(form) {
                let rule = match rule {
                    Obeyed => "obeyed".to_owned(),
                    WithoutMeaning => "without meaning".to_owned(),
                    RefusedUnless(value) => format!("refused unless `{value}`"),
                };
                assert!(!refused.contains(&(form as u8, name)), "{name}");
                assert!(known.insert((form as u8, name, rule)), "{name} is in the table twice");
            }
        }
        assert_eq!(told, known);
    }
}
