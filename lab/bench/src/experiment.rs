//! What the experiments share that are made of cells.
//!
//! A *cell* is measured once: it is kept as soon as it is measured, and an experiment that is run again into
//! the same directory goes on with those that are not there. A cell that does not count, because the machine
//! disturbed it, is kept too, and measured again as often as the experiment says; after that it is left as it
//! is. Cells run in the order of [`Experiment::keys`], in which an experiment interleaves what it compares.
//!
//! An experiment that is a command of its own is its arguments: `clap` makes the value that measures.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::interrupt::Interrupted;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::lines::Lines;

/// What an experiment comes to.
#[derive(Debug)]
pub struct Report {
    /// For a terminal, and a file.
    pub text: String,
    /// The name of that file.
    pub table: &'static str,
    /// Files beside it, with their names.
    pub files: Vec<(&'static str, String)>,
    /// For a program.
    pub json: Value,
    /// Why the command fails, though all of it is written.
    pub failure: Option<String>,
}

impl Report {
    /// A text; a program is given the cells.
    ///
    /// # Errors
    /// Cells that are no JSON.
    pub fn new<C: Serialize>(text: String, cells: &[C]) -> Result<Self> {
        Ok(Self::of(text, serde_json::to_value(cells)?))
    }

    /// A text, and what a program is given.
    #[must_use]
    pub const fn of(text: String, json: Value) -> Self {
        Self { text, table: "table.txt", files: Vec::new(), json, failure: None }
    }

    /// With a file.
    #[must_use]
    pub fn with(mut self, name: &'static str, text: String) -> Self {
        self.files.push((name, text));
        self
    }

