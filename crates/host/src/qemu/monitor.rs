//! QEMU's monitor: QMP over its socket, or through libvirt.
//!
//! Terms: a *QOM path* names an object of QEMU, such as `/objects/io0` or a
//! virtio-blk disk's `/machine/peripheral/ID/virtio-backend`; only that finds
//! latency histograms and throttling, a device's id does not. An *event* is a
//! message that answers nothing; events are skipped.
//!
//! What is set is read back. A request that was given up may be answered later:
//! the `id` tells such an answer from the next one's.
//!
//! Properties: `answer_with_a_foreign_id_is_refused`, `late_answer_is_not_the_next_ones`,
//! `ten_thousand_events_are_skipped`, `endless_events_keep_the_deadline`,
//! `value_that_is_not_taken_is_an_error`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use qapi::qmp::{
    block_latency_histogram_set, qmp_capabilities, qom_get, qom_set, query_block, query_blockstats,
    query_cpus_fast, query_iothreads, query_pci, query_status, query_version,
};
use qapi::{Command, Empty};
use rtvirtio_units::{BytesPerSecond, Nanos};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::peer::{Deadline, Peer};
use super::virsh::Virsh;
use super::{Address, Fault, QemuError, reply};
use crate::interrupt::Interrupt;

/// The most messages that are skipped for one answer. QEMU keeps events for a
/// client that reads seldom; this is a day of one each second.
const MAX_SKIPPED: usize = 100_000;

/// QEMU's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Version {
    /// 10 of 10.0.2.
    pub major: u32,
    /// The first 0 of 10.0.2.
    pub minor: u32,
    /// 2 of 10.0.2.
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// Whether the guest runs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// Whether its virtual CPUs run.
    pub running: bool,
    /// QEMU's word for it, such as `running`, `paused` or `io-error`.
    pub status: String,
}

/// Where a device is on a guest's PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct PciAddress {
    /// The domain; QEMU's PCs have one, 0. An agent says -1 where it does not know.
    #[serde(default)]
    pub domain: i64,
    /// The bus, as the guest's firmware numbered it.
    pub bus: i64,
    /// The device.
    pub slot: i64,
    /// The function.
    pub function: i64,
}

/// An IOThread: a thread of QEMU that serves virtqueues.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IoThread {
    /// Its id; its QOM path is `/objects/ID`.
    pub id: String,
    /// Its thread id on the host.
    pub thread_id: u32,
    /// The longest that it polls before it sleeps; zero: it does not poll.
    #[serde(rename = "poll-max-ns")]
    pub poll_max: Nanos,
    /// By what factor polling grows; 0 is QEMU's default.
    pub poll_grow: u64,
    /// By what divisor polling shrinks; 0 is QEMU's default.
    pub poll_shrink: u64,
}

/// The virtqueues of a disk that one IOThread serves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct MappedQueues {
    /// The IOThread's id.
    pub iothread: String,
    /// The queues, as they were given; empty: QEMU chose.
    #[serde(default)]
    pub vqs: Vec<u16>,
}

/// Limits that QEMU itself holds a disk to; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Throttle {
    /// Bytes read and written per second.
    pub bandwidth: Option<BytesPerSecond>,
    /// Requests per second.
    pub iops: Option<u64>,
}

impl Throttle {
    /// From QEMU's numbers, in which 0 is no limit.
    fn from_wire(bps: u64, iops: u64) -> Self {
        Self {
            bandwidth: (bps > 0).then(|| BytesPerSecond::new(bps)),
            iops: (iops > 0).then_some(iops),
        }
    }

    fn bps(self) -> u64 {
        self.bandwidth.map_or(0, BytesPerSecond::get)
    }
}

/// A block device of QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The QOM path of the guest's device, if it has one.
    pub qom_path: Option<String>,
    /// The name of a `-drive`; empty with `-blockdev`.
    pub device: String,
    /// The top node's name.
    pub node: Option<String>,
    /// The top node's driver, such as `raw`.
    pub driver: Option<String>,
    /// The file or device on the host, as QEMU writes it; `None`: no medium.
    pub file: Option<String>,
    /// What QEMU limits it to.
    pub throttle: Throttle,
}

/// Requests counted by their latency.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Histogram {
    /// Where one bin ends and the next begins, ascending.
    pub boundaries: Vec<Nanos>,
    /// Requests in each bin: one more than there are boundaries.
    pub bins: Vec<u64>,
}

