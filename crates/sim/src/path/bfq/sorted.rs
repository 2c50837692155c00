//! bfq: the requests of a queue, and which of them is next: a one-way elevator, and once in each service the
//! oldest if it has waited for too long.

use std::collections::VecDeque;

use crate::path::request::Request;

/// `bfq_back_max`, sectors, and `bfq_back_penalty`.
const BACK_MAX: u32 = 32 * 1024;
const BACK_PENALTY: u32 = 2;
/// `bfq_fifo_expire` of synchronous requests, ns.
const EXPIRY: u64 = 125_000_000;

/// A queue's requests.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    /// In order of arrival.
    requests: VecDeque<Request>,
    /// Where the next one is, if there is one (`next_rq`).
    next: usize,
    /// The oldest has been looked at in this service (`fifo_expire`).
    looked: bool,
}

impl Sorted {
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn next(&self) -> Option<&Request> {
        self.requests.get(self.next)
    }

    /// The queue's service begins.
    pub(super) const fn begin_service(&mut self) {
        self.looked = false;
    }

    /// Takes a request, while the device is at `head` (`bfq_add_request`). Returns whether it is the next one.
    pub(super) fn add(&mut self, request: Request, head: u32) -> bool {
        let is_next = self.next().is_none_or(|next| is_nearer(&request, next, head));
        if is_next {
            self.next = self.requests.len();
        }
        self.requests.push_back(request);
        is_next
    }

    /// Takes the next one out (`bfq_remove_request`, `bfq_find_next_rq`).
    pub(super) fn take(&mut self, now: u64) -> Option<Request> {
        let taken = self.requests.remove(self.next)?;
        let was_oldest = self.next == 0;
        self.next = 0;
        let looks = !std::mem::replace(&mut self.looked, true);
        if looks && !was_oldest && self.requests.front().is_some_and(|r| r.at + EXPIRY <= now) {
            return Some(taken);
        }
        let head = taken.position;
        for index in 1..self.requests.len() {
            if is_nearer(&self.requests[index], &self.requests[self.next], head) {
                self.next = index;
            }
        }
        Some(taken)
    }
}

/// Whether `request` is better served now than `other`, from `head` on (`bfq_choose_req`): what is ahead by its
/// distance, what is a little behind by a multiple of it, the rest from the start.
fn is_nearer(request: &Request, other: &Request, head: u32) -> bool {
    let rank = |r: &Request| {
        if r.position >= head {
            (false, r.position - head)
        } else if r.position + BACK_MAX >= head {
            (false, (head - r.position) * BACK_PENALTY)
        } else {
            (true, r.position)
        }
    };
    rank(request) < rank(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: u32, position: u32, at: u64) -> Request {
        Request { id, process: 0, position, sectors: 8, write: false, at }
    }

    fn order(sorted: &mut Sorted, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| sorted.take(now)).map(|r| r.id).collect()
    }

    #[test]
    fn elevator_goes_on_then_a_little_back_then_to_the_start() {
        let mut sorted = Sorted::default();
        let head = 1_000_000;
        for (id, position) in
            [(0, 10), (1, head + 50_000), (2, head - 20_000), (3, 700_000), (4, head + 30_000)]
        {
            sorted.add(request(id, position, 0), head);
        }
        // 20,000 back count as 40,000; from the one at 980,000 on, both ahead are still ahead.
        assert_eq!(order(&mut sorted, 0), [4, 1, 0, 3, 2]);
    }

    #[test]
    fn oldest_is_looked_at_once_in_each_service() {
        let mut sorted = Sorted::default();
        for (id, position) in [(0, 900), (1, 100), (2, 200), (3, 300)] {
            sorted.add(request(id, position, u64::from(id)), 0);
        }
        // Its time comes after the first has been taken.
        assert_eq!(sorted.take(EXPIRY - 1).map(|r| r.id), Some(1));
        assert_eq!(sorted.take(EXPIRY).map(|r| r.id), Some(2));
        sorted.begin_service();
        assert_eq!(sorted.take(EXPIRY).map(|r| r.id), Some(3));
        sorted.add(request(4, 950, 5), 308);
        sorted.add(request(5, 400, 5), 308);
        sorted.begin_service();
        assert_eq!(order(&mut sorted, EXPIRY), [5, 0, 4]);
    }
}
