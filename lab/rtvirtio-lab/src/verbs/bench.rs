//! `rtvirtio-lab bench`.

mod closed_loop;
mod dataplane;
mod path;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_bench::campaign::{Campaign, DATA_PLANE, Job, Source};
use rtvirtio_bench::completion;
use rtvirtio_bench::experiment::{Experiment, Report, Run};
use rtvirtio_bench::iocores;
use rtvirtio_bench::iothreads;
use rtvirtio_bench::qos::{self, Cases, cases};
use rtvirtio_bench::report;
use rtvirtio_calibrate::calibration::{FULL, calibrate_to};
use rtvirtio_calibrate::testbed::{CGROUP_ROOT, DeviceUnderTest as _, take_host};
use rtvirtio_cases::{Case, Mix, Neighbour, Scale, Scheme, Tier};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::run::CellKey;
use rtvirtio_spec::specification::Specification;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::device::Testbed;
use rtvirtio_testbed::guests::ImageArgs;
use rtvirtio_testbed::scratch::{Backing, ScratchDisk};
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_units::{Bytes, BytesPerSecond};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::guests::{VmKind, choose};
use super::scratch::BackingArgs;
use crate::{Outcome, input};

/// Size of the scratch disk.
pub(crate) const DISK: Bytes = Bytes::new(2 << 30);

/// Arguments of `bench`.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Results go to OUT as JSON lines (cells.jsonl) with the profile they were \
    planned with; the same OUT continues where it was. Every write goes to a scratch disk."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// Cases: strict8, all, or a list such as 1xL,4xL+M+H
    #[arg(long, default_value = "strict8", value_parser = cases)]
    cases: Cases,
    /// Schemes: bfq, ionice, rt-xen, none, mq-deadline, kyber, hand, rtvirtio
    #[arg(long, value_delimiter = ',', default_values_t = Scheme::ALL)]
    schemes: Vec<Scheme>,
    /// Beside the schemes: the data plane, with vhost-user clients in the VMs' place
    #[arg(long, conflicts_with_all = ["sweep_cap", "prediction", "conditions", "spec", "closed_loop"])]
    data_plane: bool,
    /// Beside the schemes: rtvirtio's plan without iocost (cgroup v2)
    #[arg(long, conflicts_with_all = ["sweep_cap", "prediction", "conditions", "spec", "closed_loop"])]
    without_iocost: bool,
    /// Beside the schemes: iocost with these fixed vrates (%), as resctl-bench's iocost-tune sets it (cgroup v2)
    #[arg(long, value_delimiter = ',', value_name = "PERCENT",
        value_parser = clap::value_parser!(u32).range(1..=10_000),
        conflicts_with_all = ["sweep_cap", "prediction", "conditions", "spec", "closed_loop"])]
    vrates: Vec<u32>,
    /// Targets: strict, paper, or the same for each task, such as 20ms
    #[arg(long, default_value = "strict")]
    tier: Tier,
    /// Neighbour: writer or none
    #[arg(long, default_value = "writer")]
    neighbour: Neighbour,
    #[command(flatten)]
    backing: BackingArgs,
    /// Repetitions of each case and scheme
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a cell's window in seconds; 21 is the least that judges p99.9 of 500 IOPS
    #[arg(long, default_value_t = 21, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    window: u64,
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench")]
    out: PathBuf,
    /// Use this profile instead of calibrating
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Instead of schemes: rtvirtio's settings with these caps (MB/s) on background VMs
    #[arg(long, value_delimiter = ',', value_name = "MB/S", conflicts_with = "prediction")]
    sweep_cap: Vec<u64>,
    /// Instead of schemes: N cells of random cases under settings that the planner would not
    /// choose, to hold predictions against
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "26")]
    prediction: Option<u32>,
    /// Instead of schemes: N random conditions of RT-VirtIO's Table II on bfq, widened (slice_idle 0,
    /// low_latency, max_budget, a writer); `bench path` holds simulations against them
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "150",
        conflicts_with_all = ["sweep_cap", "prediction"])]
    conditions: Option<u32>,
    /// With --conditions: the first of every N of them is run twice
    #[arg(long, value_name = "N", requires = "conditions", default_value = "5")]
    twice_every: NonZeroU32,
    /// Instead of cases: the VMs and tasks of this specification, on the scratch disk
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sweep_cap", "prediction", "conditions"])]
    spec: Option<PathBuf>,
    /// With --spec: run although the plan leaves targets unmet
    #[arg(long, requires = "spec")]
    force: bool,
    /// Instead of schemes: a background VM starts while `watch --control` looks after four others
    #[arg(long, conflicts_with_all = ["sweep_cap", "prediction", "conditions", "spec"])]
    closed_loop: bool,
    /// The VMs
    #[arg(long, value_enum, default_value_t = VmKind::Cgroup)]
    guests: VmKind,
    #[command(flatten)]
    image: ImageArgs,
    /// Seed of order and random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print each scheme's verdict as JSON
    #[arg(long)]
    json: bool,
}

