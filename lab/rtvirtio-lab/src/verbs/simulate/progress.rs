//! How far a simulation is, on standard error: a line that changes on a terminal, one every 5 s elsewhere;
//! nothing in the first 2 s.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use rtvirtio_cli::progress::human;

const QUIET: Duration = Duration::from_secs(2);

pub(super) struct Progress {
    began: Instant,
    /// When it was last told.
    told: Option<Instant>,
    every: Duration,
    is_terminal: bool,
    /// Simulated time in all, s.
    total: f64,
}

impl Progress {
    pub(super) fn new(total: f64) -> Self {
        let is_terminal = stderr().is_terminal();
        let every = Duration::from_millis(if is_terminal { 250 } else { 5_000 });
        Self { began: Instant::now(), told: None, every, is_terminal, total }
    }

    /// So many simulated seconds are done.
    pub(super) fn at(&mut self, done: f64, label: &str) {
        let elapsed = self.began.elapsed();
        let is_due = self.told.is_none_or(|told| told.elapsed() >= self.every);
        if elapsed < QUIET || !is_due || done <= 0.0 {
            return;
        }
        self.told = Some(Instant::now());
        let left = elapsed.as_secs_f64() * (self.total - done).max(0.0) / done;
        let eta = human(Duration::from_secs_f64(left));
        let percent = 100.0 * done / self.total;
        let line = format!("{percent:3.0} %  ETA {eta}  {label}, {done:.0} of {:.0} s", self.total);
        if self.is_terminal {
            eprint!("\r\x1b[K{line}");
            let _ = stderr().flush();
        } else {
            eprintln!("{line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_terminal && self.told.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}
