//! Headers of formats that are not raw: a guest must not get to see such a file's own structures,
//! nor a guest's raw disk be opened as one of them by somebody else.

/// Offset, bytes there, name.
const HEADERS: [(usize, &[u8], &str); 13] = [
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "qed"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "vdi"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"LUKS\xba\xbe", "luks"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"Bochs Virtual HD Image", "bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "cloop"),
];

/// The format that an image's first bytes are of, unless it is raw.
pub(super) fn foreign_format(head: &[u8]) -> Option<&'static str> {
    let matches = |&&(at, magic, _): &&(usize, &[u8], &str)| {
        head.get(at..).is_some_and(|rest| rest.starts_with(magic))
    };
    HEADERS.iter().find(matches).map(|(_, _, name)| *name)
}
