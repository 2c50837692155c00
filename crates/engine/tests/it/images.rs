//! What is taken for a disk, and what becomes of one whose file changes.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileError, FileSource, ImageError};
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::{Engine, Operation, Outcome, ResizeError, SizeError};
use rtvirtio_units::Bytes;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::driver::{Driver, Memory};
use crate::scratch::{Image, Loop, config, open};
use crate::testing::{has_io_uring, skipped};

fn handed(fd: impl Into<OwnedFd>) -> FileConfig {
    FileConfig { source: FileSource::Fd(fd.into()), ..config(Path::new("")) }
}

#[test]
fn foreign_header_is_refused_unless_raw_is_written_out() {
    let headers: [(u64, &[u8], &str); 8] = [
        (0, b"QFI\xfb\0\0\0\x03", "qcow2"),
        (0, b"KDMV\x01\0\0\0", "vmdk"),
        (0, b"# Disk DescriptorFile\nversion=1", "vmdk"),
        (64, b"\x7f\x10\xda\xbe", "vdi"),
        (0, b"LUKS\xba\xbe\0\x02", "luks"),
        (0, b"Bochs Virtual HD Image\0", "bochs"),
        (0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0", "cloop"),
        (0, b"QED\0", "qed"),
    ];
    for (at, bytes, name) in headers {
        let image = Image::new(4096);
        let mut file = image.file();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(bytes).unwrap();
        for direct in [false, true] {
            match FileEngine::open(FileConfig { direct, ..config(&image.path) }) {
                Err(FileError::Image(ImageError::NotRaw(found))) => assert_eq!(found, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        FileEngine::open(FileConfig { explicit_raw: true, ..config(&image.path) }).unwrap();
    }
}

#[test]
fn image_that_qemu_made_is_refused_by_its_format() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return skipped("needs qemu-img (package qemu-utils)");
    }
    let image = Image::new(0);
    for format in ["qcow2", "qed", "vmdk", "vdi", "vhdx", "vpc", "parallels"] {
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format])
            .arg(&image.path)
            .arg("8M")
            .output()
            .unwrap();
        assert!(made.status.success(), "{format}: {made:?}");
        // Sizes differ; the size must not hide what this is about.
        let length = image.file().metadata().unwrap().len();
        image.file().set_len(length.next_multiple_of(4096)).unwrap();
        match open(&image.path) {
            Err(FileError::Image(ImageError::NotRaw(found))) => assert_eq!(found, format),
            other => panic!("{format}: {other:?}"),
        }
    }
}

#[test]
fn what_is_no_disk_is_refused() {
    let image = Image::new(4096);
    let dir = image.path.parent().unwrap();
    let opened =
        |path: &Path| FileEngine::open(FileConfig { read_only: true, ..config(path) }).unwrap_err();
    assert!(matches!(opened(dir), FileError::Image(ImageError::NotADisk)));
    assert!(matches!(opened(Path::new("/dev/null")), FileError::Image(ImageError::NotADisk)));
    let pipe = dir.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(opened(&pipe), FileError::Image(ImageError::NotADisk)));
    assert!(matches!(opened(&dir.join("none")), FileError::Image(ImageError::Open { .. })));
}

#[test]
fn size_of_no_whole_block_is_refused_with_the_remedy() {
    let image = Image::new(1000);
    let error = open(&image.path).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the image's 1000 bytes are not a multiple of its block of 512: \
         enlarge it (truncate --size=%512 IMAGE)"
    );
}

#[test]
fn handed_descriptor_without_the_access_is_refused() {
    let image = Image::new(4096);
    let file = |options: &mut std::fs::OpenOptions| options.open(&image.path).unwrap();
    let readable = || file(File::options().read(true));
    let refused = [
        handed(readable()),
        handed(file(File::options().write(true))),
        handed(file(File::options().read(true).append(true))),
        FileConfig { read_only: true, ..handed(file(File::options().write(true))) },
    ];
    for config in refused {
        let error = FileEngine::open(config).unwrap_err();
        assert!(matches!(error, FileError::Image(ImageError::Access { .. })), "{error:?}");
    }
    FileEngine::open(FileConfig { read_only: true, ..handed(readable()) }).unwrap();
}

#[test]
fn handed_descriptor_is_made_direct_and_blocking() {
    let image = Image::new(4096);
    let file = image.file();
    rustix::fs::fcntl_setfl(&file, OFlags::NONBLOCK).unwrap();
    let copy = file.as_fd().try_clone_to_owned().unwrap();
    let engine = FileEngine::open(FileConfig { direct: true, ..handed(copy) }).unwrap();
    let flags = rustix::fs::fcntl_getfl(&file).unwrap();
    assert_eq!(flags & (OFlags::DIRECT | OFlags::NONBLOCK), OFlags::DIRECT);
    drop(engine);
    FileEngine::open(handed(file.as_fd().try_clone_to_owned().unwrap())).unwrap();
    assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT));
}