/// Benchmarks of something else than schemes.
#[derive(clap::Subcommand)]
enum Other {
    /// How threads learn that their I/O has ended, beside threads that compute: 7 ways
    Completion(Box<Of<completion::Benchmark>>),
    /// One guest with 4 queues: main loop, 1 IOThread and a mapping over 2, CPU per I/O and IOPS
    Iothreads(Of<iothreads::Benchmark>),
    /// A vhost-user-blk server beside qemu-storage-daemon: IOPS, latency, CPU per request
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Results go to OUT as JSON lines (cells.jsonl), table.txt and plot.svg. Files under test are \
        made in /dev/shm and in --disk-directory, and removed."
    )]
    Dataplane(Box<dataplane::Args>),
    /// Policies of I/O cores on phases of load, on two CPUs: throughput, cores, utility, verdicts
    Iocores(Box<Of<iocores::Benchmark>>),
    /// Cells that other campaigns measured, simulated: how the simulator of the two-tier path agrees
    Path(path::Args),
    /// VMs with targets on the data plane beside a deep writer, with and without its schedule
    #[command(
        after_help = "Results go to OUT as JSON lines (cells.jsonl), table.txt and plot.svg. Needs root (FUSE, loop)."
    )]
    Qos(Box<Of<qos::Benchmark>>),
    /// Random sets of VMs that run whatever the admission test says of them: how often it is right
    #[command(
        after_help = "Results go to OUT as JSON lines (cells.jsonl) and table.txt. Needs root (FUSE, loop) and 5 GiB of \
        memory."
    )]
    QosAdmission(Of<qos::admission::Benchmark>),
    /// QEMU guests beside a deep writer: the data plane, an earlier build of it, and the hand setting by turns
    #[command(
        after_help = "Results go to OUT as JSON lines (cells.jsonl) and table.txt; the same OUT continues where it was, at \
        the scale that its first cell has. Needs root (FUSE, loop) and QEMU."
    )]
    QosGuests(Of<qos::guests::Benchmark>),
    /// How soon targets are met again when a VM appears, a neighbour starts, the device slows down
    #[command(
        after_help = "Results go to OUT as JSON lines (changes.jsonl), table.txt and plot.svg. Needs root (FUSE, \
        loop)."
    )]
    QosChanges(Of<qos::changes::Benchmark>),
    /// What the data plane's schedule costs: backlogged VMs on disks in memory, with and without
    #[command(
        after_help = "Results go to OUT as JSON lines (cells.jsonl) and table.txt. Wants a machine on which nothing \
        else runs, with 2 CPUs an IOThread."
    )]
    QosCost(Of<qos::cost::Benchmark>),
}

/// An experiment's own arguments, and those that all have.
#[derive(clap::Args)]
pub(crate) struct Of<E: Experiment + clap::Args> {
    #[command(flatten)]
    experiment: E,
    /// Where results go; the same OUT continues where it was
    #[arg(long, default_value = E::OUT)]
    out: PathBuf,
    /// Print cells, or their medians, as JSON
    #[arg(long)]
    json: bool,
}

impl<E: Experiment + clap::Args> Of<E> {
    fn run(&self, interrupted: &Interrupted) -> Result<Outcome> {
        self.run_instead(&self.experiment, interrupted)
    }

    /// Another experiment with the same arguments.
    fn run_instead(&self, other: &impl Experiment, interrupted: &Interrupted) -> Result<Outcome> {
        let run = Run { out: &self.out, interrupted };
        let cells = other.run(&run)?;
        note_command(&self.out)?;
        told(&other.report(&cells, &run)?, &self.out, self.json)
    }
}

