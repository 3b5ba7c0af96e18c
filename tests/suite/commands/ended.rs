//! Runs that were killed, stopped by a signal or ran out of disk, and are resumed.

use super::*;
use crate::skips;
use rloss::recipe::Recipe;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::time::Instant;

pub(super) fn quiet(command: &mut Command) -> &mut Command {
    command.stdout(Stdio::null()).stderr(Stdio::null())
}

pub(super) fn signal(process: i32, number: i32) {
    // SAFETY: kill takes two numbers and touches no memory of this process.
    assert_eq!(unsafe { libc::kill(process, number) }, 0, "kill({process}, {number})");
}

/// Starts a small run, kills it with SIGKILL once `reached`, and says whether that came before its end.
fn killed(out: &Path, sets: &[&str], reached: impl Fn() -> bool) -> bool {
    let mut child = quiet(&mut small(out, sets)).spawn().unwrap();
    wait_until(&mut child, reached);
    let _ = child.kill();
    child.wait().unwrap().signal() == Some(libc::SIGKILL)
}

/// [`killed`], again and again until one was killed before its end, by `caught` where it should have been.
///
/// On a busy machine this process may look too late.
fn surely_killed(out: &Path, sets: &[&str], reached: impl Fn() -> bool, caught: impl Fn() -> bool) {
    let again = || {
        let _ = fs::remove_dir_all(out);
        killed(out, sets, &reached) && caught()
    };
    assert!((0..100).any(|_| again()), "never killed where it should have been");
}

/// Kills in the middle of the step after row `rows`, resumes, and expects the uninterrupted run's metrics.
fn killed_after_rows(count: usize, delay_ms: u64) {
    println!("after {count} rows and {delay_ms} ms");
    let (_folder, [out]) = scratch(["run"]);
    killed_and_resumed(&out, &[], (count, Duration::from_millis(delay_ms)));
    assert_same_results(&out, baseline());
}

pub(super) fn killed_and_resumed(out: &Path, sets: &[&str], (count, delay): (usize, Duration)) {
    let file = out.join("metrics.jsonl");
    let reached = || {
        let reached = file.exists() && line_count(&file) >= count;
        if reached {
            std::thread::sleep(delay);
        }
        reached
    };
    surely_killed(out, sets, reached, || true);
    done(&mut resumed(out, sets));
}

/// Its page showed the trajectories of steps that it no longer had.
#[test]
fn bug_a_run_resumed_with_fewer_steps_kept_the_trajectories_of_the_others() {
    let (folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["train.steps=2"]));
    let trajectories = out.join("trajectories");
    let kept = trajectories.join("step-000002.jsonl");
    let row = fs::read(&kept).unwrap();
    let own = ["eval-best-000004.jsonl", "step-000004.txt", "step-4.jsonl"];
    for name in ["step-000003.jsonl", "step-000004.jsonl", "eval-000004.jsonl"].iter().chain(&own) {
        fs::write(trajectories.join(name), &row).unwrap();
    }
    done(&mut resumed(&out, &["train.steps=3"]));
    let new = fs::read(trajectories.join("step-000003.jsonl")).unwrap();
    assert!(new != row && fs::read(&kept).unwrap() == row);
    assert!(["step-000004.jsonl", "eval-000004.jsonl"].iter().all(|name| !trajectories.join(name).exists()));
    assert!(own.iter().all(|name| trajectories.join(name).is_file()), "the user's own files");
    // A folder of samples was taken for a run without a checkpoint.
    let samples = folder.path().join("samples");
    let model = model_path(warm_model());
    done(rloss().args(["rollout", "quickstart", "--set", &model, "--out"]).arg(&samples));
    refused(small(&samples, &[]).arg("--resume=auto"), &["has the samples of `rloss eval`"]);
}

/// As torchrun and Slurm do: the same command again, until it ends.
#[test]
fn the_same_command_goes_on_by_resume_auto() {
    let (folder, [out]) = scratch(["run"]);
    let file = out.join("metrics.jsonl");
    let auto = || {
        let mut command = small(&out, &[]);
        command.arg("--resume=auto");
        command
    };
    for rows in [1, 4, 8] {
        let mut child = quiet(&mut auto()).spawn().unwrap();
        wait_until(&mut child, || file.exists() && line_count(&file) >= rows);
        let _ = child.kill();
        child.wait().unwrap();
    }
    assert_has(&done(&mut auto()).stderr, &["resuming"]);
    assert_same_results(&out, baseline());
    assert_has(&done(&mut auto()).stderr, &["all 4 steps are done"]);
    refused(small(&folder.path().join("other"), &[]).arg("--resume"), &["--resume=auto"]);
}

