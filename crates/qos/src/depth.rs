//! How many background requests may be in flight: fewer when promises are missed, more when they
//! are kept and there is a use for it.
//!
//! A device serves what it was given in an order of its own, so what must not be waited for is kept
//! back. How much that is follows from what is seen, not from a model: at the end of each
//! [epoch](crate::experiment::EPOCH_NS), the bound falls by a quarter if more than one promised response in [`TOO_MANY`]
//! was late, or by four times the part of a promised rate that is short, a quarter at most, and rises if neither is near while something
//! was held back (the rule of the kernel's blk-iolatency: the victim's latency decides, the others'
//! depth is the means). Where one at a time is too many, for what is promised needs nearly all of the
//! device, the time between two grows instead, and halves again.
//!
//! A closed loop that has little more than its rate where it is alone makes up for what it missed slowly, so a bound
//! that swings about the right one costs it its rate. So the bound is a fraction, of which epochs have the next whole
//! number in turn, and it rises by a part of its distance from where promises were last missed: fast far from there, and
//! slowly near it (as TCP's window does; Ha et al., CUBIC, 2008).

use crate::demand::Wants;
use crate::experiment::EPOCH_NS;

/// One late response in so many lowers the bound.
const TOO_MANY: u32 = 10;
/// Fewer than one in so many raise it.
const FEW: u32 = 50;

/// The longest time between two background requests, and how long one waits at most: who was
/// promised more than there is may not starve the others.
pub(crate) const MAX_BACKGROUND_WAIT_NS: u64 = 50_000_000;
/// What the time between two grows by at first, where the bound would fall by a quarter.
const GAP_NS: u64 = 1_000_000;

/// The part of the bound that it falls by at most, as thousandths.
pub(crate) const MAX_FALL: u32 = 250;
/// The part of its distance from where promises were last missed that the bound rises by.
const RISE: f64 = 0.25;
/// What it rises by at least.
const MIN_RISE: f64 = 1.0 / 16.0;

/// The bound and what it follows.
#[derive(Debug)]
pub(crate) struct Depth {
    /// The bound over some epochs, at least 1.
    level: f64,
    /// What the whole bounds of epochs have been below it in all.
    owed: f64,
    /// The bound in this epoch.
    bound: u32,
    /// Where the level was when promises were first missed, the last time that they were.
    missed_at: f64,
    /// They are being missed.
    is_falling: bool,
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
    pub(crate) fn new(most: u32) -> Self {
        Self {
            level: f64::from(most),
            owed: 0.0,
            bound: most,
            missed_at: f64::from(most),
            is_falling: false,
            gap: 0,
            most,
            kept: 0,
            late: 0,
            held_back: false,
        }
    }

