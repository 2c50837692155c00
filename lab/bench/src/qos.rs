//! The data plane's promises, measured: the cases' VMs as vhost-user-blk clients of one server whose
//! disks lie on one device, beside a background VM, the *neighbour*.
//!
//! A VM is a libblkio client with a queue and a thread for each of its tasks, which sends one request
//! at a time, each due so long after the one before; one that is late catches up. Latencies run from
//! submission. The device is an emulated SSD behind FUSE and loop, the same as for the kernel's
//! schedulers (`rtvirtio-lab bench`), whose I/O scheduler is none; or a file on the machine's disk. There
//! the most urgent VM is looked at alone before and after each cell: one that was disturbed is
//! discarded and measured once more.
//!
//! *Left over* is what the background VM moves alone, times one less the share of the device's time
//! that the requests which VMs had delivered need.
//!
//! - `cell`: what a cell holds.
//! - `rows`, `table`: what it comes to, for a terminal and as a plot.
//!
//! Benchmarks of their own: [`cost`], what a schedule costs; [`changes`], how soon targets are met
//! again when the load or the device changes; [`admission`], whether what is promised can be kept; [`guests`], QEMU guests
//! in the clients' place, beside the setting made by hand.

pub mod admission;
mod bounds;
pub(crate) mod cell;
pub mod changes;
pub mod cost;
pub mod guests;
mod rows;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use rtvirtio_cases::{Case, Tier};
use rtvirtio_spec::profile::Profile;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::neighbour::Neighbour;
use rtvirtio_testbed::scratch::{Backing, Disk};
use rtvirtio_testbed::server::{qsd_version, rtvirtio};
use rtvirtio_testbed::tasks::{Between, Plan, tasks};
use rtvirtio_testbed::trial::{DISK, Sharing, Trial, measured_curve};
use rtvirtio_units::Bytes;

use crate::campaign;
use crate::cell::CANARY_LIMIT;
use crate::experiment::{Experiment, Report, Run, lasted, seconds};
use bounds::Bounds;
use cell::{Cell, CellKey, Measured, NoiseFloor, Scheme, disturbance};

/// Length of a look at the most urgent VM alone.
const FLOOR: Duration = Duration::from_secs(5);
/// Length of a look at the background VM alone, at most: what it moves is no tail.
const ALONE: Duration = Duration::from_secs(20);
/// Arguments of `bench qos`.
#[derive(Debug, clap::Args)]
pub struct Benchmark {
    /// Cases: strict8, all, or a list such as 1xL,4xL+M+H
    #[arg(long, default_value = "strict8", value_parser = cases)]
    cases: Cases,
    /// Targets: strict, paper
    #[arg(long, value_delimiter = ',', default_value = "strict")]
    tiers: Vec<Tier>,
    /// Background VMs: deep-writer, deep-reader, large-writer, flush-storm, burst, liar
    #[arg(long, value_delimiter = ',', default_value = "deep-writer")]
    neighbours: Vec<Neighbour>,
    /// Time that guests take between the end of a request and the next, µs: 0, 250, or exponential:250 with
    /// that mean. Tasks for which it leaves too little time ask for less
    #[arg(long, value_delimiter = ',', default_value = "0")]
    between: Vec<Between>,
    /// How VMs share the device: none, qos, throttle (qemu-storage-daemon, the background VM at 10 MB/s)
    #[arg(long, value_delimiter = ',', default_value = "none,qos", value_parser = PossibleValuesParser::new(
        ["none", "qos", "throttle"],
    )
    .try_map(|name| name.parse::<Scheme>()))]
    schemes: Vec<Scheme>,
    /// Repetitions of each case under each scheme
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a window in seconds
    #[arg(long, default_value = "20", value_parser = seconds::<1_000, 3_600_000>)]
    window: Duration,
    /// Device: ssd:NAME, an emulated one (ref-4x250, ref-8x80), or file:DIRECTORY, a file of 1.25 GiB there
    #[arg(long, default_value = "ssd:ref-4x250")]
    on: Backing,
    /// The device's profile: its schedule is made by that, and the bounds of a plan are held against the tails
    #[arg(long, value_parser = profile)]
    profile: Option<Profile>,
    /// Results of `rtvirtio-lab bench` to show beside, such as docs/results/strict
    #[arg(long)]
    beside: Option<PathBuf>,
}

