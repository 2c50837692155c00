//! All of a condition at work: an event loop.

use rand::{RngExt, SeedableRng};
use rand_distr::Exp1;
use rand_pcg::Pcg64Mcg;
use rtvirtio_qos::{ClassId, Device, Kind, Promise, Rate, Running, Scheduler, Share};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_ssd::{Ssd, SsdConfig};
use rtvirtio_units::{Bytes, Iops, Nanos, Weight};

use super::bfq::Process;
use super::clocks::Clocks;
use super::condition::{Condition, ConditionError, Priority, Service, Task};
use super::outcome::{Outcome, TaskOutcome};
use super::request::Request;
use super::runner::Runner;
use super::throttle::Throttle;
use super::tier::Tier;
use crate::events::Events;

/// No limit is looked at more often than this while the length depends on samples.
const LOOK: u64 = 1_000_000_000;
/// What a task that is behind takes from an end to its next request, ns: at least, and on average beyond that for each
/// request in flight, its own among them, as their ends and tasks want the CPU too. Traced on Linux 6.18, as `tier`
/// has it: a median of 13 µs alone, of 20 to 30 with one to three others.
const BEHIND: (u64, f64) = (10_000, 7_000.0);
/// When tasks with a rate start: what floods the device has been at work before. Those of a VM start together, VMs
/// within so long of each other, ns (processes of fio that are started one after the other: 62 to 104 ms).
const START: u64 = 500_000_000;
const START_WITHIN: u64 = 100_000_000;
const VM_STARTS_WITHIN: u64 = 1_000_000;
/// How long that takes, before the warm-up, ns.
pub(super) const LEAD: u64 = START + START_WITHIN;
/// Requests are at random within so many sectors, 2 GiB.
const SECTORS: u32 = 1 << 22;
/// Latencies are recorded to two digits, up to an hour.
const DIGITS: u8 = 2;
const LONGEST: u64 = 3_600_000_000_000;

/// What happens.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// A task may issue.
    Issue { task: u32 },
    /// The device has done a request.
    Done { id: u32 },
    /// A tier's timer; the host's has the number of VMs.
    Timer { tier: u32 },
    /// A VM's limits let something through.
    Release { vm: u32 },
    /// The data plane's schedule is to be asked again.
    Ask,
    /// Are there samples enough?
    Look,
}

/// A request from its submission to its end.
#[derive(Debug)]
struct Flying {
    task: u32,
    submitted: u64,
    guest: Request,
    guest_started: u64,
    host: Request,
    host_started: u64,
    running: Option<Running>,
}

#[derive(Debug)]
struct TaskState {
    task: Task,
    vm: u32,
    /// As the host sees it, and as its guest does.
    host_process: u32,
    guest_process: u32,
    class: Option<ClassId>,
    in_flight: u32,
    clocks: Clocks,
    /// An [`Event::Issue`] of it is due.
    awaited: bool,
    /// It sleeps until then.
    asleep: bool,
    latencies: hdrhistogram::Histogram<u64>,
    bytes: u64,
}

#[derive(Debug)]
struct VmState {
    guest: Option<Tier>,
    throttle: Option<Throttle>,
    release_at: u64,
}

#[derive(Debug)]
enum Host {
    Kernel(Tier),
    DataPlane { scheduler: Box<Scheduler>, ask_at: u64 },
}

struct World {
    events: Events<Event>,
    rng: Pcg64Mcg,
    ssd: Ssd,
    host: Host,
    vms: Vec<VmState>,
    tasks: Vec<TaskState>,
    flying: Vec<Flying>,
    free: Vec<u32>,
    /// A third of what the way to the device and back takes, ns.
    transport: f64,
    /// Half of what software takes, ns.
    software: f64,
    /// Latencies from here on count.
    from: u64,
    ended: u64,
}

/// Simulates `condition`.
///
/// # Errors
/// [`ConditionError`] names what is out of range.
pub fn run(condition: &Condition) -> Result<Outcome, ConditionError> {
    condition.check()?;
    let mut world = World::new(condition)?;
    let (warm_up, length) = (world.from, condition.length);
    let (least, most) = (warm_up + length.at_least.get(), warm_up + length.at_most.get());
    let mut until = least;
    if length.until.is_some() {
        world.events.push(least, Event::Look);
        until = most;
    }
    while let Some(event) = world.events.next(until) {
        match event {
            Event::Look => {
                let now = world.events.now;
                if length.until.is_none_or(|until| world.has_samples(until.requests())) {
                    until = now;
                    break;
                }
                world.events.push(now + LOOK, Event::Look);
            }
            event => world.handle(event),
        }
    }
    Ok(world.outcome(condition, Nanos::new(until - warm_up)))
}

