//! VMs and a device around a scheduler, in simulated time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_ssd::{Ssd, SsdConfig};
use rtvirtio_units::{Bytes, Nanos};

use crate::{ClassId, Device, Kind, Promise, Running, Scheduler, Share};

/// What a VM asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// One request at a time, each due so long after the one before; it catches up.
    Paced { every: Nanos, bytes: u64 },
    /// So many at any time.
    Backlogged { depth: u32, bytes: u64 },
    /// One request at a time, and a time of the guest's own between the end of one and the next.
    Thinking { between: Between, bytes: u64 },
    /// One request at a time, each due so long after the one before and not before a time of the guest's own has passed
    /// since that one's end; it catches up.
    Task { every: Nanos, between: Between, bytes: u64 },
    /// Whatever becomes of those before: as independent arrivals do.
    Independent { every: Nanos, bytes: u64 },
}

/// A guest's own time between two requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Between {
    Constant(Nanos),
    /// Exponentially distributed, with this mean.
    Exponential(Nanos),
}

impl Between {
    fn draw(self, random: &mut Pcg64Mcg) -> Nanos {
        match self {
            Self::Constant(time) => time,
            Self::Exponential(mean) => exponential(mean, random),
        }
    }
}

impl Load {
    const fn bytes(self) -> u64 {
        match self {
            Self::Paced { bytes, .. }
            | Self::Backlogged { bytes, .. }
            | Self::Thinking { bytes, .. }
            | Self::Task { bytes, .. }
            | Self::Independent { bytes, .. } => bytes,
        }
    }
}

fn exponential(mean: Nanos, random: &mut Pcg64Mcg) -> Nanos {
    Nanos::from_secs_f64(-(1.0 - random.random::<f64>()).ln() * mean.as_secs_f64())
}

/// What became of a VM's requests.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// From arrival to end, in order of ends.
    pub(crate) responses: Vec<Nanos>,
    /// From arrival to start.
    pub(crate) waits: Vec<Nanos>,
    pub(crate) bytes: u64,
}

impl Outcome {
    pub(crate) fn rate(&self, time: Nanos) -> f64 {
        self.responses.len() as f64 / time.as_secs_f64()
    }

    /// The response that so many are not longer than.
    pub(crate) fn percentile(&self, percent: f64) -> Nanos {
        let mut sorted = self.responses.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() as f64 * percent / 100.0).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }
}

struct Client {
    load: Load,
    class: ClassId,
    /// When the next one is due.
    due: Nanos,
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives(usize),
    Ends(u64),
    Ask,
}

/// VMs, a scheduler and a device.
pub(crate) struct World {
    pub(crate) scheduler: Scheduler,
    ssd: Ssd,
    clients: Vec<Client>,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    /// When the scheduler is asked again.
    asks: BTreeSet<Nanos>,
    running: BTreeMap<u64, (Running, usize, Nanos, u64)>,
    waiting: BTreeMap<u64, (usize, Nanos, u64)>,
    /// How long a completion or an arrival takes to be seen.
    lag: Nanos,
    /// Of the guests' own times.
    random: Pcg64Mcg,
}

/// The scheduler's device that is what an emulated one is on average.
pub(crate) fn device(config: SsdConfig) -> Device {
    let kib = config.mean_service.scale(config.length_slope / 4.0);
    Device {
        channels: config.channels.into(),
        request: config.mean_service.saturating_sub(kib.scale(4.0)),
        kib,
        flush: config.mean_service,
    }
}

impl World {
    pub(crate) fn new(config: SsdConfig, lag: Nanos) -> Self {
        Self {
            scheduler: Scheduler::new(device(config)),
            ssd: Ssd::new(config, 1).unwrap(),
            clients: Vec::new(),
            events: BinaryHeap::new(),
            sequence: 0,
            asks: BTreeSet::new(),
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            lag,
            random: Pcg64Mcg::seed_from_u64(1),
        }
    }

