//! Campaigns: cells in random order, resumable, one JSON line each.
//!
//! Repetitions are blocks, and a block's cells run in random order, so that a
//! drift of the machine meets every scheme alike. A cell is written as soon as
//! it is measured; a campaign with the same directory leaves out what is
//! there. A cell whose canary was late runs once more; if that is late too it
//! is kept, marked, and counts nowhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_cases::{Case, Neighbour, Scheme, SchemeSettings, Tier, specification_for_window};
use rtvirtio_planner::FoundDevice;
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::run::{Cell, CellKey, RUN_VERSION};
use rtvirtio_spec::settings::{
    Bfq, DeviceSettings, Knobs, Limits, Scheduler, Settings, VmSettings,
};
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::{BytesPerSecond, Iops, Nanos, VmName};

use crate::cell::{CGROUP_ROOT, CellContext, Testbed, plain};
use crate::load::{CellLoad, Interrupted};
use crate::progress::Progress;

/// The file of a campaign's directory that holds its cells.
pub const CELLS: &str = "cells.jsonl";

/// Where a cell's settings come from.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A baseline, or the planner for [`Scheme::Rtvirtio`].
    Scheme(Scheme),
    /// The planner's settings with this cap on background VMs in place of its own.
    PlannedWithCap(BytesPerSecond),
    /// Settings drawn at random: scheduler and cap on background VMs.
    Drawn(Scheduler, Option<BytesPerSecond>),
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
    /// Length of a cell's window.
    pub window: Duration,
    /// Where its cells are kept.
    pub directory: &'a Path,
    /// Seed of the order.
    pub seed: u64,
}

