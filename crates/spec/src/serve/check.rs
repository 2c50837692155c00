//! Wire types to checked ones. A fault comes with the key that it belongs to.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rtvirtio_units::{Bytes, CpuId, IoThreadName, Name, Nanos};

use super::error::Fault;
use super::wire::{self, EngineKind, Size};
use super::{
    Completion, Control, CpuCost, Device, Engine, FileEngine, IoThread, Listen, MAX_CPU, MAX_PAIRS,
    MAX_POLL, MAX_RAM_BYTES, MAX_SERIAL_BYTES, MAX_SOCKET_BYTES, MAX_TAP_BYTES, MAX_USER_BYTES,
    MAX_VLAN, MIN_MTU, Network, NetworkPort, Nic, NicLink, NicRate, NvmeEngine, Polling, Qos,
    Service, Slice, SsdEngine, Vlans, mac_text,
};
use crate::control::QueueDirection;
use crate::mapping::{Entry, Mapping};

/// A fault and the keys that lead to its value.
pub(super) type Misplaced = (&'static [&'static str], Fault);

pub(super) fn at<T>(
    keys: &'static [&'static str],
    result: Result<T, Fault>,
) -> Result<T, Misplaced> {
    result.map_err(|fault| (keys, fault))
}

fn socket(path: PathBuf) -> Result<PathBuf, Fault> {
    let length = path.as_os_str().len();
    let ends_in_name =
        path.file_name().is_some() && !path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if length <= MAX_SOCKET_BYTES && ends_in_name && absolute(&path) {
        Ok(path)
    } else {
        Err(Fault::BadSocket(path))
    }
}

fn absolute(path: &Path) -> bool {
    path.is_absolute()
        && !path.to_string_lossy().chars().any(char::is_control)
        && path.as_os_str().len() < 4096
}

pub(super) fn in_range(key: &'static str, found: u64, low: u64, high: u64) -> Result<u64, Fault> {
    if (low..=high).contains(&found) {
        Ok(found)
    } else {
        Err(Fault::OutOfRange { key, found, low, high })
    }
}

/// CPUs, ascending and each once.
///
/// # Errors
/// [`Fault::BadCpu`].
pub(super) fn cpus(mut cpus: Vec<CpuId>) -> Result<Vec<CpuId>, Fault> {
    match cpus.iter().find(|cpu| cpu.get() > MAX_CPU) {
        Some(bad) => Err(Fault::BadCpu(*bad)),
        None => {
            cpus.sort_unstable();
            cpus.dedup();
            Ok(cpus)
        }
    }
}

fn user(name: Option<String>) -> Result<Option<String>, Fault> {
    let fits = |name: &String| {
        (1..=MAX_USER_BYTES).contains(&name.len()) && !name.contains([':', '/', '\0', '\n'])
    };
    match name {
        Some(name) if !fits(&name) => Err(Fault::BadUser(name)),
        name => Ok(name),
    }
}

impl Service {
    pub(super) fn located(raw: wire::Service) -> Result<Self, Misplaced> {
        let group = at(&["group"], user(raw.group))?;
        if group.is_some() && raw.user.is_none() {
            return Err((&["group"], Fault::GroupAlone));
        }
        Ok(Self { user: at(&["user"], user(raw.user))?, group, sandbox: raw.sandbox })
    }
}

impl Control {
    pub(super) fn located(raw: wire::Control) -> Result<Self, Misplaced> {
        Ok(Self { socket: at(&["socket"], socket(raw.socket))?, group: raw.group })
    }
}

impl IoThread {
    /// Checks one.
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(raw: wire::IoThread) -> Result<Self, Fault> {
        Self::located(raw).map_err(|(_, fault)| fault)
    }

