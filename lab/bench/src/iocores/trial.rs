//! One server with its VMs, for one scenario.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError};
use rtvirtio_sim::scenario::{self, Scenario};
use rtvirtio_sim::{Settled, settled};
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_units::{CpuId, Nanos};

use super::cell::{Phase, Rest, Settings, Timeline};
use super::client::{self, QueueState, Record, SAMPLE_NS, Tally};
use super::machine::{Layout, cpus};
use super::vcpus::{Clock, Times, Vcpus, compute, lanes};
use super::watch::{Events, Happened, IoCpu, Threads, What};
use crate::dataplane::server::serve;
use crate::window::p99_us;
use rtvirtio_calibrate::load::{CanaryThread, MachineSample};

/// From the server's start to a scenario's: for all VMs to connect, or their first requests are late.
pub(crate) const LEAD: Duration = Duration::from_secs(2);
/// To start a server and to end it, the last comparison among it.
const AROUND: Duration = Duration::from_secs(3);
/// How often times are looked at.
const TICK: Nanos = Nanos::from_millis(100);
/// Samples in it.
const SAMPLES: usize = 10;

/// What is to run.
#[derive(Debug)]
pub(crate) struct Trial<'a> {
    /// The `rtvirtio` that serves.
    pub(crate) program: &'a Path,
    pub(crate) settings: &'a Settings,
    pub(crate) scenario: &'a Scenario,
    /// As the server's configuration names it.
    pub(crate) policy: &'a str,
    /// IOThreads at the start.
    pub(crate) threads: u16,
    /// CPUs that its vCPUs may run on; none: all of the trial.
    pub(crate) vcpus: Option<Vec<CpuId>>,
    /// From the server's start to the scenario's.
    pub(crate) lead: Duration,
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

/// Times at a tick.
#[derive(Debug, Clone, Copy, Default)]
struct Tick {
    at: Nanos,
    /// IOThreads on a CPU.
    io: Nanos,
    vcpus: Times,
}

/// How long a trial takes.
pub(crate) fn duration(scenario: &Scenario) -> Duration {
    LEAD + AROUND + Duration::from(scenario.length())
}

