//! A VM's disk: one client with a thread for each queue, which plays its streams.
//!
//! A thread blocks until its server calls, takes all that has ended, and submits anew, like the
//! simulator's. Every request has a slot with an area of the disk of its own ([`super::content`]); reads
//! are compared whole, a completion that nothing waits for ends the trial, and so does one that does not
//! come.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use rtvirtio_sim::scenario::{Load, Scenario, Span, Stream, Vm};
use rtvirtio_units::{Bytes, Nanos};

use super::content::{Area, SECTOR, Unverified};
use super::vcpus::{Clock, Use, Vcpus};
use crate::client::{Client, Ended, Endpoint, MAX_DEPTH, Queue, Shape};
use crate::random::Random;
use crate::window::latencies;

/// Length of a sample, ns. As the simulator's.
pub const SAMPLE_NS: u64 = rtvirtio_iocores::SAMPLE.get();
/// How long a server may complete nothing.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait without a look at whether to stop.
const NAP: Duration = Duration::from_millis(50);
/// Of its requests, in 256ths.
const READS: u64 = 179;
/// Least size of a slot's area.
pub const AREA: Bytes = Bytes::from_kib(256);

/// What a queue has seen end.
#[derive(Debug, Clone)]
pub struct Tally {
    /// Of each request, ns.
    pub latencies: Histogram<u64>,
    /// Of all of them.
    pub bytes: u64,
}

impl Tally {
    /// Nothing yet.
    ///
    /// # Errors
    /// Never with these bounds.
    pub fn new() -> Result<Self> {
        Ok(Self { latencies: latencies()?, bytes: 0 })
    }

    /// Adds another one's.
    ///
    /// # Errors
    /// Never: all have the same bounds.
    pub fn add(&mut self, other: &Self) -> Result<()> {
        self.latencies.add(&other.latencies)?;
        self.bytes += other.bytes;
        Ok(())
    }
}

/// What queues have seen end, and when.
#[derive(Debug)]
pub struct Record {
    ends: Vec<Nanos>,
    /// Of each phase.
    pub phases: Vec<Tally>,
    /// Requests of each sample.
    pub samples: Vec<u32>,
    /// Sectors that were compared.
    pub checked: u64,
}

impl Record {
    /// Nothing yet, of this scenario's phases.
    ///
    /// # Errors
    /// Never with these bounds.
    pub fn new(scenario: &Scenario) -> Result<Self> {
        let phases = scenario.phases.iter();
        Ok(Self {
            ends: phases.clone().map(|phase| phase.span.stop).collect(),
            phases: phases.map(|_| Tally::new()).collect::<Result<_>>()?,
            samples: vec![0; scenario.length().get().div_ceil(SAMPLE_NS) as usize],
            checked: 0,
        })
    }

    /// Requests of `bytes` each ended at `now`; what ends after the scenario counts nowhere.
    fn ended(&mut self, now: Nanos, latency: u64, bytes: usize) {
        let phase = self.ends.partition_point(|&end| end <= now);
        let Some(tally) = self.phases.get_mut(phase) else { return };
        tally.latencies.saturating_record(latency);
        tally.bytes += bytes as u64;
        if let Some(sample) = self.samples.get_mut((now.get() / SAMPLE_NS) as usize) {
            *sample += 1;
        }
    }

    /// Adds another queue's.
    ///
    /// # Errors
    /// Never: all have the same bounds.
    pub fn add(&mut self, other: &Self) -> Result<()> {
        for (mine, other) in self.phases.iter_mut().zip(&other.phases) {
            mine.add(other)?;
        }
        for (mine, other) in self.samples.iter_mut().zip(&other.samples) {
            *mine += other;
        }
        self.checked += other.checked;
        Ok(())
    }
}

/// A request that is on its way.
#[derive(Debug, Clone, Copy)]
struct Flying {
    /// When its latency begins.
    issued: Nanos,
    sector: usize,
    bytes: usize,
    is_read: bool,
}

#[derive(Debug)]
struct Slot {
    area: Area,
    flying: Option<Flying>,
}

/// What a queue has, from one connection of its disk to the next.
#[derive(Debug)]
pub(super) struct QueueState {
    vm: usize,
    queue: usize,
    slots: Vec<Slot>,
    seed: u64,
    random: Random,
    pub record: Record,
}

