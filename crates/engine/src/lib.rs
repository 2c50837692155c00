//! Block engines. For now one: the emulated SSD, a RAM disk that answers when
//! the device model of the `ssd` room says so.

pub mod emulated;
mod priority;
mod request;

pub use priority::raise_thread_priority;
pub use request::{
    Completions, Engine, Geometry, Lent, Operation, Outcome, Request, Segment, Token,
};
// Whoever starts an emulated SSD says what it is like.
pub use rtvirtio_ssd::SsdConfig;
