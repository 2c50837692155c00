//! From probes to the models' parameters and residuals.

use std::collections::BTreeMap;

use rtvirtio_cases::highest_percentile;
use rtvirtio_model::paper::{self, Reading, Sample};
use rtvirtio_model::structural::Structural;
use rtvirtio_model::{DeviceLoad, Stream, VmLoad};
use rtvirtio_spec::latency::{Histogram, upper_limit};
use rtvirtio_spec::profile::{
    BasePoint, Capacity, DeviceIdentity, IoCostFit, PROFILE_VERSION, PaperFit, Probe, ProbeTail,
    Profile, ProfileSource, Regime, Residuals, StallFit, StructuralFit,
};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{IoCost, Limits, Scheduler, VmSettings};
use rtvirtio_units::{Bytes, Nanos, Percentile};

use super::{ProbeRun, ProbeTask, TOGETHER, Writer};

/// The percentile that a probe of `n` samples shows: the highest with 5 beyond it, which keeps the
/// luck of one sample out of it, else p99 with 2 (a flooded task issues no more).
fn observed_percentile(n: u64) -> Option<Percentile> {
    highest_percentile(n, 5).or_else(|| highest_percentile(n, 2))
}

pub(super) fn fit(
    device: DeviceIdentity,
    kernel: String,
    measured_at: MeasuredAt,
    date: String,
    capacity: Capacity,
    runs: &[ProbeRun],
) -> Profile {
    let structural = structural(runs, &capacity);
    let paper = fit_paper(runs, &capacity);
    let mut residuals = Residuals::default();
    // Each probe under a fit to all the others: its task-runs share its noise.
    for (left_out, run) in runs.iter().enumerate() {
        let mut others = runs.to_vec();
        others.remove(left_out);
        let (structural, paper) =
            (self::structural(&others, &capacity), fit_paper(&others, &capacity));
        if !is_known(run, &structural, &capacity) {
            continue;
        }
        let mut of_vms: BTreeMap<(Regime, usize), [Vec<f64>; 2]> = BTreeMap::new();
        for observation in observations(std::slice::from_ref(run)) {
            let (regime, predicted) = observation.predicted(&structural, &capacity);
            let scores = add_scores(&mut residuals, &observation, regime, predicted);
            let of_vm = of_vms.entry((regime, observation.vm)).or_default();
            of_vm.iter_mut().zip(scores).for_each(|(of_vm, score)| of_vm.push(score));
            if idles(run) {
                let reading = Reading::Corrected;
                let of_paper = paper::host_part(&paper, &load(run), observation.vm, reading);
                let score = ln_ratio(observation.disturbed_tail(), of_paper);
                residuals.paper.entry(regime).or_default().push(score);
            }
        }
        for observation in of_all_vms(run) {
            let (regime, predicted) = observation.predicted(&structural, &capacity);
            add_scores(&mut residuals, &observation, regime, predicted);
        }
        for ((regime, _), [disturbed, as_measured]) in of_vms {
            if let (Some(disturbed), Some(as_measured)) =
                (vm_score(&disturbed), vm_score(&as_measured))
            {
                residuals.structural_vms.entry(regime).or_default().push(disturbed);
                residuals.as_measured_vms.entry(regime).or_default().push(as_measured);
            }
        }
    }
    let Residuals {
        structural: of_tasks,
        structural_vms,
        as_measured,
        as_measured_vms,
        lateness: _,
        paper: of_paper,
    } = &mut residuals;
    for by_regime in [of_tasks, structural_vms, as_measured, as_measured_vms, of_paper] {
        by_regime.values_mut().for_each(|scores| scores.sort_by(f64::total_cmp));
    }
    let probes = runs.iter().map(summary).collect();
    Profile {
        version: PROFILE_VERSION,
        device,
        kernel,
        measured_at,
        date,
        capacity,
        structural,
        paper,
        residuals,
        probes,
        source: ProfileSource::Alone,
        firmware: None,
        measured_on: None,
        learned: None,
    }
}