/// Bytes of a buffer and of an area, for the largest request of a scenario.
///
/// # Errors
/// If a request is no whole number of sectors.
pub(super) fn area(scenario: &Scenario) -> Result<usize> {
    let blocks = || scenario.vms.iter().flat_map(|vm| &vm.streams).map(|s| s.block.get() as usize);
    ensure!(blocks().all(|block| block % SECTOR == 0), "a block size is no multiple of {SECTOR}");
    Ok(blocks().max().unwrap_or(0).max(AREA.get() as usize))
}

/// Bytes of a disk.
pub(super) fn disk_bytes(scenario: &Scenario) -> Result<u64> {
    let queues = scenario.vms.iter().map(|vm| usize::from(vm.queues)).max().unwrap_or(1);
    Ok((queues * MAX_DEPTH * area(scenario)?) as u64)
}

impl QueueState {
    pub(super) fn new(scenario: &Scenario, vm: usize, queue: usize) -> Result<Self> {
        let sectors = area(scenario)? / SECTOR;
        let first = |slot: usize| ((queue * MAX_DEPTH + slot) * sectors) as u64;
        let seed = scenario.seed ^ ((vm as u64 + 1) << 48);
        let slot = |slot| Slot { area: Area::new(seed, first(slot), sectors), flying: None };
        Ok(Self {
            vm,
            queue,
            slots: (0..MAX_DEPTH).map(slot).collect(),
            seed: seed ^ ((queue as u64 + 1) << 40),
            random: Random::new(seed ^ ((queue as u64 + 1) << 40)),
            record: Record::new(scenario)?,
        })
    }

    fn unverified(&self, what: String) -> Unverified {
        Unverified { vm: self.vm, queue: self.queue, what }
    }

