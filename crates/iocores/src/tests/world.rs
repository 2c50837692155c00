//! A host in simulated time, 1 ms at a time: IOThreads that serve queues in equal parts, each on a
//! CPU that it may share with vCPUs. Everything flows; nothing is random.

use std::collections::BTreeMap;

use rtvirtio_units::{CpuId, Nanos};

use crate::utility::{Progress, Reference, Weights};
use crate::{
    Action, Cpu, Decision, Kind, Limits, Policy, Queue, QueueId, Snapshot, Thread, ThreadId, Vm,
    VmId, policy,
};

/// What a request takes of an IOThread.
pub(super) const COST: f64 = 20e-6;
const TICK: f64 = 1e-3;
/// The driver of queue 0; of the next one, the next.
pub(super) const DRIVER: u32 = 40;

/// What a driver asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Load {
    /// Of an IOThread's time.
    pub(super) share: f64,
    /// Requests under way at most; then it waits.
    pub(super) depth: f64,
}

pub(super) const NONE: Load = Load { share: 0.0, depth: 0.0 };

/// So much of an IOThread's time, if it gets that.
pub(super) fn paced(share: f64) -> Load {
    Load { share, depth: 1_000.0 }
}

/// As much as it gets.
pub(super) const DEEP: Load = Load { share: 10.0, depth: 1_000.0 };

/// As much as it gets with so few under way that it is 32 % of an IOThread's time.
pub(super) const SHALLOW: Load = Load { share: 10.0, depth: 16.0 };

#[derive(Debug, Clone)]
struct Driver {
    load: Load,
    backlog: f64,
    /// What of the backlog at the last snapshot is still there.
    old: f64,
    requests: f64,
    waited: f64,
    busy: f64,
}

/// A host.
pub(super) struct World {
    pub(super) state: Snapshot,
    drivers: BTreeMap<QueueId, Driver>,
    pub(super) limits: Limits,
    /// What the vCPUs want, in CPUs.
    pub(super) wanted: f64,
    /// Whether they sleep now and then.
    pub(super) sleep: bool,
    /// A further IOThread makes every request so much dearer.
    pub(super) quarrel: f64,
    /// The CPU on which all vCPUs are that may, until they are spread.
    pub(super) crowded: Option<CpuId>,
    next: u32,
    /// When how many queues moved, and why, ms.
    pub(super) moves: Vec<(u64, usize)>,
    pub(super) log: Vec<(u64, Decision)>,
}

fn nanos(seconds: f64) -> Nanos {
    Nanos::from_secs_f64(seconds)
}

impl World {
    /// `io` CPUs for IOThreads and `vcpus` others; one IOThread, with all queues.
    pub(super) fn new(io: u32, vcpus: u32, queues: u32) -> Self {
        let cpu = |id| Cpu { id: CpuId::new(id), idle: Nanos::ZERO, vcpus: id >= io };
        let cpus: Vec<_> = (0..io).map(CpuId::new).collect();
        let limits = Limits { max_iothreads: cpus.len(), cpus, min_iothreads: 1, borrow: false };
        let mut world = Self {
            state: Snapshot { cpus: (0..io + vcpus).map(cpu).collect(), ..Snapshot::default() },
            drivers: BTreeMap::new(),
            limits,
            wanted: 0.0,
            sleep: false,
            quarrel: 0.0,
            crowded: None,
            next: 1,
            moves: Vec::new(),
            log: Vec::new(),
        };
        world.state.vms.push(Vm::new(VmId(0)));
        world.add_thread(CpuId::new(0));
        for id in 0..queues {
            world.state.queues.push(Queue::new(QueueId(id), VmId(id), ThreadId(1)));
            let driver = Driver {
                load: NONE,
                backlog: 0.0,
                old: 0.0,
                requests: 0.0,
                waited: 0.0,
                busy: 0.0,
            };
            world.drivers.insert(QueueId(id), driver);
        }
        world
    }

    /// A VM has so many of the queues, not one.
    pub(super) fn group(&mut self, each: u32) {
        self.state.queues.iter_mut().for_each(|queue| queue.vm = VmId(queue.id.0 / each));
    }

    pub(super) fn add_thread(&mut self, cpu: CpuId) -> ThreadId {
        let id = ThreadId(self.next);
        self.next += 1;
        self.state.threads.push(Thread {
            id,
            cpu: Some(cpu),
            locked: false,
            busy: Nanos::ZERO,
            poll: Nanos::ZERO,
            sleep: Nanos::ZERO,
            ran: Nanos::ZERO,
            waited: Nanos::ZERO,
        });
        id
    }

