//! Benchmarks on a host: scratch disks, guests, campaigns, report.
//!
//! - [`scratch`]: a disk to try things on.
//! - [`guests`]: real virtual machines for a load.
//! - [`cell`]: one case under one scheme: apply, load, judge.
//! - [`iocores`]: the data plane's number of IOThreads on trial, beside the simulator.
//! - [`iothreads`]: what a queue mapping costs and carries.
//! - [`campaign`]: cells in random order, resumable, as JSONL.
//! - [`closed_loop`]: `watch --control` on trial.
//! - [`completion`]: how threads learn that their I/O has ended, beside threads that compute.
//! - [`dataplane`]: a vhost-user-blk server beside its peers, and whether it loses data.
//! - [`report`]: a page of cells.
//!
//! What all of them share:
//!
//! - [`experiment`]: cells by their names, measured once each, in an order that interleaves what is compared.
//! - `window`: what the threads of a measurement look at and count.
//! - [`stats`], [`table`], `plot`, [`verdict`]: medians and intervals, and what results are shown by.

// First: its macro is used by the others.
#[macro_use]
mod named;

pub mod campaign;
pub mod cell;
pub mod closed_loop;
pub mod completion;
pub mod dataplane;
pub mod experiment;
pub mod guests;
pub mod iocores;
pub mod iothreads;
mod lines;
pub mod path;
mod plot;
pub mod qos;
pub mod report;
pub mod scratch;
pub mod stats;
pub mod table;
pub mod verdict;
mod window;
