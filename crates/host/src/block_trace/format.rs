//! The block layer's tracepoints as bytes: where a record has what.
//!
//! tracefs describes each tracepoint in its `format` file (kernel
//! Documentation/trace/events.rst, include/trace/events/block.h); offsets move
//! between kernels, so none is assumed. A record begins with the tracepoint's
//! id in 16 bits (`common_type`).
//!
//! Units: `sector` and `nr_sector` count 512 bytes. `dev` is the kernel's own
//! `dev_t`: 12 bits of major, 20 of minor number.
//!
//! Properties: `record_that_is_short_is_none`, `any_bytes_do_no_harm`,
//! `format_that_lies_is_refused`.

use std::ops::Range;
use std::path::Path;

use rtvirtio_units::Nanos;

use crate::HostError;
use crate::sysfs::DeviceNumber;

/// A tracepoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    /// A bio enters the queue of its device.
    Queued,
    /// A request, or a part of one, is done.
    RequestDone,
    /// A bio is done that was no request: of a driver that takes bios, or refused.
    BioDone,
}

impl Point {
    pub(super) const ALL: [Self; 3] = [Self::Queued, Self::RequestDone, Self::BioDone];

    /// Its directory in tracefs.
    pub(super) const fn directory(self) -> &'static str {
        match self {
            Self::Queued => "events/block/block_bio_queue",
            Self::RequestDone => "events/block/block_rq_complete",
            Self::BioDone => "events/block/block_bio_complete",
        }
    }
}

/// Reads and writes are told apart; anything else is not looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Sectors that are read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Io {
    pub(super) device: DeviceNumber,
    pub(super) direction: Direction,
    pub(super) start: u64,
    /// The first sector behind it.
    pub(super) end: u64,
}

/// What a ring tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Queued(Io),
    Done(Io),
    /// Refused with EAGAIN: it will be submitted again.
    Refused(Io),
    /// So many records were lost up to here.
    Lost(u64),
}

/// What happened when, CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) at: Nanos,
    pub(super) what: What,
}

/// EAGAIN as a completion has it: of a bio that must not wait (REQ_NOWAIT).
const REFUSED: i32 = -11;

/// Where a tracepoint's record has what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) point: Point,
    /// The tracepoint's id.
    pub(super) id: u16,
    device: Range<usize>,
    sector: Range<usize>,
    sectors: Range<usize>,
    flags: Range<usize>,
    error: Option<Range<usize>>,
}

impl Layout {
    /// From the texts of a tracepoint's files `id` and `format`.
    pub(super) fn parse(point: Point, id: &str, format: &str) -> Result<Self, HostError> {
        let wrong = |file: &str, found: &str, expected| HostError::Format {
            file: Path::new(point.directory()).join(file),
            found: found.chars().take(200).collect(),
            expected,
        };
        let number = id.trim().parse();
        let field = |name, size: Range<usize>, expected| {
            find(format, name)
                .filter(|r| size.contains(&r.len()))
                .ok_or_else(|| wrong("format", format, expected))
        };
        Ok(Self {
            point,
            id: number.map_err(|_| wrong("id", id, "a tracepoint's number"))?,
            device: field("dev", 4..5, "a format with a field dev of 4 bytes")?,
            sector: field("sector", 8..9, "a format with a field sector of 8 bytes")?,
            sectors: field("nr_sector", 4..5, "a format with a field nr_sector of 4 bytes")?,
            flags: field("rwbs", 1..65, "a format with a field rwbs of some bytes")?,
            error: match point {
                Point::BioDone => {
                    Some(field("error", 4..5, "a format with a field error of 4 bytes")?)
                }
                Point::Queued | Point::RequestDone => None,
            },
        })
    }

    /// The id of a record's tracepoint.
    pub(super) fn id_of(record: &[u8]) -> Option<u16> {
        Some(u16::from_ne_bytes(record.get(..2)?.try_into().ok()?))
    }

