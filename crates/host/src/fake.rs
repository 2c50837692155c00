//! A kernel in memory that behaves as the block layer and the io controller do.
//!
//! What it models, as seen on kernel 6.18 at HZ=250:
//!
//! - selecting another scheduler resets `iosched/*` and `nr_requests`, and
//!   leaving bfq drops every cgroup's weight line for the device; selecting
//!   the selected one does nothing;
//! - `slice_idle` and `slice_idle_us` are one value; `strict_guarantees`
//!   raises it to 8 ms; `timeout_sync` is rounded up to 4 ms;
//! - bfq turns writeback throttling off, leaving it turns it on again;
//! - writing a cgroup's default weight (v2 only here) drops its weight lines;
//! - a weight out of range is ERANGE, one under another scheduler EOPNOTSUPP;
//! - iocost (v2) has a model and latencies of each device in the root, and weights in `io.weight`; on, it
//!   turns writeback throttling off, as bfq does;
//! - an IOPS limit is cut to 32 bits on v1; 0 (v1) and `max` (v2) remove limits;
//! - `cgroup.procs` that is not empty keeps a cgroup from being removed.
//!
//! Anything else is a plain file, made by [`FakeSysfs::put`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::sysfs::{DeviceNumber, FileExtent, Sysfs};

const LIMIT_FILES: [&str; 4] = [
    "blkio.throttle.read_bps_device",
    "blkio.throttle.write_bps_device",
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_iops_device",
];
const LIMIT_KEYS: [&str; 4] = ["rbps", "wbps", "riops", "wiops"];

#[derive(Debug, Clone)]
struct Disk {
    name: String,
    sectors: u64,
    diskseq: u64,
    offered: Vec<String>,
    scheduler: String,
    iosched: BTreeMap<String, u64>,
    nr_requests: u64,
    wbt_lat_usec: u64,
    /// iocost's model, if it is not the kernel's guess.
    cost_model: Option<String>,
    /// iocost's latencies, if it is on.
    cost_qos: Option<String>,
}

#[derive(Debug, Clone)]
struct Partition {
    name: String,
    disk: String,
    sectors: u64,
}

#[derive(Debug, Clone, Default)]
struct Group {
    inode: u64,
    default_weight: u64,
    weights: BTreeMap<DeviceNumber, u64>,
    cost_weights: BTreeMap<DeviceNumber, u64>,
    limits: BTreeMap<(DeviceNumber, usize), u64>,
    processes: BTreeSet<u32>,
    subtree: BTreeSet<String>,
}

impl Group {
    fn new(inode: u64) -> Self {
        Self { inode, default_weight: 100, ..Self::default() }
    }
}

#[derive(Debug, Clone, Default)]
struct Kernel {
    mount: Option<PathBuf>,
    v2: bool,
    disks: BTreeMap<DeviceNumber, Disk>,
    partitions: BTreeMap<DeviceNumber, Partition>,
    /// By absolute path; the mount itself is one.
    groups: BTreeMap<PathBuf, Group>,
    files: BTreeMap<PathBuf, String>,
    refused: BTreeMap<PathBuf, Errno>,
    ignored: BTreeSet<PathBuf>,
    unkillable: BTreeSet<u32>,
    counter: u64,
}

/// The kernel in memory.
#[derive(Debug, Default)]
pub struct FakeSysfs(Mutex<Kernel>);

impl FakeSysfs {
    /// Plain files only.
    #[must_use]
    pub fn bare() -> Self {
        Self::default()
    }

    /// A host whose block I/O is on cgroup v1.
    #[must_use]
    pub fn v1() -> Self {
        Self::with_hierarchy("/sys/fs/cgroup/blkio", false)
    }

    /// A host whose block I/O is on cgroup v2; `io` is not enabled below the root.
    #[must_use]
    pub fn v2() -> Self {
        Self::with_hierarchy("/sys/fs/cgroup", true)
    }

    fn with_hierarchy(mount: &str, v2: bool) -> Self {
        let fake = Self::default();
        let entry = if v2 { "cgroup2 cgroup2 rw" } else { "cgroup cgroup rw,blkio" };
        fake.put("/proc/self/mountinfo", &format!("38 31 0:35 / {mount} rw - {entry}\n"));
        fake.put("/proc/sys/kernel/random/boot_id", "first\n");
        let mut kernel = fake.kernel();
        kernel.v2 = v2;
        kernel.mount = Some(mount.into());
        kernel.groups.insert(mount.into(), Group::new(1));
        kernel.counter = 1;
        drop(kernel);
        fake
    }

    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a plain file.
    pub fn remove(&self, path: &str) {
        self.kernel().files.remove(Path::new(path));
    }

