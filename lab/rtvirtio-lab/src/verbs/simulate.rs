//! `rtvirtio-lab simulate`.

mod calibrate;
mod progress;
mod table;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_iocores::{Kind, Limits, policy};
use rtvirtio_sim::scenario::{PhaseKind, Scenario, Size};
use rtvirtio_sim::{Backend, Costs, Machine, Outcome, Simulation};
use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{CpuId, Iops, Nanos};
use serde::{Serialize, Serializer};

use crate::{Outcome as Ended, input};
use progress::Progress;

/// Simulated between two looks at the clock.
const STEP: Nanos = Nanos::from_millis(50);

/// Arguments of `simulate`.
#[derive(clap::Args)]
#[command(after_help = "\
Policies:
  static:N       N IOThreads from the start, queues spread as they come; vCPUs on the other CPUs
  round-robin:N  the same, spread anew when queues come and go
  dynamic        rtvirtio's own: number and placement follow the load
  iocm, spdk     as published by IOcm and SPDK
dynamic, iocm and spdk begin with one IOThread on the last CPU, and may take CPUs from the vCPUs (not with \
--keep-vcpus). Without --policy: static with 1, 2, an eighth and a quarter of the CPUs, and these three.

Phases, played in an order that the seed gives:
  idle           hardly anything             compute    VMs compute, some I/O
  one-hot        one queue is full           mixed      each VM does something else
  all-hot        all queues are full         bursts     full and empty for 50 ms to 5 s
  small-large    many VMs with 4 KiB         hotplug    disks come and go
                 against few with 256 KiB    flapping   full and empty, 100 ms each
and, on network devices of a pair of queues for each VM on a TAP:
  small-frames   all full of 128 B           disks-nics of four VMs one with a full disk, one with small
  bulk           all full of 64 KiB                     frames, one with large ones, one with some of both
In each phase but compute (and some VMs of mixed) the VMs compute a quarter of --compute.

The table: IOPS; cores: IOThreads, mean; IOPS/core: for each of their seconds; latencies as clients see \
them; compute: CPUs' worth of it; vCPU wait: CPUs' worth of vCPUs that were ready but did not run; settled: \
time after the phase's start until the IOPS were within 5 % of its second half. Utility (compared within a \
phase): I/O + compute - 0.2 x cores. 1 is what one busy IOThread does, and one CPU's computing; or, where \
no run does more than that, the most that any does.

What --request-us and --kib-ns say is the disk's work, on top of what the data plane itself does for a \
request. All other costs are measured ones of a disk in memory on two CPUs of an Intel Xeon, or those of \
--costs, which --calibrate makes of this machine.

Left out: caches, memory bandwidth and hyperthreads (a request costs the same on every CPU and after every \
move), CPU limits of cgroups, switches between VMs, frames that are dropped, interrupts of devices, the guest's \
own kernel, the CPU time of the policy and its samples, and the time that it takes to make a thread.

Examples:
  rtvirtio-lab simulate --cpus 16 --vms 48
  rtvirtio-lab simulate --calibrate costs.json && rtvirtio-lab simulate --costs costs.json --cpus 16 --vms 48
  rtvirtio-lab simulate --cpus 64 --vms 256 --policy static:8,dynamic --phases mixed,bursts --seconds 30
  rtvirtio-lab simulate --cpus 2 --vms 4 --json --phases all-hot --policy static:1,static:2,dynamic")]
