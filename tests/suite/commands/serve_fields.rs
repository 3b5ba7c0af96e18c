//! Each field of a request is obeyed or refused: situations of public bug reports, and the page's table.

use super::serve::{CHAT, Server, TEXT, chat};
use super::*;
use Right::{Choices, Refused, Same, Tokens};

/// What must happen.
enum Right {
    /// The answer is the one without the field.
    Same,
    /// An answer with so many choices.
    Choices(usize),
    /// An answer of so many tokens at most.
    Tokens(u64),
    /// Status 400; the error names this field and has these words.
    Refused(&'static str, &'static str),
}

fn text(more: &Value) -> Value {
    let mut body = json!({"model": "quickstart", "prompt": "1+1", "seed": 5});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The body of a request with these fields.
fn body(path: &str, more: &Value) -> Value {
    if path == CHAT { chat(more) } else { text(more) }
}

/// Sends the fields of each row and checks what happens.
fn check(server: &Server, path: &str, rows: Vec<(Value, Right, &str)>) {
    let (status, plain) = server.post(path, &body(path, &json!({})));
    assert_eq!(status, 200, "{plain}");
    for (fields, right, source) in rows {
        let (status, answer) = server.post(path, &body(path, &fields));
        let told = format!("{source}: {fields}: {answer}");
        match right {
            Same => assert_eq!((status, &answer["choices"]), (200, &plain["choices"]), "{told}"),
            Choices(count) => {
                assert_eq!(
                    (status, answer["choices"].as_array().map(Vec::len)),
                    (200, Some(count)),
                    "{told}"
                );
            }
            Tokens(most) => {
                assert_eq!(status, 200, "{told}");
                assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() <= most, "{told}");
            }
            Refused(field, words) => {
                assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(field)), "{told}");
                assert!(answer["error"]["message"].as_str().unwrap().contains(words), "{told}");
            }
        }
    }
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}})
}

