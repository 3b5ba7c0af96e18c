//! Sampled turns of public reports: calls, content, reasoning and the reason of the end, as a client reads them.

use rloss::chat::{ChatFormat, Texts, TurnReader, call_json};
use serde::Deserialize;

/// What a client reads of a turn.
#[derive(Debug, PartialEq, Deserialize)]
struct ReadTurn {
    calls: Vec<String>,
    content: String,
    reasoning: String,
    reason: String,
}

fn read_turn(format: ChatFormat, text: &str) -> ReadTurn {
    let chat = format.from_embedded().unwrap();
    let mut reader = TurnReader::chat(&chat, vec![]);
    let ids = chat.vocabulary().encode_with_special(text).unwrap();
    let is_over = ids.into_iter().any(|id| reader.push(id));
    let Texts { content, reasoning } = reader.last();
    let call = |call| {
        let function = call_json(call, String::new())["function"].take();
        format!("{} {}", function["name"].as_str().unwrap(), function["arguments"].as_str().unwrap())
    };
    let calls = reader.calls().iter().map(call).collect();
    ReadTurn {
        calls,
        content,
        reasoning,
        reason: if is_over { reader.reason() } else { "length" }.to_owned(),
    }
}

/// A row of `tests/fixtures/chat_situations.jsonl`: a turn of a public report, and what is right by
/// `authority`.
#[derive(Deserialize)]
struct Situation {
    format: String,
    source: String,
    authority: String,
    turn: String,
    #[serde(flatten)]
    expected: ReadTurn,
}

#[test]
fn situations_of_public_reports_are_read() {
    let rows = include_str!("../fixtures/chat_situations.jsonl").lines();
    let rows: Vec<Situation> = rows.map(|row| serde_json::from_str(row).unwrap()).collect();
    assert_eq!(rows.len(), 37);
    for Situation { format, source, authority, turn, expected } in rows {
        let chat = match &*format {
            "chatml" => ChatFormat::ChatMl,
            "thinking_chatml" => ChatFormat::ThinkingChatMl,
            _ => ChatFormat::Harmony,
        };
        assert_eq!(read_turn(chat, &turn), expected, "{source} ({authority}): {turn}");
    }
}