pub(crate) struct Args {
    /// CPUs of the host, 2 to 128
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(2..=128))]
    cpus: u16,
    /// VMs
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    vms: u16,
    /// Queues of each VM
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// Requests in flight of a full queue
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Requests a second of a VM that is neither full nor idle
    #[arg(long, default_value = "2000", value_parser = iops)]
    rate: Iops,
    /// CPUs that all VMs together want for computing [default: half of --cpus]
    #[arg(long)]
    compute: Option<f64>,
    /// Policies to compare, as below
    #[arg(long, value_delimiter = ',')]
    policy: Vec<Which>,
    /// Phases; all: those of disks; network: idle and those of network devices
    #[arg(long, value_delimiter = ',', default_value = "all")]
    phases: Vec<String>,
    /// Length of a phase
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Another seed is another order of phases, other bursts, other times of requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// CPU time of an IOThread for the disk's work on a request, µs
    #[arg(long, default_value_t = 20.0)]
    request_us: f64,
    /// And for each KiB of it, ns
    #[arg(long, default_value_t = 40.0)]
    kib_ns: f64,
    /// All costs, JSON: those that it does not name keep their defaults
    #[arg(long)]
    costs: Option<PathBuf>,
    /// Instead: measure what things cost on this machine, and write it here for --costs. Runs loads on a
    /// server of its own for three minutes
    #[arg(long, value_name = "FILE", exclusive = true)]
    calibrate: Option<PathBuf>,
    /// Disks: null (nothing but CPU time), ref-4x250, ref-8x80, ref-stall
    #[arg(long, default_value = "null")]
    disk: String,
    /// How many of these devices the VMs share
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    devices: u16,
    /// Have the data plane's scheduler decide what a device does next, all VMs alike
    #[arg(long)]
    schedule: bool,
    /// vCPUs run on all CPUs, IOThreads' among them, whatever the policy says
    #[arg(long)]
    keep_vcpus: bool,
    /// Print all there is as JSON: timelines and decisions too
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Whether it runs a server of its own.
    pub(crate) const fn measures(&self) -> bool {
        self.calibrate.is_some()
    }
}

fn iops(text: &str) -> Result<Iops> {
    Ok(Iops::new(text.parse()?)?)
}

/// A policy, and with how many IOThreads it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Which {
    kind: Kind,
    threads: u16,
}

impl FromStr for Which {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, threads) = match text.split_once(':') {
            Some((name, threads)) => (name, Some(threads)),
            None => (text, None),
        };
        let kind: Kind = name.parse()?;
        let is_fixed = matches!(kind, Kind::Static | Kind::RoundRobin);
        let threads = match (is_fixed, threads) {
            (true, Some(threads)) => {
                threads.parse().ok().filter(|threads| (1..=128).contains(threads))
            }
            (true, None) => bail!("{name} needs a number of IOThreads, such as {name}:2"),
            (false, Some(_)) => bail!("{name} finds the number of IOThreads itself"),
            (false, None) => Some(1),
        };
        let threads = threads.context("the number of IOThreads is 1 to 128")?;
        Ok(Self { kind, threads })
    }
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            Kind::Static | Kind::RoundRobin => f.pad(&format!("{}:{}", self.kind, self.threads)),
            _ => f.pad(self.kind.name()),
        }
    }
}

