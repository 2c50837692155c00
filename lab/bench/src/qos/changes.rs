//! How soon targets are met again when the load or the device changes.
//!
//! A run has four phases of one length. Two VMs with light, medium and heavy tasks work from the
//! start; a third one, whose disk was there, appears at the second phase; the deep writer starts at
//! the third; at the fourth the emulated device takes twice as long for each request, of which its
//! schedule knows nothing. Targets are those of the strict tier. The heavy tasks ask for less than
//! the cases' do: one request at a time on a device half as quick must leave them some slack, or no
//! schedule could meet their rate.
//!
//! *Recovery* is the time from an event to the first moment, in steps of 100 ms, from which on every
//! task of the VMs that are there meets its target for a second: 0.95 of its rate, and the judged
//! percentile of what ended in that second within the target; the largest latency of those with too
//! few requests to judge one.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rtvirtio_calibrate::load::canary_summary;
use rtvirtio_cases::judge::MIN_DELIVERED;
use rtvirtio_cases::{Case, Mix, TaskKind, Tier, judged_percentile};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::run::Canary;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::neighbour::{Background, Neighbour};
use rtvirtio_testbed::scratch::{Backing, ScratchDisk};
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_testbed::tasks::{Between, Plan, tasks};
use rtvirtio_testbed::trial::{Clients, DISK, Layout, Sharing, WARM_UP};
use rtvirtio_testbed::window::{Phase, Watch, Watched};
use rtvirtio_testbed::work_directory::WorkDirectory;
use rtvirtio_units::{Bytes, Iops, Nanos};
use serde::{Deserialize, Serialize};

use super::cell::Scheme;
use crate::experiment::{self, Experiment, Report, lasted, seconds};
use crate::plot::{Chart, Weight, sheet};
use crate::stats::range;
use crate::table::Table;

/// VMs with targets; the last one appears later.
const VMS: u8 = 3;
/// What a heavy task asks for here.
const HEAVY_IOPS: f64 = 1_100.0;
/// How much longer requests take in the last phase.
const SLOWER: u16 = 2;
/// Of timelines, and the steps in which recovery is looked for.
const STEP: Duration = Duration::from_millis(100);
/// A target is met if it is for so long.
const MET: Duration = Duration::from_secs(1);
/// To start and to end a run.
const AROUND: Duration = Duration::from_secs(2);
/// Longest recovery: the mark.
const MARK: Duration = Duration::from_secs(1);

/// Names a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunKey {
    /// With a schedule or without.
    pub scheme: Scheme,
    /// From 0.
    pub repetition: u32,
}

/// A task over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Its VM, from 0.
    pub vm: usize,
    /// Such as `heavy`.
    pub name: String,
    /// Requests a second that it is to do.
    pub iops: f64,
    /// Its target, µs.
    pub target_us: f64,
    /// When it starts, s.
    pub from_s: f64,
    /// Requests that ended in each 100 ms.
    pub ended: Vec<u32>,
    /// The largest latency of these, µs; 0 without any.
    pub largest_us: Vec<u32>,
}

/// What happened to a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// For people.
    pub name: String,
    /// When, s.
    pub at_s: f64,
    /// The recovery, s; none: not before the next event.
    pub recovery_s: Option<f64>,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Which.
    #[serde(flatten)]
    pub key: RunKey,
    /// The device, such as `ref-4x250`.
    pub device: String,
    /// Length of a phase, s.
    pub phase_s: f64,
    /// The VMs' tasks.
    pub tasks: Vec<Task>,
    /// What the deep writer wrote in each 100 ms, bytes.
    pub written: Vec<u64>,
    /// In their order.
    pub events: Vec<Event>,
    /// The machine's health.
    pub canary: Canary,
    /// CPUs busy, of the machine.
    pub busy: f64,
    /// When it ran.
    pub at: String,
}

/// Arguments of `bench qos-changes`.
#[derive(Debug, clap::Args)]
pub struct Benchmark {
    /// Runs with a schedule, and as many without
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Time between two changes in seconds
    #[arg(long, default_value = "6", value_parser = seconds::<1_500, 600_000>)]
    phase: Duration,
    /// Emulated SSD: ref-4x250 or ref-8x80
    #[arg(long, default_value = "ref-4x250")]
    ssd: String,
}

impl Experiment for Benchmark {
    type Key = RunKey;
    type Cell = Run;
    type Setup = ScratchDisk;

    const FILE: &'static str = "changes.jsonl";
    const OUT: &'static str = "rtvirtio-bench-qos-changes";

