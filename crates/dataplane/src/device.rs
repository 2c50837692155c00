//! A virtio block device, as its front end sees it: features and configuration space.
//!
//! It outlives sessions. What one of them negotiates is the session's; what concerns the disk
//! itself (the write cache's mode, its size) is here, and the virtqueues look at it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use rtvirtio_engine::Engine;
use rtvirtio_units::Bytes;
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::call::Caller;
pub use crate::key::QUEUES_MAX;
use crate::protocol::{CONFIG_MAX, Header, features, send};
use crate::schedule::Member;

/// Bytes of a sector, the unit of the configuration space's sizes.
const SECTOR: u64 = 512;
/// The most entries of a virtqueue; the least are 2.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// CONFIG_CHANGE_MSG, the one request that a back end sends.
const CONFIG_CHANGE: u32 = 2;
/// Where the writeback byte is in the configuration space.
pub(crate) const WRITEBACK: u32 = 32;
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
    /// 126 data segments: with header and status they fill a queue of 128 entries, QEMU's default.
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
    channel: Mutex<Weak<Channel>>,
    member: Mutex<Option<Arc<Member>>>,
    caller: Arc<Caller>,
    rings: Turn,
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
            channel: Mutex::default(),
            caller: Arc::default(),
            rings: Turn::default(),
        })
    }

    /// Its name, in messages about it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
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

    /// Virtqueues.
    #[must_use]
    pub const fn queues(&self) -> u16 {
        self.config.queues
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
    pub(crate) fn set_write_cache(&self, on: bool) {
        self.chosen_cache.store(on, Ordering::Relaxed);
        self.write_cache.store(on, Ordering::Relaxed);
    }

    /// What the driver chose last.
    pub(crate) fn chosen_cache(&self) -> bool {
        self.chosen_cache.load(Ordering::Relaxed)
    }

    /// The mode for a driver that has negotiated features: if it cannot flush, writes must be
    /// durable when they complete (virtio 1.2, 5.2.5.2), unless it chooses otherwise.
    pub(crate) fn reset_write_cache(&self, negotiated: u64) {
        let flushes = negotiated & features::BLK_FLUSH != 0;
        self.write_cache.store(self.chosen_cache() && flushes, Ordering::Relaxed);
    }

    /// The writeback field for a driver that has negotiated features.
    fn writeback(&self, negotiated: u64) -> bool {
        let mask = features::BLK_FLUSH | features::BLK_CONFIG_WCE;
        match negotiated & mask {
            // It begins with 0 (virtio 1.2, 5.2.5.2).
            features::BLK_CONFIG_WCE => self.write_cache(),
            _ => self.chosen_cache(),
        }
    }

    /// The virtio features that are offered.
    #[must_use]
    pub fn features(&self) -> u64 {
        let geometry = self.config.engine.geometry();
        let mut offered = features::ALWAYS;
        if self.read_only() {
            offered |= features::BLK_RO;
        } else if geometry.discard {
            offered |= features::BLK_DISCARD | features::BLK_WRITE_ZEROES;
        }
        offered
    }

    /// `size` bytes of the configuration space from `offset` on, for a driver that has `negotiated`
    /// these features: zeroes behind its last field, as
    /// front ends ask for fields of features that are not offered.
    #[must_use]
    pub fn config(&self, offset: u32, size: u32, negotiated: u64) -> Vec<u8> {
        let mut space = [0; CONFIG_MAX as usize];
        space[..CONFIG_SIZE].copy_from_slice(&self.fields());
        space[WRITEBACK as usize] = self.writeback(negotiated).into();
        space.into_iter().skip(offset as usize).take(size as usize).collect()
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
        let _ = self.notify();
        Ok(capacity)
    }

    /// Tells the front end that the configuration space has changed; whether there was one that
    /// listens.
    ///
    /// # Errors
    /// The front end does not read its channel, or has closed it.
    pub fn notify(&self) -> Result<bool, Errno> {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let Some(channel) = channel else {
            return Ok(false);
        };
        // Never waits: a front end that does not read must not stop whoever resizes. The message
        // fits into an empty buffer whole.
        let message = Header::request(CONFIG_CHANGE).to_bytes();
        send(&channel.0, &message, None, SendFlags::DONTWAIT).map(|()| true)
    }

    /// Sends what there is to tell the front end over `channel`, as long as that lives.
    pub(crate) fn set_channel(&self, channel: &Arc<Channel>) {
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(channel);
    }

    /// Waits until no earlier session has rings, and keeps later ones from having any.
    pub(crate) fn take_turn(self: &Arc<Self>) -> DeviceTurn {
        self.rings.take();
        DeviceTurn(Arc::clone(self))
    }
}

/// A socket on which a front end takes requests.
#[derive(Debug)]
pub(crate) struct Channel(pub(crate) OwnedFd);

/// Lets sessions have rings one after the other: while an old one drains, a new one negotiates.
#[derive(Debug, Default)]
struct Turn {
    taken: Mutex<bool>,
    freed: Condvar,
}

impl Turn {
    fn take(&self) {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.freed.wait_while(taken, |taken| *taken);
        *wait.unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn give(&self) {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.freed.notify_one();
    }
}

/// The right to have rings, until it is dropped.
#[derive(Debug)]
pub(crate) struct DeviceTurn(Arc<Device>);

impl Drop for DeviceTurn {
    fn drop(&mut self) {
        self.0.rings.give();
    }
}
