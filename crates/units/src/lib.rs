//! Quantities and identifiers that every room shares.
//!
//! Each is a newtype with a private field: a value that exists is a value in
//! range. Nothing dereferences to the bare number; `get` (or a named
//! conversion) is the one way out. On the wire a quantity is its bare number
//! in the unit that its type documents.

mod id;
mod name;
mod quantity;

pub use id::{CpuId, IoThreadId};
pub use name::{DeviceName, DiskName, IoThreadName, Name, NameError, TaskName, VmName};
pub use quantity::{
    Bytes, BytesPerSecond, Confidence, Iops, Nanos, Percentile, QuantityError, Weight,
};
