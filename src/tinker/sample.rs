//! Sampling: the request of `asample`, and its answer.

use super::error::TinkerError;
use super::futures::{FutureReply, Promise};
use super::state::{State, sequence_digest};
use super::wire::{SampleResponse, SampledSequence, TopkLogprobs, f32_bytes, token_bytes};
use crate::engine::{Completion, EngineRequest, FinishReason, NewToken, TokenScores};
use crate::ops::logits::SamplingParameters;
use crate::serve::{ANSWER_TOKEN_BYTES, SCORE_BYTES, SampleSink, TEMPERATURE_MIN};
use prost::Message;
use serde::Deserialize;
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of likeliest tokens of a position.
const TOP_MAX: usize = 64;
/// Maximum number of stop texts or tokens, and maximum bytes of a text.
const STOPS_MAX: usize = 128;
const STOP_BYTES_MAX: usize = 1 << 10;
/// An empty cell of a row of likeliest tokens.
const EMPTY_CELL: (u32, f32) = (0, -99999.0);

/// Decodes tokens to text.
pub type Decode = Arc<dyn Fn(&[u32]) -> String + Send + Sync>;

/// The body of `asample`.
#[derive(Deserialize)]
pub struct SampleBody {
    pub sampling_session_id: Option<String>,
    pub seq_id: Option<u64>,
    #[serde(default = "one")]
    pub num_samples: usize,
    prompt: Prompt,
    sampling_params: Params,
    prompt_logprobs: Option<bool>,
    #[serde(default)]
    topk_prompt_logprobs: usize,
    #[serde(default)]
    topk_sample_logprobs: usize,
    target_prompt_logprobs: Option<Value>,
    #[serde(default)]
    prompt_alt_tokens_k: usize,
    prompt_logprobs_last_n: Option<usize>,
    record_stability_info: Option<bool>,
}

#[derive(Deserialize)]
struct Prompt {
    chunks: Vec<PromptChunk>,
}

