//! Whether `adaptive` follows a load that comes and goes: a thread reads the emulated device while n
//! threads compute for a second, rest for a second, and so on.
//!
//! In bins of 10 ms: the share of waits that ended spinning. A bin is *right* if more than half of its
//! waits did while there was no load, or at most half while there was; one without a wait is right
//! only under load, where the thread may have had no CPU. The mode has *followed* a switch at the first
//! bin from which on 5 are right.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rtvirtio_calibrate::load::MachineSample;
use rtvirtio_completion::Costs;
use rtvirtio_spec::run::Machine;
use rtvirtio_testbed::cpu::usable;
use rtvirtio_testbed::readers::{Ended, Io, Mode, Running, Stage, Target, Threads, WARM_UP};
use serde::{Deserialize, Serialize};

use crate::experiment::{self, Experiment};
use crate::stats::Spread;
use crate::verdict::Verdict;

/// Time with a load, and without.
const PHASE: Duration = Duration::from_secs(1);
/// Of a timeline.
const BIN: Duration = Duration::from_millis(10);
/// Bins on which it is judged whether the mode has followed.
const STEADY: usize = 5;
/// How soon it is to follow: the mark.
const MARK: Duration = Duration::from_millis(50);

/// Waits that ended within 10 ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Bin {
    /// Ended spinning.
    pub spun: u32,
    /// Ended asleep.
    pub parked: u32,
}

impl Bin {
    /// The share that ended spinning; none without a wait.
    pub(super) fn share(self) -> Option<f64> {
        let all = self.spun + self.parked;
        (all > 0).then(|| f64::from(self.spun) / f64::from(all))
    }

    fn add(&mut self, ended: Ended) {
        match ended {
            Ended::Spun => self.spun += 1,
            Ended::Parked => self.parked += 1,
        }
    }

    fn is_right(self, load: bool) -> bool {
        match (self.share(), load) {
            (Some(share), true) => share <= 0.5,
            (Some(share), false) => share > 0.5,
            (None, load) => load,
        }
    }
}

/// When the load came or went.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Switch {
    /// Since the first bin, s.
    pub at_s: f64,
    /// Whether it came.
    pub load: bool,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    /// From 0.
    pub repetition: u32,
    /// Compute threads while there is a load.
    pub compute: usize,
    /// CPUs that the threads could use.
    pub cpus: usize,
    /// Without a load until the first one.
    pub switches: Vec<Switch>,
    /// Of 10 ms each.
    pub bins: Vec<Bin>,
    /// The machine.
    pub machine: Machine,
    /// When it ended.
    pub at: String,
}

impl Run {
    /// How long the mode took to follow each switch, s; none: not before the next one.
    pub(crate) fn followed(&self) -> Vec<Option<f64>> {
        let bin_s = BIN.as_secs_f64();
        let end = self.bins.len() as f64 * bin_s;
        let ends = self.switches.iter().skip(1).map(|switch| switch.at_s).chain([end]);
        let followed = |(switch, end): (&Switch, f64)| {
            let (from, until) = ((switch.at_s / bin_s) as usize, (end / bin_s) as usize);
            let bins = self.bins.get(from..until)?;
            let right = |bins: &[Bin]| bins.iter().all(|bin| bin.is_right(switch.load));
            let first = bins.windows(STEADY).position(right)?;
            Some(((from + first) as f64 * bin_s - switch.at_s).max(0.0))
        };
        self.switches.iter().zip(ends).map(followed).collect()
    }
}

/// What to run.
#[derive(Debug)]
pub(super) struct Benchmark {
    /// Runs.
    pub repetitions: u32,
    /// Seconds with a load in each, and as many without.
    pub cycles: u32,
}

impl Experiment for Benchmark {
    type Key = u32;
    type Cell = Run;
    type Setup = Costs;

    const FILE: &'static str = "live.jsonl";

    fn keys(&self) -> Result<Vec<u32>> {
        Ok((0..self.repetitions).collect())
    }

    fn is_of(run: &Run, repetition: &u32) -> bool {
        run.repetition == *repetition
    }

    fn label(&self, repetition: &u32) -> String {
        format!("load on and off, {}", repetition + 1)
    }

    fn expected(&self, _: &u32) -> Duration {
        WARM_UP + PHASE * (2 * self.cycles + 1)
    }

    fn set_up(&self, _: &[u32], _: &experiment::Run<'_>) -> Result<Costs> {
        Ok(Costs::calibrate())
    }

