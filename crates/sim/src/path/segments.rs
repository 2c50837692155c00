//! A set of entities by slot, in which the one with the least finish among those that have started is
//! found: what bfq's augmented red-black trees are for (kernel `block/bfq-wf2q.c`).
//!
//! A segment tree over the slots: each node has the least start and the least (finish, order) below it. A
//! change costs log n; a search goes only where both can still be better than what is found.

/// No entity.
const NONE: (u64, u64) = (u64::MAX, u64::MAX);

/// The set.
#[derive(Debug)]
pub(super) struct Segments {
    /// Leaves in a node's right half begin here: a power of two.
    size: usize,
    /// Least start below each node; the root is at 1.
    starts: Vec<u64>,
    /// Least (finish, order of insertion) below each node.
    finishes: Vec<(u64, u64)>,
    order: u64,
    len: usize,
}

impl Segments {
    /// An empty set of up to `slots`.
    pub(super) fn new(slots: usize) -> Self {
        let size = slots.next_power_of_two().max(1);
        Self {
            size,
            starts: vec![u64::MAX; 2 * size],
            finishes: vec![NONE; 2 * size],
            order: 0,
            len: 0,
        }
    }

    /// Whether there is none.
    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds the entity of `slot`, which is not in the set. Of equal finishes the first that was added comes first.
    pub(super) fn insert(&mut self, slot: usize, start: u64, finish: u64) {
        self.order += 1;
        self.len += 1;
        self.set(slot, start, (finish, self.order));
    }

    /// Removes the entity of `slot`, which is in the set.
    pub(super) fn remove(&mut self, slot: usize) {
        self.len -= 1;
        self.set(slot, u64::MAX, NONE);
    }

    fn set(&mut self, slot: usize, start: u64, finish: (u64, u64)) {
        let mut node = self.size + slot;
        self.starts[node] = start;
        self.finishes[node] = finish;
        while node > 1 {
            node /= 2;
            self.starts[node] = self.starts[2 * node].min(self.starts[2 * node + 1]);
            self.finishes[node] = self.finishes[2 * node].min(self.finishes[2 * node + 1]);
        }
    }

    /// The least start.
    pub(super) fn min_start(&self) -> u64 {
        self.starts[1]
    }

    /// The slot with the least finish of all.
    pub(super) fn first(&self) -> Option<usize> {
        self.first_started(u64::MAX - 1)
    }

    /// The slot with the least finish among those that start at `by` or before.
    pub(super) fn first_started(&self, by: u64) -> Option<usize> {
        let mut best = (NONE, 0);
        self.search(1, by, &mut best);
        (best.0 != NONE).then(|| best.1 - self.size)
    }

    fn search(&self, node: usize, by: u64, best: &mut ((u64, u64), usize)) {
        if self.starts[node] > by || self.finishes[node] >= best.0 {
            return;
        }
        if node >= self.size {
            *best = (self.finishes[node], node);
            return;
        }
        // The more promising half first.
        let (left, right) = (2 * node, 2 * node + 1);
        let (one, other) =
            if self.finishes[left] <= self.finishes[right] { (left, right) } else { (right, left) };
        self.search(one, by, best);
        self.search(other, by, best);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn least_finish_of_those_that_have_started_is_found() {
        let mut set = Segments::new(5);
        set.insert(0, 10, 50);
        set.insert(3, 30, 40);
        set.insert(4, 20, 50);
        assert_eq!(set.first_started(9), None);
        assert_eq!(set.first_started(10), Some(0));
        assert_eq!(set.first_started(30), Some(3));
        assert_eq!(set.first(), Some(3));
        set.remove(3);
        // Equal finishes: the first that came.
        assert_eq!(set.first(), Some(0));
        assert_eq!(set.min_start(), 10);
        set.remove(0);
        assert_eq!(set.first(), Some(4));
        set.remove(4);
        assert!(set.is_empty());
        assert_eq!(set.first(), None);
    }

    proptest! {
        #[test]
        fn search_finds_what_a_look_at_all_finds(
            entries in proptest::collection::btree_map(0_usize..40, (0_u64..20, 0_u64..20), 0..40),
            by in 0_u64..20,
        ) {
            let mut set = Segments::new(40);
            for (&slot, &(start, finish)) in &entries {
                set.insert(slot, start, finish);
            }
            let started = entries.iter().filter(|(_, (start, _))| *start <= by);
            let expected = started.min_by_key(|(slot, (_, finish))| (*finish, **slot)).map(|(s, _)| *s);
            prop_assert_eq!(set.first_started(by), expected);
        }
    }
}
