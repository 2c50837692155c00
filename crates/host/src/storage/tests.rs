//! Stacks on a kernel in memory.

use super::*;
use crate::fake::FakeSysfs;

/// A host with the disks sda and sdb.
fn host() -> FakeSysfs {
    let sysfs = FakeSysfs::v2();
    sysfs.add_disk("sda", DeviceNumber::new(8, 0), 1 << 21);
    sysfs.add_disk("sdb", DeviceNumber::new(8, 16), 1 << 21);
    sysfs.add_partition("sda1", DeviceNumber::new(8, 1), "sda", 1 << 20);
    sysfs
}

fn mount(sysfs: &FakeSysfs, lines: &[&str]) {
    sysfs.put("/proc/self/mountinfo", &lines.join("\n"));
}

fn names(stack: &Stack) -> Vec<&str> {
    stack.leaves.iter().map(|leaf| leaf.name.as_str()).collect()
}

#[test]
fn image_file_leads_through_lvm_and_crypt_to_its_disk() {
    let sysfs = host();
    sysfs.stack("dm-0", DeviceNumber::new(253, 0), &["sda1"]);
    sysfs.put("/sys/dev/block/253:0/dm/uuid", "CRYPT-LUKS2-0123-luks\n");
    sysfs.put("/sys/dev/block/253:0/dm/name", "luks\n");
    sysfs.stack("dm-1", DeviceNumber::new(253, 1), &["dm-0"]);
    sysfs.put("/sys/dev/block/253:1/dm/uuid", "LVM-abcdef\n");
    sysfs.put("/sys/dev/block/253:1/dm/name", "vg-images\n");
    mount(
        &sysfs,
        &[
            "22 1 0:20 / / rw - tmpfs tmpfs rw",
            "30 22 253:1 / /var/lib/vm\\040images rw,noatime shared:1 - xfs /dev/mapper/vg-images rw",
        ],
    );
    sysfs.put("/var/lib/vm images/db.qcow2", "");
    let stack = Stack::find(&sysfs, Path::new("/var/lib/vm images/db.qcow2")).unwrap();
    assert_eq!(names(&stack), ["sda"]);
    assert_eq!(
        stack.to_string(),
        "xfs at /var/lib/vm images → LVM volume vg-images → dm-crypt luks → partition sda1 → sda"
    );
    assert_eq!(stack.leaves[0].node(), Path::new("/dev/sda"));
}

#[test]
fn array_is_a_leaf_with_its_disks() {
    let sysfs = host();
    sysfs.stack("md0", DeviceNumber::new(9, 0), &["sda1", "sdb"]);
    sysfs.put("/sys/dev/block/9:0/md/level", "raid1\n");
    sysfs.stack("dm-7", DeviceNumber::new(253, 7), &["md0"]);
    sysfs.put("/sys/dev/block/253:7/dm/uuid", "LVM-db\n");
    let stack = Stack::find(&sysfs, Path::new("/dev/dm-7")).unwrap();
    assert_eq!(stack.to_string(), "LVM volume dm-7 → md0 (raid1 of sda + sdb)");
    assert_eq!(names(&stack), ["md0"]);
    // A degraded one is the same.
    sysfs.stack("md1", DeviceNumber::new(9, 1), &["sdb"]);
    sysfs.put("/sys/dev/block/9:1/md/level", "raid1\n");
    let stack = Stack::find(&sysfs, Path::new("/dev/md1")).unwrap();
    assert_eq!(stack.to_string(), "md1 (raid1 of sdb)");
}

