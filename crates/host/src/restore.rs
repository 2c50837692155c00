//! Saving old values and putting them back.
//!
//! Restoring writes only what differs, so it may be repeated after a crash at
//! any step. Order: iocost on each device, then its scheduler, then its parameters (both
//! reset some of them), then systemd's units, then weights and limits of cgroups. A device or
//! cgroup that is gone, or another one in its place, is reported and skipped:
//! its knobs died with it. Then come the data planes' (module `promises`), and VMs' own knobs last (module
//! `guests::restore`): one that does not answer keeps neither the host from its state nor later applies from theirs.
//!
//! A change of scheduler drops things that are nobody's knob here, so they are
//! saved too: all of `queue/iosched/`, `queue/nr_requests`, `queue/wbt_lat_usec`
//! (bfq and iocost turn writeback throttling off), and every cgroup's weight line.
//!
//! Properties, tested with `apply`: `rollback_after_crash_at_any_step_restores`,
//! `rollback_itself_crashing_at_any_step_restores`,
//! `switch_away_from_bfq_and_back_keeps_foreign_weights`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_spec::settings::{Change, Knob};
use rtvirtio_units::DeviceName;

use crate::cgroup::{CgroupVersion, CostFile, Write, read, weight_lines};
use crate::device::{Disk, directory, generation};
use crate::knobs::{Schedulers, has_bfq};
use crate::record::{
    CostRecord, DeviceRecord, GroupKnob, GroupRecord, QueueRecord, Record, UnitRecord,
};
use crate::restoration::{QUEUE_FILES, Restoration, Skipped};
use crate::sysfs::{DeviceNumber, Sysfs};
use crate::systemd::{PROPERTIES, Units};
use crate::topology::{Resolved, VmGroup};
use crate::{Host, HostError, Step};

/// One parameter may move another (`strict_guarantees` raises `slice_idle`).
const PASSES: usize = 3;

/// A queue's files, named below `queue/`, on the host or within a guest.
pub(crate) trait QueueFiles {
    /// A file's text without blanks around it, the selected one of `scheduler`; `None` if it cannot
    /// be read.
    fn text(&mut self, name: &str) -> Option<String>;

    /// Writes a file, with its steps. The error is [`HostError::Interrupted`].
    fn put_back(
        &mut self,
        name: &str,
        text: &str,
        failures: &mut Vec<String>,
        done: &mut Restoration,
    ) -> Result<(), HostError>;

    /// Where the file is, for people.
    fn place_of(&self, name: &str) -> String;
}

/// Puts a queue back: its scheduler, then the parameters. Gives what did not work.
pub(crate) fn restore_queue(
    files: &mut dyn QueueFiles,
    queue: &QueueRecord,
    done: &mut Restoration,
) -> Result<Vec<String>, HostError> {
    let mut failures = Vec::new();
    let differs = |files: &mut dyn QueueFiles, name: &str, old: &str| {
        files.text(name).as_deref() != Some(old)
    };
    if differs(files, "scheduler", &queue.scheduler) {
        files.put_back("scheduler", &queue.scheduler, &mut failures, done)?;
    }
    if differs(files, "scheduler", &queue.scheduler) {
        if failures.is_empty() {
            let place = files.place_of("scheduler");
            failures.push(format!("{place} does not read {:?} again", queue.scheduler));
        }
        return Ok(failures);
    }
    let differing = |files: &mut dyn QueueFiles| {
        let mut names: Vec<(&String, &String)> = queue
            .parameters
            .iter()
            // The same value in coarser units, which would round it.
            .filter(|(name, _)| {
                *name != "iosched/slice_idle"
                    || !queue.parameters.contains_key("iosched/slice_idle_us")
            })
            .filter(|(name, old)| differs(files, name, old))
            .collect();
        names.sort_by_key(|(name, _)| *name != "iosched/strict_guarantees");
        names
    };
    for _ in 0..PASSES {
        failures.clear();
        let left = differing(files);
        if left.is_empty() {
            return Ok(failures);
        }
        for (name, old) in left {
            files.put_back(name, old, &mut failures, done)?;
        }
    }
    if failures.is_empty() {
        for (name, old) in differing(files) {
            failures.push(format!("{} does not read {old:?} again", files.place_of(name)));
        }
    }
    Ok(failures)
}

/// The queue of a disk of the host.
struct HostQueue<'a> {
    host: &'a Host,
    base: PathBuf,
}

