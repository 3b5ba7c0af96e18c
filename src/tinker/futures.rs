//! Results that clients fetch later. Each takes its share of a bounded memory when its request is accepted,
//! and stays until some time after it was fetched, because the answer may have been lost.

use super::error::TinkerError;
use crate::http::{Budget, Response, Share};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum bytes of all results.
pub const RESULT_BYTES_MAX: usize = 128 << 20;
/// Bytes of a result beside its values.
const RESULT_BYTES: usize = 2 << 10;
/// Time for which a fetched result can be fetched again; and the shortest such time if memory is needed.
const KEPT: Duration = Duration::from_secs(120);
const KEPT_MIN: Duration = Duration::from_secs(5);
/// Time that a fetch waits for its result. The SDK waits 45 seconds.
const POLL: Duration = Duration::from_secs(20);

/// The digest of a client's key.
pub type KeyDigest = [u8; 32];

/// The result of a request.
#[derive(Clone)]
pub enum FutureReply {
    Json(Arc<str>),
    Protobuf(Arc<[u8]>),
}

impl FutureReply {
    pub fn json(value: &Value) -> Self {
        Self::Json(value.to_string().into())
    }

    /// Returns the result of a request that failed. `is_user` tells whether the client can mend it.
    pub fn failed(error: &str, is_user: bool) -> Self {
        let category = if is_user { "user" } else { "server" };
        Self::json(&json!({"error": error, "category": category}))
    }

    fn response(self) -> Response<'static> {
        match self {
            Self::Json(text) => Response::whole("200 OK", "application/json", text),
            Self::Protobuf(bytes) => Response::bytes("200 OK", "application/x-protobuf", bytes),
        }
    }
}

/// The place of a result.
pub struct Promise {
    owner: KeyDigest,
    pub session: String,
    state: Mutex<PromiseState>,
    changed: Condvar,
    _share: Share,
}

#[derive(Default)]
struct PromiseState {
    reply: Option<FutureReply>,
    fetched: Option<Instant>,
    /// Memory that the work holds until the result is there.
    work: Option<Share>,
}

impl Promise {
    fn lock(&self) -> MutexGuard<'_, PromiseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the result. A second call changes nothing.
    pub fn set(&self, reply: FutureReply) {
        let mut state = self.lock();
        state.reply.get_or_insert(reply);
        state.work = None;
        self.changed.notify_all();
    }

    /// Keeps `share` until the result is there.
    pub fn keep(&self, share: Share) {
        let mut state = self.lock();
        if state.reply.is_none() {
            state.work = Some(share);
        }
    }

    fn was_fetched_before(&self, time: Duration) -> bool {
        self.lock().fetched.is_some_and(|fetched| fetched.elapsed() > time)
    }
}

/// All results that are open or kept.
pub struct Futures {
    promises: Mutex<HashMap<String, Arc<Promise>>>,
    budget: Arc<Budget>,
}

/// Whether a request is new.
pub enum Begun {
    New(Arc<Promise>),
    /// An equal request came before.
    Again,
}

impl Futures {
    pub fn new() -> Self {
        Self { promises: Mutex::default(), budget: Budget::new(RESULT_BYTES_MAX) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Promise>>> {
        self.promises.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the result `id` of up to `bytes` bytes, unless it is open already.
    ///
    /// # Errors
    /// When results that nobody fetched fill the memory.
    pub fn begin(
        &self,
        id: &str,
        owner: KeyDigest,
        session: &str,
        bytes: usize,
    ) -> Result<Begun, TinkerError> {
        let mut promises = self.lock();
        if promises.contains_key(id) {
            return Ok(Begun::Again);
        }
        let bytes = bytes.saturating_add(RESULT_BYTES);
        if bytes > RESULT_BYTES_MAX {
            return Err(TinkerError::invalid(format!(
                "the result could take {bytes} bytes, and the server has {RESULT_BYTES_MAX}; send a smaller request"
            )));
        }
        promises.retain(|_, promise| !promise.was_fetched_before(KEPT));
        let share = self.budget.take(bytes, Duration::ZERO).or_else(|| {
            promises.retain(|_, promise| !promise.was_fetched_before(KEPT_MIN));
            self.budget.take(bytes, Duration::ZERO)
        });
        let share = share.ok_or_else(|| {
            TinkerError::busy("results that were not fetched fill the memory; fetch them, or try again later")
        })?;
        let promise = Arc::new(Promise {
            owner,
            session: session.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
            _share: share,
        });
        promises.insert(id.to_owned(), promise.clone());
        Ok(Begun::New(promise))
    }

    /// Removes the result `id`, so that the same request can be sent again.
    pub fn forget(&self, id: &str) {
        self.lock().remove(id);
    }

    /// Removes all results of a session.
    pub fn end_session(&self, session: &str) {
        self.lock().retain(|_, promise| promise.session != session);
    }

    /// Waits for the result `id` and returns it, or says that it is not there yet.
    ///
    /// # Errors
    /// When there is no such result.
    pub fn fetch(&self, id: &str, owner: KeyDigest) -> Result<Response<'static>, TinkerError> {
        let promise = self.lock().get(id).filter(|promise| promise.owner == owner).cloned();
        let promise = promise.ok_or_else(|| TinkerError::unknown_request(id))?;
        let state = promise.lock();
        let waited = promise.changed.wait_timeout_while(state, POLL, |state| state.reply.is_none());
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.reply.clone() {
            Some(reply) => {
                state.fetched.get_or_insert_with(Instant::now);
                Ok(reply.response())
            }
            None => {
                let body = json!({"type": "try_again", "request_id": id, "queue_state": "active"});
                Ok(Response::whole("408 Request Timeout", "application/json", body.to_string().into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_nobody_fetches_are_bounded_and_leave_with_their_session() {
        let futures = Futures::new();
        let begin = |id: &str, session: &str| futures.begin(id, [0; 32], session, RESULT_BYTES_MAX / 4);
        for number in 0..3 {
            assert!(matches!(begin(&format!("a:{number}"), "a"), Ok(Begun::New(_))));
        }
        assert!(matches!(begin("a:0", "a"), Ok(Begun::Again)));
        let refused = begin("b:0", "b").err().unwrap();
        assert!(refused.status.starts_with("429"), "{}", refused.status);
        futures.end_session("a");
        let Ok(Begun::New(promise)) = begin("b:0", "b") else { panic!("no memory") };
        promise.set(FutureReply::failed("no", true));
        promise.set(FutureReply::failed("twice", true));
        assert!(futures.fetch("b:0", [1; 32]).err().unwrap().status.starts_with("404"));
        for _ in 0..2 {
            assert_eq!(futures.fetch("b:0", [0; 32]).unwrap().status, "200 OK");
        }
        assert_eq!(futures.lock().len(), 1);
    }
}
