//! Network devices: opened, served, and what is to be seen of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rtvirtio_frames::forwarding::Port;
use rtvirtio_spec::control::{Event, NicQueueState, NicState, PromisedFrames, QueueDirection};
use rtvirtio_spec::serve::{self, MAX_NETWORKS, NicLink};
use rtvirtio_units::{DiskName, Name};
use rtvirtio_vhost::Backend as _;
use rtvirtio_vhost::server::{Listener, Server, SocketId};
use rustix::io::Errno;

use super::iothreads::{Core, ServedNic, threads};
use super::nic_host::NicHost;
use super::positions::{PositionsError, PositionsFile};
use super::watchdog::Watchdog;
use super::{HandedFds, Notice, ObservedNic, PlaneError, Report, SOCKET_MODE, io, refused};
use crate::device::Limits;
use crate::nic::{Link, Nic, NicConfig};
use crate::sandbox::{Identity, give};
use crate::socket::Socket;
use crate::switch::Switch;
use crate::tap::{self, Tap, TapError};

/// Of virtqueues, by their index.
const DIRECTIONS: [QueueDirection; 2] = [QueueDirection::Receive, QueueDirection::Transmit];

/// A network device that has yet to be served.
#[derive(Debug)]
pub(super) struct OpenedNic {
    pub(super) spec: serve::Nic,
    pub(super) taps: Vec<Tap>,
    /// Of one on a socket.
    pub(super) link: Option<Socket>,
    pub(super) listener: Listener,
    pub(super) positions: Result<PositionsFile, PositionsError>,
}

impl OpenedNic {
    /// One that comes while others are served: there are no rights left to attach to a TAP.
    pub(super) fn handed(spec: serve::Nic, handed: HandedFds) -> Result<Self, PlaneError> {
        let HandedFds { image: _, socket, taps } = handed;
        let taps = match &spec.link {
            NicLink::Tap(tap) => {
                let handed = |why: String| {
                    PlaneError::Handed(format!("cannot take over the TAP of {}: {why}", spec.name))
                };
                if taps.len() != usize::from(spec.pairs) {
                    let (came, pairs) = (taps.len(), spec.pairs);
                    return Err(handed(format!(
                        "{came} of its queues were handed over, and it has {pairs} pairs"
                    )));
                }
                let adopted: Result<_, _> =
                    taps.into_iter().map(|fd| Tap::adopt(fd, tap)).collect();
                adopted.map_err(|error| match error {
                    TapError::NotAQueue(_) => handed(error.to_string()),
                    _ => refused(format!("cannot take over the TAP of {}", spec.name), error),
                })?
            }
            _ => Vec::new(),
        };
        let link = open_link(&spec, None)?;
        let what = || format!("cannot listen for {}", spec.name);
        let listener = match socket {
            Some(fd) => Listener::from_fd(fd).map(|listener| listener.removing(&spec.socket)),
            None => Listener::bind(&spec.socket, SOCKET_MODE),
        };
        let listener = listener.map_err(|error| refused(what(), error))?;
        let positions = PositionsFile::open(&spec.socket, 2 * spec.pairs, None);
        Ok(Self { spec, taps, link, listener, positions })
    }
}

/// The socket of a device that is on one; what is made is the property of `owner`, if one is given.
pub(super) fn open_link(
    spec: &serve::Nic,
    owner: Option<&Identity>,
) -> Result<Option<Socket>, PlaneError> {
    Ok(match &spec.link {
        NicLink::Stream(path) => {
            let what = || format!("cannot connect {} to {}", spec.name, path.display());
            Some(Socket::connect(path).map_err(|error| io(what(), error.into()))?)
        }
        NicLink::Dgram { local, remote } => {
            let what = || format!("cannot bind {} to {}", spec.name, local.display());
            let socket = Socket::bind(local, remote, SOCKET_MODE);
            let socket = socket.map_err(|error| refused(what(), error))?;
            if let Some(owner) = owner {
                give(local, owner, None).map_err(|error| io(what(), error))?;
            }
            Some(socket)
        }
        NicLink::Tap(_) | NicLink::Network(_) => None,
    })
}

/// Of the descriptors that a service manager keeps: before a TAP's name and a queue's number.
const TAP: &str = "rtvirtio-tap-";

