//! A cgroup whose disk is slow: what a server in it does stays in flight.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rtvirtio_host::{CgroupVersion, Host};
use rustix::fs::{major, minor};

use super::server::Image;
use crate::scratch_disk::Groups;

/// The cgroup, and the disk that an image lies on.
pub(crate) struct Slow {
    groups: Groups,
    version: CgroupVersion,
    disk: String,
}

impl Slow {
    /// None where the image lies on no disk, as in tmpfs; says so by name.
    pub(crate) fn disk_of(image: &Image, test: &str) -> Option<Self> {
        let device = std::fs::metadata(image.directory()).unwrap().dev();
        let node = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        let Ok(mut node) = std::fs::canonicalize(node) else {
            let why = "temporary files lie on no disk (TMPDIR=... for another place)";
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
            return None;
        };
        // Limits are for whole disks.
        if node.join("partition").exists() {
            node.pop();
        }
        let disk = std::fs::read_to_string(node.join("dev")).unwrap().trim().to_owned();
        let version = Host::new("/").cgroup_version().unwrap();
        Some(Self { groups: Groups::make(&["server"]), version, disk })
    }

    fn file(&self, name: &str) -> PathBuf {
        Path::new(self.version.mount()).join(self.groups.path("server")).join(name)
    }

    /// For the server that is to be slow.
    pub(crate) fn procs(&self) -> PathBuf {
        self.file("cgroup.procs")
    }

    /// So many reads, and as many writes, in a second; or as the disk can.
    pub(crate) fn limit(&self, iops: Option<u32>) {
        let disk = &self.disk;
        match &self.version {
            CgroupVersion::V1 { .. } => {
                let limit = format!("{disk} {}", iops.unwrap_or(0));
                for kind in ["read", "write"] {
                    let file = self.file(&format!("blkio.throttle.{kind}_iops_device"));
                    std::fs::write(file, &limit).unwrap();
                }
            }
            CgroupVersion::V2 { .. } => {
                let iops = iops.map_or("max".to_owned(), |iops| iops.to_string());
                let limit = format!("{disk} riops={iops} wiops={iops}");
                std::fs::write(self.file("io.max"), limit).unwrap();
            }
        }
    }
}
