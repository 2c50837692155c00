//! QEMU guests beside a deep writer: the data plane, an earlier build of it, and the setting made by hand, by turns.
//!
//! A cell is a run of 4xL+M+H: five guests boot, their disks on the data plane or, for the hand setting, QEMU's own on the
//! kernel path, and one window is measured in them. In each round every scheme runs once, and another one is the
//! first than in the round before, so that what else the machine does meets all of them alike. All runs are of one scale, s: a
//! trial of the host finds it before the first, and later ones take it from the cells that are there. Rates and the device
//! are s times slower than written, targets as much longer.
//!
//! Marks: the data plane passes in at least 95 % of the rounds in which the hand setting does, and its writer has in these, at
//! the median, at least five times the cap of the hand setting's. A run that the machine disturbed counts, and is marked.
//!
//! Properties (tests of the same name): `each_scheme_is_first_in_turn`, `rounds_that_hand_passes_are_compared`,
//! `scale_is_that_of_the_cells_that_are_there`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_calibrate::load::CellLoad;
use rtvirtio_calibrate::testbed::{DeviceUnderTest as _, take_host};
use rtvirtio_cases::{Case, Mix, Neighbour, Scale, Scheme, Tier};
use rtvirtio_spec::run::{Cell, CellKey};
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::device::Testbed;
use rtvirtio_testbed::guests::{Accelerator, GuestImage, ImageArgs};
use rtvirtio_testbed::scratch::{Backing, ScratchDisk};
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_units::{Bytes, Iops, Nanos};

use crate::campaign::DATA_PLANE;
use crate::cell::CellContext;
use crate::experiment::{Experiment, Report, Run};
use crate::stats::median;
use crate::verdict::{self, Outcome, Verdict};

/// The scheme of an earlier build's cells.
const BEFORE: &str = "data-plane-before";
const DEVICE: &str = "ref-4x250";
/// Size of the disk that guests have slices of.
const DISK: Bytes = Bytes::new(2 << 30);
/// A window at s = 1: the least that judges p99 of 100 requests a second, and p99.9 of 1,500.
const WINDOW: Duration = Duration::from_secs(11);
/// How long five guests take to boot, about: without KVM, on 2 CPUs.
const BOOT: Duration = Duration::from_secs(35);
/// The scale that times are told for until it is known.
const USUAL_SCALE: u32 = 10;
/// The mark: share of the rounds that the hand setting passes.
const MIN_SHARE: f64 = 0.95;
/// The mark: the writer, times the cap of the hand setting.
const MIN_WRITER: f64 = 5.0;

/// Arguments of `bench qos-guests`.
#[derive(Debug, clap::Args)]
pub struct Benchmark {
    /// Runs of each scheme
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// An earlier build's `rtvirtio`, which takes turns with the one beside this program
    #[arg(long, value_name = "PROGRAM")]
    before: Option<PathBuf>,
    #[command(flatten)]
    image: ImageArgs,
    /// Of the cells that are there.
    #[arg(skip)]
    scale: OnceLock<Scale>,
}

/// What all runs share. The testbed goes before the disk that it is on.
pub struct Setup {
    testbed: Testbed,
    _disk: ScratchDisk,
    guests: (GuestImage, Accelerator),
    curve: Curve,
    program: PathBuf,
}

impl Experiment for Benchmark {
    type Key = CellKey;
    type Cell = Cell;
    type Setup = Setup;

    const OUT: &'static str = "rtvirtio-bench-qos-guests";

    fn keys(&self) -> Result<Vec<CellKey>> {
        let case = case()?;
        let mut schemes = vec![DATA_PLANE.to_owned(), Scheme::Hand.to_string()];
        if self.before.is_some() {
            schemes.insert(1, BEFORE.to_owned());
        }
        let mut keys = Vec::new();
        for repetition in 0..self.rounds {
            keys.extend(schemes.iter().map(|scheme| CellKey {
                case: case.to_string(),
                tier: Tier::Strict.to_string(),
                neighbour: Neighbour::Writer.to_string(),
                scheme: scheme.clone(),
                repetition,
            }));
            schemes.rotate_left(1);
        }
        Ok(keys)
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        format!("{} {}", key.scheme, key.repetition)
    }

    fn expected(&self, _: &CellKey) -> Duration {
        let scale = self.scale.get().map_or(USUAL_SCALE, |scale| scale.get());
        BOOT + CellLoad::duration(WINDOW * scale)
    }

