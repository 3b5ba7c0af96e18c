//! Many trajectories with every failure there is: each one ends, once, as what it is.

use super::tools::{embedded_of, processes_of};
use super::*;
use crate::cli::scratch;
use crate::skips;
use rloss::settings::Choice;
use rloss::tasks::{TaskContext, TaskName, TaskSettings, build};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ten thousand take some minutes.
const TRAJECTORIES: usize = 240;

/// Crashes or hangs when it grades, by the text of the answer.
const TASK: &str = r#"
import json, os, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "describe":
        reply = {"version": 2, "name": "many", "python": True, "functions": True}
    elif ask["request"] == "problem":
        reply = {"prompt": str(ask["index"]), "answer": ask["index"]}
    elif ask["request"] == "call":
        if ask["messages"][-1]["recipient"] == "functions.crash":
            os._exit(1)
        reply = {"content": "21" if ask["messages"][-1]["recipient"] == "functions.half" else None}
    else:
        last = ask["messages"][-1]["content"]
        if last == "crash":
            os._exit(1)
        if last == "hang":
            time.sleep(1000)
        if last == "garbage":
            print("so", flush=True)
            continue
        reply = {"reward": 1.0 if last == "ok" else -1.0}
    print(json.dumps({"request_id": ask["request_id"], **reply}), flush=True)
"#;

const FINAL: &str = "<|channel|>final<|message|>ok<|return|>";

struct Kind {
    turns: Vec<String>,
    call: Option<CallOutcome>,
    outcome: Outcome,
}

/// One kind in so many is slow: it waits for a limit by the clock.
const SLOW_EVERY: usize = 40;

fn kinds() -> (Vec<Kind>, Vec<Kind>) {
    let call = |code: &str| format!("<|channel|>analysis to=python<|message|>{code}<|call|>");
    let kind = |first: &str, call, outcome| {
        let ends = matches!(outcome, Outcome::Finished);
        let turns = [first].into_iter().chain(ends.then_some(FINAL)).map(str::to_owned).collect();
        Kind { turns, call, outcome }
    };
    let graded = |text: &str| {
        let text = format!("<|channel|>final<|message|>{text}<|return|>");
        Kind { turns: vec![text], call: None, outcome: Outcome::TaskFailed }
    };
    let quick = vec![
        kind(&call("7*12"), Some(CallOutcome::Answered), Outcome::Finished),
        kind(&call("1/0"), Some(CallOutcome::Raised), Outcome::Finished),
        kind(&call("[0] * 10**9"), Some(CallOutcome::MemoryLimit), Outcome::Finished),
        kind(&call(""), Some(CallOutcome::MalformedCall), Outcome::Finished),
        kind(
            &FINAL.replace("<|channel|>", " to=x<|channel|>").replace("<|return|>", "<|call|>"),
            Some(CallOutcome::UnknownRecipient),
            Outcome::Finished,
        ),
        kind(&"on and on ".repeat(40), None, Outcome::TruncatedLength),
        kind(&call("1").replace("python", "functions.half"), Some(CallOutcome::Answered), Outcome::Finished),
        kind(&call("1").replace("python", "functions.crash"), None, Outcome::TaskFailed),
        graded("crash"),
        graded("garbage"),
    ];
    let slow = vec![
        kind(&call("while True: pass"), Some(CallOutcome::TimeLimit), Outcome::Finished),
        kind(&call("10**10**8"), Some(CallOutcome::ToolTimeout), Outcome::Finished),
        graded("hang"),
    ];
    (quick, slow)
}

/// Forces the tokens of each prompt's kind.
struct Kinds(Vec<Vec<Vec<u32>>>);

impl Kinds {
    fn turn(&self, position: TurnPosition) -> Vec<u32> {
        let turns = &self.0[position.prompt as usize];
        turns.get(position.turn as usize).expect("a scripted turn").clone()
    }
}

#[test]
fn every_trajectory_is_accounted_for_whatever_fails() {
    let Some(()) = skips::python3() else { return };
    let world = World::roomy();
    let (folder, [script]) = scratch(["task.py"]);
    std::fs::write(&script, TASK).unwrap();
    let task = build(
        &TaskSettings {
            name: TaskName::from_name("command").unwrap(),
            command: vec!["python3".into(), script.display().to_string()],
            command_timeout_s: Some(10.0),
            ..Default::default()
        },
        &TaskContext::default(),
    )
    .unwrap();
    // A name of its own tells these workers from those of tests beside it.
    let program = folder.path().join("worker");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rloss"), &program).unwrap();
    let tool = embedded_of(program.clone(), |s| s.workers = 4);

    let (quick, slow) = kinds();
    let of = |prompt: usize| match prompt % SLOW_EVERY {
        0 => &slow[prompt / SLOW_EVERY % slow.len()],
        _ => &quick[prompt % quick.len()],
    };
    let tokens =
        |turns: &[String]| turns.iter().map(|turn| encode_with_special(&world.tokenizer, turn)).collect();
    let source = Kinds((0..TRAJECTORIES).map(|prompt| tokens(&of(prompt).turns)).collect());
    let prompts = numbered((0..TRAJECTORIES).map(|i| task.training_problem(0, i as u64)));
    let over = AtomicBool::new(false);
    let rollouts = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(700));
                if let Some(&worker) = processes_of(&program).first() {
                    // SAFETY: a plain system call on a process that this test started.
                    unsafe { libc::kill(worker, libc::SIGKILL) };
                }
            }
        });
        let rollout = world.rollout(task.as_ref(), Some(&tool));
        let rollouts = rollout.run(
            &prompts,
            1,
            Hooks { forced: &|position| source.turn(position), keeps_parts: true, ..Hooks::until(&|| false) },
        );
        over.store(true, Ordering::SeqCst);
        rollouts.unwrap().expect("nobody stopped it")
    });

    assert_eq!(rollouts.trajectories().count(), TRAJECTORIES);
    let mut counts: BTreeMap<String, f64> = BTreeMap::new();
    for (prompt, t) in rollouts.trajectories().enumerate() {
        let kind = of(prompt);
        assert_eq!((t.prompt, &*t.problem_id), (prompt as u64, &*format!("many/train/{prompt}")));
        assert_eq!(t.outcome, kind.outcome, "{prompt}: {:?}", kind.turns);
        let calls = &t.turns[0].calls;
        let killed = *calls == [CallOutcome::WorkerDied];
        assert!(*calls == Vec::from_iter(kind.call) || killed, "{prompt}: {calls:?}");
        let (reward, success) = match kind.outcome {
            Outcome::Finished => (1.0, true),
            Outcome::TaskFailed => (-1.0, false),
            _ => (-1.0, false),
        };
        assert_eq!((t.reward, t.success), (reward, success), "{prompt}");
        *counts.entry(format!("outcome/{}", t.outcome.name())).or_default() += 1.0;
        for call in t.turns.iter().flat_map(|turn| &turn.calls) {
            *counts.entry(format!("tool/{}", call.name())).or_default() += 1.0;
        }
    }
    let metrics = rloss::rollout::metrics(&rollouts.groups).finish().unwrap();
    for (key, count) in &counts {
        assert_eq!(metrics.get(key), Some(*count), "{key}");
    }
    let ended: f64 = Outcome::ALL.iter().filter_map(|o| metrics.get(&format!("outcome/{}", o.name()))).sum();
    assert_eq!(ended, TRAJECTORIES as f64);
}
