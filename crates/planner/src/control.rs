//! When to plan again: the decision of the closed loop, without its hands.
//!
//! Terms: a VM is *present* while it runs; a task is *at risk* when more of its
//! requests missed the target than its percentile allows, within [`INTERVAL`], or within ten of them
//! if it has too few requests for a tail in one; the *margin* is by
//! how much targets are tightened for the next plan, 1 to [`MARGIN_MAX`].
//!
//! Algorithm: a change of who is present is planned for at once. A task at risk
//! under an unchanged load says that the model is too hopeful here, so the
//! margin grows by [`MARGIN_STEP`]; after [`CALM`] without a task at risk it
//! shrinks by one step. A device of the data plane that took [`SLOWER`] times
//! as long as its profile says, over [`INTERVAL`], is planned for as one that
//! much slower, until it takes as much less. What only fits a device as it was calibrated is not planned
//! any more once a task was at risk ([`Doubts`]). Changes are at least [`INTERVAL`]
//! apart, whatever the reason: a setting needs that long to show in a tail.
//!
//! Pure: the caller passes time and counts, and acts.
//!
//! Properties (tests of the same name): `a_vm_that_comes_is_planned_for_at_once`,
//! `changes_keep_their_distance`, `too_few_requests_are_no_risk`, `slow_task_that_misses_is_at_risk`,
//! `margin_grows_with_risk_and_shrinks_in_calm`, `a_plan_that_failed_is_made_again`,
//! `a_device_that_slows_down_is_planned_for_as_it_is_and_as_it_was_when_that_is_over`.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_units::{DeviceName, Nanos, Percentile, TaskName, VmName};

/// Least time between two changes.
pub const INTERVAL: Nanos = Nanos::from_millis(10_000);
/// How long nothing may be at risk before the margin shrinks.
pub const CALM: Nanos = Nanos::from_millis(60_000);
/// Growth of the margin by one step.
pub const MARGIN_STEP: f64 = 1.25;
/// The most that targets are tightened: to half.
pub const MARGIN_MAX: f64 = 2.0;
/// How many times as long a device must take, or as little, that another plan is worth it.
pub const SLOWER: f64 = 1.25;

/// Requests to a device that say nothing of its speed.
const MIN_REQUESTS: u64 = 1_000;
/// Misses that are no risk, however few requests there were: 10 beyond the percentile make a tail.
const MIN_MISSES: u64 = 10;
/// So many times [`INTERVAL`] a task that is too slow for a tail in one of them is looked at.
const MAX_INTERVALS: u32 = 10;

/// What one task did since the last observation.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskObservation {
    /// Its VM.
    pub vm: VmName,
    /// The task.
    pub task: TaskName,
    /// The target's percentile.
    pub percentile: Percentile,
    /// Requests completed.
    pub requests: u64,
    /// Of these, above the target.
    pub misses: u64,
}

/// What one device of the data plane did since the last observation.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceObservation {
    /// The device.
    pub device: DeviceName,
    /// Reads and writes completed.
    pub requests: u64,
    /// How long it served them, summed over its channels.
    pub served: Nanos,
    /// How long its profile says that takes.
    pub expected: Nanos,
}

/// Where devices are seen not to be as their profiles say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Doubts {
    /// How many times as long they take.
    pub slower: BTreeMap<DeviceName, f64>,
    /// Whether a task was at risk. What iocost lets through follows from latencies of the device as it was calibrated: if that
    /// is too much by now, tighter targets do not lower it.
    pub was_at_risk: bool,
}

/// What the caller is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// Nothing.
    Keep,
    /// Plan for the present VMs with targets divided by `margin`, and apply what changes.
    Plan {
        /// How much to tighten targets, 1 to [`MARGIN_MAX`].
        margin: f64,
        /// What profiles are not to be believed.
        doubts: Doubts,
        /// Why, for the log.
        reason: String,
    },
}

/// What was seen of a task.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    requests: u64,
    misses: u64,
    /// Misses that its percentile allows of so many requests.
    allowed: f64,
    intervals: u32,
}

impl Seen {
    /// Whether there are too few requests for a tail, be it a good one or a bad one.
    fn is_too_little(&self) -> bool {
        self.misses < MIN_MISSES && self.allowed < MIN_MISSES as f64
    }
}

