//! The server of the task `agent` against clients that lie about ids and leave: the test itself is the agent.

use crate::cli::{KilledOnDrop, Sets, json_lines, rloss, text_of};
use crate::interpreter::wait_until;
use rustix::net::SendFlags;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

const TOKEN: &str = "secret";

fn recipe() -> &'static str {
    "[task]\nname = \"agent\"\nserve_on = \"127.0.0.1:0\"\nepisode_timeout_s = 120\n\
     [model.architecture]\nmax_position_embeddings = 768\n\
     [rollout]\nprompts_per_step = 1\nsamples_per_prompt = 2\nprompt_tokens_max = 600\nresponse_tokens_max = 64\n\
     [train]\nsteps = 1\nrecompute_layers = false\n[eval]\nevery_steps = 0\nbefore_training = false\n\
     [logging]\ntrajectories_per_step = 1000\n[parallel]\nthreads = 1\n"
}

/// A run that waits for its agent.
struct Run {
    child: KilledOnDrop,
    address: String,
    folder: PathBuf,
}

/// An episode, as the server gives it.
#[derive(Clone)]
struct Episode {
    id: String,
    key: String,
    sample: u64,
}

impl Run {
    fn start(place: &Path, name: &str, sets: &[&str]) -> Self {
        std::fs::write(place.join("agent.toml"), recipe()).unwrap();
        let mut command = rloss();
        command.current_dir(place).args(["train", "agent.toml", "--resume=auto", "--out", name]);
        command.env("RLOSS_SERVE_TOKEN", TOKEN).sets(sets);
        let told = "waiting for an agent program at http://";
        let (child, address) = KilledOnDrop::server(&mut command, told);
        Self { child, address, folder: place.join(name) }
    }

    /// Sends a request and returns its connection.
    fn send(&self, path: &str, key: &str, headers: &str, body: &Value) -> TcpStream {
        let (stream, last) = self.send_but_the_end(path, key, headers, body);
        (&stream).write_all(&last).unwrap();
        stream
    }

    /// Sends a request whose client leaves. Its end and that of the connection are one packet, so that the
    /// server is never fast enough to answer before.
    fn send_and_leave(&self, path: &str, key: &str, body: &Value) -> TcpStream {
        let (stream, last) = self.send_but_the_end(path, key, "", body);
        rustix::net::send(&stream, &last, SendFlags::MORE).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        stream
    }

    /// Sends a request but its last byte. Returns its connection and that byte.
    fn send_but_the_end(&self, path: &str, key: &str, headers: &str, body: &Value) -> (TcpStream, [u8; 1]) {
        let (mut stream, body) = (TcpStream::connect(&self.address).unwrap(), body.to_string());
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream.set_nodelay(true).unwrap();
        let head = format!(
            "POST /v1{path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {key}\r\n{headers}Content-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        let (last, first) = body.as_bytes().split_last().unwrap();
        stream.write_all(&[head.as_bytes(), first].concat()).unwrap();
        (stream, [*last])
    }

    fn post(&self, path: &str, key: &str, headers: &str, body: &Value) -> (u16, Value) {
        let (status, body) = receive(self.send(path, key, headers, body));
        (status, serde_json::from_str(&body).unwrap())
    }

    fn next(&self) -> Episode {
        loop {
            let (status, episode) = self.post("/episodes/next", TOKEN, "", &json!({}));
            assert_eq!(status, 200, "{episode}");
            if let Some(id) = episode["id"].as_str() {
                let key = episode["api_key"].as_str().unwrap().to_owned();
                return Episode { id: id.to_owned(), key, sample: episode["sample"].as_u64().unwrap() };
            }
            assert_ne!(episode["done"], true);
        }
    }

    fn chat(&self, episode: &Episode, text: &str) -> (u16, Value) {
        self.post("/chat/completions", &episode.key, "", &question(text))
    }

    fn reward(&self, episode: &Episode, reward: f64) -> u16 {
        let path = format!("/episodes/{}/reward", episode.id);
        self.post(&path, TOKEN, "", &json!({"reward": reward})).0
    }

    /// Waits for the end, and returns the metrics of the only step and its trajectories.
    fn end(mut self) -> (Value, Vec<Value>) {
        assert!(self.child.wait().unwrap().success());
        let mut rows = json_lines(self.folder.join("metrics.jsonl")).into_iter();
        let row = rows.rfind(|row| row["phase"] == "rl").unwrap();
        (row, json_lines(self.folder.join("trajectories/step-000001.jsonl")))
    }
}

fn question(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "return_token_ids": true})
}

fn receive(mut stream: TcpStream) -> (u16, String) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn tokens(answer: &Value) -> Vec<Value> {
    answer["choices"][0]["token_ids"].as_array().unwrap().clone()
}

