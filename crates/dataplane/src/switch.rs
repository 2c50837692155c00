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
//! Frames of a turn that are for one receiver are posted together, as a [`Batch`]. A locked instruction waits until all
//! that was stored before it has reached memory, and what was stored is in the caches of the guests' CPUs: one for each frame
//! had taken 40 % of an IOThread's time. So a frame for one receiver is posted and released by plain stores.
//!
//! A frame that is posted is released exactly once, by whoever has its [`Delivery`]. An inbox that closes, since its
//! queue stops or breaks, is emptied by whoever comes last: the queue that has closed it, or the sender that
//! finds it closed after having posted.
//!
//! Ports come and go while frames flow. Which ones there are is a [`View`] that never changes: a change makes
//! another one, which transmit queues find at the beginning of a turn. The queues of a port that has gone stay where they are
//! for the next port of that number, since deliveries may name them; what that one needs besides is made behind them. A frame
//! was for an earlier port of its number if its sender's view is older than the port: it is released unseen.

use std::cell::UnsafeCell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crossbeam_queue::ArrayQueue;
use rtvirtio_frames::ethernet::Head;
use rtvirtio_frames::forwarding::{Destination, Egress, Forwarding, MAX_PORTS, Origin, Port};
use rtvirtio_frames::header::Header;
use rtvirtio_frames::limit::{Limit, Rate};
use rtvirtio_spec::serve::MAX_PAIRS;
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::ring::Chain;
use rustix::fd::{AsFd, BorrowedFd};

mod wakeup;

use wakeup::{ToWake, Wakeup};

/// Batches that wait for a receive queue.
const INBOX_BATCHES: usize = 256;
/// Frames of a transmit queue that are on their way: more than a turn has, and few enough for a CPU's cache.
const OUTBOX_FRAMES: usize = 256;
/// How far ahead of its rate a sender of broadcasts may be, ns: what a guest sends that starts.
const BROADCAST_BURST_NS: u64 = 100_000_000;

/// A frame on its way. With its slot's counter, what comes before `head` lies in one cache line, which is all that is
/// looked at when it goes back to its ring.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Frame {
    /// When it was posted, ns of [`crate::clock::now`].
    pub(crate) posted: u64,
    /// Bytes, without the virtio header.
    pub(crate) length: usize,
    /// What follows header and head in the guest's memory, if that is in one piece.
    pub(crate) rest: Segment,
    /// What its driver leaves to the device, checked.
    pub(crate) header: Header,
    /// Where it comes from.
    pub(crate) origin: Origin,
    /// What its ring wants back.
    pub(crate) id: u16,
    /// Its beginning, without the tag that was taken out.
    pub(crate) head: Head,
    /// The chain that it lies in, unless that is a single descriptor: of what is readable, what follows header and head.
    pub(crate) chain: Chain,
}

impl Frame {
    /// What follows header and head in the guest's memory.
    #[inline]
    pub(crate) fn rest(&self) -> &[Segment] {
        if self.rest.is_empty() { &self.chain.readable } else { std::slice::from_ref(&self.rest) }
    }
}

/// A place for a frame of one transmit queue.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Slot {
    /// Deliveries that have not been released. While there is none the frame is its queue's own.
    deliveries: AtomicU32,
    /// The slot of the next frame of its batch.
    next: AtomicU16,
    frame: UnsafeCell<Frame>,
}

// SAFETY: the frame is written by its transmit queue while `deliveries` is 0, and read by those who have a delivery
// of it, which is what `deliveries` counts.
unsafe impl Sync for Slot {}

impl Slot {
    /// A delivery is done with.
    #[inline]
    fn release(&self) {
        // What was read of the frame was read before its queue sees this, by those too that have released it before.
        if self.deliveries.load(Acquire) == 1 {
            // The only one: nobody else writes here.
            self.deliveries.store(0, Release);
        } else {
            self.deliveries.fetch_sub(1, AcqRel);
        }
    }
}

