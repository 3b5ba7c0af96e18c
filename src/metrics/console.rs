//! Progress on stderr: bars on a terminal, plain lines elsewhere.

use super::eta::Eta;
use super::table::format_number;
use super::terminal::{sanitize_line, sanitize_terminal, wrap_lines};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two plain lines of one stage.
const LINES_APART: Duration = Duration::from_secs(2);

/// The progress display. Clones share it.
#[derive(Clone)]
pub struct Console(Arc<ConsoleState>);

struct ConsoleState {
    place: ConsoleOutput,
    /// The time left over all stages of a plan, if there is one.
    eta: Mutex<Option<Eta>>,
}

enum ConsoleOutput {
    Bars(MultiProgress),
    Lines {
        out: Mutex<Box<dyn Write + Send>>,
        /// Minimum time between two plain lines of one stage.
        interval: Duration,
        /// Steps between two plain lines of one stage; 0 for none.
        every_steps: u64,
    },
}

impl Console {
    /// Makes bars if stderr is a terminal. Otherwise prints a plain line every `every_steps` steps and after
    /// the last, at most one per [`LINES_APART`] and stage. No progress is shown when `every_steps` is 0.
    pub fn stderr(every_steps: u64) -> Self {
        if every_steps > 0 && std::io::stderr().is_terminal() {
            return Self::with_output(ConsoleOutput::Bars(MultiProgress::new()));
        }
        Self::lines(std::io::stderr(), LINES_APART, every_steps)
    }

    /// Prints text to stderr, but no progress.
    pub fn plain() -> Self {
        Self::lines(std::io::stderr(), Duration::ZERO, 0)
    }

    /// Prints nothing: for ranks other than 0.
    pub fn silent() -> Self {
        Self::lines(std::io::sink(), Duration::ZERO, 0)
    }

    /// Prints plain lines to `out`.
    pub fn lines(out: impl Write + Send + 'static, interval: Duration, every_steps: u64) -> Self {
        Self::with_output(ConsoleOutput::Lines { out: Mutex::new(Box::new(out)), interval, every_steps })
    }

    fn with_output(place: ConsoleOutput) -> Self {
        Self(Arc::new(ConsoleState { place, eta: Mutex::new(None) }))
    }

    /// Shows one time left over alternating `stages`: name, steps left, and the work of a step in a unit
    /// common to all.
    pub fn plan(&self, stages: &[(&str, u64, f64)]) {
        *lock(&self.0.eta) = Some(Eta::new(stages));
    }

    /// Starts a stage of `total` steps, of which a resumed run has done `done`.
    pub fn stage(&self, name: &str, total: u64, done: u64) -> Progress {
        self.progress(name, total, done, StageUnit::Steps)
    }

    /// Starts a stage of `total` units of work other than steps, such as tokens or trajectories. Without a
    /// terminal only time decides when it prints a plain line.
    pub fn work_stage(&self, name: &str, total: u64, done: u64) -> Progress {
        self.progress(name, total, done, StageUnit::Work)
    }

    /// Starts a stage within a step, such as rollout or update: a bar on a terminal, silent otherwise.
    pub fn inner_stage(&self, name: &str, total: u64) -> Progress {
        self.progress(name, total, 0, StageUnit::Within)
    }

    /// Prints text above the bars; control characters in it are made visible.
    pub fn print(&self, text: &str) {
        let text = sanitize_terminal(text);
        match &self.0.place {
            // A terminal that is gone must not end the run.
            ConsoleOutput::Bars(bars) => {
                let columns = console::Term::stderr().size().1;
                drop(bars.println(colour_first_word(&wrap_lines(&text, columns.into()))));
            }
            ConsoleOutput::Lines { out, .. } => {
                let mut out = lock(out);
                let _ = writeln!(out, "{}", text.trim_end_matches('\n')).and_then(|()| out.flush());
            }
        }
    }

