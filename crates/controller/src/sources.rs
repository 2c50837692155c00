//! Where a task's latencies come from: the latency histograms of its disk in QEMU; and where that
//! disk lies on the host, which QEMU alone can tell.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rtvirtio_host::Host;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_host::qemu::{Fault, Monitor, Part, QemuError, QemuProcess};
use rtvirtio_observe::counters::{self, DiskCounter};
use rtvirtio_observe::vms::{self, BELIEVED, BlockDevices, Disk};
use rtvirtio_spec::plan::qemu;
use rtvirtio_spec::specification::{Backend, Specification, Vm, vm_group};
use rtvirtio_units::{DiskName, Nanos, TaskName, VmName};

use crate::history::Sample;

/// How long a monitor that did not answer is left alone.
const RETRY_BACKOFF: Duration = Duration::from_secs(10);

/// A VM's disk as its QEMU counts it.
struct DiskSource {
    counter: DiskCounter,
    /// The tasks on it with their targets.
    tasks: Vec<(TaskName, Option<Nanos>)>,
}

/// A VM that is counted.
struct Watched {
    monitor: Monitor,
    /// Disks with a task on them.
    disks: BTreeMap<DiskName, DiskSource>,
    /// What QEMU's block devices were, and when that was seen last.
    devices: BlockDevices,
    at: Instant,
}

/// Where VMs' disks lie on the host.
pub(crate) type Parts = BTreeMap<(VmName, DiskName), Part>;

/// All VMs of a specification.
pub(crate) struct Sources {
    host: Host,
    vms: Vec<Vm>,
    connected: BTreeMap<VmName, Watched>,
    left_alone: BTreeMap<VmName, Instant>,
    /// Why a VM is not watched, so that it is said once.
    said: BTreeMap<VmName, String>,
    /// Disks that their VMs do not have, so that it is said once.
    missing: BTreeSet<(VmName, DiskName)>,
    /// Of VMs that run and told it, also if their monitor is lost.
    parts: Parts,
    present: BTreeSet<VmName>,
}

/// The VMs whose disks QEMU serves.
pub(crate) fn kernel_path(specification: &Specification) -> impl Iterator<Item = &Vm> {
    specification.vms.iter().filter(|vm| vm.backend == Backend::Kernel)
}

impl Sources {
    pub(crate) fn new(specification: &Specification, host: Host) -> Result<Self> {
        host.cgroup_version()?;
        Ok(Self {
            host,
            // What the data plane serves is seen there.
            vms: kernel_path(specification).cloned().collect(),
            connected: BTreeMap::new(),
            left_alone: BTreeMap::new(),
            said: BTreeMap::new(),
            missing: BTreeSet::new(),
            parts: BTreeMap::new(),
            present: BTreeSet::new(),
        })
    }

    /// VMs that have a process in their cgroup.
    pub(crate) const fn present(&self) -> &BTreeSet<VmName> {
        &self.present
    }

    /// Where the disks of VMs that run lie on the host.
    pub(crate) const fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Sees which VMs run, and connects to those that are new or have other disks, until the user
    /// interrupts it. Returns what happened.
    pub(crate) fn refresh(&mut self, interrupted: &Interrupted) -> Vec<String> {
        let mut events = Vec::new();
        if let Ok(version) = self.host.cgroup_version() {
            let runs = |vm: &&Vm| {
                let found = self.host.cgroup_of(&vm.cgroup).ok().flatten();
                found.is_some_and(|path| has_process(&version.mount().join(path), 4))
            };
            self.present = self.vms.iter().filter(runs).map(|vm| vm.name.clone()).collect();
        }
        let now = Instant::now();
        self.connected.retain(|vm, _| self.present.contains(vm));
        let others = vms::at_once(self.connected.values_mut(), |vm| vm.has_other_disks(now));
        let mut others = others.into_iter();
        self.connected.retain(|_, _| others.next() == Some(false));
        self.parts.retain(|(vm, _), _| self.present.contains(vm));
        self.missing.retain(|(vm, _)| self.present.contains(vm));
        self.left_alone.retain(|_, since| now - *since < RETRY_BACKOFF);
        self.said.retain(|vm, _| self.present.contains(vm));
        let is_new = |vm: &&Vm| {
            self.present.contains(&vm.name)
                && !self.connected.contains_key(&vm.name)
                && !self.left_alone.contains_key(&vm.name)
        };
        let new: Vec<Vm> = self.vms.iter().filter(is_new).cloned().collect();
        if new.is_empty() {
            return events;
        }
        let processes = self.host.qemu_processes().unwrap_or_default();
        let mut found = Vec::new();
        for vm in new {
            match process_of(&self.host, &vm, &processes) {
                Ok(process) => found.push((vm, process)),
                Err(error) => self.leave_alone(&vm.name, &error, &mut events),
            }
        }
        let asked: Vec<&QemuProcess> = found.iter().map(|(_, process)| *process).collect();
        let examined = vms::examine_all(&self.host, &asked, interrupted);
        // Of an interrupted look the last ones are not there.
        let examined = found.into_iter().zip(examined);
        let connected = vms::at_once(examined, |((vm, _), examined)| {
            let connected = connect(&vm, examined);
            (vm, connected)
        });
        for (vm, connected) in connected {
            match connected {
                Ok(connected) => self.take(&vm, connected, &mut events),
                Err(error) => self.leave_alone(&vm.name, &error, &mut events),
            }
        }
        events
    }