    fn keys(&self) -> Result<Vec<RunKey>> {
        let schemes = [Scheme::None, Scheme::Qos];
        let of = |repetition| schemes.map(|scheme| RunKey { scheme, repetition });
        Ok((0..self.repetitions).flat_map(of).collect())
    }

    fn is_of(run: &Run, key: &RunKey) -> bool {
        run.key == *key
    }

    fn label(&self, key: &RunKey) -> String {
        format!("{} {}", key.scheme.name(), key.repetition + 1)
    }

    fn expected(&self, _: &RunKey) -> Duration {
        WARM_UP + 4 * self.phase + AROUND
    }

    fn foreign(&self, run: &Run) -> Option<&'static str> {
        if run.device != self.ssd {
            return Some("another device");
        }
        (!lasted(run.phase_s, self.phase)).then_some("another --phase")
    }

    fn set_up(&self, _: &[RunKey], run: &experiment::Run<'_>) -> Result<ScratchDisk> {
        let size = Bytes::new(DISK * (u64::from(VMS) + 1));
        ScratchDisk::start(&Backing::Ssd(self.ssd.clone()), size, 1, run.interrupted)
    }

    fn measure(
        &self,
        disk: &mut ScratchDisk,
        key: &RunKey,
        run: &experiment::Run<'_>,
    ) -> Result<Run> {
        let curve = Curve::of_ssd(self.ssd.parse()?);
        let (vms, writer) = (vms()?, Neighbour::DeepWriter.background());
        let directory = WorkDirectory::new()?;
        let (directory, device) = (directory.path(), disk.device().to_owned());
        let layout = Layout {
            device: &device,
            directory,
            sharing: match key.scheme {
                Scheme::Qos => Sharing::Schedule(curve),
                _ => Sharing::Free,
            },
            vms: &vms,
            background: Some(&writer),
        };
        let changed = layout.serve(&rtvirtio()?, run.interrupted, || {
            self.play(*key, (&vms, &writer), disk, directory, run.interrupted)
        })?;
        disk.slow_down(1)?;
        Ok(changed)
    }

    fn report(&self, runs: &[Run], _: &experiment::Run<'_>) -> Result<Report> {
        Ok(Report::new(table(runs), runs)?.with("plot.svg", plot(runs)))
    }
}

impl Benchmark {
    fn play(
        &self,
        key: RunKey,
        (vms, background): (&[Vec<Plan>], &Background),
        disk: &mut ScratchDisk,
        directory: &Path,
        interrupted: &Interrupted,
    ) -> Result<Run> {
        let (phase, writes) = (Phase::new(), AtomicU64::new(0));
        let (origin, seed) = (Instant::now(), u64::from(key.repetition) << 8);
        let record = move |into: &mut Vec<Ended>, ended: Instant, latency| {
            into.push(Ended { at: Nanos::from(ended - origin), latency });
        };
        std::thread::scope(|scope| {
            let end = phase.ended_by_drop();
            let mut clients = Clients::new(scope, directory, &phase);
            let late = vms.len() - 1;
            for plans in &vms[..late] {
                clients.start(plans, seed, Vec::new(), record);
            }
            phase.warm_up(WARM_UP, interrupted)?;
            let watch = Watch::start()?;
            let begin = watch.begin();
            phase.count();
            let (mut happened, mut written, mut so_far) = (Vec::new(), Vec::new(), 0);
            let steps = (self.phase.as_secs_f64() / STEP.as_secs_f64()).round() as u32;
            for step in 0..4 * steps {
                let now = Nanos::from(begin.elapsed());
                if step == steps {
                    happened.push(("a third VM starts", now));
                    clients.start(&vms[late], seed, Vec::new(), record);
                } else if step == 2 * steps {
                    happened.push(("a deep writer starts", now));
                    clients.start_background(vms.len(), background.work, &writes);
                } else if step == 3 * steps {
                    happened.push(("the device is half as fast", now));
                    disk.slow_down(SLOWER)?;
                }
                let until = begin + STEP * (step + 1);
                phase.counted(until.saturating_duration_since(Instant::now()), interrupted)?;
                let all = writes.load(Ordering::Relaxed);
                written.push(all - so_far);
                so_far = all;
            }
            let length = Nanos::from(begin.elapsed());
            let Watched { machine, canary, .. } = watch.stop()?;
            drop(end);
            // From the origin of the clients to the run's.
            let offset = Nanos::from(begin - origin);
            let mut records = Vec::new();
            for (vm, ended) in clients.join()?.into_iter().enumerate() {
                let from = if vm == late { happened[0].1 } else { Nanos::ZERO };
                for (plan, mut ended) in vms[vm].iter().zip(ended) {
                    ended.iter_mut().for_each(|e| e.at = e.at.saturating_sub(offset));
                    records.push(Record { vm, plan, from, ended });
                }
            }
            let ends = happened.iter().skip(1).map(|event| event.1).chain([length]);
            let event = |(&(name, at), end): (&(&str, Nanos), Nanos)| Event {
                name: name.to_owned(),
                at_s: at.as_secs_f64(),
                recovery_s: recovery(&records, at, end).map(|time| time.as_secs_f64()),
            };
            Ok(Run {
                key,
                device: self.ssd.clone(),
                phase_s: self.phase.as_secs_f64(),
                tasks: records.iter().map(|record| record.task(4 * steps as usize)).collect(),
                written,
                events: happened.iter().zip(ends).map(event).collect(),
                canary: canary_summary(&canary),
                busy: machine.busy_cores,
                at: jiff::Timestamp::now().to_string(),
            })
        })
    }
}

