//! A libvirt domain with a vhostuser disk that reconnects.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_bench::guests::Restarts;
use rtvirtio_host::qemu::Agent;

use super::counts::{Record, endurance};
use super::server::{Image, Kind, Server};
use super::verify::{FileSystem, Verify};
use super::vm::{Shell, can_run};
use crate::libvirt::{Cgroups, ENTER, VM, target};
use crate::scratch_disk::{can_run as can_use_host, said};

const TEST: &str = "libvirt_domain_with_vhostuser_disk_verifies_and_reconnects";
/// Set within the namespaces.
const WITHIN: &str = "RTVIRTIO_TEST_WITHIN_LIBVIRT";
const ENOUGH: Duration = Duration::from_secs(60);
/// The guest does I/O again within this time on a machine with nothing else to do: libvirt's
/// reconnect has whole seconds.
const AGAIN: Duration = Duration::from_secs(3);

#[test]
fn libvirt_domain_with_vhostuser_disk_verifies_and_reconnects() {
    if std::env::var_os(WITHIN).is_some() {
        return within();
    }
    // Its lock is the host's, which the other would take again.
    let Some(host) = can_use_host(TEST) else { return };
    drop(host);
    let Some(_host) = can_run(TEST) else { return };
    let libvirt = target("libvirt");
    if !libvirt.join("stamp").exists() {
        let why = format!("no libvirt (make it with scripts/libvirt {})", libvirt.display());
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {why}");
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
        .args([&format!("dataplane::libvirt::{TEST}"), "--exact", "--nocapture"])
        .env(WITHIN, "1")
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("1 passed"), "{}", said(&output));
}

/// The test itself, beside libvirtd.
fn within() {
    let record = Record::start(TEST);
    let version = || virsh(&["version"]);
    let start = Instant::now();
    while !version().status.success() {
        assert!(start.elapsed() < ENOUGH, "{}", said(&version()));
        std::thread::sleep(Duration::from_millis(100));
    }
    let image = Image::make();
    let mut server = Server::start(&image);
    let path = PathBuf::from("domain.xml");
    std::fs::write(&path, domain_xml(&server.mapping("libvirt"))).unwrap();
    virsh_does(&["define", "--validate", "domain.xml"]);
    let agent = || {
        let mut agent = Agent::libvirt(VM);
        agent.time(Duration::from_secs(5)).is_ok().then_some(agent)
    };
    let mut restarts = Restarts::default();
    let shell = &mut loop {
        virsh_does(&["start", VM]);
        let runs = || {
            server.check();
            virsh(&["domstate", VM]).stdout.starts_with(b"running")
        };
        if let Some(shell) = Shell::connect(agent, runs) {
            break shell;
        }
        // libvirt appends to it at each start.
        let log = std::fs::read_to_string(format!("/var/log/libvirt/qemu/{VM}.log")).unwrap();
        let said = log.rsplit("starting up").next().unwrap_or_default();
        assert!(restarts.may(VM, said), "QEMU ended: {said}");
    };
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

/// A domain of type qemu that boots the guests' image, with what `rtvirtio mapping` prints put
/// where its comments say.
fn domain_xml(printed: &str) -> String {
    const IN_DEVICES: &str = "<!-- in <devices> -->";
    let (domain, devices) = printed.split_once(IN_DEVICES).expect("a part for <devices>");
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
