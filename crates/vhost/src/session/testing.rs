//! A device and a host for tests of sessions: the host serves no ring, but writes down what it was
//! asked to.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use rtvirtio_units::Bytes;
use rtvirtio_virtq::memory::RegionSpec;
use rtvirtio_virtq::ring::Inflight;
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{
    Answer, Change, Ended, QueueHost, QueueSetup, Refused, Session, StartError, StoppedQueue, serve,
};
use crate::backend::{Backend, Link};
use crate::protocol::{Connection, Message, VringAddress, VringFd, VringState, features};

/// A device whose configuration space is one byte, which the driver may set to 0 or 1.
#[derive(Debug)]
pub struct TestDevice {
    /// Its virtqueues.
    pub queues: u16,
    /// The most guest memory.
    pub memory: Bytes,
    byte: Mutex<u8>,
    link: Link,
}

impl Default for TestDevice {
    fn default() -> Self {
        Self {
            queues: 2,
            memory: Bytes::new(1 << 40),
            byte: Mutex::default(),
            link: Link::default(),
        }
    }
}

impl Backend for TestDevice {
    fn name(&self) -> &str {
        "device"
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn features(&self) -> u64 {
        features::ALWAYS
    }

    fn memory_limit(&self) -> Bytes {
        self.memory
    }

    fn config(&self, offset: u32, size: u32, _: u64) -> Vec<u8> {
        let space = std::iter::once(*self.byte.lock().unwrap()).chain(std::iter::repeat(0));
        space.skip(offset as usize).take(size as usize).collect()
    }

    fn write_config(&self, offset: u32, data: &[u8], _: u64, _: Option<&Inflight>) -> bool {
        match (offset, data) {
            (0, [value @ (0 | 1)]) => {
                *self.byte.lock().unwrap() = *value;
                true
            }
            _ => false,
        }
    }

    fn negotiated(&self, _: u64) {}

    fn take_over(&self, _: &Inflight) {}

    fn link(&self) -> &Link {
        &self.link
    }
}

/// A [`TestDevice`] of two virtqueues.
#[must_use]
pub fn device() -> Arc<TestDevice> {
    Arc::default()
}

/// What a host was asked to do, a line for each.
#[derive(Debug, Default)]
pub struct Host {
    state: Mutex<State>,
    drained: Condvar,
}

#[derive(Debug, Default)]
struct State {
    log: Vec<String>,
    queues: HashMap<u16, QueueSetup>,
    stuck: bool,
    scarce: bool,
    broken: Option<u16>,
}

impl Host {
    /// What was asked since the last time.
    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    /// Whether rings have requests in flight that do not end.
    pub fn set_stuck(&self, stuck: bool) {
        self.state.lock().unwrap().stuck = stuck;
        self.drained.notify_all();
    }

    /// Whether memory that is added cannot be used.
    pub fn set_scarce(&self, scarce: bool) {
        self.state.lock().unwrap().scarce = scarce;
    }

    /// The ring whose driver broke it.
    pub fn set_broken(&self, index: Option<u16>) {
        self.state.lock().unwrap().broken = index;
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap())
    }

    /// A look at a queue that is served.
    pub fn queue<T>(&self, index: u16, look: impl FnOnce(&QueueSetup) -> T) -> T {
        self.with(|state| look(&state.queues[&index]))
    }
}

impl QueueHost for Host {
    type Key = u16;

    fn start(&self, setup: QueueSetup) -> Result<u16, StartError> {
        self.with(|state| {
            let (index, enabled, base) = (setup.index, setup.enabled, setup.ring.base());
            state.log.push(format!("start {index} enabled={enabled} base={base}"));
            assert!(state.queues.insert(index, setup).is_none(), "{index} was started twice");
            Ok(index)
        })
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let state = self.state.lock().unwrap();
        let mut state = self.drained.wait_while(state, |state| state.stuck).unwrap();
        state.log.push(format!("stop {index}"));
        let setup = state.queues.remove(&index).expect("it was started");
        // As if two requests had come.
        let broken = state.broken == Some(index);
        StoppedQueue { base: setup.ring.base() + 2, broken }
    }

    fn is_broken(&self, index: u16) -> bool {
        self.with(|state| state.broken == Some(index))
    }