    /// Makes or replaces a plain file.
    pub fn put(&self, path: &str, text: &str) {
        self.kernel().files.insert(path.into(), text.to_owned());
    }

    /// Plugs in a disk `/dev/NAME` with scheduler `none`; one of that number is replaced.
    pub fn add_disk(&self, name: &str, number: DeviceNumber, sectors: u64) {
        let mut kernel = self.kernel();
        kernel.counter += 1;
        let disk = Disk {
            name: name.to_owned(),
            sectors,
            diskseq: kernel.counter,
            offered: ["none", "mq-deadline", "kyber", "bfq"].map(str::to_owned).to_vec(),
            scheduler: "none".to_owned(),
            iosched: BTreeMap::new(),
            nr_requests: 128,
            wbt_lat_usec: 2000,
            cost_model: None,
            cost_qos: None,
        };
        kernel.disks.insert(number, disk);
    }

    /// Adds a partition `/dev/NAME`.
    pub fn add_partition(&self, name: &str, number: DeviceNumber, disk: &str, sectors: u64) {
        let partition = Partition { name: name.to_owned(), disk: disk.to_owned(), sectors };
        self.kernel().partitions.insert(number, partition);
    }

    /// Adds a device that hands its bios on to those of these names, which may come later.
    pub fn stack(&self, name: &str, number: DeviceNumber, below: &[&str]) {
        self.add_disk(name, number, 1 << 20);
        self.put(&format!("/sys/dev/block/{number}/queue/scheduler"), "none\n");
        for below in below {
            let lower = self.device_number(&Path::new("/dev").join(below)).ok().flatten();
            // The names of device mapper's devices end in their minor numbers.
            let minor = below.strip_prefix("dm-").and_then(|minor| minor.parse().ok());
            let lower = lower.or(minor.map(|minor| DeviceNumber::new(253, minor)));
            let Some(lower) = lower else { continue };
            self.put(&format!("/sys/dev/block/{number}/slaves/{below}/dev"), &format!("{lower}\n"));
        }
    }

    /// Gives a disk another size while it is in use.
    pub fn resize_disk(&self, number: DeviceNumber, sectors: u64) {
        if let Some(disk) = self.kernel().disks.get_mut(&number) {
            disk.sectors = sectors;
        }
    }

    /// Unplugs a disk.
    pub fn remove_disk(&self, number: DeviceNumber) {
        self.kernel().disks.remove(&number);
    }

    /// Takes a scheduler out of what a disk offers.
    pub fn withhold(&self, number: DeviceNumber, scheduler: &str) {
        if let Some(disk) = self.kernel().disks.get_mut(&number) {
            disk.offered.retain(|s| s != scheduler);
        }
    }

    /// Makes a cgroup below the mount, with its parents, with `io` enabled.
    pub fn add_cgroup(&self, path: &str) {
        let mut kernel = self.kernel();
        let Some(mut directory) = kernel.mount.clone() else {
            return;
        };
        for component in Path::new(path) {
            if let Some(group) = kernel.groups.get_mut(&directory) {
                group.subtree.insert("io".to_owned());
            }
            directory.push(component);
            kernel.counter += 1;
            let group = Group::new(kernel.counter);
            kernel.groups.entry(directory.clone()).or_insert(group);
        }
    }

    /// Removes a cgroup below the mount, whatever is in it.
    pub fn remove_cgroup(&self, path: &str) {
        let mut kernel = self.kernel();
        let Some(mount) = kernel.mount.clone() else {
            return;
        };
        kernel.groups.remove(&mount.join(path));
    }

    /// Puts a process into a cgroup below the mount; `unkillable` ones survive SIGKILL.
    pub fn add_process(&self, path: &str, pid: u32, unkillable: bool) {
        let mut kernel = self.kernel();
        let Some(mount) = kernel.mount.clone() else {
            return;
        };
        if let Some(group) = kernel.groups.get_mut(&mount.join(path)) {
            group.processes.insert(pid);
        }
        if unkillable {
            kernel.unkillable.insert(pid);
        }
    }

