//! `rloss serve --train` as a client sees it, over bare HTTP. `fixtures/tinker.jsonl` has what the unmodified SDK
//! sent (`scripts/tinker_sdk.py record`).

mod recorded;

use super::*;
use prost::Message;
use rloss::tinker::wire::{
    Chunk, Datum, EncodedText, F32, ForwardBackwardOutput, ForwardBackwardRequest, I64, SampleResponse,
    Tensor,
};
use rloss::trajectory::TrajectoryRow;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

const NAME: &str = "tiny";

struct Server {
    /// `None` for another client of a server.
    _child: Option<KilledOnDrop>,
    address: String,
    key: &'static str,
}

/// Status, content type and body of a response.
type Answer = (u16, String, Vec<u8>);

impl Server {
    /// Serves the quickstart's untrained model.
    fn start(store: &Path, arguments: &[&str]) -> Self {
        Self::of(&quickstart(), store, arguments)
    }

    fn of(model: &Path, store: &Path, arguments: &[&str]) -> Self {
        let mut command = rloss();
        command.arg("serve").arg(model).args(["--port", "0", "--set", "parallel.threads=2"]);
        command.args(["--name", NAME, "--train", "--store"]).arg(store).args(arguments);
        let (child, address) = KilledOnDrop::server(&mut command, "at http://");
        Self { _child: Some(child), address, key: "tml-a" }
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let (host, key, length) = (&self.address, self.key, body.len());
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {key}\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = vec![];
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(answer[..end].to_vec()).unwrap();
        let kind = head.lines().find_map(|line| line.strip_prefix("Content-Type: ")).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, kind.to_owned(), answer[end + 4..].to_vec())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, body) = self.ask("POST", &format!("/api/v1/{path}"), body.to_string().as_bytes());
        (status, serde_json::from_slice(&body).unwrap())
    }

    fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// Returns the text of a refusal.
    fn refused(&self, path: &str, body: &Value, status: u16) -> String {
        let (found, answer) = self.post(path, body);
        assert_eq!(found, status, "{path}: {answer}");
        answer["detail"].as_str().unwrap().to_owned()
    }

    /// Waits for a result.
    fn fetch(&self, request: &Value) -> Answer {
        let body = json!({"request_id": request["request_id"]}).to_string();
        loop {
            let answer = self.ask("POST", "/api/v1/retrieve_future", body.as_bytes());
            if answer.0 != 408 {
                return answer;
            }
        }
    }

    fn fetch_json(&self, request: &Value) -> Value {
        let (status, _, body) = self.fetch(request);
        assert_eq!(status, 200);
        serde_json::from_slice(&body).unwrap()
    }

    fn session(&self) -> String {
        self.ok("create_session", &json!({"tags": []}))["session_id"].as_str().unwrap().to_owned()
    }

    fn model(&self, session: &str, number: u64, seed: Option<u64>) -> Model<'_> {
        self.model_of("create_model", &create(session, number, seed))
    }

    /// The model that the request `body` makes.
    fn model_of(&self, path: &str, body: &Value) -> Model<'_> {
        let created = self.fetch_json(&self.ok(path, body));
        let id = created["model_id"].as_str().unwrap_or_else(|| panic!("no model: {created}"));
        Model { server: self, id: id.to_owned(), next: 1 }
    }
}

fn create(session: &str, number: u64, seed: Option<u64>) -> Value {
    let lora = json!({"rank": 4, "seed": seed});
    json!({"session_id": session, "model_seq_id": number, "base_model": NAME, "lora_config": lora})
}

/// A model, as its only client sees it.
struct Model<'s> {
    server: &'s Server,
    id: String,
    next: i64,
}

fn tensor(dtype: i32, values: &[f64]) -> Tensor {
    let dense = match dtype {
        F32 => values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&value| (value as i64).to_le_bytes()).collect(),
    };
    Tensor { dense: Some(dense), dtype, shape: vec![values.len() as i64], ..Tensor::default() }
}

