//! bfq: slots of service by budgets, idling, injection, raised weights.
//!
//! A model of what is published of it: the scheduler and its budgets by Valente and Checconi, *High Throughput Disk
//! Scheduling with Fair Bandwidth Distribution* (IEEE Transactions on Computers 59(9), 2010); low latency by Valente and
//! Andreolini, *Improving Application Responsiveness with the BFQ Disk I/O Scheduler* (SYSTOR 2012); its parameters by
//! the kernel's Documentation/block/bfq-iosched.rst; injection by its cover message (`injection`). What these leave
//! open was measured on Linux 6.12 and 6.18 with block's tracepoints (ADR 0017).
//!
//! A process has a *queue*. The queue that [`FairTree`] chooses has the device for a *slot*: until its budget of
//! sectors or its time (`timeout_sync`) is used up, or it has no more requests. Where shares must be protected the
//! device *idles* for a queue that has become empty, up to `slice_idle`; meanwhile a few requests of others are
//! *injected*. `low_latency` *raises* the weight of a queue that has just begun.
//!
//! Processes of one group with one I/O priority that begin together share a queue for good, and those of a
//! simulation do begin together. Left out: asynchronous writes, the idle class, soft real-time applications (which
//! read in sequence; positions are random here), and bursts of new processes.

mod fair;
mod injection;
mod queue;
mod rate;
mod wakers;

use rtvirtio_spec::settings::Bfq as Parameters;

use self::fair::FairTree;
use self::injection::Injection;
use self::queue::{History, LONG, Requests};
use self::rate::{REFERENCE_RATE, Rate};
use self::wakers::Wakers;
use super::request::{Elevator, Request};
use super::tick::after;

const MS: u64 = 1_000_000;
/// Before the device's rate is known a budget is this, sectors; it is after so many budgets.
const FIRST_BUDGET: u64 = 16 << 10;
const FIRST_BUDGETS: u32 = 11;
/// Budgets are at least this part of the largest.
const MIN_PART: u64 = 32;
/// The time of a slot that a whole budget is charged for, where a queue is charged by time, ns.
const FULL_SLOT: u64 = 124 * MS;
/// A slot shorter than this says nothing of a queue's pace, ns; one longer than the other does.
const SHORT_SLOT: u64 = MS;
const LONG_SLOT: u64 = 20 * MS;
/// A seeky queue that needs no protection is idled for no longer than this, ns; one with a raised weight at least as long
/// as the other.
const SEEKY_IDLE: u64 = 2 * MS;
const RAISED_IDLE: u64 = 20 * MS;
/// Raised weights are so many times what they were.
const RAISE: f64 = 30.0;
/// A weight is raised for 2.5 s on a device of the reference rate, longer on a slower one, within bounds, ns; and for no
/// more service than this, sectors.
const RAISED_FOR: (u64, u64, u64) = (3_000 * MS, 2_500 * MS, 25_000 * MS);
const RAISED_SERVICE: u64 = 120_000;
/// A queue that has been idle for so long begins anew, ns.
const LONG_IDLE: u64 = 2_000 * MS;
/// How deep writers that were here before have had the device.
const SEASONED_DEPTH: u32 = 64;
/// Tags of the scheduler (`nr_requests` of a device with 128 or more).
const TAGS: f64 = 256.0;

/// A process, as bfq sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    /// Its group; 0 is the root.
    pub(super) group: usize,
    /// 0 real-time, 1 best-effort.
    pub(super) class: u8,
    /// 0 to 7.
    pub(super) level: u8,
}

/// Why a slot ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Idle,
    Timeout,
    Budget,
    Empty,
    Preempted,
}

