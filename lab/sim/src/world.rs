//! The simulation itself: who does what when something happens.
//!
//! An event is taken, whoever it is for acts on it at that moment, and has further ones come. A burst is
//! CPU time that somebody needs before the next thing that others can see: what a batch of requests, a
//! wake-up or a message costs. What a burst does comes about at its end.

mod client;
mod disk;
mod iothread;
mod policy;

use std::collections::VecDeque;

use rand::{RngExt as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;
use rtvirtio_iocores::{Policy, SAMPLE, Snapshot, Vm};
use rtvirtio_units::{CpuId, Nanos};

use crate::cpus::{Cpus, ENDLESS, Waker, Who};
use crate::events::{Event, Events};
use crate::machine::{Machine, SimError};
use crate::meter::Meter;
use crate::outcome::Outcome;
use crate::scenario::{Burner, Role, Scenario, Stream};
use client::Client;
use disk::Disk;
use iothread::IoThread;

pub use policy::Done;

/// A compute thread's period, ns.
const PERIOD_NS: u64 = 10_000_000;
/// Between the periods of one and the next: the golden section, which spreads any number of them.
const APART_NS: u64 = 6_180_340;

/// A request. Times in ns.
#[derive(Debug, Clone, Copy)]
struct Request {
    /// When its latency begins.
    issued: u64,
    /// When the IOThread could see it.
    ready: u64,
    bytes: u32,
}

/// A virtqueue.
#[derive(Debug)]
struct Queue {
    vm: u32,
    role: Role,
    /// The IOThread that it is mapped to while nobody uses it.
    home: u32,
    /// The IOThread that serves it; none: it moves, or nobody uses it.
    owner: Option<u32>,
    /// Where it goes, while it moves.
    to: Option<u32>,
    /// When it was let go.
    left_at: u64,
    /// Whether its VM uses its disk. It leaves when nothing is in flight.
    plugged: bool,
    leaving: bool,
    /// Whether its IOThread looks at it unasked.
    awake: bool,
    busy_at: u64,
    available: VecDeque<Request>,
    /// Done, not yet seen by the client.
    used: VecDeque<Request>,
    /// Ended on the device, not yet seen by the IOThread.
    ended: VecDeque<Request>,
    /// Taken and not ended.
    in_flight: u32,
    made: u64,
    taken: u64,
    /// What had been made available at the last snapshot.
    marked: u64,
    busy: u64,
    requests: u64,
    bytes: u64,
    waited: u64,
    /// How often its driver was called.
    calls: u64,
    client: Client,
}

/// A VM's compute thread.
#[derive(Debug)]
struct Compute {
    vm: u32,
    thread: u32,
    of: Burner,
    stamp: u32,
}

/// Something that a scenario changes.
#[derive(Debug, Clone, Copy)]
enum Change {
    Phase(usize),
    Plug { vm: u32 },
    Unplug { vm: u32 },
    Begin { queue: u32, stream: Stream },
    End { queue: u32 },
    Burn { burner: u32 },
    Rest { burner: u32 },
}

impl Change {
    /// Of changes at one time: ends first, and a disk before its requests.
    const fn rank(&self) -> u8 {
        match self {
            Self::Phase(_) => 0,
            Self::End { .. } | Self::Rest { .. } => 1,
            Self::Unplug { .. } => 2,
            Self::Plug { .. } => 3,
            Self::Begin { .. } | Self::Burn { .. } => 4,
        }
    }
}

/// How many requests there have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Begun by clients.
    pub issued: u64,
    /// Whose end the client has seen.
    pub ended: u64,
    /// Begun and not seen to have ended.
    pub in_flight: u64,
}

/// A host with VMs and a policy, at a time.
pub struct Simulation<'a> {
    costs: crate::costs::Costs,
    polling: u64,
    events: Events<Event>,
    cpus: Cpus,
    count: u16,
    /// Where vCPUs run.
    vcpus: u128,
    /// Whether a VM had a front end yet, without which nobody knows where they do.
    has_seen_vms: bool,
    ios: Vec<IoThread>,
    queues: Vec<Queue>,
    /// First queue of each VM, and the end.
    first: Vec<u32>,
    burners: Vec<Compute>,
    /// What each thread that stands for a vCPU had when last measured: those of queues, then those that compute.
    vcpu_times: Vec<Vm>,
    disks: Vec<Disk>,
    changes: Vec<(u64, Change)>,
    next_change: usize,
    policy: &'a mut dyn Policy,
    snapshot: Snapshot,
    /// Snapshots so far.
    samples: u64,
    meter: Meter,
    phases: Vec<crate::scenario::Phase>,
    length: u64,
    /// Scratch, kept for its memory.
    batch: Vec<Request>,
}