    fn progress(&self, name: &str, total: u64, done: u64, kind: StageUnit) -> Progress {
        let bar = match &self.0.place {
            ConsoleOutput::Bars(bars) => {
                bars.add(ProgressBar::new(total).with_style(style(kind)).with_position(done))
            }
            ConsoleOutput::Lines { .. } => ProgressBar::hidden(),
        };
        let name = sanitize_line(name).into_owned();
        bar.set_prefix(name.clone());
        // Show the bar at once, before the first unit of work.
        bar.tick();
        let pace = Pace { start: Instant::now(), first: done, done, tokens: 0, printed: None };
        let inner = Stage { console: self.clone(), bar, name, total, kind, pace: Mutex::new(pace) };
        Progress(Arc::new(inner))
    }
}

impl std::fmt::Debug for Console {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Console")
    }
}

/// Colours the first word of `text` if it names the kind of line and the terminal has colours.
fn colour_first_word(text: &str) -> String {
    let word = |word: &str, style: console::Style| {
        let rest = text.strip_prefix(word)?;
        Some(format!("{}{rest}", style.for_stderr().apply_to(word)))
    };
    let style = console::Style::new;
    let kinds = [
        word("warning:", style().yellow().bold()),
        word("stopped:", style().yellow().bold()),
        word("done:", style().green().bold()),
    ];
    kinds.into_iter().flatten().next().unwrap_or_else(|| text.to_owned())
}

