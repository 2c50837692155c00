//! What is written down of a host before it is changed: the journal's records.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rtvirtio_spec::settings::{Knob, Limit};
use rtvirtio_units::{DeviceName, IoThreadName, Nanos, VmName};
use serde::{Deserialize, Serialize};

use crate::qemu::Address;
use crate::restoration::QUEUE_FILES;
use crate::sysfs::DeviceNumber;
use crate::systemd::bus::Properties;

/// A device's queue as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueRecord {
    /// The selected scheduler.
    pub(crate) scheduler: String,
    /// File under `queue/` → text: all of `iosched/`, and what a change of
    /// scheduler resets beside it.
    #[serde(deserialize_with = "checked::queue_files")]
    pub(crate) parameters: BTreeMap<String, String>,
}

/// Whether this can be the name of a block device, such as `vda` or `dm-0`: it becomes part of a path.
pub(crate) fn is_node(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// Names and paths of a journal, which a restoration writes to.
mod checked {
    use std::collections::BTreeMap;
    use std::path::{Component, PathBuf};

    use serde::de::{Deserialize, Deserializer, Error};

    use super::{QUEUE_FILES, is_node};

    fn is_word(name: &str) -> bool {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    }

    /// Files of a queue: those that a change of scheduler resets, and the scheduler's own.
    pub(super) fn queue_files<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<BTreeMap<String, String>, D::Error> {
        let files = BTreeMap::<String, String>::deserialize(from)?;
        let is_file = |name: &str| {
            QUEUE_FILES.contains(&name) || name.strip_prefix("iosched/").is_some_and(is_word)
        };
        match files.keys().find(|name| !is_file(name)) {
            Some(name) => Err(D::Error::custom(format!("{name:?} is no parameter of a queue"))),
            None => Ok(files),
        }
    }

    /// A path that stays below whatever it is joined to.
    pub(super) fn below<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        let path = PathBuf::deserialize(from)?;
        if path.components().all(|part| matches!(part, Component::Normal(_))) {
            return Ok(path);
        }
        Err(D::Error::custom(format!("{:?} does not lie below a mount", path.display())))
    }

    /// By nodes of block devices, such as `vda`.
    pub(super) fn nodes<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
        from: D,
    ) -> Result<BTreeMap<String, T>, D::Error> {
        let nodes = BTreeMap::<String, T>::deserialize(from)?;
        match nodes.keys().find(|node| !is_node(node)) {
            Some(node) => Err(D::Error::custom(format!("{node:?} is no block device"))),
            None => Ok(nodes),
        }
    }
}

/// A device that was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceRecord {
    pub(crate) name: DeviceName,
    /// 512-byte sectors.
    pub(crate) size_sectors: u64,
    pub(crate) diskseq: Option<u64>,
    /// `None` if only cgroup knobs were changed.
    pub(crate) queue: Option<QueueRecord>,
    /// `None` if iocost was left as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cost: Option<CostRecord>,
}

/// iocost on a device as it was, each as a knob's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CostRecord {
    pub(crate) model: String,
    pub(crate) qos: String,
}

impl DeviceRecord {
    /// Whether its scheduler was set, or something of it.
    pub(crate) const fn is_set(&self) -> bool {
        self.queue.is_some() || self.cost.is_some()
    }

    /// Whether it is about the device that has this [`crate::device::generation`]. One that grew
    /// keeps its `diskseq` (kernel `set_capacity_and_notify()`): the size counts without one.
    pub(crate) fn is_about(&self, (size_sectors, diskseq): (u64, Option<u64>)) -> bool {
        match (self.diskseq, diskseq) {
            (Some(recorded), Some(found)) => recorded == found,
            _ => self.size_sectors == size_sectors,
        }
    }
}

/// Which of a cgroup's knobs on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GroupKnob {
    Weight,
    CostWeight,
    Limit(Limit),
}

impl GroupKnob {
    /// Whether `knob` is this one of `vm` on `device`.
    pub(crate) fn is_knob(self, knob: &Knob, vm: &VmName, device: &DeviceName) -> bool {
        let kind = match knob {
            Knob::Weight { .. } => Self::Weight,
            Knob::CostWeight { .. } => Self::CostWeight,
            Knob::Limit { limit, .. } => Self::Limit(*limit),
            _ => return false,
        };
        kind == self && knob.vm() == Some(vm) && knob.device() == Some(device)
    }
}

/// What a systemd unit's properties said of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UnitRecord {
    pub(crate) unit: String,
    /// Below the io controller's mount.
    #[serde(deserialize_with = "checked::below")]
    pub(crate) cgroup: PathBuf,
    /// The cgroup's inode.
    pub(crate) id: u64,
    pub(crate) device: DeviceNumber,
    pub(crate) properties: Properties,
    /// Its cgroup's weight file ([`crate::cgroup::Cgroup::weights`]), of which systemd's writes
    /// drop lines that are nobody's knob here.
    pub(crate) weights: BTreeMap<String, String>,
}

/// A cgroup's knob on one device as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupRecord {
    /// Below the io controller's mount.
    #[serde(deserialize_with = "checked::below")]
    pub(crate) cgroup: PathBuf,
    /// The cgroup's inode: another cgroup of the same path is not restored.
    pub(crate) id: u64,
    pub(crate) device: DeviceNumber,
    pub(crate) knob: GroupKnob,
    /// `None`: no weight line, no limit.
    pub(crate) old: Option<String>,
    /// The knob is not rtvirtio's: a change of scheduler dropped it. It is put
    /// back only where nobody has set it since.
    pub(crate) only_if_absent: bool,
}

