//! The scheduler itself.

mod live;
mod stalls;

use std::collections::VecDeque;

use rtvirtio_units::{Bytes, Nanos};

use crate::demand::{Backlog, Demand, Wants};
use crate::depth::{Depth, MAX_BACKGROUND_WAIT_NS};
use crate::experiment::Epochs;
use crate::heap::Heap;
use crate::{
    Account, Device, Kind, MAX_TRANSFER, PAGE, Promise, Rate, Responses, Share, Stalls, Usage,
};
use stalls::Progress;

/// Background requests that the device has beyond its channels, so that none of these is free until
/// the end of a request has been noticed.
const EXTRA_DEPTH: u32 = 1;
/// Fair queueing's clock runs in 1/1024 ns, so that large weights do not round their costs to
/// nothing.
const VTIME_SCALE: u64 = 1024;
/// From here on the clock is set back to 0, and all tags with it. A device with 8 channels that serve a flow of
/// weight 1 gets here in 6 days. No tag is more than one request's cost beyond the clock, so tags stay far
/// below the end of their range, where all of them would be equal.
const SET_BACK: u64 = 1 << 62;
/// How long requests within a promise may keep the others of their flow waiting, with which they share its limit.
const MAX_LIMITED_NS: u64 = 1_000_000_000;

/// Names a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(u32);

/// Names a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClassId(u32);

/// A request to start now.
#[derive(Debug)]
#[must_use = "it has been taken off its queue"]
pub struct Started {
    /// What the caller knows it by.
    pub ticket: u64,
    /// To be given back when it ends.
    pub running: Running,
}

/// A request on the device. Gives its place back by [`Scheduler::complete`], once.
#[derive(Debug)]
#[must_use = "the device counts as busy with it until it completes"]
pub struct Running {
    class: u32,
    promised: bool,
    kind: Kind,
    bytes: Bytes,
    cost: u64,
    /// When the response would have begun, had the class not exceeded its rate.
    since: u64,
}

/// A request that waits.
#[derive(Debug)]
struct Pending {
    ticket: u64,
    kind: Kind,
    bytes: Bytes,
    arrived: u64,
}

/// A rate as a virtual clock's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pace {
    request: u64,
    /// 1024 bytes.
    kib: u64,
    burst: u64,
}

impl Pace {
    fn of(rate: Rate) -> Self {
        let request = rate.iops.map_or(0.0, |iops| 1e9 / iops.get());
        let kib = rate.bandwidth.map_or(0.0, |rate| 1024e9 / rate.get() as f64);
        let transfer = kib * MAX_TRANSFER.get() as f64 / 1024.0;
        // The request that arrives is one of the burst.
        let burst = f64::from(rate.burst.saturating_sub(1)) * request.max(transfer);
        Self { request: request as u64, kib: kib as u64, burst: burst as u64 }
    }

    /// How far a request moves the clock on.
    fn step(self, bytes: Bytes) -> u64 {
        let transfer = u128::from(bytes.get()) * u128::from(self.kib) / 1024;
        self.request.max(u64::try_from(transfer).unwrap_or(u64::MAX))
    }
}

/// A virtual clock as it stands for a request that arrives at `arrived`.
const fn resumed(clock: u64, burst: u64, arrived: u64) -> u64 {
    let earliest = arrived.saturating_sub(burst);
    if clock > earliest { clock } else { earliest }
}

/// A promise in ns.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Promised {
    deadline: u64,
    /// The time between two requests.
    period: u64,
    /// The sooner of both.
    due: u64,
    /// 2^16 times the steps of its virtual clock for each ns of cost.
    per_cost: u64,
    burst: u64,
    /// As it was asked for.
    promise: Promise,
}

impl Promised {
    fn of(promise: Promise, device: &Device) -> Self {
        let deadline = promise.deadline.get();
        let channels = promise.rate.channels(device).max(1e-9);
        let Pace { burst, .. } = Pace::of(promise.rate);
        let period = Pace::of(promise.rate).step(PAGE);
        let per_cost = (65_536.0 / channels) as u64;
        Self { deadline, period, due: deadline.min(period), per_cost, burst, promise }
    }

    /// How far a request of this cost moves the clock on.
    fn step(self, cost: Nanos) -> u64 {
        let step = (u128::from(cost.get()) * u128::from(self.per_cost)) >> 16;
        u64::try_from(step).unwrap_or(u64::MAX)
    }
}