/// The token ids of the events of a stream, as far as it was received.
fn streamed(events: &str) -> Vec<Value> {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: {"));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).ok());
    events
        .flat_map(|event| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect()
}

/// The sampled tokens of each turn of a trajectory.
fn turns(row: &Value) -> Vec<Vec<Value>> {
    let at = |turn: &Value, name: &str| turn[name].as_u64().unwrap() as usize;
    let all = row["tokens"].as_array().unwrap();
    let turns = row["turns"].as_array().unwrap().iter();
    turns.map(|turn| all[at(turn, "start")..at(turn, "end")].to_vec()).collect()
}

/// Ids of episodes were `t1-0-0` in every run, so a late request of an earlier process was trained on.
#[test]
fn bug_a_request_of_an_earlier_process_became_a_part_of_a_new_episode() {
    let place = TempDir::new().unwrap();
    let first = Run::start(place.path(), "run", &[]);
    let old = first.next();
    assert_eq!(first.chat(&old, "old").0, 200);
    drop(first);
    for name in ["run", "another"] {
        let run = Run::start(place.path(), name, &[]);
        let (a, b) = (run.next(), run.next());
        assert!(old.id != a.id && a.id != b.id && a.id.len() > 32, "{} {}", a.id, b.id);
        for episode in [&a, &b] {
            assert_eq!(run.chat(episode, "new").0, 200);
        }
        assert_eq!(run.chat(&old, "late").0, 404);
        assert_eq!(
            run.post(&format!("/episodes/{}/chat/completions", old.id), TOKEN, "", &question("l")).0,
            404
        );
        assert_eq!(run.post("/chat/completions", TOKEN, "X-Episode-Id: t1-0-0\r\n", &question("l")).0, 404);
        assert_eq!(run.reward(&old, 777.0), 404);
        assert_eq!((run.reward(&a, 1.0), run.reward(&b, 0.0)), (200, 200));
        let (row, trajectories) = run.end();
        assert_eq!((&row["agent/refused_requests"], &row["critic/rewards/max"]), (&json!(4), &json!(1)));
        assert_eq!((trajectories.len(), &row["agent/answers"]), (2, &json!(2)));
    }
}

/// The header's episode got the answer, whatever the key said.
#[test]
fn bug_a_request_that_names_two_episodes_was_answered_for_one_of_them() {
    let place = TempDir::new().unwrap();
    let run = Run::start(place.path(), "run", &[]);
    let (a, b) = (run.next(), run.next());
    let header = |episode: &Episode| format!("X-Episode-Id: {}\r\n", episode.id);
    let path = |episode: &Episode| format!("/episodes/{}/chat/completions", episode.id);
    let reward = |episode: &Episode| format!("/episodes/{}/reward", episode.id);
    let ask = question("?");
    for (path, key, headers, body) in [
        ("/chat/completions".to_owned(), &b.key[..], header(&a), &ask),
        (path(&a), &b.key, String::new(), &ask),
        (path(&a), TOKEN, header(&b), &ask),
        (path(&a), &a.key, header(&b), &ask),
        (reward(&a), &b.key, String::new(), &json!({"reward": 7.0})),
        (reward(&a), TOKEN, header(&b), &json!({"reward": 7.0})),
    ] {
        let (status, error) = run.post(&path, key, &headers, body);
        assert_eq!(status, 400, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains("must name one"), "{error}");
    }
    for episode in [&a, &b] {
        assert_eq!(run.post(&path(episode), &episode.key, &header(episode), &ask).0, 200);
        let body = json!({"reward": episode.sample});
        assert_eq!(run.post(&reward(episode), &episode.key, &header(episode), &body).0, 200);
    }
    let (row, trajectories) = run.end();
    assert_eq!((&row["agent/refused_requests"], &row["agent/answers"]), (&json!(6), &json!(2)));
    assert!(trajectories.iter().all(|row| row["reward"].as_f64() == row["sample"].as_f64()));
}

#[test]
fn bug_a_reward_that_was_sent_again_made_its_episode_fail() {
    let place = TempDir::new().unwrap();
    let run = Run::start(place.path(), "run", &["train.steps=2"]);
    let (a, b) = (run.next(), run.next());
    for episode in [&a, &b] {
        assert_eq!(run.chat(episode, "?").0, 200);
    }
    assert_eq!([1.0, 1.0, 777.0, 1.0].map(|reward| run.reward(&a, reward)), [200, 200, 409, 200]);
    let path = format!("/episodes/{}/reward", a.id);
    assert_eq!(run.post(&path, TOKEN, "", &json!({"reward": 1.0, "metrics": {"a": 1}})).0, 409);
    assert_eq!(run.post(&path, TOKEN, "", &json!({"error": "late"})).0, 409);
    assert_eq!(run.chat(&a, "late").0, 410);
    // The end of the step changes nothing, so a client may repeat a reward whose answer it did not get.
    assert_eq!(run.reward(&b, 0.0), 200);
    let next = [run.next(), run.next()];
    assert_eq!((run.reward(&b, 0.0), run.reward(&b, 5.0), run.chat(&b, "late").0), (200, 409, 410));
    for (episode, reward) in next.iter().zip([0.0, 1.0]) {
        assert_eq!(run.chat(episode, "?").0, 200);
        assert_eq!(
            run.post(&format!("/episodes/{}/reward", episode.id), TOKEN, "", &json!({"reward": "x"})).0,
            400
        );
        assert_eq!(run.reward(episode, reward), 409);
    }
    let folder = run.folder.clone();
    assert!(folder.exists());
    // No group of the second step has a reward, and the run goes on to its end.
    let (row, trajectories) = run.end();
    assert_eq!(row["agent/failed_bad_reward"], 2, "{row}");
    let rewards: Vec<f64> = trajectories.iter().map(|row| row["reward"].as_f64().unwrap()).collect();
    assert_eq!(rewards, [1.0, 0.0]);
}

/// Returns whether a connection from `port` is still open at its other end.
fn is_open(port: u16) -> bool {
    let connections = text_of("/proc/net/tcp");
    let end = format!(":{port:04X}");
    // Local address, remote address, state: 06 waits for late packets alone.
    connections
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .any(|line| line.len() > 3 && line[3] != "06" && (line[1].ends_with(&end) || line[2].ends_with(&end)))
}

/// Clients repeat a request whose connection broke. Every answer that nobody received was trained.
#[test]
fn bug_answers_that_no_client_received_were_trained() {
    let place = TempDir::new().unwrap();
    let chats = "/chat/completions";
    let honest = Run::start(place.path(), "honest", &[]);
    let expected = [honest.next(), honest.next()].map(|episode| {
        let answer = honest.chat(&episode, "?").1;
        assert_eq!(honest.reward(&episode, episode.sample as f64), 200);
        tokens(&answer)
    });
    let (honest_row, honest_rows) = honest.end();
    for streams in [false, true] {
        let run = Run::start(place.path(), if streams { "streams" } else { "whole" }, &[]);
        let episodes = [run.next(), run.next()];
        let mut body = question("?");
        body["stream"] = streams.into();
        for (episode, expected) in episodes.iter().zip(&expected) {
            for lost in 0..5 {
                let stream = run.send_and_leave(chats, &episode.key, &body);
                let port = stream.local_addr().unwrap().port();
                match lost % 3 {
                    0 => {}
                    // It reads on, but the server takes it for gone. So it may get no complete answer.
                    1 => {
                        let mut text = String::new();
                        let _ = (&stream).read_to_string(&mut text);
                        assert!(!text.contains("\"finish_reason\":\""), "{text}");
                    }
                    // It leaves bytes unread, so that its connection is reset.
                    _ => {
                        let _ = (&stream).read(&mut [0]);
                    }
                }
                drop(stream);
                wait_until("the server left the connection", || !is_open(port));
            }
            let (status, text) = receive(run.send(chats, &episode.key, "", &body));
            assert_eq!(status, 200, "{text}");
            let got = if streams { streamed(&text) } else { tokens(&serde_json::from_str(&text).unwrap()) };
            assert_eq!(&got, expected, "streams: {streams}");
            assert_eq!(run.reward(episode, episode.sample as f64), 200);
        }
        let (row, rows) = run.end();
        assert_eq!((&row["agent/undelivered_answers"], &row["agent/answers"]), (&json!(10), &json!(2)));
        assert_eq!(rows.iter().map(turns).collect::<Vec<_>>(), expected.clone().map(|turn| vec![turn]));
        let names = ["tokens", "reward", "sample"];
        let known = |rows: &[Value]| -> Vec<Value> {
            rows.iter().flat_map(|row| names.map(|name| row[name].clone())).collect()
        };
        assert_eq!(known(&rows), known(&honest_rows));
        assert_eq!(row["actor/grad_norm"], honest_row["actor/grad_norm"]);
    }
}

/// An equal request is a repetition only if the client of the first one has left.
#[test]
fn equal_requests_of_open_connections_are_separate() {
    let place = TempDir::new().unwrap();
    let run = Run::start(place.path(), "run", &[]);
    let episodes = [run.next(), run.next()];
    for episode in &episodes {
        let open = [0; 4].map(|_| run.send("/chat/completions", &episode.key, "", &question("?")));
        let answers = open.map(|stream| receive(stream).1);
        let ids = answers.map(|text| serde_json::from_str::<Value>(&text).unwrap()["id"].to_string());
        assert!((1..4).all(|i| !ids[..i].contains(&ids[i])), "{ids:?}");
        assert_eq!(run.reward(episode, episode.sample as f64), 200);
    }
    let (row, trajectories) = run.end();
    assert_eq!((&row["agent/undelivered_answers"], &row["agent/answers"]), (&json!(0), &json!(8)));
    assert_eq!(trajectories.iter().map(|row| turns(row).len()).sum::<usize>(), 8);
}
