//! Hostile guests, front ends and disks, against `rtvirtio serve`: the points of the list of what
//! must be survived, each with what another VM on the same IOThread notices.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;

use super::front_end::{DATA, Daemon, FrontEnd, Outcome, send};
use super::rings::CONTENTS;

const SECTORS: u64 = (4 << 20) / 512;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

fn ram() -> String {
    "{ type = 'ram', size = '4M' }".to_owned()
}

/// A daemon with a bad VM's disk and a good one's. None, and the test is skipped, where its IOThread gets no ring.
fn daemon(engine: String) -> Option<(Daemon, FrontEnd)> {
    if !has_io_uring() {
        return None;
    }
    let daemon = Daemon::start(&[("bad", engine), ("good", ram())]);
    let good = FrontEnd::connect(&daemon.socket("good"));
    Some((daemon, good))
}

/// The other VM is served.
#[track_caller]
fn is_served(good: &mut FrontEnd) {
    let start = Instant::now();
    assert_eq!(good.request(IN, 1, 4096), OK);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn any_ring_content_returns_the_head_or_breaks_the_queue() {
    let Some((mut daemon, mut good)) = daemon(ram()) else { return };
    for (name, attack) in CONTENTS {
        let bad = FrontEnd::connect(&daemon.socket("bad"));
        attack(&bad);
        assert_ne!(bad.outcome(), Outcome::Neither, "{name}");
        for _ in 0..1000 {
            bad.kick();
        }
        is_served(&mut good);
        daemon.is_quiet();
        daemon.is_alive();
    }
    // And a good driver on the same disk afterwards.
    is_served(&mut FrontEnd::connect(&daemon.socket("bad")));
}

#[test]
fn requests_outside_the_disk_fail_and_touch_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let content: Vec<u8> = (0..SECTORS * 512).map(|at| (at / 512) as u8).collect();
    std::fs::write(&path, &content).unwrap();
    let engine = format!("{{ type = 'file', path = '{}', format = 'raw' }}", path.display());
    let Some((mut daemon, mut good)) = daemon(engine) else { return };
    let mut bad = FrontEnd::connect(&daemon.socket("bad"));
    for kind in [IN, OUT] {
        for (sector, bytes) in [
            (u64::MAX, 512),
            (u64::MAX / 512, 4096),
            (SECTORS, 512),
            (SECTORS - 1, 1024),
            (SECTORS + 1, 512),
            (0, 511),
            (0, 513),
            (0, 1),
        ] {
            assert_eq!(bad.request(kind, sector, bytes), IOERR, "{kind} {sector} {bytes}");
        }
    }
    let segment = |sector: u64, sectors: u32, flags: u32| {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes
    };
    for kind in [DISCARD, WRITE_ZEROES] {
        for (sector, sectors, flags, status) in [
            (u64::MAX, 1, 0, IOERR),
            (SECTORS, 1, 0, IOERR),
            (SECTORS - 1, 2, 0, IOERR),
            (0, u32::MAX, 0, IOERR),
            (0, 1, 4, UNSUPP),
        ] {
            bad.driver.guest().write(DATA, &segment(sector, sectors, flags));
            assert_eq!(bad.request(kind, 0, 16), status, "{kind} {sector} {sectors} {flags}");
        }
        // More segments than are taken.
        for at in 0..4 {
            bad.driver.guest().write(DATA + 16 * at, &segment(at * 8, 8, 0));
        }
        assert_eq!(bad.request(kind, 0, 64), UNSUPP);
        assert_eq!(bad.request(kind, 0, 15), UNSUPP);
    }
    assert_eq!(bad.request(77, 0, 512), UNSUPP);
    assert_eq!(bad.request(FLUSH, 0, 0), OK);
    assert_eq!(bad.request(IN, SECTORS - 1, 512), OK);
    assert!(std::fs::read(&path).unwrap() == content, "the disk has changed");
    is_served(&mut good);
    daemon.is_alive();
}

#[test]
fn malformed_messages_leave_no_descriptor_and_no_memory_behind() {
    let count: u64 = match std::env::var("RTVIRTIO_MESSAGES") {
        Ok(count) => count.parse().unwrap(),
        Err(_) => 50_000,
    };
    let Some((mut daemon, mut good)) = daemon(ram()) else { return };
    let socket = daemon.socket("bad");
    drop(FrontEnd::connect(&socket));
    std::thread::sleep(Duration::from_millis(100));
    let (fds, resident) = (daemon.fds(), daemon.resident());
    let stray = File::open("/dev/null").unwrap();
    let mut random = 1u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    let mut stream = UnixStream::connect(&socket).unwrap();
    let mut answers = [0; 4096];
    for sent in 0..count {
        let length = next(200) as u32;
        let body: Vec<u8> =
            (0..length).map(|_| if next(3) == 0 { next(256) as u8 } else { 0 }).collect();
        // What it says: the truth, a little more, or anything.
        let size = match next(8) {
            0 => u32::MAX,
            1 => length + 1 + next(64) as u32,
            2 => next(1 << 20) as u32,
            _ => length,
        };
        let flags = [1, 1, 1, 9, 9, 0, 5, next(256) as u32][next(8) as usize];
        let stray = vec![stray.as_fd(); if next(4) == 0 { next(33) as usize } else { 0 }];
        let taken = send(&stream, [next(48) as u32, flags, size], &body, &stray);
        stream.set_nonblocking(true).unwrap();
        let gone = matches!(std::io::Read::read(&mut &stream, &mut answers), Ok(0));
        stream.set_nonblocking(false).unwrap();
        // A truncated body, or one that it still waits for, ends with the connection.
        if !taken || gone || next(4) == 0 {
            stream = UnixStream::connect(&socket).unwrap();
        }
        if sent % 10_000 == 0 {
            is_served(&mut good);
        }
    }
    drop(stream);
    daemon.is_quiet();
    daemon.is_alive();
    assert_eq!(daemon.fds(), fds);
    let grown = daemon.resident().saturating_sub(resident);
    assert!(grown < 4 << 10, "{grown} KiB more");
    is_served(&mut FrontEnd::connect(&socket));
    is_served(&mut good);
}

