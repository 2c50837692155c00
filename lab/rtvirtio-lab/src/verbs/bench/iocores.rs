//! `rtvirtio-lab bench iocores`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_bench::dataplane::server::rtvirtio;
use rtvirtio_bench::experiment::Experiment as _;
use rtvirtio_bench::iocores::cell::{Disk, PolicyConfig, SEEDS, Settings};
use rtvirtio_bench::iocores::{Benchmark, costs, disturb, report, simulated};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_sim::Costs;
use rtvirtio_sim::scenario::PhaseKind;

use crate::{Outcome, input};

/// Largest file of costs.
const MAX_COSTS: u64 = 1 << 16;

/// Arguments of `bench iocores`.
#[derive(clap::Args)]
#[command(after_help = "\
A cell is one policy on one seed's scenario: a fresh `rtvirtio serve` on two CPUs with a disk a VM whose \
requests cost CPU, VMs as libblkio clients with a thread for each queue, and threads that compute. The seed \
gives the order of phases, bursts and times of requests. Policies take turns on each seed. Every read is \
compared with what was written; a request that is lost, repeated or misplaced fails its cell.

Policies:
  static:1, static:2  that many IOThreads, queues spread over them
  dynamic             rtvirtio's own: number and placement follow the load
  iocm, spdk          as published by IOcm and SPDK
vCPUs (clients and what computes) may run on both CPUs, and all policies may borrow either from them.

Phases (`rtvirtio-lab simulate --help` says what each is):
  idle, one-hot, all-hot, small-large, compute, mixed, bursts, hotplug, flapping

The table has medians over seeds. utility: I/O and compute as parts of the best run's on that seed, less 0.2 \
an I/O core. Below it a line for each mark: pass, LOST or not judged.

Where policies have the same IOThreads, p99s of two runs differ by more than the 5 % that are to be told. So idle (dynamic \
and static:1) and flapping (dynamic and static:2) are run three times more for each seed, alone, and their p99 \
is judged over all.

Results go to OUT: cells.jsonl (a cell a line, with its timeline each 100 ms), table.txt, pareto.svg, \
timelines.svg, commands.txt; of --compare-simulator rounds.jsonl, costs.json and costs.txt; of --disturb \
disturb.jsonl and disturb.txt. The same OUT continues where it was. The time is policies x seeds x repetitions x \
(phases x --seconds + 4 s), and 15 min for phases alone: an hour by default, 70 min with --compare-simulator. Wants a \
machine on which nothing else runs.

Examples:
  rtvirtio-lab bench iocores
  rtvirtio-lab bench iocores --seconds 3 --seeds 1 --policies static:1,dynamic --phases all-hot,idle
  rtvirtio-lab bench iocores --compare-simulator
  rtvirtio-lab bench iocores --disturb --seconds 10 --repetitions 5")]
