//! IOcm's manager, as published: a baseline.
//!
//! Source: `mikelangelo-project/dynamic-io-manager` (`src/io_workers_manager.py`,
//! `src/algos/throughput_policy.py`, `io_cores_rebalance_policy.py`, `removal_policy.py`,
//! `latency_policy.py`; the figures of `create_configuration_file.py`), MIKELANGELO D2.13.
//!
//! Once an epoch of 100 ms, with *I/O idle* = IOThreads − what they were busy, and *VM idle* = what
//! the CPUs of the vCPUs were idle, both in CPUs:
//! - add a core if I/O idle < 0.12 and VM idle > 1.0;
//! - remove one if I/O idle > 0.8 and (VM idle < 0.05 or I/O idle > 1.3): the one that was added
//!   last.
//!
//! What is asked for in 60 % of the last 20 epochs is done. 5 epochs pass, then bytes per cycle are
//! the mean of 5 more; if that is less than the mean of the 5 before, the action is reverted and
//! not tried for 20 epochs, twice as many each time, up to 100. After one that helped, 10 epochs
//! pass. All devices of a VM are served by one IOThread: the VM's index modulo the number of
//! IOThreads, set when that number changes. The latency policy always answers "stay", and there is
//! no other move.
//!
//! Revisions differ in the figures of the regret (20 or 50 epochs asked, 5 or 10 that pass,
//! penalties of 20 to 100 or 100 to 5,000): these are the quickest. "Cycles" are those that went
//! by, not those of work.
//!
//! Left out, because there is nothing like it here: the softirq share of the I/O cores, and the
//! change between a thread for each device and shared ones. Where the core is not one of the
//! vCPUs', they need not leave it idle.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rtvirtio_units::{CpuId, Nanos};

use crate::sample::Sample;
use crate::{Action, Decision, Limits, Policy, Snapshot, ThreadId, VmId};

const EPOCH: Nanos = Nanos::from_millis(100);
/// I/O idle below which a core is added, and VM idle above which it can be taken.
const ADD: (f64, f64) = (0.12, 1.0);
/// I/O idle above which a core can be removed.
const CAN_REMOVE: f64 = 0.8;
/// VM idle below which, or I/O idle above which, it is.
const REMOVE: (f64, f64) = (0.05, 1.3);
/// Epochs in which an action must have been asked for, and of how many.
const ASKED: (usize, usize) = (12, 20);
/// Epochs that pass after an action, and as many that are then measured.
const GRACE: usize = 5;
/// Epochs for which a reverted action is not tried, and at most.
const PENALTY: (u64, u64) = (20, 100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Add,
    Remove,
}

