//! Confines a worker before it reads any code, with Linux's landlock, seccomp and resource limits.
//!
//! Every step is required. If the kernel lacks one of them, the worker does not start.

use anyhow::{Context, Result, ensure};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

mod cpython;
mod embedded;
mod scratch;

pub use cpython::{confine_fork_server, snippet_filter};
pub use embedded::confine_worker;
pub use scratch::{INODES_PER_MIB, SCRATCH_PATH};

/// Leaves the parent's session and terminal. Makes this process die when the parent, process `parent_id`,
/// dies.
fn detach(parent_id: u32) -> Result<()> {
    // SAFETY: plain system calls with integer arguments.
    unsafe {
        check(libc::setsid(), "setsid")?;
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")?;
        // The parent may have died before this process requested the signal.
        ensure!(u32::try_from(libc::getppid()) == Ok(parent_id), "the parent has died");
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")?;
        libc::umask(0o077);
    }
    Ok(())
}

/// Closes every file descriptor from `first` on.
fn close_from(first: i32) -> Result<()> {
    // SAFETY: close_range takes two descriptors and flags. Nothing in this process uses those descriptors.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    ensure!(rc == 0, "close_range: {}", io::Error::last_os_error());
    Ok(())
}

/// Returns the size in bytes of the address space of process `id` (a number, or `self`).
pub fn address_space_bytes(id: &str) -> Result<u64> {
    let path = format!("/proc/{id}/statm");
    let statm = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let pages: u64 = statm.split(' ').next().unwrap_or_default().parse().context(path)?;
    // SAFETY: a plain system call.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })?;
    Ok(pages * page)
}

/// Forbids core dumps, files longer than `file_bytes_max`, locked memory and message queues.
fn limit_resources(file_bytes_max: u64) -> Result<()> {
    for (name, resource, limit) in [
        ("RLIMIT_CORE", libc::RLIMIT_CORE, 0),
        ("RLIMIT_FSIZE", libc::RLIMIT_FSIZE, file_bytes_max),
        ("RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK, 0),
        ("RLIMIT_MSGQUEUE", libc::RLIMIT_MSGQUEUE, 0),
        ("RLIMIT_NOFILE", libc::RLIMIT_NOFILE, 64),
    ] {
        set_limit(name, resource, limit)?;
    }
    Ok(())
}

fn set_limit(name: &str, resource: libc::__rlimit_resource_t, limit: u64) -> Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid structure that outlives the call.
    check(unsafe { libc::getrlimit(resource, &mut now) }, name)?;
    // A hard limit that is already lower cannot be raised, and is strict enough.
    let limit = limit.min(now.rlim_max);
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: a valid structure that outlives the call.
    check(unsafe { libc::setrlimit(resource, &limit) }, name)
}

/// Drops every capability except `kept`. This holds for this thread, its later threads, and the program that
/// it executes.
fn drop_capabilities(kept: Option<u32>) -> Result<()> {
    for capability in (0..64).filter(|capability| Some(*capability) != kept) {
        // SAFETY: a plain system call. It fails if the process lacks the required capability. Such a process
        // cannot gain capabilities by executing a program, because no-new-privileges is set.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    // `struct __user_cap_header_struct` and `__user_cap_data_struct` of capset(2), version 3.
    let header: [u32; 2] = [0x2008_0522, 0];
    // Effective, permitted and inheritable set: first for capabilities from 0 on, then for those from 32 on.
    let sets = [kept.map_or(0, |kept| 1u32 << kept), 0].map(|set| [set; 3]);
    // SAFETY: both arrays have the layout and size that version 3 of capset(2) reads.
    let rc = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    ensure!(rc == 0, "capset: {}", io::Error::last_os_error());
    if let Some(kept) = kept {
        // SAFETY: a plain system call with integer arguments.
        let rc = unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, kept, 0, 0) };
        check(rc, "PR_CAP_AMBIENT_RAISE")?;
    }
    Ok(())
}

/// Files that a process may use. All other files are denied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowedFiles {
    /// Files and folders that may be read.
    pub read: Vec<PathBuf>,
    /// Files that may be executed and read.
    pub execute: Vec<PathBuf>,
}

/// Denies every file except `files`. If the kernel supports it, also denies TCP, and signals to anything but
/// this thread and its later threads.
///
/// Returns the kernel's landlock ABI.
fn deny_files(files: &AllowedFiles) -> Result<i32> {
    let status = rules(files, None)?.restrict_self()?;
    ensure!(status.ruleset != RulesetStatus::NotEnforced && status.no_new_privs, "landlock is not enforced");
    // Detects rules that the kernel accepted but does not enforce.
    ensure!(std::fs::File::open("/").is_err(), "landlock has no effect: files can still be opened");
    landlock_abi()
}

fn landlock_abi() -> Result<i32> {
    // SAFETY: landlock_create_ruleset(NULL, 0, LANDLOCK_CREATE_RULESET_VERSION) only returns the ABI.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, 1) };
    ensure!(abi >= 1, "the kernel has no landlock ({})", io::Error::last_os_error());
    Ok(i32::try_from(abi)?)
}

/// Returns landlock rules that allow `files`, and also plain files and folders below `writable`.
fn rules(files: &AllowedFiles, writable: Option<&Path>) -> Result<RulesetCreated> {
    landlock_abi()?;
    let newest = ABI::V7;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(newest))?
        .handle_access(AccessNet::from_all(newest))?
        .scope(Scope::from_all(newest))?
        .create()?
        .set_compatibility(CompatLevel::HardRequirement);
    for path in &files.read {
        let access =
            if path.is_dir() { AccessFs::ReadFile | AccessFs::ReadDir } else { AccessFs::ReadFile.into() };
        rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, access))?;
    }
    for path in &files.execute {
        let access = AccessFs::ReadFile | AccessFs::Execute;
        rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, access))?;
    }
    if let Some(path) = writable {
        let access = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::MakeDir
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir
            | AccessFs::Refer;
        rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, access))?;
    }
    Ok(rules)
}

/// Allowed system calls. A call is allowed if one of its conditions holds, or if it has no condition.
type AllowedCalls = BTreeMap<i64, Vec<SeccompRule>>;

/// Builds a filter that allows the calls in `allowed`. Every other call fails with `EPERM`.
fn allow_list(allowed: AllowedCalls) -> Result<BpfProgram> {
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter =
        SeccompFilter::new(allowed, denied, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?;
    Ok(filter.try_into()?)
}

/// Checks the system-call filter: detects a filter that the kernel accepted but does not enforce.
fn ensure_filtered() -> Result<()> {
    // SAFETY: plain system calls with integer arguments.
    let (socket, signal) =
        unsafe { (libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0), libc::kill(libc::getpid(), 0)) };
    ensure!(socket < 0 && signal < 0, "seccomp has no effect: sockets or signals still work");
    Ok(())
}

/// Returns a rule with a condition on one argument of a system call.
fn argument_rule(index: u8, width: SeccompCmpArgLen, is: SeccompCmpOp, value: u64) -> Result<SeccompRule> {
    Ok(SeccompRule::new(vec![SeccompCondition::new(index, width, is, value)?])?)
}

/// Returns the rules for madvise. Page merging is denied, because the time to write a merged page would
/// reveal data of other processes.
fn madvise_rules() -> Result<Vec<SeccompRule>> {
    let mergeable = u64::from(libc::MADV_MERGEABLE.cast_unsigned());
    Ok(vec![argument_rule(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, mergeable)?])
}

fn check(rc: i32, name: &str) -> Result<()> {
    ensure!(rc >= 0, "{name}: {}", io::Error::last_os_error());
    Ok(())
}
