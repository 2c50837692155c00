//! Commands of the NVM command set, as the kernel takes them in a submission queue entry.
//!
//! Numbers and fields: NVM Express NVM Command Set Specification 1.0, section 3.2 ("figures" there);
//! `struct nvme_uring_cmd` of linux/nvme_ioctl.h, which is a submission queue entry of the device
//! without what the driver fills in.

use rustix::io::Errno;

use super::format::Format;
use crate::{Operation, Request, SCRATCH_BYTES};

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const WRITE_ZEROES: u8 = 0x08;
const DATASET_MANAGEMENT: u8 = 0x09;

/// Force Unit Access, of command dword 12: on stable storage when it completes.
const FUA: u32 = 1 << 30;
/// Deallocate, of a write-zeroes' command dword 12.
const DEAC: u32 = 1 << 25;
/// Attribute Deallocate, of a dataset management's command dword 11.
const AD: u32 = 1 << 2;

/// `NVME_URING_CMD_IO` and `NVME_URING_CMD_IO_VEC`: one buffer, or a vector of them.
pub(super) const IO: u32 = 0xc048_4e80;
pub(super) const IO_VECTOR: u32 = 0xc048_4e81;

/// Bytes of a submission queue entry that are the command's; it has 72.
pub(super) const BYTES: usize = 80;

/// What a namespace's commands depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) namespace: u32,
    pub(super) format: Format,
}

/// A command, ready for the ring.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// [`IO`] or [`IO_VECTOR`].
    pub(super) kind: u32,
    pub(super) bytes: [u8; BYTES],
}

impl Command {
    /// What a request comes to. Its range is within the namespace and on its blocks, no longer than
    /// the engine's limits; what is longer than a command can say is refused.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(super) fn of(target: &Target, request: &Request<'_>) -> Result<Self, Errno> {
        let Target { namespace, format } = *target;
        let first = request.offset >> format.block_shift;
        let blocks = request.length >> format.block_shift;
        // Blocks are counted from 0.
        let count = || match blocks.checked_sub(1).map(u16::try_from) {
            Some(Ok(count)) => Ok(u32::from(count)),
            _ => Err(Errno::INVAL),
        };
        let range = [first as u32, (first >> 32) as u32];
        let dwords = |opcode, range: [u32; 2], twelfth| (opcode, [range[0], range[1], twelfth]);
        let mut data = match request.segments {
            [] => (IO, 0, 0),
            [one] => (IO, one.base().addr() as u64, one.len()),
            // A segment is a `struct iovec`.
            many => (IO_VECTOR, many.as_ptr().addr() as u64, many.len()),
        };
        let (opcode, dwords) = match request.operation {
            Operation::Flush => dwords(FLUSH, [0; 2], 0),
            Operation::Read => dwords(READ, range, count()?),
            Operation::Write { durable } => {
                dwords(WRITE, range, count()? | if durable { FUA } else { 0 })
            }
            Operation::WriteZeroes { unmap, durable } => {
                let deallocate = unmap && format.zeroes_when_deallocated;
                let flags = if deallocate { DEAC } else { 0 } | if durable { FUA } else { 0 };
                dwords(WRITE_ZEROES, range, count()? | flags)
            }
            Operation::Discard => {
                let blocks = u32::try_from(blocks).map_err(|_| Errno::INVAL)?;
                let scratch = request.scratch;
                if scratch.len() < SCRATCH_BYTES {
                    return Err(Errno::INVAL);
                }
                let range = discarded(blocks, first);
                // SAFETY: so many bytes are there, the caller's for this request.
                unsafe { range.as_ptr().copy_to_nonoverlapping(scratch.base(), range.len()) };
                data = (IO, scratch.base().addr() as u64, range.len());
                // One range.
                dwords(DATASET_MANAGEMENT, [0, AD], 0)
            }
        };
        let (kind, address, length) = data;
        let length = u32::try_from(length).map_err(|_| Errno::INVAL)?;
        let mut bytes = [0; BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &[opcode]);
        put(4, &namespace.to_ne_bytes());
        put(24, &address.to_ne_bytes());
        put(36, &length.to_ne_bytes());
        for (at, dword) in (40..).step_by(4).zip(dwords) {
            put(at, &dword.to_ne_bytes());
        }
        Ok(Self { kind, bytes })
    }
}

