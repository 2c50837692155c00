//! One front end's session: what it has set up, and the rings that run because of it.
//!
//! A ring runs from the moment its size, addresses and kick are known and the memory they lie in
//! is there, whatever the order; GET_VRING_BASE, a reset or the session's end stop it, drained.
//! Requests are taken from it while it is enabled. Whoever serves the rings is a [`QueueHost`].
//!
//! Memory that rings use is taken away only after they have been drained. Memory that is added
//! just becomes known to them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::backend::{Backend, Channel, RingsTurn};
use crate::protocol::{InflightArea, Message, VringAddress, VringFd, VringState, features};
use rtvirtio_virtq::memory::{DirtyLog, MAX_REGIONS, Memory, MemoryError, Region};
use rtvirtio_virtq::ring::{Inflight, InflightError, MAX_SIZE, Ring, RingConfig, RingError};

/// DEVICE_NEEDS_RESET of the device status.
const NEEDS_RESET: u8 = 64;

mod memory;
mod serve;

pub use serve::{Ended, SessionError, serve};

/// A ring that is to be served.
#[derive(Debug)]
pub struct QueueSetup {
    /// The ring, with what an earlier server had begun, if there is an in-flight area.
    pub ring: Ring,
    /// The virtqueue's index.
    pub index: u16,
    /// What the driver kicks; without one, the ring is polled.
    pub kick: Option<OwnedFd>,
    /// What to call the driver by; without one, it looks for itself.
    pub call: Option<OwnedFd>,
    /// Where to tell that the ring is broken.
    pub error: Option<OwnedFd>,
    /// Whether requests are taken from it.
    pub enabled: bool,
    /// What the ring and its requests lie in.
    pub memory: Arc<Memory>,
}

/// A change to a ring that is being served.
#[derive(Debug)]
pub enum Change {
    /// Whether requests are taken from it.
    Enabled(bool),
    /// What to call the driver by. It is called once: it may have missed a call to the old one.
    Call(Option<OwnedFd>),
    /// Where to tell that the ring is broken.
    Error(Option<OwnedFd>),
    /// The same memory and possibly more, or another log.
    Memory(Arc<Memory>),
    /// Other memory, in which the ring lies too. Nothing is in flight while it changes, and nothing is in the old one then.
    Replaced(Arc<Memory>),
    /// Guest address at which writes to the used ring are logged.
    Log(Option<u64>),
}

/// A ring that was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoppedQueue {
    /// As GET_VRING_BASE returns it.
    pub base: u32,
    /// Whether its driver broke it.
    pub broken: bool,
}

