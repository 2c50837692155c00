//! A block device: from a path to the whole disk whose queue carries the knobs.
//!
//! A path (often a `by-id` symbolic link) leads to a device number, which
//! `/sys/dev/block/MAJOR:MINOR` leads to a directory. A partition has no queue
//! of its own: scheduler, weights and limits are those of its disk.
//!
//! Units: `size` files count 512-byte sectors whatever the block size.
//!
//! Properties: `partition_leads_to_its_disk`, `identity_follows_the_driver`.

use std::io;
use std::path::{Component, Path, PathBuf};

use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_units::Bytes;

use crate::HostError;
use crate::cgroup::read;
use crate::storage::Stack;
use crate::sysfs::{DeviceNumber, Sysfs};

/// Bytes in a sector, always.
const SECTOR: u64 = 512;

/// A whole disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) number: DeviceNumber,
    /// Kernel name, `sda`.
    pub(crate) name: String,
}

impl Disk {
    /// The disk under the node `path`.
    pub(crate) fn find(sysfs: &dyn Sysfs, path: &Path) -> Result<Self, HostError> {
        Self::of_number(sysfs, node_number(sysfs, path)?)
    }

    /// The disk of this number, or that the partition of this number is on.
    pub(crate) fn of_number(sysfs: &dyn Sysfs, number: DeviceNumber) -> Result<Self, HostError> {
        let link = directory(number);
        let target = sysfs
            .link(&link)
            .map_err(|source| HostError::DeviceMissing { path: link.clone(), source })?;
        let is_partition = sysfs.exists(&link.join("partition"));
        let of = if is_partition { target.parent() } else { Some(target.as_path()) };
        let name = of.and_then(Path::file_name).and_then(|n| n.to_str());
        let name = name
            .ok_or_else(|| HostError::Format {
                file: link.clone(),
                found: target.display().to_string(),
                expected: "a link to a disk's directory",
            })?
            .to_owned();
        if !is_partition {
            return Ok(Self { number, name });
        }
        let file = Path::new("/sys/block").join(&name).join("dev");
        let text = read(sysfs, &file)?;
        let number = text.trim().parse().map_err(|_| HostError::Format {
            file,
            found: text.trim().to_owned(),
            expected: "MAJOR:MINOR",
        })?;
        Ok(Self { number, name })
    }

    /// A file under `queue/`.
    pub(crate) fn queue(&self, file: &str) -> PathBuf {
        directory(self.number).join("queue").join(file)
    }
}

/// `/sys/dev/block/MAJOR:MINOR`.
pub(crate) fn directory(number: DeviceNumber) -> PathBuf {
    Path::new("/sys/dev/block").join(number.to_string())
}

/// Size in sectors, and the sequence number that tells a device from a later
/// one under the same number (`diskseq`, since kernel 5.15).
pub(crate) fn generation(
    sysfs: &dyn Sysfs,
    number: DeviceNumber,
) -> Result<(u64, Option<u64>), HostError> {
    let size = sectors(sysfs, number)?;
    let sequence = sysfs.read(&directory(number).join("diskseq"));
    Ok((size, sequence.ok().and_then(|s| s.trim().parse().ok())))
}

/// Where a partition begins on its disk.
pub(crate) fn partition_start(sysfs: &dyn Sysfs, number: DeviceNumber) -> Result<u64, HostError> {
    number_in(sysfs, directory(number).join("start"))
}

pub(crate) fn sectors(sysfs: &dyn Sysfs, number: DeviceNumber) -> Result<u64, HostError> {
    number_in(sysfs, directory(number).join("size"))
}

fn number_in(sysfs: &dyn Sysfs, file: PathBuf) -> Result<u64, HostError> {
    let text = read(sysfs, &file)?;
    text.trim().parse().map_err(|_| HostError::Format {
        file,
        found: text.trim().to_owned(),
        expected: "a number of sectors",
    })
}

pub(crate) fn node_number(sysfs: &dyn Sysfs, path: &Path) -> Result<DeviceNumber, HostError> {
    let missing = |source| HostError::DeviceMissing { path: path.to_path_buf(), source };
    // udev's links stay below /dev, where each look at a disk would cost one at all mounts.
    let is_below_dev =
        path.starts_with("/dev") && !path.components().any(|c| c == Component::ParentDir);
    if !is_below_dev && let Some(stack) = Stack::beyond_reach(sysfs, path) {
        return Err(missing(io::Error::other(stack.to_string())));
    }
    sysfs
        .device_number(path)
        .map_err(missing)?
        .ok_or_else(|| HostError::NotABlockDevice { path: path.to_path_buf() })
}

