//! What a number of I/O cores is worth: one figure from what it brings and what it costs.
//!
//! utility = I/O progress / [`Reference::io`] + compute progress / [`Reference::compute`]
//!         − 0.2 × I/O cores
//!
//! - *I/O progress* is work a second: each request that ended counts 1, and each 64 KiB of it 1
//!   more, so that a large one is worth more than a small one, but not by its bytes alone.
//! - *Compute progress* is, in CPUs, what the VMs' vCPUs ran of what they wanted: (ran + waited of
//!   the reference) × ran / (ran + waited). So a VM that has nothing to do costs nothing.
//! - *I/O cores* are the IOThreads that there are, mean over the time; each has a CPU of its own.
//!
//! Both references are part of a comparison and the same for all that is compared. There are two:
//! - [`Reference::per_core`], which a policy uses on its own past: the work of one busy IOThread,
//!   and one CPU. Then all three terms are in CPUs, and a further I/O core pays from a fifth of a
//!   core's work on, on a host of any size.
//! - of a bench: the most I/O progress, and compute progress, that any of the compared runs had in
//!   that phase. Then both terms are 0 to 1. This suits small hosts only: from 5 I/O cores on, none
//!   would pay.

use crate::Snapshot;
use crate::sample::{Sample, ThreadLoad};

/// Bytes of a request that count as much as the request itself.
const BYTES: f64 = 65_536.0;

/// What counts how much. One set for every comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Normalised I/O progress.
    pub io: f64,
    /// Normalised compute progress.
    pub compute: f64,
    /// An I/O core.
    pub core: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { io: 1.0, compute: 1.0, core: 0.2 }
    }
}

/// What was done in a time, before it is normalised.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Progress {
    /// Requests and 64 KiBs, a second.
    pub io: f64,
    /// Time of IOThreads on a CPU that these took, in CPUs.
    pub busy: f64,
    /// Of vCPUs on a CPU, in CPUs.
    pub ran: f64,
    /// Of vCPUs ready but not on a CPU, in CPUs.
    pub waited: f64,
    /// IOThreads.
    pub cores: f64,
}

/// Requests, and as much for each 64 KiB of them: what I/O progress counts.
#[must_use]
pub fn work(requests: u64, bytes: u64) -> f64 {
    requests as f64 + bytes as f64 / BYTES
}

impl Progress {
    /// Between two snapshots; none if they are of the same time.
    #[must_use]
    pub fn between(before: &Snapshot, after: &Snapshot) -> Option<Self> {
        Sample::between(before, after).map(|sample| Self::of(&sample))
    }

    pub(crate) fn of(sample: &Sample) -> Self {
        // Time in turns with work has what the IOThread waited for its CPU, time on the CPU what it
        // polled.
        let on_cpu = |thread: &ThreadLoad| match thread.ran {
            0.0 => thread.busy,
            ran => ran.min(thread.busy),
        };
        let done: f64 = sample.queues.iter().map(|queue| work(queue.requests, queue.bytes)).sum();
        Self {
            io: done / sample.seconds,
            busy: sample.threads.iter().map(on_cpu).sum(),
            ran: sample.vcpus_ran,
            waited: sample.vcpus_waited,
            cores: sample.threads.len() as f64,
        }
    }

    /// The mean of times of one length.
    pub(crate) fn mean(of: &[Self]) -> Self {
        let mean =
            |part: fn(&Self) -> f64| of.iter().map(part).sum::<f64>() / (of.len() as f64).max(1.0);
        Self {
            io: mean(|of| of.io),
            busy: mean(|of| of.busy),
            ran: mean(|of| of.ran),
            waited: mean(|of| of.waited),
            cores: mean(|of| of.cores),
        }
    }
}

/// What progress is divided by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reference {
    /// I/O progress that counts 1.
    pub io: f64,
    /// Compute progress, in CPUs, that counts 1.
    pub compute: f64,
    /// What the vCPUs wanted, in CPUs.
    pub wanted: f64,
}

