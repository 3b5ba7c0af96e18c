//! Odd inputs and a short environment: one line, exit code 1 or 2, within bounded time and memory; never a
//! panic or an abort.

use super::*;
use crate::skips;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;

/// `rloss` with `arguments`, under the shell's `limits`.
fn limited(limits: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("{limits}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_rloss")])
        .args(arguments);
    command.stdin(Stdio::null());
    command
}

/// Expects an end that was meant: done, or one line that says why not.
fn ended_well(what: &str, output: &Ended) -> String {
    let (said, code) = (output.stderr.clone(), output.code);
    assert!(matches!(code, Some(0 | 1 | 2 | 127)), "{what}: {code:?}: {said}");
    for word in ["panicked", "internal error", "RUST_BACKTRACE", "overflowed its stack"] {
        assert!(!said.contains(word), "{what}: {said}");
    }
    if let Some(1 | 2) = code {
        assert_eq!(said.matches("error: ").count(), 1, "{what}: {said}");
    }
    said
}

fn refused(command: &mut Command, words: &[&str]) {
    let output = output(command);
    let said = ended_well(&words.join(" "), &output);
    assert_eq!(output.code, Some(2), "{said}");
    assert_has(&said, words);
}

#[test]
fn a_folder_that_moves_or_vanishes_ends_the_run() {
    for vanish in [false, true] {
        let (_folder, [out, elsewhere]) = scratch(["run", "elsewhere"]);
        let mut command =
            small(&out, &["train.steps=100000", "checkpoint.every_steps=1", "eval.every_steps=0"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        assert!(wait_until(&mut child, || out.join("checkpoints/step-000001").exists()));
        fs::rename(&out, &elsewhere).unwrap();
        if vanish {
            let _ = fs::remove_dir_all(&elsewhere);
        }
        let Ended { code, stderr: said, .. } = child.wait_with_output().unwrap().into();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("error: ") && !said.contains("done:"), "{said}");
        assert!(!out.exists(), "nothing is begun at the old place");
        if !vanish {
            assert!(said.contains("moved, replaced or removed"), "{said}");
            let mut verify = rloss();
            done(verify.arg("verify").arg(&elsewhere));
        }
    }
}

#[test]
fn a_tokenizer_that_is_cut_anywhere_is_refused() {
    let folder = TempDir::new().unwrap();
    let whole = fs::read(first_checkpoint(warm_model()).join("tokenizer.json")).unwrap();
    let text = String::from_utf8(whole.clone()).unwrap();
    let decoder = text.find("\"decoder\"").expect("a decoder");
    for cut in (decoder..whole.len()).step_by(7).chain((0..decoder).step_by(211)) {
        let found = rloss::harmony::HarmonyTokenizer::from_bytes(whole[..cut].to_vec(), "cut.json");
        let error = found.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("cut.json"), "cut at {cut}: {error}");
    }
    // And nonsense in place of the decoder, which the crate does not expect.
    let file = folder.path().join("torn.json");
    fs::write(&file, text.replace("\"decoder\"", "\"decoder\": {\"type\": \"Sequence\"}, \"was\"")).unwrap();
    let set = format!("model.tokenizer={}", file.display());
    refused(&mut train(&folder.path().join("run"), &[&set]), &["torn.json", "tokenizer.json"]);
}

#[test]
fn paths_that_are_not_utf8_work_or_are_refused() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join(OsStr::from_bytes(b"r\xffn"));
    done(&mut small(&out, &["train.steps=1"]));
    for command in ["eval", "rollout", "check-mismatch"] {
        refused(rloss().arg(command).arg(&out), &["UTF-8"]);
    }
    done(rloss().arg("verify").arg(&out));
    done(rloss().arg("report").arg(&out));
    let set = OsStr::from_bytes(b"model.path=r\xffn").to_owned();
    refused(rloss().arg("train").arg(quickstart()).arg("--set").arg(set), &[]);
}

