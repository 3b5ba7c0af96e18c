//! Progress on stderr: bars on a terminal, plain lines elsewhere.

use super::table::format_number;
use super::terminal::{sanitize_line, sanitize_terminal};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where progress is shown. Clones show in the same place.
#[derive(Clone)]
pub struct Console(Arc<Place>);

enum Place {
    Bars(MultiProgress),
    Lines {
        out: Mutex<Box<dyn Write + Send>>,
        /// Least time between two plain lines of one stage.
        interval: Duration,
        /// Steps between two plain lines of one stage; 0 for none.
        every_steps: u64,
    },
}

impl Console {
    /// Bars when stderr is a terminal; otherwise a plain line every `every_steps` steps and after the last, at most
    /// one per `interval` and stage. No progress is shown when `every_steps` is 0.
    pub fn stderr(interval: Duration, every_steps: u64) -> Self {
        if every_steps > 0 && std::io::stderr().is_terminal() {
            return Self(Arc::new(Place::Bars(MultiProgress::new())));
        }
        Self::lines(std::io::stderr(), interval, every_steps)
    }

    /// Plain lines to `out`.
    pub fn lines(out: impl Write + Send + 'static, interval: Duration, every_steps: u64) -> Self {
        Self(Arc::new(Place::Lines { out: Mutex::new(Box::new(out)), interval, every_steps }))
    }

    /// A stage that makes `total` steps and starts after `done` of them (a resumed run's).
    pub fn stage(&self, name: &str, total: u64, done: u64) -> Progress {
        self.progress(name, total, done, true)
    }

    /// A stage within a step, such as rollout or update: a bar on a terminal, silent elsewhere.
    pub fn inner_stage(&self, name: &str, total: u64) -> Progress {
        self.progress(name, total, 0, false)
    }

    /// Prints text above the bars; control characters in it are shown, not obeyed.
    pub fn print(&self, text: &str) {
        let text = sanitize_terminal(text);
        match &*self.0 {
            // A terminal that is gone must not end the run.
            Place::Bars(bars) => drop(bars.println(&text)),
            Place::Lines { out, .. } => {
                let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = writeln!(out, "{}", text.trim_end_matches('\n')).and_then(|()| out.flush());
            }
        }
    }

    fn progress(&self, name: &str, total: u64, done: u64, outer: bool) -> Progress {
        let bar = match &*self.0 {
            Place::Bars(bars) => bars.add(ProgressBar::new(total).with_style(style()).with_position(done)),
            Place::Lines { .. } => ProgressBar::hidden(),
        };
        let name = sanitize_line(name).into_owned();
        bar.set_prefix(name.clone());
        let pace = Pace { start: Instant::now(), first: done, done, tokens: 0, printed: None };
        let inner = Stage { console: self.clone(), bar, name, total, outer, pace: Mutex::new(pace) };
        Progress(Arc::new(inner))
    }
}

fn style() -> ProgressStyle {
    let template = ProgressStyle::with_template("{prefix:>10} {bar:10} {pos}/{len}  {wide_msg}");
    template.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─")
}

/// One stage's progress; clones advance the same stage, from any thread.
#[derive(Clone)]
pub struct Progress(Arc<Stage>);

struct Stage {
    console: Console,
    bar: ProgressBar,
    name: String,
    total: u64,
    outer: bool,
    pace: Mutex<Pace>,
}

struct Pace {
    start: Instant,
    /// Steps that were done before this process.
    first: u64,
    done: u64,
    tokens: u64,
    printed: Option<Instant>,
}

impl Progress {
    /// `steps` more are done, `tokens` more were processed; `values` are shown beside, such as `("reward", 0.5)`.
    pub fn advance(&self, steps: u64, tokens: u64, values: &[(&str, f64)]) {
        let stage = &*self.0;
        let mut pace = stage.pace.lock().unwrap_or_else(PoisonError::into_inner);
        pace.done += steps;
        pace.tokens += tokens;
        let message = message(&pace, stage.total, values);
        match &*stage.console.0 {
            Place::Bars(_) => {
                stage.bar.set_message(message);
                stage.bar.set_position(pace.done);
            }
            Place::Lines { interval, every_steps, .. } if stage.outer && *every_steps > 0 => {
                let rested = pace.printed.is_none_or(|at| at.elapsed() >= *interval);
                if pace.done >= stage.total || (rested && pace.done.is_multiple_of(*every_steps)) {
                    pace.printed = Some(Instant::now());
                    stage.console.print(&format!("{} {}/{}  {message}", stage.name, pace.done, stage.total));
                }
            }
            Place::Lines { .. } => {}
        }
    }

