//! The emulated SSD: data in RAM, completions at the time that
//! [`rtvirtio_ssd::Ssd`] computes, from one thread at real-time priority.
//!
//! A write's data is stored at submission and acknowledged at completion; a
//! read takes the data at completion. Requests are completed exactly once:
//! dropping the engine completes what is in flight at once.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_ssd::{Ssd, SsdConfig, SsdError};
use rtvirtio_units::{Bytes, Nanos};

use crate::raise_thread_priority;

/// Why an engine does not start or refuses a request.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device model refuses its configuration.
    #[error("device model")]
    Ssd(#[from] SsdError),
    /// The request leaves the device.
    #[error("offset {offset} + length {length} is beyond the device's {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Size of the device.
        size: u64,
    },
    /// The completion thread could not start.
    #[error("completion thread")]
    Thread(#[source] std::io::Error),
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Reads `length` bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Writes the bytes.
    Write {
        /// First byte.
        offset: u64,
        /// What to write.
        data: &'a [u8],
    },
}

/// What a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// The bytes read.
    Read(&'a [u8]),
    /// The number of bytes written.
    Written(u32),
}

/// Told once when its request completes, on the engine's thread: keep it short.
pub trait Completion: Send + 'static {
    /// The request has completed.
    fn complete(self, outcome: Outcome<'_>);
}

enum Answer {
    Read { offset: usize, length: usize },
    Written(u32),
}

struct InFlight<C> {
    due: Nanos,
    sequence: u64,
    answer: Answer,
    completion: C,
}

// Reversed, so that the heap's greatest is the earliest: (time, sequence).
impl<C> Ord for InFlight<C> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.sequence).cmp(&(self.due, self.sequence))
    }
}

impl<C> PartialOrd for InFlight<C> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<C> PartialEq for InFlight<C> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<C> Eq for InFlight<C> {}

struct Queue<C> {
    ssd: Ssd,
    heap: BinaryHeap<InFlight<C>>,
    sequence: u64,
    stopping: bool,
}

struct Shared<C> {
    start: Instant,
    queue: Mutex<Queue<C>>,
    earlier: Condvar,
    store: Mutex<Vec<u8>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in a completion leaves the queue and the bytes whole: go on.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An emulated SSD.
pub struct EmulatedSsd<C: Completion> {
    shared: Arc<Shared<C>>,
    size: u64,
    thread: Option<JoinHandle<()>>,
}

impl<C: Completion> EmulatedSsd<C> {
    /// Starts a device of `size` bytes. Its memory is taken at once: a page fault in a first
    /// write would be a service time that the model does not have.
    ///
    /// Without permission for real-time priority it runs at the normal one,
    /// and its service times spread under load.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start(config: SsdConfig, size: Bytes, seed: u64) -> Result<Self, EngineError> {
        let queue = Queue {
            ssd: Ssd::new(config, seed)?,
            heap: BinaryHeap::with_capacity(1024),
            sequence: 0,
            stopping: false,
        };
        let shared = Arc::new(Shared {
            start: Instant::now(),
            queue: Mutex::new(queue),
            earlier: Condvar::new(),
            // Not zero: zeroes would be mapped lazily.
            store: Mutex::new(vec![0xa5; size.get() as usize]),
        });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("ssd-complete".to_owned())
            .spawn(move || {
                let _ = raise_thread_priority(60);
                for_thread.complete_when_due();
            })
            .map_err(EngineError::Thread)?;
        Ok(Self { shared, size: size.get(), thread: Some(thread) })
    }

    /// Size of the device.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        Bytes::new(self.size)
    }

    /// Submits a request; `completion` is told when it completes.
    ///
    /// # Errors
    /// [`EngineError::OutOfRange`] with the completion, which was not told.
    pub fn submit(&self, operation: Operation<'_>, completion: C) -> Result<(), (EngineError, C)> {
        let (offset, length) = match operation {
            Operation::Read { offset, length } => (offset, u64::from(length)),
            Operation::Write { offset, data } => (offset, data.len() as u64),
        };
        let size = self.size;
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err((EngineError::OutOfRange { offset, length, size }, completion));
        }
        let answer = match operation {
            Operation::Read { offset, length } => {
                Answer::Read { offset: offset as usize, length: length as usize }
            }
            Operation::Write { offset, data } => {
                let at = offset as usize;
                lock(&self.shared.store)[at..at + data.len()].copy_from_slice(data);
                Answer::Written(data.len() as u32)
            }
        };
        let mut queue = lock(&self.shared.queue);
        // Time is read under the lock, so that it does not go back between submissions.
        let now = Nanos::from(self.shared.start.elapsed());
        let due = queue.ssd.submit(now, Bytes::new(length));
        let is_earliest = queue.heap.peek().is_none_or(|first| due < first.due);
        queue.sequence += 1;
        let sequence = queue.sequence;
        queue.heap.push(InFlight { due, sequence, answer, completion });
        drop(queue);
        if is_earliest {
            self.shared.earlier.notify_one();
        }
        Ok(())
    }
}

