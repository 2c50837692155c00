//! What is counted, phase by phase.

use hdrhistogram::Histogram;
use rtvirtio_units::Nanos;

use crate::outcome::{Outcome, PhaseOutcome, Point};
use crate::scenario::{Phase, PhaseKind, Role, Scenario, Span};
use crate::settled::{Settled, settled};
use crate::world::{Counts, Done};

/// Latencies that are told apart, ns; to 1 %.
const RANGE: (u64, u64) = (100, 100_000_000_000);
const DIGITS: u8 = 2;
/// Samples of a point of the timeline: 100 ms.
const POINT: usize = 10;
/// Most decisions that are kept.
const MAX_DECISIONS: usize = 100_000;

/// Sums over everything since the start, ns.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    pub(crate) now: u64,
    pub(crate) vcpus_ran: u64,
    pub(crate) vcpus_waited: u64,
    pub(crate) computed: u64,
    pub(crate) busy: u64,
    pub(crate) polled: u64,
    pub(crate) io_ran: u64,
    /// IOThreads that there are.
    pub(crate) threads: u32,
}

/// A 10 ms.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    requests: u32,
    threads: u32,
    moves: u32,
}

/// What a phase has had so far.
#[derive(Debug)]
struct Tally {
    latencies: Histogram<u64>,
    requests: u64,
    bytes: u64,
    frames: u64,
    frame_bytes: u64,
    sum: u128,
    longest: u64,
    moves: u32,
    added: u32,
    removed: u32,
    pauses: Histogram<u64>,
    samples: Vec<Sample>,
}

fn histogram() -> Histogram<u64> {
    let made = Histogram::new_with_bounds(RANGE.0, RANGE.1, DIGITS);
    made.expect("the bounds are in order and the digits in range")
}

impl Tally {
    fn new() -> Self {
        Self {
            latencies: histogram(),
            requests: 0,
            bytes: 0,
            frames: 0,
            frame_bytes: 0,
            sum: 0,
            longest: 0,
            moves: 0,
            added: 0,
            removed: 0,
            pauses: histogram(),
            samples: Vec::new(),
        }
    }
}

/// Counts.
#[derive(Debug)]
pub(crate) struct Meter {
    now: Tally,
    here: Sample,
    /// When the last sample ended, ns.
    sampled: u64,
    phase: Option<(Phase, Totals)>,
    phases: Vec<PhaseOutcome>,
    whole: Tally,
    decisions: Vec<Done>,
    /// Compute that each phase asks for, CPUs × ns.
    wanted: Vec<f64>,
    ended: u64,
    last: Totals,
}

impl Meter {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let burners = || scenario.vms.iter().flat_map(|vm| &vm.burners);
        let wanted = |phase: &Phase| {
            let overlap = |span: Span| {
                let stop = span.stop.min(phase.span.stop);
                stop.saturating_sub(span.start.max(phase.span.start)).get() as f64
            };
            burners().map(|burner| burner.share * overlap(burner.span)).sum()
        };
        Self {
            now: Tally::new(),
            here: Sample::default(),
            sampled: 0,
            phase: None,
            phases: Vec::new(),
            whole: Tally::new(),
            decisions: Vec::new(),
            wanted: scenario.phases.iter().map(wanted).collect(),
            ended: 0,
            last: Totals::default(),
        }
    }

    /// Requests whose end clients have seen.
    pub(crate) const fn ended(&self) -> u64 {
        self.ended
    }

    /// A client has seen the end of a request after `ns`.
    pub(crate) fn ended_one(&mut self, ns: u64, bytes: u32, role: Role) {
        self.ended += 1;
        self.here.requests += 1;
        self.now.latencies.saturating_record(ns);
        self.now.requests += 1;
        self.now.bytes += u64::from(bytes);
        if role != Role::Disk {
            self.now.frames += 1;
            self.now.frame_bytes += u64::from(bytes);
        }
        self.now.sum += u128::from(ns);
        self.now.longest = self.now.longest.max(ns);
    }

    pub(crate) fn moved(&mut self) {
        self.now.moves += 1;
        self.here.moves += 1;
    }

    pub(crate) const fn added(&mut self) {
        self.now.added += 1;
    }

    pub(crate) const fn removed(&mut self) {
        self.now.removed += 1;
    }

    /// A queue was not served for so long, because it moved.
    pub(crate) fn paused(&mut self, ns: u64) {
        self.now.pauses.saturating_record(ns);
    }

    pub(crate) fn decided(&mut self, done: Done) {
        if self.decisions.len() < MAX_DECISIONS {
            self.decisions.push(done);
        }
    }

    /// 10 ms are over, in which there were so many IOThreads.
    pub(crate) fn sample(&mut self, now: u64, threads: u32) {
        if self.phase.is_some_and(|(_, began)| began.now == now) {
            // They were the last phase's, which has them.
            return;
        }
        self.here.threads = threads;
        self.now.samples.push(std::mem::take(&mut self.here));
        self.sampled = now;
    }

    /// A phase begins.
    pub(crate) fn begin(&mut self, index: usize, phase: Phase, totals: Totals) {
        self.end_phase(totals);
        debug_assert_eq!(index, self.phases.len());
        self.phase = Some((phase, totals));
    }

    /// Nothing more comes.
    pub(crate) fn close(&mut self, totals: Totals) {
        self.end_phase(totals);
        self.last = totals;
    }

    fn end_phase(&mut self, totals: Totals) {
        let Some((phase, before)) = self.phase.take() else { return };
        let here = std::mem::take(&mut self.here);
        match self.now.samples.last_mut() {
            // The last 10 ms ended at this moment too, and have their sample.
            Some(last) if self.sampled == totals.now => {
                last.requests += here.requests;
                last.moves += here.moves;
            }
            _ => self.now.samples.push(Sample { threads: totals.threads, ..here }),
        }
        let tally = std::mem::replace(&mut self.now, Tally::new());
        let whole = &mut self.whole;
        // Both have the same bounds.
        let _ = whole.latencies.add(&tally.latencies);
        let _ = whole.pauses.add(&tally.pauses);
        whole.requests += tally.requests;
        whole.bytes += tally.bytes;
        whole.frames += tally.frames;
        whole.frame_bytes += tally.frame_bytes;
        whole.sum += tally.sum;
        whole.longest = whole.longest.max(tally.longest);
        whole.moves += tally.moves;
        whole.added += tally.added;
        whole.removed += tally.removed;
        whole.samples.extend_from_slice(&tally.samples);
        let wanted = self.wanted.get(self.phases.len()).copied().unwrap_or_default();
        self.phases.push(outcome(Some(phase.kind), &tally, &before, &totals, wanted));
    }

    pub(crate) fn outcome(self, counts: Counts) -> Outcome {
        let wanted = self.wanted.iter().take(self.phases.len()).sum();
        let whole = outcome(None, &self.whole, &Totals::default(), &self.last, wanted);
        Outcome { phases: self.phases, whole, decisions: self.decisions, counts }
    }
}

