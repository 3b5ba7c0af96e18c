//! A worker of the Python tool that is killed from outside during a run.

use super::*;
use std::io::Read;

/// Returns the ids of the workers of the process `parent`.
fn workers(parent: u32) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok());
    ids.filter(|id| {
        let read = |name: &str| fs::read_to_string(Path::new("/proc").join(id.to_string()).join(name));
        let stat = read("stat").unwrap_or_default();
        let of = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)?.parse::<u32>().ok());
        of == Some(parent) && read("cmdline").unwrap_or_default().contains("interpreter-worker")
    })
    .collect()
}

/// Kills the first worker of `run`, which is idle, once the run has its folder.
fn kill_worker(run: &mut Child, folder: &Path) {
    while run.try_wait().unwrap().is_none() {
        if let Some(worker) = workers(run.id()).first().filter(|_| folder.join("recipe.toml").exists()) {
            // SAFETY: a plain system call on a process that this test's child started.
            unsafe { libc::kill(*worker, libc::SIGKILL) };
            return;
        }
    }
}

/// Up to five deaths were not told, the end of the run named failures that nobody had printed, and the run's
/// warnings did not have them.
#[test]
fn bug_a_killed_worker_is_printed_and_counted_and_in_the_warnings() {
    let (_folder, [out]) = scratch(["run"]);
    let mut run = small(&out, &["interpreter.workers=1", "train.steps=2", "eval.before_training=false"]);
    let mut run = run.stderr(Stdio::piped()).spawn().unwrap();
    kill_worker(&mut run, &out);
    let mut text = String::new();
    run.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(run.wait().unwrap().success(), "{text}");
    let told = "Python tool: a call ended with a dead worker: killed from outside";
    assert_eq!(text.matches(&format!("warning: {told}")).count(), 1, "{text}");
    let sum = |name: &str| phase(&rows(&out), "rl").map(|row| row[name].as_f64().unwrap()).sum::<f64>();
    assert_eq!((sum("tool/worker_died"), sum("outcome/task_failed")), (1.0, 0.0));
    let end = "1 of 16 trajectories failed for reasons outside the policy (outcome/task_failed and tool/worker_died count \
               them); the first failures are printed above";
    assert!(text.contains(end), "{text}");
    let warnings = text_of(out.join("warnings.jsonl"));
    assert_eq!(warnings.matches(told).count(), 1, "{warnings}");
}