/// What is remembered of one kind of action.
#[derive(Debug, Default)]
struct Memory {
    asked: VecDeque<bool>,
    /// Penalty and when it began, in epochs.
    failed: Option<(u64, u64)>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Iocm {
    limits: Limits,
    last: Option<Snapshot>,
    epoch: u64,
    /// Bytes per second of the last epochs.
    history: VecDeque<f64>,
    memory: [Memory; 2],
    /// No action before this epoch.
    rests: u64,
    /// What was done, bytes per second before, and those of the epochs since.
    regret: Option<(Act, f64, Vec<f64>)>,
    /// CPUs that were taken from vCPUs.
    borrowed: BTreeSet<CpuId>,
}

impl Iocm {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            last: None,
            epoch: 0,
            history: VecDeque::new(),
            memory: Default::default(),
            rests: 0,
            regret: None,
            borrowed: BTreeSet::new(),
        }
    }

    /// Whether it was asked for often enough and is not penalised.
    fn asks(&mut self, act: Act, asked: bool) -> bool {
        let Memory { asked: history, failed } = &mut self.memory[act as usize];
        history.push_back(asked);
        if history.len() > ASKED.1 {
            history.pop_front();
        }
        let often = history.len() == ASKED.1 && history.iter().filter(|&&is| is).count() >= ASKED.0;
        let free = failed.is_none_or(|(penalty, since)| self.epoch > since + penalty);
        asked && often && free && self.epoch >= self.rests
    }

    /// Where each VM is served by these IOThreads, `None` the one to come.
    fn places(sample: &Sample, workers: &[Option<ThreadId>]) -> BTreeMap<VmId, Option<ThreadId>> {
        let vms: BTreeSet<_> = sample.queues.iter().map(|queue| queue.vm).collect();
        let worker = |at: usize| workers.get(at % workers.len().max(1)).copied().flatten();
        vms.into_iter().enumerate().map(|(at, vm)| (vm, worker(at))).collect()
    }

    fn vcpus(snapshot: &Snapshot) -> BTreeSet<CpuId> {
        snapshot.cpus.iter().filter(|cpu| cpu.vcpus).map(|cpu| cpu.id).collect()
    }

    /// The next CPU for an IOThread, and whether it is one of the vCPUs'.
    fn next_cpu(&self, snapshot: &Snapshot) -> Option<(CpuId, bool)> {
        let vcpus = Self::vcpus(snapshot);
        let taken = |cpu| snapshot.threads.iter().any(|thread| thread.cpu == Some(cpu));
        let of_vms = |cpu| (cpu, vcpus.contains(&cpu));
        let mut free = self.limits.cpus.iter().filter(|&&cpu| !taken(cpu)).map(|&cpu| of_vms(cpu));
        free.find(|&(_, theirs)| !theirs || (self.limits.borrow && vcpus.len() > 1))
    }

    fn add(&mut self, snapshot: &Snapshot, sample: &Sample, reason: &str) -> Vec<Decision> {
        let room = snapshot.threads.len() < self.limits.max_iothreads;
        let Some((cpu, theirs)) = self.next_cpu(snapshot).filter(|_| room) else {
            return Vec::new();
        };
        let decision = |action| Decision { action, reason: reason.to_owned() };
        let mut decisions = Vec::new();
        if theirs {
            self.borrowed.insert(cpu);
            let mut cpus = Self::vcpus(snapshot);
            cpus.remove(&cpu);
            let cpus = cpus.into_iter().collect();
            decisions.push(decision(Action::SetVcpuCpus { cpus }));
        }
        let unlocked: BTreeSet<_> = sample.unlocked().map(|thread| thread.id).collect();
        let workers: Vec<_> = unlocked.iter().copied().map(Some).chain([None]).collect();
        let places = Self::places(sample, &workers);
        let mut queues = Vec::new();
        for queue in sample.queues.iter().filter(|queue| unlocked.contains(&queue.thread)) {
            match places[&queue.vm] {
                None => queues.push(queue.id),
                Some(to) if to != queue.thread => {
                    decisions.push(decision(Action::MoveQueue { queue: queue.id, to }));
                }
                Some(_) => {}
            }
        }
        decisions.push(decision(Action::AddThread { cpu, queues }));
        decisions
    }

    fn remove(&mut self, snapshot: &Snapshot, sample: &Sample, reason: &str) -> Vec<Decision> {
        let mut unlocked: Vec<_> = sample.unlocked().copied().collect();
        // Ids are not used again: the highest was added last.
        let Some(gone) = unlocked.pop() else { return Vec::new() };
        let room = snapshot.threads.len() > self.limits.min_iothreads.max(1);
        if unlocked.is_empty() || !room {
            return Vec::new();
        }
        let decision = |action| Decision { action, reason: reason.to_owned() };
        let ids: BTreeSet<_> = unlocked.iter().map(|thread| thread.id).collect();
        let workers: Vec<_> = ids.iter().copied().map(Some).collect();
        let places = Self::places(sample, &workers);
        let (mut decisions, mut moves) = (Vec::new(), Vec::new());
        for queue in &sample.queues {
            let Some(to) = places[&queue.vm] else { continue };
            if queue.thread == gone.id {
                moves.push((queue.id, to));
            } else if queue.thread != to && ids.contains(&queue.thread) {
                decisions.push(decision(Action::MoveQueue { queue: queue.id, to }));
            }
        }
        decisions.push(decision(Action::RemoveThread { thread: gone.id, moves }));
        if let Some(cpu) = gone.cpu.filter(|cpu| self.borrowed.remove(cpu)) {
            let mut cpus = Self::vcpus(snapshot);
            cpus.insert(cpu);
            let cpus = cpus.into_iter().collect();
            decisions.push(decision(Action::SetVcpuCpus { cpus }));
        }
        decisions
    }

    /// What becomes of the last action, while that is open.
    fn regret(&mut self, snapshot: &Snapshot, sample: &Sample, rate: f64) -> Option<Vec<Decision>> {
        let (act, before, since) = self.regret.as_mut()?;
        since.push(rate);
        if since.len() < 2 * GRACE {
            return Some(Vec::new());
        }
        let (act, before) = (*act, *before);
        let after = since[GRACE..].iter().sum::<f64>() / GRACE as f64;
        self.regret = None;
        if after >= before {
            self.rests = self.epoch + 2 * GRACE as u64;
            self.memory = Default::default();
            return Some(Vec::new());
        }
        let failed = &mut self.memory[act as usize].failed;
        let penalty = failed.map_or(PENALTY.0, |(penalty, _)| (2 * penalty).min(PENALTY.1));
        *failed = Some((penalty, self.epoch));
        let reason = format!(
            "reverted: {before:.0} bytes/s before, {after:.0} after; not for {penalty} epochs"
        );
        Some(match act {
            Act::Add => self.remove(snapshot, sample, &reason),
            Act::Remove => self.add(snapshot, sample, &reason),
        })
    }
}