impl<C: Completion> Shared<C> {
    fn complete_when_due(&self) {
        let mut queue = lock(&self.queue);
        loop {
            let now = Nanos::from(self.start.elapsed());
            let wait = match queue.heap.peek() {
                Some(first) if first.due <= now || queue.stopping => None,
                Some(first) => Some(Duration::from(first.due.saturating_sub(now))),
                None if queue.stopping => return,
                None => Some(Duration::from_secs(3600)),
            };
            if let Some(wait) = wait {
                queue = self
                    .earlier
                    .wait_timeout(queue, wait)
                    .map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
            } else if let Some(done) = queue.heap.pop() {
                drop(queue);
                match done.answer {
                    Answer::Written(length) => done.completion.complete(Outcome::Written(length)),
                    Answer::Read { offset, length } => {
                        let store = lock(&self.store);
                        done.completion.complete(Outcome::Read(&store[offset..offset + length]));
                    }
                }
                queue = lock(&self.queue);
            }
        }
    }
}

impl<C: Completion> Drop for EmulatedSsd<C> {
    fn drop(&mut self) {
        lock(&self.shared.queue).stopping = true;
        self.shared.earlier.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Tell(mpsc::Sender<(Instant, Vec<u8>)>);

    impl Completion for Tell {
        fn complete(self, outcome: Outcome<'_>) {
            let bytes = match outcome {
                Outcome::Read(data) => data.to_vec(),
                Outcome::Written(n) => vec![0; n as usize],
            };
            self.0.send((Instant::now(), bytes)).unwrap();
        }
    }

    fn engine() -> EmulatedSsd<Tell> {
        EmulatedSsd::start("ref-4x250".parse().unwrap(), Bytes::from_kib(1024), 1).unwrap()
    }

    #[test]
    fn read_returns_what_was_written() {
        let (ssd, (tx, rx)) = (engine(), mpsc::channel());
        let data = [7; 4096];
        assert!(
            ssd.submit(Operation::Write { offset: 8192, data: &data }, Tell(tx.clone())).is_ok()
        );
        rx.recv().unwrap();
        assert!(ssd.submit(Operation::Read { offset: 8192, length: 4096 }, Tell(tx)).is_ok());
        assert_eq!(rx.recv().unwrap().1, data);
    }

    #[test]
    fn completion_comes_after_a_service_time() {
        let (ssd, (tx, rx)) = (engine(), mpsc::channel());
        let before = Instant::now();
        assert!(ssd.submit(Operation::Read { offset: 0, length: 4096 }, Tell(tx)).is_ok());
        let (at, _) = rx.recv().unwrap();
        // Four σ below the median of a 250 µs log-normal with σ 0.3 is about 72 µs.
        assert!(at - before > Duration::from_micros(70));
    }

    #[test]
    fn request_beyond_the_device_is_returned() {
        let (ssd, (tx, _rx)) = (engine(), mpsc::channel());
        let beyond = Operation::Read { offset: u64::MAX, length: 1 };
        let (error, _completion) = ssd.submit(beyond, Tell(tx)).err().unwrap();
        assert!(matches!(error, EngineError::OutOfRange { .. }));
    }

    #[test]
    fn drop_completes_what_is_in_flight() {
        let (ssd, (tx, rx)) = (engine(), mpsc::channel());
        for _ in 0..100 {
            let read = Operation::Read { offset: 0, length: 131_072 };
            assert!(ssd.submit(read, Tell(tx.clone())).is_ok());
        }
        drop((ssd, tx));
        assert_eq!(rx.iter().count(), 100);
    }
}