    pub(super) fn located(raw: wire::IoThread) -> Result<Self, Misplaced> {
        let default = Polling::default();
        let completion = raw.completion.unwrap_or(default.completion);
        let core = raw.core.unwrap_or(default.core);
        let keys: [(bool, &'static [&'static str]); 4] = [
            (raw.core.is_some(), &["core"]),
            (raw.poll_max_us.is_some(), &["poll_max_us"]),
            (raw.poll_grow.is_some(), &["poll_grow"]),
            (raw.poll_shrink.is_some(), &["poll_shrink"]),
        ];
        let of_adaptive = keys.into_iter().find_map(|(is_there, key)| is_there.then_some(key));
        if let Some(key) = of_adaptive.filter(|_| completion != Completion::Adaptive) {
            return Err((key, Fault::NotAdaptive { key: key[0], completion }));
        }
        let max = match raw.poll_max_us {
            None => default.max,
            Some(us) => {
                let high = MAX_POLL.get() / 1_000;
                Nanos::from_micros(at(&["poll_max_us"], in_range("poll_max_us", us, 0, high))?)
            }
        };
        let grow = raw.poll_grow.unwrap_or(default.grow);
        at(&["poll_grow"], in_range("poll_grow", grow.into(), 2, 1024))?;
        let shrink = raw.poll_shrink.unwrap_or(default.shrink);
        at(&["poll_shrink"], in_range("poll_shrink", shrink.into(), 0, 1024))?;
        Ok(Self {
            name: raw.name,
            cpus: at(&["cpus"], cpus(raw.cpus))?,
            polling: Polling { completion, core, max, grow, shrink },
            trust: raw.trust,
        })
    }
}

impl Device {
    /// Checks one, among the IOThreads and schedules that there are.
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(
        raw: wire::Device,
        iothreads: &[IoThread],
        schedules: &[Name],
    ) -> Result<Self, Fault> {
        Self::located(raw, iothreads, schedules).map_err(|(_, fault)| fault)
    }

    pub(super) fn located(
        raw: wire::Device,
        iothreads: &[IoThread],
        schedules: &[Name],
    ) -> Result<Self, Misplaced> {
        let listen = match (raw.socket, raw.socket_activation) {
            (Some(path), None) => Listen::Path(at(&["socket"], socket(path))?),
            (None, Some(name)) => Listen::Activated(name),
            (Some(_), Some(_)) => return Err((&["socket_activation"], Fault::WhichSocket)),
            (None, None) => return Err((&[], Fault::WhichSocket)),
        };
        let slots = at(&["slots"], raw.slots.map(socket).transpose())?;
        let engine = engine(raw.engine)?;
        let is_whole = matches!(&engine, Engine::File(file) if file.slice.is_none());
        if slots.is_some() && !is_whole {
            return Err((&["slots"], Fault::SlotsWithoutFile));
        }
        let serial = match raw.serial {
            None => raw.name.as_str().chars().take(MAX_SERIAL_BYTES).collect(),
            Some(serial) => at(&["serial"], checked_serial(serial))?,
        };
        let queues = raw.queues.unwrap_or(1);
        let keys: &[&str] = if raw.mapping.is_some() { &["mapping"] } else { &["queues"] };
        let mapping =
            mapping(raw.mapping, queues, iothreads, raw.trust.as_ref()).map_err(|fault| {
                (
                    if matches!(fault, Fault::Mapping(crate::mapping::MappingError::QueueCount(_)))
                    {
                        &["queues"]
                    } else {
                        keys
                    },
                    fault,
                )
            })?;
        Ok(Self {
            name: raw.name,
            vm: raw.vm,
            listen,
            slots,
            read_only: raw.read_only,
            serial,
            write_cache: raw.write_cache,
            fixed_buffers: raw.fixed_buffers,
            trust: raw.trust,
            max_memory: raw.max_memory.map(max_memory).transpose()?,
            engine,
            mapping,
            qos: raw.qos.map(|qos| Qos::located(qos, schedules)).transpose()?,
        })
    }
}

impl Nic {
    /// Checks one, among the IOThreads and networks that there are. Whether it goes with other devices says
    /// [`Self::fits`].
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(
        raw: wire::Nic,
        iothreads: &[IoThread],
        networks: &[Network],
    ) -> Result<Self, Fault> {
        Self::located(raw, iothreads, networks).map_err(|(_, fault)| fault)
    }

