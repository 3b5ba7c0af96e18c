//! Answers in OpenAI's form: whole, or as a stream of events.

use super::api_error::ApiError;
use super::fields::Form;
use super::hub::Event;
use super::log_probs::{ChatLogProbs, LogProbs, text_log_probs};
use super::metrics::Metrics;
use crate::chat::{Chat, Texts, TurnReader, call_json};
use crate::engine::{Completion, FinishReason, NewToken, TokenScores};
use crate::harmony::{TurnEnd, TurnStep};
use crate::http::{Peer, Stream};
use serde_json::{Map, Value, json};
use std::iter::once;
use std::time::{Duration, Instant};

/// Interval at which a waiting answer checks that its client is still connected.
const PEER_POLL: Duration = Duration::from_millis(100);
/// The end tag of a call of ChatML, and the tags of a thought.
const CALL_END: &[u8] = b"</tool_call>";
const THOUGHT: [&[u8]; 2] = [b"<think>", b"</think>"];

/// A prompt's tokens, and its text if the request gave a text.
pub(crate) type Prompt = (Vec<u32>, Option<String>);

/// The parts of an answer, beside the text, that the request asks for.
pub(crate) struct Reporting {
    pub form: Form,
    pub token_ids: bool,
    /// Number of likeliest tokens to report with each token's log-probability; `None` reports neither.
    pub log_probs: Option<usize>,
    pub stream_usage: bool,
    /// Whether the answer's text begins with the prompt.
    pub echo: bool,
    /// Whether an answer may have several calls. Otherwise it ends after its first one.
    pub parallel_calls: bool,
}

/// The samples of an answer, as they are drawn.
pub(crate) trait SampleSource {
    /// Returns the answer's id. No other answer of the server has the same one.
    fn id(&self) -> String;

    /// Waits for the next event, but not longer than `wait`. The number is the sample's index.
    fn next(&self, wait: Duration) -> Result<Option<(usize, Event)>, ApiError>;

    /// Ends sample `index`.
    fn end(&self, index: usize);

    /// Receives a finished sample of a chat before the client does: the message, its tokens and its
    /// `finish_reason`. An error takes the place of the answer.
    fn finished(&self, _message: &Value, _tokens: &[NewToken], _reason: &str) -> Result<(), ApiError> {
        Ok(())
    }
}

/// The parts of an answer that do not depend on its samples.
pub(crate) struct AnswerHead<'r> {
    pub chat: &'r Chat,
    /// The model's name.
    pub model: String,
    /// Version of the weights that sample.
    pub version: u64,
    /// Seconds since 1970.
    pub created: u64,
}

/// One sample of an answer.
struct Choice<'r> {
    reader: TurnReader<'r>,
    tokens: Vec<NewToken>,
    prompt_scores: Vec<TokenScores>,
    finish: Option<&'static str>,
    /// Whether the engine has finished this sample.
    is_through: bool,
    /// The texts streamed so far.
    sent: Texts,
    sent_tokens: usize,
}

/// An answer that is being sampled.
pub(crate) struct Answer<'r> {
    pub(super) head: AnswerHead<'r>,
    prompts: Vec<Prompt>,
    samples: usize,
    choices: Vec<Choice<'r>>,
    report: Reporting,
}

impl<'r> Answer<'r> {
    pub fn new(
        head: AnswerHead<'r>,
        prompts: Vec<Prompt>,
        samples: usize,
        readers: Vec<TurnReader<'r>>,
        report: Reporting,
    ) -> Self {
        let choice = |reader| Choice {
            reader,
            tokens: vec![],
            prompt_scores: vec![],
            finish: None,
            is_through: false,
            sent: Texts::default(),
            sent_tokens: 0,
        };
        Self { head, prompts, samples, choices: readers.into_iter().map(choice).collect(), report }
    }

