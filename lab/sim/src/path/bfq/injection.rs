//! How many requests of others are served while the device idles for a queue.
//!
//! Injection was added to bfq after its papers; what it does is described in the kernel's history (P. Valente,
//! *block, bfq: tune service injection basing on request service times*, linux-block, June 2019): the time that a
//! queue's first request takes after the queue was empty is measured, with nothing of others in the device and with
//! injected requests. As long as the latter is within 1.5 times of the former one more is let in, else one less.

use crate::path::tick::after;

/// Within this of the time alone others do no harm.
const HARMLESS: f64 = 1.5;
/// For so long after a step down, or after a new start, nothing is measured, ns.
const PAUSE: u64 = 10_000_000;
/// What is known is forgotten after so long without a step down, ns: what the device does changes.
const FORGET: u64 = 1_000_000_000;

/// What injection does to one queue.
#[derive(Debug)]
pub(super) struct Injection {
    limit: u32,
    /// What its first request takes alone, ns; none: it is not known.
    alone: Option<u64>,
    /// When the limit fell last, or all began anew.
    since: u64,
}

impl Injection {
    pub(super) const fn new() -> Self {
        Self { limit: 0, alone: None, since: 0 }
    }

    /// Requests that the device may have while others are let in.
    pub(super) const fn limit(&self) -> u32 {
        self.limit
    }

    /// The queue's first request is here.
    pub(super) const fn begin(&mut self, now: u64) {
        self.since = now;
    }

    /// All that is known is forgotten. A process that leaves the device idle for long anyway lets one request in.
    pub(super) fn forget(&mut self, now: u64, thinks_shortly: bool) {
        *self = Self { limit: u32::from(!thinks_shortly), alone: None, since: now };
    }

    pub(super) const fn is_old(&self, now: u64) -> bool {
        now >= after(self.since, FORGET)
    }

    /// The queue's think time has become short, or long.
    pub(super) fn think_time_changed(&mut self, now: u64, thinks_shortly: bool) {
        if self.alone.is_none() && (!thinks_shortly || now >= after(self.since, FORGET / 10)) {
            self.forget(now, thinks_shortly);
        }
    }

    /// Whether the request that comes now is measured: the device is empty, or has only what was let in.
    pub(super) const fn measures(&self, now: u64, is_empty: bool, injected: bool) -> bool {
        (is_empty || self.alone.is_some() && injected) && now >= after(self.since, PAUSE)
    }

    /// A request that was measured has taken `time`; `injected`: others were let in beside it, `by_itself`: it was
    /// the last in the device. The limit rises to `most`.
    pub(super) fn measured(
        &mut self,
        now: u64,
        time: u64,
        injected: bool,
        by_itself: bool,
        most: u32,
    ) {
        if let Some(alone) = self.alone
            && injected
        {
            if (time as f64) < HARMLESS * alone as f64 {
                self.limit = (self.limit + 1).min(most + 1).max(self.limit);
            } else if self.limit > 0 {
                self.limit -= 1;
                self.since = now;
            }
        }
        match self.alone {
            None if by_itself => {
                self.alone = Some(time);
                self.limit = self.limit.max(1);
            }
            Some(alone) if time < alone || by_itself && !injected => self.alone = Some(time),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: u64 = after(0, super::PAUSE);

    #[test]
    fn limit_rises_while_others_do_no_harm_and_falls_when_they_do() {
        let mut injection = Injection::new();
        injection.begin(0);
        assert!(!injection.measures(PAUSE - 1, true, false));
        assert!(injection.measures(PAUSE, true, false) && !injection.measures(PAUSE, false, true));
        injection.measured(PAUSE, 1_000, false, true, 4);
        assert_eq!(injection.limit(), 1);
        for _ in 0..10 {
            injection.measured(PAUSE, 1_400, true, false, 4);
        }
        assert_eq!(injection.limit(), 5);
        injection.measured(2 * PAUSE, 1_600, true, false, 4);
        assert_eq!(injection.limit(), 4);
        assert!(!injection.measures(3 * PAUSE - 1, false, true));
        assert!(injection.measures(3 * PAUSE, false, true));
        assert!(injection.is_old(2 * PAUSE + FORGET));
    }
}
