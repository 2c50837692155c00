//! How much memory there is for more processes of this one's cgroup.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Bytes that can be used without swapping: of the host (`MemAvailable` of proc(5)), and within the limit of this process's
/// cgroup and those above it, if there are any.
pub(super) fn available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let of_host = mem_available(&text).context("/proc/meminfo has no MemAvailable")?;
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = groups(&cgroups).into_iter().filter_map(|(group, of)| left(&group, of));
    Ok(left.fold(of_host, u64::min))
}

fn mem_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// The files of a cgroup that tell its limit, what it uses, and what of that the kernel would give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Files {
    limit: &'static str,
    usage: &'static str,
    inactive: &'static str,
}

const V2: Files =
    Files { limit: "memory.max", usage: "memory.current", inactive: "inactive_file " };
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};

/// The memory cgroup that `/proc/self/cgroup` names, and those above it.
fn groups(text: &str) -> Vec<(PathBuf, Files)> {
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, files) = match controllers {
            "" => ("/sys/fs/cgroup", V2),
            of if of.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", V1),
            _ => continue,
        };
        let group = Path::new(root).join(path.trim_start_matches('/'));
        let above = group.ancestors().take_while(|above| above.starts_with(root));
        groups.extend(above.map(|above| (above.to_owned(), files)));
    }
    groups
}

/// What is left of a cgroup's limit; nothing of one that has none.
fn left(group: &Path, files: Files) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let limit = number(files.limit)?;
    let cached = read("memory.stat").unwrap_or_default();
    let cached = cached.lines().find_map(|line| line.strip_prefix(files.inactive)?.parse().ok());
    let used = number(files.usage)?.saturating_sub(cached.unwrap_or(0));
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_available_is_read() {
        let text = "MemTotal:       24605256 kB\nMemAvailable:   1048576 kB\n";
        assert_eq!(mem_available(text), Some(1 << 30));
        assert!(available().unwrap() > 1 << 20);
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
        write("memory.current", "700\n");
        write("memory.stat", "anon 1\ninactive_file 300\n");
        write("memory.max", "max\n");
        assert_eq!(left(group.path(), V2), None);
        write("memory.max", "1000\n");
        assert_eq!(left(group.path(), V2), Some(600));
    }
}