/// One block device's histograms, as QEMU sees its requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct LatencyHistograms {
    /// Of reads; `None`: not set.
    #[serde(rename = "rd_latency_histogram")]
    pub read: Option<Histogram>,
    /// Of writes; `None`: not set.
    #[serde(rename = "wr_latency_histogram")]
    pub write: Option<Histogram>,
    /// Of flushes; `None`: not set.
    #[serde(rename = "flush_latency_histogram")]
    pub flush: Option<Histogram>,
}

/// What QEMU counts of a block device, since its start.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct BlockStatistics {
    /// Reads completed.
    #[serde(rename = "rd_operations")]
    pub reads: u64,
    /// Writes completed.
    #[serde(rename = "wr_operations")]
    pub writes: u64,
    /// Bytes read.
    #[serde(rename = "rd_bytes")]
    pub read_bytes: u64,
    /// Bytes written.
    #[serde(rename = "wr_bytes")]
    pub write_bytes: u64,
    /// Time that all reads took together.
    #[serde(rename = "rd_total_time_ns")]
    pub read_time_ns: u64,
    /// Time that all writes took together.
    #[serde(rename = "wr_total_time_ns")]
    pub write_time_ns: u64,
    /// Its latency histograms, as far as they are set.
    #[serde(flatten)]
    pub latencies: LatencyHistograms,
}

/// `block_set_io_throttle`: qapi's type has a deprecated field that must be named.
#[derive(Serialize)]
struct SetThrottle<'a> {
    id: &'a str,
    bps: u64,
    bps_rd: u64,
    bps_wr: u64,
    iops: u64,
    iops_rd: u64,
    iops_wr: u64,
}

impl Command for SetThrottle<'_> {
    type Ok = Empty;
    const NAME: &'static str = "block_set_io_throttle";
    const ALLOW_OOB: bool = false;
}

#[derive(Debug)]
enum Transport {
    Socket { peer: Peer, last_id: u64 },
    Libvirt(Virsh),
}

/// A QEMU process's monitor.
#[derive(Debug)]
pub struct Monitor {
    address: Address,
    transport: Transport,
}

