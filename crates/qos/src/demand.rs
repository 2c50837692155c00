//! Whether a class asks for its rate and does not get it.
//!
//! A task that waits for each of its requests asks for fewer if they are slow, so a rate that does
//! not come about looks like one that is not wanted. Once an epoch of [`EPOCH_NS`] two signs tell them
//! apart. Who does not want more has nothing under way for much of the time. But neither has a guest
//! that takes long from an end to its next request; so, secondly: its requests take so much longer
//! than their cost that this alone keeps it from its rate, and it asks for less in epochs in which
//! they take longer. Who has a pace of its own asks for the same whatever they take.

/// How long an epoch is.
const EPOCH_NS: u64 = 100_000_000;
/// A rate comes about if no more than one in so many is not asked for.
const UNASKED: u64 = 60;
/// Epochs that are remembered, and the fewest that say something.
const REMEMBERED: f64 = 16.0;
const FEWEST: f64 = 8.0;
/// A class's demand follows its responses if it falls by at least this much, as a fraction, for each
/// such fraction that they take longer: a guest that is outside the device for half of the time has
/// 1/2, where all its tasks wait.
const FOLLOWS: f64 = 0.3;
/// And if responses explain so much of the demand's variance.
const EXPLAINED: f64 = 0.5;

/// What a class asks for in an epoch, and how that went in those before.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    epoch: Epoch,
    past: Past,
}

#[derive(Debug, Default)]
struct Epoch {
    since: u64,
    /// What was asked for since, ns of the rate.
    asked: u64,
    /// How long requests were under way, ns, and since when they are.
    busy: u64,
    busy_since: u64,
    /// Requests that ended, what they cost and what they took, ns.
    ended: u64,
    cost: u64,
    responses: u64,
}

impl Demand {
    /// From now on.
    pub(crate) fn starting(now: u64) -> Self {
        Self {
            epoch: Epoch { since: now, busy_since: now, ..Epoch::default() },
            past: Past::default(),
        }
    }

    /// A request arrives that is so much of the class's rate, ns; `first`: the first under way.
    pub(crate) const fn begin(&mut self, asked: u64, first: bool, now: u64) {
        if first {
            self.epoch.busy_since = now;
        }
        self.epoch.asked = self.epoch.asked.saturating_add(asked);
    }

    /// A request has ended that took `response` and costs `cost`, ns; none is under way if it is the
    /// `last`. Whether it has just turned out that the rate does not come about.
    pub(crate) fn end(&mut self, (response, cost): (u64, u64), last: bool, now: u64) -> bool {
        let epoch = &mut self.epoch;
        let span = now.saturating_sub(epoch.since);
        epoch.ended += 1;
        epoch.cost = epoch.cost.saturating_add(cost);
        epoch.responses = epoch.responses.saturating_add(response);
        if last || span >= EPOCH_NS {
            epoch.busy += now.saturating_sub(epoch.busy_since.max(epoch.since));
            epoch.busy_since = now;
        }
        if span < EPOCH_NS {
            return false;
        }
        let ended =
            std::mem::replace(epoch, Epoch { since: now, busy_since: now, ..Epoch::default() });
        // A pause within it says nothing of the responses.
        if span < 2 * EPOCH_NS {
            let response = ended.responses as f64 / ended.ended as f64;
            self.past.add(response, ended.asked as f64 / span as f64);
        }
        let is_busy = ended.busy > span / 4 * 3;
        let at_best = span.saturating_sub(ended.busy).saturating_add(ended.cost);
        let wants = is_busy || (at_best < ended.asked && self.past.follows());
        wants && ended.asked < span - span / UNASKED
    }
}

/// Responses and demand of the last epochs: means, variances and covariance, each epoch weighing less
/// than the one after it.
#[derive(Debug, Default)]
struct Past {
    epochs: f64,
    response: f64,
    asked: f64,
    of_response: f64,
    of_asked: f64,
    covariance: f64,
}

impl Past {
    fn add(&mut self, response: f64, asked: f64) {
        self.epochs = (self.epochs + 1.0).min(REMEMBERED);
        let weight = 1.0 / self.epochs;
        let (longer, more) = (response - self.response, asked - self.asked);
        self.response += weight * longer;
        self.asked += weight * more;
        let keep = 1.0 - weight;
        self.of_response = keep * (self.of_response + weight * longer * longer);
        self.of_asked = keep * (self.of_asked + weight * more * more);
        self.covariance = keep * (self.covariance + weight * longer * more);
    }

    /// Whether less is asked for when responses are longer, and mostly because of that.
    fn follows(&self) -> bool {
        let falls = -self.covariance * self.response > FOLLOWS * self.of_response * self.asked;
        let explained = self.covariance.powi(2) > EXPLAINED * self.of_response * self.of_asked;
        self.epochs >= FEWEST && falls && explained
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: u64 = 250_000;

    /// Ends of so many ms that say that the rate, one request in 500 µs, does not come about. Requests take
    /// `response` ns in even epochs and a fifth more in odd ones; `next` says when one arrives after
    /// one that arrived and ended.
    fn slowed(response: u64, ms: u64, next: impl Fn(u64, u64) -> u64) -> usize {
        let mut demand = Demand::starting(0);
        let mut now = 0;
        let mut found = 0;
        while now < ms * 1_000_000 {
            let takes = if now / EPOCH_NS % 2 == 0 { response } else { response / 5 * 6 };
            demand.begin(500_000, true, now);
            let end = now + takes;
            found += usize::from(demand.end((takes, COST), true, end));
            now = next(now, end);
        }
        found
    }

    #[test]
    fn what_is_under_way_most_of_the_time_is_slowed() {
        // 510 and 606 µs from one to the next.
        assert!((29..=30).contains(&slowed(480_000, 3_000, |_, end| end + 30_000)));
        assert_eq!(slowed(360_000, 3_000, |_, end| end + 50_000), 0);
    }

    #[test]
    fn who_asks_for_less_when_responses_are_longer_is_slowed_if_it_need_not_be() {
        // 600 to 680 µs from one to the next, of which 240 are the guest's own; 490 at best.
        let found = slowed(360_000, 3_000, |_, end| end + 240_000);
        assert!((20..=23).contains(&found), "{found}");
        // 510 at best: with the quickest device the rate would not come about.
        assert_eq!(slowed(360_000, 3_000, |_, end| end + 260_000), 0);
    }

    #[test]
    fn who_has_a_pace_of_its_own_is_not() {
        assert_eq!(slowed(360_000, 3_000, |arrived, _| arrived + 600_000), 0);
        // Nor who asks for less by itself now and then.
        let pace = |arrived: u64, _| {
            arrived + if arrived / 500_000_000 % 2 == 0 { 600_000 } else { 720_000 }
        };
        assert_eq!(slowed(360_000, 6_000, pace), 0);
    }
}
