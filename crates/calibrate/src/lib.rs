//! Measures a block device under load and fits the models: a profile.
//!
//! - [`calibration`]: which runs, in which order, until the models have enough.
//! - [`testbed`]: takes a host and a device for measurements, and gives them back.
//! - [`load`]: VMs' tasks as fio jobs in cgroups, and what they measured.
//! - [`in_use`]: a disk in use, measured in a file of its own beside those who use it.
//! - [`neighbours`]: those who use it, who must not notice.
//! - [`observed`]: a profile from watching a disk in use, without a request of one's own.
//! - [`device`]: whether a device may be taken.
//! - [`confine`]: child processes that stay where they are put.

// Its macros take the place of the standard library's, which panic where they cannot print.
#[macro_use]
extern crate rtvirtio_cli;

pub mod calibration;
pub mod confine;
pub mod device;
pub mod in_use;
pub mod load;
pub mod neighbours;
pub mod observed;
pub mod testbed;
