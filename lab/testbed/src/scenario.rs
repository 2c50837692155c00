//! Scenarios of the simulator, played for real: one server with its VMs, for one scenario, on two CPUs.
//!
//! - `layout`: what the server serves.
//! - `player`, `content`: a VM's disk, which comes and goes; requests that are verified.
//! - `vcpus`: where clients and what computes run, and what they had of the CPUs.
//! - `events`: IOThreads and moves, by the server's events.

mod content;
mod events;
mod layout;
mod player;
mod vcpus;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use rtvirtio_calibrate::load::canary_summary;
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError};
use rtvirtio_sim::calibration::CPUS;
use rtvirtio_sim::scenario::{Scenario, Vm};
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_units::{CpuId, Nanos};

use crate::cpu::usable;
use crate::server::serve;
use crate::window::{Watch, Watched};
use crate::work_directory::WorkDirectory;
use events::{Events, IoCpu};
use layout::Layout;
use player::{QueueState, disk_bytes, play};
use vcpus::{Vcpus, compute, lanes};

pub use content::Unverified;
pub use events::{Happened, Threads, What};
pub use layout::Disk;
pub use player::{AREA, Record, SAMPLE_NS, Tally};
pub use vcpus::{Clock, Times};

/// How often times are looked at.
pub const TICK: Nanos = Nanos::from_millis(100);

/// The CPUs of a trial: the first that this process may use.
///
/// # Errors
/// If there are too few.
pub fn cpus() -> Result<Vec<CpuId>> {
    let mut cpus = usable()?;
    if cpus.len() < CPUS.into() {
        bail!("this needs {CPUS} CPUs, and this process may use {} (see taskset -p)", cpus.len());
    }
    cpus.truncate(CPUS.into());
    Ok(cpus)
}

/// What is to run.
#[derive(Debug)]
pub struct Trial<'a> {
    /// The `rtvirtio` that serves.
    pub program: &'a Path,
    /// What VMs do.
    pub scenario: &'a Scenario,
    /// Queues of each disk.
    pub queues: u16,
    /// What the disks are.
    pub disk: &'a Disk,
    /// CPU that each request costs its IOThread on top, µs.
    pub cpu_us: u32,
    /// And each KiB of it, ns.
    pub kib_ns: u32,
    /// As the server's configuration names it.
    pub policy: &'a str,
    /// IOThreads at the start.
    pub threads: u16,
    /// CPUs that its vCPUs may run on; none: all of the trial.
    pub vcpus: Option<Vec<CpuId>>,
    /// From the server's start to the scenario's: for VMs to connect, or their first requests are late.
    pub lead: Duration,
}

/// Times at a tick.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tick {
    /// When.
    pub at: Nanos,
    /// IOThreads on a CPU.
    pub io: Nanos,
    /// Clients and what computes.
    pub vcpus: Times,
}

/// What came of it.
#[derive(Debug)]
pub struct Played {
    /// What clients saw.
    pub record: Record,
    /// What the server did.
    pub happened: Vec<Happened>,
    ticks: Vec<Tick>,
    /// How late a sleeping thread woke.
    pub canary: Canary,
    /// The machine meanwhile.
    pub machine: Machine,
}

impl Played {
    /// The tick that is nearest to a time.
    #[must_use]
    pub fn tick(&self, at: Nanos) -> Tick {
        let distance = |tick: &&Tick| tick.at.get().abs_diff(at.get());
        self.ticks.iter().min_by_key(distance).copied().unwrap_or_default()
    }
}

