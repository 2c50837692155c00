//! How the processes that share slots with a poller tell it that there is something new.
//!
//! One word: a bit for each slot, and whether the poller sleeps. So one instruction says that a slot
//! has a request and learns whether somebody must be woken for it, and one takes all that is new;
//! neither looks at slots that are not concerned.
//!
//! No ring is missed. Who rings sets its bit by the same instruction that sees ASLEEP, and the poller
//! sets ASLEEP by the one that sees bits: whichever comes second knows of the other. Who has seen
//! ASLEEP takes it away, and wakes then: if the poller does not wait yet, the word is not what it is
//! about to wait for, and it does not begin to (futex(2)).
//!
//! A peer that lies can wake the poller as often as it likes, keep it awake, or not wake it for its own
//! requests. Bits are answered all at once, so it cannot hold the poller up.

use crate::slot::sync::{AtomicU64, Bed, Ordering};

/// The poller waits, or is about to. In the half of the word that a futex is on.
const ASLEEP: u64 = 1;

/// See the module's text. In memory that processes share; zeroes are one that nobody has rung.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Doorbell {
    /// [`ASLEEP`], and above it a bit for each slot.
    word: AtomicU64,
    bed: Bed,
}

impl Doorbell {
    /// Slots that it has a bit for.
    pub const SLOTS: usize = 63;

    /// What the poller waits for to change, at [`Self::futex`], when it sleeps.
    pub const SILENT: u32 = ASLEEP as u32;

    /// The submitter's: slot `index` has something new. What was written there before is seen by who
    /// answers.
    pub fn ring(&self, index: usize) {
        debug_assert!(index < Self::SLOTS);
        let before = self.word.fetch_or(2 << index, Ordering::AcqRel);
        // Of several that ring while the poller sleeps, each may see that: it is woken more than once.
        if before & ASLEEP != 0 {
            self.word.fetch_and(!ASLEEP, Ordering::Relaxed);
            self.bed.wake(&self.word, true);
        }
    }

    /// The poller's: whether somebody has rung. Cheap enough to spin on.
    #[must_use]
    pub fn is_signaled(&self) -> bool {
        self.word.load(Ordering::Relaxed) & !ASLEEP != 0
    }

    /// The poller's: which slots have something new since the last answer, the lowest bit for slot 0.
    /// It is awake from now on.
    #[must_use]
    pub fn answer(&self) -> u64 {
        self.word.swap(0, Ordering::AcqRel) >> 1
    }

    /// The poller's, before it waits; whether somebody has rung already.
    #[must_use]
    pub fn sleep(&self) -> bool {
        self.word.fetch_or(ASLEEP, Ordering::AcqRel) & !ASLEEP != 0
    }

    /// The poller's: it looks by itself from now on.
    pub fn wake_up(&self) {
        self.word.fetch_and(!ASLEEP, Ordering::Relaxed);
    }

    /// The poller's: waits until somebody rings after [`Self::sleep`] has said that nobody had. May
    /// return at any time.
    pub fn wait(&self) {
        self.bed.wait(&self.word, Self::SILENT, true, None);
    }

    /// What the poller waits at, if it has another way to wait than [`Self::wait`]: a futex that
    /// processes share.
    #[must_use]
    pub fn futex(&self) -> &std::sync::atomic::AtomicU32 {
        crate::slot::sync::low(&self.word)
    }
}

#[cfg(all(test, rtvirtio_loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Shared<const N: usize> {
        doorbell: Doorbell,
        said: [UnsafeCell<u32>; N],
    }
    // SAFETY: loom fails the model if two threads are in a cell at a time.
    unsafe impl<const N: usize> Sync for Shared<N> {}
    // SAFETY: as above.
    unsafe impl<const N: usize> Send for Shared<N> {}

    /// Loom reports a poller that waits for ever as a deadlock, and what is read without having been
    /// handed over as a race.
    fn submitters_and_a_poller<const N: usize>() {
        let said = std::array::from_fn(|_| UnsafeCell::new(0));
        let shared = Arc::new(Shared::<N> { doorbell: Doorbell::default(), said });
        let submitters: [_; N] = std::array::from_fn(|index| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // SAFETY: loom fails the model if the poller reads already.
                shared.said[index].with_mut(|said| unsafe { *said = 7 });
                shared.doorbell.ring(index);
            })
        });
        let mut answered = 0;
        while answered != (1 << N) - 1 {
            if !shared.doorbell.is_signaled() && !shared.doorbell.sleep() {
                shared.doorbell.wait();
            }
            let new = shared.doorbell.answer();
            assert_eq!(answered & new, 0, "each ring is answered once");
            answered |= new;
            for index in (0..N).filter(|index| new >> index & 1 == 1) {
                // SAFETY: loom fails the model if the submitter writes yet.
                assert_eq!(shared.said[index].with(|said| unsafe { *said }), 7);
            }
        }
        for submitter in submitters {
            submitter.join().unwrap();
        }
    }

    #[test]
    fn no_ring_is_missed() {
        loom::model(submitters_and_a_poller::<1>);
    }

    /// With two, of which one may see that the other woke the poller: all orders in which threads are
    /// interrupted twice.
    #[test]
    fn no_ring_of_several_is_missed() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(submitters_and_a_poller::<2>);
    }
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use super::*;

    #[test]
    fn answer_names_the_slots_that_rang_once() {
        let doorbell = Doorbell::default();
        assert!(!doorbell.is_signaled());
        doorbell.ring(0);
        doorbell.ring(62);
        doorbell.ring(0);
        assert!(doorbell.is_signaled());
        assert_eq!(doorbell.answer(), 1 | 1 << 62);
        assert!(!doorbell.is_signaled());
        assert_eq!(doorbell.answer(), 0);
    }

    #[test]
    fn poller_that_sleeps_is_told_of_what_rang_before_and_woken_by_what_rings_after() {
        let doorbell = Doorbell::default();
        doorbell.ring(5);
        assert!(doorbell.sleep());
        assert_eq!(doorbell.answer(), 1 << 5);
        assert!(!doorbell.sleep());
        assert_eq!(doorbell.futex().load(Ordering::Relaxed), Doorbell::SILENT);
        doorbell.ring(62);
        assert_ne!(doorbell.futex().load(Ordering::Relaxed), Doorbell::SILENT);
        // It does not begin to wait.
        doorbell.wait();
        assert_eq!(doorbell.answer(), 1 << 62);
        assert!(!doorbell.sleep());
        doorbell.wake_up();
        assert!(!doorbell.is_signaled());
    }
}
