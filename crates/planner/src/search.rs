//! The local search over one device's settings. See the crate's header.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_model::{DeviceLoad, Stream};
use rtvirtio_spec::plan::{BackgroundShare, BindingConstraint, DeviceCost, Reason, TaskPromise};
use rtvirtio_spec::settings::{
    Bfq, DeviceSettings, Knobs, Limits, Scheduler, Settings, VmSettings, diff,
};
use rtvirtio_units::{BytesPerSecond, Nanos, VmName, Weight};

use crate::{Evaluation, JointConfidence, Model, Problem};

/// The least that a background VM is left: it must stay alive.
const MIN_CAP: f64 = 1e6;

/// The part of a device's write throughput that a careful operator leaves each background VM where
/// nothing can be promised: the hand setting of `cases` is 10 MB/s of the 363 MB/s of ref-4x250,
/// 2.75 %; this is a little less.
const CAREFUL_SHARE: f64 = 0.025;

/// Caps are multiples of this, bytes per second.
const CAP_STEP: f64 = 1e5;

/// So many VMs or fewer that are not given up are tried one by one.
const ONE_BY_ONE: usize = 8;

/// Values of each bfq parameter, in the order in which neighbours are tried.
const SLICE_IDLE_US: [u32; 5] = [0, 1000, 2000, 4000, 8000];
const TIMEOUT_SYNC_MS: [u32; 3] = [32, 64, 124];
const MAX_BUDGET: [u32; 4] = [0, 64, 512, 4096];

/// The settings chosen for a device, with what they promise.
pub(crate) struct Choice {
    scheduler: Scheduler,
    /// Index of each capped VM.
    capped: Vec<usize>,
    /// The cap of each of them, bytes per second; `None`: none is needed.
    cap: Option<f64>,
    pub(crate) evaluation: Evaluation,
    worth: Score,
    /// What keeps the cap from being larger.
    binding_constraint: Option<BindingConstraint>,
    pub(crate) reasons: Vec<Reason>,
}

/// Orders candidates; greater is better.
#[derive(Debug, Clone, PartialEq)]
struct Score {
    /// Tasks that the model which was asked answers for: the search must not leave its range because
    /// another one promises more there.
    answered: usize,
    /// Whether each task's target is met, most urgent VM first.
    met: Vec<bool>,
    /// Where a target is not met: what protects the tasks, before all that the background gets.
    shortfall: Option<Shortfall>,
    /// Background throughput in per cent of the device's.
    background: i64,
    /// Knobs that keep the device idle or override weights.
    idle_knobs: u32,
    changes: usize,
    /// CPU time that the scheduler takes for a request, by rank.
    work: u32,
    /// Worst bound over target, in per mille.
    tightness: u64,
}

/// How far a candidate is from meeting all targets; smaller is better.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Shortfall {
    /// bfq that idles does not protect anybody: its tails are those of the idling.
    idle_knobs: u32,
    /// Predicted tail over target of each task that is not met, in per cent, most urgent VM first.
    violation: Vec<u64>,
    /// Tasks of whose tails nothing is known but the prediction.
    unbounded: usize,
}

impl Score {
    /// By the targets that are met, the most urgent first; who has fewer answers comes after all others.
    fn meets(&self, other: &Self) -> Ordering {
        if self.answered < other.answered { Ordering::Less } else { self.met.cmp(&other.met) }
    }

    fn compare(&self, other: &Self) -> Ordering {
        let fewer = |a: usize, b: usize| b.cmp(&a);
        self.answered
            .cmp(&other.answered)
            .then(self.met.cmp(&other.met))
            .then(other.shortfall.cmp(&self.shortfall))
            .then(self.background.cmp(&other.background))
            .then(other.idle_knobs.cmp(&self.idle_knobs))
            .then(fewer(self.changes, other.changes))
            .then(other.work.cmp(&self.work))
            .then(other.tightness.cmp(&self.tightness))
    }
}