    /// What a record of this tracepoint says; `None`: it is short. `Some(None)`: neither read nor
    /// write, or of no sector, as a flush.
    pub(super) fn read(&self, record: &[u8]) -> Option<Option<What>> {
        let four = |range: &Range<usize>| -> Option<[u8; 4]> {
            record.get(range.clone())?.try_into().ok()
        };
        let device = u32::from_ne_bytes(four(&self.device)?);
        let start = u64::from_ne_bytes(record.get(self.sector.clone())?.try_into().ok()?);
        let sectors = u32::from_ne_bytes(four(&self.sectors)?);
        let error = match &self.error {
            Some(range) => i32::from_ne_bytes(four(range)?),
            None => 0,
        };
        let direction = direction(record.get(self.flags.clone())?);
        let end = start.checked_add(u64::from(sectors)).filter(|end| *end > start);
        let (Some(direction), Some(end)) = (direction, end) else { return Some(None) };
        let device = DeviceNumber::new(device >> 20, device & 0xf_ffff);
        let io = Io { device, direction, start, end };
        Some(Some(match self.point {
            Point::Queued => What::Queued(io),
            Point::BioDone if error == REFUSED => What::Refused(io),
            Point::RequestDone | Point::BioDone => What::Done(io),
        }))
    }
}

/// The bytes of the field `name`: a line `field:char rwbs[10]; offset:34; size:10; signed:0;`.
fn find(format: &str, name: &str) -> Option<Range<usize>> {
    format.lines().find_map(|line| {
        let mut parts = line.trim().strip_prefix("field:")?.split(';').map(str::trim);
        let declared = parts.next()?.split_whitespace().last()?;
        let declared = declared.split_once('[').map_or(declared, |(name, _)| name);
        let value = |part: &str, key: &str| part.strip_prefix(key)?.parse::<u16>().ok();
        let offset = usize::from(value(parts.next()?, "offset:")?);
        let size = usize::from(value(parts.next()?, "size:")?);
        (declared == name).then_some(offset..offset + size)
    })
}

