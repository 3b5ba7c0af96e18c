//! `rloss serve` as a client sees it, over bare HTTP; `scripts/serving.py check` has OpenAI's own client.

use super::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) struct Server {
    child: KilledOnDrop,
    address: String,
}

impl Server {
    /// Serves the quickstart's untrained model.
    pub(super) fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, None)
    }

    fn start_with(arguments: &[&str], token: Option<&str>) -> Self {
        let mut command = rloss();
        command.arg("serve").arg(quickstart()).args(["--port", "0", "--set", "parallel.threads=2"]);
        command.args(arguments);
        if let Some(token) = token {
            command.env("RLOSS_SERVE_TOKEN", token);
        }
        let (child, address) = KilledOnDrop::server(&mut command, "at http://");
        Self { child, address }
    }

    fn send(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    }

    /// Sends the body of a chat, whose answer is not awaited.
    fn send_chat(&self, body: &str) -> TcpStream {
        let (host, length) = (&self.address, body.len());
        self.send(&format!("POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n{body}"))
    }

    /// Sends a request with these headers; returns status, body.
    fn ask_with(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let stream = self
            .send(&format!("{method} {path} HTTP/1.1\r\n{headers}Content-Length: {length}\r\n\r\n{body}"));
        receive(stream)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        self.ask_with(method, path, &format!("Host: {}\r\n", self.address), body)
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.ask("POST", path, &body.to_string());
        (status, serde_json::from_str(&text).unwrap())
    }

    fn signal(&self) {
        // SAFETY: a plain system call on a process that this test started.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
    }
}

