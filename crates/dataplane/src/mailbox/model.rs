//! Models of the mailbox and of the live move, every interleaving of which loom runs
//! (`make loom`).
//!
//! The mailbox is the real one. The virtqueue is what the move can get wrong: the driver's avail
//! index, its kick, which goes to whoever listens, and a used ring that one thread at a time may
//! write, which loom checks.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::thread;

use super::{Receiver, Sender, mailbox};

#[test]
fn every_letter_is_read_by_an_owner_that_sleeps() {
    loom::model(|| {
        let (sender, mail) = mailbox().unwrap();
        let other = sender.clone();
        let posters = [
            thread::spawn(move || sender.post(1).unwrap()),
            thread::spawn(move || other.post(2).unwrap()),
        ];
        let mut read = 0;
        while read < 2 {
            mail.doorbell.wake.0.wait();
            if mail.is_signaled() {
                mail.answer();
                while mail.take().is_some() {
                    read += 1;
                }
            }
        }
        for poster in posters {
            poster.join().unwrap();
        }
    });
}

/// What driver and device share.
struct Ring {
    /// Requests that the driver has made available.
    available: AtomicUsize,
    /// Whether the device wants a kick.
    notify: AtomicBool,
    /// Written by the thread that has the queue, and by no other.
    used: UnsafeCell<usize>,
}

/// What moves.
struct Queue {
    ring: Arc<Ring>,
    fetched: usize,
}

enum ThreadMessage {
    Release(Sender<ThreadMessage>),
    Adopt(Queue),
    Ended { here: bool },
    End,
}

/// An IOThread.
struct IoThread {
    mail: Receiver<ThreadMessage>,
    itself: Sender<ThreadMessage>,
    queue: Option<Queue>,
    forward: Option<Sender<ThreadMessage>>,
    /// To whom it gives the queue as soon as it has it.
    pass_on: Option<Sender<ThreadMessage>>,
    ending: bool,
    /// Started here and not yet ended here.
    outstanding: usize,
}

impl IoThread {
    /// One turn; whether there was nothing to do.
    fn turn(&mut self) -> bool {
        if self.mail.is_signaled() {
            self.mail.answer();
            while let Some(message) = self.mail.take() {
                self.read(message);
            }
        }
        let Some(queue) = &mut self.queue else { return true };
        // Kicks are enabled, then the ring is looked at again: the device's half of the fence.
        queue.ring.notify.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let available = queue.ring.available.load(Ordering::Acquire);
        let started = available - queue.fetched;
        queue.fetched = available;
        self.outstanding += started;
        // The engine tells the thread that started a request.
        (0..started).for_each(|_| drop(self.itself.post(ThreadMessage::Ended { here: true })));
        started == 0
    }

    fn read(&mut self, message: ThreadMessage) {
        match message {
            ThreadMessage::Release(to) => {
                let queue = self.queue.take().expect("the queue is here");
                let _ = to.post(ThreadMessage::Adopt(queue));
                self.forward = Some(to);
            }
            ThreadMessage::Adopt(queue) => match self.pass_on.take() {
                Some(to) => {
                    let _ = to.post(ThreadMessage::Adopt(queue));
                    self.forward = Some(to);
                }
                None => {
                    // Awake: the driver need not kick until the queue has been looked at.
                    queue.ring.notify.store(false, Ordering::Relaxed);
                    self.queue = Some(queue);
                }
            },
            ThreadMessage::End => self.ending = true,
            ThreadMessage::Ended { here } => {
                self.outstanding -= usize::from(here);
                match (&self.queue, &self.forward) {
                    // SAFETY: loom fails the model if another thread is in here.
                    (Some(queue), _) => queue.ring.used.with_mut(|used| unsafe { *used += 1 }),
                    (None, Some(to)) => drop(to.post(ThreadMessage::Ended { here: false })),
                    (None, None) => unreachable!("a message overtook the queue"),
                }
            }
        }
    }

