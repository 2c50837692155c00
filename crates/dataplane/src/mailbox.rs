//! How others speak to an IOThread: a queue of messages and an eventfd that wakes it.
//!
//! Any thread may post; posting never blocks. The eventfd is written only when nobody has rung
//! since the owner last looked, so a burst of messages costs one wake-up.
//!
//! No message is missed: a poster puts its message first and rings then; the owner takes the doorbell
//! back first and looks for messages then. Whichever of the two swaps of `rung` comes last sees
//! what the other side did before it.

use sync::{Arc, AtomicBool, Ordering, Wake, mpsc};

#[cfg(not(rtvirtio_loom))]
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::sync::{Arc, mpsc};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

    /// An eventfd, never read: a multishot poll sees each write as an edge.
    #[derive(Debug)]
    pub(super) struct Wake(OwnedFd);

    impl Wake {
        pub(super) fn new() -> rustix::io::Result<Self> {
            Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
        }

        pub(super) fn wake(&self) {
            // Cannot block, and its counter does not fill: one per post at most.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        pub(super) fn fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

#[cfg(rtvirtio_loom)]
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
    pub(super) use loom::sync::{Arc, Notify, mpsc};
    use rustix::fd::BorrowedFd;

    /// What an eventfd is to its two sides.
    pub(super) struct Wake(pub(super) Notify);

    impl std::fmt::Debug for Wake {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Wake")
        }
    }

    impl Wake {
        pub(super) fn new() -> rustix::io::Result<Self> {
            Ok(Self(Notify::new()))
        }

        pub(super) fn wake(&self) {
            self.0.notify();
        }

        pub(super) fn fd(&self) -> BorrowedFd<'_> {
            unreachable!("a model has no io_uring")
        }
    }
}

/// What wakes the owner.
#[derive(Debug)]
struct Doorbell {
    rung: AtomicBool,
    wake: Wake,
}

/// The poster's side; cheap to clone.
#[derive(Debug)]
pub(crate) struct Sender<T> {
    messages: mpsc::Sender<T>,
    doorbell: Arc<Doorbell>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { messages: self.messages.clone(), doorbell: Arc::clone(&self.doorbell) }
    }
}

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Receiver<T> {
    messages: mpsc::Receiver<T>,
    doorbell: Arc<Doorbell>,
}

/// A mailbox.
///
/// # Errors
/// No eventfd.
pub(crate) fn mailbox<T>() -> rustix::io::Result<(Sender<T>, Receiver<T>)> {
    let doorbell = Arc::new(Doorbell { rung: AtomicBool::new(false), wake: Wake::new()? });
    let (sender, receiver) = mpsc::channel();
    Ok((
        Sender { messages: sender, doorbell: Arc::clone(&doorbell) },
        Receiver { messages: receiver, doorbell },
    ))
}

impl<T> Sender<T> {
    /// Whether both post to the same owner.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.doorbell, &other.doorbell)
    }

    /// Posts a message; gives it back if the owner is gone.
    pub(crate) fn post(&self, message: T) -> Result<(), T> {
        self.messages.send(message).map_err(|error| error.0)?;
        if !self.doorbell.rung.swap(true, Ordering::AcqRel) {
            self.doorbell.wake.wake();
        }
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Whether there may be messages. Cheap enough to poll.
    pub(crate) fn is_signaled(&self) -> bool {
        self.doorbell.rung.load(Ordering::Acquire)
    }

    /// Takes the doorbell back; the caller then takes messages until there are none.
    pub(crate) fn answer(&self) {
        self.doorbell.rung.swap(false, Ordering::AcqRel);
    }

    /// The next message.
    pub(crate) fn take(&self) -> Option<T> {
        self.messages.try_recv().ok()
    }

    /// Becomes readable when somebody rings.
    pub(crate) fn fd(&self) -> rustix::fd::BorrowedFd<'_> {
        self.doorbell.wake.fd()
    }
}

#[cfg(all(test, rtvirtio_loom))]
mod model;

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(mail: &Receiver<u32>) -> bool {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(mail.fd(), PollFlags::IN)], Some(&zero)) == Ok(1)
    }

    #[test]
    fn letters_come_in_order_and_ring_once() {
        let (sender, mail) = mailbox().unwrap();
        assert!(!mail.is_signaled() && !is_readable(&mail));
        (1..=3).for_each(|message| sender.post(message).unwrap());
        assert!(mail.is_signaled() && is_readable(&mail));
        mail.answer();
        let messages: Vec<u32> = std::iter::from_fn(|| mail.take()).collect();
        assert_eq!(messages, [1, 2, 3]);
        assert!(!mail.is_signaled());
    }

    #[test]
    fn letter_to_an_owner_who_is_gone_comes_back() {
        let (sender, mail) = mailbox().unwrap();
        drop(mail);
        assert_eq!(sender.post(7), Err(7));
    }
}