fn receive(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

pub(super) const CHAT: &str = "/v1/chat/completions";
pub(super) const TEXT: &str = "/v1/completions";

pub(super) fn chat(more: &Value) -> Value {
    let mut body =
        json!({"model": "quickstart", "messages": [{"role": "user", "content": "1+1"}], "seed": 5});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn an_answer_depends_on_the_request_alone() {
    let server = Server::start(&[]);
    let body = chat(
        &json!({"n": 3, "logprobs": true, "top_logprobs": 2, "return_token_ids": true, "max_tokens": 20}),
    );
    let answer = |body: &Value| {
        let (status, answer) = server.post(CHAT, body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"].clone()
    };
    let alone = answer(&body);
    assert_eq!(alone.as_array().unwrap().len(), 3);
    assert_ne!(alone[0]["token_ids"], alone[1]["token_ids"]);
    let beside = std::thread::scope(|scope| {
        let others = (0..8).map(|seed| {
            let other = chat(&json!({"seed": seed, "temperature": 0.5 + seed as f64 / 8.0}));
            scope.spawn(move || answer(&other))
        });
        let others: Vec<_> = others.collect();
        let beside = answer(&body);
        others.into_iter().for_each(|other| drop(other.join().unwrap()));
        beside
    });
    assert_eq!(alone, beside);
    for choice in alone.as_array().unwrap() {
        let tokens = choice["token_ids"].as_array().unwrap().len();
        assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), tokens);
    }
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let server = Server::start(&[]);
    for body in [
        chat(&json!({"max_tokens": 30, "return_token_ids": true})),
        chat(&json!({"max_completion_tokens": 30, "return_token_ids": true, "stop": ["1", "e"], "seed": 6})),
    ] {
        let (_, whole) = server.post(CHAT, &body);
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        streamed["stream_options"] = json!({"include_usage": true});
        let stream = server.send_chat(&streamed.to_string());
        let (status, text) = receive(stream);
        assert_eq!(status, 200, "{text}");
        let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(*events.last().unwrap(), "[DONE]");
        let chunks: Vec<Value> =
            events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        assert_eq!(chunks.last().unwrap()["usage"], whole["usage"]);
        let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
        let joined = |key: &str| -> String {
            choices.iter().filter_map(|choice| choice["delta"][key].as_str()).collect()
        };
        let message = &whole["choices"][0]["message"];
        assert_eq!(joined("content"), message["content"].as_str().unwrap_or_default());
        assert_eq!(joined("reasoning_content"), message["reasoning_content"].as_str().unwrap_or_default());
        let ids: Vec<&Value> =
            choices.iter().filter_map(|choice| choice["token_ids"].as_array()).flatten().collect();
        assert_eq!(ids, whole["choices"][0]["token_ids"].as_array().unwrap().iter().collect::<Vec<_>>());
        let last = choices.iter().rev().find(|choice| choice["finish_reason"].is_string()).unwrap();
        assert_eq!(last["finish_reason"], whole["choices"][0]["finish_reason"]);
    }
}

#[test]
fn an_echoed_prompt_has_the_log_probs_of_its_own_sampling() {
    let server = Server::start(&[]);
    let body = json!({"model": "quickstart", "prompt": "What is 1+1?", "max_tokens": 12, "logprobs": 1, "seed": 3,
        "temperature": 1, "ignore_eos": true, "return_token_ids": true});
    let (status, sampled) = server.post(TEXT, &body);
    assert_eq!(status, 200, "{sampled}");
    let ids = |name: &str| sampled["choices"][0][name].as_array().unwrap().clone();
    let tokens = [ids("prompt_token_ids"), ids("token_ids")].concat();
    let scored =
        json!({"model": "quickstart", "prompt": [tokens], "max_tokens": 0, "logprobs": 1, "echo": true});
    let (status, scored) = server.post(TEXT, &scored);
    assert_eq!(status, 200, "{scored}");
    let log_probs =
        |answer: &Value| answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone();
    let (sampled, scored) = (log_probs(&sampled), log_probs(&scored));
    assert_eq!((sampled.len(), scored.len()), (12, tokens.len()));
    assert!(scored[0].is_null());
    assert_eq!(scored[tokens.len() - 12..], sampled[..]);
}

#[test]
fn wrong_requests_get_openais_errors_and_the_server_lives() {
    let server = Server::start(&[]);
    let message = |content: &str| json!({"messages": [{"role": "user", "content": content}]});
    let many: Vec<Value> = (0..5000).map(|_| json!({"role": "user", "content": "1"})).collect();
    let cases = [
        (chat(&message(&"1+".repeat(4000))), 400, "context_length_exceeded"),
        (chat(&json!({"messages": many})), 400, "context_length_exceeded"),
        (chat(&json!({"max_tokens": 100_000})), 400, "context_length_exceeded"),
        (chat(&json!({"model": "gpt-4"})), 404, "model_not_found"),
        (chat(&json!({"messages": []})), 400, "messages"),
        (chat(&json!({"messages": [{"role": "king", "content": "1"}]})), 400, "king"),
        (chat(&json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})), 400, "content"),
        (chat(&json!({"temperature": "hot"})), 400, "temperature"),
        (chat(&json!({"n": 0})), 400, "\\\"n\\\""),
        (chat(&json!({"top_logprobs": 3})), 400, "top_logprobs"),
        (chat(&json!({"stop": [1]})), 400, "stop"),
        (chat(&json!({"tools": [{"type": "function"}]})), 400, "tools"),
        (chat(&json!({"tool_choice": "required"})), 400, "tool_choice"),
        (chat(&json!({"frequency_penalty": 0.5})), 400, "frequency_penalty"),
        (chat(&json!({"stream_options": {}})), 400, "stream_options"),
    ];
    for (body, status, word) in cases {
        let (found, answer) = server.post(CHAT, &body);
        assert_eq!(found, status, "{answer}");
        assert!(answer.to_string().contains(word) && answer["error"]["message"].is_string(), "{answer}");
    }
    for (body, word) in [
        (json!({"model": "quickstart", "prompt": []}), "prompt"),
        (json!({"model": "quickstart", "prompt": ""}), "prompt"),
        (json!({"model": "quickstart", "prompt": [1u64 << 40]}), "vocabulary"),
        (json!({"model": "quickstart", "prompt": {"a": 1}}), "prompt"),
        (json!({"model": "quickstart"}), "prompt"),
        (json!({"prompt": "1"}), "model"),
    ] {
        let (status, answer) = server.post(TEXT, &body);
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(word), "{answer}");
    }
    let host = format!("Host: {}\r\n", server.address);
    for (method, path, headers, body, status) in [
        ("POST", CHAT, host.clone(), "{\"model\": ", 400),
        ("POST", CHAT, host.clone(), "[]", 400),
        ("POST", CHAT, host.clone(), "\u{ff}", 400),
        ("GET", CHAT, host.clone(), "", 405),
        ("GET", "/v1/embeddings", host.clone(), "", 404),
        ("GET", "/v1/models/gpt-4", host.clone(), "", 404),
        ("GET", "/v1/models", "Host: example.org\r\n".to_owned(), "", 403),
        ("GET", "/v1/models", String::new(), "", 400),
        ("GET", "/v1/models", host.clone(), "{}", 400),
        ("GET", "/v1/models", format!("{host}Origin: http://example.org\r\n"), "", 403),
        ("GET", "/v1/models", host.clone(), "", 200),
        ("GET", "/v1/models/quickstart", host.clone(), "", 200),
        ("GET", "/health", host.clone(), "", 200),
    ] {
        let (found, text) = server.ask_with(method, path, &headers, body);
        assert_eq!(found, status, "{method} {path}: {text}");
        let is_error = serde_json::from_str::<Value>(&text).is_ok_and(|answer| answer["error"].is_object());
        assert_eq!(is_error, status != 200, "{text}");
    }
    // A body over the limit is refused by its length alone.
    let length = 1u64 << 40;
    let (status, text) =
        receive(server.send(&format!("POST {CHAT} HTTP/1.1\r\n{host}Content-Length: {length}\r\n\r\n")));
    assert_eq!(status, 413, "{text}");
    let chunks = "2\r\n{}\r\nzz\r\n";
    let head = format!("POST {CHAT} HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n");
    assert_eq!(receive(server.send(&format!("{head}{chunks}"))).0, 400);
    assert_eq!(server.ask("GET", "/metrics", "").0, 200);
}

