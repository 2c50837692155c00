//! The admission test on trial: random sets of VMs run whatever it says of them.
//!
//! Each set runs with its promises beside the deep writer. Each task has a disk of its own, and so a
//! promise of its own: its rate, and its target as the deadline. A set is *met* if every task passes,
//! as in the cases. Of those that the test admits, those count that are not met; of those that it
//! refuses, those that are met all the same.
//!
//! *Of boundary* is where a set is: its rates, as a fraction of the largest with which the test still
//! admits it.

mod sets;

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Result;
use rtvirtio_qos::admission::{self, Wish};
use rtvirtio_qos::{Device, Promise, Rate};
use rtvirtio_spec::run::Canary;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::neighbour::Neighbour;
use rtvirtio_testbed::scratch::{Backing, ScratchDisk, SsdConfig};
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_testbed::tasks::{Between, Plan};
use rtvirtio_testbed::trial::{DISK, Sharing, Trial};
use rtvirtio_units::{Bytes, BytesPerSecond, Iops, Nanos};
use serde::{Deserialize, Serialize};

use super::cell::{self, Measured, disturbance};
use crate::experiment::{Experiment, Report, Run, lasted, seconds};
use crate::stats::rate;
use crate::table::{NOTHING, Table};
use crate::verdict::{self, Verdict};
use sets::{MAX_TASKS, SETS, Set, sets, utilisation};

pub use sets::Task;

/// Of the sets that are admitted, those that must be met: the mark.
const ADMITTED_MET: f64 = 0.95;
/// Of the sets that are refused, those that must miss: the mark.
const REFUSED_MISSED: f64 = 0.8;
/// Ends of the bands, of the boundary.
const BANDS: [f64; 3] = [0.85, 1.0, 1.15];

/// Of a response, what is neither service nor wait for the device: FUSE, the loop device and the data
/// plane.
const OVERHEAD: Nanos = Nanos::from_micros(100);
/// How much longer one response in 1,000 is for the host's part: the median of what responses took beyond
/// the rest of the test's formula in a first campaign, with another seed (tasks with targets below 8 ms;
/// at depth 1, with the device to itself, calibration finds 0.8 ms).
const JITTER: Nanos = Nanos::from_micros(1_000);
/// A set whose canary was later than this at p99 does not count: twice the canary of the campaign that
/// [`JITTER`] is from (0.2 ms, median). Beyond it the test presumes another machine.
const CANARY_LIMIT: Nanos = Nanos::from_micros(400);
/// 99 and 99.9 % of a normal law lie below so many standard deviations.
const NORMAL: [f64; 2] = [2.326_348, 3.090_232];

/// The emulated SSD as the admission test sees it.
fn curve(model: SsdConfig) -> admission::Curve {
    let Curve { channels, request_ns, kib_ns, flush_ns } = Curve::of_ssd(model);
    // Of the log-normal service time, over its mean.
    let [spread_99, spread] =
        NORMAL.map(|z| (z * model.sigma - model.sigma * model.sigma / 2.0).exp());
    admission::Curve {
        device: Device {
            channels: channels as u32,
            request: Nanos::new(request_ns),
            kib: Nanos::new(kib_ns),
            flush: Nanos::new(flush_ns),
        },
        spread,
        spread_decade: spread - spread_99,
        overhead: OVERHEAD,
        jitter: JITTER,
        jitter_decade: Nanos::ZERO,
    }
}

/// Why the admission test refuses a set: what it says of the first VM that does not fit.
fn refusal(curve: &admission::Curve, tasks: &[Task]) -> Option<String> {
    let wish = |task: &Task| Wish { promise: promise(task), depth: Some(1), percentile: None };
    let vms: Vec<Vec<Wish>> = tasks
        .chunk_by(|one, other| one.vm == other.vm)
        .map(|vm| vm.iter().map(wish).collect())
        .collect();
    let fits = curve.admit(&vms);
    let refused = fits.iter().flatten().find_map(|fit| fit.refusal);
    refused.map(|refusal| refusal.to_string())
}

/// What a task is promised.
fn promise(task: &Task) -> Promise {
    let bandwidth = task.iops * task.bytes().get() as f64;
    let rate = Rate {
        iops: Iops::new(task.iops).ok(),
        bandwidth: Some(BytesPerSecond::new(bandwidth as u64)),
        burst: 2,
    };
    Promise { deadline: Nanos::from_micros(task.target_us), rate }
}

