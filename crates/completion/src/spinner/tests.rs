use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::*;
use crate::gate::Backoff;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const PAUSE: u64 = 40;
const CLOCK: u64 = 25;

fn costs() -> Costs {
    let look = Nanos::new(16 * PAUSE + CLOCK);
    Costs { pauses: 16, look, wake: Nanos::from_micros(20), gap: Nanos::from_micros(40) }
}

/// A machine with a script: what is idle when, and when this thread loses its CPU for how long.
struct Script {
    now: Cell<u64>,
    idle: Box<dyn Fn(u64) -> bool>,
    lost: RefCell<Vec<(u64, u64)>>,
}

impl Script {
    fn new(idle: impl Fn(u64) -> bool + 'static) -> Self {
        let lost = RefCell::default();
        Self { now: Cell::new(1_000 * MS), idle: Box::new(idle), lost }
    }

    /// Time passes, and what is lost besides. The list is by time.
    fn pass(&self, time: u64) {
        let mut now = self.now.get() + time;
        let mut lost = self.lost.borrow_mut();
        while let Some(&(at, gap)) = lost.first()
            && at <= now
        {
            now += gap;
            lost.remove(0);
        }
        self.now.set(now);
    }
}

/// The gate on that machine.
struct Scripted<'a> {
    script: &'a Script,
    backoff: Backoff,
    held: bool,
    /// Looks without a token.
    without: u32,
}

impl<'a> Scripted<'a> {
    fn new(script: &'a Script) -> Self {
        Self { script, backoff: Backoff::default(), held: false, without: 0 }
    }
}

impl World for Scripted<'_> {
    fn now(&mut self) -> u64 {
        self.script.pass(CLOCK);
        self.script.now.get()
    }

    fn pause(&mut self) {
        self.without += u32::from(!self.held);
        self.script.pass(PAUSE);
    }

    fn enter(&mut self, now: u64) -> Entry {
        if self.backoff.holds(now) {
            return Entry::Contended;
        }
        self.held = (self.script.idle)(now);
        if self.held { Entry::Open } else { Entry::Refused }
    }

    fn stay(&mut self, before: u64, now: u64) -> Entry {
        let gap = self.is_gap(before, now);
        self.held &= !gap && (self.script.idle)(now);
        match (gap, self.held) {
            (true, _) => Entry::Contended,
            (_, false) => Entry::Refused,
            _ => Entry::Open,
        }
    }

    fn is_gap(&mut self, before: u64, now: u64) -> bool {
        let gap = now - before;
        let is_gap = gap > costs().gap.get();
        if is_gap {
            self.backoff.lost(gap, now);
        }
        is_gap
    }

    fn leave(&mut self, _: u64) {
        self.held = false;
    }
}

/// One wait for what ends after `latency`; parking adds `wake`. How long it lasted.
fn wait(waits: &mut Waits, mode: Mode, world: &mut Scripted<'_>, latency: u64, wake: u64) -> u64 {
    let script = world.script;
    let began = script.now.get();
    let done = began + latency;
    let peek = || (script.now.get() >= done).then_some(1);
    let park = || {
        let left = done.saturating_sub(script.now.get());
        script.pass(left + wake);
        1
    };
    assert_eq!(waits.wait(mode, world, peek, park), 1);
    script.now.get() - began
}

