//! Where on the host a block device's bytes lie, from what QEMU says of it.
//!
//! QEMU describes a chain of block nodes by a file's name where that says it all,
//! else by `json:` and the nodes' options (qemu-block-drivers(7)). Only nodes that
//! hand on bytes as they are, at most shifted, leave a disk in one piece: `raw`,
//! and filters that delay or copy. A format such as qcow2 scatters it.
//!
//! Properties: `each_chain_of_plain_nodes_is_followed`,
//! `formats_and_other_protocols_have_no_part`, `hostile_descriptions_do_no_harm`.

use std::path::PathBuf;

use rtvirtio_units::Bytes;
use serde_json::Value;

use super::Block;

/// A piece of a host's file or device, byte for byte a block device of QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The file or device; its path is absolute.
    pub file: PathBuf,
    /// Where it begins.
    pub offset: Bytes,
    /// How long it is; `None`: to the end.
    pub size: Option<Bytes>,
}

impl Part {
    /// All of a file or device.
    #[must_use]
    pub fn whole(file: impl Into<PathBuf>) -> Self {
        Self { file: file.into(), offset: Bytes::new(0), size: None }
    }
}

/// What a block device of QEMU ends in, whatever formats and filters lie between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Medium {
    /// A file or device; its path may be relative to QEMU's directory.
    File(PathBuf),
    /// A protocol that QEMU itself speaks, such as `rbd` or `nbd`.
    Protocol(String),
    /// Nothing is inserted.
    Absent,
}

impl Block {
    /// What it ends in.
    #[must_use]
    pub fn medium(&self) -> Medium {
        let Some(text) = self.file.as_deref() else { return Medium::Absent };
        if let Some(text) = text.strip_prefix("json:") {
            let node = serde_json::from_str(text).ok();
            let unknown = || Medium::Protocol("unknown".to_owned());
            return node.as_ref().and_then(bottom).unwrap_or_else(unknown);
        }
        // As QEMU's own rule has it (path_has_protocol): a protocol ends in a colon before any slash.
        match text.split_once(':') {
            Some(("file", path)) => Medium::File(path.into()),
            Some((protocol, _)) if !protocol.is_empty() && !protocol.contains('/') => {
                Medium::Protocol(protocol.to_owned())
            }
            _ => Medium::File(text.into()),
        }
    }

    /// Where its bytes lie; `None`: not in one piece of a file or device.
    #[must_use]
    pub fn part(&self) -> Option<Part> {
        let (driver, file) = (self.driver.as_deref()?, self.file.as_deref()?);
        let part = match file.strip_prefix("json:") {
            Some(text) => follow(&serde_json::from_str(text).ok()?),
            None if ["raw", "host_device", "file"].contains(&driver) => Some(Part::whole(file)),
            None => None,
        }?;
        part.file.is_absolute().then_some(part)
    }
}

/// The parser refuses deep nesting, which bounds the recursion.
fn bottom(node: &Value) -> Option<Medium> {
    if let Some(file) = node.get("file") {
        return match file {
            Value::String(path) => Some(Medium::File(path.into())),
            node => bottom(node),
        };
    }
    let driver = node.get("driver")?.as_str()?;
    Some(match (driver, node.get("filename").and_then(Value::as_str)) {
        ("file" | "host_device" | "host_cdrom", Some(path)) => Medium::File(path.into()),
        (driver, _) => Medium::Protocol(driver.to_owned()),
    })
}

/// The parser refuses deep nesting, which bounds the recursion.
fn follow(node: &Value) -> Option<Part> {
    match node.get("driver")?.as_str()? {
        "host_device" | "file" => Some(Part::whole(node.get("filename")?.as_str()?)),
        "throttle" | "copy-on-read" => follow(node.get("file")?),
        "raw" => {
            let below = follow(node.get("file")?)?;
            let offset = number(node.get("offset"))?.unwrap_or(0);
            let size = match (number(node.get("size"))?, below.size) {
                (None, Some(all)) => Some(all.get().checked_sub(offset)?),
                (size, _) => size,
            };
            let offset = Bytes::new(below.offset.get().checked_add(offset)?);
            Some(Part { file: below.file, offset, size: size.map(Bytes::new) })
        }
        _ => None,
    }
}

