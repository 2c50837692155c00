//! What a VM's disk is made of on this host: from a file or device down to the disks whose
//! schedulers, weights and limits count.
//!
//! Terms: a *layer* is what a path passes through, such as a filesystem or a volume of LVM; a
//! *leaf* is the device that a plan is for. Mostly it is one that has an I/O scheduler of its own,
//! for requests exist only there: a device of the device mapper hands its bios on, while multipath
//! with requests is a leaf, and so is a loop device, whatever lies below it. An array of md is a
//! leaf too. It has no scheduler, but limits of cgroups act on it as on a disk, and on all of its
//! disks they would act on each disk's part alone.
//!
//! Read from sysfs and `/proc/self/mountinfo` alone: nothing is opened, and no tool is needed.
//!
//! Properties: `image_file_leads_through_lvm_and_crypt_to_its_disk`,
//! `array_is_a_leaf_with_its_disks`, `volume_on_several_disks_has_all_of_them`, `what_no_disk_of_the_host_serves_is_named`,
//! `file_of_a_server_that_does_not_answer_is_not_looked_at`,
//! `link_to_a_server_that_does_not_answer_is_not_followed`, `file_lies_on_the_mount_that_covers_others`,
//! `disk_that_many_ways_lead_to_is_one_leaf`, `hostile_sysfs_does_no_harm`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::Serialize;

use crate::cgroup::read;
use crate::device::{Disk, directory, node_number};
use crate::mounts::{Mounted, Mounts};
use crate::sysfs::{DeviceNumber, Sysfs};
use crate::{Host, HostError};

/// No stack that works is deeper; it bounds what a circle in sysfs can cost.
const DEEPEST: usize = 16;
/// Leaves of one path, at most.
const MAX_LEAVES: usize = 64;
/// The kernel follows no more links of one path (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// What a path passes through.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "layer", rename_all = "snake_case")]
pub enum Layer {
    /// A filesystem that the file lies on.
    Filesystem {
        /// As mountinfo names it, such as `xfs`.
        kind: String,
        /// Where it is mounted.
        mount: PathBuf,
    },
    /// A partition.
    Partition {
        /// Kernel name.
        name: String,
    },
    /// A device of the device mapper.
    DeviceMapper {
        /// What it does, such as `LVM thin volume`.
        kind: String,
        /// Its name, such as `vg-db`.
        name: String,
    },
    /// Another device that hands its bios on, such as bcache's.
    Device {
        /// Kernel name.
        name: String,
    },
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Filesystem { kind, mount } => write!(f, "{kind} at {}", mount.display()),
            Self::Partition { name } => write!(f, "partition {name}"),
            Self::DeviceMapper { kind, name } => write!(f, "{kind} {name}"),
            Self::Device { name } => write!(f, "device {name}"),
        }
    }
}

/// An array of md.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Array {
    /// Such as `raid1`.
    pub level: String,
    /// Kernel names of the disks that it lies on, ascending.
    pub disks: Vec<String>,
}

/// A device whose scheduler, weights and limits count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Leaf {
    /// Kernel name, such as `nvme0n1`.
    pub name: String,
    /// Its number.
    pub number: DeviceNumber,
    /// The file behind it, if it is a loop device.
    pub backing: Option<PathBuf>,
    /// What it is made of, if it is an array.
    pub array: Option<Array>,
}

impl Leaf {
    /// Its node.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        // sysfs has `!` for the `/` of names such as cciss/c0d0.
        Path::new("/dev").join(self.name.replace('!', "/"))
    }
}

/// The way from a path down to disks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Stack {
    /// From the top; those of several ways down one after the other.
    pub layers: Vec<Layer>,
    /// The disks, by name; none if no disk of this host serves it.
    pub leaves: Vec<Leaf>,
    /// Why nothing, or not all, can be controlled, with what can be done.
    pub uncontrolled: Vec<Uncontrolled>,
}

/// Why I/O escapes the host's control.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Uncontrolled {
    /// A network filesystem.
    Network,
    /// ZFS.
    Zfs,
    /// A filesystem in memory.
    Memory,
    /// A filesystem that a process serves.
    Fuse,
    /// A filesystem that lies on others.
    Overlay,
    /// A filesystem whose device is not to be found.
    UnknownFilesystem,
    /// More layers than any stack that works.
    TooDeep,
}

