//! Any messages of a front end, well formed or not, in any order, over memory with any content: no
//! panic, every ring that was started is stopped, and no descriptor or mapping is left.

#![no_main]

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use rtvirtio_dataplane::device::{Device, DeviceConfig, Limits};
use rtvirtio_vhost::protocol::features;
use rtvirtio_vhost::{Backend, Link};
use rtvirtio_virtq::memory::RegionSpec;
use rtvirtio_vhost::protocol::{
    Header, InflightArea, Message, VringAddress, VringFd, VringState,
};
use rtvirtio_virtq::ring::{Chain, Inflight, Positions, Ring};
use rtvirtio_vhost::session::{
    Answer, Change, QueueHost, QueueSetup, Session, StartError, StoppedQueue,
};
use rtvirtio_engine::{Engine, Geometry, Outcome, Request, SubmitContext};
use rtvirtio_units::Bytes;
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;

/// Bytes of the file behind the guest's memory.
const MEMORY: u64 = 1 << 18;
/// From a guest's physical address to the front end's.
const FRONT_END: u64 = 0x7f00_0000_0000;

#[derive(Arbitrary, Debug)]
struct Input {
    queues: u8,
    read_only: bool,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Fd {
    Eventfd,
    Socket,
    Memory,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
struct Place {
    slot: u8,
    pages: u8,
    offset: u8,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// What makes a ring run, in one step.
    Ready { queue: u8, features: u64, size: u8, base: u32 },
    Features(u64),
    Protocol(u64),
    Table(Vec<Place>),
    Add(Place),
    Remove(Place),
    Log { size: u16, offset: u8 },
    LogFd,
    Size { queue: u8, size: u32 },
    Address { queue: u8, descriptors: u16, used: u16, available: u16, log: Option<u32> },
    Base { queue: u8, base: u32 },
    Stop(u8),
    Kick { queue: u8, fd: Option<Fd> },
    Call { queue: u8, fd: Option<Fd> },
    Error { queue: u8, fd: Option<Fd> },
    Enable { queue: u8, enabled: bool },
    Config { offset: u8, size: u8 },
    SetConfig { offset: u8, data: Vec<u8> },
    Channel(Fd),
    Inflight { queues: u16, size: u16 },
    SetInflight { queues: u16, size: u16, bytes: u32, offset: u16, created: bool },
    Owner { reset: bool },
    Reset,
    Status(u8),
    /// The driver writes to its memory.
    Write { at: u16, bytes: Vec<u8> },
    /// A message as it may come over the socket.
    Raw { request: u8, flags: u8, body: Vec<u8>, fds: Vec<Fd> },
    Notify,
}

struct Disk;

impl Engine for Disk {
    fn geometry(&self) -> Geometry {
        Geometry {
            capacity: Bytes::new(1 << 20),
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            discard: true,
        }
    }

    fn start(&self, _: &Request<'_>, _: &mut SubmitContext<'_, '_>) -> Outcome {
        Outcome::Done(Ok(()))
    }

    fn resize(&self, _: Option<Bytes>) -> std::io::Result<Bytes> {
        Ok(Bytes::new(1 << 20))
    }
}

/// As a network device is: where its packed rings are is kept, and it has no in-flight areas.
struct Kept {
    device: Device,
    positions: Arc<Positions>,
}

impl Backend for Kept {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn queues(&self) -> u16 {
        self.device.queues()
    }

    fn queue_num(&self) -> u64 {
        self.device.queue_num()
    }

    fn features(&self) -> u64 {
        self.device.features() | features::IN_ORDER
    }

    fn protocol_features(&self) -> u64 {
        features::PROTOCOL_OFFERED & !features::PROTOCOL_INFLIGHT_SHMFD
    }

    fn positions(&self) -> Option<&Arc<Positions>> {
        Some(&self.positions)
    }

    fn memory_limit(&self) -> Bytes {
        self.device.memory_limit()
    }

    fn config(&self, offset: u32, size: u32, negotiated: u64) -> Vec<u8> {
        self.device.config(offset, size, negotiated)
    }

    fn write_config(
        &self,
        offset: u32,
        data: &[u8],
        negotiated: u64,
        inflight: Option<&Inflight>,
    ) -> bool {
        self.device.write_config(offset, data, negotiated, inflight)
    }

    fn negotiated(&self, features: u64) {
        self.device.negotiated(features);
    }

    fn take_over(&self, _: &Inflight) {
        unreachable!("it offers none");
    }

    fn link(&self) -> &Link {
        self.device.link()
    }
}

/// Serves rings on the spot: whatever a driver asks for is done.
#[derive(Default)]
struct Host {
    rings: Mutex<HashMap<u32, (Ring, QueueFds)>>,
}

struct QueueFds {
    _all: [Option<OwnedFd>; 3],
}

fn work(ring: &mut Ring) {
    let mut chain = Chain::default();
    for _ in 0..16 {
        match ring.next(&mut chain) {
            Ok(true) => ring.finish(chain.id, 1),
            Ok(false) | Err(_) => break,
        }
    }
    let _ = ring.publish();
    let _ = ring.enable_notification();
}

impl QueueHost for Host {
    type Key = u32;

    fn start(&self, mut setup: QueueSetup) -> Result<u32, StartError> {
        if setup.enabled {
            work(&mut setup.ring);
        }
        let key = u32::from(setup.index);
        let fds = QueueFds { _all: [setup.kick, setup.call, setup.error] };
        let earlier = self.rings.lock().unwrap().insert(key, (setup.ring, fds));
        assert!(earlier.is_none(), "queue {key} was started twice");
        Ok(key)
    }

    fn stop(&self, key: u32) -> StoppedQueue {
        let (ring, _) = self.rings.lock().unwrap().remove(&key).expect("it was started");
        assert_eq!(ring.in_flight(), 0);
        StoppedQueue { base: ring.base(), broken: false }
    }

    fn update(&self, key: u32, change: Change) -> Result<(), StartError> {
        let mut rings = self.rings.lock().unwrap();
        let (ring, _) = rings.get_mut(&key).expect("it was started");
        match change {
            Change::Enabled(true) => work(ring),
            Change::Memory(memory) | Change::Replaced(memory) => {
                let _ = ring.set_memory(memory);
                work(ring);
            }
            Change::Log(log) => ring.set_log(log),
            Change::Enabled(false) | Change::Call(_) | Change::Error(_) => {}
        }
        Ok(())
    }
}

struct Front {
    memory: OwnedFd,
    inflight: Option<OwnedFd>,
    session: Session<Host>,
}

impl Front {
    fn fd(&self, fd: Fd) -> OwnedFd {
        match fd {
            Fd::Eventfd => rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            Fd::Socket => std::os::unix::net::UnixStream::pair().unwrap().0.into(),
            Fd::Memory => self.memory(),
        }
    }

    fn memory(&self) -> OwnedFd {
        self.memory.as_fd().try_clone_to_owned().unwrap()
    }

    fn send(&mut self, message: Message, fds: Vec<OwnedFd>) {
        if let Ok(Answer::Inflight(_, fd)) = self.session.handle(message, fds) {
            self.inflight = Some(fd);
        }
    }

    fn vring(&mut self, fd: Option<Fd>, queue: u8, message: impl Fn(VringFd) -> Message) {
        let fds = fd.map(|fd| self.fd(fd)).into_iter().collect();
        self.send(message(VringFd { index: queue.into(), fd: fd.is_some() }), fds);
    }

    fn step(&mut self, step: Step, device: &dyn Backend) {
        let state = |queue: u8, num| VringState { index: queue.into(), num };
        match step {
            Step::Ready { queue, features, size, base } => {
                self.send(Message::SetFeatures(features & device.features()), vec![]);
                let spec = spec(Place { slot: 0, pages: 63, offset: 0 });
                let memory = self.memory();
                self.send(Message::AddMemReg(spec), vec![memory]);
                self.send(Message::SetVringNum(state(queue, 2 << (size % 10))), vec![]);
                self.send(Message::SetVringBase(state(queue, base)), vec![]);
                let address = VringAddress {
                    index: queue.into(),
                    descriptors: FRONT_END,
                    used: FRONT_END + 0x8000,
                    available: FRONT_END + 0x4000,
                    log: None,
                };
                self.send(Message::SetVringAddr(address), vec![]);
                self.send(Message::SetVringEnable { index: queue.into(), enabled: true }, vec![]);
                self.vring(Some(Fd::Eventfd), queue, Message::SetVringKick);
            }
            Step::Features(features) => self.send(Message::SetFeatures(features), vec![]),
            Step::Protocol(features) => self.send(Message::SetProtocolFeatures(features), vec![]),
            Step::Table(places) => {
                let specs: Vec<_> = places.into_iter().take(8).map(spec).collect();
                let fds = specs.iter().map(|_| self.memory()).collect();
                self.send(Message::SetMemTable(specs), fds);
            }
            Step::Add(place) => {
                let memory = self.memory();
                self.send(Message::AddMemReg(spec(place)), vec![memory]);
            }
            Step::Remove(place) => self.send(Message::RemMemReg(spec(place)), vec![]),
            Step::Log { size, offset } => {
                let memory = self.memory();
                let offset = u64::from(offset) * 512;
                self.send(Message::SetLogBase { size: size.into(), offset }, vec![memory]);
            }
            Step::LogFd => {
                let fd = self.fd(Fd::Eventfd);
                self.send(Message::SetLogFd, vec![fd]);
            }
            Step::Size { queue, size } => {
                self.send(Message::SetVringNum(state(queue, size)), vec![]);
            }
            Step::Address { queue, descriptors, used, available, log } => {
                let address = VringAddress {
                    index: queue.into(),
                    descriptors: FRONT_END + u64::from(descriptors),
                    used: FRONT_END + u64::from(used),
                    available: FRONT_END + u64::from(available),
                    log: log.map(u64::from),
                };
                self.send(Message::SetVringAddr(address), vec![]);
            }
            Step::Base { queue, base } => {
                self.send(Message::SetVringBase(state(queue, base)), vec![]);
            }
            Step::Stop(queue) => self.send(Message::GetVringBase(queue.into()), vec![]),
            Step::Kick { queue, fd } => self.vring(fd, queue, Message::SetVringKick),
            Step::Call { queue, fd } => self.vring(fd, queue, Message::SetVringCall),
            Step::Error { queue, fd } => self.vring(fd, queue, Message::SetVringErr),
            Step::Enable { queue, enabled } => {
                self.send(Message::SetVringEnable { index: queue.into(), enabled }, vec![]);
            }
            Step::Config { offset, size } => {
                let (offset, size) = (offset.into(), size.into());
                self.send(Message::GetConfig { offset, size, flags: 0 }, vec![]);
            }
            Step::SetConfig { offset, data } => {
                self.send(Message::SetConfig { offset: offset.into(), data }, vec![]);
            }
            Step::Channel(fd) => {
                let fd = self.fd(fd);
                self.send(Message::SetBackendReqFd, vec![fd]);
            }
            Step::Inflight { queues, size: queue_size } => {
                let area = InflightArea { size: 0, offset: 0, queues, queue_size, padded: false };
                self.send(Message::GetInflightFd(area), vec![]);
            }
            Step::SetInflight { queues, size, bytes, offset, created } => {
                let created = self.inflight.as_ref().filter(|_| created);
                let fd = match created {
                    Some(fd) => fd.try_clone().unwrap(),
                    None => self.memory(),
                };
                let area = InflightArea {
                    size: bytes.into(),
                    offset: offset.into(),
                    queues,
                    queue_size: size,
                    padded: true,
                };
                self.send(Message::SetInflightFd(area), vec![fd]);
            }
            Step::Owner { reset: true } => self.send(Message::ResetOwner, vec![]),
            Step::Owner { reset: false } => self.send(Message::SetOwner, vec![]),
            Step::Reset => self.send(Message::ResetDevice, vec![]),
            Step::Status(status) => self.send(Message::SetStatus(status), vec![]),
            Step::Write { at, mut bytes } => {
                bytes.truncate(4096);
                rustix::io::pwrite(&self.memory, &bytes, at.into()).unwrap();
            }
            Step::Raw { request, flags, body, mut fds } => {
                fds.truncate(8);
                let header = Header {
                    request: u32::from(request) % 48,
                    flags: flags.into(),
                    size: body.len() as u32,
                };
                if let Ok(message) = Message::parse(header, &body, fds.len()) {
                    let fds = fds.into_iter().map(|fd| self.fd(fd)).collect();
                    self.send(message, fds);
                }
            }
            Step::Notify => {
                let _ = device.link().notify();
            }
        }
    }
}

fn spec(place: Place) -> RegionSpec {
    let guest = u64::from(place.slot) * 0x1000;
    RegionSpec {
        guest,
        size: u64::from(place.pages % 80) * 0x1000 + u64::from(place.pages / 80),
        front_end: FRONT_END + guest,
        offset: u64::from(place.offset) * 0x800,
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fuzz_target!(|input: Input| {
    let before = descriptors();
    let memory = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, MEMORY).unwrap();
    let is_kept = input.queues >= 128;
    let config = DeviceConfig {
        name: "disk".into(),
        engine: Arc::new(Disk),
        // A file of positions is large.
        queues: u16::from(input.queues % if is_kept { 4 } else { 64 }) + 1,
        read_only: input.read_only,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule: None,
    };
    let device = Device::new(config).unwrap();
    let device: Arc<dyn Backend> = if is_kept {
        let file = rustix::fs::memfd_create(c"positions", MemfdFlags::CLOEXEC).unwrap();
        let positions = Positions::map(file.as_fd(), device.queues()).unwrap();
        Arc::new(Kept { device, positions })
    } else {
        Arc::new(device)
    };
    let host = Arc::new(Host::default());
    let session = Session::new(device.clone(), Arc::clone(&host));
    let mut front = Front { memory, inflight: None, session };
    for step in input.steps.into_iter().take(256) {
        front.step(step, &*device);
    }
    drop(front);
    assert!(host.rings.lock().unwrap().is_empty());
    assert_eq!(device.link().notify(), Ok(false));
    drop((device, host));
    assert_eq!(descriptors(), before);
});
