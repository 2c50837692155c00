//! The requests of one process, and what its past says of it.

use std::collections::VecDeque;

use crate::path::request::Request;

/// `back_seek_max`, sectors, and `back_seek_penalty`: what lies so little behind the head is served as if it were so
/// many times as far ahead of it (kernel Documentation/block/bfq-iosched.rst).
const BACK_MAX: u32 = 32 * 1024;
const BACK_PENALTY: u32 = 2;
/// `fifo_expire_sync`: a request that has waited so long is next, ns; one in each slot.
const EXPIRY: u64 = 125_000_000;
/// A request this far from the last one's end is a seek, sectors, unless it is long itself.
const SEEK: u32 = 800;
/// Sectors of a long request, which makes up for a seek on flash.
pub(super) const LONG: u32 = 64;
/// Of the last 32 requests, seeks that make a process seeky.
const SEEKY: u32 = 20;
/// Think times are averaged with this weight of a new one.
const THINK_GAIN: f64 = 1.0 / 8.0;
/// How many think times are needed before the average says something.
const THINK_SAMPLES: u32 = 3;

/// The requests, in the order of a one-way elevator.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// In order of arrival.
    waiting: VecDeque<Request>,
    /// Where the next one is.
    next: usize,
    /// The oldest one was looked at in this slot.
    looked: bool,
}

impl Requests {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn next(&self) -> Option<&Request> {
        self.waiting.get(self.next)
    }

    /// Sectors of the next one.
    pub(super) fn next_sectors(&self) -> Option<u64> {
        self.next().map(|request| u64::from(request.sectors))
    }

    pub(super) const fn begin_slot(&mut self) {
        self.looked = false;
    }

    /// Takes a request while the device's head is at `head`.
    pub(super) fn add(&mut self, request: Request, head: u32) {
        if self.next().is_none_or(|next| distance(&request, head) < distance(next, head)) {
            self.next = self.waiting.len();
        }
        self.waiting.push_back(request);
    }

    /// Takes the next one out.
    pub(super) fn take(&mut self, now: u64) -> Option<Request> {
        let taken = self.waiting.remove(self.next)?;
        let was_oldest = self.next == 0;
        let is_late = self.waiting.front().is_some_and(|oldest| oldest.at + EXPIRY <= now);
        let looked = std::mem::replace(&mut self.looked, true);
        self.next = if is_late && !was_oldest && !looked {
            0
        } else {
            let order = |(_, request): &(usize, &Request)| distance(request, taken.position);
            self.waiting.iter().enumerate().min_by_key(order).map_or(0, |(index, _)| index)
        };
        Some(taken)
    }
}

/// How far ahead of the head a request lies, as the elevator counts it.
fn distance(request: &Request, head: u32) -> u64 {
    let wrapped = 1 << 40;
    match request.position.checked_sub(head) {
        Some(ahead) => u64::from(ahead),
        None if head - request.position <= BACK_MAX => {
            u64::from((head - request.position) * BACK_PENALTY)
        }
        None => wrapped + u64::from(request.position),
    }
}

/// What a process's requests have been like.
#[derive(Debug)]
pub(super) struct History {
    /// Where the last request ended.
    last_position: Option<u32>,
    /// A bit for each of the last requests: whether it was a seek.
    seeks: u32,
    /// The mean time from the end of the last request to the next one while nothing else is under way, ns.
    think: f64,
    think_samples: u32,
}

impl History {
    pub(super) const fn new() -> Self {
        Self { last_position: None, seeks: 1, think: 0.0, think_samples: 0 }
    }

    pub(super) fn note_position(&mut self, request: &Request) {
        let far = |last: u32| request.position.abs_diff(last) > SEEK;
        let is_seek = self.last_position.is_some_and(far) && request.sectors < LONG;
        self.seeks = self.seeks << 1 | u32::from(is_seek);
        self.last_position = Some(request.position + request.sectors);
    }

    /// `time`: since its last request ended, at most twice as long as the device idles.
    pub(super) fn note_think_time(&mut self, time: u64) {
        let gain = if self.think_samples == 0 { 1.0 } else { THINK_GAIN };
        self.think += (time as f64 - self.think) * gain;
        self.think_samples += 1;
    }

    pub(super) const fn is_seeky(&self) -> bool {
        self.seeks.count_ones() >= SEEKY
    }

    /// It is back before the device has idled for half of what it may.
    pub(super) fn thinks_shortly(&self, slice_idle: u64) -> bool {
        self.think_samples < THINK_SAMPLES || self.think <= slice_idle as f64 / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(id: u32, position: u32, at: u64) -> Request {
        Request { id, process: 0, position, sectors: 8, write: false, at }
    }

    #[test]
    fn requests_are_taken_ahead_of_the_head_then_from_the_start() {
        let mut requests = Requests::default();
        for (id, position) in [(0, 100_000), (1, 500_000), (2, 90_000), (3, 450_000), (4, 0)] {
            requests.add(at(id, position, 0), 100_000);
        }
        let order: Vec<_> =
            std::iter::from_fn(|| requests.take(0)).map(|request| request.id).collect();
        // What lies a little behind comes before what lies far ahead.
        assert_eq!(order, [0, 2, 3, 1, 4]);
    }

    #[test]
    fn one_that_has_waited_too_long_is_next_once_in_each_slot() {
        let mut requests = Requests::default();
        for (id, position) in [(0, 500_000), (1, 1_000), (2, 2_000), (3, 400_000)] {
            requests.add(at(id, position, 0), 0);
        }
        requests.begin_slot();
        assert_eq!(requests.take(EXPIRY).unwrap().id, 1);
        assert_eq!(requests.take(EXPIRY).unwrap().id, 0);
        assert_eq!(requests.take(EXPIRY).unwrap().id, 2);
    }

    #[test]
    fn process_is_seeky_by_most_of_its_last_requests() {
        let mut history = History::new();
        for n in 0..40 {
            history.note_position(&at(n, n * 100_000, 0));
        }
        assert!(history.is_seeky());
        for n in 0..20 {
            history.note_position(&at(n, 8 * n, 0));
        }
        assert!(!history.is_seeky());
    }

    #[test]
    fn think_time_is_short_until_it_is_known() {
        let mut history = History::new();
        let idle = 8_000_000;
        history.note_think_time(2 * idle);
        assert!(history.thinks_shortly(idle));
        (0..3).for_each(|_| history.note_think_time(2 * idle));
        assert!(!history.thinks_shortly(idle));
        (0..30).for_each(|_| history.note_think_time(100_000));
        assert!(history.thinks_shortly(idle));
    }
}