impl std::fmt::Debug for Simulation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulation").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl<'a> Simulation<'a> {
    /// At time zero.
    ///
    /// # Errors
    /// The machine or the scenario is refused.
    pub fn new(
        machine: &Machine,
        scenario: &Scenario,
        policy: &'a mut dyn Policy,
    ) -> Result<Self, SimError> {
        scenario.check()?;
        if !(1..=crate::machine::MAX_CPUS).contains(&machine.cpus) {
            return Err(SimError::Cpus(machine.cpus));
        }
        let known = |cpu: &CpuId| cpu.get() < u32::from(machine.cpus);
        if let Some(&cpu) = machine.threads.iter().chain(&machine.vcpus).find(|cpu| !known(cpu)) {
            return Err(SimError::NoCpu(cpu));
        }
        if machine.threads.is_empty() {
            return Err(SimError::Nothing("IOThread"));
        }
        if machine.vcpus.is_empty() {
            return Err(SimError::Nothing("CPU for the vCPUs"));
        }
        let cost = machine.costs.largest();
        if cost > Nanos::from_millis(1_000) {
            return Err(SimError::Cost(cost));
        }
        let disks = Disk::all(machine, scenario)?;
        let mut simulation = Self {
            costs: machine.costs,
            polling: machine.polling.get(),
            events: Events::default(),
            cpus: Cpus::new(machine.cpus, machine.slice().get(), machine.costs),
            count: machine.cpus,
            vcpus: mask(&machine.vcpus),
            has_seen_vms: false,
            vcpu_times: Vec::new(),
            ios: Vec::new(),
            queues: Vec::new(),
            first: vec![0],
            burners: Vec::new(),
            disks,
            changes: Vec::new(),
            next_change: 0,
            policy,
            snapshot: Snapshot::default(),
            samples: 0,
            meter: Meter::new(scenario),
            phases: scenario.phases.clone(),
            length: scenario.length().get(),
            batch: Vec::new(),
        };
        for &cpu in &machine.threads {
            simulation.add_io(cpu);
        }
        let mut random = Pcg64Mcg::seed_from_u64(scenario.seed);
        for (vm, of) in scenario.vms.iter().enumerate() {
            simulation.add_vm(vm as u32, of, scenario.seed, &mut random);
        }
        simulation.changes.extend(
            scenario.phases.iter().enumerate().map(|(i, p)| (p.span.start.get(), Change::Phase(i))),
        );
        // Stable: what is equal stays in the scenario's order.
        simulation.changes.sort_by_key(|(at, change)| (*at, change.rank()));
        simulation.wait_for_change();
        simulation.events.push(SAMPLE.get(), Event::Sample);
        Ok(simulation)
    }

    /// A vCPU that sleeps, on any of the CPUs of all: while they are idle it could have begun on each.
    fn spawn_vcpu(&mut self, who: Who, random: &mut Pcg64Mcg) -> u32 {
        let thread = self.cpus.spawn(who, self.vcpus);
        let at = random.random_range(0..self.vcpus.count_ones());
        let cpu = (0..at).fold(self.vcpus, |left, _| left & (left - 1)).trailing_zeros();
        self.cpus.go_to(thread, cpu as usize, &mut self.events);
        thread
    }

    fn add_vm(&mut self, vm: u32, of: &crate::scenario::Vm, seed: u64, random: &mut Pcg64Mcg) {
        let first = self.queues.len() as u32;
        for queue in 0..of.all_queues() {
            let place = first + u32::from(queue);
            let thread = self.spawn_vcpu(Who::Client(place), random);
            let client = Client::new(thread, seed ^ u64::from(place).wrapping_mul(0x9E37_79B9));
            let home = place % self.ios.len() as u32;
            self.queues.push(Queue::new(vm, of.role(queue), home, client));
        }
        self.first.push(self.queues.len() as u32);
        for plugged in &of.plugged {
            self.changes.push((plugged.start.get(), Change::Plug { vm }));
            self.changes.push((plugged.stop.get(), Change::Unplug { vm }));
        }
        for &stream in &of.streams {
            let queue = first + u32::from(stream.queue);
            self.changes.push((stream.span.start.get(), Change::Begin { queue, stream }));
            self.changes.push((stream.span.stop.get(), Change::End { queue }));
        }
        for &of in &of.burners {
            let burner = self.burners.len() as u32;
            let thread = self.spawn_vcpu(Who::Burner(burner), random);
            self.burners.push(Compute { vm, thread, of, stamp: 0 });
            self.changes.push((of.span.start.get(), Change::Burn { burner }));
            self.changes.push((of.span.stop.get(), Change::Rest { burner }));
        }
    }

    /// The time.
    #[must_use]
    pub const fn now(&self) -> Nanos {
        Nanos::new(self.events.now)
    }

    /// How many requests there have been.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let clients = self.queues.iter().map(|queue| &queue.client);
        let (mut issued, mut in_flight) = (0, 0);
        for client in clients {
            issued += client.issued;
            in_flight += u64::from(client.outstanding);
        }
        Counts { issued, ended: self.meter.ended(), in_flight }
    }

    /// Goes on until `until`, or the scenario's end if that is sooner.
    pub fn run_until(&mut self, until: Nanos) {
        let until = until.get().min(self.length);
        while let Some(event) = self.events.next(until) {
            self.happens(event);
        }
        self.events.now = self.events.now.max(until);
    }

    /// What came of it up to now; each phase that has begun.
    #[must_use]
    pub fn finish(mut self) -> Outcome {
        self.meter.close(self.totals());
        let counts = self.counts();
        self.meter.outcome(counts)
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Cpu { cpu, stamp } => {
                if let Some(thread) = self.cpus.ends(cpu, stamp, &mut self.events) {
                    match self.cpus.who(thread) {
                        Who::Io(io) => self.io_goes_on(io),
                        Who::Client(queue) => self.client_goes_on(queue),
                        Who::Burner(burner) => self.burner_rests(burner),
                    }
                }
            }
            Event::Wake { thread } => self.cpus.arrive(thread, &mut self.events),
            Event::Arrive { queue, stamp } => self.arrives(queue, stamp),
            Event::Ended { disk, slot } => self.disk_ended(disk, slot),
            Event::Ask { disk } => self.ask_disk(disk),
            Event::Change => {
                let at = self.events.now;
                while let Some(&(when, change)) = self.changes.get(self.next_change)
                    && when <= at
                {
                    self.next_change += 1;
                    self.change(change);
                }
                self.wait_for_change();
            }
            Event::Burn { burner, stamp } => {
                if self.burners[burner as usize].stamp == stamp {
                    self.burner_works(burner);
                }
            }
            Event::Sample => self.sample(),
        }
    }

    fn wait_for_change(&mut self) {
        if let Some(&(at, _)) = self.changes.get(self.next_change) {
            self.events.push(at, Event::Change);
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Phase(phase) => {
                let totals = self.totals();
                self.meter.begin(phase, self.phases[phase], totals);
            }
            Change::Plug { vm } => self.each_queue(vm, Self::plug),
            Change::Unplug { vm } => self.each_queue(vm, Self::unplug),
            Change::Begin { queue, stream } => self.begin(queue, stream),
            Change::End { queue } => self.queues[queue as usize].client.end(),
            Change::Burn { burner } => {
                // Not all at once, whose waits would be for each other.
                let first = u64::from(burner).wrapping_mul(APART_NS) % PERIOD_NS;
                let stamp = self.burners[burner as usize].stamp;
                self.events.after(first, Event::Burn { burner, stamp });
            }
            Change::Rest { burner } => {
                let compute = &mut self.burners[burner as usize];
                compute.stamp += 1;
                let thread = compute.thread;
                if !self.cpus.is_asleep(thread) {
                    self.cpus.sleep(thread, &mut self.events);
                }
            }
        }
    }

    fn each_queue(&mut self, vm: u32, act: fn(&mut Self, u32)) {
        let (first, end) = (self.first[vm as usize], self.first[vm as usize + 1]);
        (first..end).for_each(|queue| act(self, queue));
    }

    // Compute threads.

    fn burner_works(&mut self, burner: u32) {
        let Compute { thread, of, stamp, .. } = self.burners[burner as usize];
        if of.share >= 1.0 {
            self.cpus.wake(thread, ENDLESS, Waker::Timer, &mut self.events);
            return;
        }
        let burst = (of.share * PERIOD_NS as f64).round().max(1.0) as u64;
        if self.cpus.is_asleep(thread) {
            self.cpus.wake(thread, burst, Waker::Timer, &mut self.events);
        }
        // Whoever is late works on into the next period, and has lost the rest of it.
        self.events.after(PERIOD_NS, Event::Burn { burner, stamp });
    }

    fn burner_rests(&mut self, burner: u32) {
        let thread = self.burners[burner as usize].thread;
        self.cpus.sleep(thread, &mut self.events);
    }
}

/// CPUs as a set.
fn mask(cpus: &[CpuId]) -> u128 {
    cpus.iter().fold(0, |mask, cpu| mask | 1_u128.checked_shl(cpu.get()).unwrap_or(0))
}

impl Queue {
    fn new(vm: u32, role: Role, home: u32, client: Client) -> Self {
        let ring = || VecDeque::with_capacity(usize::from(crate::scenario::MAX_DEPTH));
        Self {
            vm,
            role,
            home,
            owner: None,
            to: None,
            left_at: 0,
            plugged: false,
            leaving: false,
            awake: false,
            busy_at: 0,
            available: ring(),
            used: ring(),
            ended: VecDeque::new(),
            in_flight: 0,
            made: 0,
            taken: 0,
            marked: 0,
            busy: 0,
            requests: 0,
            bytes: 0,
            waited: 0,
            calls: 0,
            client,
        }
    }
}

#[cfg(test)]
mod tests;