    /// A VM of one class.
    pub(crate) fn add(&mut self, share: Share, promise: Option<Promise>, load: Load) -> usize {
        let flow = self.scheduler.add_flow(share);
        let class = self.scheduler.add_class(flow, promise).unwrap();
        self.add_to(class, load)
    }

    /// A task of a class.
    pub(crate) fn add_to(&mut self, class: ClassId, load: Load) -> usize {
        self.add_later(class, load, Nanos::ZERO)
    }

    /// The same, which begins then.
    pub(crate) fn add_later(&mut self, class: ClassId, load: Load, begin: Nanos) -> usize {
        let index = self.clients.len();
        self.clients.push(Client { load, class, due: Nanos::ZERO, outcome: Outcome::default() });
        let first = match load {
            Load::Backlogged { depth, .. } => depth,
            _ => 1,
        };
        // Not all at the same time.
        let start = begin.saturating_add(Nanos::from_micros(7 * index as u64));
        self.clients[index].due = start;
        (0..first).for_each(|_| self.at(start, Event::Arrives(index)));
        index
    }

    fn at(&mut self, time: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    /// Lets it run until then and says what became of each client since it was last asked.
    pub(crate) fn run(&mut self, until: Nanos) -> Vec<Outcome> {
        while let Some(&Reverse((now, _, event))) = self.events.peek()
            && now <= until
        {
            self.events.pop();
            match event {
                Event::Arrives(client) => self.arrive(client, now),
                Event::Ends(ticket) => self.end(ticket, now),
                Event::Ask => {
                    self.asks.remove(&now);
                }
            }
            self.start(now);
        }
        self.clients.iter_mut().map(|client| std::mem::take(&mut client.outcome)).collect()
    }

    fn arrive(&mut self, client: usize, now: Nanos) {
        let Client { load, class, .. } = self.clients[client];
        let bytes = load.bytes();
        if let Load::Independent { every, .. } = load {
            let next = now.saturating_add(exponential(every, &mut self.random));
            self.at(next, Event::Arrives(client));
        }
        self.sequence += 1;
        let ticket = self.sequence;
        self.waiting.insert(ticket, (client, now, bytes));
        let request = (ticket, Kind::Write, Bytes::new(bytes));
        assert!(self.scheduler.submit(class, request, now));
    }

    fn start(&mut self, now: Nanos) {
        while let Some(started) = self.scheduler.next(now) {
            let (client, arrived, bytes) =
                self.waiting.remove(&started.ticket).expect("it waits, once");
            self.clients[client].outcome.waits.push(now.saturating_sub(arrived));
            let ends = self.ssd.submit(now, Bytes::new(bytes)).saturating_add(self.lag);
            let known =
                self.running.insert(started.ticket, (started.running, client, arrived, bytes));
            assert!(known.is_none());
            self.at(ends, Event::Ends(started.ticket));
        }
        if let Some(time) = self.scheduler.wake_at() {
            assert!(time > now, "who asks when it says so would ask without end");
            if self.asks.insert(time) {
                self.at(time, Event::Ask);
            }
        }
    }

    fn end(&mut self, ticket: u64, now: Nanos) {
        let (running, client, arrived, bytes) = self.running.remove(&ticket).expect("it runs");
        self.scheduler.complete(running, now);
        let after = now.saturating_add(self.lag);
        let of = &mut self.clients[client];
        of.outcome.responses.push(now.saturating_sub(arrived));
        of.outcome.bytes += bytes;
        let next = match of.load {
            Load::Paced { every, .. } => {
                of.due = of.due.saturating_add(every);
                of.due.max(after)
            }
            Load::Backlogged { .. } => after,
            Load::Thinking { between, .. } => after.saturating_add(between.draw(&mut self.random)),
            Load::Task { every, between, .. } => {
                of.due = of.due.saturating_add(every);
                of.due.max(after.saturating_add(between.draw(&mut self.random)))
            }
            Load::Independent { .. } => return,
        };
        self.at(next, Event::Arrives(client));
    }
}
