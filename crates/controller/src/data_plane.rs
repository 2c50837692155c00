//! Devices of the data plane, as its control API tells of them: responses from the kick to the
//! completion, at the ends of its buckets, so that neither a tail nor the misses are told too low.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_cli::input;
use rtvirtio_host::dataplane::{ControlClient, ControlFault, DEFAULT_SOCKET};
use rtvirtio_planner::control::{DeviceObservation, TaskObservation};
use rtvirtio_planner::service_curve;
use rtvirtio_spec::control::{DeviceState, DeviceUsage, ScheduleState, Snapshot};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::specification::{Backend, Specification, Target, Vm};
use rtvirtio_units::{DeviceName, DiskName, Nanos, VmName};

use crate::history::{History, Recent, Sample};
use crate::look::{DeviceRow, RowTarget};

/// How long the data plane may take to answer; a look is lost if it takes longer.
const ANSWER: Duration = Duration::from_millis(500);
/// No profile knows what a flush takes: a device's speed is not judged while one of so many requests
/// is one.
const MAX_FLUSH_FRACTION: u64 = 20;
/// How long one that did not answer is left alone.
const RETRY_BACKOFF: Duration = Duration::from_secs(10);
/// So long a data plane at whose socket nobody listens may restart, with its VMs running.
const RESTART_TIME: Duration = Duration::from_secs(60);

/// A device, its history, and what it had done at the last look.
struct Watched {
    vm: VmName,
    target: Option<Target>,
    seen: Histogram,
    history: History,
}

/// A physical device, and what it had done at the last look.
struct Shared {
    /// By its profile, what a request takes of a channel before its bytes.
    request: Nanos,
    /// By its profile, what a response takes beyond its service.
    overhead: Nanos,
    seen: Option<ScheduleState>,
    /// Between the last two looks.
    observed: Option<DeviceObservation>,
}

/// A data plane that is watched.
pub(crate) struct DataPlane {
    client: ControlClient,
    /// Somebody named the socket: it is missed when it is not there.
    is_named: bool,
    vms: Vec<Vm>,
    devices: BTreeMap<DiskName, Watched>,
    /// Since when it has not answered, if it does not.
    lost_since: Option<Instant>,
    /// VMs of the specification whose front ends were connected when it last answered.
    present: BTreeSet<VmName>,
    /// Those that its VMs share, if their profiles can be read.
    shared: BTreeMap<DeviceName, Shared>,
    /// When it was last asked.
    at: Instant,
    left_alone: Option<Instant>,
    /// Why it is not watched, so that it is said once.
    said: Option<String>,
}

impl DataPlane {
    /// The one at `socket`, else the specification's, else the one at the usual place, if it is
    /// there.
    pub(crate) fn new(specification: &Specification, socket: Option<&Path>) -> Self {
        let socket = socket.or(specification.data_plane.as_deref());
        let path = socket.map_or_else(|| PathBuf::from(DEFAULT_SOCKET), Path::to_owned);
        // Of one that cannot be read, the plan says so.
        let shared = specification.devices.iter().filter_map(|device| {
            let curve = service_curve(&input::profile(&device.profile).ok()?.capacity);
            let (request, overhead) = (curve.device.request, curve.overhead);
            Some((device.name.clone(), Shared { request, overhead, seen: None, observed: None }))
        });
        Self {
            shared: shared.collect(),
            client: ControlClient::new(path).with_timeout(ANSWER),
            is_named: socket.is_some(),
            vms: specification.vms.clone(),
            devices: BTreeMap::new(),
            lost_since: None,
            present: BTreeSet::new(),
            at: Instant::now(),
            left_alone: None,
            said: None,
        }
    }

    /// The VM of this name, if the specification has its disks served here.
    fn served(&self, name: &VmName) -> Option<&Vm> {
        let vm = self.vms.iter().find(|vm| vm.name == *name);
        vm.filter(|vm| vm.backend == Backend::VhostUser)
    }

