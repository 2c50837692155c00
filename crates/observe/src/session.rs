//! All VMs of a host, looked at again and again while they come and go.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_host::qemu::{QemuError, QemuProcess};
use rtvirtio_host::{Host, HostError, Topology};
use rtvirtio_spec::settings::{Knob, Limit};
use rtvirtio_units::{DeviceName, VmName};

use crate::counters::{self, DiskCounter, Interval};
use crate::diagnosis::{Evidence, RateLimit};
use crate::host_disks::{DiskActivity, HostCounters};
use crate::vms::{BELIEVED, Disk, Vm, at_once, block_devices, examine, examine_all, is_late};

/// How far back tails reach.
pub const RECENT: Duration = Duration::from_secs(60);
/// How long a VM whose monitor did not answer is left alone.
const RETRY_BACKOFF: Duration = Duration::from_secs(10);

/// A VM that is looked at.
struct Watched {
    vm: Vm,
    /// When its monitor was lost, or else its disks were last seen to be those that they were.
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
            bandwidth: rate(last.map_or(0, Interval::bytes)),
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
        self.refresh_until(&Interrupted::new(false))
    }

    /// As [`Self::refresh`], until the user interrupts it: other VMs are left for the next time.
    ///
    /// # Errors
    /// `/proc` cannot be listed.
    pub fn refresh_until(&mut self, interrupted: &Interrupted) -> Result<Vec<String>, HostError> {
        let mut events = Vec::new();
        let processes = self.host.qemu_processes()?;
        let now = Instant::now();
        let is_there: BTreeSet<u32> = processes.iter().map(|process| process.pid).collect();
        self.watched.retain(|pid, watched| {
            let is_there = is_there.contains(pid);
            if !is_there {
                events.push(format!("{} has ended", watched.vm.name));
            }
            is_there
        });
        let stays = at_once(self.watched.values_mut(), |watched| match watched.vm.monitor {
            // It is examined anew.
            Some(_) => !watched.has_other_disks(now),
            // One that did not answer is asked again.
            None => now - watched.at < RETRY_BACKOFF,
        });
        let mut stays = stays.into_iter();
        self.watched.retain(|_, _| stays.next() == Some(true));
        self.host_counters.keep(&is_there);
        let is_new = |process: &&QemuProcess| !self.watched.contains_key(&process.pid);
        let new: Vec<&QemuProcess> = processes.iter().filter(is_new).collect();
        let started = at_once(examine_all(&self.host, &new, interrupted), |mut vm| {
            let (counters, events) = start(&mut vm);
            (vm, counters, events)
        });
        for (vm, counters, said) in started {
            events.extend(said);
            if let Some(why) = &vm.unreached {
                events.push(format!("{}: not measured at QEMU: {why}", vm.name));
            }
            let recent = vec![VecDeque::new(); vm.disks.len()];
            self.watched.insert(vm.pid, Watched { vm, at: now, counters, recent });
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
        let sampled = at_once(self.watched.values_mut(), Watched::sample);
        for ((pid, watched), (intervals, lost)) in self.watched.iter_mut().zip(sampled) {
            let cpu_wait = self.host_counters.cpu_wait(*pid);
            let Watched { vm, recent, at, .. } = watched;
            let limits = cgroup_limits(&self.host, vm);
            for (i, (disk, last)) in vm.disks.iter().zip(intervals).enumerate() {
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
                let why = Some(error.to_string());
                (vm.monitor, vm.unreached, *at) = (None, why, Instant::now());
            }
        }
        (looks, events)
    }
}

impl Watched {
    /// What each disk did since the last look, as far as its QEMU says, and why it says no more.
    fn sample(&mut self) -> (Vec<Option<Interval>>, Option<QemuError>) {
        let Some(monitor) = &mut self.vm.monitor else {
            return (vec![None; self.counters.len()], None);
        };
        let (mut intervals, mut lost) = (Vec::new(), None);
        for counter in &mut self.counters {
            let sampled = match counter {
                Some(counter) if lost.is_none() => Some(counter.sample(monitor)),
                _ => None,
            };
            intervals.push(sampled.transpose().unwrap_or_else(|error| {
                lost = Some(error);
                None
            }));
        }
        // Of a disk that is gone: QEMU would count the others for nobody.
        if lost.as_ref().is_some_and(|error| !is_late(error)) {
            counters::stop(self.counters.iter().flatten(), monitor);
        }
        (intervals, lost)
    }

    /// Whether disks were plugged, unplugged or moved since they were examined, which is looked at once
    /// in a while. Nothing is counted any more then.
    fn has_other_disks(&mut self, now: Instant) -> bool {
        let Some(monitor) = self.vm.monitor.as_mut().filter(|_| now - self.at >= BELIEVED) else {
            return false;
        };
        self.at = now;
        // A monitor that does not answer is lost at the next look.
        let is_other = block_devices(monitor).is_ok_and(|devices| devices != self.vm.devices);
        if is_other {
            counters::stop(self.counters.iter().flatten(), monitor);
        }
        is_other
    }
}