/// Adds the scores of an observation to those of its regime, and its probe's lateness: of the tail with the lateness
/// on top, which may as well have met a request of it, and of the tail as it was measured.
fn add_scores(
    residuals: &mut Residuals,
    observation: &Observation<'_>,
    regime: Regime,
    predicted: Nanos,
) -> [f64; 2] {
    let [disturbed, as_measured] =
        [observation.disturbed_tail(), observation.tail].map(|tail| ln_ratio(tail, predicted));
    residuals.structural.entry(regime).or_default().push(disturbed);
    residuals.as_measured.entry(regime).or_default().push(as_measured);
    let lateness = residuals.lateness.entry(regime).or_default();
    *lateness = observation.run.canary.max(*lateness);
    [disturbed, as_measured]
}

/// The scores that `runs` give a regime, of tasks and of whole VMs, for their number: they are of
/// the fit to all runs.
pub(super) fn scores(runs: &[ProbeRun], capacity: &Capacity, of: Regime) -> (Vec<f64>, Vec<f64>) {
    let fit = structural(runs, capacity);
    let mut tasks = Vec::new();
    let mut vms = Vec::new();
    for run in runs.iter().filter(|run| is_known(run, &fit, capacity)) {
        let mut of_vms: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for observation in observations(std::slice::from_ref(run)) {
            let (regime, predicted) = observation.predicted(&fit, capacity);
            if regime == of {
                let score = ln_ratio(observation.tail, predicted);
                tasks.push(score);
                of_vms.entry(observation.vm).or_default().push(score);
            }
        }
        vms.extend(of_vms.into_values().filter_map(|scores| vm_score(&scores)));
    }
    (tasks, vms)
}

/// The score of a VM: the largest of its tasks' scores, if each task has one. A task that delivers too little has none
/// and is seldom a fast one, so that the largest of fewer scores would be too small.
fn vm_score(of_tasks: &[f64]) -> Option<f64> {
    of_tasks.iter().copied().max_by(f64::total_cmp).filter(|_| of_tasks.len() == TOGETHER)
}

/// Whether a fit has the setting of a run, if that is iocost's. Runs that showed one to be of no use say nothing of a bound under
/// others.
fn is_known(run: &ProbeRun, fit: &StructuralFit, capacity: &Capacity) -> bool {
    let (Scheduler::IoCost(setting), ..) = run.setting else { return true };
    let used = Structural::new(fit, capacity).situation(&load(run)).utilisation;
    run.delivers() && fit.iocost(setting, used).is_some()
}

/// The structural model's parameters from `runs`.
fn structural(runs: &[ProbeRun], capacity: &Capacity) -> StructuralFit {
    let mut fit = StructuralFit {
        base: Vec::new(),
        scheduler_factor: BTreeMap::new(),
        burst: Nanos::from_millis(100),
        stalls: stalls(runs),
        regime_factor: BTreeMap::new(),
        iocost: Vec::new(),
    };
    fit.base = base(runs, &fit, capacity);
    fit.scheduler_factor = scheduler_factors(runs, &fit);
    fit.burst = burst(runs, &fit, capacity);
    fit.regime_factor = regime_factors(runs, &fit, capacity);
    fit.iocost = iocost(runs, &fit, capacity);
    fit
}

/// What runs under iocost had on top of the base response, and what they left the writer, for each number of VMs that came to
/// their rates, as fewer did: a setting that starves a lone VM also starves one of many when the others are idle.
fn iocost(runs: &[ProbeRun], fit: &StructuralFit, capacity: &Capacity) -> Vec<IoCostFit> {
    let mut of: BTreeMap<(IoCost, u8), Vec<&ProbeRun>> = BTreeMap::new();
    for run in runs {
        if let (Scheduler::IoCost(setting), vms, _) = run.setting {
            of.entry((setting, vms)).or_default().push(run);
        }
    }
    let mut starved: BTreeMap<IoCost, u8> = BTreeMap::new();
    for ((setting, vms), runs) in &of {
        if !runs.iter().all(|run| run.delivers()) {
            starved.entry(*setting).or_insert(*vms);
        }
    }
    let kept = of
        .into_iter()
        .filter(|((setting, vms), _)| starved.get(setting).is_none_or(|fewest| vms < fewest));
    kept.filter_map(|((setting, _), runs)| {
        let model = Structural::new(fit, capacity);
        let (mut waits, mut left, mut utilisation) = (Vec::new(), Vec::new(), 0.0_f64);
        for run in runs {
            let situation = model.situation(&load(run)).without_queue();
            let used = situation.utilisation;
            for observation in observations(std::slice::from_ref(run)) {
                let estimate =
                    model.estimate(&situation, &observation.stream, observation.percentile);
                waits.push(observation.tail.saturating_sub(estimate.tail));
            }
            let free = capacity.write_throughput.get() as f64 * (1.0 - used).max(1e-3);
            left.push((run.writer_throughput.get() as f64 / free).clamp(0.0, 1.0));
            utilisation = utilisation.max(used).min(1.0);
        }
        left.sort_by(f64::total_cmp);
        // Tails vary by how much was let through at once: the longest one counts, and it is no shorter than a large request.
        let wait = waits.into_iter().max()?.max(capacity.response_128k.p999);
        Some(IoCostFit { setting, utilisation, wait, left: left[left.len() / 2] })
    })
    .collect()
}

