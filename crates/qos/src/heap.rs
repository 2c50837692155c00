//! A binary min-heap of small ids in which an id's key can change.
//!
//! Equal keys come out by id, so that the same calls give the same order.

/// Not in the heap.
const NOWHERE: u32 = u32::MAX;

/// Ids with keys; the least key comes first.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    entries: Vec<(u64, u32)>,
    /// Where each id is.
    places: Vec<u32>,
}

impl Heap {
    /// The least key and its id.
    pub(crate) fn first(&self) -> Option<(u64, u32)> {
        self.entries.first().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether an id is in.
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.places.get(id as usize).is_some_and(|&place| place != NOWHERE)
    }

    /// Puts an id in, or changes its key.
    pub(crate) fn set(&mut self, id: u32, key: u64) {
        let index = id as usize;
        if self.places.len() <= index {
            self.places.resize(index + 1, NOWHERE);
        }
        let mut at = self.places[index] as usize;
        if self.places[index] == NOWHERE {
            at = self.entries.len();
            self.entries.push((key, id));
        } else {
            self.entries[at].0 = key;
        }
        self.settle(at);
    }

    /// Takes an id out, if it is in.
    pub(crate) fn remove(&mut self, id: u32) {
        let Some(place) = self.places.get_mut(id as usize) else { return };
        let at = std::mem::replace(place, NOWHERE) as usize;
        if at == NOWHERE as usize {
            return;
        }
        self.entries.swap_remove(at);
        if at < self.entries.len() {
            self.settle(at);
        }
    }

    /// Moves the entry at `at` up or down to where it belongs.
    fn settle(&mut self, mut at: usize) {
        let entry = self.entries[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.entries[parent] <= entry {
                break;
            }
            self.put(at, self.entries[parent]);
            at = parent;
        }
        loop {
            let mut child = 2 * at + 1;
            if child + 1 < self.entries.len() && self.entries[child + 1] < self.entries[child] {
                child += 1;
            }
            if child >= self.entries.len() || entry <= self.entries[child] {
                break;
            }
            self.put(at, self.entries[child]);
            at = child;
        }
        self.put(at, entry);
    }

    fn put(&mut self, at: usize, entry: (u64, u32)) {
        self.entries[at] = entry;
        self.places[entry.1 as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn heap_gives_what_an_ordered_set_gives(
            changes in prop::collection::vec((0u32..12, prop::option::of(0u64..30)), 0..200),
        ) {
            let mut heap = Heap::default();
            let mut keys: [Option<u64>; 12] = [None; 12];
            for (id, key) in changes {
                match key {
                    Some(key) => heap.set(id, key),
                    None => heap.remove(id),
                }
                keys[id as usize] = key;
                let model: BTreeSet<(u64, u32)> =
                    (0..12).filter_map(|id| Some((keys[id as usize]?, id))).collect();
                prop_assert_eq!(heap.first(), model.first().copied());
                prop_assert_eq!(heap.is_empty(), model.is_empty());
            }
        }
    }
}