#[derive(Debug)]
struct Queue {
    /// Several processes have it.
    shared: bool,
    requests: Requests,
    history: History,
    injection: Injection,
    thought_shortly: bool,
    /// It has had a request.
    begun: bool,
    is_backlogged: bool,
    in_device: u32,
    /// What it gets next time, sectors.
    budget: u64,
    /// When its last request ended, ns.
    last_end: u64,
    /// Since when it has had nothing to do; none: it is new, or at work.
    idle_since: Option<u64>,
    /// Its slot ended for lack of requests with this much of its budget: if the next one comes soon, it goes on.
    resumable: Option<u64>,
    raised: Option<Raised>,
    plain_weight: f64,
}

/// A raised weight.
#[derive(Debug)]
struct Raised {
    until: u64,
    served: u64,
}

/// The queue that has the device.
#[derive(Debug)]
struct Slot {
    queue: usize,
    began: u64,
    /// When its time is over, ns.
    until: u64,
    /// When the device began to idle for it last.
    idle_began: u64,
    /// Until when it does.
    idle_until: Option<u64>,
    /// Others' requests were let in.
    injected: bool,
    /// Its next request is measured; which one is, if that has gone to the device; and since when.
    measures: bool,
    measured: Option<u32>,
    measured_since: u64,
}

/// The scheduler.
#[derive(Debug)]
pub(super) struct Bfq {
    parameters: Parameters,
    slice_idle: u64,
    tree: FairTree,
    queues: Vec<Queue>,
    queue_of: Vec<usize>,
    /// Requests of each process, here or in the device.
    outstanding: Vec<u32>,
    /// Queues with requests, and those that have some here or in the device, in the order in which they came.
    backlogged: Vec<usize>,
    pending: Vec<usize>,
    wakers: Wakers,
    slot: Option<Slot>,
    waiting: u32,
    in_device: u32,
    max_in_device: u32,
    head: u32,
    rate: Rate,
    max_budget: u64,
    /// Budgets that were given.
    budgets: u32,
}

impl Bfq {
    /// `groups[g]` are (parent, weight) of group g + 1; 0 is the root.
    pub(super) fn new(
        parameters: Parameters,
        groups: &[(usize, u32)],
        processes: &[Process],
    ) -> Self {
        let mut owners: Vec<Process> = Vec::new();
        let mut queue_of = Vec::with_capacity(processes.len());
        for process in processes {
            let known = owners.iter().position(|owner| owner == process);
            queue_of.push(known.unwrap_or(owners.len()));
            if known.is_none() {
                owners.push(*process);
            }
        }
        let is_shared = |q: usize| queue_of.iter().filter(|&&other| other == q).count() > 1;
        let shared: Vec<_> = (0..owners.len()).map(is_shared).collect();
        // Linux's weights of I/O priorities.
        let weight = |process: &Process| 10 * u32::from(8 - process.level.min(7));
        let leaves: Vec<_> = owners.iter().map(|p| (p.group, p.class, weight(p))).collect();
        let queue = |(process, shared): (&Process, bool)| Queue {
            shared,
            requests: Requests::default(),
            history: History::new(),
            injection: Injection::new(),
            thought_shortly: true,
            begun: false,
            is_backlogged: false,
            in_device: 0,
            budget: 0,
            last_end: 0,
            idle_since: None,
            resumable: None,
            raised: None,
            plain_weight: f64::from(weight(process)),
        };
        let mut bfq = Self {
            parameters,
            slice_idle: u64::from(parameters.slice_idle_us) * 1_000,
            tree: FairTree::new(groups, &leaves),
            queues: owners.iter().zip(shared).map(queue).collect(),
            outstanding: vec![0; queue_of.len()],
            queue_of,
            backlogged: Vec::new(),
            pending: Vec::new(),
            wakers: Wakers::new(owners.len()),
            slot: None,
            waiting: 0,
            in_device: 0,
            max_in_device: 0,
            head: 0,
            rate: Rate::new(),
            max_budget: 0,
            budgets: 0,
        };
        bfq.max_budget = bfq.budget_by_rate();
        bfq
    }