#[test]
fn bugs_of_requests_at_the_limits() {
    let server = Server::start(&["--name", "org/a b"]);
    let body = |more: &Value| {
        let mut body = chat(more);
        body["model"] = "org/a b".into();
        body
    };
    // A temperature whose inverse is infinite ended the server.
    let answer = |temperature: f64| {
        let (status, answer) =
            server.post(CHAT, &body(&json!({"temperature": temperature, "max_tokens": 8})));
        assert_eq!(status, 200, "{answer}");
        answer["choices"].clone()
    };
    assert_eq!(answer(1e-40), answer(0.0));
    // A name with a slash or a space was not found, because clients encode these.
    let (status, model) = server.ask("GET", "/v1/models/org%2Fa%20b", "");
    assert_eq!(status, 200, "{model}");
    let context = serde_json::from_str::<Value>(&model).unwrap()["max_model_len"].as_u64().unwrap() as usize;
    // A small body took gigabytes before it was refused.
    let stops = vec!["x".repeat(1024); 16];
    let many = json!({"model": "org/a b", "prompt": vec!["a"; 1024], "n": 128, "stop": stops});
    let (status, refused) = server.post(TEXT, &many);
    assert_eq!((status, refused["error"]["message"].to_string().contains("131072 samples")), (400, true));
    let (status, refused) = server.post(CHAT, &body(&json!({"stop_token_ids": vec![0; 129]})));
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("stop_token_ids")));
    // A prompt that fills the context could not be scored.
    let score = |tokens: usize, more: u64| {
        let ids = vec![5; tokens];
        let model = "org/a b";
        let echo = json!({"model": model, "prompt": ids, "echo": true, "logprobs": 0, "max_tokens": more});
        server.post(TEXT, &echo)
    };
    let (status, scored) = score(context, 0);
    assert_eq!(status, 200, "{scored}");
    assert_eq!(scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), context);
    assert_eq!(score(context, 1).0, 400);
}

