//! Other programs that set the same knobs, so that a drift has a name.
//!
//! - udev rules that assign `ATTR{queue/…}`: re-run at every `change` event.
//!   A file in `/etc` hides one of the same name in `/run` and `/lib` (udev(7)).
//! - TuneD with an active profile: its disk plug-in sets schedulers.
//! - systemd units with `IO…=` or `BlockIO…=`: systemd writes a unit's cgroup
//!   again whenever it realises the unit (systemd.resource-control(5)).
//!
//! Properties: `udev_match_is_no_assignment`, `udev_rule_in_etc_hides_the_one_in_lib`,
//! `unit_with_io_limit_is_found`, `file_of_a_server_is_not_read`, `tuned_profile_is_found`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::storage::Stack;
use crate::sysfs::Sysfs;
use crate::systemd::BY_NUMBER;

const UDEV: [&str; 4] =
    ["/etc/udev/rules.d", "/run/udev/rules.d", "/usr/lib/udev/rules.d", "/lib/udev/rules.d"];
const SYSTEMD: [&str; 5] = [
    "/etc/systemd/system",
    "/etc/systemd/system.control",
    "/run/systemd/system",
    "/run/systemd/system.control",
    "/run/systemd/transient",
];
const UNIT_KEYS: [&str; 10] = [
    "IOWeight",
    "StartupIOWeight",
    "IODeviceWeight",
    "IOReadBandwidthMax",
    "IOWriteBandwidthMax",
    "IOReadIOPSMax",
    "IOWriteIOPSMax",
    "IODeviceLatencyTargetSec",
    "BlockIOWeight",
    "BlockIODeviceWeight",
];

/// Which program it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WriterKind {
    /// A udev rule.
    Udev,
    /// A TuneD profile.
    Tuned,
    /// A systemd unit.
    Systemd,
}

/// A program that may set the same knobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OtherWriter {
    /// Which program.
    pub kind: WriterKind,
    /// The file that tells it to.
    pub file: PathBuf,
    /// The line of that file.
    pub line: String,
    /// Whether the program was seen running, where that matters.
    pub running: Option<bool>,
}

/// Everything found.
pub(crate) fn find(sysfs: &dyn Sysfs) -> Vec<OtherWriter> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for directory in UDEV {
        for name in sysfs.list(Path::new(directory)).unwrap_or_default() {
            if name.ends_with(".rules") && seen.insert(name.clone()) {
                let file = Path::new(directory).join(name);
                matching(sysfs, &file, WriterKind::Udev, sets_queue_attribute, &mut found);
            }
        }
    }
    found.extend(tuned(sysfs));
    for directory in SYSTEMD {
        units(sysfs, Path::new(directory), &mut found);
    }
    found
}

fn matching(
    sysfs: &dyn Sysfs,
    file: &Path,
    kind: WriterKind,
    wanted: fn(&str) -> bool,
    found: &mut Vec<OtherWriter>,
) {
    // A unit may be a link to a file of a server (`systemctl link`), who may answer no more.
    if Stack::beyond_reach(sysfs, file).is_some() {
        return;
    }
    // An unreadable file (a link to /dev/null masks a rule or unit) sets nothing.
    let text = sysfs.read(file).unwrap_or_default();
    let is_live = |l: &&str| !l.starts_with(['#', ';']) && wanted(l);
    found.extend(text.lines().map(str::trim).filter(is_live).map(|line| OtherWriter {
        kind,
        file: file.to_path_buf(),
        line: line.to_owned(),
        running: None,
    }));
}

/// `ATTR{queue/x}="y"` and `ATTR{../queue/x}="y"` assign, `==` and `!=` match. What is for zoned disks alone
/// (64-btrfs-zoned.rules) sets nothing of those that VMs share.
fn sets_queue_attribute(line: &str) -> bool {
    if line.contains("queue/zoned}==\"host-") {
        return false;
    }
    line.split("ATTR{").skip(1).any(|rest| {
        let Some((key, value)) = rest.split_once('}') else {
            return false;
        };
        let value = value.trim_start();
        let assigns = value.starts_with("+=")
            || value.starts_with(":=")
            || (value.starts_with('=') && !value.starts_with("=="));
        assigns && key.contains("queue/")
    })
}

fn tuned(sysfs: &dyn Sysfs) -> Option<OtherWriter> {
    let file = PathBuf::from("/etc/tuned/active_profile");
    let line = sysfs.read(&file).ok()?.trim().to_owned();
    if line.is_empty() {
        return None;
    }
    let is_tuned = |pid: &String| {
        let comm = sysfs.read(&Path::new("/proc").join(pid).join("comm"));
        comm.is_ok_and(|c| c.trim() == "tuned")
    };
    let mut pids = sysfs.list(Path::new("/proc")).unwrap_or_default();
    pids.retain(|p| p.bytes().all(|b| b.is_ascii_digit()));
    let running = Some(pids.iter().any(is_tuned));
    Some(OtherWriter { kind: WriterKind::Tuned, file, line, running })
}

