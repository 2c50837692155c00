//! `rtvirtio watch`: each task's tail as it happens, and the closed loop.
//!
//! A task's latency is taken where QEMU serves the guest's request, from its
//! latency histograms; a VM without a monitor that answers is shown without.
//! Beside it, each disk's latency in the host's block layer ([`HostLatency`]): the
//! closed loop goes by QEMU's alone. Devices of the data plane, which no QEMU
//! sees, are shown by what it tells of them ([`data_plane`]). What each second brought is kept for
//! [`RECENT`], so that the tails shown are those of the last minute.

mod data_plane;
mod display;
mod metrics;
mod sources;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rtvirtio_cli::log::{self, Level};
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_host::{ApplyOptions, JournalStatus, Topology};
use rtvirtio_observe::host_latency::HostLatency;
use rtvirtio_planner::control::{Controller, Decision, TaskObservation};
use rtvirtio_spec::latency::{Histogram, Quantile};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::Knobs;
use rtvirtio_spec::specification::{Backend, Specification, Target};
use rtvirtio_units::{BytesPerSecond, DeviceName, DiskName, Nanos, Percentile, TaskName, VmName};
use serde::Serialize;
use tracing::{info, warn};

use super::plan::ModelChoice;
use crate::{Outcome, input, output};
use data_plane::{DataPlane, DeviceRow};
use sources::{Sample, Sources};

/// How far back the tails shown reach.
const RECENT: Duration = Duration::from_secs(60);
/// The percentiles shown.
const PERCENTILES: [f64; 4] = [50.0, 99.0, 99.9, 99.99];
/// Samples beyond a percentile without which it is not shown.
const MIN_BEYOND: u64 = 10;

/// Arguments of `watch`.
#[derive(clap::Args)]
#[command(after_help = "A disk's NAME in the specification is the device with the id NAME or \
    ua-NAME in QEMU; in libvirt <alias name='ua-NAME'/> in its <disk> gives it that id.\n\
    --control sets the host's knobs alone, no guest's and no IOThread's.\n\
    SIGHUP has the specification read again, unless a terminal shows it. Ctrl-C ends it; settings that it applied stay until `rtvirtio rollback`.")]
pub(crate) struct Args {
    /// The specification (TOML)
    specification: PathBuf,
    /// Plan again and apply when VMs come or go, or a target is at risk
    #[arg(long)]
    control: bool,
    /// Seconds between two looks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=60))]
    interval: u64,
    /// End after this many seconds
    #[arg(long, value_name = "SECONDS")]
    duration: Option<u64>,
    /// Serve Prometheus metrics on this address, such as 127.0.0.1:9477
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Control socket of the data plane whose devices are shown too; without, the usual one if it
    /// is there
    #[arg(long, value_name = "SOCKET")]
    dataplane: Option<PathBuf>,
    /// Print a JSON line at each look
    #[arg(long)]
    json: bool,
}

/// What is known of one task.
pub(crate) struct TaskState {
    vm: VmName,
    task: TaskName,
    target: Option<Target>,
    wanted_iops: Option<f64>,
    history: History,
}

/// What a task or a disk did.
#[derive(Default)]
struct History {
    recent: VecDeque<(Instant, Sample)>,
    requests: u64,
    misses: u64,
}

/// Tails and rate of the last minute.
struct Recent {
    tails: Tails,
    iops: f64,
}

/// p50, p99, p99.9, p99.99; `None`: too few samples.
type Tails = [Option<Quantile>; 4];

/// A target as it is shown.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RowTarget {
    percentile: Percentile,
    latency: Nanos,
}

/// One task's line.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    vm: VmName,
    task: TaskName,
    measured_at: MeasuredAt,
    /// Of the last minute.
    tails: Tails,
    target: Option<RowTarget>,
    /// Requests above the target, since the start.
    misses: u64,
    /// All requests since the start.
    requests: u64,
    /// Requests per second over the last minute.
    iops: f64,
    /// Declared requests per second.
    wanted_iops: Option<f64>,
}

