//! OpenAI's HTTP interface to one model. The server is a client of the engine.
//!
//! An answer depends on weights, request and seed alone, not on other requests. The server renders tools and
//! parses calls; it never runs a tool.

mod access;
mod answer;
mod api_error;
mod fields;
mod hub;
mod log_probs;
mod messages;
mod metrics;
mod news;
mod request;

pub(crate) use access::{Access, bearer};
pub(crate) use answer::{Answer, AnswerHead, Reporting, SampleSource};
pub(crate) use api_error::ApiError;
pub(crate) use fields::{Fields, Form};
use hub::CloseAtEnd;
pub(crate) use hub::{Event, Hub, Requests, SampleSink};
pub(crate) use messages::read_conversation;
pub(crate) use metrics::Metrics;
use news::{News, Work};
pub(crate) use request::{ANSWER_TOKEN_BYTES, SCORE_BYTES, TEMPERATURE_MIN, read_stop};

use crate::chat::{Chat, SystemPromptSettings};
use crate::engine::{Engine, PolicyVersion};
use crate::http::{self, Body, Handler, HttpLimits, HttpRequest, Peer, Refusal, Response};
use crate::ops::logits::SamplingParameters;
use anyhow::{Result, anyhow};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) const JSON: &str = "application/json";

/// If this many connections are open, a new one closes an idle one. At most twice as many are open.
const CONNECTIONS_MAX: usize = 256;
/// Maximum bytes of a request's body.
pub const BODY_BYTES_MAX: usize = 4 << 20;
/// Maximum bytes of all bodies and of the JSON values that they become.
pub(crate) const REQUEST_BYTES_MAX: usize = 128 << 20;
/// Bytes of the threads of all connections, as measured.
const CONNECTION_BYTES: usize = 64 << 20;
/// Number of samples of full length, without log-probabilities, that fit into the memory of open answers, and
/// the memory beside.
const FULL_ANSWERS: usize = 256;
const ANSWER_BYTES_MIN: usize = 32 << 20;

/// Returns the maximum bytes of all prompts and answers of a server that takes `tokens_max` tokens.
fn answer_bytes_max(tokens_max: usize) -> usize {
    FULL_ANSWERS * tokens_max * request::ANSWER_TOKEN_BYTES + ANSWER_BYTES_MIN
}

/// Returns the maximum bytes of all requests and answers of a server that takes `tokens_max` tokens.
pub fn request_bytes_max(tokens_max: usize) -> usize {
    REQUEST_BYTES_MAX + CONNECTION_BYTES + answer_bytes_max(tokens_max)
}

/// A second API at the same address.
pub(crate) trait SecondApi: Sync {
    /// Returns whether requests for `path` belong to this API.
    fn owns(&self, path: &str) -> bool;

    /// Answers a request. `hub` takes requests to the engine.
    fn answer(&self, hub: &Hub, request: Result<&HttpRequest, Refusal>) -> Response<'static>;

    /// Returns the weights that the model name `name` stands for; `None` if the name is not of this API.
    ///
    /// # Errors
    /// When there are no such weights.
    fn version(&self, name: &str, key: &str) -> Option<Result<PolicyVersion, ApiError>>;

    /// Returns the number of passes and updates so far.
    fn trained(&self) -> u64;

    /// Works in the background until `is_closed` returns true.
    fn work(&self, is_closed: &dyn Fn() -> bool);
}

/// The model, the limits and the address of a server.
pub struct ServeSettings<'a> {
    pub engine: &'a Engine<'a>,
    pub chat: &'a Chat,
    /// The recipe's system prompt. A system message of a conversation replaces its text.
    pub system_prompt: &'a SystemPromptSettings,
    /// The model's name in requests and answers.
    pub model_name: String,
    /// Default sampling parameters of a request.
    pub sampling: SamplingParameters,
    /// Default maximum of new tokens in a chat's answer.
    pub answer_tokens_max: usize,
    /// Maximum tokens of a prompt with its answer.
    pub tokens_max: usize,
    /// Maximum number of samples that wait or are being sampled. A further request gets status 429.
    pub open_samples_max: usize,
    pub(crate) access: Access,
    /// A random number, drawn when the server starts. It makes ids, and the seeds of requests that give none.
    pub nonce: u64,
    /// Prints a line about the server's work.
    pub tell: &'a (dyn Fn(&str) + Sync),
    /// A second API at the same address, if any.
    pub(crate) second: Option<&'a dyn SecondApi>,
}