/// The baseline is the one with AdamW.
#[test]
fn killed_with_the_other_optimizers() {
    let folder = TempDir::new().unwrap();
    let both = |keys: &[&str]| -> Vec<String> {
        let tables = ["cold_start", "train"].into_iter();
        tables.flat_map(|table| keys.iter().map(move |key| format!("{table}.optimizer.{key}"))).collect()
    };
    for (name, keys) in
        [("8_bit", &["kind=adamw_8bit"][..]), ("sgd", &["kind=sgd", "momentum=0.9", "lr=0.05"])]
    {
        let sets = both(keys);
        let sets = texts(&sets);
        let straight = folder.path().join(name);
        done(&mut small(&straight, &sets));
        assert_ne!(results(&straight), results(baseline()));
        // In the cold start after its first checkpoint, and in reinforcement learning.
        for (count, delay) in [(4, 3), (9, 1)] {
            let out = folder.path().join(format!("{name}-{count}"));
            killed_and_resumed(&out, &sets, (count, Duration::from_millis(delay)));
            assert_same_results(&out, &straight);
            assert!(trainer_state(&out) == trainer_state(&straight), "{name}: weights and optimizer state");
        }
    }
}

#[test]
fn killed_in_the_cold_start() {
    // Before the first row, before the first checkpoint, and after one.
    for (count, delay) in [(0, 0), (2, 2), (4, 3)] {
        killed_after_rows(count, delay);
    }
}

#[test]
fn killed_in_a_rollout_and_in_an_update() {
    // Rows: 5 of the cold start, an evaluation, then step 1 of reinforcement learning.
    for (count, delay) in [(6, 2), (7, 20), (9, 1), (9, 30)] {
        killed_after_rows(count, delay);
    }
}

#[test]
fn killed_in_the_middle_of_a_checkpoint() {
    for name in ["cold-start-000004", "step-000002"] {
        let (_folder, [out]) = scratch(["run"]);
        let (aside, whole) =
            (out.join(format!("checkpoints/.{name}.partial")), out.join("checkpoints").join(name));
        // The window is a few milliseconds wide.
        let within = || aside.exists() && !whole.exists();
        surely_killed(&out, &[], || aside.join("config.json").exists(), within);
        done(&mut resumed(&out, &[]));
        assert_same_results(&out, baseline());
        assert!(!aside.exists(), "what was half written is gone");
    }
}

#[test]
fn half_written_checkpoints_are_not_taken_and_are_cleared_away() {
    let (folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["train.steps=2", "train.optimizer.schedule=constant"]));
    // A name that this run does not write again, with a state that says it is the newest.
    let aside = out.join("checkpoints/.step-000003.partial");
    copy_folder(&out.join("checkpoints/step-000002"), &aside);
    let state = aside.join("trainer.json");
    let text = text_of(&state);
    fs::write(&state, text.replace("\"step\": 2", "\"step\": 3")).unwrap();
    done(&mut resumed(&out, &["train.optimizer.schedule=constant"]));
    let expected = folder.path().join("expected");
    done(&mut small(&expected, &["train.optimizer.schedule=constant"]));
    // The same as a run of four steps at once: at a constant rate, more steps change nothing before them.
    assert_same_results(&out, &expected);
    assert!(!aside.exists());
    // Resumed once more it has nothing to do.
    let before = fs::read(out.join("metrics.jsonl")).unwrap();
    done(&mut resumed(&out, &["train.optimizer.schedule=constant"]));
    assert_eq!(fs::read(out.join("metrics.jsonl")).unwrap(), before);
    assert_eq!(checkpoints(&out), ["step-000002", "step-000004"]);
}

/// Starts a run in a process group of its own and waits until it holds its folder.
fn started(out: &Path, sets: &[&str]) -> Child {
    let mut child = quiet(small(out, sets).process_group(0)).spawn().unwrap();
    let file = out.join("metrics.jsonl");
    assert!(wait_until(&mut child, || file.exists()), "the run ended");
    child
}

