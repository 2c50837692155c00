//! What a data plane's disks and network devices do, by its control API.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_host::dataplane::{ControlClient, DEFAULT_SOCKET};
use rtvirtio_observe::diagnosis::Where;
use rtvirtio_observe::session::RECENT;
use rtvirtio_observe::vms::plain;
use rtvirtio_spec::control::{DeviceState, NicState, Snapshot};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_units::IoThreadName;
use serde::Serialize;

use super::{PERCENTILES, Row, tail};

/// How long it may take to answer; a look is lost if it takes longer.
const ANSWER: Duration = Duration::from_millis(500);
/// An IOThread that is at work for so much of the time has its queues wait.
const BUSY: f64 = 0.9;

/// One network device's line.
#[derive(Debug, Serialize)]
pub(super) struct NicRow {
    pub(super) vm: String,
    pub(super) nic: String,
    pub(super) link: String,
    pub(super) connected: bool,
    /// To the guest.
    pub(super) received_per_s: f64,
    /// From the guest.
    pub(super) transmitted_per_s: f64,
    /// Both ways.
    pub(super) bytes_per_s: f64,
    pub(super) dropped_per_s: f64,
    /// Of these, by their reasons, those that there are.
    pub(super) drops_per_s: BTreeMap<&'static str, f64>,
    pub(super) iothreads: Vec<IoThreadName>,
}

/// A data plane that is looked at.
pub(super) struct DataPlane {
    client: ControlClient,
    /// Somebody named the socket: it is missed when it is not there.
    is_named: bool,
    seen: Option<(Snapshot, Instant)>,
    /// By device.
    recent: BTreeMap<String, VecDeque<(Instant, Histogram)>>,
    /// Why it is not looked at, so that it is said once.
    said: Option<String>,
}

impl DataPlane {
    pub(super) fn new(socket: Option<&Path>) -> Self {
        let path = socket.map_or_else(|| PathBuf::from(DEFAULT_SOCKET), Path::to_owned);
        Self {
            client: ControlClient::new(path).with_timeout(ANSWER),
            is_named: socket.is_some(),
            seen: None,
            recent: BTreeMap::new(),
            said: None,
        }
    }

    /// What each device did since the last look; nothing at the first.
    pub(super) fn look(&mut self, events: &mut Vec<String>) -> (Vec<Row>, Vec<NicRow>) {
        if !self.is_named && !self.client.socket().exists() {
            self.seen = None;
            return Default::default();
        }
        let now = Instant::now();
        let snapshot = match self.client.snapshot() {
            Ok(snapshot) => snapshot,
            Err(error) => {
                let why = format!("data plane: {:#}", anyhow::Error::from(error));
                if self.said.as_ref() != Some(&why) {
                    self.said = Some(why.clone());
                    events.push(why);
                }
                self.seen = None;
                return Default::default();
            }
        };
        self.said = None;
        let Some((before, at)) = self.seen.replace((snapshot.clone(), now)) else {
            return Default::default();
        };
        // Another process, whose counters begin anew.
        if before.started_ns != snapshot.started_ns {
            self.recent.clear();
            return Default::default();
        }
        let seconds = (now - at).as_secs_f64().max(1e-3);
        let busy = busy(&before, &snapshot, seconds);
        let is_there = |name: &String| snapshot.devices.iter().any(|d| d.name.as_str() == name);
        self.recent.retain(|name, _| is_there(name));
        let pairs = snapshot.devices.iter().filter_map(|device| {
            let old = before.devices.iter().find(|old| old.name == device.name);
            Some((old?.clone(), device))
        });
        let rows = pairs.map(|(old, device)| {
            let recent = self.recent.entry(device.name.to_string()).or_default();
            recent.push_back((now, device.responses.since(&old.responses)));
            recent.retain(|(at, _)| now - *at <= RECENT);
            let mut all = Histogram::new();
            recent.iter().for_each(|(_, histogram)| all.merge(histogram));
            row(&old, device, &all, &busy, seconds)
        });
        let rows = rows.collect();
        let nics = snapshot.nics.iter().filter_map(|nic| {
            let old = before.nics.iter().find(|old| old.name == nic.name)?;
            Some(nic_row(old, nic, seconds))
        });
        (rows, nics.collect())
    }
}

