//! A running guest moves between two servers of one image, there and back.

use std::time::{Duration, Instant};

use serde_json::json;

use super::counts::{Counts, Record, middle_and_longest};
use super::server::{Image, Server};
use super::verify::{FileSystem, Verify};
use super::vm::{Disk, Vm, can_run};

/// A migration of 512 MiB under TCG.
const ENOUGH: Duration = Duration::from_secs(120);

/// Moves the guest to a new QEMU at `server`; the old one is gone then.
fn migrate(mut from: Vm, server: &Server, disk: Disk) -> (Vm, Duration) {
    let mut to = Vm::receive(server, disk);
    let uri = format!("unix:{}", to.directory().join("incoming").display());
    // Without a limit of bandwidth it is the guest's CPU time that is short.
    let parameters = json!({"max-bandwidth": 8u64 << 30, "downtime-limit": 500});
    let events = json!({"capabilities": [{"capability": "events", "state": true}]});
    for vm in [&mut from, &mut to] {
        vm.qmp.run("migrate-set-parameters", parameters.clone());
        vm.qmp.run("migrate-set-capabilities", events.clone());
    }
    to.qmp.run("migrate-incoming", json!({"uri": uri}));
    from.qmp.run("migrate", json!({"uri": uri}));
    let start = Instant::now();
    loop {
        let state = from.qmp.run("query-migrate", json!({}));
        match state["status"].as_str().unwrap() {
            "completed" => break,
            "failed" | "cancelled" => panic!("{state}\n{}\n{}", from.said(), to.said()),
            _ => assert!(start.elapsed() < ENOUGH, "{state}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let runs = |vm: &mut Vm| vm.qmp.run("query-status", json!({}))["running"] == true;
    while !runs(&mut to) {
        assert!(start.elapsed() < ENOUGH, "{}", to.said());
    }
    let took = start.elapsed();
    (to, took)
}

#[test]
fn qemu_guest_migrates_there_and_back_under_verify() {
    const TEST: &str = "qemu_guest_migrates_there_and_back_under_verify";
    let Some(_host) = can_run(TEST) else { return };
    let (record, counts) = (Record::start(TEST), Counts::get());
    let image = Image::make();
    let mut servers = ["here", "there"].map(|name| Server::start_named(&image, name));
    let disk = Disk::default();
    let mut vm = Vm::boot(&servers[0], disk);
    let files = FileSystem::make(vm.shell());
    let verify = Verify::start(vm.shell());
    let mut times = Vec::new();
    for move_ in 1..=2 * counts.migrations {
        let (there, took) = migrate(vm, &servers[move_ as usize % 2], disk);
        vm = there;
        times.push(took);
        servers.iter_mut().for_each(Server::check);
        verify.goes_on(vm.shell(), 200, Duration::from_secs(60));
    }
    let verified = verify.stop(vm.shell());
    files.is_intact(vm.shell());
    files.unmount(vm.shell());
    record.add(&format!(
        "{} times there and back, each way takes {}; {verified}",
        counts.migrations,
        middle_and_longest(times)
    ));
}
