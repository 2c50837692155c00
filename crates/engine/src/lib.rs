//! Block engines: what is behind a disk of the data plane.
//!
//! - [`ram`]: memory that answers at once;
//! - [`file`](mod@file): raw images and block devices;
//! - [`nvme`]: namespaces of NVMe devices, past the kernel's block layer;
//! - [`ssd`]: the emulated SSD, memory that answers when the device model of the `ssd` room says
//!   so, and fails when asked to; [`emulated`] is the same for the bench's FUSE disk;
//! - [`slice`](mod@slice): a part of another engine's disk.
//!
//! RAM and the emulated SSD can cost processor time on top ([`Cost`]): for benchmarks.

mod commands;
mod cost;
pub mod emulated;
mod fatal;
pub mod file;
pub mod nvme;
mod priority;
pub mod ram;
mod request;
pub mod slice;
pub mod ssd;
mod store;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
mod timed;

pub use commands::CommandRing;
pub use cost::Cost;
pub use fatal::AbortOnPanic;
pub use priority::raise_thread_priority;
pub use request::{
    Commands, Completions, Engine, Geometry, Operation, Outcome, Request, ResizeError,
    SCRATCH_BYTES, SizeError, SubmitContext, Token, TransferLimits,
};
// What requests are made of.
pub use rtvirtio_virtq::Segment;
// Whoever starts an emulated SSD says what it is like.
pub use rtvirtio_ssd::SsdConfig;