    /// Times between requests of a rate (Poisson): the same for all policies, whatever each of them gets done before.
    fn gaps(&self, stream: &Stream, rate: f64) -> impl FnMut() -> Nanos + use<> {
        let mut random = Random::new(!self.seed ^ stream.span.start.get());
        move || {
            let uniform = (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
            Nanos::from_secs_f64(-(1.0 - uniform).ln() / rate).max(Nanos::new(1))
        }
    }

    /// Starts a request of a slot that has none.
    fn submit(&mut self, on: &mut Queue, slot: usize, bytes: usize, issued: Nanos) {
        let sectors = bytes / SECTOR;
        let places = self.slots[slot].area.sectors() / sectors;
        let sector = self.random.below(places as u64) as usize * sectors;
        let is_read = self.random.next() & 255 < READS;
        let of = &mut self.slots[slot];
        let offset = of.area.offset(sector);
        if is_read {
            // Whoever reads nothing at all must not find what was read before.
            on.buffer(slot)[..SECTOR].fill(0xEE);
            on.read(slot, offset, bytes);
        } else {
            of.area.fill(sector, &mut on.buffer(slot)[..bytes]);
            on.write(slot, offset, bytes);
        }
        of.flying = Some(Flying { issued, sector, bytes, is_read });
    }

    /// Takes the end of a request.
    fn take(&mut self, on: &mut Queue, ended: Ended, now: Nanos) -> Result<(), Unverified> {
        let Ended { slot, result } = ended;
        let flying = self.slots.get_mut(slot).and_then(|slot| slot.flying.take());
        let Some(flying) = flying else {
            let what =
                format!("request {slot} ended that was not in flight: repeated or misplaced");
            return Err(self.unverified(what));
        };
        let Flying { issued, sector, bytes, is_read } = flying;
        if result != 0 {
            return Err(self.unverified(format!("request {slot} failed: errno {}", -result)));
        }
        if is_read {
            let area = &self.slots[slot].area;
            area.check(sector, &on.buffer(slot)[..bytes])
                .map_err(|wrong| self.unverified(wrong.to_string()))?;
            self.record.checked += (bytes / SECTOR) as u64;
        }
        self.record.ended(now, now.saturating_sub(issued).get(), bytes);
        Ok(())
    }

    /// Waits for something to end, for `patience` at most; `next` is asked for each what is to follow.
    fn wait(
        &mut self,
        on: &mut Queue,
        clock: &Clock,
        patience: Duration,
        mut next: impl FnMut(&mut Self, &mut Queue, usize, Nanos),
    ) -> Result<usize> {
        let mut failed = None;
        let mut seen: Option<Nanos> = None;
        let ended = on.wait(patience, |on, ended| {
            let now = *seen.get_or_insert_with(|| clock.now());
            match self.take(on, ended, now) {
                Ok(()) if failed.is_none() => next(self, on, ended.slot, now),
                Ok(()) => {}
                Err(error) => failed = failed.take().or(Some(error)),
            }
        })?;
        failed.map_or(Ok(ended), |error| Err(error.into()))
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self, on: &mut Queue, clock: &Clock) -> Result<()> {
        let mut since = Instant::now();
        while on.flying() > 0 {
            if self.wait(on, clock, NAP, |_, _, _, _| ())? > 0 {
                since = Instant::now();
            }
            self.not_lost(on, since)?;
        }
        Ok(())
    }

    fn not_lost(&self, on: &Queue, since: Instant) -> Result<(), Unverified> {
        if since.elapsed() < PATIENCE {
            return Ok(());
        }
        let (flying, patience) = (on.flying(), PATIENCE.as_secs());
        Err(self.unverified(format!("{flying} requests have not ended for {patience} s: lost")))
    }

    /// Keeps so many requests in flight.
    fn full(&mut self, on: &mut Queue, stream: &Stream, depth: u16, clock: &Clock) -> Result<()> {
        let (bytes, stop) = (stream.block.get() as usize, stream.span.stop);
        let now = clock.now();
        (0..usize::from(depth).min(on.depth())).for_each(|slot| self.submit(on, slot, bytes, now));
        let mut since = Instant::now();
        while on.flying() > 0 {
            let is_over = clock.is_stopped();
            let ended = self.wait(on, clock, NAP, |state, on, slot, now| {
                if now < stop && !is_over {
                    state.submit(on, slot, bytes, now);
                }
            })?;
            if ended > 0 {
                since = Instant::now();
            }
            self.not_lost(on, since)?;
        }
        Ok(())
    }

    /// Starts so many requests a second; a latency begins when its request is due.
    fn paced(&mut self, on: &mut Queue, stream: &Stream, rate: f64, clock: &Clock) -> Result<()> {
        let (bytes, stop) = (stream.block.get() as usize, stream.span.stop);
        let mut free: Vec<usize> = (0..on.depth()).rev().collect();
        let mut gap = self.gaps(stream, rate);
        let mut due = stream.span.start.saturating_add(gap());
        let mut since = Instant::now();
        loop {
            let now = clock.now();
            if now >= stop || clock.is_stopped() {
                return self.drain(on, clock);
            }
            while due <= now
                && let Some(slot) = free.pop()
            {
                self.submit(on, slot, bytes, due);
                due = due.saturating_add(gap());
            }
            // With a full ring it is an end that is waited for.
            let until = if free.is_empty() { stop } else { due.min(stop) };
            let left = Duration::from(until.saturating_sub(now)).min(NAP);
            if on.flying() == 0 {
                std::thread::sleep(left);
                since = Instant::now();
            } else if self.wait(on, clock, left, |_, _, slot, _| free.push(slot))? > 0 {
                since = Instant::now();
            }
            self.not_lost(on, since)?;
        }
    }

    /// Plays what the queue does while its disk is there.
    fn play(
        &mut self,
        on: &mut Queue,
        streams: &[Stream],
        plugged: Span,
        clock: &Clock,
        vcpus: &Vcpus,
    ) -> Result<()> {
        let _vcpu = vcpus.enter(Use::Io)?;
        let inside = |stream: &&Stream| {
            usize::from(stream.queue) == self.queue
                && plugged.start <= stream.span.start
                && stream.span.stop <= plugged.stop
        };
        let mut mine: Vec<Stream> = streams.iter().filter(inside).copied().collect();
        mine.sort_by_key(|stream| stream.span.start);
        for stream in &mine {
            if !clock.sleep_until(stream.span.start) {
                break;
            }
            match stream.load {
                Load::Depth(depth) => self.full(on, stream, depth, clock)?,
                Load::Rate(rate) => self.paced(on, stream, rate.get(), clock)?,
            }
        }
        clock.sleep_until(plugged.stop);
        Ok(())
    }

    /// Reads all areas and compares them.
    fn check(&mut self, on: &mut Queue, clock: &Clock) -> Result<()> {
        for slot in 0..on.depth() {
            let of = &mut self.slots[slot];
            let bytes = of.area.sectors() * SECTOR;
            on.read(slot, of.area.offset(0), bytes);
            of.flying = Some(Flying { issued: clock.now(), sector: 0, bytes, is_read: true });
            self.drain(on, clock)?;
        }
        Ok(())
    }
}

/// Plays a VM's disk: it comes and goes as told. When the scenario is over, all of it is read and compared.
pub(super) fn play(
    (scenario, vm): (&Scenario, usize),
    socket: &Path,
    states: &mut [QueueState],
    clock: &Clock,
    vcpus: &Vcpus,
) -> Result<()> {
    let vm: &Vm = &scenario.vms[vm];
    let shape = Shape { queues: states.len(), depth: MAX_DEPTH, buffer: area(scenario)? };
    let connect = || {
        let client = Client::connect(Endpoint::Socket(socket), shape);
        client.with_context(|| format!("connect to {}", socket.display()))
    };
    for &plugged in &vm.plugged {
        // Those that are there from the start are connected before it.
        if plugged.start > Nanos::ZERO && !clock.sleep_until(plugged.start) {
            return Ok(());
        }
        let mut client = connect()?;
        let played = client.run(states.iter_mut(), |on, state| {
            let played = state.play(on, &vm.streams, plugged, clock, vcpus);
            played.inspect_err(|_| clock.stop())
        });
        played.into_iter().collect::<Result<()>>()?;
    }
    if !clock.sleep_until(scenario.length()) {
        return Ok(());
    }
    let mut client = connect()?;
    let checked = client.run(states.iter_mut(), |on, state| state.check(on, clock));
    checked.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_sim::scenario::{Phase, PhaseKind};
    use rtvirtio_units::{Bytes, Iops};

    use super::*;

    fn scenario() -> Scenario {
        let span = |start, stop| Span { start: Nanos::new(start), stop: Nanos::new(stop) };
        let phase = |start, stop| Phase { kind: PhaseKind::Idle, span: span(start, stop) };
        let vm = Vm { queues: 1, pairs: 0, plugged: vec![], streams: vec![], burners: vec![] };
        let phases = vec![phase(0, 20_000_000), phase(20_000_000, 40_000_000)];
        Scenario { seed: 1, phases, vms: vec![vm] }
    }

    #[test]
    fn end_counts_in_its_phase_and_sample_and_nowhere_after_the_last() {
        let mut record = Record::new(&scenario()).unwrap();
        let end = |record: &mut Record, ns| record.ended(Nanos::new(ns), 1_000, 4_096);
        for ns in [0, 19_999_999, 20_000_000, 39_999_999, 40_000_000] {
            end(&mut record, ns);
        }
        let n: Vec<u64> = record.phases.iter().map(|tally| tally.latencies.len()).collect();
        assert_eq!((n, &record.samples[..]), (vec![2, 2], &[1, 1, 1, 1][..]));
        let mut sum = Record::new(&scenario()).unwrap();
        sum.add(&record).unwrap();
        sum.add(&record).unwrap();
        assert_eq!((sum.phases[1].latencies.len(), sum.phases[1].bytes), (4, 16_384));
        assert_eq!(sum.samples, [2, 2, 2, 2]);
    }

    #[test]
    fn requests_of_a_rate_come_as_often_as_it_says() {
        let scenario = scenario();
        let [first, second] = [0, 1].map(|queue| QueueState::new(&scenario, 0, queue).unwrap());
        let span = Span { start: Nanos::ZERO, stop: Nanos::from_millis(20) };
        let load = Load::Rate(Iops::new(1_000.0).unwrap());
        let stream = Stream { queue: 0, span, block: Bytes::from_kib(4), load };
        let gaps = |of: &QueueState, n| -> Vec<u64> {
            let mut gap = of.gaps(&stream, 1_000.0);
            (0..n).map(|_| gap().get()).collect()
        };
        let mean = gaps(&first, 20_000).iter().sum::<u64>() as f64 / 20_000.0;
        assert!((mean / 1e6 - 1.0).abs() < 0.03, "{mean}");
        // The same again, and of another queue others.
        assert_eq!(gaps(&first, 3), gaps(&first, 3));
        assert_ne!(gaps(&first, 3), gaps(&second, 3));
    }

    #[test]
    fn areas_of_two_queues_do_not_meet() {
        let scenario = scenario();
        let [first, second] = [0, 1].map(|queue| QueueState::new(&scenario, 0, queue).unwrap());
        let end = first.slots.last().map(|slot| slot.area.offset(slot.area.sectors())).unwrap();
        assert_eq!(second.slots[0].area.offset(0), end);
        // 64 areas of 256 KiB.
        assert_eq!((end, disk_bytes(&scenario).unwrap()), (16 << 20, 16 << 20));
    }
}
