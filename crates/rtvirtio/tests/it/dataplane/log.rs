//! What the data plane tells the journal.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;

use super::front_end::Daemon;

const ENOUGH: Duration = Duration::from_secs(60);

/// A session that ends in an error: its first message is none.
fn nonsense(daemon: &Daemon, disk: &str) {
    let mut stream = UnixStream::connect(daemon.socket(disk)).unwrap();
    stream.set_read_timeout(Some(ENOUGH)).unwrap();
    stream.write_all(&[0xff; 12]).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "it is not disconnected");
}

fn lines(daemon: &Daemon, start: &str) -> usize {
    daemon.log().lines().filter(|line| line.starts_with(start)).count()
}

#[test]
fn lines_have_priorities_and_a_front_end_that_comes_without_end_does_not_fill_the_journal() {
    if !has_io_uring() {
        return;
    }
    let ram = || "{ type = 'ram', size = '1M' }".to_owned();
    let daemon = Daemon::start(&[("noisy", ram()), ("quiet", ram())]);
    for _ in 0..100 {
        nonsense(&daemon, "noisy");
    }
    nonsense(&daemon, "quiet");
    let start = Instant::now();
    while lines(&daemon, "<4>quiet: front end: ") == 0 {
        assert!(start.elapsed() < ENOUGH, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(lines(&daemon, "<6>serving 2 devices"), 1, "{}", daemon.log());
    // It connects, fails and leaves: three lines each time, of which twenty are written, and one each 5 s.
    let noisy = daemon.log().lines().filter(|line| line.contains("noisy: ")).count();
    let more = start.elapsed().as_secs() as usize / 5 + 2;
    assert!((5..=20 + more).contains(&noisy), "{noisy}: {}", daemon.log());
    assert!(daemon.log().lines().all(|line| line.starts_with('<')), "{}", daemon.log());
}
