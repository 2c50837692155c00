//! One schedule for all disks on a physical device, whichever IOThreads serve them.
//!
//! The scheduler (room `qos`) is under a lock that an IOThread takes once a turn: it says what has
//! arrived and what has ended at its queues since, and is told what to start. What another thread's
//! queue is to start goes there by letter. Letters are posted under the lock, and a queue's new
//! owner registers under it, so whoever gets a letter has the queue or knows where it went.
//!
//! A request's deadline and the order of arrivals count from when its IOThread found it, to within a
//! turn.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtvirtio_engine::Token;
use rtvirtio_qos::{ClassId, Device, FlowId, Kind, Promise, Running, Scheduler, Share, Started};
use rtvirtio_units::{Bytes, Nanos};

use crate::iothread::Letter;
use crate::mailbox::Sender;
use crate::queue::{QueueKey, from_token};

/// A request that waits for its time.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) token: Token,
    pub(crate) class: ClassId,
    pub(crate) kind: Kind,
    pub(crate) bytes: Bytes,
}

/// The schedule of a physical device.
pub struct Schedule(Mutex<State>);

struct State {
    scheduler: Scheduler,
    /// Who has a queue, by key.
    owners: Vec<Option<Sender<Letter>>>,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule").finish_non_exhaustive()
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
        Some(Member { schedule: Arc::clone(self), flow, class })
    }

    /// Whose queue this is now.
    pub(crate) fn settle(&self, key: QueueKey, owner: &Sender<Letter>) {
        let at = key.0 as usize;
        let mut state = self.state();
        if state.owners.len() <= at {
            state.owners.resize_with(at + 1, || None);
        }
        state.owners[at] = Some(owner.clone());
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
    class: ClassId,
}

impl Member {
    pub(crate) const fn schedule(&self) -> &Arc<Schedule> {
        &self.schedule
    }

    /// Of its requests.
    pub(crate) const fn class(&self) -> ClassId {
        self.class
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let removed = self.schedule.state().scheduler.remove(self.flow);
        debug_assert!(removed, "a disk's queues end before it");
    }
}

/// An IOThread's side of a schedule.
pub(crate) struct Board {
    schedule: Arc<Schedule>,
    /// Its queues here.
    queues: u32,
    asks: Vec<Ask>,
    ended: Vec<Running>,
    /// When to look again though nothing happens, ns.
    wake_at: u64,
}

impl Board {
    pub(crate) const fn new(schedule: Arc<Schedule>) -> Self {
        Self { schedule, queues: 0, asks: Vec::new(), ended: Vec::new(), wake_at: u64::MAX }
    }

    pub(crate) fn is_of(&self, schedule: &Arc<Schedule>) -> bool {
        Arc::ptr_eq(&self.schedule, schedule)
    }

    /// A queue comes to this thread.
    pub(crate) fn enter(&mut self, key: QueueKey, me: &Sender<Letter>) {
        self.queues += 1;
        self.schedule.settle(key, me);
    }

    /// A queue leaves it.
    pub(crate) const fn leave(&mut self) {
        self.queues -= 1;
    }

    /// Whether it can go.
    pub(crate) const fn is_unused(&self) -> bool {
        self.queues == 0 && self.asks.is_empty() && self.ended.is_empty()
    }

    /// Takes what has happened at a queue.
    pub(crate) fn take(&mut self, asks: &mut Vec<Ask>, ended: &mut Vec<Running>) {
        self.asks.append(asks);
        self.ended.append(ended);
    }

    /// Whether there is anything to exchange at that time.
    pub(crate) const fn is_due(&self, now: u64) -> bool {
        !self.asks.is_empty() || !self.ended.is_empty() || now >= self.wake_at
    }

    pub(crate) const fn wake_at(&self) -> u64 {
        self.wake_at
    }

    /// Says what has happened, and takes what queues of this thread are to start into `granted`;
    /// the others' threads are told.
    pub(crate) fn exchange(
        &mut self,
        me: &Sender<Letter>,
        granted: &mut Vec<(Token, Running)>,
        now: u64,
    ) {
        let time = Nanos::new(now);
        let mut guard = self.schedule.state();
        let State { scheduler, owners } = &mut *guard;
        for running in self.ended.drain(..) {
            scheduler.complete(running, time);
        }
        for Ask { token, class, kind, bytes } in self.asks.drain(..) {
            let taken = scheduler.submit(class, (token.0, kind, bytes), time);
            debug_assert!(taken, "a class is there as long as its disk");
        }
        while let Some(Started { ticket, running }) = scheduler.next(time) {
            let token = Token(ticket);
            let owner = owners.get(from_token(token).0.0 as usize).and_then(Option::as_ref);
            match owner {
                Some(owner) if !owner.is(me) => {
                    let _ = owner.post(Letter::Granted { token, running });
                }
                _ => granted.push((token, running)),
            }
        }
        self.wake_at = scheduler.wake_at().map_or(u64::MAX, Nanos::get);
    }
}
