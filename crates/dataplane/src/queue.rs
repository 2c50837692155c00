//! A virtqueue being served: its ring, its requests in flight, and how its driver is called. The slots of
//! a process of this host are served as one, too (`source`).
//!
//! A queue belongs to one IOThread at a time and moves between them as a whole. It is never
//! shared, so nothing in it is locked; only its statistics are read by others.
//!
//! What its chains are, requests to a disk (`requests`) or frames of a network device (`frames`), is
//! behind [`Queue::serve`].

use std::sync::{Arc, OnceLock};

use io_uring::squeue::{Entry128, SubmissionQueue};
use rtvirtio_completion::slots::{ProtocolViolation, SLOTS, SlotMemory};
use rtvirtio_engine::{Completions, Segment, TransferLimits};
use rtvirtio_frames::promise::Reservation;
use rtvirtio_qos::Running;
use rtvirtio_units::Nanos;
use rustix::event::PollFlags;
use rustix::fd::{BorrowedFd, OwnedFd};

use crate::call::Call;
use crate::clock::now;
use crate::device::Device;
use crate::drr::TurnBudget;
use crate::fixed::FixedBuffers;
use crate::key::QueueKey;
use crate::nic::{Nic, Terms};
use crate::request::Status;
use crate::schedule::{Member, PendingRequest, Schedule};
use crate::stats::{Op, QueueStats};
use crate::thread_stats::IoThreadStats;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::{Chain, Ring, RingError};

mod frames;
mod inflight;
mod requests;
mod source;

use frames::Frames;
use inflight::InflightRequest;
#[cfg(test)]
pub(crate) use requests::MAX_PART_BYTES;
pub(crate) use source::Kick;
use source::{Slots, Source};

/// Requests that finish at once are shown to the driver in batches of so many, so that driver and
/// device work side by side: a driver that always finds something need not be called,
const BATCH: usize = 8;
/// or of so many bytes.
const BATCH_BYTES: u64 = 32 << 10;

/// A queue's stop or change of hands waits for its requests in flight; what the IOThread needs
/// to serve it.
pub struct Queue {
    pub(crate) key: QueueKey,
    work: Work,
    /// Of its disk's engine.
    limits: TransferLimits,
    memory: Arc<Memory>,
    buffers: Option<Arc<FixedBuffers>>,
    source: Source,
    // Requests in flight refer to memory within them: they stay where they are.
    inflight: Box<[InflightRequest]>,
    kick: Option<OwnedFd>,
    call: Option<Call>,
    error: Option<Call>,
    enabled: bool,
    /// It stops for good once nothing is in flight.
    is_ending: bool,
    /// Whoever does not have the queue looks too.
    broken: Arc<OnceLock<Broken>>,
    stats: Arc<QueueStats>,
    in_flight: u16,
    /// Of those in flight, started at the IOThread that has the queue now.
    pub(crate) started_here: u16,
    /// Slots whose start found the submission queue full.
    waiting: Vec<u16>,
    /// Whether something has finished, or the driver may not know of it, since the ring was last
    /// published, or one of the next two.
    unpublished: bool,
    /// The driver is called in any case.
    call_due: bool,
    /// When the driver of a device that transmits is to be asked whether it wants to be called for frames that it has back, if it
    /// is to be, ns of [`now`].
    call_at: Option<u64>,
    /// The front end is to be told that the ring is broken.
    error_due: bool,
    /// What has finished since the ring was last published: one look at the clock does for all.
    finished: Vec<Finished>,
    /// Their bytes.
    finished_bytes: u64,
    /// Frames that are done with since the ring was last published, and when the turn began that took them, ns.
    frames_done: (u64, u64),
    /// For the device's schedule: what waits for its time, and what has ended, since it was told.
    pending: Vec<PendingRequest>,
    ended: Vec<Running>,
    /// Its disk's place in that.
    member: Option<Arc<Member>>,
}

/// How long a driver is not asked whether it wants to be called for frames that it has back, ns. A driver that sends is in no hurry for
/// them: Linux's TCP lets 1 ms of data wait for that (`tcp_small_queue_check` in net/ipv4/tcp_output.c). One that is called for
/// what it receives looks for them too, as Linux's does, and then need not be called.
const CALL_AFTER_NS: u64 = 1_000_000;
/// Unless these are so many descriptors, or an eighth of the ring.
const CALL_DESCRIPTORS: u16 = 32;

