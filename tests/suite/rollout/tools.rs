//! Tools that sleep, die or are attacked, while others decode.

use super::*;
use rloss::interpreter::{EmbeddedInterpreter, InterpreterSettings};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

const FINAL: &str = "<|channel|>final<|message|>ok<|return|>";

fn calling(code: &str) -> String {
    format!("<|channel|>analysis to=python<|message|>{code}<|call|>")
}

/// Calls that wait for each other, until as many were under way at once as are awaited.
struct Meeting {
    awaited: usize,
    /// Calls under way, and the most of them.
    running: Mutex<[usize; 2]>,
    came: Condvar,
}

impl Meeting {
    fn of(awaited: usize) -> Self {
        Self { awaited, running: Mutex::default(), came: Condvar::new() }
    }

    /// A call. It gives up after minutes, so that calls that never meet fail their test.
    fn meet(&self) {
        let mut running = self.running.lock().unwrap();
        running[0] += 1;
        running[1] = running[1].max(running[0]);
        self.came.notify_all();
        let limit = Duration::from_secs(120);
        let alone = |running: &mut [usize; 2]| running[1] < self.awaited;
        let (mut running, _) = self.came.wait_timeout_while(running, limit, alone).unwrap();
        running[0] -= 1;
    }

    fn most(&self) -> usize {
        self.running.lock().unwrap()[1]
    }
}

#[test]
fn sixty_four_calls_run_side_by_side() {
    let world = World::roomy();
    let meeting = Meeting::of(64);
    let tool = Scripted(|_, _: &str| {
        meeting.meet();
        (CallOutcome::Answered, "awake".into())
    });
    let script = Script::new(&world, &[&calling("sleep"), FINAL]);
    let rollouts =
        play(world.rollout(&Questions::new(), Some(&tool)), &script, &Questions::prompts(8), 8).unwrap();
    assert!(rollouts.trajectories().all(|t| t.success));
    assert_eq!(rollouts.counts().tool_calls, 64);
    assert_eq!(meeting.most(), 64);
}

#[test]
fn no_more_calls_run_at_once_than_allowed() {
    let mut world = World::roomy();
    world.plan.settings.tool_calls_concurrent_max = 3;
    let meeting = Meeting::of(3);
    let tool = Scripted(|_, _: &str| {
        // A fourth would come meanwhile.
        std::thread::sleep(Duration::from_millis(5));
        meeting.meet();
        (CallOutcome::Answered, "awake".into())
    });
    let script = Script::new(&world, &[&calling("sleep"), FINAL]);
    let task = Questions::new();
    let rollouts = play(world.rollout(&task, Some(&tool)), &script, &Questions::prompts(5), 4).unwrap();
    assert!(rollouts.trajectories().all(|t| t.success));
    assert_eq!(meeting.most(), 3);
}

