//! Whether a thread may spin now. Times are ns of CLOCK_MONOTONIC.
//!
//! A [`Gate`] is a thread's own. It asks for one of the [`Tokens`], and it knows what they cannot: that
//! this thread was not on its CPU while it spun (a gap), or was ready and had none (run delay). Then
//! another thread wants the CPU, whatever the number of idle ones says, and the gate stays shut for
//! a while ([`Backoff`]).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::clock::cpu_time;
use crate::costs::Costs;
use crate::tokens::Tokens;

/// The gate stays shut for so many times what the thread had to do without its CPU: a visit of 60 µs
/// costs half a millisecond, and whoever has turns of milliseconds shares with a spinner for a tenth of
/// the time.
const HOLD_TIMES: u64 = 8;
/// But no longer than this, ns: a load that has gone is noticed within 50 ms, even if something small is
/// taken for it once more.
const MAX_HOLD: u64 = 16_000_000;
/// How often a thread looks at its own run delay, ns.
const DELAY_EVERY: u64 = 2_000_000;
/// A thread that was ready without a CPU for more than one part in so many is contended for.
const DELAY_PART: u64 = 8;

/// How long not to spin after the CPU was lost: eight times as long as it was lost, at most 16 ms.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backoff {
    /// Holds until then, ns.
    until: u64,
}

impl Backoff {
    /// Something else had the CPU for `lost` ns, as was seen at `now`.
    pub(crate) fn lost(&mut self, lost: u64, now: u64) {
        self.until = self.until.max(now + lost.saturating_mul(HOLD_TIMES).min(MAX_HOLD));
    }

    /// Whether not to spin at `now`.
    pub(crate) const fn holds(&self, now: u64) -> bool {
        now < self.until
    }
}

/// What a thread's `schedstat` says of its waits for a CPU.
#[derive(Debug, Default)]
struct RunDelay {
    file: Option<File>,
    /// Whether it was tried to open the file.
    opened: bool,
    /// When it was looked at last, ns.
    at: u64,
    /// Then.
    before: Delays,
}

/// Of a thread so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Delays {
    /// It could have run for so long, ns.
    waited: u64,
    /// It was given a CPU so often.
    runs: u64,
}

impl RunDelay {
    /// For how long this thread had to wait for a CPU since the last look, ns, beyond the `wake` ns
    /// that an idle one takes to begin; zero unless that was a good part of the time, or if the last
    /// look is not long ago. To be called by one thread.
    fn lost(&mut self, wake: u64, now: u64) -> u64 {
        let since = now.saturating_sub(self.at);
        if since < DELAY_EVERY {
            return 0;
        }
        if !self.opened {
            self.opened = true;
            self.file = File::open("/proc/thread-self/schedstat").ok();
        }
        let mut text = [0; 96];
        let read = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        let Some(delays) = delays(&text[..read.unwrap_or(0)]) else { return 0 };
        let first = self.at == 0;
        let before = std::mem::replace(&mut self.before, delays);
        self.at = now;
        let runs = delays.runs.saturating_sub(before.runs);
        let waited = delays.waited.saturating_sub(before.waited);
        let lost = waited.saturating_sub(runs.saturating_mul(wake));
        if first || lost <= since / DELAY_PART { 0 } else { lost }
    }
}

/// The second and third number: ns in which the thread could have run, and how often it was given a
/// CPU (sched-stats.rst).
fn delays(text: &[u8]) -> Option<Delays> {
    let mut numbers = str::from_utf8(text).ok()?.split_ascii_whitespace().skip(1);
    let mut number = || numbers.next()?.parse().ok();
    Some(Delays { waited: number()?, runs: number()? })
}

/// What a thread computes besides spinning: submitting, taking what has ended, its own work.
#[derive(Debug, Default)]
struct Work {
    /// Of the last look, ns: when, the thread's CPU time, and what it had spun with a token.
    at: u64,
    cpu: u64,
    spun: u64,
    /// CPUs that it took in the time before.
    cpus: f64,
}

impl Work {
    /// CPUs that it takes, by a time of some ms. `cpu`: the thread's CPU time so far, `spun`: what it
    /// has spun with a token; ns.
    fn cpus(&mut self, now: u64, spun: u64, cpu: impl Fn() -> u64) -> f64 {
        let since = now.saturating_sub(self.at);
        if since >= DELAY_EVERY {
            let cpu = cpu();
            let worked =
                cpu.saturating_sub(self.cpu).saturating_sub(spun.saturating_sub(self.spun));
            // The first look knows nothing.
            self.cpus = if self.at == 0 { 0.0 } else { (worked as f64 / since as f64).min(1.0) };
            (self.at, self.cpu, self.spun) = (now, cpu, spun);
        }
        self.cpus
    }
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
    /// What it has spun with tokens, ns.
    spun: u64,
    work: Work,
    backoff: Backoff,
    delay: RunDelay,
    /// Time between two looks that is a gap, ns.
    bound: u64,
    /// What a wake-up takes on an idle CPU, ns.
    wake: u64,
}

