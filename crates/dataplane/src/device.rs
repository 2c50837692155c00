//! A virtio block device, as its front end sees it: features and configuration space.
//!
//! It outlives sessions. What one of them negotiates is the session's; what concerns the disk
//! itself (the write cache's mode, its size) is here, and the virtqueues look at it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rtvirtio_engine::Engine;
use rtvirtio_units::Bytes;
use rtvirtio_vhost::protocol::CONFIG_MAX;
use rtvirtio_vhost::{Backend, Link};
use rtvirtio_virtq::ring::Inflight;

use crate::call::Caller;
pub use crate::key::QUEUES_MAX;
use crate::schedule::Member;

pub mod features;

/// Bytes of a sector, the unit of the configuration space's sizes.
const SECTOR: u64 = 512;
/// Where the writeback byte is in the configuration space.
const WRITEBACK: u32 = 32;
/// Bytes of the configuration space as far as this device has fields: `struct virtio_blk_config`
/// up to those of secure erase.
const CONFIG_SIZE: usize = 60;

/// What requests may ask for at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Data segments of a request.
    pub segments: u32,
    /// Sectors of one segment of a discard or write-zeroes request.
    pub discard_sectors: u32,
    /// Segments of a discard or write-zeroes request.
    pub discard_segments: u32,
    /// Guest memory that a front end may share, in all its regions.
    pub memory: Bytes,
}

impl Default for Limits {
    /// 126 data segments: with header and status they fill a queue of 128 entries, QEMU's default. A front end reads this before it
    /// says how many entries its queues have (QEMU as it realizes the device, GET_INFLIGHT_FD and SET_VRING_NUM as the driver starts
    /// it), so it cannot follow them. A driver of a shorter queue uses indirect descriptors, which are offered.
    /// 1 GiB of a discard: what a file system punches out in one piece without a long stall. As much memory as
    /// the host has: no guest uses more, and this process has an address space for all of them.
    fn default() -> Self {
        let memory = host_memory();
        Self { segments: 126, discard_sectors: 1 << 21, discard_segments: 1, memory }
    }
}

/// Memory and swap space of the host.
fn host_memory() -> Bytes {
    let found = rustix::system::sysinfo();
    let units = found.totalram.saturating_add(found.totalswap);
    Bytes::new(units.saturating_mul(found.mem_unit.into()))
}

/// What a device is made of.
pub struct DeviceConfig {
    /// Its name, in messages about it.
    pub name: String,
    /// Its disk.
    pub engine: Arc<dyn Engine>,
    /// Virtqueues, 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// Whether writes are refused, even if the engine would do them.
    pub read_only: bool,
    /// What GET_ID answers, padded with zeroes.
    pub serial: [u8; 20],
    /// Whether completed writes may be lost with the power, until a flush: the mode until the driver
    /// chooses.
    pub write_cache: bool,
    /// What requests may ask for at most.
    pub limits: Limits,
    /// Its place in the schedule of the physical device that its disk is on, if that has one.
    pub schedule: Option<Member>,
}

/// Why there is no such device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not 1 to [`QUEUES_MAX`].
    #[error("{0} queues: must be 1 to {QUEUES_MAX}")]
    Queues(u16),
}

/// A device.
pub struct Device {
    config: DeviceConfig,
    // As the driver chose last; until it does, as configured.
    chosen_cache: AtomicBool,
    // The same, as far as this driver can live with it.
    write_cache: AtomicBool,
    member: Mutex<Option<Arc<Member>>>,
    caller: Arc<Caller>,
    link: Link,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.config.name).finish_non_exhaustive()
    }
}

impl Device {
    /// A device.
    ///
    /// # Errors
    /// [`DeviceError`]
    pub fn new(mut config: DeviceConfig) -> Result<Self, DeviceError> {
        if !(1..=QUEUES_MAX).contains(&config.queues) {
            return Err(DeviceError::Queues(config.queues));
        }
        Ok(Self {
            chosen_cache: AtomicBool::new(config.write_cache),
            write_cache: AtomicBool::new(config.write_cache),
            member: Mutex::new(config.schedule.take().map(Arc::new)),
            config,
            caller: Arc::default(),
            link: Link::default(),
        })
    }