/// How many requests of `condition` have ended if nothing more is issued from its end on.
///
/// # Errors
/// Says what has become of a request that has not ended, or has ended twice.
#[cfg(test)]
pub(super) fn drained(condition: &Condition) -> Result<u64, String> {
    // More than limits and weights hold up what may be under way.
    const ENOUGH: u64 = 3_600_000_000_000;
    let mut world = World::new(condition).map_err(|error| error.to_string())?;
    let end = world.from + condition.length.at_most.get();
    while let Some(event) = world.events.next(end) {
        world.handle(event);
    }
    world.tasks.iter_mut().for_each(|t| t.task.queue_depth = 0);
    while let Some(event) = world.events.next(end + ENOUGH) {
        world.handle(event);
    }
    let under_way: Vec<u32> = world.tasks.iter().map(|t| t.in_flight).collect();
    if under_way.iter().any(|&requests| requests > 0) {
        return Err(format!("these requests of each task have not ended: {under_way:?}"));
    }
    // A slot that is given back twice has another missing in its place, or is one too many.
    world.free.sort_unstable();
    if !world.free.iter().copied().eq(0..world.flying.len() as u32) {
        return Err(format!("of {} slots these are free: {:?}", world.flying.len(), world.free));
    }
    Ok(world.ended)
}

/// The cgroups' parents and weights, and each process as bfq of the host sees it.
pub(super) fn host_processes(condition: &Condition) -> (Vec<(usize, u32)>, Vec<Process>) {
    let nesting = usize::from(condition.nesting);
    let mut groups: Vec<_> = (0..nesting).map(|g| (g, u32::from(Weight::DEFAULT.get()))).collect();
    groups.extend(condition.vms.iter().map(|vm| (nesting, u32::from(vm.weight.get()))));
    let mut processes = Vec::new();
    for (index, vm) in condition.vms.iter().enumerate() {
        let (class, level) = match vm.priority {
            None => (1, 4),
            Some(Priority::RealTime(level)) => (0, level),
            Some(Priority::BestEffort(level)) => (1, level),
        };
        // A guest's requests are all its IOThread's.
        let count = if vm.guest.is_some() { 1 } else { vm.tasks.len() };
        let group = nesting + index + 1;
        processes.extend((0..count).map(|_| Process { group, class, level }));
    }
    (groups, processes)
}

/// The schedule's view of a device whose service times are known.
fn curve(ssd: &SsdConfig) -> Device {
    let mean = ssd.mean_service.as_secs_f64();
    Device {
        channels: u32::from(ssd.channels),
        request: Nanos::from_secs_f64(mean * (1.0 - ssd.length_slope).max(0.0)),
        kib: Nanos::from_secs_f64(mean * ssd.length_slope / 4.0),
        flush: Nanos::from_secs_f64(mean),
    }
}

impl World {
    fn new(condition: &Condition) -> Result<Self, ConditionError> {
        let (groups, processes) = host_processes(condition);
        let host = match condition.service {
            Service::Kernel { scheduler } => {
                Host::Kernel(Tier::new(scheduler, &groups, &processes, condition.seasoned))
            }
            Service::DataPlane => Host::DataPlane {
                scheduler: Box::new(Scheduler::new(curve(&condition.device))),
                ask_at: u64::MAX,
            },
        };
        let ssd = Ssd::new(condition.device, condition.seed).map_err(ConditionError::Device)?;
        let mut world = Self {
            events: Events::default(),
            // Of its own sequence: the device's is the seed's.
            rng: Pcg64Mcg::seed_from_u64(!condition.seed),
            ssd,
            host,
            vms: Vec::new(),
            tasks: Vec::new(),
            flying: Vec::new(),
            free: Vec::new(),
            transport: condition.transport.get() as f64 / 3.0,
            software: condition.software.get() as f64 / 2.0,
            from: LEAD + condition.warm_up.get(),
            ended: 0,
        };
        let mut host_process = 0;
        for (index, vm) in condition.vms.iter().enumerate() {
            let flow = match &mut world.host {
                Host::DataPlane { scheduler, .. } => {
                    Some(scheduler.add_flow(Share { weight: vm.weight, limit: None }))
                }
                Host::Kernel(_) => None,
            };
            let start = START + world.rng.random_range(0..START_WITHIN);
            for (number, &task) in vm.tasks.iter().enumerate() {
                let class = match (&mut world.host, flow) {
                    (Host::DataPlane { scheduler, .. }, Some(flow)) => {
                        scheduler.add_class(flow, promise(&task))
                    }
                    _ => None,
                };
                let host_process =
                    host_process + if vm.guest.is_some() { 0 } else { number as u32 };
                let start = match task.iops {
                    Some(_) => start + world.rng.random_range(0..VM_STARTS_WITHIN),
                    None => 0,
                };
                world.add_task(task, index as u32, (host_process, number as u32), start, class);
            }
            host_process += if vm.guest.is_some() { 1 } else { vm.tasks.len() as u32 };
            let guest = vm.guest.map(|scheduler| {
                let process = Process { group: 0, class: 1, level: 4 };
                Tier::new(scheduler, &[], &vec![process; vm.tasks.len()], false)
            });
            let throttle = match condition.service {
                Service::Kernel { .. } => Throttle::new(vm.limits),
                Service::DataPlane => None,
            };
            world.vms.push(VmState { guest, throttle, release_at: u64::MAX });
        }
        Ok(world)
    }

