//! Calibration: measures a device alone and shared, and fits the models.
//!
//! First the device alone (capacity, service times), then *probes*: up to four
//! VMs with the tasks L, M and H, with and without a deep writer, under each
//! scheduler and knob. The list is fixed; caps are fractions of the measured
//! throughput, so that a faster device is probed with larger ones. Every probe
//! that is done is kept in a file beside the profile, so that an interrupted
//! calibration goes on where it was.

mod fit;

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_cases::{Case, Mix, Neighbour, Tier};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::profile::{Capacity, DeviceIdentity, Profile, Response};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{Bfq, DeviceSettings, Limits, Scheduler, Settings, VmSettings};
use rtvirtio_spec::specification::{Load, Specification, Target, Task};
use rtvirtio_units::{Bytes, BytesPerSecond, Confidence, Nanos, Percentile, TaskName};
use serde::{Deserialize, Serialize};

use crate::cell::{Testbed, plain};
use crate::load::{CellLoad, Interrupted};
use crate::progress::Progress;

/// Length of a probe: H has 8 samples beyond p99.9 in it, M 27 and L 5 beyond p99.
const PROBE: Duration = Duration::from_millis(5500);
/// Length of a run on the device alone.
const ALONE: Duration = Duration::from_millis(2000);

/// Probes whose canary was later than this, times the testbed's scale, at its 99th percentile are
/// repeated: base tails are below 1 ms.
const PROBE_CANARY_LIMIT: Nanos = Nanos::from_micros(300);
/// How many repetitions a calibration of three minutes has room for.
const REPEATS: u32 = 2;

const QUIET: Bfq = Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT };
const SHORT: Bfq = Bfq { timeout_sync_ms: 32, ..Bfq::DEFAULT };
const SMALL: Bfq = Bfq { max_budget: 64, ..Bfq::DEFAULT };

/// What competes with the tasks of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Writer {
    /// Nothing.
    Absent,
    /// A deep writer with a cap: a fraction of the device's write throughput.
    Capped(f64),
    /// A deep writer.
    Unlimited,
}

/// Scheduler, VMs, writer.
type ProbeSetting = (Scheduler, u8, Writer);

/// The fixed list. Each regime has at least the 19 task-runs that a bound at 0.95 needs, and the
/// one that the planner goes to (bursts of capped writers) the 59 that it needs for three tasks
/// together.
const PROBES: [ProbeSetting; 20] = [
    (Scheduler::None, 1, Writer::Absent),
    (Scheduler::None, 4, Writer::Absent),
    (Scheduler::MqDeadline, 4, Writer::Absent),
    (Scheduler::Kyber, 4, Writer::Absent),
    (Scheduler::Bfq(QUIET), 4, Writer::Absent),
    (Scheduler::None, 4, Writer::Capped(0.03)),
    (Scheduler::Bfq(QUIET), 3, Writer::Capped(0.06)),
    (Scheduler::None, 3, Writer::Capped(0.09)),
    (Scheduler::Bfq(QUIET), 4, Writer::Capped(0.09)),
    (Scheduler::None, 4, Writer::Capped(0.15)),
    (Scheduler::MqDeadline, 3, Writer::Capped(0.06)),
    (Scheduler::None, 4, Writer::Unlimited),
    (Scheduler::Kyber, 2, Writer::Unlimited),
    (Scheduler::Bfq(QUIET), 4, Writer::Unlimited),
    (Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Absent),
    (Scheduler::Bfq(Bfq::DEFAULT), 2, Writer::Absent),
    (Scheduler::Bfq(SHORT), 3, Writer::Absent),
    (Scheduler::Bfq(SMALL), 4, Writer::Absent),
    (Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Unlimited),
    (Scheduler::Bfq(SHORT), 3, Writer::Unlimited),
];

/// The list where VMs are guests, which take longer to start and stop a task: fewer schedulers
/// with a writer, and 19 VM-runs, which a bound needs, without and with a capped one. Where bfq
/// idles it has too few for a bound, so that no plan idles.
const PROBES_IN_GUESTS: [ProbeSetting; 13] = [
    (Scheduler::None, 3, Writer::Absent),
    (Scheduler::None, 4, Writer::Absent),
    (Scheduler::MqDeadline, 4, Writer::Absent),
    (Scheduler::Kyber, 4, Writer::Absent),
    (Scheduler::Bfq(QUIET), 4, Writer::Absent),
    (Scheduler::None, 4, Writer::Capped(0.03)),
    (Scheduler::Bfq(QUIET), 4, Writer::Capped(0.06)),
    (Scheduler::None, 4, Writer::Capped(0.09)),
    (Scheduler::Bfq(QUIET), 4, Writer::Capped(0.09)),
    (Scheduler::None, 4, Writer::Capped(0.15)),
    (Scheduler::None, 4, Writer::Unlimited),
    (Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Absent),
    (Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Unlimited),
];

fn probes(testbed: &Testbed) -> &'static [ProbeSetting] {
    match testbed.measured_at() {
        MeasuredAt::Host => &PROBES,
        _ => &PROBES_IN_GUESTS,
    }
}