/// Writes what an experiment comes to, and prints the text or what is for a program.
fn told(report: &Report, out: &Path, json: bool) -> Result<Outcome> {
    report.write(out)?;
    if json {
        input::print_json(&report.json)?;
    } else {
        print!("{}", report.text);
        println!("{}", out.display());
    }
    report.failure.clone().map_or(Ok(Outcome::Done), |why| bail!(why))
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    match &args.other {
        Some(Other::Completion(args)) => return args.run(interrupted),
        Some(Other::Iothreads(args)) => return args.run(interrupted),
        Some(Other::Dataplane(args)) => return dataplane::run(args, interrupted),
        Some(Other::Iocores(args)) => {
            return match args.experiment.disturbed()? {
                Some(disturbed) => args.run_instead(&disturbed, interrupted),
                None => args.run(interrupted),
            };
        }
        Some(Other::Path(args)) => return path::run(args),
        Some(Other::Qos(args)) => return args.run(interrupted),
        Some(Other::QosAdmission(args)) => return args.run(interrupted),
        Some(Other::QosChanges(args)) => return args.run(interrupted),
        Some(Other::QosGuests(args)) => return args.run(interrupted),
        Some(Other::QosCost(args)) => return args.run(interrupted),
        None => {}
    }
    let specification = args.spec.as_deref().map(input::specification).transpose()?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("create {}", args.out.display()))?;
    // Before anything is made that takes time or memory: another benchmark may be at work.
    let (_, taken) = take_host()?;
    let guests = choose(&args.image, args.guests, interrupted)?;
    let scale = guests.as_ref().map_or(Scale::ONE, |(_, accelerator)| accelerator.scale());
    let backing = args.backing.backing()?.slower(scale);
    let disk = ScratchDisk::start(&backing, DISK, args.seed, interrupted)?;
    // The testbed takes the host itself.
    drop(taken);
    let mut testbed = Testbed::new(disk.device(), disk.label())?;
    if let Some(guests) = &guests {
        testbed.boot_guests(guests, Case::new(4, Mix::LightMediumHeavy)?, None, interrupted)?;
    }
    let (profile, path) = self::profile(args, &testbed, interrupted)?;
    if args.closed_loop {
        return closed_loop::run(args, &mut testbed, &path, interrupted);
    }
    check_shared(args, &testbed, &profile)?;
    ensure!(
        args.vrates.is_empty() || testbed.has_iocost(),
        "--vrates needs iocost: io as a controller of cgroup v2, in a kernel with CONFIG_BLK_CGROUP_IOCOST"
    );
    ensure!(
        !args.data_plane || guests.is_none(),
        "--data-plane has clients in the VMs' place: leave --guests out (make demo has guests on both)"
    );
    let program = rtvirtio()?;
    let curve = match &backing {
        Backing::Ssd(name) => Curve::of_ssd(name.parse()?),
        Backing::Raw(_) => Curve::of_profile(&profile.capacity),
    };
    let campaign = Campaign {
        testbed: &testbed,
        profile: &profile,
        window: Duration::from_secs(args.window),
        rounds: 1,
        data_plane: Some((&program, curve)),
        directory: &args.out,
        seed: args.seed,
        noise_floor: matches!(backing, Backing::Raw(_)),
    };
    let jobs = match (specification, args.prediction, args.conditions) {
        (Some(specification), ..) => own(&campaign, specification, args)?,
        (None, Some(cells), _) => campaign.prediction_jobs(cells),
        (None, None, Some(conditions)) => campaign.condition_jobs(conditions, args.twice_every),
        (None, None, None) => {
            let mut sources: Vec<_> = if args.sweep_cap.is_empty() {
                args.schemes.iter().map(|&s| (s.to_string(), Source::Scheme(s))).collect()
            } else {
                let cap = |&mb| {
                    let cap = BytesPerSecond::from_megabytes(mb);
                    (format!("cap-{mb}"), Source::PlannedWithCap(cap))
                };
                args.sweep_cap.iter().map(cap).collect()
            };
            if args.data_plane {
                sources.push((DATA_PLANE.to_owned(), Source::DataPlane));
            }
            if args.without_iocost {
                sources.push(("without-iocost".to_owned(), Source::PlannedWithoutIoCost));
            }
            let fixed = |&percent| (format!("vrate-{percent}"), Source::FixedVrate(percent));
            sources.extend(args.vrates.iter().map(fixed));
            campaign.matrix(&args.cases, args.tier, args.neighbour, &sources, args.repetitions)
        }
    };
    let notes = note_command(&args.out)?;
    let cells = campaign.run(jobs, interrupted)?;
    super::report::write(&cells, &args.out.join("report.html"), "rtvirtio benchmark", &notes)?;
    if args.json {
        input::print_json(&json!({
            "schemes": super::report::verdicts(&cells),
            "predictions": report::agreement(&cells),
        }))?;
    } else {
        println!("{}", report::table(&cells));
        println!("{}", args.out.join("report.html").display());
    }
    Ok(Outcome::Done)
}