impl fmt::Display for Uncontrolled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network => {
                "a network filesystem: its requests leave through the network, and no disk of \
                 this host serves them (limit the VM in QEMU, or serve it by the data plane)"
            }
            Self::Zfs => {
                "ZFS: its own threads do the I/O, in no VM's cgroup (give the VM a volume of LVM, \
                 or serve the image by the data plane)"
            }
            Self::Memory => "a filesystem in memory: there is no disk to control",
            Self::Fuse => {
                "a filesystem that a process serves: the I/O is that process's, in no VM's cgroup"
            }
            Self::Overlay => "an overlay: move the image to the filesystem below it",
            Self::UnknownFilesystem => "a filesystem whose device is not to be found",
            Self::TooDeep => "more layers of devices than rtvirtio follows",
        })
    }
}

impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for layer in &self.layers {
            write!(f, "{layer} → ")?;
        }
        let mut names = self.leaves.iter().map(|leaf| match (&leaf.backing, &leaf.array) {
            (Some(file), _) => format!("{} (loop device of {})", leaf.name, file.display()),
            (None, Some(Array { level, disks })) => {
                format!("{} ({level} of {})", leaf.name, disks.join(" + "))
            }
            (None, None) => leaf.name.clone(),
        });
        match names.next() {
            None => f.write_str("no disk")?,
            Some(first) => {
                f.write_str(&first)?;
                names.try_for_each(|name| write!(f, " + {name}"))?;
            }
        }
        self.uncontrolled.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

impl Host {
    /// What the file or device at `path` is made of.
    ///
    /// # Errors
    /// It is not there, or sysfs cannot be read.
    pub fn storage(&self, path: &Path) -> Result<Stack, HostError> {
        Stack::find(&*self.sysfs, path)
    }

    /// The stack of a path that leads, through links too, to what a server or a process answers for: whoever looked at
    /// the file would wait for one that answers no more, for ever. Nothing there is looked at.
    #[must_use]
    pub fn beyond_reach(&self, path: &Path) -> Option<Stack> {
        Stack::beyond_reach(&*self.sysfs, path)
    }
}

impl Stack {
    pub(crate) fn find(sysfs: &dyn Sysfs, path: &Path) -> Result<Self, HostError> {
        let missing = |source| HostError::DeviceMissing { path: path.to_path_buf(), source };
        debug_assert!(path.is_absolute(), "a path of this host: {}", path.display());
        if let Some(stack) = Self::beyond_reach(sysfs, path) {
            return Ok(stack);
        }
        let path = sysfs.canonical(path).map_err(missing)?;
        let mut stack = Self::default();
        match sysfs.device_number(&path).map_err(missing)? {
            Some(number) => stack.descend(sysfs, number, &mut Way::default())?,
            None => stack.file(sysfs, &path)?,
        }
        stack.leaves.sort();
        stack.leaves.dedup();
        stack.uncontrolled.sort_unstable();
        stack.uncontrolled.dedup();
        Ok(stack)
    }

