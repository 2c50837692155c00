//! Engines under the hands of something like an IOThread.

mod driver;
mod every_engine;
mod faults;
mod images;
mod locks;
mod nvme;
mod scratch;