    /// It has been at work before, under deep queues too.
    pub(super) const fn season(mut self) -> Self {
        self.max_in_device = SEASONED_DEPTH;
        self.budgets = FIRST_BUDGETS;
        self
    }

    // ---- Budgets ---------------------------------------------------------------------------------

    /// `max_budget`; 0 leaves it to what the device does in a slot's whole time.
    fn budget_by_rate(&self) -> u64 {
        match u64::from(self.parameters.max_budget) {
            0 => {
                let seconds = f64::from(self.parameters.timeout_sync_ms) / 1e3;
                (self.rate.sectors_per_second * seconds) as u64
            }
            budget => budget,
        }
    }

    const fn largest_budget(&self) -> u64 {
        if self.budgets < FIRST_BUDGETS { FIRST_BUDGET } else { self.max_budget }
    }

    const fn min_budget(&self) -> u64 {
        self.largest_budget() / MIN_PART
    }

    /// The budget of a queue's next slot, by how this one ends: more for who needs more, little for who needs little (Valente
    /// and Checconi, section 5).
    fn next_budget(&self, q: usize, end: End) -> u64 {
        let queue = &self.queues[q];
        let (least, most) = (self.min_budget(), self.max_budget);
        if queue.raised.is_some() {
            return 2 * least;
        }
        let budget = match end {
            End::Idle if queue.in_device > 0 => (2 * queue.budget).min(most),
            End::Idle if queue.budget > 5 * least => queue.budget - 4 * least,
            End::Idle => least,
            End::Timeout => (2 * queue.budget).min(most),
            End::Budget => (4 * queue.budget).min(most),
            End::Empty => self.tree.served(q).max(least),
            End::Preempted => queue.budget,
        };
        let is_learned = self.budgets >= FIRST_BUDGETS && self.parameters.max_budget == 0;
        if is_learned { budget.min(most) } else { budget }
    }

    // ---- Whether to idle -------------------------------------------------------------------------

    /// Shares would be lost if the device did not wait for this queue: others with requests, waiting or in the device,
    /// have other weights or are in other groups.
    fn protects(&self, q: usize) -> bool {
        let mut others = self.pending.iter().copied();
        let Some(first) = others.next() else { return false };
        let group = self.tree.group(first);
        let (weight, class) = (self.tree.weight(first), self.tree.class(first));
        let mut least = weight;
        let mut varied = false;
        for o in others {
            if self.tree.group(o) != group || self.tree.class(o) != class {
                return true;
            }
            varied |= self.tree.weight(o) != weight;
            least = least.min(self.tree.weight(o));
        }
        // Who has the least weight loses nothing.
        varied && self.tree.weight(q) > least
    }

    fn idles_for(&self, q: usize) -> bool {
        let queue = &self.queues[q];
        let plain = |&o: &usize| self.queues[o].raised.is_none();
        let raised = queue.raised.is_some()
            && (self.backlogged.iter().any(plain) || self.in_device >= queue.in_device + 4);
        self.slice_idle > 0 && (raised || self.backlogged.len() == 1 || self.protects(q))
    }

    fn begin_idling(&mut self, now: u64, q: usize) {
        let raised = self.queues[q].raised.is_some();
        let length = if raised {
            self.slice_idle.max(RAISED_IDLE)
        } else if self.queues[q].history.is_seeky() && !self.protects(q) {
            self.slice_idle.min(SEEKY_IDLE)
        } else {
            self.slice_idle
        };
        if let Some(slot) = &mut self.slot {
            slot.idle_began = now;
            slot.idle_until = Some(now + length);
        }
    }

    // ---- Slots -----------------------------------------------------------------------------------