/// A running server.
struct Server<'a> {
    settings: ServeSettings<'a>,
    hub: &'a Hub<'a>,
    metrics: Metrics,
    /// Seconds since 1970 at the start.
    started: u64,
}

/// Serves until `stopped` returns true, then finishes open answers.
///
/// # Errors
/// When the engine fails.
pub fn run(listener: &TcpListener, settings: ServeSettings, stopped: &dyn Fn() -> bool) -> Result<()> {
    let engine = settings.engine;
    let hub =
        Hub::new(engine, settings.open_samples_max, answer_bytes_max(settings.tokens_max), settings.nonce);
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let server = Server { settings, hub: &hub, metrics: Metrics::default(), started };
    let limits = HttpLimits {
        connections_max: CONNECTIONS_MAX,
        body_bytes_max: BODY_BYTES_MAX,
        memory_bytes_max: REQUEST_BYTES_MAX,
    };
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            // Closes the hub, also after a panic, so that no request waits for the engine in vain.
            let _closed = CloseAtEnd(&hub);
            engine.run(&hub)
        });
        if let Some(second) = server.settings.second {
            let is_closed = || hub.is_closed();
            scope.spawn(move || second.work(&is_closed));
        }
        let news = RefCell::new(News::new());
        let is_stopped = || {
            news.borrow_mut().tell(&server);
            stopped() || hub.is_closed()
        };
        let served = http::serve(listener, limits, &server, &is_stopped);
        hub.close();
        work.join().map_err(|_| anyhow!("the engine's thread panicked; this is a bug"))??;
        served
    })
}

/// Returns the key that a request carries: its token, or its `X-API-Key`.
fn key(request: &HttpRequest) -> Option<&str> {
    bearer(request).or(request.api_key.as_deref())
}

/// Answers `request` by `route`. An error becomes OpenAI's error object.
pub(crate) fn respond<'r>(
    request: Result<&'r HttpRequest, Refusal>,
    route: impl FnOnce(&'r HttpRequest) -> Result<Response<'r>, ApiError>,
) -> Response<'r> {
    let answer = || match request {
        Ok(request) => route(request),
        Err(refusal) => Err(ApiError::refused(refusal.status, refusal.message)),
    };
    // A bug must not end the server.
    let answer = catch_unwind(AssertUnwindSafe(answer));
    let answer = answer.unwrap_or_else(|_| Err(ApiError::internal("a bug in the server")));
    answer.unwrap_or_else(|error| error.to_response())
}

impl Handler for Server<'_> {
    fn check_head(&self, head: &HttpRequest) -> Result<(), Response<'static>> {
        let checked = self.settings.access.check_head(head, key(head));
        checked.inspect_err(|response| self.metrics.count_response(response))
    }

    fn answer<'r>(&'r self, request: Result<&'r HttpRequest, Refusal>, peer: Peer<'r>) -> Response<'r> {
        let second =
            self.settings.second.filter(|second| request.is_ok_and(|head| second.owns(head.path_alone())));
        let response = match second {
            Some(second) => second.answer(self.hub, request),
            None => respond(request, |request| self.route(request, peer)),
        };
        self.metrics.count_response(&response);
        response
    }
}

