//! A thread's waits: spin or park, by what such waits have lasted.
//!
//! With leave of the [`Gate`] the thread looks after each pause, and at the clock and the gate each
//! 16 pauses or so. It gives up and parks
//! - when its [`AdaptivePollTime`] ends;
//! - at once, and for a while, when it was not on its CPU;
//! - when the tokens become fewer.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rtvirtio_units::Nanos;

use crate::adaptive_poll_time::AdaptivePollTime;
use crate::clock::now;
use crate::costs::Costs;
use crate::gate::{Entry, Gate};
use crate::tokens::Tokens;

/// How a thread waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// It parks.
    Interrupt,
    /// It spins, whatever that costs others.
    Poll,
    /// It spins while a CPU is idle and that pays, else it parks.
    #[default]
    Adaptive,
}

impl Mode {
    /// All.
    pub const ALL: [Self; 3] = [Self::Interrupt, Self::Poll, Self::Adaptive];

    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A word that is no [`Mode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a completion mode: write interrupt, poll or adaptive")]
pub struct UnknownMode;

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or(UnknownMode)
    }
}

/// What a [`Spinner`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpinnerStats {
    /// Waits.
    pub waits: u64,
    /// Of those, ended while it spun, or before it began.
    pub spun: u64,
    /// Of those, parked, after spinning or at once.
    pub parked: u64,
    /// Times that it was not on its CPU while it spun.
    pub gaps: u64,
    /// Times that there was no token, or none any more.
    pub refused: u64,
    /// Time that it spun.
    pub spinning: Nanos,
    /// Time that it was parked.
    pub parking: Nanos,
}

/// What a wait asks of the world: the time, and the gate.
trait World {
    fn now(&mut self) -> u64;
    fn pause(&mut self);
    fn enter(&mut self, now: u64) -> Entry;
    fn stay(&mut self, before: u64, now: u64) -> Entry;
    fn is_gap(&mut self, before: u64, now: u64) -> bool;
    fn leave(&mut self, now: u64);
}

impl World for Gate {
    fn now(&mut self) -> u64 {
        now()
    }

    fn pause(&mut self) {
        std::hint::spin_loop();
    }

    fn enter(&mut self, now: u64) -> Entry {
        Gate::enter(self, now)
    }

    fn stay(&mut self, before: u64, now: u64) -> Entry {
        Gate::stay(self, before, now)
    }

    fn is_gap(&mut self, before: u64, now: u64) -> bool {
        Gate::is_gap(self, before, now)
    }

    fn leave(&mut self, now: u64) {
        Gate::leave(self, now);
    }
}

/// A thread's way to wait.
#[derive(Debug)]
pub struct Spinner {
    mode: Mode,
    gate: Gate,
    waits: Waits,
}

impl Spinner {
    /// Of the thread that calls. After fork(2) the child needs its own, with tokens of its own.
    #[must_use]
    pub fn new(tokens: Arc<Tokens>, mode: Mode, costs: Costs) -> Self {
        Self { mode, gate: Gate::new(tokens, &costs), waits: Waits::new(costs) }
    }

    /// Waits for one completion that has been submitted: looks with `peek` while a token and the
    /// budget last, then `park`s. `peek` should cost a few ns; `park` sleeps until it has what `peek`
    /// would find.
    pub fn wait<T>(&mut self, peek: impl FnMut() -> Option<T>, park: impl FnMut() -> T) -> T {
        self.waits.wait(self.mode, &mut self.gate, peek, park)
    }

    /// Whether a wait that began now would spin. For who else does something that needs no completion,
    /// such as a system call, and says by [`Spinner::learn`] how long that took.
    pub fn may_spin(&mut self) -> bool {
        match self.mode {
            Mode::Interrupt => false,
            Mode::Poll => true,
            Mode::Adaptive => {
                let now = now();
                let budget = self.waits.ask(&mut self.gate, now);
                self.gate.leave(now);
                budget > 0
            }
        }
    }

    /// Something in the place of a wait lasted so long, asleep.
    pub fn learn(&mut self, lasted: Nanos) {
        self.waits.patience.learn_parked(lasted.get());
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> SpinnerStats {
        self.waits.stats
    }
}

/// The rule over waits, without a clock of its own.
#[derive(Debug)]
struct Waits {
    patience: AdaptivePollTime,
    pauses: u32,
    stats: SpinnerStats,
}

impl Waits {
    fn new(costs: Costs) -> Self {
        Self {
            patience: AdaptivePollTime::new(&costs),
            pauses: costs.pauses,
            stats: SpinnerStats::default(),
        }
    }

    fn wait<T>(
        &mut self,
        mode: Mode,
        world: &mut impl World,
        mut peek: impl FnMut() -> Option<T>,
        mut park: impl FnMut() -> T,
    ) -> T {
        self.stats.waits += 1;
        if let Some(done) = peek() {
            self.stats.spun += 1;
            self.patience.learn(0);
            return done;
        }
        let began = world.now();
        let budget = match mode {
            Mode::Interrupt => 0,
            Mode::Poll => u64::MAX,
            Mode::Adaptive => self.ask(world, began),
        };
        let mut parked = began;
        if budget > 0 {
            let (done, ended) = self.spin(mode, world, began, budget, &mut peek);
            let lasted = ended.saturating_sub(began);
            self.stats.spinning = self.stats.spinning.saturating_add(Nanos::new(lasted));
            if let Some(done) = done {
                self.stats.spun += 1;
                self.patience.learn(lasted);
                return done;
            }
            parked = ended;
        }
        self.stats.parked += 1;
        let done = park();
        let ended = world.now();
        let asleep = Nanos::new(ended.saturating_sub(parked));
        self.stats.parking = self.stats.parking.saturating_add(asleep);
        self.patience.learn_parked(ended.saturating_sub(began));
        done
    }

    /// How long an adaptive thread may spin.
    fn ask(&mut self, world: &mut impl World, now: u64) -> u64 {
        let budget = self.patience.budget();
        if budget > 0 {
            match world.enter(now) {
                Entry::Open => return budget,
                Entry::Refused => self.stats.refused += 1,
                Entry::Contended => {}
            }
        }
        0
    }

    /// Looks until the completion is there or it is to park; when that was, too. The gate has been
    /// left.
    fn spin<T>(
        &mut self,
        mode: Mode,
        world: &mut impl World,
        began: u64,
        budget: u64,
        mut peek: impl FnMut() -> Option<T>,
    ) -> (Option<T>, u64) {
        let adapts = mode == Mode::Adaptive;
        let mut before = began;
        loop {
            let mut done = None;
            for _ in 0..self.pauses {
                world.pause();
                done = peek();
                if done.is_some() {
                    break;
                }
            }
            let now = world.now();
            let entry = if done.is_none() && adapts {
                world.stay(before, now)
            } else if world.is_gap(before, now) {
                Entry::Contended
            } else {
                Entry::Open
            };
            match entry {
                Entry::Open => {}
                Entry::Refused => self.stats.refused += 1,
                Entry::Contended => self.stats.gaps += 1,
            }
            let over = adapts && (entry != Entry::Open || now.saturating_sub(began) >= budget);
            if done.is_some() || over {
                world.leave(now);
                return (done, now);
            }
            before = now;
        }
    }
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests;
