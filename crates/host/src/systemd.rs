//! Units of systemd: their I/O properties, set over the system bus.
//!
//! A VM's cgroup is often a unit of systemd's (`machine.slice/machine-….scope`).
//! Whenever systemd realises a unit (`daemon-reload`, `set-property`), it writes
//! the default of `io.bfq.weight`, at which the kernel drops every device's
//! line, then for each device that the unit's properties name its weight, and
//! all four limits of `io.max` at once (`cgroup_context_apply()` in systemd's
//! `src/core/cgroup.c`). What is written past systemd into such a cgroup is lost,
//! so there the unit's runtime properties are set.
//!
//! - *Weight*: `IODeviceWeight` w (1 to 10000) becomes the bfq weight w up to
//!   100, and 100 + (w − 100) / 11 cut to a whole number above (`BFQ_WEIGHT()`
//!   in `src/basic/cgroup-util.h`). [`io_weight`] is the inverse: every bfq
//!   weight is reached exactly. systemd before 251 leaves devices' bfq weights
//!   alone; then the file is written afterwards.
//! - *Limits*: `IO{Read,Write}{Bandwidth,IOPS}Max`; [`NO_LIMIT`] is none.
//! - *Devices* are named `/dev/block/MAJOR:MINOR`, which systemd parses without a
//!   node. One that lies on others (device mapper) it replaces by the disk
//!   below, so knobs of such a device are written to the files. Whoever else wrote
//!   the properties may have named a partition, or any file: systemd finds the disk
//!   that it lies on (`lookup_block_device()`), and so is it found here.
//!
//! Only on cgroup v2: on v1 systemd has no bfq weight of a device. Every look at
//! the bus has a time limit, connecting included.
//!
//! The order of things: [`Host::units`] finds the units; `apply` journals what their
//! properties say of each device; [`Host::set_planned`] sets one unit in one call
//! to what is planned and, for the VM's other knobs, to what the kernel shows,
//! so that nothing else moves; [`Host::restore_units`] puts the entries back. After each call
//! [`Host::keep_weights`] puts back what systemd's write of the default dropped; the journal has
//! the whole file, should the process die in between.
//!
//! Properties: `every_bfq_weight_is_reached_exactly`, `device_replaced_leaves_others_alone`,
//! `entry_of_a_file_is_about_the_disk_that_it_lies_on`,
//! `units_are_asked_about_for_knobs_of_the_host_only`,
//! `weights_that_systemd_drops_are_kept`, `weights_are_kept_when_the_bus_fails`,
//! `rollback_puts_back_weights_lost_in_between`, `rollback_leaves_newer_weights_alone`,
//! `silent_systemd_is_asked_once`;
//! on a real systemd: `crates/rtvirtio/tests/it/systemd.rs`.

pub(crate) mod bus;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rtvirtio_spec::settings::{Change, Knob, Limit};
use rtvirtio_units::{DeviceName, VmName};

use crate::cgroup::{Cgroup, CgroupVersion, Write};
use crate::device::{Disk, directory};
use crate::knobs::{MAX, Schedulers, has_bfq};
use crate::record::{GroupKnob, Record, UnitRecord};
use crate::restoration::{Restoration, Skipped};
use crate::storage::Stack;
use crate::sysfs::{DeviceNumber, Sysfs};
use crate::topology::{Resolved, VmGroup};
use crate::{Host, HostError, Step};

pub(crate) use bus::{Properties, Unit};

/// There if and only if systemd is the system's manager (sd_booted(3)).
const RUNNING: &str = "/run/systemd/system";
/// Names a device by its number.
pub(crate) const BY_NUMBER: &str = "/dev/block/";
/// The line of a weight file that holds for devices without one.
const DEFAULT: &str = "default";
/// A limit's property for no limit (`CGROUP_LIMIT_MAX`).
const NO_LIMIT: u64 = u64::MAX;
/// Each knob's property.
pub(crate) const PROPERTIES: [(GroupKnob, &str); 5] = [
    (GroupKnob::Weight, "IODeviceWeight"),
    (GroupKnob::Limit(Limit::ReadBps), "IOReadBandwidthMax"),
    (GroupKnob::Limit(Limit::WriteBps), "IOWriteBandwidthMax"),
    (GroupKnob::Limit(Limit::ReadIops), "IOReadIOPSMax"),
    (GroupKnob::Limit(Limit::WriteIops), "IOWriteIOPSMax"),
];

