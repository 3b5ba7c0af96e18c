//! A scratch folder for each snippet's process: a file system in memory, in a mount namespace that ends with
//! the process.
//!
//! Landlock forbids mounting. So, with a scratch folder, each snippet's process applies landlock after its
//! mount. The fork server runs without landlock, but never executes model-written code. All its snippets read
//! the same rules from one descriptor.

use super::{AllowedFiles, rules};
use anyhow::{Context, Result, ensure};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Path of the scratch folder, on which a file system is mounted. The landlock rule names its parent,
/// [`SCRATCH_PARENT`], because landlock ignores a rule for a folder that a mount covers.
pub const SCRATCH_PATH: &str = "/tmp/scratch";
/// Parent of the scratch folder. In the server's namespace it is read-only, and otherwise empty.
const SCRATCH_PARENT: &str = "/tmp";
const SCRATCH_PARENT_C: &CStr = c"/tmp";
/// Maximum number of files and folders per MiB of scratch. There is a limit because their names use
/// additional kernel memory.
pub const INODES_PER_MIB: u64 = 256;
/// The capability to mount.
pub(super) const CAP_SYS_ADMIN: u32 = 21;
/// The first landlock ABI that controls truncation.
const ABI_MIN: i32 = 3;

/// Additional system calls for writing files. Calls that change modes, owners and times are not included,
/// because landlock does not control them.
pub(super) const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_renameat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
];

/// Moves this process, which has one thread, into namespaces of its own, in which it may mount.
/// [`SCRATCH_PATH`] is an empty folder there.
pub(super) fn enter_namespaces(files: &AllowedFiles) -> Result<()> {
    const REMEDY: &str = "allow them, or set interpreter.scratch_mib = 0";
    let hidden = files.read.iter().chain(&files.execute).find(|path| path.starts_with(SCRATCH_PARENT));
    if let Some(path) = hidden {
        anyhow::bail!(
            "interpreter.scratch_mib: the scratch folder in {SCRATCH_PARENT} would hide {}, which Python needs",
            path.display()
        );
    }
    let forbidden =
        || format!("interpreter.scratch_mib needs user namespaces, which are forbidden here; {REMEDY}");
    // SAFETY: plain system calls with integer arguments.
    let (user, group) = unsafe { (libc::getuid(), libc::getgid()) };
    // SAFETY: a plain system call.
    super::check(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) }, "unshare")
        .with_context(forbidden)?;
    // User and group ids are equal inside and outside the namespace. Only the mounts differ.
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{user} {user} 1")),
        ("gid_map", format!("{group} {group} 1")),
    ] {
        std::fs::write(format!("/proc/self/{file}"), text).context(file).with_context(forbidden)?;
    }
    // Mounts made here must not be visible outside.
    mount(c"none", c"/", None, libc::MS_REC | libc::MS_PRIVATE, c"").with_context(forbidden)?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    let options = c"size=4k,nr_inodes=3,mode=755";
    mount(c"none", SCRATCH_PARENT_C, Some(c"tmpfs"), flags, options).with_context(forbidden)?;
    std::fs::create_dir(SCRATCH_PATH).context(SCRATCH_PATH)?;
    let flags = flags | libc::MS_REMOUNT | libc::MS_RDONLY;
    mount(c"none", SCRATCH_PARENT_C, Some(c"tmpfs"), flags, options).with_context(forbidden)
}

fn mount(what: &CStr, place: &CStr, kind: Option<&CStr>, flags: libc::c_ulong, options: &CStr) -> Result<()> {
    let kind = kind.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: every pointer is null or points to a string that outlives the call.
    let rc = unsafe { libc::mount(what.as_ptr(), place.as_ptr(), kind, flags, options.as_ptr().cast()) };
    super::check(rc, &format!("mount on {}", place.to_string_lossy()))
}

/// Stores the landlock rules of snippets in `descriptor`, for the program that this process executes. Returns
/// the ABI.
pub(super) fn store_rules(files: &AllowedFiles, descriptor: i32) -> Result<i32> {
    let abi = super::landlock_abi()?;
    ensure!(
        abi >= ABI_MIN,
        "interpreter.scratch_mib needs landlock ABI {ABI_MIN} (Linux 6.2), but this kernel has ABI {abi}; set interpreter.scratch_mib = 0"
    );
    let rules: Option<OwnedFd> = rules(files, Some(Path::new(SCRATCH_PARENT)))?.into();
    let rules = rules.context("landlock rules without a descriptor")?;
    // SAFETY: calls on descriptors that this process owns. The executed program inherits the copy.
    let moved = unsafe {
        match rules.as_raw_fd() == descriptor {
            true => libc::fcntl(descriptor, libc::F_SETFD, 0),
            false => libc::dup2(rules.as_raw_fd(), descriptor),
        }
    };
    ensure!(moved >= 0, "the rules' descriptor: {}", io::Error::last_os_error());
    if rules.as_raw_fd() == descriptor {
        std::mem::forget(rules);
    }
    // Seccomp needs this flag. Landlock sets it elsewhere, but landlock is not applied to this process.
    // SAFETY: a plain system call with integer arguments.
    super::check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, "PR_SET_NO_NEW_PRIVS")?;
    Ok(abi)
}
