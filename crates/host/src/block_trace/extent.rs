//! Sectors of a disk that belong to somebody.

use crate::HostError;
use crate::device::{Disk, directory, node_number, partition_start, sectors};
use crate::qemu::Part;
use crate::storage::Stack;
use crate::sysfs::{DeviceNumber, FileExtent, Sysfs};

use super::format::Io;

/// Sectors of a device within which data of one owner lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    pub(super) disk: DeviceNumber,
    pub(super) start: u64,
    /// The first sector behind it.
    pub(super) end: u64,
}

/// A partition or whole disk: the disk whose sectors its tracepoints name, and which of these.
struct Whole {
    disk: DeviceNumber,
    start: u64,
    end: u64,
}

impl Whole {
    fn of(sysfs: &dyn Sysfs, node: DeviceNumber) -> Result<Self, HostError> {
        if sysfs.exists(&directory(node).join("partition")) {
            let disk = Disk::of_number(sysfs, node)?.number;
            let start = partition_start(sysfs, node)?;
            return Ok(Self { disk, start, end: start.saturating_add(sectors(sysfs, node)?) });
        }
        // A disk may grow.
        Ok(Self { disk: node, start: 0, end: u64::MAX })
    }
}

impl Extent {
    /// The extents of `part`, whose file is a disk, a partition, or a regular file of a filesystem that
    /// tells where its data lies.
    pub(crate) fn find(sysfs: &dyn Sysfs, part: &Part) -> Result<Vec<Self>, HostError> {
        let missing = |source| HostError::DeviceMissing { path: part.file.clone(), source };
        let (offset, size) = (part.offset.get(), part.size.map(rtvirtio_units::Bytes::get));
        // Of a server that answers no more, not even a look at the file would come back.
        if Stack::beyond_reach(sysfs, &part.file).is_some() {
            return Err(HostError::NoExtents { path: part.file.clone() });
        }
        if sysfs.device_number(&part.file).map_err(missing)?.is_some() {
            let Whole { disk, start: base, end } =
                Whole::of(sysfs, node_number(sysfs, &part.file)?)?;
            let start = base.saturating_add(offset / 512);
            let end = size.map_or(end, |size| {
                let bytes = offset.saturating_add(size);
                base.saturating_add(bytes.div_ceil(512)).min(end)
            });
            return Ok(vec![Self { disk, start, end }]);
        }
        // A file without a name has but a link, in /proc.
        let link = |_| sysfs.link(&part.file);
        let path = sysfs.canonical(&part.file).or_else(link).map_err(missing)?;
        let told = || HostError::NoExtents { path: path.clone() };
        let device = Stack::device_of_extents(sysfs, &path)?.ok_or_else(told)?;
        let whole = Whole::of(sysfs, device)?;
        let of_file = sysfs
            .file_extents(&part.file)
            .map_err(|source| HostError::Read { file: path.clone(), source })?;
        let end = size.map_or(u64::MAX, |size| offset.saturating_add(size));
        let within = of_file.iter().filter_map(|extent| cut(*extent, offset, end));
        let mut found: Vec<Self> = within
            .map(|FileExtent { physical, length, .. }| {
                let (from, to) = (physical / 512, physical.saturating_add(length).div_ceil(512));
                let at = |sector: u64| whole.start.saturating_add(sector).min(whole.end);
                Self { disk: whole.disk, start: at(from), end: at(to) }
            })
            .filter(|extent| extent.start < extent.end)
            .collect();
        found.sort_unstable();
        Ok(joined(&found))
    }

    /// Whether a sector is in both: then nobody can tell whose I/O it is.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.disk == other.disk && self.start < other.end && other.start < self.end
    }

    /// Whether it ends behind `other`, on the same disk or on one that is sorted behind the other's.
    #[must_use]
    pub fn ends_behind(&self, other: &Self) -> bool {
        (self.disk, self.end) > (other.disk, other.end)
    }

    /// What of their disks is in none of `extents`.
    #[must_use]
    pub fn others(extents: &[Self]) -> Vec<Self> {
        let mut sorted = extents.to_vec();
        sorted.sort_unstable();
        let mut found = Vec::new();
        let mut disks: Vec<DeviceNumber> = sorted.iter().map(|extent| extent.disk).collect();
        disks.dedup();
        for disk in disks {
            let mut start = 0;
            for extent in sorted.iter().filter(|extent| extent.disk == disk) {
                if extent.start > start {
                    found.push(Self { disk, start, end: extent.start });
                }
                start = start.max(extent.end);
            }
            if start < u64::MAX {
                found.push(Self { disk, start, end: u64::MAX });
            }
        }
        found
    }

    pub(super) fn holds(&self, io: &Io) -> bool {
        self.disk == io.device && self.start <= io.start && io.end <= self.end
    }
}

