//! How often things are repeated, and the record of a run.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::server::Kind;

/// Names the file that gets a line for each test; all counts are a release's then.
const ENDURANCE: &str = "RTVIRTIO_ENDURANCE";

/// Repetitions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) reboots: u32,
    pub(crate) unplugs: u32,
    pub(crate) kills: u32,
    pub(crate) uml_boots: u32,
    /// There and back is one.
    pub(crate) migrations: u32,
    /// For how long queues move.
    pub(crate) moves: Duration,
    /// For how long fio runs where it is all that a test does.
    pub(crate) verify: Duration,
}

impl Counts {
    pub(crate) fn get() -> Self {
        if endurance().is_none() {
            return Self {
                reboots: 2,
                unplugs: 2,
                kills: 4,
                uml_boots: 2,
                migrations: 1,
                moves: Duration::from_secs(5),
                verify: Duration::from_secs(5),
            };
        }
        Self {
            reboots: 20,
            unplugs: 20,
            kills: 200,
            uml_boots: 20,
            migrations: 10,
            moves: Duration::from_secs(60),
            verify: Duration::from_secs(60),
        }
    }
}

pub(crate) fn endurance() -> Option<PathBuf> {
    std::env::var_os(ENDURANCE).map(PathBuf::from)
}

/// What a test did, for people.
pub(crate) struct Record {
    test: &'static str,
    start: Instant,
}

impl Record {
    pub(crate) fn start(test: &'static str) -> Self {
        Self { test, start: Instant::now() }
    }

    /// Adds a line to the record: to a release's file, or where `--nocapture` shows it.
    pub(crate) fn add(&self, what: &str) {
        let (server, seconds) = (Kind::under_test(), self.start.elapsed().as_secs_f64());
        let line = format!("{server} {}: {what} [after {seconds:.0} s]\n", self.test);
        print!("{line}");
        if let Some(path) = endurance() {
            let mut file = std::fs::File::options().append(true).create(true).open(&path).unwrap();
            file.write_all(line.as_bytes()).unwrap();
        }
    }
}

/// The middle and the longest of some times, in ms.
pub(crate) fn middle_and_longest(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let ms = |time: &Duration| time.as_millis();
    match (times.get(times.len() / 2), times.last()) {
        (Some(middle), Some(longest)) => format!("{} ms, at most {} ms", ms(middle), ms(longest)),
        _ => "never".to_owned(),
    }
}

/// The same with the 90th percentile between.
pub(crate) fn middle_late_and_longest(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |tenths: usize| times.get(times.len() * tenths / 10);
    match (at(5), at(9), times.last()) {
        (Some(middle), Some(late), Some(longest)) => {
            let [middle, late, longest] = [middle, late, longest].map(Duration::as_millis);
            format!("median {middle} ms, p90 {late} ms, max {longest} ms")
        }
        _ => "never".to_owned(),
    }
}