    fn add_task(
        &mut self,
        task: Task,
        vm: u32,
        (host_process, guest_process): (u32, u32),
        start: u64,
        class: Option<ClassId>,
    ) {
        let index = self.tasks.len() as u32;
        self.tasks.push(TaskState {
            task,
            vm,
            host_process,
            guest_process,
            class,
            in_flight: 0,
            clocks: Clocks::new(&task, start),
            awaited: true,
            asleep: true,
            latencies: hdrhistogram::Histogram::new_with_max(LONGEST, DIGITS)
                .expect("an hour to two digits is a histogram"),
            bytes: 0,
        });
        self.events.push(start, Event::Issue { task: index });
    }

    fn has_samples(&self, requests: f64) -> bool {
        let rated = self.tasks.iter().filter(|t| t.task.iops.is_some());
        rated.map(|t| t.latencies.len() as f64).all(|n| n >= requests)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Issue { task } => self.issue(task),
            Event::Done { id } => self.done(id),
            Event::Timer { tier } => self.timer(tier),
            Event::Release { vm } => self.release(vm),
            Event::Ask => self.ask(),
            Event::Look => {}
        }
    }

    /// A task issues what it may.
    fn issue(&mut self, index: u32) {
        let now = self.events.now;
        let t = &mut self.tasks[index as usize];
        t.awaited = false;
        if t.clocks.start < self.from && now >= self.from && t.task.iops.is_some() {
            // With the warm-up fio forgets what it owes (`reset_io_counters`).
            t.clocks.restart(now);
        }
        loop {
            let t = &mut self.tasks[index as usize];
            if t.in_flight >= t.task.queue_depth {
                return;
            }
            let reads = t.task.read_fraction;
            let write = reads < 1.0 && (reads <= 0.0 || self.rng.random::<f64>() >= reads);
            let (direction, due) = t.clocks.next(now, usize::from(write));
            if due > now {
                t.awaited = true;
                self.await_due(index, due);
                return;
            }
            t.in_flight += 1;
            t.clocks.issued[direction] += 1;
            let runner = match (t.task.queue_depth, std::mem::take(&mut t.asleep)) {
                (2.., _) => Runner::Deep,
                (_, true) => Runner::Rested,
                (_, false) => Runner::Behind,
            };
            self.submit(index, direction == 1, runner);
        }
    }

    fn submit(&mut self, task: u32, write: bool, runner: Runner) {
        let now = self.events.now;
        let t = &self.tasks[task as usize];
        let sectors = (t.task.block_size.get() / 512) as u32;
        let id = self.free.last().copied().unwrap_or(self.flying.len() as u32);
        let position = self.rng.random_range(0..SECTORS);
        let request = |process| Request { id, process, position, sectors, write, at: now };
        let (guest, host) = (request(t.guest_process), request(t.host_process));
        let vm = t.vm;
        let flying = Flying {
            task,
            submitted: now,
            guest,
            guest_started: 0,
            host,
            host_started: 0,
            running: None,
        };
        if self.free.pop().is_some() {
            self.flying[id as usize] = flying;
        } else {
            self.flying.push(flying);
        }
        if let Some(tier) = &mut self.vms[vm as usize].guest {
            tier.submit(now, guest);
            self.run_guest(vm);
        } else {
            self.enter_host(vm, id, runner);
        }
    }

    /// The guest's driver gets what its scheduler gives it.
    fn run_guest(&mut self, vm: u32) {
        let now = self.events.now;
        while let Some(tier) = &mut self.vms[vm as usize].guest
            && let Some(request) = tier.next(now)
        {
            self.flying[request.id as usize].guest_started = now;
            self.enter_host(vm, request.id, Runner::Rested);
        }
        if let Some(tier) = &mut self.vms[vm as usize].guest {
            tier.ask_again(now);
            arm(&mut self.events, tier, vm);
        }
    }

    /// A request comes to the host's block layer.
    fn enter_host(&mut self, vm: u32, id: u32, runner: Runner) {
        let now = self.events.now;
        self.flying[id as usize].host.at = now;
        let request = self.flying[id as usize].host;
        let state = &mut self.vms[vm as usize];
        if let Some(throttle) = &mut state.throttle
            && !throttle.pass(now, request)
        {
            self.arm_release(vm);
            return;
        }
        self.submit_host(request);
        self.run_host(runner);
    }

    fn arm_release(&mut self, vm: u32) {
        let state = &mut self.vms[vm as usize];
        let at = state.throttle.as_ref().and_then(Throttle::timer_at).unwrap_or(u64::MAX);
        if at < state.release_at {
            state.release_at = at;
            self.events.push(at, Event::Release { vm });
        }
    }

    fn release(&mut self, vm: u32) {
        let now = self.events.now;
        if self.vms[vm as usize].release_at != now {
            return;
        }
        self.vms[vm as usize].release_at = u64::MAX;
        let mut released = Vec::new();
        while let Some(throttle) = &mut self.vms[vm as usize].throttle
            && let Some(request) = throttle.release(now)
        {
            released.push(request);
        }
        if let Host::Kernel(tier) = &mut self.host {
            tier.submit_plugged(now, &released);
        }
        self.run_host(Runner::Kblockd);
        self.arm_release(vm);
    }

    fn submit_host(&mut self, request: Request) {
        let now = self.events.now;
        match &mut self.host {
            Host::Kernel(tier) => tier.submit(now, request),
            Host::DataPlane { scheduler, .. } => {
                let task = &self.tasks[self.flying[request.id as usize].task as usize];
                let kind = if request.write { Kind::Write } else { Kind::Read };
                let ticket = (u64::from(request.id), kind, task.task.block_size);
                if let Some(class) = task.class {
                    scheduler.submit(class, ticket, Nanos::new(now));
                }
            }
        }
    }

    /// The device gets what stands before it gives.
    fn run_host(&mut self, runner: Runner) {
        let now = self.events.now;
        let left_off = match &self.host {
            Host::Kernel(tier) => runner.leaves_off(tier.in_driver()),
            Host::DataPlane { .. } => 0.0,
        };
        let mut gave = false;
        loop {
            let (id, running) = match &mut self.host {
                Host::Kernel(tier) => match tier.next(now) {
                    Some(request) => (request.id, None),
                    None => break,
                },
                Host::DataPlane { scheduler, .. } => match scheduler.next(Nanos::new(now)) {
                    Some(started) => (started.ticket as u32, Some(started.running)),
                    None => break,
                },
            };
            let flying = &mut self.flying[id as usize];
            flying.host_started = now;
            flying.running = running;
            let length = Bytes::new(u64::from(flying.host.sectors) * 512);
            let end = self.ssd.submit(Nanos::new(now), length);
            let transport =
                (self.transport * 2.0) as u64 + exponential(&mut self.rng, self.transport);
            self.events.push(end.get().saturating_add(transport), Event::Done { id });
            gave = true;
        }
        let host = self.vms.len() as u32;
        match &mut self.host {
            Host::Kernel(tier) => {
                if gave && self.rng.random_bool(left_off) {
                    tier.defer(now, &mut self.rng);
                } else {
                    tier.ask_again(now);
                }
                arm(&mut self.events, tier, host);
            }
            Host::DataPlane { scheduler, ask_at } => {
                let at = scheduler.wake_at().map_or(u64::MAX, Nanos::get).max(now);
                if at < *ask_at {
                    *ask_at = at;
                    self.events.push(at, Event::Ask);
                }
            }
        }
    }

    fn timer(&mut self, number: u32) {
        let now = self.events.now;
        let host = number as usize == self.vms.len();
        let tier = match &mut self.host {
            Host::Kernel(tier) if host => Some(tier),
            _ if host => None,
            _ => self.vms[number as usize].guest.as_mut(),
        };
        let Some(tier) = tier else { return };
        if tier.event_at != now {
            // One that came before it has taken its place.
            return;
        }
        tier.event_at = u64::MAX;
        if !tier.timer(now, &mut self.rng) {
            arm(&mut self.events, tier, number);
        } else if host {
            self.run_host(Runner::Kblockd);
        } else {
            self.run_guest(number);
        }
    }

    /// The data plane's schedule may have something by now.
    fn ask(&mut self) {
        if let Host::DataPlane { ask_at, .. } = &mut self.host
            && *ask_at == self.events.now
        {
            *ask_at = u64::MAX;
            self.run_host(Runner::Kblockd);
        }
    }

    /// The device has done a request: back through the tiers to its task.
    fn done(&mut self, id: u32) {
        let now = self.events.now;
        let flying = &mut self.flying[id as usize];
        let Flying { task, submitted, guest, guest_started, host, host_started, .. } = *flying;
        let running = flying.running.take();
        let runs = match &mut self.host {
            Host::Kernel(tier) => {
                let runs = tier.complete(now, &host, host_started, &mut self.rng);
                arm(&mut self.events, tier, self.vms.len() as u32);
                runs
            }
            Host::DataPlane { scheduler, .. } => {
                if let Some(running) = running {
                    scheduler.complete(running, Nanos::new(now));
                }
                true
            }
        };
        self.free.push(id);
        if runs {
            self.run_host(Runner::Kblockd);
        }
        let vm = self.tasks[task as usize].vm;
        if let Some(tier) = &mut self.vms[vm as usize].guest {
            let runs = tier.complete(now, &guest, guest_started, &mut self.rng);
            arm(&mut self.events, tier, vm);
            if runs {
                self.run_guest(vm);
            }
        }
        self.ended += 1;
        let seen = now + self.software as u64 + self.jitter();
        let t = &mut self.tasks[task as usize];
        t.in_flight -= 1;
        if seen >= self.from {
            t.latencies.saturating_record(seen - submitted);
            t.bytes += t.task.block_size.get();
        }
        if !t.awaited {
            t.awaited = true;
            let due = t.clocks.first();
            if due > seen {
                self.await_due(task, due);
            } else {
                let others = match &self.host {
                    Host::Kernel(tier) => tier.in_driver(),
                    Host::DataPlane { .. } => 0,
                };
                let extra = BEHIND.1 * f64::from(1 + others.min(4));
                let gap = BEHIND.0 + exponential(&mut self.rng, extra);
                self.events.push(now + gap, Event::Issue { task });
            }
        }
    }

    /// A task sleeps until it is to issue again.
    fn await_due(&mut self, task: u32, due: u64) {
        let late = self.jitter();
        self.tasks[task as usize].asleep = true;
        self.events.push(due + late, Event::Issue { task });
    }

    /// How late a thread is woken up, ns.
    fn jitter(&mut self) -> u64 {
        exponential(&mut self.rng, self.software)
    }

    fn outcome(&self, condition: &Condition, window: Nanos) -> Outcome {
        let mut tasks = self.tasks.iter().map(|t| {
            let mut histogram = Histogram::new();
            for step in t.latencies.iter_recorded() {
                histogram.record(Nanos::new(step.value_iterated_to()), step.count_at_value());
            }
            TaskOutcome::new(&histogram, t.bytes, window)
        });
        let vms = condition.vms.iter().map(|vm| tasks.by_ref().take(vm.tasks.len()).collect());
        Outcome { window, requests: self.ended, vms: vms.collect() }
    }
}

/// ns, drawn from an exponential distribution.
fn exponential(rng: &mut Pcg64Mcg, mean: f64) -> u64 {
    (mean * rng.sample::<f64, _>(Exp1)) as u64
}

/// Asks for an event when `tier`'s timer is due, unless one comes before it anyway.
fn arm(events: &mut Events<Event>, tier: &mut Tier, number: u32) {
    let at = tier.timer_at();
    if at < tier.event_at {
        tier.event_at = at;
        events.push(at, Event::Timer { tier: number });
    }
}

/// What a task is promised by the data plane: its rate, as the planner asks for it.
fn promise(task: &Task) -> Option<Promise> {
    let iops = Iops::new(task.iops?).ok()?;
    let burst = task.queue_depth.saturating_mul(2).max(1);
    let rate = Rate { iops: Some(iops), bandwidth: None, burst };
    Some(Promise { deadline: task.deadline?, rate })
}
