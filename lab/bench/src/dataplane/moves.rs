//! Queues moved between IOThreads while a load runs whose content is checked.
//!
//! A *stage* is a server of its own (4 queues, 2 IOThreads), a load by the
//! [verifier](rtvirtio_testbed::verify), and threads that move random queues to the other
//! IOThread by the control API, paced. A *pause* is what the server says: from
//! letting a queue go to taking it up. A queue that is not started does not move
//! in this sense (its pause is 0), and does not count.
//!
//! A stage passes when no completion was lost, repeated or misplaced, moves were as
//! many as asked for, and the p99 of pauses is at most [`LIMIT`] if a core was idle,
//! else at most `FACTOR` times the p99 of wake-ups.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use rtvirtio_calibrate::load::MachineSample;
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::run::Machine;
use rtvirtio_testbed::control::{Asked, Movers, QUEUES};
use rtvirtio_testbed::named;
use rtvirtio_testbed::resets::Resets;
use rtvirtio_testbed::scratch::{open_raw, path_of};
use rtvirtio_testbed::server::{Configuration, rtvirtio, serve, whole};
use rtvirtio_testbed::verify::{Options, Report, Verifier, unique};
use rtvirtio_testbed::wakes::Wakes;
use rtvirtio_testbed::window::{p99_us, us};
use rtvirtio_testbed::work_directory::WorkDirectory;
use rtvirtio_units::Bytes;
use serde::Serialize;

use crate::experiment::seconds;

/// Pause at p99 while a core is idle.
pub const LIMIT: Duration = Duration::from_millis(1);
/// Else: of the wake-ups' p99.
pub(crate) const FACTOR: f64 = 3.0;
/// Moves per second that a stage is to see.
pub(crate) const MIN_RATE: f64 = 1000.0;
/// Size of the disk, and how much of it the load uses.
const SIZE: u64 = 64 << 20;
const USED_MIB: u32 = 16;
/// Disconnects at a time; a round ends with a check of everything.
const ROUND: u32 = 10;

named! {
    /// A load to move queues under.
    pub enum Stage {
        /// One queue, one request at a time, on an emulated SSD; the other queues rest.
        Light = "light",
        /// All queues, 32 requests in flight of each, on an emulated SSD.
        Heavy = "heavy",
        /// The same on a disk in RAM.
        Ram = "ram",
        /// The same on a file, direct.
        Disk = "disk",
        /// Like heavy, while the front end leaves in mid-I/O and is back at once.
        Disconnects = "disconnects",
        /// Like heavy, while the front end adds and removes memory.
        Memory = "memory",
        /// Like heavy, while the front end stops rings and starts them, as for a reset.
        Reset = "reset",
    }
}

/// Percentiles of durations, with the 95 % interval of the p99's rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lateness {
    /// Samples.
    pub n: u64,
    /// Half are shorter.
    pub p50_us: f64,
    /// 99 % are shorter.
    pub p99_us: f64,
    /// The lower end of its interval.
    pub p99_low_us: f64,
    /// The upper end.
    pub p99_high_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl Lateness {
    fn of(histogram: &Histogram<u64>) -> Self {
        let [p99_us, p99_low_us, p99_high_us] = p99_us(histogram);
        Self {
            n: histogram.len(),
            p50_us: us(histogram, 0.5),
            p99_us,
            p99_low_us,
            p99_high_us,
            max_us: histogram.max() as f64 / 1e3,
        }
    }
}

/// What a stage showed.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    /// Which.
    pub stage: Stage,
    /// How long queues were moved.
    pub seconds: f64,
    /// Moves of started queues.
    pub moves: u64,
    /// Per second.
    pub rate: f64,
    /// Requests that found the queue not started, or there already.
    pub idle_moves: u64,
    /// Requests refused because the queue was being moved, edited or stopped; each is followed by
    /// one for another queue, and none counts as a move.
    pub busy: u64,
    /// Rings that were stopped and started.
    pub resets: u64,
    /// Times that memory was added and removed.
    pub churns: u64,
    /// How long nobody served a queue that moved.
    pub pause: Lateness,
    /// How late a thread woke that another one woke.
    pub wake: Lateness,
    /// The machine at that time.
    pub machine: Machine,
    /// CPUs of the machine.
    pub cpus: usize,
    /// What the load did; all of it was checked.
    pub load: Report,
}

impl Shown {
    /// What the p99 of pauses may be, µs, and whether that is for an idle core.
    #[must_use]
    pub fn limit(&self) -> (f64, bool) {
        let idle = self.cpus as f64 - self.machine.busy_cores >= 1.0;
        let limit = LIMIT.as_secs_f64() * 1e6;
        (if idle { limit } else { FACTOR * self.wake.p99_us }, idle)
    }

