//! SPDK's dynamic scheduler, as published: a baseline.
//!
//! Source: SPDK `module/scheduler/dynamic/scheduler_dynamic.c` and `doc/scheduler.md` (scheduler
//! period 1 s, load limit 20 %, core limit 80 %, core busy 95 %). What SPDK calls a thread is here
//! a virtqueue, and a core in polled mode an IOThread; one in interrupt mode is a CPU without an
//! IOThread.
//!
//! Each period: a virtqueue's load is busy / (busy + idle). Below the load limit it goes to the
//! main core (the first). Others are looked at one after the other: the main core if it fits there;
//! else the first core before its own that fits; else, if its core is at the limit and has others,
//! the first that fits, or the least busy. One fits a core that has no virtqueue, or that stays
//! below the core limit with it. If a core was at core busy, what one virtqueue leaves there does
//! not count as idle: it stays at the core limit for this period. IOThreads without a virtqueue go.
//! There is no bound on moves.
//!
//! SPDK sees the time that a thread is polled in vain; here each of an IOThread's queues is taken
//! to have its part of that which the IOThread was not busy. The frequency governor is left out.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_units::{CpuId, Nanos};

use crate::sample::{QueueLoad, Sample};
use crate::{Action, Decision, Limits, Policy, QueueId, Snapshot, ThreadId};

const PERIOD: Nanos = Nanos::from_millis(1_000);
const LOAD_LIMIT: f64 = 0.20;
const CORE_LIMIT: f64 = 0.80;
const CORE_BUSY: f64 = 0.95;

/// A core, with or without an IOThread, as it would be after the moves so far.
#[derive(Debug)]
struct Core {
    cpu: Option<CpuId>,
    thread: Option<ThreadId>,
    busy: f64,
    idle: f64,
    queues: usize,
}

impl Core {
    fn share(&self) -> f64 {
        if self.busy + self.idle > 0.0 { self.busy / (self.busy + self.idle) } else { 0.0 }
    }

    fn at_limit(&self) -> bool {
        self.queues > 1 && self.share() >= CORE_LIMIT
    }

    fn fits(&self, busy: f64) -> bool {
        let all = self.busy + self.idle;
        let more = (self.busy + busy) / all;
        all == 0.0 || self.queues == 0 || (self.idle >= busy && more < CORE_LIMIT)
    }
}

/// Moves `busy` from core `from` to core `to`.
fn shift(cores: &mut [Core], busy: f64, from: usize, to: usize) {
    if from == to {
        return;
    }
    let core = &mut cores[to];
    core.busy += busy;
    core.idle = (core.idle - busy).max(0.0);
    core.queues += 1;
    let core = &mut cores[from];
    let full = core.share() >= CORE_BUSY;
    core.busy = (core.busy - busy).max(0.0);
    core.idle += busy;
    if full && core.share() < CORE_LIMIT {
        let all = core.busy + core.idle;
        core.busy = all * CORE_LIMIT;
        core.idle = all - core.busy;
    }
    core.queues -= 1;
}

