//! A request's completion in one cache line.
//!
//! Two sides share a [`Slot`]: the waiter, who submits and takes the result, and the completer. They
//! may be threads, or processes that share a memfd: there is no pointer in it, and zeroes are a slot
//! that is free.
//!
//! The word goes FREE → PENDING (submitted) → SLEEPING (the waiter is about to sleep) → DONE → FREE.
//! A waiter that spins leaves SLEEPING out. The completer makes PENDING or SLEEPING into DONE and has
//! to wake somebody only in the second case. A wake-up costs a system call, and may cost the
//! completer its CPU: [`Wakes`] collects them until the batch is done.
//!
//! State, generation and result are one word of 64 bits, written at once: so a completion that comes
//! too late, or twice, changes nothing, not even the result of the request that has the slot by then.
//! The generation has 30 bits: a completion would have to be late by 2^30 requests of its slot.
//!
//! No wake-up is lost: the kernel compares the word again, under the lock that a wake-up takes, before
//! it lets the waiter sleep (futex(2)). If the completer was first, the word is DONE and the waiter
//! does not sleep; if not, it sees SLEEPING and wakes.
//!
//! A peer that lies or dies. The completer makes two attempts to change the word and wakes one thread
//! at most: neither waits for anybody. What is no state of this request's is refused. A waiter can
//! give a time, and the side that outlives the other frees the slot ([`Slot::reclaim`]). Who shares
//! memory with a peer that it does not trust must have sealed its size (`F_SEAL_SHRINK`).

use std::time::Duration;

use sync::{AtomicU64, Bed, Ordering};

use crate::clock::now;

#[cfg(not(rtvirtio_loom))]
pub(crate) mod sync {
    use std::sync::atomic::AtomicU32;
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use rustix::thread::futex::{self, Flags, Timespec};

    /// Where waiters sleep: the kernel's, so nothing here.
    #[derive(Debug, Default)]
    pub(crate) struct Bed;

    /// The half of the word that is waited on.
    pub(crate) fn low(word: &AtomicU64) -> &AtomicU32 {
        let half = std::ptr::from_ref(word).cast::<AtomicU32>();
        // SAFETY: either half of a word is within it, and aligned.
        let half = unsafe { half.add(usize::from(cfg!(target_endian = "big"))) };
        // SAFETY: as above, for as long as the word; only the kernel reads it by this reference.
        unsafe { &*half }
    }

    const fn flags(shared: bool) -> Flags {
        if shared { Flags::empty() } else { Flags::PRIVATE }
    }

    impl Bed {
        /// Sleeps while the lower half of `word` is `expected`. May return at any time.
        pub(crate) fn wait(
            &self,
            word: &AtomicU64,
            expected: u32,
            shared: bool,
            time: Option<Duration>,
        ) {
            let time = time.and_then(|time| Timespec::try_from(time).ok());
            // Changed meanwhile, a signal, the time: the caller looks.
            let _ = futex::wait(low(word), flags(shared), expected, time.as_ref());
        }

        pub(crate) fn wake(&self, word: &AtomicU64, shared: bool) {
            // One: a peer may have put any number of threads to sleep there.
            let _ = futex::wake(low(word), flags(shared), 1);
        }
    }
}

#[cfg(rtvirtio_loom)]
pub(crate) mod sync {
    use std::time::Duration;

    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::sync::{Condvar, Mutex};

    pub(crate) fn low(_: &AtomicU64) -> &std::sync::atomic::AtomicU32 {
        unreachable!("a model has no futex")
    }

    /// What a futex is to its two sides: the word is compared under the lock of who wakes.
    #[derive(Debug, Default)]
    pub(crate) struct Bed {
        lock: Mutex<()>,
        woken: Condvar,
    }

    impl Bed {
        pub(crate) fn wait(
            &self,
            word: &AtomicU64,
            expected: u32,
            _shared: bool,
            _time: Option<Duration>,
        ) {
            let lock = self.lock.lock().unwrap();
            if word.load(Ordering::Relaxed) as u32 == expected {
                drop(self.woken.wait(lock).unwrap());
            }
        }

        pub(crate) fn wake(&self, _word: &AtomicU64, _shared: bool) {
            let _lock = self.lock.lock().unwrap();
            self.woken.notify_one();
        }
    }
}

/// A word's state: its two lowest bits.
const FREE: u32 = 0;
const PENDING: u32 = 1;
const SLEEPING: u32 = 2;
const DONE: u32 = 3;
const STATE: u32 = 3;

/// Names a request of a slot. The next one of the slot has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// Generation of the slot, above the state's two bits.
    generation: u32,
}

impl Ticket {
    const fn word(self, state: u32, result: i32) -> u64 {
        (result as u32 as u64) << 32 | (self.generation | state) as u64
    }
}

/// The request was completed before, or given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the slot waits for no completion of this request")]
pub struct NotPending;

/// Where a request's completion is waited for. `SHARED`: by processes, in memory that they share.
/// `About`: what the waiter says of the request, if its completer learns of it here.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Slot<const SHARED: bool = false, About = ()> {
    /// Below: generation and state, which is what the futex is on. Above: the result.
    word: AtomicU64,
    bed: Bed,
    about: About,
}

#[cfg(not(rtvirtio_loom))]
const _: () = assert!(size_of::<Slot>() == 64 && align_of::<Slot>() == 64);

impl<const SHARED: bool, About> Slot<SHARED, About> {
    /// A free one.
    #[must_use]
    pub fn new() -> Self
    where
        About: Default,
    {
        Self::default()
    }

    /// What is said of the request. The waiter writes it between [`Self::submit`] and telling the
    /// completer.
    pub const fn about(&self) -> &About {
        &self.about
    }