    fn leave_alone(&mut self, vm: &VmName, error: &anyhow::Error, events: &mut Vec<String>) {
        let why = vms::plain(&format!("{vm}: not watched: {error:#}"));
        if self.said.insert(vm.clone(), why.clone()).as_ref() != Some(&why) {
            events.push(why);
        }
        self.left_alone.insert(vm.clone(), Instant::now());
    }

    /// Watches a VM from now on, as far as it has the disks of the specification.
    fn take(&mut self, vm: &Vm, connected: Connected, events: &mut Vec<String>) {
        let Connected { watched, parts, missing } = connected;
        let is_said = |disk: &DiskName| self.missing.contains(&(vm.name.clone(), disk.clone()));
        // One that is examined again and again for a name is not told of each time.
        if missing.is_empty() || !missing.keys().all(is_said) {
            events.push(format!("{}: watched at QEMU", vm.name));
        }
        self.said.remove(&vm.name);
        self.missing.retain(|(of, disk)| *of != vm.name || missing.contains_key(disk));
        for (disk, why) in missing {
            if self.missing.insert((vm.name.clone(), disk.clone())) {
                events.push(format!("{}/{disk}: not watched: {why}", vm.name));
            }
        }
        self.parts.retain(|(of, _), _| *of != vm.name);
        self.parts.extend(parts.into_iter().map(|(disk, part)| ((vm.name.clone(), disk), part)));
        self.connected.insert(vm.name.clone(), watched);
    }

    /// What each task did since the last look, and which disks' QEMU did not answer. Tasks of VMs
    /// that are not watched are left out.
    pub(crate) fn sample(&mut self) -> (BTreeMap<(VmName, TaskName), Sample>, Vec<String>) {
        let (mut samples, mut events) = (BTreeMap::new(), Vec::new());
        let sampled = vms::at_once(&mut self.connected, |(vm, watched)| {
            let sampled = watched.sample(vm);
            (vm.clone(), sampled)
        });
        for (vm, Sampled { of_tasks, said, is_lost }) in sampled {
            events.extend(said);
            samples.extend(of_tasks.into_iter().map(|(task, of)| ((vm.clone(), task), of)));
            if is_lost {
                // A monitor that does not answer is not asked at each look.
                self.connected.remove(&vm);
                self.left_alone.insert(vm, Instant::now());
            }
        }
        (samples, events)
    }

    /// Gives up all monitors, for somebody else to use; the next refresh takes them again.
    pub(crate) fn let_go(&mut self) {
        vms::at_once(self.connected.values_mut(), Watched::stop);
        self.connected.clear();
    }
}

/// What one look says of a VM.
struct Sampled {
    of_tasks: Vec<(TaskName, Sample)>,
    /// What failed.
    said: Vec<String>,
    /// Whether its monitor does not answer.
    is_lost: bool,
}