fn datum(tokens: &[u32], inputs: &[(&str, &[f64])]) -> Datum {
    let targets: Vec<f64> = tokens[1..].iter().map(|&token| f64::from(token)).collect();
    let bytes = tokens[..tokens.len() - 1].iter().flat_map(|&token| (token as i32).to_le_bytes()).collect();
    let mut loss_fn_inputs = BTreeMap::from([("target_tokens".to_owned(), tensor(I64, &targets))]);
    loss_fn_inputs.extend(inputs.iter().map(|(name, values)| ((*name).to_owned(), tensor(F32, values))));
    Datum { model_input: vec![Chunk { encoded_text: Some(EncodedText { tokens: bytes }) }], loss_fn_inputs }
}

fn supervised(tokens: &[u32]) -> Datum {
    datum(tokens, &[("weights", &vec![1.0; tokens.len() - 1])])
}

impl Model<'_> {
    fn pass_at(&self, number: i64, data: Vec<Datum>, loss: &str, forward_only: bool) -> (u16, Value) {
        let request = ForwardBackwardRequest {
            model_id: self.id.clone(),
            seq_id: number as i32,
            data,
            loss_fn: loss.to_owned(),
            forward_only,
            ..ForwardBackwardRequest::default()
        };
        let (status, _, body) = self.server.ask("POST", "/api/v1/forward_backward", &request.encode_to_vec());
        (status, serde_json::from_slice(&body).unwrap())
    }

    fn pass(&mut self, data: Vec<Datum>, loss: &str, forward_only: bool) -> ForwardBackwardOutput {
        let (status, request) = self.pass_at(self.next, data, loss, forward_only);
        assert_eq!(status, 200, "{request}");
        self.next += 1;
        let (_, kind, body) = self.server.fetch(&request);
        assert_eq!(kind, "application/x-protobuf", "{}", String::from_utf8_lossy(&body));
        ForwardBackwardOutput::decode(&body[..]).unwrap()
    }

    /// Sends the next JSON request, and returns its result.
    fn next(&mut self, path: &str, mut body: Value) -> Value {
        body["model_id"] = json!(self.id);
        body["seq_id"] = json!(self.next);
        self.next += 1;
        self.server.fetch_json(&self.server.ok(path, &body))
    }

    fn step(&mut self, lr: f64) -> Value {
        self.next("optim_step", step_body(lr))
    }

    fn sampler(&mut self, number: u64) -> String {
        let made = self.next("save_weights_for_sampler", json!({"sampling_session_seq_id": number}));
        made["sampling_session_id"].as_str().unwrap().to_owned()
    }
}

fn step_body(lr: f64) -> Value {
    json!({"adam_params": {
        "learning_rate": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0,
    }})
}

fn sample_body(sampler: &str, number: u64, prompt: &[u32], seed: Option<u64>) -> Value {
    json!({
        "sampling_session_id": sampler, "seq_id": number, "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {"max_tokens": 12, "seed": seed, "stop": []},
    })
}

