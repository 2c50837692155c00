//! kill −9 of the server while a guest verifies.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;

use super::counts::{Counts, Record, endurance, middle_late_and_longest};
use super::server::{Image, Server, Sockets};
use super::slow::Slow;
use super::verify::{FileSystem, Verify};
use super::vm::{Disk, Vm, can_run};
use crate::in_guest::image as guest_image;
use crate::scratch_disk::can_run as can_use_host;

/// The guest does I/O again within this time on a machine with nothing else to do; QEMU looks for the
/// server every 200 ms.
const AGAIN: Duration = Duration::from_secs(2);
/// More than are in flight: three jobs of depth 8. So new requests are among them.
const MORE_THAN_IN_FLIGHT: u64 = 32;
/// Of a slow disk: fio waits for it, so that its requests are in flight in the server.
const SLOW_IOPS: u32 = 300;

/// From a kill to what comes after it, in order; its parts tell who is waited for.
#[derive(Default)]
struct Parts {
    /// The server listens: its start.
    listens: Vec<Duration>,
    /// A front end is connected: QEMU's timer of 200 ms.
    connected: Vec<Duration>,
    /// A request has ended: the front end's set-up, and what was in flight.
    first: Vec<Duration>,
    /// So have as many as show that new ones end.
    again: Vec<Duration>,
}

impl std::fmt::Display for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { listens, connected, first, again } = self;
        let [again, listens, connected, first] =
            [again, listens, connected, first].map(|part| middle_late_and_longest(part.clone()));
        write!(
            f,
            "I/O again after {again} (server listens: {listens}; connected: {connected}; first \
             request ended: {first})"
        )
    }
}

/// When the server listened, and when it was connected to.
fn watch(socket: &Path, start: Instant, stop: &AtomicBool) -> [Option<Duration>; 2] {
    let (mut listens, mut connected) = (None, None);
    while connected.is_none() && !stop.load(Relaxed) {
        let sockets = Sockets::of(socket);
        if sockets.listens {
            listens.get_or_insert_with(|| start.elapsed());
        }
        if sockets.connected {
            connected.get_or_insert_with(|| start.elapsed());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    [listens, connected]
}

/// Kills the server of this image under verify, again and again; it may be on a slow disk.
fn survives(record: &Record, image: &Image, disk: Disk, slow: Option<&Slow>) {
    let counts = Counts::get();
    let mut server = Server::start_in(slow.map(Slow::procs), image, "server");
    let mut vm = Vm::boot(&server, disk);
    let shell = vm.shell();
    let files = FileSystem::make(shell);
    let verify = Verify::start(shell);
    if let Some(slow) = slow {
        slow.limit(Some(SLOW_IOPS));
    }
    let (mut parts, mut in_flight) = (Parts::default(), 0);
    let socket = server.socket();
    for kill in 0..counts.kills {
        // At changing moments of fio's passes.
        std::thread::sleep(Duration::from_millis(100 + u64::from(kill) * 37 % 400));
        server.kill();
        let (start, stop) = (Instant::now(), AtomicBool::new(false));
        let before = shell.completed();
        in_flight += shell.in_flight();
        server.start_again();
        let mut first = None;
        let [listens, connected] = std::thread::scope(|scope| {
            let watched = scope.spawn(|| watch(&socket, start, &stop));
            loop {
                let (ended, waited) = (shell.completed() - before, start.elapsed());
                if ended > 0 {
                    first.get_or_insert(waited);
                }
                if ended >= MORE_THAN_IN_FLIGHT || waited > 10 * AGAIN {
                    break;
                }
            }
            stop.store(true, Relaxed);
            watched.join().unwrap()
        });
        let waited = start.elapsed();
        assert!(waited < 10 * AGAIN, "no I/O {waited:?} after kill {kill}; {}", server.log());
        parts.listens.extend(listens);
        parts.connected.extend(connected);
        parts.first.extend(first);
        parts.again.push(waited);
        verify.runs(shell);
        server.check();
    }
    if let Some(slow) = slow {
        slow.limit(None);
    }
    let verified = verify.stop(shell);
    files.is_intact(shell);
    files.unmount(shell);
    let longest = *parts.again.iter().max().unwrap();
    record.add(&format!(
        "{disk:?}: {} times killed, with {in_flight} requests in flight; {parts}; {verified}",
        counts.kills
    ));
    assert!(in_flight > 0, "no kill had anything in flight");
    // How long it takes is a measurement; that it comes again was asserted above.
    if endurance().is_some() {
        assert!(longest < AGAIN, "{longest:?} until there was I/O again");
    }
}

#[test]
fn qemu_guest_outlives_killed_server() {
    const TEST: &str = "qemu_guest_outlives_killed_server";
    let Some(_host) = can_run(TEST) else { return };
    survives(&Record::start(TEST), &Image::make(), Disk::default(), None);
}

#[test]
fn qemu_guest_with_packed_rings_outlives_killed_server() {
    const TEST: &str = "qemu_guest_with_packed_rings_outlives_killed_server";
    let Some(_host) = can_run(TEST) else { return };
    let disk = Disk { packed: true, ..Disk::default() };
    survives(&Record::start(TEST), &Image::make(), disk, None);
}

#[test]
fn qemu_guest_outlives_server_killed_on_a_slow_disk() {
    const TEST: &str = "qemu_guest_outlives_server_killed_on_a_slow_disk";
    let Some(_host) = can_use_host(TEST) else { return };
    if guest_image(TEST).is_none() || !has_io_uring() {
        return;
    }
    let image = Image::make();
    let Some(slow) = Slow::disk_of(&image, TEST) else { return };
    survives(&Record::start(TEST), &image, Disk::default(), Some(&slow));
}
