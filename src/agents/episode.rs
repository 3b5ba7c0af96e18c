//! An open episode: its requests, and its answers up to their delivery.
//!
//! An answer becomes a part of the trace once its last byte was written to a client that had not left. Until
//! then, further requests of the episode and its reward wait. A request whose answer was not delivered keeps
//! its place: an equal request gets the same random stream and the same prompt, so the same answer.

use super::board::{Place, RoundPlan, over};
use super::trace::{SampledAnswer, Trace};
use crate::chat::{Chat, RequestMessages};
use crate::http::PeerHandle;
use crate::panics::lock;
use crate::serve::ApiError;
use crate::trajectory::Trajectory;
use blake3::Hash;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Maximum number of requests of one episode.
const REQUESTS_MAX: u64 = 1000;

/// An open episode.
pub(super) struct Episode {
    /// Cannot be guessed. Another process never hands it out.
    pub id: String,
    /// Phase, step, prompt and sample as a text, equal in every run of a recipe. It names answers and calls.
    pub name: String,
    /// The fields that all trajectories of the episode share; without tokens.
    pub facts: Trajectory,
    pub round: Arc<RoundPlan>,
    pub place: Place,
    /// Number of times that it was begun before.
    pub attempt: u64,
    pub deadline: Instant,
    pub play: Mutex<Play>,
    /// Wakes whoever waits for the end of a delivery.
    pub settled: Condvar,
}

/// The changing part of an open episode.
#[derive(Default)]
pub(super) struct Play {
    is_over: bool,
    /// Number of requests so far.
    requests: u64,
    /// Number of requests so far that repeat none without a delivered answer.
    positions: u64,
    /// The requests without a delivered answer, by position.
    asked: BTreeMap<u64, Asked>,
    /// Number of answers that were not delivered.
    undelivered: u64,
    trace: Trace,
}

/// A request without a delivered answer.
struct Asked {
    body: Hash,
    /// Its number among the episode's requests. An equal request that takes its place has another one.
    request: u64,
    /// Number of answers that its prompt could repeat.
    known_answers: usize,
    limit: TokenLimit,
    state: AskedState,
}

enum AskedState {
    /// The answer is being sampled for this client.
    Open(Option<PeerHandle>),
    /// The answer is being written.
    Written(SampledAnswer),
    /// The client left.
    Lost,
}

/// The maximum number of new tokens, and whether the recipe sets it, not the client.
#[derive(Clone, Copy)]
pub(super) struct TokenLimit {
    pub new_tokens_max: usize,
    pub is_recipes: bool,
}

/// A chat request, as far as its episode must know it.
pub(super) struct ChatRequest<'a> {
    /// The digest of the request's body.
    pub body: Hash,
    pub conversation: &'a RequestMessages,
    /// The entries of its `messages`.
    pub values: &'a [Value],
    pub new_tokens_max: Option<usize>,
    pub peer: Option<PeerHandle>,
}

/// A request's place in its episode, with its prompt. If it is dropped before [`Delivery::end`], its answer
/// was not delivered.
pub(super) struct Delivery<'r> {
    pub episode: Arc<Episode>,
    /// The number of its random stream in the episode.
    pub position: u64,
    request: u64,
    chat: &'r Chat,
}

impl Episode {
    /// Waits until no answer is being written. The writes have time limits.
    pub fn settled_play(&self) -> MutexGuard<'_, Play> {
        let is_writing = |asked: &Asked| matches!(asked.state, AskedState::Written(_));
        let waits = |play: &mut Play| !play.is_over && play.asked.values().any(is_writing);
        self.settled.wait_while(lock(&self.play), waits).unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the prompt of a request does not fit.
    pub fn end_of_space(&self) {
        lock(&self.play).trace.end_of_space();
    }