/// λ from the tails where bfq idles, which is what the paper's model speaks of.
fn fit_paper(runs: &[ProbeRun], capacity: &Capacity) -> PaperFit {
    let samples: Vec<Sample> = observations(runs)
        .into_iter()
        .filter(|o| idles(o.run))
        .map(|o| Sample { load: load(o.run), vm: o.vm, tail: o.tail })
        .collect();
    paper::fit(&samples, capacity.write_throughput, Reading::Corrected)
}

fn idles(run: &ProbeRun) -> bool {
    super::idles(run.setting.0)
}

/// ln(a / b), finite for zero too.
fn ln_ratio(a: Nanos, b: Nanos) -> f64 {
    (a.get().max(1) as f64 / b.get().max(1) as f64).ln()
}

/// One task's tail in a probe.
struct Observation<'a> {
    run: &'a ProbeRun,
    vm: usize,
    stream: Stream,
    percentile: Percentile,
    tail: Nanos,
}

impl Observation<'_> {
    /// The tail with the machine's own lateness on top, which may as well have met a request of the
    /// tail: so noise widens bounds, and leaves predictions as they are.
    fn disturbed_tail(&self) -> Nanos {
        self.tail.saturating_add(self.run.canary)
    }

    fn predicted(&self, fit: &StructuralFit, capacity: &Capacity) -> (Regime, Nanos) {
        let model = Structural::new(fit, capacity);
        let situation = model.situation(&load(self.run));
        let estimate = model.estimate(&situation, &self.stream, self.percentile);
        (estimate.regime, estimate.tail)
    }
}

fn observations(runs: &[ProbeRun]) -> Vec<Observation<'_>> {
    let of_run = |run| {
        let run: &ProbeRun = run;
        run.tasks.iter().filter_map(move |task| {
            let percentile = observed_percentile(task.histogram.count())?;
            let tail = task.histogram.quantile(percentile)?.value;
            Some(Observation {
                run,
                vm: task.vm as usize,
                stream: stream(task.iops),
                percentile,
                tail,
            })
        })
    };
    runs.iter().flat_map(of_run).collect()
}

/// Tasks of one rate in all VMs of a probe together, where that shows a higher percentile than each of them does: a
/// probe is too short for p99.9 of a task of 500 requests a second, and plans promise it. It is the percentile of the
/// mixture: of VMs that do not fare alike the worst has a longer one.
fn of_all_vms(run: &ProbeRun) -> Vec<Observation<'_>> {
    let mut by_rate: BTreeMap<u64, (&ProbeTask, Histogram)> = BTreeMap::new();
    for task in &run.tasks {
        let (_, all) =
            by_rate.entry(task.iops.to_bits()).or_insert_with(|| (task, Histogram::new()));
        all.merge(&task.histogram);
    }
    let higher = |(task, all): &(&ProbeTask, Histogram)| {
        let percentile = observed_percentile(all.count())?;
        (observed_percentile(task.histogram.count())? < percentile).then_some(())?;
        let (tail, vm) = (all.quantile(percentile)?.value, task.vm as usize);
        Some(Observation { run, vm, stream: stream(task.iops), percentile, tail })
    };
    by_rate.values().filter_map(higher).collect()
}

/// A task as all probes have it: 4 KiB, 70 % reads, depth 1.
fn stream(iops: f64) -> Stream {
    Stream { iops: Some(iops), block_size: Bytes::from_kib(4), read_fraction: 0.7, depth: 1 }
}