/// What `--cases` names.
pub type Cases = Arc<[Case]>;

/// Reads a list of cases.
///
/// # Errors
/// One is none.
pub fn cases(text: &str) -> Result<Cases> {
    match text {
        "strict8" => Ok(Case::strict8().into()),
        "all" => Ok(Case::all().into()),
        list => list.split(',').map(|case| Ok(case.parse()?)).collect(),
    }
}

fn profile(path: &str) -> Result<Profile> {
    rtvirtio_cli::input::profile(Path::new(path))
}

impl Experiment for Benchmark {
    type Key = CellKey;
    type Cell = Cell;
    type Setup = (Disk, Curve);

    const ATTEMPTS: usize = 2;
    const OUT: &'static str = "rtvirtio-bench-qos";

    /// Schemes take turns.
    fn keys(&self) -> Result<Vec<CellKey>> {
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            let between = self.between.iter();
            let beside =
                self.neighbours.iter().flat_map(|n| between.clone().map(move |b| (*n, *b)));
            for (neighbour, between) in beside {
                for (turn, (tier, case)) in self.tiered_cases().enumerate() {
                    let mut schemes = self.schemes.clone();
                    schemes.rotate_left((repetition as usize + turn) % self.schemes.len().max(1));
                    if turn == 0 {
                        schemes.push(Scheme::Alone);
                    }
                    keys.extend(schemes.into_iter().map(|scheme| CellKey {
                        case: case.to_string(),
                        tier: tier.to_string(),
                        neighbour,
                        between,
                        scheme,
                        repetition,
                    }));
                }
            }
        }
        Ok(keys)
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        key.label()
    }

    fn expected(&self, key: &CellKey) -> Duration {
        let floors = match self.on {
            Backing::Ssd(_) => Duration::ZERO,
            Backing::Raw(_) => 2 * Trial::duration(FLOOR),
        };
        Trial::duration(self.window(key)) + floors
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        if cell.device != self.device() {
            return Some("another device");
        }
        (!lasted(cell.seconds, self.window(&cell.key))).then_some("another window")
    }

    fn set_up(&self, missing: &[CellKey], run: &Run<'_>) -> Result<(Disk, Curve)> {
        if missing.iter().any(|key| key.scheme == Scheme::Throttle) {
            qsd_version()?;
        }
        let disk = Disk::make(&self.on, Bytes::new(DISK * 5), run.interrupted)?;
        let curve = match (&self.on, &self.profile) {
            (_, Some(profile)) => Curve::of_profile(&profile.capacity),
            (Backing::Ssd(name), None) => Curve::of_ssd(name.parse()?),
            (Backing::Raw(_), None) => measured_curve(&rtvirtio()?, &disk.path(), run.interrupted)?,
        };
        Ok((disk, curve))
    }

    /// Between two looks at the noise if the disk is the machine's.
    fn measure(&self, on: &mut (Disk, Curve), key: &CellKey, run: &Run<'_>) -> Result<Cell> {
        let floor = || match self.on {
            Backing::Ssd(_) => Ok(None),
            Backing::Raw(_) => self.floor(&on.0, key, run).map(Some),
        };
        let before = floor()?;
        let mut cell = self.cell(on, key, run)?;
        cell.floors = before.zip(floor()?).map(|(before, after)| [before, after]);
        cell.discarded = disturbance(CANARY_LIMIT, &cell.canary, cell.floors.as_ref());
        Ok(cell)
    }

    fn discarded(cell: &Cell) -> Option<&str> {
        cell.discarded.as_deref()
    }

    fn report(&self, cells: &[Cell], _: &Run<'_>) -> Result<Report> {
        let kernel = self.beside.as_deref().map(campaign::read).transpose()?.unwrap_or_default();
        let report = Report::new(table::table(cells, &kernel), cells)?;
        Ok(report.with("plot.svg", table::plot(cells, &kernel)))
    }
}

impl Benchmark {
    /// How results name the device.
    fn device(&self) -> &str {
        match &self.on {
            Backing::Ssd(name) => name,
            Backing::Raw(_) => "file",
        }
    }