    /// Adds a request. Returns its place, its prompt and its limit.
    ///
    /// # Errors
    /// When the episode is over or has too many requests, and when the prompt is invalid or too long.
    pub fn ask<'r>(
        self: &Arc<Self>,
        chat: &'r Chat,
        asked: ChatRequest<'_>,
    ) -> Result<(Delivery<'r>, Vec<u32>, TokenLimit), ApiError> {
        let mut play = self.settled_play();
        if play.is_over {
            return Err(over(&self.id));
        }
        if play.requests >= REQUESTS_MAX {
            return Err(ApiError::full(format!("an episode has at most {REQUESTS_MAX} requests")));
        }
        let lost = play.find_lost(&asked.body);
        let known_answers = lost.map_or(play.trace.answers(), |(_, answers, _)| answers);
        let prompt = play.trace.render(chat, asked.conversation, asked.values, known_answers);
        let prompt = prompt.map_err(|error| ApiError::invalid(Some("messages"), format!("{error:#}")))?;
        let request = play.requests;
        play.requests += 1;
        let (position, limit) = match lost {
            Some((position, _, limit)) => (position, limit),
            None => {
                play.positions += 1;
                (play.positions - 1, self.limit(&mut play, &prompt, asked.new_tokens_max)?)
            }
        };
        let state = AskedState::Open(asked.peer);
        play.asked.insert(position, Asked { body: asked.body, request, known_answers, limit, state });
        Ok((Delivery { episode: self.clone(), position, request, chat }, prompt, limit))
    }

    fn limit(
        &self,
        play: &mut Play,
        prompt: &[u32],
        asked_tokens_max: Option<usize>,
    ) -> Result<TokenLimit, ApiError> {
        let (settings, prompt_tokens) = (&self.round.plan.settings, prompt.len());
        let context_tokens_max = self.round.context_tokens_max;
        let sampled = play.trace.sampled_before(prompt);
        let space = context_tokens_max.saturating_sub(prompt_tokens);
        let left = settings.response_tokens_max.saturating_sub(sampled).min(space);
        let why = if prompt_tokens > settings.prompt_tokens_max {
            let max = settings.prompt_tokens_max;
            format!("the prompt has {prompt_tokens} tokens, more than rollout.prompt_tokens_max = {max}")
        } else if left == 0 {
            format!(
                "no token is left: rollout.response_tokens_max = {} and {sampled} tokens were sampled; the prompt has \
                 {prompt_tokens} tokens and the model's context {context_tokens_max}",
                settings.response_tokens_max
            )
        } else {
            let new_tokens_max = asked_tokens_max.unwrap_or(left).min(left);
            return Ok(TokenLimit { new_tokens_max, is_recipes: new_tokens_max == left });
        };
        play.trace.end_of_space();
        Err(ApiError::too_long("messages", why))
    }

    /// Ends the episode. Returns its trace and the number of its answers that were not delivered.
    pub fn close(&self) -> (Trace, u64) {
        let mut play = lock(&self.play);
        play.is_over = true;
        let is_undelivered =
            |asked: &&Asked| matches!(asked.state, AskedState::Written(_)) || asked.has_left();
        let open = play.asked.values().filter(is_undelivered).count() as u64;
        play.asked.clear();
        self.settled.notify_all();
        (std::mem::take(&mut play.trace), play.undelivered + open)
    }
}

impl Asked {
    /// Returns whether the client left while the answer was sampled.
    fn has_left(&self) -> bool {
        matches!(&self.state, AskedState::Open(Some(peer)) if peer.has_left())
    }
}

impl Play {
    /// Returns the first request with this body whose client left: its position, its known answers and its
    /// limit.
    fn find_lost(&mut self, body: &Hash) -> Option<(u64, usize, TokenLimit)> {
        let is_lost = |asked: &Asked| matches!(asked.state, AskedState::Lost) || asked.has_left();
        let mut same = self.asked.iter_mut().filter(|(_, asked)| asked.body == *body);
        let (&position, asked) = same.find(|(_, asked)| is_lost(asked))?;
        if let AskedState::Open(_) = std::mem::replace(&mut asked.state, AskedState::Lost) {
            self.undelivered += 1;
        }
        Some((position, asked.known_answers, asked.limit))
    }

    /// Returns the request at `position`, unless an equal one has taken its place.
    fn asked(&mut self, position: u64, request: u64) -> Option<&mut Asked> {
        self.asked.get_mut(&position).filter(|asked| asked.request == request)
    }
}

impl Delivery<'_> {
    /// Keeps a finished answer, which is then written.
    ///
    /// # Errors
    /// When the episode is over, or the client left before.
    pub fn begin(&self, answer: SampledAnswer) -> Result<(), ApiError> {
        let mut play = lock(&self.episode.play);
        if play.is_over {
            return Err(over(&self.episode.id));
        }
        match play.asked(self.position, self.request) {
            Some(asked) => asked.state = AskedState::Written(answer),
            None => return Err(ApiError::refused("499 Client Closed Request", "the client has left")),
        }
        Ok(())
    }

    /// Ends the delivery. The answer becomes a part of the trace, or is lost.
    pub fn end(&self, was_delivered: bool) {
        let mut play = lock(&self.episode.play);
        let Some(asked) = play.asked(self.position, self.request) else { return };
        match (std::mem::replace(&mut asked.state, AskedState::Lost), was_delivered) {
            (AskedState::Written(answer), true) => {
                play.asked.remove(&self.position);
                play.trace.record(self.chat, answer);
            }
            (AskedState::Lost, _) => {}
            _ => play.undelivered += 1,
        }
        self.episode.settled.notify_all();
    }
}

impl Drop for Delivery<'_> {
    fn drop(&mut self) {
        self.end(false);
    }
}
