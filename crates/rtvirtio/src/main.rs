//! The `rtvirtio` binary: verbs and their wiring.
//!
//! Exit codes: 0 done, or nothing to change; 1 error; 2 there are changes
//! (`plan`) or drift (`verify`); 3 targets are unmet; 4 nothing could be compared (`demo`); 130 interrupted. A wrong
//! command line is 1 as well, so that 2 keeps its one meaning. `run` ends as its program does. 141: who read the
//! output has gone, as a shell says it of SIGPIPE.

// In the place of the standard library's, which panic where they cannot print (`output`).
macro_rules! print {
    ($($text:tt)*) => { $crate::output::print(format_args!($($text)*)) };
}
macro_rules! println {
    () => { print!("\n") };
    ($($text:tt)*) => { print!("{}\n", format_args!($($text)*)) };
}
macro_rules! eprint {
    ($($text:tt)*) => { $crate::output::complain(format_args!($($text)*)) };
}
macro_rules! eprintln {
    () => { eprint!("\n") };
    ($($text:tt)*) => { eprint!("{}\n", format_args!($($text)*)) };
}

mod input;
mod output;
mod tree;
mod verbs;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rtvirtio_host::HostError;
use rtvirtio_host::dataplane::ControlFault;
use rtvirtio_host::interrupt::InterruptedError;
use rtvirtio_model::learned::LearnedError;
use rtvirtio_planner::PlanError;
use rtvirtio_spec::mapping::MappingError;
use rtvirtio_spec::mapping::read::ReadError;
use rtvirtio_spec::serve::ServeError;
use rtvirtio_spec::specification::SpecificationError;

/// Predictable, cheap disk I/O for virtual machines.
///
/// State how long the slowest request of each VM's tasks may take; rtvirtio
/// measures the device, finds settings that meet every target or names the one
/// that cannot be met, applies them and takes them back.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done or nothing to change, 1 error, 2 changes \
    (plan) or drift (verify), 3 unmet targets, 4 nothing to compare (demo), 130 interrupted, 141 nobody reads the output.\n\
    RTVIRTIO_STATE_DIR moves apply's journal and lock away from /run/rtvirtio-host.\n\
    First steps: `rtvirtio doctor`, then `rtvirtio demo`."
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Say what this host can do, and what is missing
    Doctor(verbs::doctor::Args),
    /// Serve a scratch disk until Ctrl-C: an emulated SSD or a plain file
    Scratch(verbs::scratch::Args),
    /// Measure a scratch device and fit the models: writes a profile
    Calibrate(verbs::calibrate::Args),
    /// Predict, search, and print what to change; changes nothing
    Plan(verbs::plan::Args),
    /// Apply a saved plan, journal first; all of it or nothing
    Apply(verbs::apply::ApplyArgs),
    /// Keep what `apply --confirm-timeout` applied
    Confirm(verbs::apply::ConfirmArgs),
    /// Compare the host with a plan; names drift and other writers
    Verify(verbs::apply::VerifyArgs),
    /// Put all knobs back as they were before the first apply
    Rollback(verbs::apply::RollbackArgs),
    /// Have systemd apply a saved plan at each boot, or no longer
    Boot(verbs::boot::Args),
    /// Show each task's tail as it happens; --control keeps targets met
    Watch(verbs::watch::Args),
    /// Run schemes × cases on a scratch disk; resumable
    Bench(Box<verbs::bench::Args>),
    /// Draw a benchmark's results: one HTML file, and a table
    Report(verbs::report::Args),
    /// The main job on a scratch disk: baselines and rtvirtio side by side
    Demo(verbs::demo::Args),
    /// Serve VMs' disks over vhost-user-blk: the data plane
    Serve(verbs::serve::Args),
    /// Look at a running data plane and change it
    Ctl(Box<verbs::ctl::Args>),
    /// Mount a data plane's IOThreads, devices and queues as files, as IOcm had them
    Tree(verbs::tree::Args),
    /// Play a load on simulated hosts, policies for I/O cores side by side
    Simulate(Box<verbs::simulate::Args>),
    /// Translate queue-to-IOThread mappings between QEMU, libvirt and TOML
    Mapping(verbs::mapping::Args),
    /// Run a program whose direct I/O waits for its device by looking, while CPUs are idle
    Run(verbs::run::Args),
    /// Serve the tree (started by `tree`, which unmounts it)
    #[command(hide = true)]
    TreeServer(verbs::tree::ServerArgs),
    /// Move vCPUs for a data plane, and give them their CPUs back when it has gone (started by
    /// `serve`, which has no right to)
    #[command(hide = true)]
    VcpuGuard,
    /// Revert an unconfirmed apply once its time is up (started by `apply`)
    #[command(hide = true)]
    ConfirmWatchdog,
}

