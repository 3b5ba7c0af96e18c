//! What a worker takes from itself before it reads any code: Linux's landlock, seccomp and limits.
//!
//! Every step is a hard requirement: a kernel that lacks one makes the step fail, and the worker is refused.

use anyhow::{Context, Result, bail, ensure};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;
use std::io;

/// Confines a process that only computes: every step is tried, and the first failure is returned.
/// Descriptors from `first_unused` on are closed.
///
/// Returns what is active. The calling thread and those it starts are confined; of the process's older
/// threads only the system calls are, so they must do nothing but wait.
pub fn computing_process(parent_id: u32, memory_bytes: u64, first_unused: i32) -> Result<String> {
    let left = detach(parent_id).and_then(|()| close_from(first_unused));
    let limited = limit_resources(memory_bytes);
    let powerless = drop_capabilities();
    let landlock = deny_files();
    let seccomp = allow_only_computation();
    left?;
    limited?;
    powerless?;
    let abi = landlock?;
    seccomp?;
    Ok(format!("landlock ABI {abi} without rules, seccomp allow-list, no capabilities, resource limits"))
}

/// Leaves the parent's session and terminal, and dies with the parent `parent_id`.
fn detach(parent_id: u32) -> Result<()> {
    // SAFETY: plain system calls with integer arguments.
    unsafe {
        check(libc::setsid(), "setsid")?;
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")?;
        // The parent may have died before the signal was asked for.
        ensure!(u32::try_from(libc::getppid()) == Ok(parent_id), "the parent has died");
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")?;
        libc::umask(0o077);
    }
    Ok(())
}

/// Closes every file descriptor from `first` on.
fn close_from(first: i32) -> Result<()> {
    // SAFETY: close_range takes two descriptors and flags; nothing in this process uses those numbers.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    ensure!(rc == 0, "close_range: {}", io::Error::last_os_error());
    Ok(())
}

/// Limits address space to what is in use now plus `memory_bytes`, forbids core dumps, files and locked memory.
fn limit_resources(memory_bytes: u64) -> Result<()> {
    let statm = std::fs::read_to_string("/proc/self/statm").context("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').next().unwrap_or_default().parse().context("/proc/self/statm")?;
    // SAFETY: a plain system call.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })?;
    for (name, resource, limit) in [
        ("RLIMIT_AS", libc::RLIMIT_AS, pages * page + memory_bytes),
        ("RLIMIT_CORE", libc::RLIMIT_CORE, 0),
        ("RLIMIT_FSIZE", libc::RLIMIT_FSIZE, 0),
        ("RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK, 0),
        ("RLIMIT_MSGQUEUE", libc::RLIMIT_MSGQUEUE, 0),
        ("RLIMIT_NOFILE", libc::RLIMIT_NOFILE, 64),
    ] {
        let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: a valid structure that outlives the call.
        check(unsafe { libc::setrlimit(resource, &limit) }, name)?;
    }
    Ok(())
}

/// Gives up every capability, for this thread and those it starts.
fn drop_capabilities() -> Result<()> {
    // `struct __user_cap_header_struct` and `__user_cap_data_struct` of capset(2), version 3.
    let header: [u32; 2] = [0x2008_0522, 0];
    let none = [[0u32; 3]; 2];
    // SAFETY: both arrays have the layout and size that version 3 of capset(2) reads.
    let rc = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    ensure!(rc == 0, "capset: {}", io::Error::last_os_error());
    Ok(())
}

/// Denies every file, and where the kernel can, TCP and signals beyond this thread and those it starts.
///
/// Returns the kernel's landlock ABI.
fn deny_files() -> Result<i32> {
    // SAFETY: landlock_create_ruleset(NULL, 0, LANDLOCK_CREATE_RULESET_VERSION) only reports the ABI.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, 1) };
    ensure!(abi >= 1, "the kernel has no landlock ({})", io::Error::last_os_error());
    let newest = ABI::V7;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(newest))?
        .handle_access(AccessNet::from_all(newest))?
        .scope(Scope::from_all(newest))?
        .create()?
        .restrict_self()?;
    ensure!(status.ruleset != RulesetStatus::NotEnforced && status.no_new_privs, "landlock is not enforced");
    // A rule set that was accepted but does nothing is found here.
    ensure!(std::fs::File::open("/").is_err(), "landlock does nothing: files can still be opened");
    Ok(i32::try_from(abi)?)
}

/// Calls a thread of computation needs: its pipes, memory without execution, clocks, its own signals and end.
const COMPUTE_CALLS: [libc::c_long; 21] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Allows all threads of this process only what computation needs; everything else fails with `EPERM`.
/// It comes last: setting it up takes calls that it denies.
fn allow_only_computation() -> Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        COMPUTE_CALLS.into_iter().map(|call| (call, Vec::new())).collect();
    // Memory that can be executed stays out of reach.
    let no_exec = SeccompCondition::new(
        2,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::MaskedEq(u64::from(libc::PROT_EXEC.cast_unsigned())),
        0,
    )?;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![SeccompRule::new(vec![no_exec.clone()])?]);
    }
    // abort() signals its own process.
    let own_id = u64::from(std::process::id());
    let to_itself = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, own_id)?;
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![to_itself])?]);
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, denied, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter_all_threads(&program).context("seccomp")?;
    // SAFETY: plain system calls with integer arguments.
    let (socket, signal) =
        unsafe { (libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0), libc::kill(libc::getpid(), 0)) };
    ensure!(socket < 0 && signal < 0, "seccomp does nothing: sockets or signals still work");
    Ok(())
}

fn check(rc: i32, name: &str) -> Result<()> {
    if rc < 0 {
        bail!("{name}: {}", io::Error::last_os_error());
    }
    Ok(())
}
