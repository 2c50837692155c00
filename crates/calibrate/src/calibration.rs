//! Calibration: measures a device alone and shared, and fits the models.
//!
//! First the device alone (capacity, service times), then *probes*: up to four
//! VMs with the tasks L, M and H, with and without a deep writer, under
//! schedulers and knobs. Caps are fractions of the measured throughput, so that
//! a faster device is probed with larger ones.
//!
//! A bound needs a number of runs in its regime (`model::conformal`). Probes go
//! on until each regime of the chosen [`Depth`] has them, in the order in which
//! the planner needs regimes: writers under a cap first, then no writer, then
//! what it seldom chooses. A probe that the machine disturbed is kept: its longer
//! tails widen the bound of its regime. A task that delivers too little to show a
//! percentile gives no run, so such a probe is followed by another one, until
//! the time that was given is up. [`missing`] tells what a profile then lacks.
//!
//! Every probe that is done is kept in a file beside the profile, so that an
//! interrupted calibration goes on where it was.

mod fit;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rtvirtio_cases::{Case, Mix, Neighbour, Scale, Tier};
use rtvirtio_cli::input;
use rtvirtio_cli::progress::{Progress, human};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_model::conformal;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::profile::{Capacity, DeviceIdentity, Profile, Regime, Response};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{Bfq, DeviceSettings, Limits, Scheduler, Settings, VmSettings};
use rtvirtio_spec::specification::{Load, Specification, Target, Task};
use rtvirtio_units::{Bytes, BytesPerSecond, Confidence, Nanos, Percentile, TaskName};
use serde::{Deserialize, Serialize};

use crate::in_use::GaveUp;
use crate::load::{CellLoad, canary_summary};
use crate::testbed::{DeviceUnderTest, plain};

/// Length of a run on the device alone.
const ALONE: Duration = Duration::from_millis(1500);

/// A device that does no more than so many times what it did at half the depth is saturated.
const SATURATED: f64 = 1.1;

/// The confidence for which calibration gathers runs.
const CONFIDENCE: f64 = 0.95;
/// For so many tasks of a VM together.
const TOGETHER: usize = 3;

const QUIET: Bfq = Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT };
const SHORT: Bfq = Bfq { timeout_sync_ms: 32, ..Bfq::DEFAULT };
const SMALL: Bfq = Bfq { max_budget: 64, ..Bfq::DEFAULT };

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// What a plan for VMs beside a capped writer needs, in short probes: under a minute.
    Quick,
    /// Every regime that there is a bound for, and how each kind of scheduler does.
    Full,
}

impl Depth {
    /// Length of a probe. In 5.5 s H has 8 samples beyond p99.9, M 27 and L 5 beyond p99; in 5.2 s H has
    /// 7, M 26 and L 5: the least that keeps the luck of single requests out of the bound. Guests that are slowed down issue too little for that.
    fn probe(self, scale: Scale) -> Duration {
        match (self, scale) {
            (Self::Quick, Scale::ONE) => Duration::from_millis(5200),
            _ => Duration::from_millis(5500),
        }
    }
}

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

/// Probes of one purpose, of which there are enough once the regime has its runs.
struct Stage {
    /// The regime that they are of; without one, each is made once.
    regime: Option<Regime>,
    /// They are taken in turn.
    settings: &'static [ProbeSetting],
}

/// Where the base of all predictions comes from.
const BASE: Stage = Stage {
    regime: None,
    settings: &[(Scheduler::None, 1, Writer::Absent), (Scheduler::None, 4, Writer::Absent)],
};

/// Where the planner goes: a writer within a cap.
const BURSTING: Stage = Stage {
    regime: Some(Regime::Bursting),
    settings: &[
        (Scheduler::None, 4, Writer::Capped(0.09)),
        (Scheduler::Bfq(QUIET), 4, Writer::Capped(0.06)),
        (Scheduler::None, 4, Writer::Capped(0.03)),
        (Scheduler::Bfq(QUIET), 4, Writer::Capped(0.09)),
        (Scheduler::None, 4, Writer::Capped(0.15)),
        (Scheduler::MqDeadline, 4, Writer::Capped(0.06)),
    ],
};