    /// The completer's: the request that it is told of. `None`: none waits to be completed.
    #[must_use]
    pub fn pending(&self) -> Option<Ticket> {
        let word = self.word.load(Ordering::Acquire) as u32;
        matches!(word & STATE, PENDING | SLEEPING).then_some(Ticket { generation: word & !STATE })
    }

    /// The waiter's: takes the slot for a request. `None`: it has one.
    #[must_use]
    pub fn submit(&self) -> Option<Ticket> {
        let old = self.word.load(Ordering::Acquire);
        if old as u32 & STATE != FREE {
            return None;
        }
        let ticket = Ticket { generation: (old as u32 & !STATE).wrapping_add(STATE + 1) };
        let new = ticket.word(PENDING, 0);
        self.word
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
            .then_some(ticket)
    }

    /// The waiter's: the result, if it is there. The slot stays the request's: what else is in it can be
    /// looked at. Cheap enough to spin on.
    #[must_use]
    pub fn look(&self, ticket: Ticket) -> Option<i32> {
        let word = self.word.load(Ordering::Acquire);
        (word as u32 == ticket.generation | DONE).then_some((word >> 32) as i32)
    }

    /// The waiter's: the result, if it is there. The slot is free then. Cheap enough to spin on.
    #[must_use]
    pub fn take(&self, ticket: Ticket) -> Option<i32> {
        let word = self.word.load(Ordering::Acquire);
        if word as u32 != ticket.generation | DONE {
            return None;
        }
        self.word
            .compare_exchange(word, ticket.word(FREE, 0), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
            .then_some((word >> 32) as i32)
    }

    /// The waiter's: sleeps until the result is there. `None`: not within `time`, or the slot is not
    /// this request's any more. Signals are handled, and then it goes on.
    #[must_use]
    pub fn wait(&self, ticket: Ticket, time: Option<Duration>) -> Option<i32> {
        self.watch(ticket, time)?;
        self.take(ticket)
    }

    /// The same, but the slot stays the request's.
    #[must_use]
    pub fn watch(&self, ticket: Ticket, time: Option<Duration>) -> Option<i32> {
        let until = time.map(|time| now().saturating_add(time.as_nanos() as u64));
        loop {
            if let Some(result) = self.look(ticket) {
                return Some(result);
            }
            let pending = ticket.word(PENDING, 0);
            let sleeping = ticket.word(SLEEPING, 0);
            // Fails if it is DONE by now, or SLEEPING from an earlier round.
            let state =
                self.word.compare_exchange(pending, sleeping, Ordering::AcqRel, Ordering::Acquire);
            match state {
                Ok(_) => {}
                Err(word) if word == sleeping => {}
                Err(word) if word as u32 == ticket.generation | DONE => continue,
                Err(_) => return None,
            }
            let left = match until.map(|until| until.saturating_sub(now())) {
                Some(0) => return None,
                left => left.map(Duration::from_nanos),
            };
            self.bed.wait(&self.word, sleeping as u32, SHARED, left);
        }
    }

    /// Frees the slot, whatever it waits for: for the side that knows that the other is gone. What
    /// the other may still do to the old request is refused.
    pub fn reclaim(&self) {
        let generation =
            (self.word.load(Ordering::Acquire) as u32 & !STATE).wrapping_add(STATE + 1);
        self.word.store(Ticket { generation }.word(FREE, 0), Ordering::Release);
    }

    /// Makes it DONE; whether the waiter is to be woken.
    fn complete(&self, ticket: Ticket, result: i32) -> Result<bool, NotPending> {
        let done = ticket.word(DONE, result);
        for state in [PENDING, SLEEPING] {
            let old = ticket.word(state, 0);
            // A waiter goes from the first to the second state once, and never back.
            if self.word.compare_exchange(old, done, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Ok(state == SLEEPING);
            }
        }
        Err(NotPending)
    }

    fn wake(&self) {
        self.bed.wake(&self.word, SHARED);
    }
}

/// Wake-ups that are kept before they are issued.
const BATCH: usize = 64;

/// The completer's side of a batch: wake-ups that are still to be issued. Dropping it issues them.
#[derive(Debug)]
pub struct Wakes<'a, const SHARED: bool = false, About = ()> {
    sleepers: [Option<&'a Slot<SHARED, About>>; BATCH],
    count: usize,
}

impl<const SHARED: bool, About> Default for Wakes<'_, SHARED, About> {
    fn default() -> Self {
        Self { sleepers: [None; BATCH], count: 0 }
    }
}

impl<'a, const SHARED: bool, About> Wakes<'a, SHARED, About> {
    /// Whether nobody is to be woken.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Completes a request. Its waiter sees that at once if it spins, else when it is woken.
    ///
    /// # Errors
    /// [`NotPending`]: nothing was changed.
    pub fn complete(
        &mut self,
        slot: &'a Slot<SHARED, About>,
        ticket: Ticket,
        result: i32,
    ) -> Result<(), NotPending> {
        if slot.complete(ticket, result)? {
            if self.count == BATCH {
                self.issue();
            }
            self.sleepers[self.count] = Some(slot);
            self.count += 1;
        }
        Ok(())
    }

    /// Wakes who sleeps.
    pub fn issue(&mut self) {
        for sleeper in &mut self.sleepers[..self.count] {
            if let Some(slot) = sleeper.take() {
                slot.wake();
            }
        }
        self.count = 0;
    }
}

impl<const SHARED: bool, About> Drop for Wakes<'_, SHARED, About> {
    fn drop(&mut self) {
        self.issue();
    }
}

#[cfg(all(test, rtvirtio_loom))]
mod model;
#[cfg(all(test, not(rtvirtio_loom)))]
mod tests;
