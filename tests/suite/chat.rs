//! Conversations in ChatML, and the chat templates of checkpoints.

use crate::cli::{assert_has, in_repository, text_of};
use crate::harmony::encode_with_special;
use crate::model_files::refused;
use minijinja::value::Kwargs;
use minijinja::{Environment, Value as Jinja};
use rloss::chat::ChatFormat;
use rloss::chat::chatml::{ChatMl, json_text, python_function, system_text};
use rloss::chat::functions::check_functions;
use rloss::chat::{Call, Chat, PYTHON, SystemPromptSettings, system_prompt};
use rloss::harmony::{HarmonyTokenizer, MaskedTokens, Message, Role, TurnEnd, TurnStep};
use serde_json::{Value, json};
use std::io::Read;

fn chatml() -> ChatMl {
    ChatMl::from_embedded().unwrap()
}

/// The conversations that `scripts/chat_templates.py chatml` made, with the texts that Qwen2.5-Instruct's
/// template gave.
fn conversations() -> Vec<Value> {
    let file = in_repository("tests/fixtures/chatml.jsonl");
    let text = text_of(file);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The conversation's tokens and text; a closed one is rendered to learn from, without the line break
/// behind it.
fn rendered(chat: &ChatMl, row: &Value, messages: &[Message]) -> (Vec<u32>, String) {
    let open = row["add_generation_prompt"] == true;
    let tokens = if open {
        chat.render_prompt(messages).unwrap()
    } else {
        chat.render_training(messages).unwrap().tokens
    };
    let text = chat.vocabulary().decode(&tokens);
    (
        tokens,
        if open {
            text
        } else {
            text + "
"
        },
    )
}

/// The messages of a row. `identity`: the identity instead of the family's.
fn read(chat: &ChatMl, row: &Value, identity: Option<&str>) -> Vec<Message> {
    let settings = SystemPromptSettings {
        model_identity: identity.map(str::to_owned),
        ..SystemPromptSettings::default()
    };
    let chat = Chat::ChatMl(chat.clone());
    let mut messages = chat.read_messages(row, &settings, false).unwrap();
    if messages.first().is_none_or(|first| first.role != Role::System) {
        messages.splice(..0, system_prompt(&chat, &settings, false, &[]));
    }
    messages
}

#[test]
fn fifty_conversations_are_rendered_as_qwens_template_does() {
    let (chat, rows) = (chatml(), conversations());
    assert_eq!(rows.len(), 50);
    for (i, row) in rows.iter().enumerate() {
        let messages = read(&chat, row, None);
        let (tokens, text) = rendered(&chat, row, &messages);
        assert_eq!(text, row["text"].as_str().unwrap(), "conversation {i}");
        // Control tokens that a text spells are ordinary text.
        let starts = tokens.iter().filter(|&&token| token == 1).count();
        let ends = tokens.iter().filter(|&&token| token == 2).count();
        assert_eq!(starts - ends, usize::from(row["add_generation_prompt"] == true), "conversation {i}");
        chat.check(&tokens).unwrap();
    }
    let count = |what: fn(&Value) -> bool| rows.iter().filter(|row| what(row)).count();
    assert!(
        count(|row| row["text"].as_str().unwrap().contains("</tool_call>\n<tool_call>")) > 9,
        "several calls"
    );
    assert!(count(|row| row["messages"][0]["role"] != "system") > 9, "no system message");
    assert!(count(|row| !row["tools"].as_array().unwrap().is_empty()) > 24, "tools");
}

/// The template as transformers would apply it.
fn by_template(chat: &Chat, context: &Value) -> String {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment
        .add_filter("tojson", |value: Jinja, _: Kwargs| json_text(&serde_json::to_value(value).unwrap()));
    environment.set_unknown_method_callback(text_method);
    environment.render_str(chat.jinja(), jinja(context)).unwrap()
}

/// The value with numbers of this template engine, which does not know numbers that keep their digits.
fn jinja(value: &Value) -> Jinja {
    match value {
        Value::Number(number) => match number.as_i64() {
            Some(number) => number.into(),
            None => number.as_f64().unwrap().into(),
        },
        Value::Array(list) => list.iter().map(jinja).collect(),
        Value::Object(map) => Jinja::from_iter(map.iter().map(|(key, value)| (key.clone(), jinja(value)))),
        other => Jinja::from_serialize(other),
    }
}

/// The methods of Python's strings that our templates call.
fn text_method(
    _: &minijinja::State,
    value: &Jinja,
    method: &str,
    arguments: &[Jinja],
) -> Result<Jinja, minijinja::Error> {
    let text = value.as_str().unwrap();
    let argument = arguments[0].as_str().unwrap();
    Ok(match (method, arguments.len()) {
        ("startswith", 1) => text.starts_with(argument).into(),
        ("endswith", 1) => text.ends_with(argument).into(),
        ("strip", 1) => text.trim_matches('\n').into(),
        ("lstrip", 1) => text.trim_start_matches('\n').into(),
        ("split", 1) => text.split(argument).map(Jinja::from).collect(),
        ("split", 2) => text.splitn(2, argument).map(Jinja::from).collect(),
        _ => panic!("{method} {arguments:?}"),
    })
}

#[test]
fn our_chatml_template_gives_our_rendering() {
    let chat = chatml();
    for (i, row) in conversations().iter().enumerate() {
        let messages = read(&chat, row, Some(""));
        let (_, text) = rendered(&chat, row, &messages);
        assert_eq!(text, by_template(&Chat::ChatMl(chat.clone()), row), "conversation {i}");
    }
}

#[test]
fn our_harmony_template_gives_our_rendering() {
    let tokenizer = HarmonyTokenizer::from_embedded().unwrap();
    let chat = Chat::Harmony(tokenizer.clone());
    let messages = [
        Message::new(Role::System, "You are a test.\n\nReasoning: low"),
        Message::new(Role::Developer, "# Instructions"),
        Message::user("How <|end|>?"),
        Message::call("python", "analysis", "7*12"),
        Message::tool("python", Some("analysis"), "84"),
        Message { content_type: Some("json".into()), ..Message::call("functions.f", "commentary", "{}") },
        Message::tool("functions.f", None, ""),
        Message::assistant("final", "84"),
    ];
    let text = by_template(&chat, &json!({"messages": messages, "add_generation_prompt": true}));
    let tokens = chat.render_prompt(&messages).unwrap();
    assert_eq!(tokenizer.decode(&tokens), text);
}

#[test]
fn the_embedded_chatml_vocabulary_is_fixed_and_harmonys_ids_stay() {
    let chat = chatml();
    let ids: Vec<u32> = chat.render_prompt(&[Message::user("7?")]).unwrap();
    assert_eq!(ids, [1, 6, 26, 71, 79, 2, 26, 1, 7, 26]);
    assert_eq!(chat.stop_tokens(), [2, 0]);
    assert_eq!((chat.vocabulary().vocab_size(), chat.vocabulary().pad_id()), (272, Some(0)));
    let call = chat.render_training(&[Message::call("python", "commentary", "\"")]).unwrap();
    assert_eq!(call.tokens, [1, 7, 26, 3, 26, 8, 108, 50, 9, 26, 4, 2]);
    assert_eq!(call.mask.iter().filter(|&&sampled| sampled).count(), 9);
    // What is read back from a checkpoint is the same vocabulary.
    let again = ChatMl::from_bytes(chat.vocabulary().json_bytes().to_vec(), "again").unwrap();
    assert_eq!(again.render_training(&[Message::call("python", "commentary", "\"")]).unwrap(), call);
    let harmony = HarmonyTokenizer::from_embedded().unwrap();
    assert_eq!(harmony.turn_start(Role::Assistant).unwrap(), [1, 8]);
    assert_eq!(harmony.encode_text("7").unwrap(), [71]);
}

/// The turn that `text` samples, control tokens recognised.
fn sampled(text: &str) -> (TurnStep, Vec<Call>, Vec<Message>) {
    let chat = chatml();
    let mut parser = chat.turn_parser();
    let mut step = TurnStep::Continues;
    for token in encode_with_special(chat.vocabulary(), text) {
        step = parser.push(token);
    }
    let calls = parser.calls.to_vec();
    (step, calls, parser.finish())
}

#[test]
fn turns_are_read_whatever_the_model_wrote() {
    let call = |code: &str| Message::call("python", "commentary", code);
    let text = |code: &str| {
        format!(
            "<tool_call>\n{{\"name\": \"python\", \"arguments\": {{\"code\": \"{code}\"}}}}\n</tool_call>"
        )
    };
    let over = TurnStep::Ended;

    let answer = sampled("84\n<|im_end|>");
    assert_eq!(answer, (over(TurnEnd::Returned), vec![], vec![Message::assistant("final", "84\n")]));
    assert_eq!(sampled("84<|endoftext|>").0, over(TurnEnd::Returned), "the other stop token");
    assert_eq!(sampled("8").2, [Message::assistant("final", "8")], "cut off");
    assert_eq!(sampled("").2, []);

    let one = sampled(&format!("Let me see.\n{}<|im_end|>", text("7*12")));
    assert_eq!(one.0, over(TurnEnd::Called));
    assert_eq!(one.1, [Call::Ready(call("7*12"))]);
    assert_eq!(one.2, [Message::assistant("commentary", "Let me see."), call("7*12")]);

    let (step, calls, messages) =
        sampled(&format!("{}\n<tool_call>{{oops\n{}<|im_end|>", text("1"), text("2")));
    assert_eq!(step, over(TurnEnd::Called), "one that can be read is answered beside one that cannot");
    assert!(
        matches!(&calls[..], [Call::Ready(_), Call::Malformed { recipient: None, .. }, Call::Ready(_)]),
        "{calls:?}"
    );
    assert_eq!(messages[1], Message::assistant("commentary", "{oops"));

    let before = sampled(&format!("<|im_start|>{}<|im_end|>", text("1")));
    assert_eq!(before.0, over(TurnEnd::Called), "a special token outside of a call costs no call");
    let broken = sampled("<tool_call>{\"name\": \"python\"}</tool_call><|im_end|>");
    assert_eq!(broken.0, over(TurnEnd::Malformed));
    // A role that begins inside a call is no call to run.
    let begun = sampled(&format!("{}<|im_end|>", text("1<|im_start|>")));
    assert_eq!(begun.0, over(TurnEnd::Malformed));
    let Call::Malformed { recipient, reply } = &begun.1[0] else { panic!("{begun:?}") };
    assert_eq!(
        (recipient.as_deref(), &**reply),
        (Some("python"), "Error: the call contains special tokens.")
    );
}

#[test]
fn what_was_rendered_is_read_back() {
    let chat = chatml();
    let turn = [
        Message::assistant("commentary", "First:"),
        Message::call("python", "commentary", "print(\"é\\n\")\n\t# <tool_response>"),
        Message::call("weather", "commentary", "{\"city\": \"Ulm\", \"days\": 2}"),
    ];
    let written = chat.render_training(&turn).unwrap();
    let mut parser = chat.turn_parser();
    let sampled = written.tokens.iter().zip(&written.mask).filter(|(_, sampled)| **sampled);
    let steps: Vec<TurnStep> = sampled.map(|(&token, _)| parser.push(token)).collect();
    assert_eq!(steps.last(), Some(&TurnStep::Ended(TurnEnd::Called)));
    assert_eq!(parser.finish(), turn);
}

#[test]
fn what_follows_a_turn_continues_the_conversation() {
    let chat = chatml();
    let messages = |end: usize| {
        let all = [
            Message::user("7*12?"),
            Message::call("python", "commentary", "7*12"),
            Message::call("python", "commentary", "oops"),
            Message::tool("python", Some("commentary"), "84"),
            Message::tool("python", Some("commentary"), "NameError"),
        ];
        all[..end].to_vec()
    };
    let whole = chat.render_prompt(&messages(5)).unwrap();
    // The turn as sampled ends with its stop token; the line break behind it is inserted.
    let sampled = chat.render_training(&messages(3)).unwrap().tokens;
    let inserted = chat.render_continuation(&messages(5)[3..]).unwrap();
    assert_eq!([sampled, inserted].concat(), whole);
}

/// Two hundred prompts with drawn tools, as transformers rendered them by the published templates:
/// `scripts/chat_templates.py families`.
#[test]
fn prompts_with_tools_are_those_of_the_published_templates() {
    let thinking = Chat::ChatMl(ChatMl::from_embedded_with_thoughts().unwrap());
    let (chatml, harmony) =
        (Chat::ChatMl(chatml()), Chat::Harmony(HarmonyTokenizer::from_embedded().unwrap()));
    let rows = unpacked("tools.jsonl.gz");
    assert_eq!(rows.len(), 200);
    for (i, row) in rows.iter().enumerate() {
        let tools = row["tools"].as_array().unwrap();
        check_functions(tools).unwrap();
        let instructions = row["instructions"].as_str().map(str::to_owned);
        let user = Message::user(row["user"].as_str().unwrap());
        let prompt = |chat: &Chat, settings: &SystemPromptSettings| {
            let messages =
                [&system_prompt(chat, settings, false, tools)[..], std::slice::from_ref(&user)].concat();
            chat.render_prompt(&messages).unwrap()
        };
        let of_gpt_oss = SystemPromptSettings {
            current_date: Some("2026-01-02".into()),
            developer_instructions: instructions.clone(),
            ..Default::default()
        };
        let tokens = prompt(&harmony, &of_gpt_oss);
        assert_eq!(harmony.vocabulary().decode(&tokens), row["gpt-oss"].as_str().unwrap(), "row {i}");
        let of_qwen = SystemPromptSettings { model_identity: instructions.clone(), ..Default::default() };
        let tokens = prompt(&chatml, &of_qwen);
        let text = chatml.vocabulary().decode(&tokens);
        assert_eq!(text, row["qwen2.5"].as_str().unwrap(), "row {i}");
        // The tags that the template spells are single tokens.
        let tags = tokens.iter().filter(|&&token| token == 3 || token == 4).count();
        assert_eq!(tags, 4, "row {i}");
        // Qwen3's template makes up no identity.
        let text = thinking.vocabulary().decode(&prompt(&thinking, &of_qwen));
        assert_eq!(text, row["qwen3"].as_str().unwrap(), "row {i}");
    }
}

fn unpacked(name: &str) -> Vec<Value> {
    let file = in_repository("tests/fixtures").join(name);
    let mut text = String::new();
    flate2::read::GzDecoder::new(std::fs::File::open(file).unwrap()).read_to_string(&mut text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Two hundred conversations, as transformers rendered them by Qwen3's template:
/// `scripts/chat_templates.py families`.
#[test]
fn conversations_with_thoughts_are_those_of_qwen3s_template() {
    let rows = unpacked("thoughts.jsonl.gz");
    assert_eq!(rows.len(), 200);
    let chat = ChatMl::from_embedded_with_thoughts().unwrap();
    let mut shown = 0;
    for (i, row) in rows.iter().enumerate() {
        // The template's switch decides on prompts alone.
        let thinks = row["enable_thinking"] == true || row["add_generation_prompt"] == false;
        let chat = chat.clone().with_thinking(thinks);
        let messages = read(&chat, row, Some(""));
        let (tokens, text) = rendered(&chat, row, &messages);
        assert_eq!(text, row["text"].as_str().unwrap(), "conversation {i}");
        assert_eq!(text, by_template(&Chat::ChatMl(chat.clone()), row), "conversation {i}");
        let [opened, closed] = [5, 6].map(|tag| tokens.iter().filter(|&&token| token == tag).count());
        assert_eq!(opened, closed, "conversation {i}");
        shown += opened;
        chat.check(&tokens).unwrap();
    }
    assert!(shown > 100, "{shown}");
}

#[test]
fn thoughts_are_sampled_unless_thinking_is_off() {
    let chat = ChatMl::from_embedded_with_thoughts().unwrap();
    let thought = Message::assistant("analysis", "3*4");
    let turn = |thought: Option<&Message>| -> Vec<Message> {
        [Message::user("?")]
            .into_iter()
            .chain(thought.cloned())
            .chain([Message::assistant("final", "12")])
            .collect()
    };
    let sampled = |chat: &ChatMl, messages: &[Message]| {
        let MaskedTokens { tokens, mask } = chat.render_training(messages).unwrap();
        let sampled: Vec<u32> =
            tokens.iter().zip(&mask).filter(|(_, sampled)| **sampled).map(|(token, _)| *token).collect();
        (chat.vocabulary().decode(&sampled), sampled)
    };
    let off = chat.clone().with_thinking(false);
    let (text, tokens) = sampled(&chat, &turn(Some(&thought)));
    assert_eq!(text, "<think>\n3*4\n</think>\n\n12<|im_end|>");
    // What was rendered is read back.
    let mut parser = chat.turn_parser();
    let steps: Vec<TurnStep> = tokens.iter().map(|&token| parser.push(token)).collect();
    assert_eq!(steps.last(), Some(&TurnStep::Ended(TurnEnd::Returned)));
    assert_eq!(parser.finish(), turn(Some(&thought))[1..]);
    assert_eq!(sampled(&chat, &turn(None)).0, "<think>\n\n</think>\n\n12<|im_end|>");
    assert_eq!(sampled(&off, &turn(None)).0, "12<|im_end|>");
    assert_eq!(sampled(&off, &turn(Some(&thought))).0, text, "a thought that is there is learned");
    // Regression: a call on the channel of thoughts was rendered as one. And a demonstration's first turn had
    // no empty thought, so a model that learned from it made no call after one.
    let calls =
        [Message::user("?"), Message::call(PYTHON, "analysis", "3*4"), Message::tool(PYTHON, None, "12")];
    let calls = [&calls[..], &turn(None)[1..]].concat();
    let call =
        "<tool_call>\n{\"name\": \"python\", \"arguments\": {\"code\": \"3*4\"}}\n</tool_call><|im_end|>";
    assert_eq!(sampled(&off, &calls).0, format!("{call}12<|im_end|>"));
    assert_eq!(sampled(&chat, &calls).0, format!("{call}<think>\n\n</think>\n\n12<|im_end|>"));
    let MaskedTokens { tokens, mask } = off.render_training(&calls).unwrap();
    for end in 1..tokens.len() {
        if mask[end] && !mask[end - 1] {
            let before = off.vocabulary().decode(&tokens[..end]);
            assert!(before.ends_with("assistant\n<think>\n\n</think>\n\n"), "{before}");
        }
    }
    assert_eq!(
        tokens[..off.render_prompt(&calls[..1]).unwrap().len()],
        off.render_prompt(&calls[..1]).unwrap()
    );
    let prompt = off.render_prompt(&turn(None)[..1]).unwrap();
    assert!(chat.vocabulary().decode(&prompt).ends_with("assistant\n<think>\n\n</think>\n\n"));
    // A call inside an unfinished thought is none.
    let mut parser = chat.turn_parser();
    for token in encode_with_special(chat.vocabulary(), "<think>\n<tool_call>{}</tool_call><|im_end|>") {
        parser.push(token);
    }
    assert!(parser.calls.is_empty());
    assert_eq!(parser.finish(), [Message::assistant("analysis", "<tool_call>{}</tool_call>")]);
    let row = json!({"messages": [{"role": "assistant", "content": "", "reasoning_content": "x"}]});
    let error =
        Chat::ChatMl(chatml()).read_messages(&row, &SystemPromptSettings::default(), false).unwrap_err();
    assert!(error.contains("message 1: \"reasoning_content\""), "{error}");
}

#[test]
fn an_answer_without_a_channel_is_final_in_harmony() {
    let chat = Chat::Harmony(HarmonyTokenizer::from_embedded().unwrap());
    let row = |answer: Value| json!({"messages": [{"role": "user", "content": "2*3?"}, answer]});
    let tokens = |answer| {
        let messages = chat.read_messages(&row(answer), &SystemPromptSettings::default(), false).unwrap();
        chat.render_training(&messages).unwrap().tokens
    };
    let plain = tokens(json!({"role": "assistant", "content": "6"}));
    assert_eq!(plain, tokens(json!({"role": "assistant", "channel": "final", "content": "6"})));
    assert_ne!(plain, tokens(json!({"role": "assistant", "channel": "analysis", "content": "6"})));
    let call = json!({"role": "assistant", "recipient": "python", "content": "2*3"});
    let messages = chat.read_messages(&row(call), &SystemPromptSettings::default(), false).unwrap();
    assert_eq!(messages[1].channel.as_deref(), Some("commentary"));
}

#[test]
fn rows_that_are_no_conversation_are_told() {
    let chat = chatml();
    let encode = |text: &str| encode_with_special(chat.vocabulary(), text);
    for (text, word) in [
        ("x", "start token"),
        ("<|im_start|>narrator\nx<|im_end|>\n", "unknown role"),
        ("<|im_start|>user\nx<|im_start|>assistant\n", "within another"),
        ("<|im_start|>user\nx<|im_end|>between<|im_start|>assistant\n", "between two turns"),
    ] {
        let error = chat.check(&encode(text)).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
    for text in ["", "<|im_start|>", "<|im_start|>ass", "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nx"]
    {
        chat.check(&encode(text)).unwrap();
    }
}

#[test]
fn broken_rows_and_tokenizers_are_refused() {
    let chat = Chat::ChatMl(chatml());
    for (row, words) in [
        (json!({"messages": 3}), &["\"messages\""][..]),
        (json!({"messages": [{"role": "narrator"}]}), &["message 1", "narrator"]),
        (json!({"messages": [{"role": "user", "channel": "final"}]}), &["message 1", "channel"]),
        (
            json!({"messages": [{"role": "user", "tool_calls": [{"name": "f", "arguments": {}}]}]}),
            &["tool_calls", "user"],
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}),
            &["\"f\"", "not JSON"],
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"name": "python", "arguments": {"x": 1}}]}]}),
            &["code"],
        ),
        (json!({"messages": [], "tools": {}}), &["\"tools\""]),
    ] {
        let error = chat.read_messages(&row, &SystemPromptSettings::default(), false).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
    }
    let harmony = HarmonyTokenizer::from_embedded().unwrap().json_bytes().to_vec();
    let words = ["model/tokenizer.json", "<|im_start|>, <|im_end|>", "Qwen2.5"];
    refused(ChatMl::from_bytes(harmony, "model/tokenizer.json"), &words);
    let chatml = chatml().vocabulary().json_bytes().to_vec();
    refused(HarmonyTokenizer::from_bytes(chatml, "model/tokenizer.json"), &["<|message|>", "GPT-OSS"]);
}

