//! A switch between network devices: frames go from one guest's memory to another's by one copy.
//!
//! The IOThread of a transmit queue says where a frame goes and posts it to the receive queue's [`Inbox`]. The
//! receive queue's IOThread copies it, since only that one writes the receiver's used ring, and releases it.
//! Until then the sender's chain is in flight: the sender's queue does not stop, and its memory stays
//! mapped. No frame takes a lock, an allocation or a system call on this way.
//!
//! What decides where a frame goes lies in its [`Head`], which is read once and is delivered as it was read. The
//! rest is copied straight from the sender's memory, where the sender may still change it.
//!
//! A frame that is posted is released exactly once, by whoever has its [`Delivery`]. An inbox that closes, since its
//! queue stops or breaks, is emptied by whoever comes last: the queue that has closed it, or the sender that
//! finds it closed after having posted.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, fence};

use crossbeam_queue::ArrayQueue;
use rtvirtio_frames::ethernet::Head;
use rtvirtio_frames::forwarding::{Destination, Forwarding, Origin, Port};
use rtvirtio_frames::header::Header;
use rtvirtio_virtq::ring::{Chain, MAX_SIZE};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// Frames that wait for a receive queue: as many as a turn of four senders.
const INBOX_FRAMES: usize = 256;

/// Wakes the IOThread of a queue that waits for somebody else's queue, and costs nothing while it does not
/// wait.
#[derive(Debug)]
struct Wakeup {
    fd: OwnedFd,
    is_awaited: AtomicBool,
}

