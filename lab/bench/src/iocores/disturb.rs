//! What others do to the data plane's control side, and what the data path notices: its p99 with a
//! disturbance and without, a second each by turns: without, with, with, without, and so on, so that neither
//! always follows the other.
//!
//! Both are of the same server and clients: where the scheduler has placed their threads changes a p99 by more than
//! what is looked for, and differs from one server to the next. CPUs do not halt meanwhile (`awake`), and compared are
//! the p99s of seconds, in the middle: a machine that is itself a VM stands still for some 10 ms a few times a minute,
//! and one such second takes the p99 of all requests anywhere. What the middle does not show is beside it, over all. The load is the same all the time: VMs at a steady rate
//! on two IOThreads under `advise`, whose monitor works but changes nothing; all of it is verified. The disturbances,
//! each over the whole of its seconds:
//!
//! - *none*: nothing happens in either, which shows how far two p99s are apart by themselves.
//! - *monitor*: its thread is ended, and an eighth of a second later begun anew, again and again. A thread
//!   cannot be killed without its process; to the data path this is the same: it stops between two
//!   samples. (That a policy which panics ends alone is tested in `rtvirtio_dataplane`.)
//! - *reader*: clients follow the event stream and never read it, for two seconds: 200 events each fill their sockets.
//!   There are as many events without them: what causes them is no disturbance.
//! - *malformed*: 10,000 requests that are none, or ask for what is not there.
//!
//! Who disturbs is nice: looked for is what the server makes of it, not what its peer takes of two CPUs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_sim::scenario::{Load, Phase, PhaseKind, Scenario, Span, Stream, Vm};
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_spec::serve::Policy;
use rtvirtio_testbed::awake::Awake;
use rtvirtio_testbed::client::MAX_DEPTH;
use rtvirtio_testbed::control::{ask_malformed, never_read, send_queue, switch_monitor};
use rtvirtio_testbed::named;
use rtvirtio_testbed::scenario::{AREA, Clock, Tally, cpus};
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_testbed::window::us;
use rtvirtio_units::{Bytes, Iops, Nanos};
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cell::Settings;
use super::trial::{Measured, duration, trial};
use crate::experiment::{Experiment, Report, Run};
use crate::stats::{Runs, Spread, median, runs};
use crate::table::Table;
use crate::verdict::{self, Verdict};

/// Before it all areas are written and read, over and over: memory that nobody has touched yet is slow, in a VM by
/// tens of ms. The end of it is quiet.
const WARM_UP: Nanos = Nanos::from_millis(2_000);
const QUIET: Nanos = Nanos::from_millis(250);
/// How long it is disturbed, and how long it is not, by turns: 8,000 requests.
const SLICE: Nanos = Nanos::from_millis(1_000);
/// VMs with a load, and requests a second of each of their queues.
const VMS: u16 = 4;
const QUEUES: u16 = 2;
const RATE: f64 = 1_000.0;
/// Requests that are none, in a cell.
const REQUESTS: u32 = 10_000;
/// Clients that do not read, and events a second that they are sent.
const READERS: usize = 4;
const EVENTS: f64 = 200.0;
/// Of who disturbs.
const NICE: i32 = 19;
/// How long the monitor runs, and how long it does not.
const HALF: Duration = Duration::from_millis(125);
/// Fewest repetitions that are judged, and what the p99 may grow by.
const MIN_RUNS: usize = 3;
const MARGIN: f64 = 0.1;

named! {
    /// What happens beside the load.
    pub enum Disturbance {
        /// Nothing.
        None = "none",
        /// The monitor ends and begins.
        Monitor = "monitor",
        /// Clients do not read their events.
        Reader = "reader",
        /// Malformed requests.
        Malformed = "malformed",
    }
}

/// Requests of all seconds with a disturbance, or without.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Side {
    /// 99 % of each second's requests were no longer, µs.
    pub seconds_p99_us: Vec<f64>,
    /// How many requests in all.
    pub n: u64,
    /// Half of them were no longer, µs.
    pub p50_us: f64,
    /// 99 %, µs.
    pub p99_us: f64,
    /// 99.9 %, µs.
    pub p999_us: f64,
}

