//! `rtvirtio-lab demo`: the main job on a scratch disk, from calibration to verdict.
//!
//! The schemes take turns in short windows, so that whatever else the machine does meets all of them
//! alike. VMs are QEMU guests where one boots under KVM. Elsewhere they are cgroups on the kernel path
//! and vhost-user clients on the data plane, so that both paths are shown on any machine.

mod memory;
mod verdict;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_bench::campaign::{CELLS, Campaign, DATA_PLANE, Source};
use rtvirtio_bench::report;
use rtvirtio_calibrate::calibration::{self, Depth, FULL, calibrate_to, summary};
use rtvirtio_calibrate::load::CellLoad;
use rtvirtio_calibrate::testbed::{DeviceUnderTest as _, take_host};
use rtvirtio_cases::{Case, Mix, Neighbour, Scale, Scheme, Tier};
use rtvirtio_cli::progress::human;
use rtvirtio_host::doctor::{Status, io_uring, probe};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::run::Cell;
use rtvirtio_spec::specification::to_toml;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::device::Testbed;
use rtvirtio_testbed::guests::{Accelerator, GuestImage, ImageArgs, MEMORY_MIB, Served};
use rtvirtio_testbed::scratch::{Backing, ScratchDisk};
use rtvirtio_testbed::server::{rtvirtio, try_ring};
use rtvirtio_units::Bytes;

use super::bench::DISK;
use super::guests::{VmKind, for_demo};
use crate::{Outcome, input};
use verdict::Verdict;

/// The schemes of the short demo; the data plane comes on top.
const SHORT: [Scheme; 4] = [Scheme::Bfq, Scheme::None, Scheme::Hand, Scheme::Rtvirtio];
/// Windows of each scheme.
const ROUNDS: u32 = 3;
/// Length of one in the short demo: three judge p99 of 100 requests a second, and p99.9 of 1,500.
const SHORT_WINDOW: Duration = Duration::from_millis(3_800);
/// And in the full one: three judge p99.9 of 500 requests a second.
const FULL_WINDOW: Duration = Duration::from_secs(14);
/// Its VMs.
const VMS: u64 = 5;
/// What fio, QEMU and these programs take beside the disk and guests' memory.
const SPARE: Bytes = Bytes::new(512 << 20);
/// How long data plane guests take to boot, about.
const BOOT_AGAIN: Duration = Duration::from_secs(25);