    /// VMs of the specification that it serves and whose front ends were connected when it last
    /// answered, and what their tasks did since the last look: a device's requests count as those of
    /// its strictest task.
    pub(crate) fn observed(&self, rows: &[DeviceRow]) -> (BTreeSet<VmName>, Vec<TaskObservation>) {
        // A look that was lost says nothing of the tasks, and not that a VM has gone.
        if rows.is_empty() {
            return (self.present.clone(), Vec::new());
        }
        let observe = |(device, watched): (&DiskName, &Watched)| {
            let tasks = self.served(&watched.vm)?.tasks.iter().filter(|task| task.disk == *device);
            let with_target = tasks.filter_map(|task| Some((task, task.target?)));
            let (task, target) = with_target.min_by_key(|(_, target)| target.latency)?;
            let last = watched.history.recent.back().map(|(_, sample)| sample)?;
            Some(TaskObservation {
                vm: watched.vm.clone(),
                task: task.name.clone(),
                percentile: target.percentile,
                requests: last.histogram.count(),
                misses: last.misses,
            })
        };
        (self.present.clone(), self.devices.iter().filter_map(observe).collect())
    }

    /// How fast each physical device was between the last two looks.
    pub(crate) fn speeds(&mut self) -> Vec<DeviceObservation> {
        self.shared.values_mut().filter_map(|shared| shared.observed.take()).collect()
    }

    /// What each device did since the last look, and has done in the last minute.
    pub(crate) fn take(&mut self, now: Instant, events: &mut Vec<String>) -> Vec<DeviceRow> {
        if !self.is_named && !self.client.socket().exists() {
            self.forget(events);
            return Vec::new();
        }
        if self.left_alone.is_some_and(|since| now - since < RETRY_BACKOFF) {
            return Vec::new();
        }
        match self.client.snapshot() {
            Ok(snapshot) => {
                self.lost_since = None;
                // Both are taken: a loss that was said is said again when it happens again.
                let (left_alone, said) = (self.left_alone.take(), self.said.take());
                if left_alone.is_some() || said.is_some() {
                    events.push("data plane: watched again".to_owned());
                }
                self.rows(&snapshot, now, events)
            }
            Err(error) => {
                self.left_alone = Some(now);
                let since = *self.lost_since.get_or_insert(now);
                if matches!(error, ControlFault::Connect { .. }) && now - since >= RESTART_TIME {
                    self.present.clear();
                }
                let why = format!("data plane: not watched: {:#}", anyhow::Error::from(error));
                if self.said.as_ref() != Some(&why) {
                    self.said = Some(why.clone());
                    events.push(why);
                }
                Vec::new()
            }
        }
    }

    fn forget(&mut self, events: &mut Vec<String>) {
        self.present.clear();
        if !self.devices.is_empty() {
            self.devices.clear();
            events.push("data plane: it is gone".to_owned());
        }
    }

    fn rows(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        events: &mut Vec<String>,
    ) -> Vec<DeviceRow> {
        let seconds = (now - self.at).as_secs_f64();
        self.at = now;
        for (name, shared) in &mut self.shared {
            // A plan names a device's schedule after it.
            let of_device = snapshot.schedules.iter().find(|s| s.name.as_str() == name.as_str());
            shared.look(name, of_device);
        }
        self.devices.retain(|name, watched| {
            let is_there = snapshot.devices.iter().any(|d| d.name == *name && d.vm == watched.vm);
            if !is_there {
                events.push(format!("{}/{name}: gone from the data plane", watched.vm));
            }
            is_there
        });
        let mut rows = Vec::new();
        for device in &snapshot.devices {
            let watched = match self.devices.get_mut(&device.name) {
                Some(watched) => {
                    let new = device.responses.since(&watched.seen);
                    let misses = misses(&new, watched.target);
                    watched.history.add(now, Sample { histogram: new, misses, seconds });
                    watched.seen.clone_from(&device.responses);
                    watched
                }
                None => {
                    events
                        .push(format!("{}/{}: watched in the data plane", device.vm, device.name));
                    let target = target(&self.vms, snapshot, device);
                    let (vm, seen) = (device.vm.clone(), device.responses.clone());
                    let watched = Watched { vm, target, seen, history: History::default() };
                    self.devices.entry(device.name.clone()).or_insert(watched)
                }
            };
            rows.push(watched.row(device, now));
        }
        let connected = rows.iter().filter(|row| row.connected);
        let present = connected.filter_map(|row| self.served(&row.vm)).map(|vm| vm.name.clone());
        self.present = present.collect();
        rows
    }
}

