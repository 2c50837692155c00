//! kill −9 of the server while a guest verifies.

use std::time::{Duration, Instant};

use super::counts::{Counts, Record, middle_and_longest};
use super::server::{Image, Server};
use super::verify::{FileSystem, Verify};
use super::vm::{Disk, Vm, can_run};

/// The guest does I/O again within this time; QEMU looks for the server every 200 ms.
const AGAIN: Duration = Duration::from_secs(2);
/// More than are in flight: three jobs of depth 8. So new requests are among them.
const MORE_THAN_IN_FLIGHT: u64 = 32;

fn survives(test: &'static str, disk: Disk) {
    let Some(_host) = can_run(test) else { return };
    let (record, counts) = (Record::start(test), Counts::get());
    let image = Image::make();
    let mut server = Server::start(&image);
    let mut vm = Vm::boot(&server, disk);
    let shell = vm.shell();
    let files = FileSystem::make(shell);
    let verify = Verify::start(shell);
    let mut times = Vec::new();
    for kill in 0..counts.kills {
        // At changing moments of fio's passes.
        std::thread::sleep(Duration::from_millis(100 + u64::from(kill) * 37 % 400));
        server.kill();
        let start = Instant::now();
        let before = shell.completed();
        server.start_again();
        while shell.completed() < before + MORE_THAN_IN_FLIGHT {
            let waited = start.elapsed();
            assert!(waited < 10 * AGAIN, "no I/O {waited:?} after kill {kill}; {}", server.log());
        }
        times.push(start.elapsed());
        verify.runs(shell);
        server.check();
    }
    let verified = verify.stop(shell);
    files.is_intact(shell);
    files.unmount(shell);
    let longest = *times.iter().max().unwrap();
    record.add(&format!(
        "{disk:?}: {} times killed; I/O again after {}; {verified}",
        counts.kills,
        middle_and_longest(times)
    ));
    assert!(longest < AGAIN, "{longest:?} until there was I/O again");
}

#[test]
fn qemu_guest_outlives_killed_server() {
    survives("qemu_guest_outlives_killed_server", Disk::default());
}

#[test]
fn qemu_guest_with_packed_rings_outlives_killed_server() {
    let disk = Disk { packed: true, ..Disk::default() };
    survives("qemu_guest_with_packed_rings_outlives_killed_server", disk);
}
