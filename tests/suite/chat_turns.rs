//! Sampled turns: what a reader of tokens finds is what the turn was made of, wherever it is cut.

use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use rloss::chat::{Chat, ChatFormat, ProgramScanner, Texts, ToolForm, TurnReader, call_json};
use rloss::random::{Purpose, stream};
use serde_json::{Value, json};

/// Turns of each form. A build without optimisation reads fewer.
const TURNS: usize = if cfg!(debug_assertions) { 2_000 } else { 34_000 };

/// Texts that a parser may mistake for its own marks.
const TEXTS: [&str; 16] = [
    "",
    "plain",
    "end it with </tool_call> please",
    "begin with <tool_call>",
    "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
    "}} ]] {{ \"",
    "\\\" \\\\",
    "é 😀 数学 ١٢٣",
    "two\nlines",
    "```python\nprint(1)\n```",
    "<|im_end|>",
    "<|call|> <|end|>",
    "</think>",
    "<tool_response>7</tool_response>",
    "to=functions.f <|message|>{}",
    "&lt;tool_call&gt;",
];

/// A turn and what it says.
#[derive(Debug, Default)]
struct MadeTurn {
    text: String,
    reasoning: Vec<String>,
    content: Vec<String>,
    /// Name and arguments of each call that can be read.
    calls: Vec<(String, Value)>,
}

/// Makes turns of one form.
type Form = fn(&mut ChaCha8Rng) -> MadeTurn;

const FORMS: [(ChatFormat, Form); 3] = [
    (ChatFormat::Harmony, harmony),
    (ChatFormat::ChatMl, |random| chatml(random, false)),
    (ChatFormat::ThinkingChatMl, |random| chatml(random, true)),
];

fn any_text<'t>(random: &mut ChaCha8Rng, refused: &[&str]) -> &'t str {
    loop {
        let text = TEXTS.choose(random).unwrap();
        if !refused.iter().any(|word| text.contains(word)) {
            return text;
        }
    }
}

fn any_arguments(random: &mut ChaCha8Rng, depth: usize) -> Value {
    match random.random_range(0..6) {
        0 => json!(any_text(random, &[])),
        1 => serde_json::from_str("98765432109876543210987").unwrap(),
        2 => json!(null),
        3 if depth < 3 => {
            json!([any_arguments(random, depth + 1), any_arguments(random, depth + 1)])
        }
        _ if depth < 3 => json!({any_text(random, &[]): any_arguments(random, depth + 1), "b": 1}),
        _ => json!(-2.5),
    }
}

fn any_call(random: &mut ChaCha8Rng) -> (String, Value) {
    let name = ["add", "look_up", "f"].choose(random).unwrap();
    ((*name).to_owned(), json!({"a": any_arguments(random, 0)}))
}

fn chatml(random: &mut ChaCha8Rng, thinks: bool) -> MadeTurn {
    let mut turn = MadeTurn::default();
    let mut is_open = false;
    if thinks && random.random_bool(0.7) {
        let thought = any_text(random, &["</think>"]);
        turn.text = format!("<think>\n{thought}");
        // A call ends a thought that has no end tag, and a thought may quote a call.
        is_open = random.random_bool(0.2) && !thought.contains("<tool_call>");
        turn.reasoning.extend((!thought.is_empty()).then(|| thought.to_owned()));
        turn.text += if is_open { "\n" } else { "\n</think>\n\n" };
    }
    let mut first = true;
    for _ in 0..random.random_range(usize::from(is_open)..4) {
        if !is_open || !first {
            let text = any_text(random, &["tool_call", "</think>"]);
            turn.text += &format!("{text}\n");
            turn.content.push(text.to_owned());
        }
        first = false;
        let (name, arguments) = any_call(random);
        let call = json!({"name": name, "arguments": arguments}).to_string();
        turn.text += &format!("<tool_call>\n{call}\n");
        turn.calls.push((name, arguments));
        // A tag is missing.
        if random.random_bool(0.1) {
            if random.random_bool(0.5) {
                break;
            }
        } else {
            turn.text += "</tool_call>";
        }
        let is_after_tag = turn.text.ends_with("</tool_call>");
        if !is_after_tag {
            // The next call follows, or the end.
            if random.random_bool(0.5) {
                break;
            }
            let (name, arguments) = any_call(random);
            let call = json!({"name": name, "arguments": arguments}).to_string();
            turn.text += &format!("<tool_call>{call}</tool_call>");
            turn.calls.push((name, arguments));
        }
    }
    if turn.calls.is_empty() || turn.text.ends_with("</tool_call>") {
        let text = any_text(random, &["tool_call", "</think>"]);
        let broken = random.random_bool(0.1).then_some("<tool_call>\n{\"name\": 3\n</tool_call>");
        let alone = turn.calls.is_empty();
        turn.text += text;
        turn.content.push(text.to_owned());
        if let Some(broken) = broken {
            turn.text += broken;
            let shown = if alone { broken } else { "{\"name\": 3" };
            if alone && let Some(last) = turn.content.last_mut() {
                last.push_str(shown);
            } else {
                turn.content.push(shown.to_owned());
            }
        }
    }
    turn.text += ["<|im_end|>", "<|endoftext|>"].choose(random).unwrap();
    turn
}

