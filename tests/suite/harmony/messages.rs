//! Messages from files and settings, header fields, the training mask.

use super::*;
use rloss::error::BadInput;
use serde_json::{Value, json};

#[test]
fn header_fields_cannot_forge_headers() {
    let tokenizer = embedded();
    let tool = |name: &str| Message::tool(name, None, "x");
    for message in [
        tool("system"),
        tool("user:bob"),
        tool("python to=x"),
        tool(""),
        tool("<|end|>"),
        Message { name: None, ..tool("x") },
        Message::assistant("final code", "x"),
        Message::call("a\nb", "analysis", "x"),
        Message { content_type: Some("<|constrain|>json <|call|>".into()), ..Message::user("x") },
    ] {
        let error = tokenizer.render_message(&message).unwrap_err();
        assert!(
            error.downcast_ref::<BadInput>().is_some_and(|e| e.0.starts_with("message header: ")),
            "{error}"
        );
    }
    assert!(tokenizer.render_message(&tool("functions.lookup")).is_ok());
}

#[test]
fn training_mask_covers_what_the_assistant_samples() {
    let tokenizer = embedded();
    let messages = [
        Message::user("q"),
        Message::assistant("analysis", "t"),
        Message::call("python", "analysis", "1"),
        Message::tool("python", None, "1"),
        Message::assistant("final", "1"),
        Message::user("r"),
        Message::call("python", "commentary", "2"),
        Message::assistant("final", "2"),
    ];
    let rendered = tokenizer.render_conversation_for_training(&messages, RenderOptions::default()).unwrap();
    let mut shown = String::new();
    for (&token, &sampled) in rendered.tokens.iter().zip(&rendered.mask) {
        let text = tokenizer.decode(&[token]);
        shown += &if sampled { format!("[{text}]") } else { text };
    }
    let expected = "<|start|>user<|message|>q<|end|>\
        <|start|>assistant[<|channel|>][analysis][<|message|>][t][<|end|>]\
        [<|start|>][assistant][ to=python][<|channel|>][analysis][<|message|>][1][<|call|>]\
        <|start|>python to=assistant<|message|>1<|end|>\
        <|start|>assistant[<|channel|>][final][<|message|>][1][<|end|>]\
        <|start|>user<|message|>r<|end|>\
        <|start|>assistant[ to=python][<|channel|>][commentary][<|message|>][2][<|call|>]\
        <|start|>assistant[<|channel|>][final][<|message|>][2][<|return|>]";
    assert_eq!(shown, expected);
}

#[test]
fn system_settings_name_only_what_is_given() {
    assert_eq!(
        SystemSettings::default().message().content,
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    );
    let settings = SystemSettings {
        model_identity: Some("You are a test.".into()),
        knowledge_cutoff: Some("2024-06".into()),
        current_date: Some("2025-08-05".into()),
        reasoning_effort: Some(ReasoningEffort::Low),
        python_tool: Some("Runs code.".into()),
        function_tools: true,
    };
    let expected = "You are a test.\nKnowledge cutoff: 2024-06\nCurrent date: 2025-08-05\n\nReasoning: low\n\n# Tools\n\n\
        ## python\n\nRuns code.\n\n# Valid channels: analysis, commentary, final. Channel must be included for every \
        message.\nCalls to these tools must go to the commentary channel: 'functions'.";
    assert_eq!(settings.message().content, expected);
}

#[test]
fn messages_are_refused_with_their_place() {
    let refused = |messages: Value, part: &str| {
        let error = messages_from_json(&messages, "rows.jsonl: line 3").unwrap_err();
        let text = &error.downcast_ref::<BadInput>().unwrap().0;
        assert!(text.starts_with("rows.jsonl: line 3: ") && text.contains(part), "{text}");
    };
    refused(json!({}), "list");
    refused(json!([{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]), "message 2");
    refused(json!([{"role": "user", "content": 3}]), "content");
    refused(json!([{"role": "user", "content": "x", "tool_calls": []}]), "tool_calls");
    refused(json!([{"role": "user", "content": [{"type": "system_content"}]}]), "system message");
    let effort = json!([{"type": "system_content", "reasoning_effort": "extreme"}]);
    refused(json!([{"role": "system", "content": effort}]), "extreme");
}
