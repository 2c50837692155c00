//! What the acceptance asks, judged on cells.
//!
//! Ratios are of two cells of one place and repetition; a verdict is on their median, and the range of
//! all is printed beside it. A tail is compared at the highest of p99 and p99.9 that has 10 samples
//! beyond it in every cell of both modes.

use rtvirtio_cases::judged_percentile;

use super::{Cell, Io, Mode, Target};
use crate::stats::Spread;
use crate::verdict::{Outcome, Verdict};

/// Of polling's IOPS, alone on idle CPUs.
const IDLE_IOPS: f64 = 0.9;
/// Of the other side's IOPS and compute rate where CPUs are short.
const BUSY: f64 = 0.95;
/// Of interrupt's tail.
const TAIL: f64 = 2.0;
/// What no cell of the file may fall below.
const WORST: f64 = 0.85;
/// The share of cells that may be below [`BUSY`].
const NAMED: f64 = 0.1;

/// Where modes are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) target: Target,
    pub(super) compute: usize,
    pub(super) threads: usize,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} T{} C{}", self.target, self.threads, self.compute)
    }
}

/// The places of all cells, in the order of tables.
pub(super) fn places(cells: &[Cell]) -> Vec<Place> {
    let place = |cell: &Cell| {
        let Io { target, threads, .. } = cell.key.io?;
        Some(Place { target, compute: cell.key.compute, threads })
    };
    let mut places: Vec<Place> = cells.iter().filter_map(place).collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// The cells of a mode at a place.
pub(super) fn at(cells: &[Cell], place: Place, mode: Mode) -> Vec<&Cell> {
    let Place { target, compute, threads } = place;
    let io = Some(Io { target, mode, threads });
    cells.iter().filter(|cell| cell.key.io == io && cell.key.compute == compute).collect()
}

/// A value of one mode's cells over that of another's, pair by pair.
pub(super) fn ratio(
    cells: &[Cell],
    place: Place,
    [of, to]: [Mode; 2],
    value: impl Fn(&Cell) -> Option<f64>,
) -> Option<Spread> {
    let others = at(cells, place, to);
    let pair = |cell: &Cell| {
        let same = |other: &&&Cell| other.key.repetition == cell.key.repetition;
        Some(value(cell)? / value(others.iter().find(same)?)?)
    };
    Spread::of(at(cells, place, of).into_iter().filter_map(pair))
}

pub(super) fn iops(cell: &Cell) -> Option<f64> {
    Some(cell.result.as_ref()?.iops)
}

/// What a cell's compute threads did, over what as many do alone in the same repetition.
pub(super) fn compute_ratio(cells: &[Cell], cell: &Cell) -> Option<f64> {
    let alone = |other: &&Cell| {
        other.key.io.is_none()
            && (other.key.compute, other.key.repetition) == (cell.key.compute, cell.key.repetition)
    };
    Some(cell.compute_rate? / cells.iter().find(alone)?.compute_rate?)
}

/// All verdicts on the cells; `live` is the one on switched loads.
pub(super) fn verdicts(cells: &[Cell], live: Option<Verdict>) -> Vec<Verdict> {
    let cpus = cells.iter().map(|cell| cell.cpus).max().unwrap_or(0);
    let places = places(cells);
    let emulated = || places.iter().copied().filter(|place| !place.target.is_file());
    let mut verdicts = Vec::new();
    for place in emulated() {
        verdicts.extend(on_device(cells, place, cpus));
    }
    let file: Vec<Place> = places.iter().copied().filter(|place| place.target.is_file()).collect();
    verdicts.extend(on_file(cells, &file));
    let collapse = |place: &&Place| place.threads == 8 && place.compute == cpus;
    verdicts.extend(file.iter().filter(collapse).map(|&place| beside(cells, place)));
    verdicts.extend(live);
    verdicts
}

/// As verdicts have ratios of pairs.
fn pairs(of: Spread) -> String {
    let Spread { value, low, high, n } = of;
    format!("x {value:.3} ({low:.3} to {high:.3}, {n} pairs)")
}

/// A bound on a ratio; nothing if neither mode was measured there.
fn bound(
    place: Place,
    text: &str,
    ratio: Option<Spread>,
    holds: impl Fn(f64) -> bool,
) -> Option<Verdict> {
    let ratio = ratio?;
    let why = text.replace("{}", &pairs(ratio));
    Some(Verdict::of(format!("1 {place}"), Some(holds(ratio.value)), why))
}

/// Acceptance 1 at one place.
fn on_device(cells: &[Cell], place: Place, cpus: usize) -> Vec<Verdict> {
    let interrupt = [Mode::Adaptive, Mode::Interrupt];
    let mut verdicts = Vec::new();
    if (place.threads, place.compute) == (1, 0) {
        let ratio = ratio(cells, place, [Mode::Adaptive, Mode::Poll], iops);
        let text = format!("IOPS {{}} of poll's; >= {IDLE_IOPS}");
        verdicts.extend(bound(place, &text, ratio, |ratio| ratio >= IDLE_IOPS));
    }
    if place.threads >= cpus && place.compute >= cpus {
        let rates = ratio(cells, place, interrupt, iops);
        let text = format!("IOPS {{}} of interrupt's; >= {BUSY}");
        verdicts.extend(bound(place, &text, rates, |ratio| ratio >= BUSY));
        let compute = ratio(cells, place, interrupt, |cell| cell.compute_rate);
        let text = format!("compute rate {{}} of interrupt's; >= {BUSY}");
        verdicts.extend(bound(place, &text, compute, |ratio| ratio >= BUSY));
    }
    verdicts.extend(tail(cells, place));
    verdicts
}

/// The tail beside interrupt's.
fn tail(cells: &[Cell], place: Place) -> Option<Verdict> {
    let both = [Mode::Adaptive, Mode::Interrupt].map(|mode| at(cells, place, mode));
    if both.iter().any(Vec::is_empty) {
        return None;
    }
    let least = both.iter().flatten().filter_map(|cell| Some(cell.result.as_ref()?.n)).min()?;
    let Some(percentile) = judged_percentile(least) else {
        let why = format!("tail: {least} requests are too few for p99 (longer --window)");
        return Some(Verdict::of(format!("1 {place}"), None, why));
    };
    let (name, value): (_, fn(&Cell) -> Option<f64>) = if percentile.get() < 99.9 {
        ("p99 (too few requests for p99.9)", |cell| Some(cell.result.as_ref()?.p99_us))
    } else {
        ("p99.9", |cell| Some(cell.result.as_ref()?.p999_us))
    };
    let ratio = ratio(cells, place, [Mode::Adaptive, Mode::Interrupt], value);
    let text = format!("{name} {{}} of interrupt's; <= {TAIL}");
    bound(place, &text, ratio, |ratio| ratio <= TAIL)
}

/// `adaptive` at a place of the file, beside the best of the others that leave compute threads alone.
struct AgainstBest {
    place: Place,
    best: Mode,
    ratio: Spread,
    /// Compute rate beside interrupt's; none without compute threads.
    compute: Option<Spread>,
}

impl AgainstBest {
    fn at(cells: &[Cell], place: Place) -> Option<Self> {
        let compute = |mode| ratio(cells, place, [mode, Mode::Interrupt], |cell| cell.compute_rate);
        let leaves_alone = |mode: &Mode| {
            place.compute == 0
                || *mode == Mode::Interrupt
                || compute(*mode).is_some_and(|ratio| ratio.value >= BUSY)
        };
        let rate = |mode| Spread::of(at(cells, place, mode).into_iter().filter_map(iops));
        let others = Mode::ALL.into_iter().filter(|mode| *mode != Mode::Adaptive);
        let rates = others.filter(leaves_alone).filter_map(|mode| Some((mode, rate(mode)?)));
        let (best, _) = rates.max_by(|a, b| a.1.value.total_cmp(&b.1.value))?;
        let ratio = ratio(cells, place, [Mode::Adaptive, best], iops)?;
        Some(Self { place, best, ratio, compute: compute(Mode::Adaptive) })
    }

    fn verdict(&self) -> Verdict {
        let Self { place, best, ratio, .. } = self;
        let compute = self.compute.map_or(String::new(), |compute| {
            format!("; its compute rate x {:.3} of interrupt's", compute.value)
        });
        let ratio = pairs(*ratio);
        let why = format!("IOPS {ratio} of {best}'s, the best that leaves compute alone{compute}");
        Verdict::new(format!("2 {place}"), Outcome::Beside, why)
    }
}

/// Acceptance 2 on all places of the file.
fn on_file(cells: &[Cell], places: &[Place]) -> Vec<Verdict> {
    let all: Vec<AgainstBest> =
        places.iter().filter_map(|&place| AgainstBest::at(cells, place)).collect();
    let Some(Spread { value, n, .. }) = Spread::of(all.iter().map(|one| one.ratio.value)) else {
        return Vec::new();
    };
    let names = |below: f64| -> Vec<String> {
        let low = all.iter().filter(|one| one.ratio.value < below);
        low.map(|one| format!("{} (x {:.3}, {})", one.place, one.ratio.value, one.best)).collect()
    };
    let listed = |names: &[String]| {
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let (worst, below) = (names(WORST), names(BUSY));
    let judged = |holds, why| Verdict::of("2 file", Some(holds), why);
    let mut verdicts: Vec<Verdict> = all.iter().map(AgainstBest::verdict).collect();
    verdicts.extend([
        judged(value >= BUSY, format!("median of {n} cells x {value:.3}; >= {BUSY}")),
        judged(worst.is_empty(), format!("cells below {WORST}: {}", listed(&worst))),
        judged(
            below.len() as f64 <= NAMED * n as f64,
            format!(
                "{} of {n} cells below {BUSY}, at most {:.0} %: {}",
                below.len(),
                NAMED * 100.0,
                listed(&below)
            ),
        ),
    ]);
    verdicts
}

/// What polling does where CPUs are short: all modes beside each other.
fn beside(cells: &[Cell], place: Place) -> Verdict {
    let of = |mode: Mode| {
        let cells_here = at(cells, place, mode);
        let rate = Spread::of(cells_here.iter().filter_map(|cell| iops(cell)))?;
        let compute = cells_here.iter().filter_map(|cell| compute_ratio(cells, cell));
        let compute = Spread::of(compute).map_or("-".to_owned(), |c| format!("{:.2}", c.value));
        Some(format!("{mode} {:.1} and {compute}", rate.value / 1e3))
    };
    let all: Vec<String> = Mode::ALL.into_iter().filter_map(of).collect();
    let why = format!("kIOPS, and compute rate of C alone: {}", all.join(", "));
    Verdict::new(format!("2 {place}"), Outcome::Beside, why)
}
