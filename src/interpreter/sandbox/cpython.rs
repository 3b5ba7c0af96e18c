//! Confinement of CPython: of the fork server before it executes Python, and of each snippet's process after
//! the fork.

use super::{AllowedCalls, AllowedFiles, scratch};
use anyhow::{Context, Result};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// Stack size. Python's recursion limit keeps its stack far below this size.
const STACK_BYTES: u64 = 16 << 20;

/// Confines this process before it executes the fork server. All steps are required; the first error is
/// returned. Descriptors from `first_unused` on are closed. The process must have one thread.
///
/// If `scratch_mib` is above 0, the server gets a mount namespace of its own. Each snippet's process then
/// mounts a scratch folder and applies landlock itself. Descriptor `first_unused` holds the landlock rules.
///
/// Returns a description of the active confinement.
pub fn confine_fork_server(
    parent_id: u32,
    files: &AllowedFiles,
    first_unused: i32,
    scratch_mib: u64,
) -> Result<String> {
    fix_addresses();
    let with_scratch = scratch_mib > 0;
    if with_scratch {
        scratch::enter_namespaces(files)?;
    }
    let detached = super::detach(parent_id).and_then(|()| super::close_from(first_unused));
    let limits_set = super::limit_resources(scratch_mib << 20)
        .and_then(|()| super::set_limit("RLIMIT_STACK", libc::RLIMIT_STACK, STACK_BYTES));
    let capabilities_dropped = super::drop_capabilities(with_scratch.then_some(scratch::CAP_SYS_ADMIN));
    let landlock =
        if with_scratch { scratch::store_rules(files, first_unused) } else { super::deny_files(files) };
    let seccomp = allow_only_serving(with_scratch);
    detached?;
    limits_set?;
    capabilities_dropped?;
    let abi = landlock?;
    seccomp?;
    if with_scratch {
        return Ok(format!(
            "landlock ABI {abi} with the interpreter's folders read-only and {scratch_mib} MiB of scratch in {}, seccomp \
             allow-list, no capabilities, resource limits",
            scratch::SCRATCH_PATH
        ));
    }
    Ok(format!(
        "landlock ABI {abi} with the interpreter's folders read-only, seccomp allow-list, no capabilities, \
         resource limits"
    ))
}

/// Returns the filter that a snippet's process applies to itself, as an array of the kernel's `struct
/// sock_filter`.
pub fn snippet_filter(with_scratch: bool) -> Result<Vec<u8>> {
    let mut allowed = snippet_calls(with_scratch)?;
    // A process may read its own limits. It may not change them, and may not access the limits of another
    // process.
    let zero = |index| SeccompCondition::new(index, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0);
    allowed.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![zero(0)?, zero(2)?])?]);
    let program = super::allow_list(allowed)?;
    let bytes = |i: &seccompiler::sock_filter| {
        let [c0, c1] = i.code.to_ne_bytes();
        let [k0, k1, k2, k3] = i.k.to_ne_bytes();
        [c0, c1, i.jt, i.jf, k0, k1, k2, k3]
    };
    Ok(program.iter().flat_map(bytes).collect())
}

/// Gives every server the same memory addresses, because the order of some sets depends on addresses. If a
/// container forbids this, that order may differ between replies.
fn fix_addresses() {
    // SAFETY: a plain system call, which takes effect at the next execve.
    unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) };
}

/// System calls that a snippet needs: those of computing, and those that read the files that landlock allows.
const SNIPPET_CALLS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_lseek,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mincore,
    libc::SYS_brk,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_getcpu,
    libc::SYS_getpriority,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_getitimer,
    libc::SYS_setitimer,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_umask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Older variants of these calls.
#[cfg(target_arch = "x86_64")]
const OLDER_CALLS: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_getdents,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_getrlimit,
    libc::SYS_getpgrp,
    libc::SYS_time,
    libc::SYS_alarm,
    libc::SYS_pause,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_CALLS: &[libc::c_long] = &[];

