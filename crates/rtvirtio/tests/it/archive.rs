//! Files added to an initramfs: one more cpio archive behind the first.
//!
//! The kernel unpacks archive after archive, later files over earlier ones
//! (`Documentation/driver-api/early-userspace/buffer-format.rst`, which also has
//! the format `newc`).
//!
//! Property: `archive_unpacks_to_the_files`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Each header, each name and each file ends on a multiple of this.
const ALIGNMENT: u64 = 4;
const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;

/// A file for a guest's initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GuestFile {
    /// Where it goes, such as `/usr/bin/tool`; missing directories are made.
    pub(crate) path: String,
    /// What it holds.
    pub(crate) content: Vec<u8>,
    /// Whether it may be executed.
    pub(crate) is_executable: bool,
}

/// Writes `initramfs` with `files` behind it to `target`.
pub(crate) fn extend(initramfs: &Path, files: &[GuestFile], target: &Path) -> io::Result<()> {
    let mut output = File::create(target)?;
    let length = io::copy(&mut File::open(initramfs)?, &mut output)?;
    let mut output = Archive { output: BufWriter::new(output), length };
    output.align()?;
    let mut directories = BTreeSet::new();
    for file in files {
        let path = file.path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            if directories.insert(&path[..end]) {
                output.entry(&path[..end], DIRECTORY | 0o755, &[])?;
            }
        }
        let mode = if file.is_executable { 0o755 } else { 0o644 };
        output.entry(path, REGULAR | mode, &file.content)?;
    }
    output.entry("TRAILER!!!", 0, &[])?;
    output.output.flush()
}

struct Archive {
    output: BufWriter<File>,
    length: u64,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len()).map_err(io::Error::other)?;
        // ino, mode, uid, gid, nlink, mtime, size, 2 × device, 2 × node's device, name's size with
        // its NUL, checksum: of these newc needs few. One link: ino is not looked at.
        let fields = [0, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(b"\0")?;
        self.align()?;
        self.put(content)?;
        self.align()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.length += bytes.len() as u64;
        self.output.write_all(bytes)
    }

    fn align(&mut self) -> io::Result<()> {
        let missing = self.length.next_multiple_of(ALIGNMENT) - self.length;
        self.put(&[0; ALIGNMENT as usize][..missing as usize])
    }
}

fn file(path: &str, content: &[u8], is_executable: bool) -> GuestFile {
    GuestFile { path: path.to_owned(), content: content.to_vec(), is_executable }
}

/// Byte by byte after buffer-format.rst.
#[test]
fn archive_unpacks_to_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let (first, target) = (directory.path().join("first"), directory.path().join("target"));
    std::fs::write(&first, b"12345").unwrap();
    let files = [file("/a/run", b"hello", true), file("/a/data", b"", false)];
    extend(&first, &files, &target).unwrap();
    let zero = "00000000";
    let entry = |mode: &str, size: &str, name_size: &str, rest: &str| {
        let fields = [zero, mode, zero, zero, "00000001", zero, size, zero, zero, zero, zero];
        format!("070701{}{name_size}{zero}{rest}", fields.concat())
    };
    // A header has 110 bytes: name and NUL end on a multiple of 4 with 2 bytes over.
    let expected = [
        "12345\0\0\0".to_owned(),
        entry("000041ed", zero, "00000002", "a\0"),
        entry("000081ed", "00000005", "00000006", "a/run\0hello\0\0\0"),
        entry("000081a4", zero, "00000007", "a/data\0\0\0\0"),
        entry(zero, zero, "0000000b", "TRAILER!!!\0\0\0\0"),
    ];
    assert_eq!(String::from_utf8(std::fs::read(&target).unwrap()).unwrap(), expected.concat());
}