/// A range of a dataset management command (figure "Range Definition"): attributes, blocks, first.
fn discarded(blocks: u32, first: u64) -> [u8; SCRATCH_BYTES] {
    let mut range = [0; SCRATCH_BYTES];
    range[4..8].copy_from_slice(&blocks.to_le_bytes());
    range[8..].copy_from_slice(&first.to_le_bytes());
    range
}

/// What the driver said in a completion: nothing, its own error, or the device's status without the
/// phase (NVM Express Base Specification 2.0, figure "Completion Queue Entry: Status Field").
///
/// # Errors
/// As the kernel's block layer would say it (drivers/nvme/host/core.c, `nvme_error_status`), as far as
/// a driver of a virtio disk can tell errors apart.
pub fn result(raw: i32) -> Result<(), Errno> {
    /// Status code and its type: what is above says whether a repetition may help.
    const CODE: i32 = 0x7ff;
    match raw {
        0 => Ok(()),
        // Cancelled, since the controller was reset: it may have been done or not.
        raw if raw == -libc::EINTR => Err(Errno::IO),
        raw if raw < 0 => Err(Errno::from_raw_os_error(raw.saturating_neg())),
        raw => Err(match raw & CODE {
            // Invalid Command Opcode, Invalid Field in Command.
            0x001 | 0x002 => Errno::OPNOTSUPP,
            // Namespace is Write Protected.
            0x020 => Errno::ROFS,
            // Capacity Exceeded.
            0x081 => Errno::NOSPC,
            _ => Errno::IO,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Segment, Token};

    const BLOCK_512: Target = Target {
        namespace: 0x0102_0304,
        format: Format { block_shift: 9, zeroes_when_deallocated: true },
    };

    fn request(operation: Operation, offset: u64, length: u64) -> Request<'static> {
        let (token, buffer, scratch) = (Token(1), None, Segment::EMPTY);
        Request { token, operation, offset, length, segments: &[], buffer, scratch }
    }

    /// The dwords of the 72 bytes, by their offset.
    fn dword(command: &Command, at: usize) -> u32 {
        u32::from_ne_bytes(command.bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn read_of_one_buffer_is_encoded_as_the_specification_says() {
        let address = 0x1122_3344_5566_7000_usize;
        let segments = [Segment::new(std::ptr::without_provenance_mut(address), 4096)];
        // Block 0x1_0000_0002.
        let request =
            Request { segments: &segments, ..request(Operation::Read, 0x200_0000_0400, 4096) };
        let command = Command::of(&BLOCK_512, &request).unwrap();
        assert_eq!(command.kind, 0xc048_4e80);
        let mut expected = [0_u8; 80];
        expected[0] = 0x02;
        expected[4..8].copy_from_slice(&[4, 3, 2, 1]);
        expected[24..32].copy_from_slice(&[0, 0x70, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        // 4096 bytes.
        expected[36..40].copy_from_slice(&[0, 0x10, 0, 0]);
        // First block, then 8 blocks less one.
        expected[40..48].copy_from_slice(&[2, 0, 0, 0, 1, 0, 0, 0]);
        expected[48] = 7;
        assert_eq!(command.bytes, expected);
    }

    #[test]
    fn durable_write_of_several_buffers_is_a_vector_with_forced_unit_access() {
        let of_4096 = Target {
            format: Format { block_shift: 12, zeroes_when_deallocated: false },
            ..BLOCK_512
        };
        let piece = Segment::new(std::ptr::without_provenance_mut(0x1000), 100);
        let segments = [piece; 3];
        let write = |durable| {
            let write = request(Operation::Write { durable }, 8192, 4096 * 0x1_0000);
            Command::of(&of_4096, &Request { segments: &segments, ..write }).unwrap()
        };
        let command = write(true);
        assert_eq!((command.kind, command.bytes[0]), (0xc048_4e81, 0x01));
        let address = u64::from_ne_bytes(command.bytes[24..32].try_into().unwrap());
        assert_eq!(address, segments.as_ptr().addr() as u64);
        assert_eq!(dword(&command, 36), 3, "iovecs");
        assert_eq!([dword(&command, 40), dword(&command, 44)], [2, 0]);
        // The most blocks that there can be, and bit 30.
        assert_eq!(dword(&command, 48), 0x4000_ffff);
        assert_eq!(dword(&write(false), 48), 0xffff);
    }

    #[test]
    fn flush_names_the_namespace_and_nothing_else() {
        let command = Command::of(&BLOCK_512, &request(Operation::Flush, 0, 0)).unwrap();
        let mut expected = [0_u8; 80];
        expected[4..8].copy_from_slice(&[4, 3, 2, 1]);
        assert_eq!((command.kind, command.bytes), (IO, expected));
    }

    #[test]
    fn zeroes_are_deallocated_only_where_that_reads_as_zeroes() {
        let holds = BLOCK_512;
        let lacks = Target {
            format: Format { block_shift: 9, zeroes_when_deallocated: false },
            ..BLOCK_512
        };
        for (target, unmap, twelfth) in
            [(holds, true, 0x0200_007f), (holds, false, 0x7f), (lacks, true, 0x7f)]
        {
            let of = |durable| {
                let zeroes = Operation::WriteZeroes { unmap, durable };
                Command::of(&target, &request(zeroes, 512, 128 * 512)).unwrap()
            };
            let command = of(false);
            assert_eq!(command.bytes[0], 0x08);
            assert_eq!([dword(&command, 40), dword(&command, 48)], [1, twelfth]);
            // Without a write cache: force unit access, bit 30.
            assert_eq!(dword(&of(true), 48), twelfth | 1 << 30);
            assert_eq!([dword(&command, 24), dword(&command, 36)], [0, 0], "no data");
        }
    }

    #[test]
    fn discard_writes_one_range_to_the_callers_memory() {
        let mut scratch = [0xee_u8; 24];
        let place = Segment::new(scratch.as_mut_ptr(), 16);
        let discard = request(Operation::Discard, 0x200 << 33, 0x200 * 0xffff_ffff);
        let command = Command::of(&BLOCK_512, &Request { scratch: place, ..discard }).unwrap();
        assert_eq!((command.kind, command.bytes[0]), (IO, 0x09));
        let address = u64::from_ne_bytes(command.bytes[24..32].try_into().unwrap());
        assert_eq!((address, dword(&command, 36)), (place.base().addr() as u64, 16));
        // One range, counted from 0; the attribute; and no twelfth dword.
        assert_eq!([dword(&command, 40), dword(&command, 44), dword(&command, 48)], [0, 4, 0]);
        let range = [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 2, 0, 0, 0];
        assert_eq!(scratch[..16], range);
        assert_eq!(scratch[16..], [0xee; 8]);
    }

    #[test]
    fn request_that_no_command_can_say_is_refused() {
        let long = 512 * 0x1_0001;
        for operation in [
            Operation::Read,
            Operation::Write { durable: false },
            Operation::WriteZeroes { unmap: false, durable: true },
        ] {
            for length in [0, long] {
                let refused = Command::of(&BLOCK_512, &request(operation, 0, length));
                assert_eq!(refused, Err(Errno::INVAL), "{operation:?} of {length}");
            }
        }
        // Without memory for its range, or longer than a range.
        assert_eq!(
            Command::of(&BLOCK_512, &request(Operation::Discard, 0, 512)),
            Err(Errno::INVAL)
        );
        let mut scratch = [0_u64; 2];
        let scratch = Segment::new(scratch.as_mut_ptr().cast(), 16);
        let discard = Request { scratch, ..request(Operation::Discard, 0, 0x200 << 32) };
        assert_eq!(Command::of(&BLOCK_512, &discard), Err(Errno::INVAL));
    }

    #[test]
    fn status_of_the_device_is_told_as_the_kernel_tells_it() {
        assert_eq!(result(0), Ok(()));
        for (raw, error) in [
            (-libc::EACCES, Errno::ACCESS),
            (-libc::EINTR, Errno::IO),
            // With Do Not Retry: an opcode that it does not have, a field.
            (0x4001, Errno::OPNOTSUPP),
            (0x4002, Errno::OPNOTSUPP),
            (0x4020, Errno::ROFS),
            // LBA Out of Range, Capacity Exceeded, Unrecovered Read Error, a path's.
            (0x4080, Errno::IO),
            (0x0081, Errno::NOSPC),
            (0x4281, Errno::IO),
            (0x0371, Errno::IO),
        ] {
            assert_eq!(result(raw), Err(error), "{raw:#x}");
        }
    }
}
