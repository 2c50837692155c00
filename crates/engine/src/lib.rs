//! Block engines. For now one: the emulated SSD, a RAM disk that answers when
//! the device model of the `ssd` room says so.

mod emulated;
mod priority;

pub use emulated::{Completion, EmulatedSsd, EngineError, Operation, Outcome};
pub use priority::raise_thread_priority;
// Whoever starts an emulated SSD says what it is like.
pub use rtvirtio_ssd::SsdConfig;