/// Has QEMU count the latencies of a VM's disks; what failed, in words. A monitor that is late is not asked about the
/// others.
fn start(vm: &mut Vm) -> (Vec<Option<DiskCounter>>, Vec<String>) {
    let (mut counters, mut events) = (Vec::new(), Vec::new());
    for disk in &vm.disks {
        let started = match &mut vm.monitor {
            Some(monitor) => DiskCounter::start(monitor, disk, &BTreeSet::new()),
            None => Ok(None),
        };
        counters.push(started.unwrap_or_else(|error| {
            events.push(format!("{}/{}: {error}", vm.name, disk.name()));
            if is_late(&error) {
                (vm.monitor, vm.unreached) = (None, Some(error.to_string()));
            }
            None
        }));
    }
    (counters, events)
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
        at_once(self.watched.values_mut(), |watched| {
            if let Some(monitor) = &mut watched.vm.monitor {
                counters::stop(watched.counters.iter().flatten(), monitor);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;

    use rtvirtio_host::fake::FakeSysfs;
    use rtvirtio_host::qemu::Monitor;

    use super::*;
    use crate::vms::ANSWER;

    #[test]
    fn monitors_that_hang_are_waited_for_side_by_side() {
        // What it takes to begin to count. Nothing more is said.
        const SAID: &str = r#"{"QMP": {}}
{"return": {}, "id": 1}
{"return": [{"qdev": "/d", "stats": {"rd_operations": 0, "wr_operations": 0, "rd_bytes": 0, "wr_bytes": 0, "rd_total_time_ns": 0, "wr_total_time_ns": 0}}], "id": 2}
{"return": {}, "id": 3}
"#;
        const VMS: u32 = 12;
        let socket = std::env::temp_dir().join(format!("rtvirtio-hang-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).unwrap();
        let monitors = std::thread::spawn(move || {
            let serve = |_| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(SAID.as_bytes()).unwrap();
                stream
            };
            (0..VMS).map(serve).collect::<Vec<_>>()
        });
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
        let host = Host::with_sysfs("/nonexistent", Arc::new(FakeSysfs::v2()));
        let mut session = Session::new(host);
        for pid in 0..VMS {
            let mut vm = Vm {
                name: format!("vm{pid}"),
                pid,
                cgroup: None,
                disks: vec![disk.clone()],
                devices: Default::default(),
                lacks_names: false,
                monitor: Some(Monitor::connect(&socket, Duration::from_secs(60)).unwrap()),
                unreached: None,
            };
            let (counters, events) = start(&mut vm);
            assert_eq!(events, [""; 0]);
            let recent = vec![VecDeque::new()];
            session.watched.insert(pid, Watched { vm, at: Instant::now(), counters, recent });
        }
        std::fs::remove_file(&socket).unwrap();
        let _kept = monitors.join().unwrap();
        let begin = Instant::now();
        let (looks, events) = session.look();
        assert!(begin.elapsed() < ANSWER * VMS / 2, "{:?}", begin.elapsed());
        assert!(looks.iter().map(|look| look.pid).eq(0..VMS));
        assert_eq!(events.len(), VMS as usize, "{events:?}");
        // They are left alone for a while.
        assert!(session.look().1.is_empty());
    }

    #[test]
    fn disk_that_was_moved_is_seen_when_it_is_time_to_look() {
        let blocks = |id: u64, file: &str| {
            format!(
                "{{\"return\": [{{\"device\": \"\", \"qdev\": \"/d\", \"inserted\": {{ \
                 \"file\": \"{file}\", \"drv\": \"raw\", \"bps\": 0, \"iops\": 0}}}}], \
                 \"id\": {id}}}\n"
            )
        };
        let said = format!(
            "{{\"QMP\": {{}}}}\n{{\"return\": {{}}, \"id\": 1}}\n{}{}",
            blocks(2, "/img/a"),
            blocks(3, "/img/b")
        );
        let vm = Vm {
            name: "db".to_owned(),
            pid: 7,
            cgroup: None,
            disks: vec![],
            devices: [(Some("/d".to_owned()), Some("/img/a".to_owned()))].into(),
            lacks_names: false,
            monitor: Some(Monitor::replay(said.as_bytes()).unwrap()),
            unreached: None,
        };
        let start = Instant::now();
        let mut watched = Watched { vm, at: start, counters: vec![], recent: vec![] };
        let look = |s| watched.has_other_disks(start + Duration::from_secs(s));
        assert_eq!([5, 10, 15, 20].map(look), [false, false, false, true]);
    }
}
