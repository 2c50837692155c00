//! Whether an IOThread polls before it waits, and for how long.
//!
//! One that adapts polls only while there is an idle CPU for it (`completion::Gate`): it keeps its
//! spin token from turn to turn until it sleeps, so a request costs no write that others see. For how
//! long it polls it has learned by QEMU's rule, or, with `core = "auto"`, by what it waited for
//! lately, if that is longer: then it has its CPU to itself while nobody else wants it.

use std::sync::Arc;
use std::time::Duration;

use rtvirtio_completion::{AdaptivePollTime, Costs, Entry, Gate, Tokens};
use rtvirtio_spec::serve::{Completion, CorePolicy};

use crate::thread_stats::IoThreadStats;

/// How a thread polls before it waits; `max`, `grow` and `shrink`, of one that adapts, are QEMU's
/// IOThread properties of these names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Polling {
    /// Whether it polls at all, or does nothing else.
    pub completion: Completion,
    /// Whose its CPU is, if it adapts.
    pub core: CorePolicy,
    /// At most so long; zero: never (`poll-max-ns`). Half of it where a disk is waited for.
    pub max: Duration,
    /// Factor by which it grows; zero counts as 2 (`poll-grow`).
    pub grow: u32,
    /// Divisor by which it shrinks; zero: to none (`poll-shrink`).
    pub shrink: u32,
}

impl Default for Polling {
    /// QEMU's values (`max` for disks, 32,768), but for `shrink` (there 0): a driver that was late
    /// once is met halfway, not woken four times until polling pays again.
    fn default() -> Self {
        Self {
            completion: Completion::Adaptive,
            core: CorePolicy::Shared,
            max: Duration::from_nanos(65_536),
            grow: 2,
            shrink: 2,
        }
    }
}

impl Polling {
    /// The first polling time, as QEMU's.
    const FIRST_NS: u64 = 4_000;

    /// Whether it asks for spin tokens.
    pub(crate) fn is_gated(self) -> bool {
        self.completion == Completion::Adaptive && self.core != CorePolicy::Dedicated
    }

    /// What follows `poll` ns, at most `max`, when what the thread polled and slept for took
    /// `blocked` ns.
    pub(super) fn adjust(self, poll: u64, max: u64, blocked: u64) -> u64 {
        if blocked <= poll {
            poll
        } else if blocked > max {
            poll.checked_div(u64::from(self.shrink)).unwrap_or(0)
        } else if poll == 0 {
            Self::FIRST_NS.min(max)
        } else {
            let grow = if self.grow == 0 { 2 } else { u64::from(self.grow) };
            poll.saturating_mul(grow).min(max)
        }
    }
}

/// An IOThread's polling: what it has learned, and its gate.
pub(crate) struct Poller {
    polling: Polling,
    /// Of one that asks for tokens. There are none where the kernel does not say what is idle: it
    /// does not poll then.
    gate: Option<Gate>,
    /// What sleeping adds to a wait, ns.
    wake: u64,
    /// By kind: how long it polls for drivers alone, and where disks have a part in it, ns.
    times: [u64; 2],
    /// By kind, for `core = "auto"`.
    waits: Option<[AdaptivePollTime; 2]>,
}

impl Poller {
    /// `tokens`: of the CPUs on which the thread runs.
    pub(crate) fn new(polling: Polling, tokens: Option<(Arc<Tokens>, Costs)>) -> Self {
        let auto = tokens.as_ref().filter(|_| polling.core == CorePolicy::Auto);
        let waits =
            auto.map(|(_, costs)| [AdaptivePollTime::new(costs), AdaptivePollTime::new(costs)]);
        let wake = tokens.as_ref().map_or(0, |(_, costs)| costs.wake.get());
        let gate = tokens.map(|(tokens, costs)| Gate::new(tokens, &costs));
        Self { polling, gate, wake, times: [0; 2], waits }
    }

    /// Whether it never sleeps while it has a queue to look at.
    pub(super) fn is_endless(&self) -> bool {
        let Polling { completion, core, .. } = self.polling;
        let adaptive = completion == Completion::Adaptive;
        completion == Completion::Poll || adaptive && core == CorePolicy::Dedicated
    }

    /// How long to poll from now on, ns; zero: not at all.
    pub(super) fn time(&mut self, kind: usize, now: u64, stats: &IoThreadStats) -> u64 {
        let Some(gate) = &mut self.gate else { return 0 };
        let paying = self.waits.as_ref().map_or(0, |waits| waits[kind].budget());
        let time = self.times[kind].max(paying);
        if time == 0 {
            return 0;
        }
        match gate.enter(now) {
            Entry::Open => time,
            Entry::Refused | Entry::Contended => {
                IoThreadStats::add(&stats.poll_refused, 1);
                0
            }
        }
    }

    /// Whether it may go on polling, having looked at these times.
    pub(super) fn stays(&mut self, before: u64, now: u64, stats: &IoThreadStats) -> bool {
        // Who does not ask for tokens does not make room either.
        let Some(gate) = &mut self.gate else { return true };
        match gate.stay(before, now) {
            Entry::Open => return true,
            Entry::Refused => IoThreadStats::add(&stats.poll_refused, 1),
            Entry::Contended => IoThreadStats::add(&stats.poll_gaps, 1),
        }
        false
    }

    /// Polling found something after `lasted` ns.
    pub(super) fn found(&mut self, kind: usize, lasted: u64) {
        if let Some(waits) = &mut self.waits {
            waits[kind].learn(lasted);
        }
    }

    /// The thread is about to sleep: somebody else may poll.
    pub(super) fn leave(&mut self, now: u64) {
        if let Some(gate) = &mut self.gate {
            gate.leave(now);
        }
    }

    /// It polled and slept for `blocked` ns in all, of which a wake-up is what polling would have
    /// saved. How long it polls the next time, ns.
    pub(super) fn woken(&mut self, kind: usize, blocked: u64) -> u64 {
        if let Some(waits) = &mut self.waits {
            waits[kind].learn_parked(blocked);
        }
        if self.gate.is_some() {
            let max = self.polling.max.as_nanos() as u64 >> kind;
            let waited = blocked.saturating_sub(self.wake);
            self.times[kind] = self.polling.adjust(self.times[kind], max, waited);
        }
        self.times[kind]
    }

    /// The thread runs on other CPUs.
    pub(super) fn move_to(&mut self, tokens: Arc<Tokens>, now: u64) {
        if let Some(gate) = &mut self.gate {
            gate.move_to(tokens, now);
        }
    }
}
