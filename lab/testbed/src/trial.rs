//! One server with its clients for one window.
//!
//! - `layout`: the server's configuration.

mod layout;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::Machine;
use rtvirtio_units::Nanos;

use crate::curve::{Curve, LARGE, Rates, SMALL};
use crate::neighbour::{Background, Work};
use crate::tasks::{Plan, run_tasks_into};
use crate::window::{Phase, Watch, Watched};
use crate::work_directory::WorkDirectory;

pub use layout::{DISK, Layout, Sharing, socket};

/// From the first request to the window, in benchmarks.
pub const WARM_UP: Duration = Duration::from_secs(2);
/// To start and to end a server and its clients.
const AROUND: Duration = Duration::from_secs(1);

/// What is to run.
#[derive(Debug)]
pub struct Trial<'a> {
    /// The `rtvirtio` that serves.
    pub program: &'a Path,
    /// The block device or file under all disks.
    pub device: &'a Path,
    /// How they share it.
    pub sharing: Sharing,
    /// The tasks of each VM.
    pub vms: &'a [Vec<Plan>],
    /// Who else is there.
    pub background: Option<Background>,
    /// From the first request to the window.
    pub warm_up: Duration,
    /// Length of the window.
    pub window: Duration,
    /// Of the times and places of requests.
    pub seed: u64,
}

/// What was seen; nothing is judged.
pub struct Recorded {
    /// Of each VM's tasks.
    pub tasks: Vec<Vec<TaskRecord>>,
    /// Of the background VM, bytes a second.
    pub background: f64,
    /// Length of the window.
    pub seconds: f64,
    /// How late a sleeping thread woke up, each time.
    pub canary: Histogram,
    /// The machine meanwhile.
    pub machine: Machine,
}

/// What one task did in the window.
#[derive(Debug, Clone, Default)]
pub struct TaskRecord {
    /// Each request's latency.
    pub histogram: Histogram,
    /// The largest latency of those that ended in each [`TIMELINE`] since some instant.
    largest: BTreeMap<u64, Nanos>,
}

/// The interval of timelines.
const TIMELINE: Duration = Duration::from_millis(250);

impl TaskRecord {
    fn record(&mut self, since: Duration, latency: Nanos) {
        self.histogram.record(latency, 1);
        let interval = (since.as_nanos() / TIMELINE.as_nanos()) as u64;
        let largest = self.largest.entry(interval).or_default();
        *largest = latency.max(*largest);
    }

    /// The largest latency by time: (ms since the first request that counted, latency).
    pub fn timeline(&self) -> Vec<(u64, Nanos)> {
        let first = self.largest.keys().next().copied().unwrap_or(0);
        let ms = TIMELINE.as_millis() as u64;
        self.largest.iter().map(|(&at, &latency)| ((at - first) * ms, latency)).collect()
    }
}

impl<'a> Trial<'a> {
    /// One without VMs yet.
    #[must_use]
    pub const fn new(
        program: &'a Path,
        device: &'a Path,
        sharing: Sharing,
        window: Duration,
    ) -> Self {
        let (vms, background, warm_up, seed) = (&[], None, WARM_UP, 0);
        Self { program, device, sharing, vms, background, warm_up, window, seed }
    }

    /// How long one with such a window takes.
    pub fn duration(window: Duration) -> Duration {
        WARM_UP + window + AROUND
    }

    /// Runs it, and judges nothing.
    pub fn record(&self, interrupted: &Interrupted) -> Result<Recorded> {
        let directory = WorkDirectory::new()?;
        let directory = directory.path();
        let layout = Layout {
            device: self.device,
            directory,
            sharing: self.sharing,
            vms: self.vms,
            background: self.background.as_ref(),
        };
        layout.serve(self.program, interrupted, || self.measure(directory, interrupted))
    }

