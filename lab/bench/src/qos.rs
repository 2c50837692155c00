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
//! - [`cell`]: what a cell holds.
//! - `clients`, [`neighbour`]: the VMs.
//! - `configuration`: the server's.
//! - [`curve`]: what its schedule is told of the device.
//! - [`disk`]: the device.
//! - `trial`: one server with its clients for one window.
//! - `rows`, [`mod@table`]: what it comes to, for a terminal and as a plot.
//!
//! Benchmarks of their own: [`cost`], what a schedule costs; [`changes`], how soon targets are met
//! again when the load or the device changes; [`admission`], whether what is promised can be kept.

pub mod admission;
mod bounds;
pub mod cell;
pub mod changes;
pub mod clients;
pub(crate) mod configuration;
pub mod cost;
pub mod curve;
pub mod disk;
pub mod neighbour;
mod rows;
pub mod table;
pub(crate) mod trial;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_cases::{Case, Tier};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::profile::Profile;

use crate::campaign;
use crate::cell::CANARY_LIMIT;
use crate::dataplane::server::qsd_version;
use crate::experiment::{self, Experiment, write_files};
use bounds::Bounds;
use cell::{Cell, CellKey, NoiseFloor, Scheme, disturbance};
use clients::{Between, Plan, tasks};
use configuration::Sharing;
use curve::Curve;
use disk::{Disk, On};
use neighbour::Neighbour;
use trial::{Measured, Trial, WARM_UP};

/// Length of a look at the most urgent VM alone.
const FLOOR: Duration = Duration::from_secs(5);
/// Length of a look at the background VM alone, at most: what it moves is no tail.
const ALONE: Duration = Duration::from_secs(20);
/// A campaign.
#[derive(Debug)]
pub struct Benchmark<'a> {
    /// Cases.
    pub cases: Vec<Case>,
    /// Their targets.
    pub tiers: Vec<Tier>,
    /// Who is beside them.
    pub neighbours: Vec<Neighbour>,
    /// The guests' own times between two requests.
    pub between: Vec<Between>,
    /// How they share the device.
    pub schemes: Vec<Scheme>,
    /// How often each.
    pub repetitions: u32,
    /// Length of a window.
    pub window: Duration,
    /// The device.
    pub on: On,
    /// Its profile, by which its schedule is made and its tasks' bounds are noted; without, its own curve.
    pub profile: Option<&'a Profile>,
    /// The `rtvirtio` that serves.
    pub program: &'a Path,
    /// Where cells go.
    pub out: &'a Path,
}

impl Experiment for Benchmark<'_> {
    type Key = CellKey;
    type Cell = Cell;
    type Setup = (Disk, Curve);

    const ATTEMPTS: usize = 2;

    fn keys(&self) -> Result<Vec<CellKey>> {
        Ok(Benchmark::keys(self))
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        key.label()
    }

    fn expected(&self, key: &CellKey) -> Duration {
        let floors = match self.on {
            On::Ssd(_) => Duration::ZERO,
            On::File(_) => 2 * Trial::duration(FLOOR),
        };
        Trial::duration(self.window(key)) + floors
    }

    fn check(&self, cells: &[Cell], out: &Path) -> Result<()> {
        if let Some(other) = cells.iter().find(|cell| cell.device != self.on.label()) {
            bail!("{} has cells on {}: name another OUT", out.display(), other.device);
        }
        Ok(())
    }

    fn set_up(&self, _: &[CellKey], interrupted: &Interrupted) -> Result<(Disk, Curve)> {
        let disk = Disk::make(&self.on)?;
        let curve = match (&self.on, self.profile) {
            (_, Some(profile)) => Curve::of_profile(&profile.capacity),
            (On::Ssd(name), None) => Curve::of_ssd(name.parse()?),
            (On::File(_), None) => Curve::measured(self.program, &disk.path(), interrupted)?,
        };
        Ok((disk, curve))
    }

    fn measure(
        &self,
        (disk, curve): &mut (Disk, Curve),
        key: &CellKey,
        interrupted: &Interrupted,
    ) -> Result<Cell> {
        self.floored_cell(key, *curve, &disk.path(), interrupted)
    }

    fn discarded(cell: &Cell) -> Option<&str> {
        cell.discarded.as_deref()
    }
}