pub(crate) struct Args {
    /// Policies to compare
    #[arg(long, value_delimiter = ',', default_values_t = PolicyConfig::ALL)]
    policies: Vec<PolicyConfig>,
    /// Phases, or all
    #[arg(long, value_delimiter = ',', default_value = "all")]
    phases: Vec<String>,
    /// Length of a phase in seconds; with --disturb, how many are disturbed in each run, by turns with as many that are
    /// not [default: 20, or 10]
    #[arg(long)]
    seconds: Option<f64>,
    /// How many seeds, 1 to 3
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    seeds: u8,
    /// Other seeds than the fixed ones: this and the next, such as to judge what was made by the fixed ones
    #[arg(long, value_name = "SEED")]
    first_seed: Option<u64>,
    /// Repetitions of each policy and seed; with --disturb, of each disturbance [default: 1, or 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: Option<u32>,
    /// Disks: null (memory: nothing but CPU time), or ref-4x250, ref-8x80, ref-stall for each VM
    #[arg(long, default_value = "null")]
    disk: Disk,
    /// CPU time of an IOThread for a request, on top of its own
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    request_us: u32,
    /// And for each KiB of it
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    kib_ns: u32,
    /// VMs
    #[arg(long, default_value_t = 4)]
    vms: u16,
    /// Queues of each VM
    #[arg(long, default_value_t = 2)]
    queues: u16,
    /// Requests in flight of a full queue, 1 to 64
    #[arg(long, default_value_t = 16)]
    depth: u16,
    /// Requests a second of a VM that is neither full nor idle
    #[arg(long, default_value_t = 2_000.0)]
    rate: f64,
    /// CPUs that all VMs together want in the compute phase; a quarter of it elsewhere
    #[arg(long, default_value_t = 1.0)]
    compute: f64,
    /// Simulate what was run, and hold both against each other. What things cost the simulator is measured
    /// before each cell and after the last, in half a minute
    #[arg(long)]
    compare_simulator: bool,
    /// Simulate with these costs instead, JSON: those that it does not name keep their defaults
    #[arg(long, value_name = "FILE", requires = "compare_simulator")]
    costs: Option<PathBuf>,
    /// Instead of policies: p99 of the data path while the monitor is ended again and again, clients do
    /// not read their events, or 10,000 malformed control requests come
    #[arg(long, conflicts_with_all = ["policies", "phases", "seeds", "first_seed", "disk", "compare_simulator"])]
    disturb: bool,
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-iocores")]
    out: PathBuf,
    /// Print medians and verdicts as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    if args.disturb {
        return disturb(args, interrupted);
    }
    let mut phases = Vec::new();
    for name in &args.phases {
        match name.as_str() {
            "all" => phases.extend(PhaseKind::DISKS),
            name => phases.push(name.parse()?),
        }
    }
    if let Some(kind) = phases.iter().find(|kind| kind.has_nics()) {
        bail!("{kind}: this plays disks alone (rtvirtio-lab simulate plays network devices)");
    }
    phases.sort_unstable();
    phases.dedup();
    ensure!((0.0..=64.0).contains(&args.compute), "--compute is {}, outside 0 to 64", args.compute);
    let settings = Settings {
        phases,
        seconds: args.seconds.unwrap_or(20.0),
        vms: args.vms,
        queues: args.queues,
        depth: args.depth,
        rate: args.rate,
        compute: args.compute,
        disk: args.disk.clone(),
        cpu_us: args.request_us,
        kib_ns: args.kib_ns,
    };
    let mut policies = args.policies.clone();
    policies.sort_unstable();
    policies.dedup();
    let costs = args.costs.as_deref().map(read_costs).transpose()?;
    let program = rtvirtio()?;
    let benchmark = Benchmark {
        settings,
        policies,
        seeds: match args.first_seed {
            Some(first) => {
                (0..u64::from(args.seeds)).map(|next| first.wrapping_add(next)).collect()
            }
            None => SEEDS[..usize::from(args.seeds)].to_vec(),
        },
        repetitions: args.repetitions.unwrap_or(1),
        calibrate: args.compare_simulator && costs.is_none(),
        program: &program,
        out: &args.out,
    };
    let campaign = benchmark.campaign(interrupted)?;
    super::note_command(&args.out)?;
    let compared = match args.compare_simulator {
        true => {
            let costs = costs.map_or_else(|| found(&campaign.rounds, &args.out), Ok)?;
            Some(simulated::compare(&campaign.cells, costs, interrupted)?)
        }
        false => None,
    };
    let outcome = super::told(&report(&campaign, compared.as_deref()), &args.out, args.json)?;
    ensure!(
        campaign.cells.iter().chain(&campaign.alone).all(|cell| cell.is_good()),
        "requests were lost, repeated or misplaced (see {})",
        args.out.join("table.txt").display()
    );
    Ok(outcome)
}

fn read_costs(path: &Path) -> Result<Costs> {
    let text = input::read(path, MAX_COSTS)?;
    serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
}

/// The costs that were measured between the cells, kept beside these.
fn found(rounds: &[costs::Round], out: &Path) -> Result<Costs> {
    let (costs, text) = costs::find(rounds)?;
    input::write(&out.join("costs.json"), &(serde_json::to_string_pretty(&costs)? + "\n"))?;
    input::write(&out.join("costs.txt"), &text)?;
    Ok(costs)
}

fn disturb(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let seconds = args.seconds.unwrap_or(10.0);
    let is_whole = (2.0..=3_600.0).contains(&seconds) && seconds.fract() == 0.0;
    ensure!(is_whole, "--seconds is {seconds}, with --disturb a whole number of 2 to 3600");
    let program = rtvirtio()?;
    let benchmark = disturb::Benchmark {
        repetitions: args.repetitions.unwrap_or(5),
        seconds: seconds as u32,
        cpu_us: args.request_us,
        program: &program,
    };
    let cells = benchmark.run(&args.out, interrupted)?;
    super::note_command(&args.out)?;
    super::told(&benchmark.report(&cells)?, &args.out, args.json)
}
