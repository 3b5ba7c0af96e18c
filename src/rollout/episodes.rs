//! Counts of the episodes that a user's agent program plays (`task.name = "agent"`).

use crate::metrics::Metrics;
use crate::settings::{Choice, choice};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

choice! {
    /// Why an episode failed. No step trains on a failed episode.
    pub enum EpisodeFailure {
        /// It had no reward within `task.episode_timeout_s`.
        Timeout = "timeout",
        /// Its reward was not a finite number, or the body of the request was invalid.
        BadReward = "bad_reward",
        /// The program said that it failed.
        Error = "error",
        /// The program ended during the episode, twice.
        ProgramEnded = "program_ended",
        /// It got a reward, but no answer had been sampled.
        NoAnswer = "no_answer",
        /// The program did not ask for it.
        NotAsked = "not_asked",
    }
}

/// Counts of the episodes of one or several rollouts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EpisodeCounts {
    /// Episodes that got one valid reward.
    pub rewarded: u64,
    /// Failed episodes, by the name of their [`EpisodeFailure`].
    pub failed: BTreeMap<String, u64>,
    /// Trajectories of the rewarded episodes.
    pub trajectories: u64,
    /// Answers of the rewarded episodes.
    pub answers: u64,
    /// Requests that were refused: of an unknown or finished episode, of two episodes, with an invalid body,
    /// or a second reward that differs.
    pub refused: u64,
    /// Answers that no client took. They are not trained.
    #[serde(default)]
    pub undelivered: u64,
    /// Episodes that began again, because the program ended during them.
    pub begun_again: u64,
}

impl EpisodeCounts {
    /// Adds the counts of another rollout.
    pub fn add(&mut self, other: &Self) {
        self.rewarded += other.rewarded;
        for (name, count) in &other.failed {
            *self.failed.entry(name.clone()).or_default() += count;
        }
        self.trajectories += other.trajectories;
        self.answers += other.answers;
        self.refused += other.refused;
        self.undelivered += other.undelivered;
        self.begun_again += other.begun_again;
    }

    /// Returns the metrics. Every name is present, even if its count is 0.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::new();
        let mut set = |name: &str, value: u64| metrics.set(format!("agent/{name}"), value as f64);
        set("episodes", self.rewarded);
        set("trajectories", self.trajectories);
        set("answers", self.answers);
        set("refused_requests", self.refused);
        set("undelivered_answers", self.undelivered);
        set("begun_again", self.begun_again);
        set("failed", self.failed.values().sum());
        for failure in EpisodeFailure::all() {
            let count = self.failed.get(failure.name()).copied().unwrap_or(0);
            set(&format!("failed_{}", failure.name()), count);
        }
        metrics
    }
}
