//! `scripts/gpu_check.sh` with a program that only prints rows: what is in its table when it is cut off.

use crate::cli::in_repository;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Stands for `rloss` and for `gpu_check`: three rows a part, each written to `$ROWS` once it is printed.
/// `facts` hangs if `$HANGS` is set, `seeded` crashes if `$CRASHES` is set.
const PROGRAM: &str = r#"#!/usr/bin/env bash
say() { echo "$1"; echo "$1" >>"$ROWS"; sleep 0.02; }
case "$1" in
    --help) echo nccl; exit ;;
    device) echo "| device | a GPU of paper | |"; exit ;;
    train)
        mkdir -p "$4"
        echo '{"phase":"eval","acc/mean@1":0.5,"mismatch/logprob_abs_diff_max":0}' >"$4/metrics.jsonl"
        exit ;;
esac
say "| $1, first | passed | |"
if [ "$1" = facts ] && [ -n "${HANGS:-}" ]; then sleep 100; fi
if [ "$1" = seeded ] && [ -n "${CRASHES:-}" ]; then kill -SEGV $$; fi
say "| $1, second | passed | |"
say "| $1, third | passed | |"
"#;

/// A folder with the program, for one call of the script.
struct Call {
    folder: TempDir,
}

impl Call {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("rloss");
        fs::write(&program, PROGRAM).expect("the program");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("its permissions");
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The script with these arguments, in a process group of its own. No CUDA tool is on its path.
    fn script(&self, arguments: &[&str]) -> Command {
        let script = in_repository("scripts/gpu_check.sh");
        let mut command = Command::new("bash");
        command.arg(script).arg("--binary").arg(self.path("rloss"));
        command.arg("--check").arg(self.path("rloss")).args(arguments);
        command.env("OUT", self.folder.path()).env("ROWS", self.path("rows")).env("PYTHON", "none");
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The lines of a file that are written completely.
    fn lines(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.path(name)).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(str::to_owned).collect()
    }

    /// The table's rows, without the date.
    fn table(&self) -> Vec<String> {
        let lines = self.lines("gpu-check.md").into_iter();
        lines.filter(|line| line.starts_with('|') && !line.contains(" s, success ")).collect()
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_whole_call_has_every_part_in_order() {
    let call = Call::new();
    let output = call.script(&[]).env("CRASHES", "yes").output().expect("bash");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let table = call.table();
    let place = |row: &str| {
        table.iter().position(|line| line.starts_with(row)).unwrap_or_else(|| panic!("{row}: {table:#?}"))
    };
    let rows = [
        "| device |",
        "| primitives, third |",
        "| facts, third |",
        "| seeded, first |",
        "| seeded | **FAILED** | ended with code 139",
        "| oracle, third |",
        "| links, third |",
        "| speed, third |",
        "| profile | not run |",
        "| model, third |",
        "| compute-sanitizer memcheck |",
    ];
    assert!(rows.map(place).is_sorted(), "{table:#?}");
    assert!(!table.iter().any(|line| line.contains("seeded, second")), "{table:#?}");
    let quickstart = call.lines("gpu-check.md");
    assert!(
        quickstart.iter().any(|line| line.contains("| quickstart on the GPU | passed |")),
        "{quickstart:#?}"
    );
}

#[test]
fn the_deadline_cuts_a_part_and_all_after_it() {
    let call = Call::new();
    let start = Instant::now();
    let output = call.script(&["--deadline", "4"]).env("HANGS", "yes").output().expect("bash");
    assert!(start.elapsed() < Duration::from_secs(60), "the part that hangs was not cut off");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let table = call.table();
    let has = |row: &str| table.iter().any(|line| line.starts_with(row));
    assert!(has("| facts, first |") && !has("| facts, second |"), "{table:#?}");
    for part in ["facts", "seeded", "oracle", "speed", "quickstart", "memcheck"] {
        assert!(has(&format!("| {part} | not run: deadline |")), "{part}: {table:#?}");
    }
    assert!(!has("| nccl"), "a part of the second call: {table:#?}");
}

#[test]
fn only_the_named_parts_run_and_a_second_call_is_appended() {
    let call = Call::new();
    for parts in ["seeded,links", "oracle-full"] {
        let output = call.script(&["--only", parts]).output().expect("bash");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    }
    let firsts = call.lines("rows").into_iter().filter(|line| line.contains("first"));
    let names: Vec<String> = firsts.filter_map(|line| Some(line.split(", first").next()?.into())).collect();
    assert_eq!(names, ["| seeded", "| links", "| oracle"]);
    let named = |row: &&String| row.contains(", first");
    assert_eq!(call.table().iter().filter(named).count(), 3);
    for (arguments, told) in [
        (["--only", "sanitizer"], "no part sanitizer: --only takes device primitives"),
        (["--skip", "peers"], "--skip is gone: name the parts to run"),
        (["--deadline", "soon"], "--deadline takes seconds from the start, such as 600, not soon"),
    ] {
        let output = call.script(&arguments).output().expect("bash");
        assert!(output.status.code() == Some(2) && text(&output).contains(told), "{}", text(&output));
    }
}

/// Ends the script's process group after `count` rows of its parts. Returns its call.
fn killed_after(count: usize) -> Call {
    let call = Call::new();
    let mut script = call.script(&["--deadline", "600"]);
    let mut child = script.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("bash");
    let start = Instant::now();
    while call.lines("rows").len() < count {
        assert!(start.elapsed() < Duration::from_secs(120), "no row {count}: {:?}", call.lines("rows"));
        std::thread::sleep(Duration::from_millis(2));
    }
    let group = format!("-{}", child.id());
    assert!(Command::new("kill").args(["-9", "--", &group]).status().expect("kill").success());
    child.wait().expect("its end");
    call
}

#[test]
fn killed_at_any_moment_every_row_that_was_reached_is_in_the_table() {
    let whole = Call::new();
    assert!(whole.script(&[]).output().expect("bash").status.success());
    let (all_rows, all) = (whole.lines("rows"), whole.table());
    assert!(all_rows.len() >= 20, "{all_rows:?}");
    for moment in 1..=10 {
        let call = killed_after(moment * all_rows.len() / 10);
        let table = call.table();
        for row in call.lines("rows") {
            assert!(table.contains(&row), "moment {moment}: {row} was printed: {table:#?}");
        }
        assert_eq!(table, all[..table.len()], "moment {moment}");
    }
}