    /// The stack of a path that leads below a mount that a server or a process answers for: one that answers no more
    /// keeps whoever looks at the file, for ever if it is a hard mount. Links are read one by one, each where no
    /// such mount is on the way to it.
    pub(crate) fn beyond_reach(sysfs: &dyn Sysfs, path: &Path) -> Option<Self> {
        let mountinfo = sysfs.read(Path::new("/proc/self/mountinfo")).ok()?;
        let mounts = Mounts::parse(&mountinfo);
        // What runs this program answers. What an automount point will lead to is a server's, nearly always.
        let remote = |mounted: &Mounted<'_>| {
            let is_automount = mounted.kind == "autofs";
            is_automount
                .then_some(Uncontrolled::Network)
                .or_else(|| uncontrolled(mounted.kind))
                .filter(|why| matches!(why, Uncontrolled::Network | Uncontrolled::Fuse))
                .filter(|_| mounted.mount != Path::new("/"))
        };
        if !path.is_absolute() || mounts.all().all(|mounted| remote(mounted).is_none()) {
            return None;
        }
        // What has been walked, without links, and what is left, the next step last.
        let (mut walked, mut left) = (PathBuf::from("/"), steps(path));
        let mut links = 0;
        loop {
            let mut ahead = walked.clone();
            ahead.extend(left.iter().rev().take_while(|step| *step != ".."));
            // Below chroot(2) there may be none at `/`.
            if let Some(mounted) = mounts.holding(&ahead) {
                if let Some(why) = remote(mounted) {
                    let (kind, mount) = (mounted.kind.to_owned(), mounted.mount.clone());
                    let layers = vec![Layer::Filesystem { kind, mount }];
                    return Some(Self { layers, leaves: Vec::new(), uncontrolled: vec![why] });
                }
                // There is no link on the way to a mount, though another mount may be.
                while !walked.starts_with(&mounted.mount) {
                    walked.push(left.pop()?);
                }
            }
            let step = left.pop()?;
            if step == ".." {
                walked.pop();
                continue;
            }
            walked.push(step);
            let Ok(target) = sysfs.link(&walked) else { continue };
            links += 1;
            if links > MAX_LINKS {
                return None;
            }
            walked.pop();
            if target.is_absolute() {
                walked = PathBuf::from("/");
            }
            left.extend(steps(&target));
        }
    }

    /// What the device at `path` is made of, if it is an array.
    pub(crate) fn array(sysfs: &dyn Sysfs, path: &Path) -> Result<Option<Array>, HostError> {
        let disk = Disk::find(sysfs, path)?;
        if !sysfs.exists(&directory(disk.number).join("md/level")) {
            return Ok(None);
        }
        let mut stack = Self::default();
        stack.descend(sysfs, disk.number, &mut Way::default())?;
        Ok(stack.leaves.pop().and_then(|leaf| leaf.array))
    }

    /// The one disk that serves all of the device `number`; `None` if it has several.
    pub(crate) fn disk_below(sysfs: &dyn Sysfs, number: DeviceNumber) -> Option<DeviceNumber> {
        let mut stack = Self::default();
        stack.descend(sysfs, number, &mut Way::default()).ok()?;
        stack.only_disk()
    }

    /// Its one disk; `None` if it has several, or none.
    pub(crate) fn only_disk(&self) -> Option<DeviceNumber> {
        match self.leaves.as_slice() {
            [leaf] if self.uncontrolled.is_empty() => Some(leaf.number),
            _ => None,
        }
    }

    fn file(&mut self, sysfs: &dyn Sysfs, path: &Path) -> Result<(), HostError> {
        let mountinfo = read(sysfs, Path::new("/proc/self/mountinfo"))?;
        let mounts = Mounts::parse(&mountinfo);
        let Some(mounted) = mounts.holding(path) else {
            self.uncontrolled.push(Uncontrolled::UnknownFilesystem);
            return Ok(());
        };
        let kind = mounted.kind.to_owned();
        self.layers.push(Layer::Filesystem { kind, mount: mounted.mount.clone() });
        let numbers = match uncontrolled(mounted.kind) {
            Some(why) => {
                self.uncontrolled.push(why);
                return Ok(());
            }
            None => devices(sysfs, mounted),
        };
        if numbers.is_empty() {
            self.uncontrolled.push(Uncontrolled::UnknownFilesystem);
        }
        let mut way = Way::default();
        numbers.into_iter().try_for_each(|number| self.descend(sysfs, number, &mut way))
    }

    /// The device on which the filesystem of the file at `path` lies, if its extents are in bytes of
    /// that device.
    pub(crate) fn device_of_extents(
        sysfs: &dyn Sysfs,
        path: &Path,
    ) -> Result<Option<DeviceNumber>, HostError> {
        /// Filesystems on one device, whose FIEMAP answers in its bytes.
        const IN_BYTES: [&str; 5] = ["ext2", "ext3", "ext4", "xfs", "ntfs3"];
        let mountinfo = read(sysfs, Path::new("/proc/self/mountinfo"))?;
        let mounts = Mounts::parse(&mountinfo);
        let told = mounts.holding(path).filter(|mounted| IN_BYTES.contains(&mounted.kind));
        Ok(told.and_then(|mounted| match devices(sysfs, mounted).as_slice() {
            [device] => Some(*device),
            _ => None,
        }))
    }

    fn descend(
        &mut self,
        sysfs: &dyn Sysfs,
        number: DeviceNumber,
        way: &mut Way,
    ) -> Result<(), HostError> {
        // A circle, too, has no end.
        if way.above.len() >= DEEPEST || way.above.contains(&number) {
            self.uncontrolled.push(Uncontrolled::TooDeep);
            return Ok(());
        }
        // Two ways down may meet: what lies below is known by then.
        if !way.seen.insert(number) {
            return Ok(());
        }
        way.above.push(number);
        let found = self.descend_from(sysfs, number, way);
        way.above.pop();
        found
    }

    fn descend_from(
        &mut self,
        sysfs: &dyn Sysfs,
        number: DeviceNumber,
        way: &mut Way,
    ) -> Result<(), HostError> {
        let base = directory(number);
        let target = sysfs
            .link(&base)
            .map_err(|source| HostError::DeviceMissing { path: base.clone(), source })?;
        let name = |path: &Path| path.file_name().and_then(|n| n.to_str()).map(str::to_owned);
        let format = || HostError::Format {
            file: base.clone(),
            found: target.display().to_string(),
            expected: "a link to a device's directory",
        };
        let own = name(&target).ok_or_else(format)?;
        if sysfs.exists(&base.join("partition")) {
            let disk = target.parent().and_then(name).ok_or_else(format)?;
            self.add(Layer::Partition { name: own });
            let file = Path::new("/sys/block").join(disk).join("dev");
            return self.descend(sysfs, number_in(sysfs, &file)?, way);
        }
        let below: Vec<String> = sysfs.list(&base.join("slaves")).unwrap_or_default();
        let text = |file: &str| sysfs.read(&base.join(file)).ok().map(|t| t.trim().to_owned());
        // Of a device that hands bios on, it says `none`, or is not there. Of one that has requests, the selected one
        // is in brackets, if it is the only one too.
        let has_scheduler = text("queue/scheduler").is_some_and(|t| t.contains('['));
        if below.is_empty() || has_scheduler {
            let backing = text("loop/backing_file").map(PathBuf::from);
            self.reach(Leaf { name: own, number, backing, array: None });
            return Ok(());
        }
        let lower = below
            .iter()
            .map(|name| {
                let file = base.join("slaves").join(name).join("dev");
                number_in(sysfs, &file)
            })
            .collect::<Result<BTreeSet<_>, _>>()?;
        if let Some(level) = text("md/level") {
            let mut members = Self::default();
            // Its disks are its own, whoever else lies on them.
            let mut way = Way { above: way.above.clone(), seen: BTreeSet::new() };
            lower.into_iter().try_for_each(|lower| members.descend(sysfs, lower, &mut way))?;
            let disks: BTreeSet<String> = members.leaves.into_iter().map(|l| l.name).collect();
            self.uncontrolled.extend(members.uncontrolled);
            let array = Some(Array { level, disks: disks.into_iter().collect() });
            self.reach(Leaf { name: own, number, backing: None, array });
            return Ok(());
        }
        if let Some(uuid) = text("dm/uuid") {
            let is_pool = |number: &DeviceNumber| {
                let file = directory(*number).join("dm/uuid");
                sysfs.read(&file).is_ok_and(|uuid| uuid.trim().ends_with("-tpool"))
            };
            let kind = device_mapper(&uuid, lower.iter().any(is_pool), lower.len());
            self.add(Layer::DeviceMapper { kind, name: text("dm/name").unwrap_or(own) });
        } else {
            self.add(Layer::Device { name: own });
        }
        lower.into_iter().try_for_each(|number| self.descend(sysfs, number, way))
    }

    /// Adds a leaf, of which there may be [`MAX_LEAVES`]. One that several ways lead to is one.
    fn reach(&mut self, leaf: Leaf) {
        if self.leaves.contains(&leaf) {
            return;
        }
        if self.leaves.len() < MAX_LEAVES {
            self.leaves.push(leaf);
        } else {
            self.uncontrolled.push(Uncontrolled::TooDeep);
        }
    }

    fn add(&mut self, layer: Layer) {
        if !self.layers.contains(&layer) {
            self.layers.push(layer);
        }
    }
}

