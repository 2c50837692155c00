//! All VMs of a host, looked at again and again while they come and go.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use rtvirtio_host::{Host, HostError, Topology};
use rtvirtio_spec::settings::{Knob, Limit};
use rtvirtio_units::{DeviceName, VmName};

use crate::counters::{DiskCounter, Interval};
use crate::diagnosis::{Evidence, RateLimit};
use crate::host_disks::{DiskActivity, HostCounters};
use crate::vms::{Disk, Vm, examine};

/// How far back tails reach.
pub const RECENT: Duration = Duration::from_secs(60);
/// How long a VM whose monitor did not answer is left alone.
const RETRY_BACKOFF: Duration = Duration::from_secs(10);

/// A VM that is looked at.
struct Watched {
    vm: Vm,
    at: Instant,
    counters: Vec<Option<DiskCounter>>,
    recent: Vec<VecDeque<(Instant, Interval)>>,
}

/// The host's VMs.
pub struct Session {
    host: Host,
    host_counters: HostCounters,
    watched: BTreeMap<u32, Watched>,
}

/// What one look says of a disk.
#[derive(Debug, Clone)]
pub struct DiskLook {
    /// Its VM.
    pub vm: String,
    /// QEMU's process.
    pub pid: u32,
    /// The disk.
    pub disk: Disk,
    /// What it did since the last look, at QEMU; `None`: it is not to be measured there.
    pub last: Option<Interval>,
    /// The same within [`RECENT`].
    pub recent: Interval,
    /// What the disks below do, all of their users together.
    pub below: Vec<(String, DiskActivity)>,
    /// The least of its cgroup's limits on a disk below.
    pub cgroup_limits: RateLimit,
    /// Share of the time in which a thread of QEMU waited for a CPU.
    pub cpu_wait: f64,
}

impl DiskLook {
    /// What there is to judge by.
    #[must_use]
    pub fn evidence(&self) -> Evidence<'_> {
        let last = self.last.as_ref();
        let seconds = last.map_or(1.0, |last| last.seconds.max(1e-3));
        let rate = |count: u64| count as f64 / seconds;
        let requests = last.map_or(0, Interval::requests);
        let at_qemu = last
            .filter(|_| requests > 0)
            .map(|last| rtvirtio_units::Nanos::new(last.busy.get() / requests));
        let busiest = |(a, b): (&DiskActivity, &DiskActivity)| a.busy.total_cmp(&b.busy);
        let disk = self.below.iter().max_by(|a, b| busiest((&a.1, &b.1)));
        let throttle = self.disk.throttle;
        Evidence {
            iops: rate(requests),
            bandwidth: rate(last.map_or(0, |last| last.read_bytes + last.write_bytes)),
            at_qemu,
            limits: RateLimit {
                iops: throttle.iops.map(|iops| iops as f64),
                bandwidth: throttle.bandwidth.map(|bandwidth| bandwidth.get() as f64),
            },
            cgroup_limits: self.cgroup_limits,
            disk: disk.map(|(name, activity)| (name.as_str(), *activity)),
            cpu_wait: self.cpu_wait,
        }
    }
}

impl Session {
    /// A session that knows of no VM yet.
    #[must_use]
    pub fn new(host: Host) -> Self {
        let host_counters = HostCounters::new(host.sysfs());
        Self { host, host_counters, watched: BTreeMap::new() }
    }

    /// Sees which VMs run. What happened, in words.
    ///
    /// # Errors
    /// `/proc` cannot be listed.
    pub fn refresh(&mut self) -> Result<Vec<String>, HostError> {
        let mut events = Vec::new();
        let processes = self.host.qemu_processes()?;
        let now = Instant::now();
        let is_there: BTreeSet<u32> = processes.iter().map(|process| process.pid).collect();
        self.watched.retain(|pid, watched| {
            let stays = is_there.contains(pid);
            if !stays {
                events.push(format!("{} has ended", watched.vm.name));
            }
            // One that did not answer is asked again.
            stays && (watched.vm.monitor.is_some() || now - watched.at < RETRY_BACKOFF)
        });
        for process in &processes {
            if self.watched.contains_key(&process.pid) {
                continue;
            }
            let mut vm = examine(&self.host, process);
            let mut counters = Vec::new();
            for disk in &vm.disks {
                let started = match &mut vm.monitor {
                    Some(monitor) => DiskCounter::start(monitor, disk, &BTreeSet::new()),
                    None => Ok(None),
                };
                counters.push(started.unwrap_or_else(|error| {
                    events.push(format!("{}/{}: {error}", vm.name, disk.name()));
                    None
                }));
            }
            if let Some(why) = &vm.unreached {
                events.push(format!("{}: not measured at QEMU: {why}", vm.name));
            }
            let recent = vec![VecDeque::new(); vm.disks.len()];
            self.watched.insert(process.pid, Watched { vm, at: now, counters, recent });
        }
        Ok(events)
    }

    /// The VMs that run.
    pub fn vms(&self) -> impl Iterator<Item = &Vm> {
        self.watched.values().map(|watched| &watched.vm)
    }