    fn begin_slot(&mut self, now: u64) -> Option<usize> {
        let q = self.tree.select()?;
        self.budgets += u32::from(self.budgets < FIRST_BUDGETS);
        let queue = &mut self.queues[q];
        queue.requests.begin_slot();
        let times = (self.tree.weight(q) / queue.plain_weight).max(1.0) as u64;
        let timeout = u64::from(self.parameters.timeout_sync_ms) * MS * times;
        self.slot = Some(Slot {
            queue: q,
            began: now,
            until: after(now, timeout),
            idle_began: now,
            idle_until: None,
            injected: false,
            measures: false,
            measured: None,
            measured_since: 0,
        });
        Some(q)
    }

    /// What a queue is charged that is served its budget more slowly than others would be: for its time.
    fn charge_by_time(&mut self, q: usize, time: u64) {
        let charge =
            self.max_budget as u128 * u128::from(time.min(FULL_SLOT)) / u128::from(FULL_SLOT);
        let more = (charge as u64).saturating_sub(self.tree.served(q));
        self.tree.extend(q, self.tree.served(q) + more);
        self.tree.charge(q, more);
    }

    fn end_slot(&mut self, now: u64, end: End) {
        let Some(slot) = self.slot.take() else { return };
        let q = slot.queue;
        let until = if end == End::Idle || end == End::Timeout && slot.idle_until.is_some() {
            slot.idle_began
        } else {
            now
        };
        let time = until.saturating_sub(slot.began);
        let seeky = self.queues[q].history.is_seeky();
        let slow = match time {
            ..=LONG_SLOT => seeky,
            _ => self.tree.served(q) < self.max_budget / 2,
        };
        let unused = self.tree.left(q) >= self.tree.budget(q) / 3;
        if self.queues[q].raised.is_none() && (slow || end == End::Timeout && unused) {
            self.charge_by_time(q, if time < SHORT_SLOT { 2 * MS } else { time });
        }
        let left = self.tree.left(q);
        let budget = self.next_budget(q, end);
        self.queues[q].budget = budget;
        let goes_on = end == End::Preempted && self.idles_for(q);
        let next = self.queues[q].requests.next_sectors();
        let is_empty = next.is_none() && !goes_on;
        self.tree.expire(q, (!is_empty).then(|| budget.max(next.unwrap_or(0))));
        if is_empty {
            self.leave(now, q);
            let by_choice = end != End::Timeout && end != End::Budget;
            self.queues[q].resumable = by_choice.then_some(left);
        } else {
            self.move_to_back(q);
        }
    }

    /// It is the one that came last.
    fn move_to_back(&mut self, q: usize) {
        self.backlogged.retain(|&o| o != q);
        self.backlogged.push(q);
    }

    /// The queue has no requests here any more.
    fn leave(&mut self, now: u64, q: usize) {
        let queue = &mut self.queues[q];
        queue.is_backlogged = false;
        self.backlogged.retain(|&o| o != q);
        if queue.in_device == 0 {
            queue.idle_since = Some(now);
            self.pending.retain(|&o| o != q);
        }
    }

    fn is_out_of_time(&self, now: u64) -> bool {
        self.slot.as_ref().is_some_and(|slot| {
            let unused = self.tree.left(slot.queue) >= self.tree.budget(slot.queue) / 3;
            now >= slot.until && (slot.idle_until.is_none() || unused)
        })
    }

    /// The queue whose next request goes to the device.
    fn choose(&mut self, now: u64) -> Option<usize> {
        if let Some(slot) = &self.slot {
            let q = slot.queue;
            let waits = self.queues[q].requests.is_empty() && self.idles_for(q);
            if self.is_out_of_time(now) && !waits {
                self.end_slot(now, End::Timeout);
            }
        }
        loop {
            let q = match &self.slot {
                Some(slot) => slot.queue,
                None => self.begin_slot(now)?,
            };
            let end = match self.queues[q].requests.next_sectors() {
                Some(sectors) if sectors <= self.tree.left(q) => {
                    if let Some(slot) = &mut self.slot {
                        slot.idle_until = None;
                    }
                    return Some(q);
                }
                Some(_) => End::Budget,
                None => {
                    let idles = self.slot.as_ref().is_some_and(|slot| slot.idle_until.is_some());
                    if idles || self.queues[q].in_device > 0 && self.idles_for(q) {
                        return self.inject(q);
                    }
                    End::Empty
                }
            };
            self.end_slot(now, end);
        }
    }

