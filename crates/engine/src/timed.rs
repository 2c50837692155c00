//! Requests that end when the device model says so, on one thread at real-time priority.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_ssd::{Ssd, SsdConfig, SsdError};
use rtvirtio_units::{Bytes, Nanos};

use crate::AbortOnPanic;
use crate::raise_thread_priority;

/// Why an emulated SSD does not start or refuses a request.
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
    /// There is no memory for its content.
    #[error("memory for the content")]
    Memory(#[source] std::io::Error),
    /// The completion thread could not start.
    #[error("completion thread")]
    Thread(#[source] std::io::Error),
}

/// What is done when a request's time has come.
pub(crate) trait Timed: Send + 'static {
    /// Ends the request. On the timer's thread: keep it short.
    fn end(self);
}

struct InFlight<T> {
    due: Nanos,
    sequence: u64,
    request: T,
}

// Reversed, so that the heap's greatest is the earliest: (time, sequence).
impl<T> Ord for InFlight<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.sequence).cmp(&(self.due, self.sequence))
    }
}

impl<T> PartialOrd for InFlight<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for InFlight<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for InFlight<T> {}

struct Queue<T> {
    ssd: Ssd,
    heap: BinaryHeap<InFlight<T>>,
    sequence: u64,
    stopping: bool,
}

struct Shared<T> {
    start: Instant,
    queue: Mutex<Queue<T>>,
    earlier: Condvar,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in a completion leaves what is locked whole: go on.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests in flight. Each ends exactly once: dropping the timer ends what is left at once.
pub(crate) struct Timer<T: Timed> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Timed> Timer<T> {
    /// Without permission for real-time priority its thread runs at the normal one, and service
    /// times spread under load.
    pub(crate) fn start(config: SsdConfig, seed: u64) -> Result<Self, EngineError> {
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
        });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("ssd-complete".to_owned())
            .spawn(move || {
                let _fatal = AbortOnPanic::new();
                let _ = raise_thread_priority(60);
                for_thread.end_when_due();
            })
            .map_err(EngineError::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Ends the request when the device has done `length` bytes, and `later` after that.
    pub(crate) fn submit(&self, length: Bytes, later: Nanos, request: T) {
        let mut queue = lock(&self.shared.queue);
        // Time is read under the lock, so that it does not go back between submissions.
        let now = Nanos::from(self.shared.start.elapsed());
        let due = queue.ssd.submit(now, length).saturating_add(later);
        let is_earliest = queue.heap.peek().is_none_or(|first| due < first.due);
        queue.sequence += 1;
        let sequence = queue.sequence;
        queue.heap.push(InFlight { due, sequence, request });
        drop(queue);
        if is_earliest {
            self.shared.earlier.notify_one();
        }
    }
}

impl<T: Timed> Timer<T> {
    /// Requests from now on take `times` as long as the model says; 1 undoes it.
    pub(crate) fn slow_down(&self, times: u16) {
        lock(&self.shared.queue).ssd.slow_down(times);
    }
}

impl<T: Timed> Shared<T> {
    fn end_when_due(&self) {
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
                done.request.end();
                queue = lock(&self.queue);
            }
        }
    }
}

impl<T: Timed> Drop for Timer<T> {
    fn drop(&mut self) {
        lock(&self.shared.queue).stopping = true;
        self.shared.earlier.notify_one();
        if let Some(thread) = self.thread.take()
            // A disk's last holder may be what a completion let go of, on this very thread.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
