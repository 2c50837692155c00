//! The block device of the same namespace: what the kernel knows of the device's limits, and who else
//! uses it.
//!
//! The kernel adds up what the controller says, what the host can do and what is known to be broken in
//! this model, and shows it in sysfs for the block device, whose queue the generic device shares.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat, major, makedev, minor};

use super::NvmeError;

/// Of the running system.
pub(super) const SYSFS: &str = "/sys";

/// A page of the host: what one segment of a transfer holds at least.
const PAGE: u64 = 4096;

/// What the kernel says of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    /// Such as `nvme0n1`.
    pub(super) name: String,
    device: u64,
    /// The most bytes of a transfer, however it lies in memory.
    pub(super) max_transfer: u64,
    /// The most bytes that are discarded at once; none: it does not.
    pub(super) max_discard: u64,
    /// The most bytes that are zeroed at once; none: it does not.
    pub(super) max_zeroes: u64,
    /// Unit that the device writes without reading, in bytes.
    pub(super) physical_block: u32,
    /// Whether it has queues without interrupts.
    pub(super) can_be_polled: bool,
    /// Whether it is written to in order only.
    is_zoned: bool,
}

impl Block {
    /// Of a generic device that is open, by the sysfs mounted at `sysfs`.
    pub(super) fn of(generic: &OwnedFd, sysfs: &Path) -> Result<Self, NvmeError> {
        let stat = fstat(generic).map_err(|source| NvmeError::Call("stat", source))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
            return Err(NvmeError::NotGeneric);
        }
        Self::read(major(stat.st_rdev), minor(stat.st_rdev), sysfs)
    }

    fn read(major: u32, minor: u32, sysfs: &Path) -> Result<Self, NvmeError> {
        let device = sysfs.join(format!("dev/char/{major}:{minor}"));
        let last = |path: &Path| {
            let target = std::fs::read_link(path).ok()?;
            Some(target.file_name()?.to_str()?.to_owned())
        };
        if last(&device.join("subsystem")).as_deref() != Some("nvme-generic") {
            return Err(NvmeError::NotGeneric);
        }
        let generic = last(&device).ok_or(NvmeError::NotGeneric)?;
        // ng0n1 is nvme0n1.
        let name = generic.strip_prefix("ng").map(|rest| format!("nvme{rest}"));
        let name = name.ok_or(NvmeError::NotGeneric)?;
        let block = sysfs.join("class/block").join(&name);
        let text = |file: &str| {
            let path = block.join(file);
            let text = std::fs::read_to_string(&path);
            let text = text.map_err(|source| NvmeError::Sysfs { path: path.clone(), source })?;
            Ok::<_, NvmeError>((text.trim().to_owned(), path))
        };
        let strange =
            |path| NvmeError::Sysfs { path, source: std::io::ErrorKind::InvalidData.into() };
        let number = |file: &str| {
            let (text, path) = text(file)?;
            text.parse::<u64>().map_err(|_| strange(path))
        };
        let (dev, path) = text("dev")?;
        let dev = dev.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let (dev_major, dev_minor) = dev.ok_or_else(|| strange(path))?;
        // The first and the last page may be touched in part.
        let pages = number("queue/max_segments")?.saturating_sub(1).max(1);
        let bytes = number("queue/max_hw_sectors_kb")?.saturating_mul(1024);
        Ok(Self {
            device: makedev(dev_major, dev_minor),
            max_transfer: bytes.min(pages.saturating_mul(PAGE)),
            max_discard: number("queue/discard_max_hw_bytes")?,
            max_zeroes: number("queue/write_zeroes_max_bytes")?,
            physical_block: u32::try_from(number("queue/physical_block_size")?).unwrap_or(u32::MAX),
            can_be_polled: number("queue/io_poll")? == 1,
            is_zoned: text("queue/zoned")?.0 != "none",
            name,
        })
    }

    /// Whether it takes writes in any order.
    pub(super) fn check(&self) -> Result<(), NvmeError> {
        if self.is_zoned { Err(NvmeError::Zoned) } else { Ok(()) }
    }

    /// Opens the block device, to lock it. `exclusive`: or fails while the host mounts it, has it in a
    /// volume group or array, or swaps to it; and keeps it from doing so.
    pub(super) fn open(&self, exclusive: bool) -> Result<OwnedFd, NvmeError> {
        let path = Path::new("/dev").join(&self.name);
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        if exclusive {
            flags |= OFlags::EXCL;
        }
        let failed = |source| NvmeError::Claim { path: path.clone(), source };
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed)?;
        let stat = fstat(&fd).map_err(failed)?;
        let is_block = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        if is_block && stat.st_rdev == self.device {
            Ok(fd)
        } else {
            Err(NvmeError::OtherDevice(path))
        }
    }
}

