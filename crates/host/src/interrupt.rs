//! Ctrl-C and its like, for work that cleans up before it ends.

use std::sync::Arc;
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

/// What ends the waits of requests before their deadlines: the user's signal.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupt {
    interrupted: Option<Arc<Interrupted>>,
    /// How much longer a request may take after the signal: nothing, unless it puts something back.
    grace: Duration,
    /// The deadline of the request that is under way, and when it was found that the signal has come.
    heard: Option<(Instant, Instant)>,
}

impl Interrupt {
    pub(crate) fn new(interrupted: Option<Arc<Interrupted>>, grace: Duration) -> Self {
        Self { interrupted, grace, heard: None }
    }

    /// How long the next wait of the request with this deadline may take, of what is `left` of its time. It is
    /// never nothing, and short: a signal may come during the wait.
    ///
    /// # Errors
    /// The signal has come, and what a request may take after it is over.
    pub(crate) fn bound(
        &mut self,
        deadline: Instant,
        left: Duration,
    ) -> Result<Duration, InterruptedError> {
        let Some(interrupted) = &self.interrupted else { return Ok(left) };
        if !interrupted.load(Ordering::Relaxed) {
            return Ok(left.min(STEP));
        }
        let now = Instant::now();
        // A request that begins after the signal has all of its time from then on.
        let heard = match self.heard {
            Some((of, heard)) if of == deadline => heard,
            _ => now,
        };
        self.heard = Some((deadline, heard));
        let grace = self.grace.saturating_sub(now.saturating_duration_since(heard));
        if grace.is_zero() { Err(InterruptedError) } else { Ok(left.min(grace)) }
    }

    /// Whether the signal has come, and nothing is waited for after it.
    pub(crate) fn is_over(&self) -> bool {
        let interrupted = self.interrupted.as_ref();
        self.grace.is_zero() && interrupted.is_some_and(|i| i.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ends_with_the_signal_unless_it_puts_something_back() {
        const HOUR: Duration = Duration::from_secs(3_600);
        const GRACE: Duration = Duration::from_millis(50);
        let signal = Arc::new(Interrupted::new(false));
        let of = |grace| Interrupt::new(Some(Arc::clone(&signal)), grace);
        let (mut looks, mut puts_back) = (of(Duration::ZERO), of(GRACE));
        let deadline = Instant::now() + HOUR;
        for interrupt in [&mut looks, &mut puts_back] {
            assert_eq!(interrupt.bound(deadline, HOUR).unwrap(), STEP);
            assert_eq!(interrupt.bound(deadline, GRACE).unwrap(), GRACE);
            assert!(!interrupt.is_over());
        }
        signal.store(true, Ordering::Relaxed);
        assert!(looks.bound(deadline, HOUR).is_err() && looks.is_over());
        assert_eq!(puts_back.bound(deadline, HOUR).unwrap(), GRACE);
        std::thread::sleep(GRACE);
        assert!(puts_back.bound(deadline, HOUR).is_err() && !puts_back.is_over());
        // The next request has a time of its own.
        assert_eq!(puts_back.bound(deadline + GRACE, HOUR).unwrap(), GRACE);
        assert_eq!(Interrupt::default().bound(deadline, HOUR).unwrap(), HOUR);
    }

    #[test]
    fn wait_ends_in_time_or_when_interrupted() {
        let interrupted = Interrupted::new(false);
        wait(Duration::from_millis(1), &interrupted).unwrap();
        interrupted.store(true, Ordering::Relaxed);
        assert!(wait(Duration::from_secs(3_600), &interrupted).is_err());
    }
}
