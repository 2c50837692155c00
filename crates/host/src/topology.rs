//! Which devices and VMs a plan or specification is about, and what they are on this host.
//!
//! Terms: a [`Topology`] holds names and paths, as an operator wrote them; a
//! [`Resolved`] topology holds the disks and cgroups that were found there.
//!
//! libvirt numbers a VM's starts in the name of its scope,
//! `machine-qemu\x2dNUMBER\x2dNAME.scope`, or, without systemd, of its cgroup,
//! `qemu-NUMBER-NAME.libvirt-qemu`: a VM is looked for under another number
//! where the written one is not there.
//!
//! Properties: `vm_is_found_after_its_next_start`, `vm_is_found_by_its_qemu_process`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::settings::Knob;
use rtvirtio_spec::specification::{Backend, Specification, Vm, vm_group};
use rtvirtio_units::{DeviceName, VmName};

use crate::cgroup::{Cgroup, CgroupVersion, read, relative};
use crate::device::{self, Disk};
use crate::storage::Stack;
use crate::sysfs::Sysfs;
use crate::{DataPlaneTopology, GuestTopology, Host, HostError};

/// Devices, VMs, and which VM uses which device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Topology {
    /// Each device's node.
    pub devices: BTreeMap<DeviceName, PathBuf>,
    /// Each VM's cgroup below the io controller's mount.
    pub vms: BTreeMap<VmName, PathBuf>,
    /// The devices that each VM uses: it has a weight and limits on each.
    pub uses: BTreeMap<VmName, BTreeSet<DeviceName>>,
    /// What a device must be, where that is known; another one is refused.
    pub identities: BTreeMap<DeviceName, DeviceIdentity>,
    /// The VMs whose own knobs are observed and set too.
    pub guests: BTreeMap<VmName, GuestTopology>,
    /// The data plane whose knobs are observed and set too.
    pub data_plane: Option<DataPlaneTopology>,
}

impl Topology {
    /// The plan's devices and VMs. A VM uses the devices on which the plan
    /// settles, saw or changes one of its knobs.
    #[must_use]
    pub fn of_plan(plan: &Plan) -> Self {
        let mut uses: BTreeMap<VmName, BTreeSet<DeviceName>> = BTreeMap::new();
        let mut add = |vm: &VmName, device: &DeviceName| {
            uses.entry(vm.clone()).or_default().insert(device.clone());
        };
        for (device, settings) in &plan.settings.0 {
            settings.vms.keys().for_each(|vm| add(vm, device));
        }
        let changed = plan.changes.iter().map(|c| &c.knob);
        for knob in plan.observed.keys().chain(changed) {
            if let (Some(vm), Some(device)) = (knob.vm(), knob.device()) {
                add(vm, device);
            }
        }
        Self {
            devices: plan.devices.iter().map(|d| (d.name.clone(), d.path.clone())).collect(),
            vms: plan.vms.iter().map(|v| (v.name.clone(), v.cgroup.clone())).collect(),
            uses,
            identities: plan.devices.iter().map(|d| (d.name.clone(), d.identity.clone())).collect(),
            guests: GuestTopology::of(&plan.guests),
            data_plane: plan.data_plane.as_ref().map(DataPlaneTopology::of),
        }
    }

    /// The specification's devices and VMs of the kernel path, without what is the VMs' own. A VM
    /// uses the devices of its disks.
    #[must_use]
    pub fn of_specification(specification: &Specification) -> Self {
        // What the data plane serves is not its VM's cgroup's I/O.
        let vms = || specification.vms.iter().filter(|vm| vm.backend == Backend::Kernel);
        let uses = vms().map(|v| {
            (v.name.clone(), v.disks.iter().map(|d| d.device.clone()).collect::<BTreeSet<_>>())
        });
        Self {
            devices: specification
                .devices
                .iter()
                .map(|d| (d.name.clone(), d.path.clone()))
                .collect(),
            vms: vms().map(|v| (v.name.clone(), v.cgroup.clone())).collect(),
            uses: uses.collect(),
            identities: BTreeMap::new(),
            guests: BTreeMap::new(),
            data_plane: DataPlaneTopology::of_specification(specification),
        }
    }
}

/// A VM's cgroup as found.
#[derive(Debug, Clone)]
pub(crate) struct VmGroup {
    /// Below the mount.
    pub(crate) path: PathBuf,
    pub(crate) cgroup: Cgroup,
}

