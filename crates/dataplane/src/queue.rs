//! A virtqueue being served: its ring, its requests in flight, and how its driver is called. The slots of
//! a process of this host are served as one, too (`source`).
//!
//! A queue belongs to one IOThread at a time and moves between them as a whole. It is never
//! shared, so nothing in it is locked; only its statistics are read by others.
//!
//! Every request that leaves the ring comes back to it exactly once: a slot is taken when a chain
//! is popped, and freed when its status is written.

use std::sync::{Arc, OnceLock};

use io_uring::squeue::{Entry128, SubmissionQueue};
use rtvirtio_completion::slots::{ProtocolViolation, SLOTS, SlotMemory};
use rtvirtio_engine::{
    Completions, Operation, Outcome, Request, SCRATCH_BYTES, Segment, SubmitContext, TransferLimits,
};
use rtvirtio_qos::{Kind, MAX_TRANSFER, Running};
use rtvirtio_units::{Bytes, Nanos};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;

use crate::call::Call;
use crate::clock::now;
use crate::device::Device;
use crate::drr::{QUANTUM_BYTES, TurnBudget};
use crate::fixed::FixedBuffers;
use crate::key::{QueueKey, token};
use crate::nic::Nic;
use crate::request::{Action, Limits, Status};
use crate::schedule::{Member, PendingRequest, Schedule};
use crate::stats::{Op, QueueStats};
use crate::thread_stats::IoThreadStats;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::{Chain, Ring, RingError};

mod frames;
mod inflight;
mod source;

use frames::Frames;
use inflight::InflightRequest;
pub(crate) use source::Kick;
use source::{Slots, Source};

/// Requests that finish at once are shown to the driver in batches of so many, so that driver and
/// device work side by side: a driver that always finds something need not be called,
const BATCH: usize = 8;
/// or of so many bytes.
const BATCH_BYTES: u64 = 32 << 10;

/// The most bytes of a transfer that are started at once, a multiple of any logical block: what the kernel pins,
/// or memory copies, in a fraction of a millisecond. A chain may have 4 GiB, and its neighbours on the
/// IOThread would wait for all of it. Linux asks for 1.25 MiB at most (`BLK_DEF_MAX_SECTORS_CAP`).
pub(crate) const MAX_PART_BYTES: u64 = 1 << 20;

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
    /// The front end is to be told that the ring is broken.
    error_due: bool,
    /// What has finished since the ring was last published: one look at the clock does for all.
    finished: Vec<Finished>,
    /// Their bytes.
    finished_bytes: u64,
    /// For the device's schedule: what waits for its time, and what has ended, since it was told.
    pending: Vec<PendingRequest>,
    ended: Vec<Running>,
    /// Its disk's place in that.
    member: Option<Arc<Member>>,
}

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

/// What came of starting a request, or what is left of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
enum Progress {
    /// It has ended, or its schedule says when its next part starts.
    Ended,
    /// Its engine has it.
    Started,
    /// The turn's bytes are used up: what is left waits for the next turn.
    TurnUsedUp,
    /// The submission queue is full: it waits until there is room.
    SubmissionFull,
}