    fn measure(
        &self,
        &mut costs: &mut Costs,
        &repetition: &u32,
        run: &experiment::Run<'_>,
    ) -> Result<Run> {
        let cpus = usable()?.len();
        let io = Io { target: Target::Emulated, mode: Mode::Adaptive, threads: 1 };
        let threads = Threads { io: Some(io), compute: cpus, seed: 7, file: None, costs };
        let stage = Stage::new(false);
        // Of the bins: the window's begin.
        let origin = OnceLock::new();
        let bin = |since: Duration| (since.as_nanos() / BIN.as_nanos()) as usize;
        let all = bin(WARM_UP + PHASE * (2 * self.cycles + 1));
        let record = |bins: &mut Vec<Bin>, now: Instant, _: Duration, ended: Ended| {
            let since = origin.get().map(|&origin| now.saturating_duration_since(origin));
            if let Some(bin) = since.and_then(|since| bins.get_mut(bin(since))) {
                bin.add(ended);
            }
        };
        let observe = |running: &Running<'_, '_>| {
            stage.phase.warm_up(WARM_UP, run.interrupted)?;
            let machine = MachineSample::now()?;
            let begin = *origin.get_or_init(Instant::now);
            stage.phase.count();
            let mut switches = Vec::new();
            for number in 1..=2 * self.cycles {
                let until = begin + PHASE * number;
                let left = until.saturating_duration_since(Instant::now());
                stage.phase.counted(left, run.interrupted)?;
                let load = number % 2 == 1;
                stage.load.store(load, Ordering::Relaxed);
                switches.push(Switch { at_s: begin.elapsed().as_secs_f64(), load });
                running.wake();
            }
            stage.phase.counted(PHASE, run.interrupted)?;
            Ok((switches, bin(begin.elapsed()), machine.since()?))
        };
        let empty = || Ok(vec![Bin::default(); all]);
        let (mut records, (switches, whole, machine)) =
            threads.run(&stage, empty, record, observe)?;
        let mut bins = records.pop().context("there was one reader")?;
        bins.truncate(whole);
        let at = jiff::Timestamp::now().to_string();
        Ok(Run { repetition, compute: cpus, cpus, switches, bins, machine, at })
    }
}

/// Acceptance 7 on all runs.
pub(super) fn verdict(runs: &[Run]) -> Verdict {
    let all: Vec<Option<f64>> = runs.iter().flat_map(Run::followed).collect();
    let mark = MARK.as_secs_f64();
    let within = all.iter().flatten().filter(|&&time| time <= mark).count();
    let times = Spread::of(all.iter().flatten().map(|time| time * 1e3));
    let middle = times.map_or("-".to_owned(), |ms| format!("{:.0} ms", ms.value));
    let worst = match times {
        Some(ms) if ms.n == all.len() => format!("{:.0} ms", ms.high),
        _ => "not before the next switch".to_owned(),
    };
    let why = format!(
        "the mode followed {within} of {} switches within {} ms; median {middle}, worst {worst}",
        all.len(),
        MARK.as_millis()
    );
    Verdict::of("7 load on and off", (!all.is_empty()).then_some(within == all.len()), why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Outcome;

    fn run(bins: Vec<Bin>, switches: &[(f64, bool)]) -> Run {
        let switches = switches.iter().map(|&(at_s, load)| Switch { at_s, load }).collect();
        let machine = Machine { load1: 0.0, busy_cores: 0.0, steal_cores: 0.0 };
        Run { repetition: 0, compute: 2, cpus: 2, switches, bins, machine, at: String::new() }
    }

    const SPUN: Bin = Bin { spun: 900, parked: 1 };
    const PARKED: Bin = Bin { spun: 3, parked: 400 };

    #[test]
    fn following_a_switch_takes_until_five_bins_are_right() {
        // Load from 100 ms on; a relapse in the bin at 120 ms; none from 200 ms on.
        let mut bins = vec![SPUN; 10];
        bins.extend([SPUN, PARKED, SPUN, PARKED, Bin::default(), PARKED, PARKED]);
        bins.extend([PARKED; 5]);
        bins.extend([SPUN; 8]);
        let runs = [run(bins, &[(0.1, true), (0.2, false)])];
        let followed = runs[0].followed();
        assert!((followed[0].unwrap() - 0.03).abs() < 1e-9, "{followed:?}");
        assert!((followed[1].unwrap() - 0.02).abs() < 1e-9, "{followed:?}");
        let verdict = verdict(&runs);
        assert_eq!(verdict.outcome, Outcome::Passed);
        assert!(verdict.why.contains("2 of 2"), "{}", verdict.why);
        assert!(verdict.why.ends_with("median 25 ms, worst 30 ms"), "{}", verdict.why);
    }

    #[test]
    fn mode_that_does_not_follow_is_a_miss() {
        let verdict = verdict(&[run(vec![SPUN; 40], &[(0.1, true), (0.3, false)])]);
        assert_eq!(verdict.outcome, Outcome::Lost);
        assert!(verdict.why.contains("1 of 2"), "{}", verdict.why);
        assert!(verdict.why.ends_with("worst not before the next switch"), "{}", verdict.why);
        assert_eq!(super::verdict(&[]).outcome, Outcome::NotJudged);
    }
}