#[test]
fn disk_errors_are_told_and_others_are_served() {
    let engine = |fault: &str| {
        format!("{{ type = 'ssd', size = '4M', ssd = 'ref-8x80', fault = {{ {fault} }} }}")
    };
    for (fault, kind) in
        [("error_every = 1", IN), ("no_space_every = 1", OUT), ("short_every = 1", IN)]
    {
        let Some((mut daemon, mut good)) = daemon(engine(fault)) else { return };
        let mut bad = FrontEnd::connect(&daemon.socket("bad"));
        for _ in 0..20 {
            assert_eq!(bad.request(kind, 0, 4096), IOERR, "{fault}");
            is_served(&mut good);
        }
        daemon.is_alive();
    }
}

#[test]
fn stalled_disk_ends_late_and_others_are_served() {
    let seconds: u64 = match std::env::var("RTVIRTIO_STALL_SECONDS") {
        Ok(seconds) => seconds.parse().unwrap(),
        Err(_) => 3,
    };
    let stall = Duration::from_secs(seconds);
    let engine = format!(
        "{{ type = 'ssd', size = '4M', ssd = 'ref-8x80', fault = {{ stall_every = 1, stall_ms = {} }} }}",
        stall.as_millis()
    );
    let Some((mut daemon, mut good)) = daemon(engine) else { return };
    let mut bad = FrontEnd::connect(&daemon.socket("bad"));
    let start = Instant::now();
    bad.start(IN, 0, 4096);
    while start.elapsed() < stall - Duration::from_millis(500) {
        is_served(&mut good);
        assert_eq!(bad.finish(Duration::from_millis(100)), None);
    }
    assert_eq!(bad.finish(stall), Some(OK));
    assert!(start.elapsed() >= stall);
    daemon.is_alive();
}

#[test]
fn file_that_shrinks_fails_requests_behind_its_end() {
    for directory in ["/dev/shm", "/var/tmp"] {
        let directory = tempfile::tempdir_in(directory).unwrap();
        let path = directory.path().join("disk");
        let file = File::create(&path).unwrap();
        file.set_len(4 << 20).unwrap();
        let engine = format!(
            "{{ type = 'file', path = '{}', format = 'raw', direct = false }}",
            path.display()
        );
        let Some((mut daemon, mut good)) = daemon(engine) else { return };
        let mut bad = FrontEnd::connect(&daemon.socket("bad"));
        assert_eq!(bad.request(IN, SECTORS - 8, 4096), OK);
        file.set_len(1 << 20).unwrap();
        assert_eq!(bad.request(IN, SECTORS - 8, 4096), IOERR, "{directory:?}");
        // Across the end.
        assert_eq!(bad.request(IN, (1 << 20) / 512 - 4, 4096), IOERR);
        assert_eq!(bad.request(IN, 0, 4096), OK);
        is_served(&mut good);
        daemon.is_alive();
    }
}

#[test]
fn guest_memory_that_is_cut_off_breaks_its_queue_only() {
    let Some((mut daemon, mut good)) = daemon(ram()) else { return };
    let mut bad = FrontEnd::connect(&daemon.socket("bad"));
    assert_eq!(bad.request(IN, 0, 4096), OK);
    rustix::fs::ftruncate(bad.driver.guest().file(), 0).unwrap();
    // The test's own mapping is gone too: it may only kick.
    for _ in 0..100 {
        bad.kick();
    }
    is_served(&mut good);
    daemon.is_quiet();
    daemon.is_alive();
    drop(bad);
    is_served(&mut FrontEnd::connect(&daemon.socket("bad")));
}

/// A write in flight that ends behind the new end would make the file longer again.
#[test]
fn disk_that_is_shrunk_while_it_is_written_ends_where_it_is_told() {
    const LARGE: u64 = 64 << 20;
    const SMALL: u64 = 32 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    File::create(&path).unwrap().set_len(LARGE).unwrap();
    let engine = format!("{{ type = 'file', path = '{}', format = 'raw' }}", path.display());
    let Some((mut daemon, _good)) = daemon(engine) else { return };
    let resize = |size: u64| {
        let size = size.to_string();
        let output = daemon.ctl(&["device", "resize", "bad", &size, "--shrink"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut front = FrontEnd::connect(&daemon.socket("bad"));
    /// Ends the writer, whatever becomes of the test.
    struct Stop<'a>(&'a std::sync::atomic::AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let ends = Stop(&stop);
        let writer = scope.spawn(|| {
            let (mut written, mut refused) = (0, 0);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                match front.request(OUT, (LARGE - (64 << 10)) / 512, 64 << 10) {
                    OK => written += 1,
                    status => {
                        assert_eq!(status, IOERR);
                        refused += 1;
                    }
                }
            }
            (written, refused)
        });
        for round in 0..60 {
            resize(SMALL);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), SMALL, "round {round}");
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(std::fs::metadata(&path).unwrap().len(), SMALL, "round {round}, later");
            resize(LARGE);
        }
        drop(ends);
        let (written, refused) = writer.join().unwrap();
        assert!(written > 0 && refused > 0, "{written} written, {refused} refused");
    });
    daemon.is_alive();
}