/// One measured probe, as it is kept for a resumption and given to the fit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ProbeRun {
    setting: ProbeSetting,
    cap: Option<BytesPerSecond>,
    writer_throughput: BytesPerSecond,
    tasks: Vec<ProbeTask>,
    canary: Nanos,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ProbeTask {
    vm: u32,
    iops: f64,
    histogram: Histogram,
}

/// What is kept of an unfinished calibration, one JSON value a line.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Kept {
    Device(DeviceIdentity, String, MeasuredAt),
    Capacity(Capacity),
    Probe(ProbeRun),
}

/// How long a calibration of the testbed takes, about.
#[must_use]
pub fn duration(testbed: &Testbed) -> Duration {
    CellLoad::duration(PROBE) * probes(testbed).len() as u32 + CellLoad::duration(ALONE) * 4
}

/// Calibrates the testbed's device, whose data is overwritten. `partial` is
/// the file in which finished probes are kept; it is removed at the end.
///
/// # Errors
/// As [`Testbed::measure`].
pub fn calibrate(
    testbed: &Testbed,
    partial: &Path,
    date: String,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let identity = testbed.identity()?;
    let kernel = testbed.kernel_release()?;
    let mut kept =
        resume(partial, Kept::Device(identity.clone(), kernel.clone(), testbed.measured_at()))?;
    let mut file =
        std::fs::File::create(partial).with_context(|| format!("create {}", partial.display()))?;
    for value in &kept {
        keep(&mut file, value)?;
    }
    let done = kept.len() - 1;
    let steps = probes(testbed).len() + 1;
    let left = duration(testbed).mul_f64((steps - done.min(steps)) as f64 / steps as f64);
    let mut progress = Progress::new(steps - done.min(steps), left);
    let capacity = kept.iter().find_map(|k| match k {
        Kept::Capacity(c) => Some(*c),
        _ => None,
    });
    let capacity = match capacity {
        Some(capacity) => capacity,
        None => {
            let expected = CellLoad::duration(ALONE) * 4;
            progress.start("calibrate: the device alone", expected);
            let capacity = measure_alone(testbed, interrupted)?;
            progress.finish(expected);
            keep(&mut file, &Kept::Capacity(capacity))?;
            kept.push(Kept::Capacity(capacity));
            capacity
        }
    };
    let mut runs: Vec<ProbeRun> = kept
        .into_iter()
        .filter_map(|k| match k {
            Kept::Probe(run) => Some(run),
            _ => None,
        })
        .collect();
    let mut repeats = REPEATS;
    for &setting in probes(testbed) {
        if runs.iter().any(|r| r.setting == setting) {
            continue;
        }
        let expected = CellLoad::duration(PROBE);
        progress.start(&format!("calibrate: {}", describe(setting)), expected);
        let mut run = probe(testbed, setting, &capacity, interrupted)?;
        progress.finish(expected);
        if run.canary > testbed.scale().time(PROBE_CANARY_LIMIT) && repeats > 0 {
            // The CPU was late: once more, and the less disturbed of the two counts.
            repeats -= 1;
            progress.extend(expected);
            progress.start(&format!("calibrate: again {}", describe(setting)), expected);
            let again = probe(testbed, setting, &capacity, interrupted)?;
            progress.finish(expected);
            if again.canary < run.canary {
                run = again;
            }
        }
        keep(&mut file, &Kept::Probe(run.clone()))?;
        runs.push(run);
    }
    let profile = fit::fit(identity, kernel, testbed.measured_at(), date, capacity, &runs);
    let _ = std::fs::remove_file(partial);
    Ok(profile)
}

fn describe((scheduler, vms, writer): ProbeSetting) -> String {
    let writer = match writer {
        Writer::Absent => String::new(),
        Writer::Capped(part) => format!(", a writer at {:.0} % of the throughput", part * 100.0),
        Writer::Unlimited => ", a deep writer".to_owned(),
    };
    format!("{vms} VMs{writer}, {scheduler}")
}

fn keep(file: &mut std::fs::File, value: &Kept) -> Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    file.write_all(&line)?;
    Ok(file.sync_data()?)
}

/// What an earlier calibration of the same `device` left; its first value names that.
fn resume(partial: &Path, device: Kept) -> Result<Vec<Kept>> {
    let text = match std::fs::read_to_string(partial) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![device]),
        Err(e) => return Err(e).with_context(|| format!("read {}", partial.display())),
    };
    // The last line may be cut off.
    let values: Vec<Kept> = text.lines().map_while(|l| serde_json::from_str(l).ok()).collect();
    Ok(if values.first() == Some(&device) { values } else { vec![device] })
}

/// VMs with L, M and H, and the writer; targets are there to be measured, not met.
fn specification(testbed: &Testbed, vms: u8, writer: Writer) -> Result<Specification> {
    let neighbour = match writer {
        Writer::Absent => Neighbour::None,
        Writer::Capped(_) | Writer::Unlimited => Neighbour::Writer,
    };
    let case = Case::new(vms, Mix::LightMediumHeavy)?;
    Ok(testbed.specification(case, Tier::Strict, neighbour, Nanos::from(PROBE)))
}