#[test]
fn file_in_memory_is_served_inline_and_another_by_io_uring() {
    if !has_io_uring() {
        return;
    }
    let (disk, memory) = (Image::new(4096), Image::below("/dev/shm", 4096));
    assert_eq!(open(&disk.path).unwrap().aio_name(), "io_uring");
    assert_eq!(open(&memory.path).unwrap().aio_name(), "inline");
    let threads = FileConfig { aio: Aio::Threads, ..config(&memory.path) };
    assert_eq!(FileEngine::open(threads).unwrap().aio_name(), "threads");
}

#[test]
fn read_only_disk_reads_flushes_and_refuses_the_rest() {
    if !has_io_uring() {
        return;
    }
    let image = Image::new(4096);
    for aio in [Aio::IoUring, Aio::Threads] {
        let config = FileConfig { read_only: true, aio, ..config(&image.path) };
        let mut disk = Driver::new(Box::new(FileEngine::open(config).unwrap()));
        assert!(disk.engine.geometry().read_only);
        assert_eq!(disk.read(0, &[512]), Ok(vec![0; 512]));
        assert_eq!(disk.range(Operation::Flush, 0, 0), Ok(()));
        assert_eq!(disk.write(0, &[1; 512], &[512]), Err(Errno::ROFS));
        assert_eq!(disk.range(Operation::Discard, 0, 512), Err(Errno::ROFS));
        assert_eq!(
            disk.range(Operation::WriteZeroes { unmap: true, durable: false }, 0, 512),
            Err(Errno::ROFS)
        );
        assert!(disk.engine.resize(Some(Bytes::new(8192))).is_err());
    }
}

#[test]
fn read_beyond_a_file_that_shrank_fails() {
    if !has_io_uring() {
        return;
    }
    for place in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        for aio in [Aio::Auto, Aio::IoUring, Aio::Threads] {
            let image = Image::below(place, 65536);
            let config = FileConfig { aio, ..config(&image.path) };
            let mut disk = Driver::new(Box::new(FileEngine::open(config).unwrap()));
            image.file().set_len(8192).unwrap();
            assert_eq!(disk.read(32768, &[4096]), Err(Errno::IO));
            assert_eq!(disk.read(4096, &[2048, 6144]), Err(Errno::IO));
            assert_eq!(disk.read(4096, &[4096]), Ok(vec![0; 4096]));
            assert_eq!(disk.engine.resize(None).unwrap(), Bytes::new(8192));
        }
    }
}

#[test]
fn resize_sets_the_size_of_a_file_and_sees_what_others_set() {
    let image = Image::new(65536);
    let engine = open(&image.path).unwrap();
    assert_eq!(engine.resize(Some(Bytes::new(131_072))).unwrap(), Bytes::new(131_072));
    assert_eq!(image.file().metadata().unwrap().len(), 131_072);
    assert!(engine.resize(Some(Bytes::new(1000))).is_err());
    image.file().set_len(262_144).unwrap();
    assert_eq!(engine.geometry().capacity, Bytes::new(131_072));
    assert_eq!(engine.resize(None).unwrap(), Bytes::new(262_144));
    assert_eq!(engine.geometry().capacity, Bytes::new(262_144));
}

#[test]
fn image_without_a_block_is_no_disk() {
    for place in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        for size in [0, 1, 511] {
            let image = Image::below(place, size);
            let error = open(&image.path).unwrap_err();
            let FileError::Image(ImageError::Empty { size: found, .. }) = error else {
                panic!("{size} bytes: {error:?}")
            };
            assert_eq!(found, size);
            assert!(error.to_string().contains("truncate --size=10G IMAGE"), "{error}");
        }
        // One that others cut is not served as nothing either.
        let image = Image::below(place, 65536);
        let engine = open(&image.path).unwrap();
        image.file().set_len(0).unwrap();
        assert!(engine.resize(None).is_err());
    }
}

