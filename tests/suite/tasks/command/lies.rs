//! A program with ids that lies: no reward reaches another trajectory.

use super::{Script, open, settings, transcript};
use crate::skips;
use rloss::harmony::Message;
use rloss::tasks::TaskSettings;

/// Grades honestly except for one request in `EVERY`, where it lies in the way `WAY`.
const LIAR: &str = r#"
import json, os, random, sys, threading
def say(*lines):
    os.write(1, "".join(line + "\n" for line in lines).encode())
previous, described, count = "{}", "", 0
for line in sys.stdin:
    ask = json.loads(line)
    given, kind, count = {"request_id": ask["request_id"]}, ask["request"], count + 1
    if kind == "describe":
        described = {"request_id": ask["request_id"]}
        say(json.dumps({**given, "version": 2, "name": "liar"}))
        continue
    if kind == "problem":
        say(json.dumps({**given, "prompt": "?", "answer": ask["index"]}))
        continue
    reward = {"reward": ask["answer"] % 1000 / 1000, "success": True}
    old = json.loads(previous)
    own = json.dumps({**given, **reward})
    without = {key: value for key, value in old.items() if key != "request_id"}
    # The draw depends on the request, so a test sees the same lies every time.
    if previous == "{}" or random.Random(ask["answer"]).randrange(EVERY):
        say(own)
    else:
        [
            lambda: (say(own), say(own)),
            lambda: say(own, own),
            lambda: say(previous),
            lambda: say(previous, own),
            lambda: say(own, previous),
            lambda: say(json.dumps({"request_id": f"{count:016x}", **without})),
            lambda: say(json.dumps(without)),
            lambda: say(json.dumps({"request_id": None, **without})),
            lambda: say(json.dumps({"request_id": int(ask["request_id"], 16), **without})),
            lambda: say(json.dumps({"request_id": " " + ask["request_id"], **without})),
            lambda: say(json.dumps({**(described or {"request_id": "0"}), **without})),
            lambda: say(json.dumps([old, {**given, **reward}])),
            lambda: say(previous + own),
            lambda: say(json.dumps({**given, "reward": str(old.get("reward"))})),
            lambda: say(json.dumps({**given, "content": "good"})),
            lambda: say("grading...", own),
            lambda: say("", own),
            lambda: (say(own), threading.Thread(target=say, args=(previous,)).start()),
            lambda: say(json.dumps({"request_id": old.get("request_id"), "error": "too hard"})),
            lambda: (os.write(1, own[: len(own) // 2].encode()), os._exit(0)),
        ][WAY]()
    previous = own
"#;
const WAYS: usize = 20;

/// Asks for `requests` rewards of a program in each way of lying, from two threads.
fn no_reward_is_anothers(requests: u64, every: u64) {
    std::thread::scope(|scope| {
        for half in 0..2 {
            scope.spawn(move || (half..WAYS).step_by(2).for_each(|way| one_way(way, requests, every)));
        }
    });
}

fn one_way(way: usize, requests: u64, every: u64) {
    let text = LIAR.replace("WAY", &way.to_string()).replace("EVERY", &every.to_string());
    let script = Script::new(&text);
    let task = open(&TaskSettings { command_timeout_s: Some(60.0), ..settings(&script.command()) }).unwrap();
    let (mut given, mut refused) = (0, 0);
    let problem = task.training_problem(0, 0);
    let messages = [Message::assistant("final", "x")];
    for index in 0..requests {
        let problem = rloss::tasks::Problem { answer: index.into(), ..problem.clone() };
        match task.reward(&problem, &transcript(&messages)) {
            Ok(reward) => {
                assert_eq!(reward.value, (index % 1000) as f32 / 1000.0, "way {way}, request {index}");
                given += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(given > 0 && refused > 0, "way {way}: {given} given, {refused} refused");
}

#[test]
fn a_program_with_ids_that_lies_gives_no_reward_to_another_trajectory() {
    if skips::python3().is_some() {
        no_reward_is_anothers(24, 6);
    }
}

#[test]
#[ignore = "a million lines take minutes: just lies"]
fn a_million_lines_of_a_liar_give_no_reward_to_another_trajectory() {
    if skips::python3().is_some() {
        no_reward_is_anothers(1_000_000 / WAYS as u64, 200);
    }
}
