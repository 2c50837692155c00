//! The cgroup that carries a VM's block I/O, on v1 (`blkio`) and v2 (`io`).
//!
//! Terms: *weight line* is a cgroup's own weight for one device; without one
//! the cgroup's default holds. A limit that is absent is no limit.
//!
//! Files, per `Documentation/admin-guide/cgroup-v1/blkio-controller.rst`,
//! `cgroup-v2.rst` and `block/bfq-iosched.rst`; formats as kernel 6.18 shows them:
//!
//! | knob | v1 | v2 |
//! | --- | --- | --- |
//! | weight | `blkio.bfq.weight_device` | `io.bfq.weight` |
//! | — reads | `default 100`, then a line `7:0 300` each | the same |
//! | — writes | `7:0 300`; `7:0 default` removes the line | the same |
//! | limits | `blkio.throttle.{read,write}_{bps,iops}_device` | `io.max` |
//! | — reads | `7:0 N`; no line is no limit | `7:0 rbps=N wbps=max riops=max wiops=max` |
//! | — writes | `7:0 N`; `7:0 0` removes | `7:0 rbps=N`; `7:0 rbps=max` removes |
//!
//! iocost is v2's alone. Its model and latencies are a device's, in files of the root, and its weights in
//! `io.weight`, which reads and writes as `io.bfq.weight` does:
//!
//! | knob | file | reads and writes |
//! | --- | --- | --- |
//! | model | `io.cost.model` | `7:0 ctrl=user model=linear rbps=N …`; `ctrl=auto` is the kernel's guess |
//! | latencies | `io.cost.qos` | `7:0 enable=1 ctrl=user rpct=99.00 …`; `ctrl=auto` is the kernel's guess, `enable=0` is off |
//!
//! A device that iocost has never controlled has no line.
//!
//! A weight line lives in the device's bfq: selecting another scheduler drops
//! it, and under another scheduler writing one fails with EOPNOTSUPP. Writing
//! `blkio.bfq.weight` drops every weight line of that cgroup, so nothing here
//! writes it. Limits outlive a change of scheduler.
//!
//! Properties: `mount_is_found_on_v1_v2_and_hybrid`, `mount_is_found_beside_one_whose_name_is_not_utf8`,
//! `weight_line_is_told_from_default`, `limits_are_read_from_both_versions`,
//! `cgroup_path_cannot_leave_the_hierarchy`.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use rtvirtio_spec::settings::{COST_AUTO, COST_OFF, Limit};
use serde::Serialize;

use crate::HostError;
use crate::mounts::Mounts;
use crate::sysfs::{DeviceNumber, Sysfs};

/// Which cgroup version carries block I/O, and where its hierarchy is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "version", rename_all = "snake_case")]
pub enum CgroupVersion {
    /// The v1 `blkio` controller.
    V1 {
        /// Its mount point.
        mount: PathBuf,
    },
    /// The v2 `io` controller.
    V2 {
        /// Its mount point.
        mount: PathBuf,
    },
}

impl CgroupVersion {
    /// The hierarchy's mount point.
    #[must_use]
    pub fn mount(&self) -> &Path {
        match self {
            Self::V1 { mount } | Self::V2 { mount } => mount,
        }
    }

    /// Finds the hierarchy in `/proc/self/mountinfo`.
    pub(crate) fn find(sysfs: &dyn Sysfs) -> Result<Self, HostError> {
        let mountinfo = read(sysfs, Path::new("/proc/self/mountinfo"))?;
        let mut v2 = None;
        // Of one that another mount covers no file can be had.
        for mounted in Mounts::parse(&mountinfo).visible() {
            let mount = mounted.mount.clone();
            if mounted.kind == "cgroup" && mounted.options.split(',').any(|o| o == "blkio") {
                return Ok(Self::V1 { mount });
            }
            if mounted.kind == "cgroup2" && v2.is_none() {
                let controllers = sysfs.read(&mount.join("cgroup.controllers"));
                if controllers.is_ok_and(|c| c.split_whitespace().any(|c| c == "io")) {
                    v2 = Some(Self::V2 { mount });
                }
            }
        }
        v2.ok_or(HostError::NoIoController)
    }

    /// The cgroup at `path` below the mount.
    pub(crate) fn cgroup(&self, path: &Path) -> Result<Cgroup, HostError> {
        let path = relative(path)?;
        let v2 = matches!(self, Self::V2 { .. });
        Ok(Cgroup { directory: self.mount().join(path), v2 })
    }