impl Serialize for Which {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A policy's run.
#[derive(Debug, Serialize)]
struct Run {
    policy: Which,
    /// How long the simulation took, s.
    took_s: f64,
    /// Of each phase, then of all.
    utility: Vec<f64>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    cpus: u16,
    vms: u16,
    queues: u16,
    depth: u16,
    rate: Iops,
    compute: f64,
    seed: u64,
    disk: &'a str,
    costs: Costs,
    runs: &'a [Run],
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Ended> {
    if let Some(path) = &args.calibrate {
        calibrate::run(path, interrupted)?;
        return Ok(Ended::Done);
    }
    let compute = args.compute.unwrap_or(f64::from(args.cpus) / 2.0);
    let scenario = scenario(args, compute)?;
    let costs = costs(args)?;
    let policies = policies(args)?;
    let backend = match args.disk.as_str() {
        "null" => {
            ensure!(!args.schedule, "--schedule needs a device: --disk null has none");
            Backend::Null
        }
        name => {
            let config = SsdConfig::from_str(name)?;
            Backend::Ssd { config, devices: args.devices, schedule: args.schedule }
        }
    };

    let each = scenario.length().as_secs_f64();
    let mut progress = Progress::new(each * policies.len() as f64);
    let mut runs = Vec::new();
    for which in policies {
        let mut machine = Machine::new(args.cpus, which.threads);
        if args.keep_vcpus {
            machine.vcpus = (0..args.cpus).map(|cpu| CpuId::new(u32::from(cpu))).collect();
        }
        (machine.costs, machine.backend) = (costs, backend);
        let limits = Limits {
            cpus: machine.io_cpus(),
            min_iothreads: 1,
            max_iothreads: usize::from(args.cpus),
            borrow: !args.keep_vcpus,
        };
        let mut policy = policy(which.kind, limits);
        let began = Instant::now();
        let mut simulation = Simulation::new(&machine, &scenario, &mut *policy)?;
        let before = runs.len() as f64 * each;
        while simulation.now() < scenario.length() {
            simulation.run_until(simulation.now().saturating_add(STEP));
            progress.at(before + simulation.now().as_secs_f64(), &which.to_string());
        }
        let outcome = simulation.finish();
        let took_s = began.elapsed().as_secs_f64();
        runs.push(Run { policy: which, took_s, utility: Vec::new(), outcome });
    }
    drop(progress);

    table::add_utility(&mut runs);
    if args.json {
        let (queues, depth, rate) = (args.queues, args.depth, args.rate);
        let (cpus, vms, seed, disk) = (args.cpus, args.vms, args.seed, args.disk.as_str());
        let report =
            Report { cpus, vms, queues, depth, rate, compute, seed, disk, costs, runs: &runs };
        input::print_json(&report)?;
    } else {
        print!("{}", table::table(&runs));
        eprint!("{}", table::speed(&runs));
    }
    Ok(Ended::Done)
}

fn scenario(args: &Args, compute: f64) -> Result<Scenario> {
    let seconds = args.seconds;
    ensure!((0.1..=3_600.0).contains(&seconds), "--seconds is {seconds}, outside 0.1 to 3600");
    let mut kinds = Vec::new();
    for name in &args.phases {
        match name.as_str() {
            "all" => kinds.extend(PhaseKind::DISKS),
            "network" => kinds.extend(PhaseKind::NETWORK),
            name => kinds.push(name.parse()?),
        }
    }
    PhaseKind::shuffle(&mut kinds, args.seed);
    let size =
        Size { vms: args.vms, queues: args.queues, depth: args.depth, rate: args.rate, compute };
    Ok(Scenario::generate(&kinds, Nanos::from_secs_f64(seconds), &size, args.seed)?)
}

fn costs(args: &Args) -> Result<Costs> {
    let own = match &args.costs {
        Some(path) => rtvirtio_bench::iocores::costs::read(path)?,
        None => Costs::default(),
    };
    let (request, kib) = (args.request_us, args.kib_ns);
    ensure!((0.0..=1e6).contains(&request), "--request-us is {request}, outside 0 to 1000000");
    ensure!((0.0..=1e6).contains(&kib), "--kib-ns is {kib}, outside 0 to 1000000");
    Ok(own.with_work(Nanos::from_secs_f64(request / 1e6), Nanos::from_secs_f64(kib / 1e9)))
}

fn policies(args: &Args) -> Result<Vec<Which>> {
    if args.policy.is_empty() {
        let fixed = |threads| Which { kind: Kind::Static, threads };
        let mut fixed: Vec<Which> =
            [1, 2, args.cpus / 8, args.cpus / 4].into_iter().map(fixed).collect();
        fixed.retain(|which| which.threads > 0);
        fixed.sort_by_key(|which| which.threads);
        fixed.dedup();
        let own = [Kind::Dynamic, Kind::Iocm, Kind::Spdk];
        fixed.extend(own.map(|kind| Which { kind, threads: 1 }));
        return Ok(fixed);
    }
    if let Some(which) = args.policy.iter().find(|which| which.threads > args.cpus) {
        bail!("{which}: the host has {} CPUs (see --cpus)", args.cpus);
    }
    Ok(args.policy.clone())
}
