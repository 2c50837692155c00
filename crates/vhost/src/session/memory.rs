//! The memory that a session's rings and their requests lie in.

use std::sync::Arc;

use rtvirtio_units::Bytes;
use rtvirtio_virtq::memory::{Memory, MemoryError, RegionSpec};

use super::{Change, QueueHost, Refused, Session};
use crate::protocol::features;

impl<H: QueueHost> Session<H> {
    /// Whether the device allows so much memory, which is looked at before any of it is mapped.
    pub(super) fn fits_memory(&self, regions: &[RegionSpec]) -> Result<(), MemoryError> {
        let limit = self.device.memory_limit();
        let sizes = regions.iter().map(|region| region.size);
        let total = sizes.fold(0_u64, u64::saturating_add);
        if total <= limit.get() {
            Ok(())
        } else {
            Err(MemoryError::TooMuch { total: Bytes::new(total), limit })
        }
    }

    /// Memory of which nothing is missing that rings use.
    pub(super) fn share_memory(&mut self, memory: Memory) -> Result<(), Refused> {
        self.set_memory(memory, Change::Memory)
    }

    /// Other memory: rings that run are drained. Those that lie in it go on, without a moment in which they are not there: a
    /// network would drop what is sent to one that stops.
    pub(super) fn replace_memory(&mut self, memory: Memory) -> Result<(), Refused> {
        for index in 0..self.vrings.len() {
            if !self.goes_on_in(&memory, index) {
                self.stop(index);
            }
        }
        self.set_memory(memory, Change::Replaced)?;
        self.start_all()
    }

    /// Whether a ring runs and stays what it is in this memory.
    fn goes_on_in(&self, memory: &Memory, index: usize) -> bool {
        let vring = &self.vrings[index];
        let (Some(key), Some(size), Some(address)) = (vring.running, vring.size, vring.address)
        else {
            return false;
        };
        let config = self.config(size, address, vring.base);
        config.stays(&self.memory, memory) && !self.host.is_broken(key)
    }

    fn set_memory(
        &mut self,
        memory: Memory,
        change: fn(Arc<Memory>) -> Change,
    ) -> Result<(), Refused> {
        let logs = self.features & features::LOG_ALL != 0;
        let log = self.log.as_ref().filter(|_| logs).cloned();
        let memory = Arc::new(memory.with_log(log));
        // It is registered for the first of them, and refused there if at all.
        for index in 0..self.vrings.len() {
            self.update(index, change(Arc::clone(&memory)))?;
        }
        self.memory = memory;
        Ok(())
    }
}
