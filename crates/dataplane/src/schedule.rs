//! One schedule for all disks on a physical device, whichever IOThreads serve them.
//!
//! The scheduler (crate `qos`) is under a lock that an IOThread takes once a turn: it says what has
//! arrived and what has ended at its queues since, and is told what to start. What another thread's
//! queue is to start goes there by message. Messages are posted under the lock, and a queue's new
//! owner registers under it, so whoever gets a message has the queue or knows where it went.
//!
//! Whoever exchanges learns when to do so again though nothing happens. A queue that comes to a
//! thread has it exchange once, and a change of the schedule each owner: what waits for a time is
//! always known to somebody who will look.
//!
//! A disk's share and promise change in place. A disk that comes, leaves or changes its schedule
//! does so queue by queue, each when it has nothing in flight
//! ([`Pool::edit_drained`](crate::Pool)): no request is in two schedules.
//!
//! A request's deadline and the order of arrivals count from when its IOThread found it, to within a
//! turn.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rtvirtio_engine::Token;
use rtvirtio_qos::{
    Account, ClassId, Demand, Device, FlowId, Kind, Promise, Responses, Running, Scheduler, Share,
    Stalls, Started, Usage,
};
use rtvirtio_spec::serve::IoPriority;
use rtvirtio_units::{Bytes, Nanos};

use crate::clock::now;
use crate::key::{TableKey, from_token};

/// A request that waits for its time.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    pub(crate) token: Token,
    pub(crate) class: ClassId,
    pub(crate) kind: Kind,
    pub(crate) bytes: Bytes,
}

/// An IOThread that has queues of a schedule, as other threads reach it.
pub(crate) trait Owner: Send + Sync {
    /// A request of one of its queues is to start.
    fn start(&self, token: Token, running: Running);
    /// The schedule has been changed: it is to look at what comes of that.
    fn rescheduled(&self, schedule: Arc<Schedule>);
}

/// The schedule of a physical device.
pub struct Schedule(Mutex<State>);

struct State {
    scheduler: Scheduler,
    /// Who has a queue, by key.
    owners: Vec<Option<Arc<dyn Owner>>>,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule").finish_non_exhaustive()
    }
}

/// A schedule at one time.
#[derive(Debug, Clone, Copy)]
pub struct ScheduleStatus {
    /// The device, as its requests are charged.
    pub device: Device,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests on the device.
    pub running: u32,
    /// Background requests among them.
    pub background: u32,
    /// Background requests that may be there while promises are to be kept.
    pub background_bound: u32,
    /// How long these were withheld so far, to find out whether promised rates are wanted.
    pub withheld: Nanos,
    /// What the device did, and how long it took.
    pub usage: Usage,
    /// Times in which it ended nothing, on the monotonic clock.
    pub stalls: Stalls,
    /// How long it has ended nothing by now, if it is as long as a stall.
    pub stalled: Option<Nanos>,
}

/// What a class of a disk's requests has had since it joined its schedule.
#[derive(Debug, Clone, Copy, Default)]
pub struct ClassStatus {
    /// By kind, in the order of [`Kind::ALL`].
    pub accounts: [Account; Kind::ALL.len()],
    /// How its promise was kept.
    pub responses: Responses,
    /// Whether it would take more than it has.
    pub demand: Demand,
}

impl ClassStatus {
    fn add(&mut self, other: &Self) {
        for (all, one) in self.accounts.iter_mut().zip(&other.accounts) {
            all.requests += one.requests;
            all.bytes += one.bytes;
            all.cost += one.cost;
        }
        self.responses.in_time += other.responses.in_time;
        self.responses.late += other.responses.late;
        self.responses.late_in_stalls += other.responses.late_in_stalls;
    }
}

impl Schedule {
    /// Of a device on which nothing runs.
    #[must_use]
    pub fn new(device: Device) -> Arc<Self> {
        let state = State { scheduler: Scheduler::new(device), owners: Vec::new() };
        Arc::new(Self(Mutex::new(state)))
    }

    /// A disk on the device. It leaves when the member is dropped.
    #[must_use]
    pub fn join(self: &Arc<Self>, share: Share, promise: Option<Promise>) -> Option<Member> {
        let mut state = self.state();
        let flow = state.scheduler.add_flow(share);
        let class = state.scheduler.add_class(flow, promise)?;
        drop(state);
        Some(Member { schedule: Arc::clone(self), flow, class, tasks: Vec::new() })
    }

    /// Changes the device's service curve.
    pub(crate) fn set_device(self: &Arc<Self>, device: Device) {
        self.change(|scheduler, _| scheduler.set_device(device));
    }

