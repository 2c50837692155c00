//! A guest with a network device: its front end, its driver of one pair of queues, and memory that comes and goes.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use rtvirtio_virtq::ring::RingConfig;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::End;
use crate::dataplane::front_end::{self, words};

/// Entries of rings, and bytes between them.
const SIZE: u16 = 256;
const RING: u64 = 0x2_0000;
/// `virtio_net_hdr_v1`, and where it says in how many buffers a frame lies.
const HEADER: usize = 12;
const BUFFERS_AT: usize = 10;
/// Frames that are sent and not back, at most, and bytes between them.
const SENT: u64 = 64;
const SENT_BYTES: u64 = 2048;
/// Receive buffers: a frame takes up to three. And bytes between them.
const RECEIVED: u64 = 240;
const RECEIVED_BYTES: u64 = 1024;
const BUFFER: u32 = 700;
const BUFFERS: u64 = SENT * SENT_BYTES + RECEIVED * RECEIVED_BYTES;
/// Where they lie in the memory that stays, and where in the memory that comes and goes.
const PLACE: u64 = GUEST + 0x10_0000;
const ADDED: u64 = 0x4000_0000;
const ADDED_FRONT_END: u64 = 0x7e00_0000_0000;
/// Frames that are sent between two changes of memory.
const UNCHANGED: u64 = 1000;

const MRG_RXBUF: u64 = 1 << 15;
const EVENT_IDX: u64 = 1 << 29;
const PACKED: u64 = 1 << 34;
const IN_ORDER: u64 = 1 << 35;
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

/// Where a buffer lies.
#[derive(Clone, Copy, Default)]
struct Place {
    offset: u64,
    is_added: bool,
}

struct Ring {
    driver: Driver,
    kick: OwnedFd,
    call: OwnedFd,
    /// As it was at first.
    first: RingConfig,
    /// By ID.
    places: Vec<Place>,
}

impl Ring {
    fn new(guest: &Arc<Guest>, index: u64, packed: bool) -> Self {
        let options =
            Options { size: SIZE, packed, event_idx: true, indirect: true, in_order: packed };
        let driver = Driver::new(Arc::clone(guest), GUEST + index * RING, options);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (first, places) = (driver.config(), vec![Place::default(); usize::from(SIZE)]);
        Self { driver, kick: event(), call: event(), first, places }
    }

    fn start(&self, stream: &UnixStream, index: u64) {
        // As QEMU after a kill: of a split ring it sends what the ring says, of a packed one what it knew at first.
        let config = if self.first.packed { self.first } else { self.driver.config() };
        let events = [self.kick.as_fd(), self.call.as_fd(), self.call.as_fd()];
        assert!(front_end::start_at(stream, index, &config, events), "ring {index} is refused");
    }

    fn publish(&mut self) {
        if self.driver.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        }
    }
}

/// The memory that comes and goes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Plug {
    Out,
    Adding,
    In,
    /// Nothing is put there any more.
    Leaving,
    Removing,
}

/// A guest's device.
pub(super) struct Port {
    socket: PathBuf,
    guest: Arc<Guest>,
    added: Arc<Guest>,
    stream: Option<UnixStream>,
    receive: Ring,
    transmit: Ring,
    /// Offsets of places for frames.
    free: Vec<u64>,
    /// In their order.
    sent: VecDeque<u16>,
    sent_ever: u64,
    /// Buffers that the frame goes on in which has begun.
    rest: u16,
    plug: Plug,
    /// Whether memory comes and goes, when it did last, and how many times.
    plugs: bool,
    changed_at: u64,
    changes: u64,
    /// Buffers in it that are not back.
    away: u64,
    /// Bytes of an answer that have come.
    answer: Vec<u8>,
}

impl Port {
    /// Of the device that listens there, in whose memory nothing is served yet.
    pub(super) fn new(socket: PathBuf, packed: bool, plugs: bool) -> Self {
        let guest = Guest::new(PLACE - GUEST + BUFFERS);
        let [receive, transmit] = [0, 1].map(|index| Ring::new(&guest, index, packed));
        let mut port = Self {
            socket,
            // Its addresses are the test's own; the device is told others.
            added: Guest::new(BUFFERS),
            guest,
            stream: None,
            receive,
            transmit,
            free: (0..SENT).map(|slot| slot * SENT_BYTES).collect(),
            sent: VecDeque::new(),
            sent_ever: 0,
            rest: 0,
            plug: Plug::Out,
            plugs,
            changed_at: 0,
            changes: 0,
            away: 0,
            answer: Vec::new(),
        };
        for slot in 0..RECEIVED {
            port.offer(SENT * SENT_BYTES + slot * RECEIVED_BYTES);
        }
        port
    }

    /// Whose memory it is, where for the test, and where for the device.
    fn address(&self, Place { offset, is_added }: Place) -> (&Guest, u64, u64) {
        if is_added {
            (&self.added, GUEST + offset, ADDED + offset)
        } else {
            (&self.guest, PLACE + offset, PLACE + offset)
        }
    }

    fn place(&mut self, offset: u64) -> Place {
        let is_added = self.plug == Plug::In;
        self.away += u64::from(is_added);
        Place { offset, is_added }
    }

    fn offer(&mut self, offset: u64) {
        let place = self.place(offset);
        let (_, _, address) = self.address(place);
        let buffer = Buffer { address, length: BUFFER, writable: true };
        let id = self.receive.driver.add(&[buffer], false).expect("room");
        self.receive.places[usize::from(id)] = place;
    }