#[test]
fn size_that_no_image_has_is_said_of_the_size_and_changes_nothing() {
    let image = Image::new(65536);
    let file: Box<dyn Engine> = Box::new(open(&image.path).unwrap());
    let ram: Box<dyn Engine> =
        Box::new(RamEngine::new(Bytes::new(65536), std::time::Duration::ZERO).unwrap());
    for engine in [file, ram] {
        for size in [0, 511, 513, 65537, u64::MAX, u64::MAX - 511] {
            let checked = engine.check_size(Bytes::new(size)).unwrap_err();
            let ResizeError::Size(SizeError { size: found, block, .. }) = checked else {
                panic!("{size}: {checked:?}")
            };
            assert_eq!((found, block % 512), (size, 0));
            let refused = engine.resize(Some(Bytes::new(size))).unwrap_err();
            assert_eq!(refused.to_string(), checked.to_string());
            assert!(!refused.to_string().contains("truncate"), "{refused}");
            assert_eq!(engine.geometry().capacity, Bytes::new(65536));
        }
    }
    assert_eq!(image.file().metadata().unwrap().len(), 65536);
}

#[test]
fn full_submission_queue_is_busy_and_nothing_happens() {
    if !has_io_uring() {
        return;
    }
    let image = Image::new(4096);
    let mut disk = Driver::new(Box::new(open(&image.path).unwrap()));
    let mut memory = Memory::new(&[512], 0);
    let segments = memory.segments();
    // The driver's queue has 64 entries.
    for token in 0..64 {
        let outcome = disk.start(token, Operation::Read, 0, 512, &segments, None);
        assert_eq!(outcome, Outcome::Started);
    }
    assert_eq!(disk.start(64, Operation::Read, 0, 512, &segments, None), Outcome::Busy);
    let mut tokens: Vec<_> = (0..64).map(|_| disk.reap()).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..64).map(|token| (token, 512)).collect::<Vec<_>>());
}

#[test]
fn requests_in_flight_end_well_when_their_file_leaves_the_table() {
    if !has_io_uring() {
        return;
    }
    let image = Image::new(4096);
    for _ in 0..20 {
        let mut disk = Driver::new(Box::new(open(&image.path).unwrap()));
        let mut memory = Memory::new(&[512], 0);
        let segments = memory.segments();
        for token in 0..32 {
            let flush = disk.start(token, Operation::Flush, 0, 0, &[], None);
            let read = disk.start(token + 32, Operation::Read, 0, 512, &segments, None);
            assert_eq!((flush, read), (Outcome::Started, Outcome::Started));
        }
        disk.submit_and_withdraw_file();
        for _ in 0..64 {
            let (token, result) = disk.reap();
            assert_eq!(result, if token < 32 { 0 } else { 512 }, "{token}");
        }
    }
}

#[test]
fn drop_ends_threads_after_all_that_was_asked_of_them() {
    if !has_io_uring() {
        return;
    }
    let image = Image::new(1 << 20);
    let config = FileConfig { aio: Aio::Threads, ..config(&image.path) };
    let mut disk = Driver::new(Box::new(FileEngine::open(config).unwrap()));
    let mut memory: Vec<_> = (0..200).map(|_| Memory::new(&[4096], 0)).collect();
    let segments: Vec<_> = memory.iter_mut().map(Memory::segments).collect();
    for (token, segments) in segments.iter().enumerate() {
        let (offset, write) = (token as u64 * 4096, Operation::Write { durable: false });
        let outcome = disk.start(token as u64, write, offset, 4096, segments, None);
        assert_eq!(outcome, Outcome::Started);
    }
    disk.drop_engine();
    for token in 0..200 {
        assert_eq!(disk.told(token), Ok(()));
    }
    let written = std::fs::read(&image.path).unwrap();
    assert!(written[..200 * 4096].iter().all(|byte| *byte == 0xee));
}

#[test]
fn device_of_large_blocks_says_so_and_keeps_its_size() {
    let Some(device) = Loop::new(1 << 20, 4096) else { return };
    for direct in [false, true] {
        let engine = FileEngine::open(FileConfig { direct, ..config(&device.path) }).unwrap();
        let geometry = engine.geometry();
        assert_eq!((geometry.logical_block, geometry.physical_block), (4096, 4096));
        assert_eq!(geometry.capacity, Bytes::from_kib(1024));
        assert!(geometry.discard);
        assert!(engine.resize(Some(Bytes::from_kib(512))).is_err());
        assert_eq!(engine.resize(None).unwrap(), Bytes::from_kib(1024));
    }
}

#[test]
fn block_that_the_guest_sees_is_the_images_and_not_the_hosts() {
    let image = Image::new(1 << 20);
    let block = |direct, block_size| {
        let engine = FileEngine::open(FileConfig { direct, block_size, ..config(&image.path) });
        engine.unwrap().geometry().logical_block
    };
    for direct in [false, true] {
        assert_eq!([None, Some(512), Some(4096)].map(|size| block(direct, size)), [512, 512, 4096]);
    }
    for wrong in [0, 256, 513, 3072, 8192] {
        let refused =
            FileEngine::open(FileConfig { block_size: Some(wrong), ..config(&image.path) });
        match refused {
            Err(FileError::Image(ImageError::BlockSize(size))) => assert_eq!(size, wrong),
            other => panic!("{wrong}: {other:?}"),
        }
    }
}

