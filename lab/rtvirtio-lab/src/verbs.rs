//! One module a verb: its arguments and what it does.

pub(crate) mod bench;
pub(crate) mod demo;
mod guests;
pub(crate) mod report;
pub(crate) mod scratch;
pub(crate) mod simulate;
