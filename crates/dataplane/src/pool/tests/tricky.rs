//! What a file's io_uring does rarely: short transfers, EAGAIN, a full submission queue.

use super::*;

/// An engine that makes a file's io_uring do what is rare.
pub(super) struct Tricky {
    file: Arc<FileEngine>,
    /// No more bytes than these in one go.
    most: usize,
    /// Each request is first answered by EAGAIN.
    again: Option<(OwnedFd, OwnedFd)>,
    seen: std::sync::Mutex<std::collections::HashSet<u64>>,
    pub(super) shorted: AtomicU64,
    refused: AtomicU64,
    full: AtomicU64,
}

impl Tricky {
    pub(super) fn new(most: usize, again: bool) -> Arc<Self> {
        let pair = || std::os::unix::net::UnixStream::pair().unwrap();
        Arc::new(Self {
            file: file(Aio::IoUring),
            most,
            again: again.then(pair).map(|(a, b)| (a.into(), b.into())),
            seen: std::sync::Mutex::default(),
            shorted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            full: AtomicU64::new(0),
        })
    }
}

impl Engine for Tricky {
    fn geometry(&self) -> Geometry {
        self.file.geometry()
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        use std::os::fd::AsRawFd;
        let token = request.token.0;
        if let Some((socket, _)) = &self.again
            && self.seen.lock().unwrap().insert(token)
        {
            // Nobody sends: EAGAIN.
            let fd = types::Fd(socket.as_raw_fd());
            let nothing = opcode::Recv::new(fd, std::ptr::null_mut(), 0)
                .flags(libc::MSG_DONTWAIT)
                .build()
                .user_data(token);
            self.refused.fetch_add(1, Relaxed);
            // SAFETY: no bytes are asked for.
            return match unsafe { lent.submission.push(&nothing) } {
                Ok(()) => Outcome::Started,
                Err(_) => Outcome::Busy,
            };
        }
        let outcome = match (request.operation, request.segments) {
            (Operation::Read | Operation::Write { .. }, [first, ..]) if first.len() > self.most => {
                self.shorted.fetch_add(1, Relaxed);
                let piece = [rtvirtio_engine::Segment::new(first.base(), self.most)];
                let length = self.most as u64;
                self.file.start(&Request { segments: &piece, length, ..*request }, lent)
            }
            _ => self.file.start(request, lent),
        };
        if outcome == Outcome::Busy {
            self.full.fetch_add(1, Relaxed);
        } else {
            self.seen.lock().unwrap().remove(&token);
        }
        outcome
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.file.resize(capacity)
    }
}

#[test]
fn short_transfers_go_on_where_they_ended() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let engine = Tricky::new(512, false);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device(Arc::clone(&engine) as _, 1)), id).unwrap();
    queue.run_requests(2000);
    pool.stop(key).unwrap();
    assert!(engine.shorted.load(Relaxed) > 6000);
}

#[test]
fn transfers_that_would_block_are_started_again() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let engine = Tricky::new(BLOCK, true);
    let mut queue = Guarded::new(Shape::of(1));
    let key = pool.start(queue.setup(&device(Arc::clone(&engine) as _, 1)), id).unwrap();
    queue.run_requests(1000);
    pool.stop(key).unwrap();
    assert!(engine.refused.load(Relaxed) >= 1000);
}

#[test]
fn more_requests_than_the_submission_queue_holds_all_complete() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let engine = Tricky::new(usize::MAX, false);
    let device = device(Arc::clone(&engine) as _, 8);
    // Two have a part of the disk in common, so they only read.
    let mut queues: Vec<Guarded> = (0..16)
        .map(|n| Guarded::new(Shape { part: n % 8, depth: 48, packed: n >= 8, indirect: false }))
        .collect();
    let keys: Vec<QueueKey> =
        queues.iter().map(|q| pool.start(q.setup(&device), id).unwrap()).collect();
    all_at_once(&pool, keys[0], &mut queues);
    for key in keys {
        assert_eq!(pool.stop(key).unwrap().in_flight(), 0);
    }
    assert!(engine.full.load(Relaxed) > 0, "the submission queue was never full");
}

/// A thread finds 16 × 48 requests when it looks up, and in each turn more than its submission queue holds, and completes
/// all.
fn all_at_once(pool: &Pool, key: QueueKey, queues: &mut [Guarded]) {
    let (release, hold) = std::sync::mpsc::channel::<()>();
    let (holds, held) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let held = move |_: &mut _| {
                holds.send(()).unwrap();
                hold.recv().unwrap_or(());
            };
            pool.edit(key, held).unwrap()
        });
        held.recv().unwrap();
        for queue in &mut *queues {
            for slot in 0..48 {
                let (data, guest) = (Guarded::place(slot), Arc::clone(queue.driver.guest()));
                let header = data + BLOCK as u64;
                guest.write(header, &[0; 16]);
                guest.write(header + 16, &[0xff]);
                let buffers = [
                    Buffer { address: header, length: 16, writable: false },
                    Buffer { address: data, length: 512, writable: true },
                    Buffer { address: header + 16, length: 1, writable: true },
                ];
                let id = queue.driver.add(&buffers, false).unwrap();
                queue.slots[slot] = Some((0, true));
                queue.by_id.insert(id, slot);
            }
            queue.publish();
        }
        release.send(()).unwrap();
    });
    for queue in &mut *queues {
        let start = Instant::now();
        let mut seen = 0;
        while seen < 48 {
            assert!(start.elapsed() < LOST, "{seen} of 48 came back");
            let Some((id, written)) = queue.driver.take() else { continue };
            assert_eq!((written, queue.by_id.remove(&id).is_some()), (513, true));
            seen += 1;
        }
    }
}