/// Arguments of `demo`.
#[derive(clap::Args)]
#[command(
    after_help = "Four VMs with the paper's tasks (100, 500 and 1500 requests a second) and one that \
    writes 128 KiB blocks at depth 64 share one scratch disk. The short demo calibrates the disk, then runs \
    default bfq, no scheduler, a setting made by hand, rtvirtio's plan and the data plane (rtvirtio serve) in \
    turns: about 3 minutes. --full adds ionice, an RT-Xen-like budget, mq-deadline and kyber, with longer \
    windows and a whole calibration: about 11 minutes.\n\
    A miss within its 95 % interval, and one that is no longer than the machine itself was late, are marked \
    and are no proof of either.\n\
    Exit codes: 0 rtvirtio's plan and the data plane meet every target that the hand setting meets, 3 one of \
    them does not, 4 of one of them nothing could be compared (what to do is printed), 1 error, such as a data plane \
    that fails in the guests (the report has the rest), 130 interrupted."
)]
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
    /// All eight schemes, longer windows, a whole calibration
    #[arg(long)]
    full: bool,
    /// Where results go; an earlier demo's are replaced
    #[arg(long, default_value = "rtvirtio-demo")]
    out: PathBuf,
    /// Print the verdict as JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    fn schemes(&self) -> &'static [Scheme] {
        if self.full { &Scheme::ALL } else { &SHORT }
    }

    /// Depth of the calibration, and the time after which no probe is begun.
    const fn calibration(&self) -> (Depth, Duration) {
        if self.full { FULL } else { (Depth::Quick, Duration::from_secs(75)) }
    }

    /// Guests that are slowed down issue less, so they are watched longer.
    fn window(&self, scale: Scale) -> Duration {
        let window = if self.full { FULL_WINDOW } else { SHORT_WINDOW };
        window * scale.get()
    }
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let begin = Instant::now();
    let backing = match args.device.as_str() {
        "raw" => Backing::Raw(args.raw_dir.clone()),
        name => Backing::ssd(name)?,
    };
    check_host(&backing, args.schemes())?;
    // Before anything is made that takes time or memory: another demo may be at work.
    let (_, taken) = take_host()?;
    let kind = kind_within_memory(&backing, args.guests)?;
    let guests = for_demo(&args.image, kind, interrupted)?;
    create_directory(&args.out)?;
    let case = Case::new(4, Mix::LightMediumHeavy)?;
    let program = rtvirtio()?;
    let mut disk = ScratchDisk::start(&backing, DISK, 1, interrupted)?;
    // The testbed takes the host itself.
    drop(taken);
    let mut testbed = Testbed::new(disk.device(), disk.label())?;
    // Not before this host is taken: another demo may be at work in the directory.
    remove_earlier(&args.out);
    let mut backing = backing;
    if let Some(guests) = &guests {
        testbed.boot_guests(guests, case, None, interrupted)?;
        let scale = testbed.find_scale(case, interrupted)?;
        let percent = rtvirtio_testbed::device::GUESTS_CPU * 100.0;
        eprintln!(
            "Guests under {}: at s = {scale} the load takes no more than {percent:.0} % of the CPUs \
             that it may use. Rates and the disk are {scale} times slower than written, targets as much longer.",
            guests.1
        );
        if let (Backing::Ssd(_), Ok(times)) = (&backing, u16::try_from(scale.get())) {
            disk.slow_down(times)?;
        }
        backing = backing.slower(scale);
        testbed.set_label(backing.label());
    }
    let scale = testbed.scale();
    let window = args.window(scale);
    let on_clients = guests.is_none();
    let schemes = args.schemes().len() + 1;
    let again = if on_clients { Duration::ZERO } else { BOOT_AGAIN };
    let (depth, limit) = args.calibration();
    let expected = calibration::duration(&testbed, depth)
        + CellLoad::duration(window) * ROUNDS * schemes as u32
        + again;
    eprintln!(
        "Disk {}: calibration, then {schemes} schemes in turns, {ROUNDS} × {:.1} s each; about {} in all.",
        testbed.label(),
        window.as_secs_f64(),
        human(expected)
    );
    let calibrated = Instant::now();
    let profile =
        calibrate_to(&testbed, (depth, limit), &args.out.join("profile.json"), interrupted)?;
    let calibration = calibrated.elapsed();
    if args.full {
        eprintln!("{}", summary(&profile));
    }
    // Of an emulated SSD its model's: a profile made in guests is of their path to it.
    let curve = match &backing {
        Backing::Ssd(name) => Curve::of_ssd(name.parse()?),
        Backing::Raw(_) => Curve::of_profile(&profile.capacity),
    };
    let campaign = Campaign {
        testbed: &testbed,
        profile: &profile,
        window,
        rounds: ROUNDS,
        data_plane: Some((&program, curve)),
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
    eprintln!("{}", rtvirtio_cli::plan::describe(&plan));
    let mut sources: Vec<_> =
        args.schemes().iter().map(|&s| (s.to_string(), Source::Scheme(s))).collect();
    if on_clients {
        sources.push((DATA_PLANE.to_owned(), Source::DataPlane));
    }
    let jobs = campaign.matrix(&[case], Tier::Strict, Neighbour::Writer, &sources, 1);
    let mut cells = campaign.run(jobs, interrupted)?;
    let mut data_plane =
        "data-plane: vhost-user clients (libblkio) in the VMs' place; rtvirtio serve with \
        1 IOThread promises each VM its rate and target, the writer is not capped"
            .to_owned();
    let mut failure = None;
    if let Some(guests) = &guests {
        let stage = DataPlaneStage {
            guests,
            profile: &profile,
            window,
            directory: &args.out,
            program: &program,
            curve,
        };
        let measured = stage.run(&mut testbed, case, interrupted);
        (data_plane, failure) = match measured {
            Ok((measured, what)) => {
                cells = measured;
                (what, None)
            }
            Err(error) if rtvirtio_cli::is_of_user(&error) => return Err(error),
            // What was measured before is to be seen all the same.
            Err(error) => {
                eprintln!("warning: {DATA_PLANE}: {error:#}");
                let what = format!("{DATA_PLANE}: failed, and is not in the tables: {error:#}");
                (what, Some(error))
            }
        };
    }
    drop(testbed);
    let verdict = Verdict::of(&cells, &plan, calibration, begin.elapsed());
    let html = args.out.join("report.html");
    let vms = match &guests {
        Some((_, accelerator)) => format!(
            "VMs are QEMU guests under {}; scale factor s = {scale}: rates and the disk are {scale} \
             times slower than written, targets as much longer.",
            accelerator.name()
        ),
        None => {
            "VMs are cgroups with fio on the kernel path, and vhost-user clients on the data plane."
                .to_owned()
        }
    };
    let notes: Vec<String> = verdict
        .lines()
        .into_iter()
        .chain([vms, data_plane.clone()])
        .chain(plan.reasons.iter().map(ToString::to_string))
        .collect();
    super::report::write(&cells, &html, "rtvirtio-lab demo", &notes)?;
    input::write(&args.out.join("verdict.json"), &serde_json::to_string_pretty(&verdict)?)?;
    if args.json {
        input::print_json(&verdict)?;
    } else {
        println!("{}", report::table(&cells));
        println!("{data_plane}\n");
        for line in verdict.lines() {
            println!("{line}");
        }
        println!("Report: {}", html.display());
    }
    verdict.end(failure)
}

