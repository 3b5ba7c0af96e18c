//! Progress on stderr: bars on a terminal, plain lines elsewhere. The current stage shows progress even while
//! no step ends: a bar is updated every second, and a log gets a line at least every 30 seconds.

use super::eta::{Eta, StageSpeed, format_duration};
use super::status::StatusFile;
use super::table::format_number;
use super::terminal::{sanitize_line, sanitize_terminal, wrap_lines};
use super::warnings::FailureCount;
use crate::panics::lock;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::collections::{HashMap, HashSet};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// Minimum time between two plain lines of steps.
const LINE_INTERVAL_MIN: Duration = Duration::from_secs(2);
/// Age at which a stage prints its first plain line, if no stage of its name has printed one.
const FIRST_LINE: Duration = Duration::from_secs(4);
/// Maximum time between two plain lines of the current stage. It is below 30 seconds, because a tick may be
/// late on a busy machine.
const LINE_INTERVAL_MAX: Duration = Duration::from_secs(28);
/// Interval at which bars and the status file are updated even without progress.
const TICK: Duration = Duration::from_secs(1);

/// The progress display. Clones share it.
#[derive(Clone)]
pub struct Console(Arc<ConsoleState>);

struct ConsoleState {
    output: ConsoleOutput,
    /// The estimate of the remaining time of all planned stages.
    eta: Mutex<Eta>,
    /// Current stages, the outermost first.
    stages: Mutex<Stages>,
    failures: Mutex<FailureCount>,
}

#[derive(Default)]
struct Stages {
    open: Vec<Weak<ProgressStage>>,
    ticks: bool,
    /// Time of the last printed line of progress.
    printed: Option<Instant>,
    status: Option<StatusFile>,
    /// The names of the stages that printed a line of progress.
    told: HashSet<String>,
    /// For each stage name, the speed of the last finished stage of that name. Only stages that count tokens
    /// are here.
    earlier: HashMap<String, StageSpeed>,
}

enum ConsoleOutput {
    Bars(MultiProgress),
    Lines {
        out: Mutex<Box<dyn Write + Send>>,
        /// Minimum time between two plain lines of steps.
        interval: Duration,
        /// Number of steps between two plain lines of one stage; 0 means no lines.
        every_steps: u64,
    },
}

impl Console {
    /// Shows bars if stderr is a terminal, else plain lines. A stage prints a line every `every_steps` steps
    /// and after its last step, at least [`LINE_INTERVAL_MIN`] apart. If no line was printed for
    /// [`LINE_INTERVAL_MAX`], one is printed. No progress is shown when `every_steps` is 0.
    pub fn stderr(every_steps: u64) -> Self {
        if every_steps > 0 && std::io::stderr().is_terminal() {
            return Self::with_output(ConsoleOutput::Bars(MultiProgress::new()));
        }
        Self::lines(std::io::stderr(), LINE_INTERVAL_MIN, every_steps)
    }

    /// Prints text to stderr, but shows no progress.
    pub fn plain() -> Self {
        Self::lines(std::io::stderr(), Duration::ZERO, 0)
    }

    /// Prints nothing. Ranks other than 0 use this.
    pub fn silent() -> Self {
        Self::lines(std::io::sink(), Duration::ZERO, 0)
    }

    /// Prints plain lines to `out`.
    pub fn lines(out: impl Write + Send + 'static, interval: Duration, every_steps: u64) -> Self {
        Self::with_output(ConsoleOutput::Lines { out: Mutex::new(Box::new(out)), interval, every_steps })
    }

    fn with_output(output: ConsoleOutput) -> Self {
        Self(Arc::new(ConsoleState {
            output,
            eta: Mutex::new(Eta::new(&[])),
            stages: Mutex::default(),
            failures: Mutex::default(),
        }))
    }

