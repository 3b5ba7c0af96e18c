//! Converts the bodies of the two completion endpoints to requests to the engine.

use super::Server;
use super::answer::{Answer, AnswerHead, Prompt, Reporting};
use super::api_error::ApiError;
use super::fields::{Fields, Form, TOP_MAX};
use super::hub::Requests;
use super::messages::read_conversation;
use crate::chat::TurnReader;
use crate::engine::EngineRequest;
use crate::ops::logits::SamplingParameters;
use serde_json::Value;

/// Ends a document in the published vocabularies.
const END_OF_TEXT: &str = "<|endoftext|>";
/// Maximum number of samples per prompt, and of prompts per request.
const SAMPLES_MAX: i64 = 128;
const PROMPTS_MAX: usize = 1024;
/// Maximum number of stop texts, and maximum bytes of each.
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1 << 10;
/// Maximum number of a request's own stop tokens.
const STOP_TOKENS_MAX: usize = 128;
/// A temperature below this one means greedy, as in vLLM: logits divided by it may overflow.
pub(crate) const TEMPERATURE_MIN: f64 = 1e-5;
/// Bytes of a token of a prompt or an answer, with its text; and of a log-probability.
pub(crate) const ANSWER_TOKEN_BYTES: usize = 128;
pub(crate) const SCORE_BYTES: usize = 160;
/// Default maximum of new tokens in a text completion; OpenAI has the same default.
const TEXT_TOKENS: usize = 16;

type Read<'r> = (Answer<'r>, Requests, bool);

/// The fields that both endpoints read in the same way.
struct Common {
    sampling: SamplingParameters,
    samples: usize,
    seed: Option<i64>,
    stop: Vec<String>,
    streams: bool,
    report: Reporting,
}

