//! How many background requests may be in flight: fewer when promises are missed, more when they
//! are kept and there is a use for it.
//!
//! A device serves what it was given in an order of its own, so what must not be waited for is kept
//! back. How much that is follows from what is seen, not from a model: at the end of each
//! [epoch](crate::experiment::EPOCH_NS), the bound falls by a quarter if more than one promised response in [`TOO_MANY`]
//! was late or a promised rate did not come about, and rises by one if neither is near while something
//! was held back (the rule of the kernel's blk-iolatency: the victim's latency decides, the others'
//! depth is the means). Where one at a time is too many, for what is promised needs nearly all of the
//! device, the time between two doubles instead, and halves again.

use crate::demand::Wants;
use crate::experiment::EPOCH_NS;

/// One late response in so many lowers the bound.
const TOO_MANY: u32 = 10;
/// Fewer than one in so many raise it.
const FEW: u32 = 50;

/// The longest time between two background requests, and how long one waits at most: who was
/// promised more than there is may not starve the others.
pub(crate) const MAX_BACKGROUND_WAIT_NS: u64 = 50_000_000;
/// The shortest time between two.
const GAP_NS: u64 = 1_000_000;

/// The bound and what it follows.
#[derive(Debug)]
pub(crate) struct Depth {
    bound: u32,
    /// Time from the start of a background request to that of the next, if even one at a time is
    /// too many; else 0.
    gap: u64,
    most: u32,
    kept: u32,
    late: u32,
    held_back: bool,
}

impl Depth {
    /// At least 1 and at most `most`, with which it begins.
    pub(crate) const fn new(most: u32) -> Self {
        Self { bound: most, gap: 0, most, kept: 0, late: 0, held_back: false }
    }

    /// Another highest bound; what was not held below the old one is not below the new one.
    pub(crate) fn set_max(&mut self, most: u32) {
        self.bound = if self.bound == self.most { most } else { self.bound.min(most) };
        self.most = most;
    }

    pub(crate) const fn bound(&self) -> u32 {
        self.bound
    }

    pub(crate) const fn gap(&self) -> u64 {
        self.gap
    }

    /// Something waits because of the bound.
    pub(crate) const fn hold_back(&mut self) {
        self.held_back = true;
    }

    /// A promised response came in time, or late.
    pub(crate) const fn observe(&mut self, late: bool) {
        if late {
            self.late += 1;
        } else {
            self.kept += 1;
        }
    }

    /// How long the bound takes at most from its lowest to its highest, if nothing is against it, ns.
    pub(crate) fn recovery(&self) -> u64 {
        let gaps = (MAX_BACKGROUND_WAIT_NS / GAP_NS).ilog2() + 1;
        u64::from(self.most + gaps) * EPOCH_NS
    }

    /// Ends an epoch; `wants`: how much background the rates leave room for. An epoch that background was
    /// withheld in says nothing of the bound.
    pub(crate) fn end_epoch(&mut self, wants: Wants, is_withheld: bool) {
        let all = self.kept + self.late;
        if is_withheld {
            // The bound stays.
        } else if wants == Wants::Less || self.late * TOO_MANY > all {
            if self.bound == 1 {
                self.gap = (self.gap * 2).clamp(GAP_NS, MAX_BACKGROUND_WAIT_NS);
            }
            self.bound = (self.bound - (self.bound / 4).max(1)).max(1);
        } else if wants == Wants::Any && self.held_back && self.late * FEW <= all {
            if self.gap == 0 {
                self.bound = (self.bound + 1).min(self.most);
            }
            self.gap = if self.gap > GAP_NS { self.gap / 2 } else { 0 };
        }
        *self = Self { bound: self.bound, gap: self.gap, ..Self::new(self.most) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(depth: &mut Depth, late: u32, of: u32, number: u64) -> u32 {
        for _ in 0..number {
            depth.hold_back();
            (0..of).for_each(|i| depth.observe(i < late));
            depth.end_epoch(Wants::Any, false);
        }
        depth.bound()
    }

    #[test]
    fn late_responses_lower_the_bound_to_one_and_kept_ones_raise_it_again() {
        let mut depth = Depth::new(16);
        assert_eq!(epochs(&mut depth, 11, 100, 1), 12);
        assert_eq!(epochs(&mut depth, 5, 100, 1), 12);
        assert_eq!(epochs(&mut depth, 100, 100, 8), 1);
        assert_eq!(epochs(&mut depth, 0, 100, 3), 4);
        assert_eq!(epochs(&mut depth, 0, 0, 100), 16);
        depth.end_epoch(Wants::Less, false);
        assert_eq!(epochs(&mut depth, 0, 100, 1), 13);
        depth.hold_back();
        depth.end_epoch(Wants::NoMore, false);
        assert_eq!(depth.bound(), 13);
        depth.end_epoch(Wants::Less, true);
        assert_eq!(depth.bound(), 13);
    }

    #[test]
    fn where_one_at_a_time_is_too_many_the_gap_between_two_grows_and_goes_first() {
        let mut depth = Depth::new(2);
        epochs(&mut depth, 1, 1, 1);
        assert_eq!((depth.bound(), depth.gap()), (1, 0));
        epochs(&mut depth, 1, 1, 3);
        assert_eq!((depth.bound(), depth.gap()), (1, 4 * GAP_NS));
        epochs(&mut depth, 1, 1, 10);
        assert_eq!(depth.gap(), MAX_BACKGROUND_WAIT_NS);
        epochs(&mut depth, 0, 1, 7);
        assert_eq!((depth.bound(), depth.gap()), (1, 0));
        assert_eq!(epochs(&mut depth, 0, 1, 1), 2);
    }

    #[test]
    fn another_most_takes_the_bound_with_it_or_caps_it() {
        let mut depth = Depth::new(4);
        depth.set_max(16);
        assert_eq!(depth.bound(), 16);
        assert_eq!(epochs(&mut depth, 1, 1, 1), 12);
        depth.set_max(20);
        assert_eq!(depth.bound(), 12);
        depth.set_max(8);
        assert_eq!(depth.bound(), 8);
        assert_eq!(epochs(&mut depth, 0, 0, 3), 8);
    }

    #[test]
    fn bound_that_holds_nothing_back_stays() {
        let mut depth = Depth::new(4);
        assert_eq!(epochs(&mut depth, 1, 1, 5), 1);
        depth.observe(false);
        depth.end_epoch(Wants::Any, false);
        assert_eq!(depth.bound(), 1);
    }
}
