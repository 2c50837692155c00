//! Hostile and ordinary requests, by hand from virtio 1.2, section 5.2.6.

use rtvirtio_units::Bytes;

use super::*;

const CAPACITY: u64 = 1 << 20;

fn limits() -> Limits {
    Limits {
        geometry: Geometry {
            capacity: Bytes::new(CAPACITY),
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            discard: true,
        },
        read_only: false,
        discard_sectors: 1 << 11,
        write_through: false,
        id: *b"0123456789abcdefghij",
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(sector.to_le_bytes());
    bytes
}

fn range_of(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// What a chain of these pieces comes to: the parsed request and the lengths of its data.
fn parsed(
    limits: &Limits,
    readable: &mut [Vec<u8>],
    writable: &mut [Vec<u8>],
) -> Option<(Parsed, Vec<usize>)> {
    let segments = |pieces: &mut [Vec<u8>]| {
        pieces.iter_mut().map(|piece| Segment::new(piece.as_mut_ptr(), piece.len())).collect()
    };
    let mut chain = Chain { id: 0, readable: segments(readable), writable: segments(writable) };
    let mut data = Vec::new();
    let parsed = parse(&mut chain, limits, &mut data)?;
    Some((parsed, data.iter().map(Segment::len).collect()))
}

fn action(readable: &mut [Vec<u8>], writable: &mut [Vec<u8>]) -> Action {
    parsed(&limits(), readable, writable).expect("there is a status byte").0.action
}

#[test]
fn read_is_its_writable_part_without_the_status_byte() {
    let (request, data) =
        parsed(&limits(), &mut [header(T_IN, 8)], &mut [vec![0; 4096], vec![0; 512], vec![9]])
            .unwrap();
    assert_eq!(
        request.action,
        Action::Start { operation: Operation::Read, offset: 4096, length: 4608 }
    );
    assert_eq!((data, request.written), (vec![4096, 512], 4609));
}

#[test]
fn framing_is_the_drivers() {
    // Header in three pieces, the last of them with data; status at the end of the data.
    let all = header(T_OUT, 1);
    let mut tail = all[12..].to_vec();
    tail.extend([7; 512]);
    let (request, data) =
        parsed(&limits(), &mut [all[..5].to_vec(), all[5..12].to_vec(), tail], &mut [vec![0]])
            .unwrap();
    assert_eq!(
        request.action,
        Action::Start { operation: Operation::Write { durable: false }, offset: 512, length: 512 }
    );
    assert_eq!(data, [512]);

    let (request, data) = parsed(&limits(), &mut [header(T_IN, 0)], &mut [vec![0; 513]]).unwrap();
    assert_eq!(request.written, 513);
    assert_eq!(data, [512]);
}

#[test]
fn write_is_durable_when_the_cache_is_off() {
    let limits = Limits { write_through: true, ..limits() };
    let (request, _) =
        parsed(&limits, &mut [header(T_OUT, 0), vec![0; 512]], &mut [vec![0]]).unwrap();
    assert_eq!(
        request.action,
        Action::Start { operation: Operation::Write { durable: true }, offset: 0, length: 512 }
    );
}

#[test]
fn chain_without_a_status_byte_cannot_be_answered() {
    assert!(parsed(&limits(), &mut [header(T_IN, 0)], &mut []).is_none());
    assert!(parsed(&limits(), &mut [header(T_IN, 0)], &mut [vec![]]).is_none());
}

#[test]
fn short_header_is_an_error() {
    let mut short = [header(T_IN, 0)[..15].to_vec()];
    assert_eq!(action(&mut short, &mut [vec![0; 513]]), Action::Answer(Status::IoError));
    assert_eq!(action(&mut [], &mut [vec![0; 513]]), Action::Answer(Status::IoError));
}

#[test]
fn range_beyond_the_disk_is_an_error() {
    let last = CAPACITY / SECTOR;
    for (sector, ok) in [
        (last - 1, true),
        (last, false),
        (last + 1, false),
        (u64::MAX, false),
        (u64::MAX / 512, false),
        // Wraps around to 0 when multiplied.
        (1 << 55, false),
    ] {
        let read = action(&mut [header(T_IN, sector)], &mut [vec![0; 513]]);
        let write = action(&mut [header(T_OUT, sector), vec![0; 512]], &mut [vec![0]]);
        assert_eq!(matches!(read, Action::Start { .. }), ok, "read at {sector}");
        assert_eq!(matches!(write, Action::Start { .. }), ok, "write at {sector}");
    }
    // The last sector and one more.
    let read = action(&mut [header(T_IN, last - 1)], &mut [vec![0; 1025]]);
    assert_eq!(read, Action::Answer(Status::IoError));
}

#[test]
fn part_of_a_block_is_an_error() {
    let read = action(&mut [header(T_IN, 0)], &mut [vec![0; 512]]);
    assert_eq!(read, Action::Answer(Status::IoError));
    let mut limits = limits();
    limits.geometry.logical_block = 4096;
    for (sector, bytes, ok) in [(8, 4096, true), (8, 512, false), (1, 4096, false)] {
        let (request, _) =
            parsed(&limits, &mut [header(T_IN, sector)], &mut [vec![0; bytes + 1]]).unwrap();
        assert_eq!(matches!(request.action, Action::Start { .. }), ok, "{sector} {bytes}");
    }
}

#[test]
fn nothing_to_transfer_succeeds() {
    assert_eq!(action(&mut [header(T_IN, 0)], &mut [vec![0]]), Action::Answer(Status::Ok));
    assert_eq!(action(&mut [header(T_OUT, 0)], &mut [vec![0]]), Action::Answer(Status::Ok));
}

#[test]
fn read_only_disk_refuses_what_writes() {
    let mut limits = limits();
    limits.read_only = true;
    for kind in [T_OUT, T_DISCARD, T_WRITE_ZEROES] {
        let data = if kind == T_OUT { vec![0; 512] } else { range_of(0, 1, 0) };
        let (request, _) = parsed(&limits, &mut [header(kind, 0), data], &mut [vec![0]]).unwrap();
        assert_eq!(request.action, Action::Answer(Status::IoError), "{kind}");
    }
}

/// What must be on stable storage when it completes, by operation and cache mode. The content of a
/// discarded range is nobody's business, so there is nothing of it to keep.
#[test]
fn without_a_write_cache_all_that_stores_data_is_durable() {
    for write_through in [false, true] {
        let limits = Limits { write_through, ..limits() };
        let operation = |kind, data| {
            let mut readable = [header(kind, 0), data];
            match parsed(&limits, &mut readable, &mut [vec![0]]).unwrap().0.action {
                Action::Start { operation, .. } => operation,
                other => panic!("{other:?}"),
            }
        };
        let write = operation(T_OUT, vec![0; 512]);
        assert_eq!(write, Operation::Write { durable: write_through });
        for (flags, unmap) in [(0, false), (UNMAP, true)] {
            let zeroes = operation(T_WRITE_ZEROES, range_of(0, 1, flags));
            assert_eq!(zeroes, Operation::WriteZeroes { unmap, durable: write_through });
        }
        assert_eq!(operation(T_DISCARD, range_of(0, 1, 0)), Operation::Discard);
        assert_eq!(operation(T_FLUSH, Vec::new()), Operation::Flush);
    }
}

#[test]
fn discard_and_write_zeroes_take_one_range() {
    let discard = action(&mut [header(T_DISCARD, 0), range_of(8, 16, 0)], &mut [vec![0]]);
    assert_eq!(
        discard,
        Action::Start { operation: Operation::Discard, offset: 4096, length: 8192 }
    );
    let zeroes = action(&mut [header(T_WRITE_ZEROES, 0), range_of(0, 1, UNMAP)], &mut [vec![0]]);
    assert_eq!(
        zeroes,
        Action::Start {
            operation: Operation::WriteZeroes { unmap: true, durable: false },
            offset: 0,
            length: 512
        }
    );
    for (kind, range, status) in [
        (T_DISCARD, range_of(0, 1, UNMAP), Status::Unsupported),
        (T_DISCARD, range_of(0, 1, 2), Status::Unsupported),
        (T_WRITE_ZEROES, range_of(0, 1, 2), Status::Unsupported),
        (T_DISCARD, [range_of(0, 1, 0), range_of(1, 1, 0)].concat(), Status::Unsupported),
        (T_DISCARD, range_of(0, 1, 0)[..15].to_vec(), Status::Unsupported),
        (T_DISCARD, vec![], Status::Unsupported),
        (T_DISCARD, range_of(0, (1 << 11) + 1, 0), Status::IoError),
        (T_DISCARD, range_of(u64::MAX, u32::MAX, 0), Status::IoError),
        (T_WRITE_ZEROES, range_of(CAPACITY / SECTOR, 1, 0), Status::IoError),
        (T_DISCARD, range_of(0, 0, 0), Status::Ok),
    ] {
        let answer = action(&mut [header(kind, 0), range.clone()], &mut [vec![0]]);
        assert_eq!(answer, Action::Answer(status), "{kind} {range:?}");
    }
}

#[test]
fn id_is_written_as_far_as_it_fits() {
    let mut pieces = [vec![0; 12], vec![0; 30]];
    let (request, _) = parsed(&limits(), &mut [header(T_GET_ID, 0)], &mut pieces).unwrap();
    assert_eq!((request.action, request.written), (Action::Answer(Status::Ok), 21));
    assert_eq!((&pieces[0][..], &pieces[1][..8]), (&b"0123456789ab"[..], &b"cdefghij"[..]));

    let mut short = [vec![0; 5]];
    let (request, _) = parsed(&limits(), &mut [header(T_GET_ID, 0)], &mut short).unwrap();
    assert_eq!(request.written, 5);
    assert_eq!(&short[0], b"0123\0");
}

#[test]
fn unknown_type_is_unsupported() {
    for kind in [2, 3, 5, 10, 14, 0x8000_0000, u32::MAX] {
        let answer = action(&mut [header(kind, 0)], &mut [vec![0; 513]]);
        assert_eq!(answer, Action::Answer(Status::Unsupported), "{kind}");
    }
}

#[test]
fn flush_has_no_range() {
    let flush = action(&mut [header(T_FLUSH, u64::MAX)], &mut [vec![0]]);
    assert_eq!(flush, Action::Start { operation: Operation::Flush, offset: 0, length: 0 });
}