/// Returns the style of a bar, which fills the rest of the terminal's width.
fn style(kind: StageUnit) -> ProgressStyle {
    let template = match kind {
        StageUnit::Steps | StageUnit::Work => "{prefix:>10} {wide_bar:.cyan/dim} {pos}/{len}  {msg}",
        StageUnit::Within => "{prefix:>10} {wide_bar:.dim} {pos}/{len}  {msg}",
    };
    let template = ProgressStyle::with_template(template);
    template.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─")
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The unit of a stage, which decides where it is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StageUnit {
    /// Steps of a run.
    Steps,
    /// Other work.
    Work,
    /// Work within a step.
    Within,
}

/// The progress of one stage; clones advance it from any thread.
#[derive(Clone)]
pub struct Progress(Arc<Stage>);

struct Stage {
    console: Console,
    bar: ProgressBar,
    name: String,
    total: u64,
    kind: StageUnit,
    pace: Mutex<Pace>,
}

struct Pace {
    start: Instant,
    /// Steps done before this process.
    first: u64,
    done: u64,
    tokens: u64,
    printed: Option<Instant>,
}

impl Progress {
    /// Records `steps` more steps and `tokens` more tokens, and shows `values` beside them, such as
    /// `("reward", 0.5)`. A call without steps shows that a step is in progress.
    pub fn advance(&self, steps: u64, tokens: u64, values: &[(&str, f64)]) {
        let stage = &*self.0;
        let mut pace = lock(&stage.pace);
        pace.done += steps;
        pace.tokens += tokens;
        let left = stage.seconds_left(&pace, steps);
        match &stage.console.0.place {
            ConsoleOutput::Bars(_) => {
                stage.bar.set_message(stage.message(&pace, left, values));
                stage.bar.set_position(pace.done);
            }
            ConsoleOutput::Lines { interval, every_steps, .. } => {
                if stage.is_due(&pace, steps, *interval, *every_steps) {
                    pace.printed = Some(Instant::now());
                    let message = stage.message(&pace, left, values);
                    stage.console.print(&format!("{} {}/{}  {message}", stage.name, pace.done, stage.total));
                }
            }
        }
    }

    /// Ends the stage and removes its bar. A plain line stays on the terminal, except for a stage within a
    /// step.
    pub fn finish(&self) {
        let stage = &*self.0;
        stage.bar.finish_and_clear();
        if stage.kind != StageUnit::Within && matches!(stage.console.0.place, ConsoleOutput::Bars(_)) {
            let done = stage.bar.position();
            stage.console.print(&format!("{} {done}/{}  {}", stage.name, stage.total, stage.bar.message()));
        }
    }
}

impl Stage {
    /// Whether to print a plain line after `steps` more steps.
    fn is_due(&self, pace: &Pace, steps: u64, interval: Duration, every_steps: u64) -> bool {
        if every_steps == 0 || self.kind == StageUnit::Within {
            return false;
        }
        if pace.done >= self.total {
            return steps > 0;
        }
        let rested = pace.printed.is_none_or(|at| at.elapsed() >= interval);
        rested && (self.kind == StageUnit::Work || pace.done.is_multiple_of(every_steps))
    }

    /// Returns the seconds left after `steps` more steps, over all stages of the plan if there is one.
    fn seconds_left(&self, pace: &Pace, steps: u64) -> Option<f64> {
        let made = pace.done.saturating_sub(pace.first);
        match &mut *lock(&self.console.0.eta) {
            Some(eta) => {
                eta.advance(&self.name, steps);
                eta.seconds_left().filter(|_| self.kind != StageUnit::Within)
            }
            None => {
                let step = pace.start.elapsed().as_secs_f64() / made.max(1) as f64;
                (made > 0 && pace.done < self.total).then(|| step * (self.total - pace.done) as f64)
            }
        }
    }

    /// Formats `reward 0.5  1,204 tokens/s  1:20 left`, with the number of tokens if the stage counts other
    /// work.
    fn message(&self, pace: &Pace, left: Option<f64>, values: &[(&str, f64)]) -> String {
        let mut parts: Vec<String> = values
            .iter()
            .map(|(name, value)| format!("{} {}", sanitize_line(name), format_number(*value)))
            .collect();
        let elapsed = pace.start.elapsed().as_secs_f64();
        if pace.tokens > 0 && elapsed > 0.0 {
            if self.kind != StageUnit::Steps && pace.tokens != pace.done - pace.first {
                parts.push(format!("{} tokens", format_number(pace.tokens as f64)));
            }
            parts.push(format!("{} tokens/s", format_number((pace.tokens as f64 / elapsed).round())));
        }
        parts.extend(left.map(|seconds| format!("{} left", clock(seconds))));
        parts.join("  ")
    }
}

/// Formats seconds as `m:ss` or `h:mm:ss`.
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
    fn work_shows_its_tokens_before_its_first_piece_is_done_and_ends_once() {
        let out = Shared::default();
        let work = Console::lines(out.clone(), Duration::from_secs(3600), 10).work_stage("sampling", 4, 0);
        work.advance(0, 1200, &[]);
        work.advance(3, 34, &[("reward", 0.5)]);
        work.advance(1, 4, &[("reward", 0.5)]);
        work.advance(0, 2, &[]);
        let lines = out.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("sampling 0/4  1,200 tokens  "), "{}", lines[0]);
        assert!(lines[1].starts_with("sampling 4/4  reward 0.5  1,238 tokens  "), "{}", lines[1]);
        let scoring = Console::lines(out.clone(), Duration::ZERO, 10).work_stage("scoring", 8, 0);
        scoring.advance(3, 3, &[]);
        assert!(!out.lines()[2].contains("3 tokens  "), "they are what is counted: {}", out.lines()[2]);
        Console::lines(out.clone(), Duration::ZERO, 0).work_stage("silent", 1, 0).advance(1, 1, &[]);
        assert_eq!(out.lines().len(), 3);
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
    fn one_time_left_stands_for_all_stages() {
        let out = Shared::default();
        let console = Console::lines(out.clone(), Duration::ZERO, 1);
        console.plan(&[("cold start", 1, 1.0), ("rl", 1, 1.0)]);
        let (first, second) = (console.stage("cold start", 1, 0), console.stage("rl", 1, 0));
        first.advance(1, 0, &[]);
        second.advance(1, 0, &[]);
        let lines = out.lines();
        assert!(lines[0].ends_with(" left"), "reinforcement learning is yet to come: {}", lines[0]);
        assert_eq!(lines[1].trim_end(), "rl 1/1");
    }

    #[test]
    fn time_left_reads_as_a_clock() {
        assert_eq!([0.0, 59.6, 3661.0].map(clock), ["0:00", "1:00", "1:01:01"]);
    }
}
