//! The little statistics that experiments need, and numbers as tables and plots write them.

use std::fmt;

pub(crate) use rtvirtio_cases::wilson_interval as wilson;
use rtvirtio_units::Nanos;
use serde::Serialize;

/// The median: of an even number the mean of the two in the middle, not a number of none.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// The smallest and the largest of the values; infinite the wrong way round of none.
pub(crate) fn range(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let ends = (f64::INFINITY, f64::NEG_INFINITY);
    values.into_iter().fold(ends, |(low, high), value| (low.min(value), high.max(value)))
}

/// A value with an interval: the median of several runs with their range, or a figure with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The median, or the figure.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// Values that it is of.
    pub n: usize,
}

impl Spread {
    /// A figure with its interval.
    #[must_use]
    pub const fn new(value: f64, low: f64, high: f64) -> Self {
        Self { value, low, high, n: 1 }
    }

    /// The median of runs, and their range; `None` without a finite one.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        let ((low, high), n) = (range(values.iter().copied()), values.len());
        (n > 0).then(|| Self { value: median(values), low, high, n })
    }

    /// The same, of `whole`.
    #[must_use]
    pub fn over(self, whole: f64) -> Self {
        let Self { value, low, high, n } = self;
        Self { value: value / whole, low: low / whole, high: high / whole, n }
    }
}

impl fmt::Display for Spread {
    /// `1.50 (1.20–1.90)`, with two digits behind the point or as many as are asked for.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        let Self { value, low, high, .. } = self;
        write!(f, "{value:.digits$} ({low:.digits$}–{high:.digits$})")
    }
}

/// The cells that have one key: the runs that a row of a table is made of.
#[derive(Debug, Clone)]
pub struct Runs<'a, K, C> {
    /// What they have in common.
    pub key: K,
    /// At least one.
    pub cells: Vec<&'a C>,
}

/// The cells by their keys, in the order in which these first appear.
pub fn runs<'a, K: PartialEq, C: 'a>(
    cells: impl IntoIterator<Item = &'a C>,
    key: impl Fn(&C) -> K,
) -> Vec<Runs<'a, K, C>> {
    let mut all: Vec<Runs<'a, K, C>> = Vec::new();
    for cell in cells {
        let key = key(cell);
        match all.iter_mut().find(|runs| runs.key == key) {
            Some(runs) => runs.cells.push(cell),
            None => all.push(Runs { key, cells: vec![cell] }),
        }
    }
    all
}

impl<C, K> Runs<'_, K, C> {
    /// How many.
    #[must_use]
    pub fn n(&self) -> usize {
        self.cells.len()
    }

    /// The median of a value.
    pub fn median(&self, value: impl Fn(&C) -> f64) -> f64 {
        median(self.cells.iter().map(|cell| value(cell)))
    }

    /// The median of a value that not each of them needs to have; `None` if none has it.
    pub fn known(&self, value: impl Fn(&C) -> Option<f64>) -> Option<f64> {
        Spread::of(self.cells.iter().filter_map(|cell| value(cell))).map(|spread| spread.value)
    }

    /// The median and the range of a value.
    pub fn spread(&self, value: impl Fn(&C) -> f64) -> Option<Spread> {
        Spread::of(self.cells.iter().map(|cell| value(cell)))
    }
}

/// The distinct values of `items` in order of first appearance.
pub(crate) fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    items.into_iter().fold(Vec::new(), |mut seen, item| {
        if !seen.contains(&item) {
            seen.push(item);
        }
        seen
    })
}

/// A number with three significant digits: `0.0123`, `1.23`, `123`, `12300`.
pub(crate) fn sig3(x: f64) -> String {
    if !x.is_finite() {
        return "–".to_owned();
    }
    // The exponent of the rounded number: 9.996 is 10.0, not 10.00.
    let scientific = format!("{x:.2e}");
    let exponent = scientific.split_once('e').and_then(|(_, e)| e.parse().ok());
    match (scientific.parse::<f64>(), exponent.unwrap_or(0)) {
        (Ok(0.0), _) => "0".to_owned(),
        (_, e) if e < -4 => scientific,
        (Ok(rounded), e) => format!("{rounded:.*}", usize::try_from(2 - e).unwrap_or(0)),
        (Err(_), _) => scientific,
    }
}

/// [`sig3`] without trailing zeros behind the point, for targets and axes.
pub(crate) fn short(x: f64) -> String {
    let text = sig3(x);
    if text.contains('.') && !text.contains('e') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Milliseconds with three significant digits, without the unit.
pub(crate) fn ms(t: Nanos) -> String {
    sig3(t.as_millis_f64())
}

/// A fraction as whole percent, rounded down: what falls short of 0.95 must not read 95.
pub(crate) fn percent_down(fraction: f64) -> String {
    // The nudge keeps 0.29 × 100 at 29.
    format!("{:.0}", (fraction * 100.0 + 1e-9).floor())
}

/// `7/8 (53–98 %)`: a rate with its Wilson interval; `0/0` without an interval.
pub(crate) fn rate(successes: usize, n: usize) -> String {
    if n == 0 {
        return "0/0".to_owned();
    }
    let (low, high) = wilson(successes as u64, n as u64);
    format!("{successes}/{n} ({:.0}–{:.0} %)", low * 100.0, high * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wilson_matches_known_values() {
        // 8/8: n / (n + z²) = 8 / 11.8415; 0/10: z² / (n + z²) = 3.8415 / 13.8415.
        let (low, high) = wilson(8, 8);
        assert!((low - 0.6756).abs() < 1e-3 && (high - 1.0).abs() < 1e-9);
        let (low, high) = wilson(0, 10);
        assert!(low.abs() < 1e-9 && (high - 0.2775).abs() < 1e-3);
        assert_eq!(rate(0, 0), "0/0");
    }

    #[test]
    fn numbers_carry_three_significant_digits() {
        let cases = [
            (0.0, "0"),
            (0.012_345, "0.0123"),
            (9.996, "10.0"),
            (371.4, "371"),
            (12_345.0, "12300"),
        ];
        for (x, text) in cases {
            assert_eq!(sig3(x), text);
        }
        assert_eq!([20.0, 22.5, 200.0].map(short), ["20", "22.5", "200"]);
    }

    #[test]
    fn spread_is_the_median_and_the_range_of_what_is_finite() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([3.0, 1.0, 2.0, 4.0]), 2.5);
        let spread = Spread::of([9.96, f64::NAN, 1.0, 20.04]).unwrap();
        assert_eq!((format!("{spread:.1}"), spread.n), ("10.0 (1.0–20.0)".to_owned(), 3));
        assert_eq!(format!("{:.0}", spread.over(0.5)), "20 (2–40)");
        assert_eq!(Spread::of([f64::NAN]), None);
    }

    #[test]
    fn runs_are_the_cells_of_each_key_in_their_order() {
        let cells = [("b", 1.0), ("a", 5.0), ("b", 3.0), ("b", 2.0)];
        let all = runs(&cells, |cell| cell.0);
        let shown: Vec<_> =
            all.iter().map(|runs| (runs.key, runs.n(), runs.median(|c| c.1))).collect();
        assert_eq!(shown, [("b", 3, 2.0), ("a", 1, 5.0)]);
        assert_eq!(all[0].known(|cell| (cell.1 > 1.0).then_some(cell.1)), Some(2.5));
        assert_eq!(all[0].known(|_| None), None);
    }
}
