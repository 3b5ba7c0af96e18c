//! A scratch folder for the machine's Python: how much can be written, who sees it, and for how long.

use super::*;
use rloss::interpreter::CPython;
use std::path::Path;

/// Workers with 4 MiB of scratch; `None` where there is no Python to test with, or no namespace for a
/// scratch.
fn with_scratch(state: InterpreterState) -> Option<CPython> {
    cpython::with_scratch(|s| (s.scratch_mib, s.state, s.workers) = (4, state, 1))
}

#[test]
fn files_live_as_long_as_their_trajectory_and_no_other_sees_them() {
    let Some(python) = with_scratch(InterpreterState::Trajectory) else { return };
    eprintln!("{}", python.sandbox_description());
    assert!(
        python.sandbox_description().contains("4 MiB of scratch in /tmp/scratch"),
        "{}",
        python.sandbox_description()
    );
    let (a, b) = (SessionId(1), SessionId(2));
    let said = |session, code: &str| python.call(session, code).text;
    let write = "import os
os.mkdir('d')
print(open('x', 'w').write('mine'))
os.rename('x', 'd/rloss-scratch-test')
os.getcwd(), os.listdir('/tmp/scratch')";
    assert_eq!(said(a, write), "4\n('/tmp/scratch', ['d'])");
    assert_eq!(said(b, "import os\nos.listdir('/tmp/scratch')"), "[]", "another trajectory");
    assert_eq!(said(a, "open('/tmp/scratch/d/rloss-scratch-test').read()"), "'mine'", "the next call");
    assert!(!Path::new("/tmp/scratch/d/rloss-scratch-test").exists(), "nothing is written outside");
    let usual = "import shutil, tempfile
with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
    file.write(b'12')
    shutil.copyfile('d/rloss-scratch-test', folder + '/copy')
    file.seek(0)
    print(file.read(), open(folder + '/copy').read())
shutil.rmtree('d')
os.listdir()";
    assert_eq!(said(a, usual), "b'12' mine\n[]");
    assert_eq!(said(a, "open('y', 'w').write('2')"), "1");
    python.close(a);
    assert_eq!(said(a, "import os\nos.listdir('/tmp/scratch')"), "[]", "gone with the trajectory");
}

#[test]
fn a_call_without_memory_has_a_scratch_of_its_own() {
    let Some(python) = with_scratch(InterpreterState::Call) else { return };
    assert_eq!(call(&python, "open('x', 'w').write('1')").text, "1");
    assert_eq!(call(&python, "import os\nos.listdir()").text, "[]");
}

#[test]
fn a_scratch_is_full_at_its_size_and_at_its_number_of_files() {
    let Some(python) = with_scratch(InterpreterState::Call) else { return };
    for (code, error) in [
        ("open('one', 'wb').write(bytes(5 << 20))", "OSError: [Errno 2"),
        (
            "for name in 'abc': open(name, 'wb').write(bytes(2 << 20))",
            "OSError: [Errno 28] No space left on device",
        ),
        ("for i in range(2000): open(str(i), 'x')", "OSError: [Errno 28] No space left on device"),
        ("import os\nfor i in range(2000):\n  os.mkdir('d')\n  os.chdir('d')", "OSError: [Errno 28]"),
    ] {
        let reply = call(&python, code);
        assert_eq!(reply.outcome, Raised, "{code}: {}", reply.text);
        assert!(reply.text.contains(error), "{code}: {}", reply.text);
        assert_eq!(call(&python, "1 + 1").text, "2");
    }
}

/// What a file's mode, owner and times are is not landlock's to keep, so a snippet may not change them.
#[test]
fn modes_owners_and_links_stay_out_of_reach() {
    let Some(python) = with_scratch(InterpreterState::Call) else { return };
    for code in [
        "os.chmod('x', 0o777)",
        "os.utime('x', (0, 0))",
        "os.chown('x', 0, 0)",
        "os.symlink('/etc/passwd', 'y')",
        "os.link('x', 'y')",
        "os.mkfifo('y')",
        "os.listdir('/proc')",
        "os.truncate('x', 0)",
        "os.execv('/tmp/scratch/x', ['x'])",
    ] {
        let reply = call(&python, &format!("import os\nopen('x', 'w').close()\n{code}"));
        assert!(reply.text.contains("PermissionError"), "{code}: {}", reply.text);
    }
}