#[test]
fn a_body_in_chunks_is_read() {
    let server = Server::start(&[]);
    let body = chat(&json!({"max_tokens": 4})).to_string();
    let (a, b) = body.split_at(30);
    let stream = server.send(&format!(
        "POST {CHAT} HTTP/1.1\r\nHost: {}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{a}\r\n{:X};x=y\r\n{b}\r\n0\r\n\r\n",
        server.address,
        a.len(),
        b.len()
    ));
    assert_eq!(receive(stream).0, 200);
}

#[test]
fn tools_are_rendered_and_never_run() {
    let server = Server::start(&[]);
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]);
    let ask = |more: &Value| {
        let (status, answer) = server.post(CHAT, &chat(more));
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let none = ask(&json!({"max_tokens": 1}));
    let with = ask(&json!({"max_tokens": 1, "tools": tools}));
    assert!(with > none);
    assert_eq!(ask(&json!({"max_tokens": 1, "tools": tools, "tool_choice": "none"})), none);
    let history = json!({"max_tokens": 1, "messages": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": null, "refusal": null,
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]});
    assert!(ask(&history) > none);
}

#[test]
fn a_client_that_hangs_up_frees_its_samples() {
    let server = Server::start(&["--queue", "4"]);
    let body = chat(&json!({"n": 4, "stream": true})).to_string();
    for _ in 0..20 {
        let stream = server.send_chat(&body);
        drop(stream.shutdown(Shutdown::Both));
        // Half a request, and one that never ends.
        drop(server.send("POST / HTTP/1.1\r\nContent-Le"));
    }
    // On a busy machine, the server may read some of these requests late.
    let (status, answer) = loop {
        let (status, answer) = server.post(CHAT, &chat(&json!({"n": 4, "max_tokens": 2})));
        if status != 429 {
            break (status, answer);
        }
    };
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_full_queue_answers_429() {
    let server = Server::start(&["--queue", "2"]);
    // A request that never fits is not told to try again.
    let (status, answer) = server.post(CHAT, &chat(&json!({"n": 3})));
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("a larger --queue"), "{answer}");
    assert_eq!(server.post(CHAT, &chat(&json!({"n": 2}))).0, 200);
    let (ended, pair) = (AtomicBool::new(false), chat(&json!({"n": 2})));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                server.post(CHAT, &pair);
            }
        });
        let full = (0..1000).map(|_| server.post(CHAT, &pair)).find(|(status, _)| *status != 200);
        ended.store(true, Ordering::Relaxed);
        let (status, answer) = full.expect("the other thread's samples were never open");
        assert_eq!((status, &answer["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    });
}

#[test]
fn a_token_is_asked_for_where_one_is_set() {
    let server = Server::start_with(&[], Some("secret"));
    let host = format!("Host: {}\r\n", server.address);
    for (header, status) in
        [("", 401), ("Authorization: Bearer wrong\r\n", 401), ("Authorization: Bearer secret\r\n", 200)]
    {
        assert_eq!(
            server.ask_with("GET", "/v1/models", &format!("{host}{header}"), "").0,
            status,
            "{header}"
        );
    }
    assert_eq!(server.ask("GET", "/health", "").0, 200);
    refused(rloss().arg("serve").arg(quickstart()).args(["--address", "0.0.0.0"]), &["RLOSS_SERVE_TOKEN"]);
}

/// A body was read and kept before anyone looked at the token and the host. Here only the head is sent.
#[test]
fn bug_a_body_was_read_before_token_and_host_were_checked() {
    let server = Server::start_with(&[], Some("secret"));
    let (host, token) = (format!("Host: {}", server.address), "Authorization: Bearer secret");
    for (headers, status) in [
        (host.clone(), 401),
        (format!("{host}\r\nAuthorization: Bearer wrong"), 401),
        (format!("Host: example.org\r\n{token}"), 403),
        (format!("{host}\r\n{token}\r\nOrigin: http://example.org"), 403),
    ] {
        for framing in ["Content-Length: 4000000", "Transfer-Encoding: chunked"] {
            for path in [CHAT, "/health"] {
                let head = format!("POST {path} HTTP/1.1\r\n{headers}\r\n{framing}\r\n\r\n");
                assert_eq!(receive(server.send(&head)).0, status, "{head}");
            }
        }
    }
}

/// `+5` was the length of a chunk, and a second `Origin` and a space before a colon were taken.
#[test]
fn bug_requests_that_rfc_9112_forbids_were_answered() {
    let server = Server::start(&[]);
    let (host, body) = (format!("Host: {}", server.address), chat(&json!({"max_tokens": 4})).to_string());
    let (bytes, origin) = (body.len(), format!("Origin: http://{}", server.address));
    let whole = format!("Content-Length: {bytes}\r\n\r\n{body}");
    let chunked = |length: &str, end: &str| {
        format!("Transfer-Encoding: chunked\r\n\r\n{length}{bytes:x}\r\n{body}\r\n0\r\n{end}\r\n")
    };
    for (rest, status) in [
        (whole.clone(), 200),
        (format!("{origin}\r\n{whole}"), 200),
        (chunked("", ""), 200),
        (chunked("00", "A: b\r\n"), 200),
        (format!("{origin}\r\n{origin}\r\n{whole}"), 400),
        (whole.replace(':', " :"), 400),
        (format!("A: b\r\n c\r\n{whole}"), 400),
        (format!("A: b\nC: d\r\n{whole}"), 400),
        (format!("A: b\0\r\n{whole}"), 400),
        (format!("Content-Length: {bytes}\r\n{whole}"), 400),
        (format!("Transfer-Encoding: chunked\r\n{whole}"), 400),
        (format!("{host}\r\n{whole}"), 400),
        (chunked("+", ""), 400),
        (chunked("0x", ""), 400),
        (chunked(" ", ""), 400),
        (chunked("", "A : b\r\n"), 400),
    ] {
        let request = format!("POST {CHAT} HTTP/1.1\r\n{host}\r\n{rest}");
        assert_eq!(receive(server.send(&request)).0, status, "{request}");
    }
}

/// 24 clients with 4 MB of small objects took 5.8 GB, which the server kept.
#[test]
fn bug_small_objects_took_a_hundred_times_their_text() {
    let server = Server::start(&[]);
    let peak = || {
        let status = text_of(format!("/proc/{}/status", server.child.id()));
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() >> 10
    };
    let before = peak();
    let objects = |bytes: usize| format!("{{\"messages\": [{}0]}}", "{\"\":0},".repeat(bytes / 7));
    std::thread::scope(|scope| {
        for number in 0..24 {
            let (bytes, expected) = if number % 2 == 0 { (3_900_000, 413) } else { (200_000, 400) };
            let (server, objects) = (&server, objects(bytes));
            scope.spawn(move || assert_eq!(server.ask("POST", CHAT, &objects).0, expected));
        }
    });
    assert!(peak() < before + 192, "{before} MiB became {} MiB", peak());
    assert_eq!(server.post(CHAT, &chat(&json!({"max_tokens": 2}))).0, 200);
}

/// An answer's log-probabilities took a hundred times the memory of its tokens, without a limit.
#[test]
fn bug_the_memory_of_answers_had_no_limit() {
    let server = Server::start(&[]);
    let ask = |more: &Value| {
        let mut body = json!({"model": "quickstart", "prompt": ["1", "2"], "n": 128});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(TEXT, &body)
    };
    let (status, answer) = ask(&json!({"max_tokens": 72, "logprobs": 20}));
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("ask for fewer"), "{answer}");
    assert_eq!(ask(&json!({"max_tokens": 2})).0, 200);
}

#[test]
fn sigterm_finishes_open_answers() {
    let mut server = Server::start(&[]);
    let body = chat(&json!({"n": 8, "stream": true})).to_string();
    let stream = server.send_chat(&body);
    let mut first = [0; 1];
    stream.peek(&mut first).unwrap();
    server.signal();
    let (status, text) = receive(stream);
    assert_eq!(status, 200);
    assert!(text.contains("data: [DONE]"), "{text}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}