#[test]
fn each_trajectory_has_a_session_of_its_own_which_is_closed() {
    struct Sessions(std::sync::Mutex<Vec<(SessionId, &'static str)>>);
    impl Interpreter for Sessions {
        fn call(&self, session: SessionId, _: &str) -> Reply {
            self.0.lock().unwrap().push((session, "call"));
            Reply { text: "1".into(), outcome: CallOutcome::Answered, seconds: 0.0 }
        }
        fn close(&self, session: SessionId) {
            self.0.lock().unwrap().push((session, "close"));
        }
        fn sandbox_description(&self) -> String {
            String::new()
        }
    }
    let world = World::roomy();
    let tool = Sessions(Default::default());
    let call = calling("1");
    let script = Script::new(&world, &[&call, &call, FINAL]);
    play(world.rollout(&Questions::new(), Some(&tool)), &script, &Questions::prompts(3), 2).unwrap();
    let seen = tool.0.into_inner().unwrap();
    let mut sessions: Vec<SessionId> = vec![];
    for (session, _) in &seen {
        if !sessions.contains(session) {
            sessions.push(*session);
        }
    }
    assert_eq!(sessions.len(), 6);
    for session in sessions {
        let of: Vec<_> = seen.iter().filter(|(s, _)| *s == session).map(|(_, what)| *what).collect();
        assert_eq!(of, ["call", "call", "close"]);
    }
}

pub(super) fn embedded(change: impl FnOnce(&mut InterpreterSettings)) -> EmbeddedInterpreter {
    embedded_of(env!("CARGO_BIN_EXE_rloss").into(), change)
}

/// The same with workers that are processes of `program`.
pub(super) fn embedded_of(
    program: PathBuf,
    change: impl FnOnce(&mut InterpreterSettings),
) -> EmbeddedInterpreter {
    let mut settings =
        InterpreterSettings { workers: 2, output_chars_max: 4096, ..InterpreterSettings::default() };
    (settings.time_limit_s, settings.wall_clock_s) = (0.5, 3.0);
    change(&mut settings);
    EmbeddedInterpreter::new(settings, program).expect("this machine must be able to confine a worker")
}

/// What became of a call of `code`, and what the model read.
fn outcome_of(world: &World, tool: &dyn Interpreter, code: &str) -> (CallOutcome, String, Rollouts) {
    let script = Script::new(world, &[&calling(code), FINAL]);
    let rollouts =
        play(world.rollout(&Questions::new(), Some(tool)), &script, &Questions::prompts(1), 1).unwrap();
    let t = &rollouts.groups[0].trajectories[0];
    assert_eq!((t.outcome, t.success), (Outcome::Finished, true), "{code}: the episode goes on");
    let call = t.turns[0].calls[0];
    let metrics = rloss::rollout::metrics(&rollouts.groups).finish().unwrap();
    assert_eq!(metrics.get(&format!("tool/{}", call.name())), Some(1.0));
    (call, rollouts.messages[0][0][2].content.clone(), rollouts)
}

#[test]
fn hostile_code_ends_as_a_counted_outcome_and_the_episode_goes_on() {
    let world = World::roomy();
    let tool = embedded(|_| ());
    let cases = [
        ("7*12-5", CallOutcome::Answered, "79"),
        ("1/0", CallOutcome::Raised, "ZeroDivisionError"),
        ("while True: pass", CallOutcome::TimeLimit, "TimeoutError"),
        ("10**10**8", CallOutcome::ToolTimeout, "TimeoutError"),
    ];
    for (code, expected, text) in cases {
        let (call, reply, rollouts) = outcome_of(&world, &tool, code);
        assert_eq!(call, expected, "{code}: {reply}");
        assert!(reply.contains(text), "{code}: {reply}");
        assert_eq!(rollouts.has_tool_timeout(), expected == CallOutcome::ToolTimeout);
    }
    // The next call finds a worker again.
    assert_eq!(outcome_of(&world, &tool, "2+2").1, "4");
}

#[test]
fn a_gigabyte_of_output_is_cut_and_counted() {
    let mut world = World::roomy();
    world.plan.settings.response_tokens_max = 300;
    let tool = embedded(|s| {
        (s.time_limit_s, s.wall_clock_s, s.output_chars_max) = (60.0, 120.0, 256);
    });
    let code = "line = 'x' * 1000000\nfor i in range(1000): print(line)";
    let (call, reply, _) = outcome_of(&world, &tool, code);
    assert_eq!(call, CallOutcome::Answered);
    assert!(reply.contains("characters cut") && reply.len() < 400, "{reply}");
}

/// Processes whose program is `program`.
pub(super) fn processes_of(program: &std::path::Path) -> Vec<i32> {
    let runs = |pid: &i32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.split(|&b| b == 0).next() == Some(program.as_os_str().as_encoded_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(runs).collect()
}

#[test]
fn a_worker_killed_from_outside_is_counted_and_replaced() {
    let world = World::roomy();
    let folder = tempfile::tempdir().unwrap();
    // A name of its own tells this test's worker from those of tests beside it.
    let program = folder.path().join("worker");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rloss"), &program).unwrap();
    let tool = embedded_of(program.clone(), |s| {
        (s.time_limit_s, s.wall_clock_s, s.workers) = (20.0, 40.0, 1);
    });
    let workers = processes_of(&program);
    assert_eq!(workers.len(), 1);
    std::thread::scope(|scope| {
        let playing = scope.spawn(|| outcome_of(&world, &tool, "while True: pass"));
        std::thread::sleep(Duration::from_millis(300));
        // SAFETY: a plain system call on a process that this test started.
        assert_eq!(unsafe { libc::kill(workers[0], libc::SIGKILL) }, 0);
        assert_eq!(playing.join().unwrap().0, CallOutcome::WorkerDied);
    });
    assert_eq!(outcome_of(&world, &tool, "2+2").1, "4");
    assert_ne!(processes_of(&program), workers);
}

#[test]
fn a_stopped_rollout_closes_the_sessions_it_leaves_unfinished() {
    struct Calling(AtomicUsize, AtomicUsize);
    impl Interpreter for Calling {
        fn call(&self, _: SessionId, _: &str) -> Reply {
            self.0.fetch_add(1, Ordering::SeqCst);
            Reply { text: "1".into(), outcome: CallOutcome::Answered, seconds: 0.0 }
        }
        fn close(&self, _: SessionId) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
        fn sandbox_description(&self) -> String {
            String::new()
        }
    }
    let world = World::roomy();
    let tool = Calling(AtomicUsize::new(0), AtomicUsize::new(0));
    let script = Script::new(&world, &[&calling("1"), FINAL]);
    let task = Questions::new();
    let called = || tool.0.load(Ordering::SeqCst) > 0;
    let prompts = Questions::prompts(3);
    let forced = |position| script.turn(position);
    let hooks = Hooks { forced: &forced, keeps_parts: true, ..Hooks::until(&called) };
    let stopped = world.rollout(&task, Some(&tool)).run(&prompts, 2, hooks);
    assert!(stopped.unwrap().is_none());
    assert_eq!(tool.1.load(Ordering::SeqCst), 6);
}

/// A task like [`Questions`] whose answers come from elsewhere and take a while.
struct Slow {
    questions: Questions,
    meeting: Meeting,
}

impl Task for Slow {
    fn name(&self) -> &str {
        "slow"
    }
    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        self.questions.training_problem(seed, index)
    }
    fn validation_sets(&self) -> &[ValidationSet] {
        &[]
    }
    fn uses_python(&self) -> bool {
        false
    }
    fn may_take_long(&self) -> bool {
        true
    }
    fn next_user_message(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<Message>> {
        self.meeting.meet();
        self.questions.next_user_message(problem, transcript)
    }
    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        self.meeting.meet();
        self.questions.reward(problem, transcript)
    }
}

#[test]
fn turns_and_rewards_of_a_slow_task_run_beside_decoding_and_change_no_result() {
    let world = World::roomy();
    // Asked by the engines, no more than one an engine would be under way.
    let (plain, slow) = (Questions::new(), Slow { questions: Questions::new(), meeting: Meeting::of(5) });
    let script = Script::new(&world, &[FINAL, FINAL, FINAL]);
    let expected = play(world.rollout(&plain, None), &script, &Questions::prompts(4), 4).unwrap();
    let found = play(world.rollout(&slow, None), &script, &Questions::prompts(4), 4).unwrap();
    assert_eq!(found, expected);
    assert!(slow.meeting.most() > 4, "{}", slow.meeting.most());
}