    /// Lets every write to `path` fail.
    pub fn refuse(&self, path: impl Into<PathBuf>, errno: Errno) {
        self.kernel().refused.insert(path.into(), errno);
    }

    /// Lets every write to `path` succeed without effect.
    pub fn ignore(&self, path: impl Into<PathBuf>) {
        self.kernel().ignored.insert(path.into());
    }

    /// Ends all of [`FakeSysfs::refuse`] and [`FakeSysfs::ignore`].
    pub fn heal(&self) {
        let mut kernel = self.kernel();
        kernel.refused.clear();
        kernel.ignored.clear();
    }

    /// The whole state of disks and cgroups, to be compared.
    #[must_use]
    pub fn snapshot(&self) -> String {
        let kernel = self.kernel();
        format!("{:#?}\n{:#?}", kernel.disks, kernel.groups)
    }
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

fn defaults(scheduler: &str) -> BTreeMap<String, u64> {
    let values: &[(&str, u64)] = match scheduler {
        "bfq" => &[
            ("back_seek_max", 16384),
            ("back_seek_penalty", 2),
            ("fifo_expire_async", 250),
            ("fifo_expire_sync", 125),
            ("low_latency", 1),
            ("max_budget", 0),
            ("slice_idle_us", 8000),
            ("strict_guarantees", 0),
            ("timeout_sync", 124),
        ],
        "kyber" => &[("read_lat_nsec", 2_000_000), ("write_lat_nsec", 10_000_000)],
        "mq-deadline" => &[("fifo_batch", 16), ("read_expire", 500), ("write_expire", 5000)],
        _ => &[],
    };
    values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

impl Disk {
    fn read(&self, number: DeviceNumber, file: &str) -> Option<String> {
        let text = match file {
            "dev" => number.to_string(),
            "size" => self.sectors.to_string(),
            "diskseq" => self.diskseq.to_string(),
            "queue/rotational" => "0".to_owned(),
            "queue/nr_requests" => self.nr_requests.to_string(),
            "queue/wbt_lat_usec" => self.wbt_lat_usec.to_string(),
            "queue/scheduler" => {
                let mark = |s: &String| {
                    if *s == self.scheduler { format!("[{s}]") } else { s.clone() }
                };
                // A selected one stays listed until it is left.
                self.offered.iter().map(mark).collect::<Vec<_>>().join(" ") + " "
            }
            _ => {
                let name = file.strip_prefix("queue/iosched/")?;
                if name == "slice_idle" {
                    (self.iosched.get("slice_idle_us")? / 1000).to_string()
                } else {
                    self.iosched.get(name)?.to_string()
                }
            }
        };
        Some(text + "\n")
    }
}

impl Kernel {
    /// The disk and the file below its directory.
    fn disk_file(&self, path: &Path) -> Option<(DeviceNumber, String)> {
        let below = |prefix| path.strip_prefix(prefix).ok()?.to_str();
        if let Some(rest) = below("/sys/dev/block") {
            let (number, file) = rest.split_once('/')?;
            return Some((number.parse().ok()?, file.to_owned()));
        }
        let (name, file) = below("/sys/block")?.split_once('/')?;
        let (number, _) = self.disks.iter().find(|(_, d)| d.name == name)?;
        Some((*number, file.to_owned()))
    }

    fn read(&self, path: &Path) -> Option<String> {
        if let Some(text) = self.files.get(path) {
            return Some(text.clone());
        }
        if let Some((number, file)) = self.disk_file(path) {
            if let Some(partition) = self.partitions.get(&number) {
                return match file.as_str() {
                    "size" => Some(format!("{}\n", partition.sectors)),
                    "partition" => Some("1\n".to_owned()),
                    _ => None,
                };
            }
            return self.disks.get(&number)?.read(number, &file);
        }
        self.read_group(path)
    }

    fn is_v2_root(&self, directory: &Path) -> bool {
        self.v2 && Some(directory) == self.mount.as_deref()
    }

    fn has_io(&self, directory: &Path) -> bool {
        let parent = directory.parent().and_then(|p| self.groups.get(p));
        !self.v2 || parent.is_some_and(|p| p.subtree.contains("io"))
    }

    fn read_group(&self, path: &Path) -> Option<String> {
        let (directory, file) = (path.parent()?, path.file_name()?.to_str()?);
        let group = self.groups.get(directory)?;
        let mut text = String::new();
        match file {
            "cgroup.procs" => {
                for pid in &group.processes {
                    let _ = writeln!(text, "{pid}");
                }
            }
            "cgroup.controllers" if self.v2 => text.push_str("cpu io memory\n"),
            "cgroup.subtree_control" if self.v2 => {
                let names: Vec<_> = group.subtree.iter().cloned().collect();
                text = names.join(" ") + "\n";
            }
            "io.cost.model" if self.is_v2_root(directory) => {
                for (number, disk) in &self.disks {
                    let Some(model) = &disk.cost_model else { continue };
                    let _ = writeln!(text, "{number} ctrl=user model=linear {model}");
                }
            }
            "io.cost.qos" if self.is_v2_root(directory) => {
                for (number, disk) in &self.disks {
                    let Some(qos) = &disk.cost_qos else { continue };
                    let _ = writeln!(text, "{number} enable=1 ctrl=user {qos}");
                }
            }
            _ if Some(directory) == self.mount.as_deref() || !self.has_io(directory) => {
                return None;
            }
            "io.weight" if self.v2 => {
                let _ = writeln!(text, "default 100");
                for (device, weight) in &group.cost_weights {
                    let _ = writeln!(text, "{device} {weight}");
                }
            }
            "io.max" if self.v2 => {
                let devices: BTreeSet<_> = group.limits.keys().map(|(d, _)| *d).collect();
                for device in devices {
                    let _ = write!(text, "{device}");
                    for (index, key) in LIMIT_KEYS.iter().enumerate() {
                        let value = group.limits.get(&(device, index));
                        let value = value.map_or_else(|| "max".to_owned(), u64::to_string);
                        let _ = write!(text, " {key}={value}");
                    }
                    text.push('\n');
                }
            }
            _ if file == if self.v2 { "io.bfq.weight" } else { "blkio.bfq.weight_device" } => {
                let _ = writeln!(text, "default {}", group.default_weight);
                for (device, weight) in &group.weights {
                    let _ = writeln!(text, "{device} {weight}");
                }
            }
            "blkio.bfq.weight" if !self.v2 => {
                let _ = writeln!(text, "{}", group.default_weight);
            }
            _ => {
                let index = LIMIT_FILES.iter().position(|f| *f == file && !self.v2)?;
                for ((device, of), value) in &group.limits {
                    if *of == index {
                        let _ = writeln!(text, "{device} {value}");
                    }
                }
            }
        }
        Some(text)
    }

    fn write(&mut self, path: &Path, text: &str) -> io::Result<()> {
        if let Some(errno) = self.refused.get(path) {
            return Err((*errno).into());
        }
        let text = text.trim();
        if self.read(path).is_none() {
            return Err(not_found());
        }
        if self.ignored.contains(path) {
            return Ok(());
        }
        if let Some(file) = self.files.get_mut(path) {
            text.clone_into(file);
            return Ok(());
        }
        match self.disk_file(path) {
            Some((number, file)) => self.write_disk(number, &file, text),
            None => self.write_group(path, text),
        }
    }

    fn write_disk(&mut self, number: DeviceNumber, file: &str, text: &str) -> io::Result<()> {
        let Some(disk) = self.disks.get_mut(&number) else {
            return Err(not_found());
        };
        if file == "queue/scheduler" {
            if !disk.offered.iter().any(|s| s == text) {
                return Err(Errno::INVAL.into());
            }
            if disk.scheduler == text {
                return Ok(());
            }
            if disk.scheduler == "bfq" {
                disk.wbt_lat_usec = 2000;
                for group in self.groups.values_mut() {
                    group.weights.remove(&number);
                }
            }
            disk.iosched = defaults(text);
            disk.nr_requests = if text == "none" { 128 } else { 256 };
            text.clone_into(&mut disk.scheduler);
            if text == "bfq" {
                disk.wbt_lat_usec = 0;
            }
            return Ok(());
        }
        let value: u64 = text.parse().map_err(|_| Errno::INVAL)?;
        let mut set = |name: &str, value| {
            disk.iosched.insert(name.to_owned(), value);
        };
        match file.strip_prefix("queue/iosched/").unwrap_or(file) {
            "queue/nr_requests" => disk.nr_requests = value,
            "queue/wbt_lat_usec" => disk.wbt_lat_usec = value,
            "slice_idle" => set("slice_idle_us", value * 1000),
            "timeout_sync" => set("timeout_sync", value.div_ceil(4).max(1) * 4),
            "low_latency" => set("low_latency", value.min(1)),
            "strict_guarantees" => {
                set("strict_guarantees", value.min(1));
                if value > 0 && disk.iosched.get("slice_idle_us").is_some_and(|s| *s < 8000) {
                    disk.iosched.insert("slice_idle_us".to_owned(), 8000);
                }
            }
            name => set(name, value),
        }
        Ok(())
    }

    fn write_group(&mut self, path: &Path, text: &str) -> io::Result<()> {
        let invalid = || io::Error::from(Errno::INVAL);
        let (Some(directory), Some(file)) = (path.parent(), path.file_name()) else {
            return Err(not_found());
        };
        let children = self.groups.keys().filter(|p| p.parent() == Some(directory));
        let busy = children.filter_map(|p| self.groups.get(p)).any(|g| g.subtree.contains("io"));
        let Some(group) = self.groups.get_mut(directory) else {
            return Err(not_found());
        };
        let file = file.to_string_lossy();
        if file == "cgroup.procs" {
            group.processes.insert(text.parse().map_err(|_| invalid())?);
            return Ok(());
        }
        if file == "cgroup.subtree_control" {
            match text {
                "+io" => drop(group.subtree.insert("io".to_owned())),
                "-io" if busy => return Err(Errno::BUSY.into()),
                "-io" => drop(group.subtree.remove("io")),
                _ => return Err(invalid()),
            }
            return Ok(());
        }
        if self.v2
            && file == "io.bfq.weight"
            && let Some(weight) = text.strip_prefix("default ")
        {
            group.default_weight = weight.parse().map_err(|_| invalid())?;
            group.weights.clear();
            return Ok(());
        }
        let (device, rest) = text.split_once(' ').ok_or_else(invalid)?;
        let device: DeviceNumber = device.parse().map_err(|_| invalid())?;
        let Some(disk) = self.disks.get_mut(&device) else {
            return Err(Errno::NODEV.into());
        };
        match file.as_ref() {
            "io.cost.model" => {
                let model = rest.strip_prefix("ctrl=user model=linear ").map(str::to_owned);
                if model.is_none() && rest != "ctrl=auto" {
                    return Err(invalid());
                }
                disk.cost_model = model;
                return Ok(());
            }
            "io.cost.qos" => {
                let qos = rest.strip_prefix("enable=1 ctrl=user ").map(str::to_owned);
                if qos.is_none() && rest != "enable=0 ctrl=auto" {
                    return Err(invalid());
                }
                disk.wbt_lat_usec = if qos.is_some() { 0 } else { 2000 };
                disk.cost_qos = qos;
                return Ok(());
            }
            "io.weight" if rest == "default" => {
                group.cost_weights.remove(&device);
                return Ok(());
            }
            "io.weight" => {
                let weight = rest.parse().map_err(|_| invalid())?;
                group.cost_weights.insert(device, weight);
                return Ok(());
            }
            _ => {}
        }
        if file.contains("bfq") {
            if disk.scheduler != "bfq" {
                return Err(Errno::OPNOTSUPP.into());
            }
            if rest == "default" {
                group.weights.remove(&device);
                return Ok(());
            }
            let weight: u64 = rest.parse().map_err(|_| invalid())?;
            if !(1..=1000).contains(&weight) {
                return Err(Errno::RANGE.into());
            }
            group.weights.insert(device, weight);
            return Ok(());
        }
        if self.v2 {
            for pair in rest.split(' ') {
                let (key, value) = pair.split_once('=').ok_or_else(invalid)?;
                let index = LIMIT_KEYS.iter().position(|k| *k == key).ok_or_else(invalid)?;
                match value {
                    "max" => drop(group.limits.remove(&(device, index))),
                    "0" => return Err(Errno::RANGE.into()),
                    _ => {
                        let value = value.parse().map_err(|_| invalid())?;
                        group.limits.insert((device, index), value);
                    }
                }
            }
            return Ok(());
        }
        let index = LIMIT_FILES.iter().position(|f| *f == file).ok_or_else(invalid)?;
        let value: u64 = rest.parse().map_err(|_| invalid())?;
        let value = if index < 2 { value } else { value & u64::from(u32::MAX) };
        if value == 0 {
            group.limits.remove(&(device, index));
        } else {
            group.limits.insert((device, index), value);
        }
        Ok(())
    }

    fn list(&self, path: &Path) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for file in self.files.keys().chain(self.groups.keys()) {
            let first = file.strip_prefix(path).ok().and_then(|p| p.components().next());
            names.extend(first.map(|c| c.as_os_str().to_string_lossy().into_owned()));
        }
        if let Some((number, file)) = self.disk_file(path)
            && file == "queue/iosched"
            && let Some(disk) = self.disks.get(&number)
        {
            names.extend(disk.iosched.keys().cloned());
            if disk.iosched.contains_key("slice_idle_us") {
                names.insert("slice_idle".to_owned());
            }
        }
        if path == Path::new("/sys/block") {
            names.extend(self.disks.values().map(|d| d.name.clone()));
        }
        names
    }
}

impl Sysfs for FakeSysfs {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.kernel().read(path).ok_or_else(not_found)
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.kernel().write(path, text)
    }

