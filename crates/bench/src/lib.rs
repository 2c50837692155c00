//! bench.

pub mod report;
pub mod scratch;
