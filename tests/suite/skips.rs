//! Tests that lack something on this machine: what they lack and how to have it, listed when the run is
//! over, after the harness's own summary.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, Once};

/// A reason to skip; each says how to have what is lacking.
pub const NO_PYTHON: &str = "no python3 on the PATH (install Python 3)";
pub const NO_BROWSER: &str = "no chromium on the PATH (install Chromium)";
pub const NO_CURL: &str = "no curl on the PATH (install curl)";
pub const NO_NAMESPACES: &str = "no user namespaces for this user (Docker: --security-opt seccomp=unconfined; Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)";
pub const NO_MEMORY_GROUP: &str =
    "no memory control group can be made (run the tests as root, where /sys/fs/cgroup can be written)";
pub const NO_BF16: &str = "no dot products of bf16 in this processor (it takes AVX-512 BF16)";

/// Reason → the tests.
static NOTED: Mutex<BTreeMap<String, BTreeSet<String>>> = Mutex::new(BTreeMap::new());

/// Notes that the running test skips something for `reason`; `detail` says more about it, or is empty.
///
/// The test's name is the one that the harness gives its thread. The list is printed when the process
/// ends, because the harness keeps what a passing test prints to itself.
pub fn note(reason: &str, detail: &str) {
    static AT_EXIT: Once = Once::new();
    // SAFETY: `list` may be called at any time, and neither unwinds nor ends the process.
    AT_EXIT.call_once(|| assert_eq!(unsafe { libc::atexit(list) }, 0));
    let thread = std::thread::current();
    let test = thread.name().filter(|name| *name != "main").unwrap_or("a test, nameless on one test thread");
    let line = if detail.is_empty() { test.to_owned() } else { format!("{test}: {detail}") };
    NOTED.lock().expect("no panic inside").entry(reason.to_owned()).or_default().insert(line);
}

extern "C" fn list() {
    let Ok(noted) = NOTED.lock() else { return };
    let mut text = "\nSkipped on this machine:\n".to_owned();
    for (reason, tests) in noted.iter() {
        text += &format!("  {reason}:\n");
        tests.iter().for_each(|test| text += &format!("    {test}\n"));
    }
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn starts(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// `None`, noted, where python3 is not on the PATH.
pub fn python3() -> Option<()> {
    let there = starts(Command::new("python3").arg("--version"));
    if !there {
        note(NO_PYTHON, "");
    }
    there.then_some(())
}

/// Chromium, told to print a page's document after its scripts. Its own files go to `profile`.
pub fn browser(profile: &Path) -> Command {
    let mut command = Command::new("chromium");
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", profile.display()));
    command
}

/// Whether Chromium runs here; noted where it does not.
pub fn chromium() -> bool {
    let profile = tempfile::tempdir().expect("a folder");
    let there = browser(profile.path()).arg("about:blank").stderr(Stdio::null()).output();
    let there = there.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).contains("<html"));
    if !there {
        note(NO_BROWSER, "");
    }
    there
}

/// Whether curl is on the PATH; noted where it is not.
pub fn curl() -> bool {
    let there = starts(Command::new("curl").arg("--version"));
    if !there {
        note(NO_CURL, "");
    }
    there
}

/// Whether this user may make user namespaces and mount in them; noted where not.
pub fn namespaces() -> bool {
    let there = starts(Command::new("unshare").args(["--user", "--map-root-user", "--mount", "true"]));
    if !there {
        note(NO_NAMESPACES, "");
    }
    there
}