    /// What each disk did since the last look, and what failed.
    pub fn look(&mut self) -> (Vec<DiskLook>, Vec<String>) {
        let (mut looks, mut events) = (Vec::new(), Vec::new());
        // Each disk of the host is read once, for all that lie on it.
        let below: BTreeSet<String> = self
            .watched
            .values()
            .flat_map(|watched| &watched.vm.disks)
            .flat_map(|disk| disk.storage.iter().flat_map(|stack| &stack.leaves))
            .map(|leaf| leaf.name.clone())
            .collect();
        let activities: BTreeMap<String, DiskActivity> = below
            .into_iter()
            .filter_map(|name| Some((name.clone(), self.host_counters.disk(&name)?)))
            .collect();
        for (pid, watched) in &mut self.watched {
            let cpu_wait = self.host_counters.cpu_wait(*pid);
            let Watched { vm, counters, recent, at } = watched;
            let limits = cgroup_limits(&self.host, vm);
            let mut lost = None;
            for (i, disk) in vm.disks.iter().enumerate() {
                let sampled = match (&mut vm.monitor, &mut counters[i], &lost) {
                    (Some(monitor), Some(counter), None) => Some(counter.sample(monitor)),
                    _ => None,
                };
                let last = match sampled {
                    Some(Ok(interval)) => Some(interval),
                    Some(Err(error)) => {
                        lost = Some(error.to_string());
                        None
                    }
                    None => None,
                };
                let now = Instant::now();
                recent[i].extend(last.clone().map(|interval| (now, interval)));
                recent[i].retain(|(at, _)| now - *at <= RECENT);
                let mut sum = Interval::default();
                recent[i].iter().for_each(|(_, interval)| sum.merge(interval));
                let leaves = disk.storage.iter().flat_map(|stack| &stack.leaves);
                let below: Vec<(String, DiskActivity)> = leaves
                    .filter_map(|leaf| Some((leaf.name.clone(), *activities.get(&leaf.name)?)))
                    .collect();
                let cgroup_limits = below
                    .iter()
                    .filter_map(|(name, _)| limits.get(name))
                    .fold(RateLimit::default(), |least, limit| least.least(*limit));
                looks.push(DiskLook {
                    vm: vm.name.clone(),
                    pid: *pid,
                    disk: disk.clone(),
                    last,
                    recent: sum,
                    cgroup_limits,
                    below,
                    cpu_wait,
                });
            }
            if let Some(error) = lost {
                events.push(format!("{}: {error}", vm.name));
                // It is left alone for a while, and then asked again.
                (vm.monitor, vm.unreached, *at) = (None, Some(error), Instant::now());
            }
        }
        (looks, events)
    }
}

/// The least limits of a VM's cgroup, by disk of the host.
fn cgroup_limits(host: &Host, vm: &Vm) -> BTreeMap<String, RateLimit> {
    let mut found: BTreeMap<String, RateLimit> = BTreeMap::new();
    let leaves = vm.disks.iter().filter_map(|disk| disk.storage.as_ref());
    let devices: BTreeMap<DeviceName, _> = leaves
        .flat_map(|stack| &stack.leaves)
        .filter_map(|leaf| Some((DeviceName::new(leaf.name.clone()).ok()?, leaf.node())))
        .collect();
    let (Some(cgroup), Ok(name)) = (&vm.cgroup, VmName::new("vm")) else { return found };
    let topology = Topology {
        uses: [(name.clone(), devices.keys().cloned().collect())].into(),
        vms: [(name, cgroup.clone())].into(),
        devices,
        ..Topology::default()
    };
    // Who may not read them has none to show.
    for (knob, value) in host.observe(&topology).unwrap_or_default() {
        let Knob::Limit { device, limit, .. } = knob else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        let limit = match limit {
            Limit::ReadIops | Limit::WriteIops => RateLimit { iops: Some(value), bandwidth: None },
            Limit::ReadBps | Limit::WriteBps => RateLimit { iops: None, bandwidth: Some(value) },
        };
        let least = found.entry(device.as_str().to_owned()).or_default();
        *least = least.least(limit);
    }
    found
}

/// Ends what a killed session counts in the host's QEMUs. One that still counts there begins anew.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn stop_counting(host: &Host) -> Result<(), HostError> {
    for process in host.qemu_processes()? {
        let Vm { monitor, disks, .. } = &mut examine(host, &process);
        let Some(monitor) = monitor else { continue };
        let paths = disks.iter().filter_map(|disk| disk.qom_path.as_deref());
        paths.for_each(|path| DiskCounter::clear(monitor, path));
    }
    Ok(())
}

impl Drop for Session {
    fn drop(&mut self) {
        // QEMU counts no longer than somebody looks.
        for watched in self.watched.values_mut() {
            let Some(monitor) = &mut watched.vm.monitor else { continue };
            watched.counters.iter().flatten().for_each(|counter| counter.stop(monitor));
        }
    }
}
