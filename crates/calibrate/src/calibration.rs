//! Calibration: measures a device alone and shared, and fits the models.
//!
//! First the device alone (capacity, service times), then *probes*: up to four
//! VMs with the tasks L, M and H, with and without a deep writer, under
//! schedulers and knobs. Caps are fractions of the measured throughput, so that
//! a faster device is probed with larger ones.
//!
//! A bound needs a number of runs in its regime (`model::conformal`). Probes go
//! on until each regime of the chosen [`Depth`] has them, in the order in which
//! the planner needs regimes: writers under a cap first, then no writer, both for
//! a bound on one task and then for one on three together, then what it seldom
//! chooses. A probe that the machine disturbed is kept: its longer
//! tails widen the bound of its regime. A task that delivers too little to show a
//! percentile gives no run, so such a probe is followed by another one, until
//! the time that was given is up. [`missing`] tells what a profile then lacks.
//!
//! Every probe that is done is kept in a file beside the profile (`kept`), so that an
//! interrupted calibration goes on where it was; not of a device that others use, since what
//! was measured beside them then says nothing of now.

mod alone;
mod controlled;
mod fit;
mod kept;
mod room;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rtvirtio_cases::{Case, Mix, Neighbour, Scale, Tier};
use rtvirtio_cli::progress::{Progress, human};
use rtvirtio_cli::{input, output};
use rtvirtio_host::HostError;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_model::conformal;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::profile::{Capacity, DeviceIdentity, Profile, ProfileSource, Regime};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{Bfq, DeviceSettings, Limits, Scheduler, Settings, VmSettings};
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::{BytesPerSecond, Confidence, Nanos, Weight};
use serde::{Deserialize, Serialize};

use crate::load::{CellLoad, RAMP, canary_summary};
use crate::neighbours::{GaveUp, OtherLoad};
use crate::testbed::{DeviceUnderTest, Work, plain};
use kept::KeptFile;
use room::Room;

/// The part of a device that a load is taken to use before it was measured.
const USED: f64 = 0.5;
/// How often a probe is tried that disturbs others, and what cannot be done without.
const TRIES: u32 = 3;
/// Probes in succession that disturbed others, after which no further one is tried.
const MAX_STOPPED: u32 = 6;

/// Regimes that plans choose where they can.
const CHOSEN_REGIMES: [Regime; 2] = [Regime::Bursting, Regime::Flowing];

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

/// iocost in the place of a cap, where the host has it: which probes, [`controlled`] says.
const CONTROLLED: Stage = Stage { regime: Some(Regime::Controlled), settings: &[] };

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
        Depth::Full => &[BASE, BURSTING, FLOWING, CONTROLLED, FLOODED, IDLING],
    }
}

/// How many probes a regime takes whose tasks deliver what they should: each has twelve task-runs.
const PROBES_OF_A_REGIME: usize = 5;
/// The same of iocost.
const PROBES_OF_IOCOST: usize = 12;

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
        Regime::Controlled => "a background VM without a cap under iocost",
    }
}

/// What a profile lacks for bounds at 0.95 on three tasks of a VM together, what the planner needs
/// most first.
#[must_use]
pub fn missing(profile: &Profile, depth: Depth) -> Vec<Missing> {
    let lacking = |stage: &Stage| {
        // Where iocost keeps no rate, or is not there, nothing is lacking.
        let may_be_chosen = |regime: &Regime| {
            *regime != Regime::Controlled || !profile.structural.iocost.is_empty()
        };
        let regime = stage.regime.filter(may_be_chosen)?;
        let of = |by: &BTreeMap<Regime, Vec<f64>>| by.get(&regime).cloned().unwrap_or_default();
        let residuals = &profile.residuals;
        let (tasks, vms) = (of(&residuals.structural), of(&residuals.structural_vms));
        lack(regime, &tasks, &vms, TOGETHER)
    };
    stages(depth).iter().filter_map(lacking).collect()
}

/// What a regime lacks whose task-runs and VM-runs have these scores, for a bound on so many tasks
/// together; `None`: nothing.
fn lack(regime: Regime, tasks: &[f64], vms: &[f64], together: usize) -> Option<Missing> {
    let confidence = Confidence::new(CONFIDENCE).ok()?;
    let enough = conformal::shared(tasks, confidence, together).is_some()
        || conformal::factor(vms, confidence).is_some();
    // 1 / share − 1 (`conformal::shared`).
    let needs = (together as f64 / (1.0 - CONFIDENCE)).ceil() as usize - 1;
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
    /// What others had the device do.
    #[serde(default)]
    others: Option<OtherLoad>,
}

impl ProbeRun {
    /// Of a task's rate, what a window must have for it to count as delivered: chance and the ends of a
    /// short window take some.
    const MIN_DELIVERED: f64 = 0.9;

