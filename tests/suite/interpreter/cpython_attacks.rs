//! What hostile Python tries through the interpreter itself, with everything that the standard library
//! offers.
//!
//! Each attack is a function body, run once by a free Python (the control, which must succeed) and once as
//! a snippet (which must be denied). A verdict of its own tells a denial from a set-up that went wrong.

use super::attacks::victim;
use super::*;
use rloss::interpreter::CPython;

/// Leaves `DENIED`, `SUCCEEDED` or `SETUP FAILED` as the last line.
const FRAME: &str = "
import ctypes, os, sys
folder, victim, port = FOLDER, VICTIM, PORT
libc = ctypes.CDLL(None, use_errno=True)
def raw(*arguments):
    if libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) < 0:
        raise OSError(ctypes.get_errno(), 'system call')
def attack():
BODY
try:
    attack()
    verdict = 'SUCCEEDED'
except PermissionError:
    verdict = 'DENIED'
except RuntimeError as error:
    verdict = 'DENIED' if 'new thread' in str(error) else 'SETUP FAILED: ' + repr(error)
except ImportError as error:
    verdict = 'DENIED' if error.name == 'planted' else 'SETUP FAILED: ' + repr(error)
except BaseException as error:
    verdict = 'SETUP FAILED: ' + repr(error)
print()
print(verdict)
";

/// Attacks whose control needs root, or a kernel or a file system that offers the call.
const DEPENDS: [&str; 6] =
    ["trace", "parent memory", "raise a limit", "merge pages", "new namespaces", "xattr"];