#[test]
fn modes_are_written_as_they_are_read() {
    for mode in Mode::ALL {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert_eq!("Poll".parse::<Mode>(), Err(UnknownMode));
    assert_eq!(Mode::default(), Mode::Adaptive);
}

#[test]
fn spins_only_with_a_token() {
    for (idle, spun, parked, refused) in [(true, 20, 0, 0), (false, 0, 20, 20)] {
        let script = Script::new(move |_| idle);
        let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
        for _ in 0..20 {
            wait(&mut waits, Mode::Adaptive, &mut world, 8 * US, 20 * US);
        }
        let stats = waits.stats;
        assert_eq!((stats.spun, stats.parked, stats.refused), (spun, parked, refused));
        assert_eq!((world.without, world.held), (0, false));
    }
}

#[test]
fn interrupt_never_spins_and_poll_always_does() {
    let script = Script::new(|_| false);
    let mut world = Scripted::new(&script);
    let mut waits = Waits::new(costs());
    let lasted = wait(&mut waits, Mode::Interrupt, &mut world, 8 * US, 20 * US);
    assert!(lasted >= 28 * US && waits.stats.spinning == Nanos::ZERO);
    let lasted = wait(&mut waits, Mode::Poll, &mut world, 5 * MS, 20 * US);
    assert!((5 * MS..5 * MS + US).contains(&lasted), "{lasted}");
    assert_eq!((waits.stats.spun, waits.stats.parked), (1, 1));
}

#[test]
fn gives_up_at_four_times_the_latency() {
    let script = Script::new(|_| true);
    let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
    // Nothing is known: it spins for as long as a wake-up takes.
    wait(&mut waits, Mode::Adaptive, &mut world, 5 * MS, 20 * US);
    let spinning = waits.stats.spinning.get();
    assert!((20 * US..21 * US).contains(&spinning), "{spinning}");
    let mut waits = Waits::new(costs());
    for _ in 0..50 {
        wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    }
    let before = waits.stats.spinning.get();
    wait(&mut waits, Mode::Adaptive, &mut world, 5 * MS, 20 * US);
    let spinning = waits.stats.spinning.get() - before;
    assert!((4 * 30 * US..5 * 30 * US).contains(&spinning), "{spinning}");
    assert_eq!(waits.stats.gaps, 0);
}

#[test]
fn does_not_spin_where_parking_is_as_good() {
    let script = Script::new(|_| true);
    for (latency, spins) in [(100 * US, true), (170 * US, true), (200 * US, false), (MS, false)] {
        let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
        for _ in 0..50 {
            wait(&mut waits, Mode::Adaptive, &mut world, latency, 20 * US);
        }
        let before = waits.stats;
        wait(&mut waits, Mode::Adaptive, &mut world, latency, 20 * US);
        assert_eq!(waits.stats.spun > before.spun, spins, "{latency}");
        // And comes back when the waits are short again.
        for _ in 0..60 {
            wait(&mut waits, Mode::Adaptive, &mut world, 8 * US, 20 * US);
        }
        let before = waits.stats;
        wait(&mut waits, Mode::Adaptive, &mut world, 8 * US, 20 * US);
        assert_eq!(waits.stats.spun, before.spun + 1, "{latency}");
    }
}

#[test]
fn gap_parks_at_once_and_holds_off() {
    let script = Script::new(|_| true);
    let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
    for _ in 0..20 {
        wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    }
    let before = waits.stats;
    // Another thread has the CPU for 3 ms, 10 µs into a wait of 10 ms.
    let at = script.now.get() + 10 * US;
    script.lost.borrow_mut().push((at, 3 * MS));
    wait(&mut waits, Mode::Adaptive, &mut world, 10 * MS, 20 * US);
    let after = waits.stats;
    assert_eq!((after.gaps, after.parked), (before.gaps + 1, before.parked + 1));
    let spun = after.spinning.get() - before.spinning.get();
    assert!((3 * MS..3 * MS + 11 * US).contains(&spun), "{spun}");
    // In that wait some of the 16 ms for which it holds off went by: another gap, and it parks.
    waits.patience.latency = 30 * US;
    let now = script.now.get();
    world.backoff.lost(2 * MS, now);
    while script.now.get() < now + 16 * MS - 100 * US {
        wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    }
    assert_eq!(waits.stats.spun, after.spun);
    script.pass(200 * US);
    wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    assert_eq!(waits.stats.spun, after.spun + 1);
}

#[test]
fn gap_that_hides_the_completion_is_seen_too() {
    let script = Script::new(|_| true);
    let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
    for _ in 0..20 {
        wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    }
    let before = waits.stats;
    // Within a pause, so that the next look finds the completion.
    script.lost.borrow_mut().push((script.now.get() + 10 * US + 100, 3 * MS));
    wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    assert_eq!((waits.stats.gaps, waits.stats.parked), (1, before.parked));
    wait(&mut waits, Mode::Adaptive, &mut world, 30 * US, 20 * US);
    assert_eq!(waits.stats.parked, before.parked + 1);
}

/// Load comes and goes each second. While it is there, whoever spins loses the CPU for 3 ms now and
/// then, and wake-ups take up to a millisecond; tokens know nothing of it.
#[test]
fn follows_a_change_of_load_within_50_ms() {
    let second = 1_000 * MS;
    let is_busy = move |now: u64| (now / second).is_multiple_of(2);
    let script = Script::new(|_| true);
    let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
    let mut ends = Vec::new();
    while script.now.get() < 7 * second {
        let now = script.now.get();
        let wake = if is_busy(now) { MS } else { 20 * US };
        if is_busy(now) && script.lost.borrow().is_empty() {
            script.lost.borrow_mut().push((now + 5 * US, 3 * MS));
        }
        let before = waits.stats;
        wait(&mut waits, Mode::Adaptive, &mut world, 8 * US, wake);
        let spun = waits.stats.spun > before.spun && waits.stats.gaps == before.gaps;
        ends.push((now, spun));
        if !is_busy(script.now.get()) {
            script.lost.borrow_mut().clear();
        }
    }
    for from in (1..7).map(|n| n * second) {
        let settled = ends.iter().filter(|(at, _)| (from + 50 * MS..from + second).contains(at));
        let (mut all, mut spun) = (0, 0);
        for (_, did) in settled {
            all += 1;
            spun += u32::from(*did);
        }
        let share = f64::from(spun) / f64::from(all);
        if is_busy(from) {
            assert!(share < 0.1, "busy, from {from}: {share}");
        } else {
            assert!(share > 0.95, "idle, from {from}: {share}");
        }
    }
}

proptest! {
    /// Whatever waits last and whenever CPUs are idle or lost: tokens are given back, none is spun
    /// without, and spinning stays within its budget but for one look and what was lost.
    #[test]
    fn every_token_is_given_back(
        latencies in prop::collection::vec(0_u64..400_000, 1..80),
        lost in prop::collection::vec((0_u64..20_000_000, 1_000_u64..5_000_000), 0..20),
        period in 10_000_u64..5_000_000,
        wake in 1_000_u64..100_000,
    ) {
        let script = Script::new(move |now| (now / period).is_multiple_of(2));
        let mut lost: Vec<_> = lost.into_iter().map(|(at, gap)| (1_000 * MS + at, gap)).collect();
        lost.sort_unstable();
        let all_lost: u64 = lost.iter().map(|(_, gap)| gap).sum();
        *script.lost.borrow_mut() = lost;
        let (mut waits, mut world) = (Waits::new(costs()), Scripted::new(&script));
        let mut budgets = 0;
        for latency in latencies {
            let budget = waits.patience.budget();
            wait(&mut waits, Mode::Adaptive, &mut world, latency, wake);
            prop_assert!(!world.held);
            budgets += budget + costs().look.get() + PAUSE;
        }
        let stats = waits.stats;
        prop_assert_eq!(world.without, 0);
        prop_assert_eq!(stats.waits, stats.spun + stats.parked);
        prop_assert!(stats.spinning.get() <= budgets + all_lost);
    }
}

#[test]
fn may_spin_only_where_a_wait_would() {
    let tokens = Arc::new(Tokens::new().unwrap());
    let spinner = |mode| Spinner::new(Arc::clone(&tokens), mode, costs());
    assert!(spinner(Mode::Poll).may_spin());
    assert!(!spinner(Mode::Interrupt).may_spin());
    // Ten wake-ups: parking is as good, whether there is a token or not.
    let mut adaptive = spinner(Mode::Adaptive);
    adaptive.learn(Nanos::from_micros(220));
    assert!(!adaptive.may_spin());
    assert_eq!(tokens.spinners(), 0);
}