#[derive(Deserialize)]
struct PromptChunk {
    tokens: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Params {
    max_tokens: Option<usize>,
    pub seed: Option<i64>,
    stop: Option<Value>,
    #[serde(default = "unit")]
    temperature: f64,
    #[serde(default = "minus_one")]
    top_k: i64,
    #[serde(default = "unit")]
    top_p: f64,
}

fn one() -> usize {
    1
}

fn unit() -> f64 {
    1.0
}

fn minus_one() -> i64 {
    -1
}

/// A request for samples, read and checked.
pub struct SampleTask {
    pub request: EngineRequest,
    pub seed: Option<u64>,
    pub samples: usize,
    stop_texts: Vec<String>,
    prompt_log_probs: bool,
    prompt_top: usize,
    sample_top: usize,
}

/// The limits of a request.
pub struct SampleLimits {
    pub vocabulary: usize,
    /// Maximum tokens of a prompt with its sample.
    pub tokens_max: usize,
    pub samples_max: usize,
    /// The tokens that end a sample.
    pub stop_tokens: Vec<u32>,
}

impl SampleBody {
    /// Checks the request.
    ///
    /// # Errors
    /// When a field is not supported or out of range.
    pub fn read(self, limits: &SampleLimits) -> Result<SampleTask, TinkerError> {
        let wrong = |why: String| Err(TinkerError::invalid(why));
        for (name, is_set, remedy) in [
            (
                "target_prompt_logprobs",
                self.target_prompt_logprobs.is_some(),
                "use topk_prompt_logprobs, or forward() with these targets",
            ),
            ("prompt_alt_tokens_k", self.prompt_alt_tokens_k > 0, "use topk_prompt_logprobs"),
            (
                "prompt_logprobs_last_n",
                self.prompt_logprobs_last_n.is_some(),
                "leave it out and take the last ones",
            ),
            (
                "record_stability_info",
                self.record_stability_info == Some(true),
                "leave it out; use loss_fn=importance_sampling",
            ),
        ] {
            if is_set {
                return wrong(format!("{name} is not supported here; {remedy}"));
            }
        }
        let mut tokens = vec![];
        for chunk in self.prompt.chunks {
            match chunk.tokens {
                Some(ids) => tokens.extend(ids),
                None => {
                    return wrong(
                        "the prompt has a chunk without tokens; this model reads text alone".to_owned(),
                    );
                }
            }
        }
        let SampleLimits { vocabulary, tokens_max, samples_max, .. } = *limits;
        if tokens.is_empty() || tokens.iter().any(|&token| token as usize >= vocabulary) {
            return wrong(format!("the prompt must have at least one token, and ids below {vocabulary}"));
        }
        let Params { max_tokens, seed, stop, temperature, top_k, top_p } = self.sampling_params;
        let left = tokens_max.saturating_sub(tokens.len());
        let new_tokens_max = max_tokens.unwrap_or(left.max(1));
        if new_tokens_max > left || new_tokens_max == 0 {
            return wrong(format!(
                "the prompt has {} tokens and max_tokens is {new_tokens_max}, but this server's maximum of both is {tokens_max}; max_tokens is at least 1",
                tokens.len()
            ));
        }
        if self.num_samples == 0 || self.num_samples > samples_max {
            return wrong(format!("num_samples is {}; it must be 1 to {samples_max}", self.num_samples));
        }
        if !(temperature >= 0.0 && temperature.is_finite() && top_p > 0.0 && top_p <= 1.0 && top_k >= -1) {
            return wrong(format!(
                "temperature {temperature}, top_p {top_p} or top_k {top_k} is out of range: 0 or more, above 0 to 1, and -1 or more"
            ));
        }
        let (prompt_top, sample_top) = (self.topk_prompt_logprobs, self.topk_sample_logprobs);
        if prompt_top.max(sample_top) > TOP_MAX {
            return wrong(format!(
                "the top k of log-probs is {prompt_top} or {sample_top}; at most {TOP_MAX} are given"
            ));
        }
        let (stop_tokens, stop_texts) = read_stop(stop.as_ref(), limits)?;
        let prompt_log_probs = self.prompt_logprobs == Some(true);
        let request = EngineRequest {
            version: None,
            tokens,
            samples: vec![],
            sampling: SamplingParameters {
                temperature: if temperature < TEMPERATURE_MIN { 0.0 } else { temperature },
                top_p,
                top_k: usize::try_from(top_k).unwrap_or(0),
                min_p: 0.0,
            },
            stop_tokens,
            new_tokens_max,
            // Log-probs are those of the model's own distribution, at temperature 1.
            top_log_probs: Some(sample_top),
            prompt_log_probs: (prompt_log_probs || prompt_top > 0).then_some(prompt_top),
            keep_routed_experts: false,
            keep_token_sets: false,
            keep_sequence: false,
        };
        let seed = seed.map(|seed| seed as u64);
        Ok(SampleTask {
            request,
            seed,
            samples: self.num_samples,
            stop_texts,
            prompt_log_probs,
            prompt_top,
            sample_top,
        })
    }
}

/// Returns the stop tokens and the stop texts. Without `stop` the model's end tokens stop. An empty list
/// stops nothing. A list of texts or tokens stops beside the end tokens.
fn read_stop(stop: Option<&Value>, limits: &SampleLimits) -> Result<(Vec<u32>, Vec<String>), TinkerError> {
    let wrong = || {
        TinkerError::invalid(format!(
            "stop must be a text, or a list of up to {STOPS_MAX} texts or tokens; texts of 1 to {STOP_BYTES_MAX} bytes, tokens below {}",
            limits.vocabulary
        ))
    };
    let items = match stop {
        None | Some(Value::Null) => vec![],
        Some(Value::Array(items)) if items.is_empty() => return Ok((vec![], vec![])),
        Some(Value::Array(items)) => items.iter().collect(),
        Some(item) => vec![item],
    };
    if items.len() > STOPS_MAX {
        return Err(wrong());
    }
    let (mut tokens, mut texts) = (limits.stop_tokens.clone(), vec![]);
    for item in items {
        match (item.as_str(), item.as_u64()) {
            (Some(text), _) if (1..=STOP_BYTES_MAX).contains(&text.len()) => texts.push(text.to_owned()),
            (None, Some(token)) if token < limits.vocabulary as u64 => tokens.push(token as u32),
            _ => return Err(wrong()),
        }
    }
    Ok((tokens, texts))
}

impl SampleTask {
    /// Returns the bytes of the answer in memory, while it is sampled.
    pub fn work_bytes(&self) -> usize {
        let sampled = ANSWER_TOKEN_BYTES + (1 + self.sample_top) * SCORE_BYTES;
        let scored = self.request.prompt_log_probs.map_or(0, |top| (1 + top) * SCORE_BYTES);
        let prompt = self.request.tokens.len();
        prompt * ANSWER_TOKEN_BYTES + self.samples * (self.request.new_tokens_max * sampled + prompt * scored)
    }

    /// Returns the maximum bytes of the result.
    pub fn result_bytes(&self) -> usize {
        let sampled = self.samples * (self.request.new_tokens_max * (8 + 8 * self.sample_top) + 64);
        sampled + self.request.prompt_log_probs.map_or(0, |top| self.request.tokens.len() * (4 + 8 * top))
    }

