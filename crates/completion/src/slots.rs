//! Slots that a process shares with the poller of a disk: memory, and what is said when they meet.
//!
//! Terms. The *poller* owns the disk; it makes the memory and serves it. A *client* is a process that
//! reads and writes the disk by slots: it takes one ([`Slot::submit`]), says what it wants
//! ([`Slot::about`]), rings ([`Doorbell`]), and waits. The bytes go through the slot's own part of the memory.
//!
//! Neither side trusts the other with its own memory: there is no pointer in it, each reads a field
//! once and checks what it has read, and its size is sealed, so that nobody takes pages away under the
//! other. A poller that has a client's lies to bear is served by [`Slots::take`].
//!
//! Layout, the same on both sides or refused by [`Offer::from_bytes`]: [`Slots`], then at `DATA_AT` the
//! data of one slot after the other.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FileType, MemfdFlags, SealFlags, Stat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::doorbell::Doorbell;
use crate::slot::{Slot, Ticket};

/// Slots of a client: requests that it can have in flight.
pub const SLOTS: usize = Doorbell::SLOTS;
/// Most bytes of a request.
pub const SLOT_BYTES: usize = 128 << 10;
/// Where the data begins: a multiple of any page size.
const DATA_AT: usize = 64 << 10;
/// Bytes of the memory. It is sparse: what no request has used takes none.
const BYTES: usize = DATA_AT + SLOTS * SLOT_BYTES;

#[cfg(not(rtvirtio_loom))]
const _: () = assert!(size_of::<Slots>() <= DATA_AT);
#[cfg(not(rtvirtio_loom))]
const _: () = assert!(size_of::<Slot<true, RawRequest>>() == 64);

/// What a client wants done with a slot's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The disk's bytes are read into it.
    Read,
    /// It is written to the disk.
    Write,
}

/// What a request is, as its client says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRequest {
    /// Which way; `None`: nothing that is known.
    pub way: Option<Direction>,
    /// First byte of the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

/// A request, in the line of its slot.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RawRequest {
    offset: AtomicU64,
    length: AtomicU32,
    way: AtomicU32,
}

const READ: u32 = 1;
const WRITE: u32 = 2;

impl RawRequest {
    fn set(&self, way: Direction, offset: u64, length: u32) {
        self.offset.store(offset, Ordering::Relaxed);
        self.length.store(length, Ordering::Relaxed);
        let way = match way {
            Direction::Read => READ,
            Direction::Write => WRITE,
        };
        self.way.store(way, Ordering::Relaxed);
    }

    fn get(&self) -> SlotRequest {
        SlotRequest {
            way: match self.way.load(Ordering::Relaxed) {
                READ => Some(Direction::Read),
                WRITE => Some(Direction::Write),
                _ => None,
            },
            offset: self.offset.load(Ordering::Relaxed),
            length: self.length.load(Ordering::Relaxed),
        }
    }
}

/// The client did what no client does: its slots cannot be served any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("slot {0} rang without a request")]
pub struct ProtocolViolation(pub usize);

/// All slots of a client.
#[derive(Debug)]
#[repr(C)]
pub struct Slots {
    doorbell: Doorbell,
    ended: Ended,
    slots: [Slot<true, RawRequest>; SLOTS],
}

/// Not zero: the poller serves these slots no more, and nothing of them is in flight.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Ended(AtomicU32);

impl Slots {
    /// The client's side of the doorbell, and the poller's.
    #[must_use]
    pub const fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// A slot.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&Slot<true, RawRequest>> {
        self.slots.get(index)
    }

    /// The client's: a free slot, looked for from `from` on, for a request that is then to be told to the
    /// poller by [`Self::tell`]. `None`: all are taken.
    #[must_use]
    pub fn claim(&self, from: usize) -> Option<(usize, Ticket)> {
        (0..SLOTS).find_map(|step| {
            let index = (from + step) % SLOTS;
            Some((index, self.slots[index].submit()?))
        })
    }

    /// The client's: what is wanted with a slot that it has claimed; its data is ready.
    pub fn tell(&self, index: usize, way: Direction, offset: u64, length: u32) {
        self.slots[index].about().set(way, offset, length);
        self.doorbell.ring(index);
    }

    /// The poller's: a request of a slot that rang, each word read once.
    ///
    /// # Errors
    /// [`ProtocolViolation`]
    pub fn take(&self, index: usize) -> Result<(Ticket, SlotRequest), ProtocolViolation> {
        let slot = self.slots.get(index).ok_or(ProtocolViolation(index))?;
        let ticket = slot.pending().ok_or(ProtocolViolation(index))?;
        Ok((ticket, slot.about().get()))
    }

    /// The poller's: it serves these slots no more.
    pub fn end(&self) {
        self.ended.0.store(1, Ordering::Release);
    }

    /// The client's: whether the poller has said so.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.0.load(Ordering::Acquire) != 0
    }
}