    /// Whether each task came to its rate.
    fn delivers(&self) -> bool {
        self.tasks.iter().all(|task| {
            task.histogram.count() as f64 >= Self::MIN_DELIVERED * task.iops * self.seconds
        })
    }

    /// The part of the device that it used, 0 to 1.
    fn used(&self, capacity: &Capacity) -> f64 {
        let requests: u64 = self.tasks.iter().map(|task| task.histogram.count()).sum();
        let written = self.writer_throughput.get() as f64 / capacity.write_throughput.get() as f64;
        (requests as f64 / self.seconds / capacity.iops_4k + written).min(1.0)
    }
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

/// How many probes a calibration has where tasks deliver what they should.
fn probes(device: &dyn DeviceUnderTest, depth: Depth) -> usize {
    let (room, has_iocost) = (Room::of(device), device.has_iocost());
    let probes = |stage: &Stage| match stage.regime {
        Some(Regime::Controlled) if !has_iocost => 0,
        Some(Regime::Controlled) => PROBES_OF_IOCOST,
        Some(_) => PROBES_OF_A_REGIME,
        None => stage.settings.iter().filter(|&&setting| room.fit(setting).is_some()).count(),
    };
    stages(depth).iter().map(probes).sum()
}

/// How long a load with this window takes, about, and the rest that others are owed after it.
fn load_duration(device: &dyn DeviceUnderTest, window: Duration) -> Duration {
    let took = CellLoad::duration(window);
    took + device.owed(Work { active: window + RAMP, took, used: USED })
}

/// How long a calibration without a limit takes, about, where tasks deliver what they should.
#[must_use]
pub fn duration(device: &dyn DeviceUnderTest, depth: Depth) -> Duration {
    let probe = load_duration(device, depth.probe(device.scale()));
    probe * probes(device, depth) as u32 + alone::duration(device)
}

/// The steps of a calibration of which so much is kept, and how long they take, about. The last one that begins before
/// the limit ends after it.
fn planned(
    device: &dyn DeviceUnderTest,
    depth: Depth,
    limit: Duration,
    kept: &[Kept],
) -> (usize, Duration) {
    let has_capacity = kept.iter().any(|k| matches!(k, Kept::Capacity(_)));
    let alone = if has_capacity { Duration::ZERO } else { alone::duration(device) };
    let probe = load_duration(device, depth.probe(device.scale()));
    let done = kept.iter().filter(|k| matches!(k, Kept::Probe(_))).count();
    let begun = limit.saturating_sub(alone).as_secs_f64() / probe.as_secs_f64();
    let probes = probes(device, depth).saturating_sub(done).min(begun.ceil() as usize).max(1);
    (usize::from(!has_capacity) + probes, alone + probe * probes as u32)
}

/// Calibrates the device. `partial` is the file in which finished probes are kept, unless others use the device; it is
/// returned with the profile.
///
/// # Errors
/// As [`DeviceUnderTest::measure`], and if something else lies where `partial` is to be.
fn calibrate(
    device: &dyn DeviceUnderTest,
    depth: Depth,
    limit: Duration,
    partial: &Path,
    date: String,
    interrupted: &Interrupted,
) -> Result<(Profile, Option<KeptFile>)> {
    let (begin, scale) = (Instant::now(), device.scale());
    let identity = device.testbed().identity()?;
    let kernel = device.testbed().kernel_release()?;
    let named = Kept::Device(identity.clone(), kernel.clone(), device.measured_at());
    let (mut file, mut kept) = if device.is_used_by_others() {
        (None, vec![named])
    } else {
        let (file, kept) = KeptFile::open(partial, named)?;
        (Some(file), kept)
    };
    let expected = load_duration(device, depth.probe(scale));
    let (steps, left) = planned(device, depth, limit, &kept);
    let mut progress = Progress::new(steps, left);
    let capacity = kept.iter().find_map(|k| match k {
        Kept::Capacity(c) => Some(*c),
        _ => None,
    });
    let capacity = match capacity {
        Some(capacity) => capacity,
        None => {
            let expected = alone::duration(device);
            progress.start("calibrate: the device alone", expected);
            let capacity = alone::measure(device, interrupted)?;
            progress.finish(expected);
            keep(file.as_mut(), &Kept::Capacity(capacity))?;
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
    if let Some(file) = file.as_ref().filter(|_| !runs.is_empty()) {
        let (number, partial) = (runs.len(), file.path().display());
        progress.note(&format!(
            "calibrate: goes on with {number} probes of before; remove {partial} to begin anew"
        ));
    }
    let mut room = Room::beside_others(device, &capacity);
    let tell = |room: &Room, progress: &Progress| {
        if let Some(said) = room.describe(depth) {
            progress.note(&format!("calibrate: {said}"));
        }
    };
    tell(&room, &progress);
    if let Some(said) = room.describe_absent() {
        progress.note(&format!("calibrate: {said}"));
    }
    let mut stopped = 0;
    while let Some(setting) = next(depth, &room, &runs, &capacity) {
        if room.give_way(device, &capacity) {
            tell(&room, &progress);
            continue;
        }
        let is_indispensable = runs.is_empty();
        if begin.elapsed() >= limit && !is_indispensable {
            progress.note("calibrate: the time is up");
            break;
        }
        progress.start(&format!("calibrate: {}", describe(setting)), expected);
        let started = Instant::now();
        let run = match probe(device, setting, depth.probe(scale), &capacity, interrupted) {
            Err(error) if error.is::<GaveUp>() => {
                progress.finish(expected);
                stopped += 1;
                let times = room.stop(setting);
                if is_indispensable && times >= TRIES {
                    return Err(error);
                }
                if stopped >= MAX_STOPPED {
                    progress.note(&format!("calibrate: given up: {error}"));
                    break;
                }
                progress.note(&format!("calibrate: stopped: {error}"));
                continue;
            }
            // Where the index of modules cannot be read this shows only now, and nothing was changed.
            Err(error) if lacks_scheduler(&error) && room.lack(setting.0) => {
                progress.finish(expected);
                progress.note(&format!("calibrate: left out: {error}"));
                continue;
            }
            run => run?,
        };
        stopped = 0;
        let active = depth.probe(scale) + RAMP;
        let (took, used) = (started.elapsed(), run.used(&capacity));
        device.rest(Work { active, took, used }, interrupted)?;
        progress.finish(expected);
        keep(file.as_mut(), &Kept::Probe(run.clone()))?;
        runs.push(run);
    }
    let fitted = fit::fit(identity, kernel, device.measured_at(), date, capacity, &runs);
    let is_beside_others = runs.iter().any(|run| run.others.is_some());
    let source = if is_beside_others { ProfileSource::BesideOthers } else { ProfileSource::Alone };
    let profile = Profile { firmware: device.testbed().firmware(), source, ..fitted };
    for missing in missing(&profile, depth) {
        progress.note(&format!("calibrate: missing: {missing}"));
    }
    Ok((profile, file))
}

/// A whole calibration, and the time after which it begins no probe.
pub const FULL: (Depth, Duration) = (Depth::Full, Duration::from_secs(360));

/// That time of a disk in use: from VMs that run to settings that are applied it is six minutes, of which
/// `init` watches for one.
pub const IN_USE_LIMIT: Duration = Duration::from_secs(240);

/// Calibrates the device, whose data is overwritten, and writes the profile to `output`. Until then finished
/// probes are kept in a file beside it, unless others use the device. After the limit no probe is begun that is not
/// indispensable; [`missing`] says what the profile then lacks.
///
/// # Errors
/// As [`DeviceUnderTest::measure`] and [`write()`], and if something else lies where probes are to be kept.
pub fn calibrate_to(
    device: &dyn DeviceUnderTest,
    (depth, limit): (Depth, Duration),
    output: &Path,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let partial = kept::path_beside(output);
    let date = jiff::Timestamp::now().to_string();
    let (profile, kept) = calibrate(device, depth, limit, &partial, date, interrupted)?;
    finish(&profile, output, kept)?;
    Ok(profile)
}

/// Writes the profile, and only then removes what was kept: if that fails, a calibration that is started again
/// goes on from there.
fn finish(profile: &Profile, output: &Path, kept: Option<KeptFile>) -> Result<()> {
    write(profile, output)?;
    if let Some(file) = kept {
        file.remove();
    }
    Ok(())
}

/// Writes a profile to `output`.
///
/// # Errors
/// No plan could be made with it, which nobody should learn only then, or it cannot be written.
pub fn write(profile: &Profile, output: &Path) -> Result<()> {
    ensure!(
        !profile.structural.base.is_empty(),
        "no profile is written: it lacks the base of all predictions, for which a run without a writer and under a \
         scheduler that does not idle has to be measured"
    );
    profile.check().context("no profile is written: it could not be used")?;
    input::write(output, &serde_json::to_string_pretty(profile)?)
}

/// A window in which a device was watched: a run of the load that was there.
pub(crate) struct ObservedWindow {
    /// Its length.
    pub(crate) seconds: f64,
    /// Small requests a second.
    pub(crate) iops: f64,
    /// Their latencies.
    pub(crate) small: Histogram,
    /// What else the device did.
    pub(crate) others: Option<OtherLoad>,
    /// Delay of a sleeping thread, 99th percentile.
    pub(crate) canary: Nanos,
}

/// The models' fit to windows in which a device was watched under `scheduler`.
pub(crate) fn fit_observed(
    (device, kernel, measured_at, date): (DeviceIdentity, String, MeasuredAt, String),
    capacity: Capacity,
    scheduler: Scheduler,
    windows: Vec<ObservedWindow>,
) -> Profile {
    let run = |window: ObservedWindow| ProbeRun {
        setting: (scheduler, 1, Writer::Absent),
        seconds: window.seconds,
        cap: None,
        writer_throughput: BytesPerSecond::default(),
        tasks: vec![ProbeTask { vm: 0, iops: window.iops, histogram: window.small }],
        canary: window.canary,
        others: window.others,
    };
    let runs: Vec<ProbeRun> = windows.into_iter().map(run).collect();
    fit::fit(device, kernel, measured_at, date, capacity, &runs)
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
    text += match profile.source {
        ProfileSource::Alone => "",
        ProfileSource::BesideOthers => "made      beside others: bounds are wider\n",
        ProfileSource::Observed => {
            "made      by watching others: capacity is the least that it can be\n"
        }
    };
    if let Some(other) = &profile.measured_on {
        text += &format!("made      on another device of the model: {other}\n");
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
    output::visible(&text)
}

/// Whether a probe could not be made because the kernel does not have its scheduler.
fn lacks_scheduler(error: &anyhow::Error) -> bool {
    error.downcast_ref::<HostError>().is_some_and(HostError::lacks_scheduler)
}

/// The next probe after `runs`; `None` once there are enough.
fn next(depth: Depth, room: &Room, runs: &[ProbeRun], capacity: &Capacity) -> Option<ProbeSetting> {
    // What a bound on one task needs comes first, for each regime that plans choose: with that a plan
    // promises something, whenever the time is up.
    let chosen = |stage: &&Stage| stage.regime.is_none_or(|r| CHOSEN_REGIMES.contains(&r));
    let first = stages(depth).iter().take_while(chosen).map(|stage| (stage, 1));
    let all = stages(depth).iter().map(|stage| (stage, TOGETHER));
    first.chain(all).find_map(|(stage, together)| of_stage(stage, together, room, runs, capacity))
}

/// A further probe of a stage whose bound is to hold for so many tasks together; `None`: it has enough.
fn of_stage(
    stage: &Stage,
    together: usize,
    room: &Room,
    runs: &[ProbeRun],
    capacity: &Capacity,
) -> Option<ProbeSetting> {
    if stage.regime == Some(Regime::Controlled) {
        return controlled::next(together, room, runs, capacity);
    }
    let times = |setting: &ProbeSetting| runs.iter().filter(|r| r.setting == *setting).count();
    let mut settings = stage.settings.iter().filter_map(|&setting| room.fit(setting));
    let Some(regime) = stage.regime else {
        return settings.find(|setting| times(setting) == 0);
    };
    let (tasks, vms) = fit::scores(runs, capacity, regime);
    lack(regime, &tasks, &vms, together)?;
    let mut distinct: Vec<ProbeSetting> = Vec::new();
    settings.for_each(|setting| {
        if !distinct.contains(&setting) {
            distinct.push(setting);
        }
    });
    // Where something is not to be changed a regime may be out of reach.
    let is_whole = room.kept.is_none() && room.may_flood;
    let most = 2 * PROBES_OF_A_REGIME * 4 / usize::from(room.vms.max(1));
    if !is_whole && distinct.iter().map(times).sum::<usize>() >= most {
        return None;
    }
    // Each in turn: the one that was tried least, the first of them.
    distinct.into_iter().min_by_key(|s| times(s) + room.stops(s) as usize)
}

fn describe((scheduler, vms, writer): ProbeSetting) -> String {
    let writer = match writer {
        Writer::Absent => String::new(),
        Writer::Capped(part) => format!(", a writer at {:.0} % of the throughput", part * 100.0),
        Writer::Unlimited => ", a deep writer".to_owned(),
    };
    format!("{vms} VMs{writer}, {scheduler}")
}

fn keep(file: Option<&mut KeptFile>, value: &Kept) -> Result<()> {
    file.map_or(Ok(()), |file| file.keep(value))
}

/// Whether a scheduler idles between the requests of a queue.
pub(crate) fn idles(scheduler: Scheduler) -> bool {
    matches!(scheduler, Scheduler::Bfq(bfq) if bfq.slice_idle_us > 0)
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
        others: device.others(),
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
        // As a plan has them.
        let weight = match scheduler {
            Scheduler::IoCost(_) if vm.is_background() => Weight::BACKGROUND,
            Scheduler::IoCost(_) => Weight::MAX,
            _ => Weight::DEFAULT,
        };
        (vm.name.clone(), VmSettings { weight, limits })
    });
    DeviceSettings { scheduler, vms: vms.collect() }
}

#[cfg(test)]
mod tests;