impl QueueFiles for HostQueue<'_> {
    fn text(&mut self, name: &str) -> Option<String> {
        let sysfs = &*self.host.sysfs;
        match name {
            "scheduler" => Schedulers::of_queue(sysfs, &self.base).ok().map(|s| s.selected),
            _ => Some(sysfs.read(&self.base.join(name)).ok()?.trim().to_owned()),
        }
    }

    fn put_back(
        &mut self,
        name: &str,
        text: &str,
        failures: &mut Vec<String>,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        let write = Write { file: self.base.join(name), text: text.to_owned() };
        self.host.put_back(write, failures, done)
    }

    fn place_of(&self, name: &str) -> String {
        self.base.join(name).display().to_string()
    }
}

/// Saves what `changes` would overwrite on the host.
pub(crate) fn save(
    sysfs: &dyn Sysfs,
    resolved: &Resolved,
    changes: &[Change],
    units: &Units,
) -> Result<Record, HostError> {
    let mut record = Record::default();
    for change in changes {
        let Some(name) = change.knob.device() else { continue };
        let (disk, group) = resolved.of(&change.knob)?;
        let number = disk.number;
        save_device(sysfs, name, number, &mut record)?;
        let knob = match (&change.knob, group) {
            (Knob::Limit { limit, .. }, Some(_)) => GroupKnob::Limit(*limit),
            (Knob::Weight { .. }, Some(_)) => GroupKnob::Weight,
            (Knob::CostWeight { .. }, Some(_)) => GroupKnob::CostWeight,
            (Knob::CostModel { .. } | Knob::CostQos { .. }, _) => {
                let device = record.devices.get_mut(&number);
                if let (Some(DeviceRecord { cost: cost @ None, .. }), Some(version)) =
                    (device, &resolved.version)
                {
                    let of = |file| Ok::<_, HostError>(version.cost(sysfs, file, number)?.1);
                    let (model, qos) = (of(CostFile::Model)?, of(CostFile::Qos)?);
                    *cost = Some(CostRecord { model, qos });
                }
                // It turns writeback throttling off and on, as bfq does.
                let device = record.devices.get_mut(&number);
                if let Some(DeviceRecord { queue: queue @ None, .. }) = device {
                    *queue = Some(save_queue(sysfs, disk)?);
                }
                continue;
            }
            _ => {
                let device = record.devices.get_mut(&number);
                if let Some(DeviceRecord { queue: queue @ None, .. }) = device {
                    *queue = Some(save_queue(sysfs, disk)?);
                }
                let selected = Schedulers::read(sysfs, disk)?;
                let leaves_bfq = matches!(change.knob, Knob::Scheduler { .. })
                    && selected.is_bfq()
                    && change.new != selected.selected;
                if leaves_bfq {
                    save_weights(sysfs, resolved, number, &mut record)?;
                }
                continue;
            }
        };
        let Some(group) = group else { continue };
        save_group(sysfs, group, disk, knob, &mut record)?;
    }
    for (unit, parts) in units.parts(sysfs, resolved) {
        for part in parts {
            save_device(sysfs, part.device, part.disk.number, &mut record)?;
            // Setting one property, systemd writes all of the unit's knobs again.
            for (knob, _) in PROPERTIES {
                save_group(sysfs, part.group, part.disk, knob, &mut record)?;
            }
            record.units.push(UnitRecord {
                unit: unit.name.clone(),
                cgroup: part.group.path.clone(),
                id: group_id(sysfs, &part.group.cgroup.directory)?,
                device: part.disk.number,
                properties: part.entries(sysfs, unit),
                weights: part.group.cgroup.weights(sysfs),
            });
        }
    }
    Ok(record)
}

fn save_device(
    sysfs: &dyn Sysfs,
    name: &DeviceName,
    number: DeviceNumber,
    record: &mut Record,
) -> Result<(), HostError> {
    if let Entry::Vacant(entry) = record.devices.entry(number) {
        let (size_sectors, diskseq) = generation(sysfs, number)?;
        let name = name.clone();
        entry.insert(DeviceRecord { name, size_sectors, diskseq, queue: None, cost: None });
    }
    Ok(())
}

