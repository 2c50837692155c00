//! `rtvirtio-lab bench dataplane`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rtvirtio_bench::dataplane::footprint::{self, Footprint};
use rtvirtio_bench::dataplane::moves::{Moves, Shown, Stage};
use rtvirtio_bench::dataplane::server::{ServerKind, qsd_version};
use rtvirtio_bench::dataplane::verify::{self, Options, Report};
use rtvirtio_bench::dataplane::{
    Benchmark, Case, MIN_FOR_TAIL, Medium, Operation, rows_as_json, write_report,
};
use rtvirtio_host::interrupt::Interrupted;

use crate::{Outcome, input, rtvirtio};

/// Arguments of `bench dataplane`.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Results go to OUT as JSON lines (cells.jsonl), table.txt and plot.svg; the same \
    OUT continues where it was. Files under test are made in /dev/shm and in --disk-directory, \
    and removed."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// What disks are made of: ram, tmpfs, disk
    #[arg(long, value_delimiter = ',', default_value = "ram,tmpfs,disk")]
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
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
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
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-dataplane")]
    out: PathBuf,
    /// Print medians as JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Other {
    /// Random writes, reads, write-zeroes, discards and flushes whose content is checked. The
    /// disk's content is lost
    Verify(VerifyArgs),
    /// Random queues change their IOThread all the time, under a load whose content is checked
    Moves(MovesArgs),
    /// Time to start, memory, and CPU when idle, of `rtvirtio serve` with many disks
    Footprint(FootprintArgs),
}

#[derive(clap::Args)]
struct MovesArgs {
    /// Loads: light (one queue at depth 1), heavy (4 at depth 32, an emulated SSD), ram, disk
    /// (heavy on a file, direct), disconnects, memory and reset (heavy, racing those)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "light,heavy,ram,disk,disconnects,memory,reset"
    )]
    stages: Vec<Stage>,
    /// How long each takes
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Moves to ask for in a second
    #[arg(long, default_value_t = 1500.0)]
    rate: f64,
    /// Where the file on a disk is made
    #[arg(long, default_value = "/var/tmp")]
    disk_directory: PathBuf,
    /// The rtvirtio that serves; without, the one beside this program
    #[arg(long)]
    program: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct FootprintArgs {
    /// How many disks: sparse files in the temporary directory
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    devices: Vec<u16>,
    /// Queues of each
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// The rtvirtio that serves; without, the one beside this program
    #[arg(long)]
    program: Option<PathBuf>,
}

#[derive(clap::Args)]
struct VerifyArgs {
    /// The server's socket
    #[arg(long)]
    socket: PathBuf,
    /// How long
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Instead: drop the connection in mid-I/O so many times
    #[arg(long, conflicts_with = "kills")]
    disconnects: Option<u32>,
    /// Instead: kill the server (SIGKILL) so many times; COMMAND starts it
    #[arg(long, requires = "command")]
    kills: Option<u32>,
    /// Queues
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// Requests in flight of each queue
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    depth: u16,
    /// How much of the disk, MiB from its start
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    mebibytes: u32,
    /// Seed of order and content, which no earlier run on this disk had; without, the time
    #[arg(long)]
    seed: Option<u64>,
    /// The server's command line, which must make it listen at the socket
    #[arg(last = true)]
    command: Vec<String>,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    match &args.other {
        Some(Other::Verify(args)) => {
            input::print_json(&verified(args, interrupted)?)?;
            return Ok(Outcome::Done);
        }
        Some(Other::Footprint(args)) => return footprint(args, interrupted),
        Some(Other::Moves(args)) => return moved(args, interrupted),
        None => {}
    }
    ensure!(args.seconds.is_finite() && args.seconds > 0.0, "--seconds must be more than 0");
    std::fs::create_dir_all(&args.out).with_context(|| format!("create {}", args.out.display()))?;
    let (servers, socket) = servers(args)?;
    if servers.contains(&ServerKind::Qsd) {
        eprintln!("qemu-storage-daemon {}", qsd_version()?);
    }
    let program = args.program.clone().map_or_else(rtvirtio, Ok)?;
    let mut cases = if args.scaling {
        vec![Case { medium: Medium::Burn, operation: Operation::Read, queues: 4, depth: 32 }]
    } else if socket.is_some() {
        Case::all(&[Medium::Socket])
    } else {
        Case::all(&args.cases)
    };
    cases.retain(|case| {
        args.queues.contains(&case.queues)
            && args.depth.contains(&case.depth)
            && (case.operation == Operation::Read || !args.reads)
    });
    let benchmark = Benchmark {
        cases,
        servers,
        iothreads: if args.scaling { vec![1, 2] } else { vec![1] },
        repetitions: args.repetitions,
        seconds: args.seconds,
        // A request of 100 µs has no far tail worth a wait.
        min_for_tail: if args.quick || args.scaling { 0 } else { MIN_FOR_TAIL },
        program: &program,
        socket: socket.as_deref(),
        disk_directory: &args.disk_directory,
        out: &args.out,
    };
    super::note_command(&args.out)?;
    let cells = benchmark.run(interrupted)?;
    let table = write_report(&cells, &args.out)?;
    if args.json {
        input::print_json(&rows_as_json(&cells))?;
    } else {
        print!("{table}");
        println!("{}", args.out.display());
    }
    Ok(Outcome::Done)
}

