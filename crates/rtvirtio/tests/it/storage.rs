//! Storage stacks of a real kernel, a guest's: what each is made of, and whether a limit that is set
//! on the disk or array below, as a plan does, acts on I/O that comes through it, on cgroup v2 and on
//! v1.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::in_guest::{Machine, image, program};
use crate::scratch_disk::{RTVIRTIO, alone};

/// Bytes of each of the guest's two disks.
const DISK: u64 = 1 << 30;
/// What is written below a limit of 2 MiB/s, which takes 4 s of it.
const WRITE: &str = "bs=128k count=64";

const PREPARE: &str = "export DM_DISABLE_UDEV=1
    while read -r module; do insmod /lib/modules/$module; done </lib/modules/storage
    mkdir -p /images";

/// A version of cgroups: what mounts it, where its groups are, and how a limit in bytes a second is set on a
/// device of a number.
struct Cgroups {
    name: &'static str,
    mount: &'static str,
    root: &'static str,
    limit: &'static str,
    unlimited: &'static str,
    file: &'static str,
}

const CGROUPS: [Cgroups; 2] = [
    Cgroups {
        name: "v2",
        mount: "echo +io >/sys/fs/cgroup/cgroup.subtree_control; mkdir /sys/fs/cgroup/limited",
        root: "/sys/fs/cgroup",
        limit: "wbps=2097152",
        unlimited: "wbps=max",
        file: "io.max",
    },
    // The controller is v1's once v2 has no group that uses it.
    Cgroups {
        name: "v1",
        mount: "rmdir /sys/fs/cgroup/limited; echo -io >/sys/fs/cgroup/cgroup.subtree_control
            mkdir /blkio; for try in $(seq 50); do
                mount -t cgroup -o blkio none /blkio && break; sleep 0.2
            done; mkdir /blkio/limited",
        root: "/blkio",
        limit: "2097152",
        unlimited: "0",
        file: "blkio.throttle.write_bps_device",
    },
];

/// A stack: what makes it, what is written to, what it is taken for, and what ends it.
struct Case {
    name: &'static str,
    make: &'static str,
    target: &'static str,
    words: &'static str,
    /// Where `apply` sets limits.
    limited: &'static str,
    end: &'static str,
}

const DISKS: &str = "vda vdb";

const CASES: [Case; 8] = [
    Case { name: "whole disk", make: "", target: "/dev/vda", words: "vda", limited: DISKS, end: "" },
    Case {
        name: "LVM volume",
        make: "dmsetup create vg-db -u LVM-0123 --table '0 1048576 linear /dev/vda 2048'",
        target: "/dev/mapper/vg-db",
        words: "LVM volume vg-db → vda",
        limited: DISKS,
        end: "dmsetup remove vg-db",
    },
    Case {
        name: "dm-crypt",
        make: "key=$(head -c 64 /dev/urandom | od -An -tx1 | tr -d ' \\n')
            dmsetup create luks -u CRYPT-PLAIN-luks --table \
                \"0 1048576 crypt aes-xts-plain64 $key 0 /dev/vda 2048\"",
        target: "/dev/mapper/luks",
        words: "dm-crypt luks → vda",
        limited: DISKS,
        end: "dmsetup remove luks",
    },
    Case {
        name: "LVM thin volume",
        make: "dd if=/dev/zero of=/dev/vda bs=1M count=8
            dmsetup create meta -u LVM-m-tmeta --table '0 8192 linear /dev/vda 0'
            dmsetup create data -u LVM-d-tdata --table '0 1048576 linear /dev/vda 8192'
            dmsetup create pool -u LVM-p-tpool --table \
                '0 1048576 thin-pool /dev/mapper/meta /dev/mapper/data 128 0'
            dmsetup message pool 0 'create_thin 0'
            dmsetup create vg-thin -u LVM-t --table '0 524288 thin /dev/mapper/pool 0'",
        target: "/dev/mapper/vg-thin",
        words: "LVM thin volume vg-thin → LVM thin pool",
        limited: DISKS,
        end: "for d in vg-thin pool data meta; do dmsetup remove $d; done",
    },
    Case {
        name: "raid1",
        make: "mdadm --create /dev/md0 --run --assume-clean --metadata=1.2 --level=1 \
            --raid-devices=2 /dev/vda /dev/vdb",
        target: "/dev/md0",
        words: "md0 (raid1 of vda + vdb)",
        limited: "md0",
        end: "mdadm --stop /dev/md0; mdadm --zero-superblock /dev/vda /dev/vdb",
    },
    Case {
        name: "LVM volume on raid0",
        make: "mdadm --create /dev/md0 --run --metadata=1.2 --level=0 --raid-devices=2 /dev/vda /dev/vdb
            dmsetup create vg-db -u LVM-89ab --table '0 1048576 linear /dev/md0 2048'",
        target: "/dev/mapper/vg-db",
        words: "LVM volume vg-db → md0 (raid0 of vda + vdb)",
        limited: "md0",
        end: "dmsetup remove vg-db; mdadm --stop /dev/md0; mdadm --zero-superblock /dev/vda /dev/vdb",
    },
    Case {
        name: "file on xfs",
        make: "mkfs.xfs -q -f /dev/vda; mount -t xfs /dev/vda /images
            dd if=/dev/zero of=/images/db.img bs=1M count=16",
        target: "/images/db.img",
        words: "xfs at /images → vda",
        limited: DISKS,
        end: "umount /images",
    },
    Case {
        name: "file on ext4 on an LVM volume",
        make: "dmsetup create vg-images -u LVM-4567 --table '0 1048576 linear /dev/vda 2048'
            mkfs.ext4 -q -F /dev/mapper/vg-images; mount -t ext4 /dev/mapper/vg-images /images
            dd if=/dev/zero of=/images/db.img bs=1M count=16",
        target: "/images/db.img",
        words: "ext4 at /images → LVM volume vg-images → vda",
        limited: DISKS,
        end: "umount /images; dmsetup remove vg-images",
    },
];