/// The `IODeviceWeight` that systemd turns into the bfq weight `bfq`.
const fn io_weight(bfq: u64) -> u64 {
    if bfq <= 100 { bfq } else { 100 + (bfq - 100) * 11 }
}

/// A knob's text as its property's value.
fn property_value(knob: GroupKnob, text: &str) -> Option<u64> {
    match knob {
        GroupKnob::Weight => text.parse().ok().map(io_weight),
        // systemd's own io.weight is one with the bfq weight.
        GroupKnob::CostWeight => None,
        GroupKnob::Limit(_) if text == MAX => Some(NO_LIMIT),
        GroupKnob::Limit(_) => text.parse().ok(),
    }
}

/// Whether systemd applies properties of this device to it, not to one below.
fn takes(sysfs: &dyn Sysfs, device: DeviceNumber) -> bool {
    sysfs.list(&directory(device).join("slaves")).unwrap_or_default().is_empty()
}

/// Whether systemd applies what is said of `path` to `device`, a disk. A file or directory stands for the disk that its
/// filesystem lies on, and a partition or a device that lies on others for the one disk below.
fn is_about(sysfs: &dyn Sysfs, path: &str, device: DeviceNumber) -> bool {
    // A node may be gone; a number never is.
    if let Some(number) = path.strip_prefix(BY_NUMBER).and_then(|n| n.parse::<DeviceNumber>().ok())
    {
        return number == device || Stack::disk_below(sysfs, number) == Some(device);
    }
    let path = Path::new(path);
    path.is_absolute()
        && Stack::find(sysfs, path).is_ok_and(|stack| stack.only_disk() == Some(device))
}

/// Replaces the entries about `device` of each property that `new` names.
fn replace(sysfs: &dyn Sysfs, properties: &mut Properties, device: DeviceNumber, new: &Properties) {
    for (property, entries) in new {
        let list = properties.entry(property.clone()).or_default();
        list.retain(|(path, _)| !is_about(sysfs, path, device));
        list.extend(entries.iter().cloned());
    }
}

/// The units that hold VMs, by cgroup below the mount.
#[derive(Debug, Default)]
pub(crate) struct Units(BTreeMap<PathBuf, Unit>);

impl Units {
    /// Whether systemd is to set `knob`.
    pub(crate) fn set(&self, sysfs: &dyn Sysfs, resolved: &Resolved, knob: &Knob) -> bool {
        resolved.of(knob).is_ok_and(|(disk, group)| {
            group.is_some_and(|g| self.0.contains_key(&g.path)) && takes(sysfs, disk.number)
        })
    }

    /// Each unit with its VMs' knobs: device, disk, VM.
    pub(crate) fn parts<'a>(
        &'a self,
        sysfs: &dyn Sysfs,
        resolved: &'a Resolved,
    ) -> Vec<(&'a Unit, Vec<Part<'a>>)> {
        let of = |(path, unit): (&PathBuf, &'a Unit)| {
            let part = |(vm, device): &'a (VmName, DeviceName)| {
                let group = resolved.vms.get(vm).filter(|g| g.path == *path)?;
                let disk = resolved.devices.get(device)?;
                takes(sysfs, disk.number).then_some(Part { vm, device, disk, group })
            };
            (unit, resolved.pairs.iter().filter_map(part).collect())
        };
        self.0.iter().map(of).collect()
    }
}

/// One VM on one device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) vm: &'a VmName,
    pub(crate) device: &'a DeviceName,
    pub(crate) disk: &'a Disk,
    pub(crate) group: &'a VmGroup,
}

impl Part<'_> {
    /// The unit's entries about this device, each property's.
    pub(crate) fn entries(&self, sysfs: &dyn Sysfs, unit: &Unit) -> Properties {
        let mut properties = unit.properties.clone();
        for list in properties.values_mut() {
            list.retain(|(path, _)| is_about(sysfs, path, self.disk.number));
        }
        properties
    }

    /// The entries that make the cgroup show `changes`, and else what it shows already.
    fn planned(
        &self,
        sysfs: &dyn Sysfs,
        unit: &Unit,
        changes: &[Change],
    ) -> Result<Properties, HostError> {
        // One device under two names would have two entries, and which one wins is systemd's.
        let entries = self.entries(sysfs, unit);
        let path = entries.values().flatten().map(|(path, _)| path.clone()).next();
        let path = path.unwrap_or_else(|| format!("{BY_NUMBER}{}", self.disk.number));
        let is_bfq = Schedulers::read(sysfs, self.disk)?.is_bfq();
        let mut properties = Properties::new();
        for (kind, property) in PROPERTIES {
            let change = changes.iter().find(|c| kind.is_knob(&c.knob, self.vm, self.device));
            let text = match (change, kind) {
                (Some(change), _) => Some(change.new.clone()),
                (None, GroupKnob::Weight) if is_bfq => {
                    self.group.cgroup.weight_line(sysfs, self.disk.number)?
                }
                (None, GroupKnob::Weight | GroupKnob::CostWeight) => None,
                (None, GroupKnob::Limit(limit)) => {
                    let limit = self.group.cgroup.limit(sysfs, self.disk.number, limit)?;
                    Some(limit.unwrap_or_else(|| MAX.to_owned()))
                }
            };
            if let Some(value) = text.and_then(|t| property_value(kind, &t)) {
                properties.insert(property.to_owned(), vec![(path.clone(), value)]);
            }
        }
        Ok(properties)
    }
}

