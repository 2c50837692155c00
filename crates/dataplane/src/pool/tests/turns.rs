//! Single turns of queues.

use io_uring::IoUring;
use rtvirtio_engine::{Completions, Token};
use rtvirtio_frames::features;
use rtvirtio_frames::forwarding::{self, Vlans};

use super::frames::{HEADER, Port, frame, nic_on};
use super::*;
use crate::clock::now;
use crate::drr::{QUANTUM_NS, TurnBudget, cost};
use crate::nic::Link;
use crate::queue::{Queue, Turn};
use crate::switch::Switch;
use crate::thread_stats::IoThreadStats;

struct Nobody;

impl Completions for Nobody {
    fn complete(&self, _token: Token, _result: Result<(), Errno>) {}
}

/// A turn of so much time, and what it shows.
fn turn(queue: &mut Queue, ns: i64) {
    let mut ring = IoUring::new(8).unwrap();
    let completions: Arc<dyn Completions> = Arc::new(Nobody);
    let stats = IoThreadStats::default();
    let mut turn = Turn {
        submission: &mut ring.submission(),
        commands: None,
        file: None,
        completions: &completions,
        buffers: &|_| None,
        stats: &stats,
    };
    let mut share = TurnBudget { requests: u32::MAX, ns };
    let _ = queue.serve(&mut turn, &mut share, 0, now());
    let _ = queue.publish(&stats);
}

/// A chain has been followed before it is known what it asks for: it is charged whatever that is.
#[test]
fn pieces_of_a_request_end_a_turn_whatever_it_asks_for() {
    const PIECES: usize = 100;
    if !has_io_uring() {
        return;
    }
    let at = |address, length, writable| Buffer { address, length, writable };
    // A read with data before its buffer, and what there is no such request for.
    for (kind, data) in [(0, at(BUFFERS + 32, 1, false)), (77, at(BUFFERS + 32, 1, true))] {
        let mut guarded = Guarded::new(Shape { depth: 64, ..Shape::of(0) });
        let device = device(ram(), 1);
        let mut header = [0; 16];
        header[0] = kind;
        guarded.driver.guest().write(BUFFERS, &header);
        let mut buffers = vec![at(BUFFERS, 16, false)];
        buffers.extend([data; PIECES]);
        buffers.push(at(BUFFERS + 16, 1, true));
        for _ in 0..2 {
            guarded.driver.add(&buffers, false).unwrap();
        }
        guarded.driver.publish();
        let key = QueueKey::new(1, TableKey(0)).unwrap();
        let mut queue = Queue::new(key, guarded.setup(&device));
        for taken in 1..=2 {
            turn(&mut queue, cost::REQUEST_NS + cost::pieces_ns(PIECES) / 2);
            assert_eq!(std::iter::from_fn(|| guarded.driver.take()).count(), 1, "{kind} {taken}");
        }
    }
}

/// Whether the driver is called within some milliseconds: its first call is made by another thread.
fn is_called(port: &Port) -> bool {
    let begun = Instant::now();
    loop {
        if rustix::io::read(&port.call, &mut [0; 8]) == Ok(8) {
            return true;
        }
        if begun.elapsed() > Duration::from_millis(20) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The driver looks for what it has back, and wants to be called for what comes next; how much it found.
fn take(port: &mut Port) -> usize {
    let found = std::iter::from_fn(|| port.driver.take()).count();
    assert!(!port.driver.enable_calls());
    found
}

#[test]
fn driver_that_sends_is_called_once_for_several_frames_or_not_at_all_if_it_has_looked() {
    if !has_io_uring() {
        return;
    }
    let switch = Switch::new(1e6);
    let mac = [2, 0, 0, 0, 0, 2];
    let of = forwarding::Port { mac, vlans: Vlans::Untagged, anti_spoofing: true };
    switch.add_port(of, 1).unwrap();
    let nic = nic_on(Link::Port { switch, number: 0, pairs: 1 }, features::ALWAYS, [None; 2]);
    for packed in [false, true] {
        let mut port = Port::with_size(256, packed);
        let key = QueueKey::new(1, TableKey(0)).unwrap();
        let mut queue = Queue::of_nic(key, port.setup(&nic, 1)).unwrap();
        let send = |port: &mut Port, frames: u64| {
            (0..frames).for_each(|_| port.send(2, [0; HEADER], &frame(1, 60)));
        };
        turn(&mut queue, QUANTUM_NS);
        assert!(is_called(&port), "nobody knows what the one before did");
        assert_eq!(queue.held_until(), None);

        send(&mut port, 2);
        turn(&mut queue, QUANTUM_NS);
        assert!(!is_called(&port));
        let at = queue.held_until().expect("it is called in some time");
        assert!(!queue.release(at));
        turn(&mut queue, QUANTUM_NS);
        assert!(is_called(&port));
        assert_eq!(queue.held_until(), None);
        assert!(take(&mut port) > 0);

        // It has them back, and looks for them by itself.
        send(&mut port, 2);
        turn(&mut queue, QUANTUM_NS);
        assert_eq!(take(&mut port), 2);
        queue.release(u64::MAX);
        std::thread::sleep(Duration::from_millis(1));
        turn(&mut queue, QUANTUM_NS);
        assert_eq!((queue.held_until(), is_called(&port)), (None, false));

        // Many at once.
        send(&mut port, 32);
        turn(&mut queue, QUANTUM_NS);
        assert!(is_called(&port));
        assert!(take(&mut port) > 0);

        // It leaves.
        send(&mut port, 1);
        turn(&mut queue, QUANTUM_NS);
        queue.call_now();
        turn(&mut queue, QUANTUM_NS);
        assert!(is_called(&port));
        assert!(take(&mut port) > 0);
    }
}