impl Watched {
    /// What each task of `vm` did since the last look.
    fn sample(&mut self, vm: &VmName) -> Sampled {
        let (mut of_tasks, mut said, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        let mut lost = None;
        for (disk, source) in &mut self.disks {
            match source.sample(&mut self.monitor) {
                Ok(sampled) => of_tasks.extend(sampled),
                Err(error) => {
                    let is_of_disk =
                        matches!(error.fault, Fault::Unexpected { .. } | Fault::Refused { .. });
                    let is_late = vms::is_late(&error);
                    let why = vms::plain(&format!("{:#}", anyhow::Error::from(error)));
                    said.push(format!("{vm}/{disk}: {why}"));
                    if !is_of_disk {
                        lost = Some(is_late);
                        break;
                    }
                    gone.push(disk.clone());
                }
            }
        }
        // The VM's other disks are watched, and it is seen anew which there are when it is time.
        for source in gone.iter().filter_map(|disk| self.disks.remove(disk)) {
            counters::stop([&source.counter], &mut self.monitor);
            self.devices.clear();
        }
        if lost == Some(false) {
            self.stop();
        }
        Sampled { of_tasks, said, is_lost: lost.is_some() }
    }

    /// QEMU counts no longer than somebody looks.
    fn stop(&mut self) {
        counters::stop(self.disks.values().map(|disk| &disk.counter), &mut self.monitor);
    }

    /// Whether disks were plugged, unplugged or moved since they were examined, or nobody answers, which is looked at
    /// once in a while. Nothing is counted any more then.
    fn has_other_disks(&mut self, now: Instant) -> bool {
        if now - self.at < BELIEVED {
            return false;
        }
        self.at = now;
        match vms::block_devices(&mut self.monitor) {
            Ok(devices) if devices == self.devices => false,
            Ok(_) => {
                self.stop();
                true
            }
            // It may be that of a QEMU that has ended: whether there is another one is seen when it is examined.
            Err(_) => true,
        }
    }
}

/// A VM's QEMU: the process of its name in its cgroup, since anybody may start a process of any name.
fn process_of<'a>(host: &Host, vm: &Vm, processes: &'a [QemuProcess]) -> Result<&'a QemuProcess> {
    let cgroup = host.cgroup_of(&vm.cgroup).ok().flatten();
    let is_there = |process: &&QemuProcess| {
        cgroup.as_ref().is_none_or(|cgroup| {
            let found = host.cgroup_of_process(process.pid).ok().flatten();
            found.is_some_and(|found| found.starts_with(vm_group(cgroup)))
        })
    };
    let named = processes.iter().filter(|p| p.name.as_deref() == Some(vm.name.as_str()));
    let mut named = named.filter(is_there);
    let process = named.next().context("no QEMU of this name is in its cgroup")?;
    ensure!(named.next().is_none(), "two QEMU processes of this name");
    Ok(process)
}

/// Whether a process is in the cgroup, or in one of its children.
fn has_process(cgroup: &Path, depth: u32) -> bool {
    if std::fs::read_to_string(cgroup.join("cgroup.procs")).is_ok_and(|t| !t.trim().is_empty()) {
        return true;
    }
    let Ok(entries) = std::fs::read_dir(cgroup) else { return false };
    let children = entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    depth > 0 && children.into_iter().any(|child| has_process(&child.path(), depth - 1))
}

/// A VM's QEMU that answers.
struct Connected {
    watched: Watched,
    /// Of all disks that a file or device of the host has.
    parts: Vec<(DiskName, Part)>,
    /// Disks of the specification that it does not have, and what it has.
    missing: BTreeMap<DiskName, String>,
}

/// Has a VM's QEMU count latencies.
fn connect(vm: &Vm, found: vms::Vm) -> Result<Connected> {
    let vms::Vm { monitor, unreached, devices, lacks_names, disks: there, .. } = found;
    let monitor = monitor.context(unreached.unwrap_or_default())?;
    let mut watched = Watched { monitor, disks: BTreeMap::new(), devices, at: Instant::now() };
    let (mut parts, mut missing) = (Vec::new(), BTreeMap::new());
    for disk in &vm.disks {
        let name = &disk.name;
        let is_it = |disk: &&Disk| {
            disk.qom_path.as_deref().is_some_and(|path| qemu::is_device_of(name, path))
        };
        // By the id that `plan --qemu` gives it, or by any other name that is known of it.
        let by_id = there.iter().find(is_it);
        let by_name = || there.iter().find(|disk| disk.is_called(name.as_str()));
        let Some(found) = by_id.or_else(by_name) else {
            let names: Vec<String> = there.iter().map(|disk| disk.names.join(" = ")).collect();
            let why = format!("QEMU has no disk called {name}; it has: {}", names.join("; "));
            missing.insert(name.clone(), why);
            continue;
        };
        parts.extend(found.part.clone().map(|part| (name.clone(), part)));
        let tasks: Vec<_> = vm
            .tasks
            .iter()
            .filter(|task| task.disk == *name)
            .map(|task| (task.name.clone(), task.target.map(|target| target.latency)))
            .collect();
        if tasks.is_empty() {
            continue;
        }
        let targets = tasks.iter().filter_map(|(_, target)| *target).collect();
        match DiskCounter::start(&mut watched.monitor, found, &targets) {
            Ok(counter) => {
                let source = counter.map(|counter| (name.clone(), DiskSource { counter, tasks }));
                watched.disks.extend(source);
            }
            Err(error) => {
                watched.stop();
                return Err(error.into());
            }
        }
    }
    if lacks_names && !missing.is_empty() {
        // A disk may be there under the name that is missing: it is examined anew when it is time.
        watched.devices.clear();
    }
    Ok(Connected { watched, parts, missing })
}