/// What its chains are.
enum Work {
    /// Requests to a disk.
    Requests(Arc<Device>),
    /// Frames of a network device, or buffers for them.
    Frames(Frames),
}

/// A request that the driver does not see yet.
struct Finished {
    status: Status,
    op: Op,
    bytes: u64,
    popped: u64,
    started: u64,
}

/// What a driver did to its queue that cannot be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The ring is not valid.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A request has no byte for its status.
    #[error("a request has no status byte")]
    NoStatus,
    /// A process's slots are not what they should be.
    #[error(transparent)]
    Slots(#[from] ProtocolViolation),
}

/// What a pass over a queue came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// The ring is empty.
    Empty,
    /// Its share is used up; there may be more.
    More,
    /// The submission queue is full.
    Full,
}

/// What a queue is served with.
pub struct QueueSetup {
    /// The device.
    pub device: Arc<Device>,
    /// The memory that the ring lies in.
    pub memory: Arc<Memory>,
    /// The same, registered.
    pub buffers: Option<Arc<FixedBuffers>>,
    /// The ring.
    pub ring: Ring,
    /// Entries of the ring.
    pub size: u16,
    /// Kicked by the driver.
    pub kick: Option<OwnedFd>,
    /// Calls the driver.
    pub call: Option<Call>,
    /// Told when the ring is broken.
    pub error: Option<OwnedFd>,
    /// Whether it may be served yet (SET_VRING_ENABLE).
    pub enabled: bool,
    /// Where its requests are counted.
    pub stats: Arc<QueueStats>,
}

/// What a queue of a network device is served with.
pub(crate) struct NicQueueSetup {
    /// The device.
    pub(crate) nic: Arc<Nic>,
    /// Which of its virtqueues it is.
    pub(crate) index: u16,
    /// The memory that the ring lies in.
    pub(crate) memory: Arc<Memory>,
    /// The ring, without an in-flight region.
    pub(crate) ring: Ring,
    /// Kicked by the driver.
    pub(crate) kick: Option<OwnedFd>,
    /// Calls the driver.
    pub(crate) call: Option<Call>,
    /// Told when the ring is broken.
    pub(crate) error: Option<OwnedFd>,
    /// Whether it may be served yet (SET_VRING_ENABLE).
    pub(crate) enabled: bool,
    /// Where its frames are counted.
    pub(crate) stats: Arc<QueueStats>,
}

/// What a process's slots are served with.
pub struct SlotsSetup {
    /// The device.
    pub device: Arc<Device>,
    /// The slots.
    pub memory: Arc<SlotMemory>,
    /// Told when they are broken.
    pub error: OwnedFd,
    /// Where their requests are counted.
    pub stats: Arc<QueueStats>,
}

/// What the IOThread lends a queue for a pass.
pub(crate) struct Turn<'a, 'ring> {
    pub(crate) submission: &'a mut SubmissionQueue<'ring>,
    pub(crate) commands: Option<&'a mut SubmissionQueue<'ring, Entry128>>,
    pub(crate) file: Option<u32>,
    pub(crate) completions: &'a Arc<dyn Completions>,
    pub(crate) buffers: &'a dyn Fn(&Segment) -> Option<u16>,
    pub(crate) stats: &'a IoThreadStats,
}

impl Queue {
    pub(crate) fn new(key: QueueKey, setup: QueueSetup) -> Self {
        let source = Source::Ring { ring: setup.ring, chain: Chain::default() };
        Self {
            memory: setup.memory,
            buffers: setup.buffers,
            kick: setup.kick,
            call: setup.call,
            enabled: setup.enabled,
            // A server before this one may have died between finishing and calling.
            unpublished: true,
            call_due: true,
            ..Self::of_disk(key, source, setup.size, setup.device, setup.stats, setup.error)
        }
    }

