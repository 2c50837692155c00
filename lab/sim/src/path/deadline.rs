//! mq-deadline (kernel `block/mq-deadline.c`): reads before writes, each in the order of sectors, in batches,
//! unless one has waited too long.
//!
//! Offsets are random here, so the order of sectors is left out: within a direction it is the order of arrival.
//! Nothing waits while the driver has tags, and then the order is that of arrival altogether.

use std::collections::VecDeque;

use super::request::{Elevator, Request};

/// A write that has waited so long is served next (`write_expire`, ns).
const WRITE_EXPIRE: u64 = 5_000_000_000;
/// Requests of one direction in a row (`fifo_batch`).
const BATCH: u32 = 16;
/// Times that reads may be preferred while writes wait (`writes_starved`).
const STARVED: u32 = 2;

/// The scheduler. Direction 0 reads, 1 writes.
#[derive(Debug, Default)]
pub(super) struct MqDeadline {
    waiting: [VecDeque<Request>; 2],
    direction: usize,
    batched: u32,
    starved: u32,
}

impl Elevator for MqDeadline {
    fn insert(&mut self, _now: u64, request: Request) {
        self.waiting[usize::from(request.write)].push_back(request);
    }

    fn dispatch(&mut self, now: u64) -> Option<Request> {
        let has = |d: usize| !self.waiting[d].is_empty();
        let go_on = has(self.direction) && self.batched < BATCH;
        if !go_on {
            let late = self.waiting[1].front().is_some_and(|w| w.at + WRITE_EXPIRE < now);
            let writes = has(1) && (!has(0) || self.starved >= STARVED || late);
            if has(0) && has(1) {
                self.starved = if writes { 0 } else { self.starved + 1 };
            }
            self.direction = usize::from(writes);
            self.batched = 0;
        }
        self.batched += 1;
        self.waiting[self.direction].pop_front()
    }

    fn has_work(&self) -> bool {
        self.waiting.iter().any(|w| !w.is_empty())
    }

    fn completed(&mut self, _now: u64, _request: &Request, _started: u64) -> bool {
        self.has_work()
    }
}