    /// Another highest bound; what was not held below the old one is not below the new one.
    pub(crate) fn set_max(&mut self, most: u32) {
        let is_free = self.level >= f64::from(self.most);
        self.level = if is_free { f64::from(most) } else { self.level.min(f64::from(most)) };
        self.bound = if is_free { most } else { self.bound.min(most) };
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

    /// How long background is taken to give way after it last had to, ns: at least about as long as the bound takes from
    /// its lowest to its highest, if nothing is against it.
    pub(crate) fn recovery(&self) -> u64 {
        let gaps = (MAX_BACKGROUND_WAIT_NS / GAP_NS).ilog2() + 1;
        u64::from(2 * self.most + gaps) * EPOCH_NS
    }

    /// Ends an epoch; `wants`: how much background the rates leave room for. An epoch that background was
    /// withheld in says nothing of the bound.
    pub(crate) fn end_epoch(&mut self, wants: Wants, is_withheld: bool) {
        let all = self.kept + self.late;
        let is_late = self.late * TOO_MANY > all;
        let fall = match wants {
            _ if is_withheld => None,
            _ if is_late => Some(MAX_FALL),
            // A bound that held nothing back is far from where it would.
            Wants::Less(_) if !self.held_back => Some(MAX_FALL),
            Wants::Less(fall) => Some(fall.min(MAX_FALL)),
            Wants::Any | Wants::NoMore => None,
        };
        if let Some(fall) = fall {
            self.fall(fall, if is_late { 1.0 } else { 0.0 });
        } else if !is_withheld && wants == Wants::Any && self.held_back && self.late * FEW <= all {
            self.rise();
        }
        self.owed += self.level.fract();
        self.bound = self.level as u32 + u32::from(self.owed >= 1.0);
        self.owed = self.owed.fract();
        (self.kept, self.late, self.held_back) = (0, 0, false);
    }

    /// The bound falls by so many thousandths, and `least` at least; where it is 1, the time between two grows.
    fn fall(&mut self, thousandths: u32, least: f64) {
        if !std::mem::replace(&mut self.is_falling, true) {
            self.missed_at = self.level;
        }
        if self.level <= 1.0 {
            let part = u64::from(thousandths);
            let more = (self.gap + GAP_NS) * part / u64::from(MAX_FALL);
            self.gap = self.gap.saturating_add(more).min(MAX_BACKGROUND_WAIT_NS);
        }
        let fall = self.level * f64::from(thousandths) / 1000.0;
        self.level = (self.level - fall.max(least)).max(1.0);
    }

    fn rise(&mut self) {
        self.is_falling = false;
        if self.gap == 0 {
            let rise = ((self.level - self.missed_at).abs() * RISE).clamp(MIN_RISE, 1.0);
            self.level = (self.level + rise).min(f64::from(self.most));
        }
        self.gap = if self.gap > GAP_NS { self.gap / 2 } else { 0 };
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
        assert_eq!(epochs(&mut depth, 100, 100, 7), 1);
        assert_eq!(epochs(&mut depth, 0, 100, 3), 4);
        assert_eq!(epochs(&mut depth, 0, 0, 100), 16);
        depth.end_epoch(Wants::Less(MAX_FALL), false);
        assert_eq!(depth.bound(), 12);
        depth.hold_back();
        depth.end_epoch(Wants::NoMore, false);
        assert_eq!(depth.bound(), 12);
        depth.end_epoch(Wants::Less(MAX_FALL), true);
        assert_eq!(depth.bound(), 12);
    }

    #[test]
    fn bound_falls_by_as_much_as_a_rate_is_short_and_epochs_have_its_fraction_in_turn() {
        let mut depth = Depth::new(8);
        depth.hold_back();
        depth.end_epoch(Wants::Less(50), false);
        let mut bounds = vec![depth.bound()];
        for _ in 1..10 {
            depth.end_epoch(Wants::NoMore, false);
            bounds.push(depth.bound());
        }
        assert!(bounds.iter().all(|bound| [7, 8].contains(bound)), "{bounds:?}");
        let sum: u32 = bounds.iter().sum();
        assert!((75..=76).contains(&sum), "{bounds:?}");
    }

    #[test]
    fn bound_that_held_nothing_back_falls_fast_until_it_does() {
        let mut depth = Depth::new(33);
        (0..8).for_each(|_| depth.end_epoch(Wants::Less(10), false));
        assert!(depth.bound() <= 4, "{}", depth.bound());
    }

    #[test]
    fn bound_rises_slowly_where_promises_were_last_missed_and_fast_elsewhere() {
        let mut depth = Depth::new(32);
        assert_eq!(epochs(&mut depth, 1, 1, 4), 10);
        // It had 32, and missed from there on.
        assert_eq!(epochs(&mut depth, 0, 1, 4), 14);
        epochs(&mut depth, 1, 1, 1);
        let mut took = |to: f64| {
            (1..)
                .find(|_| {
                    epochs(&mut depth, 0, 1, 1);
                    depth.level >= to
                })
                .unwrap()
        };
        let [near, past, far] = [14.0, 15.0, 31.0].map(&mut took);
        assert!(near >= 6 && past >= 8, "{near} {past}");
        assert!(far <= 30, "{far}");
    }

    #[test]
    fn where_one_at_a_time_is_too_many_the_gap_between_two_grows_and_goes_first() {
        let mut depth = Depth::new(2);
        epochs(&mut depth, 1, 1, 1);
        assert_eq!((depth.bound(), depth.gap()), (1, 0));
        epochs(&mut depth, 1, 1, 3);
        assert_eq!((depth.bound(), depth.gap()), (1, 7 * GAP_NS));
        epochs(&mut depth, 1, 1, 10);
        assert_eq!(depth.gap(), MAX_BACKGROUND_WAIT_NS);
        epochs(&mut depth, 0, 1, 7);
        assert_eq!((depth.bound(), depth.gap()), (1, 0));
        assert_eq!(epochs(&mut depth, 0, 1, 5), 2);
        // A rate that is little short needs little.
        epochs(&mut depth, 1, 1, 1);
        depth.hold_back();
        depth.end_epoch(Wants::Less(MAX_FALL / 5), false);
        assert_eq!((depth.bound(), depth.gap()), (1, GAP_NS / 5));
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
        // The level is between two, of which this epoch has the highest one.
        let mut depth = Depth::new(2);
        depth.hold_back();
        depth.end_epoch(Wants::Less(100), false);
        depth.end_epoch(Wants::NoMore, false);
        assert_eq!(depth.bound(), 2);
        depth.set_max(33);
        assert_eq!(depth.bound(), 2);
        depth.end_epoch(Wants::NoMore, false);
        assert!(depth.bound() <= 2, "{}", depth.bound());
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