/// The servers, and the socket among them.
fn servers(args: &Args) -> Result<(Vec<ServerKind>, Option<PathBuf>)> {
    let (mut servers, mut socket) = (Vec::new(), None);
    for name in &args.server {
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

fn moved(args: &MovesArgs, interrupted: &Interrupted) -> Result<Outcome> {
    ensure!(args.seconds.is_finite() && args.seconds > 0.0, "--seconds must be more than 0");
    ensure!(args.rate.is_finite() && args.rate >= 1.0, "--rate must be 1 or more");
    let program = args.program.clone().map_or_else(rtvirtio, Ok)?;
    let seed = now();
    let moves = Moves {
        program: &program,
        disk_directory: &args.disk_directory,
        time: Duration::from_secs_f64(args.seconds),
        rate: args.rate,
        seed,
    };
    let mut all = Vec::new();
    for &stage in &args.stages {
        let shown = moves.run(stage, interrupted).with_context(|| stage.name().to_string())?;
        if !args.json {
            println!("{shown}");
        }
        all.push(shown);
    }
    if args.json {
        input::print_json(&all)?;
    }
    Ok(if all.iter().all(Shown::passed) { Outcome::Done } else { Outcome::Unmet })
}

/// What no earlier run had.
fn now() -> u64 {
    jiff::Timestamp::now().as_nanosecond() as u64
}

fn footprint(args: &FootprintArgs, interrupted: &Interrupted) -> Result<Outcome> {
    let program = args.program.clone().map_or_else(rtvirtio, Ok)?;
    let measure = |devices: &u16| {
        footprint::measure(usize::from(*devices), args.queues.into(), &program, interrupted)
    };
    let rows: Vec<_> = args.devices.iter().map(measure).collect::<Result<_>>()?;
    print!("{}", footprint::render(&rows));
    Ok(if rows.iter().all(Footprint::is_within) { Outcome::Done } else { Outcome::Unmet })
}

fn verified(args: &VerifyArgs, interrupted: &Interrupted) -> Result<Report> {
    ensure!(args.seconds.is_finite() && args.seconds >= 0.0, "--seconds must not be negative");
    let seed = args.seed.unwrap_or_else(now);
    eprintln!("seed {seed}");
    let options = Options {
        socket: args.socket.clone(),
        queues: usize::from(args.queues),
        busy: usize::from(args.queues),
        churn: false,
        depth: usize::from(args.depth),
        bytes: u64::from(args.mebibytes) << 20,
        seed,
    };
    match (args.disconnects, args.kills) {
        (Some(count), _) => verify::disconnects(options, count, interrupted),
        (_, Some(count)) => verify::kills(options, &args.command, count, interrupted),
        _ => verify::verify(options, Duration::from_secs_f64(args.seconds), interrupted),
    }
}