fn harmony(random: &mut ChaCha8Rng) -> MadeTurn {
    let mut turn = MadeTurn::default();
    let control = ["<|"];
    let start = |turn: &mut MadeTurn| {
        if !turn.text.is_empty() {
            turn.text += "<|end|><|start|>assistant";
        }
    };
    for _ in 0..random.random_range(0..3) {
        start(&mut turn);
        let text = any_text(random, &control);
        match random.random_range(0..4) {
            0 => {
                // A header with free text costs its message alone.
                turn.text += &format!("<|channel|>analysis the user asks<|message|>{text}");
                turn.content.push(format!("<|channel|>analysis the user asks {text}"));
            }
            1 => {
                turn.text += &format!("<|channel|>commentary<|message|>{text}");
                turn.content.push(text.to_owned());
            }
            _ => {
                turn.text += &format!("<|channel|>analysis<|message|>{text}");
                turn.reasoning.push(text.to_owned());
            }
        }
    }
    start(&mut turn);
    if random.random_bool(0.5) {
        let text = any_text(random, &control);
        turn.text += &format!("<|channel|>final<|message|>{text}<|return|>");
        turn.content.push(text.to_owned());
        return turn;
    }
    let (name, arguments) = loop {
        let call = any_call(random);
        // A special token in a call makes it malformed only if it is one token.
        if !call.1.to_string().contains("<|") {
            break call;
        }
    };
    let header = [
        format!("<|channel|>commentary to=functions.{name} json"),
        format!(" to=functions.{name}<|channel|>commentary json"),
        format!("<|channel|>analysis to=functions.{name}"),
        format!("<|channel|>commentary to=functions.{name}<|channel|>commentary json"),
    ];
    let end = ["<|call|>", "<|return|>", "<|end|>"].choose(random).unwrap();
    turn.text += &format!("{}<|message|>{arguments}{end}", header.choose(random).unwrap());
    turn.calls.push((name, arguments));
    turn
}

/// The tokens of a turn. Its last mark is one token; a tag of ChatML is one token or spelled.
fn tokens(chat: &Chat, text: &str, random: &mut ChaCha8Rng) -> Vec<u32> {
    let vocabulary = chat.vocabulary();
    if matches!(chat, Chat::Harmony(_)) {
        return vocabulary.encode_with_special(text).unwrap();
    }
    let end = text.rfind("<|").unwrap();
    let spelled = |text: &str| -> Vec<u32> {
        text.bytes().map(|byte| vocabulary.vocab_size() as u32 - 256 + u32::from(byte)).collect()
    };
    let mut ids = if random.random_bool(0.5) {
        vocabulary.encode_text(&text[..end]).unwrap()
    } else {
        spelled(&text[..end])
    };
    ids.extend(vocabulary.encode_with_special(&text[end..]).unwrap());
    ids
}