/// What of a file's extent lies from `start` to `end` of the file.
fn cut(extent: FileExtent, start: u64, end: u64) -> Option<FileExtent> {
    let FileExtent { logical, physical, length } = extent;
    let from = logical.max(start);
    let to = logical.saturating_add(length).min(end);
    let skipped = from - logical;
    (from < to).then(|| FileExtent {
        logical: from,
        physical: physical.saturating_add(skipped),
        length: to - from,
    })
}

/// Neighbouring extents as one: a filesystem may cut what lies in one piece, and a bio may lie in
/// both.
fn joined(sorted: &[Extent]) -> Vec<Extent> {
    let mut found: Vec<Extent> = Vec::new();
    for extent in sorted {
        match found.last_mut() {
            Some(last) if last.disk == extent.disk && extent.start <= last.end => {
                last.end = last.end.max(extent.end);
            }
            _ => found.push(*extent),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rtvirtio_units::Bytes;

    use super::*;
    use crate::fake::FakeSysfs;

    const DISK: DeviceNumber = DeviceNumber::new(8, 0);

    fn host() -> FakeSysfs {
        let sysfs = FakeSysfs::v2();
        sysfs.add_disk("sda", DISK, 1 << 21);
        sysfs.add_partition("sda1", DeviceNumber::new(8, 1), "sda", 1 << 20);
        sysfs.put("/sys/dev/block/8:1/start", "2048\n");
        sysfs
    }

    fn part(file: &str, offset: u64, size: Option<u64>) -> Part {
        let size = size.map(Bytes::new);
        Part { file: Path::new(file).to_owned(), offset: Bytes::new(offset), size }
    }

    fn sectors_of(extents: &[Extent]) -> Vec<(u64, u64)> {
        assert!(extents.iter().all(|extent| extent.disk == DISK));
        extents.iter().map(|extent| (extent.start, extent.end)).collect()
    }

    #[test]
    fn file_on_a_partition_has_its_sectors_of_the_disk() {
        let sysfs = host();
        sysfs.put("/proc/self/mountinfo", "30 22 8:1 / /images rw - ext4 /dev/sda1 rw\n");
        sysfs.put("/images/db.raw", "0 1048576 4096\n4096 1052672 4096\n8192 4194304 8192\n");
        let all = Extent::find(&sysfs, &part("/images/db.raw", 0, None)).unwrap();
        // The first two lie in one piece.
        assert_eq!(sectors_of(&all), [(4096, 4112), (10240, 10256)]);
        let middle = Extent::find(&sysfs, &part("/images/db.raw", 4096, Some(8192))).unwrap();
        assert_eq!(sectors_of(&middle), [(4104, 4112), (10240, 10248)]);
    }

    #[test]
    fn filesystem_of_addresses_of_its_own_tells_nothing() {
        let sysfs = host();
        sysfs.put("/proc/self/mountinfo", "30 22 8:1 / /images rw - btrfs /dev/sda1 rw\n");
        sysfs.put("/images/db.raw", "0 1048576 4096\n");
        let error = Extent::find(&sysfs, &part("/images/db.raw", 0, None)).unwrap_err();
        assert!(error.to_string().contains("does not tell"), "{error}");
    }

    #[test]
    fn others_are_all_that_is_not_there() {
        let at = |start, end| Extent { disk: DISK, start, end };
        let others = Extent::others(&[at(100, 200), at(0, 50), at(150, 300)]);
        assert_eq!(sectors_of(&others), [(50, 100), (300, u64::MAX)]);
        assert!(others.iter().all(|other| !other.overlaps(&at(100, 300))));
        assert!(Extent::others(&[]).is_empty());
    }
}
