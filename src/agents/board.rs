//! The episodes of the current rollout, shared by the HTTP threads and the thread that runs the engine.
//!
//! An episode waits until the program asks for it, is open until its reward comes or it fails, and then has a
//! result. HTTP threads leave their requests to the engine as commands, because the engine lives only as long
//! as one rollout.
//!
//! Locks: whoever holds the state may lock an episode's `play`, never the other way round.

use super::trace::{EpisodeFacts, Trace};
use crate::chat::ChatTurnParser;
use crate::engine::{Completion, EngineRequest, NewToken};
use crate::harmony::TurnStep;
use crate::metrics::{Console, sanitize_line};
use crate::ops::logits::SamplingParameters;
use crate::random::Purpose;
use crate::rollout::{EpisodeCounts, EpisodeFailure, Prompt, RolloutProgress};
use crate::serve::{ApiError, Event};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that a request for an episode waits. Then the program asks again.
const NEXT_WAIT: Duration = Duration::from_secs(20);
/// Interval at which a waiting request checks that its client is still connected.
const PEER_POLL: Duration = Duration::from_millis(200);

/// The rollout that is being played.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoundPlan {
    pub seed: u64,
    pub purpose: Purpose,
    pub step: u64,
    pub policy_version: u64,
    pub sampling: SamplingParameters,
    /// Whether to keep, with each token, the tokens that it was drawn from.
    pub keeps_token_sets: bool,
    pub prompt_tokens_max: usize,
    pub response_tokens_max: usize,
    pub context_tokens_max: usize,
}

impl RoundPlan {
    /// Returns the facts of the episode that is sample `sample` of `prompt`.
    fn facts(&self, prompt: &Prompt, sample: u64) -> EpisodeFacts {
        EpisodeFacts {
            step: self.step,
            policy_version: self.policy_version,
            prompt: prompt.index,
            sample,
            problem_id: prompt.problem.id.clone(),
        }
    }
}

/// A reward with its metrics, as the program gave it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GivenReward {
    pub reward: f32,
    pub success: bool,
    pub metrics: BTreeMap<String, f32>,
}

/// Where an episode stands in its rollout: prompt, then sample.
pub(super) type Place = (usize, u64);

/// The result of an episode. A failed one has no trace.
pub(super) struct EpisodeResult {
    pub facts: EpisodeFacts,
    pub given: Result<(GivenReward, Trace), EpisodeFailure>,
}

/// An episode that is not handed out yet.
struct Waiting {
    place: Place,
    /// Number of times that it was begun before.
    attempt: u64,
}

/// An open episode.
pub(super) struct Episode {
    pub id: String,
    pub facts: EpisodeFacts,
    pub round: RoundPlan,
    place: Place,
    attempt: u64,
    deadline: Instant,
    pub play: Mutex<Play>,
}

/// The changing part of an open episode.
#[derive(Default)]
pub(super) struct Play {
    pub is_over: bool,
    /// Number of requests so far.
    pub requests: u64,
    pub trace: Trace,
}

impl Episode {
    pub fn play(&self) -> MutexGuard<'_, Play> {
        self.play.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    console: Console,
}

#[derive(Default)]
struct State {
    round: Option<RoundPlan>,
    prompts: Vec<Prompt>,
    is_over: bool,
    waiting: VecDeque<Waiting>,
    open: HashMap<String, Arc<Episode>>,
    /// The places of finished episodes of this round, by id.
    ended: HashMap<String, Place>,
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
    /// Requests for an episode in all rounds.
    asked: u64,
    last_activity: Option<Instant>,
    /// The kinds of messages that were printed.
    told: BTreeSet<String>,
}

impl Board {
    pub fn new(timeout: Duration, open_max: usize, console: Console) -> Self {
        Self {
            state: Mutex::default(),
            episodes: Condvar::new(),
            work: Condvar::new(),
            timeout,
            open_max,
            console,
        }
    }

    /// Begins a rollout: `samples` episodes for each of `prompts`.
    pub fn begin_round(&self, round: RoundPlan, prompts: &[Prompt], samples: usize) {
        let mut state = self.lock();
        let places = (0..prompts.len()).flat_map(|prompt| (0..samples as u64).map(move |s| (prompt, s)));
        state.waiting = places.map(|place| Waiting { place, attempt: 0 }).collect();
        state.expected = state.waiting.len();
        state.progress = RolloutProgress { trajectories: state.expected, ..Default::default() };
        state.prompts = prompts.to_vec();
        state.round = Some(round);
        state.last_activity = Some(Instant::now());
        self.episodes.notify_all();
    }

