//! A virtio network device, as its front end sees it: features and configuration space.
//!
//! Its virtqueues come in pairs: 2 i receives, 2 i + 1 transmits (virtio 1.2, 5.1.2). The control queue is the
//! front end's own, as QEMU has it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtvirtio_frames::features;
use rtvirtio_frames::header::{BYTES, Header, announcement};
use rtvirtio_frames::limit::{Limit, Rate};
use rtvirtio_frames::promise::Reservation;
use rtvirtio_units::Bytes;
use rtvirtio_vhost::protocol::CONFIG_MAX;
use rtvirtio_vhost::protocol::features as common;
use rtvirtio_vhost::{Backend, Link as FrontEnd};
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::ring::{Inflight, Positions};

use crate::call::Caller;
use crate::socket::Socket;
use crate::switch::Switch;
use crate::tap::Tap;

/// VIRTIO_NET_S_LINK_UP
const LINK_UP: u16 = 1;

/// What a device is made of.
pub struct NicConfig {
    /// Its name, in messages about it.
    pub name: String,
    /// Its address, for front ends that ask.
    pub mac: [u8; 6],
    /// The longest packet, bytes of IP.
    pub mtu: u16,
    /// The most that goes to the guest and comes from it, to begin with.
    pub limits: [Option<Rate>; 2],
    /// What of their IOThreads' time is promised to its receive queues, and to its transmit queues.
    pub promises: [Option<Reservation>; 2],
    /// Where its frames go and come from.
    pub(crate) link: Link,
    /// Guest memory that a front end may share, in all its regions.
    pub memory: Bytes,
    /// Where its packed rings are, for whoever serves it after a crash.
    pub positions: Option<Arc<Positions>>,
}

/// What a device is attached to.
pub(crate) enum Link {
    /// A TAP of the host: a queue of it for each pair, at least one.
    Taps(Vec<Arc<Tap>>),
    /// A socket that carries frames.
    Socket(Arc<Socket>),
    /// A port of a switch.
    Port {
        /// The switch.
        switch: Arc<Switch>,
        /// Which of its ports.
        number: u16,
        /// Pairs of queues.
        pairs: u16,
    },
}

/// What holds for the queues of a direction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Terms {
    /// On what all of them together let through.
    pub(crate) limit: Option<Arc<Limit>>,
    /// What is promised to each.
    pub(crate) promise: Option<Reservation>,
}

impl Terms {
    /// Of a limit that nothing has passed.
    pub(crate) fn new(rate: Option<Rate>, promise: Option<Reservation>) -> Self {
        Self { limit: rate.map(|rate| Arc::new(Limit::new(rate))), promise }
    }
}

/// A device.
pub struct Nic {
    config: NicConfig,
    /// Of its receive queues and of its transmit queues. Queues look at them when they start, and are told of changes.
    terms: Mutex<[Terms; 2]>,
    caller: Arc<Caller>,
    front_end: FrontEnd,
    negotiated: AtomicU64,
    /// Of a TAP with several queues.
    receivers: Mutex<Receivers>,
}

/// Pairs of queues, a bit for each.
#[derive(Debug, Default)]
struct Receivers {
    /// Whose receive queue is served.
    served: u64,
    /// Whose queue of the TAP is detached.
    detached: u64,
}

impl std::fmt::Debug for Nic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nic").field("name", &self.config.name).finish_non_exhaustive()
    }
}

impl Nic {
    /// A device.
    #[must_use]
    pub fn new(config: NicConfig) -> Self {
        let (caller, front_end) = (Arc::default(), FrontEnd::default());
        let ([rx, tx], [to, from]) = (config.limits, config.promises);
        let terms = Mutex::new([Terms::new(rx, to), Terms::new(tx, from)]);
        let (negotiated, receivers) = (AtomicU64::new(0), Mutex::default());
        Self { config, terms, caller, front_end, negotiated, receivers }
    }

