//! Against qemu-storage-daemon: the tools find what they are made to find, and nothing else.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rtvirtio_engine::testing::{has_io_uring, skipped};

use super::*;
use crate::server::{Backing, ServerKind, Setup, qsd_version};

const BYTES: u64 = 4 << 20;

/// A file of its own under a qemu-storage-daemon of its own.
struct Bed {
    directory: tempfile::TempDir,
    backing: Backing,
    interrupted: Interrupted,
}

impl Bed {
    /// `None`, and says so, without qemu-storage-daemon, and the rings and direct I/O that it is told to use.
    fn new() -> Option<Self> {
        if let Err(error) = qsd_version() {
            skipped(format_args!("{error:#}"));
            return None;
        }
        if !has_io_uring() {
            return None;
        }
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("disk");
        File::create(&path).unwrap().set_len(BYTES).unwrap();
        // Linux before 6.6 has none on tmpfs.
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
        if let Err(error) = direct {
            skipped(format_args!("needs direct I/O in /dev/shm: {error}"));
            return None;
        }
        let interrupted = Interrupted::new(false);
        Some(Self { directory, backing: Backing::File(path), interrupted })
    }

    fn setup(&self) -> Setup<'_> {
        Setup {
            kind: ServerKind::Qsd,
            backing: &self.backing,
            queues: 2,
            iothreads: 1,
            program: Path::new("rtvirtio"),
            directory: self.directory.path(),
        }
    }

    fn server(&self) -> Server {
        self.setup().start(&self.interrupted).unwrap()
    }

    fn file(&self) -> File {
        let path = self.directory.path().join("disk");
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn options(&self) -> Options {
        let socket = self.directory.path().join("disk.sock");
        Options { socket, queues: 2, idle: 0, depth: 8, churn: false, mebibytes: 4, seed: 1 }
    }

    /// A verifier whose blocks are all written, and the server.
    fn loaded(&self) -> (Verifier, Server) {
        let server = self.server();
        let mut verifier = Verifier::new(self.options()).unwrap();
        verifier.load(Duration::from_millis(700), &self.interrupted).unwrap();
        verifier.check().unwrap();
        (verifier, server)
    }

    /// The numbers of two blocks of this run.
    fn two_tagged(&self) -> [u64; 2] {
        let mut block = [0; BLOCK];
        let mut tagged = (0..BYTES / BLOCK as u64).filter(|number| {
            self.file().read_exact_at(&mut block, number * BLOCK as u64).unwrap();
            matches!(block::look(&block), block::Seen::Tagged(_))
        });
        [tagged.next().unwrap(), tagged.next().unwrap()]
    }
}

fn violation(error: &anyhow::Error) -> &Violation {
    match error.downcast_ref() {
        Some(VerifyError::Content(violation)) => violation,
        _ => panic!("another error: {error:#}"),
    }
}

#[test]
fn sound_server_passes_with_every_kind_of_request() {
    let Some(bed) = Bed::new() else { return };
    let server = bed.server();
    let mut verifier = Verifier::new(bed.options()).unwrap();
    verifier.load(Duration::from_secs(1), &bed.interrupted).unwrap();
    verifier.check().unwrap();
    let report = verifier.report().clone();
    let Report { reads, writes, zeroes, discards, flushes, .. } = report;
    assert!([reads, writes, zeroes, discards, flushes].iter().all(|&n| n > 0), "{report:?}");
    assert!(report.checked >= 2 * BYTES / BLOCK as u64, "{report:?}");
    assert_eq!((report.abandoned, report.connections), (0, 2));
    server.terminate().unwrap();
}

#[test]
fn block_changed_behind_its_back_is_found() {
    let Some(bed) = Bed::new() else { return };
    let (mut verifier, _server) = bed.loaded();
    let [number, _] = bed.two_tagged();
    bed.file().write_all_at(b"?", number * BLOCK as u64 + 1000).unwrap();
    let error = verifier.check().unwrap_err();
    assert_eq!((violation(&error).block, violation(&error).seen), (number, block::Seen::Garbage));
}