/// What the closed loop did.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Change {
    /// Why it planned again.
    reason: String,
    /// Knobs written.
    written: usize,
    /// Targets that the plan leaves unmet.
    unmet: usize,
    /// Each background VM's cap, if it has one.
    caps: BTreeMap<VmName, Option<BytesPerSecond>>,
    /// Why nothing was applied.
    failed: Option<String>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, written, unmet, .. } = self;
        if let Some(failed) = &self.failed {
            return write!(f, "{reason}: not changed: {failed}");
        }
        write!(f, "{reason}: planned; {written} knobs changed, {unmet} targets unmet")?;
        for (vm, cap) in &self.caps {
            match cap {
                Some(cap) => write!(f, "; {vm} capped at {cap}")?,
                None => write!(f, "; {vm} has no cap")?,
            }
        }
        Ok(())
    }
}

/// One disk's line: the reads and writes of all tasks on it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DiskRow {
    vm: VmName,
    disk: DiskName,
    measured_at: MeasuredAt,
    /// Of the last minute.
    tails: Tails,
    /// All requests since the start, as the block layer counts them: after QEMU has merged or
    /// split the guest's.
    requests: u64,
    /// Requests per second over the last minute.
    iops: f64,
}

/// What one look says.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Look {
    /// Seconds since the start.
    at_s: f64,
    tasks: Vec<Row>,
    /// Disks of VMs that are measured on the host.
    disks: Vec<DiskRow>,
    /// Records of the block layer that were lost since the start: requests that no disk's line has.
    host_records_lost: u64,
    /// Devices of the data plane.
    data_plane: Vec<DeviceRow>,
    /// VMs that run.
    present: BTreeSet<VmName>,
    /// What `--control` did.
    change: Option<Change>,
    /// What happened: the change, monitors lost and found.
    events: Vec<String>,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    // A service has no reader of its looks: what happens goes to the journal too.
    if log::is_journal() {
        log::start(Level::Info);
    }
    let mut specification = read(&args.specification)?;
    let mut tasks = states(&specification);
    let mut sources = Sources::new(&specification, input::host())?;
    let mut on_host = HostLatency::new(input::host(), |(vm, disk)| format!("{vm}/{disk}"));
    let mut disks: BTreeMap<(VmName, DiskName), History> = BTreeMap::new();
    let mut data_plane = DataPlane::new(&specification, args.dataplane.as_deref());
    let metrics = args.listen.map(metrics::Server::start).transpose()?;
    let is_terminal = std::io::stdout().is_terminal();
    let is_table = !args.json && is_terminal;
    let mut display = is_table.then(display::Display::start).transpose()?;
    let reload = Arc::new(AtomicBool::new(false));
    if !is_terminal {
        signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&reload))
            .context("install a handler for SIGHUP")?;
    }
    let start = Instant::now();
    let clock = |now: Instant| Nanos::from_secs_f64((now - start).as_secs_f64());
    let mut controller: Option<Controller> = None;
    if args.control {
        // What a dead apply left is put back before the monitors are taken, one of which that may
        // need.
        input::host().verify(&Topology::default(), &Knobs::new())?;
    }
    loop {
        let mut events = sources.refresh();
        if reload.swap(false, Ordering::Relaxed) {
            match read(&args.specification) {
                Ok(found) => {
                    specification = found;
                    sources.let_go();
                    sources = Sources::new(&specification, input::host())?;
                    tasks = states(&specification);
                    disks.clear();
                    data_plane = DataPlane::new(&specification, args.dataplane.as_deref());
                    controller = None;
                    events = sources.refresh();
                    events.push("the specification was read again".to_owned());
                }
                Err(error) => events.push(format!(
                    "the specification cannot be read again, and the old one holds: {error:#}"
                )),
            }
        }
        let now = Instant::now();
        for (disk, (histogram, seconds)) in on_host.take(now, &mut events) {
            disks.entry(disk).or_default().add(now, Sample { histogram, misses: 0, seconds });
        }
        on_host.follow(sources.parts(), &mut events);
        let devices = data_plane.take(Instant::now(), &mut events);
        let mut observed = take(&mut tasks, &mut sources, now, &mut events);
        let mut present = sources.present().clone();
        let (served, of_served) = data_plane.observed(&devices);
        present.extend(served);
        observed.extend(of_served);
        events.iter().for_each(|event| info!("{event}"));
        let mut change = None;
        if args.control {
            let decision = match &mut controller {
                Some(controller) => {
                    let speeds = data_plane.speeds();
                    controller.step(clock(now), &present, &observed, &speeds)
                }
                None => {
                    controller = Some(Controller::new(clock(now), present.clone()));
                    let slower = BTreeMap::new();
                    Decision::Plan { margin: 1.0, slower, reason: "start".to_owned() }
                }
            };
            if let Decision::Plan { margin, slower, reason } = decision {
                if input::host().journal_status().is_ok_and(|s| s == JournalStatus::Unfinished) {
                    sources.let_go();
                }
                let done = act(&specification, &present, (margin, &slower), reason);
                if done.failed.is_some() || done.unmet > 0 {
                    warn!("{done}");
                } else {
                    info!("{done}");
                }
                events.push(done.to_string());
                if let (Some(controller), Some(_)) = (&mut controller, &done.failed) {
                    controller.failed(&done.reason);
                }
                change = Some(done);
            }
        }
        let look = Look {
            at_s: (now - start).as_secs_f64(),
            tasks: tasks.iter().map(|t| t.row(now)).collect(),
            disks: disks.iter().map(|((vm, disk), history)| history.row(vm, disk, now)).collect(),
            host_records_lost: on_host.lost(),
            data_plane: devices,
            present,
            change,
            events,
        };
        if let Some(metrics) = &metrics {
            metrics.publish(&look);
        }
        if let Some(display) = &mut display {
            if display.draw(&look)? {
                return Ok(Outcome::Done);
            }
        } else {
            print(&look, args.json)?;
        }
        if args.duration.is_some_and(|s| start.elapsed() >= Duration::from_secs(s)) {
            return Ok(Outcome::Done);
        }
        // Ctrl-C is how it ends.
        if let Err(InterruptedError) = wait(Duration::from_secs(args.interval), interrupted) {
            return Ok(Outcome::Done);
        }
    }
}

