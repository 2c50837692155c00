//! Who runs a hardware queue, and who goes on with it.

/// Who runs the device's hardware queue.
#[derive(Debug, Clone, Copy)]
pub(super) enum Runner {
    /// A task that submits right after its last request has ended.
    Behind,
    /// A task that has slept, or waited for something else.
    Rested,
    /// A task with many requests in flight.
    Deep,
    Kblockd,
}

impl Runner {
    /// How often it leaves the queue to kblockd once it has given something to the driver, which had so many before: as
    /// another task is to have its CPU (`blk_mq_do_dispatch_sched`). The same traces, of two to six tasks.
    pub(super) const fn leaves_off(self, in_driver: u32) -> f64 {
        match (self, in_driver) {
            (Self::Kblockd, _) => 0.0,
            (Self::Deep, _) => 0.65,
            (Self::Behind, 0) => 0.9,
            (Self::Behind, 1) => 0.75,
            (Self::Behind, _) => 0.57,
            (Self::Rested, 0) => 0.12,
            (Self::Rested, 1) => 0.2,
            (Self::Rested, _) => 0.33,
        }
    }
}