/// The state of the loop.
#[derive(Debug, Clone)]
pub struct Controller {
    present: BTreeSet<VmName>,
    margin: f64,
    changed: Nanos,
    calm_since: Nanos,
    seen_since: Nanos,
    /// Why the plan that could not be applied was made.
    again: Option<String>,
    /// By task, since the last change or for [`INTERVAL`], longer if that is too little.
    seen: BTreeMap<(VmName, TaskName), Seen>,
    /// For as long: requests, service and what was expected of it, s, by device.
    served: BTreeMap<DeviceName, (u64, f64, f64)>,
    doubts: Doubts,
}

impl Controller {
    /// A loop that starts at `now`, when a plan for the VMs `present` was applied.
    #[must_use]
    pub fn new(now: Nanos, present: BTreeSet<VmName>) -> Self {
        Self {
            present,
            margin: 1.0,
            changed: now,
            calm_since: now,
            seen_since: now,
            again: None,
            seen: BTreeMap::new(),
            served: BTreeMap::new(),
            doubts: Doubts::default(),
        }
    }

    /// Takes what was seen since the last call and decides. The caller acts on
    /// a [`Decision::Plan`], and says so if it [failed](Self::failed).
    pub fn step(
        &mut self,
        now: Nanos,
        present: &BTreeSet<VmName>,
        tasks: &[TaskObservation],
        devices: &[DeviceObservation],
    ) -> Decision {
        for device in devices {
            let (requests, served, expected) =
                self.served.entry(device.device.clone()).or_default();
            *requests += device.requests;
            *served += device.served.as_secs_f64();
            *expected += device.expected.as_secs_f64();
        }
        let mut speeds = Vec::new();
        if now.saturating_sub(self.seen_since) >= INTERVAL {
            speeds = self.speeds();
            self.seen_since = now;
            self.seen.retain(|_, seen| {
                seen.intervals += 1;
                seen.is_too_little() && seen.intervals < MAX_INTERVALS
            });
        }
        let mut at_risk = Vec::new();
        for task in tasks {
            let seen = self.seen.entry((task.vm.clone(), task.task.clone())).or_default();
            seen.requests += task.requests;
            seen.misses += task.misses;
            seen.allowed = seen.requests as f64 * (1.0 - task.percentile.fraction());
            let Seen { requests, misses, allowed, .. } = *seen;
            if misses >= MIN_MISSES && misses as f64 > allowed {
                at_risk.push(format!(
                    "{}/{}: {misses} of {requests} requests above the target of its p{}",
                    task.vm, task.task, task.percentile
                ));
            }
        }
        // Nor is it calm while a task misses too often that has too few requests for a tail yet.
        let is_doubtful = |seen: &Seen| seen.intervals > 0 && seen.misses as f64 > seen.allowed;
        if !at_risk.is_empty() || self.seen.values().any(is_doubtful) {
            self.calm_since = now;
        }
        let settled = now.saturating_sub(self.changed) >= INTERVAL;
        if !settled {
            return Decision::Keep;
        }
        if let Some(reason) = self.again.take() {
            self.present.clone_from(present);
            return self.plan(now, reason);
        }
        if *present != self.present {
            let reason = self.difference(present);
            self.present.clone_from(present);
            return self.plan(now, reason);
        }
        if !speeds.is_empty() {
            return self.plan(now, speeds.join("; "));
        }
        if !at_risk.is_empty() {
            if self.margin >= MARGIN_MAX {
                return Decision::Keep;
            }
            self.margin = (self.margin * MARGIN_STEP).min(MARGIN_MAX);
            self.doubts.was_at_risk = true;
            return self.plan(now, at_risk.join("; "));
        }
        if self.margin > 1.0 && now.saturating_sub(self.calm_since) >= CALM {
            self.margin = (self.margin / MARGIN_STEP).max(1.0);
            self.calm_since = now;
            return self.plan(now, format!("no task at risk for {CALM}"));
        }
        Decision::Keep
    }

