//! Processes that undo what this one leaves on the host: if it is killed, or if nobody confirms it.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rtvirtio_calibrate::testbed::recover_just_killed;
use rtvirtio_host::HostError;
use rtvirtio_observe::session::stop_counting;

use crate::{Outcome, input};

/// What a process says that has given back all that it took.
const DONE: &[u8] = b"done";

/// What a process says that has applied all of a plan.
const ALL_IS_SET: &[u8] = b"!";

/// How long a watchdog waits after a failure before it tries again: the first time, and at most. The first is short beside any
/// time to confirm; what fails for a minute is tried no more often than that.
const AGAIN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

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
    let host = input::host();
    until_it_succeeds(|| host.revert_unless_confirmed(), std::thread::sleep)?;
    Ok(Outcome::Done)
}

/// Tries until it succeeds. Nobody else reverts in time, and a journal that cannot be read now, or a knob that cannot be put
/// back now, may be so later.
///
/// # Errors
/// One that stays: see [`stays`].
fn until_it_succeeds<T>(
    mut attempt: impl FnMut() -> Result<T, HostError>,
    mut wait: impl FnMut(Duration),
) -> Result<T, HostError> {
    let [mut pause, max_pause] = AGAIN;
    loop {
        match attempt() {
            Err(error) if !stays(&error) => {
                wait(pause);
                pause = max_pause.min(pause * 2);
            }
            result => return result,
        }
    }
}

/// Whether it is of no use to try again: this program does not understand the journal, or its user may not read it.
fn stays(error: &HostError) -> bool {
    match error {
        HostError::JournalDamaged { .. } | HostError::JournalVersion { .. } => true,
        HostError::State { source, .. } => source.kind() == ErrorKind::PermissionDenied,
        _ => false,
    }
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

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn unread(errno: i32) -> HostError {
        let source = io::Error::from_raw_os_error(errno);
        HostError::State { action: "read", file: "journal.json".into(), source }
    }

    #[test]
    fn failure_does_not_end_the_wait_for_a_confirmation() {
        let mut waited = Vec::new();
        let mut errors = [libc::EMFILE, libc::EIO, libc::ENOMEM].map(unread).into_iter();
        let reverted = until_it_succeeds(
            || errors.next().map_or(Ok("reverted"), Err),
            |pause| waited.push(pause.as_secs()),
        );
        assert_eq!(reverted.unwrap(), "reverted");
        assert_eq!(waited, [1, 2, 4]);
        // What goes on failing is tried once a minute.
        let mut left = 100;
        let mut last = Duration::ZERO;
        let tried = until_it_succeeds(
            || {
                left -= 1;
                if left == 0 { Ok(()) } else { Err(unread(libc::EIO)) }
            },
            |pause| last = pause,
        );
        tried.unwrap();
        assert_eq!(last, AGAIN[1]);
    }

    #[test]
    fn journal_of_another_user_or_version_is_not_asked_for_again() {
        let version = HostError::JournalVersion { file: "journal.json".into(), found: 9, known: 3 };
        for error in [version, unread(libc::EACCES)] {
            let mut error = Some(error);
            let attempt = || Err::<(), _>(error.take().expect("it is tried once"));
            until_it_succeeds(attempt, |_| ()).unwrap_err();
        }
    }
}
