//! A vhost-user-blk server beside its peers: throughput, latency, CPU per request,
//! and whether it keeps what it acknowledged.
//!
//! - `marks`: the table and the plot, and the four marks, judged row by row.
//! - [`footprint`]: what many disks cost.
//! - [`moves`]: queues that change their IOThread under a load.
//! - [`verify`]: whether it keeps what it acknowledged.
//!
//! A *case* is a medium, an operation, a depth, and a number of queues; a *cell* is
//! a case under one server, once. A repetition goes through the cases, and through
//! the servers within each case, starting with another one each time, so that what
//! changes slowly on the machine meets all of them alike. Every cell has a fresh
//! server. Cells go to a JSONL file as they end; a cell that is there is not
//! repeated.

pub mod footprint;
mod marks;
pub mod moves;
pub mod verify;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::run::Machine;
use rtvirtio_testbed::client::Endpoint;
use rtvirtio_testbed::load::{self, Load, Measured, Operation};
use rtvirtio_testbed::named;
use rtvirtio_testbed::scratch::{open_raw, path_of};
use rtvirtio_testbed::server::{Backing, ServerKind, Setup, listener, qsd_version, rtvirtio};
use rtvirtio_testbed::work_directory::WorkDirectory;
use rtvirtio_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::experiment::{Experiment, Report, Run, lasted, seconds};

/// Requests behind a p99.99 that is judged.
pub(crate) const MIN_FOR_TAIL: u64 = 1_000_000;
/// A window is never longer.
const LONGEST: Duration = Duration::from_secs(60);
/// Size of the disks: RAM and tmpfs, file.
const SMALL: u64 = 64 << 20;
const LARGE: u64 = 512 << 20;
/// CPU that a request burns in `--scaling`, µs.
pub(crate) const SCALING_CPU_US: u64 = 100;
/// Start, warm-up and end of a cell.
const AROUND: Duration = Duration::from_millis(900);
/// What an idle window adds.
const IDLE: Duration = Duration::from_millis(2300);

named! {
    /// What the disk is made of.
    pub enum Medium {
        /// The server's memory; null-co with read-zeroes in qemu-storage-daemon.
        Ram = "ram",
        /// A file in `/dev/shm`.
        Tmpfs = "tmpfs",
        /// A file on a disk, direct.
        Disk = "disk",
        /// The RAM engine, each request of which costs `SCALING_CPU_US`.
        Burn = "burn",
        /// Whatever serves a socket that was there before.
        Socket = "socket",
    }
}

/// A case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Case {
    /// The disk.
    pub medium: Medium,
    /// Reads or writes.
    pub operation: Operation,
    /// Queues, and client threads.
    pub queues: usize,
    /// Requests in flight of each queue.
    pub depth: usize,
}

impl Case {
    /// All cases of some media, in the order of tables.
    #[must_use]
    pub fn all(media: &[Medium]) -> Vec<Self> {
        let mut cases = Vec::new();
        for &medium in media {
            for operation in [Operation::Read, Operation::Write] {
                for queues in [1, 4] {
                    let depths = [1, 32].into_iter();
                    cases.extend(depths.map(|depth| Self { medium, operation, queues, depth }));
                }
            }
        }
        cases
    }

    /// For people.
    #[must_use]
    pub fn name(&self) -> String {
        let Self { medium, operation, queues, depth } = self;
        format!("{medium} rand{operation} {queues}q d{depth}")
    }

    /// Whether its far tail is judged.
    pub(crate) const fn has_tail(&self) -> bool {
        self.queues == 4 && self.depth == 32
    }
}

/// Which cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CellKey {
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    /// The server.
    pub server: ServerKind,
    /// Its IOThreads.
    pub iothreads: usize,
    /// From 0.
    pub repetition: u32,
}

/// What a cell measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// Requests in the window.
    pub n: u64,
    /// Length of the window.
    pub seconds: f64,
    /// Requests per second.
    pub iops: f64,
    /// Latencies, µs.
    pub mean_us: f64,
    /// Half of the requests are quicker.
    pub p50_us: f64,
    /// 99 %.
    pub p99_us: f64,
    /// 99.9 %.
    pub p999_us: f64,
    /// 99.99 %.
    pub p9999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// CPU of the server for each request, µs; none without a server.
    pub cpu_us: Option<f64>,
    /// CPU of the client for each request, µs.
    pub client_us: f64,
    /// CPU of the server with a client that does nothing, in cores.
    pub idle_cores: Option<f64>,
    /// The machine in the window.
    pub machine: Machine,
    /// CPUs of the machine.
    pub cpus: usize,
}

impl Cell {
    fn new(key: CellKey, measured: &Measured) -> Self {
        let latencies = &measured.latencies;
        let (n, us) = (latencies.len(), |ns: u64| ns as f64 / 1e3);
        let at = |quantile| us(latencies.value_at_quantile(quantile));
        let each = |ns: u64| us(ns) / n.max(1) as f64;
        Self {
            key,
            n,
            seconds: measured.seconds,
            iops: n as f64 / measured.seconds,
            mean_us: latencies.mean() / 1e3,
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            p9999_us: at(0.9999),
            max_us: us(latencies.max()),
            cpu_us: (key.server != ServerKind::File).then(|| each(measured.server_ns)),
            client_us: each(measured.client_ns),
            idle_cores: measured.idle_cores,
            machine: measured.machine,
            cpus: rtvirtio_testbed::cpu::available(),
        }
    }
}

