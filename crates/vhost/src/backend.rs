//! What a session has to know of the device that it is with.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use rtvirtio_units::Bytes;
use rtvirtio_virtq::ring::{Inflight, Positions};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::protocol::{Header, features, send};

/// CONFIG_CHANGE_MSG, the one request that a back end sends.
const CONFIG_CHANGE: u32 = 2;

/// A virtio device, as its front ends see it. It outlives sessions: what one of them negotiates is
/// the session's, what concerns the device itself is here.
pub trait Backend: Send + Sync {
    /// Its name, in messages about it.
    fn name(&self) -> &str;

    /// Its virtqueues, at least 1.
    fn queues(&self) -> u16;

    /// The virtio features that are offered.
    fn features(&self) -> u64;

    /// What GET_QUEUE_NUM answers: virtqueues, or of a network device pairs of them.
    fn queue_num(&self) -> u64 {
        self.queues().into()
    }

    /// Whether a driver that has negotiated these features can be served. A device may refuse a legacy driver (virtio 1.2, 6.2).
    fn can_serve(&self, _negotiated: u64) -> bool {
        true
    }

    /// The protocol features that are offered.
    fn protocol_features(&self) -> u64 {
        features::PROTOCOL_OFFERED
    }

    /// Announces a guest that has migrated to here (SEND_RARP). False: the device has no network.
    fn announce(&self, _mac: [u8; 6]) -> bool {
        false
    }

    /// The front end says which MTU its guest was told (NET_SET_MTU). False: the device cannot have it.
    fn set_mtu(&self, _mtu: u64) -> bool {
        false
    }

    /// Where its packed rings are, kept for a successor of this process. Only of a device that uses
    /// buffers in the order in which they were made available and has no in-flight region.
    fn positions(&self) -> Option<&Arc<Positions>> {
        None
    }

    /// The most guest memory that a front end may share, in all its regions.
    fn memory_limit(&self) -> Bytes;

    /// `size` bytes of the configuration space from `offset` on, for a driver that has `negotiated`
    /// these features. Zeroes stand behind its last field.
    fn config(&self, offset: u32, size: u32, negotiated: u64) -> Vec<u8>;

    /// Takes what a driver wrote into the configuration space. False: it may not be written there,
    /// or not with this value. What the next server has to know of it is noted in `inflight`.
    fn write_config(
        &self,
        offset: u32,
        data: &[u8],
        negotiated: u64,
        inflight: Option<&Inflight>,
    ) -> bool;

    /// A driver has negotiated features, or the device was reset, while no virtqueue runs.
    fn negotiated(&self, features: u64);

    /// A virtqueue is served from now on, or is not: it runs and is enabled.
    fn serves(&self, _index: u16, _is_served: bool) {}

    /// A front end has handed over the in-flight area of an earlier server, or a new one: the
    /// device learns what that server had been told.
    fn take_over(&self, inflight: &Inflight);

    /// The way to its front end.
    fn link(&self) -> &Link;
}

/// The way from a device to whichever front end it has, for one session after the other.
#[derive(Debug, Default)]
pub struct Link {
    channel: Mutex<Weak<Channel>>,
    rings: Arc<Turn>,
}

impl Link {
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
    pub(crate) fn take_turn(&self) -> RingsTurn {
        self.rings.take();
        RingsTurn(Arc::clone(&self.rings))
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
pub(crate) struct RingsTurn(Arc<Turn>);

impl Drop for RingsTurn {
    fn drop(&mut self) {
        self.0.give();
    }
}
