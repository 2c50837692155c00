//! How much memory there is for a disk that is kept in memory, and for guests.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Bytes that can be used on this host without swapping (`MemAvailable` of proc(5)).
pub(super) fn of_host() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    mem_available(&text).context("/proc/meminfo has no MemAvailable")
}

fn mem_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Bytes that this process's memory cgroup and those above it leave within their limits; `None` without a limit.
pub(super) fn of_cgroup() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups(&text).into_iter().filter_map(|(group, names)| left(&group, names)).min()
}

/// How a cgroup names its limit, and in `memory.stat` what the kernel cannot give up without swapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Names {
    limit: &'static str,
    used: [&'static str; 2],
}

const V2: Names = Names { limit: "memory.max", used: ["anon ", "shmem "] };
const V1: Names = Names { limit: "memory.limit_in_bytes", used: ["total_rss ", "total_shmem "] };

/// The memory cgroup that `/proc/self/cgroup` names, and those above it.
fn groups(text: &str) -> Vec<(PathBuf, Names)> {
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, names) = match controllers {
            "" => ("/sys/fs/cgroup", V2),
            of if of.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", V1),
            _ => continue,
        };
        let group = Path::new(root).join(path.trim_start_matches('/'));
        let above = group.ancestors().take_while(|above| above.starts_with(root));
        groups.extend(above.map(|above| (above.to_owned(), names)));
    }
    groups
}

fn left(group: &Path, names: Names) -> Option<u64> {
    let limit = std::fs::read_to_string(group.join(names.limit)).ok()?;
    let limit: u64 = limit.trim().parse().ok()?;
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let used = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.parse().ok())
    };
    let used: u64 = names.used.into_iter().filter_map(used).sum();
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_available_is_read() {
        let text = "MemTotal:       24605256 kB\nMemAvailable:   1048576 kB\n";
        assert_eq!(mem_available(text), Some(1 << 30));
        assert!(of_host().unwrap() > 1 << 20);
    }

    #[test]
    fn limits_of_a_cgroup_and_of_those_above_count() {
        let text = "4:cpu,cpuacct:/a\n2:memory:/docker/1\n0::/";
        let found: Vec<_> = groups(text).into_iter().map(|(group, of)| (group, of == V1)).collect();
        let v1 = ["/docker/1", "/docker", ""]
            .map(|path| (format!("/sys/fs/cgroup/memory{path}").into(), true));
        assert_eq!(found[..3], v1);
        assert_eq!(found[3..], [(PathBuf::from("/sys/fs/cgroup/"), false)]);
    }

    #[test]
    fn what_the_kernel_would_give_up_is_left() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        write("memory.stat", "anon 300\nfile 650\nshmem 100\n");
        write("memory.max", "max\n");
        assert_eq!(left(group.path(), V2), None);
        write("memory.max", "1000\n");
        assert_eq!(left(group.path(), V2), Some(600));
    }
}
