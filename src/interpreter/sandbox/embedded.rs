//! Confinement of the embedded interpreter's worker, a process that only computes.

use super::{AllowedCalls, AllowedFiles};
use anyhow::{Context, Result};
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp};

/// Confines a process that only computes. All steps are required; the first error is returned. Descriptors
/// from `first_unused` on are closed.
///
/// Returns a description of the active confinement. The calling thread and its later threads are fully
/// confined. Older threads only get the system-call filter, so they must do nothing but wait.
pub fn confine_worker(parent_id: u32, memory_bytes: u64, first_unused: i32) -> Result<String> {
    let detached = super::detach(parent_id).and_then(|()| super::close_from(first_unused));
    let limits_set = limit_memory(memory_bytes).and_then(|()| super::limit_resources(0));
    let capabilities_dropped = super::drop_capabilities(None);
    let landlock = super::deny_files(&AllowedFiles::default());
    let seccomp = allow_only_computation();
    detached?;
    limits_set?;
    capabilities_dropped?;
    let abi = landlock?;
    seccomp?;
    Ok(format!("landlock ABI {abi} denies all files, seccomp allow-list, no capabilities, resource limits"))
}

/// System calls that a computation needs: pipes, non-executable memory, clocks, and the process's own signals
/// and exit.
const COMPUTE_CALLS: [libc::c_long; 20] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_munmap,
    libc::SYS_mremap,
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

/// Allows all threads of this process only the system calls of a computation. Every other call fails with
/// `EPERM`. It must be the last step, because it denies calls that the other steps need.
fn allow_only_computation() -> Result<()> {
    let mut allowed: AllowedCalls = COMPUTE_CALLS.into_iter().map(|call| (call, Vec::new())).collect();
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        // Executable memory is not allowed.
        let exec_bit = SeccompCmpOp::MaskedEq(u64::from(libc::PROT_EXEC.cast_unsigned()));
        allowed.insert(call, vec![super::argument_rule(2, SeccompCmpArgLen::Dword, exec_bit, 0)?]);
    }
    allowed.insert(libc::SYS_madvise, super::madvise_rules()?);
    // abort() sends a signal to its own process.
    let own_id = u64::from(std::process::id());
    let to_itself = super::argument_rule(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, own_id)?;
    allowed.insert(libc::SYS_tgkill, vec![to_itself]);
    seccompiler::apply_filter_all_threads(&super::allow_list(allowed)?).context("seccomp")?;
    super::ensure_filtered()
}

/// Limits the address space to its current size plus `memory_bytes`.
fn limit_memory(memory_bytes: u64) -> Result<()> {
    super::set_limit("RLIMIT_AS", libc::RLIMIT_AS, super::address_space_bytes("self")? + memory_bytes)
}