impl Side {
    fn of<'a>(seconds: impl Iterator<Item = &'a Tally>) -> Result<Self> {
        let mut all = Tally::new()?;
        let mut seconds_p99_us = Vec::new();
        for second in seconds {
            all.add(second)?;
            seconds_p99_us.push(us(&second.latencies, 0.99));
        }
        let [p50_us, p99_us, p999_us] =
            [0.5, 0.99, 0.999].map(|quantile| us(&all.latencies, quantile));
        Ok(Self { seconds_p99_us, n: all.latencies.len(), p50_us, p99_us, p999_us })
    }

    /// That of the second in the middle, µs.
    fn second_p99_us(&self) -> f64 {
        median(self.seconds_p99_us.iter().copied())
    }
}

/// Whether a second, by its number, is a disturbed one.
const fn is_disturbed(second: usize) -> bool {
    matches!(second % 4, 1 | 2)
}

/// A cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// What happened.
    pub disturbance: Disturbance,
    /// From 0.
    pub repetition: u32,
    /// The seconds without it.
    pub quiet: Side,
    /// Those with it.
    pub disturbed: Side,
    /// How often it was done: the monitor ended, events were caused, requests were sent.
    pub done: u64,
    /// How late a sleeping thread woke.
    pub canary: Canary,
    /// The machine meanwhile.
    pub machine: Machine,
    /// When it ran.
    pub at: String,
}

/// A campaign.
#[derive(Debug)]
pub struct Benchmark {
    /// How often each.
    pub repetitions: u32,
    /// For how many seconds of each run it is disturbed; for as many it is not.
    pub seconds: u32,
    /// CPU that each request costs its IOThread on top, µs.
    pub cpu_us: u32,
}

impl Experiment for Benchmark {
    type Key = (Disturbance, u32);
    type Cell = Cell;
    type Setup = Scenario;

    const FILE: &'static str = "disturb.jsonl";

    fn keys(&self) -> Result<Vec<(Disturbance, u32)>> {
        let of = |repetition: u32| {
            let mut all = Disturbance::ALL;
            all.rotate_left(repetition as usize % Disturbance::ALL.len());
            all.map(|disturbance| (disturbance, repetition))
        };
        Ok((0..self.repetitions).flat_map(of).collect())
    }

    fn is_of(cell: &Cell, key: &(Disturbance, u32)) -> bool {
        (cell.disturbance, cell.repetition) == *key
    }

    fn label(&self, (disturbance, repetition): &(Disturbance, u32)) -> String {
        format!("disturbed by {disturbance}, repetition {repetition}")
    }

    fn expected(&self, _: &(Disturbance, u32)) -> Duration {
        scenario(self.seconds).map_or(Duration::ZERO, |scenario| duration(&scenario))
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        let is_same = cell.disturbed.seconds_p99_us.len() == self.seconds as usize;
        (!is_same).then_some("another length")
    }

    fn set_up(&self, _: &[(Disturbance, u32)], _: &Run<'_>) -> Result<Scenario> {
        scenario(self.seconds)
    }

