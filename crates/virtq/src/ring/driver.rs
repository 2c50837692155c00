//! The driver's side of a ring, for tests, fuzzing and benchmarks: what a guest does.
//!
//! It is simple rather than fast, and panics where a guest would be at fault.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::memory::{Memory, Region, RegionSpec};

use super::chain::{INDIRECT, NEXT, WRITE};
use super::descriptor::Position;
use super::{RingConfig, need_event};

/// Where a guest's memory begins, for the guest.
pub const GUEST: u64 = 0x10_0000;
/// Where it begins, for the front end.
pub const FRONT_END: u64 = 0x7f00_0000_0000;

/// Entries of an indirect table.
const TABLE: usize = 16;

/// A guest's memory: one region.
#[derive(Debug)]
pub struct Guest {
    file: OwnedFd,
    region: Arc<Region>,
    memory: Arc<Memory>,
}

impl Guest {
    /// Memory of `size` bytes, all zero.
    ///
    /// # Panics
    /// The system has none.
    #[must_use]
    pub fn new(size: u64) -> Arc<Self> {
        let file = memfd_create(c"guest", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, size).expect("memory");
        let spec = RegionSpec { guest: GUEST, size, front_end: FRONT_END, offset: 0 };
        let region = Region::map(spec, file.try_clone().expect("descriptor")).expect("region");
        let region = Arc::new(region);
        let memory = Arc::new(Memory::new(vec![Arc::clone(&region)]).expect("table"));
        Arc::new(Self { file, region, memory })
    }

    /// The table that the device sees.
    #[must_use]
    pub fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory)
    }

    /// The file that holds it.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn at<T>(&self, address: u64) -> *mut T {
        let part = self.memory.guest(address, size_of::<T>() as u64).expect("guest address");
        assert!(
            part.len() == size_of::<T>() && (part.base() as usize).is_multiple_of(align_of::<T>())
        );
        part.base().cast()
    }

    /// A 16-bit field.
    #[must_use]
    pub fn u16(&self, address: u64) -> &AtomicU16 {
        // SAFETY: mapped and aligned, as `at` checked, for as long as `self` is.
        unsafe { AtomicU16::from_ptr(self.at(address)) }
    }

    /// A 32-bit field.
    #[must_use]
    pub fn u32(&self, address: u64) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(address)) }
    }

    /// A 64-bit field.
    #[must_use]
    pub fn u64(&self, address: u64) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at(address)) }
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// They are not in the memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let part = self.memory.guest(address, bytes.len() as u64).expect("guest address");
        assert_eq!(part.len(), bytes.len());
        // SAFETY: the part is mapped and that long; a race of tests would be the test's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), part.base(), bytes.len()) };
    }

    /// Reads bytes.
    ///
    /// # Panics
    /// They are not in the memory.
    #[must_use]
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let part = self.memory.guest(address, length as u64).expect("guest address");
        assert_eq!(part.len(), length);
        let mut bytes = vec![0; length];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(part.base(), bytes.as_mut_ptr(), length) };
        bytes
    }

    /// Its region.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

/// What the driver offers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Entries.
    pub size: u16,
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
}

/// A piece of a request.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

/// A driver, with a ring of its own in a guest's memory.
#[derive(Debug)]
pub struct Driver {
    guest: Arc<Guest>,
    options: Options,
    descriptors: u64,
    driver: u64,
    device: u64,
    tables: u64,
    /// Split: descriptors. Packed: buffer IDs.
    free: Vec<u16>,
    /// Requests by ID: their descriptors.
    outstanding: BTreeMap<u16, Vec<u16>>,
    /// Their IDs in the order in which they were added.
    order: VecDeque<u16>,
    /// In order: the ID of the last request of those that the last used descriptor stands for, unless that was taken.
    until: Option<(u16, u32)>,
    /// Split: the available index, with what is not published.
    available: Position,
    published: Position,
    /// Descriptors, or requests if split, added since then.
    added: u16,
    /// Packed: free descriptors.
    room: u16,
    /// Packed: the first request's flags, stored last.
    first: Option<(Position, u16)>,
    used: Position,
}

impl Driver {
    /// Bytes of guest memory that a ring takes.
    #[must_use]
    pub const fn bytes(size: u16) -> u64 {
        let size = size as u64;
        // Both layouts and a table for each request, with room to align them.
        16 * size + (6 + 2 * size + 64) + (6 + 8 * size + 64) + size * (TABLE as u64 * 16) + 4096
    }

    /// Sets up a ring at a guest address.
    ///
    /// # Panics
    /// The address is not in the memory.
    #[must_use]
    pub fn new(guest: Arc<Guest>, at: u64, options: Options) -> Self {
        let size = u64::from(options.size);
        let descriptors = at.next_multiple_of(64);
        let driver = descriptors + 16 * size;
        let device = (driver + 6 + 2 * size).next_multiple_of(64);
        let tables = (device + 6 + 8 * size).next_multiple_of(64);
        guest.write(descriptors, &vec![0; (tables - descriptors) as usize]);
        let start = Position::new(0, true);
        Self {
            guest,
            options,
            descriptors,
            driver,
            device,
            tables,
            free: (0..options.size).rev().collect(),
            outstanding: BTreeMap::new(),
            order: VecDeque::new(),
            until: None,
            available: start,
            published: start,
            added: 0,
            room: options.size,
            first: None,
            used: start,
        }
    }