    /// Of a network device; `None`: it has no such virtqueue.
    pub(crate) fn of_nic(key: QueueKey, setup: NicQueueSetup) -> Option<Self> {
        let source = Source::Ring { ring: setup.ring, chain: Chain::default() };
        let frames = Frames::new(&setup.nic, setup.index, setup.enabled)?;
        let error = setup.error.and_then(|fd| Call::new(fd, setup.nic.caller()).ok());
        Some(Self {
            memory: setup.memory,
            kick: setup.kick,
            call: setup.call,
            enabled: setup.enabled,
            unpublished: true,
            call_due: true,
            ..Self::of(key, source, 0, Work::Frames(frames), setup.stats, error)
        })
    }

    /// Of a process's slots, which lie in no guest's memory: it rings, and its threads are woken one by one.
    pub(crate) fn of_slots(key: QueueKey, setup: SlotsSetup) -> Self {
        let SlotsSetup { device, memory, error, stats } = setup;
        let source = Source::Slots(Slots::new(memory));
        Self::of_disk(key, source, SLOTS as u16, device, stats, Some(error))
    }

    fn of_disk(
        key: QueueKey,
        source: Source,
        size: u16,
        device: Arc<Device>,
        stats: Arc<QueueStats>,
        error: Option<OwnedFd>,
    ) -> Self {
        // An fd that cannot be written to is none.
        let error = error.and_then(|fd| Call::new(fd, device.caller()).ok());
        Self {
            member: device.member(),
            limits: device.engine().transfer_limits(),
            ..Self::of(key, source, size, Work::Requests(device), stats, error)
        }
    }