    pub(super) fn load(&mut self, loads: &[Load]) {
        for (driver, &load) in self.drivers.values_mut().zip(loads) {
            driver.load = load;
            driver.backlog = driver.backlog.min(load.depth);
        }
    }

    /// The CPU's time that an IOThread and vCPUs get, and what they wait.
    fn share(thread: f64, vcpus: f64) -> (f64, f64) {
        if thread + vcpus <= 1.0 {
            (thread, vcpus)
        } else {
            let thread = thread.min((1.0 - vcpus).max(0.5));
            (thread, 1.0 - thread)
        }
    }

    fn tick(&mut self) {
        let state = &mut self.state;
        let dearer = 1.0 + self.quarrel * (state.threads.len() as f64 - 1.0);
        let cost = COST * dearer;
        for driver in self.drivers.values_mut() {
            let room = (driver.load.depth - driver.backlog).max(0.0);
            driver.backlog += (driver.load.share * TICK / COST).min(room);
        }
        let crowded = self.crowded;
        let has = |cpu: &Cpu| cpu.vcpus && crowded.is_none_or(|only| only == cpu.id);
        let on = state.cpus.iter().filter(|&cpu| has(cpu)).count().max(1) as f64;
        let each = (self.wanted / on).min(1.0);
        let mut ran = 0.0;
        for cpu in &mut state.cpus {
            let vcpus = if has(cpu) { each } else { 0.0 };
            let thread = state.threads.iter_mut().find(|thread| thread.cpu == Some(cpu.id));
            let Some(thread) = thread else {
                ran += vcpus;
                cpu.idle = cpu.idle.saturating_add(nanos(TICK * (1.0 - vcpus)));
                continue;
            };
            let mut queues: Vec<_> =
                state.queues.iter_mut().filter(|queue| queue.thread == thread.id).collect();
            let asked = |queue: &&mut Queue| self.drivers[&queue.id].backlog * cost / TICK;
            let asks = queues.iter().map(asked).sum::<f64>().min(1.0);
            let (gets, vcpus) = Self::share(asks, vcpus);
            ran += vcpus;
            cpu.idle = cpu.idle.saturating_add(nanos(TICK * (1.0 - gets - vcpus).max(0.0)));
            thread.busy = thread.busy.saturating_add(nanos(TICK * asks));
            thread.ran = thread.ran.saturating_add(nanos(TICK * gets));
            thread.waited = thread.waited.saturating_add(nanos(TICK * (asks - gets)));
            thread.sleep = thread.sleep.saturating_add(nanos(TICK * (1.0 - asks)));
            // Equal parts, and what one does not need is the others'.
            queues.sort_by(|a, b| {
                self.drivers[&a.id].backlog.total_cmp(&self.drivers[&b.id].backlog)
            });
            let mut left = gets * TICK / cost;
            let mut others = queues.len() as f64;
            for queue in queues {
                let driver = self.drivers.get_mut(&queue.id).expect("each queue has one");
                let served = driver.backlog.min(left / others);
                left -= served;
                others -= 1.0;
                driver.backlog -= served;
                driver.old = (driver.old - served).max(0.0);
                driver.requests += served;
                // Those that are left wait for this tick.
                driver.waited += driver.backlog * TICK;
                driver.busy += served * cost * if gets > 0.0 { asks / gets } else { 0.0 };
                queue.busy = nanos(driver.busy);
                queue.requests = driver.requests as u64;
                queue.calls = queue.requests * u64::from(60 + queue.id.0) / 100;
                queue.bytes = 4096 * queue.requests;
                queue.waited = nanos(driver.waited);
                queue.in_flight = driver.backlog as u32;
            }
        }
        for vcpu in &mut state.vcpus {
            let queue = state.queues.iter().find(|queue| queue.id.0 + DRIVER == vcpu.id.0);
            vcpu.turns = queue.map_or(vcpu.turns, |queue| queue.calls);
        }
        for vm in &mut state.vms {
            let waited = nanos(TICK * (self.wanted - ran).max(0.0));
            // They are as many as they want CPUs, and never sleep; or they sleep, and lose nothing.
            vm.add(nanos(TICK * ran), waited, if self.sleep { nanos(1.0) } else { Nanos::ZERO });
        }
        state.now = state.now.saturating_add(nanos(TICK));
        state.measured = state.now;
    }