    /// Ends a look at the devices' speeds. What has changed, for the log.
    fn speeds(&mut self) -> Vec<String> {
        let mut changed = Vec::new();
        for (device, (requests, served, expected)) in std::mem::take(&mut self.served) {
            let known = self.doubts.slower.get(&device).copied().unwrap_or(1.0);
            // A profile is of the device at its best: faster than that is chance.
            let now = (served / expected).max(1.0);
            let differs = now > known * SLOWER || now < known / SLOWER;
            if requests < MIN_REQUESTS || expected <= 0.0 || !differs {
                continue;
            }
            changed.push(format!("{device} takes {now:.2} times as long as its profile says"));
            if now < SLOWER {
                self.doubts.slower.remove(&device);
            } else {
                self.doubts.slower.insert(device, now);
            }
        }
        changed
    }

    /// The plan that was asked for could not be applied: it is asked for again, after [`INTERVAL`].
    pub fn failed(&mut self, reason: &str) {
        self.again = Some(reason.to_owned());
    }

    fn plan(&mut self, now: Nanos, reason: String) -> Decision {
        self.changed = now;
        self.seen_since = now;
        self.seen.clear();
        self.served.clear();
        Decision::Plan { margin: self.margin, doubts: self.doubts.clone(), reason }
    }

    fn difference(&self, present: &BTreeSet<VmName>) -> String {
        let names = |of: &BTreeSet<VmName>, without: &BTreeSet<VmName>| {
            of.difference(without).map(VmName::as_str).collect::<Vec<_>>().join(", ")
        };
        let (came, went) = (names(present, &self.present), names(&self.present, present));
        match (came.is_empty(), went.is_empty()) {
            (false, true) => format!("came: {came}"),
            (true, _) => format!("went: {went}"),
            (false, false) => format!("came: {came}; went: {went}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vms(names: &[&str]) -> BTreeSet<VmName> {
        names.iter().map(|n| VmName::new(*n).unwrap()).collect()
    }

    fn at(seconds: u64) -> Nanos {
        Nanos::from_millis(seconds * 1000)
    }

    fn task(requests: u64, misses: u64) -> TaskObservation {
        TaskObservation {
            vm: VmName::new("plc").unwrap(),
            task: TaskName::new("control").unwrap(),
            percentile: Percentile::new(99.0).unwrap(),
            requests,
            misses,
        }
    }

    fn margin(decision: &Decision) -> Option<f64> {
        match decision {
            Decision::Keep => None,
            Decision::Plan { margin, .. } => Some(*margin),
        }
    }

    #[test]
    fn a_vm_that_comes_is_planned_for_at_once() {
        let mut controller = Controller::new(at(0), vms(&["plc"]));
        assert_eq!(controller.step(at(10), &vms(&["plc"]), &[], &[]), Decision::Keep);
        let decision = controller.step(at(11), &vms(&["backup", "plc"]), &[], &[]);
        let reason = "came: backup".to_owned();
        assert_eq!(decision, Decision::Plan { margin: 1.0, doubts: Doubts::default(), reason });
        assert_eq!(controller.step(at(22), &vms(&["backup", "plc"]), &[], &[]), Decision::Keep);
    }

    #[test]
    fn changes_keep_their_distance() {
        let mut controller = Controller::new(at(0), vms(&["a"]));
        let mut changes = Vec::new();
        for second in 1..100 {
            // Somebody comes or goes every second, and a task misses all the time.
            let present = if second % 2 == 0 { vms(&["a"]) } else { vms(&["a", "b"]) };
            if controller.step(at(second), &present, &[task(100, 50)], &[]) != Decision::Keep {
                changes.push(second);
            }
        }
        assert!(changes.len() > 2);
        assert!(changes.windows(2).all(|w| w[1] - w[0] >= 10), "{changes:?}");
    }

    #[test]
    fn a_plan_that_failed_is_made_again() {
        let mut controller = Controller::new(at(0), vms(&["plc"]));
        let both = vms(&["backup", "plc"]);
        let reason = "came: backup".to_owned();
        let doubts = Doubts::default();
        let plan = Decision::Plan { margin: 1.0, doubts, reason: reason.clone() };
        assert_eq!(controller.step(at(11), &both, &[], &[]), plan);
        controller.failed(&reason);
        assert_eq!(controller.step(at(20), &both, &[], &[]), Decision::Keep);
        assert_eq!(controller.step(at(21), &both, &[], &[]), plan);
        assert_eq!(controller.step(at(40), &both, &[], &[]), Decision::Keep);
    }

    #[test]
    fn too_few_requests_are_no_risk() {
        let mut controller = Controller::new(at(0), vms(&["plc"]));
        // 9 misses of 9 may be chance; 10 of 2,000 are below 1 %.
        assert_eq!(controller.step(at(11), &vms(&["plc"]), &[task(9, 9)], &[]), Decision::Keep);
        assert_eq!(controller.step(at(12), &vms(&["plc"]), &[task(1991, 1)], &[]), Decision::Keep);
        assert_eq!(
            margin(&controller.step(at(13), &vms(&["plc"]), &[task(20, 15)], &[])),
            Some(1.25)
        );
    }

    #[test]
    fn slow_task_that_misses_is_at_risk() {
        // A task that has so many requests and misses every so many seconds.
        let first_plan = |every: u64, requests: u64, misses: u64| {
            let mut controller = Controller::new(at(0), vms(&["plc"]));
            (1..=400).find(|&second| {
                let seen = if second % every == 0 { task(requests, misses) } else { task(0, 0) };
                margin(&controller.step(at(second), &vms(&["plc"]), &[seen], &[])).is_some()
            })
        };
        // One request in two seconds that misses, and 5 a second of which 3 % do: the tenth miss tells.
        assert_eq!(first_plan(2, 1, 1), Some(20));
        assert_eq!(first_plan(7, 35, 1), Some(70));
        // What is longer ago than ten intervals says nothing of now.
        assert_eq!(first_plan(12, 1, 1), None);
        // That a tail is not seen yet is no calm: the margin does not go back and forth.
        let mut controller = Controller::new(at(0), vms(&["plc"]));
        let margins = (1..=400).filter_map(|second| {
            let seen = if second % 7 == 0 { task(35, 1) } else { task(0, 0) };
            margin(&controller.step(at(second), &vms(&["plc"]), &[seen], &[]))
        });
        let margins: Vec<f64> = margins.collect();
        assert!(margins.len() > 2 && margins.is_sorted(), "{margins:?}");
    }

    #[test]
    fn margin_grows_with_risk_and_shrinks_in_calm() {
        let mut controller = Controller::new(at(0), vms(&["plc"]));
        let mut margins = Vec::new();
        for second in 1..=320 {
            // Misses for 50 s, then none.
            let seen = if second <= 50 { task(1000, 50) } else { task(1000, 0) };
            let decision = controller.step(at(second), &vms(&["plc"]), &[seen], &[]);
            margins.extend(margin(&decision));
            if let Decision::Plan { doubts, .. } = decision {
                assert!(doubts.was_at_risk, "what was too much once is not tried again");
            }
        }
        let up = [1.25, 1.5625, 1.953_125, 2.0];
        assert_eq!(margins[..4], up);
        assert!(margins[4..].is_sorted_by(|a, b| a > b), "{margins:?}");
        assert_eq!(margins.last(), Some(&1.0));
    }

    #[test]
    fn a_device_that_slows_down_is_planned_for_as_it_is_and_as_it_was_when_that_is_over() {
        let mut controller = Controller::new(at(0), vms(&["plc"]));
        let nvme = DeviceName::new("nvme0").unwrap();
        let mut plans = Vec::new();
        for second in 1..=100 {
            // Twice as slow from 30 s to 60 s; before that, too few requests to tell.
            let (requests, times) = match second {
                ..=20 => (90, 3),
                30..60 => (500, 2),
                _ => (500, 1),
            };
            let seen = DeviceObservation {
                device: nvme.clone(),
                requests,
                served: Nanos::from_millis(100 * times),
                expected: Nanos::from_millis(100),
            };
            if let Decision::Plan { margin, doubts, reason } =
                controller.step(at(second), &vms(&["plc"]), &[], &[seen])
            {
                assert_eq!(margin, 1.0);
                plans.push((second, doubts.slower.get(&nvme).copied(), reason));
            }
        }
        let said = |times: &str| format!("nvme0 takes {times} times as long as its profile says");
        assert_eq!(plans, [(40, Some(2.0), said("2.00")), (70, None, said("1.00"))]);
    }
}