/// Arguments of `bench dataplane`.
#[derive(Debug, clap::Args)]
pub struct Benchmark {
    /// What disks are made of: ram, tmpfs, disk
    #[arg(long, value_delimiter = ',', default_value = "ram,tmpfs,disk", value_parser = PossibleValuesParser::new(
        ["ram", "tmpfs", "disk"],
    )
    .try_map(|name| name.parse::<Medium>()))]
    cases: Vec<Medium>,
    /// Servers: ours (fixed buffers on and off), qsd, file (io_uring without a server), or the
    /// path of a socket at which one runs already
    #[arg(long, value_delimiter = ',', default_value = "ours,qsd,file")]
    server: Vec<String>,
    /// Queues: 1, 4 or both
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    queues: Vec<usize>,
    /// Requests in flight of each queue: 1, 32 or both
    #[arg(long, value_delimiter = ',', default_value = "1,32")]
    depth: Vec<usize>,
    /// Only reads
    #[arg(long)]
    reads: bool,
    /// Repetitions of each case under each server
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a window in seconds; at depth 32 with 4 queues longer, for p99.99
    #[arg(long, default_value = "4", value_parser = seconds::<1, 86_400_000>)]
    seconds: Duration,
    /// Do not wait for the 1,000,000 requests that judge p99.99
    #[arg(long)]
    quick: bool,
    /// Instead: 1 against 2 IOThreads, 4 queues, each request costing 100 µs of CPU
    #[arg(long)]
    scaling: bool,
    /// Where the file on a disk is made
    #[arg(long, default_value = "/var/tmp")]
    disk_directory: PathBuf,
    /// The rtvirtio that serves; without, the one beside this program
    #[arg(long)]
    program: Option<PathBuf>,
}

impl Experiment for Benchmark {
    type Key = CellKey;
    type Cell = Cell;
    type Setup = Disks;

    const OUT: &'static str = "rtvirtio-bench-dataplane";

    fn keys(&self) -> Result<Vec<CellKey>> {
        let (servers, socket) = self.servers()?;
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            for (index, case) in self.all_cases(socket.is_some()).into_iter().enumerate() {
                let mut here: Vec<(ServerKind, usize)> = Vec::new();
                for &server in servers.iter().filter(|s| makes_sense(**s, case.medium)) {
                    let compares = self.scaling && server.is_ours();
                    let threads: &[usize] = if compares { &[1, 2] } else { &[1] };
                    here.extend(threads.iter().map(|&t| (server, t)));
                }
                let turn = (repetition as usize + index) % here.len().max(1);
                here.rotate_left(turn);
                let key = |(server, iothreads)| CellKey { case, server, iothreads, repetition };
                keys.extend(here.into_iter().map(key));
            }
        }
        Ok(keys)
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        format!("{}, {}", key.case.name(), label(key))
    }

    fn expected(&self, key: &CellKey) -> Duration {
        let idle = if measures_idle(key) { IDLE } else { Duration::ZERO };
        // At about 100,000 requests a second.
        let tail = Duration::from_secs_f64(self.min_requests(key) as f64 / 1e5);
        self.seconds.max(tail) + AROUND + idle
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        // One whose tail is waited for is as long as that takes.
        let is_longer =
            self.min_requests(&cell.key) > 0 && cell.seconds >= self.seconds.as_secs_f64();
        (!is_longer && !lasted(cell.seconds, self.seconds)).then_some("another --seconds")
    }

    fn set_up(&self, missing: &[CellKey], run: &Run<'_>) -> Result<Disks> {
        if missing.iter().any(|key| key.server == ServerKind::Qsd) {
            eprintln!("qemu-storage-daemon {}", qsd_version()?);
        }
        Disks::make(missing, &self.disk_directory, run.interrupted)
    }

    fn measure(&self, disks: &mut Disks, key: &CellKey, run: &Run<'_>) -> Result<Cell> {
        let Case { medium, operation, queues, depth } = key.case;
        let load = Load {
            operation,
            depth,
            queues,
            length: self.seconds,
            least: self.min_requests(key),
            longest: LONGEST.max(self.seconds),
            idle: measures_idle(key),
        };
        let measured = match (key.server, self.servers()?.1) {
            (ServerKind::Socket, Some(socket)) => {
                let server = listener(&socket)?;
                load::run(Endpoint::Socket(&socket), Some(server), &load, run.interrupted)?
            }
            (ServerKind::File, _) => {
                load::run(Endpoint::File(&disks.file(medium)?), None, &load, run.interrupted)?
            }
            _ => {
                let directory = WorkDirectory::new()?;
                let setup = Setup {
                    kind: key.server,
                    backing: &disks.backing(medium)?,
                    queues,
                    iothreads: key.iothreads,
                    program: &self.program.clone().map_or_else(rtvirtio, Ok)?,
                    directory: directory.path(),
                };
                setup.start(run.interrupted)?.during(|server| {
                    let endpoint = Endpoint::Socket(server.socket());
                    load::run(endpoint, Some(server.id()), &load, run.interrupted)
                })?
            }
        };
        // What the last cell left to the kernel is not the next one's.
        wait(Duration::from_millis(100), run.interrupted)?;
        Ok(Cell::new(*key, &measured))
    }

    fn report(&self, cells: &[Cell], _: &Run<'_>) -> Result<Report> {
        ensure!(!cells.is_empty(), "no cell was measured");
        let rows = marks::rows(cells);
        let (text, json) = (marks::text(&rows), marks::table(&rows).json());
        Ok(Report::of(text, json).with("plot.svg", marks::plot(&rows)))
    }
}

