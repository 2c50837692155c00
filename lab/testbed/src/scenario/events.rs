//! What a server does meanwhile: IOThreads that come and go, queues that move, and the CPU of its IOThreads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_spec::control::Event;
use rtvirtio_units::Nanos;

use super::vcpus::Clock;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// IOThreads that came.
    Added,
    /// IOThreads that went.
    Removed,
    /// Queues that went to another IOThread.
    Moved,
}

/// Something that happened, and when.
pub type Happened = (Nanos, What);

#[derive(Debug, Default)]
struct Log {
    happened: Vec<Happened>,
    /// Why it is not whole.
    failed: Option<String>,
}

/// Reads a server's events until it ends.
pub(super) struct Events {
    log: Arc<Mutex<Log>>,
    thread: JoinHandle<()>,
}

impl Events {
    pub(super) fn start(control: &ControlClient, clock: &Arc<Clock>) -> Result<Self> {
        let events = control.events().context("follow the server's events")?;
        let log = Arc::<Mutex<Log>>::default();
        let (into, clock) = (Arc::clone(&log), Arc::clone(clock));
        let thread = std::thread::Builder::new().name("events".to_owned()).spawn(move || {
            for event in events {
                let now = clock.now();
                let mut log = lock(&into);
                let what = match event {
                    Ok(Event::IothreadAdded { .. }) => What::Added,
                    Ok(Event::IothreadRemoved { .. }) => What::Removed,
                    Ok(Event::QueueMoved { .. }) => What::Moved,
                    Ok(Event::EventsLost { count }) => {
                        log.failed = Some(format!("{count} events of the server were lost"));
                        continue;
                    }
                    Ok(Event::PolicyFailed { reason, .. }) => {
                        log.failed = Some(format!("the policy failed: {reason}"));
                        continue;
                    }
                    Ok(_) => continue,
                    // The server has ended, as it was told to.
                    Err(_) => return,
                };
                log.happened.push((now, what));
            }
        })?;
        Ok(Self { log, thread })
    }

    /// What happened, once the server has ended.
    pub(super) fn end(self) -> Result<Vec<Happened>> {
        ensure!(self.thread.join().is_ok(), "the reader of events failed");
        let mut log = lock(&self.log);
        match log.failed.take() {
            Some(why) => anyhow::bail!(why),
            None => Ok(std::mem::take(&mut log.happened)),
        }
    }
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CPU time of a server's IOThreads, also of those that have ended: to their last look.
#[derive(Debug)]
pub(super) struct IoCpu {
    server: u32,
    /// By thread, ns.
    threads: BTreeMap<u32, u64>,
}

impl IoCpu {
    pub(super) const fn of(server: u32) -> Self {
        Self { server, threads: BTreeMap::new() }
    }

    /// Looks at them all; the sum.
    pub(super) fn look(&mut self) -> Result<Nanos> {
        let directory = format!("/proc/{}/task", self.server);
        let tasks = std::fs::read_dir(&directory).with_context(|| format!("read {directory}"))?;
        for task in tasks {
            let task = task?;
            let Ok(id) = task.file_name().to_string_lossy().parse::<u32>() else { continue };
            // A thread may go between the list and the look.
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            if !self.threads.contains_key(&id) && !is_iothread(&read("comm")) {
                continue;
            }
            let ns = read("schedstat").split_whitespace().next().and_then(|ns| ns.parse().ok());
            let known = self.threads.entry(id).or_default();
            *known = ns.unwrap_or(0).max(*known);
        }
        Ok(Nanos::new(self.threads.values().sum()))
    }
}

/// Whether it is one by its name: `iot0` of a configuration, `auto1` of a policy.
fn is_iothread(name: &str) -> bool {
    name.starts_with("iot") || name.starts_with("auto")
}

/// IOThreads over time.
#[derive(Debug)]
pub struct Threads<'a> {
    /// At the start.
    pub first: u32,
    /// Since then.
    pub happened: &'a [Happened],
}

