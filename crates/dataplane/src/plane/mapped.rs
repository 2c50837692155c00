//! A device's queues, as far as their IOThreads are concerned.

use crate::pool::{MoveError, ThreadId};

/// A device's queues, as far as their IOThreads are concerned.
pub(crate) trait MappedHost: Send + Sync {
    /// Serves a queue by another thread, now and in later sessions. How long nobody served it, ns.
    fn assign(&self, index: u16, to: ThreadId) -> Result<u64, MoveError>;

    /// The process of the front end that is connected, if it is known.
    fn peer(&self) -> Option<i32>;

    /// Tells of queues that their drivers broke since the last time. Never waits: who calls this also frees threads
    /// that somebody here may be waiting for.
    fn report_broken_queues(&self);
}
