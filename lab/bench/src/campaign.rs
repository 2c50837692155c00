//! Campaigns: cells in random order, resumable, one JSON line each.
//!
//! Repetitions are blocks, and a block's cells run in random order, so that a
//! drift of the machine meets every scheme alike. A cell is written as soon as
//! it is measured; a campaign with the same directory leaves out what is
//! there. With more than one *round* the cells of a block take turns in short
//! windows, so that a spell of noise meets every scheme alike, and are written
//! at the block's end. With one, a cell that was disturbed runs once more.
//! A disturbed cell is kept and marked: noise never empties a table.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_calibrate::load::{CellLoad, Measurement};
use rtvirtio_calibrate::testbed::{DeviceUnderTest, plain};
use rtvirtio_cases::{Case, Neighbour, Scheme, SchemeSettings, Tier, judged_percentile};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_planner::{FoundDevice, Model};
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::run::{Cell, CellKey, NoiseFloor, RUN_VERSION};
use rtvirtio_spec::settings::{
    Bfq, DeviceSettings, IoCost, Knobs, Limits, Scheduler, Settings, VmSettings,
};
use rtvirtio_spec::specification::{Specification, Vm};
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::device::Testbed;
use rtvirtio_units::{BytesPerSecond, Iops, Nanos, VmName, Weight};

use crate::cell::CellContext;
use crate::experiment::{Experiment, Run};
use crate::lines::{self, Lines};

/// The file of a campaign's directory that holds its cells.
pub const CELLS: &str = "cells.jsonl";

/// The scheme of [`Campaign::condition_jobs`]; those of repetitions begin with it.
pub(crate) const CONDITION: &str = "condition";

/// The scheme of cells of [`Source::DataPlane`].
pub const DATA_PLANE: &str = "data-plane";

/// Window of a look at the noise floor: the least that judges p99 of 100 requests a second.
const FLOOR: Duration = Duration::from_secs(11);

/// Where a cell's settings come from.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A baseline, or the planner for [`Scheme::Rtvirtio`].
    Scheme(Scheme),
    /// The planner's settings with this cap on background VMs in place of its own.
    PlannedWithCap(BytesPerSecond),
    /// The planner's settings of a host without iocost.
    PlannedWithoutIoCost,
    /// iocost, whose rates are the device's scaled to this percentage for good: the settings among which resctl-bench's
    /// `iocost-tune` chooses (its documentation, "Solutions"). No model predicts it.
    FixedVrate(u32),
    /// The data plane on a device without a scheduler: guests whose disks it serves, or, where VMs
    /// are cgroups, vhost-user clients in their place. No model predicts it.
    DataPlane,
    /// Settings drawn at random.
    Drawn(Drawn),
}

/// Settings drawn at random.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The device's scheduler.
    pub scheduler: Scheduler,
    /// Weights of the VMs, in the specification's order; the default of those that it does not have.
    pub weights: Vec<Weight>,
    /// A cap on background VMs.
    pub cap: Option<BytesPerSecond>,
}

/// A cell to be run.
#[derive(Debug, Clone)]
pub struct Job {
    /// What identifies it.
    pub key: CellKey,
    /// What the VMs do.
    pub specification: Specification,
    /// How they are set.
    pub source: Source,
}

/// A campaign on one testbed.
pub struct Campaign<'a> {
    /// Where it runs.
    pub testbed: &'a Testbed,
    /// The device's profile.
    pub profile: &'a Profile,
    /// Length of each window.
    pub window: Duration,
    /// Windows of a cell.
    pub rounds: u32,
    /// What serves clients' disks, and the service curve that it is told, where VMs are cgroups.
    pub data_plane: Option<(&'a Path, Curve)>,
    /// Where its cells are kept.
    pub directory: &'a Path,
    /// Seed of the order.
    pub seed: u64,
    /// Whether the disk is shared with the rest of the machine: the most urgent VM runs alone
    /// before and after each cell, which counts only if it meets its targets then.
    pub noise_floor: bool,
}

