//! A disk in memory that answers at once: what the data plane itself costs.

use rtvirtio_units::Bytes;
use rustix::io::Errno;

use crate::store::Store;
use crate::{
    Cost, Engine, Geometry, Operation, Outcome, Request, ResizeError, SizeError, SubmitContext,
    TransferLimits,
};

/// Bytes of memory that are given back at once.
pub(crate) const MAX_DISCARD: u64 = 16 << 20;

/// A disk in memory.
#[derive(Debug)]
pub struct RamEngine {
    store: Store,
    cost: Cost,
}

impl RamEngine {
    /// A disk of zeroes whose requests cost so much on top, or (zero) nothing.
    ///
    /// # Errors
    /// `EINVAL` if the capacity is not a multiple of 512, `ENOMEM` without address space.
    pub fn new(capacity: Bytes, cost: impl Into<Cost>) -> std::io::Result<Self> {
        if !capacity.get().is_multiple_of(512) {
            return Err(Errno::INVAL.into());
        }
        Ok(Self { store: Store::new(capacity)?, cost: cost.into() })
    }
}

impl Engine for RamEngine {
    fn geometry(&self) -> Geometry {
        Geometry {
            capacity: self.store.capacity(),
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            discard: true,
        }
    }

    /// Ranges are zeroed and given back on the thread that asks: no more of them at a time than takes a few
    /// milliseconds.
    fn transfer_limits(&self) -> TransferLimits {
        TransferLimits { discard: MAX_DISCARD, zeroes: MAX_DISCARD, ..TransferLimits::default() }
    }

    fn writes_zeroes(&self, unmap: bool) -> bool {
        !unmap
    }

    fn start(&self, request: &Request<'_>, _lent: &mut SubmitContext<'_, '_>) -> Outcome {
        self.cost.burn(request);
        Outcome::Done(match request.operation {
            Operation::Read => self.store.read(request.offset, request.segments),
            Operation::Write { .. } => self.store.write(request.offset, request.segments),
            Operation::Flush => Ok(()),
            Operation::Discard => self.store.zero(request.offset, request.length, true),
            Operation::WriteZeroes { unmap, .. } => {
                self.store.zero(request.offset, request.length, unmap)
            }
        })
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