/// Nothing but the tasks; what each scheduler costs shows here.
const FLOWING: Stage = Stage {
    regime: Some(Regime::Flowing),
    settings: &[
        (Scheduler::Bfq(QUIET), 4, Writer::Absent),
        (Scheduler::MqDeadline, 4, Writer::Absent),
        (Scheduler::Kyber, 4, Writer::Absent),
        (Scheduler::None, 4, Writer::Absent),
    ],
};

/// A writer without a cap.
const FLOODED: Stage = Stage {
    regime: Some(Regime::Flooded),
    settings: &[
        (Scheduler::None, 4, Writer::Unlimited),
        (Scheduler::Kyber, 2, Writer::Unlimited),
        (Scheduler::Bfq(QUIET), 4, Writer::Unlimited),
    ],
};

/// bfq that idles, which no plan needs; the paper's model speaks of it.
const IDLING: Stage = Stage {
    regime: None,
    settings: &[
        (Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Absent),
        (Scheduler::Bfq(Bfq::DEFAULT), 2, Writer::Absent),
        (Scheduler::Bfq(SHORT), 3, Writer::Absent),
        (Scheduler::Bfq(SMALL), 4, Writer::Absent),
        (Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Unlimited),
        (Scheduler::Bfq(SHORT), 3, Writer::Unlimited),
    ],
};

/// Each once, to tell schedulers apart; in a quick calibration in the place of a whole regime.
const SCHEDULERS: Stage =
    Stage { regime: None, settings: &[(Scheduler::Bfq(QUIET), 4, Writer::Absent)] };

const fn stages(depth: Depth) -> &'static [Stage] {
    match depth {
        Depth::Quick => &[BASE, BURSTING, SCHEDULERS],
        Depth::Full => &[BASE, BURSTING, FLOWING, FLOODED, IDLING],
    }
}

/// How many probes a regime takes whose tasks deliver what they should: each has twelve task-runs.
const PROBES_OF_A_REGIME: usize = 5;

/// What a regime still lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// Which.
    pub regime: Regime,
    /// Task-runs that it has.
    pub has: usize,
    /// Task-runs that a bound needs.
    pub needs: usize,
    /// How many probes it takes to measure the rest, if each of their tasks gives one.
    pub probes: usize,
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { regime, has, needs, probes } = self;
        let time = human(CellLoad::duration(Depth::Full.probe(Scale::ONE)) * *probes as u32);
        write!(
            f,
            "{}: {has} of the {needs} runs that a bound needs; {probes} more probes, about {time}",
            name(*regime)
        )
    }
}

/// A regime for people.
const fn name(regime: Regime) -> &'static str {
    match regime {
        Regime::Flowing => "no background load",
        Regime::Bursting => "a background VM within a cap",
        Regime::Flooded => "a background VM without a cap",
        Regime::Idling => "bfq that idles",
        Regime::IdlingFlooded => "bfq that idles, a background VM without a cap",
    }
}

/// What a profile lacks for bounds at 0.95 on three tasks of a VM together, what the planner needs
/// most first.
#[must_use]
pub fn missing(profile: &Profile, depth: Depth) -> Vec<Missing> {
    let lacking = |stage: &Stage| {
        let regime = stage.regime?;
        let of = |by: &BTreeMap<Regime, Vec<f64>>| by.get(&regime).cloned().unwrap_or_default();
        let residuals = &profile.residuals;
        let (tasks, vms) = (of(&residuals.structural), of(&residuals.structural_vms));
        lack(regime, &tasks, &vms)
    };
    stages(depth).iter().filter_map(lacking).collect()
}

/// What a regime lacks whose task-runs and VM-runs have these scores; `None`: nothing.
fn lack(regime: Regime, tasks: &[f64], vms: &[f64]) -> Option<Missing> {
    let confidence = Confidence::new(CONFIDENCE).ok()?;
    let enough = conformal::shared(tasks, confidence, TOGETHER).is_some()
        || conformal::factor(vms, confidence).is_some();
    // 1 / share − 1 (`conformal::shared`).
    let needs = (TOGETHER as f64 / (1.0 - CONFIDENCE)).ceil() as usize - 1;
    let has = tasks.len();
    let probes = needs.saturating_sub(has).div_ceil(needs.div_ceil(PROBES_OF_A_REGIME)).max(1);
    (!enough).then_some(Missing { regime, has, needs, probes })
}

