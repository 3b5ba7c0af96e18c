//! The HTTP interface for an agent program: the queue of episodes, and OpenAI's chat completions.

use super::board::{Board, NextEpisode, over};
use super::episode::{ChatRequest, Delivery, Episode};
use super::trace::SampledAnswer;
use crate::chat::{Chat, SystemPromptSettings, TurnReader};
use crate::engine::{EngineRequest, NewToken, SampleRequest};
use crate::harmony::Message;
use crate::http::{Body, Handler, HttpRequest, Peer, Refusal, Response};
use crate::ops::logits::SamplingParameters;
use crate::random::stream;
use crate::rollout::EpisodeFailure;
use crate::serve::{
    Access, Answer, AnswerHead, ApiError, Event, Fields, Form, JSON, Metrics, Reporting, SampleSource,
    bearer, read_conversation, read_stop, respond,
};
use crate::tasks::Reward;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum number of metrics of one episode, and of characters of a name.
const METRICS_MAX: usize = 64;
const NAME_CHARS_MAX: usize = 64;

/// Penalties, with the values that have no effect.
const PENALTIES: [(&str, f64); 3] =
    [("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)];

/// The server of a run.
pub(super) struct Server {
    pub board: Board,
    pub chat: Chat,
    /// The recipe's system prompt. A system message of a conversation replaces its text.
    pub system_prompt: SystemPromptSettings,
    pub access: Access,
    pub metrics: Metrics,
}

/// The source of an answer's tokens: the engine of the current rollout.
struct Ticket<'r> {
    server: &'r Server,
    delivery: Arc<Delivery<'r>>,
    sample: u64,
    events: Receiver<(usize, Event)>,
    prompt: Vec<u32>,
    messages: Vec<Message>,
    /// Whether the recipe, not the client, limits the answer.
    has_recipe_limit: bool,
}

impl SampleSource for Ticket<'_> {
    fn id(&self) -> String {
        // Without the random part: programs may put the ids of calls into their prompts.
        format!("{}-{}", self.delivery.episode.name, self.delivery.position)
    }

    fn next(&self, wait: Duration) -> Result<Option<(usize, Event)>, ApiError> {
        match self.events.recv_timeout(wait) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(over(&self.delivery.episode.id)),
        }
    }

    fn end(&self, _index: usize) {
        self.server.board.cancel(self.sample);
    }

    fn finished(&self, message: &Value, tokens: &[NewToken], reason: &str) -> Result<(), ApiError> {
        self.delivery.begin(SampledAnswer {
            prompt: self.prompt.clone(),
            messages: self.messages.clone(),
            tokens: tokens.to_vec(),
            message: message.clone(),
            is_full: self.has_recipe_limit && reason == "length",
        })
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.server.board.cancel(self.sample);
    }
}

impl Handler for Server {
    fn check_head(&self, head: &HttpRequest) -> Result<(), Response<'static>> {
        self.access.check_head(head, Some(split_key(head).0))
    }

    fn answer<'r>(&'r self, request: Result<&'r HttpRequest, Refusal>, peer: Peer<'r>) -> Response<'r> {
        respond(request, |request| self.route(request, peer))
    }
}

/// Returns the key that a request carries, and the id of the episode in it.
fn split_key(head: &HttpRequest) -> (&str, Option<&str>) {
    let given = bearer(head).unwrap_or_default();
    given.split_once(':').map_or((given, None), |(key, id)| (key, Some(id)))
}

fn ok(value: &Value) -> Response<'static> {
    Response::whole("200 OK", JSON, value.to_string().into())
}