impl Monitor {
    /// Connects to the QMP socket at `path` and negotiates, all within `timeout`.
    /// QEMU serves one client of a socket at a time; a second one hears nothing.
    ///
    /// # Errors
    /// If nobody listens, nobody greets in time, or it is no QMP socket.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, QemuError> {
        Self::at(&Address::Socket(path.as_ref().to_owned()), timeout)
    }

    /// The monitor at `address`, reached within `timeout`.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn at(address: &Address, timeout: Duration) -> Result<Self, QemuError> {
        Self::at_until(address, timeout, &Interrupt::default())
    }

    /// The same; `interrupt` ends this, and later waits.
    pub(crate) fn at_until(
        address: &Address,
        timeout: Duration,
        interrupt: &Interrupt,
    ) -> Result<Self, QemuError> {
        let path = match address {
            Address::Socket(path) => path,
            Address::Domain(domain) => {
                return Ok(Self::through(Virsh::new(domain.clone()).until(interrupt)));
            }
        };
        let deadline = Deadline::after(timeout);
        match Peer::connect(path, deadline, interrupt) {
            Ok(peer) => Self::negotiate(address.clone(), peer, deadline),
            Err(fault) => Err(QemuError { peer: address.clone(), command: "connect", fault }),
        }
    }

    /// The monitor of a libvirt domain, by name or UUID. Nothing is asked yet.
    #[must_use]
    pub fn libvirt(domain: &str) -> Self {
        Self::through(Virsh::new(domain.into()))
    }

    pub(super) fn through(virsh: Virsh) -> Self {
        let address = Address::Domain(virsh.domain.clone());
        Self { address, transport: Transport::Libvirt(virsh) }
    }

    /// A monitor that says `bytes`, whatever it is asked.
    ///
    /// # Errors
    /// If they do not begin with a greeting and an answer.
    #[cfg(any(test, feature = "test-utils"))]
    pub fn replay(bytes: &[u8]) -> Result<Self, QemuError> {
        let peer = Peer::over(super::peer::Replay(std::io::Cursor::new(bytes.to_vec())));
        let deadline = Deadline::after(Duration::from_secs(60));
        Self::negotiate(Address::Socket("replay".into()), peer, deadline)
    }

    fn negotiate(address: Address, mut peer: Peer, deadline: Deadline) -> Result<Self, QemuError> {
        if let Err(fault) = greeting(&mut peer, deadline) {
            return Err(QemuError { peer: address, command: "greeting", fault });
        }
        let transport = Transport::Socket { peer, last_id: 0 };
        let mut monitor = Self { address, transport };
        monitor.ask::<_, Empty>(&qmp_capabilities { enable: None }, deadline)?;
        Ok(monitor)
    }

    /// Executes any command of `qapi::qmp`.
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout`.
    pub fn execute<C: Command>(
        &mut self,
        command: &C,
        timeout: Duration,
    ) -> Result<C::Ok, QemuError> {
        self.ask(command, Deadline::after(timeout))
    }

    /// QEMU's version.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn version(&mut self, timeout: Duration) -> Result<Version, QemuError> {
        #[derive(Deserialize)]
        struct Reply {
            qemu: Version,
        }
        let reply: Reply = self.ask(&query_version {}, Deadline::after(timeout))?;
        Ok(reply.qemu)
    }

    /// Whether the guest runs.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn status(&mut self, timeout: Duration) -> Result<Status, QemuError> {
        self.ask(&query_status {}, Deadline::after(timeout))
    }

    /// The IOThreads.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn iothreads(&mut self, timeout: Duration) -> Result<Vec<IoThread>, QemuError> {
        self.ask(&query_iothreads {}, Deadline::after(timeout))
    }

    /// Thread ids on the host of the virtual CPUs.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn vcpu_threads(&mut self, timeout: Duration) -> Result<Vec<u32>, QemuError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Reply {
            thread_id: u32,
        }
        let reply: Vec<Reply> = self.ask(&query_cpus_fast {}, Deadline::after(timeout))?;
        Ok(reply.into_iter().map(|r| r.thread_id).collect())
    }

    /// The `iothread-vq-mapping` of the virtio-blk disk at `qom_path`; empty without one.
    ///
    /// # Errors
    /// As [`Self::execute`]; QEMU before 9.0 refuses.
    pub fn queue_mapping(
        &mut self,
        qom_path: &str,
        timeout: Duration,
    ) -> Result<Vec<MappedQueues>, QemuError> {
        let property = "iothread-vq-mapping".to_owned();
        self.ask(&qom_get { path: qom_path.to_owned(), property }, Deadline::after(timeout))
    }

    /// The PCI address of each device that has an id.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn pci_devices(
        &mut self,
        timeout: Duration,
    ) -> Result<BTreeMap<String, PciAddress>, QemuError> {
        #[derive(Deserialize)]
        struct Bus {
            devices: Vec<Device>,
        }
        #[derive(Deserialize)]
        struct Device {
            qdev_id: String,
            #[serde(flatten)]
            address: PciAddress,
            pci_bridge: Option<Bridge>,
        }
        #[derive(Deserialize)]
        struct Bridge {
            #[serde(default)]
            devices: Vec<Device>,
        }
        let buses: Vec<Bus> = self.ask(&query_pci {}, Deadline::after(timeout))?;
        let mut open: Vec<Device> = buses.into_iter().flat_map(|b| b.devices).collect();
        let mut found = BTreeMap::new();
        while let Some(device) = open.pop() {
            open.extend(device.pci_bridge.into_iter().flat_map(|b| b.devices));
            if !device.qdev_id.is_empty() {
                found.insert(device.qdev_id, device.address);
            }
        }
        Ok(found)
    }

    /// The serial number of the device with this id, if it has one.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::Refused`] if there is no such device, or
    /// it is of a kind without serial numbers.
    pub fn serial(&mut self, id: &str, timeout: Duration) -> Result<Option<String>, QemuError> {
        let path = format!("/machine/peripheral/{id}");
        let get = qom_get { path, property: "serial".to_owned() };
        let serial: Option<String> = self.ask(&get, Deadline::after(timeout))?;
        Ok(serial.filter(|s| !s.is_empty()))
    }

    /// Sets the longest that an IOThread polls, at once and while the guest runs.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::ReadBackDiffers`].
    pub fn set_poll_max(
        &mut self,
        iothread: &str,
        poll_max: Nanos,
        timeout: Duration,
    ) -> Result<(), QemuError> {
        let deadline = Deadline::after(timeout);
        let (path, property) = (format!("/objects/{iothread}"), "poll-max-ns".to_owned());
        let value = json!(poll_max.get());
        let set = qom_set { path: path.clone(), property: property.clone(), value };
        self.ask::<_, Empty>(&set, deadline)?;
        let found: Nanos = self.ask(&qom_get { path, property }, deadline)?;
        self.compare::<qom_set, _>(poll_max, found)
    }

    /// The block devices.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn blocks(&mut self, timeout: Duration) -> Result<Vec<Block>, QemuError> {
        self.query_block(Deadline::after(timeout))
    }

    /// Starts to count the requests of the device at `qom_path` by latency, reads,
    /// writes and flushes alike; without boundaries, stops. Counts begin at zero.
    ///
    /// # Errors
    /// As [`Self::execute`]; QEMU refuses boundaries that do not ascend, and a
    /// device without a block backend, such as vhost-user-blk.
    pub fn set_latency_histogram(
        &mut self,
        qom_path: &str,
        boundaries: &[Nanos],
        timeout: Duration,
    ) -> Result<(), QemuError> {
        let boundaries: Vec<u64> = boundaries.iter().map(|b| b.get()).collect();
        let set = block_latency_histogram_set {
            id: qom_path.to_owned(),
            boundaries: (!boundaries.is_empty()).then_some(boundaries),
            boundaries_read: None,
            boundaries_write: None,
            boundaries_zap: None,
            boundaries_flush: None,
        };
        self.ask::<_, Empty>(&set, Deadline::after(timeout)).map(drop)
    }

    /// What QEMU counts of the device at `qom_path`.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::Unexpected`] if there is no such device, or a histogram is none.
    pub fn block_statistics(
        &mut self,
        qom_path: &str,
        timeout: Duration,
    ) -> Result<BlockStatistics, QemuError> {
        let statistics: BlockStatistics = self.statistics(qom_path, timeout)?;
        self.check_histograms(&statistics.latencies)?;
        Ok(statistics)
    }

    fn check_histograms(&self, histograms: &LatencyHistograms) -> Result<(), QemuError> {
        let all = [&histograms.read, &histograms.write, &histograms.flush];
        match all.into_iter().flatten().find(|h| !h.is_whole()) {
            None => Ok(()),
            Some(odd) => {
                let (found, expected) = (format!("{odd:?}"), "a histogram");
                let found = super::error::excerpt(found.as_bytes());
                Err(self.error::<query_blockstats>(Fault::Unexpected { found, expected }))
            }
        }
    }

    /// The histograms of the device at `qom_path`.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::Unexpected`] if there is no such device.
    pub fn latency_histograms(
        &mut self,
        qom_path: &str,
        timeout: Duration,
    ) -> Result<LatencyHistograms, QemuError> {
        let stats: LatencyHistograms = self.statistics(qom_path, timeout)?;
        self.check_histograms(&stats)?;
        Ok(stats)
    }

    /// Reads that the device at `qom_path` has completed.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::Unexpected`] if there is no such device.
    pub fn reads_completed(&mut self, qom_path: &str, timeout: Duration) -> Result<u64, QemuError> {
        #[derive(Deserialize)]
        struct Reads {
            rd_operations: u64,
        }
        self.statistics(qom_path, timeout).map(|r: Reads| r.rd_operations)
    }

    /// What QEMU counts of the device at `qom_path`.
    fn statistics<T: DeserializeOwned>(
        &mut self,
        qom_path: &str,
        timeout: Duration,
    ) -> Result<T, QemuError> {
        #[derive(Deserialize)]
        struct Reply<T> {
            qdev: Option<String>,
            stats: T,
        }
        let query = query_blockstats { query_nodes: Some(false) };
        let reply: Vec<Reply<T>> = self.ask(&query, Deadline::after(timeout))?;
        let device = reply.into_iter().find(|r| r.qdev.as_deref() == Some(qom_path));
        match device {
            Some(Reply { stats, .. }) => Ok(stats),
            None => Err(self.error::<query_blockstats>(no_device(qom_path))),
        }
    }

    /// Limits the device at `qom_path`.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::ReadBackDiffers`].
    pub fn set_throttle(
        &mut self,
        qom_path: &str,
        throttle: Throttle,
        timeout: Duration,
    ) -> Result<(), QemuError> {
        let deadline = Deadline::after(timeout);
        let set = SetThrottle {
            id: qom_path,
            bps: throttle.bps(),
            bps_rd: 0,
            bps_wr: 0,
            iops: throttle.iops.unwrap_or(0),
            iops_rd: 0,
            iops_wr: 0,
        };
        self.ask::<_, Empty>(&set, deadline)?;
        let blocks = self.query_block(deadline)?;
        let device = blocks.iter().find(|b| b.qom_path.as_deref() == Some(qom_path));
        let Some(device) = device else {
            return Err(self.error::<query_block>(no_device(qom_path)));
        };
        self.compare::<SetThrottle<'_>, _>(throttle, device.throttle)
    }

    /// Limits a `throttle-group` object, and so the disks in it together.
    ///
    /// # Errors
    /// As [`Self::execute`]; [`Fault::ReadBackDiffers`].
    pub fn set_throttle_group(
        &mut self,
        group: &str,
        throttle: Throttle,
        timeout: Duration,
    ) -> Result<(), QemuError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Reply {
            bps_total: u64,
            iops_total: u64,
        }
        let deadline = Deadline::after(timeout);
        let (path, property) = (format!("/objects/{group}"), "limits".to_owned());
        let iops = throttle.iops.unwrap_or(0);
        let value = json!({"bps-total": throttle.bps(), "iops-total": iops});
        let set = qom_set { path: path.clone(), property: property.clone(), value };
        self.ask::<_, Empty>(&set, deadline)?;
        let found: Reply = self.ask(&qom_get { path, property }, deadline)?;
        let found = Throttle::from_wire(found.bps_total, found.iops_total);
        self.compare::<qom_set, _>(throttle, found)
    }

    fn query_block(&mut self, deadline: Deadline) -> Result<Vec<Block>, QemuError> {
        #[derive(Deserialize)]
        struct Reply {
            device: String,
            qdev: Option<String>,
            inserted: Option<Inserted>,
        }
        #[derive(Deserialize)]
        struct Inserted {
            file: String,
            drv: String,
            #[serde(rename = "node-name")]
            node: Option<String>,
            bps: u64,
            iops: u64,
        }
        let reply: Vec<Reply> = self.ask(&query_block {}, deadline)?;
        let block = |r: Reply| {
            let throttle = r.inserted.as_ref().map(|i| Throttle::from_wire(i.bps, i.iops));
            let inserted = r.inserted.map(|i| (i.node, Some(i.drv), Some(i.file)));
            let (node, driver, file) = inserted.unwrap_or_default();
            let throttle = throttle.unwrap_or_default();
            Block { qom_path: r.qdev, device: r.device, node, driver, file, throttle }
        };
        Ok(reply.into_iter().map(block).collect())
    }

    /// Executes `command` and reads its answer as an `R`, which may name fewer
    /// members than qapi's type does.
    fn ask<C: Command, R: DeserializeOwned>(
        &mut self,
        command: &C,
        deadline: Deadline,
    ) -> Result<R, QemuError> {
        let answer = match &mut self.transport {
            Transport::Socket { peer, last_id } => exchange(peer, last_id, command, deadline),
            Transport::Libvirt(virsh) => reply::request(command, None)
                .and_then(|request| virsh.monitor(&request, deadline))
                .and_then(|line| reply::message(&line)?.result()),
        };
        answer.map_err(|fault| self.error::<C>(fault))
    }

    fn compare<C: Command, T: PartialEq + fmt::Debug>(
        &self,
        wanted: T,
        found: T,
    ) -> Result<(), QemuError> {
        if wanted == found {
            return Ok(());
        }
        let (wanted, found) = (format!("{wanted:?}"), format!("{found:?}"));
        Err(self.error::<C>(Fault::ReadBackDiffers { wanted, found }))
    }

    fn error<C: Command>(&self, fault: Fault) -> QemuError {
        QemuError { peer: self.address.clone(), command: C::NAME, fault }
    }
}

