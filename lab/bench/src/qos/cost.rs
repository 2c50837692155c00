//! What the data plane's schedule costs: backlogged VMs on disks in memory, with it and without.
//!
//! Nothing limits the schedule's side but the IOThread's own work: promises are ample and the device
//! has more channels than there are requests. So the ratio of both throughputs is the price of its
//! decisions, its lock and the second pass over each request. Memory answers at once: on any real
//! device the price is a smaller part.
//!
//! An IOThread has a CPU of its own, and so has the client that drives its disks, if there are enough
//! CPUs; else all share them (2 IOThreads on 2 CPUs). A client is one thread that looks at its disks'
//! queues in turn and never sleeps, so that the server is what limits, and no VM is ever called.
//! With several IOThreads all of them share one schedule; *lock* is the share of their time at work in
//! which they waited for another one to leave it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::control::IoThreadState;
use rtvirtio_spec::run::Machine;
use rtvirtio_testbed::cpu::{available, usable};
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::load;
use rtvirtio_testbed::server::{Configuration, rtvirtio, serve};
use rtvirtio_testbed::trial::socket;
use rtvirtio_testbed::window::{Count, Phase};
use rtvirtio_testbed::work_directory::WorkDirectory;
use rtvirtio_units::{CpuId, Nanos};
use serde::{Deserialize, Serialize};

use crate::experiment::{Experiment, Report, Run, lasted, seconds};
use crate::stats::{Runs, Spread, runs};
use crate::table::Table;
use crate::verdict::{self, Verdict};

/// Requests in flight of each VM.
const DEPTH: usize = 32;
/// VMs, each with a disk and a queue.
pub const VMS: usize = 8;
/// Of each disk, MiB: small enough for the warm-up to touch all of it.
const DISK_MIB: u64 = 16;
/// To start and to end a cell, the warm-up among it.
const AROUND: Duration = Duration::from_millis(1_000);
/// Least IOPS with a schedule, times those without: the mark.
const MIN_RATIO: f64 = 0.94;

/// Names a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellKey {
    /// IOThreads, over which the disks are spread.
    pub iothreads: usize,
    /// Whether the disks share a schedule.
    pub qos: bool,
    /// From 0; the cells with and without a schedule of one repetition are a pair.
    pub repetition: u32,
}

/// What a cell measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// Length of the window, s.
    pub seconds: f64,
    /// Requests a second, of all VMs.
    pub iops: f64,
    /// CPU of the server for each request, µs; what it polls in vain among it.
    pub cpu_us: f64,
    /// CPU of the client for each request, µs.
    pub client_us: f64,
    /// Of the time at work of the IOThreads, what they waited for the schedule's lock.
    pub lock: f64,
    /// CPUs of the machine.
    pub cpus: usize,
    /// The machine in the window.
    pub machine: Machine,
}

/// Arguments of `bench qos-cost`.
#[derive(Debug, clap::Args)]
pub struct Benchmark {
    /// Numbers of IOThreads that share the schedule, 1 to 8
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_parser = clap::value_parser!(u8).range(1..=VMS as i64))]
    iothreads: Vec<u8>,
    /// Pairs of each, with and without a schedule
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a window in seconds
    #[arg(long, default_value = "3", value_parser = seconds::<100, 600_000>)]
    window: Duration,
}

impl Experiment for Benchmark {
    type Key = CellKey;
    type Cell = Cell;
    type Setup = ();

    const OUT: &'static str = "rtvirtio-bench-qos-cost";

    /// The two of a pair take turns to be first.
    fn keys(&self) -> Result<Vec<CellKey>> {
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            for iothreads in self.iothreads.iter().copied().map(usize::from) {
                let first = repetition % 2 == 1;
                keys.extend([first, !first].map(|qos| CellKey { iothreads, qos, repetition }));
            }
        }
        Ok(keys)
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        format!("{} IOThreads, {}", key.iothreads, name(key.qos))
    }

    fn expected(&self, _: &CellKey) -> Duration {
        self.window + AROUND
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        (!lasted(cell.seconds, self.window)).then_some("another window")
    }

    fn set_up(&self, _: &[CellKey], _: &Run<'_>) -> Result<()> {
        Ok(())
    }

    fn measure(&self, (): &mut (), key: &CellKey, run: &Run<'_>) -> Result<Cell> {
        let directory = WorkDirectory::new()?;
        let directory = directory.path();
        let places = Places::of(key.iothreads, &usable()?);
        let toml = configured(*key, &places, directory);
        // Sockets are made in the order of the file.
        let last = socket(directory, VMS - 1);
        serve(&rtvirtio()?, &toml, directory, &last, run.interrupted, |server| {
            self.window(*key, &places, server.id(), directory, run.interrupted)
        })
    }

    fn report(&self, cells: &[Cell], _: &Run<'_>) -> Result<Report> {
        Report::new(table(cells), cells)
    }
}

