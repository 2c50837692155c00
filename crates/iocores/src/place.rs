//! Which queue goes where: longest processing time first, on what each queue took of a thread.
//!
//! Graham's rule (1969): by falling load, each to the thread that has least. At most 4/3 of the
//! best possible largest load, in O(queues log threads).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use rtvirtio_units::Nanos;

use crate::sample::{QueueLoad, Sample};
use crate::{QueueId, ThreadId, VmId};

/// Below this share of a thread a queue does not count as loaded.
pub(crate) const LOADED: f64 = 0.02;

/// What a queue whose requests wait has of an IOThread in a few samples, as a multiple of an equal part, that may as
/// well be its turn in them.
const NEAR_EQUAL_PART: std::ops::RangeInclusive<f64> = 0.5..=2.0;

/// A queue that has so much of what another has would take as much.
const MIN_TAKER_PART: f64 = 0.8;

/// What an idle queue counts, so that these spread too.
const IDLE: f64 = 0.001;

/// A load as a number that has an order: millionths of a thread.
fn parts(load: f64) -> u64 {
    (load.max(IDLE) * 1e6) as u64
}

/// What queues have of an IOThread.
pub(crate) fn load(queues: &[QueueLoad]) -> f64 {
    queues.iter().map(|queue| queue.busy).sum()
}

/// What the queues of an IOThread that would take more of it get of it each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FairShare {
    /// How many these are.
    takers: usize,
    /// What they have between them.
    between: f64,
}

impl FairShare {
    /// Of several, one can go and leave the IOThread as full as it is.
    pub(crate) fn is_contended(self) -> bool {
        self.takers > 1
    }

    /// In an IOThread that is not `full`, none would take more. In one that is, those that have most have about the
    /// same: it serves queues by turns.
    pub(crate) fn of(queues: &[QueueLoad], full: f64) -> Self {
        let all = load(queues);
        if all < full {
            return Self { takers: 0, between: 1.0 - all };
        }
        let (takers, take) =
            Self::takers(queues).fold((0, 0.0), |(n, sum), queue| (n + 1, sum + queue.busy));
        Self { takers, between: (1.0 - (all - take)).max(0.0) }
    }

    /// Those of a full IOThread.
    pub(crate) fn takers(queues: &[QueueLoad]) -> impl Iterator<Item = &QueueLoad> {
        let most = queues.iter().map(|queue| queue.busy).fold(0.0, f64::max);
        queues.iter().filter(move |queue| queue.busy >= MIN_TAKER_PART * most)
    }

    /// What each gets if there are so many more.
    pub(crate) fn with(self, more: usize) -> f64 {
        self.between / (self.takers + more) as f64
    }
}

/// Queues of an IOThread that are served by turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turns {
    /// How many: those that have a load, or wait.
    pub(crate) queues: usize,
    /// For how long requests of those that wait do, on average.
    pub(crate) delay: Nanos,
}

impl Turns {
    pub(crate) fn of(queues: &[QueueLoad]) -> Self {
        let waiting = || queues.iter().filter(|queue| queue.waits());
        let sum = |of: fn(&QueueLoad) -> u64| waiting().map(of).fold(0, u64::saturating_add);
        let delay = sum(|queue| queue.waited.get()) / sum(|queue| queue.requests).max(1);
        let takes_turns = |queue: &&QueueLoad| queue.busy >= LOADED || queue.waits();
        Self { queues: queues.iter().filter(takes_turns).count(), delay: Nanos::new(delay) }
    }

    /// What the delay would be with one more.
    pub(crate) fn with_one_more(self) -> Nanos {
        let each = self.delay.get() / self.queues.max(1) as u64;
        Nanos::new(each.saturating_mul(self.queues as u64 + 1))
    }
}

/// Queues by the IOThread that serves them, with one entry for each IOThread.
pub(crate) fn groups(sample: &Sample) -> BTreeMap<ThreadId, Vec<QueueLoad>> {
    let mut groups: BTreeMap<_, _> =
        sample.threads.iter().map(|thread| (thread.id, Vec::new())).collect();
    for queue in &sample.queues {
        if let Some(group) = groups.get_mut(&queue.thread) {
            group.push(*queue);
        }
    }
    groups
}

/// Falling by load, the first id first.
fn sort(queues: &mut [QueueLoad]) {
    queues.sort_by_key(|queue| (Reverse(parts(queue.busy)), queue.id));
}

