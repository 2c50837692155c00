//! A queue's client: the vCPU that submits its requests and takes their ends.
//!
//! It works like the load generator of `rtvirtio-lab bench dataplane`: it sleeps until it is called, takes
//! what has ended, submits anew, and sleeps again when there is nothing more.

use rand::SeedableRng;
use rand_distr::{Distribution, Exp1};
use rand_pcg::Pcg64Mcg;

use super::{Request, Simulation};
use crate::cpus::Waker;
use crate::events::Event;
use crate::scenario::{Load, MAX_DEPTH, Role, Stream};

/// Requests that it takes or submits before others see it.
const CHUNK: usize = 8;

/// A client.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) thread: u32,
    stream: Option<Stream>,
    /// Tells a stream's arrivals from those of an earlier one.
    stamp: u32,
    /// When the next request comes by its rate.
    next_at: u64,
    /// Whether an event waits for that.
    is_timed: bool,
    /// Begun, and not seen to have ended.
    pub(super) outstanding: u32,
    pub(super) issued: u64,
    /// What the burst that runs submits: when each one's latency begins.
    pub(super) submits: Vec<u64>,
    /// Whether a wake-up is under way.
    waking: bool,
    /// Cost that the next burst pays.
    owes: u64,
    random: Pcg64Mcg,
}

impl Client {
    pub(super) fn new(thread: u32, seed: u64) -> Self {
        Self {
            thread,
            stream: None,
            stamp: 0,
            next_at: 0,
            is_timed: false,
            outstanding: 0,
            issued: 0,
            submits: Vec::with_capacity(CHUNK),
            waking: false,
            owes: 0,
            random: Pcg64Mcg::seed_from_u64(seed),
        }
    }

    /// Bytes of a request that it submits.
    fn block(&self) -> u32 {
        self.stream.map_or(512, |stream| stream.block.get()) as u32
    }

    /// It submits nothing any more.
    pub(super) fn end(&mut self) {
        self.stream = None;
        self.stamp += 1;
        self.is_timed = false;
    }

    /// Time to its next request, ns.
    fn gap(&mut self, rate: f64) -> u64 {
        let gap: f64 = Exp1.sample(&mut self.random);
        (gap * 1e9 / rate).round().max(1.0) as u64
    }

    /// What it would submit now, up to a chunk, into `submits`.
    fn plan(&mut self, now: u64) {
        self.submits.clear();
        let Some(stream) = self.stream else { return };
        match stream.load {
            Load::Depth(depth) => {
                let room = u32::from(depth).saturating_sub(self.outstanding) as usize;
                self.submits.extend(std::iter::repeat_n(now, room.min(CHUNK)));
            }
            Load::Rate(rate) => {
                let room = u32::from(MAX_DEPTH).saturating_sub(self.outstanding) as usize;
                while self.next_at <= now && self.submits.len() < room.min(CHUNK) {
                    self.submits.push(self.next_at);
                    self.next_at += self.gap(rate.get());
                }
            }
        }
    }
}