fn save_group(
    sysfs: &dyn Sysfs,
    group: &VmGroup,
    disk: &Disk,
    knob: GroupKnob,
    record: &mut Record,
) -> Result<(), HostError> {
    let old = match knob {
        GroupKnob::Limit(limit) => group.cgroup.limit(sysfs, disk.number, limit)?,
        // Under another scheduler there are no weight lines.
        GroupKnob::Weight if Schedulers::read(sysfs, disk)?.is_bfq() => {
            group.cgroup.weight_line(sysfs, disk.number)?
        }
        GroupKnob::Weight => None,
        GroupKnob::CostWeight => group.cgroup.cost_weight_line(sysfs, disk.number)?,
    };
    record.add_group(GroupRecord {
        cgroup: group.path.clone(),
        id: group_id(sysfs, &group.cgroup.directory)?,
        device: disk.number,
        knob,
        old,
        only_if_absent: false,
    });
    Ok(())
}

fn group_id(sysfs: &dyn Sysfs, path: &Path) -> Result<u64, HostError> {
    let read = |source| HostError::Read { file: path.to_path_buf(), source };
    sysfs.inode(path).map_err(read)
}

fn save_queue(sysfs: &dyn Sysfs, disk: &Disk) -> Result<QueueRecord, HostError> {
    let mut parameters = BTreeMap::new();
    let iosched = disk.queue("iosched");
    // `none` has no directory.
    if sysfs.exists(&iosched) {
        let list = sysfs.list(&iosched);
        for name in list.map_err(|source| HostError::Read { file: iosched.clone(), source })? {
            let text = read(sysfs, &iosched.join(&name))?;
            parameters.insert(format!("iosched/{name}"), text.trim().to_owned());
        }
    }
    for name in QUEUE_FILES {
        // Not every device has them: then there is nothing to reset.
        if let Ok(text) = sysfs.read(&disk.queue(name)) {
            parameters.insert(name.to_owned(), text.trim().to_owned());
        }
    }
    Ok(QueueRecord { scheduler: Schedulers::read(sysfs, disk)?.selected, parameters })
}

fn save_weights(
    sysfs: &dyn Sysfs,
    resolved: &Resolved,
    device: DeviceNumber,
    record: &mut Record,
) -> Result<(), HostError> {
    // A topology without VMs has not looked for the hierarchy.
    let version = match &resolved.version {
        Some(version) => Some(version.clone()),
        None => CgroupVersion::find(sysfs).ok(),
    };
    let Some(version) = version else {
        return Ok(());
    };
    for (cgroup, weight) in weight_lines(sysfs, &version, device) {
        // One that has vanished since has no weight to keep.
        let Ok(id) = sysfs.inode(&version.mount().join(&cgroup)) else { continue };
        record.add_group(GroupRecord {
            id,
            cgroup,
            device,
            knob: GroupKnob::Weight,
            old: Some(weight),
            only_if_absent: true,
        });
    }
    Ok(())
}

impl Host {
    /// Puts back all that `record` holds. The only error is [`HostError::Interrupted`];
    /// what cannot be restored is among the result's failures. With it comes what is left of VMs'
    /// own knobs and data planes', unless the host's are not all back either.
    pub(crate) fn restore(
        &self,
        record: &Record,
    ) -> Result<(Restoration, Option<Record>), HostError> {
        let mut done = Restoration::default();
        for (number, device) in &record.devices {
            if !self.is_same_device(*number, device) {
                done.skip(Skipped::Device { device: device.name.clone(), number: *number });
                continue;
            }
            if let Some(cost) = &device.cost {
                self.restore_cost(*number, device, cost, &mut done)?;
            }
            if let Some(queue) = &device.queue {
                self.restore_device(*number, device, queue, &mut done)?;
            }
        }
        if !record.groups.is_empty() {
            match CgroupVersion::find(&*self.sysfs) {
                Ok(version) => {
                    // Units first: systemd writes all of a unit's knobs.
                    self.restore_units(&version, &record.units, &mut done)?;
                    for group in &record.groups {
                        self.restore_group(&version, record, group, &mut done)?;
                    }
                }
                Err(error) => done.failures.push(error.to_string()),
            }
        }
        let is_host_back = done.failures.is_empty();
        let mut left = Record::default();
        for record in &record.data_planes {
            let is_back = self.restore_data_plane(record, &mut done)?;
            left.data_planes.extend((!is_back).then(|| record.clone()));
        }
        left.guests = self.restore_guests(&record.guests, &mut done)?;
        Ok((done, is_host_back.then_some(left)))
    }

    pub(crate) fn is_same_device(&self, number: DeviceNumber, record: &DeviceRecord) -> bool {
        generation(&*self.sysfs, number).is_ok_and(|found| record.is_about(found))
    }