#[test]
fn volume_on_several_disks_has_all_of_them() {
    let sysfs = host();
    // A thin volume, its pool, and the pool's parts.
    sysfs.stack("dm-2", DeviceNumber::new(253, 2), &["sda1", "sdb"]);
    sysfs.put("/sys/dev/block/253:2/dm/uuid", "LVM-abc-tpool\n");
    sysfs.stack("dm-3", DeviceNumber::new(253, 3), &["dm-2"]);
    sysfs.put("/sys/dev/block/253:3/dm/uuid", "LVM-def\n");
    let stack = Stack::find(&sysfs, Path::new("/dev/dm-3")).unwrap();
    assert_eq!(names(&stack), ["sda", "sdb"]);
    let words = "LVM thin volume dm-3 → LVM thin pool on several devices dm-2 → partition sda1";
    assert!(stack.to_string().starts_with(words), "{stack}");
    // A multipath device with requests schedules them itself.
    sysfs.stack("dm-4", DeviceNumber::new(253, 4), &["sda", "sdb"]);
    sysfs.put("/sys/dev/block/253:4/queue/scheduler", "[mq-deadline] none\n");
    assert_eq!(names(&Stack::find(&sysfs, Path::new("/dev/dm-4")).unwrap()), ["dm-4"]);
    // No module of a scheduler is loaded.
    sysfs.put("/sys/dev/block/253:4/queue/scheduler", "[none] \n");
    assert_eq!(names(&Stack::find(&sysfs, Path::new("/dev/dm-4")).unwrap()), ["dm-4"]);
}

#[test]
fn btrfs_on_two_disks_has_both() {
    let sysfs = host();
    mount(&sysfs, &["40 1 0:44 /@vm /vm rw - btrfs /dev/sdb rw,subvol=/@vm"]);
    sysfs.put("/sys/fs/btrfs/uuid-1/devices/sda1", "");
    sysfs.put("/sys/fs/btrfs/uuid-1/devices/sdb", "");
    sysfs.put("/vm/db.img", "");
    let stack = Stack::find(&sysfs, Path::new("/vm/db.img")).unwrap();
    assert_eq!(names(&stack), ["sda", "sdb"]);
}

#[test]
fn what_no_disk_of_the_host_serves_is_named() {
    for (kind, source, why) in [
        ("nfs4", "server:/export", Uncontrolled::Network),
        ("zfs", "tank/vm", Uncontrolled::Zfs),
        ("tmpfs", "tmpfs", Uncontrolled::Memory),
        ("fuse.s3fs", "s3fs", Uncontrolled::Fuse),
        ("overlay", "overlay", Uncontrolled::Overlay),
        ("bcachefs", "nothing", Uncontrolled::UnknownFilesystem),
    ] {
        let sysfs = host();
        mount(&sysfs, &[&format!("40 1 0:44 / /vm rw - {kind} {source} rw")]);
        sysfs.put("/vm/db.img", "");
        let stack = Stack::find(&sysfs, Path::new("/vm/db.img")).unwrap();
        assert_eq!((stack.leaves.len(), &stack.uncontrolled[..]), (0, &[why][..]), "{kind}");
        assert!(stack.to_string().contains("no disk"), "{stack}");
    }
}

#[test]
fn file_of_a_server_that_does_not_answer_is_not_looked_at() {
    for (kind, why) in [
        ("nfs4", Uncontrolled::Network),
        ("cifs", Uncontrolled::Network),
        ("fuse.s3fs", Uncontrolled::Fuse),
    ] {
        let sysfs = host();
        let line = format!("40 1 0:44 / /vm rw - {kind} server:/export rw");
        let here = "41 40 8:1 / /vm/here rw - ext4 /dev/sda1 rw";
        mount(&sysfs, &["1 0 8:1 / / rw - ext4 /dev/sda1 rw", &line, here]);
        // The fake finds no such file: whoever looked would fail.
        for path in ["/vm/db.img", "/images/../vm/db.img", "/vm/../images/db.img"] {
            let stack = Stack::find(&sysfs, Path::new(path)).unwrap();
            let found = (stack.leaves.len(), &stack.uncontrolled[..]);
            assert_eq!(found, (0, &[why][..]), "{kind}");
            assert_eq!(stack.layers.len(), 1, "{stack}");
        }
        // Beside it, files are looked at.
        for looked_at in ["/vmx/db.img", "/vm/here/db.img"] {
            let found = Stack::find(&sysfs, Path::new(looked_at));
            assert!(matches!(found, Err(HostError::DeviceMissing { .. })), "{looked_at}");
        }
    }
}

