//! Log-probabilities in OpenAI's two forms.

use crate::engine::{NewToken, TokenScores};
use crate::vocabulary::Vocabulary;
use serde::{Serialize, Serializer};
use std::iter::once;

/// Log-probability that stands for minus infinity, which JSON lacks.
const LOG_PROB_MIN: f32 = -9999.0;

/// Log-probabilities of an answer.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum LogProbs<'s> {
    Chat {
        content: ChatLogProbs<'s>,
    },
    Text {
        tokens: Vec<String>,
        token_logprobs: Vec<Option<f32>>,
        top_logprobs: Vec<Option<TopByText>>,
        text_offset: Vec<usize>,
    },
}

/// Log-probabilities of a chat's tokens. They are made while they are written.
pub(super) struct ChatLogProbs<'s> {
    pub vocabulary: &'s Vocabulary,
    pub tokens: &'s [NewToken],
}

#[derive(Serialize)]
struct Entry<'s> {
    token: String,
    logprob: f32,
    bytes: &'s [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry<'s>>>,
}

impl Serialize for ChatLogProbs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entry = |token: u32, log_prob: f32, top_logprobs| Entry {
            token: self.vocabulary.decode(&[token]),
            logprob: log_prob.max(LOG_PROB_MIN),
            bytes: self.vocabulary.token_bytes(token).unwrap_or_default(),
            top_logprobs,
        };
        serializer.collect_seq(self.tokens.iter().map(|token| {
            let (log_prob, top) =
                token.scores.as_ref().map_or((0.0, &[][..]), |scores| (scores.log_prob, &scores.top[..]));
            let top = top.iter().map(|top| entry(top.token, top.log_prob, None)).collect();
            entry(token.id, log_prob, Some(top))
        }))
    }
}

/// Log-probabilities by the text of their tokens.
pub(super) struct TopByText(Vec<(String, f32)>);

impl Serialize for TopByText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, log_prob)| (text, log_prob)))
    }
}

/// Returns the log-probabilities of a text completion's `tokens`, null for a token without scores. `before`
/// are the tokens before them.
pub(super) fn text_log_probs<'s>(
    vocabulary: &Vocabulary,
    before: &[NewToken],
    tokens: impl Iterator<Item = (u32, Option<&'s TokenScores>)>,
) -> LogProbs<'s> {
    let text = |id: u32| vocabulary.decode(&[id]);
    let (mut texts, mut log_probs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    // The offset of a token is the number of characters before it, as in OpenAI's answers.
    let mut offset: usize = before.iter().map(|token| text(token.id).chars().count()).sum();
    for (id, scores) in tokens {
        let text = text(id);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        log_probs.push(scores.map(|scores| scores.log_prob.max(LOG_PROB_MIN)));
        tops.push(scores.map(|scores| top_by_text(vocabulary, id, scores)));
    }
    LogProbs::Text { tokens: texts, token_logprobs: log_probs, top_logprobs: tops, text_offset: offsets }
}

/// Returns the log-probabilities of the sampled token `id` and of the likeliest tokens, by text. Tokens that
/// are parts of a character have one text: after the first of a text, each is `token_id:N`, as in vLLM.
fn top_by_text(vocabulary: &Vocabulary, id: u32, scores: &TokenScores) -> TopByText {
    let others = scores.top.iter().filter(|top| top.token != id).map(|top| (top.token, top.log_prob));
    let mut by_text: Vec<(String, f32)> = vec![];
    for (token, log_prob) in once((id, scores.log_prob)).chain(others) {
        let text = vocabulary.decode(&[token]);
        let is_known = by_text.iter().any(|(known, _)| *known == text);
        let key = if is_known { format!("token_id:{token}") } else { text };
        by_text.push((key, log_prob.max(LOG_PROB_MIN)));
    }
    TopByText(by_text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatFormat;
    use crate::ops::logits::SampledToken;
    use serde_json::{Map, Value, json};

    /// SGLang 32290, vLLM 44319: entries with one text fell together, and another token's value was left.
    #[test]
    fn tokens_with_one_text_keep_their_entries() {
        let chat = ChatFormat::ChatMl.from_embedded().unwrap();
        let vocabulary = chat.vocabulary();
        // The embedded vocabulary's tokens are bytes: those from 128 on are parts of characters.
        let byte = |byte: u8| (0..512).find(|&id| vocabulary.token_bytes(id) == Some(&[byte])).unwrap();
        let (a, x, y, z) = (byte(b'a'), byte(0xc3), byte(0xe2), byte(0xf0));
        let text = |ids: [(u32, f32); 3], sampled: (u32, f32)| {
            let top = ids.map(|(token, log_prob)| SampledToken { token, log_prob }).to_vec();
            json!(top_by_text(vocabulary, sampled.0, &TokenScores { log_prob: sampled.1, top }))
        };
        let key = |id: u32| format!("token_id:{id}");
        let rows = [
            // The sampled token is the second likeliest.
            (
                text([(x, -0.5), (y, -1.0), (a, -2.0)], (y, -1.0)),
                vec![("\u{fffd}".to_owned(), -1.0), (key(x), -0.5), ("a".to_owned(), -2.0)],
            ),
            // It is not among the likeliest.
            (
                text([(x, -0.5), (y, -1.0), (a, -2.0)], (z, -9.0)),
                vec![("\u{fffd}".to_owned(), -9.0), (key(x), -0.5), (key(y), -1.0), ("a".to_owned(), -2.0)],
            ),
            // It has a text of its own.
            (
                text([(a, -0.5), (x, -1.0), (y, -2.0)], (a, -0.5)),
                vec![("a".to_owned(), -0.5), ("\u{fffd}".to_owned(), -1.0), (key(y), -2.0)],
            ),
            // JSON has no infinity.
            (
                text([(a, -0.5), (x, f32::NEG_INFINITY), (y, f32::NEG_INFINITY)], (a, -0.5)),
                vec![("a".to_owned(), -0.5), ("\u{fffd}".to_owned(), -9999.0), (key(y), -9999.0)],
            ),
        ];
        for (found, right) in rows {
            let right: Map<String, Value> =
                right.into_iter().map(|(key, value)| (key, value.into())).collect();
            assert_eq!(found, Value::Object(right));
        }
    }
}