    /// How long it is measured.
    fn window(&self, key: &CellKey) -> Duration {
        if key.scheme == Scheme::Alone { self.window.min(ALONE) } else { self.window }
    }

    fn tiered_cases(&self) -> impl Iterator<Item = (Tier, Case)> + '_ {
        self.tiers.iter().flat_map(|&tier| self.cases.iter().map(move |&case| (tier, case)))
    }

    /// The most urgent VM alone.
    fn floor(&self, disk: &Disk, key: &CellKey, run: &Run<'_>) -> Result<NoiseFloor> {
        let (program, vms, device) = (rtvirtio()?, vms(key)?, disk.path());
        let trial = Trial::new(&program, &device, Sharing::Free, FLOOR);
        let trial = Trial { vms: &vms[..1], seed: seed(key), ..trial };
        Ok(NoiseFloor::of(&Measured::of(&trial, run.interrupted)?.tasks))
    }

    fn cell(&self, (disk, curve): &(Disk, Curve), key: &CellKey, run: &Run<'_>) -> Result<Cell> {
        let vms = if key.scheme == Scheme::Alone { Vec::new() } else { vms(key)? };
        let sharing = match key.scheme {
            Scheme::Alone | Scheme::None => Sharing::Free,
            Scheme::Qos => Sharing::Schedule(*curve),
            Scheme::Throttle => Sharing::Throttle,
        };
        let (program, device) = (rtvirtio()?, disk.path());
        let background = Some(key.neighbour.background());
        let trial = Trial::new(&program, &device, sharing, self.window(key));
        let trial = Trial { vms: &vms, background, seed: seed(key), ..trial };
        let Measured { mut tasks, background, seconds, canary, busy } =
            Measured::of(&trial, run.interrupted)?;
        if let (Some(profile), Scheme::Qos) = (&self.profile, key.scheme) {
            let (case, tier) = (key.case.parse()?, key.tier.parse()?);
            let bounds = Bounds::of(case, tier, self.window, profile)?;
            tasks.iter_mut().for_each(|task| bounds.note(task));
        }
        let completed: u64 = tasks.iter().map(|task| task.n).sum();
        Ok(Cell {
            key: key.clone(),
            device: self.device().to_owned(),
            seconds,
            tasks,
            background,
            needed: curve.needed(completed as f64 / seconds),
            canary,
            busy,
            at: jiff::Timestamp::now().to_string(),
            curve: Some(*curve),
            floors: None,
            discarded: None,
        })
    }
}

/// The tasks of each of a cell's VMs.
fn vms(key: &CellKey) -> Result<Vec<Vec<Plan>>> {
    let (case, tier): (Case, Tier) = (key.case.parse()?, key.tier.parse()?);
    let vms = (0..case.vms()).map(|rank| tasks(case, tier, rank, key.between));
    vms.collect::<Option<_>>().context("a case has targets for its VMs")
}

fn seed(key: &CellKey) -> u64 {
    u64::from(key.repetition) << 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::of;

    #[test]
    fn cells_of_another_window_or_device_are_none_of_these() {
        let line = r#"{"case":"1xL","scheme":"qos","repetition":0,"device":"ref-4x250","seconds":12.0,"tasks":[],
            "background":0.0,"needed":0.0,"canary":{"n":1,"p50":1,"p99":1,"max":1},"busy":0.4,"at":""}"#;
        let cell: Cell = serde_json::from_str(line).unwrap();
        assert_eq!(of::<Benchmark>(&["--window=12"]).foreign(&cell), None);
        assert_eq!(of::<Benchmark>(&[]).foreign(&cell), Some("another window"));
        let other: Benchmark = of(&["--window=12", "--on=ssd:ref-8x80"]);
        assert_eq!(other.foreign(&cell), Some("another device"));
        // What the neighbour moves alone is looked at for 20 s at most.
        let key = CellKey { scheme: Scheme::Alone, ..cell.key.clone() };
        let alone = Cell { key, seconds: 20.0, ..cell };
        assert_eq!(of::<Benchmark>(&["--window=70"]).foreign(&alone), None);
    }
}