    fn exists(&self, path: &Path) -> bool {
        let kernel = self.kernel();
        kernel.read(path).is_some()
            || kernel.groups.contains_key(path)
            || !kernel.list(path).is_empty()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let names = self.kernel().list(path);
        if names.is_empty() { Err(not_found()) } else { Ok(names.into_iter().collect()) }
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        let kernel = self.kernel();
        let number = path.file_name().and_then(|n| n.to_str()?.parse::<DeviceNumber>().ok());
        let number = number.ok_or_else(not_found)?;
        if let Some(partition) = kernel.partitions.get(&number) {
            return Ok(Path::new("../../block").join(&partition.disk).join(&partition.name));
        }
        let disk = kernel.disks.get(&number).ok_or_else(not_found)?;
        Ok(Path::new("../../block").join(&disk.name))
    }

    fn inode(&self, path: &Path) -> io::Result<u64> {
        self.kernel().groups.get(path).map(|g| g.inode).ok_or_else(not_found)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        self.device_number(path).map(|_| path.to_owned())
    }

    fn device_number(&self, path: &Path) -> io::Result<Option<DeviceNumber>> {
        let kernel = self.kernel();
        if kernel.files.contains_key(path) {
            return Ok(None);
        }
        let name = path.strip_prefix("/dev").ok().and_then(Path::to_str).ok_or_else(not_found)?;
        let disk = kernel.disks.iter().find(|(_, d)| d.name == name).map(|(n, _)| *n);
        let partition = kernel.partitions.iter().find(|(_, p)| p.name == name).map(|(n, _)| *n);
        disk.or(partition).map(Some).ok_or_else(not_found)
    }

