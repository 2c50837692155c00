//! What a number of I/O cores is worth: one figure from what it brings and what it costs.
//!
//! utility = I/O progress / [`Reference::io`] + compute progress / [`Reference::compute`]
//!         − 0.2 × I/O cores
//!
//! - *I/O progress* is work a second ([`work`]): each request to a disk that ended counts 1, and each 64 KiB of it 1
//!   more, so that a large one is worth more than a small one, but not by its bytes alone. Frames of network devices count
//!   what they take of an IOThread's time beside a request of 4 KiB. That is an estimate by kind and length, and not the time
//!   that was measured: where frames take longer, as beside vCPUs on the same CPU, no more is done. Each frame
//!   as a request would do no better: those of a switch, of which a CPU copies ten times as many as it serves requests, would
//!   be all that counts.
//! - *Compute progress* is what the VMs computed of what they wanted to, in CPUs: the reference's
//!   demand × ran / (ran + waited). So a VM that has nothing to do costs nothing. A bench knows
//!   what was computed; a policy takes for it what vCPUs ran, some of which is for I/O, and what those
//!   waited that never slept ([`awake_waited`](crate::Vm::awake_waited)).
//! - *I/O cores* are the IOThreads that there are, mean over the time; each has a CPU of its own.
//!
//! There is one [`Reference`] for hosts of every size, for benches and for a policy's own past, made
//! of all that is compared ([`Reference::of`]). 1 is what one CPU does, of I/O as of compute; where
//! all that is compared does, or wants, less than that, 1 is the most of it. So:
//! - On a host of two cores both terms are about 0 to 1. However small the load is, to lose all of
//!   it is worse than to keep a core for it.
//! - On a large host both count CPUs, and a further I/O core pays from a fifth of a core's work on,
//!   however many there are. (Parts of the best run, 0 to 1 on every host, would never pay for a
//!   sixth.)
//!
//! Properties (tests of the same name): `utility_counts_cpus_worth_of_io_and_compute`, `frames_count_by_the_time_that_they_take`,
//! `load_of_less_than_a_cpu_counts_as_one`, `reference_is_the_same_for_all_that_is_compared`.

use crate::sample::{QueueLoad, Sample, ThreadLoad};
use crate::{QueueKind, Snapshot};

/// What a request or frame counts, and so many bytes of it count 1.
const fn weights(kind: QueueKind) -> (f64, f64) {
    // Of an IOThread's time a request of 4 KiB takes about 1.2 µs by io_uring, without what its driver is called for. The
    // figures of frames are those by which turns are counted (`rtvirtio_dataplane`'s `drr::cost`): by a system call 1.6 µs and
    // 80 ns a KiB, by a copy 125 ns, at each of two queues, and 60 ns a KiB.
    match kind {
        QueueKind::Disk => (1.0, 65_536.0),
        QueueKind::Link => (1.6 / 1.2, 1.2 / 0.08 * 1_024.0),
        QueueKind::Switch => (0.125 / 1.2, 1.2 / 0.06 * 1_024.0),
    }
}

/// I/O progress of so many requests or frames of a kind with so many bytes in all.
#[must_use]
pub fn work(kind: QueueKind, requests: u64, bytes: u64) -> f64 {
    let (each, unit) = weights(kind);
    each * requests as f64 + bytes as f64 / unit
}

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
    /// Of vCPUs that could compute more, ready but not on a CPU, in CPUs.
    pub waited: f64,
    /// IOThreads.
    pub cores: f64,
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
        let done: f64 = sample.queues.iter().map(QueueLoad::work).sum();
        Self {
            io: done / sample.seconds,
            busy: sample.threads.iter().map(on_cpu).sum(),
            ran: sample.vcpus_ran,
            waited: sample.awake_waited,
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
    /// Of all that is compared: the work of one busy IOThread, where it did most, and one CPU; or
    /// the most work, and the largest demand, if these are less. Where nobody did any I/O, it
    /// counts nothing.
    #[must_use]
    pub fn of(compared: &[Progress]) -> Self {
        let most = |part: fn(&Progress) -> f64| compared.iter().map(part).fold(0.0, f64::max);
        let per_core = |of: &Progress| if of.busy > 0.0 { of.io / of.busy } else { 0.0 };
        let wanted = most(|of| of.ran + of.waited);
        let io = most(per_core).min(most(|of| of.io));
        let some = |value: f64| if value > 0.0 { value } else { f64::INFINITY };
        Self { io: some(io), compute: some(wanted.min(1.0)), wanted }
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

    fn utility(of: Progress, reference: &Reference) -> f64 {
        Weights::default().utility(&of, reference)
    }

    #[test]
    fn utility_counts_cpus_worth_of_io_and_compute() {
        let after = Progress { io: 80_000.0, busy: 1.6, ran: 1.0, waited: 1.0, cores: 2.0 };
        let reference = Reference::of(&[BEFORE, after]);
        assert_eq!(reference, Reference { io: 50_000.0, compute: 1.0, wanted: 2.0 });
        // 1.0 of I/O, 1.5 of compute, 0.2 for the core; then 1.6 + 1.0 - 0.4.
        let found = [utility(BEFORE, &reference), utility(after, &reference)];
        assert!((found[0] - 2.3).abs() < 1e-9 && (found[1] - 2.2).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn frames_count_by_the_time_that_they_take() {
        // Of 1.2 µs: 1.6, 1.6 + 5.12, 0.125 and 0.125 + 3.84.
        for (kind, bytes, expected) in [
            (QueueKind::Disk, 65_536, 2.0),
            (QueueKind::Link, 0, 1.333),
            (QueueKind::Link, 65_536, 5.6),
            (QueueKind::Switch, 0, 0.104),
            (QueueKind::Switch, 65_536, 3.304),
        ] {
            let found = work(kind, 1_000, 1_000 * bytes) / 1_000.0;
            assert!((found - expected).abs() < 1e-3, "{kind:?}: {found}");
        }
    }

    #[test]
    fn utility_of_vms_that_want_less_is_not_lower() {
        let reference = Reference::of(&[BEFORE]);
        assert!(utility(Progress { ran: 0.1, waited: 0.0, ..BEFORE }, &reference) > 2.3);
    }

    #[test]
    fn load_of_less_than_a_cpu_counts_as_one() {
        // A hundredth of an IOThread, a tenth of a CPU: half of both is lost.
        let all = Progress { io: 500.0, busy: 0.01, ran: 0.1, waited: 0.0, cores: 1.0 };
        let half = Progress { io: 250.0, busy: 0.005, ran: 0.05, waited: 0.05, cores: 1.0 };
        let reference = Reference::of(&[all, half]);
        assert_eq!(reference, Reference { io: 500.0, compute: 0.1, wanted: 0.1 });
        let found = [utility(all, &reference), utility(half, &reference)];
        assert!((found[0] - 1.8).abs() < 1e-9 && (found[1] - 0.8).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn reference_is_the_same_for_all_that_is_compared() {
        // The best IOThread of all, though another run did more on two.
        let slow = Progress { io: 60_000.0, busy: 2.0, ..BEFORE };
        assert_eq!(Reference::of(&[slow, BEFORE]), Reference::of(&[BEFORE, slow]));
        assert_eq!(Reference::of(&[slow, BEFORE]).io, 50_000.0);
        assert_eq!(Reference::of(&[slow]).io, 30_000.0);
    }

    #[test]
    fn nothing_at_all_is_worth_only_what_its_cores_cost() {
        let nothing = Progress { cores: 2.0, ..Progress::default() };
        assert_eq!(utility(nothing, &Reference::of(&[nothing])), -0.4);
    }
}