#[test]
fn link_to_a_server_that_does_not_answer_is_not_followed() {
    use std::os::unix::fs::symlink;

    // What is below `/server` is not there: whoever looked would fail.
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    std::fs::create_dir_all(at("proc/self")).unwrap();
    std::fs::create_dir(at("images")).unwrap();
    let mounts =
        ["1 0 8:1 / / rw - ext4 /dev/sda1 rw", "2 1 0:44 / /server rw - nfs4 server:/export rw"];
    std::fs::write(at("proc/self/mountinfo"), mounts.join("\n")).unwrap();
    std::fs::write(at("images/here.img"), "").unwrap();
    for (target, link) in [
        ("/server/db.img", "images/absolute"),
        ("../server/db.img", "images/relative"),
        ("relative", "images/twice"),
        ("images", "pool"),
        ("/server/vm", "directory"),
        ("circle", "images/circle"),
        ("here.img", "images/local"),
    ] {
        symlink(target, at(link)).unwrap();
    }
    let sysfs = crate::sysfs::RealSysfs::new(root.path());
    let beyond = |path: &str| Stack::beyond_reach(&sysfs, Path::new(path));
    for path in [
        "/images/absolute",
        "/images/relative",
        "/images/twice",
        "/pool/relative",
        "/pool/../pool/./absolute",
        "/directory/db.img",
    ] {
        let stack = beyond(path).unwrap_or_else(|| panic!("{path}"));
        assert_eq!(stack.uncontrolled, [Uncontrolled::Network], "{path}");
        assert_eq!(Stack::find(&sysfs, Path::new(path)).unwrap(), stack);
    }
    for path in ["/images/local", "/pool/here.img", "/images/circle", "/nowhere", "/", "a"] {
        assert_eq!(beyond(path), None, "{path}");
    }
    // Below a root that is no mount, as after chroot(2), and on a server's, which runs this program.
    let server = mounts[1];
    for (mounts, is_local) in [
        (vec![server], true),
        (vec!["1 0 0:40 / / rw - nfs4 server:/root rw", server], true),
        (vec!["1 0 0:40 / / rw - nfs4 server:/root rw"], false),
    ] {
        std::fs::write(at("proc/self/mountinfo"), mounts.join("\n")).unwrap();
        let beyond = |path: &str| Stack::beyond_reach(&sysfs, Path::new(path)).is_some();
        assert_eq!(beyond("/pool/relative"), is_local, "{mounts:?}");
        assert!(!beyond("/images/here.img"), "{mounts:?}");
    }
    // An automount point, and what was mounted there.
    let point = "2 1 0:41 / /pool rw - autofs systemd-1 rw";
    for (mounts, is_beyond) in [
        (vec![point], true),
        (vec![point, "3 2 8:1 / /pool rw - ext4 /dev/sda1 rw"], false),
        (vec![point, "3 2 0:42 / /pool rw - nfs4 server:/pool rw"], true),
    ] {
        std::fs::write(at("proc/self/mountinfo"), mounts.join("\n")).unwrap();
        assert_eq!(beyond("/pool/here.img").is_some(), is_beyond, "{mounts:?}");
    }
}

#[test]
fn file_lies_on_the_mount_that_covers_others() {
    let sysfs = host();
    mount(
        &sysfs,
        &[
            "1 0 8:16 / / rw - ext4 /dev/sdb rw",
            "2 1 8:16 / /vm/images rw - ext4 /dev/sdb rw",
            "3 1 8:1 / /vm rw - ext4 /dev/sda1 rw",
        ],
    );
    sysfs.put("/vm/images/db.img", "");
    let stack = Stack::find(&sysfs, Path::new("/vm/images/db.img")).unwrap();
    assert_eq!(stack.to_string(), "ext4 at /vm → partition sda1 → sda");
    // A server that covers a disk's mount is not looked at, and one that is covered keeps nobody.
    let far = "0:44 / /vm rw - nfs4 server:/export rw";
    let near = "8:1 / /vm/images rw - ext4 /dev/sda1 rw";
    for (lines, is_far) in [
        ([format!("2 1 {near}"), format!("3 1 {far}")], true),
        ([format!("2 1 {far}"), format!("3 2 {near}")], false),
    ] {
        let root = "1 0 8:16 / / rw - ext4 /dev/sdb rw";
        mount(&sysfs, &[root, &lines[0], &lines[1]]);
        let beyond = Stack::beyond_reach(&sysfs, Path::new("/vm/images/db.img"));
        assert_eq!(beyond.is_some(), is_far, "{lines:?}");
    }
}