/// The best settings for `problem` on a host whose knobs are `observed`.
pub(crate) fn search(problem: &Problem<'_>, observed: &Knobs) -> Choice {
    // Those that may be given up, the least urgent first.
    let mut victims: Vec<usize> =
        (0..problem.vms.len()).filter(|&i| problem.vms[i].urgency.is_some()).collect();
    victims.sort_by_key(|&i| problem.vms[i].urgency);
    victims.reverse();
    let (given_up, mut best) = give_up(
        victims.len(),
        |number| local_search(problem, observed, &victims[..number]),
        |choice: &Choice, number| choice.meets_all_but(problem, &victims[..number]),
        |a: &Choice, b: &Choice| a.worth.meets(&b.worth),
    );
    for &i in &victims[..given_up] {
        let (device, vm) = (problem.device.name.clone(), problem.vms[i].vm.name.clone());
        best.reasons.push(Reason::GivenUp { device, vm });
    }
    best
}

/// How many of `vms` VMs to give up, and what is then chosen: what meets most, with as few given up as that
/// takes. Only for a target that is then met: to be less far from one is no reason to give up a VM.
///
/// One search for each number would be a thousand for a thousand VMs of which one has a target that nothing
/// meets. So few VMs that are kept are tried one by one, more by doublings, and the least number that meets as
/// much as the best of these is found by bisection. That is the same as one by one if giving up more VMs never
/// breaks a target of those that are kept, if all that it helps need the same number, and if that number keeps more
/// than twice as many VMs as have targets that nothing meets.
fn give_up<C>(
    vms: usize,
    choose: impl Fn(usize) -> C,
    is_enough: impl Fn(&C, usize) -> bool,
    compare: impl Fn(&C, &C) -> Ordering,
) -> (usize, C) {
    let mut best = choose(0);
    let (mut too_few, mut given_up) = (0, 0);
    let mut tried = 0;
    for number in numbers(vms) {
        if is_enough(&best, tried) {
            break;
        }
        let choice = choose(number);
        if compare(&choice, &best) == Ordering::Greater {
            (best, too_few, given_up) = (choice, tried, number);
        }
        tried = number;
    }
    while given_up - too_few > 1 {
        let middle = too_few.midpoint(given_up);
        let choice = choose(middle);
        if compare(&choice, &best) == Ordering::Less {
            too_few = middle;
        } else {
            (best, given_up) = (choice, middle);
        }
    }
    (given_up, best)
}

/// How many of `vms` VMs are given up at first, fewest first. The most urgent one never is.
fn numbers(vms: usize) -> impl Iterator<Item = usize> {
    let doubled = std::iter::successors(Some(2 * ONE_BY_ONE), |kept: &usize| kept.checked_mul(2));
    let kept = (1..=ONE_BY_ONE).chain(doubled).take_while(|&kept| kept < vms);
    let kept: Vec<usize> = kept.collect();
    kept.into_iter().rev().map(move |kept| vms - kept)
}

/// The names of these VMs: whether a promise is to one of them is asked for each promise of each candidate.
fn names<'a>(problem: &Problem<'a>, vms: &[usize]) -> BTreeSet<&'a VmName> {
    vms.iter().map(|&i| &problem.vms[i].vm.name).collect()
}

fn local_search(problem: &Problem<'_>, observed: &Knobs, sacrificed_vms: &[usize]) -> Choice {
    let quiet = Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT };
    let starts = [Scheduler::None, Scheduler::MqDeadline, Scheduler::Kyber, Scheduler::Bfq(quiet)];
    let iocost = problem.iocost(observed).into_iter().map(Scheduler::IoCost);
    let mut best: Option<Choice> = None;
    for start in starts.into_iter().chain(iocost).filter(|start| problem.can_have(*start)) {
        let mut here = candidate(problem, observed, sacrificed_vms, start);
        if !is_known(problem, &here) {
            continue;
        }
        loop {
            // Under bfq that idles tails are (VMs − 1) × timeout: no bound there is worth having, and one
            // that happens to be there must not win over a regime that lacks runs.
            let may_idle = !matches!(problem.model, Model::Structural);
            let better = neighbours(here.scheduler)
                .into_iter()
                .filter(|s| may_idle || idle_knobs(*s) == 0)
                .map(|s| candidate(problem, observed, sacrificed_vms, s))
                .find(|c| c.worth.compare(&here.worth) == Ordering::Greater);
            match better {
                Some(c) => here = c,
                None => break,
            }
        }
        if best.as_ref().is_none_or(|b| here.worth.compare(&b.worth) == Ordering::Greater) {
            best = Some(here);
        }
    }
    let mut best =
        best.unwrap_or_else(|| candidate(problem, observed, sacrificed_vms, Scheduler::None));
    best.binding_constraint = best.binding_constraint(problem, sacrificed_vms);
    best.reasons = best.explain(problem, sacrificed_vms);
    best
}

