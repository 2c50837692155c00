//! How large probes may be beside others, and which are not made again.

use std::mem;

use rtvirtio_spec::profile::Capacity;
use rtvirtio_spec::settings::Scheduler;

use super::{Depth, ProbeSetting, TRIES, Writer, alone, idles};
use crate::testbed::DeviceUnderTest;

/// Requests per second of a VM of the probes: L, M and H.
const VM_IOPS: f64 = 2_100.0;
/// With others, probes use the device up to so much of it.
const FULL_ENOUGH: f64 = 0.8;
/// How long a cap lets through at once what it lets through (kernel `blk-throttle.c`,
/// `DFL_THROTL_SLICE_HD`), s.
const BURST_PERIOD: f64 = 0.1;
/// The part of what others tolerate that a burst may take.
const WITHIN_TOLERATED: f64 = 0.6;
/// The largest cap of a probe, and the least factor on it.
pub(super) const LARGEST_CAP: f64 = 0.15;
const SMALLEST_CAP: f64 = 0.02;
/// The schedulers of the probes that a kernel may have been built without.
const OPTIONAL: [&str; 3] = ["mq-deadline", "kyber", "bfq"];

/// What a device leaves for probes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Room {
    /// The scheduler that it has, if it is to keep it.
    pub(super) kept: Option<Scheduler>,
    /// The schedulers that it cannot have, as far as that is known or has shown.
    pub(super) absent: Vec<&'static str>,
    /// VMs of a probe, at most.
    pub(super) vms: u8,
    /// Factor on a writer's cap.
    pub(super) caps: f64,
    /// Whether a writer without a cap may be there.
    pub(super) may_flood: bool,
    /// Whether iocost may be tried.
    pub(super) has_iocost: bool,
    /// How often a probe was stopped for the sake of others.
    pub(super) stopped: Vec<(ProbeSetting, u32)>,
}

impl Room {
    /// All of the device.
    pub(super) const fn whole(kept: Option<Scheduler>) -> Self {
        Self {
            kept,
            absent: Vec::new(),
            vms: 4,
            caps: 1.0,
            may_flood: true,
            has_iocost: false,
            stopped: Vec::new(),
        }
    }

    /// All of the device, under the schedulers that it can have.
    pub(super) fn of(device: &dyn DeviceUnderTest) -> Self {
        let offered = device.schedulers();
        let is_absent = |name: &&str| offered.iter().all(|offered| offered != *name);
        let absent = OPTIONAL.into_iter().filter(is_absent).collect();
        Self { absent, ..Self::whole(device.scheduler()) }
    }

    /// What others leave: as many VMs as keep the device below [`FULL_ENOUGH`], and writers whose bursts
    /// end within what others tolerate.
    pub(super) fn beside_others(device: &dyn DeviceUnderTest, capacity: &Capacity) -> Self {
        let has_iocost = device.has_iocost() && device.others().is_none();
        let whole = Self { has_iocost, ..Self::of(device) };
        let Some(others) = device.others() else { return whole };
        let free = (FULL_ENOUGH - alone::used_by(others, capacity)) * capacity.iops_4k;
        let vms = (free / VM_IOPS).floor().clamp(1.0, 4.0) as u8;
        let caps = device.tolerated().map_or(1.0, |tolerated| {
            // A burst takes its cap's part of the device for a period.
            let least_of_all = WITHIN_TOLERATED * tolerated.as_secs_f64() / BURST_PERIOD;
            (least_of_all / LARGEST_CAP).clamp(SMALLEST_CAP, 1.0)
        });
        Self { vms, caps, may_flood: false, ..whole }
    }

    /// Makes room for others if they came after it was found, and keeps what was stopped; whether they did.
    pub(super) fn give_way(&mut self, device: &dyn DeviceUnderTest, capacity: &Capacity) -> bool {
        // Writers without a cap are probed only where nobody else uses the device.
        if !self.may_flood || device.others().is_none() {
            return false;
        }
        let (stopped, absent) = (mem::take(&mut self.stopped), mem::take(&mut self.absent));
        *self = Self { stopped, absent, ..Self::beside_others(device, capacity) };
        true
    }

    /// Leaves out a scheduler that the kernel refused; false if probes cannot do without.
    pub(super) fn lack(&mut self, scheduler: Scheduler) -> bool {
        let refused = OPTIONAL.into_iter().find(|name| *name == scheduler.name());
        self.absent.extend(refused);
        refused.is_some()
    }

    /// What it leaves out, for people; `None`: nothing.
    pub(super) fn describe(&self, depth: Depth) -> Option<String> {
        let (has_iocost, absent) = (self.has_iocost, self.absent.clone());
        if *self == (Self { has_iocost, absent, ..Self::whole(self.kept) }) {
            return None;
        }
        let Self { vms, caps, .. } = self;
        let mut text = format!("beside others: up to {vms} VMs a probe");
        if *caps < 1.0 {
            text +=
                &format!(", writers up to {:.1} % of the throughput", caps * LARGEST_CAP * 100.0);
        }
        if depth == Depth::Full {
            text += ", none without a cap: its regime has no bound";
        }
        Some(text)
    }

    /// Which schedulers it leaves out, for people; `None`: none.
    pub(super) fn describe_absent(&self) -> Option<String> {
        let is_any = self.kept.is_none() && !self.absent.is_empty();
        is_any.then(|| format!("left out, not offered by the device: {}", self.absent.join(", ")))
    }

    /// A probe as it is made here; `None`: not at all.
    pub(super) fn fit(&self, (scheduler, vms, writer): ProbeSetting) -> Option<ProbeSetting> {
        let scheduler = match self.kept {
            // What only another one does is not probed.
            Some(kept) if idles(scheduler) && !idles(kept) => return None,
            Some(_) if matches!(scheduler, Scheduler::IoCost(_)) => return None,
            Some(kept) => kept,
            None if self.absent.contains(&scheduler.name()) => return None,
            None => scheduler,
        };
        let writer = match writer {
            Writer::Unlimited if !self.may_flood => return None,
            Writer::Capped(part) => Writer::Capped(part * self.caps),
            other => other,
        };
        let setting = (scheduler, vms.min(self.vms), writer);
        (self.stops(&setting) < TRIES).then_some(setting)
    }

    /// How often a probe was stopped.
    pub(super) fn stops(&self, setting: &ProbeSetting) -> u32 {
        let of = self.stopped.iter().find(|(stopped, _)| stopped == setting);
        of.map_or(0, |(_, times)| *times)
    }

    /// Notes that a probe was stopped; how often by now.
    pub(super) fn stop(&mut self, setting: ProbeSetting) -> u32 {
        if let Some((_, times)) = self.stopped.iter_mut().find(|(stopped, _)| *stopped == setting) {
            *times += 1;
            return *times;
        }
        self.stopped.push((setting, 1));
        1
    }
}
