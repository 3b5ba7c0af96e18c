//! The record of one episode: its answers as they were sampled, and the trajectories that they form.
//!
//! A request whose prompt begins with all tokens of a trajectory continues that trajectory. The tokens in
//! between are masked. Any other prompt begins a new trajectory. So each sampled token is trained once, after
//! the very tokens that it was sampled after. For an agent that shortens its history:
//!
//! ```text
//! request 1   prompt A             answer 1    trajectory 1: A [answer 1]
//! request 2   A answer 1 reply     answer 2    trajectory 1: A [answer 1] reply [answer 2]
//! request 3   B answer 2 question  answer 3    trajectory 2: B answer 2 question [answer 3]
//! ```
//!
//! The tokens in brackets are trained. A message that the model wrote is never tokenised again: its sampled
//! tokens are a part of later prompts.

use crate::chat::{Call, Chat, GivenAnswer, NextTokens, RequestMessages};
use crate::engine::NewToken;
use crate::harmony::Message;
use crate::rollout::TokenRecord;
use crate::trajectory::{CallOutcome, Outcome, Trajectory, Turn};
use anyhow::Result;
use serde_json::Value;

/// An answer that the client received.
struct KeptAnswer {
    message: GivenAnswer,
    /// The calls at its end. Their ids are in `message`.
    calls: Vec<Message>,
    /// The sampled messages, also the thought, which a client need not repeat.
    sampled: Vec<Message>,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// Whether the last token ends the turn.
    has_ended: bool,
}

/// A trajectory in progress.
struct Path {
    record: TokenRecord,
    turns: Vec<Turn>,
    messages: Vec<Message>,
    outcome: Outcome,
    /// Number of calls at the end of the last answer.
    open_calls: usize,
}

/// A finished answer, with its request.
pub(super) struct SampledAnswer {
    pub prompt: Vec<u32>,
    /// The messages of the prompt.
    pub messages: Vec<Message>,
    pub tokens: Vec<NewToken>,
    /// The message that the client receives.
    pub message: Value,
    /// Whether it ended because the recipe allows no further token in its trajectory.
    pub is_full: bool,
}

/// The answers and trajectories of an episode.
#[derive(Default)]
pub(super) struct Trace {
    answers: Vec<KeptAnswer>,
    paths: Vec<Path>,
    /// Index of the trajectory with the newest answer.
    newest: usize,
}

impl Trace {
    /// Returns the tokens of a request's conversation and of the start of the next answer. `values` are the
    /// entries of its `messages`. They may repeat the first `known_answers` answers.
    ///
    /// # Errors
    /// When a message cannot be rendered.
    pub fn render(
        &self,
        chat: &Chat,
        conversation: &RequestMessages,
        values: &[Value],
        known_answers: usize,
    ) -> Result<Vec<u32>> {
        let known = self.answers.get(..known_answers).unwrap_or(&self.answers);
        let (mut tokens, mut before, mut pending) = (vec![], vec![], conversation.system.clone());
        let append = |tokens: &mut Vec<u32>, before: &mut Vec<Message>, pending: &mut Vec<Message>| {
            match tokens.is_empty() {
                true => *tokens = chat.render_prompt(pending)?,
                false => match chat.render_next(before, pending)? {
                    NextTokens::Appended(rendered) => tokens.extend(rendered),
                    // The next answer begins a trajectory.
                    NextTokens::Rewritten { tokens: whole, .. } => *tokens = whole,
                },
            }
            before.append(pending);
            anyhow::Ok(())
        };
        for (value, messages) in values.iter().zip(&conversation.entries) {
            let given = GivenAnswer::read(value);
            let is_kept = value["role"] == "assistant"
                && known.iter().any(|answer| answer.message.says_the_same(&given));
            if is_kept {
                append(&mut tokens, &mut before, &mut pending)?;
                if let Some(answer) = find(known, &given, &tokens) {
                    before.extend(answer.sampled.iter().cloned());
                    tokens.extend(&answer.tokens);
                    // An answer that reached its limit is closed by a token that is not trained.
                    tokens.extend(chat.stop_tokens().first().filter(|_| !answer.has_ended));
                }
            } else {
                pending.extend(messages.iter().map(|message| address_reply(known, value, message)));
            }
        }
        append(&mut tokens, &mut before, &mut pending)?;
        Ok(tokens)
    }

    /// Returns the index of the trajectory that `prompt` continues: the longest one that it begins with.
    fn continued(&self, prompt: &[u32]) -> Option<usize> {
        let paths = self.paths.iter().enumerate().filter(|(_, path)| prompt.starts_with(&path.record.tokens));
        paths.max_by_key(|(_, path)| path.record.len()).map(|(index, _)| index)
    }

    /// Returns the number of tokens sampled so far in the trajectory that `prompt` continues.
    pub fn sampled_before(&self, prompt: &[u32]) -> usize {
        let path = self.continued(prompt).map(|index| &self.paths[index]);
        path.map_or(0, |path| path.record.sampled)
    }

    /// Notes that there was no space for a further answer.
    pub fn end_of_space(&mut self) {
        if let Some(path) = self.paths.get_mut(self.newest) {
            path.outcome = Outcome::TruncatedLength;
        }
    }