/// Whether iocost, if it is that, was measured beside loads such as these.
fn is_known(problem: &Problem<'_>, choice: &Choice) -> bool {
    let Scheduler::IoCost(setting) = choice.scheduler else { return true };
    let utilisation = choice.evaluation.utilisation;
    problem.profile.structural.iocost(setting, utilisation).is_some()
}

/// Schedulers that differ in one parameter.
fn neighbours(scheduler: Scheduler) -> Vec<Scheduler> {
    let Scheduler::Bfq(bfq) = scheduler else { return Vec::new() };
    let slice_idle = SLICE_IDLE_US.map(|slice_idle_us| Bfq { slice_idle_us, ..bfq });
    let timeout = TIMEOUT_SYNC_MS.map(|timeout_sync_ms| Bfq { timeout_sync_ms, ..bfq });
    let budget = MAX_BUDGET.map(|max_budget| Bfq { max_budget, ..bfq });
    let latency = [Bfq { low_latency: !bfq.low_latency, ..bfq }];
    slice_idle
        .into_iter()
        .chain(timeout)
        .chain(budget)
        .chain(latency)
        .filter(|&b| b != bfq)
        .map(Scheduler::Bfq)
        .collect()
}

/// The candidate of `scheduler` with the largest caps that its targets allow.
fn candidate(
    problem: &Problem<'_>,
    observed: &Knobs,
    sacrificed_vms: &[usize],
    scheduler: Scheduler,
) -> Choice {
    let sacrificed: BTreeSet<usize> = sacrificed_vms.iter().copied().collect();
    let capped: Vec<usize> = (0..problem.vms.len())
        .filter(|i| problem.vms[*i].urgency.is_none() || sacrificed.contains(i))
        .collect();
    let evaluate = |cap: Option<f64>| {
        let load = problem.load_in_order(scheduler, vm_settings(problem, scheduler, &capped, cap));
        problem.evaluate(&load, sacrificed_vms, JointConfidence::Vm)
    };
    let met =
        |e: &Evaluation| -> Vec<bool> { e.promises.iter().map(|p| p.unmet.is_none()).collect() };
    let mut cap = None;
    let mut evaluation = evaluate(None);
    let is_answered = evaluation.answered() == evaluation.promises.len();
    // iocost is there to do without caps.
    let may_cap = !matches!(scheduler, Scheduler::IoCost(_));
    if may_cap && !capped.is_empty() && (met(&evaluation).contains(&false) || !is_answered) {
        let least = evaluate(Some(MIN_CAP));
        let answered = least.answered();
        let victims = names(problem, sacrificed_vms);
        let is_victim = |p: &TaskPromise| victims.contains(&p.vm);
        // What the least cap meets stays met. What even that does not meet, or cannot promise for lack
        // of a bound, stays as near to its target as it is there: the background comes last.
        let is_kept = |(now, best): (&TaskPromise, &TaskPromise)| match best.unmet {
            None => now.unmet.is_none(),
            // A VM that is given up is capped itself.
            Some(_) => is_victim(best) || now.predicted <= best.predicted,
        };
        let keeps = |e: &Evaluation| {
            e.answered() >= answered && e.promises.iter().zip(&least.promises).all(is_kept)
        };
        let throughput = problem.profile.capacity.write_throughput.get() as f64;
        let short = least.promises.iter().any(|p| p.unmet.is_some() && !is_victim(p));
        let largest = if short {
            (throughput * CAREFUL_SHARE).max(MIN_CAP)
        } else {
            throughput.max(2.0 * MIN_CAP)
        };
        if !keeps(&evaluation) || short {
            // Bounds grow with the cap, so the largest that keeps what the least one meets
            // is found by bisection. (A learned model's need not: then it is one that keeps it.)
            let steps = |bytes: f64| (bytes / CAP_STEP).ceil() as u64;
            let (mut low, mut high) = (steps(MIN_CAP), steps(largest).max(steps(MIN_CAP) + 1));
            while high - low > 1 {
                let middle = low.midpoint(high);
                let keeps_it = keeps(&evaluate(Some(middle as f64 * CAP_STEP)));
                if keeps_it { low = middle } else { high = middle }
            }
            cap = Some(low as f64 * CAP_STEP);
            evaluation = evaluate(cap);
            let at = BytesPerSecond::new((low as f64 * CAP_STEP) as u64);
            for promise in
                evaluation.promises.iter_mut().filter(|p| p.bound.is_some() && !is_victim(p))
            {
                if let Some(unmet) = &mut promise.unmet {
                    unmet.background = Some(at);
                }
            }
        }
    }
    let worth = worth(problem, observed, scheduler, &capped, cap, &evaluation);
    Choice {
        scheduler,
        capped,
        cap,
        evaluation,
        worth,
        binding_constraint: None,
        reasons: Vec::new(),
    }
}

