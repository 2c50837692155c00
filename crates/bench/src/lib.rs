//! bench.

pub mod report;