impl Server {
    fn route<'r>(&'r self, request: &'r HttpRequest, peer: Peer<'r>) -> Result<Response<'r>, ApiError> {
        let path = request.path_alone();
        if path == "/health" {
            return Ok(Response::text("200 OK", ""));
        }
        let (_, from_key) = split_key(request);
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let named = |in_path| self.check_one_episode([in_path, request.episode.as_deref(), from_key]);
        match (request.method.as_str(), &parts[..]) {
            ("GET", ["v1", "models"]) => Ok(ok(&json!({"object": "list", "data": [model()]}))),
            ("GET", ["v1", "models", ..]) => Ok(ok(&model())),
            ("POST", ["v1", "episodes", "next"]) => Ok(self.next_episode(&peer)),
            ("POST", ["v1", "episodes", id, "reward"]) => {
                self.reward(named(Some(id))?, request).map(|()| ok(&json!({})))
            }
            ("POST", ["v1", "chat", "completions"]) => self.complete(named(None)?, request, peer),
            ("POST", ["v1", "episodes", id, "chat", "completions"]) => {
                self.complete(named(Some(id))?, request, peer)
            }
            _ => {
                let why = format!(
                    "there is no {} {path} here; an agent uses POST /v1/episodes/next, /v1/episodes/ID/reward and \
                     /v1/chat/completions",
                    request.method
                );
                Err(ApiError::not_found(why))
            }
        }
    }

    /// Returns the episode that a request names in its path, its header and its key; empty if it names none.
    ///
    /// # Errors
    /// When it names two.
    fn check_one_episode<'r>(&self, names: [Option<&'r str>; 3]) -> Result<&'r str, ApiError> {
        let mut names = names.into_iter().flatten().filter(|name| !name.is_empty());
        let one = names.next().unwrap_or_default();
        let Some(other) = names.find(|other| *other != one) else { return Ok(one) };
        let why = format!(
            "the request names the episodes {one:?} and {other:?}; its path, X-Episode-Id and key must name one"
        );
        self.board.count_refused(&why);
        Err(ApiError::invalid(None, why))
    }

    fn next_episode(&self, peer: &Peer) -> Response<'_> {
        let mut episode = match self.board.next_episode(|| peer.has_left()) {
            NextEpisode::Episode(episode) => episode,
            NextEpisode::Later => return ok(&json!({"id": null})),
            NextEpisode::Done => return ok(&json!({"id": null, "done": true})),
        };
        let id = episode["id"].as_str().unwrap_or_default().to_owned();
        let key = self.access.token.as_deref().unwrap_or("none");
        episode["api_key"] = format!("{key}:{id}").into();
        let Response { status, content_type, body } = ok(&episode);
        let tell = move |delivered: bool| {
            if !delivered {
                self.board.take_back(&id);
            }
        };
        Response { status, content_type, body: Body::Watched(body.into(), Box::new(tell)) }
    }

    fn reward(&self, id: &str, request: &HttpRequest) -> Result<(), ApiError> {
        let body = match request.json() {
            // The client may ask again.
            Err((status, why)) if !status.starts_with("400") => return Err(ApiError::refused(status, &why)),
            body => body.map_err(|(_, why)| format!("{why}; NaN and Infinity are not numbers in JSON")),
        };
        match body.and_then(|body| read_reward(&body)) {
            Ok(given) => self.board.reward(id, given.map_err(|why| (EpisodeFailure::Error, why))),
            Err(why) => {
                self.board.reward(id, Err((EpisodeFailure::BadReward, why.clone())))?;
                Err(ApiError::invalid(None, why))
            }
        }
    }

    /// Answers a chat request of episode `id`.
    fn complete<'r>(
        &'r self,
        id: &str,
        request: &HttpRequest,
        peer: Peer<'r>,
    ) -> Result<Response<'r>, ApiError> {
        if id.is_empty() {
            let why =
                "the request names no episode; use the episode's \"api_key\", or the header X-Episode-Id";
            self.board.count_refused(why);
            return Err(ApiError::invalid(None, why.to_owned()));
        }
        let episode = self.board.episode(id)?;
        let begun = self.begin(&episode, request, peer);
        let begun = begun.inspect_err(|error| self.board.count_refused(&error.message));
        let (mut answer, ticket, streams) = begun?;
        let (delivery, metrics) = (ticket.delivery.clone(), &self.metrics);
        let (content_type, body) = if streams {
            let body = Body::Stream(Box::new(move |stream| answer.stream(&ticket, stream, metrics)));
            ("text/event-stream", body)
        } else {
            (JSON, Body::Whole(answer.whole(&ticket, &peer, metrics)?.to_string().into()))
        };
        let body = Body::Watched(body.into(), Box::new(move |delivered| delivery.end(delivered)));
        Ok(Response { status: "200 OK", content_type, body })
    }

    /// Reads a chat request and gives it to the engine. Returns the answer, its source, and whether the
    /// client wants a stream.
    fn begin<'r>(
        &'r self,
        episode: &Arc<Episode>,
        request: &HttpRequest,
        peer: Peer,
    ) -> Result<(Answer<'r>, Ticket<'r>, bool), ApiError> {
        let body = request.json().map_err(|(status, why)| ApiError::refused(status, &why))?;
        let fields = Fields::new(&body)?;
        let (chat, plan) = (&self.chat, &episode.round.plan);
        let sampling = plan.settings.sampling();
        let request = self.read_fields(&fields, &sampling)?;
        let conversation = read_conversation(&fields, chat, &self.system_prompt)?;
        let prompt_max = plan.settings.prompt_tokens_max;
        if !chat.vocabulary().may_fit(conversation.bytes(), prompt_max) {
            let bytes = conversation.bytes();
            episode.end_of_space();
            let why = format!(
                "a prompt of {bytes} bytes cannot fit in rollout.prompt_tokens_max = {prompt_max} tokens"
            );
            return Err(ApiError::too_long("messages", why));
        }
        let mut digest = blake3::Hasher::new();
        serde_json::to_writer(&mut digest, &*body).map_err(|error| ApiError::internal(&error.to_string()))?;
        let asked = ChatRequest {
            body: digest.finalize(),
            conversation: &conversation,
            values: fields.list("messages")?.unwrap_or_default(),
            new_tokens_max: request.new_tokens_max,
            peer: peer.handle(),
        };
        let (delivery, prompt, limit) = episode.ask(chat, asked)?;
        let facts = &episode.facts;
        let coordinates = [facts.step, facts.prompt, facts.sample, delivery.position];
        let engine_request = |sample: u64| EngineRequest {
            version: None,
            tokens: prompt.clone(),
            samples: vec![SampleRequest {
                id: sample,
                random: stream(plan.seed, plan.purpose, &coordinates),
                forced: vec![],
            }],
            sampling,
            stop_tokens: chat.stop_tokens(),
            new_tokens_max: limit.new_tokens_max,
            top_log_probs: request.report.log_probs,
            prompt_log_probs: None,
            keep_routed_experts: false,
            keep_token_sets: plan.keeps_token_sets(),
            keep_sequence: false,
        };
        // A stop text and the end of the first call are found in the text of the answer so far.
        let is_whole = !request.streams && request.stop.is_empty() && request.report.parallel_calls;
        let whole = is_whole.then(|| chat.turn_parser());
        let (sample, events) = self.board.submit(episode, whole, engine_request)?;
        let (prompts, reader) = (vec![(prompt.clone(), None)], TurnReader::chat(chat, request.stop));
        let reader = reader.with_calls(fields.takes_calls());
        let head = AnswerHead {
            chat,
            model: request.model,
            version: episode.round.policy_version,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        };
        let answer = Answer::new(head, prompts, 1, vec![reader], request.report);
        let (delivery, messages) = (delivery.into(), conversation.into_messages());
        let has_recipe_limit = limit.is_recipes;
        let ticket = Ticket { server: self, delivery, sample, events, prompt, messages, has_recipe_limit };
        Ok((answer, ticket, request.streams))
    }

    /// Reads the fields that do not concern the conversation.
    fn read_fields(&self, fields: &Fields, sampling: &SamplingParameters) -> Result<ChatFields, ApiError> {
        self.note_sampling(fields, sampling);
        fields.check(Form::Chat, &PENALTIES.map(|(name, _)| name))?;
        fields.refuse("n", |n| n == 1)?;
        fields.refuse("stop_token_ids", |ids| ids.as_array().is_some_and(Vec::is_empty))?;
        let (streams, stream_usage) = fields.stream()?;
        Ok(ChatFields {
            model: fields.text("model")?.unwrap_or("rloss").to_owned(),
            new_tokens_max: fields.new_tokens_max(1)?,
            stop: read_stop(fields)?,
            streams,
            report: Reporting {
                form: Form::Chat,
                log_probs: fields.chat_log_probs()?,
                token_ids: fields.flag("return_token_ids")?,
                stream_usage,
                echo: false,
                parallel_calls: fields.flag_or("parallel_tool_calls", true)?,
            },
        })
    }

    /// Warns once about each sampling parameter of a client that differs from the recipe's. Trained tokens
    /// must come from the distribution that training computes.
    fn note_sampling(&self, fields: &Fields, sampling: &SamplingParameters) {
        let used = [
            ("temperature", sampling.temperature),
            ("top_p", sampling.top_p),
            ("top_k", sampling.top_k as f64),
            ("min_p", sampling.min_p),
        ];
        for (name, value) in used.into_iter().chain(PENALTIES) {
            let asked = fields.value(name).map(|asked| asked.as_f64().unwrap_or(f64::NAN));
            // vLLM's clients write -1 for no limit.
            let asked = asked.map(|asked| if name == "top_k" { asked.max(0.0) } else { asked });
            if asked.is_some_and(|asked| asked != value) {
                let text = format!(
                    "a request asks for another {name}; the recipe's {value} is used, as for every trained token"
                );
                self.board.tell_once(name, &text);
            }
        }
        if fields.value("seed").is_some() {
            let text = "a request has a seed; it is ignored, because random numbers come from train.seed";
            self.board.tell_once("seed", text);
        }
    }
}

