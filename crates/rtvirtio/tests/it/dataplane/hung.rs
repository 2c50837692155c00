//! A disk that does not answer: its own VM waits for it, and nobody else does.

use std::process::{Command, Output};

use rtvirtio_engine::testing::has_io_uring;
use rustix::process::Signal;

use super::front_end::{Daemon, FrontEnd};

const IN: u32 = 0;

/// A daemon with a disk whose every request takes an hour, one of which is in flight, and a good disk. None, and the test is
/// skipped, where its IOThread gets no ring.
fn daemon() -> Option<(Daemon, FrontEnd, FrontEnd)> {
    if !has_io_uring() {
        return None;
    }
    let fault = "fault = { stall_every = 1, stall_ms = 3600000 }";
    let hung = format!("{{ type = 'ssd', size = '1M', ssd = 'ref-8x80', {fault} }}");
    let ram = "{ type = 'ram', size = '4M' }".to_owned();
    let daemon = Daemon::start(&[("hung", hung), ("good", ram)]);
    let mut hung = FrontEnd::connect(&daemon.socket("hung"));
    hung.start(IN, 0, 4096);
    let mut good = FrontEnd::connect(&daemon.socket("good"));
    assert_eq!(good.request(IN, 1, 4096), 0);
    Some((daemon, hung, good))
}

#[track_caller]
fn succeeds(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8_lossy(&stdout).into_owned()
}

#[test]
fn disk_that_does_not_answer_is_waited_for_by_its_own_changes_alone() {
    let Some((mut daemon, _hung, mut good)) = daemon() else { return };
    let mut removal = daemon.ctl(&["device", "remove", "hung"]).spawn().unwrap();
    // It has begun: the device is not shown any more.
    while succeeds(daemon.ctl(&["snapshot"])).contains("hung") {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(succeeds(daemon.ctl(&["metrics"])).contains("rtvirtio_"));
    succeeds(daemon.ctl(&["iothread", "create", "iot1"]));
    succeeds(daemon.ctl(&["iothread", "pin", "iot1", "0"]));
    succeeds(daemon.ctl(&["mapping", "move", "good", "0", "iot1"]));
    succeeds(daemon.ctl(&["device", "resize", "good", "8M"]));
    let later = ["device", "add", "later", "--vm", "vm", "--listen", "later", "--ram"];
    succeeds(daemon.ctl(&[&later[..], &["--size", "1M"]].concat()));
    assert_eq!(good.request(IN, 1, 4096), 0);
    assert_eq!(FrontEnd::connect(&daemon.socket("later")).request(IN, 1, 4096), 0);
    succeeds(daemon.ctl(&["device", "remove", "later"]));
    assert!(removal.try_wait().unwrap().is_none(), "it was to wait for the disk");
    removal.kill().unwrap();
    removal.wait().unwrap();
    // Nor is it waited for at the end.
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("a disk does not answer"), "{log}");
}

#[test]
fn second_signal_ends_a_server_whose_disk_does_not_answer() {
    let Some((mut daemon, _hung, _good)) = daemon() else { return };
    daemon.signal(Signal::INT);
    std::thread::sleep(std::time::Duration::from_millis(300));
    daemon.is_alive();
    daemon.signal(Signal::INT);
    let (status, log) = daemon.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("second signal"), "{log}");
}
