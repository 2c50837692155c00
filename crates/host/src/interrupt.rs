//! Ctrl-C and its like, for work that cleans up before it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Set by a signal handler once the work is to stop.
pub type Interrupted = AtomicBool;

/// The user has interrupted the work.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct InterruptedError;

/// How long after a signal a wait may go on.
pub(crate) const STEP: Duration = Duration::from_millis(100);

/// Sleeps for `time`, unless interrupted.
///
/// # Errors
/// [`InterruptedError`] within 100 ms of a signal.
pub fn wait(time: Duration, interrupted: &Interrupted) -> Result<(), InterruptedError> {
    let end = Instant::now() + time;
    loop {
        if interrupted.load(Ordering::Relaxed) {
            return Err(InterruptedError);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(STEP));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_in_time_or_when_interrupted() {
        let interrupted = Interrupted::new(false);
        wait(Duration::from_millis(1), &interrupted).unwrap();
        interrupted.store(true, Ordering::Relaxed);
        assert!(wait(Duration::from_secs(3_600), &interrupted).is_err());
    }
}