/// A topology as found on the host.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub(crate) devices: BTreeMap<DeviceName, Disk>,
    pub(crate) vms: BTreeMap<VmName, VmGroup>,
    /// Each VM with each device it uses.
    pub(crate) pairs: BTreeSet<(VmName, DeviceName)>,
    pub(crate) version: Option<CgroupVersion>,
}

impl Resolved {
    /// Finds everything, or names what is not there.
    pub(crate) fn find(sysfs: &dyn Sysfs, topology: &Topology) -> Result<Self, HostError> {
        let mut devices: BTreeMap<DeviceName, Disk> = BTreeMap::new();
        for (name, path) in &topology.devices {
            let disk = Disk::find(sysfs, path)?;
            if let Some(expected) = topology.identities.get(name) {
                let found = device::identity(sysfs, path)?;
                if found != *expected {
                    return Err(HostError::DeviceReplaced {
                        device: name.clone(),
                        expected: Box::new(expected.clone()),
                        found: Box::new(found),
                    });
                }
            }
            if let Some((first, _)) = devices.iter().find(|(_, d)| d.number == disk.number) {
                return Err(HostError::SameDisk {
                    first: first.clone(),
                    second: name.clone(),
                    disk: disk.number.to_string(),
                });
            }
            devices.insert(name.clone(), disk);
        }
        if let Some(shared) = shared_disk(sysfs, topology, &devices)? {
            return Err(shared);
        }
        let version =
            if topology.vms.is_empty() { None } else { Some(CgroupVersion::find(sysfs)?) };
        let mut vms = BTreeMap::new();
        for (vm, path) in &topology.vms {
            let Some(version) = &version else { break };
            let Some(group) = locate(sysfs, version, path)? else {
                let path = version.cgroup(path)?.directory;
                return Err(HostError::CgroupMissing { vm: vm.clone(), path });
            };
            vms.insert(vm.clone(), group);
        }
        let pairs = topology.uses.iter().flat_map(|(vm, used)| {
            used.iter().map(|device| (vm.clone(), device.clone())).collect::<Vec<_>>()
        });
        let found = Self { devices, vms, pairs: pairs.collect(), version };
        for (vm, device) in &found.pairs {
            found.of(&Knob::Weight { device: device.clone(), vm: vm.clone() })?;
        }
        Ok(found)
    }

    /// The disk and, for a VM's knob, the cgroup that carry `knob`, one of the host.
    pub(crate) fn of(&self, knob: &Knob) -> Result<(&Disk, Option<&VmGroup>), HostError> {
        let unknown = || HostError::UnknownKnob { knob: Box::new(knob.clone()) };
        let disk = knob.device().and_then(|d| self.devices.get(d)).ok_or_else(unknown)?;
        let Some(vm) = knob.vm() else {
            return Ok((disk, None));
        };
        Ok((disk, Some(self.vms.get(vm).ok_or_else(unknown)?)))
    }
}

/// An array and another device that lie on one disk.
fn shared_disk(
    sysfs: &dyn Sysfs,
    topology: &Topology,
    devices: &BTreeMap<DeviceName, Disk>,
) -> Result<Option<HostError>, HostError> {
    let mut users: BTreeMap<String, &DeviceName> = BTreeMap::new();
    for (name, disk) in devices {
        let array = Stack::array(sysfs, &topology.devices[name])?;
        for disk in array.map_or_else(|| vec![disk.name.clone()], |array| array.disks) {
            if let Some(first) = users.insert(disk.clone(), name) {
                let (first, second) = (first.clone(), name.clone());
                return Ok(Some(HostError::SharedDisk { first, second, disk }));
            }
        }
    }
    Ok(None)
}

/// A VM's cgroup, if it is there.
fn locate(
    sysfs: &dyn Sysfs,
    version: &CgroupVersion,
    path: &Path,
) -> Result<Option<VmGroup>, HostError> {
    let path = relative(path)?;
    let group = |path: PathBuf| {
        let cgroup = version.cgroup(&path)?;
        Ok(sysfs.exists(&cgroup.directory).then_some(VmGroup { path, cgroup }))
    };
    let written: Option<VmGroup> = group(path.clone())?;
    let parts: Vec<&str> = path.iter().filter_map(|c| c.to_str()).collect();
    let Some(at) = parts.iter().position(|c| domain(c).is_some()).filter(|_| written.is_none())
    else {
        return Ok(written);
    };
    let parent: PathBuf = parts[..at].iter().collect();
    let mut names = sysfs.list(&version.mount().join(&parent)).unwrap_or_default();
    names.retain(|name| domain(name) == domain(parts[at]));
    match names.as_slice() {
        [name] => {
            let mut path = parent.join(name);
            path.extend(&parts[at + 1..]);
            group(path)
        }
        _ => Ok(None),
    }
}

