//! How many queues may move.

use std::collections::{BTreeMap, VecDeque};

use rtvirtio_units::Nanos;

use crate::{QueueId, Snapshot};

const SECOND: Nanos = Nanos::from_millis(1_000);

/// A queue moves at most this often: a move costs some 10 µs and what the caches held. No longer than
/// the number of IOThreads rests after an addition, or a new one could not be split in its turn.
const REST: Nanos = super::AFTER_ADDITION;

/// Most moves in any second, and of one decision, for each [`FOUR`] IOThreads that there may be:
/// of the time of these, 0.025 %.
const A_SECOND: usize = 50;
const AT_ONCE: usize = 10;
const FOUR: usize = 4;

/// What has moved lately.
#[derive(Debug)]
pub(super) struct Budget {
    a_second: usize,
    at_once: usize,
    moved: BTreeMap<QueueId, Nanos>,
    recent: VecDeque<Nanos>,
}

impl Budget {
    /// For so many IOThreads at most.
    pub(super) fn new(most: usize) -> Self {
        let fours = most.div_ceil(FOUR).max(1);
        Self {
            a_second: A_SECOND * fours,
            at_once: AT_ONCE * fours,
            moved: BTreeMap::new(),
            recent: VecDeque::new(),
        }
    }

    /// Forgets what does not count any more.
    pub(super) fn pass(&mut self, now: Nanos) {
        while self.recent.front().is_some_and(|&at| now.saturating_sub(at) >= SECOND) {
            self.recent.pop_front();
        }
        self.moved.retain(|_, &mut at| now.saturating_sub(at) < REST);
    }

    /// How many may move now.
    pub(super) fn left(&self) -> usize {
        self.at_once.min(self.a_second.saturating_sub(self.recent.len()))
    }

    /// How many may move now to balance the threads that there are: fewer, so that a load that
    /// changes faster than it can be followed is not chased.
    pub(super) fn left_to_balance(&self, snapshot: &Snapshot) -> usize {
        let a_second = (snapshot.queues.len() / 8).clamp(8, self.a_second);
        self.left().min(a_second.saturating_sub(self.recent.len()))
    }

    /// How many may move now for nothing that is known: half of these.
    pub(super) fn left_to_spread(&self, snapshot: &Snapshot) -> usize {
        self.left_to_balance(snapshot).saturating_sub(self.recent.len()) / 2
    }

    /// Whether nothing moved for a second.
    pub(super) fn is_fresh(&self) -> bool {
        self.recent.is_empty()
    }

    /// Whether this queue may.
    pub(super) fn may_move(&self, queue: QueueId) -> bool {
        !self.moved.contains_key(&queue)
    }

    /// It moves.
    pub(super) fn moves(&mut self, queue: QueueId, now: Nanos) {
        self.moved.insert(queue, now);
        self.recent.push_back(now);
    }
}