impl Threads<'_> {
    /// How many there are at a time.
    #[must_use]
    pub fn at(&self, at: Nanos) -> u32 {
        let until = self.happened.partition_point(|(when, _)| *when <= at);
        self.happened[..until].iter().fold(self.first, |count, (_, what)| match what {
            What::Added => count + 1,
            What::Removed => count.saturating_sub(1),
            What::Moved => count,
        })
    }

    /// Their mean number.
    #[must_use]
    pub fn mean(&self, start: Nanos, stop: Nanos) -> f64 {
        let (mut at, mut count, mut sum) = (start, self.at(start), 0.0);
        for &(when, what) in self.between(start, stop) {
            sum += f64::from(count) * when.saturating_sub(at).as_secs_f64();
            at = when.max(at);
            match what {
                What::Added => count += 1,
                What::Removed => count = count.saturating_sub(1),
                What::Moved => {}
            }
        }
        sum += f64::from(count) * stop.saturating_sub(at).as_secs_f64();
        sum / stop.saturating_sub(start).as_secs_f64().max(1e-9)
    }

    /// What happened after `start`, and at `stop` at the latest.
    fn between(&self, start: Nanos, stop: Nanos) -> &[Happened] {
        let from = self.happened.partition_point(|(when, _)| *when <= start);
        let to = self.happened.partition_point(|(when, _)| *when <= stop);
        &self.happened[from..to.max(from)]
    }

    /// How often something happened.
    #[must_use]
    pub fn count(&self, what: What, start: Nanos, stop: Nanos) -> u32 {
        self.between(start, stop).iter().filter(|(_, of)| *of == what).count() as u32
    }

    /// The most moves in a second.
    #[must_use]
    pub fn most_moves(&self, start: Nanos, stop: Nanos) -> u32 {
        let moves = self.between(start, stop).iter().filter(|(_, what)| *what == What::Moved);
        let times: Vec<u64> = moves.map(|(when, _)| when.get()).collect();
        let within = |at: usize| {
            times.partition_point(|&time| time < times[at].saturating_add(1_000_000_000)) - at
        };
        (0..times.len()).map(within).max().unwrap_or(0) as u32
    }

    /// After `start`, when there was one alone.
    #[must_use]
    pub fn to_one(&self, start: Nanos, stop: Nanos) -> Option<Nanos> {
        let changes = self.between(start, stop).iter().map(|(when, _)| *when);
        let at = std::iter::once(start).chain(changes).find(|&at| self.at(at) == 1)?;
        Some(at.saturating_sub(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    const HAPPENED: [Happened; 6] = [
        (ms(100), What::Moved),
        (ms(500), What::Added),
        (ms(900), What::Moved),
        (ms(1_050), What::Moved),
        (ms(1_500), What::Removed),
        (ms(1_950), What::Moved),
    ];

    #[test]
    fn iothreads_over_time_follow_from_what_happened() {
        let threads = Threads { first: 1, happened: &HAPPENED };
        assert_eq!([0, 500, 1_499, 1_500].map(|at| threads.at(ms(at))), [1, 2, 2, 1]);
        // One for 500 ms, two for 1,000, one for 500.
        assert!((threads.mean(ms(0), ms(2_000)) - 1.5).abs() < 1e-9);
        assert!((threads.mean(ms(600), ms(1_000)) - 2.0).abs() < 1e-9);
        assert_eq!(threads.count(What::Moved, ms(100), ms(1_050)), 2);
        assert_eq!(threads.most_moves(ms(0), ms(2_000)), 3);
        assert_eq!(threads.to_one(ms(1_000), ms(2_000)), Some(ms(500)));
        assert_eq!(threads.to_one(ms(0), ms(2_000)), Some(ms(0)));
        assert_eq!(threads.to_one(ms(600), ms(1_400)), None);
    }

    #[test]
    fn iothreads_are_known_by_name() {
        assert!(is_iothread("iot1\n") && is_iothread("auto12\n"));
        assert!(!is_iothread("monitor\n") && !is_iothread("rtv-control\n"));
    }
}