/// The part of the time in which each IOThread was at work.
fn busy(before: &Snapshot, now: &Snapshot, seconds: f64) -> BTreeMap<IoThreadName, f64> {
    let of = |thread: &rtvirtio_spec::control::IoThreadState| {
        let old = before.iothreads.iter().find(|old| old.id == thread.id);
        let old = old.map_or(0, |old| old.busy_ns.get());
        let spent = thread.busy_ns.get().saturating_sub(old) as f64 / 1e9;
        (thread.name.clone(), (spent / seconds).min(1.0))
    };
    now.iothreads.iter().map(of).collect()
}

/// The IOThreads of queues, each once.
fn each_once<'a>(all: impl Iterator<Item = &'a IoThreadName>) -> Vec<IoThreadName> {
    let mut iothreads: Vec<IoThreadName> = all.cloned().collect();
    iothreads.sort();
    iothreads.dedup();
    iothreads
}

fn row(
    old: &DeviceState,
    device: &DeviceState,
    recent: &Histogram,
    busy: &BTreeMap<IoThreadName, f64>,
    seconds: f64,
) -> Row {
    let sum = |of: &DeviceState, what: fn(&rtvirtio_spec::control::QueueState) -> u64| -> u64 {
        of.queues.iter().map(what).sum()
    };
    let rate = |what| sum(device, what).saturating_sub(sum(old, what)) as f64 / seconds;
    let iothreads = each_once(device.queues.iter().map(|queue| &queue.iothread));
    let busiest = iothreads.iter().filter_map(|name| busy.get(name)).copied().fold(0.0, f64::max);
    let [p50, p99, p999] = PERCENTILES.map(|p| tail(recent, p));
    let (read_iops, write_iops) = (rate(|q| q.operations.reads), rate(|q| q.operations.writes));
    let names = iothreads.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let found = match read_iops + write_iops {
        0.0 => Where::Idle,
        _ if busiest >= BUSY => Where::Cpu,
        _ => Where::Device,
    };
    let promises = device.qos.as_ref().and_then(|qos| qos.had.promises());
    let kept = promises.map(|promises| format!("; {promises}")).unwrap_or_default();
    let explanation = match found {
        Where::Cpu => {
            format!("its IOThread has no time: {names} is at work {:.0} %{kept}", busiest * 1e2)
        }
        _ => {
            format!("from the data plane's engine; {names} is at work {:.0} %{kept}", busiest * 1e2)
        }
    };
    Row {
        vm: device.vm.to_string(),
        pid: 0,
        disk: device.name.to_string(),
        names: vec![device.name.to_string()],
        format: None,
        storage: Some(format!("the data plane, by {names}")),
        measured: true,
        read_iops,
        write_iops,
        read_bytes_per_s: rate(|q| q.read_bytes.get()),
        write_bytes_per_s: rate(|q| q.written_bytes.get()),
        p50,
        p99,
        p999,
        requests: recent.count(),
        host_p50: None,
        host_p99: None,
        host_p999: None,
        on: Vec::new(),
        mean_on_disk: None,
        r#where: found,
        explanation,
        promises,
    }
}

fn nic_row(old: &NicState, nic: &NicState, seconds: f64) -> NicRow {
    use rtvirtio_spec::control::{NicQueueState, QueueDirection};
    let sum = |of: &NicState, what: &dyn Fn(&NicQueueState) -> u64| -> u64 {
        of.queues.iter().map(what).sum()
    };
    let rate = |what: &dyn Fn(&NicQueueState) -> u64| {
        sum(nic, what).saturating_sub(sum(old, what)) as f64 / seconds
    };
    let frames = |direction| {
        rate(&move |queue: &NicQueueState| {
            if queue.direction == direction { queue.frames } else { 0 }
        })
    };
    let drops = |of: &NicState| {
        let all = of.queues.iter().flat_map(|queue| queue.drops.by_reason());
        let mut drops = BTreeMap::new();
        all.for_each(|(reason, count)| *drops.entry(reason).or_insert(0) += count);
        drops
    };
    let before = drops(old);
    let drops = drops(nic).into_iter().filter_map(|(reason, count): (_, u64)| {
        let more = count.saturating_sub(before.get(reason).copied().unwrap_or(0));
        (more > 0).then(|| (reason, more as f64 / seconds))
    });
    NicRow {
        vm: nic.vm.to_string(),
        nic: nic.name.to_string(),
        link: plain(&nic.link),
        connected: nic.connected,
        received_per_s: frames(QueueDirection::Receive),
        transmitted_per_s: frames(QueueDirection::Transmit),
        bytes_per_s: rate(&|queue| queue.bytes.get()),
        dropped_per_s: rate(&|queue| queue.dropped),
        drops_per_s: drops.collect(),
        iothreads: each_once(nic.queues.iter().map(|queue| &queue.iothread)),
    }
}