/// A part of a thread's queues that goes, when they are split in parts of about the same load.
#[derive(Debug, Default)]
pub(crate) struct Split {
    /// Those that go.
    pub(crate) go: Vec<QueueLoad>,
    /// The load of those that go.
    pub(crate) load: f64,
    /// That of those that stay.
    pub(crate) stays: f64,
}

/// Splits `queues` in two: of both parts the one with fewer queues goes.
pub(crate) fn split(queues: &[QueueLoad], movable: impl Fn(QueueId) -> bool) -> Split {
    parts_that_go(queues, 2, movable).pop().unwrap_or_default()
}

/// Of `queues`, in so many parts of about the same load, those that go: all but the one with most
/// queues. Those that are not `movable`, and those without load, stay. One that stands may not have
/// been served lately: it counts an equal part at least; and one whose requests wait just that, if it had about as
/// much. Of those that count the same, a VM's go to different parts: they mostly become busy together.
pub(crate) fn parts_that_go(
    queues: &[QueueLoad],
    count: usize,
    movable: impl Fn(QueueId) -> bool,
) -> Vec<Split> {
    #[derive(Clone, Default)]
    struct Bin {
        weight: f64,
        load: f64,
        held: Vec<QueueLoad>,
        /// How many of each VM.
        vms: BTreeMap<VmId, usize>,
    }
    let counts = |queue: &QueueLoad| queue.busy >= LOADED || queue.backlogged;
    let equal = 1.0 / queues.iter().filter(|queue| counts(queue)).count().max(1) as f64;
    let weight = |queue: &QueueLoad| {
        if queue.backlogged {
            queue.busy.max(equal)
        } else if queue.waits() && NEAR_EQUAL_PART.contains(&(queue.busy / equal)) {
            equal
        } else {
            queue.busy
        }
    };
    let (mut free, fixed): (Vec<_>, Vec<_>) =
        queues.iter().filter(|queue| counts(queue)).partition(|queue| movable(queue.id));
    free.sort_by_key(|queue: &QueueLoad| (Reverse(parts(weight(queue))), queue.vm, queue.id));
    let mut bins = vec![Bin::default(); count];
    let Some(first) = bins.first_mut() else { return Vec::new() };
    first.weight = fixed.iter().map(weight).sum();
    first.load = load(&fixed);
    for queue in free {
        let of_vm = |bin: &Bin| bin.vms.get(&queue.vm).copied().unwrap_or(0);
        let least = |bin: &&mut Bin| (parts(bin.weight), of_vm(bin), bin.held.len());
        if let Some(bin) = bins.iter_mut().min_by_key(least) {
            bin.weight += weight(&queue);
            bin.load += queue.busy;
            *bin.vms.entry(queue.vm).or_default() += 1;
            bin.held.push(queue);
        }
    }
    let most = (0..count).max_by_key(|&at| (bins[at].held.len(), Reverse(at)));
    let stays = bins.remove(most.filter(|_| fixed.is_empty()).unwrap_or(0)).load;
    let part = |Bin { load, held: go, .. }: Bin| Split { go, load, stays };
    bins.into_iter().map(part).filter(|part| !part.go.is_empty()).collect()
}

/// Of `queues` without load, those that go with a part of the others: half of a VM's, and of all.
pub(crate) fn idle_that_go(
    queues: &[QueueLoad],
    part: &[QueueLoad],
    movable: impl Fn(QueueId) -> bool,
) -> Vec<QueueLoad> {
    let goes = |queue: &QueueLoad| part.iter().any(|of| of.id == queue.id);
    // Of each VM and of all, how many go and how many stay.
    let mut of_vm: BTreeMap<VmId, (usize, usize)> = BTreeMap::new();
    let mut of_all = (part.len(), 0);
    for queue in queues {
        let (go, stay) = of_vm.entry(queue.vm).or_default();
        if goes(queue) {
            *go += 1;
        } else {
            *stay += 1;
            of_all.1 += 1;
        }
    }
    let may = |of: &&QueueLoad| of.busy < LOADED && !of.backlogged && movable(of.id) && !goes(of);
    let mut idle: Vec<_> = queues.iter().filter(may).copied().collect();
    idle.sort_by_key(|queue| (queue.vm, queue.id));
    idle.retain(|queue| {
        let Some(of_vm) = of_vm.get_mut(&queue.vm) else { return false };
        let is_fewer = of_all.0 < of_all.1 && of_vm.0 < of_vm.1;
        if is_fewer {
            for of in [of_vm, &mut of_all] {
                *of = (of.0 + 1, of.1 - 1);
            }
        }
        is_fewer
    });
    idle
}