impl Shared {
    fn look(&mut self, name: &DeviceName, state: Option<&ScheduleState>) {
        let seen = std::mem::replace(&mut self.seen, state.cloned());
        self.observed = state.zip(seen).and_then(|(new, seen)| self.observe(name, new, &seen));
    }

    /// What the device did between two looks; none if they cannot be compared.
    fn observe(
        &self,
        name: &DeviceName,
        new: &ScheduleState,
        seen: &ScheduleState,
    ) -> Option<DeviceObservation> {
        // The costs of both are of one curve, and of one data plane.
        let is_same = new.request_ns == seen.request_ns && new.channels == seen.channels;
        if !is_same || new.usage.requests < seen.usage.requests {
            return None;
        }
        let did = since(&new.usage, &seen.usage);
        if did.flushes.saturating_mul(MAX_FLUSH_FRACTION) > did.requests {
            return None;
        }
        // The curve in force may be of the device as slow as it was.
        let factor = self.request.as_secs_f64() / new.request_ns.as_secs_f64();
        let around = self.overhead.scale(did.alone as f64);
        Some(DeviceObservation {
            device: name.clone(),
            requests: did.requests,
            served: did.used_ns.saturating_sub(around),
            expected: did.cost_ns.scale(factor),
        })
    }
}

/// What a device did between two looks.
const fn since(new: &DeviceUsage, seen: &DeviceUsage) -> DeviceUsage {
    DeviceUsage {
        used_ns: new.used_ns.saturating_sub(seen.used_ns),
        cost_ns: new.cost_ns.saturating_sub(seen.cost_ns),
        requests: new.requests.saturating_sub(seen.requests),
        flushes: new.flushes.saturating_sub(seen.flushes),
        alone: new.alone.saturating_sub(seen.alone),
    }
}

impl Watched {
    fn row(&self, device: &DeviceState, now: Instant) -> DeviceRow {
        let Recent { tails, iops } = self.history.recent(now);
        let mut iothreads: Vec<_> = device.queues.iter().map(|q| q.iothread.clone()).collect();
        iothreads.sort();
        iothreads.dedup();
        DeviceRow {
            vm: device.vm.clone(),
            device: device.name.clone(),
            measured_at: MeasuredAt::DataPlane,
            tails,
            target: self.target.map(|t| RowTarget { percentile: t.percentile, latency: t.latency }),
            misses: self.history.misses,
            requests: self.history.requests,
            iops,
            in_flight: device.queues.iter().map(|q| q.in_flight).sum(),
            iothreads,
            connected: device.connected,
            promises: device.qos.as_ref().and_then(|qos| qos.had.promises()),
        }
    }
}

/// The strictest target of the tasks on a device: those on the disk of its name; all of its VM's
/// if that is the VM's only device here.
fn target(vms: &[Vm], snapshot: &Snapshot, device: &DeviceState) -> Option<Target> {
    let vm = vms.iter().find(|vm| vm.name == device.vm)?;
    let is_only = snapshot.devices.iter().filter(|d| d.vm == device.vm).count() == 1;
    let has_disk = vm.disks.iter().any(|disk| disk.name == device.name);
    let on_it = vm.tasks.iter().filter(|t| t.disk == device.name || (is_only && !has_disk));
    on_it.filter_map(|t| t.target).min_by_key(|t| t.latency)
}