    fn measure(
        &self,
        scenario: &mut Scenario,
        &(disturbance, repetition): &(Disturbance, u32),
        run: &Run<'_>,
    ) -> Result<Cell> {
        let settings =
            Settings { queues: QUEUES, cpu_us: self.cpu_us, kib_ns: 0, ..Settings::default() };
        let policy = Policy::Advise.name();
        let program = rtvirtio()?;
        let trial = trial(&program, &settings, scenario, (policy, 2));
        let done = AtomicU64::new(0);
        let awake = Awake::keep(&cpus()?)?;
        let measured = Measured::of(&trial, run.interrupted, |control, clock| {
            setpriority_process(Some(gettid()), NICE).context("be nice")?;
            let who = Disturber { control, clock, done: &done };
            let mut readers = Vec::new();
            for (second, phase) in scenario.phases[1..].iter().enumerate() {
                let slice = phase.span;
                if !clock.sleep_until(slice.start) {
                    break;
                }
                let end = slice.stop;
                match (disturbance, is_disturbed(second)) {
                    (Disturbance::Reader, disturbed) => {
                        let wanted = if disturbed { READERS } else { 0 };
                        readers.truncate(wanted);
                        while readers.len() < wanted {
                            readers.push(never_read(control)?);
                        }
                        who.cause_events(end)?;
                    }
                    (Disturbance::None, _) | (_, false) => {}
                    (Disturbance::Monitor, true) => who.end_the_monitor(end)?,
                    (Disturbance::Malformed, true) => {
                        who.malformed(end, REQUESTS.div_ceil(self.seconds))?;
                    }
                }
            }
            Ok(())
        })?;
        drop(awake);
        let side = |disturbed| {
            let seconds = measured.tallies[1..].iter().enumerate();
            let of = seconds.filter(|(second, _)| is_disturbed(*second) == disturbed);
            Side::of(of.map(|(_, tally)| tally))
        };
        let (quiet, disturbed) = (side(false)?, side(true)?);
        Ok(Cell {
            disturbance,
            repetition,
            quiet,
            disturbed,
            done: done.into_inner(),
            canary: measured.canary,
            machine: measured.machine,
            at: jiff::Timestamp::now().to_string(),
        })
    }

    fn report(&self, cells: &[Cell], _: &Run<'_>) -> Result<Report> {
        let json = json!({ "cells": cells, "verdicts": judge(cells) });
        Ok(Report { table: "disturb.txt", ..Report::of(table(cells), json) })
    }
}

/// VMs at a steady rate, and one whose disk is never there: its queues are moved to make events. After the warm-up, the
/// seconds that are disturbed by turns.
fn scenario(seconds: u32) -> Result<Scenario> {
    let at = |slices: u32| WARM_UP.saturating_add(Nanos::new(SLICE.get() * u64::from(slices)));
    let span = Span { start: Nanos::ZERO, stop: at(2 * seconds) };
    let warm_up = Span { start: Nanos::ZERO, stop: WARM_UP.saturating_sub(QUIET) };
    let judged = Span { start: WARM_UP, stop: span.stop };
    let rate = Load::Rate(Iops::new(RATE)?);
    let streams = |queue| {
        [
            Stream { queue, span: warm_up, block: AREA, load: Load::Depth(MAX_DEPTH as u16) },
            Stream { queue, span: judged, block: Bytes::from_kib(4), load: rate },
        ]
    };
    let vm = Vm {
        queues: QUEUES,
        pairs: 0,
        plugged: vec![span],
        streams: (0..QUEUES).flat_map(streams).collect(),
        burners: vec![],
    };
    let absent = Vm { queues: QUEUES, pairs: 0, plugged: vec![], streams: vec![], burners: vec![] };
    let mut vms = vec![vm; usize::from(VMS)];
    vms.push(absent);
    let phase = |start, stop| Phase { kind: PhaseKind::Mixed, span: Span { start, stop } };
    let mut phases = vec![phase(Nanos::ZERO, WARM_UP)];
    phases.extend((0..2 * seconds).map(|slice| phase(at(slice), at(slice + 1))));
    let scenario = Scenario { seed: 1, phases, vms };
    scenario.check()?;
    Ok(scenario)
}

/// Who disturbs.
struct Disturber<'a> {
    control: &'a ControlClient,
    clock: &'a Clock,
    /// How often it was done.
    done: &'a AtomicU64,
}

