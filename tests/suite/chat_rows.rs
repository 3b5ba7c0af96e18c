//! Rows and requests as data libraries and clients write them: read as the clean row, or refused by name.

use rloss::chat::chatml::json_text;
use rloss::chat::{Chat, ChatFormat, ConversationSource, RequestMessages, SystemPromptSettings, read_tools};
use serde_json::{Value, json};

const FORMATS: [ChatFormat; 3] = [ChatFormat::Harmony, ChatFormat::ChatMl, ChatFormat::ThinkingChatMl];

fn tools(properties: Value) -> Value {
    let parameters = json!({"type": "object", "properties": properties});
    json!([{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}])
}

fn user() -> Value {
    json!({"role": "user", "content": "2+2?"})
}

fn answer(more: Value) -> Value {
    with(json!({"role": "assistant", "content": "4"}), more)
}

fn with(mut message: Value, more: Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        message[key] = value.clone();
    }
    message
}

/// A conversation with a call. `arguments` are those of the call.
fn called(arguments: Value, properties: Value) -> Value {
    let call = json!({"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}});
    json!({"messages": [user(), {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"}, answer(json!({}))], "tools": tools(properties)})
}

fn tokens(chat: &Chat, row: &Value) -> Result<(Vec<u32>, Vec<bool>), String> {
    let messages = chat.read_messages(row, &SystemPromptSettings::default(), false)?;
    let rendered = chat.render_training(&messages).map_err(|error| format!("{error:#}"))?;
    Ok((rendered.tokens, rendered.mask))
}

/// Source, the clean row, the row as it comes.
fn written_otherwise() -> Vec<(&'static str, Value, Value)> {
    let plain = json!({"messages": [user(), answer(json!({}))]});
    let number = json!({"a": {"type": "number"}});
    let call = called(json!({"a": 1}), number.clone());
    let no_arguments = called(json!({}), number.clone());
    let nulls = json!({"tool_calls": null, "name": null, "tool_call_id": null, "reasoning_content": null, "weight": null});
    let mut messages_with_nulls = call.clone();
    for message in messages_with_nulls["messages"].as_array_mut().unwrap() {
        for (key, value) in nulls.as_object().unwrap() {
            message.as_object_mut().unwrap().entry(key.clone()).or_insert(value.clone());
        }
    }
    let edit = |edit: &dyn Fn(&mut Value)| {
        let mut row = call.clone();
        edit(&mut row);
        row
    };
    let parts = |text: &str| json!([{"type": "text", "text": text}]);
    vec![
        (
            "TRL 5376",
            plain.clone(),
            json!({"messages": [with(user(), nulls.clone()), answer(nulls.clone())]}),
        ),
        ("TRL 5307", plain.clone(), with(plain.clone(), json!({"tools": null}))),
        ("prime-rl 3382", plain.clone(), with(plain.clone(), json!({"tools": "null"}))),
        ("OpenRLHF 1228", plain.clone(), with(plain.clone(), json!({"tools": []}))),
        ("prime-rl 885", call.clone(), edit(&|row| row["tools"] = row["tools"].to_string().into())),
        (
            "datasets: a list of texts",
            call.clone(),
            edit(&|row| row["tools"][0] = row["tools"][0].to_string().into()),
        ),
        ("prime-rl 885", call.clone(), called("{\"a\": 1}".into(), number.clone())),
        ("datasets: every key", call.clone(), messages_with_nulls),
        ("oumi 2392", call.clone(), edit(&|row| row["messages"][1]["content"] = Value::Null)),
        (
            "ms-swift 10110",
            call.clone(),
            called(json!({"a": 1}), json!({"a": {"type": "number", "enum": null}, "city": null})),
        ),
        (
            "ms-swift 10125",
            call.clone(),
            edit(&|row| row["tools"][0]["function"]["parameters"]["required"] = Value::Null),
        ),
        ("ms-swift 6467", call.clone(), called(json!({"a": 1, "city": null}), number.clone())),
        (
            "Arrow: null defaults",
            call.clone(),
            called(json!({"a": 1}), json!({"a": {"type": "number", "default": null, "enum": null}})),
        ),
        ("ai 3073", no_arguments.clone(), called(Value::Null, number.clone())),
        ("ai 3073", no_arguments.clone(), called("".into(), number.clone())),
        ("agent-chat-ui 21", no_arguments, called("{}".into(), number)),
        (
            "the function alone",
            call.clone(),
            edit(&|row| {
                row["messages"][1]["tool_calls"][0] = row["messages"][1]["tool_calls"][0]["function"].take()
            }),
        ),
        (
            "datasets: calls as a text",
            call.clone(),
            edit(&|row| {
                row["messages"][1]["tool_calls"] = row["messages"][1]["tool_calls"].to_string().into()
            }),
        ),
        (
            "a reply without an id",
            call.clone(),
            edit(&|row| drop(row["messages"][2].as_object_mut().unwrap().remove("tool_call_id"))),
        ),
        (
            "a reply by its name",
            call.clone(),
            edit(&|row| row["messages"][2] = json!({"role": "tool", "name": "add", "content": "4"})),
        ),
        (
            "OpenAI's older role",
            call.clone(),
            edit(&|row| row["messages"][2] = json!({"role": "function", "name": "add", "content": "4"})),
        ),
        (
            "openai-python's dump",
            plain.clone(),
            json!({"messages": [user(), answer(json!({"refusal": null, "annotations": [], "audio": null, "function_call": null}))]}),
        ),
        (
            "content as parts",
            plain.clone(),
            json!({"messages": [{"role": "user", "content": parts("2+2?")}, {"role": "assistant", "content": parts("4")}]}),
        ),
        ("a weight of 1", plain, json!({"messages": [user(), answer(json!({"weight": 1}))]})),
    ]
}

#[test]
fn rows_of_libraries_are_read_as_the_clean_row() {
    for format in FORMATS {
        let chat = format.from_embedded().unwrap();
        for (source, clean, row) in written_otherwise() {
            let expected = tokens(&chat, &clean).unwrap_or_else(|why| panic!("{source}: {why}"));
            assert_eq!(tokens(&chat, &row), Ok(expected), "{source} in {}: {row}", chat.name());
        }
    }
}

#[test]
fn what_would_be_lost_is_refused_with_key_and_remedy() {
    let chat = ChatFormat::ChatMl.from_embedded().unwrap();
    let one = |more: Value| json!({"messages": [user(), answer(more)]});
    for (source, row, words) in [
        ("a flag of loss", one(json!({"loss": false})), ["\"loss\"", "\"weight\": 0"]),
        ("axolotl's flag", one(json!({"train": false})), ["\"train\"", "\"weight\": 0"]),
        ("a prefix", one(json!({"prefix": true})), ["\"prefix\"", "remove it"]),
        ("a weight as a text", one(json!({"weight": "0"})), ["weight", "0 (no loss) or 1"]),
        ("half a weight", one(json!({"weight": 0.5})), ["weight", "0 (no loss) or 1"]),
        (
            "a user's weight",
            json!({"messages": [with(user(), json!({"weight": 0})), answer(json!({}))]}),
            ["weight", "assistant"],
        ),
        (
            "OpenAI's older calls",
            one(json!({"function_call": {"name": "add", "arguments": "{}"}})),
            ["function_call", "remove it"],
        ),
        (
            "Synaptic-Tuner 42",
            json!({"messages": [user(), {"role": "assistant", "content": null}]}),
            ["content", "write a text"],
        ),
        (
            "a reply without a call",
            json!({"messages": [user(), {"role": "tool", "content": "4"}, answer(json!({}))]}),
            ["message 2", "tool_call_id"],
        ),
        ("arguments of another kind", called(json!([1]), json!({})), ["\"add\"", "no JSON object"]),
        ("arguments that are no JSON", called("{\"a\": ".into(), json!({})), ["\"add\"", "not JSON"]),
        (
            "an image",
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, answer(json!({}))]}),
            ["message 1", "type is not \"text\""],
        ),
        (
            "ShareGPT's roles",
            json!({"messages": [{"role": "human", "content": "2+2?"}, answer(json!({}))]}),
            ["message 1", "\"human\""],
        ),
        (
            "tools that are no list",
            with(one(json!({})), json!({"tools": {"name": "add"}})),
            ["\"tools\"", "list"],
        ),
        (
            "a tool of no format",
            with(one(json!({})), json!({"tools": [{"name": "add"}]})),
            ["tool 0", "\"function\""],
        ),
    ] {
        let why = tokens(&chat, &row).unwrap_err();
        assert!(words.iter().all(|word| why.contains(word)), "{source}: {why}");
    }
    let harmony = ChatFormat::Harmony.from_embedded().unwrap();
    let own = json!({"messages": [user(), {"role": "assistant", "channel": "final", "content": "4"}]});
    let listed = with(own.clone(), json!({"tools": tools(json!({}))}));
    let text = with(own.clone(), json!({"tools": tools(json!({})).to_string()}));
    for row in [listed, text] {
        assert!(tokens(&harmony, &row).unwrap_err().contains("\"tools\""), "tools are never dropped");
    }
    assert_eq!(tokens(&harmony, &own), tokens(&harmony, &with(own.clone(), json!({"tools": "null"}))));
}

/// A row is trained as the server renders the same request.
#[test]
fn rows_have_the_prompts_of_the_server() {
    let system = json!({"role": "system", "content": "Be brief."});
    let mut with_system = called(json!({"a": 1}), json!({"a": {"type": "number"}}));
    with_system["messages"].as_array_mut().unwrap().insert(0, system.clone());
    let plain = json!({"messages": [system, user(), answer(json!({}))]});
    for format in FORMATS {
        let chat = format.from_embedded().unwrap();
        for row in [&with_system, &plain] {
            let list = row["messages"].as_array().unwrap();
            let tools = read_tools(&row["tools"]).unwrap();
            let settings = SystemPromptSettings::default();
            let before = &list[..list.len() - 1];
            let request =
                RequestMessages::read(before, &tools, &chat, settings, ConversationSource::Request).unwrap();
            let prompt = chat.render_prompt(&request.into_messages()).unwrap();
            let (trained, mask) = tokens(&chat, row).unwrap();
            assert_eq!(trained[..prompt.len()], prompt, "{}", chat.name());
            assert!(!mask[prompt.len() - 1] && mask[prompt.len()], "{}", chat.name());
        }
    }
}

/// A weight means its message alone, also between neighbours.
#[test]
fn bug_a_weight_of_zero_reached_the_neighbours_call() {
    let call = |weight: i64| {
        let call = json!({"type": "function", "function": {"name": "add", "arguments": {}}});
        json!({"role": "assistant", "content": "", "tool_calls": [call], "weight": weight})
    };
    for format in FORMATS {
        let chat = format.from_embedded().unwrap();
        let mask = |first, second| {
            let reply = json!({"role": "tool", "content": "1"});
            let row = json!({"messages": [user(), call(first), call(second), reply, reply], "tools": tools(json!({}))});
            tokens(&chat, &row).unwrap()
        };
        let (all, both) = mask(1, 1);
        let (_, first) = mask(1, 0);
        let (same, second) = mask(0, 1);
        assert_eq!(all, same);
        let count = |mask: &[bool]| mask.iter().filter(|&&trained| trained).count();
        assert!(count(&first) > 10 && count(&second) > 10, "{}", chat.name());
        assert_eq!(count(&first) + count(&second), count(&both), "{}", chat.name());
    }
}

/// Numbers keep their digits: in a call, a history, a schema (RFC 8259); Python's form where it has all of them.
#[test]
fn numbers_keep_their_digits() {
    let chats = FORMATS.map(|format| format.from_embedded().unwrap());
    for (given, written) in [
        ("98765432109876543210987", "98765432109876543210987"),
        ("2512292042121000001", "2512292042121000001"),
        ("18446744073709551616", "18446744073709551616"),
        ("-9007199254740993", "-9007199254740993"),
        ("0.1234567890123456789", "0.1234567890123456789"),
        ("2.50", "2.5"),
        ("1E2", "100.0"),
        ("1e-7", "1e-07"),
        ("-0", "-0"),
        ("-0.0", "-0.0"),
        ("1e400", "1e+400"),
        ("2000000000000000.0", "2000000000000000.0"),
    ] {
        let value: Value = serde_json::from_str(given).unwrap();
        assert_eq!(json_text(&value), written);
        for arguments in [json!({"a": value}), json!({"a": value}).to_string().into()] {
            let row = called(arguments, json!({"a": {"type": "number", "default": value}}));
            for chat in &chats {
                let text = chat.vocabulary().decode(&tokens(chat, &row).unwrap().0);
                assert!(text.contains(&format!("{{\"a\": {written}}}")), "{given}: {text}");
                assert!(text.matches(written).count() >= 2, "{given}: {text}");
            }
        }
    }
}