    /// Returns the failures so far.
    pub(super) fn failures(&self) -> MutexGuard<'_, FailureCount> {
        lock(&self.0.failures)
    }

    /// Sets a plan of `stages` whose steps alternate. From then on, the time left is that of all these stages
    /// together. Each stage has a name, the number of steps left, and the work of one step in a unit that all
    /// stages share.
    pub fn set_plan(&self, stages: &[(&str, u64, f64)]) {
        *lock(&self.0.eta) = Eta::new(stages);
    }

    /// Counts a step of the planned stage `name`, which has no [`Progress`] of its own.
    pub fn count_step(&self, name: &str) {
        lock(&self.0.eta).advance(name, 1);
    }

    /// Records that a step of the planned stage `name` begins inside a step of another stage, such as an
    /// evaluation during training. [`Self::count_step`] ends it.
    pub fn begin_step(&self, name: &str) {
        lock(&self.0.eta).begin(name);
    }

    /// Sets the expected seconds of a step of the planned stage `name`. They are used until a step is
    /// measured.
    pub fn expect_step(&self, name: &str, seconds: f64) {
        lock(&self.0.eta).expect(name, seconds);
    }

    /// Writes the current stage to a file in `folder` again and again, until [`Self::remove_status_file`] is
    /// called.
    pub fn start_status_file(&self, folder: &Path) {
        lock(&self.0.stages).status = Some(StatusFile::new(folder));
        self.start_ticks();
    }

    /// Removes the file that [`Self::start_status_file`] created.
    pub fn remove_status_file(&self) {
        lock(&self.0.stages).status = None;
    }

    /// Starts a stage of `total` steps. A resumed run has already done `done` of them.
    pub fn start_stage(&self, name: &str, total: u64, done: u64) -> Progress {
        self.progress(name, total, done, StageKind { unit: Unit::Steps, inner: false })
    }

    /// Starts a stage of `total` items other than steps, such as trajectories. `done` of them are already
    /// done.
    pub fn start_item_stage(&self, name: &str, total: u64, done: u64) -> Progress {
        self.progress(name, total, done, StageKind { unit: Unit::Items, inner: false })
    }

    /// Starts a stage within a step, such as the rollout, with `total` items. A `total` of 0 means that items
    /// are not counted.
    pub fn start_inner_stage(&self, name: &str, total: u64) -> Progress {
        self.progress(name, total, 0, StageKind { unit: Unit::Items, inner: true })
    }

    /// Starts a stage within a step that runs `total` tokens through the model.
    pub fn start_pass(&self, name: &str, total: u64) -> Progress {
        self.progress(name, total, 0, StageKind { unit: Unit::Tokens, inner: true })
    }

    /// Starts a stage outside steps that runs `total` tokens through the model.
    pub fn start_token_stage(&self, name: &str, total: u64) -> Progress {
        self.progress(name, total, 0, StageKind { unit: Unit::Tokens, inner: false })
    }

    /// Prints text above the bars. Control characters in the text are made visible.
    pub fn print(&self, text: &str) {
        let text = sanitize_terminal(text);
        match &self.0.output {
            // A terminal that was closed must not end the run.
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

    fn progress(&self, name: &str, total: u64, done: u64, kind: StageKind) -> Progress {
        let bar = match &self.0.output {
            ConsoleOutput::Bars(bars) => {
                bars.add(ProgressBar::new(total).with_style(style(kind, total)).with_position(done))
            }
            ConsoleOutput::Lines { .. } => ProgressBar::hidden(),
        };
        let name = sanitize_line(name).into_owned();
        bar.set_prefix(name.clone());
        // Show the bar at once, before the first unit of work.
        bar.tick();
        let state = Mutex::new(StageState { done, ..StageState::default() });
        let earlier = lock(&self.0.stages).earlier.get(&name).copied();
        let stage = Arc::new(ProgressStage {
            console: self.clone(),
            bar,
            name,
            total,
            kind,
            start: Instant::now(),
            done_at_start: done,
            earlier,
            state,
        });
        lock(&self.0.stages).open.push(Arc::downgrade(&stage));
        let is_shown = !matches!(self.0.output, ConsoleOutput::Lines { every_steps: 0, .. });
        if is_shown {
            self.start_ticks();
        }
        Progress(stage)
    }

    /// Starts the thread that updates the display, unless it is already running.
    fn start_ticks(&self) {
        let mut stages = lock(&self.0.stages);
        if std::mem::replace(&mut stages.ticks, true) {
            return;
        }
        stages.printed.get_or_insert(Instant::now());
        let state = Arc::downgrade(&self.0);
        let ticks = move || {
            loop {
                std::thread::sleep(TICK);
                let Some(state) = state.upgrade() else { break };
                Self(state).tick(Instant::now());
            }
        };
        // If the thread cannot start, progress is shown only when it advances.
        let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(ticks);
    }

    /// Updates the bars, the line of a log and the status file if they are due at `now`.
    fn tick(&self, now: Instant) {
        let open: Vec<Arc<ProgressStage>> =
            lock(&self.0.stages).open.iter().filter_map(Weak::upgrade).collect();
        if let ConsoleOutput::Bars(_) = self.0.output {
            open.iter().for_each(|stage| stage.bar.set_message(stage.message(&lock(&stage.state), now)));
        }
        let Some(line) = self.format_current_stages(&open, now) else { return };
        // A stage that advances locks its own state, then `stages`: the states were read above.
        let newest = open.last().map(|stage| (&stage.name, stage.start));
        let mut stages = lock(&self.0.stages);
        if let Some(status) = &mut stages.status {
            status.update(&line, now);
        }
        let ConsoleOutput::Lines { every_steps: 1.., .. } = self.0.output else { return };
        let is_due = |at: Instant, after: Duration| now.saturating_duration_since(at) >= after;
        let is_first =
            newest.is_some_and(|(name, start)| !stages.told.contains(name) && is_due(start, FIRST_LINE));
        if is_first || stages.printed.is_none_or(|at| is_due(at, LINE_INTERVAL_MAX)) {
            stages.told.extend(open.iter().map(|stage| stage.name.clone()));
            stages.printed = Some(now);
            drop(stages);
            self.print(&line);
        }
    }

    /// Formats the current stages on one line: the step of the outermost stage, the values of the innermost
    /// stage, and the time left of the outermost stage.
    fn format_current_stages(&self, open: &[Arc<ProgressStage>], now: Instant) -> Option<String> {
        let inner = open.last()?;
        let line = inner.line(&lock(&inner.state), now);
        let Some(outer) = open.first().filter(|outer| !Arc::ptr_eq(outer, inner)) else { return Some(line) };
        let state = lock(&outer.state);
        let left = outer
            .seconds_left(&state, now)
            .map(|seconds| format!("  ({} left in all)", format_duration(seconds)));
        Some(format!("{}: {}{}", outer.label(&state), line.trim_end(), left.unwrap_or_default()))
    }
}

impl std::fmt::Debug for Console {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Console")
    }
}