    /// Returns the number of answers.
    pub fn answers(&self) -> usize {
        self.answers.len()
    }

    /// Adds an answer to the trajectory that its prompt continues, or to a new one.
    pub fn record(&mut self, chat: &Chat, answer: SampledAnswer) {
        let SampledAnswer { prompt, messages, tokens, message, is_full } = answer;
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let mut parser = chat.turn_parser();
        for &id in &ids {
            parser.push(id);
        }
        let given = GivenAnswer::read(&message);
        let has_ended = ids.last().is_some_and(|last| chat.stop_tokens().contains(last));
        // With `parallel_tool_calls: false` an answer ends after its first call, without a stop token.
        if let (false, false, Some(&end)) = (has_ended, given.calls.is_empty(), chat.stop_tokens().first()) {
            parser.push(end);
        }
        let calls: Vec<Message> = match given.calls.is_empty() {
            true => vec![],
            false => parser
                .calls()
                .into_iter()
                .filter_map(|call| match call {
                    Call::Ready(message) => Some(message),
                    Call::Malformed { .. } => None,
                })
                .take(given.calls.len())
                .collect(),
        };
        let index = self.continued(&prompt).unwrap_or_else(|| {
            self.paths.push(Path::new());
            self.paths.len() - 1
        });
        let path = &mut self.paths[index];
        if let Some(turn) = path.turns.last_mut() {
            // The client went on after the calls of the answer before, so it answered them.
            turn.calls = vec![CallOutcome::Answered; path.open_calls];
        } else {
            path.record.prompt_tokens = prompt.len();
        }
        path.record.insert(&prompt[path.record.len()..]);
        let start = path.record.len();
        tokens.iter().for_each(|token| path.record.push(token));
        path.turns.push(Turn { start, end: path.record.len(), calls: vec![] });
        path.open_calls = calls.len();
        path.messages = messages;
        let sampled = parser.finish();
        path.messages.extend(sampled.iter().cloned());
        path.outcome = if is_full { Outcome::TruncatedLength } else { Outcome::Finished };
        self.newest = index;
        self.answers.push(KeptAnswer { message: given, calls, sampled, prompt, tokens: ids, has_ended });
    }

    /// Returns the trajectories in the order of their first answers, each with its messages, and the index of
    /// the one with the newest answer. All have reward 0.
    pub fn into_trajectories(self, facts: &Trajectory) -> (Vec<(Trajectory, Vec<Message>)>, usize) {
        let trajectory = |(part, path): (usize, Path)| {
            let TokenRecord { tokens, prompt_tokens, mask, log_probs, kept_tokens, .. } = path.record;
            let is_truncated = kept_tokens.iter().any(Option::is_some);
            let trajectory = Trajectory {
                tokens,
                prompt_tokens,
                mask,
                log_probs,
                kept_tokens: if is_truncated { kept_tokens } else { vec![] },
                turns: path.turns,
                outcome: path.outcome,
                part: part as u64,
                ..facts.clone()
            };
            (trajectory, path.messages)
        };
        (self.paths.into_iter().enumerate().map(trajectory).collect(), self.newest)
    }
}

/// Returns the answer of `known` that `given` repeats: the one that was sampled after `tokens`, else the one
/// with the same call ids, else the newest.
fn find<'a>(known: &'a [KeptAnswer], given: &GivenAnswer, tokens: &[u32]) -> Option<&'a KeptAnswer> {
    let same = || known.iter().rev().filter(|answer| answer.message.says_the_same(given));
    let has_ids =
        |answer: &&KeptAnswer| !given.call_ids.is_empty() && answer.message.call_ids == given.call_ids;
    same().find(|answer| answer.prompt == tokens).or_else(|| same().find(has_ids)).or_else(|| same().next())
}

/// Returns a tool's reply with the author and the channel of the call that it answers.
fn address_reply(known: &[KeptAnswer], value: &Value, message: &Message) -> Message {
    let id = value["tool_call_id"].as_str().unwrap_or_default();
    let call = known.iter().rev().find_map(|answer| {
        let index = answer.message.call_ids.iter().position(|other| other == id)?;
        answer.calls.get(index)
    });
    match call {
        Some(call) if value["role"] == "tool" => {
            Message { name: call.recipient.clone(), channel: call.channel.clone(), ..message.clone() }
        }
        _ => message.clone(),
    }
}

