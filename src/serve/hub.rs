//! The server as a client of the engine: sends each token to the HTTP request that waits for it.

use super::answer::SampleSource;
use super::api_error::ApiError;
use crate::engine::{Client, Completion, Engine, EngineRequest, NewToken, SampleRequest};
use crate::http::{Budget, Share};
use crate::panics::lock;
use crate::random::{Purpose, stream};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An event of one sample.
pub(crate) enum Event {
    Token(NewToken),
    Finished(Completion),
}

/// Receives the events of an answer's samples, on the engine's threads.
pub(crate) trait SampleSink: Send + Sync {
    /// Receives a token of sample `index`. Returns false to end the sample after this token.
    fn token(&self, index: usize, token: &NewToken) -> bool;

    /// Receives the result of sample `index`.
    fn finished(&self, index: usize, completion: Completion);
}

/// Sending fails if the HTTP client has left. Then nobody needs the event.
impl SampleSink for Sender<(usize, Event)> {
    fn token(&self, index: usize, token: &NewToken) -> bool {
        self.send((index, Event::Token(token.clone()))).is_ok()
    }

    fn finished(&self, index: usize, completion: Completion) {
        let _ = self.send((index, Event::Finished(completion)));
    }
}

/// The requests to the engine for one answer. Their field `samples` is empty; [`Hub::submit`] fills it.
pub(crate) struct Requests {
    pub requests: Vec<EngineRequest>,
    /// Number of samples of each request.
    pub samples: usize,
    /// Maximum bytes of the prompts and the answer.
    pub bytes: usize,
    /// Selects the random stream of each sample, together with the sample's index within its request.
    pub seed: u64,
}

/// The samples that answers wait for.
pub(crate) struct Hub<'a> {
    engine: &'a Engine<'a>,
    open_samples_max: usize,
    answers: Arc<Budget>,
    /// A random number. It makes the ids of answers unique over restarts.
    nonce: u64,
    state: Mutex<State>,
    closed: AtomicBool,
    /// Number of finished samples.
    samples: AtomicU64,
    /// Number of sampled tokens.
    tokens: AtomicU64,
}

#[derive(Default)]
struct State {
    next_id: u64,
    /// For each open sample: its index within its answer, and the receiver of its events.
    open: HashMap<u64, (usize, Arc<dyn SampleSink>)>,
}

/// The samples of one answer. When it is dropped, the samples that are still open are cancelled.
pub(super) struct Ticket<'a> {
    hub: &'a Hub<'a>,
    first: u64,
    count: usize,
    news: Receiver<(usize, Event)>,
    /// The answer's share of the memory. It must be kept until the answer is sent.
    pub memory: Arc<Share>,
}

/// Closes the hub when it is dropped.
pub(super) struct CloseAtEnd<'h, 'a>(pub &'h Hub<'a>);

impl Drop for CloseAtEnd<'_, '_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<'a> Hub<'a> {
    pub fn new(engine: &'a Engine<'a>, open_samples_max: usize, answer_bytes_max: usize, nonce: u64) -> Self {
        let (answers, closed) = (Budget::new(answer_bytes_max), AtomicBool::new(false));
        let (samples, tokens) = Default::default();
        Self { engine, open_samples_max, answers, nonce, state: Mutex::default(), closed, samples, tokens }
    }

    /// Ends the engine's work. Waiting answers get an error.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        lock(&self.state).open.clear();
        self.engine.wake();
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Returns the number of samples that wait or are being sampled.
    pub fn open_samples(&self) -> usize {
        lock(&self.state).open.len()
    }

    /// Returns the number of finished samples, and of sampled tokens.
    pub fn sampled(&self) -> (u64, u64) {
        (self.samples.load(Ordering::Relaxed), self.tokens.load(Ordering::Relaxed))
    }

    /// Returns a new number. No other call returns the same one.
    pub fn next_number(&self) -> u64 {
        let mut state = lock(&self.state);
        state.next_id += 1;
        state.next_id - 1
    }

    /// Refuses a request for more samples than the server ever takes. Such a request need not be assembled.
    pub fn check_count(&self, samples: usize) -> Result<(), ApiError> {
        if samples <= self.open_samples_max {
            return Ok(());
        }
        Err(ApiError::invalid(
            None,
            format!(
                "the request has {samples} samples, and the server takes {}; send fewer, or start it with a larger --queue",
                self.open_samples_max
            ),
        ))
    }

