//! The memory available to this process. The machine, control groups and the address space limit it.

use crate::dist::Mesh;
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// The memory available to a process, and what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Available bytes.
    pub bytes: u64,
    /// Text that names the limit. It completes a message "… GB are", as "free on this machine" does.
    pub limit: String,
}

impl AvailableMemory {
    /// Returns the share of one process if `processes` processes share the memory of the machine.
    pub fn process_share(self, processes: usize) -> Self {
        match processes {
            1 => self,
            several => Self {
                bytes: self.bytes / several as u64,
                limit: format!("each process's share of what is {}", self.limit),
            },
        }
    }
}

/// Returns the smallest available memory among the processes of `mesh`.
///
/// # Errors
/// When a process does not reply in time.
pub fn min_over_processes(mesh: &Mesh, local: Option<AvailableMemory>) -> Result<Option<AvailableMemory>> {
    let all = mesh.all_gather_records("available memory", &local.map(|local| (local.bytes, local.limit)))?;
    let smallest = all.into_iter().flatten().min_by_key(|(bytes, _)| *bytes);
    Ok(smallest.map(|(bytes, limit)| AvailableMemory { bytes, limit }))
}

/// Works like [`remaining_memory`], but the memory that this process already uses counts as available,
/// because a memory plan includes it.
pub fn available_memory() -> Option<AvailableMemory> {
    let used = field_bytes(&read_file("/proc/self/status"), "RssAnon").unwrap_or(0);
    remaining_memory().map(|left| AvailableMemory { bytes: left.bytes.saturating_add(used), ..left })
}

/// Returns the smallest of what the machine, the control groups and `ulimit -v` still allow. `None` if no
/// limit is known.
pub fn remaining_memory() -> Option<AvailableMemory> {
    let status = read_file("/proc/self/status");
    let limits = [
        machine_bytes(&read_file("/proc/meminfo")).map(|bytes| (bytes, "free on this machine")),
        control_group_bytes(Path::new("/sys/fs/cgroup"), &read_file("/proc/self/cgroup"))
            .map(|bytes| (bytes, "left in the control group")),
        address_space_bytes(&read_file("/proc/self/limits"), &status)
            .map(|bytes| (bytes, "left under ulimit -v")),
    ];
    let (bytes, limit) = limits.into_iter().flatten().min_by_key(|(bytes, _)| *bytes)?;
    Some(AvailableMemory { bytes, limit: limit.to_owned() })
}

/// Reads a file as text. Empty if the file cannot be read.
fn read_file(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Returns the value of field `key` in bytes, from a line `key: number kB`.
fn field_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Returns the machine's memory that is available without swapping: free pages and page cache.
fn machine_bytes(meminfo: &str) -> Option<u64> {
    field_bytes(meminfo, "MemAvailable")
}

/// Returns the remaining address space under `ulimit -v`.
fn address_space_bytes(limits: &str, status: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(field_bytes(status, "VmSize")?))
}

/// Returns the least remaining memory of this process's control group and its ancestors. Reads cgroup v2 and
/// the memory controller of v1. `membership` is the text of `/proc/self/cgroup`.
fn control_group_bytes(root: &Path, membership: &str) -> Option<u64> {
    membership.lines().filter_map(|line| hierarchy_bytes(root, line)).min()
}

/// Returns the remaining memory in one hierarchy, from a line `number:controllers:path` of
/// `/proc/self/cgroup`.
fn hierarchy_bytes(root: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
    let (base, files) = match controllers {
        "" => (root.to_owned(), ["memory.max", "memory.current", "file"]),
        _ if controllers.split(',').any(|name| name == "memory") => {
            (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"])
        }
        _ => return None,
    };
    // In a container, the path may be outside the mount. Then only the mount's root is read.
    let group = base.join(path);
    let groups: Vec<PathBuf> =
        group.ancestors().take_while(|g| g.starts_with(&base)).map(Into::into).collect();
    groups.iter().filter_map(|group| group_bytes(group, files)).min()
}

/// Returns the remaining memory of one control group.
fn group_bytes(group: &Path, [limit, usage, cache]: [&str; 3]) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit)?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse::<u64>().ok());
    // The kernel frees page cache on demand, so it counts as available.
    Some(limit.saturating_sub(number(usage)?.saturating_sub(cache.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_bounds_are_read() {
        assert_eq!(machine_bytes("MemTotal:  100 kB\nMemAvailable:    40 kB\n"), Some(40 << 10));
        assert_eq!(machine_bytes(""), None);
        let limits =
            |bound: &str| format!("Max cpu time  unlimited\nMax address space  {bound}  {bound}  bytes\n");
        let status = "VmPeak: 9 kB\nVmSize:\t 3 kB\n";
        assert_eq!(address_space_bytes(&limits("10240"), status), Some(7168));
        assert_eq!(address_space_bytes(&limits("1024"), status), Some(0));
        assert_eq!(address_space_bytes(&limits("unlimited"), status), None);
    }

    #[test]
    fn the_ancestor_with_the_least_memory_is_the_limit() {
        let root = tempfile::tempdir().unwrap();
        let group = |path: &str, files: &[(&str, &str)]| {
            let folder = root.path().join(path);
            fs::create_dir_all(&folder).unwrap();
            files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
        };
        group(
            "a",
            &[("memory.max", "1000\n"), ("memory.current", "700\n"), ("memory.stat", "anon 5\nfile 200\n")],
        );
        group("a/b", &[("memory.max", "max\n"), ("memory.current", "10\n")]);
        assert_eq!(control_group_bytes(root.path(), "0::/a/b\n"), Some(500));
        group("a/b", &[("memory.max", "400\n")]);
        assert_eq!(control_group_bytes(root.path(), "0::/a/b\n"), Some(390));
        let old = [("memory.limit_in_bytes", "90\n"), ("memory.usage_in_bytes", "50\n")];
        group("memory/c", &old);
        assert_eq!(control_group_bytes(root.path(), "3:cpu:/c\n4:memory,x:/c\n0::/nowhere\n"), Some(40));
        assert_eq!(control_group_bytes(root.path(), "3:cpu:/c\n"), None);
    }

    #[test]
    fn the_memory_of_this_machine_is_known() {
        assert!(available_memory().is_none_or(|found| found.bytes > 0));
    }
}
