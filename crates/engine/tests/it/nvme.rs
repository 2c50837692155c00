//! Namespaces of a real NVMe device, or of one that QEMU emulates.
//!
//! `RTVIRTIO_TEST_NVME="/dev/ng0n1 /dev/ng0n2"` names them. They are **overwritten**: nobody sets this
//! but the guest of `crates/rtvirtio/tests/it/nvme.rs`, which runs this very binary. Each is tried
//! with interrupts and polled, so the driver needs queues for that (`nvme.poll_queues=1`).

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtvirtio_engine::file::{FileSource, LockError, open};
use rtvirtio_engine::nvme::{NvmeConfig, NvmeEngine, NvmeError, claim};
use rtvirtio_engine::slice::SliceEngine;
use rtvirtio_engine::{Commands, Engine, Operation};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

use crate::driver::{Driver, Memory};

/// The namespaces that may be overwritten, one test at a time.
pub(crate) struct Namespaces {
    generic: Vec<PathBuf>,
    _alone: MutexGuard<'static, ()>,
}

impl Namespaces {
    /// If there are some.
    pub(crate) fn named() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let names = std::env::var("RTVIRTIO_TEST_NVME").ok()?;
        let generic = names.split_whitespace().map(PathBuf::from).collect();
        Some(Self { generic, _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner) })
    }

    /// Those, or a word about `test`.
    fn for_test(test: &str) -> Option<Self> {
        let named = Self::named();
        if named.is_none() {
            let why =
                "RTVIRTIO_TEST_NVME names no namespace; a guest's are tested by rtvirtio's nvme.rs";
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
        }
        named
    }

    /// Runs `check` over the first `size` bytes of each, in each way, zeroes first.
    pub(crate) fn on_each(&self, size: u64, check: impl Fn(&str, &mut Driver)) {
        self.on_each_whole(|name, generic, poll| {
            direct(generic).write_all_at(&Aligned::of(&vec![0; size as usize]), 0).unwrap();
            let whole = Arc::new(namespace(generic, poll));
            let part = SliceEngine::new(whole, Bytes::new(0), Bytes::new(size)).unwrap();
            check(name, &mut Driver::new(Box::new(part)));
        });
    }

    fn on_each_whole(&self, check: impl Fn(&str, &Path, bool)) {
        for generic in &self.generic {
            for poll in [false, true] {
                check(&format!("{}, poll {poll}", generic.display()), generic, poll);
            }
        }
    }
}

fn config(generic: &Path) -> NvmeConfig {
    NvmeConfig { source: FileSource::Path(generic.to_owned()), read_only: false, poll: false }
}

fn namespace(generic: &Path, poll: bool) -> NvmeEngine {
    NvmeEngine::open(NvmeConfig { poll, ..config(generic) }).unwrap()
}

/// Its block device: /dev/nvme0n1 of /dev/ng0n1.
fn block(generic: &Path) -> PathBuf {
    let name = generic.to_str().unwrap();
    name.replace("/dev/ng", "/dev/nvme").into()
}

/// The block device, past the page cache.
fn direct(generic: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_DIRECT).open(block(generic)).unwrap()
}

/// Bytes that direct I/O takes.
struct Aligned(Vec<u8>, usize, usize);

impl Aligned {
    fn of(content: &[u8]) -> Self {
        let mut bytes = vec![0; content.len() + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        bytes[start..start + content.len()].copy_from_slice(content);
        Self(bytes, start, content.len())
    }
}

impl std::ops::Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0[self.1..self.1 + self.2]
    }
}

impl std::ops::DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0[self.1..self.1 + self.2]
    }
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i / 512 + i) as u8 ^ seed).collect()
}

/// Interrupts of the driver's queues so far, by their lines.
fn interrupts() -> Vec<(String, u64)> {
    let table = std::fs::read_to_string("/proc/interrupts").unwrap();
    let queues = table.lines().filter(|line| line.contains("nvme"));
    let count = |line: &str| {
        let words = line.split_whitespace().skip(1);
        words.map_while(|word| word.parse::<u64>().ok()).sum()
    };
    let queues =
        queues.map(|line| (line.split_whitespace().last().unwrap().to_owned(), count(line)));
    // Queue 0 is for administration.
    queues.filter(|(name, _)| !name.ends_with("q0")).collect()
}

#[test]
fn nvme_data_is_the_block_devices_in_both_directions() {
    let Some(named) = Namespaces::for_test("nvme_data_is_the_block_devices_in_both_directions")
    else {
        return;
    };
    named.on_each_whole(|name, generic, poll| {
        let mut disk = Driver::new(Box::new(namespace(generic, poll)));
        let capacity = disk.engine.geometry().capacity.get();
        // At the start, beyond 4 GiB of bytes or at least in the middle, and at the end.
        let length = 3 << 20;
        for (at, seed) in [(0, 1), (capacity / 2, 2), (capacity - length, 3)] {
            let data = pattern(length as usize, seed);
            disk.write(at, &data, &[1 << 20, 2 << 20]).unwrap();
            let mut read = Aligned::of(&vec![0; length as usize]);
            direct(generic).read_exact_at(&mut read, at).unwrap();
            assert!(*read == data, "{name}: written at {at}");

            let data = pattern(length as usize, seed + 100);
            direct(generic).write_all_at(&Aligned::of(&data), at).unwrap();
            let read = disk.read(at, &[(1 << 20) + 4096, (2 << 20) - 4096]).unwrap();
            assert!(read == data, "{name}: read at {at}");
        }
    });
}