/// Frames of a transmit queue that are on their way.
#[derive(Debug)]
struct Outbox {
    /// In the order of its ring, round and round.
    slots: Box<[Slot]>,
    /// On frames to more than one port. It outlives the queue: a driver that resets its device is to have no other burst.
    broadcast: Arc<Limit>,
    wakeup: Wakeup,
    is_claimed: AtomicBool,
}

/// Frames for a receive queue.
#[derive(Debug)]
struct Inbox {
    batches: ArrayQueue<Batch>,
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

/// Frames of one transmit queue for one receive queue, in their order, each of which is a delivery.
#[derive(Debug)]
struct Batch {
    port: u16,
    pair: u16,
    /// The slot of the first one.
    slot: u16,
    frames: u16,
    /// Of its sender's view.
    version: u64,
}

/// A batch that has yet to be posted.
#[derive(Debug)]
struct Pending {
    /// To this port's inbox of this pair.
    to: (u16, u16),
    batch: Batch,
    /// The slot of the last frame.
    last: u16,
}

/// The queues of one pair.
#[derive(Debug)]
struct Pair {
    inbox: Inbox,
    outbox: Outbox,
}

impl Pair {
    fn new(max_broadcast: f64) -> rustix::io::Result<Self> {
        let rate = Rate { frames: Some(max_broadcast), bits: None, burst: BROADCAST_BURST_NS };
        let inbox = Inbox {
            batches: ArrayQueue::new(INBOX_BATCHES),
            is_open: AtomicBool::new(false),
            is_starved: AtomicBool::new(false),
            wakeup: Wakeup::new()?,
            is_claimed: AtomicBool::new(false),
        };
        let outbox = Outbox {
            slots: (0..OUTBOX_FRAMES).map(|_| Slot::default()).collect(),
            broadcast: Arc::new(Limit::new(rate)),
            wakeup: Wakeup::new()?,
            is_claimed: AtomicBool::new(false),
        };
        Ok(Self { inbox, outbox })
    }

    /// Whether a queue is served that has one of the two.
    fn is_claimed(&self) -> bool {
        self.inbox.is_claimed.load(SeqCst) || self.outbox.is_claimed.load(SeqCst)
    }
}

/// The queues of a port, by pair. Ports of one number have the same, one after the other.
#[derive(Debug, Default)]
struct Queues {
    /// As many, from the first on, as a port of this number had at most.
    pairs: [OnceLock<Arc<Pair>>; MAX_PAIRS as usize],
    /// Of the port that there is; 0: there is none. Who has a frame of a port knows of its pairs: they were there before its
    /// queues started.
    count: AtomicU16,
    /// The version of the first view that has the port.
    since: AtomicU64,
}

impl Queues {
    fn pair(&self, pair: u16) -> Option<&Arc<Pair>> {
        self.pairs.get(usize::from(pair))?.get()
    }

    /// Those of the port that there is.
    fn pairs(&self) -> impl Iterator<Item = &Pair> {
        let count = self.count.load(Relaxed).into();
        self.pairs.iter().take(count).map_while(OnceLock::get).map(Arc::as_ref)
    }

    /// Makes what a port of so many pairs lacks.
    fn grow(&self, pairs: u16, max_broadcast: f64) -> rustix::io::Result<()> {
        for pair in self.pairs.iter().take(pairs.into()).filter(|pair| pair.get().is_none()) {
            let made = Arc::new(Pair::new(max_broadcast)?);
            pair.get_or_init(|| made);
        }
        Ok(())
    }

