//! The CPU time that a cgroup may have, if that is bounded: who spins it away is throttled later.
//!
//! The quota is read once, of all groups from the process's own to the root: the least of them
//! counts, and that group's usage. cgroup v2 (`cpu.max`, `cpu.stat`) and v1 (`cpu.cfs_quota_us`,
//! `cpuacct.usage`), where distributions mount them.

use std::fs::read_to_string;
use std::path::Path;

use crate::source::Source;

/// How often usage is read, ns.
const EVERY_NS: u64 = 10_000_000;

/// A group with a quota.
#[derive(Debug)]
pub(super) struct Quota {
    /// CPUs that it may have.
    cpus: f64,
    usage: Source,
    /// Of the last look, ns: when, the group's usage, what spinners had spun.
    last: Option<(u64, u64, u64)>,
    /// What was left then, in CPUs.
    left: f64,
}

impl Quota {
    /// `None`: the time is not bounded, or nobody can say.
    pub(super) fn find(root: &Path, apart: bool) -> Option<Self> {
        let groups = read_to_string(root.join("proc/self/cgroup")).ok()?;
        let mut least: Option<Self> = None;
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let mounts: &[&str] = match controllers {
                "" => &["sys/fs/cgroup", "sys/fs/cgroup/unified"],
                _ if controllers.split(',').any(|name| name == "cpu") => {
                    &["sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"]
                }
                _ => continue,
            };
            for mount in mounts {
                // A group of another name space, as in a container, is seen at the mount.
                let mount = root.join(mount);
                let group = path.trim_start_matches('/');
                for group in Path::new(group).ancestors() {
                    let found = Self::of(&mount.join(group), apart);
                    let smaller = |found: &Self| least.as_ref().is_none_or(|l| found.cpus < l.cpus);
                    least = found.filter(smaller).or(least);
                }
            }
        }
        least
    }

    /// Of one group.
    fn of(group: &Path, apart: bool) -> Option<Self> {
        let number = |file: &str| read_to_string(group.join(file)).ok()?.trim().parse::<f64>().ok();
        let (cpus, usage) = match read_to_string(group.join("cpu.max")) {
            Ok(max) => {
                // `max 100000` is no bound.
                let (quota, period) = max.trim().split_once(' ')?;
                (quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?, "cpu.stat")
            }
            Err(_) => {
                // -1 is no bound.
                let quota = number("cpu.cfs_quota_us").filter(|quota| *quota > 0.0)?;
                (quota / number("cpu.cfs_period_us")?, "cpuacct.usage")
            }
        };
        let usage = Source::open(&group.join(usage), apart).ok()?;
        cpus.is_finite().then_some(Self { cpus, usage, last: None, left: 0.0 })
    }

    /// Begins anew, in a forked child.
    pub(super) fn forget(&mut self) {
        (self.last, self.left) = (None, 0.0);
    }

    /// CPUs that the group may have and does not use, but for its spinners.
    pub(super) fn left(&mut self, now: u64, spun: u64) -> f64 {
        if self.last.is_none_or(|(at, ..)| now.saturating_sub(at) >= EVERY_NS) {
            let used = self.used();
            self.left = match (used, self.last) {
                (Some(used), Some((at, used_before, spun_before))) => {
                    let used = used.saturating_sub(used_before);
                    let work = used.saturating_sub(spun.saturating_sub(spun_before));
                    self.cpus - work as f64 / (now - at) as f64
                }
                // What was left before says nothing: the group may have been removed.
                _ => 0.0,
            };
            self.last = used.map(|used| (now, used, spun));
        }
        self.left
    }

    /// CPU time that the group has had, ns.
    fn used(&self) -> Option<u64> {
        let mut text = [0; 256];
        let text = str::from_utf8(self.usage.read(&mut text)?).ok()?;
        match text.strip_prefix("usage_usec ") {
            Some(rest) => rest.lines().next()?.parse::<u64>().ok()?.checked_mul(1_000),
            None => text.trim().parse().ok(),
        }
    }
}