    /// What calls its drivers aside.
    #[must_use]
    pub const fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }

    /// What it is attached to.
    pub(crate) const fn attached(&self) -> &Link {
        &self.config.link
    }

    fn taps(&self) -> &[Arc<Tap>] {
        match &self.config.link {
            Link::Taps(taps) => taps,
            Link::Socket(_) | Link::Port { .. } => &[],
        }
    }

    fn all_terms(&self) -> MutexGuard<'_, [Terms; 2]> {
        self.terms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What holds for a virtqueue.
    pub(crate) fn terms(&self, queue: u16) -> Terms {
        self.all_terms()[usize::from(queue % 2)].clone()
    }

    /// What holds for virtqueues that start from now on, and are of this one's direction.
    pub(crate) fn set_terms(&self, queue: u16, terms: Terms) {
        self.all_terms()[usize::from(queue % 2)] = terms;
    }

    /// Its address.
    #[must_use]
    pub const fn mac(&self) -> [u8; 6] {
        self.config.mac
    }

    /// The longest packet, bytes of IP.
    #[must_use]
    pub const fn mtu(&self) -> u16 {
        self.config.mtu
    }

    /// What its driver has negotiated.
    pub(crate) fn driver_features(&self) -> u64 {
        self.negotiated.load(Relaxed)
    }

    const fn pairs(&self) -> u16 {
        match &self.config.link {
            Link::Taps(taps) => taps.len() as u16,
            Link::Socket(_) => 1,
            Link::Port { pairs, .. } => *pairs,
        }
    }
}

impl Backend for Nic {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn queues(&self) -> u16 {
        2 * self.pairs()
    }

    fn queue_num(&self) -> u64 {
        self.pairs().into()
    }

    fn features(&self) -> u64 {
        let several = if self.pairs() > 1 { features::MQ } else { 0 };
        let declined = match self.config.link {
            Link::Taps(_) | Link::Port { .. } => 0,
            Link::Socket(_) => features::OFFLOADS,
        };
        // A driver that knows the order keeps no list of descriptors that are free, and has them one behind the other.
        (common::ALWAYS | common::IN_ORDER | features::ALWAYS | several) & !declined
    }

    /// The header of a legacy driver without mergeable buffers has 10 bytes (virtio 1.2, 5.1.6.1), and all headers here have
    /// 12. Its frames would be taken to begin two bytes too late.
    fn can_serve(&self, negotiated: u64) -> bool {
        negotiated & (common::VERSION_1 | features::MRG_RXBUF) != 0
    }

    /// No in-flight region: frames that a dead server had taken are lost, as on a wire.
    fn protocol_features(&self) -> u64 {
        (common::PROTOCOL_OFFERED & !common::PROTOCOL_INFLIGHT_SHMFD)
            | common::PROTOCOL_RARP
            | common::PROTOCOL_NET_MTU
    }

    fn announce(&self, mac: [u8; 6]) -> bool {
        // A switch knows where its devices are, and what is behind a socket has no other.
        let Some(tap) = self.taps().first() else { return true };
        let (mut header, mut frame) = (Header::COMPLETE.0, announcement(mac));
        let parts = [
            Segment::new(header.as_mut_ptr(), BYTES),
            Segment::new(frame.as_mut_ptr(), frame.len()),
        ];
        // A TAP that takes it not is down: nobody would hear it.
        // SAFETY: both are this function's own.
        let _ = unsafe { tap.send(&parts) };
        true
    }

    fn set_mtu(&self, mtu: u64) -> bool {
        mtu <= self.config.mtu.into()
    }

    fn positions(&self) -> Option<&Arc<Positions>> {
        self.config.positions.as_ref()
    }

    fn memory_limit(&self) -> Bytes {
        self.config.memory
    }

    /// `struct virtio_net_config` (virtio 1.2, 5.1.4), little endian.
    fn config(&self, offset: u32, size: u32, _negotiated: u64) -> Vec<u8> {
        let mut space = [0; CONFIG_MAX as usize];
        space[..6].copy_from_slice(&self.config.mac);
        space[6..8].copy_from_slice(&LINK_UP.to_le_bytes());
        space[8..10].copy_from_slice(&self.pairs().to_le_bytes());
        space[10..12].copy_from_slice(&self.config.mtu.to_le_bytes());
        space.into_iter().skip(offset as usize).take(size as usize).collect()
    }

    fn write_config(&self, _: u32, _: &[u8], _: u64, _: Option<&Inflight>) -> bool {
        false
    }

    /// The host hands over what this driver can take from now on.
    fn negotiated(&self, negotiated: u64) {
        self.negotiated.store(negotiated, Relaxed);
        for tap in self.taps() {
            // A TAP that keeps its offloads has frames that are dropped, and counted, one by one.
            let _ = tap.set_offloads(negotiated);
        }
    }

