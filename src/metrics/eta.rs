//! Estimate of the time left over all stages of a run.

use std::time::Instant;

/// Alternating stages of a run: their steps left, and the work of a step until its speed is known.
pub(super) struct Eta {
    stages: Vec<Stage>,
    /// The end of the last step of any stage.
    mark: Instant,
}

struct Stage {
    name: String,
    left: u64,
    /// The work of a step, in a unit common to all stages.
    work: f64,
    made: u64,
    seconds: f64,
}

impl Eta {
    /// Makes an estimate of stages given as (name, steps left, work of a step).
    pub fn new(stages: &[(&str, u64, f64)]) -> Self {
        let stage = |&(name, left, work): &(&str, u64, f64)| Stage {
            name: name.to_owned(),
            left,
            work,
            made: 0,
            seconds: 0.0,
        };
        Self { stages: stages.iter().map(stage).collect(), mark: Instant::now() }
    }

    /// Records that `steps` of stage `name` took the time since the last step of any stage.
    pub fn advance(&mut self, name: &str, steps: u64) {
        let seconds = self.mark.elapsed().as_secs_f64();
        if let Some(stage) = self.stages.iter_mut().find(|stage| stage.name == name) {
            self.mark = Instant::now();
            stage.advance(steps, seconds);
        }
    }

    /// Returns the seconds left. A stage with steps done continues at its own speed; another at the speed of
    /// the others, by its work. `None` before the first step and after the last.
    pub fn seconds_left(&self) -> Option<f64> {
        let made = || self.stages.iter().filter(|stage| stage.made > 0);
        let (seconds, work) =
            made().fold((0.0, 0.0), |(s, w), stage| (s + stage.seconds, w + stage.made as f64 * stage.work));
        let left: u64 = self.stages.iter().map(|stage| stage.left).sum();
        if left == 0 || work == 0.0 {
            return None;
        }
        let of_stage = |stage: &Stage| {
            let step =
                if stage.made > 0 { stage.seconds / stage.made as f64 } else { stage.work * seconds / work };
            stage.left as f64 * step
        };
        Some(self.stages.iter().map(of_stage).sum())
    }
}

impl Stage {
    fn advance(&mut self, steps: u64, seconds: f64) {
        self.made += steps;
        self.left = self.left.saturating_sub(steps);
        self.seconds += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_has_run_counts_at_its_speed_and_another_by_its_work() {
        let mut eta = Eta::new(&[("cold start", 10, 1.0), ("rl", 4, 8.0), ("evaluation", 0, 1.0)]);
        assert_eq!(eta.seconds_left(), None, "nothing is known yet");
        eta.stages[0].advance(5, 10.0);
        assert_eq!(eta.seconds_left(), Some(5.0 * 2.0 + 4.0 * 16.0));
        eta.stages[0].advance(5, 10.0);
        eta.stages[1].advance(1, 3.0);
        assert_eq!(eta.seconds_left(), Some(3.0 * 3.0), "its own speed is known now");
        eta.stages[1].advance(3, 9.0);
        assert_eq!(eta.seconds_left(), None, "nothing is left");
    }
}