    /// The first one says the scale of all.
    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        let is_one = |scale: Scale| {
            let window = (WINDOW * scale.get()).as_secs_f64();
            *self.scale.get_or_init(|| scale) == scale && cell.window_s == window
        };
        (!scale_of(&cell.device).is_some_and(is_one)).then_some("another experiment")
    }

    fn set_up(&self, _: &[CellKey], run: &Run<'_>) -> Result<Setup> {
        let interrupted = run.interrupted;
        if let Some(before) = &self.before {
            ensure!(before.is_file(), "{} is not there", before.display());
        }
        let program = rtvirtio()?;
        // Before anything is made that takes time or memory: another benchmark may be at work.
        let (_, taken) = take_host()?;
        let guests = self.image.find(interrupted)?;
        let backing = Backing::Ssd(DEVICE.to_owned());
        let mut disk = ScratchDisk::start(&backing, DISK, 1, interrupted)?;
        // The testbed takes the host itself.
        drop(taken);
        let mut testbed = Testbed::new(disk.device(), disk.label())?;
        let scale = match self.scale.get() {
            Some(scale) => *scale,
            None => {
                testbed.boot_guests(&guests, case()?, None, interrupted)?;
                testbed.find_scale(case()?, interrupted)?
            }
        };
        testbed.set_scale(scale);
        self.scale.get_or_init(|| scale);
        disk.slow_down(u16::try_from(scale.get())?)?;
        let backing = backing.slower(scale);
        testbed.set_label(backing.label());
        let curve = Curve::of_ssd(backing.label().parse()?);
        eprintln!("Guests under {}; s = {scale}", guests.1);
        Ok(Setup { testbed, _disk: disk, guests, curve, program })
    }

    fn measure(&self, setup: &mut Setup, key: &CellKey, run: &Run<'_>) -> Result<Cell> {
        let Setup { testbed, guests, curve, program, .. } = setup;
        let started = jiff::Timestamp::now().to_string();
        let (hand, case) = (key.scheme == Scheme::Hand.to_string(), case()?);
        let before = self.before.as_ref().filter(|_| key.scheme == BEFORE);
        let served = (before.unwrap_or(program).as_path(), *curve);
        testbed.boot_guests(guests, case, (!hand).then_some(served), run.interrupted)?;
        let scale = testbed.scale();
        let window = WINDOW * scale.get();
        let specification =
            testbed.specification(case, Tier::Strict, Neighbour::Writer, Nanos::from(window));
        let scheme = if hand { Scheme::Hand } else { Scheme::None };
        // These two make nothing of the capacity.
        let settings = scheme.baseline_settings(&specification, Iops::new(1000.0)?, scale);
        let settings = settings.unwrap_or_default();
        let measured = testbed.measure(&specification, &settings, window, run.interrupted)?;
        let context = CellContext {
            key: key.clone(),
            specification: &specification,
            scheme: &settings,
            predict: &|_| Vec::new(),
            device: testbed.label().to_owned(),
            measured_at: testbed.measured_at(),
            scale,
            window,
            started,
        };
        Ok(context.judge(vec![measured]))
    }

    fn report(&self, cells: &[Cell], _: &Run<'_>) -> Result<Report> {
        Report::new(text(cells), cells)
    }
}

fn case() -> Result<Case> {
    Ok(Case::new(4, Mix::LightMediumHeavy)?)
}

/// The scale of a device's label, such as `ref-4x250*10`.
fn scale_of(label: &str) -> Option<Scale> {
    match label.strip_prefix(DEVICE)? {
        "" => Some(Scale::ONE),
        times => times.strip_prefix('*')?.parse().ok().filter(|s| *s > 0).map(Scale::new),
    }
}

/// A line for each run, and the marks.
fn text(cells: &[Cell]) -> String {
    let mut cells: Vec<&Cell> = cells.iter().collect();
    cells.sort_by(|a, b| a.started.cmp(&b.started));
    let device = cells.first().map_or(DEVICE, |cell| &cell.device);
    let mut text = format!(
        "QEMU guests on {device}, 4xL+M+H beside a deep writer; tails are of what each task's requests judge\n"
    );
    for cell in &cells {
        let _ = writeln!(text, "{}", line(cell));
    }
    text.push('\n');
    text + &verdict::lines(&verdicts(&cells))
}

fn line(cell: &Cell) -> String {
    let rates = cell.tasks.iter().map(|task| task.delivered_iops / task.requested_iops);
    let tails = cell
        .tasks
        .iter()
        .filter_map(|task| Some(task.judged?.value.as_secs_f64() / task.target?.as_secs_f64()));
    let key = &cell.key;
    format!(
        "{:>3} {:<17} {} of {} tasks  rates {}  tails over targets {}  writer {:6.2} MB/s  canary p99 {:5.2} ms{}",
        key.repetition,
        key.scheme,
        cell.tasks.iter().filter(|task| task.passed).count(),
        cell.tasks.len(),
        range(rates, 3),
        range(tails, 2),
        writer(cell) / 1e6,
        cell.canary.p99.as_secs_f64() * 1e3,
        if cell.disturbed.is_some() { ", machine late" } else { "" },
    )
}

