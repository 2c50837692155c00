//! Progress with an ETA on standard error: a bar on a terminal, a line a step
//! elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress over steps whose lengths are known beforehand, and others that come in between.
pub struct Progress {
    bar: Option<ProgressBar>,
    planned: Duration,
    done: Duration,
    begun: Instant,
    steps: usize,
    step: usize,
    ticker: Option<Ticker>,
}

/// Moves the bar while a step runs.
struct Ticker {
    stop: std::sync::mpsc::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl Progress {
    /// For `steps` steps that take `planned` in all.
    #[must_use]
    pub fn new(steps: usize, planned: Duration) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(planned.as_millis() as u64);
            let style = ProgressStyle::with_template("{bar:30} {percent:>3}%  {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let (done, begun) = (Duration::ZERO, Instant::now());
        Self { bar, planned, done, begun, steps, step: 0, ticker: None }
    }

    /// A step of about `expected` starts; beyond those that were planned it is one more.
    pub fn start(&mut self, label: &str, expected: Duration) {
        self.stop_ticker();
        self.step += 1;
        if self.step > self.steps {
            self.extend(expected);
        }
        let (step, steps) = (self.step, self.steps);
        let left = self.planned.saturating_sub(self.done).mul_f64(self.pace());
        match &self.bar {
            None => eprintln!("[{step:>3}/{steps}] {label}  (ETA {})", human(left)),
            Some(bar) => {
                let (bar, label, done) = (bar.clone(), label.to_owned(), self.done);
                let (stop, stopped) = std::sync::mpsc::channel();
                let thread = std::thread::spawn(move || {
                    let began = Instant::now();
                    loop {
                        let here = began.elapsed().min(expected);
                        bar.set_position((done + here).as_millis() as u64);
                        let eta = human(left.saturating_sub(here));
                        bar.set_message(format!("{step}/{steps}  ETA {eta}  {label}"));
                        let wait = stopped.recv_timeout(Duration::from_millis(250));
                        if wait != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                            return;
                        }
                    }
                });
                self.ticker = Some(Ticker { stop, thread });
            }
        }
    }

    /// How many times as long as expected the steps took so far.
    fn pace(&self) -> f64 {
        if self.done.is_zero() || self.done < self.planned / 20 {
            return 1.0;
        }
        self.begun.elapsed().as_secs_f64() / self.done.as_secs_f64()
    }

    /// The step that was started has ended; it had been expected to take `expected`.
    pub fn finish(&mut self, expected: Duration) {
        self.stop_ticker();
        self.done += expected;
    }

    /// One more step of `expected` than was planned.
    pub fn extend(&mut self, expected: Duration) {
        self.steps += 1;
        self.planned += expected;
        if let Some(bar) = &self.bar {
            bar.set_length(self.planned.as_millis() as u64);
        }
    }

    /// A line above the bar.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    fn stop_ticker(&mut self) {
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.stop.send(());
            let _ = ticker.thread.join();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop_ticker();
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A length of time for people: `45 s`, `3 min 20 s`, `2 h 05 min`.
#[must_use]
pub fn human(time: Duration) -> String {
    let s = time.as_secs();
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {:02} s", s / 60, s % 60),
        _ => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_is_that_of_the_steps_so_far() {
        let mut progress = Progress::new(10, Duration::from_millis(100));
        assert!((progress.pace() - 1.0).abs() < 1e-9);
        std::thread::sleep(Duration::from_millis(40));
        // Ten were expected, at least forty it took.
        progress.finish(Duration::from_millis(10));
        assert!(progress.pace() >= 4.0, "{}", progress.pace());
    }

    #[test]
    fn step_beyond_the_plan_counts_as_one_more() {
        let each = Duration::from_millis(10);
        let mut progress = Progress::new(1, each);
        for step in 1..=2_usize {
            let planned = each * step as u32;
            progress.start("a step", each);
            assert_eq!((progress.step, progress.steps, progress.planned), (step, step, planned));
            progress.finish(each);
        }
    }
}
