//! The episodes of the current rollout, shared by the HTTP threads and the thread that runs the engine.
//!
//! An episode waits until the program asks for it, is open until its reward comes or it fails, and then has a
//! result. HTTP threads leave their requests to the engine as commands, because the engine lives only as long
//! as one rollout.
//!
//! Locks: whoever holds the state may lock an episode's `play`, never the other way round.

use super::episode::Episode;
use super::trace::Trace;
use crate::chat::ChatTurnParser;
use crate::engine::{Completion, EngineRequest, NewToken};
use crate::harmony::TurnStep;
use crate::metrics::{Console, sanitize_line};
use crate::panics::lock;
use crate::random::Purpose;
use crate::rollout::{EpisodeCounts, EpisodeFailure, Prompt, RolloutPlan, RolloutProgress};
use crate::serve::{ApiError, Event};
use crate::tasks::Reward;
use crate::trajectory::{Outcome, Trajectory};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that a request for an episode waits. Then the program asks again.
const NEXT_WAIT: Duration = Duration::from_secs(20);
/// Interval at which a waiting request checks that its client is still connected.
const PEER_POLL: Duration = Duration::from_millis(200);

/// The rollout that is being played.
#[derive(Debug)]
pub(super) struct RoundPlan {
    pub plan: RolloutPlan,
    pub policy_version: u64,
    pub context_tokens_max: usize,
}

impl RoundPlan {
    /// Returns the facts of the episode that is sample `sample` of `prompt`, as a trajectory without tokens
    /// that failed.
    fn facts(&self, prompt: &Prompt, sample: u64) -> Trajectory {
        Trajectory {
            step: self.plan.step,
            policy_version: Some(self.policy_version),
            prompt: prompt.index,
            sample,
            problem_id: prompt.problem.id.clone(),
            outcome: Outcome::TaskFailed,
            ..Trajectory::default()
        }
    }
}

/// A reward with its metrics as the program gave it, or why an episode failed, with the description.
type Given = Result<Reward, (EpisodeFailure, String)>;

/// Where an episode stands in its rollout: prompt, then sample.
pub(super) type Place = (usize, u64);

/// The result of an episode. A failed one has no trace.
pub(super) struct EpisodeResult {
    /// The fields that all trajectories of the episode share; without tokens.
    pub facts: Trajectory,
    pub given: Result<(Reward, Trace), EpisodeFailure>,
}

/// An episode that is not handed out yet.
struct Waiting {
    place: Place,
    /// Number of times that it was begun before.
    attempt: u64,
}

/// An instruction for the engine.
pub(super) enum Command {
    Submit(EngineRequest),
    Cancel(u64),
}

/// A sample in the engine, and the request that waits for it.
struct OpenSample {
    /// The id of its episode.
    episode: String,
    events: Sender<(usize, Event)>,
    /// Finds the end of the answer if the request gets it as a whole. Then its tokens are not sent one by
    /// one, because each would wake the request's thread.
    whole: Option<ChatTurnParser>,
}

/// The answer to a request for an episode.
pub(super) enum NextEpisode {
    Episode(Value),
    /// There is none now; the program asks again.
    Later,
    /// The run is over.
    Done,
}

pub(super) struct Board {
    state: Mutex<State>,
    /// Wakes requests for an episode.
    episodes: Condvar,
    /// Wakes the thread that feeds the engine.
    work: Condvar,
    timeout: Duration,
    open_max: usize,
    /// A random key of this process, which ids of episodes are made of.
    secret: [u8; 32],
    console: Console,
}

#[derive(Default)]
struct State {
    round: Option<Arc<RoundPlan>>,
    prompts: Vec<Prompt>,
    is_over: bool,
    waiting: VecDeque<Waiting>,
    open: HashMap<String, Arc<Episode>>,
    /// The episodes of this round that are over, by id, with what the program gave to them.
    ended: HashMap<String, Option<Given>>,
    /// Those of the round before.
    ended_before: HashMap<String, Option<Given>>,
    results: BTreeMap<Place, EpisodeResult>,
    expected: usize,
    commands: Vec<Command>,
    /// The samples in the engine.
    samples: HashMap<u64, OpenSample>,
    next_sample: u64,
    counts: EpisodeCounts,
    progress: RolloutProgress,
    /// Episodes finished in all rounds.
    finished: u64,
    /// Episodes handed out in all rounds.
    handed_out: u64,
    /// Requests for an episode in all rounds.
    asked: u64,
    last_activity: Option<Instant>,
    /// The kinds of messages that were printed.
    told: BTreeSet<String>,
}

