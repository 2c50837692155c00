//! A libvirt domain with a vhostuser disk, and one with a vhostuser interface, that reconnect.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::Agent;
use rtvirtio_testbed::guests::Restarts;

use super::counts::{Record, endurance};
use super::server::{Image, Kind, Server};
use super::verify::{FileSystem, Verify};
use super::vm::{Shell, can_run};
use crate::libvirt::{Cgroups, ENTER, VM, target};
use crate::nic::{Daemon, Store};
use crate::scratch_disk::{can_run as can_use_host, said};

/// Set within the namespaces.
const WITHIN: &str = "RTVIRTIO_TEST_WITHIN_LIBVIRT";
const ENOUGH: Duration = Duration::from_secs(60);
/// The guest does I/O again within this time on a machine with nothing else to do: libvirt's
/// reconnect has whole seconds.
const AGAIN: Duration = Duration::from_secs(3);

#[test]
fn libvirt_domain_with_vhostuser_disk_verifies_and_reconnects() {
    beside_libvirtd("libvirt_domain_with_vhostuser_disk_verifies_and_reconnects", disk);
}

#[test]
fn libvirt_domain_with_vhostuser_interface_talks_and_reconnects() {
    beside_libvirtd("libvirt_domain_with_vhostuser_interface_talks_and_reconnects", interface);
}

/// Does `within` in namespaces with a libvirtd of their own.
fn beside_libvirtd(test: &'static str, within: fn(&'static str)) {
    if std::env::var_os(WITHIN).is_some() {
        let version = || virsh(&["version"]);
        let start = Instant::now();
        while !version().status.success() {
            assert!(start.elapsed() < ENOUGH, "{}", said(&version()));
            std::thread::sleep(Duration::from_millis(100));
        }
        return within(test);
    }
    // Its lock is the host's, which the other would take again.
    let Some(host) = can_use_host(test) else { return };
    drop(host);
    let Some(_host) = can_run(test) else { return };
    let libvirt = target("libvirt");
    if !libvirt.join("stamp").exists() {
        let why = format!("no libvirt (make it with scripts/libvirt {})", libvirt.display());
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
        return;
    }
    drop(Cgroups); // of a run that was killed
    let _cgroups = Cgroups;
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--mount-proc"])
        .args(["--kill-child=KILL", "sh", "-c", ENTER, "sh"])
        .args([&libvirt, directory.path()])
        .arg(std::env::current_exe().unwrap())
        .args([&format!("dataplane::libvirt::{test}"), "--exact", "--nocapture"])
        .env(WITHIN, "1")
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("1 passed"), "{}", said(&output));
}

/// Starts the domain that is defined; its shell. `goes_on` fails if what serves it does not.
fn start_domain(mut goes_on: impl FnMut()) -> Shell {
    let agent = || {
        let mut agent = Agent::libvirt(VM);
        agent.time(Duration::from_secs(5)).is_ok().then_some(agent)
    };
    let mut restarts = Restarts::default();
    loop {
        virsh_does(&["start", VM]);
        let runs = || {
            goes_on();
            virsh(&["domstate", VM]).stdout.starts_with(b"running")
        };
        if let Some(shell) = Shell::connect(agent, runs) {
            return shell;
        }
        // libvirt appends to it at each start.
        let log = std::fs::read_to_string(format!("/var/log/libvirt/qemu/{VM}.log")).unwrap();
        let said = log.rsplit("starting up").next().unwrap_or_default();
        assert!(restarts.may(VM, said), "QEMU ended: {said}");
    }
}

fn disk(test: &'static str) {
    let record = Record::start(test);
    let image = Image::make();
    let mut server = Server::start(&image);
    const IN_DEVICES: &str = "<!-- in <devices> -->";
    let printed = server.mapping("libvirt");
    let (domain, devices) = printed.split_once(IN_DEVICES).expect("a part for <devices>");
    std::fs::write("domain.xml", domain_xml(domain, devices)).unwrap();
    virsh_does(&["define", "--validate", "domain.xml"]);
    let shell = &mut start_domain(|| server.check());
    let queues = shell.expect("ls /sys/block/vda/mq | wc -l");
    assert_eq!(queues.trim(), Server::QUEUES.to_string());
    let files = FileSystem::make(shell);
    let verify = Verify::start(shell);
    // qemu-storage-daemon has no INFLIGHT_SHMFD: what it had in flight would hang.
    let again = if server.kind() == Kind::Ours {
        server.kill();
        let start = Instant::now();
        server.start_again();
        verify.goes_on(shell, 200, ENOUGH);
        let again = start.elapsed();
        // How long it takes is a measurement; that it comes again is asserted above.
        if endurance().is_some() {
            assert!(again < AGAIN, "{again:?} until there was I/O again");
        }
        format!("I/O again {} ms after kill -9", again.as_millis())
    } else {
        "kill -9 left out".to_owned()
    };
    let verified = verify.stop(shell);
    files.is_intact(shell);
    files.unmount(shell);
    record.add(&format!("{verified}; {again}"));
    virsh_does(&["destroy", VM]);
}

