//! `rtvirtio demo`: the main job on a scratch disk, from calibration to verdict.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_bench::InterruptedError;
use rtvirtio_bench::campaign::{CELLS, Campaign, Source};
use rtvirtio_bench::cell::Testbed;
use rtvirtio_bench::guests::{Accelerator, GuestImage, Served};
use rtvirtio_bench::load::{CellLoad, Interrupted};
use rtvirtio_bench::progress::human;
use rtvirtio_bench::qos::curve::Curve;
use rtvirtio_bench::scratch::{Backing, ScratchDisk};
use rtvirtio_bench::{calibrate, report};
use rtvirtio_cases::{Case, Mix, Neighbour, Scale, Scheme, Tier, judged_percentile};
use rtvirtio_host::doctor::{Status, probe};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::run::Cell;
use rtvirtio_spec::specification::to_toml;

use super::bench::DISK;
use super::guests::{ImageArgs, VmKind};
use crate::{Outcome, input};

/// The least window that judges p99.9 of 500 requests a second.
const WINDOW: Duration = Duration::from_secs(21);
const REPETITIONS: u32 = 2;
/// How the data plane's stage is called in tables.
const DATA_PLANE: &str = "data-plane";
/// How long its guests take to boot, about.
const BOOT_AGAIN: Duration = Duration::from_secs(25);

/// Window and repetitions. The light task of a slowed-down evaluation issues too little for a p99
/// in one window: the repetitions are made in one piece.
const fn windows(scale: Scale) -> (Duration, u32) {
    match scale {
        Scale::ONE => (WINDOW, REPETITIONS),
        _ => (Duration::from_secs(WINDOW.as_secs() * REPETITIONS as u64), 1),
    }
}

/// Arguments of `demo`.
#[derive(clap::Args)]
#[command(after_help = "Four VMs with the paper's tasks (100, 500 and 1500 IOPS) and one that \
    writes 128 KiB blocks at depth 64 share one scratch disk. With guests, the same VMs once more on \
    the data plane (rtvirtio serve), which is told each task's rate and target. Takes about 10 \
    minutes.\n\
    Exit codes: 0 rtvirtio meets every target that the hand setting meets, 3 it does not.")]