/// The devices that a walk down has passed.
#[derive(Debug, Default)]
struct Way {
    /// From the top to where it is.
    above: Vec<DeviceNumber>,
    /// All.
    seen: BTreeSet<DeviceNumber>,
}

/// The names that a path goes through, the first one last.
fn steps(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev();
    let steps = parts.filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    steps.map(|part| part.as_os_str().to_owned()).collect()
}

/// What a device of the device mapper does, from the UUID that its maker gives it: LVM, cryptsetup,
/// multipath-tools and kpartx have prefixes of their own.
fn device_mapper(uuid: &str, on_pool: bool, slaves: usize) -> String {
    let several = if slaves > 1 { " on several devices" } else { "" };
    match uuid.split('-').next().unwrap_or_default() {
        "LVM" if uuid.ends_with("-tpool") => format!("LVM thin pool{several}"),
        "LVM" if on_pool => "LVM thin volume".to_owned(),
        "LVM" => format!("LVM volume{several}"),
        "CRYPT" => "dm-crypt".to_owned(),
        "mpath" => "multipath".to_owned(),
        part if part.starts_with("part") => "partition (kpartx)".to_owned(),
        "DMRAID" => format!("firmware RAID{several}"),
        _ => format!("device mapper{several}"),
    }
}

fn uncontrolled(filesystem: &str) -> Option<Uncontrolled> {
    Some(match filesystem {
        "nfs" | "nfs4" | "cifs" | "smb3" | "smbfs" | "ceph" | "9p" | "afs" | "lustre"
        | "beegfs" | "fuse.glusterfs" | "fuse.sshfs" | "glusterfs" | "pvfs2" | "virtiofs" => {
            Uncontrolled::Network
        }
        "zfs" => Uncontrolled::Zfs,
        "tmpfs" | "ramfs" | "devtmpfs" | "hugetlbfs" => Uncontrolled::Memory,
        "overlay" | "aufs" | "unionfs" => Uncontrolled::Overlay,
        // The kernel does a fuseblk's I/O on its device through the process too.
        kind if kind.starts_with("fuse") => Uncontrolled::Fuse,
        _ => return None,
    })
}

