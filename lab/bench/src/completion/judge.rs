//! What the acceptance asks, judged on cells.
//!
//! Ratios are of two cells of one place and repetition; a verdict is on their median, and the range of
//! all is printed beside it. A tail is compared at the highest of p99 and p99.9 that has 10 samples
//! beyond it in every cell of both modes.

use rtvirtio_cases::judged_percentile;
use serde::Serialize;

use super::{Cell, Io, Mode, Target};

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

/// What came of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It is as asked.
    Pass,
    /// It is not.
    Miss,
    /// There is too little to tell.
    NotJudged,
    /// Nothing was asked.
    Beside,
}

impl Outcome {
    /// As it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Miss => "MISS",
            Self::NotJudged => "n/a",
            Self::Beside => "",
        }
    }

    const fn of(passed: bool) -> Self {
        if passed { Self::Pass } else { Self::Miss }
    }
}

/// A question and its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// How it is.
    pub outcome: Outcome,
    /// The question, with figures.
    pub text: String,
}

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

/// The one in the middle, or the mean of the two in the middle, of sorted values.
pub(super) fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Values of several repetitions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) n: usize,
}

impl Spread {
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        Some(Self { median: median(&values)?, low, high, n: values.len() })
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { median, low, high, n } = self;
        write!(f, "x {median:.3} ({low:.3} to {high:.3}, {n} pairs)")
    }
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
#[must_use]
pub fn verdicts(cells: &[Cell], live: Option<Verdict>) -> Vec<Verdict> {
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

/// A bound on a ratio; nothing if neither mode was measured there.
fn bound(text: &str, ratio: Option<Spread>, holds: impl Fn(f64) -> bool) -> Option<Verdict> {
    let ratio = ratio?;
    let text = text.replace("{}", &ratio.to_string());
    Some(Verdict { outcome: Outcome::of(holds(ratio.median)), text })
}

/// Acceptance 1 at one place.
fn on_device(cells: &[Cell], place: Place, cpus: usize) -> Vec<Verdict> {
    let interrupt = [Mode::Adaptive, Mode::Interrupt];
    let mut verdicts = Vec::new();
    if (place.threads, place.compute) == (1, 0) {
        let ratio = ratio(cells, place, [Mode::Adaptive, Mode::Poll], iops);
        let text = format!("1 {place}: IOPS {{}} of poll's; >= {IDLE_IOPS}");
        verdicts.extend(bound(&text, ratio, |ratio| ratio >= IDLE_IOPS));
    }
    if place.threads >= cpus && place.compute >= cpus {
        let rates = ratio(cells, place, interrupt, iops);
        let text = format!("1 {place}: IOPS {{}} of interrupt's; >= {BUSY}");
        verdicts.extend(bound(&text, rates, |ratio| ratio >= BUSY));
        let compute = ratio(cells, place, interrupt, |cell| cell.compute_rate);
        let text = format!("1 {place}: compute rate {{}} of interrupt's; >= {BUSY}");
        verdicts.extend(bound(&text, compute, |ratio| ratio >= BUSY));
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
        let text =
            format!("1 {place}: tail: {least} requests are too few for p99 (longer --window)");
        return Some(Verdict { outcome: Outcome::NotJudged, text });
    };
    let (name, value): (_, fn(&Cell) -> Option<f64>) = if percentile.get() < 99.9 {
        ("p99 (too few requests for p99.9)", |cell| Some(cell.result.as_ref()?.p99_us))
    } else {
        ("p99.9", |cell| Some(cell.result.as_ref()?.p999_us))
    };
    let ratio = ratio(cells, place, [Mode::Adaptive, Mode::Interrupt], value);
    let text = format!("1 {place}: {name} {{}} of interrupt's; <= {TAIL}");
    bound(&text, ratio, |ratio| ratio <= TAIL)
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
                || compute(*mode).is_some_and(|ratio| ratio.median >= BUSY)
        };
        let rate = |mode| Spread::of(at(cells, place, mode).into_iter().filter_map(iops));
        let others = Mode::ALL.into_iter().filter(|mode| *mode != Mode::Adaptive);
        let rates = others.filter(leaves_alone).filter_map(|mode| Some((mode, rate(mode)?)));
        let (best, _) = rates.max_by(|a, b| a.1.median.total_cmp(&b.1.median))?;
        let ratio = ratio(cells, place, [Mode::Adaptive, best], iops)?;
        Some(Self { place, best, ratio, compute: compute(Mode::Adaptive) })
    }

    fn text(&self) -> String {
        let Self { place, best, ratio, .. } = self;
        let compute = self.compute.map_or(String::new(), |compute| {
            format!("; its compute rate x {:.3} of interrupt's", compute.median)
        });
        format!("2 {place}: IOPS {ratio} of {best}'s, the best that leaves compute alone{compute}")
    }
}

/// Acceptance 2 on all places of the file.
fn on_file(cells: &[Cell], places: &[Place]) -> Vec<Verdict> {
    let all: Vec<AgainstBest> =
        places.iter().filter_map(|&place| AgainstBest::at(cells, place)).collect();
    let Some(spread) = Spread::of(all.iter().map(|one| one.ratio.median)) else {
        return Vec::new();
    };
    let line = |one: &AgainstBest| Verdict { outcome: Outcome::Beside, text: one.text() };
    let mut verdicts: Vec<Verdict> = all.iter().map(line).collect();
    verdicts.push(Verdict {
        outcome: Outcome::of(spread.median >= BUSY),
        text: format!("2 file: median of {} cells x {:.3}; >= {BUSY}", spread.n, spread.median),
    });
    let names = |below: f64| -> Vec<String> {
        let low = all.iter().filter(|one| one.ratio.median < below);
        low.map(|one| format!("{} (x {:.3}, {})", one.place, one.ratio.median, one.best)).collect()
    };
    let listed = |names: &[String]| {
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let worst = names(WORST);
    verdicts.push(Verdict {
        outcome: Outcome::of(worst.is_empty()),
        text: format!("2 file: cells below {WORST}: {}", listed(&worst)),
    });
    let below = names(BUSY);
    verdicts.push(Verdict {
        outcome: Outcome::of(below.len() as f64 <= NAMED * all.len() as f64),
        text: format!(
            "2 file: {} of {} cells below {BUSY}, at most {:.0} %: {}",
            below.len(),
            all.len(),
            NAMED * 100.0,
            listed(&below)
        ),
    });
    verdicts
}

/// What polling does where CPUs are short: all modes beside each other.
fn beside(cells: &[Cell], place: Place) -> Verdict {
    let of = |mode: Mode| {
        let cells_here = at(cells, place, mode);
        let rate = Spread::of(cells_here.iter().filter_map(|cell| iops(cell)))?;
        let compute = cells_here.iter().filter_map(|cell| compute_ratio(cells, cell));
        let compute = Spread::of(compute).map_or("-".to_owned(), |c| format!("{:.2}", c.median));
        Some(format!("{mode} {:.1} and {compute}", rate.median / 1e3))
    };
    let all: Vec<String> = Mode::ALL.into_iter().filter_map(of).collect();
    let text = format!("2 {place}: kIOPS, and compute rate of C alone: {}", all.join(", "));
    Verdict { outcome: Outcome::Beside, text }
}