    fn measure(&self, directory: &Path, interrupted: &Interrupted) -> Result<Recorded> {
        let origin = Instant::now();
        let (phase, moved) = (Phase::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let end = phase.ended_by_drop();
            let mut clients = Clients::new(scope, directory, &phase);
            if let Some(background) = &self.background {
                clients.start_background(self.vms.len(), background.work, &moved);
            }
            for plans in self.vms {
                let record = move |into: &mut TaskRecord, ended: Instant, latency| {
                    into.record(ended.saturating_duration_since(origin), latency);
                };
                clients.start(plans, self.seed, TaskRecord::default(), record);
            }
            let window = self.window(&phase, &moved, interrupted);
            drop(end);
            // Why a client ended says more than that it did: before what the window says.
            let tasks = clients.join()?;
            Ok(Recorded { tasks, ..window? })
        })
    }

    /// The window after the warm-up, without its tasks.
    fn window(
        &self,
        phase: &Phase,
        moved: &AtomicU64,
        interrupted: &Interrupted,
    ) -> Result<Recorded> {
        phase.warm_up(self.warm_up, interrupted)?;
        let watch = Watch::start()?;
        let before = moved.load(Ordering::Relaxed);
        phase.count();
        phase.counted(self.window, interrupted)?;
        let bytes = moved.load(Ordering::Relaxed) - before;
        let Watched { seconds, canary, machine } = watch.stop()?;
        let background = bytes as f64 / seconds;
        Ok(Recorded { tasks: Vec::new(), background, seconds, canary, machine })
    }
}

/// The clients of one server, a thread for each VM, until their phase is over.
pub struct Clients<'scope, 'env, R> {
    scope: &'scope Scope<'scope, 'env>,
    directory: &'env Path,
    phase: &'env Phase,
    vms: Vec<ScopedJoinHandle<'scope, Result<Vec<R>>>>,
    background: Option<ScopedJoinHandle<'scope, Result<()>>>,
}

impl<'scope, 'env, R: Clone + Send + 'scope> Clients<'scope, 'env, R> {
    /// None yet; sockets are in `directory`.
    pub const fn new(
        scope: &'scope Scope<'scope, 'env>,
        directory: &'env Path,
        phase: &'env Phase,
    ) -> Self {
        Self { scope, directory, phase, vms: Vec::new(), background: None }
    }

    /// Starts the next VM; each of its tasks has an `empty` record, in which `record` notes requests.
    pub fn start(
        &mut self,
        plans: &'env [Plan],
        seed: u64,
        empty: R,
        record: impl Fn(&mut R, Instant, Nanos) + Send + Sync + 'scope,
    ) {
        let (vm, phase) = (self.vms.len(), self.phase);
        let socket = socket(self.directory, vm);
        self.vms.push(self.scope.spawn(move || {
            let mut records = vec![empty; plans.len()];
            run_tasks_into(&socket, plans, seed | vm as u64, phase, &mut records, record)?;
            Ok(records)
        }));
    }

    /// Starts the background VM, which has the last disk.
    pub fn start_background(&mut self, disk: usize, work: Work, moved: &'env AtomicU64) {
        let (socket, phase) = (socket(self.directory, disk), self.phase);
        self.background = Some(self.scope.spawn(move || work.run(&socket, phase, moved)));
    }

    /// The records of each VM's tasks, once all have ended.
    ///
    /// # Errors
    /// Why a client ended early.
    pub fn join(self) -> Result<Vec<Vec<R>>> {
        let failed = |_| anyhow!("a client failed");
        let vms = self.vms.into_iter().map(|vm| vm.join().map_err(failed)?);
        let records = vms.collect::<Result<_>>()?;
        self.background.map_or(Ok(Ok(())), |vm| vm.join().map_err(failed))??;
        Ok(records)
    }
}

/// The service curve of `device`, which is loaded for 8 s in all.
pub fn measured_curve(program: &Path, device: &Path, interrupted: &Interrupted) -> Result<Curve> {
    let bandwidth = |block, depth, read_fraction, seconds| {
        let work = Work::Flood { block, depth, read_fraction };
        let trial = Trial::new(program, device, Sharing::Free, Duration::from_secs(seconds));
        let trial = Trial { background: Some(Background { work, promise: None }), ..trial };
        let bandwidth = trial.record(interrupted)?.background;
        ensure!(bandwidth > 0.0, "no request of {block} bytes ended within {seconds} s");
        Ok(bandwidth)
    };
    Ok(Curve::of_rates(Rates {
        iops: bandwidth(SMALL, 64, 0.7, 3)? / SMALL as f64,
        bandwidth: bandwidth(LARGE, 64, 0.0, 3)?,
        response: SMALL as f64 / bandwidth(SMALL, 1, 0.7, 2)?,
    }))
}