/// The memory of a client's slots, mapped until it is dropped.
#[derive(Debug)]
pub struct SlotMemory(NonNull<u8>);

// SAFETY: memory that is shared anyway, in which nothing but atomics is accessed by reference.
unsafe impl Send for SlotMemory {}
// SAFETY: as above.
unsafe impl Sync for SlotMemory {}

impl SlotMemory {
    /// The poller's: new memory, and its descriptor for the client.
    ///
    /// # Errors
    /// The system has none left.
    pub fn create() -> Result<(Self, OwnedFd), Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("rtvirtio-slots", flags)?;
        rustix::fs::ftruncate(&file, BYTES as u64)?;
        // Who shares it can make it neither shorter, which would be SIGBUS, nor longer.
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok((Self::mapped(&file)?, file))
    }

    /// The client's: memory that a poller has sent.
    ///
    /// # Errors
    /// The kernel's; EINVAL if it is not what a poller makes.
    pub fn map(file: impl AsFd) -> Result<Self, Errno> {
        // Of what has no seals at all this fails.
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SEALS) || rustix::fs::fstat(&file)?.st_size != BYTES as i64 {
            return Err(Errno::INVAL);
        }
        Self::mapped(&file)
    }

    fn mapped(file: impl AsFd) -> Result<Self, Errno> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, both, MapFlags::SHARED, file, 0)
        }?;
        NonNull::new(at.cast()).map(Self).ok_or(Errno::NOMEM)
    }

    /// A child that is forked from now on does not have it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn keep_from_children(&self) -> Result<(), Errno> {
        let at = self.0.as_ptr().cast();
        // SAFETY: the mapping is this value's, and whoever uses it is in this process.
        unsafe { rustix::mm::madvise(at, BYTES, rustix::mm::Advice::LinuxDontFork) }
    }

    /// The slots.
    #[must_use]
    pub const fn slots(&self) -> &Slots {
        // SAFETY: the mapping is long enough, aligned to a page and there as long as this value; its size
        // is sealed. Any bytes are `Slots`, which consist of atomics.
        unsafe { self.0.cast().as_ref() }
    }

    /// The data of a slot: [`SLOT_BYTES`] from there on, aligned to a page, there as long as this value.
    /// The other side may write to it at any time.
    ///
    /// # Panics
    /// There is no such slot.
    #[must_use]
    pub fn data(&self, index: usize) -> NonNull<u8> {
        assert!(index < SLOTS);
        // SAFETY: within the mapping.
        unsafe { self.0.add(DATA_AT + index * SLOT_BYTES) }
    }
}

/// Nor can anybody seal it further, against writes for one.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl Drop for SlotMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `mapped`; what `slots` and `data` gave out is used no longer than this value.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

/// Which file or block device something is, for all processes of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// A block device, whatever file it was opened by; else a regular file.
    pub block: bool,
    /// The block device's number, or that of the file's file system.
    pub device: u64,
    /// The regular file's.
    pub inode: u64,
}

impl FileIdentity {
    /// As fstat(2) says; `None`: it is neither a regular file nor a block device.
    #[must_use]
    pub fn of(status: &Stat) -> Option<Self> {
        match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => {
                Some(Self { block: false, device: status.st_dev, inode: status.st_ino })
            }
            FileType::BlockDevice => Some(Self { block: true, device: status.st_rdev, inode: 0 }),
            _ => None,
        }
    }
}

/// What a poller says to a client that connects, with the memory's descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The disk: whose I/O can go by the slots.
    pub file: FileIdentity,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What offsets, lengths and, for direct I/O, addresses are multiples of. At least 512.
    pub block: u32,
}

/// Format, version and layout of the memory: another one is refused.
const MAGIC: [u8; 8] = *b"rtslots1";

impl Offer {
    /// Bytes of an offer.
    pub const BYTES: usize = 48;