impl Reference {
    /// The work of one busy IOThread, and one CPU; none if no IOThread did anything.
    #[must_use]
    pub fn per_core(of: &Progress) -> Option<Self> {
        let io = of.io / of.busy;
        let some = io.is_finite() && io > 0.0;
        some.then_some(Self { io, compute: 1.0, wanted: of.ran + of.waited })
    }

    /// The most that any of these had, each of both parts by itself.
    #[must_use]
    pub fn best(of: &[Progress]) -> Self {
        let most = |part: fn(&Progress) -> f64| of.iter().map(part).fold(0.0, f64::max);
        // Where nobody does anything, nothing is a part of it.
        let some = |value: f64| if value > 0.0 { value } else { f64::INFINITY };
        let wanted = most(|of| of.ran + of.waited);
        let got = most(|of| of.ran / (of.ran + of.waited).max(1e-9));
        Self { io: some(most(|of| of.io)), compute: some(got * wanted), wanted }
    }
}

impl Weights {
    /// The utility of what was done.
    #[must_use]
    pub fn utility(&self, of: &Progress, reference: &Reference) -> f64 {
        let wanted = of.ran + of.waited;
        let got = if wanted > 0.0 { of.ran / wanted } else { 1.0 };
        self.io * of.io / reference.io + self.compute * got * reference.wanted / reference.compute
            - self.core * of.cores
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One thread, always busy, 50,000 requests/s; vCPUs that want 2 CPUs and get 1.5.
    const BEFORE: Progress =
        Progress { io: 50_000.0, busy: 1.0, ran: 1.5, waited: 0.5, cores: 1.0 };

    #[test]
    fn utility_per_core_counts_cores_worth_of_io_and_compute() {
        let reference = Reference::per_core(&BEFORE).unwrap();
        let utility = Weights::default().utility(&BEFORE, &reference);
        // 1.0 of I/O, 1.5 of compute, 0.2 for the core.
        assert!((utility - 2.3).abs() < 1e-9, "{utility}");
        let after = Progress { io: 80_000.0, busy: 1.6, ran: 1.0, waited: 1.0, cores: 2.0 };
        // 1.6 + 1.0 - 0.4.
        let utility = Weights::default().utility(&after, &reference);
        assert!((utility - 2.2).abs() < 1e-9, "{utility}");
    }

    #[test]
    fn best_of_several_is_the_most_io_and_the_most_of_what_vcpus_wanted() {
        // 1.0 of 2.0 CPUs; then 0.9 of 1.2.
        let other = Progress { io: 80_000.0, busy: 1.6, ran: 0.9, waited: 0.3, cores: 2.0 };
        let first = Progress { ran: 1.0, waited: 1.0, ..BEFORE };
        let reference = Reference::best(&[first, other]);
        assert_eq!((reference.io, reference.wanted, reference.compute), (80_000.0, 2.0, 1.5));
        let utility = |of: &Progress| Weights::default().utility(of, &reference);
        // 0.625 + 0.5 / 0.75 - 0.2, and 1 + 1 - 0.4.
        assert!((utility(&first) - 1.091_667).abs() < 1e-6, "{}", utility(&first));
        assert!((utility(&other) - 1.6).abs() < 1e-9, "{}", utility(&other));
        assert_eq!(work(3, 131_072), 5.0);
    }

    #[test]
    fn utility_of_vms_that_want_less_is_not_lower() {
        let reference = Reference::per_core(&BEFORE).unwrap();
        let idle = Progress { ran: 0.1, waited: 0.0, ..BEFORE };
        assert!(Weights::default().utility(&idle, &reference) > 2.3);
    }

    #[test]
    fn reference_without_io_is_none() {
        assert_eq!(Reference::per_core(&Progress::default()), None);
        assert_eq!(Reference::per_core(&Progress { busy: 0.5, ..BEFORE }).unwrap().io, 100_000.0);
    }
}
