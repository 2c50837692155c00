//! How many CPUs have nothing else to do.
//!
//! Files are opened once. What cannot be read counts as no idle CPU.

use std::path::Path;

use rtvirtio_units::CpuId;

use super::quota::Quota;
use crate::source::Source;

/// Over what the number of running tasks is averaged, ns: a few of the turns that tasks have.
const AVERAGE_NS: f64 = 4_000_000.0;
/// How often idle times are read, ns: they change in steps of USER_HZ.
const TICK_NS: u64 = 10_000_000;
/// Idle times that are kept: over two to three ticks.
const KEPT: usize = 3;

/// Of a time: idle time of the CPUs and what spinners spun of it, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sample {
    at: u64,
    idle: u64,
    spun: u64,
}

/// What is known of the machine.
#[derive(Debug)]
pub(super) struct Machine {
    cpus: Vec<CpuId>,
    /// `/proc/loadavg`.
    load: Option<Source>,
    /// Tasks that ran beside the spinners, averaged, and when.
    others: f64,
    others_at: u64,
    /// `/proc/stat`, if there are CPUs that are not allowed.
    stat: Option<Source>,
    buffer: Vec<u8>,
    /// The oldest first.
    samples: Vec<Sample>,
    quota: Option<Quota>,
}

impl Machine {
    /// # Errors
    /// Neither source can be opened.
    pub(super) fn open(root: &Path, cpus: &[CpuId], apart: bool) -> std::io::Result<Self> {
        let load = Source::open(&root.join("proc/loadavg"), apart);
        let online = std::fs::read_to_string(root.join("sys/devices/system/cpu/online"));
        let all = online.ok().and_then(|list| count(&list)).is_some_and(|all| cpus.len() >= all);
        let stat = (!all || load.is_err()).then(|| Source::open(&root.join("proc/stat"), apart));
        let stat = match (stat, &load) {
            (Some(Err(error)), Err(_)) => return Err(error),
            (stat, _) => stat.and_then(Result::ok),
        };
        // For its lines of CPUs, which come first.
        let buffer = if stat.is_some() { vec![0; 64 << 10] } else { Vec::new() };
        Ok(Self {
            cpus: cpus.to_vec(),
            load: load.ok(),
            others: 0.0,
            others_at: 0,
            stat,
            buffer,
            samples: Vec::with_capacity(KEPT),
            quota: Quota::find(root, apart),
        })
    }

    /// Begins anew, in a forked child, which has the files too. Allocates nothing.
    pub(super) fn forget(&mut self) {
        (self.others, self.others_at) = (0.0, 0);
        self.samples.clear();
        if let Some(quota) = &mut self.quota {
            quota.forget();
        }
    }

    /// CPUs with nothing to do but for `ours` tasks, which spin or ask; spinners have spun for `spun`
    /// ns since they began to count.
    pub(super) fn idle(&mut self, now: u64, ours: u32, spun: u64) -> f64 {
        let mut idle: f64 = 0.0;
        if let Some(running) = self.load.as_ref().and_then(running) {
            let others = f64::from(running.saturating_sub(ours));
            let since = now.saturating_sub(self.others_at) as f64;
            self.others += (others - self.others) * (1.0 - (-since / AVERAGE_NS).exp());
            self.others_at = now;
            idle = self.cpus.len() as f64 - self.others;
        }
        if self.stat.is_some() {
            idle = idle.max(self.idle_by_time(now, spun));
        }
        match &mut self.quota {
            Some(quota) => idle.min(quota.left(now, spun)),
            None => idle,
        }
    }

    /// What of the allowed CPUs was idle or spun on lately, in CPUs.
    fn idle_by_time(&mut self, now: u64, spun: u64) -> f64 {
        let last = self.samples.last();
        if last.is_none_or(|last| now.saturating_sub(last.at) >= TICK_NS) {
            let read = self.stat.as_ref().and_then(|file| file.read(&mut self.buffer));
            let idle = idle_ns(read.unwrap_or_default(), &self.cpus);
            if self.samples.len() == KEPT {
                self.samples.remove(0);
            }
            // After a pause there is nothing recent: one tick later there is.
            self.samples.retain(|sample| now.saturating_sub(sample.at) <= 6 * TICK_NS);
            self.samples.push(Sample { at: now, idle, spun });
        }
        let (Some(first), Some(last)) = (self.samples.first(), self.samples.last()) else {
            return 0.0;
        };
        if first.at == last.at {
            return 0.0;
        }
        let free = last.idle.saturating_sub(first.idle) + last.spun.saturating_sub(first.spun);
        free as f64 / (last.at - first.at) as f64
    }
}

/// Tasks that run or could: the fourth word of `/proc/loadavg`, up to its slash (proc_loadavg(5)).
fn running(file: &Source) -> Option<u32> {
    let mut text = [0; 128];
    let text = str::from_utf8(file.read(&mut text)?).ok()?;
    text.split(' ').nth(3)?.split_once('/')?.0.parse().ok()
}

/// Idle time of these CPUs, ns, from the lines `cpuN user nice system idle iowait …` (proc_stat(5)).
fn idle_ns(stat: &[u8], cpus: &[CpuId]) -> u64 {
    let mut ticks = 0_u64;
    for line in stat.split(|&byte| byte == b'\n') {
        let Some(rest) = str::from_utf8(line).ok().and_then(|line| line.strip_prefix("cpu")) else {
            break;
        };
        let mut fields = rest.split(' ');
        let id = fields.next().and_then(|id| id.parse().ok()).map(CpuId::new);
        if id.is_some_and(|id| cpus.contains(&id)) {
            ticks += fields.skip(3).take(2).filter_map(|n| n.parse::<u64>().ok()).sum::<u64>();
        }
    }
    ticks.saturating_mul(TICK_NS)
}

/// How many there are in a list such as `0-3,8` (cpuset(7)).
fn count(list: &str) -> Option<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some((last + 1).saturating_sub(first))
    };
    list.trim().split(',').map(range).sum()
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use super::*;

    #[test]
    fn list_of_cpus_is_counted() {
        assert_eq!(count("0-1\n"), Some(2));
        assert_eq!(count("0,2-4,9"), Some(5));
        assert_eq!(count("0"), Some(1));
        assert_eq!(count(""), None);
        assert_eq!(count("x-y"), None);
    }

    #[test]
    fn idle_time_is_that_of_the_allowed_cpus() {
        let stat = b"cpu  9 9 9 99 9\ncpu0 1 2 3 40 5 6\ncpu2 1 1 1 7 0 0\nintr 5 5\ncpu9 1 1 1 1";
        let cpus = |ids: &[u32]| ids.iter().copied().map(CpuId::new).collect::<Vec<_>>();
        assert_eq!(idle_ns(stat, &cpus(&[0, 2])), 520_000_000);
        assert_eq!(idle_ns(stat, &cpus(&[2])), 70_000_000);
        assert_eq!(idle_ns(stat, &cpus(&[9])), 0);
        assert_eq!(idle_ns(b"", &cpus(&[0])), 0);
    }
}