    /// Waits for all samples and returns the answer as JSON's text.
    pub fn whole(
        &mut self,
        ticket: &dyn SampleSource,
        peer: &Peer,
        metrics: &Metrics,
    ) -> Result<String, ApiError> {
        let mut looked = Instant::now();
        while !self.is_done() {
            if let Some((index, event)) = ticket.next(PEER_POLL)? {
                self.take(ticket, index, event);
            }
            if looked.elapsed() >= PEER_POLL {
                looked = Instant::now();
                if peer.has_left() {
                    metrics.count_left();
                    return Err(ApiError::refused("499 Client Closed Request", "the client has left"));
                }
            }
        }
        self.count(metrics);
        let id = ticket.id();
        let mut answer = self.head_json(&id, false);
        answer["usage"] = self.usage();
        if self.report.token_ids && self.report.form == Form::Chat {
            answer["prompt_token_ids"] = json!(self.prompts[0].0);
        }
        // A value takes far more memory than its text. So there is one choice at a time, without its
        // log-probabilities.
        let mut text = unclosed(&answer.to_string()).to_owned() + ",\"choices\":[";
        for (index, choice) in self.choices.iter().enumerate() {
            let value = self.choice(index, &id);
            ticket.finished(&value["message"], &choice.tokens, choice.finish.unwrap_or_default())?;
            let log_probs = serde_json::to_string(&self.log_probs(index, &choice.tokens, 0));
            let log_probs = log_probs.map_err(|error| ApiError::internal(&error.to_string()))?;
            let comma = if index == 0 { "" } else { "," };
            for part in [comma, unclosed(&value.to_string()), ",\"logprobs\":", &log_probs, "}"] {
                text.push_str(part);
            }
        }
        Ok(text + "]}")
    }