#[test]
fn sectors_are_written_on_a_device_of_large_blocks_and_their_neighbours_kept() {
    const SECTORS: usize = 2048;
    if !has_io_uring() {
        return;
    }
    let Some(device) = Loop::new(SECTORS as u64 * 512, 4096) else { return };
    let config = FileConfig { direct: true, block_size: Some(512), ..config(&device.path) };
    let engine = FileEngine::open(config).unwrap();
    assert_eq!((engine.geometry().logical_block, engine.geometry().physical_block), (512, 4096));
    assert_eq!(engine.written_block(), 4096);
    let mut disk = Driver::new(Box::new(engine));
    let mut model = vec![0_u8; SECTORS * 512];
    let mut random = 7_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    for step in 0..500 {
        // Up to three pieces of some sectors each, anywhere, at an address that may not be aligned.
        let lengths: Vec<usize> = (0..=next(3)).map(|_| 512 * (1 + next(20))).collect();
        let length: usize = lengths.iter().sum();
        let at = 512 * next(SECTORS - length / 512 + 1);
        let mut memory = Memory::new(&lengths, [0, 512, 24][next(3)]);
        let (operation, range) = (next(4), at..at + length);
        match operation {
            0 | 1 => {
                let data: Vec<u8> = (0..length).map(|i| (step + i / 7) as u8).collect();
                memory.fill(&data);
                let write = Operation::Write { durable: operation == 1 };
                transfer(&mut disk, write, at as u64, &mut memory);
                model[range].copy_from_slice(&data);
            }
            2 => {
                transfer(&mut disk, Operation::Read, at as u64, &mut memory);
                assert!(memory.content() == model[range], "step {step}: {length} from {at}");
            }
            _ => {
                let zero = Operation::WriteZeroes { unmap: step % 2 == 0, durable: false };
                disk.run(zero, at as u64, length as u64, &[], None).unwrap();
                model[range].fill(0);
            }
        }
    }
    let mut all = Memory::new(&[SECTORS * 512], 0);
    transfer(&mut disk, Operation::Read, 0, &mut all);
    assert!(all.content() == model);
}

#[test]
fn whether_zeroes_are_written_out_is_known_by_the_first_of_them() {
    if !has_io_uring() {
        return;
    }
    // A file that is told to mark a range does so, or says that it cannot.
    for place in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        let image = Image::below(place, 1 << 20);
        let engine = std::sync::Arc::new(open(&image.path).unwrap());
        assert!(engine.writes_zeroes(false), "not known yet, and taken for the worse");
        let mut disk = Driver::new(Box::new(Shared(std::sync::Arc::clone(&engine))));
        let mut memory = Memory::new(&[1 << 16], 0);
        transfer(&mut disk, Operation::Write { durable: false }, 0, &mut memory);
        let zero = Operation::WriteZeroes { unmap: false, durable: false };
        disk.run(zero, 0, 1 << 16, &[], None).unwrap();
        transfer(&mut disk, Operation::Read, 0, &mut memory);
        assert!(memory.content().iter().all(|byte| *byte == 0));
        let fd = image.file();
        let mark = rustix::fs::FallocateFlags::ZERO_RANGE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let marks = rustix::fs::fallocate(&fd, mark, 0, 4096).is_ok();
        assert_eq!(engine.writes_zeroes(false), !marks, "{place}");
        // Holes are punched in both.
        assert!(!engine.writes_zeroes(true), "{place}");
    }
}

/// A read or write of all that memory, which succeeds.
fn transfer(disk: &mut Driver, operation: Operation, offset: u64, memory: &mut Memory) {
    let segments = memory.segments();
    let length = segments.iter().map(|segment| segment.len() as u64).sum();
    disk.run(operation, offset, length, &segments, None).unwrap();
}

/// An engine that a test looks at while it is driven.
struct Shared(std::sync::Arc<FileEngine>);

impl Engine for Shared {
    fn geometry(&self) -> rtvirtio_engine::Geometry {
        self.0.geometry()
    }

    fn start(
        &self,
        request: &rtvirtio_engine::Request<'_>,
        lent: &mut rtvirtio_engine::SubmitContext<'_, '_>,
    ) -> Outcome {
        self.0.start(request, lent)
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.0.resize(capacity)
    }
}