    /// Whose request is let in while the device idles for `q`.
    fn inject(&mut self, q: usize) -> Option<usize> {
        let fits = |o: usize| {
            self.queues[o].requests.next_sectors().is_some_and(|s| s <= self.tree.left(o))
        };
        if let Some(partner) =
            self.wakers.partners(q).find(|&o| self.queues[o].is_backlogged && fits(o))
        {
            return Some(partner);
        }
        let queue = &self.queues[q];
        let raised = queue.raised.is_some();
        let thinks_shortly = queue.history.thinks_shortly(self.slice_idle);
        let are_raised = |&&o: &&usize| self.queues[o].raised.is_some();
        if raised && thinks_shortly && self.backlogged.iter().filter(are_raised).count() <= 1 {
            return None;
        }
        let limit = queue.injection.limit();
        let may_go = |&o: &usize| {
            let Some(next) = self.queues[o].requests.next() else { return false };
            let limit = if next.sectors >= LONG { limit.min(1) } else { limit };
            let may = !raised || !thinks_shortly || self.queues[o].raised.is_some();
            may && self.in_device < limit && fits(o)
        };
        let found = self.backlogged.iter().rev().copied().filter(|&o| o != q).find(may_go)?;
        if let Some(slot) = &mut self.slot {
            slot.injected = true;
        }
        Some(found)
    }

    // ---- Raised weights --------------------------------------------------------------------------

    fn raise(&mut self, now: u64, q: usize) {
        let by_rate = RAISED_FOR.1 as f64 * REFERENCE_RATE / self.rate.sectors_per_second;
        let length = (by_rate as u64).clamp(RAISED_FOR.0, RAISED_FOR.2);
        // Short slots, for the others' sake.
        let budget = 2 * self.min_budget();
        let queue = &mut self.queues[q];
        queue.budget = queue.budget.min(budget);
        queue.raised = Some(Raised { until: now + length, served: 0 });
        self.tree.set_weight(q, queue.plain_weight * RAISE);
    }

    /// A queue is served: its weight is raised for so long, or so much, alone.
    fn note_raised_service(&mut self, now: u64, q: usize, sectors: u64) {
        let queue = &mut self.queues[q];
        let Some(raised) = &mut queue.raised else { return };
        raised.served += sectors;
        if now > raised.until || raised.served > RAISED_SERVICE {
            queue.raised = None;
            self.tree.set_weight(q, queue.plain_weight);
        }
    }

    // ---- Arrivals --------------------------------------------------------------------------------

    /// A queue that had no requests has one.
    fn wake_up(&mut self, now: u64, q: usize) {
        let is_new = !std::mem::replace(&mut self.queues[q].begun, true);
        let idle_for_long = |since: u64| now > since + LONG_IDLE;
        let begins = is_new || self.queues[q].idle_since.is_some_and(idle_for_long);
        let plain = self.queues[q].plain_weight == 40.0;
        if self.parameters.low_latency && begins && plain {
            self.raise(now, q);
        }
        let queue = &mut self.queues[q];
        queue.idle_since = None;
        let in_time = now <= queue.last_end + 3 * self.slice_idle;
        let resumed = queue.resumable.take().filter(|&left| in_time && left > 0);
        let next = queue.requests.next_sectors().unwrap_or(0);
        let budget = match resumed {
            Some(left) => left.min(queue.budget),
            None => queue.budget.max(next),
        };
        queue.is_backlogged = true;
        self.backlogged.push(q);
        self.wakers.began(q);
        if queue.in_device == 0 {
            self.pending.push(q);
        }
        self.tree.activate(q, budget, resumed.is_some());
        let Some(serving) = self.slot.as_ref().map(|slot| slot.queue) else { return };
        let raised = |q: usize| self.queues[q].raised.is_some();
        let resumes = resumed.is_some() && (raised(q) || !raised(serving));
        if (resumes || self.is_above(q, serving) || !self.idles_for(serving))
            && self.tree.root_would_change()
        {
            self.end_slot(now, End::Preempted);
        }
    }

