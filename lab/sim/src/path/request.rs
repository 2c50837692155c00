//! A request on its way, and what a scheduler is to the path.

use std::collections::VecDeque;

/// A request in one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// Its slot in the world.
    pub(super) id: u32,
    /// The process that issued it, as this tier sees it.
    pub(super) process: u32,
    /// Where it begins.
    pub(super) position: u32,
    /// Its length.
    pub(super) sectors: u32,
    /// Writes (synchronous, as direct I/O is).
    pub(super) write: bool,
    /// When it came to this tier's scheduler, ns.
    pub(super) at: u64,
}

/// A device's scheduler. Times are ns, and never go back.
pub(super) trait Elevator: std::fmt::Debug {
    /// Whether `process` gets any free tag for one more request, or the first one alone.
    fn admits(&self, process: u32, write: bool) -> bool {
        let _ = (process, write);
        true
    }

    /// Takes a request.
    fn insert(&mut self, now: u64, request: Request);

    /// Gives the next one to the driver, if it wants to.
    fn dispatch(&mut self, now: u64) -> Option<Request>;

    /// Whether one waits here.
    fn has_work(&self) -> bool;

    /// The driver has done `request`, which it had got at `started`. Returns whether the scheduler asks to be
    /// asked.
    fn completed(&mut self, now: u64, request: &Request, started: u64) -> bool;

    /// When [`Elevator::timer`] is to be called, if at all.
    fn timer_at(&self) -> Option<u64> {
        None
    }

    /// It is time.
    fn timer(&mut self, now: u64) {
        let _ = now;
    }
}

/// First come first served: no scheduler.
#[derive(Debug, Default)]
pub(super) struct Fifo(VecDeque<Request>);

impl Elevator for Fifo {
    fn insert(&mut self, _now: u64, request: Request) {
        self.0.push_back(request);
    }

    fn dispatch(&mut self, _now: u64) -> Option<Request> {
        self.0.pop_front()
    }

    fn has_work(&self) -> bool {
        !self.0.is_empty()
    }

    fn completed(&mut self, _now: u64, _request: &Request, _started: u64) -> bool {
        !self.0.is_empty()
    }
}
