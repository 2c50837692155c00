//! Single turns of disks' queues.

use io_uring::IoUring;
use rtvirtio_engine::{Completions, Token};

use super::*;
use crate::drr::{TurnBudget, cost};
use crate::queue::{Queue, Turn};

struct Nobody;

impl Completions for Nobody {
    fn complete(&self, _token: Token, _result: Result<(), Errno>) {}
}

/// A chain has been followed before it is known what it asks for: it is charged whatever that is.
#[test]
fn pieces_of_a_request_end_a_turn_whatever_it_asks_for() {
    const PIECES: usize = 100;
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
        let mut ring = IoUring::new(8).unwrap();
        let (completions, stats): (Arc<dyn Completions>, _) = (Arc::new(Nobody), Arc::default());
        for taken in 1..=2 {
            let mut turn = Turn {
                submission: &mut ring.submission(),
                commands: None,
                file: None,
                completions: &completions,
                buffers: &|_| None,
                stats: &stats,
            };
            let ns = cost::REQUEST_NS + cost::pieces_ns(PIECES) / 2;
            let mut share = TurnBudget { requests: u32::MAX, ns };
            let _ = queue.serve(&mut turn, &mut share, 0, 0);
            let _ = queue.publish(&stats);
            assert_eq!(std::iter::from_fn(|| guarded.driver.take()).count(), 1, "{kind} {taken}");
        }
    }
}