/// The VMs' tasks.
fn vms() -> Result<Vec<Vec<Plan>>> {
    let case = Case::new(VMS, Mix::LightMediumHeavy)?;
    let mut vms: Vec<_> = (0..VMS)
        .map(|rank| {
            tasks(case, Tier::Strict, rank, Between::Nothing)
                .context("a case has targets for its VMs")
        })
        .collect::<Result<_>>()?;
    for plan in vms.iter_mut().flatten().filter(|plan| plan.name == TaskKind::Heavy.name()) {
        plan.iops = Iops::new(HEAVY_IOPS)?;
    }
    Ok(vms)
}

/// A request's end, and its latency.
#[derive(Debug, Clone, Copy)]
struct Ended {
    at: Nanos,
    latency: Nanos,
}

/// All requests of a task, in the order in which they ended.
struct Record<'a> {
    vm: usize,
    plan: &'a Plan,
    from: Nanos,
    ended: Vec<Ended>,
}

impl Record<'_> {
    /// Whether the target is met in the second that begins at `from`.
    fn meets(&self, from: Nanos) -> bool {
        let first = self.ended.partition_point(|request| request.at < from);
        let until = from.saturating_add(Nanos::from(MET));
        let beyond = self.ended.partition_point(|request| request.at < until);
        let mut latencies: Vec<Nanos> =
            self.ended[first..beyond].iter().map(|request| request.latency).collect();
        latencies.sort_unstable();
        let n = latencies.len();
        let rank = judged_percentile(n as u64)
            .map_or(n, |judged| (judged.get() / 100.0 * n as f64).ceil() as usize);
        let delivered = n as f64 / (self.plan.iops.get() * MET.as_secs_f64());
        let tail = rank.checked_sub(1).and_then(|at| latencies.get(at));
        delivered >= MIN_DELIVERED && tail.is_some_and(|&tail| tail <= self.plan.target)
    }

    fn task(&self, steps: usize) -> Task {
        let (mut ended, mut largest_us) = (vec![0; steps], vec![0; steps]);
        for request in &self.ended {
            let step = (request.at.get() / Nanos::from(STEP).get()) as usize;
            // What ended with the run lies beyond the last one.
            if let Some(count) = ended.get_mut(step) {
                *count += 1;
                let latency = u32::try_from(request.latency.get() / 1_000).unwrap_or(u32::MAX);
                largest_us[step] = latency.max(largest_us[step]);
            }
        }
        Task {
            vm: self.vm,
            name: self.plan.name.clone(),
            iops: self.plan.iops.get(),
            target_us: self.plan.target.get() as f64 / 1e3,
            from_s: self.from.as_secs_f64(),
            ended,
            largest_us,
        }
    }
}