    /// Whether the kernel's iocost is there.
    pub(crate) fn has_cost(&self, sysfs: &dyn Sysfs) -> bool {
        matches!(self, Self::V2 { .. }) && sysfs.exists(&self.cost_file(CostFile::Qos))
    }

    fn cost_file(&self, file: CostFile) -> PathBuf {
        self.mount().join(match file {
            CostFile::Model => "io.cost.model",
            CostFile::Qos => "io.cost.qos",
        })
    }

    /// What iocost has for `device`, as a knob's text.
    pub(crate) fn cost(
        &self,
        sysfs: &dyn Sysfs,
        file: CostFile,
        device: DeviceNumber,
    ) -> Result<(PathBuf, String), HostError> {
        let path = self.cost_file(file);
        let text = read(sysfs, &path)?;
        let line = line_of(&text, &device.to_string()).unwrap_or_default();
        let has = |pair: &str| line.split(' ').any(|found| found == pair);
        let (is_set, unset) = match file {
            CostFile::Model => (has("ctrl=user"), COST_AUTO),
            // The kernel guesses anew by itself: written down as somebody's, its guess would be fixed by a rollback.
            CostFile::Qos if has("enable=1") && has("ctrl=auto") => (false, COST_AUTO),
            CostFile::Qos => (has("enable=1"), COST_OFF),
        };
        if !is_set {
            return Ok((path, unset.to_owned()));
        }
        let is_own =
            |pair: &&str| !["ctrl=", "model=", "enable="].iter().any(|key| pair.starts_with(key));
        let own: Vec<&str> = line.split(' ').filter(is_own).collect();
        Ok((path, own.join(" ")))
    }

    /// Gives iocost `text`, a knob's, for `device`.
    pub(crate) fn cost_write(&self, file: CostFile, device: DeviceNumber, text: &str) -> Write {
        let rest = match file {
            CostFile::Model if text == COST_AUTO => "ctrl=auto".to_owned(),
            CostFile::Model => format!("ctrl=user model=linear {text}"),
            CostFile::Qos if text == COST_OFF => "enable=0 ctrl=auto".to_owned(),
            CostFile::Qos if text == COST_AUTO => "enable=1 ctrl=auto".to_owned(),
            CostFile::Qos => format!("enable=1 ctrl=user {text}"),
        };
        Write { file: self.cost_file(file), text: format!("{device} {rest}") }
    }
}

/// A file of iocost's in the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CostFile {
    Model,
    Qos,
}

/// `path` without a leading `/`; refuses what could leave the hierarchy.
pub(crate) fn relative(path: &Path) -> Result<PathBuf, HostError> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let plain = below.components().all(|c| matches!(c, Component::Normal(_)));
    if plain && below.components().next().is_some() {
        Ok(below.to_path_buf())
    } else {
        Err(HostError::BadCgroupPath { path: path.to_path_buf() })
    }
}

/// mountinfo writes space, tab, newline and backslash as three octal digits.
pub(crate) fn unescape(text: &str) -> PathBuf {
    let mut plain = text.to_owned();
    for (code, character) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        plain = plain.replace(code, character);
    }
    plain.into()
}

pub(crate) fn read(sysfs: &dyn Sysfs, file: &Path) -> Result<String, HostError> {
    sysfs.read(file).map_err(|source| HostError::Read { file: file.to_path_buf(), source })
}

/// One cgroup's directory, with the file formats of its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cgroup {
    pub(crate) directory: PathBuf,
    v2: bool,
}

/// One write to a kernel file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) file: PathBuf,
    pub(crate) text: String,
}

impl Cgroup {
    pub(crate) fn weight_file(&self) -> PathBuf {
        self.directory.join(if self.v2 { "io.bfq.weight" } else { "blkio.bfq.weight_device" })
    }

    fn limit_file(&self, limit: Limit) -> PathBuf {
        let v1 = match limit {
            _ if self.v2 => "io.max",
            Limit::ReadBps => "blkio.throttle.read_bps_device",
            Limit::WriteBps => "blkio.throttle.write_bps_device",
            Limit::ReadIops => "blkio.throttle.read_iops_device",
            Limit::WriteIops => "blkio.throttle.write_iops_device",
        };
        self.directory.join(v1)
    }

