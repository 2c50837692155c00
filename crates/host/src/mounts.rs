//! The mounts that this process sees, and which of them a path leads to.
//!
//! `/proc/self/mountinfo` (proc_pid_mountinfo(5)) lists hidden mounts too: those that another one covers, on the same
//! directory or on one above it. So a path is followed as the kernel does (`__follow_mount_rcu()`): from the root on, at
//! each directory, to the mount that lies there on the mount that was reached, until none does. The order of the list does
//! not tell: a root that an initramfs has switched to comes behind what was moved onto it.
//!
//! Properties: `mount_that_another_one_covers_is_not_what_is_there`, `root_may_come_behind_what_lies_on_it`,
//! `circle_of_mounts_ends`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::cgroup::unescape;
use crate::sysfs::DeviceNumber;

/// A line of mountinfo.
#[derive(Debug)]
pub(crate) struct Mounted<'a> {
    id: u64,
    parent: u64,
    /// The device of the filesystem; of major 0 if it has none.
    pub(crate) number: DeviceNumber,
    /// Where it is mounted.
    pub(crate) mount: PathBuf,
    /// The filesystem's type.
    pub(crate) kind: &'a str,
    pub(crate) source: PathBuf,
    /// Options of the filesystem, separated by commas.
    pub(crate) options: &'a str,
}

impl<'a> Mounted<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ');
        let (id, parent) = (before.next()?.parse().ok()?, before.next()?.parse().ok()?);
        let (number, mount) = (before.next()?.parse().ok()?, before.nth(1)?);
        let mut after = after.split(' ');
        let (kind, source) = (after.next()?, after.next()?);
        let options = after.next().unwrap_or_default();
        let (mount, source) = (unescape(mount), unescape(source));
        Some(Self { id, parent, number, mount, kind, source, options })
    }
}

/// All lines of mountinfo.
#[derive(Debug)]
pub(crate) struct Mounts<'a> {
    all: Vec<Mounted<'a>>,
    ids: BTreeSet<u64>,
}

impl<'a> Mounts<'a> {
    pub(crate) fn parse(mountinfo: &'a str) -> Self {
        let all: Vec<Mounted<'a>> = mountinfo.lines().filter_map(Mounted::parse).collect();
        let ids = all.iter().map(|mounted| mounted.id).collect();
        Self { all, ids }
    }

    /// All, hidden ones among them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Mounted<'a>> {
        self.all.iter()
    }

    /// Those that a path leads to.
    pub(crate) fn visible(&self) -> impl Iterator<Item = &Mounted<'a>> {
        let is_there = move |mounted: &&Mounted<'a>| {
            self.holding(&mounted.mount).is_some_and(|found| found.id == mounted.id)
        };
        self.all.iter().filter(is_there)
    }

    /// The mount that `path`, which is absolute and has no symbolic links, leads to.
    pub(crate) fn holding(&self, path: &Path) -> Option<&Mounted<'a>> {
        let on_the_way: Vec<&Mounted<'a>> =
            self.all.iter().filter(|mounted| path.starts_with(&mounted.mount)).collect();
        let places: Vec<&Path> = path.ancestors().collect();
        let mut reached: Option<&Mounted<'a>> = None;
        for place in places.into_iter().rev() {
            let here = on_the_way.iter().copied().filter(|mounted| mounted.mount == place);
            // The root lies on a mount that is not listed. After chroot(2) to a directory others do.
            if let Some(first) = here.clone().rfind(|mounted| self.is_first(mounted)) {
                reached = Some(first);
            }
            // Each once at most, whatever the list says.
            for _ in 0..on_the_way.len() {
                let lies_on = |mounted: &&Mounted<'a>| {
                    reached.is_some_and(|on| on.id == mounted.parent && on.id != mounted.id)
                };
                let Some(next) = here.clone().rfind(lies_on) else { break };
                reached = Some(next);
            }
        }
        reached
    }

    /// Whether what it lies on is not listed.
    fn is_first(&self, mounted: &Mounted<'a>) -> bool {
        mounted.parent == mounted.id || !self.ids.contains(&mounted.parent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources<'a>(mounts: &'a Mounts<'_>, paths: &[&str]) -> Vec<&'a str> {
        let source =
            |path: &&str| mounts.holding(Path::new(path)).unwrap().source.to_str().unwrap();
        paths.iter().map(source).collect()
    }

    #[test]
    fn mount_that_another_one_covers_is_not_what_is_there() {
        let mounts = Mounts::parse(
            "1 0 8:1 / / rw - ext4 root rw\n\
             2 1 8:2 / /vm/images rw - ext4 images rw\n\
             3 2 8:3 / /vm/images rw - ext4 later rw\n\
             4 1 8:4 / /srv/a\\040b rw - ext4 srv rw\n\
             5 1 0:44 / /vm rw - nfs4 server:/vm rw\n",
        );
        let paths = ["/vm/images/db.img", "/vm", "/srv/a b/x", "/srv", "/vmx"];
        assert_eq!(sources(&mounts, &paths), ["server:/vm", "server:/vm", "srv", "root", "root"]);
        let visible: Vec<u64> = mounts.visible().map(|mounted| mounted.id).collect();
        assert_eq!(visible, [1, 4, 5]);
        // Not covered from above, but at the same place.
        let mounts = Mounts::parse(
            "1 0 8:1 / / rw - ext4 root rw\n\
             3 2 8:3 / /vm rw - ext4 later rw\n\
             2 1 8:2 / /vm rw - ext4 first rw\n\
             4 3 8:4 / /vm/db rw - ext4 db rw\n",
        );
        assert_eq!(sources(&mounts, &["/vm/x", "/vm/db/x"]), ["later", "db"]);
    }

    #[test]
    fn root_may_come_behind_what_lies_on_it() {
        let mounts = Mounts::parse(
            "21 61 0:20 / /sys rw - sysfs sysfs rw\n\
             30 21 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n\
             61 1 253:0 / / rw shared:1 - xfs /dev/mapper/vg-root rw,attr2\n",
        );
        let paths = ["/sys/fs/cgroup/a", "/sys/block", "/var"];
        assert_eq!(sources(&mounts, &paths), ["cgroup2", "sysfs", "/dev/mapper/vg-root"]);
        assert_eq!(mounts.visible().count(), 3);
        assert_eq!(mounts.holding(Path::new("/var")).unwrap().options, "rw,attr2");
        // Below chroot(2) there may be none at the root.
        let mounts = Mounts::parse("30 22 8:1 / /images rw - ext4 images rw\n");
        assert_eq!(sources(&mounts, &["/images/x"]), ["images"]);
        assert!(mounts.holding(Path::new("/other")).is_none());
    }

    #[test]
    fn circle_of_mounts_ends() {
        let mounts = Mounts::parse(
            "1 0 8:1 / / rw - ext4 root rw\n\
             2 1 8:2 / /a rw - ext4 a rw\n\
             3 2 8:3 / /a rw - ext4 b rw\n\
             2 3 8:4 / /a rw - ext4 c rw\n\
             4 4 8:5 / /b rw - ext4 d rw\n\
             x 1 8:5 / /b rw - ext4 e rw\n\
             7 1 8:5 / /b\n",
        );
        assert!(mounts.holding(Path::new("/a")).is_some());
        assert_eq!(sources(&mounts, &["/b"]), ["d"]);
    }
}
