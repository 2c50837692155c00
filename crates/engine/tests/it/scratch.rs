//! Images and loop devices that go with the test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileError, FileSource};
use tempfile::TempDir;

use crate::testing::skipped;

/// A file of zeroes in a directory of its own.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    _dir: TempDir,
}

impl Image {
    /// On the disk.
    pub(crate) fn new(size: u64) -> Self {
        Self::below(env!("CARGO_TARGET_TMPDIR"), size)
    }

    pub(crate) fn below(place: &str, size: u64) -> Self {
        let dir = tempfile::tempdir_in(place).unwrap();
        let path = dir.path().join("image");
        File::create(&path).unwrap().set_len(size).unwrap();
        Self { path, _dir: dir }
    }

    pub(crate) fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }
}

/// A loop device on an image.
pub(crate) struct Loop {
    pub(crate) path: PathBuf,
    _image: Image,
}

impl Loop {
    /// `None`, with a word about it, where there are no loop devices to be had.
    pub(crate) fn new(size: u64, block: u32) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped("on a loop device: needs root");
            return None;
        }
        let image = Image::new(size);
        let made = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &block.to_string()])
            .arg(&image.path)
            .output();
        match made {
            Ok(made) if made.status.success() => {
                let path = String::from_utf8(made.stdout).unwrap().trim().into();
                Some(Self { path, _image: image })
            }
            other => {
                skipped(format_args!("on a loop device: there is none: {other:?}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

/// What most tests ask for.
pub(crate) fn config(path: &Path) -> FileConfig {
    FileConfig {
        source: FileSource::Path(path.to_owned()),
        direct: false,
        read_only: false,
        explicit_raw: false,
        block_size: None,
        aio: Aio::Auto,
    }
}

pub(crate) fn open(path: &Path) -> Result<FileEngine, FileError> {
    FileEngine::open(config(path))
}