impl Host {
    /// The units of systemd that hold VMs with changes.
    pub(crate) fn units(
        &self,
        resolved: &Resolved,
        changes: &[Change],
    ) -> Result<Units, HostError> {
        let is_v2 = matches!(resolved.version, Some(CgroupVersion::V2 { .. }));
        if !is_v2 || !self.sysfs.exists(Path::new(RUNNING)) {
            return Ok(Units::default());
        }
        // A VM's own knobs are none of its unit's.
        let of_host = changes.iter().filter(|c| c.knob.device().is_some());
        let vms: BTreeSet<&VmName> = of_host.filter_map(|c| c.knob.vm()).collect();
        let groups = vms.into_iter().filter_map(|vm| resolved.vms.get(vm));
        bus::units(&self.bus, groups.map(|g| g.path.clone())).map(Units)
    }

    /// Sets one unit's properties to the changes about its VMs, in one call.
    pub(crate) fn set_planned(
        &self,
        unit: &Unit,
        parts: &[Part<'_>],
        changes: &[Change],
    ) -> Result<(), HostError> {
        let Some(first) = parts.first() else {
            return Ok(());
        };
        let mut properties = unit.properties.clone();
        for part in parts {
            let planned = part.planned(&*self.sysfs, unit, changes)?;
            replace(&*self.sysfs, &mut properties, part.disk.number, &planned);
        }
        let cgroup = &first.group.cgroup;
        let before = cgroup.weights(&*self.sysfs);
        let set = self.set_properties(cgroup, &unit.name, &properties);
        if matches!(set, Err(HostError::Interrupted { .. })) {
            return set;
        }
        // systemd may have failed half way.
        match self.keep_weights(cgroup, &before) {
            Err(interrupted @ HostError::Interrupted { .. }) => Err(interrupted),
            kept => set.and(kept),
        }
    }

    /// Notes what the weight files of units' cgroups say, for a rollback that begins: what others
    /// wrote since an apply ended is theirs.
    pub(crate) fn note_weights(&self, record: &mut Record) {
        let Ok(version) = CgroupVersion::find(&*self.sysfs) else {
            return;
        };
        for unit in &mut record.units {
            if let Ok(cgroup) = version.cgroup(&unit.cgroup)
                && self.is_of(&cgroup, unit)
            {
                unit.weights = cgroup.weights(&*self.sysfs);
            }
        }
    }

    fn is_of(&self, cgroup: &Cgroup, record: &UnitRecord) -> bool {
        self.sysfs.inode(&cgroup.directory).is_ok_and(|id| id == record.id)
    }

    /// Puts back what units' properties said of devices, and their cgroups' weights. systemd is
    /// asked no more once it did not answer. The only error is [`HostError::Interrupted`].
    pub(crate) fn restore_units(
        &self,
        version: &CgroupVersion,
        records: &[UnitRecord],
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        let mut found = Vec::new();
        for record in records {
            match version.cgroup(&record.cgroup) {
                Ok(cgroup) if self.is_of(&cgroup, record) => found.push((cgroup, record)),
                Ok(_) => done.skip(Skipped::Cgroup { cgroup: record.cgroup.clone() }),
                Err(error) => done.failures.push(error.to_string()),
            }
        }
        let cgroups: BTreeSet<PathBuf> = found.iter().map(|(_, r)| r.cgroup.clone()).collect();
        let mut units = bus::units(&self.bus, cgroups);
        for (cgroup, record) in found {
            let mut failures = Vec::new();
            let restored = match &mut units {
                Ok(units) => self.restore_unit(units, &cgroup, record, done),
                Err(silence) => {
                    failures.push(failure(record, silence));
                    Ok(())
                }
            };
            match restored {
                Err(interrupted @ HostError::Interrupted { .. }) => return Err(interrupted),
                Err(error) => {
                    failures.push(failure(record, &error));
                    if !is_answer(&error) {
                        units = Err(error);
                    }
                }
                Ok(()) => {}
            }
            match self.keep_weights(&cgroup, &record.weights) {
                Err(interrupted @ HostError::Interrupted { .. }) => return Err(interrupted),
                Err(error) => failures.push(failure(record, &error)),
                Ok(()) => {}
            }
            // It may have vanished meanwhile.
            if self.is_of(&cgroup, record) {
                done.failures.append(&mut failures);
            } else {
                done.skip(Skipped::Cgroup { cgroup: record.cgroup.clone() });
            }
        }
        Ok(())
    }

    fn restore_unit(
        &self,
        units: &mut BTreeMap<PathBuf, Unit>,
        cgroup: &Cgroup,
        record: &UnitRecord,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        let unknown = || HostError::UnitUnknown { unit: record.unit.clone() };
        let unit = units.get_mut(&record.cgroup).ok_or_else(unknown)?;
        let mut properties = unit.properties.clone();
        replace(&*self.sysfs, &mut properties, record.device, &record.properties);
        if properties != unit.properties {
            self.set_properties(cgroup, &record.unit, &properties)?;
            done.restored.push((cgroup.directory.clone(), text(&properties)));
            unit.properties = properties;
        }
        Ok(())
    }

    /// Sets properties of a unit: [`Host::keep_weights`] is to follow, whatever the result.
    fn set_properties(
        &self,
        cgroup: &Cgroup,
        unit: &str,
        properties: &Properties,
    ) -> Result<(), HostError> {
        let step = || (cgroup.directory.clone(), text(properties));
        self.step(|| {
            let (file, text) = step();
            Step::BeforeWrite { file, text }
        })?;
        let result = bus::set(&self.bus, unit, properties);
        self.step(|| {
            let (file, text) = step();
            Step::AfterWrite { file, text }
        })?;
        result
    }

    /// Writes back what systemd's write of the default dropped of a cgroup's weights: the default
    /// itself, and lines that it has not set anew.
    fn keep_weights(
        &self,
        cgroup: &Cgroup,
        before: &BTreeMap<String, String>,
    ) -> Result<(), HostError> {
        // Without the io controller the weights are gone, and there is nowhere to write them.
        if !self.sysfs.exists(&cgroup.weight_file()) {
            return Ok(());
        }
        let now = cgroup.weights(&*self.sysfs);
        let default = before.get(DEFAULT).filter(|&w| now.get(DEFAULT) != Some(w));
        let mut lines = before.clone();
        lines.extend(now.clone());
        // A write of the default drops all lines (`bfq_io_set_weight_legacy()`).
        lines.retain(|name, _| {
            (default.is_some() || !now.contains_key(name))
                && name.parse().is_ok_and(|device| has_bfq(&*self.sysfs, device))
        });
        let default = default.map(|weight| (DEFAULT, weight));
        let lines = lines.iter().map(|(name, weight)| (name.as_str(), weight));
        let mut kept = Ok(());
        for (name, weight) in default.into_iter().chain(lines) {
            let write = Write { file: cgroup.weight_file(), text: format!("{name} {weight}") };
            let error = |source| HostError::Cgroup {
                action: "keep the weights of",
                path: cgroup.directory.clone(),
                source,
            };
            // One that is refused does not cost the others.
            kept = kept.and(self.write(&write)?.map_err(error));
        }
        kept
    }
}

/// Whether systemd has said so itself: others may be asked about.
fn is_answer(error: &HostError) -> bool {
    match error {
        HostError::Systemd { source, .. } => {
            matches!(source, zbus::Error::MethodError(..) | zbus::Error::FDO(_))
        }
        _ => true,
    }
}

fn failure(record: &UnitRecord, error: &HostError) -> String {
    let source = std::error::Error::source(error).map(|s| format!(": {s}"));
    format!("unit {}: {error}{}", record.unit, source.unwrap_or_default())
}

/// Properties as in a unit file, for people.
fn text(properties: &Properties) -> String {
    let entries = properties.iter().flat_map(|(property, list)| {
        list.iter().map(move |(path, value)| format!("{property}={path} {value}"))
    });
    entries.collect::<Vec<_>>().join("; ")
}
