//! What a QEMU guest sees of a device, and what it can do to it.

use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use super::counts::Record;
use super::server::{DISK_BYTES, Image, Kind, Server};
use super::vm::{Disk, Vm, can_run};

const SECTOR: u64 = 512;
/// For a notification of the guest.
const SOON: Duration = Duration::from_secs(60);

/// Whether the test can run; qemu-storage-daemon is not configured by our file.
fn can_see(test: &str) -> Option<std::sync::MutexGuard<'static, ()>> {
    if Kind::under_test() == Kind::Qsd {
        eprintln!("SKIPPED {test}: for rtvirtio only");
        return None;
    }
    can_run(test)
}

#[test]
fn qemu_guest_sees_its_disk_resized_serial_and_discards() {
    const TEST: &str = "qemu_guest_sees_its_disk_resized_serial_and_discards";
    let Some(_host) = can_see(TEST) else { return };
    let record = Record::start(TEST);
    let image = Image::make();
    let server = Server::start(&image);
    let mut vm = Vm::boot(&server, Disk::default());
    let shell = vm.shell();
    assert_eq!(shell.expect("cat /sys/block/vda/serial").trim(), Server::SERIAL);
    assert_eq!(shell.expect("cat /sys/block/vda/ro").trim(), "0");
    assert_eq!(shell.expect("cat /sys/block/vda/cache_type").trim(), "write back");
    assert_eq!(shell.expect("blockdev --getsize64 /dev/vda").trim(), DISK_BYTES.to_string());

    // 64 MiB in the file, and gone again.
    let held = || image.path().metadata().unwrap().blocks() * SECTOR;
    shell.expect("dd if=/dev/urandom of=/dev/vda bs=1M count=64 && sync");
    assert!(held() >= 64 << 20, "{}", held());
    shell.expect("blkdiscard -o 0 -l 67108864 /dev/vda");
    assert!(held() < 1 << 20, "{}", held());
    shell.expect("echo 3 >/proc/sys/vm/drop_caches");
    shell.expect("[ $(dd if=/dev/vda bs=1M count=64 | tr -d '\\0' | wc -c) = 0 ]");

    // Twice the size while it runs, and the new half can be used.
    server.ctl(&["device", "resize", Server::DEVICE, "2G"]);
    let start = Instant::now();
    let size = (2 * DISK_BYTES / SECTOR).to_string();
    while shell.expect("cat /sys/block/vda/size").trim() != size {
        assert!(
            start.elapsed() < SOON,
            "{}",
            shell.expect("cat /sys/block/vda/size; dmesg | tail")
        );
    }
    let told = start.elapsed().as_millis();
    shell.expect("dd if=/dev/urandom of=/tmp/new bs=1M count=8");
    shell.expect("dd if=/tmp/new of=/dev/vda bs=1M seek=1800 && sync");
    shell.expect("echo 3 >/proc/sys/vm/drop_caches");
    shell.expect("dd if=/dev/vda bs=1M skip=1800 count=8 | cmp - /tmp/new");
    record.add(&format!("the guest knows the new size {told} ms after ctl returned"));
}

#[test]
fn qemu_guest_cannot_write_to_read_only_disk() {
    const TEST: &str = "qemu_guest_cannot_write_to_read_only_disk";
    let Some(_host) = can_see(TEST) else { return };
    let image = Image::make();
    let server = Server::start_with(&image, "read_only = true");
    let mut vm = Vm::boot(&server, Disk::default());
    let shell = vm.shell();
    assert_eq!(shell.expect("cat /sys/block/vda/ro").trim(), "1");
    shell.expect("dd if=/dev/vda of=/dev/null bs=1M count=8");
    // Even if its kernel forgot about it.
    shell.expect(
        "blockdev --setrw /dev/vda; ! dd if=/dev/urandom of=/dev/vda bs=4k count=1 conv=fsync",
    );
    assert_eq!(image.path().metadata().unwrap().blocks(), 0);
}

#[test]
fn qemu_guest_without_write_cache_writes_through() {
    const TEST: &str = "qemu_guest_without_write_cache_writes_through";
    let Some(_host) = can_see(TEST) else { return };
    let image = Image::make();
    let server = Server::start_with(&image, "write_cache = false");
    let mut vm = Vm::boot(&server, Disk::default());
    let shell = vm.shell();
    assert_eq!(shell.expect("cat /sys/block/vda/cache_type").trim(), "write through");
    assert_eq!(shell.expect("cat /sys/block/vda/queue/write_cache").trim(), "write through");
    shell.expect("dd if=/dev/urandom of=/dev/vda bs=1M count=4 conv=fsync");
    // It may ask for a cache.
    shell.expect("echo 'write back' >/sys/block/vda/cache_type");
    assert_eq!(shell.expect("cat /sys/block/vda/cache_type").trim(), "write back");
    shell.expect("dd if=/dev/urandom of=/dev/vda bs=1M count=4 conv=fsync");
}
