//! A VM's own knobs: the schedulers within its guest, and the polling of its QEMU's IOThreads.
//!
//! A [`FoundGuest`] is what a running VM shows of them, [`Guests`] is what a plan
//! sets. What a plan leaves alone is in neither its settings nor its knobs.

use std::collections::BTreeMap;

use rtvirtio_units::{DiskName, IoThreadName, Nanos, VmName};
use serde::{Deserialize, Serialize};

use crate::settings::{BfqParameter, Knob, Knobs};

/// bfq's parameters that are set within a guest.
pub const GUEST_PARAMETERS: [BfqParameter; 2] =
    [BfqParameter::SliceIdleUs, BfqParameter::LowLatency];

/// What a running VM shows of its own knobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundGuest {
    /// Its disks, as its guest's agent shows them.
    pub disks: BTreeMap<DiskName, FoundQueue>,
    /// The longest that each IOThread polls.
    pub iothreads: BTreeMap<IoThreadName, Nanos>,
    /// What could not be seen, and why, for people.
    pub unseen: Vec<String>,
}

/// A disk's queue within a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundQueue {
    /// The schedulers that the guest's kernel offers.
    pub offered: Vec<String>,
    /// The selected one.
    pub selected: String,
    /// Of [`GUEST_PARAMETERS`], those there are: none unless bfq is selected.
    pub bfq: BTreeMap<BfqParameter, String>,
}

impl FoundGuest {
    /// All of it as knobs of `vm`.
    #[must_use]
    pub fn knobs(&self, vm: &VmName) -> Knobs {
        let mut knobs = Knobs::new();
        for (disk, queue) in &self.disks {
            let (vm, disk) = (vm.clone(), disk.clone());
            knobs.extend(queue.bfq.iter().map(|(&parameter, text)| {
                let (vm, disk) = (vm.clone(), disk.clone());
                (Knob::GuestBfq { vm, disk, parameter }, text.clone())
            }));
            knobs.insert(Knob::GuestScheduler { vm, disk }, queue.selected.clone());
        }
        for (iothread, poll_max) in &self.iothreads {
            let knob = Knob::PollMax { vm: vm.clone(), iothread: iothread.clone() };
            knobs.insert(knob, poll_max.get().to_string());
        }
        knobs
    }
}

/// The scheduler that a plan sets within a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "kebab-case", deny_unknown_fields)]
pub enum GuestScheduler {
    /// First come first served.
    None,
    /// Budget fair queueing.
    Bfq {
        /// `slice_idle_us`.
        slice_idle_us: u32,
        /// `low_latency`.
        low_latency: bool,
    },
}

/// What a plan sets of one VM's own knobs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestSettings {
    /// The scheduler of each disk within the guest.
    pub disks: BTreeMap<DiskName, GuestScheduler>,
    /// The longest that each IOThread polls, ns; 0: it does not poll.
    pub poll_max: BTreeMap<IoThreadName, Nanos>,
}

/// What a plan sets of each VM's own knobs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Guests(pub BTreeMap<VmName, GuestSettings>);

impl Guests {
    /// Every knob that these settings define.
    #[must_use]
    pub fn knobs(&self) -> Knobs {
        let mut knobs = Knobs::new();
        for (vm, settings) in &self.0 {
            for (disk, scheduler) in &settings.disks {
                let knob = |parameter| {
                    let (vm, disk) = (vm.clone(), disk.clone());
                    Knob::GuestBfq { vm, disk, parameter }
                };
                let name = match *scheduler {
                    GuestScheduler::None => "none",
                    GuestScheduler::Bfq { slice_idle_us, low_latency } => {
                        knobs.insert(knob(BfqParameter::SliceIdleUs), slice_idle_us.to_string());
                        let low_latency = u32::from(low_latency).to_string();
                        knobs.insert(knob(BfqParameter::LowLatency), low_latency);
                        "bfq"
                    }
                };
                let knob = Knob::GuestScheduler { vm: vm.clone(), disk: disk.clone() };
                knobs.insert(knob, name.to_owned());
            }
            for (iothread, poll_max) in &settings.poll_max {
                let knob = Knob::PollMax { vm: vm.clone(), iothread: iothread.clone() };
                knobs.insert(knob, poll_max.get().to_string());
            }
        }
        knobs
    }

    /// Whether these settings are about `knob`.
    #[must_use]
    pub fn cover(&self, knob: &Knob) -> bool {
        let settings = knob.vm().and_then(|vm| self.0.get(vm));
        settings.is_some_and(|s| match knob {
            Knob::GuestScheduler { disk, .. } | Knob::GuestBfq { disk, .. } => {
                s.disks.contains_key(disk)
            }
            Knob::PollMax { iothread, .. } => s.poll_max.contains_key(iothread),
            _ => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::diff;

    fn vm() -> VmName {
        VmName::new("plc").unwrap()
    }

    fn disk() -> DiskName {
        DiskName::new("root").unwrap()
    }

    fn settings(scheduler: GuestScheduler) -> Guests {
        let poll_max = [(IoThreadName::new("io0").unwrap(), Nanos::ZERO)].into();
        let settings = GuestSettings { disks: [(disk(), scheduler)].into(), poll_max };
        Guests([(vm(), settings)].into())
    }

    #[test]
    fn guests_knobs_come_scheduler_first_and_before_the_hosts() {
        let bfq = settings(GuestScheduler::Bfq { slice_idle_us: 0, low_latency: false });
        let mut knobs = bfq.knobs();
        let device = rtvirtio_units::DeviceName::new("data").unwrap();
        knobs.insert(Knob::Scheduler { device }, "none".to_owned());
        let shown: Vec<String> = knobs.iter().map(|(k, v)| format!("{k} = {v}")).collect();
        assert_eq!(
            shown,
            [
                "plc/root: guest scheduler = bfq",
                "plc/root: guest bfq slice_idle_us = 0",
                "plc/root: guest bfq low_latency = 0",
                "plc: IOThread io0: poll-max-ns = 0",
                "data: scheduler = none",
            ]
        );
    }

    #[test]
    fn diff_after_a_switch_within_a_guest_lists_every_parameter() {
        let wanted = settings(GuestScheduler::Bfq { slice_idle_us: 0, low_latency: false }).knobs();
        let mut current = wanted.clone();
        assert!(diff(&current, &wanted).is_empty());
        let knob = Knob::GuestScheduler { vm: vm(), disk: disk() };
        current.insert(knob.clone(), "none".to_owned());
        let changes = diff(&current, &wanted);
        assert_eq!((changes.len(), &changes[0].knob), (3, &knob));
    }

    #[test]
    fn found_knobs_are_covered_by_settings_about_them_only() {
        let found = FoundGuest {
            disks: [(
                disk(),
                FoundQueue {
                    offered: vec!["none".to_owned(), "bfq".to_owned()],
                    selected: "bfq".to_owned(),
                    bfq: [(BfqParameter::SliceIdleUs, "8000".to_owned())].into(),
                },
            )]
            .into(),
            iothreads: ["io0", "io1"]
                .map(|id| (IoThreadName::new(id).unwrap(), Nanos::new(32_768)))
                .into(),
            unseen: Vec::new(),
        };
        let settings = settings(GuestScheduler::None);
        let knobs = found.knobs(&vm());
        let left: Vec<String> =
            knobs.keys().filter(|k| !settings.cover(k)).map(Knob::to_string).collect();
        assert_eq!((knobs.len(), left), (4, vec!["plc: IOThread io1: poll-max-ns".to_owned()]));
        assert!(found.knobs(&VmName::new("b").unwrap()).keys().all(|k| !settings.cover(k)));
    }
}