/// Bound over target; infinite without a bound.
fn tightness(promise: &TaskPromise) -> f64 {
    let bound = promise.bound.map_or(f64::INFINITY, Nanos::as_secs_f64);
    bound / promise.target.as_secs_f64()
}

fn worth(
    problem: &Problem<'_>,
    observed: &Knobs,
    scheduler: Scheduler,
    capped: &[usize],
    cap: Option<f64>,
    evaluation: &Evaluation,
) -> Score {
    let urgencies: BTreeMap<&VmName, Option<Nanos>> =
        problem.vms.iter().map(|v| (&v.vm.name, v.urgency)).collect();
    let mut by_urgency: Vec<_> = evaluation.promises.iter().collect();
    by_urgency.sort_by_cached_key(|p| urgencies.get(&p.vm).copied().flatten());
    let settings = settings(problem, scheduler, capped, cap);
    let wanted = Settings([(problem.device.name.clone(), settings)].into()).knobs();
    let throughput = problem.profile.capacity.write_throughput.get() as f64;
    let idle_knobs = idle_knobs(scheduler);
    let violation = |p: &&TaskPromise| match p.unmet {
        Some(_) => (p.predicted.as_secs_f64() / p.target.as_secs_f64() * 100.0) as u64,
        None => 0,
    };
    let shortfall = by_urgency.iter().any(|p| p.unmet.is_some()).then(|| Shortfall {
        idle_knobs,
        violation: by_urgency.iter().map(violation).collect(),
        unbounded: by_urgency.iter().filter(|p| p.bound.is_none()).count(),
    });
    // No insertion, sorting by sector, token domains, trees of budgets.
    let work = match scheduler {
        Scheduler::None => 0,
        Scheduler::IoCost(_) | Scheduler::MqDeadline | Scheduler::Kyber => 1,
        Scheduler::Bfq(_) => 2,
    };
    let tightest = evaluation.promises.iter().map(|p| (tightness(p) * 1000.0) as u64).max();
    Score {
        answered: evaluation.answered(),
        met: by_urgency.iter().map(|p| p.unmet.is_none()).collect(),
        shortfall,
        background: (background(problem, scheduler, capped, cap, evaluation) / throughput * 100.0)
            as i64,
        idle_knobs,
        changes: diff(observed, &wanted).len(),
        work,
        tightness: tightest.unwrap_or(0),
    }
}

/// Knobs of a scheduler that keep the device idle or override weights.
fn idle_knobs(scheduler: Scheduler) -> u32 {
    match scheduler {
        Scheduler::Bfq(b) => u32::from(b.slice_idle_us > 0) + u32::from(b.low_latency),
        _ => 0,
    }
}

/// Background throughput, bytes per second: the caps, or what the declared loads leave.
fn background(
    problem: &Problem<'_>,
    scheduler: Scheduler,
    capped: &[usize],
    cap: Option<f64>,
    evaluation: &Evaluation,
) -> f64 {
    let throughput = problem.profile.capacity.write_throughput.get() as f64;
    match cap {
        // Caps of many VMs, each of which must stay alive, may be more than the device can do.
        Some(cap) => (cap * capped.len() as f64).min(throughput),
        None if capped.is_empty() => 0.0,
        None => {
            let used = evaluation.utilisation;
            let controlled = match scheduler {
                Scheduler::IoCost(setting) => problem.profile.structural.iocost(setting, used),
                _ => None,
            };
            let rest = (1.0 - used).max(0.0);
            throughput * controlled.map_or(rest, |fit| fit.background(used))
        }
    }
}

