//! One module a verb: its arguments and what it does.

pub(crate) mod apply;
pub(crate) mod bench;
pub(crate) mod boot;
pub(crate) mod calibrate;
pub(crate) mod ctl;
pub(crate) mod demo;
pub(crate) mod doctor;
mod guests;
pub(crate) mod mapping;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod scratch;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod tree;
pub(crate) mod watch;