    fn file_extents(&self, path: &Path) -> io::Result<Vec<FileExtent>> {
        // A file of this tree has them as its text: `LOGICAL PHYSICAL LENGTH` a line.
        let text = self.read(path)?;
        let numbers = |line: &str| -> Option<FileExtent> {
            let mut fields = line.split(' ').map(|field| field.parse().ok());
            let mut next = || fields.next().flatten();
            Some(FileExtent { logical: next()?, physical: next()?, length: next()? })
        };
        Ok(text.lines().filter_map(numbers).collect())
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut kernel = self.kernel();
        if kernel.groups.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if !path.parent().is_some_and(|p| kernel.groups.contains_key(p)) {
            return Err(not_found());
        }
        kernel.counter += 1;
        let group = Group::new(kernel.counter);
        kernel.groups.insert(path.to_path_buf(), group);
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut kernel = self.kernel();
        let group = kernel.groups.get(path).ok_or_else(not_found)?;
        let has_child = kernel.groups.keys().any(|p| p.parent() == Some(path));
        if has_child || !group.processes.is_empty() {
            return Err(Errno::BUSY.into());
        }
        kernel.groups.remove(path);
        Ok(())
    }

    fn kill(&self, pid: u32) -> io::Result<()> {
        let mut kernel = self.kernel();
        if !kernel.unkillable.contains(&pid) {
            for group in kernel.groups.values_mut() {
                group.processes.remove(&pid);
            }
        }
        Ok(())
    }
}
