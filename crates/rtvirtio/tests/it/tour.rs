//! The whole way of an operator on a host of cgroup v2, Debian's kernel and LVM, which is a guest: from VMs that
//! run to settings that are applied and taken back, without a byte of an image changed.
//!
//! Three QEMUs (stopped, for they are emulated twice) have their disks in a qcow2 file and a raw file on XFS on
//! a logical volume, and on another logical volume of the same disk. What reads in their cgroups is fio.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rtvirtio_bench::guests::GuestFile;
use serde_json::Value;

use crate::in_guest::{Machine, image, program};
use crate::scratch_disk::{RTVIRTIO, alone};

/// Bytes of the disk, and of each image.
const DISK: u64 = 2 << 30;
const IMAGE: usize = 16 << 20;
const LONG: Duration = Duration::from_secs(300);

/// Name, cgroup, and the disk's options.
const VMS: [(&str, &str, &str); 3] = [
    (
        "db",
        r"machine-qemu\x2d1\x2ddb.scope",
        "driver=qcow2,file.driver=file,file.filename=/images/db.qcow2,cache.direct=on,file.cache.direct=on",
    ),
    (
        "web",
        r"machine-qemu\x2d2\x2dweb.scope",
        "driver=raw,file.driver=file,file.filename=/images/web.raw,cache.direct=on,file.cache.direct=on",
    ),
    (
        "backup",
        r"machine-qemu\x2d3\x2dbackup.scope",
        "driver=raw,file.driver=host_device,file.filename=/dev/mapper/vg-backup,cache.direct=on,\
         file.cache.direct=on",
    ),
];

const PREPARE: &str = "set -e; export DM_DISABLE_UDEV=1
    while read -r module; do insmod /lib/modules/$module; done </lib/modules/storage
    mkdir -p /images /run/qemu /sys/fs/cgroup/machine.slice
    echo +io >/sys/fs/cgroup/cgroup.subtree_control
    echo +io >/sys/fs/cgroup/machine.slice/cgroup.subtree_control
    dmsetup create vg-images -u LVM-images --table '0 3145728 linear /dev/vda 2048'
    dmsetup create vg-backup -u LVM-backup --table '0 262144 linear /dev/vda 3147776'
    mkfs.xfs -q -f /dev/mapper/vg-images; mount -t xfs /dev/mapper/vg-images /images
    for image in db.qcow2 web.raw; do dd if=/$image of=/images/$image bs=1M oflag=direct; rm /$image; done
    dd if=/dev/urandom of=/dev/mapper/vg-backup bs=1M count=16 oflag=direct
    dd if=/dev/zero of=/bios bs=64k count=1; sync";