impl Server<'_> {
    /// Returns what the server has done so far.
    fn work(&self) -> Work {
        let (samples, tokens) = self.hub.sampled();
        let trained = self.settings.second.map_or(0, |second| second.trained());
        Work { samples, tokens, refused: self.metrics.refused(), trained }
    }

    fn route<'r>(&'r self, request: &'r HttpRequest, peer: Peer<'r>) -> Result<Response<'r>, ApiError> {
        let path = request.path_alone();
        let method = if ["/v1/chat/completions", "/v1/completions"].contains(&path) { "POST" } else { "GET" };
        // Clients encode a slash in a model's name.
        let model = path.strip_prefix("/v1/models/");
        let model = model.map(|name| percent_decode_str(name).decode_utf8_lossy());
        let is_known = ["/health", "/metrics", "/v1/models"].contains(&path) || model.is_some();
        if method == "GET" && !is_known {
            return Err(ApiError::not_found(format!("there is no {path} here")));
        }
        if request.method != method {
            return Err(ApiError::refused("405 Method Not Allowed", &format!("{path} takes {method}")));
        }
        let ok = |value: Value| Response::whole("200 OK", JSON, value.to_string().into());
        match (path, model) {
            ("/health", _) => Ok(Response::text("200 OK", "")),
            ("/metrics", _) => {
                let text = self.metrics.text(self.hub.open_samples(), self.settings.engine.prefill_counts());
                Ok(Response::whole("200 OK", "text/plain; version=0.0.4", text.into()))
            }
            ("/v1/models", _) => Ok(ok(json!({"object": "list", "data": [self.model()]}))),
            (_, Some(name)) => self.check_model(&name).map(|()| ok(self.model())),
            ("/v1/chat/completions", _) => self.complete(request, peer, Form::Chat),
            _ => self.complete(request, peer, Form::Text),
        }
    }

    fn model(&self) -> Value {
        json!({
            "id": self.settings.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "rloss",
            "max_model_len": self.settings.tokens_max,
        })
    }

    /// Returns the weights of another API that a request's model names, if it names any.
    fn named_version(&self, name: &str, request: &HttpRequest) -> Result<Option<PolicyVersion>, ApiError> {
        let named =
            self.settings.second.and_then(|second| second.version(name, key(request).unwrap_or_default()));
        if let Some(version) = named { version.map(Some) } else { self.check_model(name).map(|()| None) }
    }

    fn check_model(&self, name: &str) -> Result<(), ApiError> {
        let served = &self.settings.model_name;
        if name == served {
            return Ok(());
        }
        Err(ApiError::model_not_found(format!("the model {name:?} is not served here; {served:?} is")))
    }

    /// Reads the body and answers it, as a whole or as a stream of events.
    fn complete<'r>(
        &'r self,
        request: &HttpRequest,
        peer: Peer<'r>,
        form: Form,
    ) -> Result<Response<'r>, ApiError> {
        let body = request.json().map_err(|(status, why)| ApiError::refused(status, &why))?;
        let fields = Fields::new(&body)?;
        let name = fields.text("model")?;
        let name = name.ok_or_else(|| ApiError::invalid(Some("model"), "\"model\" is missing".to_owned()))?;
        let (version, name) = (self.named_version(name, request)?, name.to_owned());
        let (mut answer, mut requests, streams) =
            if let Form::Chat = form { self.read_chat(&fields)? } else { self.read_completion(&fields)? };
        drop(body);
        answer.head.model = name;
        requests.requests.iter_mut().for_each(|request| request.version.clone_from(&version));
        let ticket = self.hub.submit(requests)?;
        if !streams {
            let text = answer.whole(&ticket, &peer, &self.metrics)?;
            let memory = ticket.memory.clone();
            let body = Body::Watched(Body::Whole(text.into()).into(), Box::new(move |_| drop(memory)));
            return Ok(Response { status: "200 OK", content_type: JSON, body });
        }
        let metrics = &self.metrics;
        let body = Body::Stream(Box::new(move |stream| answer.stream(&ticket, stream, metrics)));
        Ok(Response { status: "200 OK", content_type: "text/event-stream", body })
    }
}
