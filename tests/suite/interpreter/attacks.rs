//! What a worker's process may not do, tried natively: as if hostile code had taken the interpreter over.
//!
//! Each attack runs in a process of its own, once free (the control, which must succeed) and once confined
//! in each way (which must fail). The exit codes tell a denial from a set-up that went wrong.

use super::*;
use Control::{Depends, Succeeds};
use rloss::interpreter::CPython;
use rloss::interpreter::sandbox::{self, AllowedFiles};
use std::ffi::CString;
use std::path::Path;
use std::process::Child;

const DENIED: i32 = 40;
const SUCCEEDED: i32 = 41;
const SETUP_FAILED: i32 = 42;

/// Where an attack finds its victims.
struct Place {
    folder: String,
    victim_id: i32,
}

impl Place {
    fn path(&self, name: &str) -> CString {
        CString::new(format!("{}/{name}", self.folder)).unwrap()
    }
}

type Attack = (&'static str, Control, fn(&Place) -> bool);

/// Whether the control must succeed.
#[derive(PartialEq, Clone, Copy)]
enum Control {
    Succeeds,
    /// Only with a kernel that offers the call, or as root: said when it does not succeed.
    Depends,
}

/// A raw system call; true when the kernel carried it out.
macro_rules! call {
    ($number:expr $(, $argument:expr)*) => {
        // SAFETY: every pointer passed below outlives its call; the process ends right after.
        unsafe { libc::syscall($number $(, $argument)*) >= 0 }
    };
}

fn open(path: CString, flags: i32) -> bool {
    call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o600)
}

fn absolute(path: &str) -> CString {
    CString::new(path).unwrap()
}

fn x32(number: i64) -> i64 {
    number | 0x4000_0000
}