    /// Writes the text and the other files.
    ///
    /// # Errors
    /// One cannot be written.
    pub fn write(&self, out: &Path) -> Result<()> {
        let files = self.files.iter().map(|(name, text)| (*name, text));
        for (name, text) in files.chain([(self.table, &self.text)]) {
            let path = out.join(name);
            std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

/// Where an experiment is run.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Its directory.
    pub out: &'a Path,
    /// Whether the user wants it to end.
    pub interrupted: &'a Interrupted,
}

/// An experiment that is made of cells.
pub trait Experiment: Sized {
    /// Names a cell.
    type Key;
    /// What was measured under a name.
    type Cell: Serialize + DeserializeOwned;
    /// What cells need while they are measured, such as a disk; it is there as long as they are.
    type Setup;

    /// Where cells are kept, below the experiment's directory.
    const FILE: &'static str = "cells.jsonl";
    /// How often a cell is measured that does not count each time.
    const ATTEMPTS: usize = 1;
    /// The experiment's directory where none is asked for.
    const OUT: &'static str = "rtvirtio-bench";

    /// All cells, in the order in which they are measured.
    ///
    /// # Errors
    /// What is asked for is not to be had.
    fn keys(&self) -> Result<Vec<Self::Key>>;

    /// Whether `cell` is the one of this name.
    fn is_of(cell: &Self::Cell, key: &Self::Key) -> bool;

    /// The cell's name, for people.
    fn label(&self, key: &Self::Key) -> String;

    /// How long it takes, about.
    fn expected(&self, key: &Self::Key) -> Duration;

    /// Of what else a cell is than this experiment, to whose cells none can be added then; `None`: it is one of these.
    fn foreign(&self, cell: &Self::Cell) -> Option<&'static str> {
        let _ = cell;
        None
    }

    /// Makes what the cells of these names need.
    ///
    /// # Errors
    /// It is not to be had, or the user interrupts.
    fn set_up(&self, missing: &[Self::Key], run: &Run<'_>) -> Result<Self::Setup>;

    /// Measures one.
    ///
    /// # Errors
    /// Something fails, or the user interrupts.
    fn measure(
        &self,
        setup: &mut Self::Setup,
        key: &Self::Key,
        run: &Run<'_>,
    ) -> Result<Self::Cell>;

    /// Why a cell does not count; `None`: it does.
    fn discarded(cell: &Self::Cell) -> Option<&str> {
        let _ = cell;
        None
    }

    /// What the cells come to, and what else is in their directory.
    ///
    /// # Errors
    /// There is nothing to show, or what it is to be shown beside cannot be read or made; the user interrupts.
    fn report(&self, cells: &[Self::Cell], run: &Run<'_>) -> Result<Report> {
        let _ = run;
        Report::new(String::new(), cells)
    }

    /// Measures the cells that are not there yet, and returns all that are.
    ///
    /// # Errors
    /// As the other functions; what was measured until then is kept.
    fn run(&self, run: &Run<'_>) -> Result<Vec<Self::Cell>> {
        complete(self, run)
    }
}

/// Reads a time in seconds, for `clap`; from and to so many ms.
///
/// # Errors
/// Not a number, or out of its range.
pub fn seconds<const FROM: u64, const TO: u64>(text: &str) -> Result<Duration> {
    let seconds: f64 = text.parse()?;
    let [from, to] = [FROM, TO].map(|ms| ms as f64 / 1e3);
    ensure!((from..=to).contains(&seconds), "{seconds} is outside {from} to {to} s");
    Ok(Duration::from_secs_f64(seconds))
}

/// Whether a window that lasted so many seconds is one of the length that is `asked` for: its end may come late by a
/// tenth and 0.1 s.
pub(crate) fn lasted(seconds: f64, asked: Duration) -> bool {
    let asked = asked.as_secs_f64();
    (seconds - asked).abs() <= 0.1 + 0.1 * asked
}

/// Whether a cell is there that counts, or was tried often enough.
fn is_done<E: Experiment>(cells: &[E::Cell], key: &E::Key) -> bool {
    let mut tried = 0;
    let counts = cells.iter().filter(|cell| E::is_of(cell, key)).any(|cell| {
        tried += 1;
        E::discarded(cell).is_none()
    });
    counts || tried >= E::ATTEMPTS
}

/// [`Experiment::run`], for those that do more.
pub(crate) fn complete<E: Experiment>(experiment: &E, run: &Run<'_>) -> Result<Vec<E::Cell>> {
    // What is refused leaves no file.
    let mut missing = experiment.keys()?;
    let mut cells = Lines::<E::Cell>::open(&run.out.join(E::FILE))?;
    if let Some(what) = cells.iter().find_map(|cell| experiment.foreign(cell)) {
        bail!("{} has cells of {what}: name another --out", run.out.display());
    }
    missing.retain(|key| !is_done::<E>(&cells, key));
    if missing.is_empty() {
        return Ok(cells.into_all());
    }
    let mut setup = experiment.set_up(&missing, run)?;
    let whole = missing.iter().map(|key| experiment.expected(key)).sum();
    let mut progress = Progress::new(missing.len(), whole);
    for key in &missing {
        let (label, expected) = (experiment.label(key), experiment.expected(key));
        while !is_done::<E>(&cells, key) {
            progress.start(&label, expected);
            let cell = experiment.measure(&mut setup, key, run);
            cells.push(cell.with_context(|| label.clone())?)?;
            progress.finish(expected);
            let why = cells.last().and_then(E::discarded);
            if let Some(why) = why.filter(|_| !is_done::<E>(&cells, key)) {
                progress.note(&format!("{label}: {why}; once more"));
                progress.extend(expected);
            }
        }
    }
    Ok(cells.into_all())
}

/// An experiment of these arguments.
#[cfg(test)]
pub(crate) fn of<E: clap::Args>(arguments: &[&str]) -> E {
    let command = E::augment_args(clap::Command::new("bench").no_binary_name(true));
    E::from_arg_matches(&command.get_matches_from(arguments)).unwrap()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell as Counter;

    use super::*;

    /// Cells are pairs of a name and a value; odd values do not count, and each measurement has the next.
    struct Numbers {
        names: u32,
        next: Counter<u32>,
        /// The measurement that fails.
        fails_at: u32,
    }

    impl Experiment for Numbers {
        type Key = u32;
        type Cell = (u32, u32);
        type Setup = ();

        const ATTEMPTS: usize = 2;

        fn keys(&self) -> Result<Vec<u32>> {
            Ok((0..self.names).collect())
        }

        fn is_of(cell: &(u32, u32), key: &u32) -> bool {
            cell.0 == *key
        }

        fn label(&self, key: &u32) -> String {
            key.to_string()
        }

        fn expected(&self, _: &u32) -> Duration {
            Duration::ZERO
        }

        fn foreign(&self, (name, _): &(u32, u32)) -> Option<&'static str> {
            (*name >= 100).then_some("larger numbers")
        }

        fn set_up(&self, missing: &[u32], _: &Run<'_>) -> Result<()> {
            assert!(!missing.is_empty());
            Ok(())
        }

        fn measure(&self, (): &mut (), key: &u32, _: &Run<'_>) -> Result<(u32, u32)> {
            let value = self.next.replace(self.next.get() + 1);
            if value == self.fails_at {
                bail!("it fails");
            }
            Ok((*key, value))
        }

        fn discarded(cell: &(u32, u32)) -> Option<&str> {
            (cell.1 % 2 == 1).then_some("odd")
        }
    }

    fn numbers(names: u32, from: u32, fails_at: u32) -> Numbers {
        Numbers { names, next: Counter::new(from), fails_at }
    }

    #[test]
    fn experiment_goes_on_where_it_was_and_repeats_what_does_not_count() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path();
        let run =
            |numbers: &Numbers| numbers.run(&Run { out, interrupted: &Interrupted::new(false) });
        let error = run(&numbers(3, 0, 3)).unwrap_err();
        assert_eq!(format!("{error:#}"), "2: it fails");
        // 0 at once; 1 at the second attempt; 2 not at all yet.
        let kept = [(0, 0), (1, 1), (1, 2)];
        assert_eq!(Lines::<(u32, u32)>::open(&out.join("cells.jsonl")).unwrap()[..], kept);
        let all = run(&numbers(3, 5, 99)).unwrap();
        assert_eq!(all, [&kept[..], &[(2, 5), (2, 6)]].concat());
        // Nothing is missing, so nothing is set up; one that never counts is left as it is.
        assert_eq!(run(&numbers(3, 0, 0)).unwrap(), all);
        let odd = Numbers { names: 4, ..numbers(0, 7, 99) };
        odd.next.set(7);
        let all = run(&odd).unwrap();
        assert_eq!(all[5..], [(3, 7), (3, 8)]);
    }

    #[test]
    fn time_out_of_its_range_is_refused() {
        assert_eq!(seconds::<100, 3_000>("1.5").unwrap(), Duration::from_millis(1_500));
        let error = seconds::<100, 3_000>("4").unwrap_err();
        assert_eq!(error.to_string(), "4 is outside 0.1 to 3 s");
        assert!(seconds::<0, 1>("nan").is_err() && seconds::<0, 1>("soon").is_err());
    }

    #[test]
    fn window_may_end_late_and_is_no_other_one() {
        let asked = Duration::from_secs(20);
        assert!(lasted(20.0, asked) && lasted(20.01, asked) && lasted(22.0, asked));
        assert!(!lasted(12.0, asked) && !lasted(30.0, asked) && !lasted(f64::NAN, asked));
        let short = Duration::from_millis(100);
        assert!(lasted(0.15, short) && !lasted(0.5, short));
    }

    #[test]
    fn cells_of_another_experiment_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("cells.jsonl"), "[100,0]\n").unwrap();
        let run = Run { out: directory.path(), interrupted: &Interrupted::new(false) };
        let error = numbers(1, 0, 99).run(&run).unwrap_err().to_string();
        assert!(error.ends_with("has cells of larger numbers: name another --out"), "{error}");
    }
}
