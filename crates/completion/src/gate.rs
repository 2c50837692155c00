//! Whether a thread may spin now. Times are ns of CLOCK_MONOTONIC.
//!
//! A [`Gate`] is a thread's own. It asks for one of the [`Tokens`], and it knows what they cannot: that
//! this thread was not on its CPU while it spun (a gap), or was ready and had none (run delay). Then
//! another thread wants the CPU, whatever the number of idle ones says, and the gate stays shut for
//! a while ([`Backoff`]).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::costs::Costs;
use crate::tokens::Tokens;

/// How long the gate stays shut after a first gap, ns: some turns of a competitor.
const FIRST_HOLD: u64 = 2_000_000;
/// Doublings of that, to 16 ms: a load that has gone is noticed within 50 ms, even if something small is
/// taken for it once more.
const MOST_LEVEL: u32 = 3;
/// How often a thread looks at its own run delay, ns.
const DELAY_EVERY: u64 = 2_000_000;
/// A thread that was ready without a CPU for more than one part in so many is contended for.
const DELAY_PART: u64 = 8;

/// How long not to spin after a gap: 2 ms, twice as long for each further gap, to 16 ms; half as long
/// again for each such time without one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backoff {
    /// Holds until then, ns.
    until: u64,
    /// Doublings of the next hold.
    level: u32,
    /// When that falls, ns.
    falls_at: u64,
}

impl Backoff {
    const fn time(level: u32) -> u64 {
        FIRST_HOLD << level
    }

    /// Something else had the CPU, as was seen at `now`.
    pub(crate) fn gap(&mut self, now: u64) {
        self.forget(now);
        self.until = now + Self::time(self.level);
        self.level = (self.level + 1).min(MOST_LEVEL);
        self.falls_at = self.until + Self::time(self.level);
    }

    /// Whether not to spin at `now`.
    pub(crate) fn holds(&mut self, now: u64) -> bool {
        if now < self.until {
            return true;
        }
        self.forget(now);
        false
    }

    fn forget(&mut self, now: u64) {
        while self.level > 0 && now >= self.falls_at {
            self.level -= 1;
            self.falls_at += Self::time(self.level);
        }
    }
}

/// What a thread's `schedstat` says of its waits for a CPU.
#[derive(Debug, Default)]
struct RunDelay {
    file: Option<File>,
    /// Whether it was tried to open the file.
    opened: bool,
    /// Of the last look, ns: when, and all delay so far.
    at: u64,
    delay: u64,
}

impl RunDelay {
    /// Whether this thread had to wait for a CPU for a good part of the time since the last look, if
    /// that was long enough ago. To be called by one thread.
    fn is_contended(&mut self, now: u64) -> bool {
        let since = now.saturating_sub(self.at);
        if since < DELAY_EVERY {
            return false;
        }
        if !self.opened {
            self.opened = true;
            self.file = File::open("/proc/thread-self/schedstat").ok();
        }
        let mut text = [0; 96];
        let read = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        let Some(delay) = run_delay(&text[..read.unwrap_or(0)]) else { return false };
        let waited = delay.saturating_sub(self.delay);
        let first = self.at == 0;
        (self.at, self.delay) = (now, delay);
        !first && waited > since / DELAY_PART
    }
}

/// The second number: ns in which the thread could have run (sched-stats.rst).
fn run_delay(text: &[u8]) -> Option<u64> {
    str::from_utf8(text).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// What a gate answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Spin. The gate has a token until [`Gate::leave`].
    Open,
    /// Park: there is no token.
    Refused,
    /// Park: others wanted this thread's CPU lately.
    Contended,
}

/// Whether this thread may spin.
#[derive(Debug)]
pub struct Gate {
    tokens: Arc<Tokens>,
    /// Since when it has a token, or when that time was last accounted for, ns.
    held: Option<u64>,
    backoff: Backoff,
    delay: RunDelay,
    /// Time between two looks that is a gap, ns.
    bound: u64,
}