    /// Writes the answer as server-sent events.
    pub fn stream(&mut self, ticket: &dyn SampleSource, stream: &mut Stream, metrics: &Metrics) {
        let id = ticket.id();
        let data = |value: &Value| format!("data: {value}\n\n");
        let send = |stream: &mut Stream, value: &Value| stream.write(&data(value));
        // The events of the end are written at once, because a client may close after any of them.
        let mut end = String::new();
        let mut is_there = (0..self.choices.len()).all(|index| send(stream, &self.first_chunk(index, &id)));
        let mut looked = Instant::now();
        while is_there && !self.is_done() {
            match ticket.next(PEER_POLL) {
                Ok(Some((index, event))) => {
                    if self.choices[index].finish.is_none() {
                        self.take(ticket, index, event);
                        if let Some(reason) = self.choices[index].finish {
                            let message = &self.choice(index, &id)["message"];
                            let told = ticket.finished(message, &self.choices[index].tokens, reason);
                            if let Err(error) = told {
                                send(stream, &error.to_json());
                                return;
                            }
                        }
                        match self.next_chunk(index, &id) {
                            Some(chunk) if self.is_done() => end = data(&chunk),
                            Some(chunk) => is_there = send(stream, &chunk),
                            None => {}
                        }
                    } else {
                        self.take(ticket, index, event);
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    send(stream, &error.to_json());
                    return;
                }
            }
            if looked.elapsed() >= PEER_POLL {
                looked = Instant::now();
                is_there &= !stream.has_left();
            }
        }
        if !is_there {
            metrics.count_left();
            return;
        }
        self.count(metrics);
        if self.report.stream_usage {
            let mut chunk = self.head_json(&id, true);
            chunk["choices"] = json!([]);
            chunk["usage"] = self.usage();
            end += &data(&chunk);
        }
        stream.end(&(end + "data: [DONE]\n\n"));
    }

    /// Returns the maximum number of calls of one answer.
    fn calls_max(&self) -> usize {
        if self.report.parallel_calls { usize::MAX } else { 1 }
    }

    fn is_done(&self) -> bool {
        let needs_scores = self.scores_prompt();
        self.choices.iter().all(|choice| choice.finish.is_some() && (choice.is_through || !needs_scores))
    }

    fn scores_prompt(&self) -> bool {
        self.report.echo && self.report.log_probs.is_some()
    }

    /// Applies an event of the engine to sample `index`.
    fn take(&mut self, ticket: &dyn SampleSource, index: usize, event: Event) {
        let (waits_for_scores, one_call) = (self.scores_prompt(), !self.report.parallel_calls);
        let choice = &mut self.choices[index];
        let (tokens, end) = match event {
            Event::Token(token) => (vec![token], None),
            Event::Finished(completion) => {
                let Completion { tokens, finish_reason, prompt_scores, .. } = completion;
                (choice.prompt_scores, choice.is_through) = (prompt_scores, true);
                // Of a sample whose tokens were not sent, the completion has all of them.
                (tokens.into_iter().skip(choice.tokens.len()).collect(), Some(finish_reason))
            }
        };
        for token in tokens {
            if choice.finish.is_some() {
                break;
            }
            let mut ends = choice.reader.push(token.id);
            choice.tokens.push(token);
            if one_call
                && !ends
                && let Some(end) = end_of_call(self.head.chat, &choice.tokens)
            {
                ends = choice.reader.push(end);
            }
            if ends {
                choice.finish = Some(choice.reader.reason());
                if !waits_for_scores {
                    ticket.end(index);
                }
            }
        }
        if let Some(reason) = end {
            choice.finish.get_or_insert(if let FinishReason::Length = reason { "length" } else { "stop" });
        }
    }

    fn count(&self, metrics: &Metrics) {
        let prompt = self.prompts.iter().map(|(tokens, _)| tokens.len()).sum();
        metrics.count_tokens(prompt, self.sampled());
    }

    fn sampled(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }

    fn usage(&self) -> Value {
        let prompt: usize = self.prompts.iter().map(|(tokens, _)| tokens.len()).sum();
        let sampled = self.sampled();
        json!({"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled})
    }

    fn head_json(&self, id: &str, is_chunk: bool) -> Value {
        let (prefix, object) = match (self.report.form, is_chunk) {
            (Form::Chat, false) => ("chatcmpl", "chat.completion"),
            (Form::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Form::Text, _) => ("cmpl", "text_completion"),
        };
        let mut head = json!({
            "id": format!("{prefix}-{id}"),
            "object": object,
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": format!("rloss-step-{}", self.head.version),
        });
        if is_chunk && self.report.stream_usage {
            head["usage"] = Value::Null;
        }
        head
    }

    /// Returns a choice of a whole answer, without its log-probabilities.
    fn choice(&self, index: usize, id: &str) -> Value {
        let choice = &self.choices[index];
        let Texts { content, reasoning } = choice.reader.last();
        let mut value = json!({"index": index, "finish_reason": choice.finish});
        match self.report.form {
            Form::Chat => {
                let calls = calls_json(&choice.reader, self.calls_max(), &format!("{id}{index}"));
                let text = if content.is_empty() && !calls.is_empty() { Value::Null } else { content.into() };
                let mut message = json!({"role": "assistant", "content": text});
                if !reasoning.is_empty() {
                    message["reasoning_content"] = reasoning.into();
                }
                if !calls.is_empty() {
                    message["tool_calls"] = calls.into();
                }
                value["message"] = message;
            }
            Form::Text => {
                let prompt = if self.report.echo { self.prompt_text(index) } else { String::new() };
                value["text"] = (prompt + &content).into();
                if self.report.token_ids {
                    value["prompt_token_ids"] = json!(self.prompt(index).0);
                }
            }
        }
        if self.report.token_ids {
            value["token_ids"] = ids(&choice.tokens);
        }
        value
    }

    /// Returns the first event of a choice.
    fn first_chunk(&self, index: usize, id: &str) -> Value {
        let mut choice = json!({"index": index, "finish_reason": null, "logprobs": null});
        match self.report.form {
            Form::Chat => choice["delta"] = json!({"role": "assistant", "content": ""}),
            Form::Text => {
                choice["text"] = if self.report.echo { self.prompt_text(index).into() } else { "".into() };
                if self.report.token_ids {
                    choice["prompt_token_ids"] = json!(self.prompt(index).0);
                }
            }
        }
        let mut chunk = self.head_json(id, true);
        if self.report.token_ids && self.report.form == Form::Chat {
            chunk["prompt_token_ids"] = json!(self.prompt(index).0);
        }
        chunk["choices"] = json!([choice]);
        chunk
    }

    /// Returns the next event of a choice, if there is something new.
    fn next_chunk(&mut self, index: usize, id: &str) -> Option<Value> {
        let choice = &mut self.choices[index];
        let is_over = choice.finish.is_some();
        let now = if is_over { choice.reader.last() } else { choice.reader.certain() };
        let new = |sent: &mut String, now: String| match now.strip_prefix(sent.as_str()) {
            Some(new) => {
                let new = new.to_owned();
                *sent = now;
                new
            }
            // What was sent has become a thought: its end tag came without a begin tag.
            None if now.is_empty() => {
                sent.clear();
                now
            }
            None => String::new(),
        };
        let content = new(&mut choice.sent.content, now.content);
        let reasoning = new(&mut choice.sent.reasoning, now.reasoning);
        let first = std::mem::replace(&mut choice.sent_tokens, choice.tokens.len());
        let choice = &self.choices[index];
        let tokens = &choice.tokens[first..];
        let tells_tokens = (self.report.token_ids || self.report.log_probs.is_some()) && !tokens.is_empty();
        if content.is_empty() && reasoning.is_empty() && !is_over && !tells_tokens {
            return None;
        }
        let mut value = json!({"index": index, "finish_reason": choice.finish});
        match self.report.form {
            Form::Chat => {
                let mut delta = Map::new();
                if !content.is_empty() {
                    delta.insert("content".into(), content.into());
                }
                if !reasoning.is_empty() {
                    delta.insert("reasoning_content".into(), reasoning.into());
                }
                let calls_max = if is_over { self.calls_max() } else { 0 };
                let calls = calls_json(&choice.reader, calls_max, &format!("{id}{index}"));
                if !calls.is_empty() {
                    let numbered = calls.into_iter().enumerate().map(|(number, mut call)| {
                        call["index"] = number.into();
                        call
                    });
                    delta.insert("tool_calls".into(), numbered.collect());
                }
                value["delta"] = delta.into();
            }
            Form::Text => value["text"] = content.into(),
        }
        value["logprobs"] = json!(self.log_probs(index, tokens, first));
        if self.report.token_ids {
            value["token_ids"] = ids(tokens);
        }
        let mut chunk = self.head_json(id, true);
        chunk["choices"] = json!([value]);
        Some(chunk)
    }

    fn prompt(&self, index: usize) -> &Prompt {
        &self.prompts[index / self.samples]
    }

    fn prompt_text(&self, index: usize) -> String {
        let (tokens, text) = self.prompt(index);
        text.clone().unwrap_or_else(|| self.head.chat.vocabulary().decode(tokens))
    }

    /// Returns log-probabilities, those of an echoed prompt first; `None` if the request does not ask for
    /// them. `first` is the index within the sample of the first of `tokens`.
    fn log_probs<'s>(&'s self, index: usize, tokens: &'s [NewToken], first: usize) -> Option<LogProbs<'s>> {
        self.report.log_probs?;
        let vocabulary = self.head.chat.vocabulary();
        if self.report.form == Form::Chat {
            return Some(LogProbs::Chat { content: ChatLogProbs { vocabulary, tokens } });
        }
        let choice = &self.choices[index];
        let prompt = if self.report.echo && first == 0 { &self.prompt(index).0[..] } else { &[] };
        let of_prompt = prompt.iter().copied().zip(once(None).chain(choice.prompt_scores.iter().map(Some)));
        let of_tokens = tokens.iter().map(|token| (token.id, token.scores.as_ref()));
        Some(text_log_probs(vocabulary, &choice.tokens[..first], of_prompt.chain(of_tokens)))
    }
}

/// Returns the text of a JSON object without its last brace, so that a field can follow.
fn unclosed(object: &str) -> &str {
    object.strip_suffix('}').unwrap_or(object)
}

/// Returns the calls at the end of an answer in OpenAI's form, up to `calls_max`; `id` names the answer.
fn calls_json(reader: &TurnReader, calls_max: usize, id: &str) -> Vec<Value> {
    let calls = reader.calls().into_iter().take(calls_max).enumerate();
    calls.map(|(number, call)| call_json(&call, format!("call_{id}_{number}"))).collect()
}

fn ids(tokens: &[NewToken]) -> Value {
    tokens.iter().map(|token| token.id).collect()
}

/// Returns the token that ends the turn, if `tokens` end with the end tag of a call that can be read. A call
/// in an open thought is none yet. Harmony needs no such check: its turns end with their first call.
fn end_of_call(chat: &Chat, tokens: &[NewToken]) -> Option<u32> {
    let Chat::ChatMl(_) = chat else { return None };
    let bytes = |token: &NewToken| chat.vocabulary().token_bytes(token.id).unwrap_or_default();
    let text = |tokens: &[NewToken]| -> Vec<u8> { tokens.iter().flat_map(bytes).copied().collect() };
    let tail = text(&tokens[tokens.len().saturating_sub(CALL_END.len() + 1)..]);
    if !tail.trim_ascii_end().ends_with(CALL_END) {
        return None;
    }
    let text = text(tokens);
    let [open, close] = THOUGHT;
    if text.trim_ascii_start().starts_with(open) && !text.windows(close.len()).any(|part| part == close) {
        return None;
    }
    let end = *chat.stop_tokens().first()?;
    let mut parser = chat.turn_parser();
    for token in tokens {
        parser.push(token.id);
    }
    // A model's own template may begin the thought.
    parser.answer()?;
    (parser.push(end) == TurnStep::Ended(TurnEnd::Called)).then_some(end)
}

#[cfg(test)]
mod tests;
