//! What happened between two snapshots.
//!
//! Counts and times are the caller's, who may be wrong: one that falls counts as zero, a share of a
//! thread's time is 0 to 1, and two snapshots of the same time have nothing between them.

use rtvirtio_units::{CpuId, Nanos};

use crate::utility;
use crate::{Cpu, Queue, QueueId, QueueKind, Snapshot, Thread, ThreadId, Vm, VmId};

/// What requests may wait on average before they start.
pub(crate) const DELAY: Nanos = Nanos::from_micros(200);

/// The time between two snapshots.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sample {
    /// How long, in seconds; more than 0.
    pub(crate) seconds: f64,
    /// Those in the later snapshot, by id.
    pub(crate) threads: Vec<ThreadLoad>,
    /// Those in the later snapshot whose thread is there too, by id.
    pub(crate) queues: Vec<QueueLoad>,
    /// Those in both, by id.
    pub(crate) cpus: Vec<CpuLoad>,
    /// Of all VMs' vCPUs, in CPUs: 1.0 is one on a CPU all the time.
    pub(crate) vcpus_ran: f64,
    /// The same, ready but not on a CPU.
    pub(crate) vcpus_waited: f64,
    /// Of these, what those had that never slept.
    pub(crate) awake_ran: f64,
    pub(crate) awake_waited: f64,
}

/// Of an IOThread. Shares of the time: 0 to 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadLoad {
    pub(crate) id: ThreadId,
    pub(crate) cpu: Option<CpuId>,
    pub(crate) locked: bool,
    pub(crate) busy: f64,
    /// On its CPU.
    pub(crate) ran: f64,
    /// Ready but not on its CPU.
    pub(crate) waited: f64,
}

/// Of a virtqueue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueLoad {
    pub(crate) id: QueueId,
    pub(crate) kind: QueueKind,
    pub(crate) vm: VmId,
    pub(crate) thread: ThreadId,
    /// Of its thread's time, 0 to 1.
    pub(crate) busy: f64,
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// Sum of what its requests waited for before they started.
    pub(crate) waited: Nanos,
    pub(crate) backlogged: bool,
}

impl QueueLoad {
    /// What it has done.
    pub(crate) fn work(&self) -> f64 {
        utility::work(self.kind, self.requests, self.bytes)
    }

    /// Whether its requests waited for more than [`DELAY`] on average before they started.
    pub(crate) fn waits(&self) -> bool {
        self.waited.get() > DELAY.get().saturating_mul(self.requests.max(1))
    }
}

/// Of a CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuLoad {
    pub(crate) id: CpuId,
    /// Of the time, 0 to 1.
    pub(crate) idle: f64,
    pub(crate) vcpus: bool,
}

/// The item of this id, in what is sorted by id.
pub(crate) fn find<T, I: Ord>(items: &[T], id: I, of: impl Fn(&T) -> I) -> Option<&T> {
    items.binary_search_by_key(&id, of).ok().map(|at| &items[at])
}

/// Sorted by id, each once.
fn by_id<T, I: Ord>(mut items: Vec<T>, of: impl Fn(&T) -> I) -> Vec<T> {
    items.sort_by_key(&of);
    items.dedup_by_key(|item| of(item));
    items
}

impl Sample {
    /// None if no time went by.
    pub(crate) fn between(before: &Snapshot, after: &Snapshot) -> Option<Self> {
        let elapsed = after.now.saturating_sub(before.now);
        if elapsed == Nanos::ZERO {
            return None;
        }
        let seconds = elapsed.as_secs_f64();
        let per = |from: Nanos, to: Nanos, time: f64| {
            if time > 0.0 { to.saturating_sub(from).as_secs_f64() / time } else { 0.0 }
        };
        let share = |from: Nanos, to: Nanos| per(from, to, seconds).min(1.0);
        // What the kernel counts is of its own time, which may be longer, or nothing.
        let measured = after.measured.saturating_sub(before.measured).as_secs_f64();
        let cpus = |from: Nanos, to: Nanos| per(from, to, measured);
        let on_cpu = |from: Nanos, to: Nanos| cpus(from, to).min(1.0);

        let thread = |now: &Thread| {
            let was = find(&before.threads, now.id, |thread| thread.id).unwrap_or(now);
            ThreadLoad {
                id: now.id,
                cpu: now.cpu,
                locked: now.locked,
                busy: share(was.busy, now.busy),
                ran: on_cpu(was.ran, now.ran),
                waited: on_cpu(was.waited, now.waited),
            }
        };
        let threads =
            by_id(after.threads.iter().map(thread).collect(), |thread: &ThreadLoad| thread.id);

        let queue = |now: &Queue| {
            let was = find(&before.queues, now.id, |queue| queue.id).unwrap_or(now);
            QueueLoad {
                id: now.id,
                kind: now.kind,
                vm: now.vm,
                thread: now.thread,
                busy: share(was.busy, now.busy),
                requests: now.requests.saturating_sub(was.requests),
                bytes: now.bytes.saturating_sub(was.bytes),
                waited: now.waited.saturating_sub(was.waited),
                backlogged: now.backlogged,
            }
        };
        let served = |queue: &&Queue| find(&threads, queue.thread, |thread| thread.id).is_some();
        let queues = after.queues.iter().filter(served).map(queue).collect();
        let queues = by_id(queues, |queue: &QueueLoad| queue.id);

        let cpu = |now: &Cpu| {
            let was = find(&before.cpus, now.id, |cpu| cpu.id)?;
            Some(CpuLoad { id: now.id, idle: on_cpu(was.idle, now.idle), vcpus: now.vcpus })
        };
        let host = by_id(after.cpus.iter().filter_map(cpu).collect(), |cpu: &CpuLoad| cpu.id);

        let vms = |of: fn(&Vm) -> Nanos| -> f64 {
            let both = after.vms.iter().filter_map(|now| {
                let was = find(&before.vms, now.id, |vm| vm.id)?;
                Some(cpus(of(was), of(now)))
            });
            both.fold(0.0, |sum, of| sum + of)
        };
        Some(Self {
            seconds,
            threads,
            queues,
            cpus: host,
            vcpus_ran: vms(|vm| vm.ran),
            vcpus_waited: vms(|vm| vm.waited),
            awake_ran: vms(|vm| vm.awake_ran),
            awake_waited: vms(|vm| vm.awake_waited),
        })
    }

    /// An IOThread by its id.
    pub(crate) fn thread(&self, id: ThreadId) -> Option<&ThreadLoad> {
        find(&self.threads, id, |thread| thread.id)
    }

    /// A CPU by its id.
    pub(crate) fn cpu(&self, id: CpuId) -> Option<&CpuLoad> {
        find(&self.cpus, id, |cpu| cpu.id)
    }

    /// IOThreads that are not locked.
    pub(crate) fn unlocked(&self) -> impl Iterator<Item = &ThreadLoad> {
        self.threads.iter().filter(|thread| !thread.locked)
    }

    /// The queues of an IOThread.
    pub(crate) fn queues_of(&self, thread: ThreadId) -> impl Iterator<Item = &QueueLoad> {
        self.queues.iter().filter(move |queue| queue.thread == thread)
    }

    /// What the CPUs are idle on which vCPUs may run, in CPUs.
    pub(crate) fn vcpus_idle(&self) -> f64 {
        self.cpus
            .iter()
            .filter(|cpu| cpu.vcpus)
            .map(|cpu| cpu.idle)
            .fold(0.0, |sum, idle: f64| sum + idle)
    }
}