/// The specification, with the VMs where they are.
fn read(path: &Path) -> Result<Specification> {
    let mut specification = input::specification(path)?;
    input::host().locate_vms(&mut specification)?;
    Ok(specification)
}

fn states(specification: &Specification) -> Vec<TaskState> {
    let mut states = Vec::new();
    for vm in &specification.vms {
        for task in &vm.tasks {
            states.push(TaskState {
                vm: vm.name.clone(),
                task: task.name.clone(),
                target: task.target,
                wanted_iops: task.load.iops.map(rtvirtio_units::Iops::get),
                history: History::default(),
            });
        }
    }
    states
}

/// Takes what each task did since the last look.
fn take(
    tasks: &mut [TaskState],
    sources: &mut Sources,
    now: Instant,
    events: &mut Vec<String>,
) -> Vec<TaskObservation> {
    let mut observed = Vec::new();
    let (mut samples, lost) = sources.sample();
    events.extend(lost);
    for state in tasks {
        let key = (state.vm.clone(), state.task.clone());
        let Some(sample) = samples.remove(&key) else { continue };
        let (requests, misses) = (sample.histogram.count(), sample.misses);
        state.history.add(now, sample);
        if let Some(target) = state.target {
            observed.push(TaskObservation {
                vm: state.vm.clone(),
                task: state.task.clone(),
                percentile: target.percentile,
                requests,
                misses,
            });
        }
    }
    observed
}