/// Colours the first word of `text` if the word names the kind of line, such as `warning:`, and the terminal
/// has colours.
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
fn style(kind: StageKind, total: u64) -> ProgressStyle {
    let template = match (kind.inner, total) {
        (_, 0) => "{prefix:>10} {msg}",
        (false, _) => "{prefix:>10} {wide_bar:.cyan/dim} {pos}/{len}  {msg}",
        (true, _) => "{prefix:>10} {wide_bar:.dim} {pos}/{len}  {msg}",
    };
    let template = ProgressStyle::with_template(template);
    template.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─")
}

/// The kind of a stage. It decides where and when the stage is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StageKind {
    unit: Unit,
    /// Whether the stage is part of a step. Such a stage leaves no line on the terminal.
    inner: bool,
}

/// The unit in which a stage counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// Steps of a run.
    Steps,
    /// Items other than steps, such as trajectories.
    Items,
    /// Tokens that go through the model.
    Tokens,
}

/// The progress of one stage; clones advance it from any thread.
#[derive(Clone)]
pub struct Progress(Arc<ProgressStage>);

struct ProgressStage {
    console: Console,
    bar: ProgressBar,
    name: String,
    total: u64,
    kind: StageKind,
    start: Instant,
    /// Number of steps that were done when this process started.
    done_at_start: u64,
    /// The speed of the last finished stage with the same name.
    earlier: Option<StageSpeed>,
    state: Mutex<StageState>,
}

#[derive(Default)]
struct StageState {
    done: u64,
    /// Number of tokens so far. In a running pass, each finished layer counts as a fraction of the batch's
    /// tokens.
    tokens: f64,
    tokens_left: Option<f64>,
    /// The time of the last call that added tokens.
    advanced: Option<Instant>,
    /// A remark before the values.
    note: Option<String>,
    values: Vec<(String, f64)>,
    printed: Option<Instant>,
}

