//! A QEMU guest: file system, verify, reboots, hot-unplug.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::time::{Duration, Instant};

use super::counts::{Counts, Record, middle_and_longest};
use super::sandbox::has_no_rights;
use super::server::{Image, Kind, Server};
use super::verify::{FileSystem, Verify, misplaced};
use super::vm::{Disk, Owner, Vm, can_run};

/// VIRTIO_F_RING_PACKED.
const RING_PACKED: usize = 34;

/// Boots, makes a file system, verifies; and the server ends as told.
fn serves(test: &'static str, disk: Disk) {
    let Some(_host) = can_run(test) else { return };
    let record = Record::start(test);
    let image = Image::make();
    let server = Server::start(&image);
    let mut vm = Vm::boot(&server, disk);
    let shell = vm.shell();
    let features = shell.read("/sys/block/vda/device/features").unwrap();
    // libvhost-user has no packed ring, so QEMU falls back.
    if server.kind() == Kind::Ours {
        let packed = features.as_bytes()[RING_PACKED] == b'1';
        assert_eq!(packed, disk.packed, "{features}");
    }
    let tags = shell.read("/sys/block/vda/mq/0/nr_tags").unwrap();
    assert_eq!(tags.trim(), disk.queue_size.to_string());
    let queues = shell.expect("ls /sys/block/vda/mq | wc -l");
    assert_eq!(queues.trim(), Server::QUEUES.to_string());
    let files = FileSystem::make(shell);
    let verify = Verify::start(shell);
    std::thread::sleep(Counts::get().verify);
    let verified = verify.stop(shell);
    assert!(verified.discards > 0 && verified.read_late > 0, "{verified}");
    files.is_intact(shell);
    files.unmount(shell);
    drop(vm);
    let status = server.end();
    assert_eq!(status.code(), Some(0), "SIGTERM");
    record.add(&format!("{disk:?}: {verified}"));
}

#[test]
fn qemu_guest_with_split_rings_verifies() {
    serves("qemu_guest_with_split_rings_verifies", Disk::default());
}

#[test]
fn qemu_guest_with_packed_rings_verifies() {
    let disk = Disk { packed: true, ..Disk::default() };
    serves("qemu_guest_with_packed_rings_verifies", disk);
}

#[test]
fn qemu_guest_with_rings_of_1024_verifies() {
    let disk = Disk { queue_size: 1024, ..Disk::default() };
    serves("qemu_guest_with_rings_of_1024_verifies", disk);
}

#[test]
fn qemu_guest_of_one_user_is_served_by_a_daemon_of_another_without_rights() {
    const TEST: &str = "qemu_guest_of_one_user_is_served_by_a_daemon_of_another_without_rights";
    /// Debian's account, and its group nogroup.
    const SERVICE: (&str, u32) = ("nobody", 65_534);
    const OWNER: Owner = Owner { id: 64_321, group: SERVICE.1 };
    if !rustix::process::geteuid().is_root() || Kind::under_test() == Kind::Qsd {
        eprintln!("SKIPPED {TEST}: needs root, and rtvirtio");
        return;
    }
    let Some(_host) = can_run(TEST) else { return };
    let record = Record::start(TEST);
    let image = Image::make();
    // As an operator has them: the image is the service's, the directory of its socket its group's.
    let mode = std::fs::Permissions::from_mode;
    let id = Some(SERVICE.1);
    chown(image.path(), id, id).unwrap();
    std::fs::set_permissions(image.path(), mode(0o600)).unwrap();
    chown(image.directory(), id, id).unwrap();
    std::fs::set_permissions(image.directory(), mode(0o750)).unwrap();
    let mut server = Server::start_as(SERVICE.0, &image);
    let made = std::fs::metadata(server.socket()).unwrap();
    assert_eq!((made.uid(), made.gid(), made.mode() & 0o777), (SERVICE.1, SERVICE.1, 0o660));
    let mut vm = Vm::boot_as(Some(OWNER), &server, Disk::default());
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    assert!(status.contains("\nUid:\t64321\t64321\t64321\t64321\n"), "{status}");
    has_no_rights(server.pid());
    let shell = vm.shell();
    let files = FileSystem::make(shell);
    let verify = Verify::start(shell);
    std::thread::sleep(Counts::get().verify);
    server.kill();
    server.start_again();
    verify.goes_on(shell, 500, Duration::from_secs(60));
    has_no_rights(server.pid());
    let verified = verify.stop(shell);
    assert!(verified.discards > 0 && verified.read_late > 0, "{verified}");
    files.is_intact(shell);
    files.unmount(shell);
    drop(vm);
    assert_eq!(server.end().code(), Some(0), "SIGTERM");
    record.add(&format!("{verified}, with a kill -9 between"));
}

#[test]
fn qemu_guest_reset_in_mid_io_finds_its_files() {
    const TEST: &str = "qemu_guest_reset_in_mid_io_finds_its_files";
    let Some(_host) = can_run(TEST) else { return };
    let (record, counts) = (Record::start(TEST), Counts::get());
    let image = Image::make();
    let mut server = Server::start(&image);
    let mut vm = Vm::boot(&server, Disk::default());
    let files = FileSystem::make(vm.shell());
    let mut times = Vec::new();
    for _ in 0..counts.reboots {
        // fio first: it does not write to a disk that is mounted.
        Verify::start(vm.shell());
        files.is_intact(vm.shell());
        let start = Instant::now();
        vm.reset();
        times.push(start.elapsed());
        server.check();
    }
    files.is_intact(vm.shell());
    files.unmount(vm.shell());
    record.add(&format!(
        "{} resets in mid-I/O, a boot takes {}",
        counts.reboots,
        middle_and_longest(times)
    ));
}

#[test]
fn qemu_disk_unplugged_in_mid_io_comes_back_intact() {
    const TEST: &str = "qemu_disk_unplugged_in_mid_io_comes_back_intact";
    let Some(_host) = can_run(TEST) else { return };
    let (record, counts) = (Record::start(TEST), Counts::get());
    let image = Image::make();
    let mut server = Server::start(&image);
    let mut vm = Vm::boot(&server, Disk::default());
    let files = FileSystem::make(vm.shell());
    let (mut times, mut connection) = (Vec::new(), 0);
    for unplug in 0..counts.unplugs {
        let verify = Verify::start(vm.shell());
        let start = Instant::now();
        vm.unplug();
        times.push(start.elapsed());
        server.check();
        verify.fails(vm.shell());
        assert_eq!(misplaced(&image.path()), []);
        // By the same connection, and by a new one.
        let next = connection + unplug % 2;
        vm.plug(connection, next);
        connection = next;
        files.is_intact(vm.shell());
        files.unmount(vm.shell());
    }
    let verify = Verify::start(vm.shell());
    verify.goes_on(vm.shell(), 500, Duration::from_secs(60));
    let verified = verify.stop(vm.shell());
    record.add(&format!(
        "{} times unplugged in mid-I/O, which takes {}; then {verified}",
        counts.unplugs,
        middle_and_longest(times)
    ));
}