    /// Of a lower class, or of a larger weight: within one group its own, else its group's.
    fn is_above(&self, q: usize, other: usize) -> bool {
        let heavier = if self.tree.group(q) == self.tree.group(other) {
            self.tree.weight(q) > self.tree.weight(other)
        } else {
            self.tree.group_weight(q) > self.tree.group_weight(other)
        };
        self.tree.class(q) < self.tree.class(other) || heavier
    }

    fn note_think_time(&mut self, now: u64, q: usize) {
        let idle = self.slice_idle;
        let queue = &mut self.queues[q];
        if queue.in_device == 0 && !queue.is_backlogged {
            let time = if queue.begun { now - queue.last_end } else { u64::MAX };
            queue.history.note_think_time(time.min(2 * idle));
        }
        let shortly = queue.history.thinks_shortly(idle);
        if idle > 0 && queue.thought_shortly != shortly {
            queue.thought_shortly = shortly;
            queue.injection.think_time_changed(now, shortly);
        }
    }
}

impl Elevator for Bfq {
    /// Tags by the share of the queue among those with requests; fewer for writes, so that reads find some.
    fn admits(&self, process: u32, write: bool) -> bool {
        let raised = || self.backlogged.iter().any(|&q| self.queues[q].raised.is_some());
        let part = match write {
            false => 1.0,
            true if raised() => 0.375,
            true => 0.75,
        };
        !self.tree.has_its_tags(self.queue_of[process as usize], TAGS * part)
    }

    fn insert(&mut self, now: u64, request: Request) {
        let process = request.process as usize;
        let q = self.queue_of[process];
        self.outstanding[process] += 1;
        self.tree.hold_tags(q, 1);
        if !self.queues[q].begun {
            self.queues[q].budget = 2 * self.largest_budget() / 3;
            self.queues[q].injection.begin(now);
        }
        self.note_think_time(now, q);
        let thinks_shortly = self.queues[q].thought_shortly;
        self.queues[q].history.note_position(&request);
        if self.outstanding[process] == 1 {
            if !thinks_shortly {
                self.wakers.note(now, q, self.slice_idle);
            }
            if self.queues[q].injection.is_old(now) {
                self.queues[q].injection.forget(now, thinks_shortly);
            }
            let is_empty = self.in_device == 0;
            if let Some(slot) = &mut self.slot
                && slot.queue == q
                && self.queues[q].injection.measures(now, is_empty, slot.injected)
            {
                slot.measures = true;
                slot.measured_since = now;
                slot.injected &= !is_empty;
            }
        }
        self.waiting += 1;
        self.queues[q].requests.add(request, self.head);
        if !self.queues[q].is_backlogged {
            self.wake_up(now, q);
        } else if self.slot.as_ref().is_none_or(|slot| slot.queue != q) {
            self.fit_budget(q);
        } else {
            self.go_on(now);
        }
    }

