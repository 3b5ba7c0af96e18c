//! Counters in Prometheus' text format.

use crate::engine::PrefillCounts;
use crate::panics::lock;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a server.
#[derive(Default)]
pub(crate) struct Metrics {
    /// Responses by status code.
    responses: Mutex<BTreeMap<&'static str, u64>>,
    prompt_tokens: AtomicU64,
    sampled_tokens: AtomicU64,
    /// Number of answers whose client left.
    left: AtomicU64,
}

impl Metrics {
    pub fn count_response(&self, status: &'static str) {
        let code = status.split(' ').next().unwrap_or_default();
        *lock(&self.responses).entry(code).or_default() += 1;
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
        // 408 asks to wait for longer.
        let refused = responses.iter().filter(|(code, _)| !code.starts_with('2') && **code != "408");
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