/// A set that has run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// The set, from 0.
    pub set: u32,
    /// Its tasks.
    pub tasks: Vec<Task>,
    /// What they need of the device, 1 for all channels at all times.
    pub utilisation: f64,
    /// Its rates, of the largest with which it is admitted; none: it is refused at any.
    pub of_boundary: Option<f64>,
    /// Why it is refused; none: it is admitted.
    pub refused: Option<String>,
    /// Length of the window, s.
    pub seconds: f64,
    /// What came of the tasks.
    pub results: Vec<cell::Task>,
    /// Whether all of them passed.
    pub met: bool,
    /// What the deep writer wrote, bytes a second.
    pub background: f64,
    /// The machine's health.
    pub canary: Canary,
    /// CPUs busy, of the machine.
    pub busy: f64,
    /// When it ran.
    pub at: String,
    /// Why it does not count, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discarded: Option<String>,
}

impl Cell {
    /// The largest tail, of its target; none if a task has too few requests to judge.
    pub(crate) fn worst_tail(&self) -> Option<f64> {
        let judged = self.results.iter().all(|task| task.percentile > 0.0);
        let tails = self.results.iter().map(|task| task.tail_us / task.target_us);
        judged.then(|| tails.fold(0.0, f64::max))
    }

    /// The smallest part of a rate that was delivered.
    pub(crate) fn min_delivered(&self) -> f64 {
        self.results.iter().map(|task| task.delivered).fold(f64::INFINITY, f64::min)
    }

    /// Its band, from 0; the last one if it is refused at any rate.
    fn band(&self) -> usize {
        let of_boundary = self.of_boundary.unwrap_or(f64::INFINITY);
        BANDS.iter().filter(|&&end| of_boundary > end).count()
    }
}

/// Arguments of `bench qos-admission`.
#[derive(Debug, clap::Args)]
pub struct Benchmark {
    /// The first so many of the 60 sets
    #[arg(long, default_value_t = SETS, value_parser = clap::value_parser!(u32).range(1..=i64::from(SETS)))]
    sets: u32,
    /// Length of a window in seconds; 20 is the least that judges the lowest rates
    #[arg(long, default_value = "20", value_parser = seconds::<1_000, 3_600_000>)]
    window: Duration,
    /// Emulated SSD: ref-4x250 or ref-8x80
    #[arg(long, default_value = "ref-4x250")]
    ssd: String,
    /// What these make.
    #[arg(skip)]
    made: OnceLock<Vec<Set>>,
}

impl Experiment for Benchmark {
    type Key = Set;
    type Cell = Cell;
    type Setup = ScratchDisk;

    const ATTEMPTS: usize = 2;
    const OUT: &'static str = "rtvirtio-bench-qos-admission";

    fn keys(&self) -> Result<Vec<Set>> {
        let curve = curve(self.ssd.parse()?);
        let mut sets = sets(&curve.device, &|tasks| refusal(&curve, tasks).is_none());
        sets.truncate(self.sets as usize);
        Ok(sets)
    }

    fn is_of(cell: &Cell, set: &Set) -> bool {
        cell.set == set.number
    }

    fn label(&self, set: &Set) -> String {
        format!("set {}, {} tasks", set.number, set.tasks.len())
    }

    fn expected(&self, _: &Set) -> Duration {
        Trial::duration(self.window)
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        let keys = self.made.get_or_init(|| self.keys().unwrap_or_default());
        let is_same = |set: &Set| set.number == cell.set && set.tasks == cell.tasks;
        let is_known = keys.iter().any(is_same) || cell.set >= self.sets;
        if !is_known {
            return Some("other sets than this program makes");
        }
        (!lasted(cell.seconds, self.window)).then_some("another window")
    }

    fn set_up(&self, _: &[Set], run: &Run<'_>) -> Result<ScratchDisk> {
        let size = Bytes::new(DISK * (MAX_TASKS as u64 + 1));
        ScratchDisk::start(&Backing::Ssd(self.ssd.clone()), size, 1, run.interrupted)
    }

    fn measure(&self, disk: &mut ScratchDisk, set: &Set, run: &Run<'_>) -> Result<Cell> {
        let model: SsdConfig = self.ssd.parse()?;
        let curve = curve(model);
        let (program, vms) = (rtvirtio()?, plans(&set.tasks)?);
        let (sharing, seed) = (Sharing::Schedule(Curve::of_ssd(model)), u64::from(set.number) << 8);
        let background = Some(Neighbour::DeepWriter.background());
        let trial = Trial::new(&program, disk.device(), sharing, self.window);
        let trial = Trial { vms: &vms, background, seed, ..trial };
        let used = utilisation(&curve.device, &set.tasks);
        let refused = refusal(&curve, &set.tasks);
        Ok(cell(set.clone(), used, refused, Measured::of(&trial, run.interrupted)?))
    }