    /// As it is sent: numbers as this machine writes them.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut rest = &mut bytes[..];
        let mut put = |field: &[u8]| {
            let (front, back) = std::mem::take(&mut rest).split_at_mut(field.len());
            front.copy_from_slice(field);
            rest = back;
        };
        put(&MAGIC);
        put(&self.file.device.to_ne_bytes());
        put(&self.file.inode.to_ne_bytes());
        put(&u32::from(self.file.block).to_ne_bytes());
        put(&u32::from(self.read_only).to_ne_bytes());
        put(&self.block.to_ne_bytes());
        put(&(SLOTS as u32).to_ne_bytes());
        put(&(SLOT_BYTES as u32).to_ne_bytes());
        put(&(DATA_AT as u32).to_ne_bytes());
        bytes
    }

    /// What was sent; `None`: it is no offer that can be taken.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (inode, rest) = rest.split_first_chunk()?;
        let mut numbers = rest
            .chunks_exact(4)
            .map(|number| number.try_into().map(u32::from_ne_bytes).unwrap_or_default());
        let mut next = || numbers.next();
        let (block_device, read_only, block) = (next()?, next()?, next()?);
        let layout = [next()?, next()?, next()?].map(|number| number as usize);
        let fits = *magic == MAGIC && layout == [SLOTS, SLOT_BYTES, DATA_AT];
        let block_fits = block.is_power_of_two() && (512..=SLOT_BYTES as u32).contains(&block);
        (fits && block_fits).then_some(Self {
            file: FileIdentity {
                block: block_device != 0,
                device: u64::from_ne_bytes(*device),
                inode: u64::from_ne_bytes(*inode),
            },
            read_only: read_only != 0,
            block,
        })
    }
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use super::*;

    #[test]
    fn request_goes_from_a_client_to_the_poller_and_back() {
        let (ours, file) = SlotMemory::create().unwrap();
        let theirs = SlotMemory::map(&file).unwrap();
        let (index, ticket) = theirs.slots().claim(61).unwrap();
        assert_eq!(index, 61);
        // SAFETY: the slot's data, which nobody else has now.
        unsafe { theirs.data(index).write_bytes(7, SLOT_BYTES) };
        theirs.slots().tell(index, Direction::Write, 1 << 40, 4096);

        assert_eq!(ours.slots().doorbell().answer(), 1 << 61);
        let (taken, wanted) = ours.slots().take(61).unwrap();
        assert_eq!(
            wanted,
            SlotRequest { way: Some(Direction::Write), offset: 1 << 40, length: 4096 }
        );
        // SAFETY: within the slot's data.
        let last = unsafe { ours.data(61).add(SLOT_BYTES - 1) };
        // SAFETY: the slot's last byte.
        assert_eq!(unsafe { last.read() }, 7);
        let slot = ours.slots().get(61).unwrap();
        crate::Wakes::default().complete(slot, taken, 4096).unwrap();
        assert_eq!(theirs.slots().get(index).unwrap().take(ticket), Some(4096));
    }

    #[test]
    fn slots_are_claimed_once_each_and_again_when_they_are_free() {
        let (memory, _) = SlotMemory::create().unwrap();
        let slots = memory.slots();
        let claimed: Vec<usize> = (0..SLOTS).map(|_| slots.claim(60).unwrap().0).collect();
        assert_eq!(claimed[..4], [60, 61, 62, 0]);
        assert!(slots.claim(0).is_none());
        slots.get(5).unwrap().reclaim();
        assert_eq!(slots.claim(60).unwrap().0, 5);
    }

    #[test]
    fn slot_that_rings_without_a_request_is_an_error() {
        let (memory, _) = SlotMemory::create().unwrap();
        let slots = memory.slots();
        assert_eq!(slots.take(3), Err(ProtocolViolation(3)));
        assert_eq!(slots.take(SLOTS), Err(ProtocolViolation(SLOTS)));
        let (index, ticket) = slots.claim(3).unwrap();
        assert!(slots.take(index).is_ok());
        crate::Wakes::default().complete(slots.get(index).unwrap(), ticket, 0).unwrap();
        assert_eq!(slots.take(index), Err(ProtocolViolation(3)));
    }

    #[test]
    fn memory_cannot_be_made_shorter_and_other_memory_is_refused() {
        let (_memory, file) = SlotMemory::create().unwrap();
        assert_eq!(rustix::fs::ftruncate(&file, 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&file, 1 << 30), Err(Errno::PERM));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let other = rustix::fs::memfd_create("other", flags).unwrap();
        rustix::fs::ftruncate(&other, BYTES as u64).unwrap();
        assert_eq!(SlotMemory::map(&other).err(), Some(Errno::INVAL), "not sealed");
        rustix::fs::ftruncate(&other, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&other, SEALS).unwrap();
        assert_eq!(SlotMemory::map(&other).err(), Some(Errno::INVAL), "too short");
    }

    #[test]
    fn offer_is_read_as_it_is_written_and_another_layout_is_refused() {
        let offer = Offer {
            file: FileIdentity { block: false, device: 0x801, inode: u64::MAX },
            read_only: true,
            block: 4096,
        };
        let bytes = offer.to_bytes();
        assert_eq!(Offer::from_bytes(&bytes), Some(offer));
        // Magic, block size, slots, bytes of a slot, start of the data.
        for at in [0, 32, 36, 40, 44] {
            let mut wrong = bytes;
            wrong[at] ^= 1;
            assert_eq!(Offer::from_bytes(&wrong), None, "{at}");
        }
        assert_eq!(Offer::from_bytes(&[0; Offer::BYTES]), None);
    }
}