fn outcome(
    kind: Option<PhaseKind>,
    tally: &Tally,
    before: &Totals,
    after: &Totals,
    wanted: f64,
) -> PhaseOutcome {
    let ns = (after.now - before.now).max(1) as f64;
    let seconds = ns / 1e9;
    let cpus = |of: fn(&Totals) -> u64| (of(after) - of(before)) as f64 / ns;
    let samples = &tally.samples;
    let threads: u64 = samples.iter().map(|sample| u64::from(sample.threads)).sum();
    let io_cores = threads as f64 / (samples.len() as f64).max(1.0);
    let iops = tally.requests as f64 / seconds;
    let latency = |quantile| Nanos::new(tally.latencies.value_at_quantile(quantile));
    let mean = tally.sum.checked_div(u128::from(tally.requests)).unwrap_or(0);
    let has_pauses = !tally.pauses.is_empty();
    PhaseOutcome {
        kind,
        start: Nanos::new(before.now),
        length: Nanos::new(after.now - before.now),
        requests: tally.requests,
        bytes: tally.bytes,
        frames: tally.frames,
        frame_bytes: tally.frame_bytes,
        iops,
        io_cores,
        iops_per_core: if io_cores > 0.0 { iops / io_cores } else { 0.0 },
        busy: cpus(|of| of.busy),
        polled: cpus(|of| of.polled),
        io_ran: cpus(|of| of.io_ran),
        vcpus_ran: cpus(|of| of.vcpus_ran),
        vcpus_waited: cpus(|of| of.vcpus_waited),
        computed: cpus(|of| of.computed),
        compute_wanted: wanted / ns,
        mean: Nanos::new(mean as u64),
        p50: latency(0.5),
        p99: latency(0.99),
        p999: latency(0.999),
        longest: Nanos::new(tally.longest),
        moves: tally.moves,
        added: tally.added,
        removed: tally.removed,
        pause_p99: has_pauses.then(|| Nanos::new(tally.pauses.value_at_quantile(0.99))),
        settled: kind.filter(|kind| kind.is_steady()).and_then(|_| {
            let requests: Vec<u32> = samples.iter().map(|sample| sample.requests).collect();
            match settled(&requests) {
                Settled::After(time) => Some(time),
                Settled::TooLittle | Settled::Never => None,
            }
        }),
        timeline: samples
            .chunks(POINT)
            .map(|of| Point {
                requests: of.iter().map(|sample| sample.requests).sum(),
                io_cores: of.iter().map(|sample| f64::from(sample.threads)).sum::<f64>()
                    / of.len() as f64,
                moves: of.iter().map(|sample| sample.moves).sum(),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_that_ends_with_a_sample_has_no_empty_one_behind_it() {
        let ms = Nanos::from_millis;
        let phase = |start, stop| Phase {
            kind: PhaseKind::AllHot,
            span: Span { start: ms(start), stop: ms(stop) },
        };
        let phases = vec![phase(0, 100), phase(100, 200)];
        let scenario = Scenario { seed: 1, phases: phases.clone(), vms: Vec::new() };
        let at = |of: u64| Totals { now: ms(of).get(), threads: 1, ..Totals::default() };
        let mut meter = Meter::new(&scenario);
        meter.begin(0, phases[0], at(0));
        for sample in 1..=10 {
            meter.ended_one(1_000, 4_096, Role::Disk);
            meter.sample(ms(10 * sample).get(), 1);
        }
        // At the moment of the last sample, and after it.
        meter.ended_one(1_000, 4_096, Role::Disk);
        meter.begin(1, phases[1], at(100));
        meter.close(at(200));
        let outcome = meter.outcome(Counts { issued: 11, ended: 11, in_flight: 0 });
        let points: Vec<u32> =
            outcome.phases[0].timeline.iter().map(|point| point.requests).collect();
        assert_eq!(points, [11]);
        assert_eq!((outcome.phases[0].requests, outcome.phases[0].io_cores), (11, 1.0));
    }
}
