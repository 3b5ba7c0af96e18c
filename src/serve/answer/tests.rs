use super::*;
use crate::chat::ChatFormat;
use std::cell::Cell;

/// A source whose tokens the test hands over itself.
#[derive(Default)]
struct Source {
    has_ended: Cell<bool>,
}

impl SampleSource for Source {
    fn id(&self) -> String {
        "id".to_owned()
    }

    fn next(&self, _wait: Duration) -> Result<Option<(usize, Event)>, ApiError> {
        Ok(None)
    }

    fn end(&self, _index: usize) {
        self.has_ended.set(true);
    }
}

/// The answer to a chat in which the model samples `text`: as a whole and as a stream, the number of its
/// tokens, and whether the sample was ended before the model ended its turn.
fn answer(format: ChatFormat, text: &str, parallel_calls: bool) -> (Value, Vec<Value>, usize, bool) {
    let chat = format.from_embedded().unwrap();
    let head = AnswerHead { chat: &chat, model: "m".into(), version: 0, created: 0 };
    let report = Reporting {
        form: Form::Chat,
        token_ids: true,
        log_probs: None,
        stream_usage: false,
        echo: false,
        parallel_calls,
    };
    let prompts = vec![(vec![0], None)];
    let mut answer = Answer::new(head, prompts, 1, vec![TurnReader::chat(&chat, vec![])], report);
    let (source, mut deltas) = (Source::default(), vec![]);
    for id in chat.vocabulary().encode_with_special(text).unwrap() {
        if answer.choices[0].finish.is_some() {
            break;
        }
        let token = NewToken { id, log_prob: 0.0, kept: None, scores: None };
        answer.take(&source, 0, Event::Token(token));
        if let Some(chunk) = answer.next_chunk(0, "id") {
            deltas.push(chunk["choices"][0]["delta"].clone());
        }
    }
    let tokens = answer.choices[0].tokens.len();
    let stop = chat.stop_tokens().contains(&answer.choices[0].tokens[tokens - 1].id);
    (answer.choice(0, "id"), deltas, tokens, source.has_ended.get() && !stop)
}

fn call(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

/// vLLM 9451 and 26233, SGLang 9696: `parallel_tool_calls: false` was accepted, and several calls came.
#[test]
fn without_parallel_calls_an_answer_ends_after_its_first_call() {
    let (a, b) = (call("a", "{\"x\": 1}"), call("b", "{}"));
    let quoted = call("a", "{\"x\": \"</tool_call> and more\"}");
    let thought = format!("<think>\nI could write {a}\n</think>\n\n");
    let (plain, thinking) = (ChatFormat::ChatMl, ChatFormat::ThinkingChatMl);
    // The format, the text, names without parallel calls, names with them, whether the sample is cut short.
    type Row = (ChatFormat, String, &'static [&'static str], &'static [&'static str], bool);
    let rows: [Row; 8] = [
        (plain, format!("{a}\n{b}<|im_end|>"), &["a"], &["a", "b"], true),
        (plain, format!("Two calls.\n{a}\n{b}\n{b}<|im_end|>"), &["a"], &["a", "b", "b"], true),
        (plain, format!("{a}<|im_end|>"), &["a"], &["a"], true),
        (plain, "<tool_call>\n{1}\n</tool_call><|im_end|>".to_owned(), &[], &[], false),
        (plain, format!("<tool_call>\n{{1}}\n</tool_call>\n{b}\n{a}<|im_end|>"), &["b"], &["b", "a"], true),
        (thinking, format!("{thought}{b}\n{a}<|im_end|>"), &["b"], &["b", "a"], true),
        (thinking, format!("{thought}7<|im_end|>"), &[], &[], false),
        (
            ChatFormat::Harmony,
            " to=functions.a<|channel|>commentary json<|message|>{\"x\": \"</tool_call>\"}<|call|>"
                .to_owned(),
            &["a"],
            &["a"],
            false,
        ),
    ];
    for (format, text, one, all, is_cut) in rows {
        let (whole, deltas, tokens, cut) = answer(format, &text, false);
        let (usual, _, all_tokens, usual_cut) = answer(format, &text, true);
        let names = |choice: &Value| -> Vec<String> {
            let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
            calls.iter().map(|call| call["function"]["name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!((names(&whole), names(&usual)), (to_owned(one), to_owned(all)), "{text}");
        assert_eq!((cut, usual_cut, tokens < all_tokens), (is_cut, false, is_cut), "{text}");
        let streamed: usize =
            deltas.iter().map(|delta| delta["tool_calls"].as_array().map_or(0, Vec::len)).sum();
        assert_eq!(streamed, one.len(), "{text}");
        let reason = if one.is_empty() { "stop" } else { "tool_calls" };
        assert_eq!(whole["finish_reason"], reason, "{text}");
        assert_eq!(whole["token_ids"].as_array().unwrap().len(), tokens, "{text}");
    }
    // The end tag in an argument is no end of the call.
    let (whole, ..) = answer(plain, &format!("{quoted}\n{b}<|im_end|>"), false);
    let calls = whole["message"]["tool_calls"].as_array().map_or(0, Vec::len);
    assert!(calls <= 1, "{whole}");
}

fn to_owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}