#[test]
fn nvme_request_beyond_the_end_fails_and_later_ones_do_not() {
    let Some(named) =
        Namespaces::for_test("nvme_request_beyond_the_end_fails_and_later_ones_do_not")
    else {
        return;
    };
    named.on_each_whole(|name, generic, poll| {
        let mut disk = Driver::new(Box::new(namespace(generic, poll)));
        let geometry = disk.engine.geometry();
        let (end, block) = (geometry.capacity.get(), geometry.logical_block as usize);
        for at in [end, end - block as u64, 1 << 60] {
            // The data plane checks first; the device does too.
            assert_eq!(disk.read(at, &[2 * block]), Err(Errno::IO), "{name}, {at}");
            let data = vec![7; 2 * block];
            assert_eq!(disk.write(at, &data, &[2 * block]), Err(Errno::IO), "{name}, {at}");
        }
        disk.range(Operation::Flush, 0, 0).unwrap();
        assert_eq!(disk.read(end - block as u64, &[block]).unwrap().len(), block);
    });
}

#[test]
fn nvme_polled_requests_end_without_interrupts_and_others_with() {
    let Some(named) =
        Namespaces::for_test("nvme_polled_requests_end_without_interrupts_and_others_with")
    else {
        return;
    };
    named.on_each_whole(|name, generic, poll| {
        let kind = if poll { Commands::Polled } else { Commands::Interrupt };
        let mut disk = Driver::new(Box::new(namespace(generic, poll)));
        assert_eq!(disk.engine.commands(), Some(kind));
        let before = interrupts();
        assert!(!before.is_empty(), "the queues have lines");
        for round in 0..4 {
            let mut memory: Vec<_> = (0..50).map(|_| Memory::new(&[4096], 0)).collect();
            let segments: Vec<_> = memory.iter_mut().map(Memory::segments).collect();
            for (token, segments) in (0..).zip(&segments) {
                disk.run_later(round * 50 + token, Operation::Read, token * 4096, 4096, segments);
            }
            disk.finish_all();
        }
        let count = |lines: Vec<(String, u64)>| lines.iter().map(|(_, n)| n).sum::<u64>();
        let came = count(interrupts()) - count(before);
        // Several ends may share an interrupt.
        assert!(if poll { came == 0 } else { (1..=200).contains(&came) }, "{name}: {came}");
    });
}

#[test]
fn nvme_in_use_or_served_already_is_refused() {
    let Some(named) = Namespaces::for_test("nvme_in_use_or_served_already_is_refused") else {
        return;
    };
    for generic in &named.generic {
        let fd = open(generic, false).unwrap();
        let engine = namespace(generic, false);
        {
            // One server, by whichever descriptor of the generic device.
            let _claimed = claim(&fd, true).unwrap();
            let again = claim(&open(generic, false).unwrap(), true);
            let Err(NvmeError::Claim { source: Errno::BUSY, .. }) = again else {
                panic!("{again:?}")
            };
        }
        // Without the claim the locks remain, and are those of the file engine.
        let lockable = engine.lockable(claim(&fd, false).unwrap());
        let lock = lockable.lock().unwrap();
        let other = crate::scratch::open(&block(generic)).unwrap();
        assert!(matches!(other.lock(), Err(LockError::Held(_) | LockError::NotShared(_))));
        drop(lock);
        let locked = other.lock().unwrap();
        assert!(matches!(lockable.lock(), Err(LockError::Held(_) | LockError::NotShared(_))));
        drop(locked);
        // As a file system that is mounted, or an array, has it.
        let mut options = File::options();
        let held = options.read(true).custom_flags(libc::O_EXCL).open(block(generic)).unwrap();
        assert!(matches!(claim(&fd, true), Err(NvmeError::Claim { source: Errno::BUSY, .. })));
        drop(held);
        claim(&fd, true).unwrap();
    }
}

#[test]
fn nvme_opened_for_reading_reads_and_takes_no_write() {
    let Some(named) = Namespaces::for_test("nvme_opened_for_reading_reads_and_takes_no_write")
    else {
        return;
    };
    for generic in &named.generic {
        let engine = NvmeEngine::open(NvmeConfig { read_only: true, ..config(generic) }).unwrap();
        let mut disk = Driver::new(Box::new(engine));
        let geometry = disk.engine.geometry();
        assert!(geometry.read_only && !geometry.discard);
        let before = disk.read(0, &[4096]).unwrap();
        for operation in
            [Operation::Discard, Operation::WriteZeroes { unmap: false, durable: false }]
        {
            assert_eq!(disk.range(operation, 0, 4096), Err(Errno::ROFS));
        }
        assert_eq!(disk.write(0, &[9; 4096], &[4096]), Err(Errno::ROFS));
        assert_eq!(disk.range(Operation::Flush, 0, 0), Ok(()));
        assert_eq!(disk.read(0, &[4096]).unwrap(), before);
        // Handed over for reading only, it cannot be written to.
        let source = FileSource::Fd(open(generic, true).unwrap());
        let refused = NvmeEngine::open(NvmeConfig { source, ..config(generic) });
        assert!(matches!(refused, Err(NvmeError::File(_))), "{refused:?}");
    }
}

#[test]
fn nvme_size_is_asked_for_again_and_not_set() {
    let Some(named) = Namespaces::for_test("nvme_size_is_asked_for_again_and_not_set") else {
        return;
    };
    for generic in &named.generic {
        let engine = namespace(generic, false);
        let capacity = engine.geometry().capacity;
        assert_eq!(engine.resize(None).unwrap(), capacity);
        assert_eq!(engine.resize(Some(capacity)).unwrap(), capacity);
        assert!(engine.resize(Some(Bytes::new(capacity.get() / 2))).is_err());
        assert_eq!(engine.geometry().capacity, capacity);
    }
}
