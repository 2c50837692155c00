//! QEMU processes on this host, their monitors, and the agents in their guests.
//!
//! - [`discover`]: which QEMU processes run, and how each can be reached;
//! - [`Monitor`]: QEMU's own control (QMP): IOThreads, block devices, latency
//!   histograms, throttling;
//! - [`Agent`]: files and programs within a guest, through `qemu-ga`.
//!
//! Terms: a *peer* is the other end of a conversation, which is not trusted: a
//! guest agent belongs to its guest, and a socket may be anybody's. A *request*
//! is one command; a *message* is one line of a peer.
//!
//! Each request has one deadline over all its reads and writes, and a message
//! has at most [`LARGEST_MESSAGE`] bytes. Where libvirt holds the sockets, the
//! same commands go through `virsh`.

mod agent;
pub mod discover;
pub(crate) mod error;
pub mod libvirt;
mod monitor;
mod part;
mod peer;
mod reply;
#[cfg(test)]
mod tests;
mod virsh;

pub use agent::{Agent, ExecStatus, GuestDisk, Output};
pub use discover::{QemuDisk, QemuProcess};
pub use error::{Address, Domain, Fault, QemuError};
pub use monitor::{
    Block, BlockStatistics, Histogram, IoThread, LatencyHistograms, MappedQueues, Monitor,
    PciAddress, Status, Throttle, Version,
};
pub use part::{Medium, Part};
pub(crate) use peer::Deadline;
pub use peer::LARGEST_MESSAGE;
#[cfg(test)]
pub(crate) use tests::{Wire, refusal};