impl Campaign<'_> {
    /// The specification of a case on the testbed.
    #[must_use]
    pub fn specification(&self, case: Case, tier: Tier, neighbour: Neighbour) -> Specification {
        let device = self.testbed.device().clone();
        let root = Path::new(CGROUP_ROOT);
        specification_for_window(case, tier, neighbour, Nanos::from(self.window), device, root)
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
                    let key = CellKey {
                        case: case.to_string(),
                        tier: tier.to_string(),
                        neighbour: neighbour.to_string(),
                        scheme: scheme.clone(),
                        repetition,
                    };
                    let specification = self.specification(case, tier, neighbour);
                    jobs.push(Job { key, specification, source: source.clone() });
                }
            }
        }
        jobs
    }

    /// `cells` random cases; every other one under the planner's settings, the
    /// rest under settings that it would not choose (bfq that idles, a writer
    /// without a cap or with a large one).
    #[must_use]
    pub fn prediction_jobs(&self, cells: u32) -> Vec<Job> {
        let mut rng = Pcg64Mcg::seed_from_u64(self.seed);
        let all = Case::all();
        let throughput = self.profile.capacity.write_throughput.get() as f64;
        let mut pick = |n: usize| rng.random_range(0..n);
        (0..cells)
            .map(|i| {
                let case = all[pick(all.len())];
                let planned = i % 2 == 0;
                let neighbour =
                    if planned || pick(2) == 0 { Neighbour::Writer } else { Neighbour::None };
                let source = if planned {
                    Source::Scheme(Scheme::Rtvirtio)
                } else {
                    let idling = Bfq {
                        slice_idle_us: [1000, 2000, 4000, 8000][pick(4)],
                        timeout_sync_ms: [32, 64, 124][pick(3)],
                        low_latency: pick(2) == 0,
                        max_budget: [0, 0, 64, 512][pick(4)],
                    };
                    let quiet = Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT };
                    let scheduler = match pick(5) {
                        0 => Scheduler::None,
                        1 => Scheduler::Kyber,
                        2 => Scheduler::Bfq(quiet),
                        _ => Scheduler::Bfq(idling),
                    };
                    let part = [None, None, Some(0.12), Some(0.16)][pick(4)];
                    let cap = part.map(|p| BytesPerSecond::new((throughput * p) as u64));
                    Source::Drawn(scheduler, cap)
                };
                let key = CellKey {
                    case: case.to_string(),
                    tier: Tier::Strict.to_string(),
                    neighbour: neighbour.to_string(),
                    scheme: if planned { "rtvirtio" } else { "drawn" }.to_owned(),
                    repetition: i,
                };
                let specification = self.specification(case, Tier::Strict, neighbour);
                Job { key, specification, source }
            })
            .collect()
    }

    /// The plan for a specification on the testbed as it is now.
    ///
    /// # Errors
    /// If the profile is not the device's.
    pub fn plan(&self, specification: &Specification, observed: &Knobs) -> Result<Plan> {
        Ok(rtvirtio_planner::plan(specification, &self.found()?, observed)?)
    }

    fn found(&self) -> Result<BTreeMap<rtvirtio_units::DeviceName, FoundDevice<'_>>> {
        let identity = self.testbed.identity()?;
        let found = FoundDevice { profile: self.profile, identity };
        Ok([(self.testbed.device().name.clone(), found)].into())
    }

    fn settings(&self, job: &Job) -> Result<SchemeSettings> {
        let specification = &job.specification;
        let planned = || -> Result<Settings> {
            let observed = self.testbed.prepare(specification)?;
            Ok(self.plan(specification, &observed)?.settings)
        };
        match &job.source {
            Source::Scheme(scheme) => {
                let capacity = Iops::new(self.profile.capacity.iops_4k)?;
                match scheme.baseline_settings(specification, capacity) {
                    Some(settings) => Ok(settings),
                    None => Ok(plain(planned()?)),
                }
            }
            Source::PlannedWithCap(cap) => {
                let mut settings = planned()?;
                let background = background(specification);
                for device in settings.0.values_mut() {
                    for (vm, s) in &mut device.vms {
                        if background.contains(vm) {
                            s.limits = Limits::bps(*cap);
                        }
                    }
                }
                Ok(plain(settings))
            }
            Source::Drawn(scheduler, cap) => {
                let background = background(specification);
                let vms = specification.vms.iter().map(|vm| {
                    let cap = cap.filter(|_| background.contains(&vm.name));
                    let limits = cap.map(Limits::bps).unwrap_or_default();
                    (vm.name.clone(), VmSettings { limits, ..VmSettings::default() })
                });
                let device = DeviceSettings { scheduler: *scheduler, vms: vms.collect() };
                let name = self.testbed.device().name.clone();
                Ok(plain(Settings([(name, device)].into())))
            }
        }
    }

    /// Runs the jobs that the directory does not hold yet and returns all cells of it.
    ///
    /// # Errors
    /// As [`Testbed::measure`]; what was measured until then is kept.
    pub fn run(&self, jobs: Vec<Job>, interrupted: &Interrupted) -> Result<Vec<Cell>> {
        std::fs::create_dir_all(self.directory)
            .with_context(|| format!("create {}", self.directory.display()))?;
        let path = self.directory.join(CELLS);
        let mut cells = if path.exists() { read(self.directory)? } else { Vec::new() };
        let there: BTreeSet<CellKey> = cells.iter().map(|c| c.key.clone()).collect();
        let mut jobs: Vec<Job> = jobs.into_iter().filter(|j| !there.contains(&j.key)).collect();
        let mut rng = Pcg64Mcg::seed_from_u64(self.seed);
        jobs.shuffle(&mut rng);
        jobs.sort_by_key(|j| j.key.repetition);
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        let expected = CellLoad::duration(self.window);
        let mut progress = Progress::new(jobs.len(), expected * jobs.len() as u32);
        for job in &jobs {
            let label = format!("{} {} {}", job.key.case, job.key.scheme, job.key.repetition);
            progress.start(&label, expected);
            let mut cell = self.cell(job, interrupted).with_context(|| label.clone())?;
            progress.finish(expected);
            if let Some(reason) = &cell.discarded {
                progress.note(&format!("{label}: {reason}; once more"));
                progress.extend(expected);
                progress.start(&label, expected);
                cell = self.cell(job, interrupted).with_context(|| label.clone())?;
                progress.finish(expected);
            }
            append(&mut file, &cell)?;
            cells.push(cell);
        }
        Ok(cells)
    }

    fn cell(&self, job: &Job, interrupted: &Interrupted) -> Result<Cell> {
        let scheme = self.settings(job)?;
        let started = jiff::Timestamp::now().to_string();
        let measured =
            self.testbed.measure(&job.specification, &scheme, self.window, interrupted)?;
        let found = self.found()?;
        let predict = |specification: &Specification| {
            rtvirtio_planner::predict(specification, &found, &scheme.settings).unwrap_or_default()
        };
        let context = CellContext {
            key: job.key.clone(),
            specification: &job.specification,
            scheme: &scheme,
            predict: &predict,
            device: self.testbed.label().to_owned(),
            window: self.window,
            started,
        };
        Ok(context.judge(measured))
    }
}

fn background(specification: &Specification) -> BTreeSet<&VmName> {
    specification.vms.iter().filter(|vm| vm.is_background()).map(|vm| &vm.name).collect()
}

fn append(file: &mut File, cell: &Cell) -> Result<()> {
    let mut line = serde_json::to_vec(cell)?;
    line.push(b'\n');
    file.write_all(&line)?;
    Ok(file.sync_data()?)
}

/// All cells of a campaign's directory. A last line that was cut off is left out.
///
/// # Errors
/// If the file cannot be read, a line is damaged, or its version is unknown.
pub fn read(directory: &Path) -> Result<Vec<Cell>> {
    let path = directory.join(CELLS);
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut cells = Vec::new();
    for (index, line) in text.split_inclusive('\n').enumerate() {
        if !line.ends_with('\n') {
            // Cut off by a kill: what follows would be glued to it, so it goes.
            let whole = text.len() - line.len();
            OpenOptions::new().write(true).open(&path)?.set_len(whole as u64)?;
            break;
        }
        let cell: Cell = serde_json::from_str(line)
            .with_context(|| format!("{}:{}: not a cell", path.display(), index + 1))?;
        if cell.version != RUN_VERSION {
            bail!("{}:{}: record version {}", path.display(), index + 1, cell.version);
        }
        cells.push(cell);
    }
    Ok(cells)
}