    /// Queues the requests of an answer.
    ///
    /// # Errors
    /// When too many samples are open, when open answers need the memory, or the server is stopping.
    pub(super) fn submit(&'a self, requests: Requests) -> Result<Ticket<'a>, ApiError> {
        let count = requests.requests.len() * requests.samples;
        let (sender, news) = channel();
        let (first, memory) = self.reserve(&requests, Arc::new(sender))?;
        let ticket = Ticket { hub: self, first, count, news, memory: Arc::new(memory) };
        self.start(requests, first)?;
        Ok(ticket)
    }

    /// Queues the requests of an answer whose events go to `sink`. Returns the answer's share of the memory,
    /// which must be kept as long as the answer.
    ///
    /// # Errors
    /// Errors of [`Self::submit`].
    pub fn submit_to(&self, requests: Requests, sink: &Arc<dyn SampleSink>) -> Result<Share, ApiError> {
        let (first, memory) = self.reserve(&requests, sink.clone())?;
        self.start(requests, first)?;
        Ok(memory)
    }

    /// Takes the memory and the ids of an answer. Returns the first id.
    fn reserve(&self, requests: &Requests, sink: Arc<dyn SampleSink>) -> Result<(u64, Share), ApiError> {
        let &Requests { bytes, samples, .. } = requests;
        if bytes > self.answers.bytes {
            return Err(ApiError::invalid(
                None,
                format!(
                    "the answer could take {bytes} bytes, and the server has {}; ask for fewer samples, tokens or log-probabilities",
                    self.answers.bytes
                ),
            ));
        }
        let full = || ApiError::full("the memory for open answers is in use; try again later".to_owned());
        let memory = self.answers.take(bytes, Duration::ZERO).ok_or_else(full)?;
        let count = requests.requests.len() * samples;
        let mut state = lock(&self.state);
        if self.is_closed() {
            return Err(ApiError::ending());
        }
        let open = state.open.len();
        if open + count > self.open_samples_max {
            return Err(ApiError::full(format!(
                "{open} of {} samples are open, and this request has {count}; try again later",
                self.open_samples_max
            )));
        }
        let first = state.next_id;
        state.next_id += count as u64;
        for index in 0..count {
            state.open.insert(first + index as u64, (index, sink.clone()));
        }
        Ok((first, memory))
    }

    /// Sends the requests of an answer to the engine. `first` is the id of its first sample.
    fn start(&self, requests: Requests, first: u64) -> Result<(), ApiError> {
        let Requests { requests, samples, seed, .. } = requests;
        for (number, mut request) in requests.into_iter().enumerate() {
            let sample = |sample: usize| SampleRequest {
                id: first + (number * samples + sample) as u64,
                random: stream(seed, Purpose::Request, &[sample as u64]),
                forced: vec![],
            };
            request.samples = (0..samples).map(sample).collect();
            self.engine.submit(request).map_err(|error| ApiError::internal(&format!("{error:#}")))?;
        }
        Ok(())
    }
}

impl Client for Hub<'_> {
    fn token(&self, sample: u64, token: &NewToken) -> bool {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        // A sink is called without the lock.
        let open = lock(&self.state).open.get(&sample).cloned();
        open.is_some_and(|(index, sink)| sink.token(index, token))
    }

    fn finished(&self, sample: u64, completion: Completion) {
        self.samples.fetch_add(1, Ordering::Relaxed);
        let open = lock(&self.state).open.remove(&sample);
        if let Some((index, sink)) = open {
            sink.finished(index, completion);
        }
    }

    fn goes_on(&self, _sampled: u64) -> bool {
        !self.is_closed()
    }
}

impl SampleSource for Ticket<'_> {
    fn id(&self) -> String {
        format!("{:016x}{:x}", self.hub.nonce, self.first)
    }

    fn next(&self, wait: Duration) -> Result<Option<(usize, Event)>, ApiError> {
        match self.news.recv_timeout(wait) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(ApiError::ending()),
        }
    }

    fn end(&self, index: usize) {
        let id = self.first + index as u64;
        if lock(&self.hub.state).open.remove(&id).is_some() {
            self.hub.engine.cancel(id);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        (0..self.count).for_each(|index| self.end(index));
    }
}