#[derive(Debug)]
struct Class {
    flow: u32,
    promise: Option<Promised>,
    /// The virtual clock, ns.
    clock: u64,
    queue: VecDeque<Pending>,
    running: u32,
    demand: Demand,
    accounts: [Account; Kind::ALL.len()],
    responses: Responses,
}

impl Class {
    /// Requests wait or run.
    fn is_under_way(&self) -> bool {
        self.running > 0 || !self.queue.is_empty()
    }

    /// When its head is eligible, and when it is due.
    fn head(&self) -> Option<(u64, u64)> {
        let Promised { due, burst, .. } = self.promise?;
        let arrived = self.queue.front()?.arrived;
        let eligible = resumed(self.clock, burst, arrived);
        Some((eligible, eligible.max(arrived).saturating_add(due)))
    }

    /// Whether a promised response was late.
    fn is_late(&self, response: u64) -> bool {
        self.promise.is_some_and(|promise| response > promise.deadline)
    }
}

#[derive(Debug)]
struct Flow {
    weight: u64,
    limit: Option<Pace>,
    /// The limit's virtual clock, ns.
    clock: u64,
    /// The same of the requests alone that are not promised.
    clock_of_others: u64,
    /// When one of these was last started, or the flow last began to wait.
    served_at: u64,
    /// Fair queueing's tag of its next request.
    start: u64,
    classes: Vec<u32>,
    pending: usize,
    running: usize,
    /// Nobody has it any more.
    leaving: bool,
}

impl Flow {
    /// When its limit lets a request that is not promised start. What is promised uses the limit up and is not held by it:
    /// where it leaves the others less, they have one request in [`MAX_LIMITED_NS`], if their own requests alone are within
    /// the limit.
    fn due(&self) -> u64 {
        if self.limit.is_none() {
            return 0;
        }
        let longest = self.served_at.saturating_add(MAX_LIMITED_NS);
        self.clock.min(longest.max(self.clock_of_others))
    }
}

/// Decides what one device gets next.
#[derive(Debug)]
pub struct Scheduler {
    device: Device,
    /// `None`: removed, and free for the next.
    flows: Vec<Option<Flow>>,
    classes: Vec<Option<Class>>,
    /// Classes whose head is eligible, by when it is due.
    eligible: Heap,
    /// Classes whose head is not yet, by when it is.
    early: Heap,
    /// Flows with requests that are within their limits, by tag.
    fair: Heap,
    /// Flows with requests that are not, by when they are.
    limited: Heap,
    /// Fair queueing's clock.
    virtual_time: u64,
    /// Since when background waits, or when it was last served.
    waits_since: u64,
    /// When background was last served.
    served_at: u64,
    running: u32,
    background: u32,
    promises: u32,
    epochs: Epochs,
    depth: Depth,
    usage: Usage,
    /// Until when [`Usage::used`] is counted.
    used_at: u64,
    progress: Progress,
}

impl Scheduler {
    /// For a device that nothing has been given to.
    #[must_use]
    pub fn new(device: Device) -> Self {
        let device = Device { channels: device.channels.max(1), ..device };
        Self {
            device,
            flows: Vec::new(),
            classes: Vec::new(),
            eligible: Heap::default(),
            early: Heap::default(),
            fair: Heap::default(),
            limited: Heap::default(),
            virtual_time: 0,
            waits_since: 0,
            served_at: 0,
            running: 0,
            background: 0,
            promises: 0,
            epochs: Epochs::new(),
            depth: Depth::new(device.channels.saturating_add(EXTRA_DEPTH)),
            usage: Usage::default(),
            used_at: 0,
            progress: Progress::default(),
        }
    }

    /// A new flow, without classes.
    pub fn add_flow(&mut self, share: Share) -> FlowId {
        let flow = Flow {
            weight: u64::from(share.weight.get()),
            limit: share.limit.map(Pace::of),
            clock: 0,
            clock_of_others: 0,
            served_at: 0,
            start: 0,
            classes: Vec::new(),
            pending: 0,
            running: 0,
            leaving: false,
        };
        FlowId(put(&mut self.flows, flow))
    }

    /// A new class of a flow; `None` if there is no such flow.
    pub fn add_class(&mut self, flow: FlowId, promise: Option<Promise>) -> Option<ClassId> {
        let classes = &mut self.flows.get_mut(flow.0 as usize)?.as_mut()?.classes;
        let class = Class {
            flow: flow.0,
            promise: promise.map(|promise| Promised::of(promise, &self.device)),
            clock: 0,
            queue: VecDeque::new(),
            running: 0,
            demand: Demand::default(),
            accounts: Default::default(),
            responses: Responses::default(),
        };
        self.promises += u32::from(promise.is_some());
        let id = put(&mut self.classes, class);
        classes.push(id);
        Some(ClassId(id))
    }