    /// Time, ms.
    pub(super) fn ms(&self) -> u64 {
        self.state.now.get() / 1_000_000
    }

    /// Lets it run for so long under a policy, ms.
    pub(super) fn run(&mut self, policy: &mut dyn Policy, ms: u64) {
        for _ in 0..ms {
            self.tick();
            if self.ms().is_multiple_of(10) {
                for queue in &mut self.state.queues {
                    let driver = self.drivers.get_mut(&queue.id).expect("each queue has one");
                    queue.backlogged = driver.old > 0.5;
                    driver.old = driver.backlog;
                }
                for decision in policy.step(&self.state) {
                    self.apply(&decision);
                }
            }
        }
    }

    fn apply(&mut self, decision: &Decision) {
        let mut moved = 0;
        let mut to = |queue: QueueId, to: ThreadId, state: &mut Snapshot| {
            let queue = state.queues.iter_mut().find(|of| of.id == queue).expect("it exists");
            queue.thread = to;
            moved += 1;
        };
        match &decision.action {
            Action::AddThread { cpu, queues } => {
                let id = self.add_thread(*cpu);
                queues.iter().for_each(|&queue| to(queue, id, &mut self.state));
            }
            Action::RemoveThread { thread, moves } => {
                moves.iter().for_each(|&(queue, thread)| to(queue, thread, &mut self.state));
                self.state.threads.retain(|of| of.id != *thread);
            }
            Action::MoveQueue { queue, to: thread } => to(*queue, *thread, &mut self.state),
            Action::SetVcpuCpus { cpus } => {
                for cpu in &mut self.state.cpus {
                    cpu.vcpus = cpus.contains(&cpu.id);
                }
            }
            Action::PlaceVcpus { at } => {
                self.crowded = None;
                for vcpu in &mut self.state.vcpus {
                    let to = at.iter().find(|(id, _)| *id == vcpu.id);
                    vcpu.cpu = to.map(|(_, cpu)| *cpu).or(vcpu.cpu);
                }
            }
        }
        self.moves.push((self.ms(), moved));
        self.log.push((self.ms(), decision.clone()));
    }

    /// How many queues moved from then on, ms.
    pub(super) fn moves_since(&self, ms: u64) -> usize {
        self.moves.iter().filter(|&&(at, _)| at > ms).map(|&(_, moves)| moves).sum()
    }

    /// Runs for so long and says what utility that had.
    pub(super) fn utility(&mut self, policy: &mut dyn Policy, ms: u64) -> f64 {
        let before = self.state.clone();
        let cores = |world: &Self| world.state.threads.len() as f64;
        let mut sum = 0.0;
        for _ in 0..ms / 10 {
            self.run(policy, 10);
            sum += cores(self);
        }
        let progress = Progress::between(&before, &self.state).expect("time went by");
        let progress = Progress { cores: sum / (ms / 10) as f64, ..progress };
        let io = (1.0 + 4096.0 / 65_536.0) / COST;
        let reference = Reference { io, compute: 1.0, wanted: self.wanted };
        Weights::default().utility(&progress, &reference)
    }

    /// The utility of the best number of IOThreads for these loads that never change, each queue
    /// where it is best by what it asks for.
    pub(super) fn best_static(&self, loads: &[Load]) -> f64 {
        let mut best = f64::MIN;
        for count in 1..=self.limits.max_iothreads {
            let (io, all) = (self.limits.cpus.len() as u32, self.state.cpus.len() as u32);
            let mut world = Self::new(io, all - io, self.drivers.len() as u32);
            (world.wanted, world.quarrel) = (self.wanted, self.quarrel);
            for &cpu in &self.limits.cpus[1..count] {
                world.add_thread(cpu);
            }
            let mut order: Vec<usize> = (0..loads.len()).collect();
            order.sort_by(|&a, &b| loads[b].share.total_cmp(&loads[a].share));
            let mut sums = vec![0.0; count];
            for at in order {
                let least = (0..count).min_by(|&a, &b| f64::total_cmp(&sums[a], &sums[b]));
                let to = least.expect("at least one");
                sums[to] += loads[at].share;
                world.state.queues[at].thread = world.state.threads[to].id;
            }
            world.load(loads);
            let mut fixed = policy(Kind::Static, self.limits.clone());
            world.run(&mut *fixed, 500);
            best = best.max(world.utility(&mut *fixed, 1_000));
        }
        best
    }
}
