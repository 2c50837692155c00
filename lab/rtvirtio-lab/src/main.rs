//! The `rtvirtio-lab` binary: the demonstration, benchmarks, simulators, reports and scratch disks.
//!
//! Exit codes: 0 done; 1 error, of the command line too; 3 targets are unmet; 4 nothing could be compared (`demo`); 130
//! interrupted; 141: who read the output has gone.

// Its macros take the place of the standard library's, which panic where they cannot print.
#[macro_use]
extern crate rtvirtio_cli;

mod verbs;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rtvirtio_cli::{Outcome, Program, input};
use rtvirtio_host::interrupt::Interrupted;

/// What rtvirtio is tried and measured with; nothing of it runs beside an operator's VMs.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done, 1 error, 3 unmet targets, 4 nothing to compare (demo), 130 interrupted, \
    141 nobody reads the output.\n\
    First steps: `rtvirtio doctor`, then `rtvirtio-lab demo`."
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// The main job on a scratch disk: baselines and rtvirtio side by side
    Demo(verbs::demo::Args),
    /// Serve a scratch disk until Ctrl-C: an emulated SSD or a plain file
    Scratch(verbs::scratch::Args),
    /// Run schemes × cases on a scratch disk; resumable
    Bench(Box<verbs::bench::Args>),
    /// Draw a benchmark's results: one HTML file, and a table
    Report(verbs::report::Args),
    /// Play a load on simulated hosts, policies for I/O cores side by side
    Simulate(Box<verbs::simulate::Args>),
}

impl Program for Cli {
    fn cleans_up(&self) -> bool {
        match &self.verb {
            Verb::Demo(_) | Verb::Scratch(_) | Verb::Bench(_) => true,
            Verb::Simulate(args) => args.measures(),
            Verb::Report(_) => false,
        }
    }

    fn run(self, interrupted: &Interrupted) -> Result<Outcome> {
        match self.verb {
            Verb::Demo(args) => verbs::demo::run(&args, interrupted),
            Verb::Scratch(args) => verbs::scratch::run(&args, interrupted),
            Verb::Bench(args) => verbs::bench::run(&args, interrupted),
            Verb::Report(args) => verbs::report::run(&args),
            Verb::Simulate(args) => verbs::simulate::run(&args, interrupted),
        }
    }
}

fn main() -> ExitCode {
    rtvirtio_cli::main::<Cli>()
}