    /// Removes a flow and its classes, once nothing of it waits or runs.
    pub fn remove(&mut self, flow: FlowId) {
        let Some(Some(of)) = self.flows.get_mut(flow.0 as usize) else { return };
        of.leaving = true;
        self.remove_if_left(flow.0);
    }

    fn remove_if_left(&mut self, id: u32) {
        let slot = &mut self.flows[id as usize];
        let left = |flow: &mut Flow| flow.leaving && flow.pending + flow.running == 0;
        let Some(flow) = slot.take_if(left) else { return };
        for class in flow.classes {
            let removed = self.classes[class as usize].take();
            let promised = removed.is_some_and(|class| class.promise.is_some());
            self.promises -= u32::from(promised);
        }
    }

    /// Takes a request, whose caller knows it by `ticket`. False: there is no such class.
    pub fn submit(
        &mut self,
        class: ClassId,
        (ticket, kind, bytes): (u64, Kind, Bytes),
        now: Nanos,
    ) -> bool {
        let arrived = now.get();
        self.tick(arrived);
        let Some(Some(to)) = self.classes.get_mut(class.0 as usize) else { return false };
        let Some(Some(flow)) = self.flows.get_mut(to.flow as usize) else { return false };
        if !to.is_under_way() {
            to.demand.begin(arrived);
        }
        if let Some(promise) = to.promise
            && self.epochs.is_settled(arrived)
        {
            to.demand.ask(promise.step(self.device.cost(kind, bytes)));
        }
        to.queue.push_back(Pending { ticket, kind, bytes, arrived });
        flow.pending += 1;
        let (first_of_class, first_of_flow, of) = (to.queue.len() == 1, flow.pending == 1, to.flow);
        if first_of_class {
            self.rank(class.0, arrived);
        }
        if first_of_flow {
            let Some(Some(flow)) = self.flows.get_mut(of as usize) else { return false };
            flow.start = flow.start.max(self.virtual_time);
            flow.served_at = arrived;
            self.queue_flow(of, arrived);
        }
        true
    }

    /// Whether so many requests could start now whatever they are: nothing waits that might go
    /// first, and each has a channel.
    #[must_use]
    pub fn has_room_for(&self, requests: usize) -> bool {
        let free = self.device.channels.saturating_sub(self.running);
        self.fair.is_empty() && self.limited.is_empty() && requests <= free as usize
    }

    /// Takes a request and starts it, as [`submit`](Self::submit) and [`next`](Self::next) do, but
    /// for the queues that it need not wait in. `None`: it has to be submitted. The caller asks
    /// [`Self::has_room_for`] before.
    pub fn start_at_once(
        &mut self,
        class: ClassId,
        (ticket, kind, bytes): (u64, Kind, Bytes),
        now: Nanos,
    ) -> Option<Started> {
        let now = now.get();
        self.tick(now);
        let to = self.classes.get_mut(class.0 as usize)?.as_mut()?;
        let flow = self.flows.get_mut(to.flow as usize)?.as_mut()?;
        let cost = self.device.cost(kind, bytes).get().max(1);
        let promise = to.promise;
        let eligible = promise.map(|promise| resumed(to.clock, promise.burst, now));
        let eligible = eligible.filter(|eligible| *eligible <= now);
        let is_bound = self.depth.gap() > 0 || self.background >= self.depth.bound();
        let is_held = self.promises > 0 && (is_bound || self.epochs.is_withheld());
        if flow.limit.is_some() || (eligible.is_none() && is_held) {
            return None;
        }
        if to.running == 0 {
            to.demand.begin(now);
        }
        if let Some(promise) = promise {
            let step = promise.step(self.device.cost(kind, bytes));
            if self.epochs.is_settled(now) {
                to.demand.ask(step);
            }
            if let Some(eligible) = eligible {
                to.clock = eligible.saturating_add(step);
            }
        }
        flow.start = flow.start.max(self.virtual_time);
        if eligible.is_none() {
            self.virtual_time = flow.start;
            flow.start = flow.start.saturating_add(cost.saturating_mul(VTIME_SCALE) / flow.weight);
            (self.waits_since, self.served_at) = (now, now);
            self.background += 1;
        }
        to.running += 1;
        flow.running += 1;
        self.set_back();
        self.begin(now);
        let promised = eligible.is_some();
        let running = Running { class: class.0, promised, kind, bytes, cost, since: now };
        Some(Started { ticket, running })
    }