    /// The kernel spreads flows over all queues of a TAP that are attached: frames for one that nobody serves would be lost. As
    /// long as none is served all are attached, as at the start.
    fn serves(&self, index: u16, is_served: bool) {
        let taps = self.taps();
        if taps.len() < 2 || index % 2 == 1 {
            return;
        }
        let mut receivers = self.receivers.lock().unwrap_or_else(PoisonError::into_inner);
        let bit = 1 << (index / 2);
        receivers.served = if is_served { receivers.served | bit } else { receivers.served & !bit };
        for (pair, tap) in taps.iter().enumerate() {
            let bit = 1 << pair;
            let is_attached = receivers.served == 0 || receivers.served & bit != 0;
            let was_attached = receivers.detached & bit == 0;
            // What the kernel refuses stays as it is: that costs frames, as before.
            if is_attached != was_attached && tap.set_attached(is_attached).is_ok() {
                receivers.detached ^= bit;
            }
        }
    }

    fn take_over(&self, _: &Inflight) {}

    fn link(&self) -> &FrontEnd {
        &self.front_end
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_vhost::protocol::{InflightArea, Message, VringFd, VringState};
    use rtvirtio_vhost::session::Refused;
    use rtvirtio_vhost::session::testing::{Front, address, eventfd, memory};

    use super::*;

    fn nic() -> Nic {
        nic_on(Link::Taps(Vec::new()))
    }

    fn nic_on(link: Link) -> Nic {
        Nic::new(NicConfig {
            name: "nic".to_owned(),
            mac: [2, 0, 0, 0, 0, 7],
            mtu: 9000,
            limits: [None; 2],
            promises: [None; 2],
            link,
            memory: Bytes::new(1 << 20),
            positions: None,
        })
    }

    #[test]
    fn configuration_space_is_that_of_the_specification() {
        let all = nic().config(0, 12, 0);
        // MAC, status, pairs, MTU.
        assert_eq!(all, [2, 0, 0, 0, 0, 7, 1, 0, 0, 0, 0x28, 0x23]);
        assert_eq!(nic().config(10, 4, 0), [0x28, 0x23, 0, 0]);
        assert_eq!(nic().config(CONFIG_MAX - 1, 1, 0), [0]);
        assert!(!nic().write_config(0, &[1], u64::MAX, None));
    }

    #[test]
    fn what_is_of_networks_is_offered_and_no_region_of_requests_in_flight() {
        let offered = nic().protocol_features();
        assert_ne!(offered & common::PROTOCOL_RARP, 0);
        assert_ne!(offered & common::PROTOCOL_NET_MTU, 0);
        assert_eq!(offered & common::PROTOCOL_INFLIGHT_SHMFD, 0);
        assert_ne!(nic().features() & common::VERSION_1, 0);
        assert_ne!(nic().features() & common::IN_ORDER, 0);
        assert!(nic().set_mtu(1500) && nic().set_mtu(9000) && !nic().set_mtu(9001));
    }

    #[test]
    fn driver_whose_headers_have_ten_bytes_is_refused_with_the_remedy() {
        for (negotiated, is_served) in [
            (0, false),
            (features::MAC | features::STATUS, false),
            (features::MRG_RXBUF, true),
            (common::VERSION_1, true),
        ] {
            let link = Link::Port { switch: Switch::new(1e3), number: 0, pairs: 1 };
            let mut front = Front::ready(Arc::new(nic_on(link)));
            front.send(Message::SetFeatures(negotiated)).unwrap();
            front.send(Message::SetVringNum(VringState { index: 0, num: 16 })).unwrap();
            front.send(Message::SetVringAddr(address(0))).unwrap();
            let kick = Message::SetVringKick(VringFd { index: 0, fd: true });
            let refused = front.with_fd(kick, eventfd()).err();
            assert_eq!(refused, (!is_served).then_some(Refused::Legacy(0)), "{negotiated:#x}");
            assert_eq!(front.host.log().len(), usize::from(is_served));
            if let Some(refused) = refused {
                assert!(refused.to_string().contains("disable-legacy=on"), "{refused}");
            }
        }
    }

    /// An area would say of chains that they are in flight, which nobody has.
    #[test]
    fn areas_of_requests_in_flight_are_refused() {
        let mut front = Front::ready(Arc::new(nic()));
        let area =
            InflightArea { size: 0x1000, offset: 0, queues: 2, queue_size: 16, padded: true };
        assert_eq!(front.send(Message::GetInflightFd(area)).err(), Some(Refused::NoInflight));
        let set = front.with_fd(Message::SetInflightFd(area), memory(0x1_0000));
        assert_eq!(set.err(), Some(Refused::NoInflight));
    }
}