#[test]
fn swapped_blocks_are_found() {
    let Some(bed) = Bed::new() else { return };
    let (mut verifier, _server) = bed.loaded();
    let [one, other] = bed.two_tagged().map(|number| number * BLOCK as u64);
    let (file, mut first, mut second) = (bed.file(), [0; BLOCK], [0; BLOCK]);
    file.read_exact_at(&mut first, one).unwrap();
    file.read_exact_at(&mut second, other).unwrap();
    file.write_all_at(&second, one).unwrap();
    file.write_all_at(&first, other).unwrap();
    let error = verifier.check().unwrap_err();
    let found = violation(&error);
    assert!([one, other].contains(&(found.block * BLOCK as u64)), "{found}");
    assert!(matches!(found.seen, block::Seen::Tagged(tag) if tag.block != found.block), "{found}");
}

#[test]
fn stale_block_is_found() {
    let Some(bed) = Bed::new() else { return };
    let (mut verifier, _server) = bed.loaded();
    let [number, _] = bed.two_tagged();
    let mut old = [0; BLOCK];
    bed.file().read_exact_at(&mut old, number * BLOCK as u64).unwrap();
    let mut now = old;
    while now == old {
        verifier.load(Duration::from_millis(200), &bed.interrupted).unwrap();
        bed.file().read_exact_at(&mut now, number * BLOCK as u64).unwrap();
    }
    bed.file().write_all_at(&old, number * BLOCK as u64).unwrap();
    assert_eq!(violation(&verifier.check().unwrap_err()).block, number);
}

#[test]
fn disconnects_in_mid_io_lose_nothing() {
    let Some(bed) = Bed::new() else { return };
    let server = bed.server();
    let mut verifier = Verifier::new(bed.options()).unwrap();
    // A busy machine may spend all of these short sessions on what each reads first.
    let done = |report: &Report| report.abandoned > 0 && report.writes > 0;
    let mut rounds = 0;
    while rounds == 0 || (!done(&verifier.report) && rounds < 10) {
        verifier.disconnects(10, &bed.interrupted).unwrap();
        rounds += 1;
    }
    let report = &verifier.report;
    assert!(done(report), "{report:?}");
    assert_eq!(report.connections, rounds * (10 + 5 + 1));
    server.terminate().unwrap();
}

#[test]
fn kills_under_load_lose_nothing_acknowledged() {
    let Some(bed) = Bed::new() else { return };
    let (command, _) = bed.setup().command().unwrap();
    let (options, directory) = (bed.options(), bed.directory.path());
    let socket = options.socket.clone();
    let start = || Server::start(&command, &socket, directory, &bed.interrupted);
    let mut verifier = Verifier::new(options).unwrap();
    verifier.kills(start, 5, &bed.interrupted).unwrap();
    let report = verifier.report();
    assert!(report.abandoned > 0, "{report:?}");
    assert!(report.longest_pause < Duration::from_secs(2), "{report:?}");
}

#[test]
fn kill_that_loses_a_write_is_found() {
    let Some(bed) = Bed::new() else { return };
    let (mut verifier, server) = bed.loaded();
    let [number, _] = bed.two_tagged();
    server.kill().unwrap();
    bed.file().write_all_at(&[0; BLOCK], number * BLOCK as u64).unwrap();
    let _server = bed.server();
    let error = verifier.check().unwrap_err();
    assert_eq!((violation(&error).block, violation(&error).seen), (number, block::Seen::Zeroes));
}

#[test]
fn server_that_is_away_is_an_error() {
    let options = Options {
        socket: "/dev/shm/no-such-socket".into(),
        queues: 1,
        idle: 0,
        churn: false,
        depth: 1,
        mebibytes: 4,
        seed: 1,
    };
    let mut verifier = Verifier::new(options).unwrap();
    assert!(verifier.load(Duration::ZERO, &Interrupted::new(false)).is_err());
}