    /// Whether moves were as many and as quick as they are to be.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.rate >= MIN_RATE && self.pause.p99_us <= self.limit().0
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pause, wake, load, .. } = self;
        let row = |f: &mut std::fmt::Formatter<'_>, name, of: &Lateness| {
            writeln!(
                f,
                "  {name}  p50 {:.0} us, p99 {:.0} us ({:.0} to {:.0}), max {:.0} us, n = {}",
                of.p50_us, of.p99_us, of.p99_low_us, of.p99_high_us, of.max_us, of.n
            )
        };
        writeln!(
            f,
            "{}: {} moves in {:.0} s, {:.0}/s (>= {MIN_RATE}); {} found the queue stopped or \
             there, {} were refused as busy; {} resets of rings, {} changes of memory",
            self.stage.name(),
            self.moves,
            self.seconds,
            self.rate,
            self.idle_moves,
            self.busy,
            self.resets,
            self.churns
        )?;
        row(f, "pause  ", pause)?;
        row(f, "wake-up", wake)?;
        writeln!(
            f,
            "  {:.2} of {} CPUs busy; {} reads, {} writes, {} zeroes, {} discards, {} flushes, {} \
             abandoned, {} connections; {} blocks as they should be",
            self.machine.busy_cores,
            self.cpus,
            load.reads,
            load.writes,
            load.zeroes,
            load.discards,
            load.flushes,
            load.abandoned,
            load.connections,
            load.checked
        )?;
        let (limit, idle) = self.limit();
        let why = if idle { "a core is idle" } else { "no core is idle: 3 x wake-up p99" };
        let verdict = if self.passed() { "passed" } else { "LOST" };
        write!(f, "  {verdict}: pause p99 {:.0} us <= {limit:.0} us ({why})", pause.p99_us)
    }
}

/// What to run, by `bench dataplane moves`.
#[derive(Debug, clap::Args)]
pub struct Moves {
    /// How long each takes
    #[arg(long = "seconds", default_value = "60", value_parser = seconds::<1, 86_400_000>)]
    pub time: Duration,
    /// Moves to ask for in a second, 1 or more
    #[arg(long, default_value_t = 1500.0)]
    pub rate: f64,
    /// Where the file on a disk is made
    #[arg(long, default_value = "/var/tmp")]
    pub disk_directory: PathBuf,
    /// The rtvirtio that serves; without, the one beside this program
    #[arg(long)]
    pub program: Option<PathBuf>,
    /// Of order and content.
    #[arg(skip = unique())]
    pub seed: u64,
}

impl Moves {
    /// Runs a stage.
    ///
    /// # Errors
    /// If a completion is lost, repeated or misplaced, or a move fails; if interrupted.
    pub fn run(&self, stage: Stage, interrupted: &Interrupted) -> Result<Shown> {
        ensure!(self.rate.is_finite() && self.rate >= 1.0, "--rate must be 1 or more");
        let program = self.program.clone().map_or_else(rtvirtio, Ok)?;
        let directory = WorkDirectory::new()?;
        let disk = || open_raw(&self.disk_directory, Bytes::new(SIZE), interrupted);
        let disk = (stage == Stage::Disk).then(disk).transpose()?;
        let at = |name: &str| directory.path().join(name);
        let engine = match (&disk, stage) {
            (Some(file), _) => whole(&path_of(file)),
            (None, Stage::Ram) => format!("type = \"ram\", size = {SIZE}"),
            (None, _) => format!("type = \"ssd\", size = {SIZE}, ssd = \"ref-4x250\""),
        };
        let (socket, control) = (at("disk.sock"), at("control.sock"));
        let toml = configuration(&socket, &control, &engine);
        serve(&program, &toml, directory.path(), &socket, interrupted, |_| {
            self.beside(stage, socket.clone(), &ControlClient::new(control), interrupted)
        })
    }

    fn beside(
        &self,
        stage: Stage,
        socket: PathBuf,
        control: &ControlClient,
        interrupted: &Interrupted,
    ) -> Result<Shown> {
        let (idle, depth) = if stage == Stage::Light { (QUEUES - 1, 1) } else { (0, 32) };
        let resets = match stage {
            Stage::Reset => Some(Resets::start(socket.with_extension("resets"), socket.clone())?),
            _ => None,
        };
        let mut verifier = Verifier::new(Options {
            socket: resets.as_ref().map_or(socket, |resets| resets.socket().to_owned()),
            queues: QUEUES,
            idle,
            depth,
            mebibytes: USED_MIB,
            churn: stage == Stage::Memory,
            seed: self.seed,
        })?;
        let movers = Movers::new(control, self.rate);
        let begun = Instant::now();
        let machine = MachineSample::now()?;
        let wakes = Wakes::start()?;
        let (asked, loaded) = movers.during(self.seed, || match stage {
            Stage::Disconnects => loop {
                let round = verifier.disconnects(ROUND, interrupted);
                if round.is_err() || begun.elapsed() >= self.time {
                    break round;
                }
            },
            _ => verifier.load(self.time, interrupted),
        });
        let wake = wakes.stop();
        let seconds = begun.elapsed().as_secs_f64();
        let machine = machine.since()?;
        let checked = loaded.and_then(|()| verifier.check());
        // Why it failed says more than that libblkio lost its server.
        let resets = resets.map(Resets::stop).transpose().context("reset rings")?.unwrap_or(0);
        checked?;
        let Asked { pauses, idle: idle_moves, busy } = asked?;
        let moves = pauses.len();
        Ok(Shown {
            stage,
            seconds,
            moves,
            rate: moves as f64 / seconds,
            idle_moves,
            busy,
            resets,
            churns: verifier.report().churns,
            pause: Lateness::of(&pauses),
            wake: Lateness::of(&wake),
            machine,
            cpus: rtvirtio_testbed::cpu::available(),
            load: verifier.report().clone(),
        })
    }
}

fn configuration(socket: &Path, control: &Path, engine: &str) -> String {
    let disk = ("disk", "bench");
    Configuration::new(Some(control), [None, None]).disk(disk, socket, QUEUES, engine).text()
}

#[cfg(test)]
mod tests;