impl Path {
    fn new() -> Self {
        // One version samples an episode: that of its facts.
        let record = TokenRecord::new(&[], 0, true);
        Self { record, turns: vec![], messages: vec![], outcome: Outcome::Finished, open_calls: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::chatml::TemplateSource;
    use crate::chat::{ChatFormat, ConversationSource, SystemPromptSettings};
    use serde_json::json;

    /// With `parallel_tool_calls: false` the answer has no stop token. Its call must still be known, and its
    /// turn must be closed in the next prompt.
    #[test]
    fn an_answer_that_ends_after_its_first_call_is_continued() {
        let chat = ChatFormat::ChatMl.from_embedded().unwrap();
        let ids = |text: &str| chat.vocabulary().encode_with_special(text).unwrap();
        let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let sampled: Vec<NewToken> = ids(call)
            .into_iter()
            .map(|id| NewToken { id, log_prob: 0.0, kept: None, scores: None })
            .collect();
        let function = json!({"name": "add", "arguments": "{\"a\": 1}"});
        let answer = json!({"role": "assistant", "content": null,
            "tool_calls": [{"id": "c", "type": "function", "function": function}]});
        let values = [
            json!({"role": "user", "content": "1+1"}),
            answer.clone(),
            json!({"role": "tool", "tool_call_id": "c", "content": "2"}),
        ];
        let read = |values: &[Value]| {
            let settings = SystemPromptSettings::default();
            RequestMessages::read(values, &[], &chat, settings, ConversationSource::Request).unwrap()
        };
        let mut trace = Trace::default();
        let prompt = trace.render(&chat, &read(&values[..1]), &values[..1], 0).unwrap();
        let messages = vec![];
        let (tokens, message) = (sampled, answer);
        trace.record(
            &chat,
            SampledAnswer { prompt: prompt.clone(), messages, tokens, message, is_full: false },
        );
        assert_eq!((trace.answers[0].calls.len(), trace.paths[0].open_calls), (1, 1));
        let next = trace.render(&chat, &read(&values), &values, 1).unwrap();
        let closed = [prompt, ids(call), chat.stop_tokens()[..1].to_vec()].concat();
        assert_eq!(next[..closed.len()], closed);
        assert_eq!(trace.continued(&next), Some(0));
    }

    /// A repeated request gets the prompt of the first one, whatever was answered since.
    #[test]
    fn a_prompt_repeats_only_the_answers_that_were_known() {
        let chat = ChatFormat::ChatMl.from_embedded().unwrap();
        let id = |text: &str| chat.vocabulary().encode_with_special(text).unwrap();
        let sampled = [id("hi \n "), chat.stop_tokens()[..1].to_vec()].concat();
        let token = |id: u32| NewToken { id, log_prob: 0.0, kept: None, scores: None };
        let answer = json!({"role": "assistant", "content": "hi"});
        let values = [
            json!({"role": "user", "content": "?"}),
            answer.clone(),
            json!({"role": "user", "content": "!"}),
        ];
        let settings = SystemPromptSettings::default();
        let source = ConversationSource::Request;
        let conversation = RequestMessages::read(&values, &[], &chat, settings, source).unwrap();
        let mut trace = Trace::default();
        let before = trace.render(&chat, &conversation, &values, 0).unwrap();
        let tokens = sampled.iter().map(|&id| token(id)).collect();
        let (prompt, messages) = (id("?"), vec![]);
        trace.record(&chat, SampledAnswer { prompt, messages, tokens, message: answer, is_full: false });
        assert_eq!(trace.render(&chat, &conversation, &values, 0).unwrap(), before);
        let after = trace.render(&chat, &conversation, &values, 1).unwrap();
        assert!(after != before && after.windows(sampled.len()).any(|window| window == sampled));
    }

    /// The model's own template drops the thought of an earlier answer, so the sampled ids are no history of
    /// the next prompt.
    #[test]
    fn a_prompt_that_a_template_rewrites_begins_a_trajectory() {
        for (template, continued) in [
            (include_str!("../../tests/fixtures/templates/thoughts.jinja"), None),
            (include_str!("../../tests/fixtures/templates/plain.jinja"), Some(0)),
        ] {
            let vocabulary = ChatFormat::ThinkingChatMl.from_embedded().unwrap().vocabulary().clone();
            let source = TemplateSource { default: template.into(), ..TemplateSource::default() };
            let chat = ChatFormat::ThinkingChatMl.with_template(vocabulary, "test", &source).unwrap();
            let answer = json!({"role": "assistant", "content": "7"});
            let values = [
                json!({"role": "user", "content": "?"}),
                answer.clone(),
                json!({"role": "user", "content": "!"}),
            ];
            let read = |values: &[Value]| {
                let settings = SystemPromptSettings::default();
                RequestMessages::read(values, &[], &chat, settings, ConversationSource::Request).unwrap()
            };
            let mut trace = Trace::default();
            let prompt = trace.render(&chat, &read(&values[..1]), &values[..1], 0).unwrap();
            let text =
                if continued.is_none() { "<think>\nhm\n</think>\n\n7<|im_end|>" } else { "7<|im_end|>" };
            let ids = chat.vocabulary().encode_with_special(text).unwrap();
            let tokens =
                ids.iter().map(|&id| NewToken { id, log_prob: 0.0, kept: None, scores: None }).collect();
            let messages = vec![];
            trace.record(&chat, SampledAnswer { prompt, messages, tokens, message: answer, is_full: false });
            // The client repeats no thought.
            let next = trace.render(&chat, &read(&values), &values, 1).unwrap();
            assert_eq!(trace.continued(&next), continued, "{template}");
            assert_eq!(next, chat.render_prompt(&read(&values).into_messages()).unwrap(), "{template}");
        }
    }
}
