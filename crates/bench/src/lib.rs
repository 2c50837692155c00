//! Benchmarks on a host: scratch disks, load, calibration, campaigns, report.
//!
//! - [`scratch`]: a disk to try things on.
//! - [`guests`]: real virtual machines for a load.
//! - [`load`]: one cell's load, by fio in cgroups or in guests.
//! - [`cell`]: one case under one scheme: apply, load, judge.
//! - [`calibrate`]: measures a device and fits the models: a profile.
//! - [`iocores`]: the data plane's number of IOThreads on trial, beside the simulator.
//! - [`iothreads`]: what a queue mapping costs and carries.
//! - [`campaign`]: cells in random order, resumable, as JSONL.
//! - [`closed_loop`]: `watch --control` on trial.
//! - [`completion`]: how threads learn that their I/O has ended, beside threads that compute.
//! - [`dataplane`]: a vhost-user-blk server beside its peers, and whether it loses data.
//! - [`report`]: one HTML file, and a table for a terminal.

pub mod calibrate;
pub mod campaign;
pub mod cell;
pub mod closed_loop;
pub mod completion;
mod confine;
pub mod dataplane;
pub mod guests;
pub mod iocores;
pub mod iothreads;
mod lines;
pub mod load;
pub mod path;
pub mod progress;
pub mod qos;
pub mod report;
pub mod scratch;
pub mod verdict;
