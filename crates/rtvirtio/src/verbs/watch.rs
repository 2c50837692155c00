//! `rtvirtio watch`: each task's tail as it happens, and the closed loop.
//!
//! Latency is taken where QEMU serves the guest's request, from its latency
//! histograms; a VM without a monitor that answers is shown without. What each
//! second brought is kept for [`RECENT`], so that the tails shown are those of
//! the last minute.

mod display;
mod metrics;
mod sources;

use std::collections::{BTreeSet, VecDeque};
use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rtvirtio_bench::InterruptedError;
use rtvirtio_bench::load::{Interrupted, wait};
use rtvirtio_host::{ApplyOptions, Topology};
use rtvirtio_planner::control::{Controller, Decision, TaskObservation};
use rtvirtio_spec::latency::{Histogram, Quantile};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::specification::{Specification, Target};
use rtvirtio_units::{Nanos, Percentile, TaskName, VmName};
use serde::Serialize;

use crate::{Outcome, input};
use sources::{Sample, Sources};

/// How far back the tails shown reach.
const RECENT: Duration = Duration::from_secs(60);
/// The percentiles shown.
const PERCENTILES: [f64; 4] = [50.0, 99.0, 99.9, 99.99];
/// Samples beyond a percentile without which it is not shown.
const LEAST_BEYOND: u64 = 10;

/// Arguments of `watch`.
#[derive(clap::Args)]
#[command(after_help = "A disk's name in the specification is the id of its device in QEMU. \
    --control sets the host's knobs alone, no guest's and no IOThread's. \
    Ctrl-C ends it; settings that it applied stay until `rtvirtio rollback`.")]
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
    recent: VecDeque<(Instant, Sample)>,
    requests: u64,
    misses: u64,
}

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
    /// p50, p99, p99.9, p99.99 of the last minute; `None`: too few samples.
    tails: [Option<Quantile>; 4],
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

/// What one look says.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Look {
    /// Seconds since the start.
    at_s: f64,
    tasks: Vec<Row>,
    /// VMs that run.
    present: BTreeSet<VmName>,
    /// What happened: changes with their reason, monitors lost and found.
    events: Vec<String>,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let specification = input::specification(&args.specification)?;
    let mut tasks = states(&specification);
    let mut sources = Sources::new(&specification, input::host())?;
    let metrics = args.listen.map(metrics::Server::start).transpose()?;
    let is_table = !args.json && std::io::stdout().is_terminal();
    let mut display = is_table.then(display::Display::start).transpose()?;
    let start = Instant::now();
    let clock = |now: Instant| Nanos::from_secs_f64((now - start).as_secs_f64());
    let mut controller: Option<Controller> = None;
    loop {
        let mut events = sources.refresh();
        let now = Instant::now();
        let observed = take(&mut tasks, &mut sources, now, &mut events);
        let present = sources.present().clone();
        if args.control {
            let decision = match &mut controller {
                Some(controller) => controller.step(clock(now), &present, &observed),
                None => {
                    controller = Some(Controller::new(clock(now), present.clone()));
                    Decision::Plan { margin: 1.0, reason: "start".to_owned() }
                }
            };
            if let Decision::Plan { margin, reason } = decision {
                events.push(format!("{reason}: {}", act(&specification, &present, margin)));
            }
        }
        let look = Look {
            at_s: (now - start).as_secs_f64(),
            tasks: tasks.iter().map(|t| t.row(now)).collect(),
            present,
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
        match wait(Duration::from_secs(args.interval), interrupted) {
            // Ctrl-C is how it ends.
            Err(error) if error.is::<InterruptedError>() => return Ok(Outcome::Done),
            other => other?,
        }
    }
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
                recent: VecDeque::new(),
                requests: 0,
                misses: 0,
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
    for state in tasks {
        let sample = match sources.sample(&state.vm, &state.task) {
            Ok(Some(sample)) => sample,
            Ok(None) => continue,
            Err(error) => {
                events.push(format!("{}/{}: {error:#}", state.vm, state.task));
                continue;
            }
        };
        let (requests, misses) = (sample.histogram.count(), sample.misses);
        state.requests += requests;
        state.misses += misses;
        state.recent.push_back((now, sample));
        while state.recent.front().is_some_and(|(at, _)| now - *at > RECENT) {
            state.recent.pop_front();
        }
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

impl TaskState {
    fn row(&self, now: Instant) -> Row {
        let mut recent = Histogram::new();
        for (_, sample) in &self.recent {
            recent.merge(&sample.histogram);
        }
        let seconds: f64 = self.recent.iter().map(|(_, s)| s.seconds).sum();
        let tails = PERCENTILES.map(|p| {
            let percentile = Percentile::new(p).ok()?;
            let enough = rtvirtio_spec::latency::beyond(recent.count(), percentile) >= LEAST_BEYOND;
            enough.then(|| recent.quantile(percentile)).flatten()
        });
        let is_fresh = self.recent.back().is_some_and(|(at, _)| now - *at < RECENT);
        Row {
            vm: self.vm.clone(),
            task: self.task.clone(),
            measured_at: MeasuredAt::Qemu,
            tails,
            target: self.target.map(|t| RowTarget { percentile: t.percentile, latency: t.latency }),
            misses: self.misses,
            requests: self.requests,
            iops: if is_fresh { recent.count() as f64 / seconds.max(1e-3) } else { 0.0 },
            wanted_iops: self.wanted_iops,
        }
    }
}

/// Plans for the VMs that run with targets tightened by `margin`, applies what changes, and says
/// what was done.
fn act(specification: &Specification, present: &BTreeSet<VmName>, margin: f64) -> String {
    let mut wanted = specification.clone();
    wanted.vms.retain(|vm| present.contains(&vm.name));
    if wanted.vms.is_empty() {
        return "no VM runs".to_owned();
    }
    for task in wanted.vms.iter_mut().flat_map(|vm| &mut vm.tasks) {
        if let Some(target) = &mut task.target {
            target.latency = target.latency.scale(1.0 / margin);
        }
    }
    let done = || -> Result<String> {
        // The host alone: the monitors serve this one client, which holds them.
        let plan = super::plan::plan_host(&wanted)?;
        let unmet = plan.tasks.iter().filter(|t| t.unmet.is_some()).count();
        if plan.changes.is_empty() {
            return Ok(format!("planned, nothing to change ({unmet} targets unmet)"));
        }
        let topology = Topology::of_plan(&plan);
        let options = ApplyOptions::default();
        let applied = input::host().apply(&topology, &plan.observed, &plan.changes, options)?;
        let caps: Vec<String> = plan
            .background
            .iter()
            .map(|b| {
                let cap = b.cap.map_or_else(|| "no cap".to_owned(), |c| c.to_string());
                format!("{} {cap}", b.vm)
            })
            .collect();
        let caps = if caps.is_empty() { String::new() } else { format!("; {}", caps.join(", ")) };
        Ok(format!("{} knobs changed, {unmet} targets unmet{caps}", applied.written))
    };
    done().unwrap_or_else(|error| format!("not changed: {error:#}"))
}

fn print(look: &Look, json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let text = if json { serde_json::to_string(look)? } else { display::text(look) };
    writeln!(out, "{text}").and_then(|()| out.flush()).context("write to standard output")
}
