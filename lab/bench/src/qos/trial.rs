//! One server with its clients for one window.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use rtvirtio_cases::judge;
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_units::{Nanos, Percentile};

use super::cell::Task;
use super::clients::{Plan, run_tasks_into};
use super::configuration::{Layout, Sharing, socket};
use super::curve::{Curve, LARGE, Rates, SMALL};
use super::neighbour::{Background, Work};
use crate::dataplane::server::Server;
use crate::window::{COUNTING, EndPhase, WARMING};
use rtvirtio_calibrate::load::{CanaryThread, MachineSample, canary_summary};

/// From the first request to the window, in benchmarks.
pub(crate) const WARM_UP: Duration = Duration::from_secs(2);
/// To start and to end a server and its clients.
const AROUND: Duration = Duration::from_secs(1);

/// What is to run.
#[derive(Debug)]
pub(crate) struct Trial<'a> {
    /// The `rtvirtio` that serves.
    pub(crate) program: &'a Path,
    /// The block device or file under all disks.
    pub(crate) device: &'a Path,
    /// How they share it.
    pub(crate) sharing: Sharing,
    /// The tasks of each VM.
    pub(crate) vms: &'a [Vec<Plan>],
    /// Who else is there.
    pub(crate) background: Option<Background>,
    /// From the first request to the window.
    pub(crate) warm_up: Duration,
    /// Length of the window.
    pub(crate) window: Duration,
    /// Of the times and places of requests.
    pub(crate) seed: u64,
}

/// What came of it.
pub(crate) struct Measured {
    pub(crate) tasks: Vec<Task>,
    /// Of the background VM, bytes a second.
    pub(crate) background: f64,
    /// Length of the window.
    pub(crate) seconds: f64,
    pub(crate) canary: Canary,
    /// CPUs busy, of the machine.
    pub(crate) busy: f64,
}

/// The same before it is judged.
pub(crate) struct Recorded {
    /// Of each VM's tasks.
    pub(crate) tasks: Vec<Vec<TaskRecord>>,
    /// Of the background VM, bytes a second.
    pub(crate) background: f64,
    /// Length of the window.
    pub(crate) seconds: f64,
    /// How late a sleeping thread woke up, each time.
    pub(crate) canary: Histogram,
    pub(crate) machine: Machine,
}

/// What one task did in the window.
#[derive(Debug, Clone, Default)]
pub(crate) struct TaskRecord {
    /// Each request's latency.
    pub(crate) histogram: Histogram,
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
    pub(crate) fn timeline(&self) -> Vec<(u64, Nanos)> {
        let first = self.largest.keys().next().copied().unwrap_or(0);
        let ms = TIMELINE.as_millis() as u64;
        self.largest.iter().map(|(&at, &latency)| ((at - first) * ms, latency)).collect()
    }
}

