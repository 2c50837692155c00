//! What the programs share that have a command line: reading and writing the files that a user names,
//! output that outlives its reader, progress, exit codes, errors with a hint.
//!
//! A program says what it does as a [`Program`] and calls [`main`].

/// Standard output, by [`output::print`]: the standard library's macro panics where it cannot print.
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => { $crate::output::print(format_args!($($text)*)) };
}
/// As [`print!`], a line.
#[macro_export]
macro_rules! println {
    () => { $crate::print!("\n") };
    ($($text:tt)*) => { $crate::print!("{}\n", format_args!($($text)*)) };
}
/// Standard error, by [`output::complain`].
#[macro_export]
macro_rules! eprint {
    ($($text:tt)*) => { $crate::output::complain(format_args!($($text)*)) };
}
/// As [`eprint!`], a line.
#[macro_export]
macro_rules! eprintln {
    () => { $crate::eprint!("\n") };
    ($($text:tt)*) => { $crate::eprint!("{}\n", format_args!($($text)*)) };
}

pub mod input;
mod iothreads;
pub mod log;
pub mod output;
pub mod plan;
pub mod progress;

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use anyhow::Result;
use clap::Parser;
use rtvirtio_host::HostError;
use rtvirtio_host::dataplane::ControlFault;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError};
use rtvirtio_model::learned::LearnedError;
use rtvirtio_planner::PlanError;
use rtvirtio_spec::mapping::MappingError;
use rtvirtio_spec::mapping::read::ReadError;
use rtvirtio_spec::serve::ServeError;
use rtvirtio_spec::specification::SpecificationError;

/// Set by SIGHUP, if that is something else to the program than its end.
static RELOAD: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Whether SIGHUP has come since this was last asked, of a program that [reloads](Program::reloads).
#[must_use]
pub fn is_to_reload() -> bool {
    RELOAD.swap(false, Ordering::Relaxed)
}

/// Has signals set their flags from now on.
fn hear_signals(interrupted: &Arc<Interrupted>, reloads: bool) -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let hang_up = if reloads { &*RELOAD } else { interrupted };
    for (signal, flag) in [(SIGINT, interrupted), (SIGTERM, interrupted), (SIGHUP, hang_up)] {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It did what it was asked for, or there was nothing to change.
    Done,
    /// There are changes to make, or the host has drifted, or lacks something.
    Changes,
    /// Targets are unmet.
    Unmet,
    /// Nothing could be compared: the machine left too little.
    NotJudged,
    /// It ends with a code that is another tool's custom.
    Exit(u8),
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::Changes => Self::from(2),
            Outcome::Unmet => Self::from(3),
            Outcome::NotJudged => Self::from(4),
            Outcome::Exit(code) => Self::from(code),
        }
    }
}

/// A program's command line, and what it does.
pub trait Program: Parser {
    /// Whether a signal must let it finish or clean up; otherwise a signal just ends it.
    fn cleans_up(&self) -> bool;

    /// Whether SIGHUP is something else to it than its end.
    fn reloads(&self) -> bool {
        false
    }

    /// Whether it has changed the host once it has succeeded, so that its exit code is about that, whether
    /// or not somebody reads what it prints.
    fn changes_the_host(&self) -> bool {
        false
    }

    /// Does it; `interrupted` becomes true when the user wants it to end.
    ///
    /// # Errors
    /// What the user is to know.
    fn run(self, interrupted: &Interrupted) -> Result<Outcome>;
}

/// Runs a program.
///
/// Exit codes: those of [`Outcome`]; 1 error, of the command line too, so that 2 keeps its one meaning; 130
/// interrupted; 141: who read the output has gone, as a shell says it of SIGPIPE, and the host has not been changed.
#[must_use]
pub fn main<P: Program>() -> ExitCode {
    let program = match P::try_parse() {
        Ok(program) => program,
        Err(e) => {
            let is_unwritten = |e: &std::io::Error| e.kind() != std::io::ErrorKind::BrokenPipe;
            let failed = e.print().is_err_and(|e| is_unwritten(&e)) || e.use_stderr();
            return ExitCode::from(u8::from(failed));
        }
    };
    if let Err(e) = input::state_directory() {
        report_error(&e);
        return ExitCode::FAILURE;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    if program.cleans_up()
        && let Err(e) = hear_signals(&interrupted, program.reloads())
    {
        eprintln!("error: install a signal handler: {e}");
        return ExitCode::FAILURE;
    }
    input::end_waits_with(&interrupted);
    let changes_the_host = program.changes_the_host();
    if changes_the_host {
        output::outlive_reader();
    }
    let work = || {
        let outcome = program.run(&interrupted);
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
        Ok(outcome) => outcome.into(),
        Err(e) if is_of_user(&e) => {
            eprintln!("interrupted");
            ExitCode::from(130)
        }
        Err(e) => {
            report_error(&e);
            ExitCode::FAILURE
        }
    }
}

/// Whether the user has ended the work that failed so.
#[must_use]
pub fn is_of_user(error: &anyhow::Error) -> bool {
    error.is::<InterruptedError>()
        || error.downcast_ref::<HostError>().is_some_and(HostError::is_of_user)
}

/// Prints an error with its causes, each once, and a hint if there is one.
pub fn report_error(error: &anyhow::Error) {
    eprintln!("error: {}", output::visible(&format!("{error:#}")));
    if let Some(hint) = error.chain().find_map(hint) {
        eprintln!("hint: {}", output::visible(&hint));
    }
}

/// The hint of an error that has one.
fn hint(cause: &(dyn Error + 'static)) -> Option<String> {
    fn of<E: Error + 'static>(
        cause: &(dyn Error + 'static),
        hint: impl FnOnce(&E) -> Option<String>,
    ) -> Option<String> {
        cause.downcast_ref().and_then(hint)
    }
    of(cause, HostError::hint)
        .or_else(|| of(cause, ControlFault::hint))
        .or_else(|| of(cause, |e: &SpecificationError| Some(e.hint())))
        .or_else(|| of(cause, |e: &ServeError| Some(e.hint())))
        .or_else(|| of(cause, |e: &ReadError| Some(e.hint())))
        .or_else(|| of(cause, |e: &MappingError| Some(e.hint())))
        .or_else(|| of(cause, |e: &LearnedError| Some(e.hint().to_owned())))
        .or_else(|| of(cause, |e: &PlanError| Some(e.hint())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hang_up_asks_to_reload_once_and_ends_nothing_from_the_start() {
        let interrupted = Arc::new(Interrupted::new(false));
        hear_signals(&interrupted, true).unwrap();
        assert!(!is_to_reload());
        signal_hook::low_level::raise(signal_hook::consts::SIGHUP).unwrap();
        assert!(is_to_reload() && !is_to_reload());
        assert!(!interrupted.load(Ordering::Relaxed));
    }
}