    fn ask(&mut self, request: u32) {
        let body = words(&[0, ADDED, BUFFERS, ADDED_FRONT_END, 0]);
        let stream = self.stream.as_ref().expect("a connection");
        let fds = if request == ADD_MEM_REG { vec![self.added.file()] } else { Vec::new() };
        assert!(front_end::send(stream, [request, 1 | 8, body.len() as u32], &body, &fds));
    }

    /// Whether the last message was answered. Frames flow meanwhile.
    fn is_answered(&mut self) -> bool {
        let stream = self.stream.as_ref().expect("a connection");
        let mut bytes = [0; 20];
        match recv(stream, &mut bytes[self.answer.len()..], RecvFlags::DONTWAIT) {
            Ok((length, _)) => {
                assert!(length > 0, "it has hung up");
                let begin = self.answer.len();
                self.answer.extend_from_slice(&bytes[begin..begin + length]);
            }
            Err(Errno::AGAIN) => {}
            Err(error) => panic!("{error}"),
        }
        let is_answered = self.answer.len() == bytes.len();
        if is_answered {
            assert_eq!(self.answer.split_off(12), [0; 8], "{:?} is refused", self.plug);
            self.answer.clear();
        }
        is_answered
    }

    fn change_memory(&mut self) {
        let is_time = self.plugs && self.sent_ever - self.changed_at >= UNCHANGED;
        let plug = self.plug;
        match plug {
            Plug::Out if is_time => {
                self.ask(ADD_MEM_REG);
                self.plug = Plug::Adding;
            }
            Plug::In if is_time => self.plug = Plug::Leaving,
            Plug::Leaving if self.away == 0 => {
                self.ask(REM_MEM_REG);
                self.plug = Plug::Removing;
            }
            Plug::Adding | Plug::Removing if self.is_answered() => {
                self.plug = if plug == Plug::Adding { Plug::In } else { Plug::Out };
                (self.changed_at, self.changes) = (self.sent_ever, self.changes + 1);
            }
            _ => {}
        }
    }
}

impl End for Port {
    fn connect(&mut self) {
        assert_eq!((self.plug, self.rest), (Plug::Out, 0), "a kill has cut a frame");
        let packed = if self.receive.first.packed { PACKED | IN_ORDER } else { 0 };
        let features = MRG_RXBUF | EVENT_IDX | packed;
        let stream = front_end::open(&self.socket, features, CONFIGURE_MEM_SLOTS, &self.guest);
        self.receive.publish();
        self.receive.start(&stream, 0);
        self.stream = Some(stream);
    }

    fn start_sending(&mut self) {
        self.transmit.start(self.stream.as_ref().expect("a connection"), 1);
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        let Some(offset) = self.free.pop() else { return false };
        let place = self.place(offset);
        let (guest, own, address) = self.address(place);
        guest.write(own, &[0; HEADER]);
        guest.write(own + HEADER as u64, frame);
        // In pieces that cut the header, follow it, or cut the frame's own.
        let length = (HEADER + frame.len()) as u32;
        let (cuts, indirect): (&[u32], bool) = match self.sent_ever % 4 {
            0 => (&[], false),
            1 => (&[5], false),
            2 => (&[12, 29], true),
            _ => (&[12], false),
        };
        let mut begin = 0;
        let buffers: Vec<Buffer> = cuts
            .iter()
            .chain([&length])
            .map(|&end| {
                let address = address + u64::from(begin);
                let length = end - std::mem::replace(&mut begin, end);
                Buffer { address, length, writable: false }
            })
            .collect();
        let id = self.transmit.driver.add(&buffers, indirect).expect("room");
        self.transmit.places[usize::from(id)] = place;
        self.sent.push_back(id);
        self.sent_ever += 1;
        true
    }

    fn returned(&mut self) -> u64 {
        let mut returned = 0;
        while let Some((id, written)) = self.transmit.driver.take() {
            assert_eq!((self.sent.pop_front(), written), (Some(id), 0), "not in their order");
            let Place { offset, is_added } = self.transmit.places[usize::from(id)];
            self.away -= u64::from(is_added);
            self.free.push(offset);
            returned += 1;
        }
        returned
    }

    fn repeats(&self) -> bool {
        true
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        while let Some((id, length)) = self.receive.driver.take() {
            let place = self.receive.places[usize::from(id)];
            assert!(length <= BUFFER, "{length} bytes of {BUFFER}");
            let (guest, own, _) = self.address(place);
            let mut bytes = guest.read(own, length as usize);
            self.away -= u64::from(place.is_added);
            self.offer(place.offset);
            if self.rest == 0 {
                frame.clear();
                let header: Vec<u8> = bytes.drain(..HEADER).collect();
                assert_eq!(header[..BUFFERS_AT], [0; BUFFERS_AT], "offloads were not negotiated");
                self.rest = u16::from_le_bytes([header[BUFFERS_AT], header[BUFFERS_AT + 1]]);
                assert!((1..=3).contains(&self.rest), "{} buffers", self.rest);
            }
            self.rest -= 1;
            frame.extend_from_slice(&bytes);
            if self.rest == 0 {
                return true;
            }
        }
        false
    }

    fn flush(&mut self) {
        self.receive.publish();
        self.transmit.publish();
        self.change_memory();
    }

    fn changes(&self) -> u64 {
        self.changes
    }
}
