//! An IOThread: the loop of `rtvirtio_dataplane`'s, burst by burst.
//!
//! A turn takes what has ended on devices and messages, then gives each queue that is awake its share, in
//! batches whose ends are shown to the driver as one. When nothing is left it polls, as long as that has
//! paid lately, then sleeps; a queue that slept kicks it awake.

use std::collections::VecDeque;

use rtvirtio_iocores::ThreadId;
use rtvirtio_units::CpuId;

use super::{Request, Simulation};
use crate::cpus::{Waker, Who};
use crate::scenario::Role;

/// What a queue may start in a turn, ns of estimated time: `rtvirtio_dataplane`'s `drr`.
const QUANTUM_NS: i64 = 12_800;
/// What is shown to the driver as one.
const BATCH: usize = 8;
const BATCH_BYTES: u64 = 32 << 10;
/// A queue that was idle for so long among busy ones is not looked at any more until it kicks, ns.
const IDLE_BEFORE_NOTIFY_NS: u64 = 1_000_000;
/// The first time that it polls, ns.
const FIRST_POLL_NS: u64 = 4_000;

/// What it is told.
#[derive(Debug, Clone, Copy)]
pub(super) enum Message {
    Adopt(u32),
    Release { queue: u32, to: u32 },
}

/// What its burst is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Asleep,
    Polling,
    /// Messages, and so many queues with requests that have ended.
    Reaping {
        messages: usize,
        queues: usize,
        since: u64,
    },
    /// So many requests of a queue, since when.
    Batch {
        queue: u32,
        requests: usize,
        since: u64,
    },
    /// What is owed, before it polls or sleeps.
    Paying,
}

/// An IOThread.
#[derive(Debug)]
pub(super) struct IoThread {
    pub(super) id: ThreadId,
    pub(super) thread: u32,
    pub(super) cpu: CpuId,
    /// It has no queue and gets none.
    pub(super) gone: bool,
    /// It is to go.
    pub(super) ending: bool,
    pub(super) queues: Vec<u32>,
    pub(super) awake: Vec<u32>,
    pub(super) mail: VecDeque<Message>,
    /// Queues with requests that have ended.
    pub(super) ended: Vec<u32>,
    doing: Doing,
    /// Whether a wake-up is under way.
    waking: bool,
    /// Since when it does what it does: the turn, polling, or sleep.
    since: u64,
    /// Since when it has had nothing to do.
    idle_since: u64,
    woken_at: u64,
    /// Whether the turn found work.
    worked: bool,
    /// Of the pass over queues that are awake: where it began, and how many have had their share.
    first: usize,
    passed: usize,
    /// What the queue may still have.
    share: i64,
    /// Cost that the next burst pays.
    pub(super) owes: u64,
    /// For drivers alone, and where disks have a part in it.
    polls: [u64; 2],
    /// Whether it waited for a disk when it last waited.
    disk: bool,
    /// Which of the two holds for this wait.
    kind: usize,
    busy: u64,
    poll: u64,
    sleep: u64,
    /// On a CPU, and ready without one, when the policy was last shown that.
    pub(super) measured: (u64, u64),
}

impl IoThread {
    /// Whether it gets no queue any more.
    pub(super) const fn is_leaving(&self) -> bool {
        self.gone || self.ending
    }

    /// In turns, polling and asleep so far, ns.
    pub(super) const fn times(&self, now: u64) -> (u64, u64, u64) {
        let here = now - self.since;
        match self.doing {
            Doing::Asleep => (self.busy, self.poll, self.sleep + here),
            Doing::Polling => (self.busy, self.poll + here, self.sleep),
            Doing::Reaping { .. } | Doing::Batch { .. } | Doing::Paying => {
                (self.busy + here, self.poll, self.sleep)
            }
        }
    }
}

/// What a request or frame is of a turn, ns: `rtvirtio_dataplane`'s `drr::cost`.
const fn turn_ns(role: Role, bytes: u32) -> i64 {
    match role {
        Role::Disk if bytes <= 4_096 => 400,
        Role::Disk => bytes as i64 * 100 / 1_024,
        Role::Receive | Role::Transmit => 1_600 + bytes as i64 * 80 / 1_024,
    }
}

/// How long to poll next, by what the last wait showed: as `rtvirtio_dataplane`'s `Polling::adjust`.
const fn adjusted(poll: u64, max: u64, blocked: u64) -> u64 {
    if blocked <= poll {
        poll
    } else if blocked > max {
        poll / 2
    } else {
        let next = if poll == 0 { FIRST_POLL_NS } else { poll * 2 };
        if next < max { next } else { max }
    }
}