#[test]
fn a_signal_finishes_the_step_and_the_resumed_run_is_the_same() {
    for (number, count) in [(libc::SIGTERM, 2), (libc::SIGINT, 7)] {
        let (_folder, [out]) = scratch(["run"]);
        let file = out.join("metrics.jsonl");
        // On a busy machine this process may look when the run has ended.
        let stopped_in_time = || {
            let _ = fs::remove_dir_all(&out);
            let mut child = started(&out, &[]);
            assert!(wait_until(&mut child, || line_count(&file) >= count), "the run ended");
            // As a terminal does: to the Python tool's workers too.
            signal(-(child.id() as i32), number);
            let code = child.wait().unwrap().code();
            assert!(matches!(code, Some(0 | 130)), "{code:?}");
            code == Some(130) && phase(&rows(&out), "rl").count() < 4
        };
        assert!((0..100).any(|_| stopped_in_time()), "never stopped before its end");
        let stopped = rows(&out);
        let last = stopped.iter().rfind(|row| row["phase"] != "eval").unwrap();
        let name = if last["phase"] == "rl" { "step" } else { "cold-start" };
        let newest = format!("{name}-{:06}", last["step"].as_u64().unwrap());
        assert!(checkpoints(&out).contains(&newest), "{newest} of {:?}", checkpoints(&out));
        done(&mut resumed(&out, &[]));
        assert_same_results(&out, baseline());
    }
}

#[test]
fn a_run_resumes_with_less_memory_to_the_same_results() {
    const CONSTANT: &str = "train.optimizer.schedule=constant";
    let (_folder, [whole, broken]) = scratch(["whole", "broken"]);
    done(&mut small(&whole, &[CONSTANT]));
    done(&mut small(&broken, &[CONSTANT, "train.steps=2"]));
    done(&mut resumed(&broken, &[CONSTANT, "train.recompute_layers=true", "rollout.sequences_max=2"]));
    assert_same_results(&broken, &whole);
}

/// Like [`started`], with a first step of many seconds; returns what it says too.
fn started_with_a_long_step(out: &Path) -> (Child, impl BufRead) {
    let sets = ["cold_start.batch_size=20000", "cold_start.eval_every_steps=0"];
    let mut command = small(out, &sets);
    let mut child = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let file = out.join("metrics.jsonl");
    assert!(wait_until(&mut child, || file.exists()), "the run ended");
    let said = BufReader::new(child.stderr.take().unwrap());
    (child, said)
}

fn wait_for_line(said: &mut impl BufRead, words: &str) {
    let mut lines = said.lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains(words)), "never said: {words}");
}

#[test]
fn a_second_signal_exits_at_once() {
    for (first, second) in
        [(libc::SIGINT, libc::SIGINT), (libc::SIGTERM, libc::SIGTERM), (libc::SIGINT, libc::SIGTERM)]
    {
        let (_folder, [out]) = scratch(["run"]);
        let (mut child, mut said) = started_with_a_long_step(&out);
        signal(child.id() as i32, first);
        wait_for_line(&mut said, "repeat the signal to stop at once");
        if first == second {
            // Within a second it counts as the first.
            std::thread::sleep(Duration::from_millis(1100));
        }
        assert!(child.try_wait().unwrap().is_none(), "the first signal waits for the step");
        signal(child.id() as i32, second);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert_eq!(rows(&out).len(), 0);
        assert_eq!(checkpoints(&out), [""; 0]);
    }
}

/// Whether a signal waits to be delivered to `process`.
fn is_pending(process: i32, number: i32) -> bool {
    let status = text_of(format!("/proc/{process}/status"));
    let mask = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (number - 1) & 1 == 1
}

/// A bug: GNU `timeout` and batch schedulers signal the process and its group, and the second of these
/// signals ended the run without its checkpoint and without a word.
#[test]
fn a_signal_to_the_process_and_to_its_group_counts_once() {
    for number in [libc::SIGINT, libc::SIGTERM] {
        let (_folder, [out]) = scratch(["run"]);
        let sets = ["train.steps=100000", "checkpoint.every_steps=0", "eval.every_steps=0"];
        let mut output = None;
        while output.is_none() {
            let _ = fs::remove_dir_all(&out);
            let mut command = small(&out, &sets);
            let mut child =
                command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            assert!(wait_until(&mut child, || out.join("checkpoints/cold-start-000004").exists()));
            let (process, begun) = (child.id() as i32, Instant::now());
            signal(process, number);
            // Two that wait at once are one to the system.
            crate::interpreter::wait_until("the first is delivered", || !is_pending(process, number));
            signal(-process, number);
            // A busy machine may have taken long over it: once more.
            let in_time = begun.elapsed() < Duration::from_millis(500);
            output = Some(Ended::from(child.wait_with_output().unwrap())).filter(|_| in_time);
        }
        let output = output.unwrap();
        let said = output.stderr;
        assert_eq!(output.code, Some(130), "{said}");
        assert_has(&said, &["then saving; repeat the signal to stop at once", "stopped: ", "--resume"]);
        let last = phase(&rows(&out), "rl").last().map(|row| row["step"].as_u64().unwrap());
        let newest = last.map_or("cold-start-000004".to_owned(), |step| format!("step-{step:06}"));
        assert!(checkpoints(&out).contains(&newest), "{newest} of {:?}", checkpoints(&out));
    }
}

