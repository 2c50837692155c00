//! Numbers as the report writes them, and the little statistics it needs.

use rtvirtio_units::Nanos;

pub(super) use rtvirtio_cases::wilson_interval as wilson;

/// A number with three significant digits: `0.0123`, `1.23`, `123`, `12300`.
pub(super) fn sig3(x: f64) -> String {
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
pub(super) fn short(x: f64) -> String {
    let text = sig3(x);
    if text.contains('.') && !text.contains('e') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Milliseconds with three significant digits, without the unit.
pub(super) fn ms(t: Nanos) -> String {
    sig3(t.as_millis_f64())
}

/// A fraction as whole percent.
pub(super) fn percent(fraction: f64) -> String {
    format!("{:.0}", fraction * 100.0)
}

/// A fraction as whole percent, rounded down: what falls short of 0.95 must not read 95.
pub(super) fn percent_down(fraction: f64) -> String {
    // The nudge keeps 0.29 × 100 at 29.
    format!("{:.0}", (fraction * 100.0 + 1e-9).floor())
}

/// `7/8 (53–98 %)`: a rate with its Wilson interval; `0/0` without an interval.
pub(super) fn rate(successes: usize, n: usize) -> String {
    if n == 0 {
        return "0/0".to_owned();
    }
    let (low, high) = wilson(successes as u64, n as u64);
    format!("{successes}/{n} ({}–{} %)", percent(low), percent(high))
}

/// The median; of an even number the larger of the two in the middle.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
