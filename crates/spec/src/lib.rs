//! The types that rooms exchange and the file formats that users keep.
//!
//! - [`specification`]: what an operator wants (TOML), hostile until parsed.
//! - [`settings`]: every knob rtvirtio may set, as typed values and as the
//!   flat [`settings::Knobs`] map that a host observes and writes.
//! - [`guests`]: the knobs that are a VM's own, within its guest and its QEMU.
//! - [`profile`]: what calibration learned of a device (JSON).
//! - [`learned`]: what a learned model says of itself (JSON within ONNX).
//! - [`plan`]: settings chosen for a specification, with predictions (JSON).
//! - [`run`]: what a benchmark measured, one JSON record a cell.
//! - [`serve`]: what the data plane serves (TOML), hostile until parsed.
//! - [`mapping`]: which IOThread serves each virtqueue, in three formats.
//! - [`control`]: what the data plane's control API says and takes (JSON).
//! - [`latency`]: a mergeable latency histogram and its percentiles.
//!
//! Formats live here and not in their writers, so that a reader needs no
//! other room. Every file carries a version; a reader refuses one it does not
//! know.

pub mod control;
pub mod cpulist;
pub mod guests;
pub mod latency;
pub mod learned;
pub mod mapping;
pub mod plan;
pub mod profile;
#[cfg(feature = "schema")]
pub mod reference;
pub mod run;
pub mod serve;
pub mod settings;
pub mod specification;