impl Gate {
    /// A thread's own; with the tokens of all threads that may run where it may.
    #[must_use]
    pub fn new(tokens: Arc<Tokens>, costs: &Costs) -> Self {
        // Where descriptors are not ours, gaps have to do: a file a thread would be opened while the
        // program runs.
        let delay = RunDelay { opened: tokens.is_apart(), ..RunDelay::default() };
        let backoff = Backoff::default();
        Self { tokens, held: None, backoff, delay, bound: costs.gap.get() }
    }

    /// Asks for leave to spin. Whoever has a token and asks again writes nothing that is shared.
    pub fn enter(&mut self, now: u64) -> Entry {
        if self.delay.is_contended(now) {
            self.backoff.gap(now);
        }
        let contended = self.backoff.holds(now);
        self.answer(contended, now)
    }

    /// To be called at each look of a spinning thread, which looked last at `before`. Unless it is
    /// open the thread has to park, and the gate has been left.
    pub fn stay(&mut self, before: u64, now: u64) -> Entry {
        let contended = self.is_gap(before, now);
        self.answer(contended, now)
    }

    /// Unless it is open, the gate is left.
    fn answer(&mut self, contended: bool, now: u64) -> Entry {
        let entry = if contended {
            Entry::Contended
        } else if self.has_token(now) {
            return Entry::Open;
        } else {
            Entry::Refused
        };
        self.leave(now);
        entry
    }

    /// From now on with these tokens: the thread runs elsewhere.
    pub fn move_to(&mut self, tokens: Arc<Tokens>, now: u64) {
        self.leave(now);
        self.tokens = tokens;
    }

    /// Whether the thread was not on its CPU between two looks; then it holds off.
    pub fn is_gap(&mut self, before: u64, now: u64) -> bool {
        let gap = now.saturating_sub(before) > self.bound;
        if gap {
            self.backoff.gap(now);
        }
        gap
    }

    /// Gives the token back, if there is one.
    pub fn leave(&mut self, now: u64) {
        if let Some(since) = self.held.take() {
            self.tokens.give(now.saturating_sub(since));
        }
    }

    fn has_token(&mut self, now: u64) -> bool {
        match self.held {
            Some(since) => {
                if self.tokens.account(now.saturating_sub(since)) {
                    self.held = Some(now);
                }
                self.tokens.keeps(now)
            }
            None => {
                let taken = self.tokens.take(now);
                self.held = taken.then_some(now);
                taken
            }
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.leave(self.held.unwrap_or(0));
    }
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn holds_double_to_16_ms_and_halve_without_a_gap() {
        let mut backoff = Backoff::default();
        let mut now = 1_000 * MS;
        assert!(!backoff.holds(now));
        let mut holds = Vec::new();
        for _ in 0..7 {
            backoff.gap(now);
            assert!(backoff.holds(now));
            let hold = (1..100).find(|ms| !backoff.holds(now + ms * MS)).unwrap();
            holds.push(hold);
            now += hold * MS;
        }
        assert_eq!(holds, [2, 4, 8, 16, 16, 16, 16]);
        // 16 + 8 + 4 + 2 ms without one: as if there had been none.
        now += 100 * MS;
        backoff.gap(now);
        assert!(backoff.holds(now + 2 * MS - 1) && !backoff.holds(now + 2 * MS));
    }

    #[test]
    fn run_delay_is_the_second_number() {
        assert_eq!(run_delay(b"1234 567 8\n"), Some(567));
        assert_eq!(run_delay(b""), None);
        assert_eq!(run_delay(b"12"), None);
        assert_eq!(run_delay(b"1 \xff 3"), None);
    }

    #[test]
    fn own_run_delay_can_be_read_here() {
        let mut delay = RunDelay::default();
        assert!(!delay.is_contended(1_000 * MS), "the first look knows nothing");
        assert!(delay.file.is_some() && delay.at > 0);
        // A look before its time asks nobody.
        delay.delay = 0;
        assert!(!delay.is_contended(1_001 * MS));
        assert_eq!(delay.at, 1_000 * MS);
    }
}