fn probe(
    testbed: &Testbed,
    setting: ProbeSetting,
    capacity: &Capacity,
    interrupted: &Interrupted,
) -> Result<ProbeRun> {
    let (scheduler, vms, writer) = setting;
    let specification = specification(testbed, vms, writer)?;
    let cap = match writer {
        Writer::Capped(part) => {
            let bytes = capacity.write_throughput.get() as f64 * part;
            Some(BytesPerSecond::new(bytes as u64))
        }
        Writer::Absent | Writer::Unlimited => None,
    };
    let settings = device_settings(&specification, scheduler, cap);
    let settings = Settings([(testbed.device().name.clone(), settings)].into());
    let measured = testbed.measure(&specification, &plain(settings), PROBE, interrupted)?;
    let iops_of = |vm: &str, task: &str| {
        let vm = specification.vms.iter().find(|v| v.name.as_str() == vm)?;
        let task = vm.tasks.iter().find(|t| t.name.as_str() == task)?;
        task.load.iops.map(rtvirtio_units::Iops::get)
    };
    let vm_index = |name: &str| specification.vms.iter().position(|v| v.name.as_str() == name);
    let tasks = measured
        .tasks
        .iter()
        .filter_map(|t| {
            Some(ProbeTask {
                vm: vm_index(t.vm.as_str())? as u32,
                iops: iops_of(t.vm.as_str(), t.task.as_str())?,
                histogram: t.histogram.clone(),
            })
        })
        .collect();
    Ok(ProbeRun {
        setting,
        cap,
        writer_throughput: measured.background.values().copied().next().unwrap_or_default(),
        tasks,
        canary: measured.canary.p99,
    })
}

fn device_settings(
    specification: &Specification,
    scheduler: Scheduler,
    cap: Option<BytesPerSecond>,
) -> DeviceSettings {
    let vms = specification.vms.iter().map(|vm| {
        let limits = match cap {
            Some(cap) if vm.is_background() => Limits::bps(cap),
            _ => Limits::default(),
        };
        (vm.name.clone(), VmSettings { limits, ..VmSettings::default() })
    });
    DeviceSettings { scheduler, vms: vms.collect() }
}

/// Runs one task alone and returns its latencies.
fn alone(testbed: &Testbed, load: Load, interrupted: &Interrupted) -> Result<Histogram> {
    let mut specification = specification(testbed, 1, Writer::Absent)?;
    let name = TaskName::new("alone")?;
    let Some(vm) = specification.vms.first_mut() else { bail!("a case has a VM") };
    let disk = vm.disks[0].name.clone();
    // Any target makes it a measured task.
    let target = Target {
        percentile: Percentile::new(99.0)?,
        latency: Nanos::from_millis(1),
        confidence: Confidence::new(0.95)?,
    };
    let recognise = rtvirtio_spec::specification::Recognise::Disk;
    vm.tasks = vec![Task { name, disk, recognise, load, target: Some(target) }];
    let settings = device_settings(&specification, Scheduler::None, None);
    let settings = Settings([(testbed.device().name.clone(), settings)].into());
    let measure = || testbed.measure(&specification, &plain(settings.clone()), ALONE, interrupted);
    let mut measured = measure()?;
    if measured.canary.p99 > testbed.scale().time(PROBE_CANARY_LIMIT) {
        let again = measure()?;
        if again.canary.p99 < measured.canary.p99 {
            measured = again;
        }
    }
    let task = measured.tasks.into_iter().next().context("fio measured nothing")?;
    Ok(task.histogram)
}

fn measure_alone(testbed: &Testbed, interrupted: &Interrupted) -> Result<Capacity> {
    let load = |kib, read_fraction, queue_depth| Load {
        iops: None,
        block_size: Bytes::from_kib(kib),
        read_fraction,
        queue_depth,
    };
    let per_second = |h: &Histogram| h.count() as f64 / ALONE.as_secs_f64();
    let deep_4k = alone(testbed, load(4, 0.7, 64), interrupted)?;
    let deep_128k = alone(testbed, load(128, 0.0, 64), interrupted)?;
    let one_4k = alone(testbed, load(4, 0.7, 1), interrupted)?;
    let one_128k = alone(testbed, load(128, 0.0, 1), interrupted)?;
    Ok(Capacity {
        iops_4k: per_second(&deep_4k),
        write_throughput: BytesPerSecond::new((per_second(&deep_128k) * 131_072.0) as u64),
        response_4k: response(&one_4k)?,
        response_128k: response(&one_128k)?,
    })
}

fn response(histogram: &Histogram) -> Result<Response> {
    let at = |p: f64| -> Result<Nanos> {
        let quantile = histogram.quantile(Percentile::new(p)?);
        Ok(quantile.context("the device completed nothing")?.value)
    };
    Ok(Response { mean: histogram.mean(), p50: at(50.0)?, p99: at(99.0)?, p999: at(99.9)? })
}
