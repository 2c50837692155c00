//! Block engines: what is behind a disk of the data plane.
//!
//! - [`ram`]: memory that answers at once;
//! - [`file`](mod@file): raw images and block devices;
//! - [`emulated`]: the emulated SSD, a RAM disk that answers when the device model of the `ssd`
//!   room says so.

pub mod emulated;
pub mod file;
mod priority;
pub mod ram;
mod request;
mod store;

pub use priority::raise_thread_priority;
pub use request::{
    Completions, Engine, Geometry, Lent, Operation, Outcome, Request, Segment, Token,
};
// Whoever starts an emulated SSD says what it is like.
pub use rtvirtio_ssd::SsdConfig;