impl Histogram {
    pub(super) fn is_whole(&self) -> bool {
        self.bins.len() == self.boundaries.len() + 1 && self.boundaries.is_sorted()
    }
}

fn no_device(qom_path: &str) -> Fault {
    Fault::Unexpected { found: qom_path.to_owned(), expected: "the QOM path of a block device" }
}

fn greeting(peer: &mut Peer, deadline: Deadline) -> Result<(), Fault> {
    let line = peer.line(deadline)?;
    if reply::message(&line)?.greeting.is_some() {
        return Ok(());
    }
    let found = super::error::excerpt(&line);
    Err(Fault::Unexpected { found, expected: "QMP's greeting" })
}

fn exchange<C: Command, R: DeserializeOwned>(
    peer: &mut Peer,
    last_id: &mut u64,
    command: &C,
    deadline: Deadline,
) -> Result<R, Fault> {
    *last_id += 1;
    let id = *last_id;
    peer.send(&reply::request(command, Some(id))?, deadline)?;
    for _ in 0..MAX_SKIPPED {
        let line = peer.line(deadline)?;
        let message = reply::message(&line)?;
        match message.id() {
            Some(of) if of == id => return message.result(),
            // To a request that was given up.
            Some(of) if of < id => {}
            None if message.event.is_some() => {}
            _ => {
                let found = super::error::excerpt(&line);
                return Err(Fault::Unexpected { found, expected: "the answer to this request" });
            }
        }
    }
    Err(Fault::Flood { limit: MAX_SKIPPED })
}