/// The core for a virtqueue that is active.
fn best(cores: &[Core], busy: f64, from: usize) -> usize {
    let at_limit = cores[from].at_limit();
    let mut least = from;
    for (at, core) in cores.iter().enumerate() {
        if core.busy < cores[least].busy {
            least = at;
        }
        // The main core is the first.
        if at != from && core.fits(busy) && (at == 0 || (at < from && from != 0) || at_limit) {
            return at;
        }
    }
    if at_limit { least } else { from }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Spdk {
    limits: Limits,
    last: Option<Snapshot>,
    /// CPUs that were taken from vCPUs.
    borrowed: BTreeSet<CpuId>,
}

impl Spdk {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, last: None, borrowed: BTreeSet::new() }
    }

    /// The cores there are, and those that there may be, in order.
    fn cores(&self, sample: &Sample, vcpus: &BTreeSet<CpuId>) -> Vec<Core> {
        let of = |thread: &crate::sample::ThreadLoad| Core {
            cpu: thread.cpu,
            thread: Some(thread.id),
            busy: thread.busy,
            idle: 1.0 - thread.busy,
            queues: sample.queues_of(thread.id).count(),
        };
        let taken: BTreeSet<_> = sample.threads.iter().filter_map(|thread| thread.cpu).collect();
        let mut room = self.limits.max_iothreads.saturating_sub(sample.threads.len());
        let mut keep = vcpus.len().saturating_sub(1);
        let mut cores = Vec::new();
        let mut seen = BTreeSet::new();
        for &cpu in self.limits.cpus.iter().filter(|&&cpu| seen.insert(cpu)) {
            let theirs = vcpus.contains(&cpu);
            let free = !theirs || (self.limits.borrow && keep > 0);
            if let Some(thread) = sample.unlocked().find(|thread| thread.cpu == Some(cpu)) {
                cores.push(of(thread));
            } else if !taken.contains(&cpu) && free && room > 0 {
                room -= 1;
                keep -= usize::from(theirs);
                cores.push(Core { cpu: Some(cpu), thread: None, busy: 0.0, idle: 0.0, queues: 0 });
            }
        }
        let known: BTreeSet<_> = cores.iter().filter_map(|core| core.thread).collect();
        cores.extend(sample.unlocked().filter(|thread| !known.contains(&thread.id)).map(of));
        // The main core is the first that there is.
        if let Some(main) = cores.iter().position(|core| core.thread.is_some()) {
            cores[..=main].rotate_right(1);
        }
        cores
    }

    fn balance(&mut self, snapshot: &Snapshot, sample: &Sample) -> Vec<Decision> {
        let mut vcpus: BTreeSet<_> =
            snapshot.cpus.iter().filter(|cpu| cpu.vcpus).map(|cpu| cpu.id).collect();
        let mut cores = self.cores(sample, &vcpus);
        if cores.is_empty() {
            return Vec::new();
        }
        let place: BTreeMap<_, _> =
            (0..).zip(&cores).filter_map(|(at, core)| Some((core.thread?, at))).collect();
        let idle: Vec<_> = cores.iter().map(|core| core.idle / core.queues.max(1) as f64).collect();
        let is_active = |queue: &QueueLoad, at: usize| {
            queue.busy > 0.0 && queue.busy / (queue.busy + idle[at]) >= LOAD_LIMIT
        };
        let mut at: BTreeMap<QueueId, usize> = BTreeMap::new();
        for active in [false, true] {
            for queue in &sample.queues {
                let Some(&from) = place.get(&queue.thread) else { continue };
                if is_active(queue, from) == active {
                    let to = if active { best(&cores, queue.busy, from) } else { 0 };
                    shift(&mut cores, queue.busy, from, to);
                    at.insert(queue.id, to);
                }
            }
        }

        let mut decisions = Vec::new();
        let mut threads = sample.threads.len();
        let before = vcpus.clone();
        let moved = |queue: &&QueueLoad| {
            let Some(&from) = place.get(&queue.thread) else { return false };
            at.get(&queue.id).is_some_and(|&to| to != from)
        };
        let reason = |core: &Core| {
            format!(
                "{} virtqueues with {:.0} % for core {:?} (load limit 20 %, core limit 80 %, busy 95 %)",
                core.queues,
                100.0 * core.share(),
                core.cpu.map(CpuId::get),
            )
        };
        let decision = |action, core: &Core| Decision { action, reason: reason(core) };
        for (to, core) in cores.iter().enumerate() {
            let arrives = |queue: &&QueueLoad| moved(queue) && at[&queue.id] == to;
            let mut queues = sample.queues.iter().filter(arrives).map(|queue| queue.id).peekable();
            if queues.peek().is_none() {
                continue;
            }
            if let (None, Some(cpu)) = (core.thread, core.cpu) {
                threads += 1;
                if vcpus.remove(&cpu) {
                    self.borrowed.insert(cpu);
                }
                let queues = queues.collect();
                decisions.push(decision(Action::AddThread { cpu, queues }, core));
            }
        }
        if vcpus != before {
            let cpus = vcpus.iter().copied().collect();
            decisions.insert(0, decision(Action::SetVcpuCpus { cpus }, &cores[0]));
        }
        let taken = vcpus.clone();
        let mut gone = Vec::new();
        for core in &cores {
            if let Some(thread) = core.thread.filter(|_| core.queues == 0)
                && threads > self.limits.min_iothreads.max(1)
            {
                threads -= 1;
                gone.push(thread);
                vcpus.extend(core.cpu.filter(|cpu| self.borrowed.remove(cpu)));
            }
        }
        let mut leaving: BTreeMap<ThreadId, Vec<(QueueId, ThreadId)>> =
            gone.iter().map(|&thread| (thread, Vec::new())).collect();
        for queue in sample.queues.iter().filter(moved) {
            let core = &cores[at[&queue.id]];
            // The others went to a new one.
            let Some(to) = core.thread else { continue };
            match leaving.get_mut(&queue.thread) {
                Some(moves) => moves.push((queue.id, to)),
                None => {
                    decisions.push(decision(Action::MoveQueue { queue: queue.id, to }, core));
                }
            }
        }
        for (thread, moves) in leaving {
            let reason = "0 virtqueues are left (interrupt mode)".to_owned();
            decisions.push(Decision { action: Action::RemoveThread { thread, moves }, reason });
        }
        if vcpus != taken {
            let cpus = vcpus.into_iter().collect();
            decisions.push(decision(Action::SetVcpuCpus { cpus }, &cores[0]));
        }
        decisions
    }
}

impl Policy for Spdk {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        let last = self.last.get_or_insert_with(|| snapshot.clone());
        if snapshot.now.saturating_sub(last.now) < PERIOD {
            return Vec::new();
        }
        let Some(sample) = Sample::between(last, snapshot) else { return Vec::new() };
        self.last = Some(snapshot.clone());
        self.balance(snapshot, &sample)
    }
}