    /// Whether it may be there beside these: a TAP is of one device, an address of one in its network, and a
    /// network of one trust domain.
    ///
    /// # Errors
    /// [`Fault`]: which of them it is not.
    pub fn fits<'a>(&self, others: impl IntoIterator<Item = &'a Self>) -> Result<(), Fault> {
        self.located_among(others).map_err(|(_, fault)| fault)
    }

    pub(super) fn located_among<'a>(
        &self,
        others: impl IntoIterator<Item = &'a Self>,
    ) -> Result<(), Misplaced> {
        for other in others {
            match (&self.link, &other.link) {
                (NicLink::Tap(tap), NicLink::Tap(theirs)) if tap == theirs => {
                    let (tap, other) = (tap.clone(), other.name.clone());
                    return Err((&["tap"], Fault::DuplicateTap { tap, other }));
                }
                (NicLink::Network(port), NicLink::Network(theirs))
                    if port.network == theirs.network =>
                {
                    if self.mac == other.mac {
                        let (mac, other) = (mac_text(self.mac), other.name.clone());
                        return Err((&["mac"], Fault::DuplicateMac { mac, other }));
                    }
                    if self.trust != other.trust {
                        return Err((&["network"], Fault::NetworkAcrossTrust(other.name.clone())));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Where it listens, and where its frames come by datagram.
    pub fn sockets(&self) -> impl Iterator<Item = &PathBuf> {
        let local = match &self.link {
            NicLink::Dgram { local, .. } => Some(local),
            _ => None,
        };
        [&self.socket].into_iter().chain(local)
    }

    /// The socket that it connects to.
    #[must_use]
    pub fn stream(&self) -> Option<&PathBuf> {
        match &self.link {
            NicLink::Stream(path) => Some(path),
            _ => None,
        }
    }

    pub(super) fn located(
        raw: wire::Nic,
        iothreads: &[IoThread],
        networks: &[Network],
    ) -> Result<Self, Misplaced> {
        let link = nic_link(&raw, networks)?;
        let mac = match raw.mac {
            Some(mac) => at(&["mac"], checked_mac(mac))?,
            None => made_mac(&raw.vm, &raw.name),
        };
        if let Some(mtu) = raw.mtu {
            at(&["mtu"], in_range("mtu", mtu.into(), MIN_MTU.into(), u16::MAX.into()))?;
        }
        let pairs = raw.queues.unwrap_or(1);
        at(&["queues"], in_range("queues", pairs.into(), 1, MAX_PAIRS.into()))?;
        let keys: &[&str] = if raw.mapping.is_some() { &["mapping"] } else { &["queues"] };
        let mapping = mapping(raw.mapping, 2 * pairs, iothreads, raw.trust.as_ref());
        Ok(Self {
            name: raw.name,
            vm: raw.vm,
            socket: at(&["socket"], socket(raw.socket))?,
            link,
            mac,
            mtu: raw.mtu,
            pairs: pairs as u16,
            trust: raw.trust,
            max_memory: raw.max_memory.map(max_memory).transpose()?,
            mapping: mapping.map_err(|fault| (keys, fault))?,
            rx: raw.rx.map(|raw| nic_rate("rx", raw)).transpose()?,
            tx: raw.tx.map(|raw| nic_rate("tx", raw)).transpose()?,
        })
    }
}

/// Where a network device's frames go.
fn nic_link(raw: &wire::Nic, networks: &[Network]) -> Result<NicLink, Misplaced> {
    let wire::Nic { tap, stream, dgram, network, vlan, trunk, anti_spoofing, .. } = raw;
    let of_network: [(&[&str], bool); 3] = [
        (&["vlan"], vlan.is_some()),
        (&["trunk"], trunk.is_some()),
        (&["anti_spoofing"], anti_spoofing.is_some()),
    ];
    if network.is_none()
        && let Some((key, _)) = of_network.into_iter().find(|(_, is_given)| *is_given)
    {
        return Err((key, Fault::OfNetwork));
    }
    let one_pair = || at(&["queues"], in_range("queues", raw.queues.unwrap_or(1).into(), 1, 1));
    let network = match (tap, stream, dgram, network) {
        (Some(tap), None, None, None) => {
            return Ok(NicLink::Tap(at(&["tap"], checked_tap(tap.clone()))?));
        }
        (None, Some(path), None, None) => {
            one_pair()?;
            return Ok(NicLink::Stream(at(&["stream"], socket(path.clone()))?));
        }
        (None, None, Some(wire::Dgram { local, remote }), None) => {
            one_pair()?;
            let local = at(&["dgram", "local"], socket(local.clone()))?;
            let remote = at(&["dgram", "remote"], socket(remote.clone()))?;
            if local == remote {
                return Err((&["dgram", "remote"], Fault::OwnPeer));
            }
            return Ok(NicLink::Dgram { local, remote });
        }
        (None, None, None, Some(network)) => network,
        (None, None, None, None) => return Err((&[], Fault::WhichLink)),
        (_, _, Some(_), _) => return Err((&["dgram"], Fault::WhichLink)),
        (_, Some(_), None, _) => return Err((&["stream"], Fault::WhichLink)),
        (Some(_), None, None, Some(_)) => return Err((&["network"], Fault::WhichLink)),
    };
    if networks.iter().all(|known| known.name != *network) {
        return Err((&["network"], Fault::NoNetwork(network.clone())));
    }
    let vlans = match (*vlan, trunk) {
        (None, None) => Vlans::Untagged,
        (Some(vlan), None) => Vlans::Access(at(&["vlan"], checked_vlan(vlan))?),
        (None, Some(trunk)) => {
            let mut vlans = trunk.clone();
            vlans.sort_unstable();
            vlans.dedup();
            if vlans.is_empty() || vlans.len() < trunk.len() {
                return Err((&["trunk"], Fault::BadTrunk));
            }
            for vlan in &vlans {
                at(&["trunk"], checked_vlan(*vlan))?;
            }
            Vlans::Trunk(vlans)
        }
        (Some(_), Some(_)) => return Err((&["trunk"], Fault::WhichVlan)),
    };
    let anti_spoofing = anti_spoofing.unwrap_or(true);
    Ok(NicLink::Network(NetworkPort { network: network.clone(), vlans, anti_spoofing }))
}

fn checked_vlan(vlan: u16) -> Result<u16, Fault> {
    in_range("a VLAN", vlan.into(), 1, MAX_VLAN.into())?;
    Ok(vlan)
}

/// Enough for the neighbours of a few hundred guests to be asked for, and too little to burden these.
const USUAL_MAX_BROADCAST: u64 = 1_000;

impl Network {
    /// Checks one.
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(raw: wire::Network) -> Result<Self, Fault> {
        Self::located(raw).map_err(|(_, fault)| fault)
    }

    pub(super) fn located(raw: wire::Network) -> Result<Self, Misplaced> {
        let max_broadcast = raw.max_broadcast.unwrap_or(USUAL_MAX_BROADCAST);
        at(&["max_broadcast"], in_range("max_broadcast", max_broadcast, 1, 100_000_000))?;
        Ok(Self { name: raw.name, max_broadcast })
    }
}

/// A burst of which a driver's own batches seldom feel anything.
const USUAL_BURST_MS: u64 = 5;

impl NicRate {
    /// Checks one of a direction.
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(direction: QueueDirection, raw: wire::NicRate) -> Result<Self, Fault> {
        nic_rate(direction.key(), raw).map_err(|(_, fault)| fault)
    }
}

fn nic_rate(direction: &'static str, raw: wire::NicRate) -> Result<NicRate, Misplaced> {
    let keys: &[&str] = if direction == "rx" { &["rx"] } else { &["tx"] };
    let wire::NicRate { max_frames, max_mbit, burst_ms, within_us } = raw;
    if max_frames.is_none() && max_mbit.is_none() {
        return Err((keys, Fault::NoNicRate(direction)));
    }
    if let Some(frames) = max_frames {
        at(keys, in_range("max_frames", frames, 1, 100_000_000))?;
    }
    if let Some(mbit) = max_mbit {
        at(keys, in_range("max_mbit", mbit, 1, 1_000_000))?;
    }
    let burst = burst_ms.unwrap_or(USUAL_BURST_MS);
    at(keys, in_range("burst_ms", burst, 0, 1_000))?;
    if let Some(within) = within_us {
        at(keys, in_range("within_us", within, 1, 1_000_000))?;
    }
    Ok(NicRate {
        frames: max_frames,
        bits: max_mbit.map(|mbit| mbit * 1_000_000),
        burst: Nanos::from_millis(burst),
        within: within_us.map(Nanos::from_micros),
    })
}

/// As the kernel has it (`dev_valid_name`).
fn checked_tap(name: String) -> Result<String, Fault> {
    let is_name = |b: u8| b.is_ascii_graphic() && b != b'/' && b != b':';
    let fits = (1..=MAX_TAP_BYTES).contains(&name.len()) && name != "." && name != "..";
    if fits && name.bytes().all(is_name) { Ok(name) } else { Err(Fault::BadTap(name)) }
}

fn checked_mac(text: String) -> Result<[u8; 6], Fault> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        // Digits alone: a sign would be taken too.
        let is_hex = |part: &&str| part.bytes().all(|b| b.is_ascii_hexdigit());
        let part = parts.next().filter(|part| part.len() == 2).filter(is_hex);
        match part.and_then(|part| u8::from_str_radix(part, 16).ok()) {
            Some(value) => *byte = value,
            None => return Err(Fault::BadMac(text)),
        }
    }
    // That of a group is nobody's.
    let is_one = parts.next().is_none() && mac[0] & 1 == 0 && mac != [0; 6];
    if is_one { Ok(mac) } else { Err(Fault::BadMac(text)) }
}

/// QEMU's prefix and 24 bits of the names (FNV-1a), so that a device keeps its address.
fn made_mac(vm: &rtvirtio_units::VmName, name: &Name) -> [u8; 6] {
    let mut hash = 0x811c_9dc5_u32;
    for byte in vm.as_str().bytes().chain(*b"/").chain(name.as_str().bytes()) {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    let [_, a, b, c] = (hash ^ hash >> 24).to_be_bytes();
    [0x52, 0x54, 0x00, a, b, c]
}

fn max_memory(Size(size): Size) -> Result<Bytes, Misplaced> {
    at(&["max_memory"], in_range("max_memory", size.get(), 1 << 20, i64::MAX as u64))?;
    Ok(size)
}

fn checked_serial(serial: String) -> Result<String, Fault> {
    let is_printable = serial.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    let fits = (1..=MAX_SERIAL_BYTES).contains(&serial.len());
    if fits && is_printable { Ok(serial) } else { Err(Fault::BadSerial(serial)) }
}

fn mapping(
    entries: Option<Vec<Entry>>,
    queues: u32,
    iothreads: &[IoThread],
    trust: Option<&Name>,
) -> Result<Mapping, Fault> {
    if iothreads.is_empty() {
        return Err(Fault::NoIoThread);
    }
    let trusted = || iothreads.iter().filter(|iothread| iothread.trust.as_ref() == trust);
    let known: BTreeSet<IoThreadName> = trusted().map(|iothread| iothread.name.clone()).collect();
    if known.is_empty() {
        return Err(Fault::NoIoThreadOf(trust.cloned()));
    }
    let all = || trusted().map(|iothread| Entry::round_robin(iothread.name.clone())).collect();
    let entries = entries.unwrap_or_else(all);
    let is_other = |entry: &&Entry| {
        let named = iothreads.iter().find(|iothread| iothread.name == entry.iothread);
        named.is_some_and(|iothread| iothread.trust.as_ref() != trust)
    };
    if let Some(entry) = entries.iter().find(is_other) {
        return Err(Fault::OtherTrust(entry.iothread.clone()));
    }
    Ok(Mapping::new(&entries, queues, Some(&known))?)
}

/// The engine, of whose keys each belongs to its type.
fn engine(raw: wire::Engine) -> Result<Engine, Misplaced> {
    let kind = raw.kind;
    let only = |of: &[EngineKind], key: &'static str, is_given: bool| {
        if is_given && !of.contains(&kind) {
            return Err((&["engine"] as &[_], Fault::ForeignEngineKey { kind, key }));
        }
        Ok(())
    };
    let (file, nvme) = (&[EngineKind::File], &[EngineKind::Nvme]);
    let stored = &[EngineKind::File, EngineKind::Nvme];
    let (ssd, emulated) = (&[EngineKind::Ssd], &[EngineKind::Ram, EngineKind::Ssd]);
    only(stored, "path", raw.path.is_some())?;
    only(file, "direct", raw.direct.is_some())?;
    only(file, "block_size", raw.block_size.is_some())?;
    only(file, "format", raw.format.is_some())?;
    only(file, "aio", raw.aio.is_some())?;
    only(nvme, "poll", raw.poll.is_some())?;
    only(stored, "lock", raw.lock.is_some())?;
    only(stored, "offset", raw.offset.is_some())?;
    only(ssd, "ssd", raw.ssd.is_some())?;
    only(ssd, "seed", raw.seed.is_some())?;
    only(ssd, "fault", raw.fault.is_some())?;
    only(emulated, "cpu_us", raw.cpu_us.is_some())?;
    only(emulated, "cpu_kib_ns", raw.cpu_kib_ns.is_some())?;
    let missing = |key| (&["engine"] as &[_], Fault::MissingEngineKey { kind, key });
    match kind {
        EngineKind::File | EngineKind::Nvme => {
            let slice = match (raw.offset, raw.size) {
                (None, None) => None,
                (None, Some(_)) => return Err(missing("offset")),
                (Some(_), None) => return Err(missing("size")),
                (Some(offset), Some(part)) => Some(slice(offset, part)?),
            };
            let path = raw.path.ok_or_else(|| missing("path"))?;
            if !absolute(&path) {
                return Err((&["engine", "path"], Fault::BadPath { path, kind }));
            }
            let lock = raw.lock.unwrap_or_default();
            if kind == EngineKind::Nvme {
                let poll = raw.poll.unwrap_or(false);
                return Ok(Engine::Nvme(NvmeEngine { path, poll, lock, slice }));
            }
            Ok(Engine::File(FileEngine {
                path,
                direct: raw.direct.unwrap_or(true),
                aio: raw.aio.unwrap_or_default(),
                lock,
                raw: raw.format.is_some(),
                block_size: raw.block_size.map(block_size).transpose()?,
                slice,
            }))
        }
        EngineKind::Ram => {
            let size = size(raw.size.ok_or_else(|| missing("size"))?)?;
            Ok(Engine::Ram { size, cpu: cpu(raw.cpu_us, raw.cpu_kib_ns)? })
        }
        EngineKind::Ssd => {
            let size = size(raw.size.ok_or_else(|| missing("size"))?)?;
            let model = raw.ssd.ok_or_else(|| missing("ssd"))?;
            let is_model = |c: char| c.is_ascii_alphanumeric() || "-_.*".contains(c);
            if !(1..=64).contains(&model.len()) || !model.chars().all(is_model) {
                return Err((&["engine", "ssd"], Fault::BadModel(model)));
            }
            let faults = raw.fault.unwrap_or_default();
            let stall = in_range("stall_ms", faults.stall_ms.into(), 0, 3_600_000);
            at(&["engine", "fault", "stall_ms"], stall)?;
            let (cpu, seed) = (cpu(raw.cpu_us, raw.cpu_kib_ns)?, raw.seed.unwrap_or(1));
            // TOML's integers end there, and the configuration is written as TOML too.
            at(&["engine", "seed"], in_range("seed", seed, 0, i64::MAX as u64))?;
            Ok(Engine::Ssd(SsdEngine { size, model, seed, faults, cpu }))
        }
    }
}

fn cpu(request_us: Option<u32>, kib_ns: Option<u32>) -> Result<CpuCost, Misplaced> {
    let (request, kib) = (request_us.unwrap_or(0).into(), kib_ns.unwrap_or(0).into());
    at(&["engine", "cpu_us"], in_range("cpu_us", request, 0, 1_000_000))?;
    at(&["engine", "cpu_kib_ns"], in_range("cpu_kib_ns", kib, 0, 1_000_000))?;
    Ok(CpuCost { request: Nanos::from_micros(request), kib: Nanos::new(kib) })
}

fn block_size(size: u32) -> Result<u32, Misplaced> {
    let is_one = size.is_power_of_two() && (512..=4096).contains(&size);
    if is_one { Ok(size) } else { Err((&["engine", "block_size"], Fault::BadBlockSize(size))) }
}

fn size(Size(size): Size) -> Result<Bytes, Misplaced> {
    const KEYS: &[&str] = &["engine", "size"];
    at(KEYS, in_range("size", size.get(), 512, MAX_RAM_BYTES.get()))?;
    if size.get().is_multiple_of(512) {
        Ok(size)
    } else {
        Err((KEYS, Fault::NotInSectors { key: "size", value: size.get() }))
    }
}

/// A part of an image.
fn slice(Size(offset): Size, Size(size): Size) -> Result<Slice, Misplaced> {
    const KEYS: &[&str] = &["engine", "size"];
    at(KEYS, in_range("size", size.get(), 512, i64::MAX as u64))?;
    let in_sectors = |n: Bytes| n.get().is_multiple_of(512);
    if !in_sectors(size) {
        return Err((KEYS, Fault::NotInSectors { key: "size", value: size.get() }));
    }
    if !in_sectors(offset) {
        let value = offset.get();
        return Err((&["engine", "offset"], Fault::NotInSectors { key: "offset", value }));
    }
    Ok(Slice { offset, size })
}

/// As `Device::new` reads it back.
impl From<&Device> for wire::Device {
    fn from(device: &Device) -> Self {
        let (socket, socket_activation) = match &device.listen {
            Listen::Path(path) => (Some(path.clone()), None),
            Listen::Activated(name) => (None, Some(name.clone())),
        };
        let engine = match &device.engine {
            Engine::File(file) => wire::Engine {
                kind: EngineKind::File,
                path: Some(file.path.clone()),
                direct: Some(file.direct),
                block_size: file.block_size,
                aio: Some(file.aio),
                lock: Some(file.lock),
                format: file.raw.then_some(wire::ImageFormat::Raw),
                offset: file.slice.map(|s| Size(s.offset)),
                size: file.slice.map(|s| Size(s.size)),
                ..wire::Engine::default()
            },
            Engine::Nvme(nvme) => wire::Engine {
                kind: EngineKind::Nvme,
                path: Some(nvme.path.clone()),
                poll: Some(nvme.poll),
                lock: Some(nvme.lock),
                offset: nvme.slice.map(|s| Size(s.offset)),
                size: nvme.slice.map(|s| Size(s.size)),
                ..wire::Engine::default()
            },
            Engine::Ram { size, cpu } => wire::Engine {
                kind: EngineKind::Ram,
                size: Some(Size(*size)),
                cpu_us: Some((cpu.request.get() / 1_000) as u32),
                cpu_kib_ns: Some(cpu.kib.get() as u32),
                ..wire::Engine::default()
            },
            Engine::Ssd(ssd) => wire::Engine {
                cpu_us: Some((ssd.cpu.request.get() / 1_000) as u32),
                cpu_kib_ns: Some(ssd.cpu.kib.get() as u32),
                kind: EngineKind::Ssd,
                size: Some(Size(ssd.size)),
                ssd: Some(ssd.model.clone()),
                seed: Some(ssd.seed),
                fault: Some(ssd.faults),
                ..wire::Engine::default()
            },
        };
        Self {
            name: device.name.clone(),
            vm: device.vm.clone(),
            socket,
            socket_activation,
            slots: device.slots.clone(),
            queues: Some(device.queues().into()),
            read_only: device.read_only,
            serial: Some(device.serial.clone()),
            write_cache: device.write_cache,
            fixed_buffers: device.fixed_buffers,
            trust: device.trust.clone(),
            max_memory: device.max_memory.map(Size),
            engine,
            mapping: Some(device.mapping.entries()),
            qos: device.qos.as_ref().map(wire::Qos::from),
        }
    }
}