const ATTACKS: &[(&str, &str)] = &[
    ("passwd", "open('/etc/passwd').read()"),
    ("ssh key", "open(folder + '/home/.ssh/id_ed25519').read()"),
    ("recipe's folder", "open(folder + '/recipe.toml').read()"),
    ("by dots", "open(folder + '/home/../recipe.toml').read()"),
    ("list a folder", "os.listdir(folder)"),
    ("descriptors", "os.open(folder, os.O_RDONLY | os.O_DIRECTORY)"),
    ("parent environment", "open(f'/proc/{victim}/environ', 'rb').read()"),
    ("parent memory", "open(f'/proc/{os.getppid()}/mem', 'rb')"),
    ("own memory by proc", "open('/proc/self/mem', 'r+b')"),
    ("write", "open(folder + '/recipe.toml', 'w').write('gone')"),
    ("write in tmp", "import uuid; p = f'/tmp/{uuid.uuid4()}'; open(p, 'w').write('x'); os.unlink(p)"),
    ("write in shared memory", "p = f'/dev/shm/rloss-{victim}'; open(p, 'w').write('x'); os.unlink(p)"),
    ("many files", "os.mkdir(folder + '/many')\nfor i in range(100): open(f'{folder}/many/{i}', 'x')"),
    ("append", "open(folder + '/recipe.toml', 'a').write('more')"),
    ("truncate", "os.truncate(folder + '/recipe.toml', 0)"),
    ("chmod", "os.chmod(folder + '/recipe.toml', 0o777)"),
    ("chown", "os.chown(folder + '/recipe.toml', os.getuid(), os.getgid())"),
    ("utime", "os.utime(folder + '/recipe.toml', (0, 0))"),
    ("xattr", "os.setxattr(folder + '/recipe.toml', 'user.x', b'y')"),
    ("rename", "os.rename(folder + '/recipe.toml', folder + '/renamed')"),
    ("unlink", "os.unlink(folder + '/recipe.toml')"),
    ("symlink", "os.symlink('/etc/passwd', folder + '/link')"),
    ("hardlink", "os.link(folder + '/recipe.toml', folder + '/link')"),
    ("pipe file", "os.mkfifo(folder + '/fifo')"),
    ("planted module", "os.chdir(folder); sys.path.insert(0, folder); import planted"),
    ("loopback", "import socket; socket.create_connection(('127.0.0.1', port), 5)"),
    (
        "datagram",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    ),
    ("unix socket", "import socket; socket.socket(socket.AF_UNIX).bind(folder + '/socket')"),
    ("abstract socket", "import socket; socket.socket(socket.AF_UNIX).bind(f'\\0rloss-{victim}')"),
    ("netlink", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    ("socket pair", "import socket; socket.socketpair()"),
    ("fork", "if os.fork() == 0: os._exit(0)"),
    ("daemon", "if os.fork() == 0:\n    os.setsid()\n    os._exit(0)"),
    ("thread", "import threading; threading.Thread(target=int).start()"),
    ("subprocess", "import subprocess; subprocess.run(['/bin/true'], check=True)"),
    ("shell", "import subprocess; subprocess.check_output('id', shell=True)"),
    ("spawn", "os.posix_spawn('/bin/true', ['true'], {})"),
    ("system", "if os.system('exit 0') != 0: raise PermissionError"),
    ("own interpreter", "import subprocess; subprocess.run([sys.executable, '--version'], check=True)"),
    ("setuid program", "import subprocess; subprocess.run(['/bin/su', '--version'], check=True)"),
    ("exec", "os.execv('/bin/sh', ['sh', '-c', 'echo SUCCEEDED'])"),
    ("kill", "os.kill(victim, 0)"),
    ("kill parent", "os.kill(os.getppid(), 0)"),
    ("kill group", "os.killpg(0, 0)"),
    ("kill all", "raw(62, -1, 0) if os.uname().machine == 'x86_64' else os.kill(victim, 0)"),
    ("limit the parent", "import resource; resource.prlimit(victim, resource.RLIMIT_CPU, (1000, 1000))"),
    ("raise a limit", "import resource; resource.prlimit(0, resource.RLIMIT_NOFILE, (4096, 4096))"),
    ("priority", "os.setpriority(os.PRIO_PROCESS, victim, 19)"),
    ("affinity", "os.sched_setaffinity(victim, os.sched_getaffinity(victim))"),
    ("signal by a pipe", "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, victim)"),
    ("trace", "if libc.ptrace(0x4206, victim, None, None) < 0: raise OSError(ctypes.get_errno(), 'ptrace')"),
    ("memory file", "os.memfd_create('x')"),
    ("process descriptor", "os.pidfd_open(victim)"),
    ("semaphore", "import multiprocessing; multiprocessing.Lock()"),
    ("shared memory", "if libc.shmget(0, 4096, 0o600) < 0: raise OSError(ctypes.get_errno(), 'shmget')"),
    ("message queue", "if libc.msgget(0, 0o600) < 0: raise OSError(ctypes.get_errno(), 'msgget')"),
    (
        "shared futex",
        "w = ctypes.c_int(1)\nraw(202 if os.uname().machine == 'x86_64' else 98, ctypes.addressof(w), 1, 1)",
    ),
    ("advice about a file", "os.posix_fadvise(os.open(sys.executable, os.O_RDONLY), 0, 0, 0)"),
    ("cut", "os.open('/dev/null', os.O_RDONLY | os.O_TRUNC)"),
    ("new namespaces", "if libc.unshare(0x10020000): raise OSError(ctypes.get_errno(), 'unshare')"),
    ("merge pages", "import mmap; mmap.mmap(-1, 4096).madvise(12)"),
    ("more filters", "if libc.prctl(38, 1, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'prctl')"),
];

fn program(body: &str, folder: &str, victim: u32, port: u16) -> String {
    let body: String = body.lines().map(|line| format!("    {line}\n")).collect();
    FRAME
        .replace("BODY", &body)
        // A string of JSON is one of Python, whatever letters it has.
        .replace("FOLDER", &serde_json::to_string(folder).unwrap())
        .replace("VICTIM", &victim.to_string())
        .replace("PORT", &port.to_string())
}

fn verdict(text: &str) -> String {
    text.trim_end().lines().last().unwrap_or("nothing").to_string()
}

#[test]
fn hostile_python_is_denied_what_a_free_one_may_do() {
    let Some(python) = cpython::cpython(|_| {}) else { return };
    all_denied(&python, &[]);
}

/// A scratch is there to be written, and calls that cut files with it; outside all is as without.
#[test]
fn hostile_python_with_a_scratch_is_denied_the_same() {
    let Some(python) = cpython::with_scratch(|s| s.scratch_mib = 1) else { return };
    all_denied(&python, &["write in tmp", "cut"]);
}

/// A folder for a victim outside of /tmp, which a scratch hides; the target folder may itself lie below /tmp.
fn outside_of_tmp() -> tempfile::TempDir {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let places = [target, std::env::temp_dir(), "/var/tmp".into(), "/dev/shm".into()];
    let hidden = |place: &PathBuf| place.canonicalize().is_ok_and(|place| place.starts_with("/tmp"));
    let made =
        places.iter().filter(|place| !hidden(place)).find_map(|place| tempfile::tempdir_in(place).ok());
    made.expect("a folder outside of /tmp that can be written: /var/tmp, or set TMPDIR to one")
}

/// Runs every attack but those `left_out`.
fn all_denied(python: &CPython, left_out: &[&str]) {
    for (name, body) in ATTACKS.iter().filter(|(name, _)| !left_out.contains(name)) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let attempt = |run: &dyn Fn(&str) -> String| {
            let folder = outside_of_tmp();
            let mut victim = victim(folder.path());
            std::fs::write(folder.path().join("planted.py"), "").unwrap();
            let found = run(&program(body, folder.path().to_str().unwrap(), victim.id(), port));
            assert!(victim.try_wait().unwrap().is_none(), "{name}: the victim died");
            victim.kill().unwrap();
            victim.wait().unwrap();
            let recipe = std::fs::read_to_string(folder.path().join("recipe.toml")).unwrap_or_default();
            (verdict(&found), recipe == "recipe" && std::fs::read_dir(folder.path()).unwrap().count() == 3)
        };
        let (free, _) = attempt(&|code| {
            let output = Command::new(cpython::program()).args(["-c", code]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
        });
        match free.as_str() {
            "SUCCEEDED" => {}
            _ if DEPENDS.contains(name) => eprintln!("{name}: not offered by this machine ({free})"),
            other => panic!("{name}: the control ended with {other}"),
        }
        let (confined, untouched) = attempt(&|code| call(python, code).text);
        assert_eq!(confined, "DENIED", "{name}: as a snippet");
        assert!(untouched, "{name}: the victim's folder was changed");
    }
}

/// Looks through its own memory, page by page: `write` reports an unmapped page instead of crashing.
const SCAN: &str = "
import ctypes, os, re
libc = ctypes.CDLL(None)
r, w = os.pipe()
anchors = [id(object()), id(bytes(1 << 20)), id([0] * 1000), id(type('T', (), {})), id(os.__dict__)]
found = set()
for page in sorted({(a >> 12) + i for a in anchors for i in range(-2048, 2048)}):
    if libc.write(w, ctypes.c_void_p(page << 12), ctypes.c_size_t(4096)) == 4096:
        found.update(re.findall(rb'mark[0-9a-f]{64}', os.read(r, 4096)))
len(found) > 0
";

#[test]
fn a_snippet_finds_nothing_of_an_earlier_one() {
    let secret = "import hashlib\nsecret = [('mark' + hashlib.sha256(bytes([i])).hexdigest()) for i in range(100)]\n\
                  print(secret)";
    let scanned = |python: &CPython, other: SessionId| {
        use rloss::interpreter::Interpreter;
        for _ in 0..3 {
            assert_eq!(python.call(SessionId(0), secret).outcome, Answered);
        }
        let reply = python.call(other, SCAN);
        assert_eq!(reply.outcome, Answered, "{}", reply.text);
        reply.text
    };
    let Some(keeping) = cpython::cpython(|s| (s.state, s.workers) = (InterpreterState::Trajectory, 1)) else {
        return;
    };
    assert_eq!(scanned(&keeping, SessionId(0)), "True", "the control: the same process");
    assert_eq!(scanned(&keeping, SessionId(1)), "False", "another trajectory");
    let Some(python) = cpython::cpython(|s| s.workers = 1) else { return };
    assert_eq!(scanned(&python, SessionId(0)), "False", "the next call");
}

/// The flags of an open file are all its holders': one that is shared passes messages.
#[test]
fn trajectories_share_no_open_file() {
    use rloss::interpreter::Interpreter;
    let kept = |s: &mut rloss::interpreter::InterpreterSettings| {
        (s.state, s.workers) = (InterpreterState::Trajectory, 1)
    };
    let Some(python) = cpython::cpython(kept) else { return };
    let flags = "import fcntl\n[fcntl.fcntl(fd, fcntl.F_GETFL) for fd in range(3)]";
    let before = python.call(SessionId(1), flags).text;
    let set =
        "import fcntl, os\nfor fd in range(3): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)";
    assert_eq!(python.call(SessionId(2), set).outcome, Answered);
    assert_eq!(python.call(SessionId(1), flags).text, before);
    assert_eq!(python.call(SessionId(3), flags).text, before);
}

/// What is preloaded into this process is no part of the sandbox, and its folder no folder of the
/// interpreter.
#[test]
fn a_preloaded_library_opens_no_folder() {
    if !cpython::there() {
        return;
    }
    let (folder, [source, library]) = scratch(["x.c", "x.so"]);
    std::fs::write(&source, "int nothing_at_all;").unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    if !built.is_ok_and(|status| status.success()) {
        return skips::note("no C compiler (install gcc or clang)", "");
    }
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    let mut command =
        own_process("cpython_attacks::alone_with_a_preloaded_library", secret.to_str().unwrap());
    let output = command.env("LD_PRELOAD", &library).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by a_preloaded_library_opens_no_folder in a process of its own"]
fn alone_with_a_preloaded_library() {
    use rloss::interpreter::Interpreter;
    let Ok(secret) = std::env::var("RLOSS_TEST_CHILD") else { return };
    let python = cpython::cpython(|_| {}).unwrap();
    let secret = serde_json::to_string(&secret).unwrap();
    let reply = python.call(SessionId(0), &format!("open({secret}).read()"));
    assert!(reply.text.contains("PermissionError"), "{}", reply.text);
}
