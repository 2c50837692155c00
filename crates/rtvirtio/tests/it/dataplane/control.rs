//! Queues that move while a guest verifies: by the server's control socket.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::counts::{Counts, Record, middle_and_longest};
use super::server::{Image, Kind, Server};
use super::verify::{FileSystem, Verify};
use super::vm::{Disk, Vm, can_run};

/// Moves in a second.
const RATE: u32 = 1000;
/// Only tells a hang.
const MOVES_TIME: Duration = Duration::from_secs(600);

/// Asks, on a connection of its own as the server wants it; the answer's status and body.
fn put(control_socket: &Path, path: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(control_socket)
        .unwrap_or_else(|e| panic!("{}: {e}", control_socket.display()));
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    let request = format!(
        "PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
    (status, body.to_owned())
}

/// Moves of queues.
#[derive(Default)]
struct Moves {
    /// From a question to its answer.
    asked: Vec<Duration>,
    /// For how long nobody served the queue that moved, where it moved.
    pauses: Vec<Duration>,
}

/// Moves any queue to any IOThread, `rate` times a second until `stop`, and at least `min` of them however
/// long that takes a busy machine.
fn move_queues_randomly(
    control_socket: &Path,
    (rate, min): (u32, usize),
    stop: &AtomicBool,
) -> Moves {
    let (start, mut moves) = (Instant::now(), Moves::default());
    // Where a queue goes back to where it is, nothing moves: each goes round by turns.
    let mut at = [0; Server::QUEUES as usize];
    // xorshift64 (Marsaglia 2003): the same moves in each run.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    while !stop.load(Ordering::Relaxed) || moves.pauses.len() < min {
        assert!(start.elapsed() < MOVES_TIME, "{} moves", moves.pauses.len());
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let queue = (state % u64::from(Server::QUEUES)) as usize;
        at[queue] = (at[queue] + 1) % Server::IOTHREADS.len();
        let iothread = Server::IOTHREADS[at[queue]];
        let before = Instant::now();
        let path = format!("/v1/mapping/{}/{queue}", Server::DEVICE);
        let body = format!(r#"{{"iothread":"{iothread}"}}"#);
        let (status, answer) = put(control_socket, &path, &body);
        assert_eq!(status, 200, "{path} to {iothread}: {answer}");
        moves.asked.push(before.elapsed());
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        let pause = answer["pause_ns"].as_u64().expect("a pause");
        if pause > 0 {
            moves.pauses.push(Duration::from_nanos(pause));
        }
        let due = start + Duration::from_secs(1) / rate * moves.asked.len() as u32;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    moves
}

/// The time that so many of 1,000 do not exceed, in µs.
fn quantile(times: &mut [Duration], of_1000: usize) -> u128 {
    times.sort_unstable();
    times.get(times.len() * of_1000 / 1000).or(times.last()).map_or(0, Duration::as_micros)
}

#[test]
fn qemu_guest_whose_queues_move_verifies() {
    const TEST: &str = "qemu_guest_whose_queues_move_verifies";
    if Kind::under_test() == Kind::Qsd {
        eprintln!("SKIPPED {TEST}: qemu-storage-daemon moves no queue");
        return;
    }
    let Some(_host) = can_run(TEST) else { return };
    let (record, counts) = (Record::start(TEST), Counts::get());
    let image = Image::make();
    let server = Server::start(&image);
    let mut vm = Vm::boot(&server, Disk::default());
    let files = FileSystem::make(vm.shell());
    let verify = Verify::start(vm.shell());
    let (control, stop) = (server.control(), AtomicBool::new(false));
    // A tenth of what the benchmark asks for; how many there are a second is its to say.
    let min = (counts.moves.as_secs_f64() * f64::from(RATE) / 10.0) as usize;
    let mut moves = std::thread::scope(|scope| {
        let moves = scope.spawn(|| move_queues_randomly(&control, (RATE, min), &stop));
        let start = Instant::now();
        while start.elapsed() < counts.moves && !moves.is_finished() {
            std::thread::sleep(Duration::from_millis(100));
        }
        stop.store(true, Ordering::Relaxed);
        moves.join().unwrap()
    });
    verify.goes_on(vm.shell(), 200, Duration::from_secs(60));
    let verified = verify.stop(vm.shell());
    files.is_intact(vm.shell());
    files.unmount(vm.shell());
    let rate = moves.pauses.len() as f64 / counts.moves.as_secs_f64();
    let pauses = [500, 990, 999, 1000].map(|of_1000| quantile(&mut moves.pauses, of_1000));
    record.add(&format!(
        "{} moves, {rate:.0} a second, each asked and answered in {}; pauses, p50 p99 p99.9 max: \
         {pauses:?} us; {verified}",
        moves.pauses.len(),
        middle_and_longest(moves.asked),
    ));
}