impl Server<'_> {
    pub(super) fn read_chat<'r>(&'r self, fields: &Fields) -> Result<Read<'r>, ApiError> {
        let chat = self.settings.chat;
        let mut common = self.read_common(fields, Form::Chat)?;
        let messages = read_conversation(fields, chat, self.settings.system_prompt)?.into_messages();
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        self.check_bytes(bytes, "messages")?;
        let tokens = chat
            .render_prompt(&messages)
            .map_err(|error| ApiError::invalid(Some("messages"), format!("{error:#}")))?;
        let top = fields.chat_log_probs()?;
        let left = self.check_prompt(&tokens, "messages")?;
        let new_tokens_max = fields.new_tokens_max(1)?;
        let new_tokens_max = new_tokens_max.unwrap_or(self.settings.answer_tokens_max.min(left).max(1));
        self.check_room(tokens.len(), new_tokens_max, left)?;
        let stop_tokens = self.stop_tokens(fields)?;
        let request = engine_request(tokens.clone(), &common, stop_tokens, new_tokens_max, top);
        let mut ids = self.stop_token_ids(fields)?;
        ids.extend(chat.vocabulary().added_id(END_OF_TEXT));
        let takes_calls = fields.takes_calls();
        let parallel_calls = fields.flag_or("parallel_tool_calls", true)? || !takes_calls;
        let reader = |stop: &[String]| {
            TurnReader::chat(chat, stop.to_vec()).with_stop_tokens(ids.clone()).with_calls(takes_calls)
        };
        (common.report.log_probs, common.report.parallel_calls) = (top, parallel_calls);
        self.assemble(common, vec![request], vec![(tokens, None)], &reader)
    }

    pub(super) fn read_completion<'r>(&'r self, fields: &Fields) -> Result<Read<'r>, ApiError> {
        let chat = self.settings.chat;
        let mut common = self.read_common(fields, Form::Text)?;
        let top = fields.whole("logprobs", 0, TOP_MAX)?.map(|top| top as usize);
        let echo = fields.flag("echo")?;
        if common.streams && echo && top.is_some() {
            let why = "\"echo\" with \"logprobs\" cannot be streamed".to_owned();
            return Err(ApiError::invalid(Some("stream"), why));
        }
        let prompts = self.read_prompts(fields)?;
        let new_tokens_max = fields.new_tokens_max(i64::from(!echo))?.unwrap_or(TEXT_TOKENS);
        let stop_tokens = self.stop_tokens(fields)?;
        let mut requests = vec![];
        for (tokens, _) in &prompts {
            let left = self.check_prompt(tokens, "prompt")?;
            self.check_room(tokens.len(), new_tokens_max, left)?;
            let mut request =
                engine_request(tokens.clone(), &common, stop_tokens.clone(), new_tokens_max, top);
            request.prompt_log_probs = top.filter(|_| echo);
            requests.push(request);
        }
        let ids = self.stop_token_ids(fields)?;
        let reader = |stop: &[String]| TurnReader::text(chat, stop.to_vec()).with_stop_tokens(ids.clone());
        (common.report.log_probs, common.report.echo) = (top, echo);
        self.assemble(common, requests, prompts, &reader)
    }

    fn assemble<'r>(
        &'r self,
        common: Common,
        requests: Vec<EngineRequest>,
        prompts: Vec<Prompt>,
        reader: &dyn Fn(&[String]) -> TurnReader<'r>,
    ) -> Result<Read<'r>, ApiError> {
        self.hub.check_count(requests.len() * common.samples)?;
        let seed = common.seed.map_or_else(
            || {
                // Each request without a seed gets a new seed, also after a restart of the server.
                let digest = blake3::hash(
                    &[self.settings.nonce, self.hub.next_number()].map(u64::to_le_bytes).concat(),
                );
                u64::from_le_bytes(std::array::from_fn(|byte| digest.as_bytes()[byte]))
            },
            |seed| seed as u64,
        );
        let readers = (0..prompts.len() * common.samples).map(|_| reader(&common.stop)).collect();
        let head = AnswerHead {
            chat: self.settings.chat,
            model: self.settings.model_name.clone(),
            version: self.settings.engine.version(),
            created: self.started,
        };
        let answer = Answer::new(head, prompts, common.samples, readers, common.report);
        let bytes = requests.iter().map(|request| answer_bytes_max(request, common.samples)).sum();
        Ok((answer, Requests { requests, samples: common.samples, bytes, seed }, common.streams))
    }

    fn read_common(&self, fields: &Fields, form: Form) -> Result<Common, ApiError> {
        fields.check(form, &[])?;
        let default = self.settings.sampling;
        let temperature = fields.number("temperature", 0.0, 100.0)?.unwrap_or(default.temperature);
        let sampling = SamplingParameters {
            temperature: if temperature < TEMPERATURE_MIN { 0.0 } else { temperature },
            top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(default.top_p),
            top_k: fields
                .whole("top_k", -1, i64::from(u32::MAX))?
                .map_or(default.top_k, |k| k.max(0) as usize),
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(default.min_p),
        };
        let (streams, stream_usage) = fields.stream()?;
        Ok(Common {
            sampling,
            samples: fields.whole("n", 1, SAMPLES_MAX)?.unwrap_or(1) as usize,
            seed: fields.whole("seed", i64::MIN, i64::MAX)?,
            stop: read_stop(fields)?,
            streams,
            report: Reporting {
                form,
                token_ids: fields.flag("return_token_ids")?,
                log_probs: None,
                stream_usage,
                echo: false,
                parallel_calls: true,
            },
        })
    }

    /// Reads `prompt`: a text, a list of texts, ids, or a list of lists of ids. Returns the tokens of each
    /// prompt, and its text if the request gave a text.
    fn read_prompts(&self, fields: &Fields) -> Result<Vec<Prompt>, ApiError> {
        let wrong = |why: &str| ApiError::invalid(Some("prompt"), format!("\"prompt\" {why}"));
        let shape = || wrong("must be a text, a list of texts, ids, or a list of lists of ids");
        let prompt = fields.value("prompt").ok_or_else(|| wrong("is missing"))?;
        let vocabulary = self.settings.chat.vocabulary();
        let from_text = |text: &str| {
            self.check_bytes(text.len(), "prompt")?;
            let tokens =
                vocabulary.encode_with_special(text).map_err(|error| wrong(&format!("{error:#}")))?;
            Ok((tokens, Some(text.to_owned())))
        };
        let from_ids = |ids: &[Value]| {
            let ids = ids.iter().map(|id| self.token_id(id)).collect::<Option<Vec<u32>>>();
            ids.map(|ids| (ids, None)).ok_or_else(|| wrong("has an id that is not in the vocabulary"))
        };
        match prompt {
            Value::String(text) => Ok(vec![from_text(text)?]),
            Value::Array(list) if list.is_empty() => Err(wrong("is empty")),
            Value::Array(list) if list.iter().all(Value::is_number) => Ok(vec![from_ids(list)?]),
            Value::Array(list) if list.len() > PROMPTS_MAX => {
                Err(wrong(&format!("has {} entries, more than {PROMPTS_MAX}", list.len())))
            }
            Value::Array(list) => list
                .iter()
                .map(|prompt| match prompt {
                    Value::String(text) => from_text(text),
                    Value::Array(ids) => from_ids(ids),
                    _ => Err(shape()),
                })
                .collect(),
            _ => Err(shape()),
        }
    }

    /// Refuses a text that has too many bytes to fit, before it is tokenised.
    fn check_bytes(&self, bytes: usize, field: &str) -> Result<(), ApiError> {
        let tokens_max = self.settings.tokens_max;
        if self.settings.chat.vocabulary().may_fit(bytes, tokens_max) {
            return Ok(());
        }
        let why =
            format!("a text of {bytes} bytes cannot fit in this model's maximum of {tokens_max} tokens");
        Err(ApiError::too_long(field, why))
    }

    /// Returns the number of tokens that may follow a prompt, and refuses a prompt that is empty or too long.
    fn check_prompt(&self, tokens: &[u32], field: &str) -> Result<usize, ApiError> {
        let tokens_max = self.settings.tokens_max;
        match tokens_max.checked_sub(tokens.len()) {
            _ if tokens.is_empty() => Err(ApiError::invalid(Some(field), format!("{field:?} has no token"))),
            Some(left) => Ok(left),
            None => Err(ApiError::too_long(
                field,
                format!(
                    "the prompt has {} tokens, more than this model's maximum of {tokens_max}",
                    tokens.len()
                ),
            )),
        }
    }

    fn check_room(&self, prompt: usize, new: usize, left: usize) -> Result<(), ApiError> {
        if new <= left {
            return Ok(());
        }
        Err(ApiError::too_long(
            "max_tokens",
            format!(
                "this model's maximum is {} tokens; the prompt has {prompt}, and {new} new ones are requested",
                self.settings.tokens_max
            ),
        ))
    }

    /// Returns the tokens that end a sample: those of the chat format, unless `ignore_eos` is true, and those
    /// of the request.
    fn stop_tokens(&self, fields: &Fields) -> Result<Vec<u32>, ApiError> {
        let chat = self.settings.chat;
        let mut tokens = match fields.flag("ignore_eos")? {
            true => vec![],
            // The published models also end with the end of text, which is no stop token of Harmony.
            false => chat.stop_tokens().into_iter().chain(chat.vocabulary().added_id(END_OF_TEXT)).collect(),
        };
        tokens.extend(self.stop_token_ids(fields)?);
        Ok(tokens)
    }

    fn stop_token_ids(&self, fields: &Fields) -> Result<Vec<u32>, ApiError> {
        let ids = fields.list("stop_token_ids")?.unwrap_or_default();
        let read: Option<Vec<u32>> = ids.iter().map(|id| self.token_id(id)).collect();
        read.filter(|_| ids.len() <= STOP_TOKENS_MAX).ok_or_else(|| {
            let why = format!("\"stop_token_ids\" must be up to {STOP_TOKENS_MAX} ids of the vocabulary");
            ApiError::invalid(Some("stop_token_ids"), why)
        })
    }

    fn token_id(&self, id: &Value) -> Option<u32> {
        let ids_max = self.settings.engine.policy().model.config.vocab_size as u64;
        id.as_u64().filter(|&id| id < ids_max).map(|id| id as u32)
    }
}