/// The block devices that a filesystem lies on.
fn devices(sysfs: &dyn Sysfs, mounted: &Mounted<'_>) -> Vec<DeviceNumber> {
    if mounted.kind == "btrfs" {
        let mut all = btrfs(sysfs, &mounted.source);
        if !all.is_empty() {
            all.sort_unstable();
            return all;
        }
    }
    // Major 0 is no device's.
    if sysfs.link(&directory(mounted.number)).is_ok() {
        return vec![mounted.number];
    }
    node_number(sysfs, &mounted.source).into_iter().collect()
}

/// All devices of the btrfs that has `source`.
fn btrfs(sysfs: &dyn Sysfs, source: &Path) -> Vec<DeviceNumber> {
    let source = sysfs.canonical(source).unwrap_or_else(|_| source.to_owned());
    let name = source.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let root = Path::new("/sys/fs/btrfs");
    let number = |name: &String| node_number(sysfs, &Path::new("/dev").join(name)).ok();
    for uuid in sysfs.list(root).unwrap_or_default() {
        let devices = sysfs.list(&root.join(uuid).join("devices")).unwrap_or_default();
        if devices.iter().any(|device| device == name) {
            return devices.iter().filter_map(number).collect();
        }
    }
    Vec::new()
}

fn number_in(sysfs: &dyn Sysfs, file: &Path) -> Result<DeviceNumber, HostError> {
    let text = read(sysfs, file)?;
    text.trim().parse().map_err(|_| HostError::Format {
        file: file.to_owned(),
        found: text.trim().to_owned(),
        expected: "MAJOR:MINOR",
    })
}

#[cfg(test)]
mod tests;
