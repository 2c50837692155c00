//! What a plan sets on the data plane, and what was found there.
//!
//! A knob's text is the JSON that the control API takes, in the form in which it gives it back: what
//! is read back compares equal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rtvirtio_units::{DiskName, Name};
use serde::{Deserialize, Serialize};

use crate::control::{ScheduleCurve, Snapshot};
use crate::serve::wire;
use crate::settings::{Knob, Knobs};

/// What a plan sets on the data plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPlane {
    /// Its control socket.
    pub control: PathBuf,
    /// The schedules of physical devices, which have the names of the specification's devices.
    pub schedules: BTreeMap<Name, ScheduleCurve>,
    /// What each of its devices has there: the disks of VMs.
    pub disks: BTreeMap<DiskName, wire::Qos>,
}

impl DataPlane {
    /// Every knob that these settings define.
    #[must_use]
    pub fn knobs(&self) -> Knobs {
        let schedules = self.schedules.iter().map(|(schedule, curve)| {
            (Knob::Schedule { schedule: schedule.clone() }, curve_text(curve))
        });
        let disks =
            self.disks.iter().map(|(disk, qos)| (Knob::Qos { disk: disk.clone() }, qos_text(qos)));
        schedules.chain(disks).collect()
    }
}

/// The knobs that a data plane shows of these schedules and devices; what is not there, or has
/// nothing set, has no entry.
#[must_use]
pub fn found(snapshot: &Snapshot, schedules: &BTreeSet<Name>, disks: &BTreeSet<DiskName>) -> Knobs {
    let schedules = snapshot.schedules.iter().filter(|s| schedules.contains(&s.name)).map(|s| {
        let curve = ScheduleCurve {
            channels: s.channels,
            request_ns: s.request_ns.get(),
            kib_ns: s.kib_ns.get(),
            flush_ns: Some(s.flush_ns.get()),
        };
        (Knob::Schedule { schedule: s.name.clone() }, curve_text(&curve))
    });
    let devices = snapshot.devices.iter().filter(|device| disks.contains(&device.name));
    let disks = devices.filter_map(|device| {
        let text = qos_text(&device.qos.as_ref()?.settings);
        Some((Knob::Qos { disk: device.name.clone() }, text))
    });
    schedules.chain(disks).collect()
}

fn curve_text(curve: &ScheduleCurve) -> String {
    // Numbers alone are JSON.
    serde_json::to_string(curve).unwrap_or_default()
}

fn qos_text(qos: &wire::Qos) -> String {
    serde_json::to_string(qos).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{DeviceUsage, ScheduleState, StallsState};
    use rtvirtio_units::Nanos;

    #[test]
    fn what_is_set_and_found_again_compares_equal() {
        let schedule = Name::new("data").unwrap();
        let disk = DiskName::new("root").unwrap();
        let curve = ScheduleCurve {
            channels: 4,
            request_ns: 212_500,
            kib_ns: 9_375,
            flush_ns: Some(250_000),
        };
        let qos = r#"{"schedule":"data","weight":100,"deadline_us":10000,"iops":2100,"burst":6}"#;
        let set = DataPlane {
            control: "/run/x.sock".into(),
            schedules: [(schedule.clone(), curve)].into(),
            disks: [(disk.clone(), serde_json::from_str(qos).unwrap())].into(),
        };
        let state = ScheduleState {
            name: schedule.clone(),
            channels: 4,
            request_ns: Nanos::new(212_500),
            kib_ns: Nanos::new(9_375),
            flush_ns: Nanos::new(250_000),
            waiting: 1,
            running: 2,
            background: 1,
            background_bound: 5,
            withheld_ns: Nanos::ZERO,
            usage: DeviceUsage::default(),
            stalls: StallsState::default(),
        };
        let snapshot = Snapshot { schedules: vec![state], ..Snapshot::default() };
        let seen = found(&snapshot, &[schedule.clone()].into(), &BTreeSet::new());
        let knob = Knob::Schedule { schedule };
        assert_eq!(seen[&knob], set.knobs()[&knob]);
        assert_eq!(set.knobs()[&Knob::Qos { disk }], qos);
        assert!(found(&snapshot, &BTreeSet::new(), &BTreeSet::new()).is_empty());
    }
}