    pub(crate) fn status(&self) -> ScheduleStatus {
        let scheduler = &self.state().scheduler;
        ScheduleStatus {
            device: *scheduler.device(),
            waiting: scheduler.waiting(),
            running: scheduler.running(),
            background: scheduler.background(),
            background_bound: scheduler.depth(),
            withheld: scheduler.withheld(),
            usage: scheduler.usage(),
            stalls: scheduler.stalls(),
            stalled: scheduler.stalled_for(Nanos::new(now())),
        }
    }

    /// The device's stalls; none: an IOThread has the schedule just now.
    pub(crate) fn stalls(&self) -> Option<Stalls> {
        Some(self.0.try_lock().ok()?.scheduler.stalls())
    }

    /// Changes something and has the owners of queues look at what comes of it.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut Scheduler, Nanos)) {
        let mut state = self.state();
        change(&mut state.scheduler, Nanos::new(now()));
        let mut notified: Vec<&Arc<dyn Owner>> = Vec::new();
        for owner in state.owners.iter().flatten() {
            if !notified.iter().any(|other| Arc::ptr_eq(other, owner)) {
                owner.rescheduled(Arc::clone(self));
                notified.push(owner);
            }
        }
    }

    /// Whose queue this is now.
    pub(crate) fn set_owner(&self, key: TableKey, owner: &Arc<dyn Owner>) {
        let at = key.0 as usize;
        let mut state = self.state();
        if state.owners.len() <= at {
            state.owners.resize_with(at + 1, || None);
        }
        state.owners[at] = Some(Arc::clone(owner));
    }

    /// The state, and how long another thread had it, ns.
    fn state_in_turn(&self) -> (MutexGuard<'_, State>, u64) {
        match self.0.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let began = now();
                let state = self.state();
                (state, now() - began)
            }
            Ok(state) => (state, 0),
            Err(TryLockError::Poisoned(poisoned)) => (poisoned.into_inner(), 0),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk's place in a schedule.
#[derive(Debug)]
pub struct Member {
    schedule: Arc<Schedule>,
    flow: FlowId,
    /// Of requests that are no task's.
    class: ClassId,
    tasks: Vec<(IoPriority, ClassId)>,
}

impl Member {
    pub(crate) const fn schedule(&self) -> &Arc<Schedule> {
        &self.schedule
    }

    /// Requests that the driver marks so get a promise of their own. It is the disk's all the same:
    /// a driver that marks others too exceeds only this.
    #[must_use]
    pub fn with_task(mut self, ioprio: IoPriority, promise: Promise) -> Self {
        let class = self.schedule.state().scheduler.add_class(self.flow, Some(promise));
        self.tasks.extend(class.map(|class| (ioprio, class)));
        self
    }

    /// Of requests whose header has this field.
    pub(crate) fn class(&self, ioprio: u32) -> ClassId {
        if self.tasks.is_empty() {
            return self.class;
        }
        let ioprio = IoPriority::from_header(ioprio);
        let task = self.tasks.iter().find(|(of, _)| Some(*of) == ioprio);
        task.map_or(self.class, |&(_, class)| class)
    }

    /// Changes its part of the device, for what waits, too. False: its tasks are others, and
    /// nothing has changed.
    pub(crate) fn set(
        &self,
        share: Share,
        promise: Option<Promise>,
        tasks: &[(IoPriority, Promise)],
    ) -> bool {
        let (known, wanted) = (self.tasks.iter(), tasks.iter());
        if !known.map(|(ioprio, _)| ioprio).eq(wanted.map(|(ioprio, _)| ioprio)) {
            return false;
        }
        self.schedule.change(|scheduler, now| {
            scheduler.set_share(self.flow, share, now);
            scheduler.set_promise(self.class, promise, now);
            for (&(_, class), &(_, promise)) in self.tasks.iter().zip(tasks) {
                scheduler.set_promise(class, Some(promise), now);
            }
        });
        true
    }

    /// Lets what waits come out as fast as its weight has it: the disk leaves.
    pub(crate) fn lift_limit(&self) {
        self.schedule.change(|scheduler, now| {
            scheduler.lift_limit(self.flow, now);
        });
    }

    /// Of all its requests, and of its tasks'.
    pub(crate) fn status(&self) -> (ClassStatus, Vec<(IoPriority, ClassStatus)>) {
        let scheduler = &self.schedule.state().scheduler;
        let of = |class| ClassStatus {
            accounts: scheduler.accounts(class).copied().unwrap_or_default(),
            responses: scheduler.responses(class).unwrap_or_default(),
            demand: scheduler.demand(class).unwrap_or_default(),
        };
        let tasks: Vec<_> = self.tasks.iter().map(|&(ioprio, class)| (ioprio, of(class))).collect();
        let mut all = of(self.class);
        tasks.iter().for_each(|(_, task)| all.add(task));
        (all, tasks)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // The thread that its last request ended at may not have said so yet.
        self.schedule.state().scheduler.remove(self.flow);
    }
}