/// Reading a turn from a stream agrees with what it was made of, at every cut.
#[test]
fn turns_are_read_from_a_stream_as_they_were_made() {
    for (number, (format, form)) in FORMS.into_iter().enumerate() {
        let chat = format.from_embedded().unwrap();
        let mut random = stream(79, Purpose::Sampling, &[number as u64]);
        let mut with_calls = 0;
        for _ in 0..TURNS {
            let turn = form(&mut random);
            let mut reader = TurnReader::chat(&chat, vec![]);
            let mut shown = Texts::default();
            let ids = tokens(&chat, &turn.text, &mut random);
            let (mut cut, mut is_over) = (0, false);
            for (index, &id) in ids.iter().enumerate() {
                is_over = reader.push(id);
                if index >= cut {
                    let now = reader.certain();
                    assert!(now.content.starts_with(&shown.content), "{shown:?} {now:?}: {turn:?}");
                    assert!(now.reasoning.starts_with(&shown.reasoning), "{shown:?} {now:?}: {turn:?}");
                    (shown, cut) = (now, index + random.random_range(1..40));
                }
                assert_eq!(is_over, index + 1 == ids.len(), "{turn:?}");
            }
            assert!(is_over, "{turn:?}");
            let calls: Vec<(String, Value)> = reader
                .calls()
                .iter()
                .map(|call| {
                    let function = call_json(call, String::new())["function"].take();
                    let arguments = function["arguments"].as_str().unwrap();
                    (function["name"].as_str().unwrap().to_owned(), serde_json::from_str(arguments).unwrap())
                })
                .collect();
            assert_eq!(calls, turn.calls, "{turn:?}");
            let reason = if turn.calls.is_empty() { "stop" } else { "tool_calls" };
            assert_eq!(reader.reason(), reason, "{turn:?}");
            let last = reader.last();
            let joined = |texts: &[String]| {
                texts
                    .iter()
                    .filter(|text| !text.is_empty())
                    .map(|text| &**text)
                    .collect::<Vec<_>>()
                    .join("\n")
            };
            assert_eq!(last.content.trim_end_matches('\n'), joined(&turn.content), "{turn:?}");
            assert_eq!(last.reasoning, joined(&turn.reasoning), "{turn:?}");
            assert!(last.content.starts_with(shown.content.trim_end()), "{shown:?} {last:?}: {turn:?}");
            with_calls += usize::from(!calls.is_empty());
        }
        assert!(with_calls * 3 > TURNS, "{with_calls}");
    }
}

/// The text of an answer with blocks, and the programs that close in it.
fn blocks(random: &mut ChaCha8Rng) -> (String, Vec<String>) {
    let (mut text, mut programs) = (String::new(), vec![]);
    let lines = ["print(1)", "x = '```'", "# é 数", "", "  y", "``", "if x: ```", "~~~"];
    for _ in 0..random.random_range(0..5) {
        let prose = ["so\n", "a ```python b\n", "``` `x` ```\n", "````` in `words`\n", "<code>1</code>\n"];
        text += prose.choose(random).unwrap();
        let marks = "`".repeat(random.random_range(3..6));
        let language =
            ["python", "py", "Python", "python3", "bash", "output", "", "pythonic"].choose(random).unwrap();
        let is_python = matches!(*language, "python" | "py" | "Python" | "python3");
        let mut code: String =
            (0..random.random_range(0..4)).map(|_| format!("{}\n", lines.choose(random).unwrap())).collect();
        if marks.len() > 3 && random.random_bool(0.5) {
            code += "```python\nnested\n```\n";
        }
        text += &format!("{marks}{language}\n{code}");
        if random.random_bool(0.1) {
            return (text, programs);
        }
        // A longer end closes too.
        text += &marks;
        text += ["\n", " \n", "`\n"].choose(random).unwrap();
        programs.extend(is_python.then_some(code));
    }
    (text, programs)
}

/// Exactly the closed blocks of Python run, wherever the text is cut into tokens.
#[test]
fn closed_programs_are_found_at_every_cut() {
    let mut random = stream(81, Purpose::Sampling, &[]);
    let mut found = 0;
    for _ in 0..10_000 {
        let (text, expected) = blocks(&mut random);
        let (mut scanner, mut programs, mut end) = (ProgramScanner::new(ToolForm::Fence), vec![], 0);
        while end < text.len() {
            end = text.len().min(end + random.random_range(1..8));
            programs.extend(scanner.read(Some(&text.as_bytes()[..end])));
        }
        assert_eq!(programs, expected, "{text}");
        found += programs.len();
    }
    assert!(found > 5_000, "{found}");
}