impl Trial<'_> {
    pub(crate) fn run(&self, interrupted: &Interrupted) -> Result<Measured> {
        self.run_beside(interrupted, |_, _| Ok(()))
    }

    /// Runs it, and `beside` in a thread of its own from the scenario's start on.
    pub(crate) fn run_beside(
        &self,
        interrupted: &Interrupted,
        beside: impl FnOnce(&ControlClient, &Clock) -> Result<()> + Send,
    ) -> Result<Measured> {
        let directory = tempfile::Builder::new().prefix("rtvirtio-iocores-").tempdir()?;
        let cpus = cpus()?;
        let layout = Layout {
            directory: directory.path(),
            cpus: &cpus,
            vms: self.scenario.vms.len() as u16,
            queues: self.settings.queues,
            disk: &self.settings.disk,
            bytes: client::disk_bytes(self.scenario)?,
            cpu_us: self.settings.cpu_us,
            kib_ns: self.settings.kib_ns,
            seed: self.scenario.seed,
        };
        let toml = layout.toml(self.policy, self.threads);
        let (played, events) = serve(
            self.program,
            &toml,
            directory.path(),
            &layout.last_socket(),
            interrupted,
            |server| {
                let control = ControlClient::new(layout.control());
                let clock = Arc::new(Clock::after(self.lead));
                let events = Events::start(&control, &clock)?;
                let beside = |clock: &Clock| beside(&control, clock);
                Ok((self.play(&layout, server.id(), &clock, interrupted, beside)?, events))
            },
        )?;
        // They end with the server.
        self.measured(played, &events.end()?)
    }

    fn play(
        &self,
        layout: &Layout<'_>,
        server: u32,
        clock: &Clock,
        interrupted: &Interrupted,
        beside: impl FnOnce(&Clock) -> Result<()> + Send,
    ) -> Result<Played> {
        let scenario = self.scenario;
        let vcpus = Vcpus::new(self.vcpus.clone().unwrap_or_else(|| layout.cpus.to_vec()));
        let states = |(vm, of): (usize, &scenario::Vm)| {
            let queue = |queue| QueueState::new(scenario, vm, queue);
            (0..usize::from(of.queues)).map(queue).collect::<Result<Vec<_>>>()
        };
        let mut states = scenario.vms.iter().enumerate().map(states).collect::<Result<Vec<_>>>()?;
        let burners: Vec<_> = scenario.vms.iter().flat_map(|vm| lanes(&vm.burners)).collect();
        let watched = std::thread::scope(|scope| {
            let vcpus = &vcpus;
            let mut threads = Vec::new();
            for (vm, states) in states.iter_mut().enumerate() {
                let socket = layout.socket(vm);
                threads.push(scope.spawn(move || {
                    client::play((scenario, vm), &socket, states, clock, vcpus)
                        .inspect_err(|_| clock.stop())
                }));
            }
            for (number, lane) in (0..).zip(&burners) {
                threads.push(scope.spawn(move || compute(lane, number, clock, vcpus)));
            }
            threads.push(scope.spawn(move || {
                if clock.sleep_until(Nanos::ZERO) { beside(clock) } else { Ok(()) }
            }));
            let watched = watch(scenario.length(), server, clock, vcpus, interrupted);
            if watched.is_err() {
                clock.stop();
            }
            // Why a client ended says more than that it did.
            for thread in threads {
                thread.join().map_err(|_| anyhow!("a client failed"))??;
            }
            watched
        })?;
        let mut record = Record::new(scenario)?;
        for state in states.iter().flatten() {
            record.add(&state.record)?;
        }
        Ok(Played { record, watched })
    }

    /// Figures of each phase.
    fn measured(&self, played: Played, happened: &[Happened]) -> Result<Measured> {
        let Played { record, watched } = played;
        let threads = Threads { first: self.threads.into(), happened };
        let length = self.scenario.length();
        let mut phases = Vec::new();
        let mut all: Option<Tally> = None;
        for (phase, tally) in self.scenario.phases.iter().zip(&record.phases) {
            let made = self.phase(Some(*phase), tally, &record, &watched.ticks, &threads);
            phases.push(made);
            match &mut all {
                None => all = Some(tally.clone()),
                Some(all) => {
                    all.latencies.add(&tally.latencies)?;
                    all.bytes += tally.bytes;
                }
            }
        }
        let all = all.ok_or_else(|| anyhow!("the scenario has no phase"))?;
        let whole = self.phase(None, &all, &record, &watched.ticks, &threads);
        let points = record.samples.chunks(SAMPLES).enumerate().map(|(point, samples)| {
            let start = Nanos::new(TICK.get() * point as u64);
            let stop = start.saturating_add(TICK).min(length);
            let moves = threads.count(What::Moved, start, stop);
            (samples.iter().sum::<u32>(), threads.mean(start, stop) as f32, moves)
        });
        let mut timeline = Timeline::default();
        for (requests, io_cores, moves) in points {
            timeline.requests.push(requests);
            timeline.io_cores.push(io_cores);
            timeline.moves.push(moves);
        }
        let Watched { canary, machine, .. } = watched;
        let (tallies, checked) = (record.phases, record.checked);
        Ok(Measured { phases, tallies, whole, timeline, checked, canary, machine })
    }

    fn phase(
        &self,
        of: Option<scenario::Phase>,
        tally: &Tally,
        record: &Record,
        ticks: &[Tick],
        threads: &Threads<'_>,
    ) -> Phase {
        let length = self.scenario.length();
        let (start, stop) = of.map_or((Nanos::ZERO, length), |of| (of.span.start, of.span.stop));
        let kind = of.map(|of| of.kind);
        let (before, after) = (tick(ticks, start), tick(ticks, stop));
        let passed = after.at.saturating_sub(before.at).as_secs_f64().max(1e-9);
        let cpus =
            |of: fn(&Tick) -> Nanos| of(&after).saturating_sub(of(&before)).as_secs_f64() / passed;
        let seconds = stop.saturating_sub(start).as_secs_f64();
        let sample = |at: Nanos| (at.get() / SAMPLE_NS) as usize;
        let samples = &record.samples[sample(start)..sample(stop).min(record.samples.len())];
        let rest = match (kind.is_some_and(|kind| kind.is_steady()), settled(samples)) {
            (false, _) | (_, Settled::TooLittle) => Rest::NotJudged,
            (_, Settled::Never) => Rest::Never,
            (_, Settled::After(time)) => Rest::AfterMs(time.as_millis_f64()),
        };
        let moves_until = |at: Nanos| threads.count(What::Moved, start, at.min(stop));
        let us = |quantile| tally.latencies.value_at_quantile(quantile) as f64 / 1e3;
        let [p99_us, low, high] = p99_us(&tally.latencies);
        let burners = self.scenario.vms.iter().flat_map(|vm| &vm.burners);
        let wanted = burners.map(|burner| {
            let (from, to) = (burner.span.start.max(start), burner.span.stop.min(stop));
            burner.share * to.saturating_sub(from).as_secs_f64()
        });
        Phase {
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
            p50_us: us(0.5),
            p99_us,
            p99_interval_us: [low, high],
            p999_us: us(0.999),
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

/// What clients saw, and what was seen of them.
#[derive(Debug)]
struct Played {
    record: Record,
    watched: Watched,
}

#[derive(Debug)]
struct Watched {
    ticks: Vec<Tick>,
    canary: Canary,
    machine: Machine,
}

/// The tick that is nearest to a time.
fn tick(ticks: &[Tick], at: Nanos) -> Tick {
    let distance = |tick: &&Tick| tick.at.get().abs_diff(at.get());
    ticks.iter().min_by_key(distance).copied().unwrap_or_default()
}

/// Looks at all times until the scenario is over.
fn watch(
    length: Nanos,
    server: u32,
    clock: &Clock,
    vcpus: &Vcpus,
    interrupted: &Interrupted,
) -> Result<Watched> {
    let on = |due: Nanos| -> Result<()> {
        let is_on = clock.sleep_until(due);
        ensure!(!interrupted.load(Ordering::Relaxed), InterruptedError);
        ensure!(is_on, "a client ended early");
        Ok(())
    };
    on(Nanos::ZERO)?;
    let mut io = IoCpu::of(server);
    let machine = MachineSample::now()?;
    let canary = CanaryThread::start();
    let mut look = || -> Result<Vec<Tick>> {
        let mut ticks = Vec::new();
        let mut due = Nanos::ZERO;
        loop {
            on(due)?;
            ticks.push(Tick { at: clock.now(), io: io.look()?, vcpus: vcpus.times() });
            if due >= length {
                return Ok(ticks);
            }
            due = due.saturating_add(TICK).min(length);
        }
    };
    let ticks = look();
    let canary = canary.stop();
    Ok(Watched { ticks: ticks?, canary, machine: machine.since()? })
}