fn load(run: &ProbeRun) -> DeviceLoad {
    let (scheduler, vms, writer) = run.setting;
    let mut loads: Vec<VmLoad> = (0..u32::from(vms))
        .map(|vm| VmLoad {
            streams: run.tasks.iter().filter(|t| t.vm == vm).map(|t| stream(t.iops)).collect(),
            settings: VmSettings::default(),
        })
        .collect();
    if writer != Writer::Absent {
        let limits = run.cap.map(Limits::bps).unwrap_or_default();
        loads.push(VmLoad {
            streams: vec![Stream::UNDECLARED[1]],
            settings: VmSettings { limits, ..VmSettings::default() },
        });
    }
    // Others who used the device are a stream of what they were seen to do.
    loads.extend(run.others.map(|others| VmLoad {
        streams: vec![Stream {
            iops: Some(others.iops),
            block_size: others.block_size,
            read_fraction: others.read_fraction,
            depth: 1,
        }],
        settings: VmSettings::default(),
    }));
    DeviceLoad { scheduler, vms: loads }
}

fn pooled(run: &ProbeRun) -> Histogram {
    let mut all = Histogram::new();
    for task in &run.tasks {
        all.merge(&task.histogram);
    }
    all
}

fn at(histogram: &Histogram, percentile: f64) -> Nanos {
    let quantile = Percentile::new(percentile).ok().and_then(|p| histogram.quantile(p));
    quantile.map_or(Nanos::ZERO, |q| q.value)
}

/// Whether nothing but the tasks themselves delays a task: no writer, no idling.
fn is_quiet(run: &ProbeRun) -> bool {
    run.setting.2 == Writer::Absent && !idles(run)
}

/// Base tails by utilisation, the least over the schedulers: noise only
/// lengthens a tail, and no scheduler shortens it.
fn base(runs: &[ProbeRun], fit: &StructuralFit, capacity: &Capacity) -> Vec<BasePoint> {
    let model = Structural::new(fit, capacity);
    let mut points: BTreeMap<(u8, u64), BasePoint> = BTreeMap::new();
    for run in runs.iter().filter(|r| is_quiet(r)) {
        let all = pooled(run);
        let here = BasePoint {
            utilisation: model.situation(&load(run)).utilisation.min(0.99),
            mean: all.mean(),
            p99: at(&all, 99.0),
            p999: at(&all, 99.9),
        };
        // By tenths of the device too: others come and go.
        let tenth = (here.utilisation * 10.0).round() as u64;
        let least = points.entry((run.setting.1, tenth)).or_insert(here);
        *least = lesser(least, &here);
    }
    let mut points: Vec<BasePoint> = points.into_values().collect();
    // Others come and go: more VMs need not be more load.
    points.sort_by(|a, b| a.utilisation.total_cmp(&b.utilisation));
    points.dedup_by(|a, b| {
        let is_same = a.utilisation <= b.utilisation;
        if is_same {
            *b = lesser(b, a);
        }
        is_same
    });
    // Tails do not fall with utilisation: a point above a busier one is noise.
    for i in (1..points.len()).rev() {
        points[i - 1] = lesser(&points[i - 1], &points[i]);
    }
    points
}

/// `a` with no tail longer than that of `b`.
fn lesser(a: &BasePoint, b: &BasePoint) -> BasePoint {
    BasePoint {
        utilisation: a.utilisation,
        mean: a.mean.min(b.mean),
        p99: a.p99.min(b.p99),
        p999: a.p999.min(b.p999),
    }
}

/// Each scheduler's mean response over the base, with most VMs and no writer: the CPU time that
/// it adds shows there, and the machine's own lateness, which is in the tails, does not.
fn scheduler_factors(runs: &[ProbeRun], fit: &StructuralFit) -> BTreeMap<String, f64> {
    let Some(base) = fit.base.last() else { return BTreeMap::new() };
    let factor = |run: &ProbeRun| {
        (pooled(run).mean().as_secs_f64() / base.mean.as_secs_f64().max(1e-9)).max(1.0)
    };
    let quiet = runs.iter().filter(|run| is_quiet(run));
    let most = quiet.clone().map(|run| run.setting.1).max();
    quiet
        .filter(|run| Some(run.setting.1) == most)
        .map(|run| (run.setting.0.name().to_owned(), factor(run)))
        .collect()
}

/// Bursts of a capped VM a second (kernel `DFL_THROTL_SLICE_HD`, HZ/10).
const BURSTS_PER_SECOND: f64 = 10.0;

