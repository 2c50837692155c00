//! Where a task's latencies come from: the latency histograms of its disk in QEMU; and where that
//! disk lies on the host, which QEMU alone can tell.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rtvirtio_host::Host;
use rtvirtio_host::qemu::{Monitor, Part, QemuProcess};
use rtvirtio_observe::counters::DiskCounter;
use rtvirtio_observe::vms::{self, Disk};
use rtvirtio_spec::plan::qemu;
use rtvirtio_spec::specification::{Backend, Specification, Vm};
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

/// Where VMs' disks lie on the host.
pub(crate) type Parts = BTreeMap<(VmName, DiskName), Part>;

/// All VMs of a specification.
pub(crate) struct Sources {
    host: Host,
    vms: Vec<Vm>,
    connected: BTreeMap<VmName, (Monitor, BTreeMap<DiskName, DiskSource>)>,
    left_alone: BTreeMap<VmName, Instant>,
    /// Why a VM is not watched, so that it is said once.
    said: BTreeMap<VmName, String>,
    /// Of VMs that run and told it, also if their monitor is lost.
    parts: Parts,
    present: BTreeSet<VmName>,
}

/// The VMs whose disks QEMU serves.
fn kernel_path(specification: &Specification) -> impl Iterator<Item = &Vm> {
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

    /// Sees which VMs run, and connects to those that are new. Returns what happened.
    pub(crate) fn refresh(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        if let Ok(version) = self.host.cgroup_version() {
            let runs = |vm: &&Vm| {
                let found = self.host.cgroup_of(&vm.cgroup).ok().flatten();
                found.is_some_and(|path| has_process(&version.mount().join(path), 4))
            };
            self.present = self.vms.iter().filter(runs).map(|vm| vm.name.clone()).collect();
        }
        self.connected.retain(|vm, _| self.present.contains(vm));
        self.parts.retain(|(vm, _), _| self.present.contains(vm));
        let now = Instant::now();
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
        for vm in new {
            let process = processes.iter().find(|p| p.name.as_deref() == Some(vm.name.as_str()));
            let connected =
                process.context("no QEMU of this name").and_then(|p| connect(&self.host, &vm, p));
            match connected {
                Ok(Connected { monitor, sources, parts }) => {
                    events.push(format!("{}: watched at QEMU", vm.name));
                    self.said.remove(&vm.name);
                    self.parts.retain(|(of, _), _| *of != vm.name);
                    let of_vm = |(disk, part)| ((vm.name.clone(), disk), part);
                    self.parts.extend(parts.into_iter().map(of_vm));
                    self.connected.insert(vm.name, (monitor, sources));
                }
                Err(error) => {
                    let why = format!("{}: not watched: {error:#}", vm.name);
                    if self.said.insert(vm.name.clone(), why.clone()).as_ref() != Some(&why) {
                        events.push(why);
                    }
                    self.left_alone.insert(vm.name, now);
                }
            }
        }
        events
    }

    /// What each task did since the last look, and which disks' QEMU did not answer. Tasks of VMs
    /// that are not watched are left out.
    pub(crate) fn sample(&mut self) -> (BTreeMap<(VmName, TaskName), Sample>, Vec<String>) {
        let (mut samples, mut lost) = (BTreeMap::new(), Vec::new());
        for (vm, (monitor, disks)) in &mut self.connected {
            for (disk, source) in disks {
                match source.sample(monitor) {
                    Ok(of_tasks) => samples.extend(
                        of_tasks.into_iter().map(|(task, sample)| ((vm.clone(), task), sample)),
                    ),
                    Err(error) => {
                        lost.push((vm.clone(), format!("{vm}/{disk}: {error:#}")));
                        break;
                    }
                }
            }
        }
        let now = Instant::now();
        let event = |(vm, event): (VmName, String)| {
            // A monitor that does not answer is not asked at each look.
            self.connected.remove(&vm);
            self.left_alone.insert(vm, now);
            event
        };
        let events = lost.into_iter().map(event).collect();
        (samples, events)
    }

    /// Gives up all monitors, for somebody else to use; the next refresh takes them again.
    pub(crate) fn let_go(&mut self) {
        // QEMU counts no longer than somebody looks.
        for (monitor, disks) in self.connected.values_mut() {
            for disk in disks.values() {
                disk.counter.stop(monitor);
            }
        }
        self.connected.clear();
    }
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
    monitor: Monitor,
    /// Of disks with a task on them.
    sources: BTreeMap<DiskName, DiskSource>,
    /// Of all disks that a file or device of the host has.
    parts: Vec<(DiskName, Part)>,
}

/// Connects to a VM's QEMU and has it count latencies.
fn connect(host: &Host, vm: &Vm, process: &QemuProcess) -> Result<Connected> {
    let found = vms::examine(host, process);
    let Some(mut monitor) = found.monitor else {
        bail!(found.unreached.unwrap_or_default());
    };
    let (mut sources, mut parts) = (BTreeMap::new(), Vec::new());
    for disk in &vm.disks {
        let name = &disk.name;
        let is_it = |disk: &&Disk| {
            disk.qom_path.as_deref().is_some_and(|path| qemu::is_device_of(name, path))
        };
        // By the id that `plan --qemu` gives it, or by any other name that is known of it.
        let by_id = found.disks.iter().find(is_it);
        let by_name = || found.disks.iter().find(|disk| disk.is_called(name.as_str()));
        let Some(there) = by_id.or_else(by_name) else {
            let names = found.disks.iter().map(|disk| disk.names.join(" = "));
            let names: Vec<String> = names.collect();
            bail!("QEMU has no disk called {name}; it has: {}", names.join("; "));
        };
        parts.extend(there.part.clone().map(|part| (name.clone(), part)));
        let mut on_it = vm.tasks.iter().filter(|t| t.disk == disk.name).peekable();
        if on_it.peek().is_some() {
            let tasks: Vec<_> =
                on_it.map(|t| (t.name.clone(), t.target.map(|t| t.latency))).collect();
            let targets = tasks.iter().filter_map(|(_, target)| *target).collect();
            let counter = DiskCounter::start(&mut monitor, there, &targets)?;
            sources.extend(counter.map(|counter| (name.clone(), DiskSource { counter, tasks })));
        }
    }
    Ok(Connected { monitor, sources, parts })
}

impl DiskSource {
    fn sample(&mut self, monitor: &mut Monitor) -> Result<Vec<(TaskName, Sample)>> {
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