impl State {
    /// Returns what the program gave to episode `id`, which is over: `None` inside if it gave nothing.
    fn given(&self, id: &str) -> Option<&Option<Given>> {
        self.ended.get(id).or_else(|| self.ended_before.get(id))
    }

    /// Returns the open episodes by place.
    fn open_episodes(&self) -> Vec<Arc<Episode>> {
        let mut open: Vec<_> = self.open.values().cloned().collect();
        open.sort_by_key(|episode| episode.place);
        open
    }
}

impl Board {
    /// `secret` are random bytes.
    pub fn new(timeout: Duration, open_max: usize, secret: [u8; 32], console: Console) -> Self {
        Self {
            state: Mutex::default(),
            episodes: Condvar::new(),
            work: Condvar::new(),
            timeout,
            open_max,
            secret,
            console,
        }
    }

    /// Begins a rollout: `samples` episodes for each of `prompts`.
    pub fn begin_round(&self, round: RoundPlan, prompts: &[Prompt], samples: usize) {
        let mut state = lock(&self.state);
        let places = (0..prompts.len()).flat_map(|prompt| (0..samples as u64).map(move |s| (prompt, s)));
        state.waiting = places.map(|place| Waiting { place, attempt: 0 }).collect();
        state.expected = state.waiting.len();
        state.progress = RolloutProgress { trajectories: state.expected, ..Default::default() };
        state.prompts = prompts.to_vec();
        state.round = Some(round.into());
        state.last_activity = Some(Instant::now());
        self.episodes.notify_all();
    }

    /// Ends the rollout and returns its results. Episodes that are still open are dropped.
    pub fn end_round(&self) -> (BTreeMap<Place, EpisodeResult>, EpisodeCounts) {
        let mut state = lock(&self.state);
        for episode in state.open_episodes() {
            self.close(&mut state, &episode);
        }
        (state.round, state.expected) = (None, 0);
        state.waiting.clear();
        state.commands.clear();
        state.samples.clear();
        state.ended_before = std::mem::take(&mut state.ended);
        (std::mem::take(&mut state.results), std::mem::take(&mut state.counts))
    }

    /// Tells the program that there are no further episodes.
    pub fn end_run(&self) {
        lock(&self.state).is_over = true;
        self.episodes.notify_all();
    }

    /// Returns whether every episode of the rollout has a result.
    pub fn is_round_over(&self) -> bool {
        let state = lock(&self.state);
        state.results.len() >= state.expected
    }