/// The time from an event `at` to the first moment from which on all tasks that are there meet their
/// targets for a second that ends before `end`.
fn recovery(records: &[Record<'_>], at: Nanos, end: Nanos) -> Option<Nanos> {
    let there: Vec<_> = records.iter().filter(|record| record.from <= at).collect();
    let step = Nanos::from(STEP);
    let span = end.saturating_sub(at).saturating_sub(Nanos::from(MET));
    (0..=span.get() / step.get())
        .map(|number| Nanos::new(number * step.get()))
        .find(|&time| there.iter().all(|record| record.meets(at.saturating_add(time))))
}

/// Each event's recovery in each repetition.
#[must_use]
pub fn table(runs: &[Run]) -> String {
    let Some(first) = runs.first() else { return String::new() };
    let events = || first.events.iter().enumerate();
    let rows: Vec<_> =
        events().flat_map(|of| [Scheme::None, Scheme::Qos].map(|s| (of, s))).collect();
    let recoveries = |index: usize, scheme| -> Vec<Option<f64>> {
        let runs = runs.iter().filter(|run| run.key.scheme == scheme);
        runs.filter_map(|run| Some(run.events.get(index)?.recovery_s)).collect()
    };
    let table = Table::of(&rows)
        .text("event", |((_, event), _)| &event.name)
        .text("scheme", |(_, scheme)| scheme.name())
        .shown("<= 1 s", |((index, _), scheme)| {
            let all = recoveries(*index, *scheme);
            let in_time = all.iter().flatten().filter(|&&s| s <= MARK.as_secs_f64()).count();
            Some(format!("{in_time}/{}", all.len()))
        })
        .text("recovery, s", |((index, _), scheme)| {
            let time = |time: Option<f64>| time.map_or("never".to_owned(), |s| format!("{s:.1}"));
            recoveries(*index, *scheme).into_iter().map(time).collect::<Vec<_>>().join(" ")
        });
    let canary = runs.iter().map(|run| run.canary.p99.as_millis_f64()).fold(0.0, f64::max);
    format!(
        "{table}\nRecovery: from the event until all tasks meet their targets for a second. never: not within \
         the {} s until the next event. The machine's canary (p99): at most {canary:.1} ms.\n",
        first.phase_s
    )
}

/// Latencies and the writer over time in the first repetition of each scheme, a column for each.
#[must_use]
pub fn plot(runs: &[Run]) -> String {
    const NAMES: [&str; 3] = ["light", "medium", "heavy"];
    let first = |scheme| runs.iter().find(|run| run.key.scheme == scheme);
    let shown: Vec<&Run> = [Scheme::None, Scheme::Qos].into_iter().filter_map(first).collect();
    let tasks = || shown.iter().flat_map(|run| &run.tasks);
    let vms = tasks().map(|task| task.vm + 1).max().unwrap_or(0);
    let most = range(tasks().flat_map(|task| &task.largest_us).map(|&us| f64::from(us) / 1e3)).1;
    let written = |bytes: u64| bytes as f64 / 1e6 / STEP.as_secs_f64();
    let most_written = range(shown.iter().flat_map(|run| &run.written).map(|&b| written(b))).1;
    let middle = |step: usize| (step as f64 + 0.5) * STEP.as_secs_f64();
    let chart = |run: &Run, title: String, y: &'static str, with_recoveries: bool| {
        let chart = Chart::new(title, "time, s", y, (560.0, 230.0)).x_range(0.0, 4.0 * run.phase_s);
        run.events.iter().fold(chart, |chart, event| {
            let recovery = event.recovery_s;
            let recovery = recovery
                .map_or("not met again".to_owned(), |s| format!("met again after {s:.1} s"));
            let labels = [event.name.as_str(), recovery.as_str()];
            chart.vertical(event.at_s, if with_recoveries { &labels } else { &[] })
        })
    };
    let latencies = |run: &Run, vm: usize| {
        let title = match run.key.scheme {
            Scheme::Qos => format!("VM {}, with a schedule", vm + 1),
            _ => format!("VM {}, without a schedule", vm + 1),
        };
        let mut chart = chart(run, title, "largest latency, ms", vm == 0);
        for (colour, task) in run.tasks.iter().filter(|task| task.vm == vm).enumerate() {
            let points = task.largest_us.iter().enumerate().filter(|&(_, &us)| us > 0);
            let points = points.map(|(step, &us)| (middle(step), f64::from(us) / 1e3));
            chart = chart.line((task.name.as_str(), colour), Weight::Thin, points);
            chart = chart.horizontal(task.target_us / 1e3);
        }
        chart.log_y().y_range(0.2, most).draw()
    };
    let writer = |run: &Run| {
        let points = run.written.iter().enumerate();
        let points = points.map(|(step, &bytes)| (middle(step), written(bytes)));
        let chart = chart(run, "deep writer".to_owned(), "MB/s", false);
        chart.line(("deep writer", 7), Weight::Thin, points).y_range(0.0, most_written).draw()
    };
    let mut drawings = Vec::new();
    for vm in 0..vms {
        drawings.extend(shown.iter().map(|run| latencies(run, vm)));
    }
    drawings.extend(shown.iter().map(|run| writer(run)));
    let legend: Vec<(&str, usize)> = NAMES.into_iter().zip(0..).collect();
    sheet(&legend, shown.len().max(1), &drawings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(iops: f64, target_ms: u64) -> Plan {
        Plan {
            name: "task".to_owned(),
            iops: Iops::new(iops).unwrap(),
            block: 4096,
            read_fraction: 0.7,
            target: Nanos::from_millis(target_ms),
            between: Between::Nothing,
        }
    }

    /// A request each 10 ms, of which those that end in `slow` (ms) took 30 ms.
    fn record(plan: &Plan, from_ms: u64, slow: std::ops::Range<u64>) -> Record<'_> {
        let ended = (from_ms / 10..600).map(|number| {
            let latency = Nanos::from_millis(if slow.contains(&(number * 10)) { 30 } else { 1 });
            Ended { at: Nanos::from_millis(number * 10), latency }
        });
        Record { vm: 0, plan, from: Nanos::from_millis(from_ms), ended: ended.collect() }
    }

    #[test]
    fn runs_of_another_device_or_phase_are_none_of_these() {
        let line = r#"{"scheme":"qos","repetition":0,"device":"ref-4x250","phase_s":6.0,"tasks":[],"written":[],
            "events":[],"canary":{"n":1,"p50":1,"p99":1,"max":1},"busy":0.4,"at":""}"#;
        let run: Run = serde_json::from_str(line).unwrap();
        let of = experiment::of::<Benchmark>;
        assert_eq!(of(&[]).foreign(&run), None);
        assert_eq!(of(&["--ssd=ref-8x80"]).foreign(&run), Some("another device"));
        assert_eq!(of(&["--phase=3"]).foreign(&run), Some("another --phase"));
    }

    #[test]
    fn recovery_is_the_first_moment_from_which_all_tasks_meet_their_targets_for_a_second() {
        let plan = plan(100.0, 20);
        let (at, end) = (Nanos::from_millis(2_000), Nanos::from_millis(4_000));
        let quick = record(&plan, 0, 0..0);
        assert_eq!(recovery(&[quick], at, end), Some(Nanos::ZERO));
        // The last slow one ends at 2,240 ms.
        let slow = || record(&plan, 0, 2_000..2_250);
        assert_eq!(recovery(&[slow()], at, end), Some(Nanos::from_millis(300)));
        let other = record(&plan, 0, 2_900..3_010);
        assert_eq!(recovery(&[slow(), other], at, end), None);
    }

    #[test]
    fn task_that_is_not_there_yet_is_not_looked_at_and_one_without_its_rate_misses() {
        let plan = plan(100.0, 20);
        let (at, end) = (Nanos::from_millis(1_000), Nanos::from_millis(3_000));
        let there = || record(&plan, 0, 0..0);
        let late = || record(&plan, 1_500, 0..0);
        assert_eq!(recovery(&[there(), late()], at, end), Some(Nanos::ZERO));
        // From 1,500 ms on: 95 of 100 requests are enough.
        let starved = Record { from: at, ..late() };
        assert_eq!(recovery(&[there(), starved], at, end), Some(Nanos::from_millis(500)));
    }

    #[test]
    fn second_with_a_thousand_requests_is_judged_by_p99() {
        let plan = plan(1_000.0, 20);
        let ended = |slow: u64| {
            (0..1_000).map(move |number| Ended {
                at: Nanos::from_millis(number),
                latency: Nanos::from_millis(if number < slow { 30 } else { 1 }),
            })
        };
        let meets = |slow| {
            let record =
                Record { vm: 0, plan: &plan, from: Nanos::ZERO, ended: ended(slow).collect() };
            record.meets(Nanos::ZERO)
        };
        assert!(meets(10) && !meets(11));
    }

    #[test]
    fn tasks_fit_the_device_when_it_takes_twice_as_long() {
        let model: rtvirtio_testbed::scratch::SsdConfig = "ref-4x250".parse().unwrap();
        let service = model.mean_service.as_secs_f64() * f64::from(SLOWER);
        let iops: Vec<f64> = vms().unwrap().iter().flatten().map(|plan| plan.iops.get()).collect();
        assert_eq!(iops.len(), 9);
        // 3 x 1,700 a second of 0.5 ms each on 4 channels.
        let utilisation = iops.iter().sum::<f64>() * service / f64::from(model.channels);
        assert!((utilisation - 0.6375).abs() < 1e-9, "{utilisation}");
        // One request at a time, 0.1 ms of which is not the device's.
        assert!(iops.iter().all(|iops| iops * (service + 1e-4) < 0.8));
    }
}