/// Adds this command with date and machine to the directory's list, and returns the list.
fn note_command(out: &Path) -> Result<Vec<String>> {
    let path = out.join("commands.txt");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut text = std::fs::read_to_string(&path).unwrap_or_default();
    text += &format!(
        "{} rtvirtio {} ({}; {})\n",
        jiff::Timestamp::now().strftime("%F %TZ"),
        arguments.join(" "),
        env!("CARGO_PKG_VERSION"),
        super::report::machine()
    );
    input::write(&path, &text)?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The profile given, the one in the directory, or a new one, with its file; of this device in any
/// case.
fn profile(
    args: &Args,
    testbed: &Testbed,
    interrupted: &Interrupted,
) -> Result<(Profile, PathBuf)> {
    let kept = args.out.join("profile.json");
    let path = args.profile.clone().unwrap_or_else(|| kept.clone());
    if args.profile.is_none() && !path.exists() {
        return Ok((calibrate_to(testbed, FULL, &kept, interrupted)?, kept));
    }
    let profile = input::profile(&path)?;
    ensure!(
        profile.device == testbed.identity()?,
        "{} is of another device than --ssd or --raw asks for (use another --out or --profile)",
        path.display()
    );
    ensure!(
        profile.measured_at == testbed.measured_at(),
        "{} was not measured with the VMs that --guests asks for (use another --out or --profile)",
        path.display()
    );
    Ok((profile, path))
}

/// What all cells of a directory share.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Shared {
    device: String,
    window_s: u64,
    /// When its profile was made.
    profile: String,
    /// The text of `--spec`.
    specification: Option<String>,
}

/// Refuses to mix cells of two experiments in one directory.
fn check_shared(args: &Args, testbed: &Testbed, profile: &Profile) -> Result<()> {
    let specification = args.spec.as_ref().map(std::fs::read_to_string).transpose()?;
    let mine = Shared {
        device: testbed.label().to_owned(),
        window_s: args.window,
        profile: profile.date.clone(),
        specification,
    };
    let path = args.out.join("campaign.json");
    if !path.exists() {
        return input::write(&path, &serde_json::to_string_pretty(&mine)?);
    }
    let there: Shared = serde_json::from_str(&std::fs::read_to_string(&path)?)
        .with_context(|| format!("{}", path.display()))?;
    ensure!(
        there == mine,
        "{} holds another campaign: its device, window, profile or specification differs (use \
         another --out)",
        args.out.display()
    );
    Ok(())
}

/// One cell of an operator's own specification, its VMs on the scratch disk.
fn own(campaign: &Campaign<'_>, mut specification: Specification, args: &Args) -> Result<Vec<Job>> {
    let device = campaign.testbed.device().clone();
    let mut tasks = specification.vms.iter().flat_map(|v| &v.tasks);
    ensure!(
        tasks.all(|t| t.target.is_none() || t.load.iops.is_some()),
        "a task has a target and no iops: give its rate, or it cannot be judged"
    );
    for vm in &mut specification.vms {
        vm.cgroup = Path::new(CGROUP_ROOT).join(vm.name.as_str());
        for disk in &mut vm.disks {
            disk.device = device.name.clone();
        }
    }
    specification.devices = vec![device];
    let observed = campaign.testbed.prepare(&specification)?;
    let plan = campaign.plan(&specification, &observed)?;
    eprint!("{}", rtvirtio_cli::plan::describe(&plan));
    if !plan.meets_all() && !args.force {
        bail!("the plan leaves targets unmet, as said above (--force runs it all the same)");
    }
    let job = |repetition| Job {
        key: CellKey {
            case: "specification".to_owned(),
            tier: "own".to_owned(),
            neighbour: "own".to_owned(),
            scheme: Scheme::Rtvirtio.to_string(),
            repetition,
        },
        specification: specification.clone(),
        source: Source::Scheme(Scheme::Rtvirtio),
    };
    Ok((0..args.repetitions).map(job).collect())
}