fn snippet_calls(with_scratch: bool) -> Result<AllowedCalls> {
    let calls = SNIPPET_CALLS.iter().chain(OLDER_CALLS);
    let mut allowed: AllowedCalls = calls.map(|&call| (call, Vec::new())).collect();
    match with_scratch {
        true => allowed.extend(scratch::SYSTEM_CALLS.iter().map(|&call| (call, Vec::new()))),
        // Before Linux 6.2, landlock does not control truncation, so opening a file with O_TRUNC is denied.
        false => {
            let without_truncation = |index| {
                let flag = u64::from(libc::O_TRUNC.cast_unsigned());
                super::argument_rule(index, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(flag), 0)
            };
            allowed.insert(libc::SYS_openat, vec![without_truncation(2)?]);
            #[cfg(target_arch = "x86_64")]
            allowed.insert(libc::SYS_open, vec![without_truncation(1)?]);
        }
    }
    // Descriptors may be duplicated, and their flags may change. F_SETOWN, which binds a signal to a
    // descriptor, is denied.
    let fcntl =
        [libc::F_DUPFD, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL, libc::F_DUPFD_CLOEXEC];
    allowed.insert(libc::SYS_fcntl, one_of(1, fcntl.map(|c| u64::from(c.cast_unsigned())))?);
    // Only private futexes are allowed. Shared futexes could pass messages through the memory pages that all
    // snippets of a server share.
    let private = SeccompCmpOp::MaskedEq(u64::from(libc::FUTEX_PRIVATE_FLAG.cast_unsigned()));
    let flag = u64::from(libc::FUTEX_PRIVATE_FLAG.cast_unsigned());
    allowed.insert(libc::SYS_futex, vec![super::argument_rule(1, SeccompCmpArgLen::Dword, private, flag)?]);
    allowed.insert(libc::SYS_madvise, super::madvise_rules()?);
    // The ioctl calls of isatty(), and those that set or clear close-on-exec.
    allowed.insert(libc::SYS_ioctl, one_of(1, [libc::TCGETS, libc::FIOCLEX, libc::FIONCLEX])?);
    Ok(allowed)
}

/// Returns rules that match if the argument equals one of `values`.
fn one_of<const N: usize>(index: u8, values: [u64; N]) -> Result<Vec<SeccompRule>> {
    values
        .into_iter()
        .map(|v| super::argument_rule(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, v))
        .collect()
}

/// Allows the server only the system calls of its snippets, and those that start snippets. It must be the
/// last step, because it denies calls that the other steps need.
fn allow_only_serving(with_scratch: bool) -> Result<()> {
    let arch = std::env::consts::ARCH.try_into()?;
    let missing = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    // clone3 has its flags in memory, which no filter can read. If clone3 is denied, libc uses clone.
    let clone3 = [(libc::SYS_clone3, Vec::new())].into();
    let no_clone3: BpfProgram =
        SeccompFilter::new(clone3, SeccompAction::Allow, missing, arch)?.try_into()?;
    let mut allowed = snippet_calls(with_scratch)?;
    let to_start = [libc::SYS_execve, libc::SYS_wait4, libc::SYS_setsid, libc::SYS_recvmsg];
    let unchecked = to_start.into_iter().chain([libc::SYS_prlimit64, libc::SYS_clone3]);
    allowed.extend(unchecked.map(|call| (call, Vec::new())));
    // Allows a child process, but no thread and no namespace.
    let plain = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
    let others = SeccompCmpOp::MaskedEq(!u64::from(plain.cast_unsigned()));
    allowed.insert(libc::SYS_clone, vec![super::argument_rule(0, SeccompCmpArgLen::Qword, others, 0)?]);
    if with_scratch {
        // Calls of a snippet's process before it applies its own filter.
        let before = [libc::SYS_mount, libc::SYS_capset, libc::SYS_landlock_restrict_self];
        allowed.extend(before.map(|call| (call, Vec::new())));
        let mounts = u64::from(libc::CLONE_NEWNS.cast_unsigned());
        let only_mounts = super::argument_rule(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, mounts)?;
        allowed.insert(libc::SYS_unshare, vec![only_mounts]);
    }
    let own = [libc::PR_SET_PDEATHSIG, libc::PR_SET_DUMPABLE, libc::PR_SET_SECCOMP];
    allowed.insert(libc::SYS_prctl, one_of(0, own.map(|c| u64::from(c.cast_unsigned())))?);
    let serving = super::allow_list(allowed)?;
    seccompiler::apply_filter(&no_clone3).context("seccomp")?;
    seccompiler::apply_filter(&serving).context("seccomp")?;
    super::ensure_filtered()
}