    /// The cgroup's weight under iocost for `device`: its line, or the default.
    pub(crate) fn cost_weight(
        &self,
        sysfs: &dyn Sysfs,
        device: DeviceNumber,
    ) -> Result<String, HostError> {
        let file = self.directory.join("io.weight");
        let text = read(sysfs, &file)?;
        let line = line_of(&text, &device.to_string()).or_else(|| line_of(&text, "default"));
        line.map(str::to_owned).ok_or_else(|| HostError::Format {
            file,
            found: text.trim().to_owned(),
            expected: "weights with a default",
        })
    }

    /// The cgroup's own weight under iocost for `device`; `None` if the default holds.
    pub(crate) fn cost_weight_line(
        &self,
        sysfs: &dyn Sysfs,
        device: DeviceNumber,
    ) -> Result<Option<String>, HostError> {
        let text = read(sysfs, &self.directory.join("io.weight"))?;
        Ok(line_of(&text, &device.to_string()).map(str::to_owned))
    }

    /// Sets the weight under iocost for `device`; `None` removes the line.
    pub(crate) fn cost_weight_write(&self, device: DeviceNumber, weight: Option<&str>) -> Write {
        let text = format!("{device} {}", weight.unwrap_or("default"));
        Write { file: self.directory.join("io.weight"), text }
    }

    /// The cgroup's own weight for `device`; `None` if the default holds.
    pub(crate) fn weight_line(
        &self,
        sysfs: &dyn Sysfs,
        device: DeviceNumber,
    ) -> Result<Option<String>, HostError> {
        let text = read(sysfs, &self.weight_file())?;
        Ok(line_of(&text, &device.to_string()).map(str::to_owned))
    }

    /// The lines of the weight file: `default` or a device's number, and the weight. None without
    /// bfq.
    pub(crate) fn weights(&self, sysfs: &dyn Sysfs) -> BTreeMap<String, String> {
        let text = sysfs.read(&self.weight_file()).unwrap_or_default();
        let pair = |line: &str| line.split_once(' ').map(|(n, w)| (n.to_owned(), w.to_owned()));
        text.lines().filter_map(pair).collect()
    }

    /// The weight that holds for `device`: its line, or the default.
    pub(crate) fn weight(
        &self,
        sysfs: &dyn Sysfs,
        device: DeviceNumber,
    ) -> Result<String, HostError> {
        let file = self.weight_file();
        let text = read(sysfs, &file)?;
        if let Some(w) = line_of(&text, &device.to_string()).or_else(|| line_of(&text, "default")) {
            return Ok(w.to_owned());
        }
        // An old v1 kernel's weight_device has no `default` line.
        let file = self.directory.join("blkio.bfq.weight");
        let default = if self.v2 { text } else { read(sysfs, &file)? };
        let default = default.trim();
        if !default.is_empty() && default.bytes().all(|b| b.is_ascii_digit()) {
            return Ok(default.to_owned());
        }
        Err(HostError::Format { file, found: default.to_owned(), expected: "a weight" })
    }

    /// The cgroup's limit on `device`; `None` if there is none.
    pub(crate) fn limit(
        &self,
        sysfs: &dyn Sysfs,
        device: DeviceNumber,
        limit: Limit,
    ) -> Result<Option<String>, HostError> {
        let text = read(sysfs, &self.limit_file(limit))?;
        let line = line_of(&text, &device.to_string());
        if !self.v2 {
            return Ok(line.map(str::to_owned));
        }
        let value = line.and_then(|l| {
            l.split(' ').find_map(|pair| pair.strip_prefix(key(limit))?.strip_prefix('='))
        });
        Ok(value.filter(|v| *v != "max").map(str::to_owned))
    }

    /// Sets the weight line for `device`; `None` removes it.
    pub(crate) fn weight_write(&self, device: DeviceNumber, weight: Option<&str>) -> Write {
        let text = format!("{device} {}", weight.unwrap_or("default"));
        Write { file: self.weight_file(), text }
    }

    /// Sets the limit on `device`; `None` removes it.
    pub(crate) fn limit_write(
        &self,
        device: DeviceNumber,
        limit: Limit,
        value: Option<&str>,
    ) -> Write {
        let text = if self.v2 {
            format!("{device} {}={}", key(limit), value.unwrap_or("max"))
        } else {
            format!("{device} {}", value.unwrap_or("0"))
        };
        Write { file: self.limit_file(limit), text }
    }
}

/// `io.max`'s key.
const fn key(limit: Limit) -> &'static str {
    match limit {
        Limit::ReadBps => "rbps",
        Limit::WriteBps => "wbps",
        Limit::ReadIops => "riops",
        Limit::WriteIops => "wiops",
    }
}

