//! Free memory for this process: of the machine, its control group and its address space.

use crate::dist::Mesh;
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// The memory that a process can have, what it already holds included, and the limit that bounds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AvailableMemory {
    pub bytes: u64,
    /// The limit in words, to follow "… GB are".
    pub bound: String,
}

impl AvailableMemory {
    /// Returns the share of one of `processes` on the same machine.
    pub fn process_share(self, processes: usize) -> Self {
        match processes {
            1 => self,
            several => Self {
                bytes: self.bytes / several as u64,
                bound: format!("each process's share of what is {}", self.bound),
            },
        }
    }
}

/// Returns the smallest available memory of all processes of `mesh`.
///
/// # Errors
/// When a process does not answer in time.
pub fn min_over_processes(mesh: &Mesh, own: Option<AvailableMemory>) -> Result<Option<AvailableMemory>> {
    let all = mesh.all_gather_records("available memory", &own.map(|own| (own.bytes, own.bound)))?;
    let least = all.into_iter().flatten().min_by_key(|(bytes, _)| *bytes);
    Ok(least.map(|(bytes, bound)| AvailableMemory { bytes, bound }))
}

/// Returns the smallest of the limits set by the machine, control groups and `ulimit -v`; `None` if none is
/// known. What this process already holds counts as available, because a plan includes it.
pub fn available_memory() -> Option<AvailableMemory> {
    let status = read("/proc/self/status");
    let bounds = [
        machine(&read("/proc/meminfo")).map(|bytes| (bytes, "free on this machine")),
        control_groups(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup"))
            .map(|bytes| (bytes, "left in the control group")),
        address_space(&read("/proc/self/limits"), &status).map(|bytes| (bytes, "left under ulimit -v")),
    ];
    let (bytes, bound) = bounds.into_iter().flatten().min_by_key(|(bytes, _)| *bytes)?;
    let held = kib(&status, "RssAnon").unwrap_or(0);
    Some(AvailableMemory { bytes: bytes.saturating_add(held), bound: bound.to_owned() })
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Returns the bytes after `key` in lines of `key: number kB`.
fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Returns the machine's memory available without swapping: free pages and page cache.
fn machine(meminfo: &str) -> Option<u64> {
    kib(meminfo, "MemAvailable")
}

/// Returns the address space left under `ulimit -v`.
fn address_space(limits: &str, status: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(kib(status, "VmSize")?))
}

/// Returns the smallest rest of this process's control group and its ancestors, for cgroup v2 or the v1
/// memory controller.
fn control_groups(root: &Path, membership: &str) -> Option<u64> {
    membership.lines().filter_map(|line| of_hierarchy(root, line)).min()
}

/// Returns the same for one line `number:controllers:path` of `/proc/self/cgroup`.
fn of_hierarchy(root: &Path, line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
    let (base, files) = match controllers {
        "" => (root.to_owned(), ["memory.max", "memory.current", "file"]),
        _ if controllers.split(',').any(|name| name == "memory") => {
            (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"])
        }
        _ => return None,
    };
    // In a container, the path may lie outside the mount. Then the mount's root is the own group.
    let own = base.join(path);
    let groups: Vec<PathBuf> = own.ancestors().take_while(|g| g.starts_with(&base)).map(Into::into).collect();
    groups.iter().filter_map(|group| left(group, files)).min()
}

fn left(group: &Path, [limit, usage, cache]: [&str; 3]) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit)?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse::<u64>().ok());
    // Page cache is reclaimed on demand.
    Some(limit.saturating_sub(number(usage)?.saturating_sub(cache.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_bounds_are_read() {
        assert_eq!(machine("MemTotal:  100 kB\nMemAvailable:    40 kB\n"), Some(40 << 10));
        assert_eq!(machine(""), None);
        let limits =
            |bound: &str| format!("Max cpu time  unlimited\nMax address space  {bound}  {bound}  bytes\n");
        let status = "VmPeak: 9 kB\nVmSize:\t 3 kB\n";
        assert_eq!(address_space(&limits("10240"), status), Some(7168));
        assert_eq!(address_space(&limits("1024"), status), Some(0));
        assert_eq!(address_space(&limits("unlimited"), status), None);
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
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
        assert_eq!(control_groups(root.path(), "0::/a/b\n"), Some(500));
        group("a/b", &[("memory.max", "400\n")]);
        assert_eq!(control_groups(root.path(), "0::/a/b\n"), Some(390));
        let old = [("memory.limit_in_bytes", "90\n"), ("memory.usage_in_bytes", "50\n")];
        group("memory/c", &old);
        assert_eq!(control_groups(root.path(), "3:cpu:/c\n4:memory,x:/c\n0::/nowhere\n"), Some(40));
        assert_eq!(control_groups(root.path(), "3:cpu:/c\n"), None);
    }

    #[test]
    fn this_machine_says_something() {
        assert!(available_memory().is_none_or(|found| found.bytes > 0));
    }
}