impl Campaign<'_> {
    /// The specification of a case on the testbed.
    #[must_use]
    pub fn specification(&self, case: Case, tier: Tier, neighbour: Neighbour) -> Specification {
        let window = Nanos::from(self.window * self.rounds);
        self.testbed.specification(case, tier, neighbour, window)
    }

    /// The cells of `cases` × `schemes` × `repetitions`.
    #[must_use]
    pub fn matrix(
        &self,
        cases: &[Case],
        tier: Tier,
        neighbour: Neighbour,
        sources: &[(String, Source)],
        repetitions: u32,
    ) -> Vec<Job> {
        let mut jobs = Vec::new();
        for repetition in 0..repetitions {
            for &case in cases {
                for (scheme, source) in sources {
                    let key = key(case, tier, neighbour, scheme, repetition);
                    let specification = self.specification(case, tier, neighbour);
                    jobs.push(Job { key, specification, source: source.clone() });
                }
            }
        }
        jobs
    }

    /// `cells` random cases under random settings that the planner would not choose: each kind of
    /// scheduler alike, with a writer that has no cap or too large a one; where bfq idles, also
    /// without a writer. What predictions of the planner's own settings are worth shows in every
    /// cell of [`Scheme::Rtvirtio`].
    #[must_use]
    pub fn prediction_jobs(&self, cells: u32) -> Vec<Job> {
        let mut rng = Pcg64Mcg::seed_from_u64(self.seed);
        let all = Case::all();
        let throughput = self.profile.capacity.write_throughput.get() as f64;
        let mut pick = |n: usize| rng.random_range(0..n);
        (0..cells)
            .map(|repetition| {
                let case = all[pick(all.len())];
                let idling = Bfq {
                    slice_idle_us: [1000, 2000, 4000, 8000][pick(4)],
                    timeout_sync_ms: [32, 64, 124][pick(3)],
                    low_latency: pick(2) == 0,
                    max_budget: [0, 0, 64, 512][pick(4)],
                };
                let quiet = Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT };
                let (scheduler, alone) = match pick(5) {
                    0 => (Scheduler::None, false),
                    1 => (Scheduler::MqDeadline, false),
                    2 => (Scheduler::Kyber, false),
                    3 => (Scheduler::Bfq(quiet), false),
                    _ => (Scheduler::Bfq(idling), pick(2) == 0),
                };
                let neighbour = if alone { Neighbour::None } else { Neighbour::Writer };
                let part = [None, None, Some(0.12), Some(0.16)][pick(4)];
                let cap = part.map(|p| BytesPerSecond::new((throughput * p) as u64));
                let key = key(case, Tier::Strict, neighbour, "drawn", repetition);
                let specification = self.specification(case, Tier::Strict, neighbour);
                let drawn = Drawn { scheduler, weights: Vec::new(), cap };
                Job { key, specification, source: Source::Drawn(drawn) }
            })
            .collect()
    }

    /// `conditions` random ones of RT-VirtIO's Table II on the kernel's bfq, widened by what that leaves out:
    /// `slice_idle` 0, `low_latency`, `max_budget`, and a writer with and without a cap. The first of every
    /// `twice_every` is run twice, to tell how far two repetitions differ.
    #[must_use]
    pub fn condition_jobs(&self, conditions: u32, twice_every: NonZeroU32) -> Vec<Job> {
        let mut rng = Pcg64Mcg::seed_from_u64(self.seed);
        let all = Case::all();
        let throughput = self.profile.capacity.write_throughput.get() as f64;
        let mut pick = |n: usize| rng.random_range(0..n);
        let mut jobs = Vec::new();
        for number in 0..conditions {
            let case = all[pick(all.len())];
            let scheduler = Scheduler::Bfq(Bfq {
                slice_idle_us: [0, 1000, 2000, 4000, 6000, 8000][pick(6)],
                timeout_sync_ms: [32, 64, 124][pick(3)],
                low_latency: pick(2) == 0,
                max_budget: [0, 0, 0, 64, 512][pick(5)],
            });
            let weight = |w| Weight::new(w).expect("Table II's weights are weights");
            let weights = (0..case.vms())
                .map(|_| weight([50, 100, 150, 250, 300, 500, 700][pick(7)]))
                .collect();
            let neighbour = [Neighbour::None, Neighbour::Writer][pick(2)];
            let part = [None, Some(0.05), Some(0.1), Some(0.2)][pick(4)];
            let cap = part.map(|p| BytesPerSecond::new((throughput * p) as u64));
            let drawn = Drawn { scheduler, weights, cap };
            let specification = self.specification(case, Tier::Strict, neighbour);
            let schemes = [CONDITION, "condition, again"];
            let runs = if number % twice_every == 0 { 2 } else { 1 };
            jobs.extend(schemes.iter().take(runs).map(|scheme| Job {
                key: key(case, Tier::Strict, neighbour, scheme, number),
                specification: specification.clone(),
                source: Source::Drawn(drawn.clone()),
            }));
        }
        jobs
    }

    /// The plan for a specification on the testbed as it is now.
    ///
    /// # Errors
    /// If the profile is not the device's.
    pub fn plan(&self, specification: &Specification, observed: &Knobs) -> Result<Plan> {
        Ok(rtvirtio_planner::plan(specification, &self.found(self.profile)?, observed)?)
    }

    fn found<'a>(
        &self,
        profile: &'a Profile,
    ) -> Result<BTreeMap<rtvirtio_units::DeviceName, FoundDevice<'a>>> {
        let identity = self.testbed.identity()?;
        let schedulers = Some(self.testbed.schedulers());
        let found = FoundDevice { profile, identity, model: Model::Structural, schedulers };
        Ok([(self.testbed.device().name.clone(), found)].into())
    }

    /// A baseline's settings; none for the planner.
    fn baseline(
        &self,
        scheme: Scheme,
        specification: &Specification,
    ) -> Result<Option<SchemeSettings>> {
        let capacity = Iops::new(self.profile.capacity.iops_4k)?;
        Ok(scheme.baseline_settings(specification, capacity, self.testbed.scale()))
    }

    fn settings(&self, job: &Job) -> Result<SchemeSettings> {
        let specification = &job.specification;
        let planned = |profile: &Profile| -> Result<Settings> {
            let observed = self.testbed.prepare(specification)?;
            let found = self.found(profile)?;
            Ok(rtvirtio_planner::plan(specification, &found, &observed)?.settings)
        };
        let each = |scheduler, of: &dyn Fn(usize, &Vm) -> VmSettings| {
            let vms = specification.vms.iter().enumerate();
            let vms = vms.map(|(index, vm)| (vm.name.clone(), of(index, vm))).collect();
            let name = self.testbed.device().name.clone();
            Settings([(name, DeviceSettings { scheduler, vms })].into())
        };
        Ok(plain(match &job.source {
            Source::Scheme(scheme) => match self.baseline(*scheme, specification)? {
                Some(settings) => return Ok(settings),
                None => planned(self.profile)?,
            },
            Source::DataPlane => {
                return Ok(self.baseline(Scheme::None, specification)?.unwrap_or_default());
            }
            Source::PlannedWithoutIoCost => {
                let mut profile = self.profile.clone();
                profile.structural.iocost.clear();
                planned(&profile)?
            }
            Source::FixedVrate(percent) => {
                let capacity = &self.profile.capacity;
                let cost = IoCost {
                    bps: capacity.write_throughput,
                    iops: capacity.iops_4k as u64,
                    // They decide how long iocost's period is, and with that how much it lets through at once.
                    read_latency_us: 1_000,
                    write_latency_us: 1_000,
                    vrate: (*percent, *percent),
                };
                each(Scheduler::IoCost(cost), &|_, vm| {
                    let weight = if vm.is_background() { Weight::BACKGROUND } else { Weight::MAX };
                    VmSettings { weight, limits: Limits::default() }
                })
            }
            Source::PlannedWithCap(cap) => {
                let mut settings = planned(self.profile)?;
                let vms = settings.0.values_mut().flat_map(|device| &mut device.vms);
                let is_background = |name: &VmName| {
                    specification.vms.iter().any(|vm| vm.is_background() && vm.name == *name)
                };
                for (_, settings) in vms.filter(|(name, _)| is_background(name)) {
                    settings.limits = Limits::bps(*cap);
                }
                settings
            }
            Source::Drawn(Drawn { scheduler, weights, cap }) => each(*scheduler, &|index, vm| {
                let cap = cap.filter(|_| vm.is_background());
                let limits = cap.map(Limits::bps).unwrap_or_default();
                let weight = weights.get(index).copied().unwrap_or(Weight::DEFAULT);
                VmSettings { weight, limits }
            }),
        }))
    }

    /// Runs the jobs that the directory does not hold yet and returns all cells of it; with more than one round, all jobs.
    ///
    /// # Errors
    /// As [`Testbed::measure`]; what was measured until then is kept.
    pub fn run(&self, mut jobs: Vec<Job>, interrupted: &Interrupted) -> Result<Vec<Cell>> {
        jobs.shuffle(&mut Pcg64Mcg::seed_from_u64(self.seed));
        jobs.sort_by_key(|j| j.key.repetition);
        if self.rounds <= 1 {
            let run = Run { out: self.directory, interrupted };
            return Jobs { campaign: self, jobs }.run(&run);
        }
        let mut cells = Lines::open(&self.directory.join(CELLS))?;
        let (windows, expected) = (jobs.len() as u32 * self.rounds, self.expected());
        let mut progress = Progress::new(windows as usize, expected * windows);
        for block in jobs.chunk_by(|a, b| a.key.repetition == b.key.repetition) {
            for cell in self.block(block, &mut progress, interrupted)? {
                cells.push(cell)?;
            }
        }
        Ok(cells.into_all())
    }

    /// How long a window takes, about.
    fn expected(&self) -> Duration {
        let floors = if self.noise_floor { 2 * CellLoad::duration(FLOOR) } else { Duration::ZERO };
        CellLoad::duration(self.window) + floors
    }

    /// The cells of `jobs`, which take turns.
    fn block(
        &self,
        jobs: &[Job],
        progress: &mut Progress,
        interrupted: &Interrupted,
    ) -> Result<Vec<Cell>> {
        let (expected, mut open) = (self.expected(), Vec::new());
        for job in jobs {
            open.push((job, self.settings(job)?, jiff::Timestamp::now().to_string(), Vec::new()));
        }
        for round in 0..self.rounds as usize {
            take_turns(&mut open, round);
            for (job, scheme, _, windows) in &mut open {
                let CellKey { case, scheme: name, .. } = &job.key;
                let label = format!("{case} {name}, round {} of {}", round + 1, self.rounds);
                progress.start(&label, expected);
                let window =
                    self.window(job, scheme, interrupted).with_context(|| label.clone())?;
                windows.push(window);
                progress.finish(expected);
            }
        }
        let judged = |(job, scheme, started, windows): (&Job, SchemeSettings, String, Vec<_>)| {
            self.judge(job, &scheme, started, windows)
        };
        open.into_iter().map(judged).collect()
    }

    /// A cell, between two looks at the noise floor if the disk has one.
    fn floored_cell(&self, job: &Job, interrupted: &Interrupted) -> Result<Cell> {
        if !self.noise_floor {
            return self.cell(job, interrupted);
        }
        let before = self.floor(job, interrupted)?;
        let mut cell = self.cell(job, interrupted)?;
        let after = self.floor(job, interrupted)?;
        cell.noise_floor = Some(NoiseFloor { before, after });
        let met = |floor: Option<f64>| floor.is_some_and(|ratio| ratio <= 1.0);
        if !(met(before) && met(after)) {
            let text =
                |f: Option<f64>| f.map_or("too few samples".to_owned(), |r| format!("{r:.2}"));
            cell.disturbed.get_or_insert(format!(
                "the most urgent VM alone: tail/target {} before, {} after",
                text(before),
                text(after)
            ));
        }
        Ok(cell)
    }

    /// The most urgent VM alone under no scheduler: its worst tail over target.
    fn floor(&self, job: &Job, interrupted: &Interrupted) -> Result<Option<f64>> {
        let mut specification = job.specification.clone();
        let strictest = |vm: &Vm| vm.tasks.iter().filter_map(|t| Some(t.target?.latency)).min();
        specification.vms.retain(|vm| !vm.is_background());
        specification.vms.sort_by_key(strictest);
        specification.vms.truncate(1);
        let scheme = self.baseline(Scheme::None, &specification)?.unwrap_or_default();
        let measured = self.testbed.measure(&specification, &scheme, FLOOR, interrupted)?;
        let worst = specification.vms.iter().flat_map(|vm| &vm.tasks).map(|task| {
            let histogram = &measured.tasks.iter().find(|m| m.task == task.name)?.histogram;
            let percentile = judged_percentile(histogram.count())?;
            let tail = histogram.quantile(percentile)?.value.as_secs_f64();
            Some(tail / task.target?.latency.as_secs_f64())
        });
        // A task without enough samples makes the whole floor unknown.
        Ok(worst.collect::<Option<Vec<f64>>>().and_then(|w| w.into_iter().max_by(f64::total_cmp)))
    }

    fn cell(&self, job: &Job, interrupted: &Interrupted) -> Result<Cell> {
        let scheme = self.settings(job)?;
        let started = jiff::Timestamp::now().to_string();
        let window = self.window(job, &scheme, interrupted)?;
        self.judge(job, &scheme, started, vec![window])
    }

    /// One window of a job.
    fn window(
        &self,
        job: &Job,
        scheme: &SchemeSettings,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        let (testbed, specification) = (self.testbed, &job.specification);
        match (&job.source, self.data_plane) {
            (Source::DataPlane, Some(served)) if !testbed.guests_run() => {
                testbed.measure_clients(specification, scheme, served, self.window, interrupted)
            }
            _ => testbed.measure(specification, scheme, self.window, interrupted),
        }
    }

    fn judge(
        &self,
        job: &Job,
        scheme: &SchemeSettings,
        started: String,
        windows: Vec<Measurement>,
    ) -> Result<Cell> {
        let found = self.found(self.profile)?;
        let predict = |specification: &Specification| {
            if matches!(job.source, Source::DataPlane | Source::FixedVrate(_)) {
                return Vec::new();
            }
            rtvirtio_planner::predict(specification, &found, &scheme.settings).unwrap_or_default()
        };
        let context = CellContext {
            key: job.key.clone(),
            specification: &job.specification,
            scheme,
            predict: &predict,
            device: self.testbed.label().to_owned(),
            measured_at: self.testbed.measured_at(),
            scale: self.testbed.scale(),
            window: self.window,
            started,
        };
        Ok(context.judge(windows))
    }
}