    /// What calls its drivers aside.
    #[must_use]
    pub const fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }

    /// Its disk.
    #[must_use]
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.config.engine
    }

    /// What GET_ID answers.
    #[must_use]
    pub const fn serial(&self) -> &[u8; 20] {
        &self.config.serial
    }

    /// Its place in a schedule, for a queue that has nothing in flight.
    pub(crate) fn member(&self) -> Option<Arc<Member>> {
        self.member.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives it another place, for queues that start from now on; the one before.
    pub(crate) fn set_member(&self, member: Option<Member>) -> Option<Arc<Member>> {
        let mut place = self.member.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut place, member.map(Arc::new))
    }

    /// What requests may ask for at most.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.config.limits
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.config.read_only || self.config.engine.geometry().read_only
    }

    /// Whether completed writes may be lost with the power, until a flush.
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    /// What the driver chose in the writeback field.
    ///
    /// It holds until it chooses again, in later sessions and after resets too: QEMU shows guests
    /// the field as it was when QEMU began or they last wrote it, and says nothing of it when it
    /// connects again (hw/block/vhost-user-blk.c). A guest that sees no cache does not flush.
    fn set_write_cache(&self, on: bool) {
        self.chosen_cache.store(on, Ordering::Relaxed);
        self.write_cache.store(on, Ordering::Relaxed);
    }

    /// The writeback field for a driver that has negotiated features.
    fn writeback(&self, negotiated: u64) -> bool {
        let mask = features::BLK_FLUSH | features::BLK_CONFIG_WCE;
        match negotiated & mask {
            // It begins with 0 (virtio 1.2, 5.2.5.2).
            features::BLK_CONFIG_WCE => self.write_cache(),
            _ => self.chosen_cache.load(Ordering::Relaxed),
        }
    }

    /// `struct virtio_blk_config` (virtio 1.2, 5.2.4), little endian.
    fn fields(&self) -> [u8; CONFIG_SIZE] {
        let geometry = self.config.engine.geometry();
        let Limits { segments, discard_sectors, discard_segments, .. } = self.config.limits;
        let discard = self.features() & features::BLK_DISCARD != 0;
        let of_discard = |value: u32| if discard { value } else { 0 };
        let blocks = (geometry.physical_block / geometry.logical_block).max(1);

        let mut space = [0; CONFIG_SIZE];
        let mut put = |offset: usize, bytes: &[u8]| {
            space[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &(geometry.capacity.get() / SECTOR).to_le_bytes());
        put(12, &segments.to_le_bytes());
        put(20, &geometry.logical_block.to_le_bytes());
        put(24, &[blocks.ilog2() as u8]);
        put(26, &u16::try_from(blocks).unwrap_or(u16::MAX).to_le_bytes());
        put(34, &self.config.queues.to_le_bytes());
        put(36, &of_discard(discard_sectors).to_le_bytes());
        put(40, &of_discard(discard_segments).to_le_bytes());
        put(44, &of_discard(geometry.logical_block / SECTOR as u32).to_le_bytes());
        put(48, &of_discard(discard_sectors).to_le_bytes());
        put(52, &of_discard(discard_segments).to_le_bytes());
        put(56, &[u8::from(discard)]);
        space
    }

    /// Looks at the disk's size again, or changes it, and tells the front end.
    ///
    /// # Errors
    /// The engine cannot have that size.
    pub fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        let capacity = self.config.engine.resize(capacity)?;
        // A front end that does not listen learns of it when it next reads the field.
        let _ = self.link.notify();
        Ok(capacity)
    }
}

impl Backend for Device {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn queues(&self) -> u16 {
        self.config.queues
    }

    fn features(&self) -> u64 {
        let geometry = self.config.engine.geometry();
        let mut offered = features::ALWAYS;
        if self.read_only() {
            offered |= features::BLK_RO;
        } else if geometry.discard {
            offered |= features::BLK_DISCARD | features::BLK_WRITE_ZEROES;
        }
        offered
    }

    fn memory_limit(&self) -> Bytes {
        self.config.limits.memory
    }

    // Front ends ask for fields of features that are not offered, too.
    fn config(&self, offset: u32, size: u32, negotiated: u64) -> Vec<u8> {
        let mut space = [0; CONFIG_MAX as usize];
        space[..CONFIG_SIZE].copy_from_slice(&self.fields());
        space[WRITEBACK as usize] = self.writeback(negotiated).into();
        space.into_iter().skip(offset as usize).take(size as usize).collect()
    }

    fn write_config(
        &self,
        offset: u32,
        data: &[u8],
        negotiated: u64,
        inflight: Option<&Inflight>,
    ) -> bool {
        match (offset, data) {
            (WRITEBACK, [on @ (0 | 1)]) if negotiated & features::BLK_CONFIG_WCE != 0 => {
                self.set_write_cache(*on == 1);
                if let Some(inflight) = inflight {
                    inflight.set_write_through(*on == 0);
                }
                true
            }
            _ => false,
        }
    }

    /// If the driver cannot flush, writes must be durable when they complete (virtio 1.2, 5.2.5.2),
    /// unless it chooses otherwise.
    fn negotiated(&self, negotiated: u64) {
        let flushes = negotiated & features::BLK_FLUSH != 0;
        let chosen = self.chosen_cache.load(Ordering::Relaxed);
        self.write_cache.store(chosen && flushes, Ordering::Relaxed);
    }

    fn take_over(&self, inflight: &Inflight) {
        if inflight.is_write_through() {
            // Said to an earlier server.
            self.set_write_cache(false);
        }
        inflight.set_write_through(!self.chosen_cache.load(Ordering::Relaxed));
    }

    fn link(&self) -> &Link {
        &self.link
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