fn settings(
    problem: &Problem<'_>,
    scheduler: Scheduler,
    capped: &[usize],
    cap: Option<f64>,
) -> DeviceSettings {
    let names = problem.vms.iter().map(|v| v.vm.name.clone());
    let vms = names.zip(vm_settings(problem, scheduler, capped, cap)).collect();
    DeviceSettings { scheduler, vms }
}

/// Those of each VM, in the problem's order: candidates need no names, and there are many.
fn vm_settings(
    problem: &Problem<'_>,
    scheduler: Scheduler,
    capped: &[usize],
    cap: Option<f64>,
) -> impl Iterator<Item = VmSettings> {
    let strictest = problem.vms.iter().filter_map(|v| v.urgency).min().unwrap_or(Nanos::ZERO);
    problem.vms.iter().enumerate().map(move |(i, v)| {
        // They are in order.
        let is_capped = capped.binary_search(&i).is_ok();
        // In proportion to urgency: half the latency, twice the weight.
        let weight = match v.urgency {
            // As it was measured: nobody with a target is held back by another one.
            Some(_) if !is_capped && matches!(scheduler, Scheduler::IoCost(_)) => Weight::MAX,
            Some(target) if !is_capped => {
                let share = strictest.as_secs_f64() / target.as_secs_f64();
                Weight::new((share * 1000.0) as u32).unwrap_or(Weight::BACKGROUND)
            }
            _ => Weight::BACKGROUND,
        }
        .max(Weight::BACKGROUND);
        let limits = match cap {
            Some(cap) if is_capped && v.tasks.is_empty() => undeclared_limits(cap),
            Some(cap) if is_capped => Limits::bps(BytesPerSecond::new(cap as u64)),
            _ => Limits::default(),
        };
        VmSettings { weight, limits }
    })
}

/// Limits that leave an undeclared load `cap` in all, whatever it reads or writes: half each way,
/// and no more requests than the size that it is taken for makes of that.
fn undeclared_limits(cap: f64) -> Limits {
    let half = cap / 2.0;
    let requests = (half / Stream::UNDECLARED_BLOCK.get() as f64).ceil() as u64;
    Limits {
        read_iops: Some(requests),
        write_iops: Some(requests),
        ..Limits::bps(BytesPerSecond::new(half as u64))
    }
}

impl Choice {
    /// Whether all targets are met but those of `victims`.
    fn meets_all_but(&self, problem: &Problem<'_>, victims: &[usize]) -> bool {
        let victims = names(problem, victims);
        self.evaluation.promises.iter().all(|p| p.unmet.is_none() || victims.contains(&p.vm))
    }

    pub(crate) fn settings(&self, problem: &Problem<'_>) -> DeviceSettings {
        settings(problem, self.scheduler, &self.capped, self.cap)
    }

    pub(crate) fn shares(&self, problem: &Problem<'_>) -> Vec<BackgroundShare> {
        let share = |&i: &usize| BackgroundShare {
            vm: problem.vms[i].vm.name.clone(),
            device: problem.device.name.clone(),
            cap: self.cap.map(|c| BytesPerSecond::new(c as u64)),
            binding_constraint: self.binding_constraint.clone(),
        };
        self.capped.iter().map(share).collect()
    }

    pub(crate) fn cost(&self, problem: &Problem<'_>) -> DeviceCost {
        let planned = background(problem, self.scheduler, &self.capped, self.cap, &self.evaluation);
        let throughput = problem.profile.capacity.write_throughput;
        let has_background = !self.capped.is_empty();
        DeviceCost {
            device: problem.device.name.clone(),
            background_alone: if has_background { throughput } else { BytesPerSecond::default() },
            background_planned: BytesPerSecond::new(planned as u64),
            utilisation: self.evaluation.utilisation,
        }
    }