    /// Begins a split ring of indices at `index`, to be near where they wrap.
    #[must_use]
    pub fn starting_at(mut self, index: u16) -> Self {
        assert!(!self.options.packed);
        for position in [&mut self.available, &mut self.published, &mut self.used] {
            *position = Position::new(index, true);
        }
        self.guest.u16(self.driver + 2).store(index, Ordering::Relaxed);
        self.guest.u16(self.device + 2).store(index, Ordering::Relaxed);
        self
    }

    /// What the device is told about the ring, with the base of one that has just begun.
    #[must_use]
    pub fn config(&self) -> RingConfig {
        let Options { size, packed, event_idx, indirect, in_order } = self.options;
        let place = |address| address - GUEST + FRONT_END;
        let base = if packed {
            u32::from(self.used.bits()) * 0x1_0001
        } else {
            u32::from(self.used.index())
        };
        RingConfig {
            size,
            packed,
            event_idx,
            indirect,
            in_order,
            descriptors: place(self.descriptors),
            driver: place(self.driver),
            device: place(self.device),
            base,
            log: None,
        }
    }

    /// Guest addresses of descriptors, driver area and device area.
    #[must_use]
    pub const fn addresses(&self) -> (u64, u64, u64) {
        (self.descriptors, self.driver, self.device)
    }

    /// The guest.
    #[must_use]
    pub const fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    /// Requests that have not come back.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Writes a request's descriptors; the device sees it with the next [`Driver::publish`].
    /// Its ID, or `None` if there is no room.
    pub fn add(&mut self, buffers: &[Buffer], indirect: bool) -> Option<u16> {
        let count = if indirect { 1 } else { buffers.len() };
        let room = if self.options.packed { usize::from(self.room) } else { self.free.len() };
        if count > room || buffers.len() > if indirect { TABLE } else { count } || count == 0 {
            return None;
        }
        let entries: Vec<(u64, u32, u16)> = buffers
            .iter()
            .map(|b| (b.address, b.length, if b.writable { WRITE } else { 0 }))
            .collect();
        let id = *self.free.last()?;
        let entries = if indirect { vec![self.table(id, &entries)] } else { entries };
        let id =
            if self.options.packed { self.add_packed(&entries) } else { self.add_split(&entries) };
        self.order.extend(id);
        id
    }

    /// Writes a request's indirect table; the descriptor of it.
    fn table(&self, id: u16, entries: &[(u64, u32, u16)]) -> (u64, u32, u16) {
        let table = self.tables + u64::from(id) * (TABLE as u64 * 16);
        for (index, &(address, length, flags)) in entries.iter().enumerate() {
            let at = table + 16 * index as u64;
            let more = !self.options.packed && index + 1 < entries.len();
            let (flags, next) = if more { (flags | NEXT, index as u16 + 1) } else { (flags, 0) };
            self.guest.u64(at).store(address, Ordering::Relaxed);
            let word = if self.options.packed {
                u64::from(length) | u64::from(flags) << 48
            } else {
                u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48
            };
            self.guest.u64(at + 8).store(word, Ordering::Relaxed);
        }
        (table, 16 * entries.len() as u32, INDIRECT)
    }

    fn add_split(&mut self, entries: &[(u64, u32, u16)]) -> Option<u16> {
        let taken: Vec<u16> = entries.iter().filter_map(|_| self.free.pop()).collect();
        for (index, &(address, length, flags)) in entries.iter().enumerate() {
            let next = taken.get(index + 1).copied();
            let flags = flags | if next.is_some() { NEXT } else { 0 };
            self.set_descriptor(taken[index], address, length, flags, next.unwrap_or(0));
        }
        let head = taken[0];
        let slot = u64::from(self.available.index() % self.options.size);
        self.guest.u16(self.driver + 4 + 2 * slot).store(head, Ordering::Relaxed);
        self.available = Position::new(self.available.index().wrapping_add(1), true);
        self.added += 1;
        self.outstanding.insert(head, taken);
        Some(head)
    }