    /// Ends the rollout and returns its results. Episodes that are still open are dropped.
    pub fn end_round(&self) -> (BTreeMap<Place, EpisodeResult>, EpisodeCounts) {
        let mut state = self.lock();
        let open: Vec<Arc<Episode>> = state.open.drain().map(|(_, episode)| episode).collect();
        open.iter().for_each(|episode| episode.play().is_over = true);
        (state.round, state.expected) = (None, 0);
        state.waiting.clear();
        state.commands.clear();
        state.samples.clear();
        state.ended.clear();
        (std::mem::take(&mut state.results), std::mem::take(&mut state.counts))
    }

    /// Tells the program that there are no further episodes.
    pub fn end_run(&self) {
        self.lock().is_over = true;
        self.episodes.notify_all();
    }

    /// Returns whether every episode of the rollout has a result.
    pub fn is_round_over(&self) -> bool {
        let state = self.lock();
        state.results.len() >= state.expected
    }

    /// Waits for an episode to hand out. `has_left` tells whether the client is gone.
    pub fn next_episode(&self, has_left: impl Fn() -> bool) -> NextEpisode {
        let until = Instant::now() + NEXT_WAIT;
        let mut state = self.lock();
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
                && let Some(round) = state.round
                && let Some(waiting) = state.waiting.pop_front()
            {
                return NextEpisode::Episode(self.hand_out(&mut state, round, waiting));
            }
            let wait = PEER_POLL.min(until - now);
            state = self.episodes.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn hand_out(&self, state: &mut State, round: RoundPlan, waiting: Waiting) -> Value {
        let Waiting { place: (index, sample), attempt } = waiting;
        let prompt = &state.prompts[index];
        let (letter, phase) = match round.purpose {
            Purpose::Evaluation => ('v', "validation"),
            _ => ('t', "train"),
        };
        let again = if attempt == 0 { String::new() } else { format!("-again{attempt}") };
        let id = format!("{letter}{}-{}-{sample}{again}", round.step, prompt.index);
        let value = json!({
            "id": id, "phase": phase, "step": round.step, "seed": round.seed, "index": prompt.index,
            "sample": sample, "problem_id": prompt.problem.id, "problem": prompt.problem.answer,
        });
        let facts = round.facts(prompt, sample);
        let episode = Episode {
            id: id.clone(),
            facts,
            round,
            place: (index, sample),
            attempt,
            deadline: Instant::now() + self.timeout,
            play: Mutex::default(),
        };
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
        let mut state = self.lock();
        match state.open.get(id) {
            Some(episode) => Ok(episode.clone()),
            None => Err(self.refuse_unknown(&mut state, id)),
        }
    }

    fn refuse_unknown(&self, state: &mut State, id: &str) -> ApiError {
        state.counts.refused += 1;
        let error = match state.ended.contains_key(id) {
            true => over(id),
            false => ApiError::not_found(format!(
                "there is no episode {id:?}, or it ended in an earlier step; ask POST /v1/episodes/next for one"
            )),
        };
        self.tell(state, "refused", &format!("a request was refused: {}", error.message()));
        error
    }

    /// Counts a request that was refused for another reason.
    pub fn count_refused(&self, why: &str) {
        let mut state = self.lock();
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
        let mut state = self.lock();
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
        let mut state = self.lock();
        let Some(open) = state.samples.get_mut(&sample) else { return false };
        match &mut open.whole {
            Some(parser) => !matches!(parser.push(token.id), TurnStep::Ended(_)),
            None => open.events.send((0, Event::Token(token.clone()))).is_ok(),
        }
    }

    /// Passes the end of a sample to the request that waits for it.
    pub fn finish(&self, sample: u64, completion: Completion) {
        let open = self.lock().samples.remove(&sample);
        if let Some(open) = open {
            // Sending fails if the client has left. Then nobody needs the answer.
            let _ = open.events.send((0, Event::Finished(completion)));
        }
    }

    /// Ends a sample that nobody waits for any more.
    pub fn cancel(&self, sample: u64) {
        let mut state = self.lock();
        if state.samples.remove(&sample).is_some() {
            state.commands.push(Command::Cancel(sample));
            self.work.notify_one();
        }
    }

    /// Ends episode `id` with its reward, or with the failure and its description.
    ///
    /// # Errors
    /// When the episode is unknown or over. A second reward makes the episode fail.
    pub fn reward(
        &self,
        id: &str,
        given: Result<GivenReward, (EpisodeFailure, String)>,
    ) -> Result<(), ApiError> {
        let mut state = self.lock();
        if let Some(episode) = state.open.get(id).cloned() {
            self.end_episode(&mut state, &episode, given);
            return Ok(());
        }
        let error = self.refuse_unknown(&mut state, id);
        let place = state.ended.get(id).copied();
        if let Some(result) = place.and_then(|place| state.results.get_mut(&place))
            && result.given.is_ok()
        {
            result.given = Err(EpisodeFailure::SecondReward);
            let why = "it got a second reward; give one to each episode";
            self.tell_failure(&mut state, id, EpisodeFailure::SecondReward, why);
        }
        Err(error)
    }

    fn end_episode(
        &self,
        state: &mut State,
        episode: &Episode,
        given: Result<GivenReward, (EpisodeFailure, String)>,
    ) {
        state.open.remove(&episode.id);
        state.ended.insert(episode.id.clone(), episode.place);
        self.drop_samples(state, &episode.id);
        let trace = {
            let mut play = episode.play();
            play.is_over = true;
            std::mem::take(&mut play.trace)
        };
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
                state.progress.reward_sum += f64::from(given.reward);
                Ok((given, trace))
            }
            Err((failure, why)) => {
                self.tell_failure(state, &episode.id, failure, &why);
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
        let mut state = self.lock();
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
        let Some(round) = state.round.filter(|_| is_idle && state.open.is_empty()) else { return };
        while let Some(waiting) = state.waiting.pop_front() {
            self.fail_waiting(state, round, &waiting, seconds);
        }
        self.work.notify_one();
    }

    fn fail_waiting(&self, state: &mut State, round: RoundPlan, waiting: &Waiting, seconds: f64) {
        let (index, sample) = waiting.place;
        let facts = round.facts(&state.prompts[index], sample);
        let why = format!("the program did not ask for it within task.episode_timeout_s = {seconds} s");
        let failure = EpisodeFailure::NotAsked;
        self.tell_failure(state, &facts.problem_id, failure, &why);
        state.progress.finished += 1;
        state.results.insert(waiting.place, EpisodeResult { facts, given: Err(failure) });
    }

    /// Puts open episodes back, because their program has ended. An episode that was begun twice fails.
    pub fn begin_again(&self) {
        let mut state = self.lock();
        let mut open: Vec<Arc<Episode>> = state.open.values().cloned().collect();
        open.sort_by_key(|episode| std::cmp::Reverse(episode.place));
        for episode in open {
            if episode.attempt > 0 {
                let why = "the program ended during it, twice".to_owned();
                self.end_episode(&mut state, &episode, Err((EpisodeFailure::ProgramEnded, why)));
                continue;
            }
            state.open.remove(&episode.id);
            self.drop_samples(&mut state, &episode.id);
            episode.play().is_over = true;
            state.counts.begun_again += 1;
            state.waiting.push_front(Waiting { place: episode.place, attempt: 1 });
        }
        state.last_activity = Some(Instant::now());
        self.episodes.notify_all();
    }

    /// Returns the number of finished episodes and of requests for one, over all rounds.
    pub fn activity(&self) -> (u64, u64) {
        let state = self.lock();
        (state.finished, state.asked)
    }

    /// Adds sampled tokens to the progress and returns it.
    pub fn progress(&self, sampled: u64) -> RolloutProgress {
        let mut state = self.lock();
        state.progress.sampled_tokens += sampled;
        state.progress
    }

    /// Prints `text` as a warning if no message of this `kind` was printed before.
    pub fn tell_once(&self, kind: &str, text: &str) {
        self.tell(&mut self.lock(), kind, text);
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error of a request to an episode that is over.
pub(super) fn over(id: &str) -> ApiError {
    ApiError::refused("410 Gone", &format!("episode {id:?} is over"))
}