/// It stayed, in a group of its own, and held the terminal open.
#[test]
fn a_hanging_task_program_ends_with_the_run() {
    let Some(()) = skips::python3() else { return };
    let (folder, [out, told]) = scratch(["run", "told"]);
    let program = r#"
import json, os, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "reward":
        with open(sys.argv[1] + ".part", "w") as file: file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(1000)
    reply = {"version": 2, "name": "mine"} if ask["request"] == "describe" else {"prompt": "2 * 3?", "answer": 6}
    print(json.dumps({"request_id": ask["request_id"], **reply}), flush=True)
"#;
    fs::write(folder.path().join("task.py"), program).unwrap();
    let command = format!(
        "task.command=[\"python3\", \"{}\", \"{}\"]",
        folder.path().join("task.py").display(),
        told.display()
    );
    let sets = ["task.name=command", &command, "cold_start.steps=0", "task.command_processes=1"];
    assert!(killed(&out, &sets, || told.exists()));
    let process = text_of(&told);
    let place = Path::new("/proc").join(&process);
    // Until its new parent has looked, a process that has ended is a zombie.
    let ended = || match fs::read_to_string(place.join("stat")) {
        Ok(stat) => stat.contains(") Z "),
        Err(_) => true,
    };
    crate::interpreter::wait_until("the program ends with the run", ended);
}

#[test]
fn keep_bounds_the_checkpoints() {
    let folder = TempDir::new().unwrap();
    for (keep, stay) in [
        ("1", &["step-000004"][..]),
        ("3", &["step-000002", "step-000003", "step-000004"]),
        ("5", &["cold-start-000004", "step-000001", "step-000002", "step-000003", "step-000004"]),
    ] {
        let out = folder.path().join(keep);
        done(&mut small(&out, &["checkpoint.every_steps=1", &format!("checkpoint.keep={keep}")]));
        assert_eq!(checkpoints(&out), stay);
    }
}

/// The command with files bounded to `kib`: writing beyond fails, as on a full disk.
pub(super) fn bounded(command: &Command, kib: u64) -> Option<i32> {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", kib * 2), "sh"]);
    shell.arg(command.get_program()).args(command.get_args());
    let output = output(&mut shell);
    assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
    assert_has(&output.stderr, &["error: writing "]);
    output.code
}

#[test]
fn a_full_disk_ends_the_run_with_the_last_checkpoint_intact() {
    let (_folder, [out]) = scratch(["run"]);
    surely_killed(&out, &[], || out.join("checkpoints/step-000002").exists(), || true);
    let kept = checkpoints(&out);
    assert_eq!(bounded(&resumed(&out, &[]), 200), Some(1));
    // The kill may have come before the oldest beyond `checkpoint.keep` was cleared, which the resume
    // makes up for.
    let keep = Recipe::default().checkpoint.keep;
    assert_eq!(checkpoints(&out), kept[kept.len().saturating_sub(keep)..]);
    done(&mut resumed(&out, &[]));
    assert_same_results(&out, baseline());
}

#[test]
fn a_folder_in_use_is_refused() {
    let (_folder, [out]) = scratch(["run"]);
    let mut child = started(&out, &["train.steps=1000"]);
    for command in [&mut small(&out, &[]), &mut resumed(&out, &[])] {
        refused(command, &[&out.display().to_string()]);
    }
    let text = output(&mut resumed(&out, &["train.steps=1000"])).stderr;
    assert!(text.contains("another process is running in this folder"), "{text}");
    child.kill().unwrap();
    child.wait().unwrap();
    // A dead process holds nothing.
    done(&mut resumed(&out, &["train.steps=1", "cold_start.steps=4"]));
}

/// A run that was signalled in its last step said how to resume it.
#[test]
fn bug_a_signal_in_the_last_step_called_a_finished_run_stopped() {
    let folder = TempDir::new().unwrap();
    for (name, sets) in [
        ("rl", ["cold_start.steps=0", "train.steps=1", "rollout.samples_per_prompt=600"]),
        ("warm-up", ["cold_start.steps=1", "train.steps=0", "cold_start.batch_size=4000"]),
    ] {
        let out = folder.path().join(name);
        let mut command = small(&out, &[&sets[..], &["eval.every_steps=0"]].concat());
        let mut child =
            command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        assert!(wait_until(&mut child, || out.join("metrics.jsonl").exists()), "the run ended");
        let mut said = BufReader::new(child.stderr.take().unwrap());
        signal(child.id() as i32, libc::SIGINT);
        wait_for_line(&mut said, "then saving");
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{rest}");
        assert!(rest.contains("done: ") && !rest.contains("to resume"), "{rest}");
    }
}
