//! Engines under the hands of something like an IOThread.

mod driver;
mod every_engine;
mod faults;
mod images;
mod locks;
mod nvme;
mod scratch;
// The library has it for its unit tests, and by a feature for other crates: this binary may have neither.
#[path = "../../src/testing.rs"]
pub mod testing;