impl Benchmark {
    fn window(
        &self,
        key: CellKey,
        places: &Places,
        server: u32,
        directory: &Path,
        interrupted: &Interrupted,
    ) -> Result<Cell> {
        let phase = Phase::new();
        let done = Count::some(places.clients.len());
        std::thread::scope(|scope| {
            let end = phase.ended_by_drop();
            let clients = places.clients.iter().zip(&done).enumerate();
            let clients: Vec<_> = clients
                .map(|(index, (cpu, done))| {
                    let disks = (index..VMS).step_by(places.clients.len());
                    let sockets: Vec<PathBuf> = disks.map(|vm| socket(directory, vm)).collect();
                    let phase = &phase;
                    scope.spawn(move || load::drive(&sockets, *cpu, DEPTH, phase, &done.0))
                })
                .collect();
            let times = Times::now(directory)?;
            let length = (self.window, self.window);
            let window = load::window((length, 0), Some(server), &phase, &done, interrupted)?;
            let lock = Times::now(directory)?.lock_since(times);
            drop(end);
            for client in clients {
                let Ok(ended) = client.join() else { bail!("a client failed") };
                ended?;
            }
            ensure!(window.requests > 0, "no request completed");
            let us = |ns: u64| ns as f64 / 1e3 / window.requests as f64;
            Ok(Cell {
                key,
                seconds: window.seconds,
                iops: window.requests as f64 / window.seconds,
                cpu_us: us(window.server_ns),
                client_us: us(window.client_ns),
                lock,
                cpus: available(),
                machine: window.machine,
            })
        })
    }
}

/// Of all IOThreads, ns.
struct Times {
    busy: u64,
    lock: u64,
}

impl Times {
    fn now(directory: &Path) -> Result<Self> {
        let threads = ControlClient::new(control(directory)).snapshot()?.iothreads;
        let sum = |of: fn(&IoThreadState) -> Nanos| threads.iter().map(|t| of(t).get()).sum();
        Ok(Self { busy: sum(|thread| thread.busy_ns), lock: sum(|thread| thread.lock_ns) })
    }

    /// The share of the lock since then.
    fn lock_since(&self, earlier: Self) -> f64 {
        (self.lock - earlier.lock) as f64 / (self.busy - earlier.busy).max(1) as f64
    }
}

fn control(directory: &Path) -> PathBuf {
    directory.join("control.sock")
}

/// Who runs where.
#[derive(Debug, PartialEq, Eq)]
struct Places {
    /// Each IOThread's CPU.
    iothreads: Vec<CpuId>,
    /// Each client's; none: any.
    clients: Vec<Option<CpuId>>,
}

impl Places {
    /// As many clients as IOThreads.
    fn of(iothreads: usize, cpus: &[CpuId]) -> Self {
        let enough = cpus.len() >= 2 * iothreads;
        Self {
            iothreads: (0..iothreads).map(|at| cpus[at % cpus.len()]).collect(),
            clients: (0..iothreads).map(|at| enough.then(|| cpus[iothreads + at])).collect(),
        }
    }
}

/// A disk in memory for each VM, the IOThreads in turn; with a schedule that holds nothing back.
fn configured(key: CellKey, places: &Places, directory: &Path) -> String {
    let cpus = places.iothreads.iter().map(|cpu| Some(cpu.get()));
    let mut all = Configuration::new(Some(&control(directory)), cpus);
    if key.qos {
        all = all.schedule(&Curve { channels: 1024, request_ns: 1000, kib_ns: 0, flush_ns: 1000 });
    }
    for vm in 0..VMS {
        let (name, socket) = (format!("vm{vm}"), socket(directory, vm));
        let engine = format!("type = \"ram\", size = \"{DISK_MIB}M\"");
        let iothread = vm % key.iothreads;
        all = all
            .disk((&name, &name), &socket, 1, engine)
            .with(format_args!("mapping = [{{ iothread = \"iot{iothread}\", vqs = [0] }}]\n"));
        if key.qos {
            all = all.with(
                "qos = { schedule = \"device\", deadline_us = 10000, iops = 10000, burst = 32 }\n",
            );
        }
    }
    all.text()
}

const fn name(qos: bool) -> &'static str {
    if qos { "qos" } else { "none" }
}

