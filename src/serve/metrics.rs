//! Counters in Prometheus' text format.

use crate::engine::PrefillCounts;
use crate::http::{Body, Response};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

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
        *self.responses.lock().unwrap_or_else(PoisonError::into_inner).entry(code).or_default() += 1;
        if let (true, Body::Whole(text)) = (is_error(code), &response.body) {
            // As OpenAI's error object has it, or the Tinker SDK's.
            let body: Value = serde_json::from_str(text).unwrap_or_default();
            let message = body["error"]["message"].as_str().or(body["detail"].as_str()).unwrap_or_default();
            *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = message.to_owned();
        }
    }

    /// Returns the message of the last error; "" before the first.
    pub fn last_error(&self) -> String {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        let responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = responses.iter().filter(|(code, _)| is_error(code));
        refused.map(|(_, count)| count).sum()
    }

    /// Returns all counters as text.
    pub fn text(&self, open_samples: usize, prefill: PrefillCounts) -> String {
        let mut out =
            "# HELP rloss_responses_total Responses by status.\n# TYPE rloss_responses_total counter\n"
                .to_owned();
        for (code, count) in &*self.responses.lock().unwrap_or_else(PoisonError::into_inner) {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "rloss_responses_total{{code=\"{code}\"}} {count}");
        }
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let counters = [
            ("prompt_tokens_total", "Tokens of prompts.", load(&self.prompt_tokens)),
            ("prefilled_tokens_total", "Prompt tokens that passed through the model.", prefill.read),
            ("reused_tokens_total", "Prompt tokens that another request had read.", prefill.reused),
            ("sampled_tokens_total", "Tokens sampled.", load(&self.sampled_tokens)),
            ("clients_left_total", "Answers whose client closed the connection.", load(&self.left)),
        ];
        for (name, help, value) in counters {
            let _ = writeln!(
                out,
                "# HELP rloss_{name} {help}\n# TYPE rloss_{name} counter\nrloss_{name} {value}"
            );
        }
        let gauges = [
            ("open_samples", "Samples that wait or are being sampled.", open_samples),
            ("kept_tokens", "Tokens whose keys and values are kept for later requests.", prefill.kept),
        ];
        for (name, help, value) in gauges {
            let _ =
                writeln!(out, "# HELP rloss_{name} {help}\n# TYPE rloss_{name} gauge\nrloss_{name} {value}");
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
