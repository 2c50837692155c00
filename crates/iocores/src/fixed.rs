//! Policies that do not look at the load: the number of IOThreads is the operator's.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::{Action, Decision, Policy, QueueId, Snapshot, ThreadId};

/// Changes nothing.
#[derive(Debug)]
pub(crate) struct Static;

impl Policy for Static {
    fn step(&mut self, _: &Snapshot) -> Vec<Decision> {
        Vec::new()
    }
}

/// Keeps the numbers of queues of the unlocked IOThreads within one of each other, with the fewest
/// moves that do.
///
/// What QEMU's `iothread-vq-mapping` does with IOThreads that are named without queues (QEMU 9.0,
/// `hw/block/virtio-blk.c`), kept up while queues come and go.
#[derive(Debug)]
pub(crate) struct RoundRobin;

impl Policy for RoundRobin {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        let unlocked = snapshot.threads.iter().filter(|thread| !thread.locked);
        let mut held: BTreeMap<ThreadId, Vec<QueueId>> =
            unlocked.map(|thread| (thread.id, Vec::new())).collect();
        for queue in &snapshot.queues {
            if let Some(queues) = held.get_mut(&queue.thread) {
                queues.push(queue.id);
            }
        }
        let total: usize = held.values().map(Vec::len).sum();
        let Some(fair) = total.checked_div(held.len()) else { return Vec::new() };
        let (further, threads) = (total % held.len(), held.len());

        // Those that have most keep what does not divide: fewest moves.
        let mut held: Vec<_> = held.into_iter().collect();
        held.sort_by_key(|(_, queues)| Reverse(queues.len()));
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (place, (thread, mut queues)) in held.into_iter().enumerate() {
            let share = fair + usize::from(place < further);
            let has = queues.len();
            from.extend(queues.drain(share.min(has)..).map(|queue| (queue, thread, has)));
            to.extend(std::iter::repeat_n((thread, has), share.saturating_sub(has)));
        }
        let moves = from.into_iter().zip(to);
        let decision = |((queue, from, has), (to, had))| {
            let (ThreadId(from), ThreadId(into)) = (from, to);
            let reason = format!(
                "IOThread {from} has {has} queues and IOThread {into} {had}: \
                 {total} queues are spread over {threads} IOThreads"
            );
            Decision { action: Action::MoveQueue { queue, to }, reason }
        };
        moves.map(decision).collect()
    }
}