/// What identifies the device at `path`: size is the node's own, the rest its disk's.
pub(crate) fn identity(sysfs: &dyn Sysfs, path: &Path) -> Result<DeviceIdentity, HostError> {
    let node = node_number(sysfs, path)?;
    let disk = Disk::find(sysfs, path)?;
    let base = directory(disk.number);
    let first = |files: &[&str]| {
        let texts = files.iter().filter_map(|f| sysfs.read(&base.join(f)).ok());
        texts.map(|t| t.trim().to_owned()).find(|t| !t.is_empty())
    };
    let kind = kind(&disk.name);
    let model = first(&["loop/backing_file"])
        .map(|f| Path::new(&f).file_name().map_or(f.clone(), |n| n.to_string_lossy().into_owned()))
        .or_else(|| first(&["device/model", "dm/name", "md/level"]))
        .unwrap_or_else(|| kind.clone());
    let serial = first(&["device/serial", "serial", "wwid", "device/wwid", "dm/uuid", "md/uuid"]);
    let rotational = read(sysfs, &disk.queue("rotational"))?.trim() == "1";
    let size = Bytes::new(sectors(sysfs, node)?.saturating_mul(SECTOR));
    Ok(DeviceIdentity { kind, model, serial, size, rotational })
}

/// What NVMe (`firmware_rev`) and SCSI (`rev`) devices tell of their firmware.
pub(crate) fn firmware(sysfs: &dyn Sysfs, path: &Path) -> Option<String> {
    let base = directory(Disk::find(sysfs, path).ok()?.number).join("device");
    let told = ["firmware_rev", "rev"].iter().filter_map(|file| sysfs.read(&base.join(file)).ok());
    told.map(|text| text.trim().to_owned()).find(|text| !text.is_empty())
}

/// The driver's prefix of a kernel name: `sda` → `sd`, `nvme0n1` → `nvme`.
fn kind(name: &str) -> String {
    for letters in ["xvd", "sd", "vd", "hd"] {
        let rest = name.strip_prefix(letters);
        if rest.is_some_and(|r| !r.is_empty() && r.bytes().all(|b| b.is_ascii_lowercase())) {
            return letters.to_owned();
        }
    }
    name.chars().take_while(char::is_ascii_alphabetic).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;

    #[test]
    fn partition_leads_to_its_disk() {
        let sysfs = FakeSysfs::v1();
        sysfs.add_disk("sda", DeviceNumber::new(8, 0), 1000);
        sysfs.add_partition("sda1", DeviceNumber::new(8, 1), "sda", 10);
        let disk = Disk::find(&sysfs, Path::new("/dev/sda1")).unwrap();
        assert_eq!(disk.number, DeviceNumber::new(8, 0));
        assert_eq!(disk.queue("scheduler"), Path::new("/sys/dev/block/8:0/queue/scheduler"));
        assert_eq!(identity(&sysfs, Path::new("/dev/sda1")).unwrap().size, Bytes::new(5120));
    }

    #[test]
    fn node_on_a_server_is_not_looked_at() {
        let sysfs = FakeSysfs::v1();
        sysfs.put("/proc/self/mountinfo", "40 1 0:44 / /srv rw - nfs4 server:/export rw\n");
        // A look would find a file.
        sysfs.put("/srv/disk", "");
        for path in ["/srv/disk", "/dev/../srv/disk"] {
            let error = Disk::find(&sysfs, Path::new(path)).unwrap_err();
            let HostError::DeviceMissing { source, .. } = &error else { panic!("{error}") };
            assert!(source.to_string().contains("a network filesystem"), "{source}");
        }
    }

    #[test]
    fn identity_follows_the_driver() {
        for (name, expected) in
            [("sda", "sd"), ("vdb", "vd"), ("nvme0n1", "nvme"), ("loop7", "loop"), ("dm-0", "dm")]
        {
            assert_eq!(kind(name), expected);
        }
        let sysfs = FakeSysfs::v1();
        sysfs.add_disk("loop0", DeviceNumber::new(7, 0), 2048);
        sysfs.put("/sys/dev/block/7:0/loop/backing_file", "/var/lib/img/data.img\n");
        let found = identity(&sysfs, Path::new("/dev/loop0")).unwrap();
        let expected = DeviceIdentity {
            kind: "loop".to_owned(),
            model: "data.img".to_owned(),
            serial: None,
            size: Bytes::new(1_048_576),
            rotational: false,
        };
        assert_eq!(found, expected);
    }
}
