//! A line about the server's work now and then, if there was any.

use super::Server;
use crate::metrics::{format_count, format_number, sanitize_terminal};
use std::time::{Duration, Instant};

/// Interval between two lines.
const INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of characters of an error that are shown.
const ERROR_CHARS_MAX: usize = 200;

/// The work of a server so far.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Work {
    pub samples: u64,
    pub tokens: u64,
    /// Number of requests that were answered with an error.
    pub refused: u64,
    /// Number of passes and updates of adapters.
    pub trained: u64,
}

/// The work that was told last.
pub(super) struct News {
    told: Work,
    at: Instant,
}

impl News {
    pub fn new() -> Self {
        Self { told: Work::default(), at: Instant::now() }
    }

    /// Prints a line if the last one is [`INTERVAL`] ago and there was work since.
    pub fn tell(&mut self, server: &Server) {
        let elapsed = self.at.elapsed();
        if elapsed >= INTERVAL {
            let work = server.work();
            if work != self.told {
                let open = server.hub.open_samples();
                let mut text = describe(work, self.told, elapsed.as_secs_f64(), open);
                let error = server.metrics.last_error();
                if work.refused > self.told.refused && !error.is_empty() {
                    let short: String = error.chars().take(ERROR_CHARS_MAX).collect();
                    text += &format!("; the last error: {}", sanitize_terminal(&short));
                }
                (server.settings.tell)(&text);
            }
            *self = Self { told: work, at: Instant::now() };
        }
    }
}

/// Describes the work of the last `seconds`, between `before` and `now`.
fn describe(now: Work, before: Work, seconds: f64, open: usize) -> String {
    let tokens = now.tokens - before.tokens;
    let rate = format_number(tokens as f64 / seconds);
    let mut text = format!(
        "last {seconds:.0} s: {}, {} ({rate}/s)",
        format_count(now.samples - before.samples, "sample"),
        format_count(tokens, "token"),
    );
    let more = [
        (now.refused - before.refused, "request", " refused"),
        (now.trained - before.trained, "training request", ""),
        (open as u64, "sample", " open"),
    ];
    for (count, noun, end) in more.into_iter().filter(|(count, ..)| *count > 0) {
        text += &format!(", {}{end}", format_count(count, noun));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_about_what_is_new() {
        let before = Work { samples: 10, tokens: 1000, refused: 1, trained: 0 };
        let now = Work { samples: 12, tokens: 4000, ..before };
        assert_eq!(describe(now, before, 30.0, 0), "last 30 s: 2 samples, 3,000 tokens (100/s)");
        let now = Work { samples: 11, refused: 2, trained: 8, ..before };
        assert_eq!(
            describe(now, before, 30.2, 3),
            "last 30 s: 1 sample, 0 tokens (0/s), 1 request refused, 8 training requests, 3 samples open"
        );
    }
}