impl Progress {
    /// Returns a progress that is not shown.
    pub fn hidden() -> Self {
        Console::silent().start_pass("", 0)
    }

    /// Adds `steps` steps and `tokens` tokens, and shows `values` beside them, such as `("reward", 0.5)`. A
    /// call without steps shows that a step is in progress.
    pub fn advance(&self, steps: u64, tokens: u64, values: &[(&str, f64)]) {
        self.advance_to(steps, tokens, None, values);
    }

    /// Advances as [`Self::advance`] does, and computes the time left from `tokens_left`, the tokens left in
    /// the stage.
    pub fn advance_to(&self, steps: u64, tokens: u64, tokens_left: Option<f64>, values: &[(&str, f64)]) {
        let (stage, now) = (&*self.0, Instant::now());
        let mut state = lock(&stage.state);
        state.done += steps;
        state.tokens += tokens as f64;
        state.tokens_left = tokens_left;
        if tokens > 0 {
            state.advanced = Some(now);
        }
        state.values =
            values.iter().map(|(name, value)| (sanitize_line(name).into_owned(), *value)).collect();
        if stage.kind.unit == Unit::Steps {
            lock(&stage.console.0.eta).advance(&stage.name, steps);
        }
        match &stage.console.0.output {
            ConsoleOutput::Bars(_) => {
                stage.bar.set_message(stage.message(&state, now));
                stage.bar.set_position(state.done);
            }
            ConsoleOutput::Lines { interval, every_steps, .. } => {
                if stage.is_due(&state, steps, *interval, *every_steps) {
                    state.printed = Some(now);
                    lock(&stage.console.0.stages).printed = Some(now);
                    stage.console.print(&stage.line(&state, now));
                }
            }
        }
    }

    /// Shows `note` before the values from the next advance on, or no note.
    pub fn set_note(&self, note: Option<String>) {
        lock(&self.0.state).note = note;
    }

    /// Adds `tokens` tokens to a pass: all tokens of a batch, or one layer's fraction of them.
    pub fn advance_tokens(&self, tokens: f64) {
        let stage = &*self.0;
        let mut state = lock(&stage.state);
        state.tokens += tokens;
        state.done = (state.tokens.round() as u64).min(stage.total);
        stage.bar.set_position(state.done);
    }

    /// Ends the stage and removes its bar. A stage outside steps leaves a plain line on the terminal.
    pub fn finish(&self) {
        let stage = &*self.0;
        let this = Arc::downgrade(&self.0);
        let speed = stage.speed(&lock(&stage.state), Instant::now());
        let mut stages = lock(&stage.console.0.stages);
        stages.open.retain(|open| !open.ptr_eq(&this));
        if stage.kind.unit != Unit::Steps && speed.tokens > 0.0 {
            stages.earlier.insert(stage.name.clone(), speed);
        }
        drop(stages);
        stage.bar.finish_and_clear();
        if !stage.kind.inner && matches!(stage.console.0.output, ConsoleOutput::Bars(_)) {
            let done = stage.bar.position();
            stage.console.print(&format!("{} {done}/{}  {}", stage.name, stage.total, stage.bar.message()));
        }
    }
}

/// Removes the bar of a stage, including one whose work failed.
impl Drop for ProgressStage {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl ProgressStage {
    /// Returns whether to print a plain line after `steps` more steps. A stage that does not count steps
    /// prints only its last line here; [`Console::tick`] prints its other lines.
    fn is_due(&self, state: &StageState, steps: u64, interval: Duration, every_steps: u64) -> bool {
        if every_steps == 0 || self.kind.inner {
            return false;
        }
        if state.done >= self.total {
            return steps > 0;
        }
        let interval_passed = state.printed.is_none_or(|at| at.elapsed() >= interval);
        interval_passed && self.kind.unit == Unit::Steps && state.done.is_multiple_of(every_steps)
    }

