//! I/O priorities as a Linux guest puts them into its requests (`include/uapi/linux/ioprio.h`).

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer};
use serde::{Serialize, Serializer};

const REALTIME: u16 = 1;
const BEST_EFFORT: u16 = 2;
const IDLE: u16 = 3;
const CLASS_SHIFT: u32 = 13;
const LEVELS: u16 = 8;

/// A class and, but for idle, a level: `rt/0` to `rt/7`, `be/0` to `be/7`, `idle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoPriority {
    class: u16,
    level: u16,
}

impl IoPriority {
    /// What the field `ioprio` of a virtio-blk request's header says; `None`: nothing. Hints, the
    /// bits between class and level, are left aside, and so is the level of idle.
    #[must_use]
    pub fn from_header(field: u32) -> Option<Self> {
        let value = u16::try_from(field).ok()?;
        match value >> CLASS_SHIFT {
            class @ (REALTIME | BEST_EFFORT) => Some(Self { class, level: value % LEVELS }),
            IDLE => Some(Self { class: IDLE, level: 0 }),
            _ => None,
        }
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for IoPriority {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "IoPriority".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^(rt/[0-7]|be/[0-7]|idle)$" })
    }
}

impl fmt::Display for IoPriority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.class {
            REALTIME => write!(f, "rt/{}", self.level),
            BEST_EFFORT => write!(f, "be/{}", self.level),
            _ => f.write_str("idle"),
        }
    }
}

impl FromStr for IoPriority {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str =
            "not an I/O priority: write \"rt/0\" to \"rt/7\", \"be/0\" to \"be/7\" or \"idle\"";
        let (class, level) = match text.split_once('/') {
            Some(("rt", level)) => (REALTIME, level),
            Some(("be", level)) => (BEST_EFFORT, level),
            None if text == "idle" => (IDLE, "0"),
            _ => return Err(WRONG),
        };
        match level.as_bytes() {
            [digit @ b'0'..=b'7'] => Ok(Self { class, level: u16::from(digit - b'0') }),
            _ => Err(WRONG),
        }
    }
}

impl Serialize for IoPriority {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IoPriority {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_read_as_ionice_says_them_and_as_linux_encodes_them() {
        for (text, field) in [
            ("rt/0", 0x2000),
            ("rt/7", 0x2007),
            ("be/4", 0x4004),
            ("idle", 0x6000),
            // A level of idle, and a duration limit hint.
            ("idle", 0x6007),
            ("rt/1", 0x2009),
        ] {
            let read: IoPriority = text.parse().unwrap();
            assert_eq!(IoPriority::from_header(field), Some(read), "{text}");
            assert_eq!(read.to_string(), text);
        }
        for field in [0, 7, 0x8000, 0xffff, 0x1_2000, u32::MAX] {
            assert_eq!(IoPriority::from_header(field), None, "{field:#x}");
        }
        for wrong in ["", "rt", "rt/", "rt/8", "rt/00", "idle/0", "none/0", "RT/0", "be/-1"] {
            assert!(wrong.parse::<IoPriority>().is_err(), "{wrong}");
        }
    }
}
