//! Malformed messages by the ten thousand: every descriptor closed, every session ended with a
//! named reason or by the front end, memory bounded.
//!
//! A binary of its own, since it counts the descriptors of the process.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rtvirtio_dataplane::device::{Device, DeviceConfig, Limits};
use rtvirtio_engine::{Engine, Geometry, Outcome, Request, SubmitContext};
use rtvirtio_units::Bytes;
use rtvirtio_vhost::protocol::{Connection, Header, TransportError};
use rtvirtio_vhost::session::{
    Change, QueueHost, QueueSetup, Session, SessionError, StartError, StoppedQueue, serve,
};
use rtvirtio_virtq::ring::Ring;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

struct Disk;

impl Engine for Disk {
    fn geometry(&self) -> Geometry {
        Geometry {
            capacity: Bytes::new(1 << 20),
            logical_block: 512,
            physical_block: 512,
            read_only: false,
            discard: true,
        }
    }

    fn start(&self, _: &Request<'_>, _: &mut SubmitContext<'_, '_>) -> Outcome {
        unreachable!("no request is ever taken from a ring")
    }

    fn resize(&self, _: Option<Bytes>) -> std::io::Result<Bytes> {
        Ok(Bytes::new(1 << 20))
    }
}

/// Keeps rings, and does nothing with them.
#[derive(Default)]
struct Host(Mutex<BTreeMap<u16, Kept>>);

/// A ring with its kick, call and error.
type Kept = (Ring, [Option<OwnedFd>; 3]);

impl QueueHost for Host {
    type Key = u16;

    fn start(&self, setup: QueueSetup) -> Result<u16, StartError> {
        let fds = [setup.kick, setup.call, setup.error];
        self.0.lock().unwrap().insert(setup.index, (setup.ring, fds));
        Ok(setup.index)
    }

    fn stop(&self, index: u16) -> StoppedQueue {
        let (ring, _) = self.0.lock().unwrap().remove(&index).unwrap();
        StoppedQueue { base: ring.base(), broken: false }
    }

    fn update(&self, index: u16, change: Change) -> Result<(), StartError> {
        if let Change::Memory(memory) | Change::Replaced(memory) = change {
            let _ = self.0.lock().unwrap().get_mut(&index).unwrap().0.set_memory(memory);
        }
        Ok(())
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// The body that the request has, if it has one.
fn likely_size(request: u32, dice: &mut Dice) -> u32 {
    match request {
        2 | 8 | 10..=14 | 16 | 18 | 21 | 39 => 8,
        5 => 8 + 32 * dice.below(9) as u32,
        6 => 16,
        9 | 37 | 38 => 40,
        24 | 25 => 12 + dice.below(5) as u32,
        31 | 32 => 20 + 4 * dice.below(2) as u32,
        _ => 0,
    }
}

/// A number as fields have them: small, page-sized or arbitrary.
fn field(dice: &mut Dice) -> u32 {
    match dice.below(4) {
        0 | 1 => dice.below(10) as u32,
        2 => (dice.below(16) as u32) << 12,
        _ => dice.roll() as u32,
    }
}

fn message(dice: &mut Dice) -> Vec<u8> {
    let request = if dice.one_in(50) { dice.roll() as u32 } else { dice.below(46) as u32 };
    let likely = likely_size(request, dice);
    let size = if dice.one_in(20) { dice.below(64) as u32 } else { likely };
    let flags = if dice.one_in(100) { dice.roll() as u32 } else { dice.pick(&[1, 9]) };
    let claimed = if dice.one_in(200) { field(dice) } else { size };
    let mut bytes = Header { request, flags, size: claimed }.to_bytes().to_vec();
    let body = std::iter::repeat_with(|| field(dice).to_ne_bytes());
    bytes.extend(body.take(size.div_ceil(4) as usize).flatten().take(size as usize));
    if dice.one_in(500) {
        bytes.truncate(dice.below(bytes.len() as u64 + 1) as usize);
    }
    bytes
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn attack(messages: u64, seed: u64) {
    let config = DeviceConfig {
        name: "disk".into(),
        engine: Arc::new(Disk),
        queues: 4,
        read_only: false,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule: None,
    };
    let device = Arc::new(Device::new(config).unwrap());
    let host = Arc::new(Host::default());
    let mut dice = Dice(seed);
    let before = descriptors();
    let resident = resident_kib();
    let mut reasons = BTreeMap::<String, u64>::new();
    let mut handled = 0;
    while handled < messages {
        let memory = rustix::fs::memfd_create(c"guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let (front, back) = UnixStream::pair().unwrap();
        // REPLY_ACK: to be told rather than thrown out, so that sessions last.
        let agree = Header { request: 16, flags: 1, size: 8 }.to_bytes();
        send(&front, &[&agree[..], &8_u64.to_ne_bytes()].concat(), &[]).unwrap();
        for _ in 0..=dice.below(64) {
            let bytes = message(&mut dice);
            let request = u32::from_ne_bytes(*bytes.first_chunk().unwrap_or(&[0; 4]));
            let likely = match (request, bytes.get(12)) {
                (5, Some(&regions)) => regions.into(),
                (6 | 7 | 12..=14 | 21 | 32 | 37, _) => 1,
                _ => 0,
            };
            let count = if dice.one_in(20) { dice.below(33) } else { likely.min(32) };
            let choice = [memory.as_fd(), memory.as_fd(), event.as_fd(), front.as_fd()];
            let fds: Vec<_> = (0..count).map(|_| dice.pick(&choice)).collect();
            if send(&front, &bytes, &fds).is_err() {
                break;
            }
        }
        front.shutdown(Shutdown::Write).unwrap();
        let mut session = Session::new(device.clone(), Arc::clone(&host));
        let ended = serve(&mut Connection::new(Arc::new(back)), &mut session);
        drop(session);
        let reason = match ended.error {
            Some(SessionError::Transport(TransportError::Header(_))) => "header".into(),
            Some(SessionError::Transport(error)) => error.to_string(),
            Some(SessionError::Message(_)) => "message".into(),
            Some(SessionError::Refused { request, .. }) => request.to_string(),
            None => "left".into(),
        };
        handled += ended.messages - 1 + u64::from(ended.error.is_some());
        *reasons.entry(reason).or_default() += 1;
        assert!(host.0.lock().unwrap().is_empty());
    }
    let grown = resident_kib().saturating_sub(resident);
    println!("{handled} messages, {grown} KiB more resident, sessions ended by {reasons:?}");
    assert_eq!(descriptors(), before);
    assert!(grown < 16 << 10, "{grown} KiB");
    assert!(reasons.len() > 5, "{reasons:?}");
}

#[test]
fn malformed_messages_leave_nothing_behind() {
    let messages = std::env::var("HOSTILE_MESSAGES").map_or(50_000, |text| text.parse().unwrap());
    attack(messages, 1);
}
