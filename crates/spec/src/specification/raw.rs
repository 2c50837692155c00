//! The file's tables as they are written: any scalar under a known key, checked by nobody yet.
//!
//! An unknown key is refused here; everything else that can be wrong with a
//! value is left to the conversion, which can say to which VM it belongs.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use toml::Spanned;

use super::error::Found;

/// A value with its place in the text.
pub(super) type Value = Spanned<Scalar>;

/// The whole file.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a specification")]
pub(super) struct RawSpecification {
    /// The format's version: 1.
    #[cfg_attr(feature = "schema", schemars(with = "u32", range(min = 1, max = 1)))]
    pub(super) version: Option<Value>,
    /// The data plane; there if a VM is served by it.
    #[cfg_attr(feature = "schema", schemars(with = "Option<RawDataPlane>"))]
    pub(super) data_plane: Option<Spanned<RawDataPlane>>,
    /// Block devices of the host, at least one, by names that are used below.
    #[cfg_attr(feature = "schema", schemars(with = "BTreeMap<String, RawDevice>"))]
    #[serde(default)]
    pub(super) device: BTreeMap<Spanned<String>, Spanned<RawDevice>>,
    /// Virtual machines, 1 to 10,000.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<RawVm>"))]
    #[serde(default)]
    pub(super) vm: Vec<Spanned<RawVm>>,
}

/// `[data_plane]`
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [data_plane]")]
pub(super) struct RawDataPlane {
    /// Absolute path of its control socket.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub(super) control: Option<Value>,
}

/// `[device.NAME]`: a block device on which disks of VMs lie.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [device.NAME]")]
pub(super) struct RawDevice {
    /// Absolute path of its node, such as `/dev/disk/by-id/nvme-...`.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub(super) path: Option<Value>,
    /// Its profile, which `rtvirtio calibrate` makes; a relative path starts at the specification.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub(super) profile: Option<Value>,
}

/// `[[vm]]`
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[vm]]")]
pub(super) struct RawVm {
    /// Its name, which may be that of a libvirt domain.
    #[cfg_attr(feature = "schema", schemars(with = "rtvirtio_units::VmName"))]
    pub(super) name: Option<Value>,
    /// Who serves its disks: QEMU (`kernel`, the default) or `rtvirtio serve` (`vhost-user`).
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<String>", regex(pattern = "^(kernel|vhost-user)$"))
    )]
    pub(super) backend: Option<Value>,
    /// Its cgroup below the io controller's mount; `rtvirtio/NAME` if nothing says. If it is not there, the cgroup
    /// of the QEMU that runs under the VM's name is taken.
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub(super) cgroup: Option<Value>,
    /// Its virtual CPUs; IOThreads are planned for VMs that say.
    #[cfg_attr(feature = "schema", schemars(with = "Option<u32>", range(min = 1, max = 512)))]
    pub(super) vcpus: Option<Value>,
    /// Whether the schedulers within its guest are set too, through the guest's agent; no if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
    pub(super) guest_agent: Option<Value>,
    /// Its disks, 1 to 64.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<RawDisk>"))]
    #[serde(default)]
    pub(super) disk: Vec<Spanned<RawDisk>>,
    /// What it does, 0 to 64 tasks; a VM without one is background of unknown load.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<RawTask>"))]
    #[serde(default)]
    pub(super) task: Vec<Spanned<RawTask>>,
}

/// `[[vm.disk]]`
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[vm.disk]]")]
pub(super) struct RawDisk {
    /// Its name within the VM; what the data plane serves has the name of its device there.
    #[cfg_attr(feature = "schema", schemars(with = "rtvirtio_units::Name"))]
    pub(super) name: Option<Value>,
    /// The device on which it lies: a NAME of `[device.NAME]`.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub(super) device: Option<Value>,
    /// Its virtqueues; QEMU's default if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<u32>", range(min = 1, max = 1024)))]
    pub(super) queues: Option<Value>,
}

/// `[[vm.task]]`
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[vm.task]]")]
pub(super) struct RawTask {
    /// Its name within the VM.
    #[cfg_attr(feature = "schema", schemars(with = "rtvirtio_units::Name"))]
    pub(super) name: Option<Value>,
    /// Its disk; the VM's only one if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub(super) disk: Option<Value>,
    /// How its requests are told from others of the VM: by its disk (`disk`), or on the data plane by the
    /// I/O priority that the guest gives them (`ioprio:rt/0`). If nothing says, the VM's strictest target
    /// holds for all that it does.
    #[cfg_attr(
        feature = "schema",
        schemars(
            with = "Option<String>",
            regex(pattern = "^(disk|ioprio:(rt/[0-7]|be/[0-7]|idle))$")
        )
    )]
    pub(super) recognise: Option<Value>,
    /// Requests a second that it issues; as many as it can if nothing says.
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<f64>", range(min = 0.001, max = 100000000))
    )]
    pub(super) iops: Option<Value>,
    /// Bytes of a request, in whole sectors of 512, to 16 MiB: a number or a text such as `"4k"`; 4 KiB if
    /// nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::serve::wire::Size>"))]
    pub(super) block_size: Option<Value>,
    /// Reads among its requests, %; 70 if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<u32>", range(max = 100)))]
    pub(super) read_percent: Option<Value>,
    /// Requests in flight; 1 if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<u32>", range(min = 1, max = 1024)))]
    pub(super) queue_depth: Option<Value>,
    /// How long its requests may take; without one it is background load.
    #[cfg_attr(feature = "schema", schemars(with = "Option<RawTarget>"))]
    pub(super) target: Option<Spanned<RawTarget>>,
}

/// `target = { ... }`
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table { percentile = ..., latency_ms = ... }")]
pub(super) struct RawTarget {
    /// Which percentile of its latencies; 99.99 if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>", range(min = 50, max = 99.9999)))]
    pub(super) percentile: Option<Value>,
    /// How long that may take, ms.
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0.000001, max = 3600000)))]
    pub(super) latency_ms: Option<Value>,
    /// How sure the bound must be; 0.95 if nothing says.
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>", range(min = 0.5, max = 0.999)))]
    pub(super) confidence: Option<Value>,
}

/// A TOML scalar, or the mark of something that is none.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scalar {
    /// Any integer that TOML gives.
    Integer(i128),
    /// Any float, NaN and infinities among them.
    Float(f64),
    /// A string.
    Text(String),
    /// `true` or `false`.
    Boolean(bool),
    /// An array, whose items are not read.
    List,
    /// A table or a date (a date arrives as a table), whose items are not read.
    Table,
}

impl Scalar {
    /// What it is, for messages.
    pub(super) fn found(&self) -> Found {
        match self {
            Self::Integer(value) => Found::Integer(*value),
            Self::Float(value) => Found::Float(*value),
            Self::Text(text) => Found::Text(text.clone()),
            Self::Boolean(value) => Found::Boolean(*value),
            Self::List => Found::List,
            Self::Table => Found::Table,
        }
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Boolean(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value.into()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Scalar, E> {
        Ok(Scalar::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Scalar, A::Error> {
        Ok(Scalar::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Scalar, A::Error> {
        Ok(Scalar::Table)
    }
}