/// What follows the end of a request's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
enum PartEnd {
    /// Nothing: the request has ended, or there was none.
    Ended,
    /// Its device's schedule says when the next part starts.
    Scheduled,
    /// The next part is to start now.
    NextPart,
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
        let frames = Frames::new(&setup.nic, setup.index)?;
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
            broken: Arc::default(),
            stats,
            in_flight: 0,
            started_here: 0,
            waiting: Vec::new(),
            unpublished: false,
            call_due: false,
            error_due: false,
            finished: Vec::with_capacity(usize::from(size)),
            finished_bytes: 0,
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
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        match &self.work {
            Work::Frames(frames) if self.is_served() => frames.link(),
            _ => None,
        }
    }

    /// When a limit on its rate lets the next frame pass, if none may pass now, ns of [`now`].
    pub(crate) fn held_until(&self) -> Option<u64> {
        match &self.work {
            Work::Frames(frames) if self.is_served() => frames.held_until(),
            _ => None,
        }
    }

    /// The next frame may pass.
    pub(crate) fn release(&mut self) {
        if let Work::Frames(frames) = &mut self.work {
            frames.release();
        }
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
    pub(crate) const fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
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
        if self.is_served() { self.source.recovering() } else { 0 }
    }

    pub(crate) const fn in_flight(&self) -> u16 {
        self.in_flight
    }

    pub(crate) fn is_served(&self) -> bool {
        self.enabled && self.broken.get().is_none()
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.is_waiting()
            || self.is_served()
                && match &self.work {
                    Work::Requests(_) => self.source.is_pending(),
                    Work::Frames(frames) => frames.is_pending(self.source.is_pending()),
                }
    }

    /// Whether requests wait for room in the submission queue.
    pub(crate) const fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Tells whoever watches it what its driver has made available and is not taken. Buffers to receive
    /// into are no work.
    pub(crate) fn look(&self) {
        let is_work = match &self.work {
            Work::Requests(_) => true,
            Work::Frames(frames) => frames.is_transmit(),
        };
        let backlog = if is_work && self.is_served() { self.source.backlog() } else { 0 };
        self.stats.see(backlog);
    }

    /// Asks for kicks; whether requests came in the meantime.
    pub(crate) fn enable_notification(&mut self) -> bool {
        if !self.is_served() {
            return false;
        }
        let Work::Frames(frames) = &self.work else { return self.source.enable_notification() };
        // A driver that adds buffers to others has nothing to say.
        if frames.held_until().is_some() {
            return false;
        }
        if frames.waits_for_driver(self.source.is_pending()) {
            let has_come = self.source.enable_notification();
            return frames.is_pending(has_come);
        }
        frames.is_pending(true)
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
        // What has left the ring ends, whatever has become of the ring. The share of a queue that is to
        // stop has no requests, but bytes.
        while share.bytes > 0
            && let Some(head) = self.waiting.pop()
        {
            if self.inflight[usize::from(head)].done_bytes() == 0 {
                self.inflight[usize::from(head)].started = begun;
            }
            if self.start(head, turn, share) == Progress::SubmissionFull {
                return Pass::Full;
            }
        }
        if self.is_waiting() {
            return Pass::More;
        }
        if !self.is_served() {
            return Pass::Empty;
        }
        if let Work::Frames(_) = self.work {
            return self.serve_frames(share);
        }
        let mut limits = None;
        let mut started = begun;
        while share.is_left() {
            if self.finished.len() >= BATCH || self.finished_bytes >= BATCH_BYTES {
                self.publish(turn.stats);
                started = now();
            }
            let head = match self.source.next() {
                Ok(Some(head)) => head,
                Ok(None) => return Pass::Empty,
                Err(error) => {
                    self.mark_broken(error);
                    return Pass::Empty;
                }
            };
            let Work::Requests(device) = &self.work else { return Pass::Empty };
            let limits = limits.get_or_insert_with(|| Limits {
                geometry: device.engine().geometry(),
                read_only: device.read_only(),
                write_through: !device.write_cache(),
                discard_sectors: device.limits().discard_sectors,
                id: *device.serial(),
            });
            let slot = &mut self.inflight[usize::from(head)];
            let Some(parsed) = self.source.parse(limits, &mut slot.segments) else {
                self.mark_broken(Broken::NoStatus);
                return Pass::Empty;
            };
            share.requests -= 1;
            self.in_flight += 1;
            self.stats.start(1);
            slot.status = parsed.status;
            slot.written = parsed.written;
            slot.ioprio = parsed.ioprio;
            slot.popped = found;
            slot.started = started;
            match parsed.action {
                Action::Answer(status) => {
                    slot.bytes = 0;
                    self.finish(head, status, Op::Other);
                }
                Action::Start { operation, offset, length } => {
                    slot.operation = Some(operation);
                    slot.offset = offset;
                    slot.length = length;
                    slot.bytes = length;
                    slot.done = 0;
                    if self.member.is_some() {
                        self.submit_to_schedule(head);
                        share.bytes -= self.inflight[usize::from(head)].cost();
                        continue;
                    }
                    let max = self.max_part(operation);
                    self.inflight[usize::from(head)].divide(max);
                    if self.start(head, turn, share) == Progress::SubmissionFull {
                        return Pass::Full;
                    }
                }
            }
        }
        Pass::More
    }

    /// The same for frames.
    fn serve_frames(&mut self, share: &mut TurnBudget) -> Pass {
        let (Work::Frames(frames), Source::Ring { ring, chain }) =
            (&mut self.work, &mut self.source)
        else {
            return Pass::Empty;
        };
        match frames.serve(ring, chain, &self.memory, share, &self.stats) {
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

    /// The most bytes that are started at once of a request that does this.
    fn max_part(&self, operation: Operation) -> u64 {
        let longest = match operation {
            Operation::Read | Operation::Write { .. } => MAX_PART_BYTES,
            Operation::WriteZeroes { .. } if self.writes_out(operation) => MAX_PART_BYTES,
            _ => u64::MAX,
        };
        longest.min(self.limits.of(operation))
    }

    /// Whether this is to zero a range, and takes a write of its bytes.
    fn writes_out(&self, operation: Operation) -> bool {
        match (operation, self.disk()) {
            (Operation::WriteZeroes { unmap, .. }, Some(disk)) => {
                disk.engine().writes_zeroes(unmap)
            }
            _ => false,
        }
    }

    /// Starts what is left of a request: part by part as long as parts end at once and something is left
    /// of the share, whose bytes they take; then the rest waits for the next turn.
    fn start(&mut self, head: u16, turn: &mut Turn<'_, '_>, share: &mut TurnBudget) -> Progress {
        loop {
            let cost = self.inflight[usize::from(head)].cost();
            match self.start_part(head, turn) {
                Outcome::Done(result) => {
                    share.bytes -= cost;
                    if self.complete_part(head, result) != PartEnd::NextPart {
                        return Progress::Ended;
                    }
                    if share.bytes <= 0 {
                        self.waiting.push(head);
                        return Progress::TurnUsedUp;
                    }
                }
                Outcome::Started => {
                    share.bytes -= cost;
                    self.started_here += 1;
                    return Progress::Started;
                }
                Outcome::Busy => {
                    self.waiting.push(head);
                    return Progress::SubmissionFull;
                }
            }
        }
    }

    fn start_part(&mut self, head: u16, turn: &mut Turn<'_, '_>) -> Outcome {
        let slot = &mut self.inflight[usize::from(head)];
        let Some(operation) = slot.operation else { return Outcome::Done(Ok(())) };
        let scratch = Segment::new(slot.scratch.as_mut_ptr().cast(), SCRATCH_BYTES);
        let segments = &slot.segments[slot.done..slot.part_end];
        let transfers = matches!(operation, Operation::Read | Operation::Write { .. });
        let request = Request {
            token: token(self.key, head),
            operation,
            offset: slot.offset,
            length: slot.part,
            segments: if transfers { segments } else { &[] },
            buffer: match segments {
                [only] if transfers => (turn.buffers)(only),
                _ => None,
            },
            scratch,
        };
        let mut lent = SubmitContext {
            submission: turn.submission,
            commands: turn.commands.as_deref_mut(),
            file: turn.file,
            completions: turn.completions,
        };
        let Work::Requests(device) = &self.work else { return Outcome::Done(Ok(())) };
        device.engine().start(&request, &mut lent)
    }

    /// A completion queue entry has come: its result is bytes, or a negated error number. What is left of a
    /// short transfer starts, or waits if there is no room for it.
    pub(crate) fn complete_entry(&mut self, head: u16, result: i32, turn: &mut Turn<'_, '_>) {
        let Some(slot) = self.inflight.get_mut(usize::from(head)) else { return };
        let Some(operation) = slot.operation else { return };
        let transfers = matches!(operation, Operation::Read | Operation::Write { .. });
        let result = match u64::try_from(result) {
            Err(_) => match Errno::from_raw_os_error(result.saturating_neg()) {
                Errno::INTR | Errno::AGAIN => return self.start_rest(head, turn),
                error => Err(error),
            },
            Ok(_) if !transfers => Ok(()),
            // The end of a file that shrank.
            Ok(0) => Err(Errno::IO),
            Ok(bytes) if bytes < slot.part => {
                let memory = (operation == Operation::Read).then_some(&*self.memory);
                slot.advance(bytes, memory);
                return self.start_rest(head, turn);
            }
            Ok(_) => Ok(()),
        };
        self.complete(head, result, turn);
    }

    /// A request has ended, or a part of it. The next part starts, or waits if there is no room for it.
    pub(crate) fn complete(
        &mut self,
        head: u16,
        result: Result<(), Errno>,
        turn: &mut Turn<'_, '_>,
    ) {
        if self.complete_part(head, result) == PartEnd::NextPart {
            self.start_rest(head, turn);
        }
    }

    /// Starts what is left of a request though it is not its queue's turn: as much of it as a turn has
    /// at most. Whatever came of it, the queue knows: what did not fit is in `waiting`.
    fn start_rest(&mut self, head: u16, turn: &mut Turn<'_, '_>) {
        let mut budget = TurnBudget { requests: 0, bytes: QUANTUM_BYTES.into() };
        let _: Progress = self.start(head, turn, &mut budget);
    }

    /// A part of a request has ended, or all of it.
    fn complete_part(&mut self, head: u16, result: Result<(), Errno>) -> PartEnd {
        let Some(slot) = self.inflight.get_mut(usize::from(head)) else { return PartEnd::Ended };
        let Some(operation) = slot.operation else { return PartEnd::Ended };
        if result.is_err() || slot.part == slot.length {
            self.finish(head, result.into(), op(operation));
            return PartEnd::Ended;
        }
        let memory = (operation == Operation::Read).then_some(&*self.memory);
        slot.advance(slot.part, memory);
        self.ended.extend(slot.running.take());
        if self.member.is_some() {
            self.submit_to_schedule(head);
            return PartEnd::Scheduled;
        }
        let max = self.max_part(operation);
        self.inflight[usize::from(head)].divide(max);
        PartEnd::NextPart
    }

    /// Has the device's schedule say when what is left of a request starts, or as much of it as its
    /// engine takes and no more than [`MAX_TRANSFER`].
    fn submit_to_schedule(&mut self, head: u16) {
        let Some(operation) = self.inflight[usize::from(head)].operation else { return };
        let (kind, max) = match operation {
            Operation::Read => (Kind::Read, MAX_TRANSFER.get()),
            Operation::Write { .. } => (Kind::Write, MAX_TRANSFER.get()),
            // A write of zeroes.
            _ if self.writes_out(operation) => (Kind::Write, MAX_TRANSFER.get()),
            Operation::Flush => (Kind::Flush, u64::MAX),
            Operation::Discard | Operation::WriteZeroes { .. } => (Kind::Discard, u64::MAX),
        };
        let max = max.min(self.limits.of(operation));
        let Some(member) = &self.member else { return };
        let slot = &mut self.inflight[usize::from(head)];
        slot.divide(max);
        self.pending.push(PendingRequest {
            token: token(self.key, head),
            class: member.class(slot.ioprio),
            kind,
            // A range that is discarded, or zeroed without a write, is no transfer: no rate of bytes is
            // charged for it.
            bytes: Bytes::new(if kind == Kind::Discard { 0 } else { slot.part }),
        });
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

    /// The schedule says that a request's time has come. `time` is when it said so, or when what was
    /// to be done since had been done, ns of [`now`].
    pub(crate) fn start_scheduled(
        &mut self,
        head: u16,
        running: Running,
        turn: &mut Turn<'_, '_>,
        time: &mut u64,
    ) {
        if self.finished.len() >= BATCH || self.finished_bytes >= BATCH_BYTES {
            self.publish(turn.stats);
            *time = now();
        }
        let slot = &mut self.inflight[usize::from(head)];
        slot.running = Some(running);
        slot.started = *time;
        self.start_rest(head, turn);
    }

    fn finish(&mut self, head: u16, status: Status, op: Op) {
        let slot = &mut self.inflight[usize::from(head)];
        slot.operation = None;
        self.ended.extend(slot.running.take());
        if let Some(to) = slot.status.take() {
            // SAFETY: one byte of guest memory, which `memory` keeps mapped.
            unsafe { to.base().write_volatile(status as u8) };
            if self.memory.log().is_some() {
                self.memory.log_write(to);
                if slot.written > 1 {
                    slot.segments.iter().for_each(|&segment| self.memory.log_write(segment));
                }
            }
        }
        // Of a request that failed nothing is known to have been written but its status.
        let written = if status == Status::Ok { slot.written } else { slot.written.min(1) };
        self.source.finish(head, written, slot.bytes, status);
        self.in_flight -= 1;
        self.unpublished = true;
        let InflightRequest { bytes, popped, started, .. } = *slot;
        self.finished.push(Finished { status, op, bytes, popped, started });
        self.finished_bytes += bytes;
    }

    /// Counts what the driver is about to see; when, if there is anything.
    fn count(&mut self) -> Option<u64> {
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
    }
}

const fn op(operation: Operation) -> Op {
    match operation {
        Operation::Read => Op::Read,
        Operation::Write { .. } => Op::Write,
        Operation::Flush => Op::Flush,
        Operation::Discard => Op::Discard,
        Operation::WriteZeroes { .. } => Op::WriteZeroes,
    }
}