impl History {
    fn add(&mut self, now: Instant, sample: Sample) {
        self.requests = self.requests.saturating_add(sample.histogram.count());
        self.misses = self.misses.saturating_add(sample.misses);
        self.recent.push_back((now, sample));
        while self.recent.front().is_some_and(|(at, _)| now - *at > RECENT) {
            self.recent.pop_front();
        }
    }

    fn recent(&self, now: Instant) -> Recent {
        let mut recent = Histogram::new();
        for (_, sample) in &self.recent {
            recent.merge(&sample.histogram);
        }
        let seconds: f64 = self.recent.iter().map(|(_, s)| s.seconds).sum();
        let tails = PERCENTILES.map(|p| {
            let percentile = Percentile::new(p).ok()?;
            let enough = rtvirtio_spec::latency::beyond(recent.count(), percentile) >= MIN_BEYOND;
            enough.then(|| recent.quantile(percentile)).flatten()
        });
        let is_fresh = self.recent.back().is_some_and(|(at, _)| now - *at < RECENT);
        let iops = if is_fresh { recent.count() as f64 / seconds.max(1e-3) } else { 0.0 };
        Recent { tails, iops }
    }

    fn row(&self, vm: &VmName, disk: &DiskName, now: Instant) -> DiskRow {
        let Recent { tails, iops } = self.recent(now);
        let (vm, disk, requests) = (vm.clone(), disk.clone(), self.requests);
        DiskRow { vm, disk, measured_at: MeasuredAt::Host, tails, requests, iops }
    }
}

impl TaskState {
    fn row(&self, now: Instant) -> Row {
        let Recent { tails, iops } = self.history.recent(now);
        Row {
            vm: self.vm.clone(),
            task: self.task.clone(),
            measured_at: MeasuredAt::Qemu,
            tails,
            target: self.target.map(|t| RowTarget { percentile: t.percentile, latency: t.latency }),
            misses: self.history.misses,
            requests: self.history.requests,
            iops,
            wanted_iops: self.wanted_iops,
        }
    }
}

/// Plans for the VMs that run with targets tightened by `margin` and devices as slow as they are, and
/// applies what changes.
fn act(
    specification: &Specification,
    present: &BTreeSet<VmName>,
    (margin, slower): (f64, &BTreeMap<DeviceName, f64>),
    reason: String,
) -> Change {
    let mut wanted = specification.clone();
    wanted.vms.retain(|vm| present.contains(&vm.name));
    // A deadline is kept by the data plane itself: a shorter one would only be refused.
    let of_kernel = wanted.vms.iter_mut().filter(|vm| vm.backend == Backend::Kernel);
    for task in of_kernel.flat_map(|vm| &mut vm.tasks) {
        if let Some(target) = &mut task.target {
            target.latency = target.latency.scale(1.0 / margin);
        }
    }
    let mut change = Change { reason, written: 0, unmet: 0, caps: BTreeMap::new(), failed: None };
    if wanted.vms.is_empty() {
        return change;
    }
    let mut apply = || -> Result<()> {
        // The host alone: the monitors serve this one client, which holds them.
        let plan = super::plan::plan_host(&wanted, slower, &ModelChoice::Structural)?;
        change.unmet = plan.tasks.iter().filter(|t| t.unmet.is_some()).count();
        change.caps = plan.background.iter().map(|b| (b.vm.clone(), b.cap)).collect();
        let (topology, options) = (Topology::of_plan(&plan), ApplyOptions::default());
        let host = input::host();
        change.written = host.apply(&topology, &plan.observed, &plan.changes, options)?.written;
        Ok(())
    };
    change.failed = apply().err().map(|error| format!("{error:#}"));
    change
}

fn print(look: &Look, json: bool) -> Result<()> {
    let text = if json { serde_json::to_string(look)? } else { display::text(look) };
    output::line(&text);
    Ok(())
}