    fn of(
        key: QueueKey,
        source: Source,
        size: u16,
        work: Work,
        stats: Arc<QueueStats>,
        error: Option<Call>,
    ) -> Self {
        stats.set_broken(false);
        stats.see(0);
        Self {
            key,
            member: None,
            limits: TransferLimits { transfer: 0, discard: 0, zeroes: 0 },
            work,
            memory: Arc::default(),
            buffers: None,
            source,
            inflight: (0..size).map(|_| InflightRequest::default()).collect(),
            kick: None,
            call: None,
            error,
            enabled: true,
            is_ending: false,
            broken: Arc::default(),
            stats,
            in_flight: 0,
            started_here: 0,
            waiting: Vec::new(),
            unpublished: false,
            call_due: false,
            call_at: None,
            error_due: false,
            finished: Vec::with_capacity(usize::from(size)),
            finished_bytes: 0,
            frames_done: (0, 0),
            pending: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Its disk, if it has one.
    #[must_use]
    pub(crate) const fn disk(&self) -> Option<&Arc<Device>> {
        match &self.work {
            Work::Requests(device) => Some(device),
            Work::Frames(_) => None,
        }
    }

    /// What it waits for beside its driver's kicks: the link of a network device.
    pub(crate) fn link(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.work {
            // One that is not served any more, or has to stop, hears of the last frames that come back by its link.
            Work::Frames(frames) if self.is_served() || frames.in_flight() > 0 => frames.link(),
            _ => None,
        }
    }

    /// When it is to be looked at though nothing happens: when a limit on its rate lets the next frame pass, if none may pass
    /// now, or when its driver may have to be called; ns of [`now`].
    pub(crate) fn held_until(&self) -> Option<u64> {
        let frames = match &self.work {
            Work::Frames(frames) if self.is_served() => frames.held_until(),
            _ => None,
        };
        [frames, self.call_at].into_iter().flatten().min()
    }

    /// What of its IOThread's time is promised to it.
    pub(crate) const fn reservation(&self) -> Option<Reservation> {
        match &self.work {
            Work::Requests(_) => None,
            Work::Frames(frames) => frames.reservation(),
        }
    }

    /// Since when the first frame of its last turn was there for it, ns of [`now`]: `seen`, if nobody knows better.
    pub(crate) fn waited_since(&self, seen: u64) -> u64 {
        match &self.work {
            Work::Requests(_) => seen,
            Work::Frames(frames) => frames.waited_since(seen),
        }
    }

    /// It is looked at though nothing has happened, at `time`, ns of [`now`]: its driver may have to be called. Whether the next
    /// frame may pass.
    pub(crate) fn release(&mut self, time: u64) -> bool {
        let has_come = |at: Option<u64>| at.is_some_and(|at| at <= time);
        self.unpublished |= has_come(self.call_at);
        match &mut self.work {
            Work::Frames(frames) if has_come(frames.held_until()) => {
                frames.release();
                true
            }
            _ => false,
        }
    }

    /// It leaves its IOThread: whatever its driver may have to be told is told now.
    pub(crate) fn call_now(&mut self) {
        if self.call_at.is_some() {
            (self.call_at, self.unpublished) = (Some(0), true);
        }
    }

    /// Shows the driver frames that it has sent, which it need not be called for at once. Whether it is to be asked now if it wants
    /// to be.
    fn is_to_be_asked(&mut self) -> bool {
        let (Work::Frames(frames), Source::Ring { ring, .. }) = (&self.work, &mut self.source)
        else {
            return true;
        };
        if !frames.is_transmit() || self.call_due || self.error_due {
            return true;
        }
        ring.flush();
        let many = CALL_DESCRIPTORS.min(ring.config().size / 8);
        if ring.shown() >= many {
            return true;
        }
        let now = now();
        *self.call_at.get_or_insert(now + CALL_AFTER_NS) <= now
    }

    /// The link has something, or has failed.
    pub(crate) fn link_event(&mut self, failed: bool) {
        if let Work::Frames(frames) = &mut self.work {
            frames.link_event(failed);
        }
    }

    /// Buffers that were taken for frames that have not come go back to the ring.
    pub(crate) fn give_back(&mut self) {
        if let (Work::Frames(frames), Some(ring)) = (&mut self.work, self.source.ring()) {
            frames.give_back(ring);
        }
    }

    /// It has stopped: frames for it are taken no longer.
    pub(crate) fn end(&mut self) {
        if let Work::Frames(frames) = &mut self.work {
            frames.set_open(false);
        }
    }

    /// It is to be woken by whoever has something for it, or looks by itself.
    pub(crate) fn set_waiting(&self, waits: bool) {
        if let Work::Frames(frames) = &self.work {
            frames.set_waiting(waits);
        }
    }

    /// Whether frames have arrived that are to go back to the ring.
    fn has_ended(&self) -> bool {
        matches!(&self.work, Work::Frames(frames) if frames.has_ended())
    }

    /// Its memory, registered.
    #[must_use]
    pub(crate) const fn buffers(&self) -> Option<&Arc<FixedBuffers>> {
        self.buffers.as_ref()
    }

    /// As GET_VRING_BASE returns it.
    #[must_use]
    pub(crate) fn base(&self) -> u32 {
        self.source.base()
    }

    /// Why it is not served any more, if its driver broke it.
    #[must_use]
    pub(crate) fn broken(&self) -> Option<Broken> {
        self.broken.get().copied()
    }

    /// The same for whoever does not have the queue; neither waits for the other.
    pub(crate) const fn broken_cell(&self) -> &Arc<OnceLock<Broken>> {
        &self.broken
    }

    /// Serves it, or not.
    pub(crate) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
        self.open();
    }

    /// What holds for a network device's queue by now.
    pub(crate) fn set_terms(&mut self, terms: Terms) {
        if let Work::Frames(frames) = &mut self.work {
            frames.set_terms(terms);
        }
    }

    /// Frames for it are taken as long as it is served.
    fn open(&mut self) {
        let is_served = self.is_served();
        if let Work::Frames(frames) = &mut self.work {
            frames.set_open(is_served);
        }
    }

    /// Calls the driver by another fd from now on.
    pub(crate) fn set_call(&mut self, call: Option<Call>) {
        self.call = call;
        // What finished while there was no fd, or went to the old one.
        self.call_due = true;
        self.unpublished = true;
    }

    /// Tells of a broken ring by another fd from now on.
    pub(crate) fn set_error(&mut self, error: Option<Call>) {
        self.error = error;
    }

    /// Memory was added, or the dirty log switched: what is in flight stays where it is.
    ///
    /// # Errors
    /// The ring does not lie within the memory: the queue is broken.
    pub(crate) fn set_memory(
        &mut self,
        memory: Arc<Memory>,
        buffers: Option<Arc<FixedBuffers>>,
    ) -> Result<(), RingError> {
        self.give_back();
        self.buffers = buffers;
        self.memory = Arc::clone(&memory);
        let Some(ring) = self.source.ring() else { return Ok(()) };
        ring.set_memory(memory).inspect_err(|&error| self.mark_broken(error.into()))
    }

    /// Logs writes to the used ring at a guest address, or not.
    pub(crate) fn set_log(&mut self, log: Option<u64>) {
        if let Some(ring) = self.source.ring() {
            ring.set_log(log);
        }
    }

    /// Where its requests are counted.
    #[must_use]
    pub(crate) fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// What says that there may be something new; none: nothing does.
    pub(crate) fn kick(&self) -> Option<Kick<'_>> {
        self.kick.as_ref().map(Kick::Fd).or_else(|| self.source.futex())
    }