impl Benchmark<'_> {
    /// Runs what is not in `cells.jsonl` yet, and returns all that is there.
    ///
    /// # Errors
    /// If the device, the server or a client fails; if interrupted.
    pub fn run(&self, interrupted: &Interrupted) -> Result<Vec<Cell>> {
        if self.schemes.contains(&Scheme::Throttle) {
            qsd_version()?;
        }
        experiment::run(self, self.out, interrupted)
    }

    /// How long it is measured.
    fn window(&self, key: &CellKey) -> Duration {
        if key.scheme == Scheme::Alone { self.window.min(ALONE) } else { self.window }
    }

    /// Every cell, in the order in which they run: schemes take turns.
    fn keys(&self) -> Vec<CellKey> {
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
        keys
    }

    fn tiered_cases(&self) -> impl Iterator<Item = (Tier, Case)> + '_ {
        self.tiers.iter().flat_map(|&tier| self.cases.iter().map(move |&case| (tier, case)))
    }

    /// A cell, between two looks at the noise if the disk is the machine's.
    fn floored_cell(
        &self,
        key: &CellKey,
        curve: Curve,
        device: &Path,
        interrupted: &Interrupted,
    ) -> Result<Cell> {
        if let On::Ssd(_) = self.on {
            let mut cell = self.cell(key, curve, device, interrupted)?;
            cell.discarded = disturbance(CANARY_LIMIT, &cell.canary, None);
            return Ok(cell);
        }
        let before = self.floor(key, device, interrupted)?;
        let mut cell = self.cell(key, curve, device, interrupted)?;
        let floors = [before, self.floor(key, device, interrupted)?];
        cell.discarded = disturbance(CANARY_LIMIT, &cell.canary, Some(&floors));
        cell.floors = Some(floors);
        Ok(cell)
    }

    /// The most urgent VM alone.
    fn floor(&self, key: &CellKey, device: &Path, interrupted: &Interrupted) -> Result<NoiseFloor> {
        let trial = Trial {
            program: self.program,
            device,
            sharing: Sharing::Free,
            vms: &vms(key)?[..1],
            background: None,
            warm_up: WARM_UP,
            window: FLOOR,
            seed: seed(key),
        };
        Ok(NoiseFloor::of(&trial.run(interrupted)?.tasks))
    }

    fn cell(
        &self,
        key: &CellKey,
        curve: Curve,
        device: &Path,
        interrupted: &Interrupted,
    ) -> Result<Cell> {
        let vms = if key.scheme == Scheme::Alone { Vec::new() } else { vms(key)? };
        let trial = Trial {
            program: self.program,
            device,
            sharing: match key.scheme {
                Scheme::Alone | Scheme::None => Sharing::Free,
                Scheme::Qos => Sharing::Schedule(curve),
                Scheme::Throttle => Sharing::Throttle,
            },
            vms: &vms,
            background: Some(key.neighbour.background()),
            warm_up: WARM_UP,
            window: self.window(key),
            seed: seed(key),
        };
        let Measured { mut tasks, background, seconds, canary, busy } = trial.run(interrupted)?;
        if let (Some(profile), Scheme::Qos) = (self.profile, key.scheme) {
            let (case, tier) = (key.case.parse()?, key.tier.parse()?);
            let bounds = Bounds::of(case, tier, self.window, profile)?;
            tasks.iter_mut().for_each(|task| bounds.note(task));
        }
        let completed: u64 = tasks.iter().map(|task| task.n).sum();
        Ok(Cell {
            key: key.clone(),
            device: self.on.label().to_owned(),
            seconds,
            tasks,
            background,
            needed: curve.needed(completed as f64 / seconds),
            canary,
            busy,
            at: jiff::Timestamp::now().to_string(),
            curve: Some(curve),
            floors: None,
            discarded: None,
        })
    }
}

/// Writes `table.txt` and `plot.svg` beside the cells. `beside` is the directory of a benchmark of
/// the kernel path.
///
/// # Errors
/// If its cells cannot be read, or the files not be written.
pub fn write_report(cells: &[Cell], beside: Option<&Path>, out: &Path) -> Result<String> {
    let kernel = beside.map(campaign::read).transpose()?.unwrap_or_default();
    let text = table::table(cells, &kernel);
    write_files(out, &[("table.txt", &text), ("plot.svg", &table::plot(cells, &kernel))])?;
    Ok(text)
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