impl Trial<'_> {
    /// Plays it, and `beside` in a thread of its own from the scenario's start on.
    ///
    /// # Errors
    /// If there are too few CPUs; if the server fails, or does not do what it is told ([`Unverified`]); those of `beside`;
    /// if interrupted.
    pub fn play_beside(
        &self,
        interrupted: &Interrupted,
        beside: impl FnOnce(&ControlClient, &Clock) -> Result<()> + Send,
    ) -> Result<Played> {
        let directory = WorkDirectory::new()?;
        let cpus = cpus()?;
        let layout = Layout {
            directory: directory.path(),
            cpus: &cpus,
            vms: self.scenario.vms.len() as u16,
            queues: self.queues,
            disk: self.disk,
            bytes: disk_bytes(self.scenario)?,
            cpu_us: self.cpu_us,
            kib_ns: self.kib_ns,
            seed: self.scenario.seed,
        };
        let toml = layout.toml(self.policy, self.threads);
        let last = layout.last_socket();
        let (played, events) =
            serve(self.program, &toml, directory.path(), &last, interrupted, |server| {
                let control = ControlClient::new(layout.control());
                let clock = Arc::new(Clock::after(self.lead));
                let events = Events::start(&control, &clock)?;
                let beside = |clock: &Clock| beside(&control, clock);
                Ok((self.clients(&layout, server.id(), &clock, interrupted, beside)?, events))
            })?;
        // They end with the server.
        Ok(Played { happened: events.end()?, ..played })
    }

    /// Without what the server did.
    fn clients(
        &self,
        layout: &Layout<'_>,
        server: u32,
        clock: &Clock,
        interrupted: &Interrupted,
        beside: impl FnOnce(&Clock) -> Result<()> + Send,
    ) -> Result<Played> {
        let scenario = self.scenario;
        let vcpus = Vcpus::new(self.vcpus.clone().unwrap_or_else(|| layout.cpus.to_vec()));
        let states = |(vm, of): (usize, &Vm)| {
            let queue = |queue| QueueState::new(scenario, vm, queue);
            (0..usize::from(of.queues)).map(queue).collect::<Result<Vec<_>>>()
        };
        let mut states = scenario.vms.iter().enumerate().map(states).collect::<Result<Vec<_>>>()?;
        let burners: Vec<_> = scenario.vms.iter().flat_map(|vm| lanes(&vm.burners)).collect();
        let mut played = std::thread::scope(|scope| {
            let vcpus = &vcpus;
            let mut threads = Vec::new();
            for (vm, states) in states.iter_mut().enumerate() {
                let socket = layout.socket(vm);
                threads.push(scope.spawn(move || {
                    play((scenario, vm), &socket, states, clock, vcpus)
                        .inspect_err(|_| clock.stop())
                }));
            }
            for (number, lane) in (0..).zip(&burners) {
                threads.push(scope.spawn(move || compute(lane, number, clock, vcpus)));
            }
            threads.push(scope.spawn(move || {
                if clock.sleep_until(Nanos::ZERO) { beside(clock) } else { Ok(()) }
            }));
            let watched = watch(scenario, server, clock, vcpus, interrupted);
            if watched.is_err() {
                clock.stop();
            }
            // Why a client ended says more than that it did.
            for thread in threads {
                thread.join().map_err(|_| anyhow!("a client failed"))??;
            }
            watched
        })?;
        for state in states.iter().flatten() {
            played.record.add(&state.record)?;
        }
        Ok(played)
    }
}

/// Looks at all times until the scenario is over; without what clients and server saw.
fn watch(
    scenario: &Scenario,
    server: u32,
    clock: &Clock,
    vcpus: &Vcpus,
    interrupted: &Interrupted,
) -> Result<Played> {
    let on = |due: Nanos| -> Result<()> {
        let is_on = clock.sleep_until(due);
        ensure!(!interrupted.load(Ordering::Relaxed), InterruptedError);
        ensure!(is_on, "a client ended early");
        Ok(())
    };
    let length = scenario.length();
    on(Nanos::ZERO)?;
    let mut io = IoCpu::of(server);
    let machine = Watch::start()?;
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
    let ticks = look()?;
    let Watched { canary, machine, .. } = machine.stop()?;
    let canary = canary_summary(&canary);
    Ok(Played { record: Record::new(scenario)?, happened: Vec::new(), ticks, canary, machine })
}