impl GroupRecord {
    fn same_knob(&self, other: &Self) -> bool {
        let key = |r: &Self| (r.id, r.device, r.knob);
        key(self) == key(other) && self.cgroup == other.cgroup
    }
}

/// A disk within a guest as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuestDiskRecord {
    /// The guest's kernel's, where it tells.
    pub(crate) diskseq: Option<String>,
    pub(crate) queue: QueueRecord,
}

/// A VM whose own knobs were changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuestRecord {
    pub(crate) vm: VmName,
    /// Its QEMU's process, and when that started, in ticks since boot (`/proc/PID/stat`).
    pub(crate) pid: u32,
    pub(crate) started: u64,
    pub(crate) monitor: Address,
    /// `None` if nothing within its guest was changed, as `boot_id`.
    pub(crate) agent: Option<Address>,
    /// The guest's own `/proc/sys/kernel/random/boot_id`.
    pub(crate) boot_id: Option<String>,
    /// By name within the guest, such as `vda`.
    #[serde(deserialize_with = "checked::nodes")]
    pub(crate) disks: BTreeMap<String, GuestDiskRecord>,
    /// The longest that each IOThread polled, ns.
    pub(crate) poll_max: BTreeMap<IoThreadName, Nanos>,
}

impl GuestRecord {
    /// Adds what `newer` knows of the same VM and is not known yet.
    fn add(&mut self, newer: Self) {
        if (self.pid, self.started) != (newer.pid, newer.started) {
            // Another QEMU: the old one's state died with it, but for that of a guest that was saved and restored.
            if newer.boot_id.is_none() || self.boot_id != newer.boot_id {
                *self = newer;
                return;
            }
            self.poll_max.clear();
            (self.pid, self.started) = (newer.pid, newer.started);
            self.monitor = newer.monitor;
        }
        for (iothread, poll_max) in newer.poll_max {
            self.poll_max.entry(iothread).or_insert(poll_max);
        }
        if newer.boot_id.is_none() {
            return;
        }
        // So did the state of a guest that was booted again.
        if self.boot_id != newer.boot_id {
            self.disks.clear();
        }
        (self.agent, self.boot_id) = (newer.agent, newer.boot_id);
        for (node, disk) in newer.disks {
            match self.disks.get(&node) {
                Some(older) if older.diskseq == disk.diskseq => {}
                _ => drop(self.disks.insert(node, disk)),
            }
        }
    }
}

/// A data plane whose knobs were changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataPlaneRecord {
    pub(crate) control: PathBuf,
    /// When it started, since 1970.
    pub(crate) started: Nanos,
    /// Each knob's text; `None`: it was not there.
    pub(crate) old: Vec<(Knob, Option<String>)>,
}

impl DataPlaneRecord {
    /// Adds what `newer` knows of the same socket and is not known yet.
    fn add(&mut self, newer: Self) {
        if self.started != newer.started {
            // Another data plane: what the old one had set ended with it.
            *self = newer;
            return;
        }
        for (knob, old) in newer.old {
            if self.old.iter().all(|(known, _)| *known != knob) {
                self.old.push((knob, old));
            }
        }
    }
}

/// Old values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub(crate) devices: BTreeMap<DeviceNumber, DeviceRecord>,
    pub(crate) groups: Vec<GroupRecord>,
    pub(crate) units: Vec<UnitRecord>,
    /// One for each VM at most.
    pub(crate) guests: Vec<GuestRecord>,
    /// One for each control socket at most.
    pub(crate) data_planes: Vec<DataPlaneRecord>,
}

impl Record {
    /// The devices whose scheduler was set, or something of it.
    pub(crate) fn set_devices(&self) -> impl Iterator<Item = (DeviceNumber, &DeviceName)> {
        let set = self.devices.iter().filter(|(_, device)| device.is_set());
        set.map(|(number, device)| (*number, &device.name))
    }

    /// Adds a cgroup's knob unless an older value is known.
    pub(crate) fn add_group(&mut self, newer: GroupRecord) {
        match self.groups.iter_mut().find(|r| r.same_knob(&newer)) {
            Some(older) => older.only_if_absent &= newer.only_if_absent,
            None => self.groups.push(newer),
        }
    }

    /// Both records; where both know a value, the one of `self`, which is older.
    pub(crate) fn merged(mut self, newer: Self) -> Self {
        for (number, record) in newer.devices {
            match self.devices.get_mut(&number) {
                // Another device under the same number: the old one's state died with it, and so did
                // what cgroups and units had for it, which would win over the new one's.
                Some(older) if !older.is_about((record.size_sectors, record.diskseq)) => {
                    *older = record;
                    self.groups.retain(|group| group.device != number);
                    self.units.retain(|unit| unit.device != number);
                }
                Some(older) => {
                    older.queue = older.queue.take().or(record.queue);
                    older.cost = older.cost.take().or(record.cost);
                }
                None => {
                    self.devices.insert(number, record);
                }
            }
        }
        newer.groups.into_iter().for_each(|g| self.add_group(g));
        for unit in newer.units {
            let same = |u: &UnitRecord| (u.id, u.device) == (unit.id, unit.device);
            match self.units.iter_mut().find(|u| same(u)) {
                // Not rtvirtio's to put back as they once were.
                Some(older) => older.weights = unit.weights,
                None => self.units.push(unit),
            }
        }
        for plane in newer.data_planes {
            match self.data_planes.iter_mut().find(|p| p.control == plane.control) {
                Some(older) => older.add(plane),
                None => self.data_planes.push(plane),
            }
        }
        for guest in newer.guests {
            match self.guests.iter_mut().find(|g| g.vm == guest.vm) {
                Some(older) => older.add(guest),
                None => self.guests.push(guest),
            }
        }
        self
    }
}
