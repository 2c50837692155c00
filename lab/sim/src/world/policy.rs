//! What the policy is shown, and what it has done.

use rtvirtio_iocores::{
    Action, Cpu, Decision, QueueId, QueueKind, REFRESH, SAMPLE, Thread, ThreadId, Vcpu, VcpuId, Vm,
    VmId,
};
use rtvirtio_units::{CpuId, Nanos};
use serde::Serialize;

use super::iothread::Message;
use super::{Simulation, mask};
use crate::cpus::Waker;
use crate::events::Event;
use crate::meter::Totals;
use crate::scenario::Role;

/// Something that the policy decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Done {
    /// When.
    pub at: Nanos,
    /// What.
    pub action: String,
    /// Why, in the policy's words.
    pub reason: String,
    /// Whether it could be done.
    pub done: bool,
}

impl Simulation<'_> {
    /// Shows the policy what there is and does what it says.
    pub(super) fn sample(&mut self) {
        self.cpus.balance(&mut self.events);
        self.take_snapshot();
        let decisions = self.policy.step(&self.snapshot);
        for Decision { action, reason } in decisions {
            let at = self.now();
            let text = describe(&action);
            let done = self.carry_out(action);
            self.meter.decided(Done { at, action: text, reason, done });
        }
        self.meter.sample(self.events.now, self.threads());
        self.events.after(SAMPLE.get(), Event::Sample);
    }

    fn take_snapshot(&mut self) {
        let now = self.events.now;
        self.snapshot.now = Nanos::new(now);
        if self.samples.is_multiple_of(REFRESH) {
            self.measure();
        }
        self.samples += 1;
        let snapshot = &mut self.snapshot;
        snapshot.threads.clear();
        for io in self.ios.iter().filter(|io| !io.gone) {
            let (busy, poll, sleep) = io.times(now);
            let (ran, waited) = io.measured;
            snapshot.threads.push(Thread {
                id: io.id,
                cpu: Some(io.cpu),
                locked: false,
                busy: Nanos::new(busy),
                poll: Nanos::new(poll),
                sleep: Nanos::new(sleep),
                ran: Nanos::new(ran),
                waited: Nanos::new(waited),
            });
        }
        snapshot.queues.clear();
        for (place, queue) in (0..).zip(&mut self.queues) {
            let io = queue.owner.or(queue.to).unwrap_or(queue.home);
            snapshot.queues.push(rtvirtio_iocores::Queue {
                id: QueueId(place),
                kind: match queue.role {
                    Role::Disk => QueueKind::Disk,
                    Role::Receive | Role::Transmit => QueueKind::Link,
                },
                vm: VmId(queue.vm),
                thread: self.ios[io as usize].id,
                busy: Nanos::new(queue.busy),
                requests: queue.requests,
                bytes: queue.bytes,
                waited: Nanos::new(queue.waited),
                calls: queue.calls,
                in_flight: queue.in_flight,
                backlogged: queue.taken < queue.marked,
            });
            queue.marked = queue.made;
        }
    }

    /// The kernel's times, as seldom as the data plane's monitor reads them.
    fn measure(&mut self) {
        let now = self.events.now;
        for io in &mut self.ios {
            io.measured = self.cpus.times(io.thread, now);
        }
        let snapshot = &mut self.snapshot;
        let passed = snapshot.now.saturating_sub(snapshot.measured);
        snapshot.measured = snapshot.now;
        // As there, a VM is known by its disk's front end, and where its vCPUs run once there was one.
        snapshot.vms.clear();
        let is_seen = |vm: &u32| self.queues[self.first[*vm as usize] as usize].plugged;
        let seen = (0..self.first.len() as u32 - 1).filter(is_seen);
        snapshot.vms.extend(seen.map(|vm| Vm::new(VmId(vm))));
        let clients = self.queues.iter().map(|queue| (queue.vm, queue.client.thread));
        let burners = self.burners.iter().map(|burner| (burner.vm, burner.thread));
        let vcpus = clients.chain(burners);
        self.vcpu_times.resize(self.queues.len() + self.burners.len(), Vm::new(VmId(0)));
        snapshot.vcpus.clear();
        for (place, ((vm, thread), had)) in (0..).zip(vcpus.zip(&mut self.vcpu_times)) {
            let (ran, waited) = self.cpus.times(thread, now);
            let ran = Nanos::new(ran).saturating_sub(had.ran);
            let waited = Nanos::new(waited).saturating_sub(had.waited);
            had.add(ran, waited, passed);
            let Ok(at) = snapshot.vms.binary_search_by_key(&VmId(vm), |vm| vm.id) else { continue };
            let vm = &mut snapshot.vms[at];
            let (cpu, turns) = self.cpus.turns(thread);
            let cpu = Some(CpuId::new(cpu as u32));
            snapshot.vcpus.push(Vcpu { id: VcpuId(place), cpu, turns });
            let of = |sum: &mut Nanos, of: Nanos| *sum = sum.saturating_add(of);
            of(&mut vm.ran, had.ran);
            of(&mut vm.waited, had.waited);
            of(&mut vm.awake_ran, had.awake_ran);
            of(&mut vm.awake_waited, had.awake_waited);
        }
        self.has_seen_vms |= !snapshot.vms.is_empty();
        let vcpus = if self.has_seen_vms { self.vcpus } else { 0 };
        snapshot.cpus.clear();
        snapshot.cpus.extend((0..self.count).map(|cpu| Cpu {
            id: CpuId::new(u32::from(cpu)),
            idle: Nanos::new(self.cpus.idle(usize::from(cpu), now)),
            vcpus: vcpus & (1 << cpu) != 0,
        }));
    }

    /// IOThreads that there are.
    fn threads(&self) -> u32 {
        self.ios.iter().filter(|io| !io.gone).count() as u32
    }

    /// Sums over everything so far.
    pub(super) fn totals(&self) -> Totals {
        let now = self.events.now;
        let mut totals = Totals { now, threads: self.threads(), ..Totals::default() };
        for queue in &self.queues {
            let (ran, waited) = self.cpus.times(queue.client.thread, now);
            totals.vcpus_ran += ran;
            totals.vcpus_waited += waited;
        }
        for burner in &self.burners {
            let (ran, waited) = self.cpus.times(burner.thread, now);
            totals.vcpus_ran += ran;
            totals.vcpus_waited += waited;
            totals.computed += ran;
        }
        for io in &self.ios {
            let (busy, poll, _) = io.times(now);
            totals.busy += busy;
            totals.polled += poll;
            totals.io_ran += self.cpus.times(io.thread, now).0;
        }
        totals
    }

    /// Does it; whether it could be done.
    fn carry_out(&mut self, action: Action) -> bool {
        match action {
            Action::AddThread { cpu, queues } => {
                let is_taken = self.ios.iter().any(|io| !io.gone && io.cpu == cpu);
                if is_taken || cpu.get() >= u32::from(self.count) {
                    return false;
                }
                let io = self.add_io(cpu);
                self.meter.added();
                for queue in queues {
                    self.move_queue(queue, io);
                }
                true
            }
            Action::RemoveThread { thread, moves } => {
                let Some(io) = self.io(thread) else { return false };
                let is_other = |other: usize| other != io && !self.ios[other].is_leaving();
                if !(0..self.ios.len()).any(is_other) {
                    return false;
                }
                // What it still has goes where it is told to, or it stays; so does what is on its way there.
                let goes = |place: u32| {
                    let to = moves.iter().find(|(queue, _)| *queue == QueueId(place));
                    to.and_then(|(_, to)| self.io(*to)).is_some_and(|to| to != io)
                };
                let stays = |(place, queue): (u32, &super::Queue)| {
                    let has = if queue.plugged { queue.owner } else { Some(queue.home) };
                    queue.to == Some(io as u32) || has == Some(io as u32) && !goes(place)
                };
                if (0..).zip(&self.queues).any(stays) {
                    return false;
                }
                for (queue, to) in moves {
                    if let Some(to) = self.io(to) {
                        self.move_queue(queue, to as u32);
                    }
                }
                self.ios[io].ending = true;
                self.meter.removed();
                self.ring(io as u32, Waker::Device);
                true
            }
            Action::MoveQueue { queue, to } => {
                self.io(to).is_some_and(|to| self.move_queue(queue, to as u32))
            }
            Action::SetVcpuCpus { cpus } => {
                let is_known = |cpu: &CpuId| cpu.get() < u32::from(self.count);
                if cpus.is_empty() || !cpus.iter().all(is_known) {
                    return false;
                }
                self.vcpus = mask(&cpus);
                for cpu in &mut self.snapshot.cpus {
                    cpu.vcpus = cpus.contains(&cpu.id);
                }
                let clients = self.queues.iter().map(|queue| queue.client.thread);
                let burners = self.burners.iter().map(|burner| burner.thread);
                for thread in clients.chain(burners) {
                    self.cpus.allow(thread, self.vcpus, &mut self.events);
                }
                true
            }
            Action::PlaceVcpus { at } => {
                for (VcpuId(place), cpu) in at {
                    // As they were numbered when they were measured: those of queues, then those that compute.
                    let place = place as usize;
                    let client = self.queues.get(place).map(|queue| queue.client.thread);
                    let burner = |place: usize| self.burners.get(place).map(|burner| burner.thread);
                    let after = place.checked_sub(self.queues.len());
                    let thread = client.or_else(|| after.and_then(burner));
                    if let Some(thread) = thread.filter(|_| mask(&[cpu]) & self.vcpus != 0) {
                        self.cpus.go_to(thread, cpu.get() as usize, &mut self.events);
                    }
                }
                true
            }
        }
    }

    /// The place of an IOThread that is there.
    fn io(&self, thread: ThreadId) -> Option<usize> {
        self.ios.get(thread.0 as usize).filter(|io| !io.gone).map(|_| thread.0 as usize)
    }

    /// Has a queue moved; not if it moves already, or is there.
    fn move_queue(&mut self, QueueId(place): QueueId, to: u32) -> bool {
        let is_ending = self.ios[to as usize].ending;
        let Some(of) = self.queues.get_mut(place as usize).filter(|_| !is_ending) else {
            return false;
        };
        if !of.plugged {
            let moves = std::mem::replace(&mut of.home, to) != to;
            if moves {
                self.meter.moved();
            }
            return moves;
        }
        let is_still = of.to.is_none();
        let Some(io) = of.owner.filter(|&io| is_still && io != to) else { return false };
        of.to = Some(to);
        self.meter.moved();
        self.post(io, Message::Release { queue: place, to });
        true
    }
}

/// An action for people.
fn describe(action: &Action) -> String {
    match action {
        Action::AddThread { cpu, queues } => {
            format!("add an IOThread on CPU {cpu} with {} queues", queues.len())
        }
        Action::RemoveThread { thread, moves } => {
            format!("remove IOThread {}, {} queues move", thread.0, moves.len())
        }
        Action::MoveQueue { queue, to } => format!("move queue {} to IOThread {}", queue.0, to.0),
        Action::SetVcpuCpus { cpus } => format!("vCPUs run on {} CPUs", cpus.len()),
        Action::PlaceVcpus { at } => format!("{} vCPUs are placed", at.len()),
    }
}
