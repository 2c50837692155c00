//! How others speak to an IOThread: a queue of letters and an eventfd that wakes it.
//!
//! Any thread may post; posting never blocks. The eventfd is written only when nobody has rung
//! since the owner last looked, so a burst of letters costs one wake-up.
//!
//! No letter is missed: a poster puts its letter first and rings then; the owner takes the bell
//! back first and looks for letters then. Whichever of the two swaps of `rung` comes last sees
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
struct Bell {
    rung: AtomicBool,
    wake: Wake,
}

/// The poster's side; cheap to clone.
#[derive(Debug)]
pub(crate) struct Sender<T> {
    letters: mpsc::Sender<T>,
    bell: Arc<Bell>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { letters: self.letters.clone(), bell: Arc::clone(&self.bell) }
    }
}

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Receiver<T> {
    letters: mpsc::Receiver<T>,
    bell: Arc<Bell>,
}

/// A mailbox.
///
/// # Errors
/// No eventfd.
pub(crate) fn mailbox<T>() -> rustix::io::Result<(Sender<T>, Receiver<T>)> {
    let bell = Arc::new(Bell { rung: AtomicBool::new(false), wake: Wake::new()? });
    let (sender, receiver) = mpsc::channel();
    Ok((Sender { letters: sender, bell: Arc::clone(&bell) }, Receiver { letters: receiver, bell }))
}

impl<T> Sender<T> {
    /// Whether both post to the same owner.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.bell, &other.bell)
    }

    /// Posts a letter; gives it back if the owner is gone.
    pub(crate) fn post(&self, letter: T) -> Result<(), T> {
        self.letters.send(letter).map_err(|error| error.0)?;
        if !self.bell.rung.swap(true, Ordering::AcqRel) {
            self.bell.wake.wake();
        }
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Whether there may be letters. Cheap enough to poll.
    pub(crate) fn has_rung(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// Takes the bell back; the caller then takes letters until there are none.
    pub(crate) fn answer(&self) {
        self.bell.rung.swap(false, Ordering::AcqRel);
    }

    /// The next letter.
    pub(crate) fn take(&self) -> Option<T> {
        self.letters.try_recv().ok()
    }

    /// Becomes readable when somebody rings.
    pub(crate) fn fd(&self) -> rustix::fd::BorrowedFd<'_> {
        self.bell.wake.fd()
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
        assert!(!mail.has_rung() && !is_readable(&mail));
        (1..=3).for_each(|letter| sender.post(letter).unwrap());
        assert!(mail.has_rung() && is_readable(&mail));
        mail.answer();
        let letters: Vec<u32> = std::iter::from_fn(|| mail.take()).collect();
        assert_eq!(letters, [1, 2, 3]);
        assert!(!mail.has_rung());
    }

    #[test]
    fn letter_to_an_owner_who_is_gone_comes_back() {
        let (sender, mail) = mailbox().unwrap();
        drop(mail);
        assert_eq!(sender.post(7), Err(7));
    }
}