impl Trial<'_> {
    /// How long one with such a window takes.
    pub(crate) fn duration(window: Duration) -> Duration {
        WARM_UP + window + AROUND
    }

    pub(crate) fn run(&self, interrupted: &Interrupted) -> Result<Measured> {
        let recorded = self.record(interrupted)?;
        Ok(Measured {
            tasks: self.judged(&recorded.tasks, recorded.seconds),
            background: recorded.background,
            seconds: recorded.seconds,
            canary: canary_summary(&recorded.canary),
            busy: recorded.machine.busy_cores,
        })
    }

    /// Runs it, and judges nothing.
    pub(crate) fn record(&self, interrupted: &Interrupted) -> Result<Recorded> {
        let directory = tempfile::Builder::new().prefix("rtvirtio-qos-").tempdir()?;
        let directory = directory.path();
        let layout = Layout {
            device: self.device,
            directory,
            sharing: self.sharing,
            vms: self.vms,
            background: self.background.as_ref(),
        };
        let command = layout.command(self.program)?;
        let server = Server::start(&command, &layout.last_socket(), directory, interrupted)?;
        server.during(|_| self.measure(directory, interrupted))
    }

    fn measure(&self, directory: &Path, interrupted: &Interrupted) -> Result<Recorded> {
        let origin = Instant::now();
        let phase = AtomicU8::new(WARMING);
        let moved = AtomicU64::new(0);
        let (phase, moved) = (&phase, &moved);
        std::thread::scope(|scope| {
            let end = EndPhase(phase);
            let background = self.background.as_ref().map(|background| {
                let socket = socket(directory, self.vms.len());
                scope.spawn(move || background.work.run(&socket, phase, moved))
            });
            let client = |(vm, plans): (usize, &'_ Vec<Plan>)| {
                let (socket, plans, seed) = (socket(directory, vm), plans.clone(), self.seed);
                scope.spawn(move || {
                    let mut records = vec![TaskRecord::default(); plans.len()];
                    let record = |into: &mut TaskRecord, ended: Instant, latency| {
                        into.record(ended.saturating_duration_since(origin), latency);
                    };
                    let seed = seed | vm as u64;
                    run_tasks_into(&socket, &plans, seed, phase, &mut records, record)?;
                    Ok::<_, anyhow::Error>(records)
                })
            };
            let clients: Vec<_> = self.vms.iter().enumerate().map(client).collect();
            let window = self.window(phase, moved, interrupted);
            drop(end);
            // Why a client ended says more than that it did: before what the window says.
            let mut tasks = Vec::new();
            for client in clients {
                tasks.push(client.join().map_err(|_| anyhow!("a client failed"))??);
            }
            if let Some(background) = background {
                background.join().map_err(|_| anyhow!("the background client failed"))??;
            }
            Ok(Recorded { tasks, ..window? })
        })
    }

    /// The window after the warm-up, without its tasks.
    fn window(
        &self,
        phase: &AtomicU8,
        moved: &AtomicU64,
        interrupted: &Interrupted,
    ) -> Result<Recorded> {
        wait(self.warm_up, interrupted)?;
        ensure!(phase.load(Ordering::Relaxed) == WARMING, "a VM ended in the warm-up");
        let (canary, machine) = (CanaryThread::start(), MachineSample::now()?);
        let (before, begin) = (moved.load(Ordering::Relaxed), Instant::now());
        phase.store(COUNTING, Ordering::Relaxed);
        wait(self.window, interrupted)?;
        ensure!(phase.load(Ordering::Relaxed) == COUNTING, "a VM ended in the window");
        let bytes = moved.load(Ordering::Relaxed) - before;
        let seconds = begin.elapsed().as_secs_f64();
        let machine = machine.since()?;
        let (background, canary) = (bytes as f64 / seconds, canary.lateness());
        Ok(Recorded { tasks: Vec::new(), background, seconds, canary, machine })
    }

    fn judged(&self, records: &[Vec<TaskRecord>], seconds: f64) -> Vec<Task> {
        let vms = self.vms.iter().zip(records).enumerate();
        let tasks = vms.flat_map(|(vm, (plans, records))| {
            let tasks = plans.iter().zip(records);
            tasks.map(move |(plan, record)| judged(plan, vm, &record.histogram, seconds))
        });
        tasks.collect()
    }
}

/// The service curve of `device`, which is loaded for 8 s in all.
pub(crate) fn measured_curve(
    program: &Path,
    device: &Path,
    interrupted: &Interrupted,
) -> Result<Curve> {
    let bandwidth = |block, depth, read_fraction, seconds| {
        let work = Work::Flood { block, depth, read_fraction };
        let trial = Trial {
            program,
            device,
            sharing: Sharing::Free,
            vms: &[],
            background: Some(Background { work, promise: None }),
            warm_up: WARM_UP,
            window: Duration::from_secs(seconds),
            seed: 0,
        };
        let bandwidth = trial.run(interrupted)?.background;
        ensure!(bandwidth > 0.0, "no request of {block} bytes ended within {seconds} s");
        Ok(bandwidth)
    };
    Ok(Curve::of_rates(Rates {
        iops: bandwidth(SMALL, 64, 0.7, 3)? / SMALL as f64,
        bandwidth: bandwidth(LARGE, 64, 0.0, 3)?,
        response: SMALL as f64 / bandwidth(SMALL, 1, 0.7, 2)?,
    }))
}

/// What came of a task in a window of `seconds`.
fn judged(plan: &Plan, vm: usize, histogram: &Histogram, seconds: f64) -> Task {
    let us = |time: Nanos| time.get() as f64 / 1e3;
    let p99 = Percentile::new(99.0).expect("99 is a percentile");
    let judgement = judge(histogram, seconds, plan.iops, plan.target);
    let (percentile, tail) =
        judgement.judged.map_or((0.0, Nanos::ZERO), |q| (q.percentile.get(), q.value));
    Task {
        name: format!("vm{vm}.{}", plan.name),
        n: histogram.count(),
        percentile,
        tail_us: us(tail),
        tail_interval_us: judgement.judged.map(|q| [us(q.low), us(q.high)]),
        p99_us: histogram.quantile(p99).map(|q| [us(q.value), us(q.low), us(q.high)]),
        target_us: us(plan.target),
        bound_us: None,
        delivered: judgement.delivered_fraction,
        passed: judgement.passed(),
    }
}