/// Requests in buckets that end above the target.
fn misses(histogram: &Histogram, target: Option<Target>) -> u64 {
    let latency = target.map_or(Nanos::new(u64::MAX), |t| t.latency);
    histogram.bins().filter(|&(end, _)| end > latency).map(|(_, count)| count).sum()
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::specification::parse;

    use super::*;
    use rtvirtio_spec::control::StallsState;

    const SPECIFICATION: &str = r#"
version = 1
[device.ssd]
path = "/dev/sda"
profile = "p.json"
[[vm]]
name = "plc"
cgroup = "plc.scope"
[[vm.disk]]
name = "root"
device = "ssd"
[[vm.disk]]
name = "logs"
device = "ssd"
[[vm.task]]
name = "read"
disk = "root"
target = { percentile = 99.9, latency_ms = 5 }
[[vm.task]]
name = "log"
disk = "logs"
"#;

    /// Devices with a bucket of so many requests each.
    fn snapshot(devices: &[(&str, &str, (u64, u64))]) -> Snapshot {
        let device = |&(vm, name, (end_us, count)): &(&str, &str, (u64, u64))| {
            let mut responses = Histogram::new();
            responses.record(Nanos::from_micros(end_us), count);
            DeviceState {
                name: DiskName::new(name).unwrap(),
                vm: VmName::new(vm).unwrap(),
                socket: None,
                connected: true,
                capacity: rtvirtio_units::Bytes::new(512),
                read_only: false,
                queues: Vec::new(),
                responses,
                qos: None,
                slots: None,
            }
        };
        Snapshot { devices: devices.iter().map(device).collect(), ..Snapshot::default() }
    }

    #[test]
    fn requests_count_from_the_first_look_and_misses_against_the_task_on_the_disk() {
        let specification = parse("test", SPECIFICATION).unwrap();
        let mut data_plane = DataPlane::new(&specification, None);
        let (start, mut events) = (data_plane.at, Vec::new());
        let at = |s| start + Duration::from_secs(s);
        let before = [("plc", "root", (8000, 50)), ("plc", "logs", (8000, 50))];
        data_plane.rows(&snapshot(&before), at(1), &mut events);
        let after = [("plc", "root", (8000, 250)), ("plc", "logs", (8000, 90))];
        let rows = data_plane.rows(&snapshot(&after), at(3), &mut events);
        let [root, logs] = rows.as_slice() else { panic!("two rows") };
        assert_eq!((root.requests, root.misses, root.iops), (200, 200, 100.0));
        assert_eq!(root.target.unwrap().latency, Nanos::from_millis(5));
        assert_eq!(root.tails[0].unwrap().value, Nanos::from_millis(8));
        // 200 requests: 2 beyond p99.
        assert!(root.tails[1].is_none());
        assert_eq!((logs.requests, logs.misses, logs.target.is_none()), (40, 0, true));
        assert_eq!(events.len(), 2, "{events:?}");

        // Served anew: what it has done is all new.
        let anew = data_plane.rows(&snapshot(&[("plc", "root", (4000, 10))]), at(4), &mut events);
        assert_eq!((anew[0].requests, anew[0].misses), (210, 200));
        assert_eq!(events[2], "plc/logs: gone from the data plane");
    }

    #[test]
    fn control_sees_vms_of_the_data_plane_by_their_front_ends_and_strictest_tasks() {
        let head = "version = 1\n[data_plane]\ncontrol = \"/run/x.sock\"";
        let text = SPECIFICATION.replace("version = 1", head);
        let text = text.replace("[[vm]]", "[[vm]]\nbackend = \"vhost-user\"");
        let mut data_plane = DataPlane::new(&parse("test", &text).unwrap(), None);
        assert_eq!(data_plane.client.socket(), Path::new("/run/x.sock"));
        let now = data_plane.at + Duration::from_secs(1);
        let mut look = |count| {
            let devices = [("plc", "root", (8000, count)), ("other", "root2", (8000, count))];
            let rows = data_plane.rows(&snapshot(&devices), now, &mut Vec::new());
            data_plane.observed(&rows)
        };
        let plc = VmName::new("plc").unwrap();
        assert_eq!(look(50), ([plc.clone()].into(), Vec::new()));
        let (_, observed) = look(250);
        let [read] = &observed[..] else { panic!("{observed:?}") };
        assert_eq!((read.task.as_str(), read.requests, read.misses), ("read", 200, 200));
        assert_eq!(data_plane.observed(&[]), ([plc].into(), Vec::new()));
        // VMs of the kernel path are watched at their QEMUs.
        let mut kernel = DataPlane::new(&parse("test", SPECIFICATION).unwrap(), None);
        let rows = kernel.rows(&snapshot(&[("plc", "root", (1, 1))]), now, &mut Vec::new());
        assert_eq!(kernel.observed(&rows), Default::default());
    }

    #[test]
    fn vm_outlasts_answers_that_do_not_come_and_each_loss_is_said() {
        use std::io::{Read as _, Write as _};

        const NO_DEVICE: &[u8] = b"HTTP/1.0 200 OK\r\n\r\n\
            {\"time_ns\":7,\"iothreads\":[],\"devices\":[]}";
        let head = "version = 1\n[data_plane]\ncontrol = \"/run/x.sock\"";
        let text = SPECIFICATION.replace("version = 1", head);
        let text = text.replace("[[vm]]", "[[vm]]\nbackend = \"vhost-user\"");
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let mut data_plane = DataPlane::new(&parse("test", &text).unwrap(), Some(socket.as_path()));
        data_plane.client = data_plane.client.clone().with_timeout(Duration::from_secs(60));
        let (start, mut events) = (data_plane.at, Vec::new());
        let at = |s| start + Duration::from_secs(s);
        data_plane.rows(&snapshot(&[("plc", "root", (8000, 50))]), at(1), &mut events);
        // Nobody answers, and then it is left alone.
        for s in [2, 3] {
            let rows = data_plane.take(at(s), &mut events);
            let plc = VmName::new("plc").unwrap();
            assert_eq!(data_plane.observed(&rows), ([plc].into(), Vec::new()));
        }
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(NO_DEVICE);
        });
        let rows = data_plane.take(at(20), &mut events);
        server.join().unwrap();
        assert_eq!(data_plane.observed(&rows), Default::default());
        // One that nobody listens at any more has left no VM behind.
        data_plane.rows(&snapshot(&[("plc", "root", (8000, 50))]), at(21), &mut events);
        std::fs::remove_file(&socket).unwrap();
        for (s, is_there) in [(21, true), (40, true), (81, false)] {
            let rows = data_plane.take(at(s), &mut events);
            assert_eq!(data_plane.observed(&rows).0.is_empty(), !is_there, "{s}");
        }
        let lost = events.iter().filter(|event| event.contains("not watched")).count();
        assert_eq!(lost, 2, "{events:?}");
    }

    #[test]
    fn speed_of_a_device_is_told_by_its_profile_whatever_curve_is_in_force() {
        let (request, overhead) = (Nanos::from_micros(200), Nanos::from_micros(50));
        let mut shared = Shared { request, overhead, seen: None, observed: None };
        let name = DeviceName::new("ssd").unwrap();
        let mut look = |request_us, (used, cost, requests, flushes, alone)| {
            let usage = DeviceUsage {
                used_ns: Nanos::from_millis(used),
                cost_ns: Nanos::from_millis(cost),
                requests,
                flushes,
                alone,
            };
            let request_ns = Nanos::from_micros(request_us);
            let state = ScheduleState {
                name: rtvirtio_units::Name::new("ssd").unwrap(),
                channels: 4,
                request_ns,
                kib_ns: Nanos::ZERO,
                flush_ns: request_ns,
                waiting: 0,
                running: 0,
                background: 0,
                background_bound: 4,
                withheld_ns: Nanos::ZERO,
                usage,
                stalls: StallsState::default(),
            };
            shared.look(&name, Some(&state));
            let seen = shared.observed.take()?;
            Some((seen.requests, seen.served, seen.expected))
        };
        let told = |requests, served, expected| {
            Some((requests, Nanos::from_millis(served), Nanos::from_millis(expected)))
        };
        assert_eq!(look(200, (1_000, 900, 4_500, 0, 0)), None);
        // 1,000 requests of 200 us took 450 us each, 50 of them around the service.
        assert_eq!(look(200, (1_450, 1_100, 5_500, 0, 1_000)), told(1_000, 400, 200));
        // Another curve cannot be compared; that it charges twice as much is seen through.
        assert_eq!(look(400, (1_450, 1_100, 5_500, 0, 1_000)), None);
        assert_eq!(look(400, (1_850, 1_500, 6_500, 50, 1_000)), told(1_000, 400, 200));
        assert_eq!(look(400, (2_250, 1_900, 7_500, 101, 1_000)), None);
        // Another data plane.
        assert_eq!(look(400, (10, 10, 10, 0, 0)), None);
    }

    #[test]
    fn absent_data_plane_is_said_once_and_only_if_it_was_named() {
        let specification = parse("test", SPECIFICATION).unwrap();
        let mut events = Vec::new();
        let socket = Path::new("/nonexistent/control.sock");
        let mut data_plane = DataPlane::new(&specification, Some(socket));
        for s in [0, 11, 22] {
            let now = Instant::now() + Duration::from_secs(s);
            assert!(data_plane.take(now, &mut events).is_empty());
        }
        assert_eq!(events.len(), 1, "{events:?}");
        let words = "data plane: not watched: cannot connect to the data plane at /nonexistent";
        assert!(events[0].starts_with(words), "{events:?}");
    }
}