/// Under what name a service manager keeps a TAP's queue.
pub(super) fn tap_name(tap: &str, queue: u16) -> String {
    format!("{TAP}{tap}-{queue}")
}

/// Has the service manager let go of the queues of TAPs that are of no device now: it would keep them
/// busy.
pub(super) fn release_others(
    nics: &[serve::Nic],
    handed: &mut HashMap<String, OwnedFd>,
    release: &dyn Fn(&str),
) {
    let names = |nic: &serve::Nic| match &nic.link {
        NicLink::Tap(tap) => (0..nic.pairs).map(|queue| tap_name(tap, queue)).collect(),
        _ => Vec::new(),
    };
    let wanted: HashSet<String> = nics.iter().flat_map(names).collect();
    let is_other = |name: &String, _: &mut OwnedFd| name.starts_with(TAP) && !wanted.contains(name);
    handed.extract_if(is_other).for_each(|(name, _)| release(&name));
}

/// Goes on with what was `handed` over of a device's TAP, or attaches to it; a device without a TAP has none.
pub(super) fn attach(
    spec: &serve::Nic,
    handed: &mut HashMap<String, OwnedFd>,
    release: &dyn Fn(&str),
) -> Result<Vec<Tap>, PlaneError> {
    let NicLink::Tap(tap) = &spec.link else { return Ok(Vec::new()) };
    let names: Vec<String> = (0..spec.pairs).map(|queue| tap_name(tap, queue)).collect();
    let kept: Vec<_> = names.iter().map(|name| handed.remove(name)).collect();
    let were_kept = kept.iter().any(Option::is_some);
    let adopt = |fd: Option<OwnedFd>| Tap::adopt(fd?, tap).ok();
    if let Some(taps) = kept.into_iter().map(adopt).collect() {
        return Ok(taps);
    }
    if were_kept {
        names.iter().for_each(|name| release(name));
    }
    let what = || format!("cannot attach {} to its TAP", spec.name);
    Tap::attach(tap, spec.pairs).map_err(|error| refused(what(), error))
}

/// Network devices, as far as they may be changed.
pub(super) type ServedNics = BTreeMap<DiskName, ServedNic>;

/// A network device that is served.
struct Served {
    /// As it was added.
    spec: serve::Nic,
    nic: Arc<Nic>,
    host: Arc<NicHost>,
    socket_id: SocketId,
    // Behind what ends the sessions.
    _positions: Option<PositionsFile>,
}

/// A network.
struct Network {
    spec: serve::Network,
    switch: Arc<Switch>,
}

/// All network devices, and their networks.
#[derive(Default)]
pub(super) struct Nics {
    served: Mutex<BTreeMap<Name, Served>>,
    networks: Mutex<BTreeMap<Name, Network>>,
}