/// The least and the most.
fn range(values: impl Iterator<Item = f64> + Clone, digits: usize) -> String {
    let (least, most) = (values.clone().fold(f64::NAN, f64::min), values.fold(f64::NAN, f64::max));
    if least.is_nan() {
        "not judged".to_owned()
    } else {
        format!("{least:.digits$}-{most:.digits$}")
    }
}

/// What the writer moved, bytes a second.
fn writer(cell: &Cell) -> f64 {
    cell.background.values().map(|moved| moved.get() as f64).sum()
}

/// The most that the settings leave to one VM, bytes a second: the writer's, since they cap no other.
fn cap(cell: &Cell) -> Option<f64> {
    let vms = cell.settings.0.values().flat_map(|device| device.vms.values());
    vms.filter_map(|vm| vm.limits.write_bps).map(|cap| cap.get() as f64).reduce(f64::max)
}

/// The marks, for the build that is measured; the earlier one's figures stand beside them.
fn verdicts(cells: &[&Cell]) -> Vec<Verdict> {
    let of = |scheme: &str| -> Vec<&Cell> {
        cells.iter().copied().filter(|cell| cell.key.scheme == scheme).collect()
    };
    let hand = of(&Scheme::Hand.to_string());
    let cap = hand.iter().find_map(|cell| cap(cell));
    let mut found = Vec::new();
    for scheme in [DATA_PLANE, BEFORE] {
        let ours = of(scheme);
        if ours.is_empty() {
            continue;
        }
        // The rounds that the hand setting passes: a writer is worth something where others' targets hold.
        let pairs: Vec<&Cell> = hand
            .iter()
            .filter(|hand| hand.passed)
            .filter_map(|hand| ours.iter().find(|c| c.key.repetition == hand.key.repetition))
            .copied()
            .collect();
        let both = pairs.iter().filter(|cell| cell.passed).count();
        let share = (!pairs.is_empty()).then(|| both as f64 / pairs.len() as f64);
        let why = format!(
            "{both} of {} rounds that the hand setting passes ({} of {} runs in all)",
            pairs.len(),
            ours.iter().filter(|cell| cell.passed).count(),
            ours.len()
        );
        let judged = |mark: String, holds: Option<bool>, why: String| {
            let mut verdict = Verdict::of(mark, holds, why);
            if scheme == BEFORE {
                verdict.outcome = Outcome::Beside;
            }
            verdict
        };
        let holds = share.map(|share| share >= MIN_SHARE);
        found.push(judged(format!("{scheme}: targets"), holds, why));
        let moved: Vec<f64> = pairs.iter().map(|cell| writer(cell)).collect();
        let times = cap.zip(share).map(|(cap, _)| median(moved.iter().copied()) / cap);
        let why = match times {
            Some(times) => format!(
                "{} MB/s in these, at the median {times:.1} times the hand setting's cap",
                range(moved.iter().map(|moved| moved / 1e6), 2)
            ),
            None => "no such round".to_owned(),
        };
        found.push(judged(
            format!("{scheme}: writer"),
            times.map(|times| times >= MIN_WRITER),
            why,
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rtvirtio_spec::run::{Machine, RUN_VERSION};
    use rtvirtio_spec::settings::{DeviceSettings, Limits, Scheduler, Settings, VmSettings};
    use rtvirtio_units::{BytesPerSecond, DeviceName, VmName};

    use super::*;
    use crate::cell::canary_of;

    fn benchmark(rounds: u32, before: Option<&str>) -> Benchmark {
        let (before, image) =
            (before.map(PathBuf::from), ImageArgs { guest_image: PathBuf::new() });
        Benchmark { rounds, before, image, scale: OnceLock::new() }
    }

    /// A run whose writer moved so many MB/s; the hand setting's cap is 1 MB/s.
    fn cell(scheme: &str, repetition: u32, passed: bool, writer_mb: u64) -> Cell {
        let vm = VmName::new("background").unwrap();
        let mut settings = Settings::default();
        if scheme == "hand" {
            let limits = Limits::bps(BytesPerSecond::from_megabytes(1));
            let vms = [(vm.clone(), VmSettings { limits, ..VmSettings::default() })].into();
            let device = DeviceSettings { scheduler: Scheduler::None, vms };
            settings = Settings([(DeviceName::new("scratch").unwrap(), device)].into());
        }
        Cell {
            version: RUN_VERSION,
            key: CellKey {
                case: "4xL+M+H".to_owned(),
                tier: "strict".to_owned(),
                neighbour: "writer".to_owned(),
                scheme: scheme.to_owned(),
                repetition,
            },
            started: format!("2026-01-01T00:00:{repetition:02}Z"),
            device: "ref-4x250*10".to_owned(),
            window_s: 110.0,
            settings,
            ioprio: BTreeMap::new(),
            tasks: Vec::new(),
            background: [(vm, BytesPerSecond::from_megabytes(writer_mb))].into(),
            canary: canary_of(Nanos::ZERO),
            machine: Machine { load1: 0.0, busy_cores: 0.0, steal_cores: 0.0 },
            passed,
            noise_floor: None,
            attempts: 1,
            rounds: 1,
            disturbed: None,
        }
    }

    #[test]
    fn each_scheme_is_first_in_turn() {
        let order = |benchmark: &Benchmark| -> Vec<String> {
            let keys = benchmark.keys().unwrap();
            keys.iter().map(|key| format!("{}{}", key.scheme, key.repetition)).collect()
        };
        assert_eq!(order(&benchmark(2, None)), ["data-plane0", "hand0", "hand1", "data-plane1"]);
        let keys = order(&benchmark(3, Some("/old/rtvirtio")));
        let first = [&keys[0], &keys[3], &keys[6]];
        assert_eq!(first, ["data-plane0", "data-plane-before1", "hand2"]);
        assert_eq!(keys.len(), 9);
    }

    #[test]
    fn rounds_that_hand_passes_are_compared() {
        let outcomes = |cells: &[Cell]| -> Vec<(Outcome, String)> {
            let cells: Vec<&Cell> = cells.iter().collect();
            verdicts(&cells).into_iter().map(|v| (v.outcome, v.why)).collect()
        };
        let mut cells = Vec::new();
        for round in 0..20 {
            // The hand setting misses round 0, so that what the data plane does there does not count.
            cells.push(cell("hand", round, round > 0, 1));
            cells.push(cell("data-plane", round, round > 0, 5));
        }
        let found = outcomes(&cells);
        assert_eq!((found[0].0, found[1].0), (Outcome::Passed, Outcome::Passed));
        assert!(found[0].1.starts_with("19 of 19 rounds"), "{}", found[0].1);
        assert!(found[1].1.ends_with("5.0 times the hand setting's cap"), "{}", found[1].1);
        // One of 19 is less than 95 %, and so is a writer below five caps.
        cells[3].passed = false;
        for cell in &mut cells {
            cell.background.values_mut().for_each(|b| *b = BytesPerSecond::from_megabytes(4));
        }
        let found = outcomes(&cells);
        assert_eq!((found[0].0, found[1].0), (Outcome::Lost, Outcome::Lost));
        // An earlier build is beside; without a round of the hand setting nothing is judged.
        let found = outcomes(&[cell("data-plane", 0, true, 9), cell(BEFORE, 0, false, 9)]);
        let kinds: Vec<_> = found.iter().map(|found| found.0).collect();
        let (unknown, beside) = (Outcome::NotJudged, Outcome::Beside);
        assert_eq!(kinds, [unknown, unknown, beside, beside]);
    }

    #[test]
    fn scale_is_that_of_the_cells_that_are_there() {
        let benchmark = benchmark(1, None);
        assert_eq!(benchmark.scale.get(), None);
        let there = cell("hand", 0, true, 1);
        let mut other = there.clone();
        other.device = "ref-4x250*20".to_owned();
        assert_eq!(benchmark.foreign(&there), None);
        assert_eq!(benchmark.foreign(&other), Some("another experiment"));
        assert_eq!(benchmark.scale.get().map(|scale| scale.get()), Some(10));
        assert_eq!(scale_of("ref-4x250").map(Scale::get), Some(1));
        for wrong in ["raw", "ref-4x250*", "ref-4x250*0", "ref-4x2500", "ref-8x80*10"] {
            assert_eq!(scale_of(wrong).map(Scale::get), None, "{wrong}");
        }
    }

    #[test]
    fn each_run_has_a_line() {
        let text = text(&[cell("data-plane", 1, false, 7), cell("hand", 0, true, 1)]);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].contains("ref-4x250*10"), "{text}");
        assert!(
            lines[1].starts_with("  0 hand") && lines[1].contains("writer   1.00 MB/s"),
            "{text}"
        );
        assert!(lines[2].starts_with("  1 data-plane"), "{text}");
        assert!(text.contains("data-plane: targets"), "{text}");
    }
}