impl Benchmark {
    /// The cases that are asked for.
    fn all_cases(&self, has_socket: bool) -> Vec<Case> {
        let mut cases = if self.scaling {
            vec![Case { medium: Medium::Burn, operation: Operation::Read, queues: 4, depth: 32 }]
        } else if has_socket {
            Case::all(&[Medium::Socket])
        } else {
            Case::all(&self.cases)
        };
        cases.retain(|case| {
            self.queues.contains(&case.queues)
                && self.depth.contains(&case.depth)
                && (case.operation == Operation::Read || !self.reads)
        });
        cases
    }

    /// Requests to wait for.
    const fn min_requests(&self, key: &CellKey) -> u64 {
        // A request of 100 µs has no far tail worth a wait.
        let is_judged = key.case.has_tail() && !self.quick && !self.scaling;
        if is_judged { MIN_FOR_TAIL } else { 0 }
    }

    /// The servers, and the socket of one that runs already.
    fn servers(&self) -> Result<(Vec<ServerKind>, Option<PathBuf>)> {
        let (mut servers, mut socket) = (Vec::new(), None);
        for name in &self.server {
            match name.as_str() {
                "ours" => servers.extend([ServerKind::Rtvirtio, ServerKind::RtvirtioFixed]),
                "qsd" => servers.push(ServerKind::Qsd),
                "file" => servers.push(ServerKind::File),
                path => {
                    ensure!(path.contains('/'), "`{path}` is none of ours, qsd, file, and no path");
                    ensure!(socket.is_none(), "more than one socket");
                    socket = Some(PathBuf::from(path));
                    servers.push(ServerKind::Socket);
                }
            }
        }
        ensure!(
            socket.is_none() || servers.len() == 1,
            "a socket's disk is not known: it is measured alone"
        );
        Ok((servers, socket))
    }
}

/// For people: the server, and its IOThreads if it has more than one.
pub(crate) fn label(key: &CellKey) -> String {
    match key.iothreads {
        _ if key.case.medium == Medium::Burn => format!("{} x{}", key.server.name(), key.iothreads),
        0 | 1 => key.server.name().to_owned(),
        threads => format!("{} x{threads}", key.server.name()),
    }
}

fn measures_idle(key: &CellKey) -> bool {
    key.case.operation == Operation::Read && key.case.depth == 1 && key.server != ServerKind::File
}

/// Whether a server can have a medium, and is not another one under a second name there.
fn makes_sense(server: ServerKind, medium: Medium) -> bool {
    match (medium, server) {
        (Medium::Socket, ServerKind::Socket) => true,
        (Medium::Socket, _) | (_, ServerKind::Socket) => false,
        (Medium::Burn, server) => server == ServerKind::Rtvirtio,
        // No file: nothing to register buffers with, nothing to read without a server.
        (Medium::Ram, server) => !matches!(server, ServerKind::RtvirtioFixed | ServerKind::File),
        (Medium::Tmpfs | Medium::Disk, _) => true,
    }
}

/// The files under test, which have no names.
pub struct Disks {
    tmpfs: Option<File>,
    disk: Option<File>,
}

impl Disks {
    fn make(keys: &[CellKey], directory: &Path, interrupted: &Interrupted) -> Result<Self> {
        let make = |medium, directory: &Path, bytes| {
            let is_wanted = keys.iter().any(|key| key.case.medium == medium);
            is_wanted.then(|| open_raw(directory, Bytes::new(bytes), interrupted)).transpose()
        };
        Ok(Self {
            tmpfs: make(Medium::Tmpfs, Path::new("/dev/shm"), SMALL)?,
            disk: make(Medium::Disk, directory, LARGE)?,
        })
    }

    fn file(&self, medium: Medium) -> Result<PathBuf> {
        let file = if medium == Medium::Disk { &self.disk } else { &self.tmpfs };
        file.as_ref().map(path_of).context("a medium without a file")
    }

    fn backing(&self, medium: Medium) -> Result<Backing> {
        match medium {
            Medium::Ram => Ok(Backing::Ram { bytes: SMALL, cpu_us: 0 }),
            Medium::Burn => Ok(Backing::Ram { bytes: SMALL, cpu_us: SCALING_CPU_US }),
            _ => self.file(medium).map(Backing::File),
        }
    }
}

#[cfg(test)]
mod tests;