/// The fields of a chat request that do not concern the conversation.
struct ChatFields {
    model: String,
    new_tokens_max: Option<usize>,
    stop: Vec<String>,
    streams: bool,
    report: Reporting,
}

fn model() -> Value {
    json!({"id": "rloss", "object": "model", "created": 0, "owned_by": "rloss"})
}

/// Reads `{"reward": 1.0, "success": true, "metrics": {"name": 0.5}}`, or `{"error": "why"}`, which is
/// returned as the inner error.
fn read_reward(body: &Value) -> Result<Result<Reward, String>, String> {
    if let Some(error) = body["error"].as_str() {
        return Ok(Err(error.chars().take(300).collect()));
    }
    let number = |value: &Value| value.as_f64().map(|n| n as f32).filter(|n| n.is_finite());
    let value = number(&body["reward"]).ok_or("\"reward\" must be a finite number")?;
    let success = match &body["success"] {
        Value::Null => value > 0.0,
        Value::Bool(success) => *success,
        _ => return Err("\"success\" must be true or false".to_owned()),
    };
    let mut named = BTreeMap::new();
    let none = serde_json::Map::new();
    let given = match &body["metrics"] {
        Value::Null => &none,
        Value::Object(given) if given.len() <= METRICS_MAX => given,
        _ => return Err(format!("\"metrics\" must be an object of up to {METRICS_MAX} numbers")),
    };
    for (name, metric) in given {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > NAME_CHARS_MAX || !name.chars().all(is_plain) {
            return Err(format!(
                "the metric {name:?} must have a name of up to {NAME_CHARS_MAX} letters, digits, _, - and ."
            ));
        }
        let metric = number(metric).ok_or_else(|| format!("the metric {name:?} must be a finite number"))?;
        named.insert(name.clone(), metric);
    }
    Ok(Ok(Reward { value, success, named }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reward_is_one_finite_number_with_named_metrics() {
        let read_reward =
            |text: &[u8]| read_reward(&serde_json::from_slice(text).map_err(|e| e.to_string())?);
        let given = read_reward(br#"{"reward": -0.5, "metrics": {"format.ok": 1}}"#).unwrap().unwrap();
        assert_eq!((given.value, given.success, given.named["format.ok"]), (-0.5, false, 1.0));
        assert!(read_reward(br#"{"reward": 1}"#).unwrap().unwrap().success);
        assert!(!read_reward(br#"{"reward": 1, "success": false}"#).unwrap().unwrap().success);
        assert_eq!(read_reward(br#"{"error": "no disk"}"#).unwrap(), Err("no disk".to_owned()));
        for wrong in [
            r#"{"reward": NaN}"#,
            r#"{"reward": 1e300}"#,
            r#"{"reward": "1"}"#,
            r#"{"reward": 1, "success": 1}"#,
            r#"{"reward": 1, "metrics": {"a b": 1}}"#,
            r#"{"reward": 1, "metrics": {"a": null}}"#,
            r#"{"reward": 1, "metrics": [1]}"#,
            "{}",
            "[]",
            "",
        ] {
            assert!(read_reward(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