fn units(sysfs: &dyn Sysfs, directory: &Path, found: &mut Vec<OtherWriter>) {
    let sets = |line: &str| {
        // What resets a list sets nothing, and a device by its number is what rtvirtio writes.
        line.split_once('=').is_some_and(|(key, value)| {
            let is_own = value.is_empty() || value.starts_with(BY_NUMBER);
            UNIT_KEYS.contains(&key.trim()) && !is_own
        })
    };
    for name in sysfs.list(directory).unwrap_or_default() {
        let path = directory.join(&name);
        // Drop-ins lie one level below.
        if name.ends_with(".d") {
            if Stack::beyond_reach(sysfs, &path).is_some() {
                continue;
            }
            for drop_in in sysfs.list(&path).unwrap_or_default() {
                matching(sysfs, &path.join(drop_in), WriterKind::Systemd, sets, found);
            }
        } else if [".service", ".slice", ".scope"].iter().any(|s| name.ends_with(s)) {
            matching(sysfs, &path, WriterKind::Systemd, sets, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeSysfs;

    fn kinds(sysfs: &FakeSysfs) -> Vec<WriterKind> {
        find(sysfs).iter().map(|w| w.kind).collect()
    }

    #[test]
    fn udev_match_is_no_assignment() {
        assert!(sets_queue_attribute("KERNEL==\"sd?\", ATTR{queue/scheduler}=\"none\""));
        assert!(sets_queue_attribute("ATTR{../queue/scheduler} = \"none\""));
        assert!(!sets_queue_attribute("ATTR{queue/rotational}==\"0\", RUN+=\"x\""));
        assert!(!sets_queue_attribute(
            "ATTR{queue/zoned}==\"host-managed\", ATTR{queue/scheduler}=\"mq-deadline\""
        ));
        assert!(sets_queue_attribute(
            "ATTR{queue/zoned}==\"none\", ATTR{queue/scheduler}=\"mq-deadline\""
        ));
        assert!(!sets_queue_attribute("ATTR{queue/rotational}!=\"0\", ATTR{size}=\"1\""));
    }

    #[test]
    fn udev_rule_in_etc_hides_the_one_in_lib() {
        let sysfs = FakeSysfs::bare();
        sysfs.put("/lib/udev/rules.d/60-io.rules", "ATTR{queue/scheduler}=\"none\"\n");
        assert_eq!(kinds(&sysfs), [WriterKind::Udev]);
        sysfs.put("/etc/udev/rules.d/60-io.rules", "# ATTR{queue/scheduler}=\"none\"\n");
        assert_eq!(kinds(&sysfs), []);
    }

    #[test]
    fn unit_with_io_limit_is_found() {
        let sysfs = FakeSysfs::bare();
        sysfs.put("/run/systemd/transient/a.scope", "[Scope]\nIOWeight=200\n");
        sysfs.put("/etc/systemd/system/b.service.d/io.conf", "IOReadBandwidthMax=/dev/sda 5M\n");
        sysfs.put("/etc/systemd/system/c.service", "IOSchedulingClass=idle\n");
        let own = "[Scope]\nIODeviceWeight=\nIODeviceWeight=/dev/block/252:0 6700\n";
        sysfs.put("/run/systemd/transient/a.scope.d/50-IODeviceWeight.conf", own);
        assert_eq!(kinds(&sysfs), [WriterKind::Systemd, WriterKind::Systemd]);
    }

    #[test]
    fn file_of_a_server_is_not_read() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for directory in ["proc/self", "etc/systemd/system/b.service.d", "far/c.service.d"] {
            std::fs::create_dir_all(at(directory)).unwrap();
        }
        let mounts =
            "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:44 / /far rw - nfs4 server:/export rw\n";
        std::fs::write(at("proc/self/mountinfo"), mounts).unwrap();
        for file in
            ["far/a.service", "far/c.service.d/io.conf", "etc/systemd/system/b.service.d/io.conf"]
        {
            std::fs::write(at(file), "IOReadBandwidthMax=/dev/sda 5M\n").unwrap();
        }
        for name in ["a.service", "c.service.d"] {
            // Through which they would be read.
            let (target, link) =
                (format!("../../../far/{name}"), format!("etc/systemd/system/{name}"));
            std::os::unix::fs::symlink(target, at(&link)).unwrap();
        }
        let sysfs = crate::sysfs::RealSysfs::new(root.path());
        let found = find(&sysfs);
        let files: Vec<&Path> = found.iter().map(|writer| writer.file.as_path()).collect();
        assert_eq!(files, [Path::new("/etc/systemd/system/b.service.d/io.conf")]);
    }

    #[test]
    fn tuned_profile_is_found() {
        let sysfs = FakeSysfs::bare();
        sysfs.put("/etc/tuned/active_profile", "\n");
        assert_eq!(kinds(&sysfs), []);
        sysfs.put("/etc/tuned/active_profile", "throughput-performance\n");
        assert_eq!(find(&sysfs)[0].running, Some(false));
        sysfs.put("/proc/812/comm", "tuned\n");
        assert_eq!(find(&sysfs)[0].running, Some(true));
    }
}
