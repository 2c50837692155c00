//! Extents, the order of events, and a ring that is too small.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};

use rtvirtio_units::Bytes;

use super::format::{Direction, Io, What};
use super::*;
use crate::fake::FakeSysfs;
use crate::qemu::Part;
use crate::sysfs::{DeviceNumber, RealSysfs};

const SDA: DeviceNumber = DeviceNumber::new(8, 0);

fn part(file: &str, offset: u64, size: Option<u64>) -> Part {
    Part { file: file.into(), offset: Bytes::new(offset), size: size.map(Bytes::new) }
}

#[test]
fn extent_is_in_sectors_of_the_whole_disk() {
    let sysfs = FakeSysfs::v1();
    sysfs.add_disk("sda", SDA, 100_000);
    sysfs.add_partition("sda1", DeviceNumber::new(8, 1), "sda", 1000);
    sysfs.put("/sys/dev/block/8:1/start", "2048\n");
    let extent = |start, end| Extent { disk: SDA, start, end };
    for (file, offset, size, expected) in [
        ("/dev/sda", 0, None, extent(0, u64::MAX)),
        ("/dev/sda", 1 << 20, Some(2 << 20), extent(2048, 6144)),
        ("/dev/sda1", 0, None, extent(2048, 3048)),
        ("/dev/sda1", 5120, None, extent(2058, 3048)),
        ("/dev/sda1", 5120, Some(1024), extent(2058, 2060)),
        // More than there is, as a hostile monitor may say.
        ("/dev/sda1", 0, Some(u64::MAX), extent(2048, 3048)),
        ("/dev/sda1", u64::MAX, Some(u64::MAX), extent(2048 + (u64::MAX >> 9), 3048)),
    ] {
        let found = Extent::find(&sysfs, &part(file, offset, size)).unwrap();
        assert_eq!(found, [expected], "{file} {offset} {size:?}");
    }
    let missing = Extent::find(&sysfs, &part("/dev/sdz", 0, None)).unwrap_err();
    assert!(matches!(missing, HostError::DeviceMissing { .. }));
}

#[test]
fn extents_overlap_within_a_disk_only() {
    let extent = |minor, start, end| Extent { disk: DeviceNumber::new(8, minor), start, end };
    let one = extent(0, 100, 200);
    assert!(one.overlaps(&one) && one.overlaps(&extent(0, 199, 300)));
    assert!(extent(0, 0, u64::MAX).overlaps(&one));
    assert!(!one.overlaps(&extent(0, 200, 300)) && !one.overlaps(&extent(0, 0, 100)));
    assert!(!one.overlaps(&extent(16, 100, 200)));
}

#[test]
fn records_of_two_cpus_are_put_in_order() {
    let extent = Extent { disk: SDA, start: 0, end: 100 };
    let mut matcher = Matcher::new(&BTreeSet::from([extent]));
    let io = Io { device: SDA, direction: Direction::Read, start: 0, end: 8 };
    let at = |us, what| Event { at: Nanos::from_micros(us), what };
    // The ring that has the end was read first; a later start is not settled.
    let mut pending =
        vec![at(96, What::Done(io)), at(300, What::Queued(io)), at(32, What::Queued(io))];
    settle(&mut pending, Nanos::from_micros(200), &mut matcher);
    let bins: Vec<_> = matcher.take().of[&extent].bins().collect();
    assert_eq!(bins, [(Nanos::from_micros(64), 1)]);
    assert_eq!(pending, [at(300, What::Queued(io))]);
}

#[test]
fn list_of_cpus_is_read_or_refused() {
    assert_eq!(cpus("0\n"), Some(vec![0]));
    assert_eq!(cpus("0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
    for bad in ["", "a", "3-1", "0-", "0,,1", "0-99999999999"] {
        assert_eq!(cpus(bad), None, "{bad}");
    }
}

/// A file on a disk, to be read past the page cache; or why not.
fn direct_file(directory: &Path) -> io::Result<(File, DeviceNumber)> {
    let path = directory.join("file");
    let mut file = File::create(&path)?;
    file.write_all(&[1; 1 << 16])?;
    file.sync_all()?;
    let flags = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&path)?;
    let number = file.metadata()?.dev();
    Ok((file, DeviceNumber::new(rustix::fs::major(number), rustix::fs::minor(number))))
}

#[test]
fn full_ring_says_how_many_records_it_lost() {
    const NAME: &str = "full_ring_says_how_many_records_it_lost";
    const READS: u64 = 1000;
    let sysfs = RealSysfs::new("/");
    // Beside the tests' binary: /tmp may be memory.
    let beside = std::env::current_exe().unwrap();
    let directory = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
    let open = || {
        let (file, device) = direct_file(directory.path())?;
        let tracefs = Tracefs::open(&sysfs).map_err(io::Error::other)?;
        let layout = |point| {
            let text = |file| tracefs.read(&sysfs, point, file);
            Layout::parse(point, &text("id")?, &text("format")?)
        };
        let layouts = Point::ALL.into_iter().map(layout).collect::<Result<Vec<_>, HostError>>();
        let cpus = cpus(&sysfs.read(Path::new(ONLINE))?).unwrap();
        let layouts = layouts.map_err(io::Error::other)?;
        let rings = Rings::open(layouts, &cpus, &BTreeSet::from([device]), 4096)?;
        io::Result::Ok((file, rings))
    };
    let (file, mut rings) = match open() {
        Ok(opened) => opened,
        Err(error) => {
            // Not println: what a passing test prints is hidden.
            let _ = writeln!(io::stderr(), "SKIPPED {NAME}: {error}");
            return;
        }
    };
    let mut memory = vec![0; 8192];
    let aligned = memory.as_ptr().align_offset(4096);
    for i in 0..READS {
        file.read_exact_at(&mut memory[aligned..aligned + 4096], i % 16 * 4096).unwrap();
    }
    let mut events = Vec::new();
    rings.drain(&mut events);
    if events.is_empty() {
        let _ = writeln!(io::stderr(), "SKIPPED {NAME}: its file is on no disk with tracepoints");
        return;
    }
    // A ring tells a loss with its next record: here with those of one more read.
    file.read_exact_at(&mut memory[aligned..aligned + 4096], 0).unwrap();
    rings.drain(&mut events);
    let lost: u64 = events
        .iter()
        .map(|e| match e.what {
            What::Lost(records) => records,
            _ => 0,
        })
        .sum();
    let read = events.iter().filter(|e| !matches!(e.what, What::Lost(_))).count() as u64;
    // 57 records of 72 bytes at most fit into a ring. The submitter's CPU tells its loss; another
    // CPU may have no record any more.
    assert!(lost > READS / 2 && read < READS, "{read} read, {lost} lost");
}