    fn has_completed(&self) -> bool {
        // SAFETY: as above; the queue is this thread's.
        self.queue.as_ref().is_some_and(|q| q.ring.used.with(|used| unsafe { *used } == 1))
    }
}

/// A request that is kicked around a move is started once, and its completion, which comes in at
/// the thread that started it, is written by the thread that has the queue then.
#[test]
fn request_around_a_move_is_completed_once_by_the_queues_owner() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let ring = Arc::new(Ring {
            available: AtomicUsize::new(0),
            notify: AtomicBool::new(true),
            used: UnsafeCell::new(0),
        });
        let (to_source, source_mail) = mailbox().unwrap();
        let (to_target, target_mail) = mailbox().unwrap();

        // A kick wakes the target if it listens by then: if it does not, it looks when it does.
        // The source never sleeps, so its own kicks do not matter.
        let kick = Arc::clone(&target_mail.doorbell);
        let shared = Arc::clone(&ring);
        let driver = thread::spawn(move || {
            shared.available.store(1, Ordering::Release);
            // The driver's half of the fence (virtio 1.2, section 2.7.13.4.1).
            fence(Ordering::SeqCst);
            if shared.notify.load(Ordering::Relaxed) {
                kick.wake.wake();
            }
        });
        let release_to = to_target.clone();
        let source = thread::spawn(move || {
            let mut source = IoThread {
                mail: source_mail,
                itself: to_source,
                queue: Some(Queue { ring, fetched: 0 }),
                forward: None,
                pass_on: None,
                ending: false,
                outstanding: 0,
            };
            source.turn();
            let _ = source.itself.post(ThreadMessage::Release(release_to));
            while source.queue.is_some() || source.outstanding > 0 {
                source.turn();
            }
        });
        let mut target = IoThread {
            mail: target_mail,
            itself: to_target,
            queue: None,
            forward: None,
            pass_on: None,
            ending: false,
            outstanding: 0,
        };
        while !target.has_completed() {
            if target.turn() && !target.mail.is_signaled() && !target.has_completed() {
                target.mail.doorbell.wake.0.wait();
            }
        }
        driver.join().unwrap();
        source.join().unwrap();
    });
}

/// A queue that moves on while a request is in flight: its completion follows it over a thread
/// that has started nothing of it.
#[test]
fn completion_follows_its_queue_over_two_moves() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let ring = Arc::new(Ring {
            available: AtomicUsize::new(1),
            notify: AtomicBool::new(true),
            used: UnsafeCell::new(0),
        });
        let (to_source, source_mail) = mailbox().unwrap();
        let (to_middle, middle_mail) = mailbox().unwrap();
        let (to_target, target_mail) = mailbox().unwrap();
        let thread = |mail, itself, queue, pass_on| IoThread {
            mail,
            itself,
            queue,
            forward: None,
            pass_on,
            ending: false,
            outstanding: 0,
        };
        let (middle, last) = (to_middle.clone(), to_target.clone());
        let mut source = thread(source_mail, to_source, Some(Queue { ring, fetched: 0 }), None);
        let source = thread::spawn(move || {
            source.read(ThreadMessage::Release(middle));
            // It had been started before; the engine tells of it now.
            source.outstanding = 1;
            source.read(ThreadMessage::Ended { here: true });
        });
        let ends = to_middle.clone();
        let mut middle = thread(middle_mail, to_middle, None, Some(last));
        let middle = thread::spawn(move || {
            while !middle.ending {
                middle.mail.doorbell.wake.0.wait();
                middle.turn();
            }
        });
        let mut target = thread(target_mail, to_target, None, None);
        while !target.has_completed() {
            target.mail.doorbell.wake.0.wait();
            while target.mail.is_signaled() {
                target.mail.answer();
                while let Some(message) = target.mail.take() {
                    target.read(message);
                }
            }
        }
        let _ = ends.post(ThreadMessage::End);
        source.join().unwrap();
        middle.join().unwrap();
    });
}