impl Wakeup {
    fn new() -> rustix::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, is_awaited: AtomicBool::new(false) })
    }

    /// Something is there to be found. The fence is that of [`Self::wait`]: one of the two sides sees what the
    /// other has done before it.
    fn wake(&self) {
        fence(SeqCst);
        if self.is_awaited.load(Relaxed) && self.is_awaited.swap(false, Relaxed) {
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// From now on whoever leaves something wakes; what is there already is to be looked for after this.
    fn wait(&self) {
        self.is_awaited.store(true, Relaxed);
        fence(SeqCst);
    }

    fn stop_waiting(&self) {
        self.is_awaited.store(false, Relaxed);
    }

    /// It has woken.
    fn answer(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

/// A frame on its way.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    /// What its driver leaves to the device, checked.
    pub(crate) header: Header,
    /// Its beginning, without the tag that was taken out.
    pub(crate) head: Head,
    /// Where it comes from.
    pub(crate) origin: Origin,
    /// The chain that it lies in: what follows header and head in the guest's memory is what is readable.
    pub(crate) chain: Chain,
    /// Bytes, without the virtio header.
    pub(crate) length: usize,
    /// When it was posted, ns of [`crate::clock::now`].
    pub(crate) posted: u64,
}

/// A place for a frame of one transmit queue.
#[derive(Debug, Default)]
struct Slot {
    frame: UnsafeCell<Frame>,
    /// Deliveries that have not been released. While there is none the frame is its queue's own.
    deliveries: AtomicU32,
}

// SAFETY: the frame is written by its transmit queue while `deliveries` is 0, and read by those who have a delivery
// of it, which is what `deliveries` counts.
unsafe impl Sync for Slot {}

/// Frames of a transmit queue that are on their way.
#[derive(Debug)]
struct Outbox {
    /// In the order of its ring, round and round.
    slots: Box<[Slot]>,
    wakeup: Wakeup,
    is_claimed: AtomicBool,
}

/// Frames for a receive queue.
#[derive(Debug)]
struct Inbox {
    deliveries: ArrayQueue<Delivery>,
    /// Whether its queue is served.
    is_open: AtomicBool,
    /// Whether its driver has let frames wait for too long: until it has buffers none are posted.
    is_starved: AtomicBool,
    wakeup: Wakeup,
    is_claimed: AtomicBool,
}

/// A frame to be delivered, and then released: it names a slot.
#[derive(Debug)]
pub(crate) struct Delivery {
    port: u16,
    pair: u16,
    slot: u16,
}

/// A port's queues: an inbox and an outbox for each pair.
#[derive(Debug)]
struct Queues(Box<[(Inbox, Outbox)]>);

/// A switch and its ports, which stay as they are.
#[derive(Debug)]
pub(crate) struct Switch {
    forwarding: Forwarding,
    ports: Box<[Queues]>,
    /// Frames per second to more than one port, from each transmit queue.
    max_broadcast: f64,
}

impl Switch {
    /// A switch with these ports, each with so many pairs of queues.
    ///
    /// # Errors
    /// No eventfd.
    pub(crate) fn new(
        ports: Vec<(Port, u16)>,
        max_broadcast: f64,
    ) -> rustix::io::Result<Arc<Self>> {
        let pair = |_| -> rustix::io::Result<_> {
            let inbox = Inbox {
                deliveries: ArrayQueue::new(INBOX_FRAMES),
                is_open: AtomicBool::new(false),
                is_starved: AtomicBool::new(false),
                wakeup: Wakeup::new()?,
                is_claimed: AtomicBool::new(false),
            };
            let outbox = Outbox {
                slots: (0..MAX_SIZE).map(|_| Slot::default()).collect(),
                wakeup: Wakeup::new()?,
                is_claimed: AtomicBool::new(false),
            };
            Ok((inbox, outbox))
        };
        let queues = |pairs| (0..pairs).map(pair).collect::<Result<_, _>>().map(Queues);
        Ok(Arc::new(Self {
            ports: ports.iter().map(|&(_, pairs)| queues(pairs)).collect::<Result<_, _>>()?,
            forwarding: Forwarding::new(ports.into_iter().map(|(port, _)| port).collect()),
            max_broadcast,
        }))
    }

    pub(crate) const fn forwarding(&self) -> &Forwarding {
        &self.forwarding
    }

    pub(crate) const fn max_broadcast(&self) -> f64 {
        self.max_broadcast
    }

    fn pair(&self, port: u16, pair: u16) -> Option<&(Inbox, Outbox)> {
        self.ports.get(usize::from(port))?.0.get(usize::from(pair))
    }

    fn slot(&self, delivery: &Delivery) -> Option<&Slot> {
        let (_, outbox) = self.pair(delivery.port, delivery.pair)?;
        outbox.slots.get(usize::from(delivery.slot))
    }

    /// The inbox at a port for frames of one flow, of those that are open: a flow has the same one as long as no
    /// queue comes or goes.
    fn inbox(&self, port: u16, flow: impl FnOnce() -> u32) -> Option<&Inbox> {
        let pairs = &self.ports.get(usize::from(port))?.0;
        if let [(inbox, _)] = &pairs[..] {
            return Some(inbox);
        }
        let open =
            || pairs.iter().map(|(inbox, _)| inbox).filter(|inbox| inbox.is_open.load(Relaxed));
        let count = open().count();
        open().nth(flow() as usize % count.max(1))
    }

    /// Posts a frame; false: its receiver is not there, or has too many.
    fn post(&self, inbox: &Inbox, delivery: Delivery) -> bool {
        let posts = inbox.is_open.load(Relaxed) && !inbox.is_starved.load(Relaxed);
        if !posts {
            self.release(delivery);
            return false;
        }
        if let Err(delivery) = inbox.deliveries.push(delivery) {
            self.release(delivery);
            return false;
        }
        inbox.wakeup.wake();
        // Behind the fence of `wake`: either this sees that the inbox has closed, or whoever closes it sees the
        // delivery.
        if !inbox.is_open.load(Relaxed) {
            self.empty(inbox);
        }
        true
    }

    fn empty(&self, inbox: &Inbox) {
        while let Some(delivery) = inbox.deliveries.pop() {
            self.release(delivery);
        }
    }

    /// A delivery is done with.
    pub(crate) fn release(&self, delivery: Delivery) {
        let Some((_, outbox)) = self.pair(delivery.port, delivery.pair) else { return };
        let Some(slot) = outbox.slots.get(usize::from(delivery.slot)) else { return };
        // What was read of the frame was read before its queue sees this.
        if slot.deliveries.fetch_sub(1, AcqRel) == 1 {
            outbox.wakeup.wake();
        }
    }
}

/// The transmit queue's side of a port's pair.
#[derive(Debug)]
pub(crate) struct PortSender {
    switch: Arc<Switch>,
    port: u16,
    pair: u16,
    /// The oldest frame on its way, and how many there are from there on.
    first: usize,
    count: usize,
}

impl PortSender {
    /// `None`: there is no such pair, or somebody has it.
    pub(crate) fn claim(switch: &Arc<Switch>, port: u16, pair: u16) -> Option<Self> {
        let (_, outbox) = switch.pair(port, pair)?;
        let is_free = !outbox.is_claimed.swap(true, AcqRel);
        is_free.then(|| Self { switch: Arc::clone(switch), port, pair, first: 0, count: 0 })
    }

    pub(crate) const fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    fn outbox(&self) -> Option<&Outbox> {
        self.switch.pair(self.port, self.pair).map(|(_, outbox)| outbox)
    }

    fn place(&self, number: usize) -> usize {
        (self.first + number) % usize::from(MAX_SIZE)
    }

    /// Where the next frame goes; `None`: as many are on their way as a ring has entries.
    pub(crate) fn next(&mut self) -> Option<&mut Frame> {
        if self.count == usize::from(MAX_SIZE) {
            return None;
        }
        let place = self.place(self.count);
        let slot = self.outbox()?.slots.get(place)?;
        // SAFETY: the slot is behind those on their way, so nobody has a delivery of it; this is the one sender of the
        // outbox, and is borrowed for as long as the frame is.
        Some(unsafe { &mut *slot.frame.get() })
    }

    /// The frame of [`Self::next`] is on its way: to the ports of `destination`, or nowhere. How many have taken
    /// it, and how many have not. What nobody has taken has a length of 0 from now on.
    pub(crate) fn send(&mut self, destination: Option<Destination>) -> (u32, u32) {
        let place = self.place(self.count);
        self.count += 1;
        let Some(slot) = self.outbox().and_then(|outbox| outbox.slots.get(place)) else {
            return (0, 0);
        };
        // SAFETY: as in `next`; from here on it is only read.
        let frame = unsafe { &*slot.frame.get() };
        let switch = &*self.switch;
        let (mut taken, mut refused) = (0, 0);
        let mut post = |port: u16| {
            // Its own sender does not see it as ended before all have been posted.
            slot.deliveries.fetch_add(1, Relaxed);
            let delivery = Delivery { port: self.port, pair: self.pair, slot: place as u16 };
            let posted = match switch.inbox(port, || frame.head.flow()) {
                Some(inbox) => switch.post(inbox, delivery),
                None => {
                    switch.release(delivery);
                    false
                }
            };
            *(if posted { &mut taken } else { &mut refused }) += 1;
        };
        match destination {
            Some(Destination::Port(port)) => post(port),
            Some(Destination::Group) => {
                switch.forwarding.flooded(frame.origin, false).for_each(post);
            }
            Some(Destination::Unknown) => {
                switch.forwarding.flooded(frame.origin, true).for_each(post);
            }
            None => {}
        }
        if taken == 0 {
            // SAFETY: nobody has a delivery of it.
            unsafe { (*slot.frame.get()).length = 0 };
        }
        (taken, refused)
    }

    /// Whether the oldest frame on its way has arrived.
    pub(crate) fn has_ended(&self) -> bool {
        let slot = self.outbox().and_then(|outbox| outbox.slots.get(self.first));
        self.count > 0 && slot.is_some_and(|slot| slot.deliveries.load(Acquire) == 0)
    }

    /// The oldest frame, if it has arrived: in the order of the ring, which positions of packed rings rest
    /// on.
    pub(crate) fn take_ended(&mut self) -> Option<&Frame> {
        if !self.has_ended() {
            return None;
        }
        let place = self.first;
        self.first = self.place(1);
        self.count -= 1;
        let slot = self.outbox()?.slots.get(place)?;
        // SAFETY: nobody has a delivery of it, and it is not the next one's place before this borrow ends.
        Some(unsafe { &*slot.frame.get() })
    }

    /// Frames on their way.
    pub(crate) const fn in_flight(&self) -> usize {
        self.count
    }

    pub(crate) fn wait(&self) {
        if let Some(outbox) = self.outbox() {
            outbox.wakeup.wait();
        }
    }

    pub(crate) fn stop_waiting(&self) {
        if let Some(outbox) = self.outbox() {
            outbox.wakeup.stop_waiting();
        }
    }

    pub(crate) fn answer(&self) {
        if let Some(outbox) = self.outbox() {
            outbox.wakeup.answer();
        }
    }

    /// What becomes readable when a frame has arrived that was waited for.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.outbox().map(|outbox| outbox.wakeup.fd.as_fd())
    }
}

impl Drop for PortSender {
    fn drop(&mut self) {
        debug_assert_eq!(self.count, 0, "a queue stops when nothing is in flight");
        if let Some(outbox) = self.outbox() {
            outbox.is_claimed.store(false, SeqCst);
        }
    }
}

/// The receive queue's side of a port's pair.
#[derive(Debug)]
pub(crate) struct PortReceiver {
    switch: Arc<Switch>,
    port: u16,
    pair: u16,
}

impl PortReceiver {
    /// `None`: there is no such pair, or somebody has it.
    pub(crate) fn claim(switch: &Arc<Switch>, port: u16, pair: u16) -> Option<Self> {
        let (inbox, _) = switch.pair(port, pair)?;
        let is_free = !inbox.is_claimed.swap(true, AcqRel);
        is_free.then(|| Self { switch: Arc::clone(switch), port, pair })
    }

    pub(crate) const fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    fn inbox(&self) -> Option<&Inbox> {
        self.switch.pair(self.port, self.pair).map(|(inbox, _)| inbox)
    }

    /// From now on frames are taken, or not: then all that wait are released.
    pub(crate) fn set_open(&self, is_open: bool) {
        let Some(inbox) = self.inbox() else { return };
        inbox.is_open.store(is_open, Relaxed);
        inbox.is_starved.store(false, Relaxed);
        fence(SeqCst);
        if !is_open {
            self.switch.empty(inbox);
        }
    }

    /// Whether no frames are posted until its driver has buffers.
    pub(crate) fn is_starved(&self) -> bool {
        self.inbox().is_some_and(|inbox| inbox.is_starved.load(Relaxed))
    }

    pub(crate) fn set_starved(&self, is_starved: bool) {
        if let Some(inbox) = self.inbox() {
            inbox.is_starved.store(is_starved, Relaxed);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inbox().is_none_or(|inbox| inbox.deliveries.is_empty())
    }

    /// The next frame.
    pub(crate) fn take(&self) -> Option<Delivery> {
        self.inbox()?.deliveries.pop()
    }

    /// The frame of a delivery.
    pub(crate) fn frame<'a>(&'a self, delivery: &'a Delivery) -> Option<&'a Frame> {
        let slot = self.switch.slot(delivery)?;
        // SAFETY: whoever has a delivery may read until it is released, which ends this borrow.
        Some(unsafe { &*slot.frame.get() })
    }

    pub(crate) fn release(&self, delivery: Delivery) {
        self.switch.release(delivery);
    }

    pub(crate) fn wait(&self) {
        if let Some(inbox) = self.inbox() {
            inbox.wakeup.wait();
        }
    }

    pub(crate) fn stop_waiting(&self) {
        if let Some(inbox) = self.inbox() {
            inbox.wakeup.stop_waiting();
        }
    }

    pub(crate) fn answer(&self) {
        if let Some(inbox) = self.inbox() {
            inbox.wakeup.answer();
        }
    }

    /// What becomes readable when a frame is posted that was waited for.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inbox().map(|inbox| inbox.wakeup.fd.as_fd())
    }
}

impl Drop for PortReceiver {
    fn drop(&mut self) {
        self.set_open(false);
        if let Some(inbox) = self.inbox() {
            inbox.is_claimed.store(false, SeqCst);
        }
    }
}