/// A device on a stream socket, at the other end of which this answers who has an address, and pings.
fn interface(_: &'static str) {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link");
    let listener = UnixListener::bind(&link).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(|stream| answer_all(stream.unwrap())));
    let socket = directory.path().join("net0");
    let nic = format!(
        "[[nic]]\nname = 'net0'\nvm = '{VM}'\nsocket = '{}'\nstream = '{}'\n",
        socket.display(),
        link.display()
    );
    let mut store = Store::new();
    let mut daemon = Daemon::start(directory.path(), &mut store, &nic);
    let memory = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";
    let devices = format!(
        "<interface type='vhostuser'><mac address='52:54:00:00:00:01'/>
           <source type='unix' path='{}' mode='client'><reconnect enabled='yes' timeout='1'/></source>
           <model type='virtio'/></interface>",
        socket.display()
    );
    std::fs::write("domain.xml", domain_xml(memory, &devices)).unwrap();
    virsh_does(&["define", "--validate", "domain.xml"]);
    let mut shell = start_domain(|| assert_eq!(daemon.child.try_wait().unwrap(), None));
    shell.expect(
        "while read -r m; do insmod /lib/modules/$m; done </lib/modules/network; \
         ip link set eth0 up && ip address add 10.82.0.2/24 dev eth0 && ping -c 3 -W 5 10.82.0.1",
    );
    let seen = daemon.nic(0);
    assert_eq!(
        (&seen["queues"][0]["dropped"], &seen["queues"][1]["dropped"]),
        (&0.into(), &0.into()),
        "{seen}"
    );
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    daemon = Daemon::start(directory.path(), &mut store, &nic);
    // As long as libvirt's reconnect takes, and the link of the guest is down.
    shell.expect("for i in $(seq 20); do ping -c 1 -W 1 10.82.0.1 && exit; done; exit 1");
    assert_eq!(daemon.nic(0)["connected"], true);
    virsh_does(&["destroy", VM]);
}

/// Answers frames until the other end goes.
fn answer_all(mut stream: UnixStream) {
    let mut length = [0; 4];
    while stream.read_exact(&mut length).is_ok() {
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        if stream.read_exact(&mut frame).is_err() {
            return;
        }
        if let Some(answer) = answer(frame) {
            let sent = [&(answer.len() as u32).to_be_bytes()[..], &answer].concat();
            let _ = stream.write_all(&sent);
        }
    }
}

/// To an ARP request (RFC 826) or an echo request (RFC 792).
fn answer(mut frame: Vec<u8>) -> Option<Vec<u8>> {
    const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 9];
    let exchange = |frame: &mut [u8], first: usize, second: usize, length: usize| {
        let (low, high) = frame.split_at_mut(second);
        low[first..first + length].swap_with_slice(&mut high[..length]);
    };
    if frame.len() >= 42 && frame[12..14] == [8, 6] && frame[21] == 1 {
        frame[21] = 2;
        // Hardware address and address, the sender's and the target's.
        exchange(&mut frame, 22, 32, 10);
        frame[22..28].copy_from_slice(&MAC);
    } else if frame.len() >= 42 && frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == 8 {
        exchange(&mut frame, 26, 30, 4);
        frame[34] = 0;
        // By as much as the type became less, in ones' complement.
        let (sum, carry) = u16::from_be_bytes([frame[36], frame[37]]).overflowing_add(0x0800);
        frame[36..38].copy_from_slice(&(sum + u16::from(carry)).to_be_bytes());
    } else {
        return None;
    }
    exchange(&mut frame, 0, 6, 6);
    frame[6..12].copy_from_slice(&MAC);
    Some(frame)
}

fn virsh(arguments: &[&str]) -> Output {
    let mut command = Command::new("virsh");
    command.args(["--quiet", "--connect", "qemu:///system"]).args(arguments);
    command.stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn virsh_does(arguments: &[&str]) {
    let output = virsh(arguments);
    assert!(output.status.success(), "virsh {arguments:?}: {}", said(&output));
}

/// A domain of type qemu that boots the guests' image, with these parts within `<domain>` and `<devices>`.
fn domain_xml(domain: &str, devices: &str) -> String {
    let image = target("guest");
    format!(
        "<domain type='qemu'><name>{VM}</name>
         <uuid>6ba7b810-9dad-11d1-80b4-00c04fd430c4</uuid><memory unit='MiB'>512</memory>
         {domain}
         <vcpu>4</vcpu>
         <os><type arch='x86_64' machine='q35'>hvm</type>
           <kernel>{}</kernel><initrd>{}</initrd>
           <cmdline>console=ttyS0 quiet panic=1 random.trust_cpu=on mitigations=off</cmdline></os>
         <cpu mode='maximum'/>
         <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
           {devices}
           <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
           <memballoon model='none'/>
         </devices></domain>",
        image.join("kernel").display(),
        image.join("initramfs").display()
    )
}