#[test]
fn a_short_environment_is_told_in_one_line() {
    let folder = TempDir::new().unwrap();
    let (recipe, out) = (quickstart(), folder.path().join("run"));
    let (recipe, out) = (recipe.to_str().unwrap(), out.to_str().unwrap());
    let steps =
        ["--set", "cold_start.steps=1", "--set", "train.steps=0", "--set", "eval.before_training=false"];
    let arguments = |more: &[&'static str]| {
        let mut all = vec!["train", recipe, "--out", out];
        all.extend(steps);
        all.extend(more);
        all
    };
    for files in [3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24] {
        let _ = fs::remove_dir_all(out);
        let output = output(&mut limited(&format!("ulimit -n {files}"), &arguments(&[])));
        let said = ended_well(&format!("{files} files"), &output);
        assert!(!said.contains("unsandboxed"), "{files} files: {said}");
    }
    for mib in [40, 100, 150, 200, 300, 500, 1000] {
        let _ = fs::remove_dir_all(out);
        let output = output(&mut limited(&format!("ulimit -v {}", mib << 10), &arguments(&[])));
        ended_well(&format!("{mib} MiB"), &output);
    }
    for kib in [64, 256, 1024] {
        let _ = fs::remove_dir_all(out);
        let output = output(&mut limited(&format!("ulimit -s {kib}"), &arguments(&[])));
        ended_well(&format!("a stack of {kib} KiB"), &output);
    }
    let _ = fs::remove_dir_all(out);
    let threads = ["--set", "parallel.threads=4096"];
    let output = output(&mut limited("ulimit -v 4000000", &arguments(&threads)));
    let said = ended_well("4096 threads", &output);
    assert!(said.contains("parallel.threads") || said.contains("memory"), "{said}");
}

/// A bug: the allocator reserved 1 GiB at once and glibc 128 MiB for each thread, so limits between 1,000 and
/// 1,600 MiB left nothing for the rest.
#[test]
fn an_address_space_of_a_little_more_than_1_gib_is_enough() {
    let folder = TempDir::new().unwrap();
    let (recipe, out) = (quickstart(), folder.path().join("run"));
    let (recipe, out) = (recipe.to_str().unwrap(), out.to_str().unwrap());
    for mib in [700, 850, 1000, 1005, 1100, 1200, 1300, 1400, 1500, 1600] {
        let _ = fs::remove_dir_all(out);
        let mut command = limited(&format!("ulimit -v {}", mib << 10), &["train", recipe, "--out", out]);
        command.sets([
            "cold_start.steps=1",
            "train.steps=0",
            "eval.before_training=false",
            "parallel.threads=2",
        ]);
        let output = output(&mut command);
        assert_eq!(output.code, Some(0), "{mib} MiB: {}", output.stderr);
    }
}

#[test]
fn a_scratch_is_refused_where_user_namespaces_are_forbidden() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let plain = train(&folder.path().join("run"), &["interpreter.kind=cpython", "interpreter.scratch_mib=1"]);
    // None may be made below a namespace that says so.
    let forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$0\" \"$@\"";
    let able = output(Command::new("unshare").args(["-Ur", "sh", "-c", forbid, "python3", "--version"]));
    if able.code != Some(0) {
        return skips::note(
            "no user namespace to forbid others in (util-linux, and the right to make one)",
            "",
        );
    }
    let mut command = Command::new("unshare");
    command.args(["-Ur", "sh", "-c", forbid]).arg(plain.get_program()).args(plain.get_args());
    refused(&mut command, &["interpreter.scratch_mib", "user namespaces", "set interpreter.scratch_mib = 0"]);
    let words = ["interpreter.scratch_mib", "cpython"];
    refused(&mut train(&folder.path().join("run"), &["interpreter.scratch_mib=1"]), &words);
}