/// Tokens and log-probs of each sample.
fn samples(server: &Server, body: &Value) -> Vec<(Vec<u32>, Vec<f32>)> {
    let (_, kind, body) = server.fetch(&server.ok("asample", body));
    assert_eq!(kind, "application/x-protobuf", "{}", String::from_utf8_lossy(&body));
    let sequence = |sequence: &rloss::tinker::wire::SampledSequence| {
        let tokens = sequence.tokens.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        (tokens, floats(&sequence.logprobs))
    };
    SampleResponse::decode(&body[..]).unwrap().sequences.iter().map(sequence).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn log_probs(output: &ForwardBackwardOutput) -> Vec<f32> {
    output.loss_fn_outputs.iter().flat_map(|record| floats(&record.fields["logprobs"].data)).collect()
}

/// A short reinforcement of one client: losses, and what it sampled.
fn work(model: &mut Model, seed: Option<u64>) -> Vec<f64> {
    let mut found = vec![];
    for step in 0..3 {
        let sampler = model.sampler(step);
        let drawn = samples(model.server, &sample_body(&sampler, 0, &[5, 6, 7], seed));
        let data: Vec<Datum> = drawn
            .iter()
            .enumerate()
            .map(|(index, (tokens, log_probs))| {
                let tokens = [&[5, 6, 7], &tokens[..]].concat();
                let zeros = |values: Vec<f64>| [vec![0.0; 2], values].concat();
                let log_probs = zeros(log_probs.iter().map(|&value| f64::from(value)).collect());
                let advantages = zeros(vec![index as f64 - 1.0; tokens.len() - 3]);
                datum(&tokens, &[("logprobs", &log_probs), ("advantages", &advantages)])
            })
            .collect();
        let output = model.pass(data, "ppo", false);
        assert_eq!(output.metrics["mismatch:max"], 0.0, "a sample's bits are those of the forward pass");
        assert_eq!(output.metrics["mismatch_unknown_tokens:sum"], 0.0);
        assert!(output.metrics["mismatch_tokens:sum"] > 0.0);
        found.extend(log_probs(&output).into_iter().map(f64::from));
        found.push(model.step(1e-2)["metrics"]["optim/grad_norm"].as_f64().unwrap());
    }
    found
}

#[test]
fn a_client_beside_others_has_what_it_has_alone_with_and_without_seeds() {
    let store = TempDir::new().unwrap();
    let server = Server::start(store.path(), &["--adapters", "8"]);
    let run = |seed: Option<u64>| {
        let session = server.session();
        let found = work(&mut server.model(&session, 0, seed), seed);
        server.ok(&format!("sessions/{session}/finish"), &json!({"reason": {"type": "success"}}));
        found
    };
    let alone = [None, Some(1), Some(2)].map(run);
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
    std::thread::scope(|scope| {
        let beside: Vec<_> =
            (0..8).map(|i| scope.spawn(move || run([None, Some(1), Some(2)][i % 3]))).collect();
        for (i, found) in beside.into_iter().enumerate() {
            assert_eq!(found.join().unwrap(), alone[i % 3], "client {i}");
        }
    });
}

/// After a refused load every later request of the client waited for ever: its number was never answered.
#[test]
fn a_refused_load_is_a_failed_result_and_the_next_request_is_answered() {
    let store = TempDir::new().unwrap();
    let server = Server::start(store.path(), &[]);
    let mut model = server.model(&server.session(), 0, None);
    for path in ["tinker://nope/weights/x", "no path"] {
        let result = model.next("load_weights", json!({"path": path, "optimizer": false}));
        assert!(result["error"].as_str().is_some_and(|text| !text.is_empty()), "{result}");
    }
    model.pass(vec![supervised(&[5, 6, 7, 8])], "cross_entropy", false);
    assert!(model.step(1e-2)["metrics"]["optim/grad_norm"].as_f64().is_some_and(|norm| norm > 0.0));
    // Weights of another rank were loaded, and the rank that was told stayed.
    let saved = model.next("save_weights", json!({"path": "x"}))["path"].clone();
    let mut body = create(&server.session(), 0, None);
    body["lora_config"]["rank"] = json!(2);
    let mut other = server.model_of("create_model", &body);
    let result = other.next("load_weights", json!({"path": saved, "optimizer": false}));
    assert!(
        result["error"].as_str().is_some_and(|text| text.contains("has rank 4, and this model 2")),
        "{result}"
    );
}

/// The remedy named a value that changed nothing.
#[test]
fn the_remedy_of_a_plan_that_does_not_fit_fits() {
    let store = TempDir::new().unwrap();
    let sets = ["--set", "train.micro_batch_tokens=16777216"];
    let train = ["--port", "0", "--train", "--store"];
    let text = refused(rloss().arg("serve").arg(quickstart()).args(train).arg(store.path()).args(sets), &[]);
    let remedy = text.split("; add ").last().unwrap().trim().to_owned();
    assert!(remedy.starts_with("--set train.micro_batch_tokens="), "{text}");
    let added: Vec<&str> = sets.into_iter().chain(remedy.split(' ')).collect();
    let server = Server::start(store.path(), &added);
    server.session();
}

#[test]
fn what_was_answered_loads_after_a_kill_and_goes_on_bit_for_bit() {
    let store = TempDir::new().unwrap();
    let data = || vec![supervised(&[1, 2, 3, 4, 5]), supervised(&[9, 8, 7])];
    let server = Server::start(store.path(), &[]);
    let session = server.session();
    let mut model = server.model(&session, 0, Some(3));
    let losses = |model: &mut Model, steps: usize| -> Vec<f64> {
        let step = |_| {
            let loss = model.pass(data(), "cross_entropy", false).metrics["loss:sum"];
            model.step(1e-2);
            loss
        };
        (0..steps).map(step).collect()
    };
    losses(&mut model, 3);
    let saved = model.next("save_weights", json!({"path": "three"}))["path"].as_str().unwrap().to_owned();
    let sampler = model.next("save_weights_for_sampler", json!({"path": "three"}));
    let sampler = sampler["path"].as_str().unwrap().to_owned();
    let refusal = model.next("save_weights", json!({"path": "three"}));
    assert!(refusal["error"].as_str().unwrap().contains("overwrite"), "{refusal}");
    let expected = losses(&mut model, 3);
    let again = model.next("save_weights", json!({"path": "three", "overwrite": true}));
    assert_eq!(again["path"], json!(saved));
    let later = losses(&mut model, 2);
    drop(server);
    // The kill left a half-written folder.
    let half =
        store.path().join(saved.split('/').nth(2).unwrap().replace(':', "-")).join("weights/.x.partial");
    fs::create_dir_all(&half).unwrap();
    let server = Server::start(store.path(), &[]);
    assert!(!half.exists());
    let session = server.session();
    let load = |path: &str, number: u64, optimizer: bool| {
        let body =
            json!({"session_id": session, "model_seq_id": number, "path": path, "optimizer": optimizer});
        let request = server.ok("load_weights", &body);
        let loaded = server.fetch_json(&request);
        assert_eq!(loaded["path"], json!(path), "{loaded}");
        Model { server: &server, id: loaded["model_id"].as_str().unwrap().to_owned(), next: 1 }
    };
    assert_eq!(losses(&mut load(&saved, 0, true), 2), later);
    // The sampler's path has the weights after three steps.
    let mut third = load(&sampler, 1, false);
    assert_eq!(third.pass(data(), "cross_entropy", true).metrics["loss:sum"], expected[0]);
    let info = server.ok("weights_info", &json!({"tinker_path": saved}));
    assert_eq!((info["lora_rank"].clone(), info["base_model"].clone()), (json!(4), json!(NAME)));
    let other = Server { key: "tml-b", _child: None, address: server.address.clone() };
    assert!(other.refused("weights_info", &json!({"tinker_path": saved}), 404).contains("in this store"));
    let run = saved.split('/').nth(2).unwrap();
    // The report and the export read the store.
    let folder = store.path().join(run.replace(':', "-"));
    done(rloss().arg("report").arg(&folder));
    let page = text_of(folder.join("report.html"));
    assert!(page.contains("Loss of a client"));
    let out = store.path().join("peft");
    done(rloss().args(["export", &saved, "--store"]).arg(store.path()).arg("--out").arg(&out));
    let config: Value = serde_json::from_slice(&fs::read(out.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((config["r"].clone(), config["lora_alpha"].as_f64()), (json!(4), Some(32.0)));
    let whole = store.path().join("whole");
    done(
        rloss()
            .args(["export", &saved, "--merged", "--set", "checkpoint.dtype=f32", "--store"])
            .arg(store.path())
            .arg("--out")
            .arg(&whole),
    );
    assert!(whole.join("model.safetensors").is_file());
    // OpenAI's door samples from the path.
    let chat = json!({"model": sampler, "prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}).to_string();
    let (status, _, body) = server.ask("POST", "/v1/completions", chat.as_bytes());
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
    let path = format!("/api/v1/training_runs/{run}/checkpoints/weights/three");
    assert_eq!(server.ask("DELETE", &path, b"").0, 200);
    assert_eq!(server.ask("DELETE", &path, b"").0, 404);
    server.refused("weights_info", &json!({"tinker_path": saved}), 404);
}

#[test]
fn hostile_clients_get_a_clear_error_each_and_leave_the_server_as_it_was() {
    let store = TempDir::new().unwrap();
    let server = Server::start(store.path(), &["--adapters", "2"]);
    let session = server.session();
    let mut model = server.model(&session, 0, Some(1));
    let (status, _, body) = server.ask("POST", "/api/v1/forward_backward", &[0xff; 100]);
    assert_eq!(status, 400, "{}", String::from_utf8_lossy(&body));
    assert!(String::from_utf8_lossy(&body).contains("protobuf"));
    // A request that cannot be done fails in its turn, and leaves no hole.
    let failed = |model: &mut Model, data: Vec<Datum>, loss: &str| -> String {
        let (status, request) = model.pass_at(model.next, data, loss, false);
        assert_eq!(status, 200, "{request}");
        model.next += 1;
        let (_, kind, body) = model.server.fetch(&request);
        assert_eq!(kind, "application/json");
        let error: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(error["category"], json!("user"), "{error}");
        error["error"].as_str().unwrap().to_owned()
    };
    let good = || supervised(&[1, 2, 3]);
    assert!(failed(&mut model, vec![good()], "stable_reinforce").contains("importance_sampling"));
    assert!(failed(&mut model, vec![], "cross_entropy").contains("at least one"));
    assert!(failed(&mut model, vec![supervised(&[1, 2, 1 << 30])], "cross_entropy").contains("below"));
    assert!(failed(&mut model, vec![supervised(&[1 << 30, 2, 1])], "cross_entropy").contains("sequence 0"));
    assert!(failed(&mut model, vec![supervised(&vec![1; 100_000])], "cross_entropy").contains("maximum"));
    let mut huge = good();
    huge.loss_fn_inputs.get_mut("weights").unwrap().shape = vec![1 << 50, 1 << 50];
    assert!(failed(&mut model, vec![huge], "cross_entropy").contains("shape"));
    let far = datum(&[1, 2, 3], &[("logprobs", &[0.0, -1000.0]), ("advantages", &[0.0, 1.0])]);
    assert!(
        failed(&mut model, vec![far], "importance_sampling").contains("datum 0: target 1: its log-prob is")
    );
    let refusal = model.next("save_weights", json!({"path": "../../x"}));
    assert!(refusal["error"].as_str().unwrap().contains("not usable"), "{refusal}");
    let adam = json!({"learning_rate": -1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8});
    let refusal = model.next("optim_step", json!({"adam_params": adam}));
    assert!(refusal["error"].as_str().unwrap().contains("out of range"), "{refusal}");
    // The same number again is the same request; a former one whose result is gone, and one far ahead, are not.
    let number = model.next;
    let first = model.pass_at(number, vec![good()], "cross_entropy", true);
    assert_eq!(first, model.pass_at(number, vec![supervised(&[4, 5])], "cross_entropy", true));
    model.next += 1;
    let (status, _) = model.pass_at(1 << 20, vec![good()], "cross_entropy", true);
    assert_eq!(status, 400);
    // A thousand requests that come before their turn.
    let ahead: Vec<Value> =
        (1..=1000).map(|i| model.pass_at(model.next + i, vec![good()], "cross_entropy", true).1).collect();
    let (status, request) = model.pass_at(model.next, vec![good()], "cross_entropy", true);
    assert_eq!(status, 200, "{request}");
    let last = ForwardBackwardOutput::decode(&server.fetch(&ahead[999]).2[..]).unwrap();
    assert!(last.metrics["loss:sum"] > 0.0);
    // Another key sees nothing of it.
    let other = Server { key: "tml-b", _child: None, address: server.address.clone() };
    other.refused("get_info", &json!({"model_id": model.id}), 404);
    other.refused("retrieve_future", &json!({"request_id": request["request_id"]}), 404);
    assert!(other.refused("create_model", &create(&session, 1, None), 404).contains("session"));
    // Limits.
    server.model(&session, 1, None);
    assert!(server.refused("create_model", &create(&session, 2, None), 400).contains("--adapters"));
    let mut wrong = create(&session, 3, None);
    wrong["base_model"] = json!("other/model");
    assert!(server.refused("create_model", &wrong, 400).contains("tiny"));
    let path = "tinker://../../weights/x";
    let body = json!({"session_id": session, "model_seq_id": 9, "path": path, "optimizer": true});
    assert!(server.refused("load_weights", &body, 400).contains("tinker://RUN"));
    assert!(server.refused("asample", &json!({"num_samples": 1}), 400).contains("prompt"));
    let sampling = json!({"session_id": session, "sampling_session_seq_id": 7, "base_model": NAME});
    let sampler = server.ok("create_sampling_session", &sampling)["sampling_session_id"].clone();
    let sampler = sampler.as_str().unwrap();
    let mut body = sample_body(sampler, 0, &[1 << 30], None);
    assert!(server.refused("asample", &body, 400).contains("ids below"));
    body = sample_body(sampler, 0, &[1], None);
    body["sampling_params"]["max_tokens"] = json!(1u64 << 40);
    assert!(server.refused("asample", &body, 400).contains("maximum"));
    body["sampling_params"]["max_tokens"] = json!(4);
    body["num_samples"] = json!(1u64 << 40);
    assert!(server.refused("asample", &body, 400).contains("num_samples"));
    let (status, _) = server.post("nothing/here", &json!({}));
    assert_eq!(status, 404);
    // After all of it the server answers, and a finished session frees its adapters.
    assert_eq!(samples(&server, &sample_body(sampler, 1, &[1, 2], Some(1))).len(), 3);
    server.ok(&format!("sessions/{session}/finish"), &json!({}));
    let session = server.session();
    server.model(&session, 0, None);
    server.model(&session, 1, None);
}

#[test]
fn a_grpo_step_of_a_run_and_of_a_client_are_the_same_weights() {
    let (_folder, [run, store]) = scratch(["run", "store"]);
    let sets = [
        "cold_start.steps=0",
        "adapter.rank=3",
        "adapter.alpha=32.0",
        r#"adapter.targets=["*", "lm_head.weight"]"#,
        "policy.aggregation=token_sum",
        "policy.dual_clip=0",
        "policy.overlong.buffer_tokens=60",
        "policy.old_logprob=rollout",
        "train.steps=1",
        "train.seed=5",
        "train.micro_batch_tokens=768",
        "train.optimizer.lr=1e-2",
        "train.optimizer.schedule=constant",
        "train.optimizer.beta2=0.95",
        "train.optimizer.grad_norm_max=0",
        "checkpoint.every_steps=1",
        "eval.every_steps=0",
        "rollout.prompts_per_step=6",
        "logging.trajectories_per_step=64",
    ];
    done(&mut small(&run, &sets));
    let text = fs::read(run.join("trajectories/step-000001.jsonl")).unwrap();
    let rows: Vec<TrajectoryRow> = text
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| TrajectoryRow::from_line(line).unwrap())
        .collect();
    assert_eq!(rows.len(), 24);
    let data = || -> Vec<Datum> {
        let datum_of = |row: &TrajectoryRow| {
            let of_targets = |values: &[f32]| -> Vec<f64> {
                let masked = values.iter().zip(&row.trajectory.mask).skip(1);
                masked.map(|(&value, &mask)| if mask { f64::from(value) } else { 0.0 }).collect()
            };
            let advantages = of_targets(&row.token_stats.as_ref().unwrap().advantages);
            let log_probs = of_targets(&row.trajectory.log_probs);
            datum(&row.trajectory.tokens, &[("logprobs", &log_probs), ("advantages", &advantages)])
        };
        rows.iter().map(datum_of).collect()
    };
    assert!(rows.iter().any(|row| row.token_stats.as_ref().unwrap().advantages.iter().any(|a| *a > 0.0)));
    let checkpoints = warm_model().join("checkpoints");
    let base = fs::read_dir(checkpoints).unwrap().next().unwrap().unwrap().path();
    let server = Server::of(&base, &store, &["--set", "train.micro_batch_tokens=768"]);
    let expected = fs::read(run.join("checkpoints/step-000001/adapter_model.safetensors")).unwrap();
    for (number, loss) in [(0, "ppo"), (1, "importance_sampling")] {
        let session = server.session();
        let lora = json!({"rank": 3, "seed": 5});
        let body =
            json!({"session_id": session, "model_seq_id": number, "base_model": NAME, "lora_config": lora});
        let mut model = server.model_of("create_model", &body);
        model.pass(data(), loss, false);
        let mut step = step_body(1e-2);
        step["adam_params"]["eps"] = json!(1e-8);
        model.next("optim_step", step);
        let saved = model.next("save_weights", json!({"path": "one"}))["path"].as_str().unwrap().to_owned();
        let run = saved.split('/').nth(2).unwrap().replace(':', "-");
        let found = fs::read(store.join(run).join("weights/one/adapter_model.safetensors")).unwrap();
        assert_eq!(found.len(), expected.len());
        assert!(found == expected, "{loss}: the weights differ");
    }
}