#[test]
fn functions_are_listed_after_the_system_text() {
    assert_eq!(system_text(None, &[]), None);
    assert_eq!(system_text(Some("Be brief."), &[]).unwrap(), "Be brief.");
    let text = system_text(Some("Be brief."), &[python_function()]).unwrap();
    assert!(text.starts_with("Be brief.\n\n# Tools\n\nYou may call"), "{text}");
    assert_has(&text, &["\n<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"python\", "]);
    assert_eq!(ChatFormat::ChatMl.from_embedded().unwrap().stop_tokens(), [2, 0]);
}

#[test]
fn a_function_that_no_prompt_can_declare_is_refused() {
    let tool = |schema: Value| json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
    let check = |schema: Value| check_functions(tool(schema).as_array().unwrap());
    for right in [
        json!(null),
        json!({}),
        json!({"type": ["object", "null"], "properties": {"a": true, "b": {"$ref": "#/$defs/b"}}, "required": ["a"]}),
    ] {
        assert_eq!(check(right.clone()), Ok(()), "{right}");
    }
    for (wrong, reason) in [
        (json!([]), "`function.parameters` must be a JSON schema, an object"),
        (json!({"type": "array"}), "`function.parameters.type` must be \"object\""),
        (
            json!({"properties": {"a": "integer"}}),
            "`function.parameters.properties` must be an object of JSON schemas",
        ),
        (json!({"properties": []}), "`function.parameters.properties` must be an object of JSON schemas"),
        (json!({"required": true}), "`function.parameters.required` must be a list of names"),
    ] {
        assert_eq!(check(wrong.clone()), Err(format!("tool 0: {reason}")), "{wrong}");
    }
}
