//! The emulated SSD as the bench's FUSE disk uses it: byte slices instead of guest memory.
//!
//! A write's data is stored at submission and acknowledged at completion; a
//! read takes the data at completion. Requests are completed exactly once:
//! dropping the engine completes what is in flight at once.

use std::sync::{Arc, Mutex};

use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{Bytes, Nanos};

pub use crate::timed::EngineError;
use crate::timed::{Timed, Timer, lock};

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
    answer: Answer,
    completion: C,
    store: Arc<Mutex<Vec<u8>>>,
}

impl<C: Completion> Timed for InFlight<C> {
    fn end(self) {
        match self.answer {
            Answer::Written(length) => self.completion.complete(Outcome::Written(length)),
            Answer::Read { offset, length } => {
                let store = lock(&self.store);
                self.completion.complete(Outcome::Read(&store[offset..offset + length]));
            }
        }
    }
}

/// An emulated SSD.
pub struct EmulatedSsd<C: Completion> {
    timer: Timer<InFlight<C>>,
    store: Arc<Mutex<Vec<u8>>>,
    size: u64,
}

impl<C: Completion> EmulatedSsd<C> {
    /// Starts a device of `size` bytes. Its memory is taken at once: a page fault in a first
    /// write would be a service time that the model does not have.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start(config: SsdConfig, size: Bytes, seed: u64) -> Result<Self, EngineError> {
        // Not zero: zeroes would be mapped lazily.
        let store = Arc::new(Mutex::new(vec![0xa5; size.get() as usize]));
        Ok(Self { timer: Timer::start(config, seed)?, store, size: size.get() })
    }

    /// Size of the device.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        Bytes::new(self.size)
    }

    /// Requests from now on take `times` as long as the model says; 1 undoes it.
    pub fn slow_down(&self, times: u16) {
        self.timer.slow_down(times);
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
                lock(&self.store)[at..at + data.len()].copy_from_slice(data);
                Answer::Written(data.len() as u32)
            }
        };
        let request = InFlight { answer, completion, store: Arc::clone(&self.store) };
        self.timer.submit(Bytes::new(length), Nanos::ZERO, request);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

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