const ATTACKS: &[Attack] = &[
    ("read-passwd", Succeeds, |_| open(absolute("/etc/passwd"), libc::O_RDONLY)),
    ("read-ssh-key", Succeeds, |p| open(p.path("home/.ssh/id_ed25519"), libc::O_RDONLY)),
    ("read-by-dots", Succeeds, |p| open(p.path("home/../recipe.toml"), libc::O_RDONLY)),
    ("list-folder", Succeeds, |p| open(p.path(""), libc::O_RDONLY | libc::O_DIRECTORY)),
    ("read-parent-environment", Succeeds, |p| {
        open(absolute(&format!("/proc/{}/environ", p.victim_id)), libc::O_RDONLY)
    }),
    ("open-parent-memory", Depends, |p| open(absolute(&format!("/proc/{}/mem", p.victim_id)), libc::O_RDWR)),
    ("read-parent-memory", Depends, |p| {
        let mut byte = 0u8;
        let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // An unmapped address of a process that may be read gives EFAULT instead of EPERM.
        let rc = unsafe { libc::process_vm_readv(p.victim_id, &here, 1, &here, 1, 0) };
        rc == 1 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
    }),
    ("write-new", Succeeds, |p| open(p.path("new"), libc::O_WRONLY | libc::O_CREAT)),
    ("write-recipe", Succeeds, |p| open(p.path("recipe.toml"), libc::O_WRONLY)),
    ("truncate", Succeeds, |p| call!(libc::SYS_truncate, p.path("recipe.toml").as_ptr(), 0)),
    ("chmod", Succeeds, |p| call!(libc::SYS_fchmodat, libc::AT_FDCWD, p.path("recipe.toml").as_ptr(), 0o777)),
    ("utime", Succeeds, |p| call!(libc::SYS_utimensat, libc::AT_FDCWD, p.path("recipe.toml").as_ptr(), 0, 0)),
    ("unlink", Succeeds, |p| call!(libc::SYS_unlinkat, libc::AT_FDCWD, p.path("recipe.toml").as_ptr(), 0)),
    ("mkdir", Succeeds, |p| call!(libc::SYS_mkdirat, libc::AT_FDCWD, p.path("folder").as_ptr(), 0o700)),
    ("symlink", Succeeds, |p| {
        call!(libc::SYS_symlinkat, absolute("/etc/passwd").as_ptr(), libc::AT_FDCWD, p.path("link").as_ptr())
    }),
    ("hardlink", Succeeds, |p| {
        let (from, to) = (p.path("recipe.toml"), p.path("link"));
        call!(libc::SYS_linkat, libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), 0)
    }),
    ("memory-file", Succeeds, |_| call!(libc::SYS_memfd_create, absolute("x").as_ptr(), 0)),
    ("tcp-socket", Succeeds, |_| call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0)),
    ("udp-socket", Succeeds, |_| call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM, 0)),
    ("unix-socket", Succeeds, |_| call!(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0)),
    ("netlink-socket", Succeeds, |_| call!(libc::SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW, 0)),
    ("socket-pair", Succeeds, |_| {
        let mut pair = [0i32; 2];
        call!(libc::SYS_socketpair, libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr())
    }),
    ("fork", Succeeds, |_| {
        let rc = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if rc == 0 {
            unsafe { libc::_exit(0) }
        }
        rc > 0
    }),
    ("thread", Succeeds, |_| std::thread::Builder::new().spawn(|| ()).is_ok_and(|t| t.join().is_ok())),
    // A refused execve returns; one that was carried out becomes `false`, which exits with 1.
    ("exec", Succeeds, |_| {
        let program = absolute("/bin/sh");
        let (dash_c, script) = (absolute("-c"), CString::new(format!("exit {SUCCEEDED}")).unwrap());
        let arguments = [program.as_ptr(), dash_c.as_ptr(), script.as_ptr(), std::ptr::null()];
        call!(libc::SYS_execve, program.as_ptr(), arguments.as_ptr(), std::ptr::null::<u8>())
    }),
    ("kill-parent", Succeeds, |p| call!(libc::SYS_kill, p.victim_id, 0)),
    ("kill-thread-of-parent", Succeeds, |p| call!(libc::SYS_tgkill, p.victim_id, p.victim_id, libc::SIGCONT)),
    ("limit-parent", Succeeds, |p| {
        let mut old = [0u64; 2];
        call!(libc::SYS_prlimit64, p.victim_id, libc::RLIMIT_CPU, 0, old.as_mut_ptr())
    }),
    ("raise-own-limit", Depends, |_| {
        let limit = libc::rlimit { rlim_cur: 1 << 40, rlim_max: 1 << 40 };
        call!(libc::SYS_prlimit64, 0, libc::RLIMIT_AS, &limit, 0)
    }),
    ("trace-parent", Depends, |p| call!(libc::SYS_ptrace, libc::PTRACE_SEIZE, p.victim_id, 0, 0)),
    ("pidfd", Succeeds, |p| call!(libc::SYS_pidfd_open, p.victim_id, 0)),
    ("executable-memory", Succeeds, |_| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        call!(libc::SYS_mmap, 0, 4096, libc::PROT_READ | libc::PROT_EXEC, flags, -1, 0)
    }),
    ("unshare-mounts", Depends, |_| call!(libc::SYS_unshare, libc::CLONE_NEWNS)),
    ("mount", Depends, |p| {
        let kind = absolute("tmpfs");
        let folder = p.path("home");
        call!(libc::SYS_unshare, libc::CLONE_NEWNS)
            && call!(libc::SYS_mount, kind.as_ptr(), folder.as_ptr(), kind.as_ptr(), 0, 0)
    }),
    ("chroot", Depends, |p| call!(libc::SYS_chroot, p.path("home").as_ptr())),
    ("become-another-user", Depends, |_| call!(libc::SYS_setuid, 65534)),
    ("io-uring", Depends, |_| {
        // The kernel writes the ring's layout back into these 120 bytes.
        let mut parameters = [0u64; 15];
        call!(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr())
    }),
    ("bpf", Depends, |_| {
        // BPF_MAP_CREATE of an array: type 2, key 4, value 4, 1 entry.
        let attributes: [u32; 18] = [2, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        call!(libc::SYS_bpf, 0, attributes.as_ptr(), 72)
    }),
    ("userfaultfd", Depends, |_| call!(libc::SYS_userfaultfd, libc::O_CLOEXEC)),
    ("perf", Depends, |_| {
        // A software clock (type 1, config 0) of this process.
        let attributes: [u32; 32] = std::array::from_fn(|i| [1, 128].get(i).copied().unwrap_or(0));
        call!(libc::SYS_perf_event_open, attributes.as_ptr(), 0, -1, -1, 0)
    }),
    ("keyring", Depends, |_| {
        let (kind, name) = (absolute("user"), absolute("rloss-test"));
        call!(libc::SYS_add_key, kind.as_ptr(), name.as_ptr(), kind.as_ptr(), 4, -1)
    }),
    ("x32-call", Depends, |_| call!(x32(libc::SYS_getpid))),
    ("x32-open", Depends, |_| {
        call!(x32(libc::SYS_openat), libc::AT_FDCWD, absolute("/etc/passwd").as_ptr(), 0)
    }),
    ("ioctl", Succeeds, |_| {
        let mut ready = 0i32;
        call!(libc::SYS_ioctl, 0, libc::FIONREAD, &raw mut ready)
    }),
    ("sleep", Succeeds, |_| call!(libc::SYS_nanosleep, [0i64, 1].as_ptr(), 0)),
];