    /// For whoever frees an IOThread that is stuck in it.
    pub(crate) fn calls(&self) -> [Option<Call>; 2] {
        [self.call.clone(), self.error.clone()]
    }

    /// Requests of an earlier server that are still to be done again: the ring's base counts them
    /// as taken.
    pub(crate) fn recovering(&self) -> u16 {
        let is_done_again = self.is_served() || self.is_ending && self.broken.get().is_none();
        if is_done_again { self.source.recovering() } else { 0 }
    }

    /// It stops for good. What an earlier server had begun is done again before, as what is in flight ends before, even if the
    /// queue is disabled: front ends disable it before they ask for its base, and nobody else would do these requests.
    pub(crate) const fn set_ending(&mut self) {
        self.is_ending = true;
    }

    pub(crate) fn in_flight(&self) -> u16 {
        match &self.work {
            Work::Requests(_) => self.in_flight,
            Work::Frames(frames) => frames.in_flight(),
        }
    }

    pub(crate) fn is_served(&self) -> bool {
        self.enabled && self.broken.get().is_none()
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.is_waiting()
            || self.is_served()
                && match &self.work {
                    Work::Requests(_) => self.source.is_pending(),
                    Work::Frames(frames) => frames.is_pending(|| self.source.is_pending()),
                }
    }