    /// Whether a port may have them: none has, and none is served any more.
    fn are_free(&self) -> bool {
        let mut made = self.pairs.iter().filter_map(OnceLock::get);
        self.count.load(Relaxed) == 0 && !made.any(|pair| pair.is_claimed())
    }
}

/// Which ports there are.
#[derive(Debug)]
struct View {
    forwarding: Forwarding,
    /// Rises with each change.
    version: u64,
}

/// A switch and its ports.
#[derive(Debug)]
pub(crate) struct Switch {
    /// Held by whoever changes the ports.
    changing: Mutex<()>,
    // Taken for as long as it takes to copy or replace the reference, and by no frame.
    view: Mutex<Arc<View>>,
    /// Of the view.
    version: AtomicU64,
    /// By number.
    ports: Box<[Queues]>,
    /// Frames per second to more than one port, from each transmit queue.
    max_broadcast: f64,
}

/// Why a switch gets no further port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PortError {
    /// It has [`MAX_PORTS`].
    #[error("the network has {MAX_PORTS} ports, and can have no more")]
    TooMany,
    /// There is no eventfd.
    #[error("eventfd")]
    System(#[from] rustix::io::Errno),
}

impl Switch {
    /// A switch without ports.
    pub(crate) fn new(max_broadcast: f64) -> Arc<Self> {
        let view = View { forwarding: Forwarding::new(Vec::new()), version: 0 };
        Arc::new(Self {
            changing: Mutex::default(),
            view: Mutex::new(Arc::new(view)),
            version: AtomicU64::new(0),
            ports: (0..MAX_PORTS).map(|_| Queues::default()).collect(),
            max_broadcast,
        })
    }

