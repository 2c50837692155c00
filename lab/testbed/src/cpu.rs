//! The CPUs that this process may use; memory, threads and CPU time of a process: the nanoseconds of `/proc/PID/task/*/schedstat`, summed.
//!
//! `stat` counts ticks of 10 ms, too coarse for an idle server. A thread that has
//! gone is in no `schedstat`; what it used is lost, so threads are held one by one
//! and a sum never goes down. io_uring's workers are threads of the process.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rtvirtio_units::CpuId;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs that this process may use.
///
/// # Errors
/// If the kernel does not say.
pub fn usable() -> Result<Vec<CpuId>> {
    let set = sched_getaffinity(None)?;
    let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Ok(cpus.map(|cpu| CpuId::new(cpu as u32)).collect())
}

/// Has this thread run on these CPUs.
///
/// # Errors
/// If it may not.
pub fn run_on(cpus: &[CpuId]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu.get() as usize));
    Ok(sched_setaffinity(None, &set)?)
}

/// CPUs' worth of time that this process's cgroup and those above it may have (`cpu.max`, of cgroup v1
/// `cpu.cfs_quota_us`); `None`: as much as there is.
#[must_use]
pub fn quota() -> Option<f64> {
    quota_below(Path::new("/"))
}

fn quota_below(root: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut smallest: Option<f64> = None;
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let mounts = match controllers {
            "" => ["sys/fs/cgroup", "sys/fs/cgroup/unified"],
            of if of.split(',').any(|name| name == "cpu") => {
                ["sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"]
            }
            _ => continue,
        };
        for mount in mounts {
            // In a container the mount itself may be a group with a quota.
            for group in Path::new(path.trim_start_matches('/')).ancestors() {
                let found = quota_of(&root.join(mount).join(group));
                smallest = [smallest, found].into_iter().flatten().reduce(f64::min);
            }
        }
    }
    smallest
}

/// The quota of one group.
fn quota_of(group: &Path) -> Option<f64> {
    let read = |file: &str| std::fs::read_to_string(group.join(file)).ok();
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let (quota, period) = match read("cpu.max") {
        // `max 100000` is no bound.
        Some(max) => {
            let (quota, period) = max.trim().split_once(' ')?;
            (number(quota)?, number(period)?)
        }
        // Nor is -1.
        None => (number(&read("cpu.cfs_quota_us")?)?, number(&read("cpu.cfs_period_us")?)?),
    };
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

/// CPUs of the machine that this process may use.
#[must_use]
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads (`task`) or descriptors (`fd`) of a process.
///
/// # Errors
/// If it has gone.
pub fn entries(process: u32, of: &str) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{process}/{of}"))?.count())
}

/// What a process has in memory that it does not share, MiB.
///
/// # Errors
/// If it has gone.
pub fn resident_mib(process: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let kib = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        let number = value.and_then(|v| v.trim().trim_end_matches(" kB").parse::<f64>().ok());
        number.with_context(|| format!("no {key} in a process's status"))
    };
    Ok((kib("VmRSS")? - kib("RssShmem")?) / 1024.0)
}

/// Has this process have as many descriptors as it may: a client takes some ten for each queue.
pub fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// CPU time of each thread, ns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessCpu(BTreeMap<u32, u64>);

impl ProcessCpu {
    /// Of a process.
    ///
    /// # Errors
    /// If it has gone, or the kernel does not say.
    pub fn of(process: u32) -> Result<Self> {
        let directory = format!("/proc/{process}/task");
        let tasks = std::fs::read_dir(&directory).with_context(|| format!("read {directory}"))?;
        let mut threads = BTreeMap::new();
        for task in tasks {
            let task = task?;
            let Ok(id) = task.file_name().to_string_lossy().parse() else { continue };
            // A thread may go between the list and the look.
            let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
            let on_cpu = text.split_whitespace().next().and_then(|ns| ns.parse().ok());
            threads.insert(id, on_cpu.with_context(|| format!("schedstat is odd: {text}"))?);
        }
        ensure!(!threads.is_empty(), "process {process} has no threads");
        Ok(Self(threads))
    }

    /// By threads' ids, ns: of what was measured otherwise.
    pub fn of_threads(threads: impl IntoIterator<Item = (u32, u64)>) -> Self {
        Self(threads.into_iter().collect())
    }

    /// CPU time since `earlier`, ns.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> u64 {
        self.since_of(earlier, |_| true)
    }

    /// CPU time since `earlier` of the threads that `counts` says, ns.
    #[must_use]
    pub fn since_of(&self, earlier: &Self, counts: impl Fn(u32) -> bool) -> u64 {
        let before = |id| earlier.0.get(id).copied().unwrap_or(0);
        let counted = self.0.iter().filter(|(id, _)| counts(**id));
        counted.map(|(id, &now)| now.saturating_sub(before(id))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_thread_counts_and_one_that_went_does_not_subtract() {
        let earlier = ProcessCpu(BTreeMap::from([(1, 100), (2, 5_000)]));
        let later = ProcessCpu(BTreeMap::from([(1, 160), (3, 40)]));
        assert_eq!(later.since(&earlier), 100);
        assert_eq!(later.since_of(&earlier, |id| id == 1), 60);
    }

    #[test]
    fn smallest_quota_of_the_groups_above_counts() {
        let quota = |cgroup: &str, files: &[(&str, &str)]| {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in [("proc/self/cgroup", cgroup)].iter().chain(files) {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            quota_below(root.path())
        };
        let v2 = [
            ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/a/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/cpu.max", "400000 100000\n"),
        ];
        assert_eq!(quota("0::/a/b\n", &v2), Some(1.5));
        assert_eq!(quota("0::/\n", &v2), Some(4.0));
        assert_eq!(quota("0::/c\n", &v2[..2]), None);
        let v1 = [
            ("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ];
        assert_eq!(quota("4:cpu,cpuacct:/a\n2:memory:/a\n", &v1), Some(0.5));
        assert_eq!(quota("4:cpu,cpuacct:/\n", &v1), None);
        assert_eq!(quota("2:cpuset:/a\n", &v1), None);
    }

    #[test]
    fn own_process_used_cpu() {
        let now = ProcessCpu::of(std::process::id()).unwrap();
        assert!(now.0.values().sum::<u64>() > 0);
    }
}
