//! Queues that move while a guest verifies: by the server's control socket.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
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

/// A connection that stays, as 1,000 requests a second want it.
struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    fn connect(control_socket: &Path) -> Self {
        let stream = UnixStream::connect(control_socket)
            .unwrap_or_else(|e| panic!("{}: {e}", control_socket.display()));
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    /// The answer's status and body.
    fn put(&mut self, path: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let request = format!(
            "PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        self.stream.get_mut().write_all(request.as_bytes()).unwrap();
        let status = self.line();
        let status = status.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
        let mut length = 0;
        loop {
            let line = self.line().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            assert!(!line.starts_with("transfer-encoding:"), "{line}");
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.stream.read_line(&mut line).unwrap() > 0, "the server hung up");
        line.trim_end().to_owned()
    }
}

/// Moves any queue to any IOThread, `rate` times a second until `stop`; how long each took.
fn move_queues_randomly(control_socket: &Path, rate: u32, stop: &AtomicBool) -> Vec<Duration> {
    let mut client = Client::connect(control_socket);
    let (start, mut times) = (Instant::now(), Vec::new());
    // xorshift64 (Marsaglia 2003): the same moves in each run.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    while !stop.load(Ordering::Relaxed) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let queue = state % u64::from(Server::QUEUES);
        let iothread = Server::IOTHREADS[(state >> 32) as usize % Server::IOTHREADS.len()];
        let before = Instant::now();
        let path = format!("/v1/mapping/{}/{queue}", Server::DEVICE);
        let (status, body) = client.put(&path, &format!(r#"{{"iothread":"{iothread}"}}"#));
        assert!((200..300).contains(&status), "{path} to {iothread}: {status} {body}");
        times.push(before.elapsed());
        let due = start + Duration::from_secs(1) / rate * times.len() as u32;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    times
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
    let times = std::thread::scope(|scope| {
        let moves = scope.spawn(|| move_queues_randomly(&control, RATE, &stop));
        let start = Instant::now();
        while start.elapsed() < counts.moves && !moves.is_finished() {
            std::thread::sleep(Duration::from_millis(100));
        }
        stop.store(true, Ordering::Relaxed);
        moves.join().unwrap()
    });
    verify.goes_on(vm.shell(), 200, Duration::from_secs(10));
    let verified = verify.stop(vm.shell());
    files.is_intact(vm.shell());
    files.unmount(vm.shell());
    let rate = times.len() as f64 / counts.moves.as_secs_f64();
    record.add(&format!(
        "{} moves, {rate:.0} a second, each asked and answered in {}; {verified}",
        times.len(),
        middle_and_longest(times),
    ));
    // The acceptance's rate is for 60 s on a machine that does nothing else.
    assert!(rate > f64::from(RATE) / 10.0, "{rate:.0} moves a second");
}