/// Returns the maximum bytes of a prompt with its answers, as tokens and as text.
fn answer_bytes_max(request: &EngineRequest, samples: usize) -> usize {
    let bytes = |scores: Option<usize>| ANSWER_TOKEN_BYTES + scores.map_or(0, |top| (1 + top) * SCORE_BYTES);
    let sampled = samples * request.new_tokens_max * bytes(request.top_log_probs);
    let echoed = samples * request.tokens.len() * request.prompt_log_probs.map_or(0, |top| bytes(Some(top)));
    request.tokens.len() * ANSWER_TOKEN_BYTES + sampled + echoed
}

fn engine_request(
    tokens: Vec<u32>,
    common: &Common,
    stop_tokens: Vec<u32>,
    new_tokens_max: usize,
    top_log_probs: Option<usize>,
) -> EngineRequest {
    EngineRequest {
        version: None,
        tokens,
        samples: vec![],
        sampling: common.sampling,
        stop_tokens,
        new_tokens_max,
        top_log_probs,
        prompt_log_probs: None,
        keep_routed_experts: false,
        keep_token_sets: false,
        keep_sequence: false,
    }
}

pub(crate) fn read_stop(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let wrong = || {
        let why = format!(
            "\"stop\" must be a text or up to {STOPS_MAX} texts, each of up to {STOP_BYTES_MAX} bytes"
        );
        ApiError::invalid(Some("stop"), why)
    };
    let texts = match fields.value("stop") {
        None => vec![],
        Some(Value::Array(texts)) => texts.iter().collect(),
        Some(text) => vec![text],
    };
    let text = |text: &Value| Some(text.as_str()?.to_owned()).filter(|text| text.len() <= STOP_BYTES_MAX);
    let texts: Vec<String> = texts.into_iter().map(text).collect::<Option<_>>().ok_or_else(wrong)?;
    if texts.len() > STOPS_MAX {
        return Err(wrong());
    }
    // lm-eval sends empty stop texts. They are ignored.
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}