#[cfg(test)]
impl Block {
    /// One with these limits.
    pub(super) fn of_limits(max_transfer: u64, max_discard: u64, max_zeroes: u64) -> Self {
        let (name, device) = ("nvme0n1".to_owned(), 0);
        let (physical_block, can_be_polled, is_zoned) = (512, false, false);
        Self {
            name,
            device,
            max_transfer,
            max_discard,
            max_zeroes,
            physical_block,
            can_be_polled,
            is_zoned,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A sysfs with a generic device 237:0 and its block device, with these changes.
    fn sysfs(changes: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for directory in ["dev/char", "class/nvme-generic/ng0n1", "class/block/nvme0n1/queue"] {
            std::fs::create_dir_all(at(directory)).unwrap();
        }
        symlink("../../class/nvme-generic/ng0n1", at("dev/char/237:0")).unwrap();
        symlink("../../nvme-generic", at("class/nvme-generic/ng0n1/subsystem")).unwrap();
        let block = at("class/block/nvme0n1");
        for (file, text) in [
            ("dev", "259:0\n"),
            ("queue/max_segments", "127\n"),
            ("queue/max_hw_sectors_kb", "512\n"),
            ("queue/discard_max_hw_bytes", "2199023255040\n"),
            ("queue/write_zeroes_max_bytes", "524288\n"),
            ("queue/physical_block_size", "4096\n"),
            ("queue/io_poll", "0\n"),
            ("queue/zoned", "none\n"),
        ]
        .iter()
        .chain(changes)
        {
            std::fs::write(block.join(file), text).unwrap();
        }
        root
    }

    #[test]
    fn limits_are_those_of_the_block_device() {
        let root = sysfs(&[]);
        let block = Block::read(237, 0, root.path()).unwrap();
        let expected = Block {
            name: "nvme0n1".to_owned(),
            device: makedev(259, 0),
            // 126 pages are less than 512 KiB.
            max_transfer: 516_096,
            max_discard: 2_199_023_255_040,
            max_zeroes: 524_288,
            physical_block: 4096,
            can_be_polled: false,
            is_zoned: false,
        };
        assert_eq!(block, expected);
        assert!(block.check().is_ok());
        let root = sysfs(&[("queue/max_hw_sectors_kb", "64"), ("queue/io_poll", "1")]);
        let block = Block::read(237, 0, root.path()).unwrap();
        assert_eq!((block.max_transfer, block.can_be_polled), (65_536, true));
    }

    #[test]
    fn device_that_is_no_namespace_is_refused() {
        let root = sysfs(&[]);
        assert!(matches!(Block::read(1, 3, root.path()), Err(NvmeError::NotGeneric)));
        let other = root.path().join("class/nvme-generic/ng0n1/subsystem");
        std::fs::remove_file(&other).unwrap();
        symlink("../../mem", &other).unwrap();
        assert!(matches!(Block::read(237, 0, root.path()), Err(NvmeError::NotGeneric)));
        let zoned = sysfs(&[("queue/zoned", "host-managed\n")]);
        let block = Block::read(237, 0, zoned.path()).unwrap();
        assert!(matches!(block.check(), Err(NvmeError::Zoned)));
    }

    #[test]
    fn file_of_sysfs_that_is_missing_or_no_number_is_named() {
        let broken = sysfs(&[("queue/max_segments", "many\n")]);
        let error = Block::read(237, 0, broken.path()).unwrap_err().to_string();
        assert!(error.contains("class/block/nvme0n1/queue/max_segments"), "{error}");
        let broken = sysfs(&[("dev", "259\n")]);
        let error = Block::read(237, 0, broken.path()).unwrap_err().to_string();
        assert!(error.ends_with("class/block/nvme0n1/dev"), "{error}");
        let missing = sysfs(&[]);
        std::fs::remove_file(missing.path().join("class/block/nvme0n1/queue/io_poll")).unwrap();
        let error = Block::read(237, 0, missing.path()).unwrap_err().to_string();
        assert!(error.ends_with("queue/io_poll"), "{error}");
    }
}