/// Makes the directory.
fn create_directory(out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
    ensure!(
        !out.join("commands.txt").exists(),
        "{} holds a benchmark; use another --out",
        out.display()
    );
    Ok(())
}

/// Removes what an earlier demo left there.
fn remove_earlier(out: &Path) {
    let partial = "profile.json.rtvirtio-partial";
    for stale in [CELLS, "profile.json", partial, "report.html", "verdict.json"] {
        let _ = std::fs::remove_file(out.join(stale));
    }
}

/// The same guests once more, their disks on the data plane.
struct DataPlaneStage<'a> {
    guests: &'a (GuestImage, Accelerator),
    profile: &'a Profile,
    window: Duration,
    directory: &'a Path,
    program: &'a Path,
    curve: Curve,
}

impl DataPlaneStage<'_> {
    /// The cells of all stages, and what to say about this one.
    fn run(
        &self,
        testbed: &mut Testbed,
        case: Case,
        interrupted: &Interrupted,
    ) -> Result<(Vec<Cell>, String)> {
        eprintln!("The same guests once more, their disks on the data plane (rtvirtio serve)");
        let served = (self.program, self.curve);
        testbed.boot_guests(self.guests, case, Some(served), interrupted)?;
        let before = testbed.served()?;
        let start = Instant::now();
        let campaign = Campaign {
            testbed,
            profile: self.profile,
            window: self.window,
            rounds: ROUNDS,
            data_plane: None,
            directory: self.directory,
            seed: 1,
            noise_floor: false,
        };
        let sources = [(DATA_PLANE.to_owned(), Source::DataPlane)];
        let (tier, neighbour) = (Tier::Strict, Neighbour::Writer);
        let jobs = campaign.matrix(&[case], tier, neighbour, &sources, 1);
        let cells = campaign.run(jobs, interrupted)?;
        let after = testbed.served()?;
        let cost = before.zip(after).map(|(before, after)| cost(before, after, start.elapsed()));
        let what = "the disks served by rtvirtio serve (vhost-user-blk, 1 IOThread) from the same \
                    device, each task's rate and target promised, the writer uncapped";
        Ok((cells, format!("{DATA_PLANE}: {what}{}", cost.unwrap_or_default())))
    }
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
fn check_host(backing: &Backing, schemes: &[Scheme]) -> Result<()> {
    // The hand setting is bfq's, too.
    let mut needed = vec!["root", "loop", "fio", "bfq", "limits", "io_uring"];
    if matches!(backing, Backing::Ssd(_)) {
        needed.push("fuse");
    }
    // The calibration leaves out the probes of a scheduler that is not there, and so the plan does not choose it.
    if schemes.contains(&Scheme::Kyber) {
        needed.extend(["kyber", "mq-deadline"]);
    }
    let host = input::host();
    let mut findings = probe(&host);
    findings.push(io_uring(&host, try_ring()));
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
            eprintln!("  or use a plain file: rtvirtio-lab demo --device raw");
        }
    }
    bail!("this host cannot run the demo yet");
}

/// What VMs may be, by the memory that an emulated disk, which is kept there, and guests would leave this host: where there is
/// none the kernel kills whom it likes, such as somebody's VM.
fn kind_within_memory(backing: &Backing, kind: VmKind) -> Result<VmKind> {
    let is_emulated = matches!(backing, Backing::Ssd(_));
    let disk = SPARE.get() + if is_emulated { DISK.get() } else { 0 };
    let guests = disk + VMS * (u64::from(MEMORY_MIB) << 20);
    let host = memory::of_host()?;
    // Guests have a cgroup of their own.
    let own = memory::of_cgroup().map_or(host, |left| left.min(host));
    let lacks = |what: &str, needed: u64, available: u64| {
        format!("{what} {:.1} GiB of memory, and {:.1} are available", gib(needed), gib(available))
    };
    if own < disk {
        let remedy = if is_emulated { ", or take a plain file as disk: --device raw" } else { "" };
        bail!("{}: end what else runs here{remedy}", lacks("the demo needs", disk, own));
    }
    match kind {
        VmKind::Qemu if host < guests => bail!(
            "{}: end what else runs here, or have cgroups as VMs: --guests cgroup",
            lacks("the demo with guests needs", guests, host)
        ),
        VmKind::Auto if host < guests => {
            eprintln!("VMs are no guests: {}", lacks("these would need", guests, host));
            Ok(VmKind::Cgroup)
        }
        kind => Ok(kind),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