/// The authority is OpenAI's reference; where OpenAI has no such field, vLLM's protocol.
#[test]
fn situations_of_chats() {
    let schema = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}});
    let tools = json!([function("f")]);
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}});
    let named = json!({"type": "function", "function": {"name": "f"}});
    let usage = |options: Value| json!({"stream": true, "stream_options": options});
    let rows = vec![
        (json!({"temperatur": 0.9}), Refused("temperatur", "\"temperature\""), "turbo-fieldfare 168"),
        (json!({"max_token": 4}), Refused("max_token", "\"max_tokens\""), "turbo-fieldfare 168"),
        (json!({"made_up_field": [1, 2]}), Refused("made_up_field", "leave it out"), "turbo-fieldfare 168"),
        (json!({"made_up_field": null}), Same, "koboldcpp 1503"),
        (json!({"response_format": {"type": "json_object"}}), Refused("response_format", ""), "halogen 14"),
        (json!({"response_format": schema}), Refused("response_format", ""), "llama.cpp 24097"),
        (json!({"response_format": {"type": "no_format"}}), Refused("response_format", ""), "webai 191"),
        (json!({"response_format": "json"}), Refused("response_format", ""), "vLLM 11363"),
        (json!({"response_format": {"type": "text"}}), Same, "OpenAI's reference"),
        (json!({"parallel_tool_calls": "no"}), Refused("parallel_tool_calls", "true or false"), "vLLM 9451"),
        (json!({"parallel_tool_calls": null}), Same, "vLLM 26233"),
        (json!({"parallel_tool_calls": true}), Same, "vLLM 26233"),
        (json!({"parallel_function_calls": false}), Refused("parallel_function_calls", ""), "Qwen3 1092"),
        (json!({"functions": [{"name": "f"}]}), Refused("functions", ""), "OrcaRouter-Lite 131"),
        (json!({"function_call": {"name": "f"}}), Refused("function_call", ""), "OrcaRouter-Lite 131"),
        (json!({"function_call": "none"}), Refused("function_call", ""), "openai-python's types"),
        (json!({"tools": [], "tool_choice": "required"}), Refused("tool_choice", ""), "vLLM 21052"),
        (json!({"tools": null, "tool_choice": null}), Same, "notebook-intelligence 55"),
        (json!({"tools": null, "tool_choice": "auto"}), Same, "LiteLLM 6228"),
        (json!({"tools": tools, "tool_choice": allowed}), Refused("tool_choice", ""), "agent-framework 5309"),
        (json!({"tools": tools, "tool_choice": named}), Refused("tool_choice", ""), "beeai 1221"),
        (json!({"tools": tools, "tool_choice": "f"}), Refused("tool_choice", ""), "LangChain 16767"),
        (json!({"tools": tools, "tool_choice": "none"}), Same, "OpenAI's reference"),
        (json!({"max_tokens": null}), Same, "llama-gpt 113, vLLM 852"),
        (json!({"max_tokens": -1}), Refused("max_tokens", "from 1"), "eternal-zoo 14"),
        (json!({"max_tokens": 0}), Refused("max_tokens", "from 1"), "promptflow 1333"),
        (json!({"max_tokens": 100_000_000}), Refused("max_tokens", "maximum"), "modular 6673"),
        (json!({"max_completion_tokens": 3}), Tokens(3), "ik_llama.cpp 2321"),
        (json!({"max_tokens": 3, "max_completion_tokens": 3}), Tokens(3), "TGI 2925"),
        (
            json!({"max_tokens": 3, "max_completion_tokens": 5}),
            Refused("max_tokens", "contradict"),
            "tt 2953",
        ),
        (json!({"max_gen_toks": 8}), Refused("max_gen_toks", ""), "tt 2953"),
        (json!({"seed": u64::MAX}), Refused("seed", "whole number"), "vLLM 57018"),
        (json!({"seed": "100"}), Refused("seed", "whole number"), "SGLang 28960"),
        (json!({"seed": -1}), Choices(1), "triton 8822"),
        (json!({"seed": i64::MAX}), Choices(1), "openai-python 3922"),
        (json!({"seed": null}), Choices(1), "koboldcpp 1503"),
        (json!({"temperature": null, "top_p": null, "n": null}), Same, "koboldcpp 1503"),
        (json!({"stop": []}), Same, "Ollama 3629"),
        (json!({"stop": null}), Same, "Ollama 3629"),
        (json!({"stop": ["", ""]}), Same, "MLC 2070"),
        (json!({"stop": ["a", 1]}), Refused("stop", ""), "FastChat 1923"),
        (json!({"stream_options": {"include_usage": true}}), Refused("stream_options", ""), "LiteLLM 5803"),
        (json!({"stream": false, "stream_options": null}), Same, "LiteLLM 5803"),
        (usage(json!({"include_usage": "yes"})), Refused("include_usage", ""), "MTPLX 191"),
        (usage(json!({"usage": true})), Refused("stream_options", "\"usage\""), "MTPLX 191"),
        (usage(json!({"continuous_usage_stats": true})), Refused("stream_options", ""), "vLLM's protocol"),
        (
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            Refused("chat_template_kwargs", ""),
            "SGLang 28454",
        ),
        (json!({"chat_template_kwargs": {}}), Same, "vLLM's protocol"),
        (json!({"reasoning_effort": "none"}), Refused("reasoning_effort", ""), "FreeToken 2"),
        (json!({"reasoning": {"effort": "high"}}), Refused("reasoning", ""), "GLM-4.5 112"),
        (json!({"logprobs": 5}), Refused("logprobs", "true or false"), "ocp 470"),
        (json!({"logprobs": true, "top_logprobs": 21}), Refused("top_logprobs", "20"), "OpenAI's reference"),
        (json!({"logprobs": true, "top_logprobs": -1}), Refused("top_logprobs", ""), "vLLM's protocol"),
        (json!({"skip_special_tokens": false}), Refused("skip_special_tokens", "give true"), "vLLM 2947"),
        (json!({"ignore_eos": true}), Refused("ignore_eos", ""), "modular 6673"),
        (json!({"user": "cdc1", "store": true, "metadata": {"a": "b"}}), Same, "minimind 29"),
        (json!({"logit_bias": {"1": -100}}), Refused("logit_bias", "give {}"), "MTPLX 191"),
        (json!({"logit_bias": {}}), Same, "MTPLX 191"),
        (json!({"n": 3}), Choices(3), "ocp 470"),
        (json!({"n": 2.5}), Refused("n", "whole number"), "ocp 470"),
        (json!({"presence_penalty": 0, "frequency_penalty": 0.0}), Same, "vLLM's protocol"),
        (json!({"presence_penalty": "0"}), Refused("presence_penalty", ""), "OpenAI's reference"),
        (json!({"stop_token_ids": [4_000_000_000u32]}), Refused("stop_token_ids", "vocabulary"), "vLLM 2538"),
        (json!({"prompt": "1"}), Refused("prompt", ""), "OpenAI's reference"),
        (json!({"extra_body": {"top_k": 5}}), Refused("extra_body", ""), "vLLM 10463"),
    ];
    check(&Server::start(&[]), CHAT, rows);
}