    fn current(&self) -> Arc<View> {
        Arc::clone(&self.view.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        // A change is whole or none.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the view, whose changes are the caller's.
    fn change(&self, before: &View, number: u16, port: Option<Port>) {
        let version = before.version.saturating_add(1);
        let forwarding = before.forwarding.with_port(number, port);
        let mut after = Arc::new(View { forwarding, version });
        std::mem::swap(&mut *self.view.lock().unwrap_or_else(PoisonError::into_inner), &mut after);
        self.version.store(version, Release);
    }

    /// Adds a port with so many pairs of queues, at most [`MAX_PAIRS`], whose address no other one has in its VLANs. Its
    /// number.
    ///
    /// # Errors
    /// There are too many, or no eventfd is left.
    pub(crate) fn add_port(&self, port: Port, pairs: u16) -> Result<u16, PortError> {
        let _changing = self.changing();
        let view = self.current();
        let mut ports = (0..).zip(&self.ports);
        let (number, queues) =
            ports.find(|(_, queues)| queues.are_free()).ok_or(PortError::TooMany)?;
        queues.grow(pairs, self.max_broadcast)?;
        queues.count.store(pairs, Relaxed);
        queues.since.store(view.version.saturating_add(1), Relaxed);
        self.change(&view, number, Some(port));
        Ok(number)
    }

    /// Removes a port whose queues have stopped. What was learned of it is forgotten.
    pub(crate) fn remove_port(&self, number: u16) {
        let _changing = self.changing();
        let view = self.current();
        view.forwarding.forget(number);
        self.change(&view, number, None);
        if let Some(queues) = self.queues(number) {
            queues.count.store(0, Relaxed);
        }
    }

    /// How many ports it has.
    pub(crate) fn ports(&self) -> usize {
        let _changing = self.changing();
        self.ports.iter().filter(|queues| queues.count.load(Relaxed) > 0).count()
    }

    fn queues(&self, port: u16) -> Option<&Queues> {
        self.ports.get(usize::from(port))
    }

    fn pair(&self, port: u16, pair: u16) -> Option<&Arc<Pair>> {
        self.queues(port)?.pair(pair)
    }

    fn slot(&self, delivery: &Delivery) -> Option<&Slot> {
        let pair = self.pair(delivery.port, delivery.pair)?;
        pair.outbox.slots.get(usize::from(delivery.slot))
    }

    /// The pair of a port for frames of one flow, of those whose queues are served: a flow has the same one as long as
    /// no queue comes or goes. `None`: frames for it are not taken.
    fn pair_for(&self, port: u16, flow: impl FnOnce() -> u32) -> Option<u16> {
        let is_open = |pair: &Pair| pair.inbox.is_open.load(Relaxed);
        let takes = |pair: &Pair| is_open(pair) && !pair.inbox.is_starved.load(Relaxed);
        let queues = self.queues(port)?;
        if queues.count.load(Relaxed) == 1 {
            return queues.pair(0).is_some_and(|only| takes(only)).then_some(0);
        }
        let open = || (0..).zip(queues.pairs()).filter(|(_, pair)| is_open(pair));
        let count = open().count();
        let (pair, chosen) = open().nth(flow() as usize % count.max(1))?;
        takes(chosen).then_some(pair)
    }

    /// Posts a batch and has it found; the frames of one for which there is no room are released. Frames that were not
    /// posted.
    fn post(&self, (port, pair): (u16, u16), batch: Batch) -> u16 {
        let Some(pair) = self.pair(port, pair) else { return 0 };
        let inbox = &pair.inbox;
        let refused = match inbox.batches.push(batch) {
            Ok(()) => 0,
            Err(batch) => {
                let frames = batch.frames;
                self.release_all(batch);
                frames
            }
        };
        inbox.wakeup.wake();
        // Behind the fence of `wake`: either this sees that the inbox has closed, or whoever closes it sees the batch.
        if !inbox.is_open.load(Relaxed) {
            self.empty(inbox);
        }
        refused
    }

    fn empty(&self, inbox: &Inbox) {
        while let Some(batch) = inbox.batches.pop() {
            self.release_all(batch);
        }
    }

    fn release_all(&self, mut batch: Batch) {
        let port = batch.port;
        while let Some(delivery) = self.next(&mut batch) {
            self.release(delivery);
        }
        self.wake_senders(port);
    }

    /// Takes the first frame off a batch.
    fn next(&self, batch: &mut Batch) -> Option<Delivery> {
        let &mut Batch { port, pair, slot, .. } = batch;
        batch.frames = batch.frames.checked_sub(1)?;
        let delivery = Delivery { port, pair, slot };
        batch.slot = self.slot(&delivery)?.next.load(Relaxed);
        Some(delivery)
    }

    /// Frames of a port have been released.
    fn wake_senders(&self, port: u16) {
        let Some(queues) = self.queues(port) else { return };
        queues.pairs().for_each(|pair| pair.outbox.wakeup.wake());
    }

    /// A delivery is done with, of which its sender is to be told ([`Self::wake_senders`]).
    fn release(&self, delivery: Delivery) {
        if let Some(slot) = self.slot(&delivery) {
            slot.release();
        }
    }
}

/// The transmit queue's side of a port's pair.
#[derive(Debug)]
pub(crate) struct PortSender {
    switch: Arc<Switch>,
    /// Its queue, and the other one of its pair.
    own: Arc<Pair>,
    /// The ports that it knows of.
    view: Arc<View>,
    port: u16,
    pair: u16,
    /// The oldest frame on its way, and how many there are from there on.
    first: usize,
    count: usize,
    /// What was sent in this turn, by receive queue.
    pending: Vec<Pending>,
    /// Frames of this turn that were pending, and for which there was no room.
    lost: u32,
}

impl PortSender {
    /// `None`: there is no such pair, or somebody has it.
    pub(crate) fn claim(switch: &Arc<Switch>, port: u16, pair: u16) -> Option<Self> {
        let own = switch.pair(port, pair)?;
        let is_free = !own.outbox.is_claimed.swap(true, AcqRel);
        is_free.then(|| Self {
            switch: Arc::clone(switch),
            own: Arc::clone(own),
            view: switch.current(),
            port,
            pair,
            first: 0,
            count: 0,
            pending: Vec::new(),
            lost: 0,
        })
    }

    /// The limit on its frames to more than one port.
    pub(crate) fn broadcast(&self) -> Arc<Limit> {
        Arc::clone(&self.own.outbox.broadcast)
    }

    /// A turn begins: ports may have come or gone. Nothing is pending.
    pub(crate) fn look(&mut self) {
        if self.switch.version.load(Acquire) != self.view.version {
            self.view = self.switch.current();
        }
    }

    /// The number of the port, which ports there are, and what [`Self::next`] says.
    pub(crate) fn next_with_ports(&mut self) -> Option<(u16, &Forwarding, &mut Frame)> {
        let place = self.place(self.count);
        if self.is_full() {
            return None;
        }
        let slot = self.own.outbox.slots.get(place)?;
        // SAFETY: the slot is behind those on their way, so nobody has a delivery of it; this is the one sender of the
        // outbox, and is borrowed for as long as the frame is.
        let frame = unsafe { &mut *slot.frame.get() };
        Some((self.port, &self.view.forwarding, frame))
    }

    fn place(&self, number: usize) -> usize {
        (self.first + number) % OUTBOX_FRAMES
    }

    /// Where the next frame goes; `None`: as many as there may be are on their way.
    pub(crate) fn next(&mut self) -> Option<&mut Frame> {
        self.next_with_ports().map(|(_, _, frame)| frame)
    }

    /// The frame of [`Self::next`] is on its way to the ports of `destination`, or nowhere, and [`Self::post`] has to follow. How
    /// many take it, and how many do not. What nobody takes has a length of 0 from now on.
    pub(crate) fn send(&mut self, destination: Option<Destination>) -> (u32, u32) {
        let place = self.place(self.count);
        self.count += 1;
        let Self { switch, own, view, port, pair, pending, lost, .. } = self;
        let slots = &own.outbox.slots;
        let Some(slot) = slots.get(place) else { return (0, 0) };
        // SAFETY: as in `next`; from here on it is only read.
        let frame = unsafe { &*slot.frame.get() };
        let version = view.version;
        let batch = || Batch { port: *port, pair: *pair, slot: place as u16, frames: 1, version };
        let (mut taken, mut refused) = (0, 0);
        let mut flood = |is_unknown: bool| {
            // As many as it may go to: those that do not take it are released at once.
            let ports = view.forwarding.flooded(frame.origin, is_unknown);
            slot.deliveries.store(ports.count() as u32, Relaxed);
            for to in view.forwarding.flooded(frame.origin, is_unknown) {
                let Some(to) = switch.pair_for(to, || frame.head.flow()).map(|pair| (to, pair))
                else {
                    switch.release(Delivery { port: *port, pair: *pair, slot: place as u16 });
                    refused += 1;
                    continue;
                };
                // A slot is in one batch at most, and frames keep their order.
                if let Some(at) = pending.iter().position(|pending| pending.to == to) {
                    let before = pending.swap_remove(at);
                    *lost += u32::from(switch.post(to, before.batch));
                }
                let unposted = u32::from(switch.post(to, batch()));
                (taken, refused) = (taken + 1 - unposted, refused + unposted);
            }
        };
        match destination {
            Some(Destination::Port(to)) => match switch.pair_for(to, || frame.head.flow()) {
                Some(pair) => {
                    taken = 1;
                    slot.deliveries.store(1, Relaxed);
                    let to = (to, pair);
                    match pending.iter_mut().find(|pending| pending.to == to) {
                        Some(pending) => {
                            if let Some(last) = slots.get(usize::from(pending.last)) {
                                last.next.store(place as u16, Relaxed);
                            }
                            pending.batch.frames += 1;
                            pending.last = place as u16;
                        }
                        None => {
                            pending.push(Pending { to, batch: batch(), last: place as u16 });
                        }
                    }
                }
                None => refused = 1,
            },
            Some(Destination::Group) => flood(false),
            Some(Destination::Unknown) => flood(true),
            None => {}
        }
        if taken == 0 {
            // SAFETY: nobody has a delivery of it.
            unsafe { (*slot.frame.get()).length = 0 };
        }
        (taken, refused)
    }

    /// Has the receivers find what was sent since the last time. Frames for which there was no room, though [`Self::send`] said that
    /// they were taken.
    pub(crate) fn post(&mut self) -> u32 {
        let switch = &*self.switch;
        let mut lost = std::mem::take(&mut self.lost);
        for Pending { to, batch, .. } in self.pending.drain(..) {
            lost += u32::from(switch.post(to, batch));
        }
        lost
    }

    /// Whether the oldest frame on its way has arrived.
    pub(crate) fn has_ended(&self) -> bool {
        let slot = self.own.outbox.slots.get(self.first);
        self.count > 0 && slot.is_some_and(|slot| slot.deliveries.load(Acquire) == 0)
    }

    /// The oldest frame, if it has arrived: in the order of the ring, which positions of packed rings rest
    /// on.
    pub(crate) fn take_ended(&mut self) -> Option<&Frame> {
        if !self.has_ended() {
            return None;
        }
        let place = self.first;
        self.count -= 1;
        // The slots that were used last are those that a CPU's cache has.
        self.first = if self.count == 0 { 0 } else { self.place(1) };
        let slot = self.own.outbox.slots.get(place)?;
        // SAFETY: nobody has a delivery of it, and it is not the next one's place before this borrow ends.
        Some(unsafe { &*slot.frame.get() })
    }

    /// How many frames may be sent before another one has arrived.
    pub(crate) const fn room(&self) -> usize {
        OUTBOX_FRAMES - self.count
    }

    /// Whether no frame is taken before another one has arrived.
    pub(crate) const fn is_full(&self) -> bool {
        self.count == OUTBOX_FRAMES
    }

    /// Frames on their way.
    pub(crate) const fn in_flight(&self) -> usize {
        self.count
    }

    pub(crate) fn wait(&self) {
        self.own.outbox.wakeup.wait();
    }

    pub(crate) fn stop_waiting(&self) {
        self.own.outbox.wakeup.stop_waiting();
    }

    pub(crate) fn answer(&self) {
        self.own.outbox.wakeup.answer();
    }

    /// What becomes readable when a frame has arrived that was waited for.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.own.outbox.wakeup.fd.as_fd()
    }
}

impl Drop for PortSender {
    fn drop(&mut self) {
        debug_assert_eq!(self.count, 0, "a queue stops when nothing is in flight");
        self.own.outbox.is_claimed.store(false, SeqCst);
    }
}

/// The receive queue's side of a port's pair.
#[derive(Debug)]
pub(crate) struct PortReceiver {
    switch: Arc<Switch>,
    /// Its queue, and the other one of its pair.
    own: Arc<Pair>,
    /// Whether frames leave with tags here.
    is_trunk: bool,
    /// Frames of senders that knew less were for an earlier port.
    since: u64,
    /// What is left of the batch that was taken last.
    batch: Option<Batch>,
    to_wake: ToWake,
}

impl PortReceiver {
    /// `None`: there is no such pair, or somebody has it.
    pub(crate) fn claim(switch: &Arc<Switch>, port: u16, pair: u16) -> Option<Self> {
        let own = switch.pair(port, pair)?;
        let is_free = !own.inbox.is_claimed.swap(true, AcqRel);
        is_free.then(|| Self {
            switch: Arc::clone(switch),
            own: Arc::clone(own),
            is_trunk: switch.current().forwarding.is_trunk(port),
            since: switch.queues(port).map_or(0, |queues| queues.since.load(Relaxed)),
            batch: None,
            to_wake: ToWake::default(),
        })
    }