    /// What to start now, if anything: the caller starts it, and asks again.
    pub fn next(&mut self, now: Nanos) -> Option<Started> {
        let now = now.get();
        self.tick(now);
        while let Some((at, class)) = self.early.first()
            && at <= now
        {
            self.rank(class, now);
        }
        while let Some((at, flow)) = self.limited.first()
            && at <= now
        {
            self.queue_flow(flow, now);
        }
        let most = self.device.channels.saturating_mul(2);
        if self.running >= most {
            return None;
        }
        let fair = self.fair.first().map(|(_, flow)| flow);
        if let Some(flow) = fair
            && now.saturating_sub(self.waits_since) > MAX_BACKGROUND_WAIT_NS
        {
            return self.start_background(flow, now);
        }
        if let Some((_, class)) = self.eligible.first() {
            return self.start_promised(class, now);
        }
        let flow = fair?;
        if self.promises > 0 {
            if self.running >= self.device.channels.saturating_add(EXTRA_DEPTH) {
                return None;
            }
            if self.epochs.is_withheld() {
                return None;
            }
            let is_soon = now.saturating_sub(self.served_at) < self.depth.gap();
            if is_soon || self.background >= self.depth.bound() {
                self.depth.hold_back();
                return None;
            }
        }
        self.start_background(flow, now)
    }

    /// When to ask again though nothing has come or ended: a limit or a rate holds something. Later
    /// than the last [`Scheduler::next`] that had nothing to start.
    #[must_use]
    pub fn wake_at(&self) -> Option<Nanos> {
        // What is early is background until then; where that may start it need not be waited for.
        let times = [self.limited.first(), self.early.first()].into_iter().flatten();
        let background = if self.fair.is_empty() { None } else { self.background_at() };
        times.map(|(at, _)| at).chain(background).min().map(Nanos::new)
    }

    /// When time alone lets the next background request start.
    fn background_at(&self) -> Option<u64> {
        if let Some(end) = self.epochs.withheld_until() {
            let longest = self.waits_since.saturating_add(MAX_BACKGROUND_WAIT_NS + 1);
            let is_full = self.running >= self.device.channels.saturating_mul(2);
            return Some(if is_full { end } else { end.min(longest) });
        }
        // Where it is the end of a request that background waits for, time alone changes nothing.
        let has_room = self.running < self.device.channels.saturating_add(EXTRA_DEPTH)
            && self.background < self.depth.bound();
        let gap = self.depth.gap();
        (gap > 0 && has_room).then(|| self.served_at.saturating_add(gap))
    }

    /// A request has ended.
    pub fn complete(&mut self, running: Running, now: Nanos) {
        self.tick(now.get());
        self.end(&running, now.get());
        self.background -= u32::from(!running.promised);
        let Some(Some(class)) = self.classes.get_mut(running.class as usize) else { return };
        class.running -= 1;
        if !class.is_under_way() {
            class.demand.end(now.get());
        }
        if running.promised {
            let response = now.get().saturating_sub(running.since);
            let late = class.is_late(response);
            let count = if late { &mut class.responses.late } else { &mut class.responses.in_time };
            *count += 1;
            let stalled = if late { self.progress.stalled_since(running.since) } else { 0 };
            if stalled > 0 && !class.is_late(response.saturating_sub(stalled)) {
                class.responses.late_in_stalls += 1;
            }
            self.depth.observe(late);
        }
        let account = &mut class.accounts[running.kind as usize];
        account.requests += 1;
        account.bytes += running.bytes.get();
        account.cost += running.cost;
        let id = class.flow;
        if let Some(Some(flow)) = self.flows.get_mut(id as usize) {
            flow.running -= 1;
            self.remove_if_left(id);
        }
    }

    /// The device, as its requests are charged.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Requests on the device.
    #[must_use]
    pub const fn running(&self) -> u32 {
        self.running
    }

    /// Background requests on the device.
    #[must_use]
    pub const fn background(&self) -> u32 {
        self.background
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.flows.iter().flatten().map(|flow| flow.pending).sum()
    }

    /// Background requests that may be on the device while promises are to be kept; 0: one now and
    /// then.
    #[must_use]
    pub const fn depth(&self) -> u32 {
        if self.depth.gap() > 0 || self.epochs.is_withheld() { 0 } else { self.depth.bound() }
    }

