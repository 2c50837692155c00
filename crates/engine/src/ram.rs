//! A disk in memory that answers at once: what the data plane itself costs.

use std::time::Duration;

use rtvirtio_units::Bytes;
use rustix::io::Errno;
use rustix::time::ClockId;

use crate::store::Store;
use crate::{Engine, Geometry, Lent, Operation, Outcome, Request};

/// A disk in memory.
#[derive(Debug)]
pub struct RamEngine {
    store: Store,
    cpu: Duration,
}

impl RamEngine {
    /// A disk of zeroes. Each request burns `cpu` of processor time on the thread that starts it
    /// (zero for none): for benchmarks of engines that cost.
    ///
    /// # Errors
    /// `EINVAL` if the capacity is not a multiple of 512, `ENOMEM` without address space.
    pub fn new(capacity: Bytes, cpu: Duration) -> std::io::Result<Self> {
        if !capacity.get().is_multiple_of(512) {
            return Err(Errno::INVAL.into());
        }
        Ok(Self { store: Store::new(capacity)?, cpu })
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

    fn start(&self, request: &Request<'_>, _lent: &mut Lent<'_, '_>) -> Outcome {
        if !self.cpu.is_zero() {
            burn(self.cpu);
        }
        Outcome::Done(match request.operation {
            Operation::Read => self.store.read(request.offset, request.segments),
            Operation::Write { .. } => self.store.write(request.offset, request.segments),
            Operation::Flush => Ok(()),
            Operation::Discard => self.store.zero(request.offset, request.length, true),
            Operation::WriteZeroes { unmap } => {
                self.store.zero(request.offset, request.length, unmap)
            }
        })
    }

    /// Grows up to 16 times the first capacity; shrinking drops what is cut off.
    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        if let Some(capacity) = capacity {
            if !capacity.get().is_multiple_of(512) {
                return Err(Errno::INVAL.into());
            }
            self.store.resize(capacity)?;
        }
        Ok(self.store.capacity())
    }
}

/// Burns processor time, which is less than the time that passes if the thread is preempted.
fn burn(cpu: Duration) {
    let until = thread_time() + cpu;
    while thread_time() < until {
        std::hint::spin_loop();
    }
}

fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
