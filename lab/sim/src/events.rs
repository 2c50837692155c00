//! What happens when: a heap by (time, order of arrival), so that equal times have one order; and what happens
//! in the simulation of hosts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that happens at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A CPU's burst or slice ends, if nothing has changed there since.
    Cpu { cpu: u8, stamp: u32 },
    /// A wake-up reaches a thread.
    Wake { thread: u32 },
    /// A queue's client has its next request by its rate, if it still has that stream.
    Arrive { queue: u32, stamp: u32 },
    /// A device has done a request.
    Ended { disk: u16, slot: u32 },
    /// A device's schedule is to be asked again.
    Ask { disk: u16 },
    /// The next change of the scenario.
    Change,
    /// A compute thread begins or ends, or its next period does.
    Burn { burner: u32, stamp: u32 },
    /// The policy is shown a snapshot.
    Sample,
}

/// An event with its place in the order.
#[derive(Debug, Clone, Copy)]
struct Entry<E> {
    at: u64,
    order: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<E> Eq for Entry<E> {}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// All that is to happen.
#[derive(Debug)]
pub(crate) struct Events<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    order: u64,
    /// The time of the event that was taken last, ns.
    pub(crate) now: u64,
}

impl<E> Default for Events<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), order: 0, now: 0 }
    }
}

impl<E: Copy> Events<E> {
    /// At `at`, or now if that is past.
    pub(crate) fn push(&mut self, at: u64, event: E) {
        self.order += 1;
        let at = at.max(self.now);
        self.heap.push(Reverse(Entry { at, order: self.order, event }));
    }

    /// So long from now.
    pub(crate) fn after(&mut self, ns: u64, event: E) {
        self.push(self.now.saturating_add(ns), event);
    }

    /// The next event before `until`, whose time is now.
    pub(crate) fn next(&mut self, until: u64) -> Option<E> {
        if self.heap.peek()?.0.at >= until {
            return None;
        }
        let entry = self.heap.pop()?.0;
        self.now = entry.at;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_one_time_come_in_their_order_and_time_does_not_go_back() {
        let mut events = Events::default();
        events.push(20, Event::Change);
        events.push(10, Event::Sample);
        events.push(10, Event::Wake { thread: 1 });
        events.push(10, Event::Wake { thread: 2 });
        assert_eq!(events.next(100), Some(Event::Sample));
        events.push(3, Event::Wake { thread: 3 });
        assert_eq!(events.next(100), Some(Event::Wake { thread: 1 }));
        assert_eq!(events.next(100), Some(Event::Wake { thread: 2 }));
        assert_eq!(events.next(100), Some(Event::Wake { thread: 3 }));
        assert_eq!(events.now, 10);
        assert_eq!(events.next(20), None);
        assert_eq!(events.next(21), Some(Event::Change));
        assert_eq!(events.next(21), None);
    }
}