/// A process to attack, and files that belong to it.
pub fn victim(folder: &Path) -> Child {
    std::fs::create_dir_all(folder.join("home/.ssh")).unwrap();
    std::fs::write(folder.join("home/.ssh/id_ed25519"), "key").unwrap();
    std::fs::write(folder.join("recipe.toml"), "recipe").unwrap();
    Command::new("sleep").arg("600").spawn().unwrap()
}

/// How the attacker is confined.
#[derive(Debug, PartialEq, Clone, Copy)]
enum Confined {
    Free,
    /// As the embedded interpreter's worker.
    Computing,
    /// As a snippet's CPython process.
    Python,
}

/// What CPython needs, and may do to itself alone.
const PYTHON_MAY: [&str; 2] = ["executable-memory", "sleep"];

fn attempt(name: &str, confined: Confined) -> Option<i32> {
    let folder = tempfile::tempdir().unwrap();
    let mut victim = victim(folder.path());
    let setting = format!("{name} {confined:?} {} {}", victim.id(), folder.path().display());
    let (input, _writer) = std::io::pipe().unwrap();
    let output = own_process("attacks::alone_attack", &setting).stdin(input).output().unwrap();
    assert!(victim.try_wait().unwrap().is_none(), "{name}: the victim died");
    victim.kill().unwrap();
    victim.wait().unwrap();
    if output.status.code() != Some(DENIED) && output.status.code() != Some(SUCCEEDED) {
        eprintln!("{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
    output.status.code()
}

#[test]
fn a_confined_process_is_denied_what_a_free_one_may_do() {
    for (name, control, _) in ATTACKS {
        match attempt(name, Confined::Free) {
            Some(SUCCEEDED) => {}
            Some(DENIED) if *control == Depends => eprintln!("{name}: not offered by this machine"),
            other => panic!("{name}: the control exited with {other:?}"),
        }
        assert_eq!(attempt(name, Confined::Computing), Some(DENIED), "{name}: the confined attack");
        let python = if PYTHON_MAY.contains(name) { SUCCEEDED } else { DENIED };
        assert_eq!(attempt(name, Confined::Python), Some(python), "{name}: the attack confined as Python");
    }
}

#[test]
#[ignore = "run by a_confined_process_is_denied_what_a_free_one_may_do in a process of its own"]
fn alone_attack() {
    if !in_own_process() {
        return;
    }
    let exit = |code: i32| -> ! {
        // SAFETY: ends the process at once, whatever the harness's other threads do.
        unsafe { libc::_exit(code) }
    };
    let setting = std::env::var("RLOSS_TEST_CHILD").unwrap_or_default();
    let fields: Vec<&str> = setting.splitn(4, ' ').collect();
    let [name, confined, victim_id, folder] = fields[..] else { exit(SETUP_FAILED) };
    let Ok(victim_id) = victim_id.parse() else { exit(SETUP_FAILED) };
    let place = Place { folder: folder.to_string(), victim_id };
    let Some((_, _, attack)) = ATTACKS.iter().find(|(n, _, _)| *n == name) else { exit(SETUP_FAILED) };
    // SAFETY: a plain system call.
    let parent_id = unsafe { libc::getppid() }.cast_unsigned();
    let confined = match confined {
        "Free" => Ok(()),
        "Computing" => sandbox::confine_worker(parent_id, 256 << 20, 3).map(drop),
        "Python" => {
            let files = AllowedFiles { read: vec!["/usr/lib".into()], execute: vec!["/usr/bin/env".into()] };
            sandbox::confine_fork_server(parent_id, &files, 3, 0)
                .and_then(|_| sandbox::snippet_filter(false))
                .and_then(|filter| apply(&filter))
        }
        _ => exit(SETUP_FAILED),
    };
    if let Err(error) = confined {
        eprintln!("{error:#}");
        exit(SETUP_FAILED);
    }
    exit(if attack(&place) { SUCCEEDED } else { DENIED })
}

/// Puts a snippet's filter on this thread, as its process does.
fn apply(filter: &[u8]) -> anyhow::Result<()> {
    let mut program: Vec<libc::sock_filter> = filter
        .chunks_exact(8)
        .map(|i| libc::sock_filter {
            code: u16::from_ne_bytes([i[0], i[1]]),
            jt: i[2],
            jf: i[3],
            k: u32::from_ne_bytes([i[4], i[5], i[6], i[7]]),
        })
        .collect();
    let program = libc::sock_fprog { len: u16::try_from(program.len())?, filter: program.as_mut_ptr() };
    // SAFETY: the program and its instructions outlive the call.
    let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
    anyhow::ensure!(rc == 0, "seccomp: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Makes landlock's first call fail as on a kernel without it, for this process and those it starts.
fn hide_landlock() {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let rules = [(libc::SYS_landlock_create_ruleset, Vec::new())].into();
    let missing = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, missing, arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter_all_threads(&program).unwrap();
}

#[test]
fn a_kernel_that_cannot_confine_is_refused_by_default() {
    let output = own_process("attacks::alone_without_landlock", "").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by a_kernel_that_cannot_confine_is_refused_by_default in a process of its own"]
fn alone_without_landlock() {
    if !in_own_process() {
        return;
    }
    hide_landlock();
    let mut refused = vec![EmbeddedInterpreter::new(settings(), super::program()).err().expect("refused")];
    let python_there = super::cpython::there();
    let with_python =
        || InterpreterSettings { python: super::cpython::program().display().to_string(), ..settings() };
    if python_there {
        refused.push(CPython::new(with_python(), super::program(), 64).err().expect("refused"));
    }
    for error in refused {
        assert!(error.is::<rloss::error::BadInput>(), "{error:#}");
        for part in ["the kernel has no landlock", "`interpreter.dangerously_allow_unsandboxed = true`"] {
            assert!(error.to_string().contains(part), "{error:#}");
        }
    }
    if python_there {
        let python = CPython::new(
            InterpreterSettings { dangerously_allow_unsandboxed: true, ..with_python() },
            super::program(),
            64,
        )
        .unwrap();
        let confinement = python.sandbox_description();
        assert!(confinement.contains("NOT SANDBOXED (the kernel has no landlock"), "{confinement}");
        assert_eq!(call(&python, "1 + 1").text, "2");
    }
    let python = embedded(|s| s.dangerously_allow_unsandboxed = true);
    assert!(python.sandbox_description().starts_with("NOT SANDBOXED (the kernel has no landlock"));
    assert_eq!(call(&python, "1 + 1").text, "2");
}