/// What follows `name` and a space on the line that starts with it.
pub(crate) fn line_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')).map(str::trim)
}

/// Every cgroup below the mount that has its own weight for `device`.
pub(crate) fn weight_lines(
    sysfs: &dyn Sysfs,
    version: &CgroupVersion,
    device: DeviceNumber,
) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(path) = open.pop() {
        let directory = version.mount().join(&path);
        // A cgroup may vanish while the tree is walked: then it has no weight to keep.
        for name in sysfs.list(&directory).unwrap_or_default() {
            if sysfs.exists(&directory.join(&name).join("cgroup.procs")) {
                open.push(path.join(&name));
            }
        }
        if let Ok(cgroup) = version.cgroup(&path)
            && let Ok(Some(weight)) = cgroup.weight_line(sysfs, device)
        {
            found.push((path, weight));
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;

    const DEVICE: DeviceNumber = DeviceNumber::new(7, 0);

    fn cgroup(v2: bool) -> Cgroup {
        Cgroup { directory: "/g".into(), v2 }
    }

    #[test]
    fn mount_is_found_on_v1_v2_and_hybrid() {
        let sysfs = FakeSysfs::bare();
        sysfs.put("/proc/self/mountinfo", "38 31 0:35 / /cg/a\\040b rw - cgroup cgroup rw,blkio\n");
        let found = CgroupVersion::find(&sysfs).unwrap();
        assert_eq!(found, CgroupVersion::V1 { mount: "/cg/a b".into() });

        sysfs.put("/proc/self/mountinfo", "31 23 0:28 / /cg rw,nosuid - cgroup2 cgroup2 rw\n");
        assert!(matches!(CgroupVersion::find(&sysfs), Err(HostError::NoIoController)));
        sysfs.put("/cg/cgroup.controllers", "cpuset cpu io memory\n");
        let found = CgroupVersion::find(&sysfs).unwrap();
        assert_eq!(found, CgroupVersion::V2 { mount: "/cg".into() });

        // Hybrid: a v2 mount without io comes first, v1 blkio carries it.
        sysfs.put("/cg/cgroup.controllers", "\n");
        let both = "1 0 0:1 / /cg rw - cgroup2 cgroup2 rw\n2 0 0:2 / /b rw - cgroup b rw,blkio\n";
        sysfs.put("/proc/self/mountinfo", both);
        assert_eq!(CgroupVersion::find(&sysfs).unwrap().mount(), Path::new("/b"));
        // Something else has been mounted over the first one.
        let lines = [
            "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
            "2 1 0:2 / /b rw - cgroup b rw,blkio",
            "3 2 0:3 / /b rw - tmpfs tmpfs rw",
            "4 1 0:2 / /c rw - cgroup b rw,blkio",
        ];
        sysfs.put("/proc/self/mountinfo", &lines.join("\n"));
        assert_eq!(CgroupVersion::find(&sysfs).unwrap().mount(), Path::new("/c"));
    }

    #[test]
    fn mount_is_found_beside_one_whose_name_is_not_utf8() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let of_user = b"36 31 0:40 / /home/u/\xff rw - fuse.x x rw\n".as_slice();
        let cgroups = b"38 31 0:35 / /cg rw - cgroup cgroup rw,blkio\n".as_slice();
        let mountinfo = [of_user, cgroups].concat();
        std::fs::write(root.path().join("proc/self/mountinfo"), mountinfo).unwrap();
        let found = CgroupVersion::find(&crate::sysfs::RealSysfs::new(root.path())).unwrap();
        assert_eq!(found, CgroupVersion::V1 { mount: "/cg".into() });
    }

    #[test]
    fn iocost_is_read_and_written_as_a_knobs_text() {
        let sysfs = FakeSysfs::bare();
        let version = CgroupVersion::V2 { mount: "/cg".into() };
        assert!(!version.has_cost(&sysfs));
        sysfs.put("/cg/io.cost.qos", "");
        sysfs.put("/cg/io.cost.model", "");
        assert!(version.has_cost(&sysfs));
        assert!(!CgroupVersion::V1 { mount: "/cg".into() }.has_cost(&sysfs));
        let of = |file| version.cost(&sysfs, file, DEVICE).unwrap().1;
        assert_eq!((of(CostFile::Model).as_str(), of(CostFile::Qos).as_str()), ("auto", "off"));
        // As Linux 6.18 shows them.
        let qos = "rpct=99.00 rlat=2000 wpct=99.00 wlat=2000 min=1.00 max=10000.00";
        let model = "rbps=9 rseqiops=7 rrandiops=7 wbps=9 wseqiops=7 wrandiops=7";
        let lines = |enable: u8, ctrl: &str| {
            sysfs.put(
                "/cg/io.cost.qos",
                &format!("8:0 enable=0\n7:0 enable={enable} ctrl=user {qos}\n"),
            );
            sysfs.put("/cg/io.cost.model", &format!("7:0 ctrl={ctrl} model=linear {model}\n"));
        };
        lines(1, "user");
        assert_eq!((of(CostFile::Model).as_str(), of(CostFile::Qos).as_str()), (model, qos));
        lines(0, "auto");
        assert_eq!((of(CostFile::Model).as_str(), of(CostFile::Qos).as_str()), ("auto", "off"));
        let text = |file, text| version.cost_write(file, DEVICE, text).text;
        assert_eq!(text(CostFile::Qos, "off"), "7:0 enable=0 ctrl=auto");
        assert_eq!(text(CostFile::Qos, qos), format!("7:0 enable=1 ctrl=user {qos}"));
        assert_eq!(text(CostFile::Model, "auto"), "7:0 ctrl=auto");
        assert_eq!(text(CostFile::Model, model), format!("7:0 ctrl=user model=linear {model}"));
        // On, with latencies that the kernel guesses.
        sysfs.put("/cg/io.cost.qos", &format!("7:0 enable=1 ctrl=auto {qos}\n"));
        assert_eq!(of(CostFile::Qos), "auto");
        assert_eq!(text(CostFile::Qos, "auto"), "7:0 enable=1 ctrl=auto");
    }

    #[test]
    fn weight_line_is_told_from_default() {
        let sysfs = FakeSysfs::bare();
        for (v2, file) in [(false, "/g/blkio.bfq.weight_device"), (true, "/g/io.bfq.weight")] {
            let group = cgroup(v2);
            sysfs.put(file, "default 100\n17:0 5\n7:0 300\n");
            assert_eq!(group.weight_line(&sysfs, DEVICE).unwrap().as_deref(), Some("300"));
            assert_eq!(group.weight(&sysfs, DEVICE).unwrap(), "300");
            sysfs.put(file, "default 100\n17:0 5\n");
            assert_eq!(group.weight_line(&sysfs, DEVICE).unwrap(), None);
            assert_eq!(group.weight(&sysfs, DEVICE).unwrap(), "100");
            assert_eq!(group.weight_write(DEVICE, None).text, "7:0 default");
        }
        sysfs.put("/g/blkio.bfq.weight_device", "");
        sysfs.put("/g/blkio.bfq.weight", "200\n");
        assert_eq!(cgroup(false).weight(&sysfs, DEVICE).unwrap(), "200");
    }

    #[test]
    fn limits_are_read_from_both_versions() {
        let sysfs = FakeSysfs::bare();
        sysfs.put("/g/blkio.throttle.read_bps_device", "7:0 1000\n");
        sysfs.put("/g/blkio.throttle.write_iops_device", "");
        sysfs.put(
            "/g/io.max",
            "8:0 rbps=5 wbps=max riops=max wiops=max\n7:0 rbps=1000 wbps=max riops=max wiops=7\n",
        );
        for v2 in [false, true] {
            let group = cgroup(v2);
            let read_bps = group.limit(&sysfs, DEVICE, Limit::ReadBps).unwrap();
            assert_eq!(read_bps.as_deref(), Some("1000"));
        }
        assert_eq!(cgroup(false).limit(&sysfs, DEVICE, Limit::WriteIops).unwrap(), None);
        assert_eq!(cgroup(true).limit(&sysfs, DEVICE, Limit::WriteBps).unwrap(), None);
        let wiops = cgroup(true).limit(&sysfs, DEVICE, Limit::WriteIops).unwrap();
        assert_eq!(wiops.as_deref(), Some("7"));
        assert_eq!(cgroup(true).limit_write(DEVICE, Limit::ReadBps, None).text, "7:0 rbps=max");
        assert_eq!(cgroup(false).limit_write(DEVICE, Limit::ReadBps, None).text, "7:0 0");
    }

    #[test]
    fn cgroup_path_cannot_leave_the_hierarchy() {
        assert_eq!(relative(Path::new("/a/b")).unwrap(), Path::new("a/b"));
        for bad in ["", "/", "../x", "a/../../x"] {
            assert!(relative(Path::new(bad)).is_err(), "{bad:?}");
        }
    }
}