impl Simulation<'_> {
    /// A further IOThread, asleep; its place.
    pub(super) fn add_io(&mut self, cpu: CpuId) -> u32 {
        let place = self.ios.len() as u32;
        let thread = self.cpus.spawn(Who::Io(place), 1 << cpu.get());
        self.ios.push(IoThread {
            id: ThreadId(place),
            thread,
            cpu,
            gone: false,
            ending: false,
            queues: Vec::new(),
            awake: Vec::new(),
            mail: VecDeque::new(),
            ended: Vec::new(),
            doing: Doing::Asleep,
            waking: false,
            since: self.events.now,
            idle_since: self.events.now,
            woken_at: 0,
            worked: false,
            first: 0,
            passed: 0,
            share: QUANTUM_NS,
            owes: 0,
            polls: [0; 2],
            disk: false,
            kind: 0,
            busy: 0,
            poll: 0,
            sleep: 0,
            measured: (0, 0),
        });
        place
    }

    /// There is something for an IOThread to do; what an interrupt costs who says so.
    pub(super) fn ring(&mut self, io: u32, waker: Waker) -> u64 {
        let of = &mut self.ios[io as usize];
        let thread = of.thread;
        match of.doing {
            Doing::Asleep if !of.waking => {
                of.waking = true;
                self.cpus.wake(thread, self.costs.wake.get(), waker, &mut self.events)
            }
            Doing::Polling => {
                self.cpus.cut(thread, self.costs.poll.get(), &mut self.events);
                0
            }
            _ => 0,
        }
    }

    /// Posts a message.
    pub(super) fn post(&mut self, io: u32, message: Message) {
        self.ios[io as usize].mail.push_back(message);
        self.ring(io, Waker::Device);
    }

    /// Its burst has ended.
    pub(super) fn io_goes_on(&mut self, io: u32) {
        let now = self.events.now;
        let of = &mut self.ios[io as usize];
        match of.doing {
            Doing::Asleep => {
                of.waking = false;
                of.woken_at = now;
                of.sleep += now - of.since;
                of.since = now;
                let (kind, blocked) = (of.kind, now - of.idle_since);
                of.polls[kind] = adjusted(of.polls[kind], self.polling >> kind, blocked);
                self.turn(io);
            }
            Doing::Polling => {
                of.poll += now - of.since;
                of.since = now;
                let is_ending = of.ending;
                if is_ending || self.has_work(io) { self.turn(io) } else { self.fall_asleep(io) }
            }
            Doing::Reaping { messages, queues, since } => {
                self.reap(io, queues, (now - since) / (messages + queues) as u64);
                self.read_mail(io, messages);
                self.pass(io);
            }
            Doing::Paying => {
                of.busy += now - of.since;
                of.since = now;
                if self.has_work(io) { self.turn(io) } else { self.idle(io) }
            }
            Doing::Batch { queue, requests, since } => {
                self.batch_ends(io, queue, requests, since);
                self.serve(io, queue);
            }
        }
    }

    fn has_work(&self, io: u32) -> bool {
        let of = &self.ios[io as usize];
        !of.mail.is_empty()
            || !of.ended.is_empty()
            || of.awake.iter().any(|&queue| !self.queues[queue as usize].available.is_empty())
    }

    /// A turn begins.
    fn turn(&mut self, io: u32) {
        let of = &self.ios[io as usize];
        let (messages, queues) = (of.mail.len(), of.ended.len());
        let mut cost = self.costs.turn.get();
        if messages + queues == 0 {
            let of = &mut self.ios[io as usize];
            of.owes += cost;
            of.worked = false;
            of.passed = 0;
            return self.pass(io);
        }
        cost += messages as u64 * self.costs.message.get();
        for &queue in &of.ended {
            cost += self.queues[queue as usize].ended.len() as u64 * self.costs.reap.get();
            if self.client_waits(queue) {
                cost += self.costs.call.get();
            }
        }
        let of = &mut self.ios[io as usize];
        cost += std::mem::take(&mut of.owes);
        of.worked = true;
        of.passed = 0;
        of.doing = Doing::Reaping { messages, queues, since: self.events.now };
        let thread = of.thread;
        self.cpus.burst(thread, cost, &mut self.events);
    }

    /// Shows drivers what has ended on the device, of the first so many queues, each of which took `ns`.
    fn reap(&mut self, io: u32, queues: usize, ns: u64) {
        for at in 0..queues {
            let place = self.ios[io as usize].ended[at];
            let queue = &mut self.queues[place as usize];
            if queue.owner != Some(io) {
                continue;
            }
            if !queue.awake {
                queue.awake = true;
                self.ios[io as usize].awake.push(place);
            }
            queue.busy_at = self.events.now;
            queue.busy += ns;
            while let Some(request) = queue.ended.pop_front() {
                queue.in_flight -= 1;
                queue.requests += 1;
                queue.bytes += u64::from(request.bytes);
                queue.used.push_back(request);
            }
            self.call_client(place, io);
        }
        self.ios[io as usize].ended.drain(..queues);
    }

    /// Goes on to the next queue that has something, or ends the turn.
    fn pass(&mut self, io: u32) {
        let of = &mut self.ios[io as usize];
        let awake = of.awake.len();
        while of.passed < awake && (of.mail.is_empty() || !of.worked) {
            let place = of.awake[(of.first + of.passed) % awake];
            of.passed += 1;
            if !self.queues[place as usize].available.is_empty() {
                of.share = QUANTUM_NS;
                of.worked = true;
                return self.serve(io, place);
            }
        }
        // A pass that a message cut short goes on where it ended.
        of.first = if of.passed < awake { (of.first + of.passed) % awake } else { 0 };
        self.turn_ends(io);
    }

    fn turn_ends(&mut self, io: u32) {
        let now = self.events.now;
        let of = &mut self.ios[io as usize];
        if of.worked {
            of.busy += now - of.since;
            of.since = now;
            let queues = &mut self.queues;
            of.awake.retain(|&place| {
                let queue = &mut queues[place as usize];
                queue.awake =
                    !queue.available.is_empty() || now - queue.busy_at <= IDLE_BEFORE_NOTIFY_NS;
                queue.awake
            });
        }
        if self.has_work(io) {
            return self.turn(io);
        }
        if self.ios[io as usize].ending && self.ios[io as usize].queues.is_empty() {
            self.ios[io as usize].gone = true;
            return self.fall_asleep(io);
        }
        let of = &mut self.ios[io as usize];
        let owed = std::mem::take(&mut of.owes);
        if owed == 0 {
            return self.idle(io);
        }
        of.doing = Doing::Paying;
        let thread = of.thread;
        self.cpus.burst(thread, owed, &mut self.events);
    }

    /// Gives a queue its next batch, or goes on to another one.
    fn serve(&mut self, io: u32, place: u32) {
        let now = self.events.now;
        let of = &mut self.ios[io as usize];
        let queue = &mut self.queues[place as usize];
        let (mut requests, mut bytes, mut cost) = (0, 0, of.owes);
        // Frames are shown to the driver at the end of the turn.
        let (most, most_bytes, each, kib) = match queue.role {
            Role::Disk => (BATCH, BATCH_BYTES, self.costs.request, self.costs.kib),
            Role::Receive | Role::Transmit => {
                (usize::MAX, u64::MAX, self.costs.frame, self.costs.frame_kib)
            }
        };
        for request in queue.available.iter().take(most) {
            if of.share <= 0 || bytes >= most_bytes {
                break;
            }
            of.share -= turn_ns(queue.role, request.bytes);
            requests += 1;
            bytes += u64::from(request.bytes);
            cost += each.get();
            queue.waited += now - request.ready.max(of.woken_at).min(now);
        }
        if requests == 0 {
            return self.pass(io);
        }
        cost += bytes * kib.get() / 1024;
        queue.taken += requests as u64;
        queue.in_flight += requests as u32;
        queue.busy_at = now;
        of.owes = 0;
        of.doing = Doing::Batch { queue: place, requests, since: now };
        let thread = of.thread;
        if self.ends_at_once(place) && self.client_waits(place) {
            cost += self.costs.call.get();
        }
        self.cpus.burst(thread, cost, &mut self.events);
    }

    /// What a batch was for comes about.
    fn batch_ends(&mut self, io: u32, place: u32, requests: usize, since: u64) {
        let ends_at_once = self.ends_at_once(place);
        let queue = &mut self.queues[place as usize];
        queue.busy += self.events.now - since;
        if ends_at_once {
            queue.in_flight -= requests as u32;
            queue.requests += requests as u64;
            for request in queue.available.drain(..requests) {
                queue.bytes += u64::from(request.bytes);
                queue.used.push_back(request);
            }
            return self.call_client(place, io);
        }
        let mut batch: Vec<Request> = std::mem::take(&mut self.batch);
        batch.extend(queue.available.drain(..requests));
        for request in batch.drain(..) {
            self.start(place, request);
        }
        self.batch = batch;
    }

    /// Whether what a queue has is done when its IOThread has done its part.
    fn ends_at_once(&self, place: u32) -> bool {
        self.disks.is_empty() || self.queues[place as usize].role != Role::Disk
    }

    /// Polls, if that has paid.
    fn idle(&mut self, io: u32) {
        let queues = &self.queues;
        let of = &mut self.ios[io as usize];
        of.idle_since = self.events.now;
        let disk = of.awake.iter().any(|&queue| queues[queue as usize].in_flight > 0);
        // What follows a wait for a disk is seldom a driver that comes back at once.
        of.kind = usize::from(disk | std::mem::replace(&mut of.disk, disk));
        let poll = of.polls[of.kind];
        if poll == 0 {
            return self.fall_asleep(io);
        }
        of.doing = Doing::Polling;
        let thread = of.thread;
        self.cpus.burst(thread, poll, &mut self.events);
    }

    fn fall_asleep(&mut self, io: u32) {
        let of = &mut self.ios[io as usize];
        for place in of.awake.drain(..) {
            self.queues[place as usize].awake = false;
        }
        of.doing = Doing::Asleep;
        of.since = self.events.now;
        let thread = of.thread;
        self.cpus.sleep(thread, &mut self.events);
    }

    // Messages.

    fn read_mail(&mut self, io: u32, messages: usize) {
        for _ in 0..messages {
            match self.ios[io as usize].mail.pop_front() {
                Some(Message::Adopt(queue)) => self.adopt(io, queue),
                Some(Message::Release { queue, to }) => self.release(io, queue, to),
                None => return,
            }
        }
    }

    fn release(&mut self, io: u32, place: u32, to: u32) {
        let is_ending = self.ios[to as usize].ending;
        let queue = &mut self.queues[place as usize];
        if queue.owner != Some(io) {
            return;
        }
        if is_ending {
            queue.to = None;
            return;
        }
        queue.owner = None;
        queue.awake = false;
        queue.left_at = self.events.now;
        let of = &mut self.ios[io as usize];
        of.queues.retain(|&other| other != place);
        of.awake.retain(|&other| other != place);
        self.post(to, Message::Adopt(place));
    }

    fn adopt(&mut self, io: u32, place: u32) {
        let now = self.events.now;
        let queue = &mut self.queues[place as usize];
        if queue.to.take() != Some(io) || !queue.plugged {
            return;
        }
        if queue.left_at > 0 {
            self.meter.paused(now - queue.left_at);
        }
        queue.owner = Some(io);
        queue.awake = true;
        queue.busy_at = now;
        let of = &mut self.ios[io as usize];
        of.queues.push(place);
        of.awake.push(place);
        if !queue.ended.is_empty() {
            of.ended.push(place);
        }
    }

    // Disks that come and go. As in the data plane, what comes and goes is the front end: a disk is known
    // all the time, with its queues and the IOThreads that these are mapped to.

    /// A queue's disk is used.
    pub(super) fn plug(&mut self, place: u32) {
        let queue = &mut self.queues[place as usize];
        queue.leaving = false;
        if std::mem::replace(&mut queue.plugged, true) {
            return;
        }
        let io = queue.home;
        queue.left_at = 0;
        queue.to = Some(io);
        self.post(io, Message::Adopt(place));
    }

    /// A queue's disk is no longer used, once nothing is in flight.
    pub(super) fn unplug(&mut self, place: u32) {
        self.queues[place as usize].leaving = true;
        self.leave_if_done(place);
    }

    pub(super) fn remove_queue(&mut self, place: u32) {
        let queue = &mut self.queues[place as usize];
        queue.plugged = false;
        queue.leaving = false;
        queue.awake = false;
        queue.home = queue.to.take().or(queue.owner).unwrap_or(queue.home);
        if let Some(io) = queue.owner.take() {
            let of = &mut self.ios[io as usize];
            of.queues.retain(|&other| other != place);
            of.awake.retain(|&other| other != place);
        }
    }
}