    fn dispatch(&mut self, now: u64) -> Option<Request> {
        if self.waiting == 0 && self.slot.is_none() {
            return None;
        }
        let q = self.choose(now)?;
        let in_device = self.in_device;
        let request = self.queues[q].requests.take(now)?;
        let sectors = u64::from(request.sectors);
        self.tree.charge(q, sectors);
        self.head = request.position + request.sectors;
        self.waiting -= 1;
        self.in_device += 1;
        self.max_in_device = self.max_in_device.max(self.in_device);
        self.queues[q].in_device += 1;
        if self.rate.note(now, sectors, in_device) && self.parameters.max_budget == 0 {
            self.max_budget = self.budget_by_rate();
        }
        match &mut self.slot {
            Some(slot) if slot.queue == q => {
                if std::mem::take(&mut slot.measures) {
                    slot.measured = Some(request.id);
                }
                self.note_raised_service(now, q, sectors);
            }
            _ if self.queues[q].requests.is_empty() => {
                self.leave(now, q);
                self.tree.deactivate(q);
            }
            _ => self.fit_budget(q),
        }
        Some(request)
    }

    fn has_work(&self) -> bool {
        self.waiting > 0
    }

    fn completed(&mut self, now: u64, request: &Request, _started: u64) -> bool {
        let process = request.process as usize;
        let q = self.queue_of[process];
        self.outstanding[process] -= 1;
        self.tree.hold_tags(q, -1);
        if let Some(slot) = &mut self.slot
            && slot.measured == Some(request.id)
        {
            let time = now - slot.measured_since;
            let (injected, by_itself) = (slot.injected, self.in_device == 1);
            slot.measured = None;
            slot.injected = false;
            let most = self.max_in_device;
            self.queues[q].injection.measured(now, time, injected, by_itself, most);
        }
        self.in_device -= 1;
        let queue = &mut self.queues[q];
        queue.in_device -= 1;
        queue.last_end = now;
        self.wakers.ended(now, (!queue.shared).then_some(q));
        let none_in_device = queue.in_device == 0;
        if none_in_device && !queue.is_backlogged {
            queue.idle_since = Some(now);
            self.pending.retain(|&o| o != q);
        }
        if self.slot.as_ref().is_some_and(|slot| slot.queue == q) {
            let is_empty = self.queues[q].requests.is_empty();
            if is_empty && self.idles_for(q) {
                if none_in_device {
                    self.begin_idling(now, q);
                }
                return false;
            }
            if self.is_out_of_time(now) {
                self.end_slot(now, End::Timeout);
            } else if is_empty {
                self.end_slot(now, End::Empty);
            }
        }
        self.in_device == 0 && self.waiting > 0
    }

    fn timer_at(&self) -> Option<u64> {
        self.slot.as_ref().and_then(|slot| slot.idle_until)
    }

    fn timer(&mut self, now: u64) {
        let Some(slot) = &mut self.slot else { return };
        if now >= slot.until {
            self.end_slot(now, End::Timeout);
        } else if self.queues[slot.queue].requests.is_empty() {
            self.end_slot(now, End::Idle);
        } else {
            slot.idle_until = None;
        }
    }
}

impl Bfq {
    /// The budget of a queue that is not served has room for its next request, but not for more to be let in than that.
    fn fit_budget(&mut self, q: usize) {
        let next = self.queues[q].requests.next_sectors().unwrap_or(0);
        let budget = self.queues[q].budget.max(next).max(self.tree.served(q));
        if self.tree.budget(q) != budget {
            self.tree.set_budget(q, budget);
            self.move_to_back(q);
        }
    }

    /// The queue that is served, and may have been idled for, has a request.
    fn go_on(&mut self, now: u64) {
        let is_out_of_time = self.slot.as_ref().is_some_and(|slot| now >= slot.until);
        let Some(slot) = &mut self.slot else { return };
        if slot.idle_until.is_none() {
            return;
        }
        slot.idle_until = None;
        if is_out_of_time {
            self.end_slot(now, End::Timeout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_one_group_and_priority_share_a_queue() {
        let process = |group, level| Process { group, class: 1, level };
        let processes = [process(1, 4), process(2, 4), process(1, 4), process(1, 0)];
        let bfq = Bfq::new(Parameters::DEFAULT, &[(0, 100), (0, 100)], &processes);
        assert_eq!(bfq.queue_of, [0, 1, 0, 2]);
    }
}