#[test]
fn disk_that_many_ways_lead_to_is_one_leaf() {
    let sysfs = host();
    let many = MAX_LEAVES as u32 + 6;
    let called = |kind: &str| (0..many).map(|i| format!("{kind}{i}")).collect::<Vec<_>>();
    let (parts, disks) = (called("sdb"), called("disk"));
    for (i, (part, disk)) in (0..many).zip(parts.iter().zip(&disks)) {
        sysfs.add_partition(part, DeviceNumber::new(259, i), "sdb", 1 << 10);
        sysfs.add_disk(disk, DeviceNumber::new(65, i), 1 << 10);
    }
    let stack = |name: &str, minor, below: &[String]| {
        let below: Vec<&str> = below.iter().map(String::as_str).collect();
        sysfs.stack(name, DeviceNumber::new(253, minor), &below);
        Stack::find(&sysfs, &Path::new("/dev").join(name)).unwrap()
    };
    let on_one = stack("dm-8", 8, &parts);
    assert_eq!(names(&on_one), ["sdb"]);
    assert!(on_one.uncontrolled.is_empty());
    let on_all = stack("dm-9", 9, &disks[..MAX_LEAVES]);
    assert_eq!(on_all.leaves.len(), MAX_LEAVES);
    assert!(on_all.uncontrolled.is_empty());
    let on_more = stack("dm-10", 10, &disks);
    assert_eq!(on_more.leaves.len(), MAX_LEAVES);
    assert_eq!(on_more.uncontrolled, [Uncontrolled::TooDeep]);
    // Each layer doubles the ways.
    for layer in 0..10 {
        for half in 0..2 {
            let below = match layer {
                0 => vec!["sda".to_owned()],
                _ => [98, 99].map(|minor| format!("dm-{}", minor + 2 * layer)).to_vec(),
            };
            let minor = 100 + 2 * layer + half;
            let found = stack(&format!("dm-{minor}"), minor, &below);
            assert_eq!(names(&found), ["sda"]);
            assert_eq!(found.layers.len(), 2 * layer as usize + 1);
        }
    }
}

#[test]
fn loop_device_is_a_leaf_with_its_file() {
    let sysfs = host();
    sysfs.add_disk("loop0", DeviceNumber::new(7, 0), 2048);
    sysfs.put("/sys/dev/block/7:0/loop/backing_file", "/srv/pool.img\n");
    let stack = Stack::find(&sysfs, Path::new("/dev/loop0")).unwrap();
    assert_eq!(stack.to_string(), "loop0 (loop device of /srv/pool.img)");
}

#[test]
fn hostile_sysfs_does_no_harm() {
    let sysfs = host();
    // A circle.
    sysfs.stack("dm-5", DeviceNumber::new(253, 5), &["dm-6"]);
    sysfs.stack("dm-6", DeviceNumber::new(253, 6), &["dm-5"]);
    let stack = Stack::find(&sysfs, Path::new("/dev/dm-5")).unwrap();
    assert_eq!(stack.uncontrolled, [Uncontrolled::TooDeep]);
    sysfs.put("/sys/block/sda/dev", "8;0");
    assert!(matches!(Stack::find(&sysfs, Path::new("/dev/sda1")), Err(HostError::Format { .. })));
    assert!(matches!(
        Stack::find(&sysfs, Path::new("/dev/nothing")),
        Err(HostError::DeviceMissing { .. })
    ));
}