/// What follows the number in the name of a libvirt domain's scope, or of its cgroup where
/// systemd does not run.
fn domain(group: &str) -> Option<&str> {
    let forms = [("machine-qemu\\x2d", "\\x2d", ".scope"), ("qemu-", "-", ".libvirt-qemu")];
    forms.into_iter().find_map(|(prefix, separator, suffix)| {
        let (number, name) = group.strip_prefix(prefix)?.split_once(separator)?;
        let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        (is_number && name.ends_with(suffix)).then_some(name)
    })
}

impl Host {
    /// Where below the io controller's mount a VM's cgroup is now, if it is there.
    ///
    /// # Errors
    /// [`HostError::NoIoController`], [`HostError::BadCgroupPath`].
    pub fn cgroup_of(&self, path: &Path) -> Result<Option<PathBuf>, HostError> {
        let version = CgroupVersion::find(&*self.sysfs)?;
        Ok(locate(&*self.sysfs, &version, path)?.map(|group| group.path))
    }

    /// The cgroup of the VM whose process this is, below the io controller's mount.
    ///
    /// # Errors
    /// [`HostError::NoIoController`]; the process has ended.
    pub fn cgroup_of_process(&self, pid: u32) -> Result<Option<PathBuf>, HostError> {
        let version = CgroupVersion::find(&*self.sysfs)?;
        let text = read(&*self.sysfs, &Path::new("/proc").join(pid.to_string()).join("cgroup"))?;
        // cgroups(7): hierarchy-ID:controller-list:path
        let path = text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let is_it = match version {
                CgroupVersion::V1 { .. } => controllers.split(',').any(|c| c == "blkio"),
                CgroupVersion::V2 { .. } => controllers.is_empty(),
            };
            is_it.then_some(path)
        });
        // A process in the root, or one beyond this namespace's.
        let below = path.and_then(|path| relative(Path::new(path)).ok());
        Ok(below.map(|path| vm_group(&path).to_owned()))
    }

    /// Puts in the cgroups of VMs that are not where the specification says, or of which it says
    /// nothing, and whose QEMU runs under their name. What was found, by VM: the cgroup, and the
    /// process that is in it.
    ///
    /// # Errors
    /// [`HostError::NoIoController`], [`HostError::BadCgroupPath`]; `/proc` cannot be listed.
    pub fn locate_vms(
        &self,
        specification: &mut Specification,
    ) -> Result<BTreeMap<VmName, (PathBuf, u32)>, HostError> {
        let mut found = BTreeMap::new();
        let mut processes = None;
        let kernel_path = |vm: &&mut Vm| vm.backend == Backend::Kernel;
        for vm in specification.vms.iter_mut().filter(kernel_path) {
            if self.cgroup_of(&vm.cgroup)?.is_some() {
                continue;
            }
            let processes = match &processes {
                Some(processes) => processes,
                None => processes.insert(self.qemu_processes()?),
            };
            let mut named =
                processes.iter().filter(|p| p.name.as_deref() == Some(vm.name.as_str()));
            // Of two with one name, nobody can tell which is meant.
            let (Some(process), None) = (named.next(), named.next()) else { continue };
            if let Ok(Some(cgroup)) = self.cgroup_of_process(process.pid) {
                vm.cgroup.clone_from(&cgroup);
                found.insert(vm.name.clone(), (cgroup, process.pid));
            }
        }
        Ok(found)
    }

    /// The topology without the VMs whose cgroups are not there, and their names: VMs that are off.
    ///
    /// # Errors
    /// [`HostError::NoIoController`], [`HostError::BadCgroupPath`].
    pub fn running(&self, topology: &Topology) -> Result<(Topology, Vec<VmName>), HostError> {
        let (mut there, mut absent) = (topology.clone(), Vec::new());
        if topology.vms.is_empty() {
            return Ok((there, absent));
        }
        let version = self.cgroup_version()?;
        for (vm, path) in &topology.vms {
            if locate(&*self.sysfs, &version, path)?.is_none() {
                there.vms.remove(vm);
                there.uses.remove(vm);
                there.guests.remove(vm);
                absent.push(vm.clone());
            }
        }
        Ok((there, absent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;
    use crate::sysfs::DeviceNumber;

    #[test]
    fn array_and_its_disk_are_not_two_devices() {
        let sysfs = FakeSysfs::v2();
        sysfs.add_disk("sda", DeviceNumber::new(8, 0), 1 << 21);
        sysfs.add_disk("sdb", DeviceNumber::new(8, 16), 1 << 21);
        sysfs.add_disk("sdc", DeviceNumber::new(8, 32), 1 << 21);
        sysfs.stack("md0", DeviceNumber::new(9, 0), &["sda", "sdb"]);
        sysfs.put("/sys/dev/block/9:0/md/level", "raid1\n");
        let find = |other: &str| {
            let device = |name: &str, path: &str| (DeviceName::new(name).unwrap(), path.into());
            let devices = [device("array", "/dev/md0"), device("other", other)].into();
            Resolved::find(&sysfs, &Topology { devices, ..Topology::default() })
        };
        assert!(find("/dev/sdc").is_ok());
        let error = find("/dev/sdb").unwrap_err();
        assert_eq!(error.to_string(), "devices array and other share the disk sdb");
        assert!(error.hint().is_some());
    }

    #[test]
    fn vm_is_found_after_its_next_start() {
        let sysfs = FakeSysfs::v2();
        let version = CgroupVersion::find(&sysfs).unwrap();
        for group in ["machine.slice", "machine.slice/machine-qemu\\x2d12\\x2dplc.scope"] {
            sysfs.create_dir(&version.mount().join(group)).unwrap();
        }
        let find = |name: &str| {
            let path = Path::new("machine.slice").join(name);
            locate(&sysfs, &version, &path).unwrap().map(|g| g.path.display().to_string())
        };
        let there = "machine.slice/machine-qemu\\x2d12\\x2dplc.scope";
        assert_eq!(find("machine-qemu\\x2d3\\x2dplc.scope").as_deref(), Some(there));
        assert_eq!(find("machine-qemu\\x2d12\\x2dplc.scope").as_deref(), Some(there));
        assert_eq!(find("machine-qemu\\x2d3\\x2dother.scope"), None);
        assert_eq!(find("plc.scope"), None);
        sysfs.create_dir(&version.mount().join("machine.slice/qemu-4-plc.libvirt-qemu")).unwrap();
        let there = "machine.slice/qemu-4-plc.libvirt-qemu";
        assert_eq!(find("qemu-1-plc.libvirt-qemu").as_deref(), Some(there));
    }

    #[test]
    fn vm_is_found_by_its_qemu_process() {
        use std::sync::Arc;

        const SPECIFICATION: &str = "version = 1\n\
            [device.d]\npath = \"/dev/sda\"\nprofile = \"p.json\"\n\
            [[vm]]\nname = \"db\"\n\
            [[vm.disk]]\nname = \"root\"\ndevice = \"d\"\n\
            [[vm]]\nname = \"off\"\n\
            [[vm.disk]]\nname = \"root\"\ndevice = \"d\"\n\
            [[vm]]\nname = \"twice\"\n\
            [[vm.disk]]\nname = \"root\"\ndevice = \"d\"\n";
        for (fake, controllers) in [(FakeSysfs::v1(), "blkio"), (FakeSysfs::v2(), "")] {
            let scope = "machine.slice/machine-qemu\\x2d1\\x2ddb.scope";
            fake.add_cgroup(scope);
            for (pid, name) in [(7, "db"), (8, "twice"), (9, "twice")] {
                fake.put(&format!("/proc/{pid}/cmdline"), &format!("qemu-kvm\0-name\0{name}\0"));
                let group = format!("0:{controllers}:/{scope}/libvirt/emulator\n");
                fake.put(&format!("/proc/{pid}/cgroup"), &format!("9:cpu:/elsewhere\n{group}"));
            }
            let host = Host::with_sysfs("/nonexistent", Arc::new(fake));
            let mut specification =
                rtvirtio_spec::specification::parse("site.toml", SPECIFICATION).unwrap();
            let found = host.locate_vms(&mut specification).unwrap();
            let db = VmName::new("db").unwrap();
            assert_eq!(found, [(db, (PathBuf::from(scope), 7))].into());
            assert_eq!(specification.vms[0].cgroup, Path::new(scope));
            assert_eq!(specification.vms[2].cgroup, Path::new("rtvirtio/twice"));
            // And once it is written down, nothing is looked for.
            assert!(host.locate_vms(&mut specification).unwrap().is_empty());
        }
    }
}
