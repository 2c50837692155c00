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
#[serde(deny_unknown_fields, expecting = "a specification")]
pub(super) struct RawSpecification {
    pub(super) version: Option<Value>,
    pub(super) data_plane: Option<Spanned<RawDataPlane>>,
    #[serde(default)]
    pub(super) device: BTreeMap<Spanned<String>, Spanned<RawDevice>>,
    #[serde(default)]
    pub(super) vm: Vec<Spanned<RawVm>>,
}

/// `[data_plane]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [data_plane]")]
pub(super) struct RawDataPlane {
    pub(super) control: Option<Value>,
}

/// `[device.NAME]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [device.NAME]")]
pub(super) struct RawDevice {
    pub(super) path: Option<Value>,
    pub(super) profile: Option<Value>,
}

/// `[[vm]]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [[vm]]")]
pub(super) struct RawVm {
    pub(super) name: Option<Value>,
    pub(super) backend: Option<Value>,
    pub(super) cgroup: Option<Value>,
    pub(super) vcpus: Option<Value>,
    pub(super) guest_agent: Option<Value>,
    #[serde(default)]
    pub(super) disk: Vec<Spanned<RawDisk>>,
    #[serde(default)]
    pub(super) task: Vec<Spanned<RawTask>>,
}

/// `[[vm.disk]]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [[vm.disk]]")]
pub(super) struct RawDisk {
    pub(super) name: Option<Value>,
    pub(super) device: Option<Value>,
    pub(super) queues: Option<Value>,
}

/// `[[vm.task]]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [[vm.task]]")]
pub(super) struct RawTask {
    pub(super) name: Option<Value>,
    pub(super) disk: Option<Value>,
    pub(super) recognise: Option<Value>,
    pub(super) iops: Option<Value>,
    pub(super) block_size: Option<Value>,
    pub(super) read_percent: Option<Value>,
    pub(super) queue_depth: Option<Value>,
    pub(super) target: Option<Spanned<RawTarget>>,
}

/// `target = { ... }`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table { percentile = ..., latency_ms = ... }")]
pub(super) struct RawTarget {
    pub(super) percentile: Option<Value>,
    pub(super) latency_ms: Option<Value>,
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