impl Gate {
    /// A thread's own; with the tokens of all threads that may run where it may.
    #[must_use]
    pub fn new(tokens: Arc<Tokens>, costs: &Costs) -> Self {
        // Where descriptors are not ours, gaps have to do: a file a thread would be opened while the
        // program runs.
        let delay = RunDelay { opened: tokens.is_apart(), ..RunDelay::default() };
        let backoff = Backoff::default();
        let (bound, wake) = (costs.gap.get(), costs.wake.get());
        let (work, spun) = (Work::default(), 0);
        Self { tokens, held: None, spun, work, backoff, delay, bound, wake }
    }

    /// Asks for leave to spin. Whoever has a token and asks again writes nothing that is shared.
    pub fn enter(&mut self, now: u64) -> Entry {
        self.backoff.lost(self.delay.lost(self.wake, now), now);
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
        let gap = now.saturating_sub(before);
        let is_gap = gap > self.bound;
        if is_gap {
            self.backoff.lost(gap, now);
        }
        is_gap
    }

    /// Gives the token back, if there is one.
    pub fn leave(&mut self, now: u64) {
        if let Some(since) = self.held.take() {
            let spun = now.saturating_sub(since);
            self.spun += spun;
            self.tokens.give(spun);
        }
    }

    fn has_token(&mut self, now: u64) -> bool {
        match self.held {
            Some(since) => {
                let spun = now.saturating_sub(since);
                if self.tokens.account(spun) {
                    self.spun += spun;
                    self.held = Some(now);
                }
                self.tokens.keeps(now)
            }
            None => {
                let work = self.work.cpus(now, self.spun, cpu_time);
                let taken = self.tokens.take(now, work);
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
    fn holds_eight_times_what_was_lost_and_16_ms_at_most() {
        let mut backoff = Backoff::default();
        let now = 1_000 * MS;
        assert!(!backoff.holds(now));
        for (lost, held) in
            [(60_000, 480_000), (MS, 8 * MS), (3 * MS, 16 * MS), (u64::MAX, 16 * MS)]
        {
            let now = now + held;
            backoff.lost(lost, now);
            assert!(backoff.holds(now + held - 1) && !backoff.holds(now + held), "{lost}");
        }
        // What was less does not shorten it.
        let now = 2_000 * MS;
        backoff.lost(MS, now);
        backoff.lost(0, now + MS);
        assert!(backoff.holds(now + 8 * MS - 1) && !backoff.holds(now + 8 * MS));
    }

    #[test]
    fn delays_are_the_second_and_third_number() {
        assert_eq!(delays(b"1234 567 8\n"), Some(Delays { waited: 567, runs: 8 }));
        for text in [&b""[..], b"12", b"1 2", b"1 \xff 3"] {
            assert_eq!(delays(text), None);
        }
    }

    #[test]
    fn own_delays_are_read_here_and_wake_ups_of_idle_cpus_are_none() {
        let now = 1_000 * MS;
        let mut delay = RunDelay::default();
        assert_eq!(delay.lost(0, now), 0, "the first look knows nothing");
        assert!(delay.file.is_some() && delay.at == now);
        // A look before its time asks nobody.
        delay.before = Delays::default();
        assert_eq!((delay.lost(0, now + MS), delay.at), (0, now));
        // The file's number of runs is at least 1: what it says cannot be more than a wake-up without
        // end has taken.
        assert_eq!(delay.lost(u64::MAX, now + 2 * MS), 0);
        assert!(delay.before.runs > 0);
    }

    #[test]
    fn work_is_cpu_time_that_was_not_spun() {
        let mut work = Work::default();
        let mut cpus = |ms: u64, spun: u64, cpu: u64| work.cpus(ms * MS, spun, || cpu);
        assert_eq!(cpus(1_000, 5 * MS, 70 * MS), 0.0);
        // 4 ms, of them 3 on a CPU, of those 2 spun.
        assert_eq!(cpus(1_004, 7 * MS, 73 * MS), 0.25);
        assert_eq!(cpus(1_005, 7 * MS, 74 * MS), 0.25, "too soon for another look");
        // More was spun than it ran: others had its CPU.
        assert_eq!(cpus(1_008, 9 * MS, 74 * MS), 0.0);
    }

    #[test]
    fn waiting_for_an_eighth_of_the_time_is_lost() {
        let path = std::env::temp_dir().join(format!("schedstat-{}", std::process::id()));
        let mut delay = RunDelay { opened: true, ..RunDelay::default() };
        let mut look = |text: &str, now: u64| {
            std::fs::write(&path, text).unwrap();
            delay.file = Some(File::open(&path).unwrap());
            delay.lost(20_000, now)
        };
        assert_eq!(look("0 5000000 10\n", 1_000 * MS), 0);
        // In 10 ms: 100 wake-ups of 20 µs, and 1 ms more; an eighth is 1.25 ms.
        assert_eq!(look("0 8000000 110\n", 1_010 * MS), 0);
        assert_eq!(look("0 11300000 210\n", 1_020 * MS), 1_300_000);
        std::fs::remove_file(&path).unwrap();
    }
}
