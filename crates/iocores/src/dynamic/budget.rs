//! How many queues may move.

use std::collections::{BTreeMap, VecDeque};

use rtvirtio_units::Nanos;

use crate::{QueueId, Snapshot};

const SECOND: Nanos = Nanos::from_millis(1_000);

/// A queue moves at most this often: a move costs some 10 µs and what the caches held.
const REST: Nanos = Nanos::from_millis(250);

/// Most moves in any second.
const A_SECOND: usize = 50;

/// Most moves of one decision.
const AT_ONCE: usize = 10;

/// What has moved lately.
#[derive(Debug, Default)]
pub(super) struct Budget {
    moved: BTreeMap<QueueId, Nanos>,
    recent: VecDeque<Nanos>,
}

impl Budget {
    /// Forgets what does not count any more.
    pub(super) fn pass(&mut self, now: Nanos) {
        while self.recent.front().is_some_and(|&at| now.saturating_sub(at) >= SECOND) {
            self.recent.pop_front();
        }
        self.moved.retain(|_, &mut at| now.saturating_sub(at) < REST);
    }

    /// How many may move now.
    pub(super) fn left(&self) -> usize {
        AT_ONCE.min(A_SECOND.saturating_sub(self.recent.len()))
    }

    /// How many may move now to balance the threads that there are: fewer, so that a load that
    /// changes faster than it can be followed is not chased.
    pub(super) fn left_to_balance(&self, snapshot: &Snapshot) -> usize {
        let a_second = (snapshot.queues.len() / 8).clamp(8, A_SECOND);
        self.left().min(a_second.saturating_sub(self.recent.len()))
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