    fn update(&self, index: u16, change: Change) -> Result<(), StartError> {
        self.with(|state| {
            let setup = state.queues.get_mut(&index).expect("it was started");
            if state.scarce && matches!(change, Change::Memory(_) | Change::Replaced(_)) {
                return Err(StartError::System(Errno::NOMEM));
            }
            let line = match change {
                Change::Enabled(enabled) => {
                    setup.enabled = enabled;
                    format!("enabled={enabled}")
                }
                Change::Call(call) => {
                    setup.call = call;
                    format!("call={}", setup.call.is_some())
                }
                Change::Error(error) => {
                    setup.error = error;
                    format!("error={}", setup.error.is_some())
                }
                Change::Memory(ref memory) | Change::Replaced(ref memory) => {
                    setup.ring.set_memory(Arc::clone(memory)).unwrap();
                    let is_replaced = matches!(change, Change::Replaced(_));
                    let line = format!(
                        "{}regions={} log={}",
                        if is_replaced { "drained " } else { "" },
                        memory.regions().len(),
                        memory.log().is_some()
                    );
                    setup.memory = Arc::clone(memory);
                    line
                }
                Change::Log(log) => format!("log={log:?}"),
            };
            state.log.push(format!("update {index} {line}"));
            Ok(())
        })
    }
}

/// A file of guest memory, with zeroes.
#[must_use]
pub fn memory(size: u64) -> OwnedFd {
    let memory = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, size).unwrap();
    memory
}

/// 64 KiB of guest memory from `guest` on; the front end has it 1 GiB higher.
#[must_use]
pub const fn region(guest: u64) -> RegionSpec {
    RegionSpec { guest, size: 0x1_0000, front_end: guest + (1 << 30), offset: 0 }
}

/// Features without which nothing goes.
pub const BASIC: u64 = features::VERSION_1 | features::PROTOCOL_FEATURES;

/// Protocol features of a front end that is told of changes of the configuration.
pub const TOLD_OF_CHANGES: u64 = features::PROTOCOL_BACKEND_REQ | features::PROTOCOL_CONFIG;

/// A front end and its session, with nothing between them.
pub struct Front {
    /// What serves its rings.
    pub host: Arc<Host>,
    /// The session.
    pub session: Session<Host>,
}

impl Front {
    /// A front end that has said nothing yet.
    #[must_use]
    pub fn new(device: Arc<dyn Backend>) -> Self {
        let host = Arc::new(Host::default());
        Self { session: Session::new(device, Arc::clone(&host)), host }
    }

    /// Sends a message without a file descriptor.
    ///
    /// # Errors
    /// The session refuses it.
    pub fn send(&mut self, message: Message) -> Result<Answer, Refused> {
        self.session.handle(message, vec![])
    }

    /// Sends a message with one.
    ///
    /// # Errors
    /// The session refuses it.
    pub fn with_fd(&mut self, message: Message, fd: OwnedFd) -> Result<Answer, Refused> {
        self.session.handle(message, vec![fd])
    }

    /// A front end that has agreed on features and shares 64 KiB of memory.
    #[must_use]
    pub fn ready(device: Arc<dyn Backend>) -> Self {
        let mut front = Self::new(device);
        front.send(Message::SetFeatures(BASIC)).unwrap();
        front.with_fd(Message::AddMemReg(region(0)), memory(0x1_0000)).unwrap();
        front
    }

    /// Sets ring `index` up, so that it runs.
    pub fn set_up(&mut self, index: u32) {
        self.send(Message::SetVringNum(VringState { index, num: 16 })).unwrap();
        self.send(Message::SetVringBase(VringState { index, num: 0 })).unwrap();
        self.send(Message::SetVringAddr(address(index))).unwrap();
        self.kick(index);
    }

    /// Gives ring `index` a kick.
    pub fn kick(&mut self, index: u32) {
        let kick = VringFd { index, fd: true };
        self.with_fd(Message::SetVringKick(kick), eventfd()).unwrap();
    }

    /// Stops ring `index`; its base.
    pub fn base(&mut self, index: u32) -> u32 {
        match self.send(Message::GetVringBase(index)) {
            Ok(Answer::Vring(state)) => state.num,
            other => panic!("{other:?}"),
        }
    }
}

/// An eventfd.
#[must_use]
pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// Where ring `index` lies, in the front end's addresses of [`region`]\(0).
#[must_use]
pub const fn address(index: u32) -> VringAddress {
    let base = (1 << 30) + index as u64 * 0x4000;
    VringAddress {
        index,
        descriptors: base,
        available: base + 0x1000,
        used: base + 0x2000,
        log: None,
    }
}

/// A session with a thread of its own, and the front end's socket.
#[must_use]
pub fn served(device: Arc<dyn Backend>) -> (Arc<Host>, UnixStream, std::thread::JoinHandle<Ended>) {
    let host = Arc::new(Host::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut session = Session::new(device, Arc::clone(&host));
    let thread =
        std::thread::spawn(move || serve(&mut Connection::new(Arc::new(theirs)), &mut session));
    (host, ours, thread)
}
