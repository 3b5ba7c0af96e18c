//! Counters in Prometheus' text format.

use crate::engine::PrefillCounts;
use crate::http::{Body, Response};
use crate::panics::lock;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a server.
#[derive(Default)]
pub(crate) struct Metrics {
    /// Responses by status code.
    responses: Mutex<BTreeMap<&'static str, u64>>,
    /// The message of the last error.
    last_error: Mutex<String>,
    prompt_tokens: AtomicU64,
    sampled_tokens: AtomicU64,
    /// Number of answers whose client left.
    left: AtomicU64,
}

/// Returns whether a response with this status code is an error. 408 asks to wait for longer.
fn is_error(code: &str) -> bool {
    !code.starts_with('2') && code != "408"
}

impl Metrics {
    pub fn count_response(&self, response: &Response) {
        let code = response.status.split(' ').next().unwrap_or_default();
        *lock(&self.responses).entry(code).or_default() += 1;
        if let (true, Body::Whole(text)) = (is_error(code), &response.body) {
            // As OpenAI's error object has it, or the Tinker SDK's.
            let body: Value = serde_json::from_str(text).unwrap_or_default();
            let message = body["error"]["message"].as_str().or(body["detail"].as_str()).unwrap_or_default();
            *lock(&self.last_error) = message.to_owned();
        }
    }

    /// Returns the message of the last error; "" before the first.
    pub fn last_error(&self) -> String {
        lock(&self.last_error).clone()
    }

    pub fn count_tokens(&self, prompt: usize, sampled: usize) {
        self.prompt_tokens.fetch_add(prompt as u64, Ordering::Relaxed);
        self.sampled_tokens.fetch_add(sampled as u64, Ordering::Relaxed);
    }

    pub fn count_left(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of responses with an error.
    pub fn refused(&self) -> u64 {
        let responses = lock(&self.responses);
        let refused = responses.iter().filter(|(code, _)| is_error(code));
        refused.map(|(_, count)| count).sum()
    }

    /// Returns all counters as text.
    pub fn text(&self, open_samples: usize, prefill: PrefillCounts) -> String {
        let mut out =
            "# HELP rloss_responses_total Responses by status.\n# TYPE rloss_responses_total counter\n"
                .to_owned();
        for (code, count) in &*lock(&self.responses) {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "rloss_responses_total{{code=\"{code}\"}} {count}");
        }
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let (kept, left) = (prefill.kept as u64, load(&self.left));
        let metrics = [
            ("prompt_tokens_total", "counter", "Tokens of prompts.", load(&self.prompt_tokens)),
            (
                "prefilled_tokens_total",
                "counter",
                "Prompt tokens that passed through the model.",
                prefill.read,
            ),
            (
                "reused_tokens_total",
                "counter",
                "Prompt tokens that another request had read.",
                prefill.reused,
            ),
            ("sampled_tokens_total", "counter", "Tokens sampled.", load(&self.sampled_tokens)),
            ("clients_left_total", "counter", "Answers whose client closed the connection.", left),
            ("open_samples", "gauge", "Samples that wait or are being sampled.", open_samples as u64),
            ("kept_tokens", "gauge", "Tokens whose keys and values are kept for later requests.", kept),
        ];
        for (name, kind, help, value) in metrics {
            let head = format!("# HELP rloss_{name} {help}\n# TYPE rloss_{name} {kind}");
            let _ = writeln!(out, "{head}\nrloss_{name} {value}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_is_kept_in_both_forms() {
        let metrics = Metrics::default();
        let answers = [
            ("200 OK", r#"{"detail": "fine"}"#, ""),
            ("429 Too Many Requests", r#"{"detail": "all adapters are in use"}"#, "all adapters are in use"),
            ("408 Request Timeout", r#"{"detail": "wait"}"#, "all adapters are in use"),
            ("404 Not Found", r#"{"error": {"message": "no such model"}}"#, "no such model"),
        ];
        for (status, body, last) in answers {
            metrics.count_response(&Response::whole(status, "application/json", body.into()));
            assert_eq!(metrics.last_error(), last, "{status}");
        }
        assert_eq!(metrics.refused(), 2);
    }
}