impl Nics {
    fn served(&self) -> MutexGuard<'_, BTreeMap<Name, Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_networks(&self) -> MutexGuard<'_, BTreeMap<Name, Network>> {
        self.networks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a network.
    pub(super) fn add_network(&self, spec: serve::Network) -> Result<(), PlaneError> {
        let mut networks = self.all_networks();
        if networks.contains_key(&spec.name) {
            return Err(PlaneError::NetworkExists(spec.name));
        }
        if networks.len() >= MAX_NETWORKS {
            return Err(PlaneError::TooMany { what: "networks", limit: MAX_NETWORKS });
        }
        let switch = Switch::new(spec.max_broadcast as f64);
        networks.insert(spec.name.clone(), Network { spec, switch });
        Ok(())
    }

    /// Removes a network in which no device is.
    pub(super) fn remove_network(&self, network: &Name) -> Result<(), PlaneError> {
        let mut networks = self.all_networks();
        let found = networks.get(network);
        let found = found.ok_or_else(|| PlaneError::NoNetwork(network.clone()))?;
        let ports = found.switch.ports();
        if ports > 0 {
            return Err(PlaneError::NetworkInUse { network: network.clone(), ports });
        }
        networks.remove(network);
        Ok(())
    }

    /// As they are in the configuration.
    pub(super) fn networks(&self) -> Vec<serve::Network> {
        self.all_networks().values().map(|network| network.spec.clone()).collect()
    }

    /// What a device is attached to: its TAP's queues, its socket, or a port that is made for it.
    fn link(
        &self,
        spec: &serve::Nic,
        taps: Vec<Tap>,
        socket: Option<Socket>,
    ) -> Result<Link, PlaneError> {
        let port = match &spec.link {
            NicLink::Tap(_) => return Ok(Link::Taps(taps.into_iter().map(Arc::new).collect())),
            NicLink::Stream(_) | NicLink::Dgram { .. } => {
                let missing = || io(format!("{} has no socket", spec.name), Errno::NOTCONN.into());
                return Ok(Link::Socket(Arc::new(socket.ok_or_else(missing)?)));
            }
            NicLink::Network(port) => port,
        };
        // Under the lock: who removes the network sees the port.
        let networks = self.all_networks();
        let network = networks.get(&port.network);
        let network = network.ok_or_else(|| PlaneError::NoNetwork(port.network.clone()))?;
        let switch = Arc::clone(&network.switch);
        let (vlans, anti_spoofing) = (port.vlans.clone(), port.anti_spoofing);
        let port = Port { mac: spec.mac, vlans, anti_spoofing };
        let number = switch.add_port(port, spec.pairs);
        let what = || format!("cannot connect {} to its network", spec.name);
        let number = number.map_err(|error| refused(what(), error))?;
        Ok(Link::Port { switch, number, pairs: spec.pairs })
    }

    /// Serves a device by the IOThreads of its mapping.
    pub(super) fn add(
        &self,
        opened: OpenedNic,
        server: &Server,
        core: &Core,
        watchdog: &Watchdog,
        report: &Arc<Report>,
    ) -> Result<(), PlaneError> {
        let OpenedNic { spec, taps, link, listener, positions } = opened;
        let positions = positions.map_err(|error| {
            report(spec.name.as_str(), Notice::NoPositions(&error));
        });
        let positions = positions.ok();
        // What Linux gives a TAP that nobody has changed.
        const USUAL_MTU: u16 = 1500;
        let of_tap = || match &spec.link {
            NicLink::Tap(tap) => tap::mtu(tap),
            _ => None,
        };
        let nic = Arc::new(Nic::new(NicConfig {
            name: spec.name.to_string(),
            mac: spec.mac,
            mtu: spec.mtu.or_else(of_tap).unwrap_or(USUAL_MTU),
            limits: [spec.rx, spec.tx].map(|limit| limit.map(|limit| limit.rate())),
            promises: DIRECTIONS.map(|direction| spec.reservation(direction)),
            link: self.link(&spec, taps, link)?,
            memory: spec.max_memory.unwrap_or(Limits::default().memory),
            positions: positions.as_ref().map(|file| Arc::clone(&file.positions)),
        }));
        let failed = |error| {
            leave_network(&nic);
            error
        };
        // No IOThread of its mapping may end before the device is there.
        let mut state = core.state();
        let threads = threads(&state, &spec.mapping).map_err(failed)?;
        let name = DiskName::from(spec.name.clone());
        let (pool, events, report) =
            (Arc::clone(&core.pool), core.events.clone(), Arc::clone(report));
        let host = NicHost::new(name.clone(), Arc::clone(&nic), pool, threads, events, report);
        let host = Arc::new(host);
        // Before its front ends' events: one may be waiting at the socket.
        core.tell(Event::DeviceAdded { device: name.clone() });
        let served = server.add(listener, Arc::clone(&nic) as Arc<_>, Arc::clone(&host));
        let unheard = |error| {
            core.tell(Event::DeviceRemoved { device: name.clone() });
            failed(io(format!("cannot listen for {}", spec.name), error))
        };
        let socket_id = served.map_err(unheard)?;
        watchdog.watch(Arc::downgrade(&host) as Weak<_>);
        let mapped = ServedNic {
            host: Arc::clone(&host),
            ids: state.ids(&spec.vm, spec.mapping.queues()),
            spec: spec.clone(),
        };
        let served = Served { nic, host, socket_id, _positions: positions, spec };
        self.served().insert(served.spec.name.clone(), served);
        state.nics.insert(name, mapped);
        drop(state);
        core.touch();
        Ok(())
    }

    /// Has a service manager keep the queues of a device's TAP that came while others were served.
    pub(super) fn keep_taps(&self, name: &Name, report: &Report) {
        let device = self.served().get(name).map(|it| (it.spec.clone(), Arc::clone(&it.nic)));
        if let Some((spec, nic)) = device {
            tell_of_taps(&spec, &nic, report, true);
        }
    }

    /// Ends a device's session, and lets go of what it is attached to.
    pub(super) fn remove(&self, name: &Name, server: &Server, report: &Report) {
        let Some(served) = self.served().remove(name) else { return };
        server.remove(served.socket_id);
        tell_of_taps(&served.spec, &served.nic, report, false);
        if let Some(kept) = served.nic.positions() {
            (0..served.nic.queues()).for_each(|index| kept.forget(index));
        }
        leave_network(&served.nic);
    }

    /// Forgets where the rings of front ends were that have been here and gone. Those that have yet to
    /// come back to what an earlier server has left are waited for.
    pub(super) fn forget_gone(&self, server: &Server) {
        for nic in self.served().values() {
            if let Some(kept) = nic.nic.positions()
                && nic.host.has_served()
                && !server.is_connected(nic.socket_id)
            {
                (0..nic.nic.queues()).for_each(|index| kept.forget(index));
            }
        }
    }

    /// Ends all sessions.
    pub(super) fn close(&self, server: &Server) {
        for (_, nic) in std::mem::take(&mut *self.served()) {
            server.remove(nic.socket_id);
        }
    }

    /// As the control API says it.
    pub(super) fn observe(&self, server: &Server, mapped: &ServedNics) -> Vec<ObservedNic> {
        let of = |(name, nic): (&Name, &Served)| {
            let ServedNic { spec, ids, .. } = mapped.get(&name.clone().into())?;
            let queues = spec.mapping.by_queue().iter().zip(&nic.host.queues.stats).enumerate();
            let queues = queues.map(|(index, (iothread, stats))| {
                let seen = stats.snapshot();
                let drops = stats.drops();
                let frames = seen.operations.reads + seen.operations.writes;
                let limit = [spec.rx, spec.tx][index % 2];
                let within = limit.and_then(|limit| limit.within);
                NicQueueState {
                    index: index as u16,
                    id: ids.queue + index as u32,
                    direction: DIRECTIONS[index % 2],
                    iothread: iothread.clone(),
                    frames: frames.saturating_sub(seen.errors),
                    bytes: rtvirtio_units::Bytes::new(
                        seen.read_bytes.get() + seen.written_bytes.get(),
                    ),
                    dropped: drops.total(),
                    drops,
                    promised: within.map(|within_ns| {
                        let (promised, late) = stats.promised_and_late();
                        PromisedFrames { within_ns, kept: promised - late, late }
                    }),
                    kicks: seen.kicks,
                    calls: seen.calls,
                    busy_ns: seen.busy,
                    wait: seen.wait.summary(),
                    service: seen.service.summary(),
                }
            });
            let state = NicState {
                name: name.clone(),
                vm: nic.spec.vm.clone(),
                socket: nic.spec.socket.clone(),
                connected: server.is_connected(nic.socket_id),
                link: nic.spec.link.to_string(),
                mac: serve::mac_text(nic.nic.mac()),
                mtu: nic.nic.mtu(),
                queues: queues.collect(),
            };
            Some(ObservedNic { state, stats: nic.host.queues.stats.clone() })
        };
        self.served().iter().filter_map(of).collect()
    }
}

/// Has a service manager keep the queues of a device's TAP, or let go of them.
fn tell_of_taps(spec: &serve::Nic, nic: &Nic, report: &Report, are_kept: bool) {
    let (NicLink::Tap(tap), Link::Taps(taps)) = (&spec.link, nic.attached()) else { return };
    for (number, queue) in (0..).zip(taps) {
        let (name, queue) = (&*tap_name(tap, number), queue.as_fd());
        let notice = match are_kept {
            true => Notice::KeepTap { name, queue },
            false => Notice::ReleaseTap { name },
        };
        report(spec.name.as_str(), notice);
    }
}

/// Takes a device whose queues have stopped out of its network, if it is in one.
fn leave_network(nic: &Nic) {
    if let Link::Port { switch, number, .. } = nic.attached() {
        switch.remove_port(*number);
    }
}