#[test]
fn what_is_no_file_or_too_long_is_refused_at_once() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    let keys: String = (0..400_000).map(|i| format!("key{i} = 1\n")).collect();
    fs::write(path("keys.toml"), &keys).unwrap();
    fs::write(path("some.toml"), &keys[..1_000_000]).unwrap();
    fs::write(path("deep.toml"), format!("{}a = 1\n", "a.".repeat(300_000))).unwrap();
    fs::write(path("latin.toml"), b"[train]\n# caf\xe9\n").unwrap();
    let mut long = File::create(path("long.jsonl")).unwrap();
    let piece = vec![b'x'; 1 << 20];
    (0..100).for_each(|_| long.write_all(&piece).unwrap());
    let long = path("long.jsonl");
    let out = path("run");
    let bounded = |arguments: &[&str]| {
        let output = output(&mut limited("ulimit -v 4000000", arguments));
        let said = ended_well(&arguments.join(" "), &output);
        assert_eq!(output.code, Some(2), "{arguments:?}: {said}");
        said
    };
    let out = out.to_str().unwrap();
    for recipe in [Path::new("/dev/zero"), &path("pipe"), folder.path(), &path("keys.toml"), &long] {
        bounded(&["train", recipe.to_str().unwrap(), "--out", out]);
        let based = path("based.toml");
        fs::write(&based, format!("base = {:?}\n", recipe.display().to_string())).unwrap();
        let said = bounded(&["train", based.to_str().unwrap(), "--out", out]);
        assert!(said.contains("based.toml:1"), "{said}");
        let recipe = recipe.display();
        for key in ["model.tokenizer", "cold_start.train_file", "train.trajectories", "model.path"] {
            let quick = quickstart();
            bounded(&["train", quick.to_str().unwrap(), "--out", out, "--set", &format!("{key}={recipe}")]);
        }
    }
    let said = bounded(&["train", path("some.toml").to_str().unwrap(), "--out", out]);
    assert!(said.contains("more") && said.len() < 25_000, "{} characters", said.len());
    bounded(&["train", path("deep.toml").to_str().unwrap(), "--out", out]);
    let said = bounded(&["train", path("latin.toml").to_str().unwrap(), "--out", out]);
    assert!(said.contains("line 2 is not UTF-8"), "{said}");
    assert!(!Path::new(out).exists());
}

#[test]
fn a_closed_terminal_stops_a_run_unless_it_was_told_not_to() {
    for ignored in [false, true] {
        let (_folder, [out]) = scratch(["run"]);
        // One that ignores the signal goes on to its end, the other stops long before.
        let steps = if ignored { "train.steps=6" } else { "train.steps=100000" };
        let plain = small(&out, &[steps, "checkpoint.every_steps=0", "eval.every_steps=0"]);
        let mut command = Command::new(plain.get_program());
        command.args(plain.get_args()).stdout(Stdio::null()).stderr(Stdio::null());
        // This process may itself be told to ignore the signal, which a child inherits.
        let action = if ignored { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: the child sets the action of one signal, which touches no memory.
        unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGHUP, action);
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        // The first checkpoint ends the cold start.
        assert!(wait_until(&mut child, || out.join("checkpoints/cold-start-000004").exists()));
        for _ in 0..2 {
            // SAFETY: kill takes two numbers and touches no memory of this process.
            unsafe { libc::kill(child.id() as i32, libc::SIGHUP) };
        }
        let code = child.wait().unwrap().code();
        assert_eq!(code, Some(if ignored { 0 } else { 130 }));
        done(rloss().arg("verify").arg(&out));
    }
}

#[test]
fn a_standard_output_that_takes_no_more_is_an_error() {
    if !Path::new("/dev/full").exists() {
        return;
    }
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let out = first_checkpoint(warm_model());
    for arguments in [&["--help"][..], &["verify", out.to_str().unwrap()]] {
        let mut command = rloss();
        let output = output(command.args(arguments).stdout(full()).stderr(Stdio::piped()));
        assert_eq!(output.code, Some(1), "{arguments:?}: {}", output.stderr);
    }
}

/// Work that no pool of the run's own was asked for went to rayon's own pool, a thread a core whatever
/// `parallel.threads` said: the optimizer's.
#[test]
fn a_run_starts_no_threads_but_those_it_is_allowed() {
    let folder = TempDir::new().unwrap();
    let mut command = super::small(&folder.path().join("run"), &["parallel.threads=1"]);
    // So many threads would that pool have, to be seen by their number.
    let mut run =
        command.env("RAYON_NUM_THREADS", "64").stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let mut threads_max = 0;
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        let tasks = fs::read_dir(format!("/proc/{}/task", run.id()));
        threads_max = threads_max.max(tasks.map_or(0, Iterator::count));
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    assert!(status.success());
    assert!((2..64).contains(&threads_max), "{threads_max} threads");
}
