//! Processes that undo what this one leaves on the host: if it is killed, or if nobody confirms it.

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use rtvirtio_calibrate::testbed::recover_just_killed;
use rtvirtio_observe::session::stop_counting;

use crate::{Outcome, input};

/// What a process says that has given back all that it took.
const DONE: &[u8] = b"done";

/// What a process says that has applied all of a plan.
const ALL_IS_SET: &[u8] = b"!";

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

/// A process that takes back an apply that nobody confirms, started before the first write: none
/// is done without it. What this process holds open tells it of this one's end.
pub(crate) struct ConfirmWatchdog(Child);

impl ConfirmWatchdog {
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start() -> Result<Self> {
        start("confirm-watchdog", Stdio::piped())
            .map(Self)
            .context("start the watchdog that reverts unless confirmed; nothing was changed")
    }

    /// Lets it wait for the confirmation, detached from this process.
    ///
    /// # Errors
    /// It is not there any more.
    pub(crate) fn all_is_set(mut self) -> Result<()> {
        let mut stdin = self.0.stdin.take().context("the watchdog's standard input")?;
        stdin
            .write_all(ALL_IS_SET)
            .context("the watchdog has ended; run `rtvirtio rollback` to take the changes back")
    }
}

/// What it does: it waits until the apply has come to its end or its process has died, and then,
/// unless the journal says that all is undone or settled, for the confirmation.
pub(crate) fn revert_unless_confirmed() -> Result<Outcome> {
    // Either way the journal says what there is to be done: a death in mid-apply leaves it half done.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    input::host().revert_unless_confirmed()?;
    Ok(Outcome::Done)
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
