//! User Mode Linux: a guest kernel as a process, whose driver passes no eventfds.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_bench::guests::{GuestFile, GuestImage};

use super::counts::{Counts, Record, middle_and_longest};
use super::server::{Image, Server};
use super::vm::can_run;
use crate::in_guest::image_directory;

/// One boot with its work.
const BOOT: &str = "90";

/// The first boot makes the file system and its files; each finds what all before it wrote.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
insmod /lib/modules/uml/virtio_blk.ko
work() {
    [ -b /dev/vda ] || return 1
    dd if=/dev/vda of=/tmp/first bs=4k count=1 || return 1
    # Of a new disk, all is zeroes.
    if [ -z "$(tr -d '\0' </tmp/first)" ]; then
        mkfs.ext4 -q -F /dev/vda 256M || return 1
    fi
    e2fsck -f -n /dev/vda || return 1
    mount -t ext4 -o discard /dev/vda /mnt || return 1
    if [ -e /mnt/sums ]; then (cd /mnt && md5sum -c sums) || return 1; fi
    fio --name=files --directory=/mnt --size=4m --nrfiles=4 --rw=randrw --bs=4k --ioengine=libaio \
        --direct=1 --iodepth=16 --fsync=32 --verify=crc32c --verify_fatal=1 --thread=1 || return 1
    rm /mnt/files*
    dd if=/dev/urandom of=/mnt/file-$(ls /mnt | wc -l) bs=64k count=16 || return 1
    (cd /mnt && md5sum file-* >sums && sync) || return 1
    umount /mnt || return 1
    fio --name=raw --filename=/dev/vda --offset=512m --size=4m --rw=randtrimwrite --bs=4k \
        --ioengine=libaio --direct=1 --iodepth=32 --verify=crc32c --verify_backlog=64 \
        --verify_fatal=1 --thread=1 || return 1
}
work && echo "uml: all is well"
poweroff -f
"#;

#[test]
fn user_mode_linux_finds_what_it_wrote_at_each_boot() {
    const TEST: &str = "user_mode_linux_finds_what_it_wrote_at_each_boot";
    let Some(_host) = can_run(TEST) else { return };
    let uml = image_directory().with_file_name("uml");
    let Ok(module) = std::fs::read(uml.join("virtio_blk.ko")) else {
        let why = format!("no User Mode Linux (make it with scripts/uml {})", uml.display());
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {why}");
        return;
    };
    let (record, counts) = (Record::start(TEST), Counts::get());
    let image = Image::make();
    let mut server = Server::start(&image);
    let directory = tempfile::tempdir().unwrap();
    let file = |path: &str, content: Vec<u8>| GuestFile {
        path: path.to_owned(),
        content,
        is_executable: true,
    };
    let files = [file("/init", INIT.into()), file("/lib/modules/uml/virtio_blk.ko", module)];
    let initramfs: PathBuf = directory.path().join("initramfs");
    GuestImage::find(&image_directory()).unwrap().with_files(&files, &initramfs).unwrap();

    let mut times = Vec::new();
    for boot in 1..=counts.uml_boots {
        let start = Instant::now();
        // Its first process ends last and its others with it.
        let output = Command::new("timeout")
            .args(["--kill-after=5", BOOT])
            .arg(uml.join("linux"))
            .args(["mem=512M", "con=null", "con0=null,fd:1", "quiet", "panic=-1"])
            .arg(format!("initrd={}", initramfs.display()))
            .arg(format!("virtio_uml.device={}:2", server.socket().display()))
            .env("TMPDIR", "/dev/shm")
            .env("HOME", directory.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        // Its kernel keeps a process's floating-point state in less room than a CPU with AMX needs, and
        // then starts no process, whatever its disks are.
        if boot == 1 && said.contains("ptrace set fp regs failed") {
            let why = "this User Mode Linux starts no process on this CPU (ptrace set fp regs)";
            let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {why}");
            server.end();
            return;
        }
        assert!(said.contains("uml: all is well"), "boot {boot}, {:?}: {said}", output.status);
        times.push(start.elapsed());
        server.check();
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(server.end().code(), Some(0), "SIGTERM");
    record.add(&format!(
        "{} boots, each with its verify takes {}",
        counts.uml_boots,
        middle_and_longest(times)
    ));
}