    /// Whether requests wait for room in the submission queue, or frames have arrived: what is done whatever has
    /// become of the ring.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.has_ended()
    }

    /// Tells whoever watches it what its driver has made available and is not taken, or that frames wait for it. Buffers to
    /// receive into are no work, and what a limit, the link or a full receiver holds back does not wait for the IOThread.
    pub(crate) fn look(&self) {
        let backlog = match &self.work {
            _ if !self.is_served() => 0,
            Work::Requests(_) => self.source.backlog(),
            Work::Frames(frames) => match frames.is_pending(|| self.source.is_pending()) {
                true if frames.is_transmit() => self.source.backlog(),
                is_pending => u32::from(is_pending),
            },
        };
        self.stats.see(backlog);
    }

    /// Whether there is something in its ring, or something that was taken from it and is not back.
    pub(crate) fn is_filled(&self) -> bool {
        match &self.source {
            Source::Ring { ring, .. } => ring.is_pending() || ring.in_flight() > 0,
            Source::Slots(_) => true,
        }
    }

    /// Asks for kicks; whether requests came in the meantime.
    pub(crate) fn enable_notification(&mut self) -> bool {
        if !self.is_served() {
            return false;
        }
        let Work::Frames(frames) = &self.work else { return self.source.enable_notification() };
        if frames.waits_for_driver(self.source.is_pending()) {
            let has_come = self.source.enable_notification();
            return frames.is_pending(|| has_come);
        }
        // A driver that adds buffers to others has nothing to say.
        frames.held_until().is_none() && frames.is_pending(|| true)
    }

    pub(crate) fn disable_notification(&mut self) {
        if self.is_served() {
            self.source.disable_notification();
        }
    }

    /// Takes requests from the ring and starts them as long as something is left of its share. The
    /// round that found them began at `found`, and the turn at `begun`, ns of [`now`].
    pub(crate) fn serve(
        &mut self,
        turn: &mut Turn<'_, '_>,
        share: &mut TurnBudget,
        found: u64,
        begun: u64,
    ) -> Pass {
        match &self.work {
            Work::Requests(_) => self.serve_requests(turn, share, found, begun),
            Work::Frames(_) => self.serve_frames(share, found, begun),
        }
    }

    /// The same for frames.
    fn serve_frames(&mut self, share: &mut TurnBudget, found: u64, begun: u64) -> Pass {
        let before = share.requests;
        let pass = self.pass_frames(share, begun);
        let taken = u64::from(before - share.requests);
        if taken > 0 {
            self.stats.take_frames(taken, begun.saturating_sub(found));
            if !matches!(&self.work, Work::Frames(frames) if frames.are_lent()) {
                self.frames_done = (self.frames_done.0 + taken, begun);
            }
        }
        pass
    }

    fn pass_frames(&mut self, share: &mut TurnBudget, begun: u64) -> Pass {
        let is_served = self.is_served();
        let (Work::Frames(frames), Source::Ring { ring, chain }) =
            (&mut self.work, &mut self.source)
        else {
            return Pass::Empty;
        };
        if !is_served {
            self.unpublished |= frames.reap(ring, &self.stats, begun);
            return Pass::Empty;
        }
        match frames.serve(ring, chain, &self.memory, share, &self.stats, begun) {
            Ok((pass, is_unpublished)) => {
                self.unpublished |= is_unpublished;
                pass
            }
            Err(error) => {
                self.mark_broken(error.into());
                Pass::Empty
            }
        }
    }

    /// The schedule of the device that its disk is on.
    pub(crate) fn schedule(&self) -> Option<&Arc<Schedule>> {
        self.member.as_deref().map(Member::schedule)
    }

    /// Goes to where its disk has a place now. Nothing may be in flight.
    pub(crate) fn join(&mut self) {
        debug_assert_eq!(self.in_flight, 0, "what is in flight is known to the schedule before");
        self.member = self.disk().and_then(|disk| disk.member());
    }

    /// What its schedule does not know yet: requests that wait for it, and those that have ended.
    pub(crate) const fn unreported(&mut self) -> (&mut Vec<PendingRequest>, &mut Vec<Running>) {
        (&mut self.pending, &mut self.ended)
    }

    /// Counts what the driver is about to see; when, if there is anything.
    fn count(&mut self) -> Option<u64> {
        let (frames, begun) = std::mem::take(&mut self.frames_done);
        if frames > 0 {
            // Within its turn, which is accounted for as a whole.
            self.stats.end_frames(frames, now().saturating_sub(begun));
        }
        if self.finished.is_empty() {
            return None;
        }
        let now = now();
        let mut waited = 0;
        for Finished { status, op, bytes, popped, started } in self.finished.drain(..) {
            waited += started.saturating_sub(popped);
            if status == Status::Ok {
                let wait = Nanos::new(started.saturating_sub(popped));
                let service = Nanos::new(now.saturating_sub(started));
                self.stats.record(op, bytes, wait, service);
            } else {
                self.stats.fail(op);
            }
        }
        self.finished_bytes = 0;
        // A wait for the device's schedule is no wait for the IOThread.
        if self.member.is_none() {
            self.stats.waited(waited);
        }
        Some(now)
    }

    /// Shows the driver what has finished and calls it if it wants to be. When, if anything has.
    pub(crate) fn publish(&mut self, thread: &IoThreadStats) -> Option<u64> {
        if !std::mem::take(&mut self.unpublished) {
            return None;
        }
        let at = self.count();
        if !self.is_to_be_asked() {
            return at;
        }
        self.call_at = None;
        let (call, woken) = self.source.publish();
        if woken {
            self.stats.call();
        }
        let call = call | std::mem::take(&mut self.call_due);
        let error = std::mem::take(&mut self.error_due);
        if !call && !error {
            return at;
        }
        // These fds are written to here and nowhere else: whoever watches over the threads
        // knows whose one is stuck in.
        thread.set_calling(Some(self.key));
        if call && let Some(call) = &self.call {
            self.stats.call();
            call.signal();
        }
        if error && let Some(error) = &self.error {
            error.signal_aside();
        }
        thread.set_calling(None);
        at
    }

    pub(crate) const fn is_unpublished(&self) -> bool {
        self.unpublished
    }

    /// The driver broke its ring: it is not served until it is set up anew.
    fn mark_broken(&mut self, error: Broken) {
        // The first fault is what its driver did.
        let _ = self.broken.set(error);
        self.stats.set_broken(true);
        self.stats.see(0);
        self.error_due = true;
        self.unpublished = true;
        self.open();
    }
}