/// A number or its text, as options of `-drive` are; the outer `None`: it is neither.
fn number(value: Option<&Value>) -> Option<Option<u64>> {
    match value {
        None => Some(None),
        Some(Value::String(text)) => text.parse().ok().map(Some),
        Some(value) => value.as_u64().map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::Throttle;
    use proptest::prelude::*;

    fn part_of(driver: &str, file: &str) -> Option<Part> {
        let block = Block {
            qom_path: None,
            device: String::new(),
            node: None,
            driver: Some(driver.to_owned()),
            file: Some(file.to_owned()),
            throttle: Throttle::default(),
        };
        block.part()
    }

    fn part(offset: u64, size: Option<u64>) -> Option<Part> {
        let size = size.map(Bytes::new);
        Some(Part { file: "/dev/loop0".into(), offset: Bytes::new(offset), size })
    }

    #[test]
    fn each_chain_of_plain_nodes_is_followed() {
        // Texts as QEMU 10.0.2 writes them.
        let slice = r#"json:{"offset": 1048576, "driver": "raw", "size": 2097152, "file": {"driver": "host_device", "filename": "/dev/loop0"}}"#;
        let behind = r#"json:{"throttle-group": "tg0", "driver": "throttle", "file": {"offset": 4194304, "driver": "raw", "file": {"driver": "host_device", "filename": "/dev/loop0"}}}"#;
        let twice = r#"json:{"driver": "raw", "offset": "512", "file": {"driver": "raw", "offset": 1024, "size": 4096, "file": {"driver": "file", "filename": "/dev/loop0"}}}"#;
        for (driver, file, expected) in [
            ("raw", "/dev/loop0", part(0, None)),
            ("host_device", "/dev/loop0", part(0, None)),
            ("raw", slice, part(1_048_576, Some(2_097_152))),
            ("throttle", behind, part(4_194_304, None)),
            ("raw", twice, part(1536, Some(3584))),
        ] {
            assert_eq!(part_of(driver, file), expected, "{file}");
        }
    }

    #[test]
    fn formats_and_other_protocols_have_no_part() {
        for (driver, file) in [
            ("qcow2", "/dev/vg/plc"),
            ("raw", "disk.img"),
            ("raw", "rbd:pool/image"),
            ("nbd", "nbd://host/disk"),
            (
                "throttle",
                r#"json:{"driver": "throttle", "file": {"driver": "qcow2", "file": {"driver": "host_device", "filename": "/dev/loop0"}}}"#,
            ),
        ] {
            assert_eq!(part_of(driver, file), None, "{file}");
        }
    }

    #[test]
    fn what_a_disk_ends_in_is_found_through_formats_and_filters() {
        let medium = |file: &str| {
            let block = Block {
                qom_path: None,
                device: String::new(),
                node: None,
                driver: None,
                file: Some(file.to_owned()),
                throttle: Throttle::default(),
            };
            block.medium()
        };
        let file = |path: &str| Medium::File(path.into());
        let qcow2 = r#"json:{"driver": "throttle", "file": {"driver": "qcow2", "file": {"driver": "file", "filename": "/vm/a:b.qcow2"}}}"#;
        let nbd = r#"json:{"driver": "raw", "file": {"driver": "nbd", "host": "h"}}"#;
        assert_eq!(medium("/vm/db.qcow2"), file("/vm/db.qcow2"));
        assert_eq!(medium("./a:b.img"), file("./a:b.img"));
        assert_eq!(medium("file:db.img"), file("db.img"));
        assert_eq!(medium(qcow2), file("/vm/a:b.qcow2"));
        assert_eq!(medium("rbd:pool/image"), Medium::Protocol("rbd".to_owned()));
        assert_eq!(medium(nbd), Medium::Protocol("nbd".to_owned()));
        assert_eq!(medium("json:{"), Medium::Protocol("unknown".to_owned()));
    }

    #[test]
    fn hostile_descriptions_do_no_harm() {
        let raw = |rest: &str| {
            format!(
                r#"json:{{"driver": "raw", {rest} "file": {{"driver": "file", "filename": "/dev/loop0"}}}}"#
            )
        };
        for rest in [r#""offset": -1,"#, r#""offset": "1M","#, r#""size": [],"#, r#""size": 1e9,"#]
        {
            assert_eq!(part_of("raw", &raw(rest)), None, "{rest}");
        }
        let over = r#"json:{"driver": "raw", "offset": 18446744073709551615, "file": {"driver": "raw", "offset": 1, "file": {"driver": "file", "filename": "/dev/loop0"}}}"#;
        assert_eq!(part_of("raw", over), None);
        let deep = format!("json:{}", r#"{"driver": "raw", "file": "#.repeat(100_000));
        assert_eq!(part_of("raw", &deep), None);
        // QEMU cuts a description that is too long for it.
        assert_eq!(part_of("raw", &raw("")[..60]), None);
    }

    proptest! {
        #[test]
        fn any_description_does_no_harm(driver in ".{0,20}", file in ".{0,200}") {
            let _ = part_of(&driver, &file);
            let _ = part_of(&driver, &format!("json:{file}"));
            let block = Block {
                qom_path: None,
                device: String::new(),
                node: None,
                driver: Some(driver),
                file: Some(format!("json:{file}")),
                throttle: Throttle::default(),
            };
            let _ = block.medium();
        }
    }
}