impl Policy for Iocm {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        let last = self.last.get_or_insert_with(|| snapshot.clone());
        if snapshot.now.saturating_sub(last.now) < EPOCH {
            return Vec::new();
        }
        let Some(sample) = Sample::between(last, snapshot) else { return Vec::new() };
        self.last = Some(snapshot.clone());
        self.epoch += 1;
        let rate =
            sample.queues.iter().map(|queue| queue.bytes as f64).sum::<f64>() / sample.seconds;
        if let Some(decisions) = self.regret(snapshot, &sample, rate) {
            return decisions;
        }
        self.history.push_back(rate);
        if self.history.len() > GRACE {
            self.history.pop_front();
        }
        let busy: f64 = sample.threads.iter().map(|thread| thread.busy).sum();
        let io_idle = (sample.threads.len() as f64 - busy).max(0.0);
        let vm_idle = sample.vcpus_idle();
        let given = self.next_cpu(snapshot).is_some_and(|(_, theirs)| !theirs || vm_idle > ADD.1);
        let add = io_idle < ADD.0 && given && snapshot.threads.len() < self.limits.max_iothreads;
        let remove = io_idle > CAN_REMOVE
            && (vm_idle < REMOVE.0 || io_idle > REMOVE.1)
            && snapshot.threads.len() > self.limits.min_iothreads.max(1);
        let (add, remove) = (self.asks(Act::Add, add), self.asks(Act::Remove, remove));
        let reason = format!(
            "I/O idle {io_idle:.2} of {} cores, VM idle {vm_idle:.2} cores, in {} of {} epochs",
            sample.threads.len(),
            ASKED.0,
            ASKED.1,
        );
        let (act, decisions) = match (add, remove) {
            (true, _) => (Act::Add, self.add(snapshot, &sample, &reason)),
            (_, true) => (Act::Remove, self.remove(snapshot, &sample, &reason)),
            _ => return Vec::new(),
        };
        if !decisions.is_empty() {
            let before = self.history.iter().sum::<f64>() / self.history.len() as f64;
            self.regret = Some((act, before, Vec::new()));
        }
        decisions
    }
}