/// From `rwbs` (`blk_fill_rwbs`): `F` for a flush before it, then the operation, then flags.
fn direction(flags: &[u8]) -> Option<Direction> {
    match flags.strip_prefix(b"F").unwrap_or(flags).first()? {
        b'R' => Some(Direction::Read),
        b'W' => Some(Direction::Write),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As Linux 6.18 writes it.
    const QUEUED: &str = "name: block_bio_queue\nID: 2097\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n\
        \tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:dev_t dev;\toffset:8;\tsize:4;\tsigned:0;\n\
        \tfield:sector_t sector;\toffset:16;\tsize:8;\tsigned:0;\n\
        \tfield:unsigned int nr_sector;\toffset:24;\tsize:4;\tsigned:0;\n\
        \tfield:char rwbs[10];\toffset:28;\tsize:10;\tsigned:0;\n\
        \tfield:char comm[16];\toffset:38;\tsize:16;\tsigned:0;\n\n\
        print fmt: \"%d,%d %s %llu + %u [%s]\", ((unsigned int) ((REC->dev) >> 20))\n";
    const BIO_DONE: &str = "format:\n\
        \tfield:dev_t dev;\toffset:8;\tsize:4;\tsigned:0;\n\
        \tfield:sector_t sector;\toffset:16;\tsize:8;\tsigned:0;\n\
        \tfield:unsigned nr_sector;\toffset:24;\tsize:4;\tsigned:0;\n\
        \tfield:int error;\toffset:28;\tsize:4;\tsigned:1;\n\
        \tfield:char rwbs[10];\toffset:32;\tsize:10;\tsigned:0;\n";

    fn queued() -> Layout {
        Layout::parse(Point::Queued, "2097\n", QUEUED).unwrap()
    }

    /// A record of 54 bytes as `QUEUED` has it.
    fn record(device: u32, sector: u64, sectors: u32, flags: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 54];
        bytes[..2].copy_from_slice(&2097_u16.to_ne_bytes());
        bytes[8..12].copy_from_slice(&device.to_ne_bytes());
        bytes[16..24].copy_from_slice(&sector.to_ne_bytes());
        bytes[24..28].copy_from_slice(&sectors.to_ne_bytes());
        bytes[28..28 + flags.len()].copy_from_slice(flags);
        bytes
    }

    #[test]
    fn record_says_device_sectors_and_direction() {
        let io =
            |direction| Io { device: DeviceNumber::new(259, 3), direction, start: 2048, end: 2056 };
        let device = 259 << 20 | 3;
        for (flags, direction) in [
            (b"R".as_slice(), Direction::Read),
            (b"RA", Direction::Read),
            (b"WS", Direction::Write),
            (b"FWFS", Direction::Write),
        ] {
            let bytes = record(device, 2048, 8, flags);
            assert_eq!(Layout::id_of(&bytes), Some(queued().id));
            assert_eq!(queued().read(&bytes), Some(Some(What::Queued(io(direction)))));
        }
    }

    #[test]
    fn discards_and_flushes_are_left_out() {
        for (sectors, flags) in [(8, b"D".as_slice()), (0, b"FWS"), (0, b"FF"), (8, b"N"), (8, b"")]
        {
            assert_eq!(queued().read(&record(1, 0, sectors, flags)), Some(None), "{flags:?}");
        }
        // (sector_t)-1 is of no sector either.
        assert_eq!(queued().read(&record(1, u64::MAX, 8, b"W")), Some(None));
    }

    #[test]
    fn refused_bio_is_not_done() {
        let layout = Layout::parse(Point::BioDone, "7", BIO_DONE).unwrap();
        let mut bytes = record(1, 16, 8, b"");
        bytes[28..32].copy_from_slice(&(-11_i32).to_ne_bytes());
        bytes[32] = b'R';
        assert!(matches!(layout.read(&bytes), Some(Some(What::Refused(_)))));
        // An error is an end too.
        bytes[28..32].copy_from_slice(&(-5_i32).to_ne_bytes());
        assert!(matches!(layout.read(&bytes), Some(Some(What::Done(_)))));
    }

    #[test]
    fn record_that_is_short_is_none() {
        let whole = record(1, 0, 8, b"R");
        for length in 0..38 {
            assert_eq!(queued().read(&whole[..length]), None, "{length}");
        }
        assert!(queued().read(&whole[..38]).is_some());
        assert_eq!(Layout::id_of(&whole[..1]), None);
    }

    #[test]
    fn format_that_lies_is_refused() {
        for (from, to) in [
            ("offset:16;\tsize:8", "offset:16;\tsize:4"),
            ("offset:16;\tsize:8", "offset:-1;\tsize:8"),
            ("offset:16;\tsize:8", "offset:99999;\tsize:8"),
            ("rwbs[10]", "flags[10]"),
            ("size:10", "size:65000"),
            ("\tfield:dev_t dev;", "\tfield:dev_t dev"),
        ] {
            let text = QUEUED.replace(from, to);
            assert_ne!(text, QUEUED);
            let error = Layout::parse(Point::Queued, "1", &text).unwrap_err();
            assert!(matches!(error, HostError::Format { .. }), "{error}");
        }
        assert!(Layout::parse(Point::Queued, "1", "").is_err());
        assert!(Layout::parse(Point::Queued, "70000", QUEUED).is_err());
        // A field of another tracepoint is not missed.
        assert!(Layout::parse(Point::BioDone, "1", QUEUED).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Some(Some(What::Queued(io))) = queued().read(&bytes) {
                prop_assert!(io.end > io.start);
            }
        }

        #[test]
        fn any_format_does_no_harm(text in ".{0,200}", offset in any::<u32>(), size in any::<u32>()) {
            let _ = Layout::parse(Point::Queued, &text, &text);
            let line = format!("\tfield:dev_t dev;\toffset:{offset};\tsize:{size};");
            let _ = Layout::parse(Point::Queued, "1", &line);
        }
    }
}