#[test]
fn stacks_of_a_guests_kernel_are_found_and_limits_below_act() {
    const NAME: &str = "stacks_of_a_guests_kernel_are_found_and_limits_below_act";
    let Some(image) = image(NAME) else { return };
    let files = match program(Path::new(RTVIRTIO), "/usr/bin/rtvirtio") {
        Ok(files) => files,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {NAME}: {why}");
            return;
        }
    };
    let _host = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut arguments = Vec::new();
    for disk in ["a", "b"] {
        let file = directory.path().join(disk);
        std::fs::File::create(&file).unwrap().set_len(DISK).unwrap();
        let node = format!(
            "driver=raw,node-name={disk},file.driver=file,file.filename={},cache.direct=off",
            file.display()
        );
        let device = format!("virtio-blk-pci,drive={disk},num-queues=1");
        arguments.extend(["-blockdev".to_owned(), node, "-device".to_owned(), device]);
    }
    arguments.extend(["-m".to_owned(), "1024".to_owned()]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let machine = Machine::boot(&image, &files, &arguments);
    machine.expect(0, PREPARE);
    let mut report = Vec::new();
    let all =
        CGROUPS.iter().flat_map(|cgroups| CASES.iter().enumerate().map(move |c| (cgroups, c)));
    for (cgroups, (number, case)) in all {
        let Cgroups { name: version, mount, root, limit, unlimited, file } = cgroups;
        if number == 0 {
            machine.expect(0, &format!("set -e; {mount}"));
        }
        let run = |script: &str| {
            let script = format!("export DM_DISABLE_UDEV=1; set -e; {script}");
            let said = machine.shell(&script, Duration::from_secs(120));
            assert_eq!(
                said.code,
                Some(0),
                "{}: {script}\n{}{}",
                case.name,
                said.stdout,
                said.stderr
            );
            said.stdout
        };
        run(case.make);
        let words = run(&format!("rtvirtio doctor {}", case.target));
        assert!(words.contains(case.words), "{}: {words}", case.name);
        let script = format!(
            "for disk in {limited}; do
                 echo $(cat /sys/block/$disk/dev) {limit} >{root}/limited/{file}
             done
             begin=$(cut -d. -f1 /proc/uptime)
             sh -c 'echo $$ >{root}/limited/cgroup.procs
                 exec dd if=/dev/zero of={} {WRITE} oflag=direct conv=notrunc' 2>/dev/null
             end=$(cut -d. -f1 /proc/uptime)
             for disk in {limited}; do
                 echo $(cat /sys/block/$disk/dev) {unlimited} >{root}/limited/{file}
             done
             echo $((end - begin))",
            case.target,
            limited = case.limited
        );
        let seconds: u32 = run(&script).trim().parse().unwrap();
        report.push((format!("{} on {version}: {seconds} s", case.name), seconds));
        run(case.end);
    }
    let text = report.iter().map(|(line, _)| line.as_str()).collect::<Vec<_>>().join("; ");
    println!("8 MiB below a limit of 2 MiB/s on the disks: {text}");
    assert!(report.iter().all(|(_, seconds)| *seconds >= 3), "{text}");
}
