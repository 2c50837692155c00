//! The emulated SSD: memory, completions at the time that [`rtvirtio_ssd::Ssd`] computes, and
//! faults on request.
//!
//! A write's data is stored when it starts and acknowledged at completion; a read takes the data
//! at completion. Dropping the engine completes what is in flight at once.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{Bytes, Nanos};
use rustix::io::Errno;

use crate::ram::MAX_DISCARD;
use crate::store::Store;
use crate::timed::{EngineError, Timed, Timer};
use crate::{
    Completions, Cost, Engine, Geometry, Operation, Outcome, Request, ResizeError, Segment,
    SizeError, SubmitContext, Token, TransferLimits,
};

/// What goes wrong: of the requests that a fault can hit, each `every`th, counted for each fault
/// by itself. The same seed and the same requests give the same faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// Any request fails with `EIO`, and does nothing.
    pub error_every: Option<NonZeroU64>,
    /// A write or write-zeroes fails with `ENOSPC`, and does nothing.
    pub no_space_every: Option<NonZeroU64>,
    /// A read or write moves the first half of its bytes, in whole blocks, and fails with `EIO`:
    /// what comes of a device that ends in the middle.
    pub short_every: Option<NonZeroU64>,
    /// Any request ends so much later.
    pub stall: Option<(NonZeroU64, Duration)>,
    /// So many requests are taken to have been made before the first.
    pub seed: u64,
}

/// Counts to a fault.
#[derive(Debug)]
struct Countdown {
    every: Option<NonZeroU64>,
    count: AtomicU64,
}

impl Countdown {
    const fn new(every: Option<NonZeroU64>, seed: u64) -> Self {
        Self { every, count: AtomicU64::new(seed) }
    }

    fn strikes(&self) -> bool {
        self.every.is_some_and(|n| {
            self.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_multiple_of(n.get())
        })
    }
}

/// A request in flight.
struct InFlight {
    token: Token,
    result: Result<(), Errno>,
    /// Of a read: from where, how many bytes, to where.
    read: Option<(u64, u64, *const Segment, usize)>,
    store: Arc<Store>,
    completions: Arc<dyn Completions>,
}

// SAFETY: whoever started the request keeps its segments in place until it is told the result.
unsafe impl Send for InFlight {}

impl Timed for InFlight {
    fn end(self) {
        let mut result = self.result;
        if let Some((offset, length, segments, count)) = self.read {
            // SAFETY: the segments are still in place: the result is told below.
            let segments = unsafe { std::slice::from_raw_parts(segments, count) };
            let read = first(segments, length, |at, piece| self.store.read(offset + at, &[piece]));
            result = result.and(read);
        }
        self.completions.complete(self.token, result);
    }
}

/// An emulated SSD.
pub struct SsdEngine {
    store: Arc<Store>,
    timer: Timer<InFlight>,
    error: Countdown,
    no_space: Countdown,
    short: Countdown,
    stall: Countdown,
    stall_length: Nanos,
    cost: Cost,
}

impl SsdEngine {
    /// A device of zeroes. Its memory is taken at once: a page fault in a first write would be a
    /// service time that the model does not have. `seed` is the model's.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start(
        config: SsdConfig,
        capacity: Bytes,
        seed: u64,
        faults: Faults,
    ) -> Result<Self, EngineError> {
        let memory = |error: Errno| EngineError::Memory(error.into());
        check(capacity).map_err(memory)?;
        let store = Store::new(capacity).map_err(memory)?;
        match store.populate() {
            // A kernel before 5.14 takes it later.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(memory(error)),
        }
        let (stall_every, stall_length) = faults.stall.unzip();
        Ok(Self {
            store: Arc::new(store),
            timer: Timer::start(config, seed)?,
            error: Countdown::new(faults.error_every, faults.seed),
            no_space: Countdown::new(faults.no_space_every, faults.seed),
            short: Countdown::new(faults.short_every, faults.seed),
            stall: Countdown::new(stall_every, faults.seed),
            stall_length: stall_length.map_or(Nanos::ZERO, Nanos::from),
            cost: Cost::default(),
        })
    }

    /// The same, but each request costs so much of the thread that starts it.
    #[must_use]
    pub fn with_cost(self, cost: Cost) -> Self {
        Self { cost, ..self }
    }

    /// The fault that strikes this request, and how many of its bytes are moved before.
    fn fault(&self, request: &Request<'_>) -> (Result<(), Errno>, u64) {
        use Operation::{Read, Write, WriteZeroes};
        let operation = request.operation;
        if self.error.strikes() {
            return (Err(Errno::IO), 0);
        }
        if matches!(operation, Write { .. } | WriteZeroes { .. }) && self.no_space.strikes() {
            return (Err(Errno::NOSPC), 0);
        }
        if matches!(operation, Read | Write { .. }) && self.short.strikes() {
            return (Err(Errno::IO), request.length / 2 / 512 * 512);
        }
        (Ok(()), request.length)
    }
}

impl Engine for SsdEngine {
    fn geometry(&self) -> Geometry {
        Geometry {
            capacity: self.store.capacity(),
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            discard: true,
        }
    }

    /// As in [`crate::ram`].
    fn transfer_limits(&self) -> TransferLimits {
        TransferLimits { discard: MAX_DISCARD, zeroes: MAX_DISCARD, ..TransferLimits::default() }
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let &Request { operation, offset, segments, .. } = request;
        let (fault, length) = self.fault(request);
        self.cost.burn(request);
        let mut read = None;
        let done = match operation {
            Operation::Read => {
                read = Some((offset, length, segments.as_ptr(), segments.len()));
                Ok(())
            }
            Operation::Write { .. } => {
                first(segments, length, |at, piece| self.store.write(offset + at, &[piece]))
            }
            Operation::Flush => Ok(()),
            // The pages stay: see `SsdEngine::start`.
            Operation::Discard | Operation::WriteZeroes { .. } => {
                self.store.zero(offset, length, false)
            }
        };
        let moved =
            if let Operation::Read | Operation::Write { .. } = operation { length } else { 0 };
        let later = if self.stall.strikes() { self.stall_length } else { Nanos::ZERO };
        let in_flight = InFlight {
            token: request.token,
            result: fault.and(done),
            read,
            store: Arc::clone(&self.store),
            completions: Arc::clone(lent.completions),
        };
        self.timer.submit(Bytes::new(moved), later, in_flight);
        Outcome::Started
    }

    fn check_size(&self, size: Bytes) -> Result<(), ResizeError> {
        SizeError::check(size, 512, self.store.max_capacity())
    }

    /// Grows up to 16 times the first capacity; shrinking drops what is cut off.
    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        if let Some(capacity) = capacity {
            self.check_size(capacity).map_err(std::io::Error::other)?;
            self.store.resize(capacity)?;
        } else {
            self.store.admit_all();
        }
        Ok(self.store.capacity())
    }

    fn refuse_beyond(&self, capacity: Bytes) {
        self.store.refuse_beyond(capacity);
    }
}

fn check(capacity: Bytes) -> Result<(), Errno> {
    if capacity.get().is_multiple_of(512) { Ok(()) } else { Err(Errno::INVAL) }
}

/// Calls `each` with the place and memory of each piece of the first `length` bytes.
fn first(
    segments: &[Segment],
    length: u64,
    mut each: impl FnMut(u64, Segment) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut done = 0;
    for segment in segments {
        let piece = (segment.len() as u64).min(length - done);
        each(done, Segment::new(segment.base(), piece as usize))?;
        done += piece;
    }
    Ok(())
}