    /// Ends the stage: its bar goes; of an outer one a plain line stays on the terminal.
    pub fn finish(&self) {
        let stage = &*self.0;
        stage.bar.finish_and_clear();
        if stage.outer && matches!(&*stage.console.0, Place::Bars(_)) {
            let done = stage.bar.position();
            stage.console.print(&format!("{} {done}/{}  {}", stage.name, stage.total, stage.bar.message()));
        }
    }
}

/// `reward 0.5  1,204 tokens/s  1:20 left`
fn message(pace: &Pace, total: u64, values: &[(&str, f64)]) -> String {
    let mut parts: Vec<String> = values
        .iter()
        .map(|(name, value)| format!("{} {}", sanitize_line(name), format_number(*value)))
        .collect();
    let elapsed = pace.start.elapsed().as_secs_f64();
    if pace.tokens > 0 && elapsed > 0.0 {
        parts.push(format!("{} tokens/s", format_number((pace.tokens as f64 / elapsed).round())));
    }
    let made = pace.done.saturating_sub(pace.first);
    if made > 0 && pace.done < total {
        parts.push(format!("{} left", clock(elapsed / made as f64 * (total - pace.done) as f64)));
    }
    parts.join("  ")
}

/// `m:ss` or `h:mm:ss`.
fn clock(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if h > 0 { format!("{h}:{m:02}:{s:02}") } else { format!("{m}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Shared {
        fn lines(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(Into::into).collect()
        }
    }

    #[test]
    fn every_step_prints_a_line_without_an_interval() {
        let out = Shared::default();
        let console = Console::lines(out.clone(), Duration::ZERO, 1);
        let stage = console.stage("rl", 3, 1);
        stage.advance(1, 0, &[("reward", -0.25)]);
        stage.advance(1, 0, &[("reward", 0.5)]);
        stage.finish();
        let lines = out.lines();
        assert_eq!(lines.len(), 2);
        assert!(
            lines[0].starts_with("rl 2/3  reward -0.25  ") && lines[0].ends_with(" left"),
            "{}",
            lines[0]
        );
        assert_eq!(lines[1], "rl 3/3  reward 0.5");
    }

    #[test]
    fn an_interval_keeps_the_first_and_the_last_line_and_inner_stages_are_silent() {
        let out = Shared::default();
        let console = Console::lines(out.clone(), Duration::from_secs(3600), 1);
        let (stage, inner) = (console.stage("cold start", 500, 0), console.inner_stage("rollout", 8));
        for _ in 0..500 {
            stage.advance(1, 10, &[("loss", 1.0)]);
            inner.advance(1, 10, &[]);
        }
        let lines = out.lines();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("cold start 1/500  loss 1  "));
        assert!(lines[1].starts_with("cold start 500/500  loss 1  ") && lines[1].contains("tokens/s"));
    }

    #[test]
    fn control_characters_never_reach_the_terminal() {
        let out = Shared::default();
        let console = Console::lines(out.clone(), Duration::ZERO, 1);
        console.stage("a\u{1b}[2J\n", 1, 0).advance(1, 0, &[("b\u{7}", 1.0)]);
        console.print("two\nlines \u{1b}]0;title\u{7}");
        let text = out.lines().join("|");
        assert_eq!(text, "a␛[2J␊ 1/1  b␇ 1|two|lines ␛]0;title␇");
    }

    #[test]
    fn time_left_reads_as_a_clock() {
        assert_eq!([0.0, 59.6, 3661.0].map(clock), ["0:00", "1:00", "1:01:01"]);
    }
}