pub(crate) struct Args {
    /// Disk: ref-4x250, ref-8x80, ref-stall (emulated, needs FUSE), or raw (a plain file)
    #[arg(long, default_value = "ref-4x250")]
    device: String,
    /// Directory of the plain file for `--device raw`
    #[arg(long, default_value = "/var/tmp")]
    raw_dir: PathBuf,
    /// The four VMs and the one that writes
    #[arg(long, value_enum, default_value_t = VmKind::Auto)]
    guests: VmKind,
    #[command(flatten)]
    image: ImageArgs,
    /// Where results go; an earlier demo's are replaced
    #[arg(long, default_value = "rtvirtio-demo")]
    out: PathBuf,
    /// Print each scheme's verdict as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let backing = match args.device.as_str() {
        "raw" => Backing::Raw(args.raw_dir.clone()),
        name => {
            name.parse::<rtvirtio_bench::scratch::SsdConfig>()?;
            Backing::Ssd(name.to_owned())
        }
    };
    check_host(&backing)?;
    let guests = args.image.choose(args.guests, interrupted)?;
    let scale = guests.as_ref().map_or(Scale::ONE, |(_, accelerator)| accelerator.scale());
    let backing = backing.slower(scale);
    std::fs::create_dir_all(&args.out).with_context(|| format!("create {}", args.out.display()))?;
    ensure!(
        !args.out.join("commands.txt").exists(),
        "{} holds a benchmark; use another --out",
        args.out.display()
    );
    for stale in [CELLS, "profile.json", "profile.partial", "report.html"] {
        let _ = std::fs::remove_file(args.out.join(stale));
    }
    let case = Case::new(4, Mix::LightMediumHeavy)?;
    let program = std::env::current_exe()?;
    let disk = ScratchDisk::start(&program, &backing, DISK, 1)?;
    let mut testbed = Testbed::new(disk.device(), disk.label())?;
    if let Some((image, accelerator)) = &guests {
        testbed.boot_guests(image, *accelerator, case, interrupted)?;
    }
    let (window, repetitions) = windows(scale);
    let cells_planned = Scheme::ALL.len() as u32 * repetitions;
    let again = match guests {
        Some(_) => BOOT_AGAIN + CellLoad::duration(window) * repetitions,
        None => Duration::ZERO,
    };
    let expected =
        calibrate::duration(&testbed) + CellLoad::duration(window) * cells_planned + again;
    eprintln!(
        "Disk {}: calibration, then {} schemes × {repetitions} of {} s, about {} in all.",
        disk.label(),
        Scheme::ALL.len(),
        window.as_secs(),
        human(expected)
    );
    let profile = super::calibrate::profile(&testbed, &args.out.join("profile.json"), interrupted)?;
    eprintln!("{}", super::calibrate::summary(&profile));
    let campaign = Campaign {
        testbed: &testbed,
        profile: &profile,
        window,
        directory: &args.out,
        seed: 1,
        // It would take a demo to 20 minutes.
        noise_floor: false,
    };
    let specification = campaign.specification(case, Tier::Strict, Neighbour::Writer);
    input::write(&args.out.join("specification.toml"), &to_toml(&specification))?;
    let observed = testbed.prepare(&specification)?;
    let plan = campaign.plan(&specification, &observed)?;
    input::write(&args.out.join("plan.json"), &serde_json::to_string_pretty(&plan)?)?;
    let described = super::plan::describe(&plan);
    eprintln!("{described}");
    let sources: Vec<_> = Scheme::ALL.iter().map(|&s| (s.to_string(), Source::Scheme(s))).collect();
    let jobs = campaign.matrix(&[case], Tier::Strict, Neighbour::Writer, &sources, repetitions);
    let cells = campaign.run(jobs, interrupted)?;
    let stage = DataPlaneStage {
        guests: guests.as_ref(),
        profile: &profile,
        window,
        repetitions,
        directory: &args.out,
        program: &program,
        // Of an emulated SSD its model's: a profile made in guests is of their path to it.
        curve: match &backing {
            Backing::Ssd(name) => Curve::of_ssd(name.parse()?),
            Backing::Raw(_) => Curve::of_profile(&profile.capacity),
        },
    };
    let (cells, of_data_plane) = stage.run(&mut testbed, case, cells, interrupted)?;
    let html = args.out.join("report.html");
    let vms = guests.as_ref().map(|(_, accelerator)| {
        format!(
            "VMs are QEMU guests under {}; scale factor s = {scale}: rates and the disk are {scale} \
             times slower than written, targets as much longer.",
            accelerator.name()
        )
    });
    let notes: Vec<String> = vms
        .into_iter()
        .chain(plan.reasons.iter().cloned())
        .chain([of_data_plane.clone()])
        .collect();
    super::report::write(&cells, &html, "rtvirtio demo", &notes)?;
    if args.json {
        input::print_json(&super::bench::verdicts(&cells))?;
    } else {
        println!("{}", report::table(&cells));
        for scheme in [Scheme::Rtvirtio, Scheme::Hand] {
            println!("{}", urgent(&cells, scheme));
        }
        println!("{of_data_plane}");
        if let Some(beside_hand) = beside_hand(&cells) {
            println!("{beside_hand}");
        }
        println!("Report: {}", html.display());
    }
    let level = meets_what_hand_meets(&cells, &Scheme::Rtvirtio.to_string());
    if !level {
        eprintln!("rtvirtio missed a target that the hand setting met, or nothing counts");
    }
    Ok(if level { Outcome::Done } else { Outcome::Unmet })
}

/// The same VMs once more, their disks on the data plane.
struct DataPlaneStage<'a> {
    guests: Option<&'a (GuestImage, Accelerator)>,
    profile: &'a Profile,
    window: Duration,
    repetitions: u32,
    directory: &'a Path,
    program: &'a Path,
    curve: Curve,
}

impl DataPlaneStage<'_> {
    /// All cells, and what to say about the stage: without guests it is left out, and a failure is
    /// told.
    fn run(
        &self,
        testbed: &mut Testbed,
        case: Case,
        cells: Vec<Cell>,
        interrupted: &Interrupted,
    ) -> Result<(Vec<Cell>, String)> {
        let Some((image, accelerator)) = self.guests else {
            let why = "left out: fio processes have no vhost-user; it needs guests (make guest)";
            return Ok((cells, format!("{DATA_PLANE}: {why}")));
        };
        eprintln!("The same guests once more, their disks on the data plane (rtvirtio serve)");
        let mut measure = || -> Result<_> {
            let (program, accelerator) = (self.program, *accelerator);
            let served = (program, self.curve);
            testbed.boot_guests_on_data_plane(image, accelerator, case, served, interrupted)?;
            let before = testbed.served()?;
            let start = Instant::now();
            let campaign = Campaign {
                testbed,
                profile: self.profile,
                window: self.window,
                directory: self.directory,
                seed: 1,
                noise_floor: false,
            };
            let sources = [(DATA_PLANE.to_owned(), Source::DataPlane)];
            let (tier, neighbour) = (Tier::Strict, Neighbour::Writer);
            let jobs = campaign.matrix(&[case], tier, neighbour, &sources, self.repetitions);
            let cells = campaign.run(jobs, interrupted)?;
            let cost = before
                .zip(testbed.served()?)
                .map(|(before, after)| cost(before, after, start.elapsed()));
            Ok((cells, cost.unwrap_or_default()))
        };
        match measure() {
            Ok((cells, cost)) => {
                let what = "the disks served by rtvirtio serve (vhost-user-blk, 1 IOThread) from \
                            the same device, each task's rate and target promised, the writer \
                            uncapped";
                Ok((cells, format!("{DATA_PLANE}: {what}{cost}")))
            }
            Err(error) if error.is::<InterruptedError>() => Err(error),
            Err(error) => {
                eprintln!("warning: {DATA_PLANE}: {error:#}");
                Ok((cells, format!("{DATA_PLANE}: failed, and is not in the tables: {error:#}")))
            }
        }
    }
}