    /// What the device did, and took for it.
    #[must_use]
    pub const fn usage(&self) -> Usage {
        self.usage
    }

    /// Times in which the device ended nothing of what it had.
    #[must_use]
    pub const fn stalls(&self) -> Stalls {
        self.progress.stalls()
    }

    /// How long the device has ended nothing of what it has, if that is as long as a stall and goes on.
    #[must_use]
    pub fn stalled_for(&self, now: Nanos) -> Option<Nanos> {
        // Which request will end it is not known yet: a small one, if any.
        let cost = self.device.cost(Kind::Read, PAGE).get();
        self.progress.ongoing(cost, self.running, now.get())
    }

    /// What a class has had, by kind; `None`: there is no such class.
    #[must_use]
    pub fn accounts(&self, class: ClassId) -> Option<&[Account; Kind::ALL.len()]> {
        Some(&self.classes.get(class.0 as usize)?.as_ref()?.accounts)
    }

    /// How a class's promise was kept; `None`: there is no such class.
    #[must_use]
    pub fn responses(&self, class: ClassId) -> Option<Responses> {
        Some(self.classes.get(class.0 as usize)?.as_ref()?.responses)
    }

    /// Ends an epoch if it is time.
    fn tick(&mut self, now: u64) {
        if self.epochs.is_over(now) {
            self.end_epoch(now);
        }
    }

    #[cold]
    fn end_epoch(&mut self, now: u64) {
        let epoch = self.epochs.end(self.served_at, self.depth.recovery(), now);
        let (mut is_tried, mut answers, mut wants) = (false, false, Wants::Any);
        for class in self.classes.iter_mut().flatten() {
            let Some(Promised { period, burst, .. }) = class.promise else { continue };
            let backlog = match class.head() {
                Some((eligible, _)) if eligible > now => Backlog::BeyondRate,
                _ if class.is_under_way() => Backlog::WithinRate,
                _ => Backlog::None,
            };
            let look = class.demand.end_epoch(&epoch, (period, burst), backlog);
            is_tried |= look.is_tried;
            answers |= look.answers;
            wants = wants.max(look.wants);
        }
        self.depth.end_epoch(wants, self.epochs.is_withheld());
        self.epochs.begin(is_tried, answers, now);
    }

    /// Whether a class that has less than its rate would take more; `None`: there is no such class.
    #[must_use]
    pub fn demand(&self, class: ClassId) -> Option<crate::Demand> {
        Some(self.classes.get(class.0 as usize)?.as_ref()?.demand.known())
    }

    /// How long background was withheld so far, to find that out.
    #[must_use]
    pub const fn withheld(&self) -> Nanos {
        Nanos::new(self.epochs.withheld())
    }

    /// The device gets a request.
    fn begin(&mut self, now: u64) {
        self.use_until(now);
        self.progress.begin(self.running, now);
        self.running += 1;
    }

    /// It has ended one.
    fn end(&mut self, request: &Running, now: u64) {
        self.use_until(now);
        let usage = &mut self.usage;
        usage.cost += request.cost;
        usage.requests += 1;
        usage.flushes += u64::from(matches!(request.kind, Kind::Flush | Kind::Discard));
        usage.alone += u64::from(self.running <= self.device.channels);
        self.progress.end(request.cost, self.running, now);
        self.running -= 1;
    }

    fn use_until(&mut self, now: u64) {
        let channels = self.running.min(self.device.channels);
        self.usage.used += now.saturating_sub(self.used_at) * u64::from(channels);
        self.used_at = self.used_at.max(now);
    }

    /// Puts a class where its head belongs.
    fn rank(&mut self, class: u32, now: u64) {
        let head = self.classes[class as usize].as_ref().and_then(Class::head);
        match head {
            None => {
                self.eligible.remove(class);
                self.early.remove(class);
            }
            Some((eligible, deadline)) if eligible <= now => {
                self.early.remove(class);
                self.eligible.set(class, deadline);
            }
            Some((eligible, _)) => {
                self.eligible.remove(class);
                self.early.set(class, eligible);
            }
        }
    }