#[test]
fn situations_of_completions() {
    let rows = vec![
        (json!({"max_completion_tokens": 2}), Tokens(2), "GuideLLM 269"),
        (json!({"best_of": 1}), Same, "openai-python's types"),
        (json!({"best_of": 2, "n": 2}), Choices(2), "OpenAI's reference"),
        (json!({"best_of": 4}), Refused("best_of", "give n"), "vLLM's protocol"),
        (json!({"n": 2, "best_of": 1}), Refused("best_of", ""), "OpenAI's reference"),
        (json!({"suffix": "", "user": "u"}), Same, "vLLM's protocol"),
        (json!({"suffix": "end"}), Refused("suffix", ""), "vLLM's protocol"),
        (json!({"logprobs": true}), Refused("logprobs", "whole number"), "mlx-examples 806"),
        (json!({"logprobs": 0}), Choices(1), "SGLang 2301"),
        (json!({"logprobs": 21}), Refused("logprobs", "20"), "vLLM 44504"),
        (json!({"top_logprobs": 5}), Refused("top_logprobs", ""), "vLLM 13881"),
        (json!({"max_tokens": 0}), Refused("max_tokens", "from 1"), "lm-eval 1903"),
        (json!({"max_tokens": 0, "echo": true, "logprobs": 1}), Tokens(0), "lm-eval 1903"),
        (json!({"messages": []}), Refused("messages", ""), "OpenAI's reference"),
        (json!({"reasoning_effort": "low"}), Refused("reasoning_effort", ""), "OpenAI's reference"),
        (json!({"prompt_logprobs": 1}), Refused("prompt_logprobs", ""), "vLLM's protocol"),
        (json!({"min_tokens": 0, "bad_words": [], "skip_special_tokens": true}), Same, "vLLM's protocol"),
        (json!({"min_tokens": 3}), Refused("min_tokens", ""), "vLLM's protocol"),
        (json!({"truncate_prompt_tokens": 2}), Refused("truncate_prompt_tokens", ""), "vLLM's protocol"),
    ];
    check(&Server::start(&[]), TEXT, rows);
}

/// SGLang 32290: of tokens with one text, all but one entry were lost.
#[test]
fn the_likeliest_tokens_are_as_many_as_asked_for() {
    let server = Server::start(&[]);
    for seed in 0..6 {
        let body = json!({"model": "quickstart", "prompt": "é€ 1", "max_tokens": 12, "logprobs": 8,
            "temperature": 3, "seed": seed, "echo": true});
        let (status, answer) = server.post(TEXT, &body);
        assert_eq!(status, 200, "{answer}");
        let scores = &answer["choices"][0]["logprobs"];
        let list = |name: &str| scores[name].as_array().unwrap().clone();
        let tokens = list("tokens").into_iter().zip(list("token_logprobs")).zip(list("top_logprobs"));
        assert!(tokens.len() > 6);
        for ((text, log_prob), top) in tokens.skip(1) {
            let top = top.as_object().unwrap();
            assert!([8, 9].contains(&top.len()), "{top:?}");
            assert_eq!(top[text.as_str().unwrap()], log_prob, "{top:?}");
        }
    }
}

/// The rows of the page's table: fields, paths, rule.
fn table() -> Vec<(Vec<String>, Vec<&'static str>, String)> {
    let page = in_repository("docs/SERVING.md");
    let page = text_of(page);
    let (_, section) = page.split_once("## Fields").unwrap();
    let lines = section.split("\n## ").next().unwrap().lines().filter(|line| line.starts_with("| `"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let names = cells[1].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let paths = match cells[2] {
            "both" => vec![CHAT, TEXT],
            "chat" => vec![CHAT],
            _ => vec![TEXT],
        };
        (names, paths, cells[3].to_owned())
    };
    lines.map(row).collect()
}

/// What the page says of a field happens, for each field and each form.
#[test]
fn the_table_of_the_page_is_true() {
    let server = Server::start(&[]);
    let (mut obeyed, mut ignored, mut refused) = (0, 0, 0);
    for path in [CHAT, TEXT] {
        let mut rows = vec![];
        for (name, rule) in table()
            .into_iter()
            .filter(|(_, paths, _)| paths.contains(&path))
            .flat_map(|(names, _, rule)| names.into_iter().map(move |name| (name, rule.clone())))
        {
            let field: &'static str = name.clone().leak();
            let with = |value: Value| json!({ field: value });
            let strange = json!({"strange": 1});
            match rule.as_str() {
                // The server reads it: a wrong type is noticed.
                "obeyed" => {
                    obeyed += 1;
                    rows.push((with(strange), Refused(field, ""), "an object"));
                }
                "without meaning" => {
                    ignored += 1;
                    rows.push((with(strange), Same, "without meaning"));
                }
                rule => {
                    refused += 1;
                    rows.push((with(strange), Refused(field, "leave it out"), "refused"));
                    let neutral =
                        rule.strip_prefix("refused unless `").and_then(|rule| rule.strip_suffix('`'));
                    let neutral = neutral.map(|value| if value == "n" { "1" } else { value });
                    if let Some(value) = neutral {
                        rows.push((with(serde_json::from_str(value).unwrap()), Same, "neutral"));
                    }
                }
            }
            if !["model", "messages", "prompt", "seed"].contains(&field) {
                rows.push((with(Value::Null), Same, "null"));
            }
        }
        check(&server, path, rows);
    }
    assert!(obeyed > 35 && ignored > 25 && refused > 80, "{obeyed} {ignored} {refused}");
}