/// A pair of rows for each number of IOThreads, and how they compare.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let mut rows = runs(cells, |cell| (cell.key.iothreads, cell.key.qos));
    rows.sort_by_key(|row| row.key);
    let table = Table::of(&rows)
        .figure("IOThreads", 0, |row| row.key.0)
        .text("schedule", |row| name(row.key.1))
        .figure("runs", 0, Runs::n)
        .figure("IOPS", 0, |row| row.median(|cell| cell.iops))
        .figure("CPU/IO us", 3, |row| row.median(|cell| cell.cpu_us))
        .figure("client us", 3, |row| row.median(|cell| cell.client_us))
        .figure("lock %", 2, |row| row.median(|cell| cell.lock * 100.0))
        .figure("busy", 2, |row| row.median(|cell| cell.machine.busy_cores))
        .figure("steal", 2, |row| row.median(|cell| cell.machine.steal_cores))
        .figure("load", 2, |row| row.median(|cell| cell.machine.load1));
    let mut verdicts = Vec::new();
    for with in rows.iter().filter(|row| row.key.1) {
        let iothreads = with.key.0;
        let without = |cell: &Cell| CellKey { qos: false, ..cell.key };
        let pair = |cell: &&Cell| {
            Some(cell.iops / cells.iter().find(|other| other.key == without(cell))?.iops)
        };
        if let Some(ratio) = Spread::of(with.cells.iter().filter_map(pair)) {
            let Spread { value, low, high, n } = ratio;
            let why = format!(
                "x {value:.3} the IOPS with a schedule ({low:.3} to {high:.3}, {n} pairs; >= {MIN_RATIO})"
            );
            let mark = format!("{iothreads} IOThreads");
            verdicts.push(Verdict::of(mark, Some(value >= MIN_RATIO), why));
        }
    }
    let cpus = cells.iter().map(|cell| cell.cpus).min().unwrap_or(0);
    format!(
        "{table}\n{}Medians. {VMS} VMs at depth {DEPTH}, 4 KiB, 70 % reads, disks in memory, {cpus} CPUs. \
         CPU/IO: of the server; client: CPU of the client for each request; lock: of the \
         IOThreads' time at work, what they waited for the schedule; busy, steal: of the \
         machine, cores.\n",
        verdict::lines(&verdicts)
    )
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::serve;

    use super::*;

    fn cell(qos: bool, repetition: u32, iops: f64) -> Cell {
        let key = CellKey { iothreads: 1, qos, repetition };
        let machine = Machine { load1: 1.0, busy_cores: 2.0, steal_cores: 0.0 };
        let (cpu_us, client_us) = (1.0, 0.5);
        Cell { key, seconds: 3.0, iops, cpu_us, client_us, lock: 0.0, cpus: 2, machine }
    }

    #[test]
    fn ratio_is_the_median_of_pairs_and_not_of_rows() {
        // Pairs: 0.95, 0.55, 0.99. Medians of the rows are 300 and 220.
        let runs = [(100.0, 95.0), (400.0, 220.0), (300.0, 297.0)];
        let cells: Vec<Cell> = (0..)
            .zip(runs)
            .flat_map(|(at, (without, with))| [cell(false, at, without), cell(true, at, with)])
            .collect();
        let text = table(&cells);
        assert!(text.contains("pass       1 IOThreads              x 0.950"), "{text}");
        assert!(text.contains("(0.550 to 0.990, 3 pairs; >= 0.94)"), "{text}");
    }

    #[test]
    fn cells_of_another_window_are_none_of_these() {
        let of = crate::experiment::of::<Benchmark>;
        let there = cell(true, 0, 100.0);
        assert_eq!(of(&[]).foreign(&there), None);
        assert_eq!(of(&["--window=1"]).foreign(&there), Some("another window"));
    }

    fn cpus<const N: usize>(numbers: [u32; N]) -> Vec<CpuId> {
        numbers.map(CpuId::new).into()
    }

    #[test]
    fn clients_have_cpus_of_their_own_if_there_are_enough() {
        let places = Places::of(1, &cpus([4, 6]));
        assert_eq!(places, Places { iothreads: cpus([4]), clients: vec![Some(CpuId::new(6))] });
        let places = Places::of(2, &cpus([4, 6]));
        assert_eq!(places, Places { iothreads: cpus([4, 6]), clients: vec![None, None] });
        let places = Places::of(2, &cpus([0, 1, 2, 3]));
        assert_eq!(
            places,
            Places { iothreads: cpus([0, 1]), clients: [2, 3].map(|n| Some(CpuId::new(n))).into() }
        );
    }

    #[test]
    fn configuration_spreads_disks_and_promises_each_its_rate() {
        let key = CellKey { iothreads: 2, qos: true, repetition: 0 };
        let text = configured(key, &Places::of(2, &cpus([0, 1])), Path::new("/tmp/x"));
        let found = serve::parse("test", &text).unwrap();
        assert_eq!((found.iothreads.len(), found.devices.len()), (2, VMS));
        assert!(found.devices.iter().all(|device| device.qos.is_some()));
        let on = |vm: usize| found.devices[vm].mapping.by_queue()[0].as_str();
        assert_eq!([on(0), on(1), on(7)], ["iot0", "iot1", "iot1"]);
        let text = configured(
            CellKey { qos: false, ..key },
            &Places::of(2, &cpus([0, 1])),
            Path::new("/"),
        );
        assert!(serve::parse("test", &text).unwrap().schedules.is_empty());
    }
}