/// The data plane against the hand setting: what passes, and what the writer gets.
fn beside_hand(cells: &[Cell]) -> Option<String> {
    let background = |name: &str| {
        let of: Vec<f64> = cells
            .iter()
            .filter(|c| c.key.scheme == name && c.discarded.is_none())
            .map(|c| c.background.values().map(|b| b.as_megabytes_f64()).sum::<f64>())
            .collect();
        (!of.is_empty()).then(|| of.iter().sum::<f64>() / of.len() as f64)
    };
    let (ours, hand) = (background(DATA_PLANE)?, background(&Scheme::Hand.to_string())?);
    let passes =
        if meets_what_hand_meets(cells, DATA_PLANE) { "passes" } else { "does not pass all of" };
    Some(format!(
        "{DATA_PLANE}: {passes} what the hand setting passes; the writer gets {ours:.1} MB/s, {:.1} \
         times as much",
        ours / hand.max(1e-3)
    ))
}

/// What the IOThread cost.
fn cost(before: Served, after: Served, time: Duration) -> String {
    let cpu_ns = after.cpu_ns.saturating_sub(before.cpu_ns) as f64;
    let requests = after.requests.saturating_sub(before.requests);
    format!(
        "; its IOThread took {:.1} µs of CPU per request ({requests} requests) and {:.1} % of a \
         core",
        cpu_ns / 1e3 / requests.max(1) as f64,
        cpu_ns / 1e9 / time.as_secs_f64() * 100.0
    )
}

/// Clear words, before anything is started, on what the host lacks.
fn check_host(backing: &Backing) -> Result<()> {
    let mut needed = vec!["root", "loop", "fio", "bfq", "kyber", "mq-deadline", "limits"];
    if matches!(backing, Backing::Ssd(_)) {
        needed.push("fuse");
    }
    let findings = probe(&input::host());
    let missing: Vec<_> = findings
        .iter()
        .filter(|f| needed.contains(&f.name) && f.status == Status::Missing)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    for f in &missing {
        eprintln!("missing: {}: {}", f.name, f.detail);
        if let Some(remedy) = &f.remedy {
            eprintln!("  {remedy}");
        }
        if f.name == "fuse" {
            eprintln!("  or use a plain file: rtvirtio demo --device raw");
        }
    }
    bail!("this host cannot run the demo yet");
}

/// All requests of the most urgent VM together, whatever their task.
fn urgent(cells: &[Cell], scheme: Scheme) -> String {
    let name = scheme.to_string();
    let counted: Vec<_> =
        cells.iter().filter(|c| c.key.scheme == name && c.discarded.is_none()).collect();
    let tasks = || counted.iter().flat_map(|c| &c.tasks);
    let most = tasks().filter(|t| t.target.is_some()).min_by_key(|t| t.target).map(|t| &t.vm);
    let mut all = Histogram::new();
    for task in tasks().filter(|t| Some(&t.vm) == most) {
        all.merge(&task.histogram);
    }
    let percentile = judged_percentile(all.count());
    match (most, percentile.and_then(|p| all.quantile(p))) {
        (Some(vm), Some(q)) => format!(
            "{name}: all requests of {vm}, the most urgent: p{} {} (95 % interval {} to {}, n {})",
            q.percentile, q.value, q.low, q.high, q.n
        ),
        _ => format!("{name}: too few requests of the most urgent VM"),
    }
}

/// Whether each task that passed in all of hand's runs passed in all of another scheme's.
fn meets_what_hand_meets(cells: &[Cell], scheme: &str) -> bool {
    let passed = |name: &str| {
        let mut tasks = std::collections::BTreeMap::new();
        for cell in cells.iter().filter(|c| c.key.scheme == name && c.discarded.is_none()) {
            for t in &cell.tasks {
                let all: &mut bool = tasks.entry((t.vm.clone(), t.task.clone())).or_insert(true);
                *all &= t.passed;
            }
        }
        tasks
    };
    let (hand, ours) = (passed(&Scheme::Hand.to_string()), passed(scheme));
    let met = |task| ours.get(task) == Some(&true);
    !hand.is_empty() && hand.iter().filter(|(_, met)| **met).all(|(task, _)| met(task))
}