    fn restore_device(
        &self,
        number: DeviceNumber,
        device: &DeviceRecord,
        queue: &QueueRecord,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        let mut files = HostQueue { host: self, base: directory(number).join("queue") };
        let mut failures = restore_queue(&mut files, queue, done)?;
        if failures.is_empty() {
            return Ok(());
        }
        // It may have vanished meanwhile.
        if self.is_same_device(number, device) {
            done.failures.append(&mut failures);
        } else {
            done.skip(Skipped::Device { device: device.name.clone(), number });
        }
        Ok(())
    }

    /// The model first: what turns iocost on again finds it.
    fn restore_cost(
        &self,
        number: DeviceNumber,
        device: &DeviceRecord,
        cost: &CostRecord,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        let sysfs = &*self.sysfs;
        let mut failures = Vec::new();
        match CgroupVersion::find(sysfs) {
            Ok(version) => {
                for (file, old) in [(CostFile::Model, &cost.model), (CostFile::Qos, &cost.qos)] {
                    match version.cost(sysfs, file, number) {
                        Ok((_, found)) if found == *old => {}
                        Ok(_) => {
                            let write = version.cost_write(file, number, old);
                            self.put_back(write, &mut failures, done)?;
                        }
                        Err(error) => failures.push(error.to_string()),
                    }
                }
            }
            Err(error) => failures.push(error.to_string()),
        }
        // It may have vanished meanwhile.
        if !failures.is_empty() && !self.is_same_device(number, device) {
            done.skip(Skipped::Device { device: device.name.clone(), number });
            return Ok(());
        }
        done.failures.append(&mut failures);
        Ok(())
    }

    fn restore_group(
        &self,
        version: &CgroupVersion,
        record: &Record,
        group: &GroupRecord,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        let sysfs = &*self.sysfs;
        let number = group.device;
        if record.devices.get(&number).is_some_and(|d| !self.is_same_device(number, d)) {
            return Ok(());
        }
        let cgroup = match version.cgroup(&group.cgroup) {
            Ok(cgroup) => cgroup,
            Err(error) => {
                done.failures.push(error.to_string());
                return Ok(());
            }
        };
        let is_same = || sysfs.inode(&cgroup.directory).is_ok_and(|id| id == group.id);
        let current = match group.knob {
            GroupKnob::Weight => {
                if !has_bfq(sysfs, number) {
                    // Weight lines died with bfq, and none was there before it.
                    return Ok(());
                }
                cgroup.weight_line(sysfs, number)
            }
            GroupKnob::CostWeight => cgroup.cost_weight_line(sysfs, number),
            GroupKnob::Limit(limit) => cgroup.limit(sysfs, number, limit),
        };
        if !is_same() {
            done.skip(Skipped::Cgroup { cgroup: group.cgroup.clone() });
            return Ok(());
        }
        let old = group.old.as_deref();
        match current {
            Ok(current) if current == group.old => return Ok(()),
            Ok(Some(_)) if group.only_if_absent => return Ok(()),
            Ok(_) => {}
            // Somebody has turned the io controller off for it, and its knobs died with their files.
            Err(HostError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                done.skip(Skipped::Cgroup { cgroup: group.cgroup.clone() });
                return Ok(());
            }
            Err(error) => {
                done.failures.push(error.to_string());
                return Ok(());
            }
        }
        let write = match group.knob {
            GroupKnob::Weight => cgroup.weight_write(number, old),
            GroupKnob::CostWeight => cgroup.cost_weight_write(number, old),
            GroupKnob::Limit(limit) => cgroup.limit_write(number, limit, old),
        };
        let mut failures = Vec::new();
        self.put_back(write, &mut failures, done)?;
        if is_same() {
            done.failures.append(&mut failures);
        } else {
            done.skip(Skipped::Cgroup { cgroup: group.cgroup.clone() });
        }
        Ok(())
    }

    fn put_back(
        &self,
        write: Write,
        failures: &mut Vec<String>,
        done: &mut Restoration,
    ) -> Result<(), HostError> {
        match self.write(&write)? {
            Ok(()) => done.restored.push((write.file, write.text)),
            Err(e) => failures.push(format!("{}: {e}", write.file.display())),
        }
        Ok(())
    }

    /// One write, with its steps. The outer error is [`HostError::Interrupted`].
    pub(crate) fn write(&self, write: &Write) -> Result<io::Result<()>, HostError> {
        self.step(|| Step::BeforeWrite { file: write.file.clone(), text: write.text.clone() })?;
        let result = self.sysfs.write(&write.file, &write.text);
        self.step(|| Step::AfterWrite { file: write.file.clone(), text: write.text.clone() })?;
        Ok(result)
    }
}