    /// What a cap one step larger would break.
    fn binding_constraint(
        &self,
        problem: &Problem<'_>,
        sacrificed_vms: &[usize],
    ) -> Option<BindingConstraint> {
        let larger = self.cap? + CAP_STEP;
        let load = problem.load(&settings(problem, self.scheduler, &self.capped, Some(larger)));
        let broken = problem.evaluate(&load, sacrificed_vms, JointConfidence::Vm).promises;
        let pairs = self.evaluation.promises.iter().zip(&broken);
        let mut pairs = pairs.filter(|(now, then)| now.unmet.is_none() && then.unmet.is_some());
        if let Some((_, then)) = pairs.next() {
            return Some(BindingConstraint::Target { promise: Box::new(then.clone()) });
        }
        // Beside a task that is not met nothing is broken, and the cap is no larger than `CAREFUL_SHARE`, or than its tail allows.
        let victims = names(problem, sacrificed_vms);
        let mut unmet = self.evaluation.promises.iter().filter(|p| p.unmet.is_some());
        let unmet = unmet.find(|promise| !victims.contains(&promise.vm));
        Some(unmet.map_or(BindingConstraint::Throughput, |promise| BindingConstraint::Unmet {
            vm: promise.vm.clone(),
            task: promise.task.clone(),
        }))
    }

    fn explain(&self, problem: &Problem<'_>, sacrificed_vms: &[usize]) -> Vec<Reason> {
        let device = || problem.device.name.clone();
        let mut reasons = vec![Reason::Scheduler { device: device(), scheduler: self.scheduler }];
        if let (Some(cap), Some(held_by)) = (self.cap, self.binding_constraint.clone()) {
            let load: DeviceLoad =
                problem.load(&settings(problem, self.scheduler, &self.capped, None));
            let uncapped = problem.evaluate(&load, sacrificed_vms, JointConfidence::Vm);
            reasons.push(Reason::Cap {
                device: device(),
                cap: BytesPerSecond::new(cap as u64),
                step: BytesPerSecond::new(CAP_STEP as u64),
                met: self.evaluation.promises.iter().filter(|p| p.unmet.is_none()).count(),
                lost: uncapped.promises.iter().filter(|p| p.unmet.is_some()).count(),
                of: uncapped.promises.len(),
                held_by,
            });
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Which of `vms` VMs are met, the most urgent first, if each needs so many given up.
    fn met(vms: usize, given_up: usize, needs: impl Fn(usize) -> usize) -> Vec<bool> {
        (0..vms).map(|vm| vm + given_up < vms && needs(vm) <= given_up).collect()
    }

    /// How many are given up, and how many searches that took.
    fn given_up(vms: usize, needs: impl Fn(usize) -> usize) -> (usize, usize) {
        let searches = Cell::new(0);
        let (number, _) = give_up(
            vms,
            |number| {
                searches.set(searches.get() + 1);
                met(vms, number, &needs)
            },
            |met: &Vec<bool>, number| met[..vms - number].iter().all(|met| *met),
            Ord::cmp,
        );
        (number, searches.get())
    }

    #[test]
    fn as_few_as_it_takes_are_given_up_and_few_searches_find_them() {
        // The most urgent VMs of a thousand are never met, the others once so many are given up.
        for (hopeless, needed) in [(0, 0), (1, 0), (0, 250), (3, 250), (1, 700), (5, 990)] {
            let needs = |vm: usize| if vm < hopeless { usize::MAX } else { needed };
            let (number, searches) = given_up(1000, needs);
            assert_eq!(number, needed, "{hopeless} hopeless");
            assert!(searches <= 25, "{hopeless} hopeless: {searches}");
        }
        // Nobody is given up for nothing.
        assert_eq!(given_up(1000, |_| usize::MAX).0, 0);
        assert_eq!(given_up(0, |_| 0), (0, 1));
    }

    #[test]
    fn of_few_vms_each_number_is_tried() {
        for seed in 0..200_usize {
            for vms in 1..=ONE_BY_ONE + 1 {
                let needs = |vm: usize| (7 * vm * vm + 3 * seed) % (vms + 4);
                let best = (0..vms).rev().max_by_key(|&number| met(vms, number, needs));
                assert_eq!(Some(given_up(vms, needs).0), best, "{vms} VMs, {seed}");
            }
        }
    }
}