    /// Returns what collects the samples, fulfils `promise` with the answer, and remembers the sequences of
    /// the weights `of` in `state`.
    pub fn sink(
        &self,
        promise: Arc<Promise>,
        decode: Decode,
        of: Option<(String, u64)>,
        state: Arc<Mutex<State>>,
    ) -> Arc<dyn SampleSink> {
        let tail_tokens = self.stop_texts.iter().map(String::len).max().unwrap_or(0) + 4;
        Arc::new(Collector {
            promise,
            decode,
            of,
            state,
            prompt: self.request.tokens.clone(),
            stop_texts: self.stop_texts.clone(),
            tail_tokens,
            prompt_log_probs: self.prompt_log_probs,
            prompt_top: self.prompt_top,
            sample_top: self.sample_top,
            tails: Mutex::new(vec![vec![]; self.samples]),
            completions: Mutex::new((0..self.samples).map(|_| None).collect()),
        })
    }
}

/// Collects the samples of a request.
struct Collector {
    promise: Arc<Promise>,
    decode: Decode,
    of: Option<(String, u64)>,
    state: Arc<Mutex<State>>,
    prompt: Vec<u32>,
    stop_texts: Vec<String>,
    /// Number of tokens that can hold a stop text at their end.
    tail_tokens: usize,
    prompt_log_probs: bool,
    prompt_top: usize,
    sample_top: usize,
    /// The last tokens of each sample, if there are stop texts.
    tails: Mutex<Vec<Vec<u32>>>,
    completions: Mutex<Vec<Option<Completion>>>,
}

impl SampleSink for Collector {
    fn token(&self, index: usize, token: &NewToken) -> bool {
        if self.stop_texts.is_empty() {
            return true;
        }
        let mut tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(tail) = tails.get_mut(index) else { return false };
        tail.push(token.id);
        if tail.len() > self.tail_tokens {
            tail.remove(0);
        }
        let text = (self.decode)(tail);
        !self.stop_texts.iter().any(|stop| text.contains(stop))
    }

    fn finished(&self, index: usize, completion: Completion) {
        let all: Vec<Completion> = {
            let mut completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(place) = completions.get_mut(index) {
                *place = Some(completion);
            }
            if completions.iter().any(Option::is_none) {
                return;
            }
            completions.iter_mut().filter_map(Option::take).collect()
        };
        if let Some(of) = &self.of {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            for completion in &all {
                let sampled = completion.tokens.iter().map(|token| token.id);
                let sequence: Vec<u32> = self.prompt.iter().copied().chain(sampled).collect();
                state.remember_sample(of, sequence_digest(&sequence));
            }
        }
        self.promise.set(FutureReply::Protobuf(self.response(&all).into()));
    }
}

impl Collector {
    fn response(&self, completions: &[Completion]) -> Vec<u8> {
        let sequence = |completion: &Completion| {
            let tokens = &completion.tokens;
            let scores: Vec<&TokenScores> = tokens.iter().filter_map(|token| token.scores.as_ref()).collect();
            SampledSequence {
                stop_reason: i32::from(completion.finish_reason == FinishReason::Length),
                tokens: token_bytes(tokens.iter().map(|token| token.id)),
                logprobs: f32_bytes(scores.iter().map(|scores| scores.log_prob)),
                topk: (self.sample_top > 0).then(|| top_rows(scores.into_iter(), self.sample_top, 0)),
            }
        };
        let scores = completions.first().map_or(&[][..], |completion| &completion.prompt_scores);
        let prompt_logprobs = self
            .prompt_log_probs
            .then(|| f32_bytes(std::iter::once(f32::NAN).chain(scores.iter().map(|scores| scores.log_prob))));
        let prompt_top = (self.prompt_top > 0).then(|| top_rows(scores.iter(), self.prompt_top, 1));
        SampleResponse {
            sequences: completions.iter().map(sequence).collect(),
            prompt_logprobs,
            topk_prompt_logprobs: prompt_top,
        }
        .encode_to_vec()
    }
}

/// Returns rows of the `k` likeliest tokens, after `empty` rows of empty cells.
fn top_rows<'a>(scores: impl Iterator<Item = &'a TokenScores>, k: usize, empty: usize) -> TopkLogprobs {
    let mut cells = vec![EMPTY_CELL; empty * k];
    for scores in scores {
        let top = scores.top.iter().map(|top| (top.token, top.log_prob));
        cells.extend(top.chain(std::iter::repeat(EMPTY_CELL)).take(k));
    }
    let length = (cells.len() / k.max(1)) as i32;
    let (tokens, log_probs): (Vec<u32>, Vec<f32>) = cells.into_iter().unzip();
    TopkLogprobs { token_ids: token_bytes(tokens), logprobs: f32_bytes(log_probs), k: k as i32, length }
}