    /// Waits for an episode to hand out. `has_left` tells whether the client is gone.
    pub fn next_episode(&self, has_left: impl Fn() -> bool) -> NextEpisode {
        let until = Instant::now() + NEXT_WAIT;
        let mut state = lock(&self.state);
        state.asked += 1;
        loop {
            if state.is_over {
                return NextEpisode::Done;
            }
            let now = Instant::now();
            if has_left() || now >= until {
                return NextEpisode::Later;
            }
            if state.open.len() < self.open_max
                && let Some(round) = state.round.clone()
                && let Some(waiting) = state.waiting.pop_front()
            {
                return NextEpisode::Episode(self.hand_out(&mut state, round, waiting));
            }
            let wait = PEER_POLL.min(until - now);
            state = self.episodes.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn hand_out(&self, state: &mut State, round: Arc<RoundPlan>, waiting: Waiting) -> Value {
        let Waiting { place: (index, sample), attempt } = waiting;
        let prompt = &state.prompts[index];
        let (letter, phase) =
            if let Purpose::Evaluation = round.plan.purpose { ('v', "validation") } else { ('t', "train") };
        let again = if attempt == 0 { String::new() } else { format!("-again{attempt}") };
        let name = format!("{letter}{}-{}-{sample}{again}", round.plan.step, prompt.index);
        state.handed_out += 1;
        let secret = blake3::keyed_hash(&self.secret, &state.handed_out.to_le_bytes());
        let id = format!("{name}-{}", &secret.to_hex()[..32]);
        let value = json!({
            "id": id, "phase": phase, "step": round.plan.step, "seed": round.plan.seed, "index": prompt.index,
            "sample": sample, "problem_id": prompt.problem.id, "problem": prompt.problem.answer,
        });
        let facts = round.facts(prompt, sample);
        let deadline = Instant::now() + self.timeout;
        let (place, play, settled) = ((index, sample), Mutex::default(), Condvar::new());
        let episode = Episode { id: id.clone(), name, facts, round, place, attempt, deadline, play, settled };
        state.open.insert(id, Arc::new(episode));
        state.progress.started += 1;
        state.last_activity = Some(Instant::now());
        value
    }

    /// Returns the open episode `id`.
    ///
    /// # Errors
    /// When there is no such episode, or it is over.
    pub fn episode(&self, id: &str) -> Result<Arc<Episode>, ApiError> {
        let mut state = lock(&self.state);
        match state.open.get(id) {
            Some(episode) => Ok(episode.clone()),
            None => Err(self.refuse_unknown(&mut state, id)),
        }
    }

    fn refuse_unknown(&self, state: &mut State, id: &str) -> ApiError {
        state.counts.refused += 1;
        let error = match state.given(id) {
            Some(_) => over(id),
            None => ApiError::not_found(format!(
                "there is no episode {id:?}, or it is of an earlier step or process; ask POST /v1/episodes/next for one"
            )),
        };
        self.tell(state, "refused", &format!("a request was refused: {}", error.message));
        error
    }

    /// Counts a request that was refused for another reason.
    pub fn count_refused(&self, why: &str) {
        let mut state = lock(&self.state);
        state.counts.refused += 1;
        self.tell(&mut state, "refused", &format!("a request was refused: {why}"));
    }

    /// Queues a request of an open episode. Its `samples` are set here. Returns the sample's id and the
    /// channel of its events, which is closed when the episode ends. With `whole`, a parser of the answer,
    /// the only event is the end of the answer.
    ///
    /// # Errors
    /// When the episode is over.
    pub fn submit(
        &self,
        episode: &Episode,
        whole: Option<ChatTurnParser>,
        request: impl FnOnce(u64) -> EngineRequest,
    ) -> Result<(u64, Receiver<(usize, Event)>), ApiError> {
        let mut state = lock(&self.state);
        if !state.open.contains_key(&episode.id) {
            return Err(self.refuse_unknown(&mut state, &episode.id));
        }
        let sample = state.next_sample;
        state.next_sample += 1;
        let (sender, events) = channel();
        state.samples.insert(sample, OpenSample { episode: episode.id.clone(), events: sender, whole });
        state.commands.push(Command::Submit(request(sample)));
        state.last_activity = Some(Instant::now());
        self.work.notify_one();
        Ok((sample, events))
    }

    /// Passes a token of the engine to the request that waits for it. Returns whether the sample goes on.
    pub fn token(&self, sample: u64, token: &NewToken) -> bool {
        let mut state = lock(&self.state);
        let Some(open) = state.samples.get_mut(&sample) else { return false };
        match &mut open.whole {
            Some(parser) => !matches!(parser.push(token.id), TurnStep::Ended(_)),
            None => open.events.send((0, Event::Token(token.clone()))).is_ok(),
        }
    }

    /// Passes the end of a sample to the request that waits for it.
    pub fn finish(&self, sample: u64, completion: Completion) {
        let open = lock(&self.state).samples.remove(&sample);
        if let Some(open) = open {
            // Sending fails if the client has left. Then nobody needs the answer.
            let _ = open.events.send((0, Event::Finished(completion)));
        }
    }

    /// Ends a sample that nobody waits for any more.
    pub fn cancel(&self, sample: u64) {
        let mut state = lock(&self.state);
        if state.samples.remove(&sample).is_some() {
            state.commands.push(Command::Cancel(sample));
            self.work.notify_one();
        }
    }

    /// Ends episode `id` with its reward, or with the failure and its description. The same again changes
    /// nothing.
    ///
    /// # Errors
    /// When the episode is unknown or over, and when it was given something else before, which stays.
    pub fn reward(&self, id: &str, given: Given) -> Result<(), ApiError> {
        let open = lock(&self.state).open.get(id).cloned();
        if let Some(episode) = open {
            drop(episode.settled_play());
        }
        let mut state = lock(&self.state);
        if let Some(episode) = state.open.get(id).cloned() {
            state.ended.insert(id.to_owned(), Some(given.clone()));
            self.end_episode(&mut state, &episode, given);
            return Ok(());
        }
        match state.given(id) {
            Some(Some(before)) if *before == given => Ok(()),
            Some(Some(_)) => {
                state.counts.refused += 1;
                let why =
                    format!("episode {id:?} has another reward or error, which stays; give one to each");
                self.tell(&mut state, "other_reward", &format!("a reward was refused: {why}"));
                Err(ApiError::refused("409 Conflict", &why))
            }
            _ => Err(self.refuse_unknown(&mut state, id)),
        }
    }

    /// Ends an open episode and returns its trace.
    fn close(&self, state: &mut State, episode: &Episode) -> Trace {
        state.open.remove(&episode.id);
        state.ended.entry(episode.id.clone()).or_insert(None);
        self.drop_samples(state, &episode.id);
        let (trace, undelivered) = episode.close();
        state.counts.undelivered += undelivered;
        if undelivered > 0 {
            let text = format!(
                "episode {}: a client closed its connection before its answer was written; the answer is not trained; \
                 further ones are only counted, as agent/undelivered_answers",
                episode.name
            );
            self.tell(state, "undelivered", &text);
        }
        trace
    }

    fn end_episode(&self, state: &mut State, episode: &Episode, given: Given) {
        let trace = self.close(state, episode);
        let given = match given {
            Ok(_) if trace.answers() == 0 => {
                Err((EpisodeFailure::NoAnswer, "it got a reward, but asked for no answer".to_owned()))
            }
            given => given,
        };
        state.finished += 1;
        state.last_activity = Some(Instant::now());
        state.progress.finished += 1;
        let given = match given {
            Ok(given) => {
                state.progress.reward_sum += f64::from(given.value);
                Ok((given, trace))
            }
            Err((failure, why)) => {
                self.tell_failure(state, &episode.name, failure, &why);
                Err(failure)
            }
        };
        state.results.insert(episode.place, EpisodeResult { facts: episode.facts.clone(), given });
        self.episodes.notify_all();
        self.work.notify_one();
    }

    fn drop_samples(&self, state: &mut State, id: &str) {
        let dropped: Vec<u64> =
            state.samples.iter().filter(|(_, open)| open.episode == id).map(|(&sample, _)| sample).collect();
        for sample in dropped {
            state.samples.remove(&sample);
            state.commands.push(Command::Cancel(sample));
        }
    }

    /// Waits up to `wait` for commands, and fails the episodes whose time is over.
    pub fn take_commands(&self, wait: Duration) -> Vec<Command> {
        let mut state = lock(&self.state);
        if state.commands.is_empty() && state.results.len() < state.expected {
            state = self.work.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.end_late_episodes(&mut state);
        std::mem::take(&mut state.commands)
    }

    fn end_late_episodes(&self, state: &mut State) {
        let (now, seconds) = (Instant::now(), self.timeout.as_secs_f64());
        let late: Vec<_> = state.open.values().filter(|episode| episode.deadline <= now).cloned().collect();
        for episode in late {
            let why = format!("no reward came within task.episode_timeout_s = {seconds} s");
            self.end_episode(state, &episode, Err((EpisodeFailure::Timeout, why)));
        }
        let is_idle = state.last_activity.is_some_and(|last| now.duration_since(last) >= self.timeout);
        if !is_idle || !state.open.is_empty() {
            return;
        }
        let Some(round) = state.round.clone() else { return };
        let why = format!("the program did not ask for it within task.episode_timeout_s = {seconds} s");
        let failure = EpisodeFailure::NotAsked;
        while let Some(Waiting { place, .. }) = state.waiting.pop_front() {
            let facts = round.facts(&state.prompts[place.0], place.1);
            self.tell_failure(state, &facts.problem_id, failure, &why);
            state.progress.finished += 1;
            state.results.insert(place, EpisodeResult { facts, given: Err(failure) });
        }
        self.work.notify_one();
    }

    /// Puts back an episode that the program did not receive. It then gets another id.
    pub fn take_back(&self, id: &str) {
        let mut state = lock(&self.state);
        if let Some(episode) = state.open.get(id).cloned() {
            self.put_back(&mut state, &episode, episode.attempt);
            state.progress.started -= 1;
            self.episodes.notify_all();
        }
    }

    fn put_back(&self, state: &mut State, episode: &Episode, attempt: u64) {
        self.close(state, episode);
        state.waiting.push_front(Waiting { place: episode.place, attempt });
    }

    /// Puts open episodes back, because their program has ended. An episode that was begun twice fails.
    pub fn begin_again(&self) {
        let mut state = lock(&self.state);
        for episode in state.open_episodes().into_iter().rev() {
            if episode.attempt > 0 {
                let why = "the program ended during it, twice".to_owned();
                self.end_episode(&mut state, &episode, Err((EpisodeFailure::ProgramEnded, why)));
                continue;
            }
            self.put_back(&mut state, &episode, 1);
            state.counts.begun_again += 1;
        }
        state.last_activity = Some(Instant::now());
        self.episodes.notify_all();
    }

    /// Returns the number of finished episodes and of requests for one, over all rounds.
    pub fn activity(&self) -> (u64, u64) {
        let state = lock(&self.state);
        (state.finished, state.asked)
    }

    /// Adds sampled tokens to the progress and returns it.
    pub fn progress(&self, sampled: u64) -> RolloutProgress {
        let mut state = lock(&self.state);
        let progress = &mut state.progress;
        progress.sampled_tokens += sampled;
        // An unfinished episode counts as half an episode.
        let half = progress.started.saturating_sub(progress.finished) as f64 / 2.0;
        let length = progress.sampled_tokens as f64 / (progress.finished as f64 + half);
        let left = (progress.trajectories - progress.finished) as f64 - half;
        progress.tokens_left = (progress.finished > 0).then_some(left * length);
        *progress
    }

    /// Prints `text` as a warning if no message of this `kind` was printed before.
    pub fn tell_once(&self, kind: &str, text: &str) {
        self.tell(&mut lock(&self.state), kind, text);
    }

    fn tell_failure(&self, state: &mut State, id: &str, failure: EpisodeFailure, why: &str) {
        *state.counts.failed.entry(failure.to_string()).or_default() += 1;
        let text = format!(
            "episode {id}: {why}; no step trains on it; further ones are only counted, as agent/failed_{failure}"
        );
        self.tell(state, &failure.to_string(), &text);
    }

    fn tell(&self, state: &mut State, kind: &str, text: &str) {
        if state.told.insert(kind.to_owned()) {
            self.console.print(&sanitize_line(&format!("warning: agent: {text}")));
        }
    }
}

/// Returns the error of a request to an episode that is over.
pub(super) fn over(id: &str) -> ApiError {
    ApiError::refused("410 Gone", &format!("episode {id:?} is over"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::RolloutSettings;
    use crate::tasks::Problem;

    /// An episode whose client left while it was handed out stayed open until its time was over.
    #[test]
    fn bug_an_episode_that_nobody_received_was_lost() {
        let board = Board::new(Duration::from_secs(600), 4, [7; 32], Console::plain());
        let round = RoundPlan {
            plan: RolloutPlan::for_training(&RolloutSettings::default(), 1, 1),
            policy_version: 0,
            context_tokens_max: 16,
        };
        let problem = Problem { id: "p".into(), messages: vec![], answer: Value::Null };
        board.begin_round(round, &[Prompt { index: 0, problem }], 2);
        let next = || match board.next_episode(|| false) {
            NextEpisode::Episode(episode) => (episode["id"].to_string(), episode["sample"].clone()),
            _ => panic!("no episode"),
        };
        let (first, sample) = next();
        board.take_back(first.trim_matches('"'));
        let (again, same) = next();
        assert!(sample == same && again != first && again[..8] == first[..8], "{first} {again}");
        assert_eq!(board.episode(first.trim_matches('"')).err().map(|error| error.status), Some("410 Gone"));
        assert!(board.episode(again.trim_matches('"')).is_ok());
        assert_ne!(next().1, sample);
    }
}