/// The burst time (1 to 250 ms) that explains the capped probes best, by least
/// squares of the logarithms, over the fastest streams whose observed percentile
/// shows bursts: a stream meets each burst with one request, so its requests beyond the percentile must be
/// fewer than the bursts. A slow stream that keeps step with the bursts meets all
/// of them or none.
fn burst(runs: &[ProbeRun], fit: &StructuralFit, capacity: &Capacity) -> Nanos {
    let shows = |o: &Observation<'_>| {
        let rate = o.stream.iops.unwrap_or(0.0);
        let is_capped = matches!(o.run.setting.2, Writer::Capped(_));
        is_capped && rate * (1.0 - o.percentile.fraction()) < BURSTS_PER_SECOND
    };
    let of_run = |run| {
        let all: Vec<_> =
            observations(std::slice::from_ref(run)).into_iter().filter(shows).collect();
        let fastest = all.iter().filter_map(|o| o.stream.iops).fold(0.0, f64::max);
        all.into_iter().filter(move |o| o.stream.iops == Some(fastest))
    };
    let capped: Vec<_> = runs.iter().flat_map(of_run).collect();
    let error = |burst: Nanos| -> f64 {
        let fit = StructuralFit { burst, ..fit.clone() };
        capped.iter().map(|o| ln_ratio(o.tail, o.predicted(&fit, capacity).1).powi(2)).sum()
    };
    (1..=250)
        .map(Nanos::from_millis)
        .min_by(|&a, &b| error(a).total_cmp(&error(b)))
        .unwrap_or(fit.burst)
}

/// Median of measured over modelled, for each regime that has observations. Where bursts are,
/// their length is the fit, of the tasks that meet each of them.
fn regime_factors(
    runs: &[ProbeRun],
    fit: &StructuralFit,
    capacity: &Capacity,
) -> BTreeMap<Regime, f64> {
    let mut scores: BTreeMap<Regime, Vec<f64>> = BTreeMap::new();
    for o in observations(runs) {
        let (regime, predicted) = o.predicted(fit, capacity);
        scores.entry(regime).or_default().push(ln_ratio(o.tail, predicted));
    }
    scores
        .into_iter()
        .filter(|(regime, _)| ![Regime::Bursting, Regime::Controlled].contains(regime))
        .map(|(regime, mut scores)| {
            scores.sort_by(f64::total_cmp);
            (regime, scores[scores.len() / 2].exp())
        })
        .collect()
}

/// Stalls of the device, from what the fastest task of the first VM saw where
/// nothing else can block: no writer, no idling.
///
/// A stall shows once to a depth-1 task that is fast enough. What is five
/// times as long as the 99.9th percentile and 5 ms at least is taken for one; a
/// single one is chance.
fn stalls(runs: &[ProbeRun]) -> Option<StallFit> {
    let mut seen = 0;
    let mut longest = Nanos::ZERO;
    let mut seconds = 0.0;
    for run in runs.iter().filter(|r| is_quiet(r)) {
        let Some(fastest) =
            run.tasks.iter().filter(|t| t.vm == 0).max_by(|a, b| a.iops.total_cmp(&b.iops))
        else {
            continue;
        };
        let long = at(&pooled(run), 99.9).scale(5.0).max(Nanos::from_millis(5));
        for (latency, count) in fastest.histogram.bins().filter(|(l, _)| *l > long) {
            seen += count;
            longest = longest.max(latency);
        }
        seconds += run.seconds;
    }
    if seen < 2 || seconds == 0.0 {
        return None;
    }
    Some(StallFit { per_second: upper_limit(seen) / seconds, length: longest })
}

fn summary(run: &ProbeRun) -> Probe {
    let (scheduler, vms, writer) = run.setting;
    let tails = run
        .tasks
        .iter()
        .filter_map(|t| {
            let percentile = observed_percentile(t.histogram.count())?;
            Some(ProbeTail {
                vm: t.vm,
                iops: t.iops,
                delivered: t.histogram.count() as f64 / run.seconds / t.iops,
                percentile,
                tail: t.histogram.quantile(percentile)?.value,
            })
        })
        .collect();
    Probe {
        scheduler,
        vms: u32::from(vms),
        writer: writer != Writer::Absent,
        cap: run.cap,
        writer_throughput: run.writer_throughput,
        tails,
        canary: run.canary,
    }
}