/// Has each come after another one than in the round before, so that what one leaves behind on the device does not meet the
/// same one each time. In reverse order they also have equal parts in a drift of the machine.
fn take_turns<T>(all: &mut [T], round: usize) {
    if round > 0 {
        all.reverse();
    }
}

/// Cells of one round each.
struct Jobs<'a> {
    campaign: &'a Campaign<'a>,
    jobs: Vec<Job>,
}

impl Experiment for Jobs<'_> {
    type Key = Job;
    type Cell = Cell;
    type Setup = ();

    fn keys(&self) -> Result<Vec<Job>> {
        Ok(self.jobs.clone())
    }

    fn is_of(cell: &Cell, job: &Job) -> bool {
        cell.key == job.key
    }

    fn label(&self, Job { key, .. }: &Job) -> String {
        format!("{} {} {}", key.case, key.scheme, key.repetition)
    }

    fn expected(&self, _: &Job) -> Duration {
        self.campaign.expected()
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        (cell.version != RUN_VERSION).then_some("another version of this program")
    }

    fn set_up(&self, _: &[Job], _: &Run<'_>) -> Result<()> {
        Ok(())
    }

    fn measure(&self, (): &mut (), job: &Job, run: &Run<'_>) -> Result<Cell> {
        let cell = self.campaign.floored_cell(job, run.interrupted)?;
        let Some(reason) = &cell.disturbed else { return Ok(cell) };
        eprintln!("{}: {reason}; once more", self.label(job));
        Ok(Cell { attempts: 2, ..self.campaign.floored_cell(job, run.interrupted)? })
    }
}

