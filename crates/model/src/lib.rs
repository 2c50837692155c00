//! Tail-latency models of one shared device.
//!
//! From the plainest to what the planner uses:
//! - [`paper`]: Eq. 1–5 of RT-VirtIO with Table III's λ or refit ones, in the
//!   printed reading and the corrected one.
//! - [`structural`]: what measurement showed: base response plus the times in
//!   which a request cannot be served (bursts, idling, stalls, a flood).
//! - [`learned`]: any regressor in an ONNX file, asked by [`features`].
//! - [`conformal`]: a one-sided bound on top of each.
//!
//! All speak of a [`DeviceLoad`]: the VMs that share a device, what they do
//! and how they are set. Pure: no clock, no file, no random source.

pub mod conformal;
pub mod features;
pub mod learned;
mod load;
pub mod paper;
pub mod structural;

pub use load::{DeviceLoad, Stream, VmLoad};

use rtvirtio_spec::profile::Regime;
use rtvirtio_units::Nanos;

/// What a model says of one stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Expected value of the percentile that was asked for.
    pub tail: Nanos,
    /// Fraction of the declared rate that is delivered, 0 to 1.
    pub delivered: f64,
    /// What dominates the tail.
    pub regime: Regime,
}