impl Verb {
    /// Whether a signal must let it finish or clean up; any other just ends.
    const fn cleans_up(&self) -> bool {
        match self {
            Self::Scratch(_)
            | Self::Calibrate(_)
            | Self::Apply(_)
            | Self::Confirm(_)
            | Self::Rollback(_)
            | Self::Boot(_)
            | Self::Watch(_)
            | Self::Bench(_)
            | Self::Demo(_)
            | Self::Serve(_)
            | Self::Tree(_)
            // Its data plane tells it when to end.
            | Self::VcpuGuard => true,
            Self::Simulate(args) => args.measures(),
            Self::Doctor(_)
            | Self::Plan(_)
            | Self::Verify(_)
            | Self::Report(_)
            | Self::Ctl(_)
            | Self::Mapping(_)
            | Self::Run(_)
            | Self::TreeServer(_)
            | Self::ConfirmWatchdog => false,
        }
    }
}

impl Verb {
    /// Whether it has changed the host once it has succeeded, so that its exit code is about that.
    const fn changes_the_host(&self) -> bool {
        match self {
            Self::Apply(_) | Self::Confirm(_) | Self::Rollback(_) | Self::Boot(_) => true,
            Self::Ctl(args) => args.changes(),
            _ => false,
        }
    }
}

/// How a verb ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    Changes,
    Unmet,
    /// Nothing could be compared: the machine left too little.
    NotJudged,
    /// With a code that is another tool's custom.
    Exit(u8),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(u8::from(e.use_stderr()));
        }
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    if cli.verb.cleans_up() {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if let Err(e) = signal_hook::flag::register(signal, Arc::clone(&interrupted)) {
                eprintln!("error: install a signal handler: {e}");
                return ExitCode::FAILURE;
            }
        }
    }
    let changes_the_host = cli.verb.changes_the_host();
    let work = || {
        let outcome = run(cli.verb, &interrupted);
        (outcome, output::failure())
    };
    let Some((outcome, unwritten)) = output::catch_broken_pipe(work) else {
        return ExitCode::from(output::EXIT_SIGPIPE);
    };
    if let Some(why) = unwritten {
        if outcome.is_ok() && !changes_the_host {
            eprintln!("error: write standard output: {why}");
            return ExitCode::FAILURE;
        }
        eprintln!("warning: write standard output: {why}; the exit code says what was done");
    }
    match outcome {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Changes) => ExitCode::from(2),
        Ok(Outcome::Unmet) => ExitCode::from(3),
        Ok(Outcome::NotJudged) => ExitCode::from(4),
        Ok(Outcome::Exit(code)) => ExitCode::from(code),
        Err(e) if e.downcast_ref::<InterruptedError>().is_some() => {
            eprintln!("interrupted");
            ExitCode::from(130)
        }
        Err(e) => {
            report_error(&e);
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb, interrupted: &AtomicBool) -> Result<Outcome> {
    match verb {
        Verb::Doctor(args) => verbs::doctor::run(&args),
        Verb::Scratch(args) => verbs::scratch::run(&args, interrupted),
        Verb::Calibrate(args) => verbs::calibrate::run(&args, interrupted),
        Verb::Plan(args) => verbs::plan::run(&args),
        Verb::Apply(args) => verbs::apply::apply(&args),
        Verb::Confirm(args) => verbs::apply::confirm(&args),
        Verb::Verify(args) => verbs::apply::verify(&args),
        Verb::Rollback(args) => verbs::apply::rollback(&args),
        Verb::Boot(args) => verbs::boot::run(&args),
        Verb::Watch(args) => verbs::watch::run(&args, interrupted),
        Verb::Bench(args) => verbs::bench::run(&args, interrupted),
        Verb::Report(args) => verbs::report::run(&args),
        Verb::Demo(args) => verbs::demo::run(&args, interrupted),
        Verb::Serve(args) => verbs::serve::run(&args, interrupted),
        Verb::Ctl(args) => verbs::ctl::run(&args),
        Verb::Tree(args) => verbs::tree::run(&args, interrupted),
        Verb::TreeServer(args) => Ok(verbs::tree::serve(&args)),
        Verb::Simulate(args) => verbs::simulate::run(&args, interrupted),
        Verb::Mapping(args) => verbs::mapping::run(&args),
        Verb::Run(args) => verbs::run::run(&args),
        Verb::VcpuGuard => verbs::serve::guard_vcpus(),
        Verb::ConfirmWatchdog => verbs::apply::watchdog(),
    }
}

/// Prints an error with its causes, each once, and a hint if there is one.
fn report_error(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
    let hint = error.chain().find_map(|cause| {
        if let Some(e) = cause.downcast_ref::<HostError>() {
            e.hint()
        } else if let Some(e) = cause.downcast_ref::<SpecificationError>() {
            Some(e.hint())
        } else if let Some(e) = cause.downcast_ref::<ControlFault>() {
            e.hint()
        } else if let Some(e) = cause.downcast_ref::<ServeError>() {
            Some(e.hint())
        } else if let Some(e) = cause.downcast_ref::<ReadError>() {
            Some(e.hint())
        } else if let Some(e) = cause.downcast_ref::<MappingError>() {
            Some(e.hint())
        } else if let Some(e) = cause.downcast_ref::<LearnedError>() {
            Some(e.hint().to_owned())
        } else {
            cause.downcast_ref::<PlanError>().map(PlanError::hint)
        }
    });
    if let Some(hint) = hint {
        eprintln!("hint: {hint}");
    }
}