impl DiskSource {
    fn sample(&mut self, monitor: &mut Monitor) -> Result<Vec<(TaskName, Sample)>, QemuError> {
        let interval = self.counter.sample(monitor)?;
        let of_task = |(task, target): &(TaskName, Option<Nanos>)| {
            let misses = target.map_or(0, |target| interval.above(target));
            let (histogram, seconds) = (interval.histogram.clone(), interval.seconds);
            (task.clone(), Sample { histogram, misses, seconds })
        };
        Ok(self.tasks.iter().map(of_task).collect())
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_host::fake::FakeSysfs;
    use rtvirtio_host::sysfs::Sysfs;
    use rtvirtio_spec::specification::parse;

    use super::*;

    const SPECIFICATION: &str = r#"
version = 1
[device.ssd]
path = "/dev/sda"
profile = "p.json"
[[vm]]
name = "plc"
cgroup = "machine.slice/plc.scope"
[[vm.disk]]
name = "root"
device = "ssd"
[[vm.disk]]
name = "logs"
device = "ssd"
[[vm.task]]
name = "read"
disk = "root"
[[vm.task]]
name = "log"
disk = "logs"
"#;

    #[test]
    fn process_of_a_vms_name_is_the_vm_in_its_cgroup_alone() {
        let sysfs = Arc::new(FakeSysfs::v2());
        sysfs.add_cgroup("machine.slice/plc.scope");
        let put = |pid: u32, cgroup: &str| {
            sysfs.put(&format!("/proc/{pid}/cmdline"), "qemu-kvm\0-name\0plc\0");
            sysfs.put(&format!("/proc/{pid}/cgroup"), &format!("0::/{cgroup}\n"));
        };
        let host = Host::with_sysfs("/nonexistent", Arc::clone(&sysfs) as Arc<dyn Sysfs>);
        let specification = parse("test", SPECIFICATION).unwrap();
        let find = || {
            let processes = host.qemu_processes().unwrap();
            let found = process_of(&host, &specification.vms[0], &processes);
            found.map(|process| process.pid).map_err(|error| error.to_string())
        };
        put(7, "user.slice/other.scope");
        assert_eq!(find(), Err("no QEMU of this name is in its cgroup".to_owned()));
        put(8, "machine.slice/plc.scope/libvirt/emulator");
        assert_eq!(find(), Ok(8));
        put(9, "machine.slice/plc.scope");
        assert_eq!(find(), Err("two QEMU processes of this name".to_owned()));
    }

    #[test]
    fn disk_that_is_not_there_or_leaves_is_said_once_and_the_vm_is_watched() {
        // QEMU counts `root`, of which it knows nothing any more when it is asked again.
        const SAID: &str = r#"{"QMP": {}}
{"return": {}, "id": 1}
{"return": [{"qdev": "/d", "stats": {"rd_operations": 0, "wr_operations": 0, "rd_bytes": 0, "wr_bytes": 0, "rd_total_time_ns": 0, "wr_total_time_ns": 0}}], "id": 2}
{"return": {}, "id": 3}
{"return": [], "id": 4}
{"error": {"class": "GenericError", "desc": "no such device"}, "id": 5}
"#;
        let specification = parse("test", SPECIFICATION).unwrap();
        let host = Host::with_sysfs("/nonexistent", Arc::new(FakeSysfs::v2()));
        let mut sources = Sources::new(&specification, host).unwrap();
        let disk = Disk {
            names: vec!["root".to_owned()],
            qom_path: Some("/d".to_owned()),
            libvirt: None,
            format: None,
            file: None,
            part: None,
            storage: None,
            unknown_storage: None,
            throttle: Default::default(),
        };
        let found = vms::Vm {
            name: "plc".to_owned(),
            pid: 7,
            cgroup: None,
            disks: vec![disk],
            devices: [(Some("/d".to_owned()), None)].into(),
            lacks_names: false,
            monitor: Some(Monitor::replay(SAID.as_bytes()).unwrap()),
            unreached: None,
        };
        let (vm, mut events) = (&specification.vms[0], Vec::new());
        sources.take(vm, connect(vm, found).unwrap(), &mut events);
        let missing = "plc/logs: not watched: QEMU has no disk called logs; it has: root";
        assert_eq!(events, ["plc: watched at QEMU", missing]);
        let (_, events) = sources.sample();
        assert!(events.len() == 1 && events[0].starts_with("plc/root: "), "{events:?}");
        let (samples, events) = sources.sample();
        assert!(samples.is_empty() && events.is_empty(), "{events:?}");
        let watched = &sources.connected[&vm.name];
        assert!(watched.devices.is_empty(), "it is examined anew when it is time");
    }
}