impl Simulation<'_> {
    /// A stream begins.
    pub(super) fn begin(&mut self, queue: u32, stream: Stream) {
        let now = self.events.now;
        let client = &mut self.queues[queue as usize].client;
        client.stream = Some(stream);
        client.stamp += 1;
        client.is_timed = false;
        let is_receive = self.queues[queue as usize].role == Role::Receive;
        let client = &mut self.queues[queue as usize].client;
        match stream.load {
            Load::Depth(_) if is_receive => self.deliver(queue),
            Load::Depth(_) => drop(self.wake_client(queue, Waker::Timer)),
            Load::Rate(rate) => {
                client.next_at = now + client.gap(rate.get());
                self.time_client(queue);
            }
        }
    }

    /// Has the frames come that are due, or for which the VM has taken others: who sends them costs this host nothing.
    fn deliver(&mut self, place: u32) {
        let now = self.events.now;
        let queue = &mut self.queues[place as usize];
        let before = queue.made;
        loop {
            queue.client.plan(now);
            let sent = queue.client.submits.len();
            if sent == 0 {
                break;
            }
            let bytes = queue.client.block();
            let frames = queue.client.submits.drain(..);
            queue.available.extend(frames.map(|issued| Request { issued, ready: now, bytes }));
            queue.made += sent as u64;
            queue.client.outstanding += sent as u32;
            queue.client.issued += sent as u64;
        }
        let has_come = queue.made > before;
        self.time_client(place);
        if has_come {
            let _ = self.show(place, Waker::Device);
        }
    }

    /// Has the next request of a client by a rate come, if it is the only thing to wait for.
    fn time_client(&mut self, queue: u32) {
        let client = &mut self.queues[queue as usize].client;
        let is_by_rate = matches!(client.stream, Some(Stream { load: Load::Rate(_), .. }));
        // With a full ring it is an end that is waited for.
        if is_by_rate && !client.is_timed && client.outstanding < u32::from(MAX_DEPTH) {
            client.is_timed = true;
            self.events.push(client.next_at, Event::Arrive { queue, stamp: client.stamp });
        }
    }

    pub(super) fn arrives(&mut self, queue: u32, stamp: u32) {
        let client = &mut self.queues[queue as usize].client;
        if client.stamp == stamp {
            client.is_timed = false;
            match self.queues[queue as usize].role {
                Role::Receive => self.deliver(queue),
                Role::Disk | Role::Transmit => drop(self.wake_client(queue, Waker::Timer)),
            }
        }
    }

    /// Whether it has to be called to see what has ended.
    pub(super) fn client_waits(&self, queue: u32) -> bool {
        let client = &self.queues[queue as usize].client;
        !client.waking && self.cpus.is_asleep(client.thread)
    }

    /// A sleeping client is called by its IOThread.
    pub(super) fn call_client(&mut self, queue: u32, io: u32) {
        let waker = Waker::Thread(self.ios[io as usize].thread);
        self.queues[queue as usize].calls += u64::from(self.client_waits(queue));
        self.ios[io as usize].owes += self.wake_client(queue, waker);
    }

    /// A client that sleeps is woken; what an interrupt costs who does it.
    fn wake_client(&mut self, queue: u32, waker: Waker) -> u64 {
        let waits = self.client_waits(queue);
        if waits {
            let client = &mut self.queues[queue as usize].client;
            client.waking = true;
        }
        let thread = self.queues[queue as usize].client.thread;
        if !waits {
            return 0;
        }
        let burst = self.costs.wake.get() + self.costs.client_turn.get();
        self.cpus.wake(thread, burst, waker, &mut self.events)
    }

    /// A client's burst has ended.
    pub(super) fn client_goes_on(&mut self, place: u32) {
        self.submit(place);
        let now = self.events.now;
        let queue = &mut self.queues[place as usize];
        let role = queue.role;
        queue.client.waking = false;
        let ends = queue.used.len().min(CHUNK);
        let mut bytes = 0;
        for request in queue.used.drain(..ends) {
            bytes += u64::from(request.bytes);
            self.meter.ended_one(now - request.issued, request.bytes, role);
        }
        queue.client.outstanding -= ends as u32;
        if role == Role::Receive {
            self.deliver(place);
        } else {
            queue.client.plan(now);
        }
        let queue = &mut self.queues[place as usize];
        let submits = queue.client.submits.len();
        let thread = queue.client.thread;
        let owed = std::mem::take(&mut queue.client.owes);
        if ends + submits + owed as usize == 0 {
            self.time_client(place);
            self.cpus.sleep(thread, &mut self.events);
            return self.leave_if_done(place);
        }
        queue.client.outstanding += submits as u32;
        queue.client.issued += submits as u64;
        bytes += submits as u64 * u64::from(queue.client.block());
        // Half of it before a request, half after.
        let each = match role {
            Role::Disk => self.costs.client,
            Role::Receive | Role::Transmit => self.costs.client_frame,
        };
        let half =
            (ends + submits) as u64 * each.get() + bytes * self.costs.client_kib.get() / 1_024;
        // Of frames to a VM it has no other half.
        let mut cost = if role == Role::Receive { half } else { half / 2 } + owed;
        if submits > 0 && !queue.awake && queue.owner.is_some() {
            cost += self.costs.kick.get();
        }
        self.cpus.burst(thread, cost, &mut self.events);
    }

    /// Makes available what the burst was for.
    fn submit(&mut self, place: u32) {
        let now = self.events.now;
        let queue = &mut self.queues[place as usize];
        if queue.client.submits.is_empty() {
            return;
        }
        let bytes = queue.client.block();
        for &issued in &queue.client.submits {
            queue.available.push_back(Request { issued, ready: now, bytes });
        }
        queue.made += queue.client.submits.len() as u64;
        queue.client.submits.clear();
        let thread = queue.client.thread;
        let cost = self.show(place, Waker::Thread(thread));
        self.queues[place as usize].client.owes += cost;
    }

    /// Its IOThread finds what has been made available; what an interrupt costs who says so.
    fn show(&mut self, place: u32, waker: Waker) -> u64 {
        let now = self.events.now;
        let queue = &mut self.queues[place as usize];
        let Some(io) = queue.owner else { return 0 };
        if !queue.awake {
            queue.awake = true;
            queue.busy_at = now;
            self.ios[io as usize].awake.push(place);
        }
        self.ring(io, waker)
    }

    /// A disk that is to go goes once nothing of it is in flight.
    pub(super) fn leave_if_done(&mut self, place: u32) {
        let queue = &self.queues[place as usize];
        if queue.leaving && queue.client.outstanding == 0 {
            self.remove_queue(place);
        }
    }
}