    /// How a frame leaves at this port.
    pub(crate) fn egress(&self, from: Origin) -> Egress {
        Egress::of(self.is_trunk, from)
    }

    /// From now on frames are taken, or not: then all that wait are released.
    pub(crate) fn set_open(&mut self, is_open: bool) {
        let inbox = &self.own.inbox;
        inbox.is_open.store(is_open, Relaxed);
        inbox.is_starved.store(false, Relaxed);
        fence(SeqCst);
        if !is_open {
            self.switch.empty(inbox);
            if let Some(batch) = self.batch.take() {
                self.switch.release_all(batch);
            }
        }
    }

    /// Whether no frames are posted until its driver has buffers.
    pub(crate) fn is_starved(&self) -> bool {
        self.own.inbox.is_starved.load(Relaxed)
    }

    pub(crate) fn set_starved(&self, is_starved: bool) {
        self.own.inbox.is_starved.store(is_starved, Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batch.as_ref().is_none_or(|batch| batch.frames == 0)
            && self.own.inbox.batches.is_empty()
    }

    /// Whether frames leave with tags here.
    pub(crate) const fn is_trunk(&self) -> bool {
        self.is_trunk
    }

    /// How many frames of one sender are next, if any are.
    pub(crate) fn waiting(&mut self) -> usize {
        while self.batch.as_ref().is_none_or(|batch| batch.frames == 0) {
            self.batch = None;
            let Some(batch) = self.own.inbox.batches.pop() else { return 0 };
            if batch.version < self.since {
                self.switch.release_all(batch);
            } else {
                self.batch = Some(batch);
            }
        }
        self.batch.as_ref().map_or(0, |batch| batch.frames.into())
    }

    /// The next frame.
    pub(crate) fn take(&mut self) -> Option<Delivery> {
        self.waiting();
        self.switch.next(self.batch.as_mut()?)
    }

    /// When the next frame was posted, ns of [`crate::clock::now`], if there is one.
    pub(crate) fn next_posted(&mut self) -> Option<u64> {
        self.waiting();
        let &Batch { port, pair, slot, .. } = self.batch.as_ref()?;
        self.frame(&Delivery { port, pair, slot }).map(|frame| frame.posted)
    }

    /// Gives frames of the next sender to `deliver`, each of which is released, until that does not take one, which then is
    /// the next frame; [`Self::wake`] has to follow.
    #[inline]
    pub(crate) fn deliver(&mut self, mut deliver: impl FnMut(&Frame) -> bool) {
        self.waiting();
        let Some(batch) = &mut self.batch else { return };
        let Some(pair) = self.switch.pair(batch.port, batch.pair) else { return };
        self.to_wake.note(batch.port);
        while batch.frames > 0 {
            let Some(slot) = pair.outbox.slots.get(usize::from(batch.slot)) else { return };
            // SAFETY: the batch has a delivery of it, which is released after this borrow.
            if !deliver(unsafe { &*slot.frame.get() }) {
                return;
            }
            batch.slot = slot.next.load(Relaxed);
            batch.frames -= 1;
            slot.release();
        }
    }

    /// The frame of a delivery.
    pub(crate) fn frame<'a>(&'a self, delivery: &'a Delivery) -> Option<&'a Frame> {
        let slot = self.switch.slot(delivery)?;
        // SAFETY: whoever has a delivery may read until it is released, which ends this borrow.
        Some(unsafe { &*slot.frame.get() })
    }

    /// A delivery is done with; [`Self::wake`] has to follow.
    pub(crate) fn release(&mut self, delivery: Delivery) {
        self.to_wake.note(delivery.port);
        self.switch.release(delivery);
    }

    /// Has the senders find what was released since the last time.
    pub(crate) fn wake(&mut self) {
        let switch = &*self.switch;
        self.to_wake.0.drain(..).for_each(|port| switch.wake_senders(port));
    }

    pub(crate) fn wait(&self) {
        self.own.inbox.wakeup.wait();
    }

    pub(crate) fn stop_waiting(&self) {
        self.own.inbox.wakeup.stop_waiting();
    }

    pub(crate) fn answer(&self) {
        self.own.inbox.wakeup.answer();
    }

    /// What becomes readable when a frame is posted that was waited for.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.own.inbox.wakeup.fd.as_fd()
    }
}

impl Drop for PortReceiver {
    fn drop(&mut self) {
        self.wake();
        self.set_open(false);
        self.own.inbox.is_claimed.store(false, SeqCst);
    }
}
