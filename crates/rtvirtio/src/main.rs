//! The `rtvirtio` binary: an operator's verbs and their wiring.
//!
//! Exit codes: 0 done, or nothing to change; 1 error, of the command line too; 2 there are changes (`plan`),
//! drift (`verify`) or something that this host lacks (`serve --check`); 3 targets are unmet; 78 the configuration is
//! wrong (`serve`); 130 interrupted; 141: who read the output has gone.

// Its macros take the place of the standard library's, which panic where they cannot print.
#[macro_use]
extern crate rtvirtio_cli;

mod verbs;
mod watchdog;
mod wish;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rtvirtio_cli::{Outcome, Program, input, output};
use rtvirtio_host::interrupt::Interrupted;

use crate::watchdog::guarded;

/// Predictable, cheap disk I/O for virtual machines.
///
/// State how long the slowest request of each VM's tasks may take; rtvirtio
/// measures the device, finds settings that meet every target or names the one
/// that cannot be met, applies them and takes them back.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done or nothing to change, 1 error, 2 changes \
    (plan), drift (verify) or something that this host lacks (serve --check), 3 unmet targets, 78 a configuration that is wrong (serve), 130 interrupted, 141 nobody reads the output.
\
    RTVIRTIO_STATE_DIR moves apply's journal and lock away from /run/rtvirtio-host.
\
    First steps: `rtvirtio doctor`. Demonstration, benchmarks, simulators and scratch disks: `rtvirtio-lab`."
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Say what this host can do, and what is missing
    Doctor(verbs::doctor::Args),
    /// Show what the disks of all VMs do and where their time goes; needs no configuration
    Top(verbs::top::Args),
    /// Write a specification of the VMs that run here, from what they are seen to do
    Init(verbs::init::Args),
    /// Measure a disk, empty or in use, and fit the models: writes a profile
    Calibrate(verbs::calibrate::Args),
    /// Show a profile, or take it to another device of the model
    Profile(verbs::profile::Args),
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
    /// Serve VMs' disks over vhost-user-blk: the data plane
    Serve(verbs::serve::Args),
    /// Look at a running data plane and change it
    Ctl(Box<verbs::ctl::Args>),
    /// Translate queue-to-IOThread mappings between QEMU, libvirt and TOML
    Mapping(verbs::mapping::Args),
    /// Write man pages and completions (for packages)
    #[command(hide = true)]
    Generate(verbs::generate::Args),
    /// Move vCPUs for a data plane, and give them their CPUs back when it has gone (started by
    /// `serve`, which has no right to)
    #[command(hide = true)]
    VcpuGuard,
    /// Revert an unconfirmed apply once its time is up (started by `apply`)
    #[command(hide = true)]
    ConfirmWatchdog,
    /// Undo what a killed process left (started by `top`, `init`, `calibrate` and `watch`)
    #[command(hide = true)]
    Watchdog,
}

impl Program for Cli {
    fn cleans_up(&self) -> bool {
        match self.verb {
            Verb::Top(_)
            | Verb::Init(_)
            | Verb::Calibrate(_)
            | Verb::Apply(_)
            | Verb::Confirm(_)
            | Verb::Rollback(_)
            | Verb::Boot(_)
            | Verb::Watch(_)
            | Verb::Serve(_)
            | Verb::Watchdog
            // Its data plane tells it when to end.
            | Verb::VcpuGuard => true,
            Verb::Plan(ref args) => args.applies(),
            Verb::Doctor(_)
            | Verb::Profile(_)
            | Verb::Verify(_)
            | Verb::Ctl(_)
            | Verb::Mapping(_)
            | Verb::Generate(_)
            | Verb::ConfirmWatchdog => false,
        }
    }

    /// A service of systemd is told so to read its file again; a terminal that closes ends what it shows.
    fn reloads(&self) -> bool {
        matches!(self.verb, Verb::Watch(_)) && !std::io::stdout().is_terminal()
    }

    fn changes_the_host(&self) -> bool {
        match &self.verb {
            Verb::Apply(_) | Verb::Confirm(_) | Verb::Rollback(_) | Verb::Boot(_) => true,
            Verb::Plan(args) => args.applies(),
            Verb::Ctl(args) => args.changes(),
            _ => false,
        }
    }

    fn run(self, interrupted: &Interrupted) -> Result<Outcome> {
        match self.verb {
            Verb::Doctor(args) => verbs::doctor::run(&args),
            Verb::Top(args) => guarded(|| verbs::top::run(&args, interrupted)),
            Verb::Init(args) => guarded(|| verbs::init::run(&args, interrupted)),
            Verb::Calibrate(args) => guarded(|| verbs::calibrate::run(&args, interrupted)),
            Verb::Profile(args) => verbs::profile::run(&args),
            Verb::Plan(args) => verbs::plan::run(&args),
            Verb::Apply(args) => verbs::apply::apply(&args),
            Verb::Confirm(args) => verbs::apply::confirm(&args),
            Verb::Verify(args) => verbs::apply::verify(&args),
            Verb::Rollback(args) => verbs::apply::rollback(&args),
            Verb::Boot(args) => verbs::boot::run(&args),
            Verb::Watch(args) => guarded(|| verbs::watch::run(&args, interrupted)),
            Verb::Serve(args) => verbs::serve::run(&args, interrupted),
            Verb::Ctl(args) => verbs::ctl::run(&args),
            Verb::Mapping(args) => verbs::mapping::run(&args),
            Verb::Generate(args) => verbs::generate::run(&args),
            Verb::VcpuGuard => verbs::serve::guard_vcpus(),
            Verb::ConfirmWatchdog => watchdog::revert_unless_confirmed(),
            Verb::Watchdog => watchdog::clean_up(),
        }
    }
}

fn main() -> ExitCode {
    rtvirtio_cli::main::<Cli>()
}