impl Drop for SchedulerClient {
    fn drop(&mut self) {
        // It may be the only one that knows when something that waits for its time is to be started.
        if self.wake_at < u64::MAX {
            self.schedule.change(|_, _| ());
        }
    }
}

/// An IOThread's side of a schedule.
pub(crate) struct SchedulerClient {
    schedule: Arc<Schedule>,
    /// Its queues here.
    queues: u32,
    pending: Vec<PendingRequest>,
    ended: Vec<Running>,
    /// When to look again though nothing happens, ns.
    wake_at: u64,
}

impl SchedulerClient {
    pub(crate) const fn new(schedule: Arc<Schedule>) -> Self {
        Self { schedule, queues: 0, pending: Vec::new(), ended: Vec::new(), wake_at: u64::MAX }
    }

    pub(crate) fn is_of(&self, schedule: &Arc<Schedule>) -> bool {
        Arc::ptr_eq(&self.schedule, schedule)
    }

    /// A queue comes to this thread. What it waits for, only the thread that it left may know.
    pub(crate) fn enter(&mut self, key: TableKey, me: &Arc<dyn Owner>) {
        self.queues += 1;
        self.schedule.set_owner(key, me);
        self.look();
    }

    /// Exchanges in the next turn, whatever happens.
    pub(crate) const fn look(&mut self) {
        self.wake_at = 0;
    }

    /// A queue leaves it.
    pub(crate) const fn leave(&mut self) {
        self.queues -= 1;
    }

    /// Whether it can go.
    pub(crate) const fn is_unused(&self) -> bool {
        self.queues == 0 && !self.has_news()
    }

    /// Takes what has happened at a queue.
    pub(crate) fn take(&mut self, pending: &mut Vec<PendingRequest>, ended: &mut Vec<Running>) {
        self.pending.append(pending);
        self.ended.append(ended);
    }

    /// Whether there is anything to exchange at that time.
    pub(crate) const fn is_due(&self, now: u64) -> bool {
        self.has_news() || now >= self.wake_at
    }

    /// Whether something has happened that the schedule does not know of.
    pub(crate) const fn has_news(&self) -> bool {
        !self.pending.is_empty() || !self.ended.is_empty()
    }

    pub(crate) const fn wake_at(&self) -> u64 {
        self.wake_at
    }

    /// Says what has happened, and takes what queues of this thread are to start into `to_start`;
    /// the others' threads are told. How long another thread had the schedule, ns.
    pub(crate) fn exchange(
        &mut self,
        me: &Arc<dyn Owner>,
        to_start: &mut Vec<(Token, Running)>,
        now: u64,
    ) -> u64 {
        let time = Nanos::new(now);
        let (mut guard, waited) = self.schedule.state_in_turn();
        let State { scheduler, owners } = &mut *guard;
        for running in self.ended.drain(..) {
            scheduler.complete(running, time);
        }
        let mut hand = |Started { ticket, running }| {
            let token = Token(ticket);
            let owner = owners.get(from_token(token).0.0 as usize).and_then(Option::as_ref);
            match owner {
                Some(owner) if !Arc::ptr_eq(owner, me) => owner.start(token, running),
                _ => to_start.push((token, running)),
            }
        };
        let has_room = scheduler.has_room_for(self.pending.len());
        for PendingRequest { token, class, kind, bytes } in self.pending.drain(..) {
            let request = (token.0, kind, bytes);
            if has_room && let Some(started) = scheduler.start_at_once(class, request, time) {
                hand(started);
            } else {
                let taken = scheduler.submit(class, request, time);
                debug_assert!(taken, "a class is there as long as its disk");
            }
        }
        while let Some(started) = scheduler.next(time) {
            hand(started);
        }
        self.wake_at = scheduler.wake_at().map_or(u64::MAX, Nanos::get);
        waited
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    #[derive(Default)]
    struct Asked(AtomicU32);

    impl Owner for Asked {
        fn start(&self, _: Token, _: Running) {}

        fn rescheduled(&self, _: Arc<Schedule>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// A queue leaves a thread that has passed on its last word, and knows alone when what waits is to be started.
    #[test]
    fn client_that_goes_has_others_look_for_what_waits_for_its_time() {
        let request = Nanos::from_micros(250);
        let device =
            rtvirtio_qos::Device { channels: 1, request, kib: Nanos::ZERO, flush: request };
        for (wake_at, looks) in [(u64::MAX, 0), (1_000, 1)] {
            let schedule = Schedule::new(device);
            let owner = Arc::new(Asked::default());
            let as_owner: Arc<dyn Owner> = owner.clone();
            let mut client = SchedulerClient::new(Arc::clone(&schedule));
            client.enter(TableKey(0), &as_owner);
            client.leave();
            client.wake_at = wake_at;
            assert!(client.is_unused());
            drop(client);
            assert_eq!(owner.0.load(Relaxed), looks);
        }
    }
}
