//! Estimate of the remaining time of a run with several stages.

use std::collections::VecDeque;
use std::time::Instant;

/// Number of most recent steps of a stage. Their mean time is the expected time of the stage's next step.
/// Older steps are ignored, because a policy's answers become shorter or longer while it learns.
const RECENT_STEPS: usize = 3;

/// Estimates the remaining time of a run with alternating stages. A stage without a finished step is
/// estimated from its relative `work`.
pub(super) struct Eta {
    stages: Vec<StageEstimate>,
    /// The end of the last step of any stage.
    last_step_end: Instant,
    /// The stage of the current step, if that step began inside a step of another stage ([`Eta::begin`]).
    current_stage: Option<String>,
}

struct StageEstimate {
    name: String,
    left: u64,
    /// The work of a step, in a unit common to all stages.
    work: f64,
    /// Seconds of the most recent steps.
    recent: VecDeque<f64>,
    /// Expected seconds of a step, derived from other measurements. They are used until a step is measured.
    expected: Option<f64>,
}

impl Eta {
    /// Creates an estimate for stages given as (name, steps left, work of a step).
    pub fn new(stages: &[(&str, u64, f64)]) -> Self {
        let stage = |&(name, left, work): &(&str, u64, f64)| StageEstimate {
            name: name.to_owned(),
            left,
            work,
            recent: VecDeque::new(),
            expected: None,
        };
        Self {
            stages: stages.iter().map(stage).collect(),
            last_step_end: Instant::now(),
            current_stage: None,
        }
    }

    pub fn has_plan(&self) -> bool {
        !self.stages.is_empty()
    }

    /// Sets the expected `seconds` of a step of stage `name`. They are used until a step is measured.
    pub fn expect(&mut self, name: &str, seconds: f64) {
        if let Some(stage) = self.stages.iter_mut().find(|stage| stage.name == name) {
            stage.expected = Some(seconds);
        }
    }

    /// Records that a step of stage `name` begins inside a step of another stage.
    pub fn begin(&mut self, name: &str) {
        self.current_stage = Some(name.to_owned());
    }

    /// Records that `steps` steps of stage `name` took the time since the last step of any stage.
    pub fn advance(&mut self, name: &str, steps: u64) {
        let seconds = self.last_step_end.elapsed().as_secs_f64();
        if let Some(stage) = self.stages.iter_mut().find(|stage| stage.name == name && steps > 0) {
            self.last_step_end = Instant::now();
            self.current_stage = None;
            stage.advance(steps, seconds);
        }
    }

    /// Returns the seconds left at `now`; `name` is the stage of the current step. The time of a step is the
    /// mean of the stage's recent steps. Without such steps it is the stage's expected seconds, else it is
    /// derived from the other stages' time per unit of work. Returns `None` until a step of any stage is
    /// measured, and when no step is left.
    pub fn seconds_left(&self, name: &str, now: Instant) -> Option<f64> {
        let measured =
            || self.stages.iter().filter_map(|stage| Some((stage.mean_step_seconds()?, stage.work)));
        let (seconds, work) = measured().fold((0.0, 0.0), |(s, w), (step, work)| (s + step, w + work));
        let left: u64 = self.stages.iter().map(|stage| stage.left).sum();
        if left == 0 || work == 0.0 {
            return None;
        }
        let step = |stage: &StageEstimate| {
            stage.mean_step_seconds().or(stage.expected).unwrap_or(stage.work * seconds / work)
        };
        let all: f64 = self.stages.iter().map(|stage| stage.left as f64 * step(stage)).sum();
        let name = self.current_stage.as_deref().unwrap_or(name);
        let current = self.stages.iter().find(|stage| stage.name == name && stage.left > 0).map_or(0.0, step);
        let elapsed = now.saturating_duration_since(self.last_step_end).as_secs_f64();
        // A step that takes longer than expected is not done yet.
        let rest = if current > 0.0 { (current - elapsed).max(elapsed / 10.0) } else { 0.0 };
        Some(all - current + rest)
    }

    /// Returns the names of the stages with steps left.
    pub fn stages_left(&self) -> Vec<String> {
        self.stages.iter().filter(|stage| stage.left > 0).map(|stage| stage.name.clone()).collect()
    }
}

impl StageEstimate {
    fn advance(&mut self, steps: u64, seconds: f64) {
        self.left = self.left.saturating_sub(steps);
        self.recent.extend((0..steps).map(|_| seconds / steps as f64));
        self.recent.drain(..self.recent.len().saturating_sub(RECENT_STEPS));
    }

    /// Returns the mean seconds of the stage's recent steps.
    fn mean_step_seconds(&self) -> Option<f64> {
        (!self.recent.is_empty()).then(|| self.recent.iter().sum::<f64>() / self.recent.len() as f64)
    }
}

/// The finished items, the tokens and the time of a stage. The next stage of the same name is estimated from
/// them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StageSpeed {
    /// Number of finished items.
    pub items: f64,
    pub tokens: f64,
    pub seconds: f64,
}

/// Fraction of a stage that must be done before its own speed is used, if there is no earlier stage.
const FRACTION_MIN: f64 = 0.1;

impl StageSpeed {
    /// Returns the seconds left of a stage of `items` items. `done` is what it has done, and `tokens_left` is
    /// the estimate of its remaining tokens. `earlier` is the last stage of the same name, and has the weight
    /// of half a stage: parallel passes and trajectories finish late, so a stage seems slow at first.
    pub fn seconds_left(done: Self, items: f64, tokens_left: f64, earlier: Option<Self>) -> Option<f64> {
        let fraction = done.items / items.max(1.0);
        let Some(earlier) = earlier.filter(|earlier| earlier.tokens > 0.0 && earlier.items > 0.0) else {
            return (fraction >= FRACTION_MIN).then(|| done.seconds * tokens_left / done.tokens);
        };
        let expected = earlier.tokens / earlier.items * items;
        let expected_left = (expected - done.tokens).max((1.0 - fraction) * expected / 4.0);
        let left = fraction * tokens_left + (1.0 - fraction) * expected_left;
        let weight = expected / 2.0;
        let seconds_per_token =
            (done.seconds + weight * earlier.seconds / earlier.tokens) / (done.tokens + weight);
        Some(left * seconds_per_token)
    }
}