    /// Puts a flow where its requests belong.
    fn queue_flow(&mut self, id: u32, now: u64) {
        let Some(Some(flow)) = self.flows.get_mut(id as usize) else { return };
        if flow.pending == 0 {
            self.fair.remove(id);
            self.limited.remove(id);
        } else if flow.due() > now {
            self.fair.remove(id);
            self.limited.set(id, flow.due());
        } else {
            if self.limited.contains(id) {
                // What its limit kept from it is not made up for: its tag stood still meanwhile, and it would go
                // ahead of all others until that has come up to theirs, which takes hours.
                flow.start = flow.start.max(self.virtual_time);
                self.limited.remove(id);
            }
            if self.fair.is_empty() {
                self.waits_since = now;
            }
            self.fair.set(id, flow.start);
        }
    }

    /// As after a long time: the clock, and the tags of all flows, stand at `clock`.
    #[cfg(test)]
    pub(crate) fn wind(&mut self, clock: u64) {
        self.virtual_time = clock;
        self.flows.iter_mut().flatten().for_each(|flow| flow.start = clock);
    }

    /// Sets fair queueing's clock back before its tags come near the end of their range. What was between
    /// tags stays; a flow that is behind the clock starts there anyway.
    fn set_back(&mut self) {
        if self.virtual_time < SET_BACK {
            return;
        }
        let by = std::mem::take(&mut self.virtual_time);
        for (id, flow) in self.flows.iter_mut().enumerate() {
            let Some(flow) = flow else { continue };
            flow.start = flow.start.saturating_sub(by);
            if self.fair.contains(id as u32) {
                self.fair.set(id as u32, flow.start);
            }
        }
    }

    fn start_promised(&mut self, class: u32, now: u64) -> Option<Started> {
        let of = self.classes[class as usize].as_mut()?;
        let (eligible, _) = of.head()?;
        let &Pending { kind, bytes, .. } = of.queue.front()?;
        let step = of.promise?.step(self.device.cost(kind, bytes));
        of.clock = eligible.saturating_add(step);
        self.start(class, Some(eligible), now)
    }

    fn start_background(&mut self, id: u32, now: u64) -> Option<Started> {
        let flow = self.flows[id as usize].as_ref()?;
        // Of its classes, the one whose head should end first. What exceeds a promise takes its turn with what has none:
        // ahead of it, a class that always exceeds its rate would let the others of its flow have nothing.
        let urgency = |&class: &u32| {
            let class = self.classes[class as usize].as_ref()?;
            let arrived = class.queue.front()?.arrived;
            let head = class.head().filter(|(eligible, _)| *eligible <= now);
            Some((head.map_or(u64::MAX, |(_, deadline)| deadline), arrived))
        };
        let class = *flow
            .classes
            .iter()
            .filter(|class| urgency(class).is_some())
            .min_by_key(|class| urgency(class))?;
        self.virtual_time = self.virtual_time.max(flow.start);
        self.set_back();
        self.waits_since = now;
        self.served_at = now;
        self.background += 1;
        self.start(class, None, now)
    }

    /// Takes the head of a class off its queue; it is promised if it was `eligible` at some time.
    fn start(&mut self, class: u32, eligible: Option<u64>, now: u64) -> Option<Started> {
        let promised = eligible.is_some();
        let of = self.classes[class as usize].as_mut()?;
        let Pending { ticket, kind, bytes, arrived } = of.queue.pop_front()?;
        let cost = self.device.cost(kind, bytes).get().max(1);
        let id = of.flow;
        of.running += 1;
        let flow = self.flows[id as usize].as_mut()?;
        flow.pending -= 1;
        flow.running += 1;
        if let Some(limit) = flow.limit {
            let step = limit.step(bytes);
            let next = |clock| resumed(clock, limit.burst, arrived.max(now)).saturating_add(step);
            flow.clock = next(flow.clock);
            if promised {
                // What exceeds the limit for long is not made up for afterwards.
                let longest = now.saturating_add(MAX_LIMITED_NS).max(flow.clock_of_others);
                flow.clock = flow.clock.min(longest);
            } else {
                flow.clock_of_others = next(flow.clock_of_others);
                flow.served_at = now;
            }
        }
        if !promised {
            flow.start = flow.start.saturating_add(cost.saturating_mul(VTIME_SCALE) / flow.weight);
        }
        self.begin(now);
        self.rank(class, now);
        self.queue_flow(id, now);
        let since = eligible.unwrap_or(0).max(arrived);
        Some(Started { ticket, running: Running { class, promised, kind, bytes, cost, since } })
    }
}

/// Puts a value into the first free slot.
fn put<T>(slots: &mut Vec<Option<T>>, value: T) -> u32 {
    let free = slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    });
    slots[free] = Some(value);
    free as u32
}
