//! One server with its VMs, for one scenario, as figures of each phase.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_sim::scenario::{self, Scenario};
use rtvirtio_sim::{Settled, settled};
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_testbed::scenario::{
    Clock, Played, SAMPLE_NS, TICK, Tally, Threads, Tick, Trial, What,
};
use rtvirtio_testbed::window::{p99_us, us};
use rtvirtio_units::Nanos;

use super::cell::{Phase, Rest, Settings, Timeline};

/// From the server's start to a scenario's: for all VMs to connect.
const LEAD: Duration = Duration::from_secs(2);
/// To start a server and to end it, the last comparison among it.
const AROUND: Duration = Duration::from_secs(3);
/// Samples in a tick.
const SAMPLES: usize = 10;

/// What is to run, under a policy that begins with so many IOThreads.
pub(crate) fn trial<'a>(
    program: &'a Path,
    settings: &'a Settings,
    scenario: &'a Scenario,
    (policy, threads): (&'a str, u16),
) -> Trial<'a> {
    let Settings { queues, ref disk, cpu_us, kib_ns, .. } = *settings;
    let (vcpus, lead) = (None, LEAD);
    Trial { program, scenario, queues, disk, cpu_us, kib_ns, policy, threads, vcpus, lead }
}

/// How long a trial takes.
pub(crate) fn duration(scenario: &Scenario) -> Duration {
    LEAD + AROUND + Duration::from(scenario.length())
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) phases: Vec<Phase>,
    /// Of each of them.
    pub(crate) tallies: Vec<Tally>,
    pub(crate) whole: Phase,
    pub(crate) timeline: Timeline,
    pub(crate) checked: u64,
    pub(crate) canary: Canary,
    pub(crate) machine: Machine,
}

impl Measured {
    /// Of a trial, with `beside` in a thread of its own.
    pub(crate) fn of(
        trial: &Trial<'_>,
        interrupted: &Interrupted,
        beside: impl FnOnce(&ControlClient, &Clock) -> Result<()> + Send,
    ) -> Result<Self> {
        let played = trial.play_beside(interrupted, beside)?;
        let Trial { scenario, threads, .. } = *trial;
        let threads = Threads { first: threads.into(), happened: &played.happened };
        let record = &played.record;
        let mut phases = Vec::new();
        let mut all = Tally::new()?;
        for (phase, tally) in scenario.phases.iter().zip(&record.phases) {
            phases.push(Phase::of(scenario, Some(*phase), tally, &played, &threads));
            all.add(tally)?;
        }
        let whole = Phase::of(scenario, None, &all, &played, &threads);
        let mut timeline = Timeline::default();
        for (point, samples) in record.samples.chunks(SAMPLES).enumerate() {
            let start = Nanos::new(TICK.get() * point as u64);
            let stop = start.saturating_add(TICK).min(scenario.length());
            timeline.requests.push(samples.iter().sum());
            timeline.io_cores.push(threads.mean(start, stop) as f32);
            timeline.moves.push(threads.count(What::Moved, start, stop));
        }
        let Played { record, canary, machine, .. } = played;
        let (tallies, checked) = (record.phases, record.checked);
        Ok(Self { phases, tallies, whole, timeline, checked, canary, machine })
    }
}

impl Phase {
    /// Of one phase, or of all.
    fn of(
        scenario: &Scenario,
        of: Option<scenario::Phase>,
        tally: &Tally,
        played: &Played,
        threads: &Threads<'_>,
    ) -> Self {
        let length = scenario.length();
        let (start, stop) = of.map_or((Nanos::ZERO, length), |of| (of.span.start, of.span.stop));
        let kind = of.map(|of| of.kind);
        let (before, after) = (played.tick(start), played.tick(stop));
        let passed = after.at.saturating_sub(before.at).as_secs_f64().max(1e-9);
        let cpus =
            |of: fn(&Tick) -> Nanos| of(&after).saturating_sub(of(&before)).as_secs_f64() / passed;
        let seconds = stop.saturating_sub(start).as_secs_f64();
        let sample = |at: Nanos| (at.get() / SAMPLE_NS) as usize;
        let samples = &played.record.samples;
        let samples = &samples[sample(start)..sample(stop).min(samples.len())];
        let rest = match (kind.is_some_and(|kind| kind.is_steady()), settled(samples)) {
            (false, _) | (_, Settled::TooLittle) => Rest::NotJudged,
            (_, Settled::Never) => Rest::Never,
            (_, Settled::After(time)) => Rest::AfterMs(time.as_millis_f64()),
        };
        let moves_until = |at: Nanos| threads.count(What::Moved, start, at.min(stop));
        let [p99_us, low, high] = p99_us(&tally.latencies);
        let burners = scenario.vms.iter().flat_map(|vm| &vm.burners);
        let wanted = burners.map(|burner| {
            let (from, to) = (burner.span.start.max(start), burner.span.stop.min(stop));
            burner.share * to.saturating_sub(from).as_secs_f64()
        });
        Self {
            kind,
            seconds,
            requests: tally.latencies.len(),
            bytes: tally.bytes,
            io_cores: threads.mean(start, stop),
            io_ran: cpus(|of| of.io),
            vcpus_ran: cpus(|of| of.vcpus.ran),
            vcpus_waited: cpus(|of| of.vcpus.waited),
            computed: cpus(|of| of.vcpus.computed),
            compute_wanted: wanted.sum::<f64>() / seconds.max(1e-9),
            mean_us: tally.latencies.mean() / 1e3,
            p50_us: us(&tally.latencies, 0.5),
            p99_us,
            p99_interval_us: [low, high],
            p999_us: us(&tally.latencies, 0.999),
            moves: moves_until(stop),
            most_moves: threads.most_moves(start, stop),
            added: threads.count(What::Added, start, stop),
            removed: threads.count(What::Removed, start, stop),
            rest,
            moves_to_rest: match rest {
                Rest::AfterMs(ms) => {
                    moves_until(start.saturating_add(Nanos::from_secs_f64(ms / 1e3)))
                }
                Rest::Never | Rest::NotJudged => moves_until(stop),
            },
            to_one_ms: threads.to_one(start, stop).map(Nanos::as_millis_f64),
        }
    }
}