/// Formats seconds as `m:ss` or `h:mm:ss`.
pub fn format_duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if h > 0 { format!("{h}:{m:02}:{s:02}") } else { format!("{m}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_stage_that_has_run_counts_at_its_speed_and_another_by_its_work() {
        let mut eta = Eta::new(&[("cold start", 10, 1.0), ("rl", 4, 8.0), ("evaluation", 0, 1.0)]);
        let seconds = |eta: &Eta, name| eta.seconds_left(name, eta.last_step_end);
        assert_eq!(seconds(&eta, "cold start"), None, "nothing is known yet");
        eta.stages[0].advance(5, 10.0);
        assert_eq!(seconds(&eta, "cold start"), Some(5.0 * 2.0 + 4.0 * 16.0));
        eta.stages[0].advance(5, 10.0);
        eta.stages[1].advance(1, 3.0);
        assert_eq!(seconds(&eta, "rl"), Some(3.0 * 3.0), "its own speed is known");
        let within = |s| eta.seconds_left("rl", eta.last_step_end + Duration::from_secs(s));
        assert_eq!([within(2), within(50)], [Some(7.0), Some(11.0)], "a long step is not done");
        eta.stages[1].advance(3, 9.0);
        assert_eq!(seconds(&eta, "rl"), None, "nothing is left");
    }

    /// Regression test: the time left did not include evaluations, or their estimate was too short.
    #[test]
    fn evaluations_to_come_count_by_what_their_trajectories_take() {
        let mut eta = Eta::new(&[("rl", 4, 24.0), ("evaluation", 2, 8.0)]);
        eta.stages[0].advance(1, 30.0);
        let seconds =
            |eta: &Eta, later| eta.seconds_left("rl", eta.last_step_end + Duration::from_secs(later));
        assert_eq!(seconds(&eta, 0), Some(3.0 * 30.0 + 2.0 * 10.0), "estimated from the work");
        eta.expect("evaluation", 25.0);
        assert_eq!(seconds(&eta, 0), Some(3.0 * 30.0 + 2.0 * 25.0));
        eta.begin("evaluation");
        assert_eq!([seconds(&eta, 10), seconds(&eta, 30)], [Some(130.0), Some(118.0)], "its own time passes");
        eta.advance("evaluation", 1);
        eta.stages[1].recent = VecDeque::from([40.0]);
        assert_eq!(seconds(&eta, 0), Some(3.0 * 30.0 + 40.0), "its own speed is known");
    }

    #[test]
    fn the_time_of_ten_steps_is_right_within_a_fifth_after_a_slow_start() {
        let mut eta = Eta::new(&[("rl", 40, 1.0)]);
        eta.stages[0].advance(1, 60.0);
        (0..19).for_each(|step| eta.stages[0].advance(1, if step % 2 == 0 { 19.0 } else { 21.0 }));
        let left = eta.seconds_left("rl", eta.last_step_end).unwrap();
        assert!((left - 20.0 * 20.0).abs() < 0.2 * 400.0, "{left}");
    }

    /// The seconds of the steps of a run on real weights, whose answers became shorter. The mean of ten steps
    /// told up to 1.95 times the time left.
    #[test]
    fn steps_that_become_shorter_are_expected_to_stay_short() {
        let steps = [116, 163, 121, 79, 83, 79, 68, 72, 62, 50, 52, 40, 52, 51, 50];
        let mut eta = Eta::new(&[("rl", 15, 1.0)]);
        for (done, &seconds) in (1..15).zip(&steps) {
            eta.stages[0].advance(1, f64::from(seconds));
            let left = eta.seconds_left("rl", eta.last_step_end).unwrap();
            let ratio = left / f64::from(steps[done..].iter().sum::<i32>());
            assert!(done < 6 || (0.75..1.5).contains(&ratio), "step {done}: {ratio}");
        }
    }

    /// Regression test: the time left of a phase was wrong by a factor of up to nine in its first seconds.
    #[test]
    fn a_stage_is_estimated_from_the_one_before_it_until_its_own_speed_is_known() {
        let of = |items, tokens, seconds| StageSpeed { items, tokens, seconds };
        let left = |done, tokens_left, earlier| StageSpeed::seconds_left(done, 8.0, tokens_left, earlier);
        assert_eq!(left(of(0.5, 50.0, 25.0), 750.0, None), None, "a sixteenth is too little");
        assert_eq!(left(of(1.0, 100.0, 50.0), 700.0, None), Some(350.0));
        assert_eq!(left(of(2.0, 200.0, 50.0), 600.0, None), Some(150.0));
        let earlier = Some(of(8.0, 800.0, 100.0));
        assert_eq!(left(of(0.0, 0.0, 10.0), 0.0, earlier), Some(800.0 * (10.0 + 50.0) / 400.0));
        let late = left(of(7.0, 700.0, 88.0), 100.0, earlier).unwrap();
        assert!((late - 12.5).abs() < 0.1, "{late}");
    }

    #[test]
    fn time_left_reads_as_a_clock() {
        assert_eq!([0.0, 59.6, 3661.0].map(format_duration), ["0:00", "1:00", "1:01:01"]);
    }
}