    /// Writes a split descriptor, for tests that want a bad one.
    pub fn set_descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = self.descriptors + 16 * u64::from(index);
        let word = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.guest.u64(at).store(address, Ordering::Relaxed);
        self.guest.u64(at + 8).store(word, Ordering::Relaxed);
    }

    fn add_packed(&mut self, entries: &[(u64, u32, u16)]) -> Option<u16> {
        let id = self.free.pop()?;
        for (index, &(address, length, flags)) in entries.iter().enumerate() {
            let at = self.descriptors + 16 * u64::from(self.available.index());
            let more = if index + 1 < entries.len() { NEXT } else { 0 };
            let flags = flags | more | self.available.available_flags();
            self.guest.u64(at).store(address, Ordering::Relaxed);
            self.guest.u32(at + 8).store(length, Ordering::Relaxed);
            self.guest.u16(at + 12).store(id, Ordering::Relaxed);
            if self.first.is_none() {
                self.first = Some((self.available, flags));
            } else {
                self.guest.u16(at + 14).store(flags, Ordering::Relaxed);
            }
            self.available = self.available.after(1, self.options.size);
        }
        self.added += entries.len() as u16;
        self.room -= entries.len() as u16;
        self.outstanding.insert(id, vec![0; entries.len()]);
        Some(id)
    }

    /// Makes available what has been added. Whether the device wants a kick.
    pub fn publish(&mut self) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        if let Some((position, flags)) = self.first.take() {
            let at = self.descriptors + 16 * u64::from(position.index()) + 14;
            self.guest.u16(at).store(flags, Ordering::Release);
        } else {
            self.guest.u16(self.driver + 2).store(self.available.index(), Ordering::Release);
        }
        self.published = self.available;
        // Store what is available, fence, load what the device wants: see the ring's other half.
        fence(Ordering::SeqCst);
        let new = self.published.index();
        if self.options.packed {
            let event = self.guest.u32(self.device).load(Ordering::Relaxed);
            let wanted = Position::from_bits(event as u16);
            match event >> 16 {
                0 => true,
                2 => {
                    let lap =
                        if wanted.wrap() == self.published.wrap() { 0 } else { self.options.size };
                    need_event(wanted.index().wrapping_sub(lap), new, new.wrapping_sub(added))
                }
                _ => false,
            }
        } else if self.options.event_idx {
            let at = self.device + 4 + 8 * u64::from(self.options.size);
            let event = self.guest.u16(at).load(Ordering::Relaxed);
            need_event(event, new, new.wrapping_sub(added))
        } else {
            self.guest.u16(self.device).load(Ordering::Relaxed) & 1 == 0
        }
    }

    fn next_used(&self) -> Option<(u16, u32)> {
        if self.options.packed {
            let at = self.descriptors + 16 * u64::from(self.used.index());
            let word = self.guest.u64(at + 8).load(Ordering::Acquire);
            let flags = (word >> 48) as u16 & (1 << 7 | 1 << 15);
            let used = if self.used.wrap() { 1 << 7 | 1 << 15 } else { 0 };
            (flags == used).then_some(((word >> 32) as u16, word as u32))
        } else {
            let index = self.guest.u16(self.device + 2).load(Ordering::Acquire);
            if index == self.used.index() {
                return None;
            }
            let at = self.device + 4 + 8 * u64::from(self.used.index() % self.options.size);
            let id = self.guest.u32(at).load(Ordering::Relaxed);
            Some((id as u16, self.guest.u32(at + 4).load(Ordering::Relaxed)))
        }
    }

    /// Takes the next request that the device has finished: its ID and the bytes written.
    ///
    /// # Panics
    /// It had not been asked for.
    pub fn take(&mut self) -> Option<(u16, u32)> {
        let (id, written) =
            if self.options.in_order { self.take_next() } else { self.next_used() }?;
        let taken = self.outstanding.remove(&id);
        let taken = taken.unwrap_or_else(|| panic!("{id} comes back, and was not away"));
        if self.options.packed {
            let count = taken.len() as u16;
            self.used = self.used.after(count, self.options.size);
            self.room += count;
            self.free.push(id);
        } else {
            self.used = Position::new(self.used.index().wrapping_add(1), true);
            self.free.extend(taken);
        }
        Some((id, written))
    }

    /// In order: the oldest request, if a used descriptor stands for it.
    fn take_next(&mut self) -> Option<(u16, u32)> {
        let (last, written) = self.until.or_else(|| self.next_used())?;
        let id = self.order.pop_front().expect("a used descriptor, and nothing is away");
        self.until = (id != last).then_some((last, written));
        // What the others had written is not said.
        Some((id, if id == last { written } else { 0 }))
    }

    /// Asks to be called; whether something has finished in the meantime.
    pub fn enable_calls(&mut self) -> bool {
        if self.options.packed {
            let flags = if self.options.event_idx { 2 << 16 } else { 0 };
            let event = flags | u32::from(self.used.bits());
            self.guest.u32(self.driver).store(event, Ordering::Relaxed);
        } else if self.options.event_idx {
            let at = self.driver + 4 + 2 * u64::from(self.options.size);
            self.guest.u16(at).store(self.used.index(), Ordering::Relaxed);
        } else {
            self.guest.u16(self.driver).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.until.is_some() || self.next_used().is_some()
    }

    /// Asks not to be called.
    pub fn disable_calls(&mut self) {
        if self.options.packed {
            self.guest.u32(self.driver).store(1 << 16, Ordering::Relaxed);
        } else if !self.options.event_idx {
            self.guest.u16(self.driver).store(1, Ordering::Relaxed);
        }
    }
}