impl Disturber<'_> {
    /// Calls `act` with numbers from 0, `every` so long, until `end`; it says whether that counts.
    fn pace(
        &self,
        every: Duration,
        end: Nanos,
        mut act: impl FnMut(u64) -> Result<bool>,
    ) -> Result<()> {
        let mut due = self.clock.now();
        for number in 0.. {
            if due >= end || !self.clock.sleep_until(due) {
                return Ok(());
            }
            self.done.fetch_add(act(number)?.into(), Ordering::Relaxed);
            due = due.saturating_add(Nanos::from(every));
        }
        Ok(())
    }

    fn end_the_monitor(&self, end: Nanos) -> Result<()> {
        self.pace(HALF, end, |number| {
            let ends = number % 2 == 0;
            switch_monitor(self.control, !ends)?;
            Ok(ends)
        })
    }

    fn cause_events(&self, end: Nanos) -> Result<()> {
        let absent = format!("vm{VMS}");
        self.pace(Duration::from_secs_f64(1.0 / EVENTS), end, |number| {
            send_queue(self.control, &absent, number)?;
            Ok(true)
        })
    }

    fn malformed(&self, end: Nanos, requests: u32) -> Result<()> {
        // All of them until then, and a little before.
        let left = end.saturating_sub(self.clock.now()).as_secs_f64();
        let every = Duration::from_secs_f64(0.9 * left / f64::from(requests));
        let mut sent = 0;
        self.pace(every, end, |number| {
            let is_one = sent < requests;
            if is_one {
                ask_malformed(self.control.socket(), number)?;
                sent += 1;
            }
            Ok(is_one)
        })?;
        ensure!(
            self.clock.is_stopped() || sent == requests,
            "{sent} of {requests} malformed requests went into a second: use a longer --seconds"
        );
        self.control.snapshot().context("ask for a snapshot after malformed requests")?;
        Ok(())
    }
}

/// By how much the p99 of a second grows in a run; none without a request.
fn growth(cell: &Cell) -> Option<f64> {
    let growth = cell.disturbed.second_p99_us() / cell.quiet.second_p99_us() - 1.0;
    growth.is_finite().then_some(growth)
}

/// What the p99 grows by in runs with a disturbance.
fn growths(cells: &[Cell], of: Disturbance) -> Option<Spread> {
    Spread::of(cells.iter().filter(|cell| cell.disturbance == of).filter_map(growth))
}

/// The median and the range of growths, %.
fn percent(growth: Option<Spread>) -> String {
    let Some(Spread { value, low, high, .. }) = growth.map(|growth| growth.over(0.01)) else {
        return "unknown".to_owned();
    };
    format!("{value:+.1} ({low:+.1} to {high:+.1})")
}

/// Whether the p99 stays with each disturbance.
#[must_use]
pub fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let marks = [
        ("6 monitor ends", Disturbance::Monitor),
        ("6 reader does not read", Disturbance::Reader),
        ("6 malformed requests", Disturbance::Malformed),
    ];
    let nothing = growths(cells, Disturbance::None);
    let judged = |(mark, of)| {
        let growth = growths(cells, of);
        let Some(Spread { value, n, .. }) = growth.filter(|growth| growth.n >= MIN_RUNS) else {
            let runs = growth.map_or(0, |growth| growth.n);
            return Verdict::of(mark, None, format!("{runs} runs of at least {MIN_RUNS}"));
        };
        let text = percent(growth);
        // What is looked for is not seen then.
        if nothing.is_some_and(|nothing| nothing.value.abs() >= MARGIN) {
            let why = format!("p99 {text} %, but {} % by itself", percent(nothing));
            return Verdict::of(mark, None, why);
        }
        let most = 100.0 * MARGIN;
        let why =
            format!("p99 {text} % beside the same server undisturbed (< +{most:.0} %), {n} runs");
        Verdict::of(mark, Some(value < MARGIN), why)
    };
    marks.into_iter().map(judged).collect()
}

