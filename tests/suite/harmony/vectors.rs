//! Vectors, our own and outside ones: every text, rendering and parse of the Harmony data, token by token.

use super::vocabulary::forgeries;
use super::*;
use rand::Rng;
use rloss::random::{Purpose, stream};
use serde_json::{Value, json};

/// The rows of one kind with the vocabulary that their ids are of: our own, and the outside ones where
/// they are there.
fn sets(stem: &str) -> Vec<(data::Folder, HarmonyTokenizer, Vec<Value>)> {
    let sets = data::folders("harmony").into_iter().zip(vocabularies()).map(|(folder, (_, tokenizer))| {
        let rows = data::rows_of(&folder.path).into_iter().filter(|(file, _)| file == stem);
        let rows: Vec<Value> = rows.map(|(_, row)| row).collect();
        assert!(!rows.is_empty(), "no rows in {stem}.jsonl");
        (folder, tokenizer, rows)
    });
    sets.collect()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn text_of(file: &str) -> Option<String> {
    let folder = data::folder("harmony")?.join("test-data");
    Some(std::fs::read_to_string(folder.join(file)).unwrap())
}

#[test]
fn every_kind_of_row_is_known_to_the_vectors() {
    for (stem, _) in data::jsonl_rows("harmony") {
        assert!(
            ["text-tokens", "render-vectors", "parse-vectors"].contains(&stem.as_str()),
            "no test reads {stem}.jsonl"
        );
    }
}

#[test]
fn text_vectors_encode_and_decode() {
    for (folder, tokenizer, rows) in sets("text-tokens") {
        let texts = folder.path.join("test-data");
        let names = std::fs::read_dir(&texts).unwrap().map(|entry| entry.unwrap().file_name());
        let mut files: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        for row in &rows {
            let (name, text) = (row["name"].as_str().unwrap(), row["text"].as_str().unwrap());
            let file = if name.ends_with(".txt") { name.to_string() } else { format!("{name}.txt") };
            assert_eq!(std::fs::read_to_string(texts.join(&file)).unwrap(), text, "{name}");
            files.retain(|f| *f != file);
            let tokens = encode_with_special(&tokenizer, text);
            assert_eq!(tokens, ids(&row["tokens"]), "{name}");
            assert_eq!(tokenizer.decode(&tokens), text, "{name}");
        }
        assert!(files.is_empty(), "test-data without tokens: {files:?}");
        let sizes = (tokenizer.vocab_size(), tokenizer.control_tokens().constrain, tokenizer.pad_id());
        let expected = if folder.own { (439, 433, 431) } else { (201_088, 200_003, 199_999) };
        assert_eq!(sizes, (expected.0, Some(expected.1), Some(expected.2)));
    }
}

#[test]
fn render_vectors_give_the_same_tokens() {
    let options = RenderOptions::default();
    for (tokenizer, row) in
        sets("render-vectors").iter().flat_map(|(_, t, rows)| rows.iter().map(move |r| (t, r)))
    {
        let name = format!("{} {}", row["name"], row["mode"]);
        let messages = messages_from_json(&row["messages"], &name).unwrap();
        let tokens = match row["mode"].as_str().unwrap() {
            "render_conversation" => tokenizer.render_conversation(&messages, options).unwrap(),
            "render_conversation_for_training" => {
                let rendered = tokenizer.render_conversation_for_training(&messages, options).unwrap();
                assert_eq!(rendered.tokens.len(), rendered.mask.len());
                rendered.tokens
            }
            "render_conversation_for_completion" => {
                tokenizer.render_conversation_for_completion(&messages, Role::Assistant, options).unwrap()
            }
            mode => panic!("unknown mode {mode}"),
        };
        assert_eq!(tokenizer.decode(&tokens), row["text"].as_str().unwrap(), "{name}");
        assert_eq!(tokens, ids(&row["tokens"]), "{name}");
    }
}

#[test]
fn parse_vectors_give_the_same_messages_and_errors() {
    for (tokenizer, row) in
        sets("parse-vectors").iter().flat_map(|(_, t, rows)| rows.iter().map(move |r| (t, r)))
    {
        let tokens = ids(&row["tokens"]);
        let role = Role::from_name(row["role"].as_str().unwrap()).unwrap();
        for (key, mode) in [("strict", ParseMode::Strict), ("lenient", ParseMode::Lenient)] {
            let place = format!("{} {key}", row["text"]);
            let parsed = parse(tokenizer, role, mode, &tokens);
            match row[key].get("messages") {
                Some(expected) => {
                    assert_eq!(parsed.unwrap(), messages_from_json(expected, &place).unwrap(), "{place}")
                }
                None => assert!(row[key]["error"].is_string() && parsed.is_err(), "{place}: {parsed:?}"),
            }
        }
    }
}

/// Where the reference reads a well-formed turn, the tolerant parser reads the same.
#[test]
fn parse_vectors_read_tolerantly() {
    // The reference takes a lone content type for a recipient; here `final json` is a final answer of type
    // json.
    let lone_type = ["<|constrain|>json", "json"];
    let (mut agreed, mut malformed) = (0, 0);
    let sets = sets("parse-vectors");
    for (tokenizer, row) in sets.iter().flat_map(|(_, t, rows)| rows.iter().map(move |r| (t, r))) {
        let parsed = parse_completion(tokenizer, &ids(&row["tokens"]));
        let Some(expected) = row["strict"].get("messages") else {
            assert!(parsed.error.is_some(), "{}", row["text"]);
            malformed += 1;
            continue;
        };
        let mut expected = messages_from_json(expected, "").unwrap();
        for message in &mut expected {
            if message.recipient.as_deref().is_some_and(|name| lone_type.contains(&name)) {
                message.content_type = message.recipient.take();
            }
        }
        assert_eq!(parsed.messages, expected, "{}", row["text"]);
        agreed += 1;
    }
    let (agreed_min, malformed_min) = if sets.len() > 1 { (19, 10) } else { (6, 5) };
    assert!(agreed >= agreed_min && malformed >= malformed_min, "{agreed} {malformed}");
}

/// The token lists among the test data: what a model sampled, parsed strictly.
#[test]
fn sampled_token_vectors_parse() {
    let Some(tokenizer) = o200k() else { return };
    for (file, recipient) in
        [("test_simple_reasoning_response.txt", None), ("test_simple_tool_call.txt", Some("lookup_weather"))]
    {
        let Some(text) = text_of(file) else { return };
        let tokens: Vec<u32> = text.split_whitespace().map(|id| id.parse().unwrap()).collect();
        let messages = parse(tokenizer, Role::Assistant, ParseMode::Strict, &tokens).unwrap();
        assert_eq!(messages.len(), 2, "{file}: {messages:?}");
        assert_eq!(messages[0].channel.as_deref(), Some("analysis"));
        assert_eq!(messages[1].recipient.as_deref(), recipient);
    }
}

/// Texts among the test data that are read, not rendered: a turn with a tool's reply, and a reply alone.
#[test]
fn tool_reply_vectors_parse() {
    let Some(tokenizer) = o200k() else { return };
    let Some(text) = text_of("test_streamable_parser.txt") else { return };
    let tokens = encode_with_special(tokenizer, &text);
    let messages = parse(tokenizer, Role::Assistant, ParseMode::Strict, &tokens).unwrap();
    let query = "{\"query\": \"current US president July 2025\", \"topn\": 10, \"source\": \"news\"}";
    let call =
        Message { content_type: Some("code".into()), ..Message::call("browser.search", "commentary", query) };
    let reply = Message::tool("browser.search", Some("commentary"), "{\"result\": \"https://openai.com/\"}");
    assert_eq!(messages[0].channel.as_deref(), Some("analysis"));
    assert_eq!(messages[1..], [call.clone(), reply.clone()]);
    // The turn itself ends at the call; the reply behind it is not the assistant's.
    let mut parser = TurnParser::new(tokenizer);
    let over = tokens.iter().position(|&token| matches!(parser.push(token), TurnStep::Ended(_))).unwrap();
    assert_eq!(parser.call(), Some(&call));
    assert_eq!(tokens[over], tokenizer.control_tokens().call);

    let tokens = encode_with_special(tokenizer, &text_of("test_tool_response_parsing.txt").unwrap());
    let mut parser = StreamParser::new(tokenizer, None, ParseMode::Strict);
    tokens.iter().for_each(|&token| parser.push(token).unwrap());
    let parsed = parser.finish().unwrap();
    assert_eq!(parsed, [Message { content: format!("{} ", reply.content), ..reply }]);
}

fn prompt_text(tokenizer: &HarmonyTokenizer, messages: &[Message], auto_drop_analysis: bool) -> String {
    let options = RenderOptions { auto_drop_analysis };
    tokenizer
        .decode(&tokenizer.render_conversation_for_completion(messages, Role::Assistant, options).unwrap())
}

/// The rendered prompts among the test data, built from messages.
#[test]
fn conversation_vectors_render_from_messages() {
    let Some(tokenizer) = o200k() else { return };
    let settings = SystemSettings {
        model_identity: Some("You are ChatGPT, a large language model trained by OpenAI.".into()),
        knowledge_cutoff: Some("2024-06".into()),
        reasoning_effort: Some(ReasoningEffort::High),
        ..Default::default()
    };
    let developer = |text: &str| {
        let content = DeveloperContent { instructions: Some(text.into()), tools: None };
        Message::new(Role::Developer, content.text())
    };
    let capital = Message::user("What is the capital of the largest country in the world?");
    let simple = [settings.message(), developer("Answer the user's questions like a robot."), capital];
    let expected = text_of("test_simple_convo_high_effort.txt").unwrap();
    assert_eq!(prompt_text(tokenizer, &simple, false), expected.trim_end());

    let tools = json!({"functions": {"name": "functions", "tools": [
        {"name": "get_location", "description": "Gets the location of the user."},
        {"name": "get_current_weather", "description": "Gets the current weather in the provided location.",
         "parameters": {"type": "object", "required": ["location"], "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
            "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}}},
        {"name": "get_multiple_weathers",
         "description": "Gets the current weather in the provided list of locations.",
         "parameters": {"type": "object", "required": ["locations"], "properties": {
            "locations": {"type": "array", "items": {"type": "string"},
                "description": "List of city and state, e.g. [\"San Francisco, CA\", \"New York, NY\"]"},
            "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}}},
        {"name": "kitchensink", "description": "A function with various complex schemas.",
         "parameters": {"type": "object", "description": "params object", "properties": {
            "string": {"type": "string", "title": "STRING", "description": "A string",
                       "examples": ["hello", "world"]},
            "string_nullable": {"type": "string", "nullable": true, "description": "A nullable string",
                                "default": "the default"},
            "string_enum": {"type": "string", "enum": ["a", "b", "c"]},
            "oneof_string_or_number": {"description": "a oneof", "default": 20, "oneOf": [
                {"type": "string", "default": "default_string_in_oneof"},
                {"type": "number", "description": "numbers can happen too"}]}}}}]}});
    let system = json!({"type": "system_content", "model_identity": settings.model_identity,
        "knowledge_cutoff": "2024-06", "conversation_start_date": "2025-06-28", "reasoning_effort": "High",
        "channel_config": {"valid_channels": ["analysis", "commentary", "final"], "channel_required": true}});
    let conversation = json!([
        {"role": "system", "content": [system]},
        {"role": "developer", "content": [{"type": "developer_content",
            "instructions": "Always respond in riddles", "tools": tools}]},
        {"role": "user", "content": "What is the weather like in SF?"}]);
    let messages = messages_from_json(&conversation, "test").unwrap();
    let expected = text_of("test_render_functions_with_parameters.txt").unwrap();
    assert_eq!(prompt_text(tokenizer, &messages, false), expected.trim_end());
}

#[test]
fn dropped_analysis_vectors() {
    let Some(tokenizer) = o200k() else { return };
    let expect = |file: &str, messages: &[Message], drop: bool| {
        assert_eq!(prompt_text(tokenizer, messages, drop), text_of(file).unwrap().trim_end(), "{file}");
    };
    let sums = [
        Message::user("What is 2 + 2?"),
        Message::assistant("analysis", "User asks a simple question: \"What is 2 + 2?\" The answer: 4."),
        Message::assistant("final", "2 + 2 equals 4."),
        Message::user("What about 9 / 2?"),
    ];
    expect("test_dropping_cot_by_default.txt", &sums, true);
    expect("test_preserve_cot.txt", &sums, false);

    let call = Message {
        content_type: Some("<|constrain|>json".into()),
        ..Message::call("functions.lookup_weather", "commentary", "{\"location\": \"San Francisco\"}")
    };
    let mut reply =
        Message::tool("functions.lookup_weather", None, "{\"temperature\": 20, \"description\": \"sunny\"}");
    reply.recipient = None;
    let analysis = "User asks: “What is the weather in SF?” We need to use lookup_weather tool.";
    let ongoing =
        [Message::user("What is the weather in SF?"), Message::assistant("analysis", analysis), call, reply];
    expect("test_does_not_drop_if_ongoing_analysis.txt", &ongoing, true);

    let between = [
        Message::user("What is 2 + 2?"),
        Message::assistant("analysis", "thinking 2+2"),
        Message::assistant("final", "4"),
        Message::user("What is 3 + 5?"),
        Message::assistant("analysis", "thinking 3+5"),
        Message::assistant("final", "8"),
    ];
    let options = RenderOptions { auto_drop_analysis: true };
    let tokens = tokenizer.render_conversation(&between, options).unwrap();
    assert_eq!(tokenizer.decode(&tokens), text_of("test_keep_analysis_between_finals.txt").unwrap());
}

#[test]
fn text_cannot_forge_control_tokens_of_the_o200k_vectors() {
    vocabularies().iter().for_each(|(_, tokenizer)| forgeries(tokenizer));
}

#[test]
fn o200k_vectors_round_trip_any_text() {
    for (_, tokenizer) in vocabularies() {
        let mut random = stream(7, Purpose::Demonstration, &[2]);
        for _ in 0..200 {
            let length = random.random_range(0..200);
            let text: String = (0..length).map(|_| random.random::<char>()).collect();
            let tokens = tokenizer.encode_text(&text).unwrap();
            assert_eq!(tokenizer.decode(&tokens), text);
            assert!(tokens.iter().all(|&id| !tokenizer.is_special(id)));
        }
        // A run of spaces on which a backtracking pattern may give up.
        let spaces = format!("{}x", " ".repeat(3_000_000));
        assert_eq!(tokenizer.decode(&tokenizer.encode_text(&spaces).unwrap()), spaces);
    }
}