    fn discarded(cell: &Cell) -> Option<&str> {
        cell.discarded.as_deref()
    }

    fn report(&self, cells: &[Cell], _: &Run<'_>) -> Result<Report> {
        Report::new(table(cells), cells)
    }
}

/// A VM with one task for each task: it has a disk of its own.
fn plans(tasks: &[Task]) -> Result<Vec<Vec<Plan>>> {
    let plan = |(number, task): (usize, &Task)| -> Result<Vec<Plan>> {
        Ok(vec![Plan {
            name: format!("task{number}-of-vm{}", task.vm),
            iops: Iops::new(task.iops)?,
            block: task.bytes().get() as usize,
            read_fraction: 0.7,
            target: Nanos::from_micros(task.target_us),
            between: Between::Nothing,
        }])
    };
    tasks.iter().enumerate().map(plan).collect()
}

fn cell(set: Set, utilisation: f64, refused: Option<String>, measured: Measured) -> Cell {
    Cell {
        set: set.number,
        utilisation,
        of_boundary: set.boundary.map(f64::recip),
        refused,
        seconds: measured.seconds,
        met: measured.tasks.iter().all(|task| task.passed),
        results: measured.tasks,
        tasks: set.tasks,
        background: measured.background,
        discarded: disturbance(CANARY_LIMIT, &measured.canary, None),
        canary: measured.canary,
        busy: measured.busy,
        at: jiff::Timestamp::now().to_string(),
    }
}

/// What the test said, what came of it, and both errors by band.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let mut sorted: Vec<&Cell> = cells.iter().collect();
    sorted.sort_by_key(|cell| cell.set);
    let sets = Table::of(&sorted)
        .figure("set", 0, |cell| cell.set)
        .figure("vms", 0, |cell| cell.tasks.iter().map(|task| task.vm + 1).max())
        .figure("tasks", 0, |cell| cell.tasks.len())
        .figure("utilisation", 2, |cell| cell.utilisation)
        .figure("of boundary", 2, |cell| cell.of_boundary)
        .text("test", |cell| if cell.refused.is_none() { "admitted" } else { "refused" })
        .text("ran", |cell| match (&cell.discarded, cell.met) {
            (Some(_), _) => "-",
            (None, true) => "met",
            (None, false) => "missed",
        })
        .figure("tail/target", 2, |cell| cell.worst_tail())
        .figure("delivered", 3, |cell| cell.min_delivered())
        .figure("writer MB/s", 1, |cell| cell.background / 1e6)
        .figure("canary", 1, |cell| cell.canary.p99.as_millis_f64())
        .figure("busy", 2, |cell| cell.busy);
    let bands = ["< 0.85", "0.85-1.0", "1.0-1.15", "> 1.15"].into_iter().zip((0..).map(Some));
    let rows: Vec<_> = bands.chain([("all", None)]).collect();
    let of =
        |band: Option<usize>| counts(cells, |cell| band.is_none_or(|band| cell.band() == band));
    let bands = Table::of(&rows)
        .text("of boundary", |(name, _)| *name)
        .text("admitted and met", |(_, band)| share(of(*band)[0]))
        .text("refused and missed", |(_, band)| share(of(*band)[1]));
    let mark = |mark, (good, n): (usize, usize), least: f64| {
        let part = good as f64 / n as f64;
        Verdict::of(
            mark,
            (n > 0).then_some(part >= least),
            format!("{} (>= {least})", share((good, n))),
        )
    };
    let [admitted, refused] = of(None);
    let verdicts = [
        mark("admitted are met", admitted, ADMITTED_MET),
        mark("refused miss", refused, REFUSED_MISSED),
    ];
    format!(
        "{sets}\n{bands}\n{}In brackets: 95 % intervals (Wilson). tail/target: the worst task's, at its judged \
         percentile; -: a task had too few requests to judge. delivered: the least. canary: p99, ms. ran -: \
         discarded, the canary was later than {CANARY_LIMIT}.\n",
        verdict::lines(&verdicts)
    )
}

/// Of the sets that were admitted, how many were met, of how many; of those refused, missed.
fn counts(cells: &[Cell], is_in: impl Fn(&Cell) -> bool) -> [(usize, usize); 2] {
    [false, true].map(|is_refused| {
        let counts = |c: &&Cell| c.discarded.is_none() && is_in(c);
        let of = || cells.iter().filter(counts).filter(|c| c.refused.is_some() == is_refused);
        (of().filter(|cell| cell.met != is_refused).count(), of().count())
    })
}