/// One measured probe, as it is kept for a resumption and given to the fit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ProbeRun {
    setting: ProbeSetting,
    /// Length of its window.
    seconds: f64,
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

/// How long a calibration takes, about, where tasks deliver what they should.
#[must_use]
pub fn duration(device: &dyn DeviceUnderTest, depth: Depth) -> Duration {
    let scale = device.scale();
    let probes = |stage: &Stage| match stage.regime {
        Some(_) => PROBES_OF_A_REGIME,
        None => stage.settings.len(),
    };
    let probes: usize = stages(depth).iter().map(probes).sum();
    CellLoad::duration(depth.probe(scale)) * probes as u32 + CellLoad::duration(ALONE) * 4
}

/// Calibrates the device, whose data is overwritten. `partial` is
/// the file in which finished probes are kept; it is removed at the end. After `limit` no probe is
/// begun that is not indispensable; [`missing`] says what the profile then lacks.
///
/// # Errors
/// As [`DeviceUnderTest::measure`].
pub fn calibrate(
    device: &dyn DeviceUnderTest,
    depth: Depth,
    limit: Duration,
    partial: &Path,
    date: String,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let (begin, scale) = (Instant::now(), device.scale());
    let identity = device.testbed().identity()?;
    let kernel = device.testbed().kernel_release()?;
    let mut kept =
        resume(partial, Kept::Device(identity.clone(), kernel.clone(), device.measured_at()))?;
    let mut file =
        std::fs::File::create(partial).with_context(|| format!("create {}", partial.display()))?;
    for value in &kept {
        keep(&mut file, value)?;
    }
    let expected = CellLoad::duration(depth.probe(scale));
    let spent = expected * (kept.len() - 1) as u32;
    let left = duration(device, depth).saturating_sub(spent).max(expected);
    let steps = (left.as_secs_f64() / expected.as_secs_f64()).ceil() as usize;
    let mut progress = Progress::new(steps, left);
    let capacity = kept.iter().find_map(|k| match k {
        Kept::Capacity(c) => Some(*c),
        _ => None,
    });
    let capacity = match capacity {
        Some(capacity) => capacity,
        None => {
            let expected = CellLoad::duration(ALONE) * 4;
            progress.start("calibrate: the device alone", expected);
            let capacity = measure_alone(device, interrupted)?;
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
    while let Some(setting) = next(depth, device.scheduler(), &runs, &capacity) {
        let is_indispensable = runs.len() < BASE.settings.len();
        if begin.elapsed() >= limit && !is_indispensable {
            progress.note("calibrate: the time is up");
            break;
        }
        progress.start(&format!("calibrate: {}", describe(setting)), expected);
        let run = match probe(device, setting, depth.probe(scale), &capacity, interrupted) {
            Err(error) if error.is::<GaveUp>() && !is_indispensable => {
                progress.note(&format!("calibrate: given up for a neighbour's sake: {error}"));
                break;
            }
            run => run?,
        };
        progress.finish(expected);
        keep(&mut file, &Kept::Probe(run.clone()))?;
        runs.push(run);
    }
    let profile = fit::fit(identity, kernel, device.measured_at(), date, capacity, &runs);
    for missing in missing(&profile, depth) {
        progress.note(&format!("calibrate: missing: {missing}"));
    }
    let _ = std::fs::remove_file(partial);
    Ok(profile)
}

/// A whole calibration, and the time after which it begins no probe.
pub const FULL: (Depth, Duration) = (Depth::Full, Duration::from_secs(360));

/// Calibrates and writes the profile to `output`; what is kept of an unfinished calibration lies beside it.
///
/// # Errors
/// As [`calibrate`], and if the profile cannot be written.
pub fn calibrate_to(
    device: &dyn DeviceUnderTest,
    (depth, limit): (Depth, Duration),
    output: &Path,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let partial = output.with_extension("partial");
    let date = jiff::Timestamp::now().to_string();
    let profile = calibrate(device, depth, limit, &partial, date, interrupted)?;
    input::write(output, &serde_json::to_string_pretty(&profile)?)?;
    Ok(profile)
}

/// What a profile says, for people.
#[must_use]
pub fn summary(profile: &Profile) -> String {
    let c = &profile.capacity;
    let s = &profile.structural;
    let mut text = format!(
        "device    {} {} ({}), kernel {}\n\
         capacity  {:.0} IOPS of 4 KiB, {} in 128 KiB writes\n\
         response  4 KiB: mean {}, p99 {}, p99.9 {}; 128 KiB: mean {}\n\
         bursts    a cap is released {} at a time\n",
        profile.device.kind,
        profile.device.model,
        profile.device.size,
        profile.kernel,
        c.iops_4k,
        c.write_throughput,
        c.response_4k.mean,
        c.response_4k.p99,
        c.response_4k.p999,
        c.response_128k.mean,
        s.burst,
    );
    if let Some(stalls) = s.stalls {
        text += &format!(
            "stalls    up to {} long, at most {:.2} a second\n",
            stalls.length, stalls.per_second
        );
    }
    text += "tails     VMs  writer      worst p99.9/p99 of a task  under\n";
    for p in &profile.probes {
        let worst = p.tails.iter().map(|t| t.tail).max();
        let writer = match (p.writer, p.cap) {
            (false, _) => "none".to_owned(),
            (true, Some(cap)) => cap.to_string(),
            (true, None) => "unlimited".to_owned(),
        };
        let tail = worst.map_or("too few requests".to_owned(), |t| t.to_string());
        text += &format!("          {:>3}  {writer:<10}  {tail:>24}  {}\n", p.vms, p.scheduler);
    }
    text
}

/// The next probe after `runs`; `None` once there are enough.
fn next(
    depth: Depth,
    kept: Option<Scheduler>,
    runs: &[ProbeRun],
    capacity: &Capacity,
) -> Option<ProbeSetting> {
    let times = |setting: &ProbeSetting| runs.iter().filter(|r| r.setting == *setting).count();
    let idles = |s: Scheduler| matches!(s, Scheduler::Bfq(bfq) if bfq.slice_idle_us > 0);
    // What the device has, if it is to keep it; what only another one does is not probed.
    let under = |&(scheduler, vms, writer): &ProbeSetting| match kept {
        Some(kept) if idles(scheduler) && !idles(kept) => None,
        Some(kept) => Some((kept, vms, writer)),
        None => Some((scheduler, vms, writer)),
    };
    for stage in stages(depth) {
        let Some(regime) = stage.regime else {
            match stage.settings.iter().filter_map(under).find(|setting| times(setting) == 0) {
                Some(setting) => return Some(setting),
                None => continue,
            }
        };
        let (tasks, vms) = fit::scores(runs, capacity, regime);
        if lack(regime, &tasks, &vms).is_some() {
            // Each in turn: the one that was run least, the first of them.
            let setting =
                stage.settings.iter().filter_map(under).min_by_key(|setting| times(setting));
            // Under a scheduler that is not to be changed a regime may be out of reach.
            let probes: usize = stage.settings.iter().filter_map(under).map(|s| times(&s)).sum();
            if kept.is_none() || probes < 2 * PROBES_OF_A_REGIME {
                return setting;
            }
        }
    }
    None
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
fn specification(
    device: &dyn DeviceUnderTest,
    vms: u8,
    writer: Writer,
    window: Duration,
) -> Result<Specification> {
    let neighbour = match writer {
        Writer::Absent => Neighbour::None,
        Writer::Capped(_) | Writer::Unlimited => Neighbour::Writer,
    };
    let case = Case::new(vms, Mix::LightMediumHeavy)?;
    Ok(device.specification(case, Tier::Strict, neighbour, Nanos::from(window)))
}

fn probe(
    device: &dyn DeviceUnderTest,
    setting: ProbeSetting,
    window: Duration,
    capacity: &Capacity,
    interrupted: &Interrupted,
) -> Result<ProbeRun> {
    let (scheduler, vms, writer) = setting;
    let specification = specification(device, vms, writer, window)?;
    let cap = match writer {
        Writer::Capped(part) => {
            let bytes = capacity.write_throughput.get() as f64 * part;
            Some(BytesPerSecond::new(bytes as u64))
        }
        Writer::Absent | Writer::Unlimited => None,
    };
    let settings = device_settings(&specification, scheduler, cap);
    let settings = Settings([(device.testbed().device().name.clone(), settings)].into());
    let measured = device.measure(&specification, &plain(settings), window, interrupted)?;
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
        seconds: window.as_secs_f64(),
        cap,
        writer_throughput: measured.background.values().copied().next().unwrap_or_default(),
        tasks,
        canary: canary_summary(&measured.canary).p99,
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
fn alone(device: &dyn DeviceUnderTest, load: Load, interrupted: &Interrupted) -> Result<Histogram> {
    let mut specification = specification(device, 1, Writer::Absent, ALONE)?;
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
    let scheduler = device.scheduler().unwrap_or(Scheduler::None);
    let settings = device_settings(&specification, scheduler, None);
    let settings = Settings([(device.testbed().device().name.clone(), settings)].into());
    let measured = device.measure(&specification, &plain(settings), ALONE, interrupted)?;
    let task = measured.tasks.into_iter().next().context("fio measured nothing")?;
    Ok(task.histogram)
}

/// Depths at which a device is saturated: at once, or step by step beside others.
const fn depths(is_in_use: bool) -> &'static [u32] {
    if is_in_use { &[2, 4, 8, 16, 32, 64] } else { &[64] }
}

fn per_second(histogram: &Histogram) -> f64 {
    histogram.count() as f64 / ALONE.as_secs_f64()
}

fn measure_alone(device: &dyn DeviceUnderTest, interrupted: &Interrupted) -> Result<Capacity> {
    let load = |kib, read_fraction, queue_depth| Load {
        iops: None,
        block_size: Bytes::from_kib(kib),
        read_fraction,
        queue_depth,
    };
    let one_4k = alone(device, load(4, 0.7, 1), interrupted)?;
    let one_128k = alone(device, load(128, 0.0, 1), interrupted)?;
    let most = |kib, reads, one: &Histogram| {
        let mut most = per_second(one);
        for &depth in depths(device.is_in_use()) {
            let rate = match alone(device, load(kib, reads, depth), interrupted) {
                Ok(histogram) => per_second(&histogram),
                // What it did before somebody was disturbed is the least that it can do.
                Err(error) if error.is::<GaveUp>() => break,
                Err(error) => return Err(error),
            };
            let is_saturated = rate < SATURATED * most;
            most = most.max(rate);
            if is_saturated {
                break;
            }
        }
        Ok(most)
    };
    let iops_4k = most(4, 0.7, &one_4k)?;
    let per_second_128k = most(128, 0.0, &one_128k)?;
    Ok(Capacity {
        iops_4k,
        write_throughput: BytesPerSecond::new((per_second_128k * 131_072.0) as u64),
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

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: Capacity = Capacity {
        iops_4k: 16_000.0,
        write_throughput: BytesPerSecond::from_megabytes(370),
        response_4k: RESPONSE,
        response_128k: RESPONSE,
    };
    const RESPONSE: Response = Response {
        mean: Nanos::from_micros(300),
        p50: Nanos::from_micros(290),
        p99: Nanos::from_micros(560),
        p999: Nanos::from_micros(700),
    };

    /// A probe of 5.2 s whose tasks delivered this part of their rates, each request in 1 ms.
    fn run(setting: ProbeSetting, delivered: f64) -> ProbeRun {
        let (_, vms, writer) = setting;
        let task = |vm, iops: f64| {
            let mut histogram = Histogram::new();
            histogram.record(Nanos::from_millis(1), (iops * 5.2 * delivered) as u64);
            ProbeTask { vm, iops, histogram }
        };
        let of_vm = |vm| [100.0, 500.0, 1500.0].map(|iops| task(vm, iops));
        let cap = match writer {
            Writer::Capped(part) => Some(BytesPerSecond::new((370e6 * part) as u64)),
            _ => None,
        };
        ProbeRun {
            setting,
            seconds: 5.2,
            cap,
            writer_throughput: BytesPerSecond::default(),
            tasks: (0..u32::from(vms)).flat_map(of_vm).collect(),
            canary: Nanos::from_micros(100),
        }
    }

    /// All probes of a calibration whose tasks deliver `delivered`, at most `most` of them.
    fn all(depth: Depth, delivered: f64, most: usize) -> Vec<ProbeRun> {
        let mut runs = Vec::new();
        while let Some(setting) = next(depth, None, &runs, &CAPACITY).filter(|_| runs.len() < most)
        {
            runs.push(run(setting, delivered));
        }
        runs
    }

    #[test]
    fn quick_calibration_ends_once_a_bound_beside_a_capped_writer_has_its_runs() {
        let runs = all(Depth::Quick, 1.0, 100);
        let capped = runs.iter().filter(|r| matches!(r.setting.2, Writer::Capped(_))).count();
        // 12 task-runs a probe, of which 59 are needed; the base before, a scheduler after.
        assert_eq!((capped, runs.len()), (5, 8));
        assert!(matches!(runs[0].setting, (Scheduler::None, 1, Writer::Absent)));
        let (tasks, vms) = fit::scores(&runs, &CAPACITY, Regime::Bursting);
        assert_eq!((tasks.len(), vms.len()), (60, 20));
        assert_eq!(lack(Regime::Bursting, &tasks, &vms), None);
    }

    #[test]
    fn probes_go_on_where_tasks_deliver_too_little_to_show_a_percentile() {
        // L shows nothing at half its rate: eight task-runs a probe, but VM-runs count too.
        assert_eq!(all(Depth::Quick, 0.5, 100).len(), 8);
        // At a hundredth nothing does: they go on until the time is up.
        assert_eq!(all(Depth::Quick, 0.01, 50).len(), 50);
    }

    #[test]
    fn full_calibration_has_a_bound_in_every_regime_that_a_plan_may_choose() {
        let runs = all(Depth::Full, 1.0, 100);
        for regime in [Regime::Bursting, Regime::Flowing, Regime::Flooded] {
            let (tasks, vms) = fit::scores(&runs, &CAPACITY, regime);
            assert_eq!(lack(regime, &tasks, &vms), None, "{regime:?}");
        }
        assert!(runs.len() <= 24, "{}", runs.len());
    }

    #[test]
    fn device_that_keeps_its_scheduler_is_probed_under_no_other() {
        for (kept, most) in [(Scheduler::None, 20), (Scheduler::Bfq(Bfq::DEFAULT), 32)] {
            let mut runs = Vec::new();
            while let Some(setting) = next(Depth::Full, Some(kept), &runs, &CAPACITY) {
                assert_eq!(setting.0, kept);
                runs.push(run(setting, 1.0));
                assert!(runs.len() <= most, "{kept}: goes on for ever");
            }
            assert!(runs.len() >= 12, "{kept}: {}", runs.len());
        }
    }

    #[test]
    fn resumed_calibration_makes_the_same_probes_as_one_that_was_not_interrupted() {
        let whole = all(Depth::Full, 1.0, 100);
        for kept in 0..whole.len() {
            let runs = &whole[..kept];
            assert_eq!(next(Depth::Full, None, runs, &CAPACITY), Some(whole[kept].setting));
        }
    }

    #[test]
    fn what_a_profile_lacks_says_how_many_probes_it_takes() {
        let lacks = lack(Regime::Bursting, &[0.0; 24], &[0.0; 8]).unwrap();
        assert_eq!((lacks.has, lacks.needs, lacks.probes), (24, 59, 3));
        let text = lacks.to_string();
        assert!(text.contains("24 of the 59 runs") && text.contains("3 more probes"), "{text}");
        // 19 whole VMs do as well as 59 tasks.
        assert_eq!(lack(Regime::Bursting, &[0.0; 20], &[0.0; 19]), None);
    }
}
