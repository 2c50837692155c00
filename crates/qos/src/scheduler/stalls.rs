//! Times in which the device ended nothing of what it had.

use rtvirtio_units::Nanos;

use crate::{Stall, Stalls};

/// No stall is shorter. What a scheduler does to a request is over within a few service times.
const MIN_NS: u64 = 50_000_000;
/// Nor shorter than so many times what the request that ended it costs: a slow device is not a stalled one.
const SERVICES: u64 = 10;

/// The shortest stall that a request of that cost ends.
const fn min(cost: u64) -> u64 {
    let services = cost.saturating_mul(SERVICES);
    if services > MIN_NS { services } else { MIN_NS }
}

/// When the device last ended something, or began with nothing under way.
#[derive(Debug, Default)]
pub(super) struct Progress {
    at: u64,
    stalls: Stalls,
}

impl Progress {
    /// A request starts on the device, which has so many already.
    pub(super) const fn begin(&mut self, running: u32, now: u64) {
        if running == 0 {
            self.at = now;
        }
    }

    /// A request of that cost ends, of so many.
    pub(super) fn end(&mut self, cost: u64, running: u32, now: u64) {
        let length = now.saturating_sub(self.at);
        if length >= min(cost) {
            let begin = Nanos::new(self.at);
            self.stalls.count += 1;
            self.stalls.time += length;
            self.stalls.longest = self.stalls.longest.max(length);
            self.stalls.last =
                Some(Stall { begin, length: Nanos::new(length), in_flight: running });
        }
        self.at = self.at.max(now);
    }

    pub(super) const fn stalls(&self) -> Stalls {
        self.stalls
    }

    /// How long nothing of so many requests has ended, if it is as long as a stall that one of that cost ends.
    pub(super) fn ongoing(&self, cost: u64, running: u32, now: u64) -> Option<Nanos> {
        let length = now.saturating_sub(self.at);
        (running > 0 && length >= min(cost)).then_some(Nanos::new(length))
    }

    /// What of the time from `since` on was the last stall's, ns.
    pub(super) fn stalled_since(&self, since: u64) -> u64 {
        let Some(Stall { begin, length, .. }) = self.stalls.last else { return 0 };
        begin.saturating_add(length).get().saturating_sub(since.max(begin.get()))
    }
}