/// `18/20 (70–97 %)`, with its interval.
fn share((good, n): (usize, usize)) -> String {
    if n == 0 { NOTHING.to_owned() } else { rate(good, n) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::canary_of;

    fn cell(set: u32, of_boundary: Option<f64>, refused: bool, met: bool) -> Cell {
        Cell {
            discarded: None,
            set,
            tasks: vec![Task { vm: 0, block_kib: 4, iops: 100.0, target_us: 3_000 }],
            utilisation: 0.9,
            of_boundary,
            refused: refused.then(|| "too much".to_owned()),
            seconds: 20.0,
            results: Vec::new(),
            met,
            background: 0.0,
            canary: canary_of(Nanos::ZERO),
            busy: 0.0,
            at: String::new(),
        }
    }

    #[test]
    fn errors_of_both_kinds_are_counted_by_band() {
        let cells = [
            cell(0, Some(0.8), false, true),
            cell(1, Some(0.85), false, true),
            cell(2, Some(0.9), false, true),
            cell(3, Some(1.0), false, false),
            cell(4, Some(1.1), true, true),
            cell(5, Some(1.2), true, false),
            cell(6, None, true, false),
        ];
        let text = table(&cells);
        let row = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap().to_owned();
        assert!(row("< 0.85").contains("2/2 (34–100 %)"), "{text}");
        assert!(row("0.85-1.0").contains("1/2 "), "{text}");
        assert!(row("1.0-1.15").contains("0/1 "), "{text}");
        assert!(row("> 1.15").contains("2/2 "), "{text}");
        assert!(row("all").contains("3/4 ") && row("all").contains("2/3 "), "{text}");
        assert!(text.matches("LOST").count() == 2, "{text}");
    }

    #[test]
    fn cells_of_another_window_are_none_of_these() {
        let benchmark: Benchmark = crate::experiment::of(&["--sets=1"]);
        // Of a set that is not asked for, whose tasks may be any.
        let there = cell(5, None, false, true);
        assert_eq!(benchmark.foreign(&there), None);
        let short = Cell { seconds: 5.0, ..there };
        assert_eq!(benchmark.foreign(&short), Some("another window"));
    }

    #[test]
    fn set_is_refused_if_one_of_its_vms_does_not_fit() {
        let curve = curve("ref-4x250".parse().unwrap());
        assert!((curve.spread - 2.416).abs() < 1e-3, "{}", curve.spread);
        let task = |vm, iops| Task { vm, block_kib: 4, iops, target_us: 40_000 };
        assert_eq!(refusal(&curve, &[task(0, 100.0), task(0, 100.0), task(1, 100.0)]), None);
        // Of 64 KiB, one at a time: no more than 1,096 a second.
        let too_much = Task { block_kib: 64, ..task(1, 1_500.0) };
        let refusal = refusal(&curve, &[task(0, 100.0), too_much]).unwrap();
        assert!(refusal.contains("requests a second at most"), "{refusal}");
    }

    #[test]
    fn sets_are_on_both_sides_of_the_test_and_near_ones_near_its_boundary() {
        let curve = curve("ref-4x250".parse().unwrap());
        let sets = sets(&curve.device, &|tasks| refusal(&curve, tasks).is_none());
        let admitted = sets.iter().filter(|set| refusal(&curve, &set.tasks).is_none()).count();
        assert!((15..=45).contains(&admitted), "{admitted}");
        for set in sets.iter().filter(|set| set.number % 3 == 2) {
            let of_boundary = set.boundary.unwrap().recip();
            // Rates are whole numbers.
            assert!((0.83..1.17).contains(&of_boundary), "{}: {of_boundary}", set.number);
        }
    }

    #[test]
    fn promise_is_the_task() {
        let task = Task { vm: 0, block_kib: 64, iops: 100.0, target_us: 3_000 };
        let promise = promise(&task);
        assert_eq!(promise.deadline, Nanos::from_millis(3));
        assert_eq!(promise.rate.iops.unwrap().get(), 100.0);
        assert_eq!(promise.rate.bandwidth.unwrap().get(), 6_553_600);
        let plans = plans(&[task.clone(), task]).unwrap();
        assert_eq!((plans.len(), plans[1].len(), plans[1][0].block), (2, 1, 65_536));
    }
}