/// Bytes that are not all alike.
fn precious() -> Vec<u8> {
    (0..IMAGE as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// The images, as files of the guest.
fn images() -> Result<Vec<GuestFile>, String> {
    let directory = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (raw, qcow2) = (directory.path().join("raw"), directory.path().join("qcow2"));
    std::fs::write(&raw, precious()).map_err(|e| e.to_string())?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2", "-o", "preallocation=full"]);
    let status = convert.args([&raw, &qcow2]).status().map_err(|e| format!("qemu-img: {e}"))?;
    if !status.success() {
        return Err(format!("qemu-img: {status}"));
    }
    let file = |name: &str, from: &Path| {
        let content = std::fs::read(from).map_err(|e| e.to_string())?;
        Ok::<_, String>(GuestFile { path: format!("/{name}"), content, is_executable: false })
    };
    Ok(vec![file("db.qcow2", &qcow2)?, file("web.raw", &raw)?])
}

#[test]
fn operators_host_on_cgroup2_and_lvm_gets_its_settings_and_loses_no_byte() {
    const NAME: &str = "operators_host_on_cgroup2_and_lvm_gets_its_settings_and_loses_no_byte";
    let Some(image) = image(NAME) else { return };
    let files = || -> Result<Vec<GuestFile>, String> {
        let mut files = program(Path::new(RTVIRTIO), "/usr/bin/rtvirtio")?;
        let qemu = Path::new("/usr/bin/qemu-system-x86_64");
        files.extend(program(qemu, "/usr/bin/qemu-system-x86_64")?);
        files.extend(images()?);
        Ok(files)
    };
    let files = match files() {
        Ok(files) => files,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {NAME}: {why}");
            return;
        }
    };
    let _host = alone();
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(DISK).unwrap();
    let node = format!(
        "driver=raw,node-name=disk,file.driver=file,file.filename={},cache.direct=off",
        disk.display()
    );
    let device = "virtio-blk-pci,drive=disk,num-queues=1,serial=precious";
    let arguments = ["-blockdev", &node, "-device", device, "-m", "2048"];
    let site = Site { machine: Machine::boot(&image, &files, &arguments) };
    site.run(0, PREPARE);
    site.start_vms();
    let before = site.sums();
    site.tour();
    assert_eq!(site.sums(), before, "an image has changed");
    site.nothing_is_left();
}

struct Site {
    machine: Machine,
}

impl Site {
    #[track_caller]
    fn run(&self, code: i64, script: &str) -> String {
        let said = self.machine.shell(script, LONG);
        assert_eq!(said.code, Some(code), "{script}\n{}\n{}", said.stdout, said.stderr);
        said.stdout + &said.stderr
    }

    fn start_vms(&self) {
        for (number, (name, scope, blockdev)) in VMS.iter().enumerate() {
            let script = format!(
                r#"scope='/sys/fs/cgroup/machine.slice/{scope}'; mkdir "$scope"
                (echo 0 >"$scope/cgroup.procs"
                 exec qemu-system-x86_64 -name guest={name} -machine q35 -accel tcg,tb-size=1 -m 16 -S \
                    -nodefaults -display none -bios /bios -qmp unix:/run/qemu/{name}.qmp,server=on,wait=off \
                    -blockdev node-name=disk{number},{blockdev} \
                    -device virtio-blk-pci,drive=disk{number},id=virtio-disk0) \
                    </dev/null >/run/qemu/{name}.log 2>&1 &
                for try in $(seq 300); do
                    [ -S /run/qemu/{name}.qmp ] && exit 0; sleep 0.2
                done
                cat /run/qemu/{name}.log; exit 1"#
            );
            self.run(0, &script);
        }
        // What their guests would read; a disk's part that the image's name leads to.
        for (index, path) in ["/images/db.qcow2", "/images/web.raw"].iter().enumerate() {
            let scope = VMS[index].1;
            let script = format!(
                r#"(echo 0 >'/sys/fs/cgroup/machine.slice/{scope}/cgroup.procs'
                 exec fio --name=read --readonly --rw=randread --bs=4k --direct=1 --ioengine=psync --rate_iops=20 \
                    --filename={path} --time_based --runtime=1h --output=/dev/null) </dev/null >/dev/null 2>&1 &"#
            );
            self.run(0, &script);
        }
    }

    fn sums(&self) -> String {
        self.run(
            0,
            "sha256sum /images/db.qcow2 /images/web.raw
            dd if=/dev/mapper/vg-backup bs=1M count=16 iflag=direct 2>/dev/null | sha256sum",
        )
    }

    fn tour(&self) {
        let doctor = self.run(0, "rtvirtio doctor /images/db.qcow2 /dev/mapper/vg-backup");
        assert!(doctor.contains("xfs at /images → LVM volume vg-images → vda"), "{doctor}");
        assert!(doctor.contains("LVM volume vg-backup → vda"), "{doctor}");

        let looks = self.run(0, "rtvirtio top --json --count 2 --interval 3");
        let look: Value = looks.lines().rev().find_map(|l| serde_json::from_str(l).ok()).unwrap();
        for (vm, format, storage) in [
            ("db", "qcow2", "xfs at /images → LVM volume vg-images → vda"),
            ("web", "raw", "xfs at /images → LVM volume vg-images → vda"),
            ("backup", "raw", "LVM volume vg-backup → vda"),
        ] {
            let row = look["disks"].as_array().unwrap().iter().find(|row| row["vm"] == vm);
            let row = row.unwrap_or_else(|| panic!("{look}"));
            assert_eq!(row["format"], format);
            assert!(row["storage"].as_str().unwrap().contains(storage), "{row}");
        }
        // fio's reads of the images, which the disk below did.
        let on_host = |vm: &str| {
            let row = look["disks"].as_array().unwrap().iter().find(|row| row["vm"] == vm);
            row.unwrap()["host_p50"].clone()
        };
        assert!(on_host("db").is_u64() && on_host("web").is_u64(), "{look}");

        let said = self
            .run(0, "rtvirtio init db=p99.9:400ms --observe 4 -o /site.toml --profiles /profiles");
        assert!(said.contains("/profiles/vda.json"), "{said}");
        let toml = self.run(0, "cat /site.toml");
        assert!(toml.contains("/dev/vda") && toml.contains("latency_ms = 400"), "{toml}");

        let said = self.run(
            0,
            "rtvirtio calibrate --in /images --size 256 --limit 150 --share 1 --tolerate 1000 \
             -o /profiles/vda.json",
        );
        assert!(said.contains("profile written"), "{said}");

        // Backup and web were seen to do nothing, so they may do anything and have to be held. In two
        // and a half minutes an emulated guest makes few runs: enough for a bound that is less sure.
        assert_eq!(toml.matches("[[vm.task]]").count(), 1, "{toml}");
        assert!(toml.contains("confidence = 0.95"), "{toml}");
        self.run(0, "sed 's/confidence = 0.95/confidence = 0.7/' /site.toml >/edited.toml");
        let planned = self.run(2, "rtvirtio plan /edited.toml -o /site.plan");
        assert!(planned.contains("met") && planned.contains("write limit"), "{planned}");
        self.run(0, "rtvirtio apply /site.plan");
        let backup = format!("'/sys/fs/cgroup/machine.slice/{}/io.max'", VMS[2].1);
        let limit = self.run(0, &format!("cat {backup}"));
        assert!(limit.contains("wbps=") && !limit.contains("wbps=max"), "{limit}");
        self.run(0, "rtvirtio verify /site.plan");
        self.run(0, "rtvirtio rollback");
        assert_eq!(self.run(0, &format!("cat {backup}")), "");
        self.run(2, "rtvirtio verify /site.plan");
    }

    /// But for what was asked for: the specification, the profile, the plan.
    fn nothing_is_left(&self) {
        let left = self.run(
            0,
            "find /sys/fs/cgroup -type d -path '*rtvirtio*'; ls /images | grep -v -x -e db.qcow2 -e web.raw
             find /run/rtvirtio-host -type f ! -name lock ! -name cgroups.lock ! -name in-use; ps | grep '[r]tvirtio '; true",
        );
        assert_eq!(left, "", "something is left");
    }
}
