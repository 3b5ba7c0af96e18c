//! Sampled turns of public reports: calls, content, reasoning and the reason of the end, as a client reads them.

use rloss::chat::{ChatFormat, Texts, TurnReader, call_json};

/// What a client reads of a turn.
#[derive(Debug, PartialEq)]
struct ReadTurn {
    calls: Vec<String>,
    content: String,
    reasoning: String,
    reason: &'static str,
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
    ReadTurn { calls, content, reasoning, reason: if is_over { reader.reason() } else { "length" } }
}

/// Situations of public reports: source, authority, turn, calls, content, reasoning, reason.
type Situation = (
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
    &'static str,
    &'static str,
);

const CHATML: &[Situation] = &[
    (
        "vLLM 45167",
        "RFC 8259",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x </tool_call> y\"}}\n</tool_call><|im_end|>",
        &["f {\"a\": \"x </tool_call> y\"}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "vLLM 48353",
        "RFC 8259",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"<tool_call>\"}}</tool_call><|im_end|>",
        &["f {\"a\": \"<tool_call>\"}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "vLLM 18791",
        "vLLM's parser",
        "先算一下。\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"参数\"}}\n</tool_call><|im_end|>",
        &["f {\"a\": \"参数\"}"],
        "先算一下。",
        "",
        "tool_calls",
    ),
    (
        "vLLM 28806",
        "Qwen's template",
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call><|im_end|>",
        &["now {}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "ATOM 1427",
        "ATOM's parser",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}<|im_end|>",
        &["f {}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "localharness 104",
        "Qwen's template",
        "<tool_call>{\"name\": \"f\", \"parameters\": {\"a\": 1}}</tool_call><|im_end|>",
        &[],
        "<tool_call>{\"name\": \"f\", \"parameters\": {\"a\": 1}}</tool_call>",
        "",
        "stop",
    ),
    (
        "odysseus 5887",
        "odysseus's parser",
        "<tool_call>{\"name\": \"f\", \"arguments\": 7}</tool_call><|im_end|>",
        &[],
        "<tool_call>{\"name\": \"f\", \"arguments\": 7}</tool_call>",
        "",
        "stop",
    ),
    (
        "SGLang 17894",
        "SGLang's parser",
        "a<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>b<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>c<|im_end|>",
        &["f {}", "g {}"],
        "a\nb\nc",
        "",
        "tool_calls",
    ),
    (
        "SGLang 30533",
        "SGLang's parser",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call><|endoftext|>",
        &["f {}", "g {}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "hermes-agent 1883",
        "this parser",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call><|im_end|>",
        &["f {\"a\": 1}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "pi 8943",
        "RFC 8259",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"id\": 98765432109876543210987}}</tool_call><|im_end|>",
        &["f {\"id\": 98765432109876543210987}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "the length limit",
        "vLLM's server",
        "so<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        &[],
        "so<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        "",
        "length",
    ),
    (
        "braces too many",
        "Python's json",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}}</tool_call><|im_end|>",
        &[],
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}}</tool_call>",
        "",
        "stop",
    ),
    (
        "one of two",
        "vLLM's server",
        "<tool_call>{1}</tool_call>\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><|im_end|>",
        &["f {}"],
        "{1}",
        "",
        "tool_calls",
    ),
    (
        "an empty answer",
        "OpenAI's API",
        "<tool_call></tool_call><|im_end|>",
        &[],
        "<tool_call></tool_call>",
        "",
        "stop",
    ),
];

const THINKING: &[Situation] = &[
    (
        "ds4 318",
        "vLLM's parser of Qwen3",
        "<think>\nI ask.\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><|im_end|>",
        &["f {}"],
        "",
        "I ask.",
        "tool_calls",
    ),
    (
        "a quoted call",
        "Qwen3's template",
        "<think>\nno <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n</think>\n\n7<|im_end|>",
        &[],
        "7",
        "no <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
        "stop",
    ),
    ("SGLang 33154", "vLLM's parser of Qwen3", "<think>\nIt is 7.<|im_end|>", &[], "", "It is 7.", "stop"),
    ("renderers 137", "Qwen3's template", "It is 7.</think>\n\n7<|im_end|>", &[], "7", "It is 7.", "stop"),
    (
        "an end tag in a call",
        "RFC 8259",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"</think>\"}}</tool_call><|im_end|>",
        &["f {\"a\": \"</think>\"}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "a call after a thought",
        "Qwen3's template",
        "<think>\nx\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>",
        &["f {}"],
        "",
        "x",
        "tool_calls",
    ),
    (
        "dify 221",
        "this parser",
        "<think>\nnot <tool_call> yet<|im_end|>",
        &[],
        "",
        "not <tool_call> yet",
        "stop",
    ),
];

const HARMONY: &[Situation] = &[
    (
        "SGLang 10576",
        "openai-harmony",
        " to=functions.f<|channel|>commentary json<|message|>{}<|return|>",
        &["f {}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "SGLang 10576",
        "openai-harmony",
        "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
        &["f {}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "harmony 38",
        "openai-harmony, lenient",
        "<|channel|>final––commentary x<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
        &[],
        "a\n7",
        "",
        "stop",
    ),
    (
        "vLLM 51977",
        "openai-harmony",
        "<|channel|>commentary json to=functions.web-browsing<|message|>{}<|call|>",
        &["web-browsing {}"],
        "",
        "",
        "tool_calls",
    ),
    (
        "llama.cpp 27720",
        "openai-harmony, lenient",
        "<|channel|>commentary?<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
        &[],
        "a\n7",
        "",
        "stop",
    ),
    (
        "llama.cpp 27720",
        "openai-harmony, lenient",
        "<|channel|>commentary to=assistant<|channel|>commentary?<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
        &[],
        "<|channel|>commentary to=assistant<|channel|>commentary? a\n7",
        "",
        "stop",
    ),
    (
        "llama.cpp 27720",
        "openai-harmony, lenient",
        "<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
        &[],
        "7",
        "hm",
        "stop",
    ),
    (
        "llama.cpp 15181",
        "llama.cpp's parser",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        &["f {}"],
        "First.",
        "",
        "tool_calls",
    ),
    (
        "imp 1719",
        "vLLM's server",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"city\":",
        &[],
        "{\"city\":",
        "hm",
        "length",
    ),
    (
        "an empty call",
        "OpenAI's API",
        "<|channel|>commentary to=functions.f<|message|> <|call|>",
        &[],
        "to=functions.f",
        "",
        "stop",
    ),
    (
        "a call without a recipient",
        "openai-harmony",
        "<|channel|>commentary<|message|>{}<|call|>",
        &[],
        "{}",
        "",
        "stop",
    ),
    ("harmony 60", "this parser", "<|channel|>final<|message|>7<|end|>and", &[], "7\na", "", "stop"),
    (
        "tiles 145",
        "this parser",
        "<|channel|>analysis<|message|>hm<|end|><|start|>bash<|message|>ls<|end|>",
        &[],
        "bash ls",
        "hm",
        "stop",
    ),
    (
        "to the assistant",
        "openai-harmony",
        "<|channel|>final to=assistant<|message|>7<|return|>",
        &[],
        "7",
        "",
        "stop",
    ),
    (
        "mlxcel 658",
        "RFC 8259",
        " to=functions.f<|channel|>commentary json<|message|>{\n  \"a\": [1, {}]\n}<|call|>",
        &["f {\n  \"a\": [1, {}]\n}"],
        "",
        "",
        "tool_calls",
    ),
];

#[test]
fn situations_of_public_reports_are_read() {
    for (format, situations) in
        [(ChatFormat::ChatMl, CHATML), (ChatFormat::ThinkingChatMl, THINKING), (ChatFormat::Harmony, HARMONY)]
    {
        for (source, authority, text, calls, content, reasoning, reason) in situations {
            let expected = ReadTurn {
                calls: calls.iter().map(|&call| call.to_owned()).collect(),
                content: (*content).to_owned(),
                reasoning: (*reasoning).to_owned(),
                reason,
            };
            assert_eq!(read_turn(format, text), expected, "{source} ({authority}): {text}");
        }
    }
}