fn key(case: Case, tier: Tier, neighbour: Neighbour, scheme: &str, repetition: u32) -> CellKey {
    CellKey {
        case: case.to_string(),
        tier: tier.to_string(),
        neighbour: neighbour.to_string(),
        scheme: scheme.to_owned(),
        repetition,
    }
}

/// All cells of a campaign's directory, which is not changed. A last line that is not whole (yet) is left out.
///
/// # Errors
/// If the file cannot be read, a line is damaged, or its version is unknown.
pub fn read(directory: &Path) -> Result<Vec<Cell>> {
    let path = directory.join(CELLS);
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let cells: Vec<Cell> = lines::parse(&bytes, &path)?.0;
    if let Some(at) = cells.iter().position(|cell| cell.version != RUN_VERSION) {
        bail!("{}:{}: record version {}", path.display(), at + 1, cells[at].version);
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_last_line_is_left_out_and_the_file_is_untouched() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(CELLS);
        std::fs::write(&path, "{\"version\": 1, \"key\"").unwrap();
        assert_eq!(read(directory.path()).unwrap(), []);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 20);
    }

    #[test]
    fn each_comes_after_another_one_than_in_the_round_before() {
        for n in 2..6 {
            let mut all: Vec<usize> = (0..n).collect();
            let mut before = vec![None; n];
            let mut last = None;
            for round in 0..4 {
                take_turns(&mut all, round);
                let mut here = vec![None; n];
                for &one in &all {
                    here[one] = last.replace(one);
                    let is_same = here[one].is_some() && here[one] == before[one];
                    assert!(!is_same, "{one} of {n} in round {round}");
                }
                before = here;
            }
        }
    }

    #[test]
    fn damaged_line_is_named() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(CELLS), "{}\n").unwrap();
        let error = format!("{:#}", read(directory.path()).unwrap_err());
        assert!(error.contains("cells.jsonl:1: not a cell"), "{error}");
    }
}
