//! Experiments, and the harness that all of them share; what they run on is `rtvirtio_testbed`'s.
//!
//! - [`campaign`]: cases under schemes of the kernel path and the data plane. [`cell`]: how one is judged.
//! - [`qos`]: what the data plane promises, kept or not.
//! - [`iocores`]: the data plane's number of IOThreads on trial, beside the simulator.
//! - [`iothreads`]: what a queue mapping costs and carries.
//! - [`closed_loop`]: `watch --control` on trial.
//! - [`completion`]: how threads learn that their I/O has ended, beside threads that compute.
//! - [`dataplane`]: a vhost-user-blk server beside its peers, and whether it loses data.
//! - [`path`]: the simulated two-tier path beside cells that were measured.
//! - [`report`]: a page of cells.
//!
//! What all of them share:
//!
//! - [`experiment`]: cells by their names, measured once each, in an order that interleaves what is compared.
//! - [`stats`], [`table`], `plot`, [`verdict`]: medians and intervals, and what results are shown by.

pub mod campaign;
pub mod cell;
pub mod closed_loop;
pub mod completion;
pub mod dataplane;
pub mod experiment;
pub mod iocores;
pub mod iothreads;
mod lines;
pub mod path;
mod plot;
pub mod qos;
pub mod report;
pub mod stats;
pub mod table;
pub mod verdict;