/// Where queues go, and what comes of it.
#[derive(Debug)]
pub(crate) struct Drained {
    pub(crate) moves: Vec<(QueueId, ThreadId)>,
    /// What the threads are then asked for beyond `full`, or beyond what one queue alone asks for.
    pub(crate) excess: f64,
}

/// Gives `queues` to the threads with these queues; none if there is no such thread.
pub(crate) fn drain(
    mut queues: Vec<QueueLoad>,
    to: &BTreeMap<ThreadId, Vec<QueueLoad>>,
    full: f64,
) -> Option<Drained> {
    struct Bin {
        load: f64,
        one: f64,
    }
    let mut bins = BTreeMap::new();
    let mut least = BinaryHeap::new();
    for (&thread, held) in to {
        let load = held.iter().map(|queue| queue.busy).sum();
        let one = held.iter().map(|queue| queue.busy).fold(0.0, f64::max);
        let counted: u64 = held.iter().map(|queue| parts(queue.busy)).sum();
        bins.insert(thread, Bin { load, one });
        least.push(Reverse((counted, thread)));
    }
    sort(&mut queues);
    let mut moves = Vec::with_capacity(queues.len());
    for queue in queues {
        let Reverse((counted, thread)) = least.pop()?;
        if let Some(bin) = bins.get_mut(&thread) {
            bin.load += queue.busy;
            bin.one = bin.one.max(queue.busy);
        }
        least.push(Reverse((counted + parts(queue.busy), thread)));
        moves.push((queue.id, thread));
    }
    let beyond = |bin: &Bin| (bin.load - full.max(bin.one)).max(0.0);
    let excess = bins.values().map(beyond).sum();
    Some(Drained { moves, excess })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QueueKind;

    fn queue(id: u32, thread: u32, busy: f64) -> QueueLoad {
        QueueLoad {
            id: QueueId(id),
            kind: QueueKind::Disk,
            vm: VmId(0),
            thread: ThreadId(thread),
            busy,
            requests: 0,
            bytes: 0,
            waited: Nanos::ZERO,
            backlogged: false,
        }
    }

    fn ids(queues: &[QueueLoad]) -> Vec<u32> {
        queues.iter().map(|queue| queue.id.0).collect()
    }

    #[test]
    fn split_of_unlike_queues_moves_the_part_with_fewer() {
        let loads = [0.1, 0.5, 0.2, 0.15, 0.0];
        let queues: Vec<_> = (0..).zip(loads).map(|(id, load)| queue(id, 0, load)).collect();
        // 0.5 against 0.2 + 0.15 + 0.1.
        let split = split(&queues, |_| true);
        assert_eq!(ids(&split.go), [1]);
        assert!((split.load - 0.5).abs() < 1e-9 && (split.stays - 0.45).abs() < 1e-9);
    }

    #[test]
    fn split_with_a_queue_that_may_not_move_leaves_it() {
        let queues = [queue(0, 0, 0.5), queue(1, 0, 0.3), queue(2, 0, 0.2)];
        let split = split(&queues, |id| id != QueueId(0));
        assert_eq!(ids(&split.go), [1, 2]);
    }

    #[test]
    fn split_of_one_loaded_queue_is_none() {
        let queues = [queue(0, 0, 0.9), queue(1, 0, 0.001)];
        let split = split(&queues, |_| true);
        assert!(split.load.min(split.stays) < LOADED, "{split:?}");
    }

    #[test]
    fn parts_that_go_have_about_the_same_load_and_leave_one() {
        let queues: Vec<_> = (0..8).map(|id| queue(id, 0, 0.125)).collect();
        let parts = parts_that_go(&queues, 4, |_| true);
        assert_eq!(
            parts.iter().map(|part| ids(&part.go)).collect::<Vec<_>>(),
            [[1, 5], [2, 6], [3, 7]]
        );
        assert!(parts.iter().all(|part| (part.load - 0.25).abs() < 1e-9 && part.stays == 0.25));
        // Four that cannot go are a part of their own.
        let parts = parts_that_go(&queues, 3, |id| id.0 >= 4);
        assert_eq!(parts.iter().map(|part| ids(&part.go)).collect::<Vec<_>>(), [[4, 6], [5, 7]]);
        assert!(parts_that_go(&queues[..1], 3, |_| true).is_empty());
    }

    #[test]
    fn queues_that_stand_are_spread_though_they_were_not_served_lately() {
        let backlogged = |id| QueueLoad { backlogged: true, ..queue(id, 0, 0.0) };
        let mut queues: Vec<_> =
            (0..3).map(|id| queue(id, 0, [0.2, 0.15, 0.1][id as usize])).collect();
        queues.extend((3..27).map(backlogged));
        let parts = parts_that_go(&queues, 4, |_| true);
        assert_eq!(parts.len(), 3);
        for part in parts {
            let stand = part.go.iter().filter(|queue| queue.backlogged).count();
            assert!((1..=14).contains(&stand), "{part:?}");
        }
    }

    #[test]
    fn queues_of_a_vm_that_wait_go_to_different_parts() {
        let waiting = |id: u32, busy| QueueLoad {
            vm: VmId(id / 2),
            requests: 10,
            waited: Nanos::from_millis(10),
            ..queue(id, 0, busy)
        };
        let loads = [0.07, 0.13, 0.2, 0.11, 0.12, 0.1, 0.13, 0.14];
        let queues: Vec<_> = (0..).zip(loads).map(|(id, load)| waiting(id, load)).collect();
        assert_eq!(ids(&split(&queues, |_| true).go), [1, 3, 5, 7]);
        // Without a wait they have what they ask for: 0.2, 0.12, 0.11 and 0.07 against the others.
        let served: Vec<_> =
            queues.iter().map(|of| QueueLoad { waited: Nanos::ZERO, ..*of }).collect();
        let split = split(&served, |_| true);
        assert!((split.load - split.stays).abs() < 0.03, "{split:?}");
        assert_ne!(ids(&split.go), [1, 3, 5, 7]);
    }

    #[test]
    fn idle_queues_go_along_by_halves() {
        let of = |id: u32| QueueLoad { vm: VmId(id / 2), ..queue(id, 0, f64::from(id / 6) * 0.5) };
        let queues: Vec<_> = (0..8).map(of).collect();
        // 6 and 7 are loaded, and 7 goes: then one of each other VM too.
        assert_eq!(ids(&idle_that_go(&queues, &queues[7..], |_| true)), [0, 2, 4]);
        assert_eq!(ids(&idle_that_go(&queues, &queues[7..], |id| id.0 > 2)), [3, 4]);
        // Half are there already.
        assert_eq!(ids(&idle_that_go(&queues[4..], &queues[6..], |_| true)), [0u32; 0]);
    }

    #[test]
    fn fair_share_is_of_those_that_would_take_more() {
        let full = [queue(0, 0, 0.32), queue(1, 0, 0.3), queue(2, 0, 0.28), queue(3, 0, 0.1)];
        let of = FairShare::of(&full, 0.85);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(of.with(0), 0.3) && close(of.with(2), 0.18));
        // With room, it is that which one more would find.
        let of = FairShare::of(&full[1..], 0.85);
        assert!(close(of.with(1), 0.32) && of.with(0) == f64::INFINITY);
    }

    #[test]
    fn drained_queues_go_to_the_least_loaded_and_a_queue_that_fills_a_thread_is_no_excess() {
        let to = BTreeMap::from([
            (ThreadId(1), vec![queue(0, 1, 1.0)]),
            (ThreadId(2), vec![queue(1, 2, 0.4)]),
        ]);
        let drained = drain(vec![queue(2, 3, 0.3), queue(3, 3, 0.4)], &to, 1.0).unwrap();
        assert_eq!(drained.moves, [(QueueId(3), ThreadId(2)), (QueueId(2), ThreadId(2))]);
        // 1.0 is one queue's; 0.4 + 0.4 + 0.3 is 0.1 too much.
        assert!((drained.excess - 0.1).abs() < 1e-9, "{drained:?}");
        assert!(drain(vec![queue(2, 3, 0.3)], &BTreeMap::new(), 1.0).is_none());
    }
}