    /// Returns the seconds left at `now`. For a planned stage, these are the seconds left of the whole plan.
    fn seconds_left(&self, state: &StageState, now: Instant) -> Option<f64> {
        let elapsed = now.saturating_duration_since(self.start).as_secs_f64();
        let eta = lock(&self.console.0.eta);
        if self.kind.unit == Unit::Steps && eta.has_plan() {
            return eta.seconds_left(&self.name, now);
        }
        drop(eta);
        let tokens_left = match self.kind.unit {
            Unit::Tokens => Some(self.total as f64 - state.tokens),
            _ => state.tokens_left,
        };
        if self.kind.unit != Unit::Steps
            && state.done < self.total.max(1)
            && let Some(tokens_left) = tokens_left.filter(|left| *left > 0.0 && state.tokens > 0.0)
        {
            let speed = self.speed(state, now);
            return StageSpeed::seconds_left(speed, self.total as f64, tokens_left, self.earlier);
        }
        let done_here = state.done.saturating_sub(self.done_at_start);
        // The time per finished trajectory does not predict the time left, because long trajectories finish
        // last.
        let counts = self.kind.unit == Unit::Steps || state.tokens == 0.0;
        let is_known = counts && done_here > 0 && state.done < self.total;
        is_known.then(|| elapsed / done_here as f64 * (self.total - state.done) as f64)
    }

    /// Returns the stages of the run that have steps left, such as `: evaluation`.
    fn stages_left(&self) -> String {
        let eta = lock(&self.console.0.eta);
        let is_planned = self.kind.unit == Unit::Steps && eta.has_plan();
        if is_planned { format!(": {}", eta.stages_left().join(", ")) } else { String::new() }
    }

    /// Returns the finished items, the tokens and the seconds of this stage so far.
    fn speed(&self, state: &StageState, now: Instant) -> StageSpeed {
        let seconds = now.saturating_duration_since(self.start).as_secs_f64();
        let items = state.done.saturating_sub(self.done_at_start) as f64;
        StageSpeed { items, tokens: state.tokens, seconds }
    }

    /// Formats name and count, such as `rl 3/100`.
    fn label(&self, state: &StageState) -> String {
        let done = if self.total == 0 { String::new() } else { format!(" {}/{}", state.done, self.total) };
        format!("{}{done}", self.name)
    }

    /// Formats the label and the message.
    fn line(&self, state: &StageState, now: Instant) -> String {
        format!("{}  {}", self.label(state), self.message(state, now))
    }

    /// Formats the message, such as `reward 0.5  1,204 tokens/s  1:20 left`. The number of tokens is included
    /// if the stage counts items and the number of items is different. The elapsed time is included if an
    /// unfinished stage does not count steps, and has neither tokens nor an estimate of the time left.
    fn message(&self, state: &StageState, now: Instant) -> String {
        let value = |(name, value): &(String, f64)| format!("{name} {}", format_number(*value));
        let mut parts: Vec<String> =
            state.note.iter().cloned().chain(state.values.iter().map(value)).collect();
        let elapsed = now.saturating_duration_since(self.start).as_secs_f64();
        let tokens = state.tokens.round();
        // A step adds its tokens at its end.
        let measured_until = state.advanced.filter(|_| self.kind.unit == Unit::Steps).unwrap_or(now);
        let token_seconds = measured_until.saturating_duration_since(self.start).as_secs_f64();
        if tokens > 0.0 && token_seconds > 0.0 {
            if self.kind.unit == Unit::Items && tokens != (state.done - self.done_at_start) as f64 {
                parts.push(format!("{} tokens", format_number(tokens)));
            }
            let rate = tokens / token_seconds;
            let rate = if rate < 10.0 { (10.0 * rate).round() / 10.0 } else { rate.round() };
            parts.push(format!("{} tokens/s", format_number(rate)));
        }
        let left = self.seconds_left(state, now).map(|seconds| {
            let others = if state.done < self.total { String::new() } else { self.stages_left() };
            format!("{} left{others}", format_duration(seconds))
        });
        if left.is_none() && tokens == 0.0 && self.kind.unit != Unit::Steps && state.done < self.total.max(1)
        {
            parts.push(format!("{} so far", format_duration(elapsed)));
        }
        parts.extend(left);
        parts.join("  ")
    }
}

#[cfg(test)]
mod tests;