/// A row for each disturbance, and what came of each.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let mut rows = runs(cells, |cell| cell.disturbance);
    rows.sort_by_key(|row| row.key);
    let requests = |row: &Runs<'_, Disturbance, Cell>| {
        row.cells.iter().map(|cell| cell.disturbed.n.min(cell.quiet.n)).min()
    };
    let table = Table::of(&rows)
        .text("disturbance", |row| row.key)
        .figure("runs", 0, Runs::n)
        .figure("n", 0, requests)
        .figure("quiet us", 1, |row| row.median(|cell| cell.quiet.second_p99_us()))
        .figure("p99 us", 1, |row| row.median(|cell| cell.disturbed.second_p99_us()))
        .shown("grows by %", |row| Some(percent(growths(cells, row.key))))
        .figure("quiet all", 1, |row| row.median(|cell| cell.quiet.p99_us))
        .figure("p99", 1, |row| row.median(|cell| cell.disturbed.p99_us))
        .figure("quiet all", 1, |row| row.median(|cell| cell.quiet.p999_us))
        .figure("p99.9", 1, |row| row.median(|cell| cell.disturbed.p999_us))
        .figure("done", 0, |row| row.median(|cell| cell.done as f64))
        .figure("canary", 2, |row| row.median(|cell| cell.canary.p99.as_millis_f64()))
        .figure("busy", 2, |row| row.median(|cell| cell.machine.busy_cores))
        .figure("steal", 3, |row| row.median(|cell| cell.machine.steal_cores));
    format!(
        "{table}\n{}\nMedians of runs; n: requests with, and without, the least. us: p99 of the second in the middle. \
         grows by: in the same run, median and range of runs. all: over all requests, us. done: how often the \
         monitor was ended, events were caused, requests were sent. canary: its p99, ms. busy, steal: CPUs.\n",
        verdict::lines(&judge(cells))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::canary_of;
    use crate::verdict::Outcome;

    fn cell(disturbance: Disturbance, repetition: u32, [quiet, disturbed]: [f64; 2]) -> Cell {
        // One second stood still.
        let seconds = |p99_us| vec![p99_us, 80_000.0, p99_us];
        let side = |p99_us| Side {
            seconds_p99_us: seconds(p99_us),
            n: 24_000,
            p50_us: 50.0,
            p99_us: 70_000.0,
            p999_us: 80_000.0,
        };
        Cell {
            disturbance,
            repetition,
            quiet: side(quiet),
            disturbed: side(disturbed),
            done: 40,
            canary: canary_of(Nanos::ZERO),
            machine: Machine { load1: 1.0, busy_cores: 1.0, steal_cores: 0.0 },
            at: String::new(),
        }
    }

    #[test]
    fn p99_that_grows_by_a_tenth_is_lost_and_noise_or_two_runs_are_not_judged() {
        let cells = |last: f64, by_itself: f64| -> Vec<Cell> {
            // A slow server and a fast one do not count for more.
            let runs = [[1_000.0, 500.0], [100.0, last], [1.0, 9.0]];
            let runs = runs.into_iter().zip(0..).map(|(run, n)| cell(Disturbance::Monitor, n, run));
            runs.chain([cell(Disturbance::None, 0, [100.0, by_itself])]).collect()
        };
        let outcome = |cells: &[Cell]| judge(cells)[0].outcome;
        assert_eq!(outcome(&cells(109.9, 100.0)), Outcome::Passed);
        assert_eq!(outcome(&cells(110.1, 100.0)), Outcome::Lost);
        assert_eq!(outcome(&cells(100.0, 89.0)), Outcome::NotJudged);
        assert_eq!(outcome(&cells(110.1, 100.0)[1..]), Outcome::NotJudged);
        assert_eq!(judge(&cells(1.0, 100.0))[2].outcome, Outcome::NotJudged);
        let table = table(&cells(105.0, 100.0));
        assert!(table.contains("+5.0 (-50.0 to +800.0)"), "{table}");
    }

    #[test]
    fn seconds_with_and_without_are_as_many_and_follow_each_other_both_ways() {
        let disturbed: Vec<_> = (0..8).map(is_disturbed).collect();
        assert_eq!(disturbed, [false, true, true, false, false, true, true, false]);
        // Of an odd number, too.
        assert_eq!((0..6).filter(|&second| is_disturbed(second)).count(), 3);
    }

    #[test]
    fn load_is_steady_over_all_seconds_and_one_disk_is_never_there() {
        let scenario = scenario(2).unwrap();
        assert_eq!(scenario.vms.len(), 5);
        assert!(scenario.vms[4].plugged.is_empty() && scenario.vms[0].streams.len() == 4);
        assert_eq!((scenario.phases.len(), scenario.length()), (5, Nanos::from_millis(6_000)));
    }
}
