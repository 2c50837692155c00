//! Requests to a disk: taken from the queue's source, started part by part, and finished.
//!
//! Every request that leaves the ring comes back to it exactly once: a slot is taken when a chain is popped,
//! and freed when its status is written.

use rtvirtio_engine::{Operation, Outcome, Request, SCRATCH_BYTES, Segment, SubmitContext};
use rtvirtio_qos::{Kind, MAX_TRANSFER, Running};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

use super::inflight::InflightRequest;
use super::{BATCH, BATCH_BYTES, Broken, Finished, Pass, Queue, Turn, Work};
use crate::clock::now;
use crate::drr::{QUANTUM_NS, TurnBudget, cost};
use crate::key::token;
use crate::request::{Action, Limits, Status};
use crate::schedule::PendingRequest;
use crate::stats::Op;

/// The most bytes of a transfer that are started at once, a multiple of any logical block: what the kernel pins,
/// or memory copies, in a fraction of a millisecond. A chain may have 4 GiB, and its neighbours on the
/// IOThread would wait for all of it. Linux asks for 1.25 MiB at most (`BLK_DEF_MAX_SECTORS_CAP`).
pub(crate) const MAX_PART_BYTES: u64 = 1 << 20;

/// What came of starting a request, or what is left of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
enum Progress {
    /// It has ended, or its schedule says when its next part starts.
    Ended,
    /// Its engine has it.
    Started,
    /// The turn is used up: what is left waits for the next turn.
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

impl Queue {
    /// As [`Queue::serve`], of a disk.
    pub(super) fn serve_requests(
        &mut self,
        turn: &mut Turn<'_, '_>,
        share: &mut TurnBudget,
        found: u64,
        begun: u64,
    ) -> Pass {
        // What has left the ring ends, whatever has become of the ring. The share of a queue that is to
        // stop has no requests, but time.
        while share.ns > 0
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
        if !self.is_served() && self.recovering() == 0 {
            return Pass::Empty;
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
            share.ns -= cost::REQUEST_NS + cost::pieces_ns(self.source.pieces());
            let Work::Requests(device) = &self.work else { return Pass::Empty };
            let limits = limits.get_or_insert_with(|| Limits {
                geometry: device.engine().geometry(),
                read_only: device.read_only(),
                write_through: !device.write_cache(),
                discard_sectors: device.limits().discard_sectors,
                id: *device.serial(),
            });
            // The driver may have turned it off since, for all that it has made available behind that.
            limits.write_through = !device.write_cache();
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
                        share.ns -= self.inflight[usize::from(head)].cost();
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
    /// of the share, whose time they take; then the rest waits for the next turn.
    fn start(&mut self, head: u16, turn: &mut Turn<'_, '_>, share: &mut TurnBudget) -> Progress {
        loop {
            let cost = self.inflight[usize::from(head)].cost();
            match self.start_part(head, turn) {
                Outcome::Done(result) => {
                    share.ns -= cost;
                    if self.complete_part(head, result) != PartEnd::NextPart {
                        return Progress::Ended;
                    }
                    if share.ns <= 0 {
                        self.waiting.push(head);
                        return Progress::TurnUsedUp;
                    }
                }
                Outcome::Started => {
                    share.ns -= cost;
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
        let mut budget = TurnBudget { requests: 0, ns: QUANTUM_NS };
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
        // A divided request has started with its first part: the time that this took is none that it waited.
        if slot.done_bytes() == 0 {
            slot.started = *time;
        }
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
