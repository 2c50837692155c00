//! A process that undoes what this one leaves on the host if it is killed.

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use rtvirtio_calibrate::testbed::recover_just_killed;
use rtvirtio_observe::session::stop_counting;

use crate::{Outcome, input};

/// What a process says that has given back all that it took.
const DONE: &[u8] = b"done";

/// Starts a process of this program that outlives it, for a hidden verb.
pub(crate) fn start(verb: &str, stdin: Stdio) -> std::io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .arg(verb)
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Out of the terminal's process group: Ctrl-C or a hang-up there must not end it.
        .process_group(0)
        .spawn()
}

/// Runs a verb beside a watchdog, whose standard input ends with this process.
///
/// # Errors
/// As the verb; no watchdog can be started.
pub(crate) fn guarded(run: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
    let mut watchdog = start("watchdog", Stdio::piped())
        .context("start the process that cleans up after this one")?;
    let outcome = run();
    if let Some(mut stdin) = watchdog.stdin.take() {
        let _ = stdin.write_all(DONE);
    }
    let _ = watchdog.wait();
    outcome
}

/// What the watchdog does: nothing if its process came to its own end.
pub(crate) fn clean_up() -> Result<Outcome> {
    let mut said = Vec::new();
    std::io::stdin().read_to_end(&mut said)?;
    if said != DONE {
        // Each whether the other succeeds or not.
        let recovered = recover_just_killed();
        stop_counting(&input::host())?;
        recovered?;
    }
    Ok(Outcome::Done)
}