/// Why a ring is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The kick is nothing that can be waited for.
    #[error("its kick is no eventfd, pipe or socket")]
    Kick,
    /// The call is nothing that can be signalled.
    #[error("its call is no eventfd, pipe or socket")]
    Call,
    /// Another program uses the image.
    #[error("its image is locked: is it in use by QEMU, qemu-img or another rtvirtio?")]
    Locked,
    /// As many rings are served as ever can be.
    #[error("too many virtqueues are served")]
    Full,
    /// The memory cannot be registered, and must be.
    #[error("the memory cannot be registered (fixed_buffers = \"on\")")]
    Register(#[source] Errno),
    /// The system refused.
    #[error("the system refused")]
    System(#[source] Errno),
}

/// Serves rings: the pool of IOThreads, for one device.
pub trait QueueHost {
    /// Names a ring that is served.
    type Key: Copy + std::fmt::Debug + Send;

    /// Serves a ring, and looks into it once unasked: its kick may have been lost.
    ///
    /// # Errors
    /// [`StartError`]
    fn start(&self, setup: QueueSetup) -> Result<Self::Key, StartError>;

    /// Stops serving a ring. When it returns, nothing is in flight and the ring's memory and file
    /// descriptors have been let go.
    fn stop(&self, key: Self::Key) -> StoppedQueue;

    /// Changes a ring that is served. When it returns, what was replaced is used no more.
    ///
    /// # Errors
    /// Memory that was added cannot be used: the ring goes on with what it had.
    fn update(&self, key: Self::Key, change: Change) -> Result<(), StartError>;

    /// Whether the driver broke a ring that is served.
    fn is_broken(&self, _key: Self::Key) -> bool {
        false
    }

    /// A front end has connected, of this process, if that is known; or it has left.
    fn set_connected(&self, _connected: bool, _peer: Option<i32>) {}
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Features that were not offered.
    #[error("features {0:#x} were not offered")]
    Features(u64),
    /// Features cannot change under a ring that runs.
    #[error("features {0:#x} cannot change while a virtqueue runs")]
    FeaturesRunning(u64),
    /// A request of network devices.
    #[error("the device has no network")]
    NoNetwork,
    /// A request of devices whose requests in flight outlive the server.
    #[error("the device has no in-flight area")]
    NoInflight,
    /// The device cannot have that MTU.
    #[error("the device does not have an MTU of {0}")]
    Mtu(u64),
    /// There is no such virtqueue.
    #[error("there is no virtqueue {0}")]
    NoQueue(u32),
    /// The ring must be stopped first.
    #[error("virtqueue {0} is running")]
    Running(u32),
    /// No ring can have that size.
    #[error("virtqueue {index} cannot have {size} entries")]
    QueueSize {
        /// Which.
        index: u32,
        /// Entries.
        size: u32,
    },
    /// No split ring can be there.
    #[error("virtqueue {index} cannot begin at {base:#x}")]
    Base {
        /// Which.
        index: u32,
        /// As SET_VRING_BASE gave it.
        base: u32,
    },
    /// The device does not serve what its driver has negotiated.
    #[error(
        "virtqueue {0} has a legacy driver without mergeable buffers: give the guest a driver of virtio 1.0 or later, \
         and in QEMU its device disable-legacy=on"
    )]
    Legacy(u16),
    /// The ring cannot be set up.
    #[error("virtqueue {index} is not usable")]
    Ring {
        /// Which.
        index: u16,
        /// Why.
        #[source]
        source: RingError,
    },
    /// The ring cannot be served.
    #[error("virtqueue {index} cannot be served")]
    Start {
        /// Which.
        index: u16,
        /// Why.
        #[source]
        source: StartError,
    },
    /// The memory cannot be used.
    #[error("the memory cannot be used")]
    Memory(#[from] MemoryError),
    /// The in-flight area cannot be used.
    #[error("the in-flight area cannot be used")]
    Inflight(#[from] InflightError),
    /// The in-flight area has more virtqueues than the device, or none, or of no possible size.
    #[error("an in-flight area of {queues} virtqueues with {size} entries")]
    InflightSize {
        /// Virtqueues.
        queues: u16,
        /// Entries of each.
        size: u16,
    },
    /// Not a field that the driver may write, or not with that value.
    #[error("the configuration space cannot be written at {offset}")]
    Config {
        /// Its place.
        offset: u32,
    },
    /// Not as many file descriptors as the message has.
    #[error("a file descriptor is missing")]
    NoFd,
    /// A channel for the back end's requests that is no socket.
    #[error("the back end's channel is no socket")]
    NotASocket,
    /// The system refused.
    #[error("the system refused")]
    System(#[source] Errno),
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// What a request is answered with.
#[derive(Debug)]
pub enum Answer {
    /// That it is done, if the front end wants to know.
    Done,
    /// A number.
    U64(u64),
    /// A virtqueue's index and its base.
    Vring(VringState),
    /// A part of the configuration space.
    Config {
        /// Its first byte.
        offset: u32,
        /// As the request had them.
        flags: u32,
        /// The bytes.
        data: Vec<u8>,
    },
    /// An in-flight area, new.
    Inflight(InflightArea, OwnedFd),
}

/// What the driver kicks a ring by.
#[derive(Debug, Default)]
enum Kick {
    /// Not said yet: the ring does not run.
    #[default]
    Unset,
    /// It does not kick: the ring is polled.
    Polled,
    /// A file descriptor.
    Fd(OwnedFd),
}

/// A virtqueue as the front end has set it up.
#[derive(Debug)]
struct Vring<K> {
    size: Option<u16>,
    base: u32,
    // As SET_VRING_BASE said last.
    told: u32,
    address: Option<VringAddress>,
    kick: Kick,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    // As SET_VRING_ENABLE said.
    enabled: Option<bool>,
    running: Option<K>,
}

impl<K> Default for Vring<K> {
    fn default() -> Self {
        Self {
            size: None,
            base: 0,
            told: 0,
            address: None,
            kick: Kick::Unset,
            call: None,
            error: None,
            enabled: None,
            running: None,
        }
    }
}

/// The area in which requests in flight are noted.
#[derive(Debug)]
struct InflightState {
    map: Arc<Inflight>,
    queues: u16,
    queue_size: u16,
}

/// A session. Dropping it stops its rings.
pub struct Session<H: QueueHost> {
    device: Arc<dyn Backend>,
    host: Arc<H>,
    // As it was when the session began: the front end has seen these.
    offered: u64,
    features: u64,
    protocol: u64,
    // As SET_STATUS said.
    status: u8,
    // A ring that was broken has stopped since the last reset.
    broken: bool,
    vrings: Vec<Vring<H::Key>>,
    memory: Arc<Memory>,
    // Used while LOG_ALL is negotiated.
    log: Option<Arc<DirtyLog>>,
    inflight: Option<InflightState>,
    channel: Option<Arc<Channel>>,
    // The ring that GET_VRING_BASE has stopped just before.
    answered: Option<usize>,
    // From the first ring on.
    turn: Option<RingsTurn>,
}

impl<H: QueueHost> Session<H> {
    /// A session in which nothing has been said.
    #[must_use]
    pub fn new(device: Arc<dyn Backend>, host: Arc<H>) -> Self {
        Self {
            offered: device.features(),
            vrings: (0..device.queues()).map(|_| Vring::default()).collect(),
            device,
            host,
            features: 0,
            protocol: 0,
            status: 0,
            broken: false,
            memory: Arc::default(),
            log: None,
            inflight: None,
            channel: None,
            answered: None,
            turn: None,
        }
    }

    /// Whether the front end is told the outcome of requests that ask for it.
    #[must_use]
    pub const fn acknowledges(&self) -> bool {
        self.protocol & features::PROTOCOL_REPLY_ACK != 0
    }

    /// Does what a message asks for. `fds` came with it.
    ///
    /// # Errors
    /// [`Refused`]; the session is as it was, but rings may have stopped.
    pub fn handle(&mut self, message: Message, fds: Vec<OwnedFd>) -> Result<Answer, Refused> {
        // The front end has had its answer: it knows where the ring is.
        if let Some(position) = self.answered.take() {
            self.forget(position);
        }
        let mut fds = fds.into_iter();
        let mut fd = || fds.next().ok_or(Refused::NoFd);
        match message {
            Message::GetFeatures => return Ok(Answer::U64(self.offered)),
            Message::SetFeatures(features) => self.set_features(features)?,
            Message::SetLogFd => {}
            // A session begins. If there was one on this connection, its device was unplugged and
            // another plugged in (QEMU's chardev outlives both), which adds its memory anew.
            Message::SetOwner => {
                if self.memory.regions().len() > 0 {
                    self.reset();
                    self.memory = Arc::default();
                }
            }
            // Deprecated; back ends that heed it disable the rings.
            Message::ResetOwner => {
                for index in 0..self.vrings.len() {
                    self.set_enabled(index, false)?;
                }
            }
            Message::GetProtocolFeatures => {
                return Ok(Answer::U64(self.device.protocol_features()));
            }
            Message::SetProtocolFeatures(protocol) => {
                refuse_others(protocol, self.device.protocol_features())?;
                self.protocol = protocol;
            }
            Message::SetMemTable(specs) => {
                self.fits_memory(&specs)?;
                let map = |spec| Ok(Arc::new(Region::map(spec, fd()?)?));
                let regions = specs.into_iter().map(map).collect::<Result<_, Refused>>()?;
                self.replace_memory(Memory::new(regions)?)?;
            }
            Message::AddMemReg(spec) => {
                if self.memory.regions().len() >= MAX_REGIONS {
                    return Err(MemoryError::TooManyRegions.into());
                }
                let there = self.memory.regions().map(|region| *region.spec());
                self.fits_memory(&there.chain([spec]).collect::<Vec<_>>())?;
                let more = self.memory.with(Arc::new(Region::map(spec, fd()?)?))?;
                self.share_memory(more)?;
                self.start_all()?;
            }
            Message::RemMemReg(spec) => self.replace_memory(self.memory.without(&spec)?)?,
            Message::GetMaxMemSlots => return Ok(Answer::U64(MAX_REGIONS as u64)),
            Message::SetLogBase { size, offset } => {
                self.log = Some(Arc::new(DirtyLog::map(fd()?, offset, size)?));
                self.share_memory(self.memory.with_log(None))?;
                return Ok(Answer::U64(0));
            }
            Message::SetVringNum(VringState { index, num }) => {
                self.set_size(index, num)?;
                self.start(index as usize)?;
            }
            Message::SetVringAddr(address) => self.set_address(address)?,
            Message::SetVringBase(VringState { index, num }) => {
                let vring = self.stopped(index)?;
                (vring.base, vring.told) = (num, num);
            }
            Message::GetVringBase(index) => {
                let position = self.position(index)?;
                if self.vrings[position].running.is_some() {
                    self.answered = Some(position);
                }
                self.stop(position);
                let vring = &mut self.vrings[position];
                vring.kick = Kick::Unset;
                return Ok(Answer::Vring(VringState { index, num: vring.base }));
            }
            Message::SetVringKick(VringFd { index, fd: with_fd }) => {
                let position = self.position(index)?;
                let kick = if with_fd { Kick::Fd(fd()?) } else { Kick::Polled };
                self.stop(position);
                self.vrings[position].kick = kick;
                self.start(position)?;
            }
            Message::SetVringCall(VringFd { index, fd: with_fd }) => {
                let position = self.position(index)?;
                let call = if with_fd { Some(fd()?) } else { None };
                let copy = call.as_ref().map(OwnedFd::try_clone).transpose().map_err(system)?;
                self.vrings[position].call = call;
                self.update(position, Change::Call(copy))?;
            }
            Message::SetVringErr(VringFd { index, fd: with_fd }) => {
                let position = self.position(index)?;
                let error = if with_fd { Some(fd()?) } else { None };
                let copy = error.as_ref().map(OwnedFd::try_clone).transpose().map_err(system)?;
                self.vrings[position].error = error;
                self.update(position, Change::Error(copy))?;
            }
            Message::SetVringEnable { index, enabled } => {
                let position = self.position(index)?;
                self.set_enabled(position, enabled)?;
            }
            Message::GetQueueNum => return Ok(Answer::U64(self.device.queue_num())),
            Message::SendRarp(mac) if !self.device.announce(mac) => return Err(Refused::NoNetwork),
            Message::SendRarp(_) => {}
            Message::NetSetMtu(mtu) if !self.device.set_mtu(mtu) => return Err(Refused::Mtu(mtu)),
            Message::NetSetMtu(_) => {}
            Message::GetConfig { offset, size, flags } => {
                let data = self.device.config(offset, size, self.features);
                return Ok(Answer::Config { offset, flags, data });
            }
            Message::SetConfig { offset, data } => self.set_config(offset, &data)?,
            Message::SetBackendReqFd => {
                let fd = fd()?;
                let mode = rustix::fs::fstat(&fd)?.st_mode;
                if FileType::from_raw_mode(mode) != FileType::Socket {
                    return Err(Refused::NotASocket);
                }
                let channel = Arc::new(Channel(fd));
                // All that is sent there is that the configuration has changed, which other front ends do not expect.
                if self.protocol & features::PROTOCOL_CONFIG != 0 {
                    self.device.link().set_channel(&channel);
                }
                self.channel = Some(channel);
            }
            Message::GetInflightFd(area) => return self.create_inflight(area),
            Message::SetInflightFd(area) => {
                let fd = fd()?;
                self.set_inflight(area, fd)?;
            }
            // The memory stays: front ends that add regions one by one do not add them again.
            Message::ResetDevice => self.reset(),
            Message::SetStatus(status) => {
                if status == 0 {
                    self.reset_rings();
                    self.broken = false;
                }
                self.status = status;
            }
            Message::GetStatus => return Ok(Answer::U64(self.status().into())),
        }
        Ok(Answer::Done)
    }

    /// A driver that broke a ring must reset the device (virtio 1.2, 2.1.2).
    fn status(&self) -> u8 {
        let is_broken = |vring: &Vring<_>| vring.running.is_some_and(|k| self.host.is_broken(k));
        if self.broken || self.vrings.iter().any(is_broken) {
            self.status | NEEDS_RESET
        } else {
            self.status
        }
    }

    fn set_features(&mut self, features: u64) -> Result<(), Refused> {
        refuse_others(features, self.offered)?;
        let changed = features ^ self.features;
        let fixed = changed & !(features::LOG_ALL | features::PROTOCOL_FEATURES);
        let runs = self.vrings.iter().any(|vring| vring.running.is_some());
        if fixed != 0 && runs {
            return Err(Refused::FeaturesRunning(fixed));
        }
        self.features = features;
        if changed & features::RING_PACKED != 0 {
            // Its layout is the other kind's.
            self.inflight = None;
        }
        // Also if nothing has changed: an earlier session's driver was another one.
        if !runs {
            self.device.negotiated(features);
        }
        if changed & features::LOG_ALL != 0 {
            self.share_memory(self.memory.with_log(None))?;
        }
        if changed & features::PROTOCOL_FEATURES != 0 {
            for index in 0..self.vrings.len() {
                self.update(index, Change::Enabled(self.is_enabled(index)))?;
            }
        }
        Ok(())
    }

    const fn packed(&self) -> bool {
        self.features & features::RING_PACKED != 0
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), Refused> {
        let inflight = self.inflight.as_ref().map(|area| &*area.map);
        if self.device.write_config(offset, data, self.features, inflight) {
            Ok(())
        } else {
            Err(Refused::Config { offset })
        }
    }

    fn position(&self, index: u32) -> Result<usize, Refused> {
        let position = index as usize;
        if position < self.vrings.len() { Ok(position) } else { Err(Refused::NoQueue(index)) }
    }

    /// A ring that does not run.
    fn stopped(&mut self, index: u32) -> Result<&mut Vring<H::Key>, Refused> {
        let position = self.position(index)?;
        match &mut self.vrings[position] {
            vring if vring.running.is_none() => Ok(vring),
            _ => Err(Refused::Running(index)),
        }
    }

    fn set_size(&mut self, index: u32, size: u32) -> Result<(), Refused> {
        let packed = self.packed();
        let vring = self.stopped(index)?;
        let entries = u16::try_from(size).ok().filter(|entries| is_queue_size(*entries, packed));
        vring.size = Some(entries.ok_or(Refused::QueueSize { index, size })?);
        Ok(())
    }

    fn set_address(&mut self, address: VringAddress) -> Result<(), Refused> {
        let position = self.position(address.index)?;
        let old = self.vrings[position].address.replace(address);
        let place = |address: VringAddress| VringAddress { log: None, ..address };
        if old.map(place) == Some(place(address)) && self.vrings[position].running.is_some() {
            return self.update(position, Change::Log(address.log));
        }
        self.stop(position);
        self.start(position)
    }

    fn is_enabled(&self, index: usize) -> bool {
        // Without protocol features there is no SET_VRING_ENABLE.
        let negotiated = self.features & features::PROTOCOL_FEATURES != 0;
        self.vrings[index].enabled.unwrap_or(!negotiated)
    }

    fn set_enabled(&mut self, index: usize, enabled: bool) -> Result<(), Refused> {
        self.vrings[index].enabled = Some(enabled);
        self.update(index, Change::Enabled(enabled))?;
        if self.vrings[index].running.is_some() {
            self.device.serves(index as u16, enabled);
        }
        Ok(())
    }

    fn update(&self, index: usize, change: Change) -> Result<(), Refused> {
        let Some(key) = self.vrings[index].running else { return Ok(()) };
        let index = index as u16;
        self.host.update(key, change).map_err(|source| Refused::Start { index, source })
    }

    const fn config(&self, size: u16, address: VringAddress, base: u32) -> RingConfig {
        RingConfig {
            size,
            packed: self.packed(),
            event_idx: self.features & features::RING_EVENT_IDX != 0,
            indirect: self.features & features::RING_INDIRECT_DESC != 0,
            in_order: self.features & features::IN_ORDER != 0,
            descriptors: address.descriptors,
            driver: address.available,
            device: address.used,
            base,
            log: address.log,
        }
    }

    /// Serves a ring, if all of it is there and it is not served yet.
    fn start(&mut self, position: usize) -> Result<(), Refused> {
        let index = position as u16;
        let vring = &self.vrings[position];
        let (None, Some(size), Some(address)) = (vring.running, vring.size, vring.address) else {
            return Ok(());
        };
        let kick = match &vring.kick {
            Kick::Unset => return Ok(()),
            Kick::Polled => None,
            Kick::Fd(fd) => Some(fd),
        };
        // Only now: a front end may set other features before it sets its driver's.
        if !self.device.can_serve(self.features) {
            return Err(Refused::Legacy(index));
        }
        // The size was checked, but the kind of ring may have changed since.
        let packed = self.packed();
        if !is_queue_size(size, packed) {
            return Err(Refused::QueueSize { index: index.into(), size: size.into() });
        }
        let (base, told) = (vring.base, vring.told);
        if !packed && base > u16::MAX.into() {
            return Err(Refused::Base { index: index.into(), base });
        }
        // An earlier session's requests end before this one's begin.
        if self.turn.is_none() {
            self.turn = Some(self.device.link().take_turn());
        }
        let config = self.config(size, address, base);
        let inflight = match &self.inflight {
            Some(area) if index < area.queues && size > area.queue_size => {
                return Err(Refused::QueueSize { index: index.into(), size: size.into() });
            }
            Some(area) => area.map.queue(index),
            None => None,
        };
        let memory = Arc::clone(&self.memory);
        let ring = match self.device.positions().and_then(|kept| kept.queue(index, told)) {
            Some(position) => Ring::with_position(config, memory, position),
            None => Ring::new(config, memory, inflight),
        };
        let ring = match ring {
            Ok(ring) => ring,
            // Its memory may come later.
            Err(RingError::Unmapped) => return Ok(()),
            Err(source) => return Err(Refused::Ring { index, source }),
        };
        let copy = |fd: Option<&OwnedFd>| fd.map(OwnedFd::try_clone).transpose().map_err(system);
        let setup = QueueSetup {
            ring,
            index,
            kick: copy(kick)?,
            call: copy(vring.call.as_ref())?,
            error: copy(vring.error.as_ref())?,
            enabled: self.is_enabled(position),
            memory: Arc::clone(&self.memory),
        };
        let key = self.host.start(setup).map_err(|source| Refused::Start { index, source })?;
        self.vrings[position].running = Some(key);
        self.device.serves(index, self.is_enabled(position));
        Ok(())
    }

    fn start_all(&mut self) -> Result<(), Refused> {
        (0..self.vrings.len()).try_for_each(|index| self.start(index))
    }

    /// Stops serving a ring, if it is served; it continues from where it was.
    fn stop(&mut self, position: usize) {
        let vring = &mut self.vrings[position];
        if let Some(key) = vring.running.take() {
            let stopped = self.host.stop(key);
            vring.base = stopped.base;
            self.broken |= stopped.broken;
            self.device.serves(position as u16, false);
        }
    }

    /// The front end knows where a ring is, or sets it up anew. Until then what is kept is right: the
    /// ring has been drained.
    fn forget(&self, position: usize) {
        if let Some(kept) = self.device.positions() {
            kept.forget(position as u16);
        }
    }

    fn stop_all(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
        }
    }

    /// Stops all rings and forgets what is set anew by whoever resets: features, log and in-flight
    /// area.
    fn reset(&mut self) {
        self.reset_rings();
        self.features &= features::PROTOCOL_FEATURES;
        self.status = 0;
        self.broken = false;
        self.log = None;
        // No ring runs that would have to know.
        self.memory = Arc::new(self.memory.with_log(None));
        self.inflight = None;
        self.device.negotiated(self.features);
    }

    /// Stops all rings and forgets how they were set up.
    fn reset_rings(&mut self) {
        self.stop_all();
        for index in 0..self.vrings.len() {
            self.forget(index);
            self.vrings[index] = Vring::default();
        }
    }

    fn check_inflight(&self, area: &InflightArea) -> Result<(), Refused> {
        if self.device.protocol_features() & features::PROTOCOL_INFLIGHT_SHMFD == 0 {
            return Err(Refused::NoInflight);
        }
        let InflightArea { queues, queue_size: size, .. } = *area;
        let possible = (1..=self.device.queues()).contains(&queues);
        if possible && is_queue_size(size, self.packed()) {
            Ok(())
        } else {
            Err(Refused::InflightSize { queues, size })
        }
    }

    fn create_inflight(&self, area: InflightArea) -> Result<Answer, Refused> {
        self.check_inflight(&area)?;
        let (fd, size) = Inflight::create(area.queues, area.queue_size, self.packed())?;
        Ok(Answer::Inflight(InflightArea { size, offset: 0, ..area }, fd))
    }

    fn set_inflight(&mut self, area: InflightArea, fd: OwnedFd) -> Result<(), Refused> {
        self.check_inflight(&area)?;
        if let Some(index) = self.vrings.iter().position(|vring| vring.running.is_some()) {
            return Err(Refused::Running(index as u32));
        }
        let InflightArea { size, offset, queues, queue_size, .. } = area;
        let map = Inflight::map(fd, offset, size, queues, queue_size, self.packed())?;
        self.device.take_over(&map);
        self.inflight = Some(InflightState { map, queues, queue_size });
        Ok(())
    }
}

impl<H: QueueHost> Drop for Session<H> {
    fn drop(&mut self) {
        self.stop_all();
    }
}

const fn refuse_others(features: u64, offered: u64) -> Result<(), Refused> {
    match features & !offered {
        0 => Ok(()),
        others => Err(Refused::Features(others)),
    }
}

const fn is_queue_size(size: u16, packed: bool) -> bool {
    2 <= size && size <= MAX_SIZE && (packed || size.is_power_of_two())
}

fn system(error: std::io::Error) -> Refused {
    Refused::System(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
#[cfg(test)]
mod tests;
