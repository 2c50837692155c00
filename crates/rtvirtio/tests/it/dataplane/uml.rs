//! User Mode Linux: a guest kernel as a process, whose driver passes no eventfds.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_testbed::guests::GuestImage;

use super::counts::{Counts, Record, middle_and_longest};
use super::server::{Image, Server};
use super::vm::can_run;
use crate::archive::{self, GuestFile};
use crate::in_guest::image_directory;
use crate::nic::{Daemon, Store};

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

/// Two guests, each of which sends the other the same text.
const TALK: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
for module in failover net_failover virtio_net; do insmod /lib/modules/uml/$module.ko; done
mkfifo /tmp/open
text() { seq 1 500000; }
# Whoever reads keeps its own end open: busybox's nc ends with the other side's.
receive() { [ "$(nc -l -p 7001 <>/tmp/open | md5sum)" = "$(text | md5sum)" ]; }
send() {
    # Until the other listens.
    for try in 1 2 3 4 5 6 7 8 9 10; do
        text | nc 10.81.0.$1 7001 && return
        sleep 1
    done
    return 1
}
work() {
    ip link set eth0 up && ip address add 10.81.0.$me/24 dev eth0 || return 1
    for try in 1 2 3 4 5 6 7 8 9 10; do
        ping -c 1 -W 5 10.81.0.$other && break
    done
    case $me in
        1) send 2 && receive ;;
        2) receive && send 1 ;;
    esac
}
work && echo "uml: all is well"
poweroff -f
"#;

/// Where User Mode Linux is, and whether it may run here; without it, `test` is skipped by name.
fn uml(test: &str, modules: &[&str]) -> Option<PathBuf> {
    let uml = image_directory().with_file_name("uml");
    if modules.iter().all(|module| uml.join(module).with_extension("ko").exists()) {
        return Some(uml);
    }
    let why = format!("no User Mode Linux (make it with scripts/uml {})", uml.display());
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
    None
}

/// The guests' image with an init and modules of this kernel's, in a directory.
fn initramfs(uml: &Path, init: &str, modules: &[&str], directory: &Path) -> PathBuf {
    let file = |path: String, content| GuestFile { path, content, is_executable: true };
    let mut files = vec![file("/init".to_owned(), init.into())];
    for module in modules {
        let content = std::fs::read(uml.join(module).with_extension("ko")).unwrap();
        files.push(file(format!("/lib/modules/uml/{module}.ko"), content));
    }
    let initramfs = directory.join("initramfs");
    let image = GuestImage::find(&image_directory()).unwrap();
    archive::extend(&image.initramfs, &files, &initramfs).unwrap();
    initramfs
}

/// One boot with its work. `device`: a socket and the virtio device's type.
fn boot(uml: &Path, directory: &Path, device: &str, arguments: &[&str]) -> Command {
    // Its first process ends last and its others with it.
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", BOOT])
        .arg(uml.join("linux"))
        .args(["con=null", "con0=null,fd:1", "quiet", "panic=-1"])
        .arg(format!("initrd={}", directory.join("initramfs").display()))
        .arg(format!("virtio_uml.device={device}"))
        .args(arguments)
        .env("TMPDIR", "/dev/shm")
        .env("HOME", directory)
        .stdin(Stdio::null());
    command
}

/// Its kernel keeps a process's floating-point state in less room than a CPU with AMX needs, and then starts no process,
/// whatever its devices are.
fn starts_no_process(test: &str, said: &str) -> bool {
    let starts_none = said.contains("ptrace set fp regs failed");
    if starts_none {
        let why = "this User Mode Linux starts no process on this CPU (ptrace set fp regs)";
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
    }
    starts_none
}

#[test]
fn user_mode_linux_finds_what_it_wrote_at_each_boot() {
    const TEST: &str = "user_mode_linux_finds_what_it_wrote_at_each_boot";
    let Some(_host) = can_run(TEST) else { return };
    const MODULES: [&str; 1] = ["virtio_blk"];
    let Some(uml) = uml(TEST, &MODULES) else { return };
    let (record, counts) = (Record::start(TEST), Counts::get());
    let image = Image::make();
    let mut server = Server::start(&image);
    let directory = tempfile::tempdir().unwrap();
    initramfs(&uml, INIT, &MODULES, directory.path());

    let mut times = Vec::new();
    for number in 1..=counts.uml_boots {
        let start = Instant::now();
        let device = format!("{}:2", server.socket().display());
        let output = boot(&uml, directory.path(), &device, &["mem=512M"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        if number == 1 && starts_no_process(TEST, &said) {
            server.end();
            return;
        }
        assert!(said.contains("uml: all is well"), "boot {number}, {:?}: {said}", output.status);
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

/// Its driver negotiates a packed ring, and takes its address from the configuration space.
#[test]
fn user_mode_linux_guests_talk_over_a_network() {
    const TEST: &str = "user_mode_linux_guests_talk_over_a_network";
    const MODULES: [&str; 3] = ["failover", "net_failover", "virtio_net"];
    let Some(_host) = can_run(TEST) else { return };
    let Some(uml) = uml(TEST, &MODULES) else { return };
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = directory.path();
    let socket = |number: u8| at.join(format!("nic{number}")).display().to_string();
    let mut nics = "[[network]]\nname = 'lan'\n".to_owned();
    for number in [1, 2] {
        nics += &format!(
            "[[nic]]\nname = 'nic{number}'\nvm = 'vm{number}'\nsocket = '{}'\nnetwork = 'lan'\n\
             mac = '52:54:00:00:00:0{number}'\n",
            socket(number)
        );
    }
    let daemon = Daemon::start(at, &mut Store::new(), &nics);
    initramfs(&uml, TALK, &MODULES, at);
    let guests = [(1, 2), (2, 1)].map(|(number, other)| {
        let (me, other) = (format!("me={number}"), format!("other={other}"));
        let mut command =
            boot(&uml, at, &format!("{}:1", socket(number)), &["mem=512M", &me, &other]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    });
    let said = guests.map(|guest| {
        let output = guest.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    });
    if said.iter().any(|said| starts_no_process(TEST, said)) {
        return;
    }
    assert!(said.iter().all(|said| said.contains("uml: all is well")), "{said:?}");
    for nic in [0, 1] {
        let seen = daemon.nic(nic);
        let bytes = |queue: usize| seen["queues"][queue]["bytes"].as_u64().unwrap();
        // What `seq 1 500000` prints.
        assert!(bytes(0) > 3_388_895 && bytes(1) > 3_388_895, "{seen}");
    }
}
