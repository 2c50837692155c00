//! Inline SVG: scales, axes and curves, no more than the report needs.
//!
//! Lengths are px of the drawing's own box; the style sheet sets fonts and
//! colours by class and lets a drawing shrink with the page. Drawn by hand: a
//! chart library would round points to whole px and cannot name classes, and
//! tooltips come from `title` elements.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::stats::short;

/// A mapping from values to px.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    log: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Logarithmic; the ends move out to 1, 2 or 5 times a power of ten.
    pub(crate) fn log(low: f64, high: f64, from: f64, to: f64) -> Self {
        let low = if low.is_finite() && low > 0.0 { low } else { 1.0 };
        let high = if high.is_finite() && high > low { high } else { low * 10.0 };
        let outward = |x: f64, pick: fn(f64, f64) -> bool, steps: [f64; 4]| {
            let decade = 10f64.powf(x.log10().floor());
            steps.map(|s| s * decade).into_iter().find(|&s| pick(s, x)).unwrap_or(x)
        };
        let low = outward(low, |s, x| s <= x * 1.000_001, [5.0, 2.0, 1.0, 0.5]);
        let high = outward(high, |s, x| s >= x * 0.999_999, [1.0, 2.0, 5.0, 10.0]);
        Self { log: true, low, high, from, to }
    }

    /// Linear over `low..high` exactly.
    pub(crate) fn linear(low: f64, high: f64, from: f64, to: f64) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        Self { log: false, low, high, from, to }
    }

    /// The smallest and the largest value.
    pub(crate) const fn ends(self) -> (f64, f64) {
        (self.low, self.high)
    }

    /// Where the low end is drawn.
    pub(crate) const fn from(self) -> f64 {
        self.from
    }

    /// Where the high end is drawn.
    pub(crate) const fn to(self) -> f64 {
        self.to
    }

    /// Where `value` is drawn; values outside are drawn at the nearer end.
    pub(crate) fn at(self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Values to label, and values that only get a grid line.
    fn ticks(self) -> (Vec<f64>, Vec<f64>) {
        if !self.log {
            return (linear_ticks(self.low, self.high), Vec::new());
        }
        let decades = (self.high / self.low).log10();
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        let within = |v: &f64| *v >= self.low * 0.999_999 && *v <= self.high * 1.000_001;
        let multiples = |steps: &[f64]| -> Vec<f64> {
            let each = (first..=last).flat_map(|e| steps.iter().map(move |s| s * 10f64.powi(e)));
            each.filter(within).collect()
        };
        let steps: &[f64] = if decades < 2.2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let minor: &[f64] =
            if decades < 2.2 { &[3.0, 4.0, 6.0, 7.0, 8.0, 9.0] } else { &[2.0, 5.0] };
        (multiples(steps), multiples(minor))
    }
}

/// About five round values.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * decade).into_iter().find(|&s| s >= rough * 0.999);
    let step = step.unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..).map(|i| i as f64 * step).take_while(|&v| v <= high + step * 1e-6).collect()
}

/// A drawing's box and its two scales.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plot {
    pub(crate) width: f64,
    pub(crate) height: f64,
    pub(crate) x: Scale,
    pub(crate) y: Scale,
}

impl Plot {
    /// The drawing, with `label` for those who cannot see it.
    pub(crate) fn draw(&self, label: &str, content: Markup) -> Markup {
        let view = format!("0 0 {} {}", self.width, self.height);
        html! {
            svg viewBox=(view) width=(self.width) height=(self.height) role="img" aria-label=(label) {
                (content)
            }
        }
    }

    /// Vertical grid lines and the labels of the x axis, with its title.
    pub(crate) fn x_axis(&self, title: &str) -> Markup {
        let (labelled, minor) = self.x.ticks();
        let (top, bottom) = (self.y.to, self.y.from);
        let lines = |ticks: &[f64]| {
            ticks.iter().fold(String::new(), |mut d, &v| {
                let _ = write!(d, "M{} {}V{}", px(self.x.at(v)), px(top), px(bottom));
                d
            })
        };
        html! {
            path.minor d=(lines(&minor)) {}
            path.grid d=(lines(&labelled)) {}
            @for v in &labelled {
                text.tick x=(px(self.x.at(*v))) y=(px(bottom + 13.0)) text-anchor="middle" { (axis_number(*v)) }
            }
            text.axis x=(px(f64::midpoint(self.x.from, self.x.to))) y=(px(bottom + 28.0)) text-anchor="middle" { (title) }
        }
    }

    /// Horizontal grid lines and the labels of the y axis, with its title.
    pub(crate) fn y_axis(&self, title: &str) -> Markup {
        let (labelled, minor) = self.y.ticks();
        let (left, right) = (self.x.from, self.x.to);
        let lines = |ticks: &[f64]| {
            ticks.iter().fold(String::new(), |mut d, &v| {
                let _ = write!(d, "M{} {}H{}", px(left), px(self.y.at(v)), px(right));
                d
            })
        };
        let middle = f64::midpoint(self.y.from, self.y.to);
        let turn = format!("translate(12 {}) rotate(-90)", px(middle));
        html! {
            path.minor d=(lines(&minor)) {}
            path.grid d=(lines(&labelled)) {}
            @for v in &labelled {
                text.tick x=(px(left - 5.0)) y=(px(self.y.at(*v) + 3.5)) text-anchor="end" { (axis_number(*v)) }
            }
            text.axis transform=(turn) text-anchor="middle" { (title) }
        }
    }

    /// Dashed vertical lines at `targets` (ms), labelled where there is room.
    pub(crate) fn target_lines(&self, targets: &[f64]) -> Markup {
        const LABEL: f64 = 11.0;
        let mut labelled = f64::NEG_INFINITY;
        let marks: Vec<(f64, f64, bool)> = targets
            .iter()
            .map(|&t| {
                let x = self.x.at(t);
                let room = x - labelled >= LABEL;
                if room {
                    labelled = x;
                }
                (t, x, room)
            })
            .collect();
        html! {
            @for (t, x, room) in marks {
                path.target d=(format!("M{} {}V{}", px(x), px(self.y.to), px(self.y.from))) {
                    title { "target " (short(t)) " ms" }
                }
                @if room {
                    text.tick.halo transform=(format!("translate({} {}) rotate(-90)", px(x - 2.5), px(self.y.from - 4.0))) {
                        (short(t)) " ms"
                    }
                }
            }
        }
    }

    /// A curve through `points`, with points closer than half a px left out.
    pub(crate) fn curve(&self, points: impl IntoIterator<Item = (f64, f64)>) -> String {
        let mut d = String::new();
        let mut last: Option<(f64, f64)> = None;
        let mut skipped = None;
        let mut emit = |(x, y): (f64, f64), last: &mut Option<(f64, f64)>| {
            let _ = write!(d, "{}{} {}", if last.is_some() { "L" } else { "M" }, px(x), px(y));
            *last = Some((x, y));
        };
        for (x, y) in points {
            let point = (self.x.at(x), self.y.at(y));
            let near = |l: (f64, f64)| (point.0 - l.0).hypot(point.1 - l.1) < 0.5;
            if last.is_some_and(near) {
                skipped = Some(point);
            } else {
                emit(point, &mut last);
                skipped = None;
            }
        }
        if let Some(point) = skipped {
            emit(point, &mut last);
        }
        d
    }
}

/// A coordinate with one digit behind the point.
pub(crate) fn px(x: f64) -> String {
    let text = format!("{x:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// An axis label: powers of ten below 0.001 and above 10,000 in scientific notation.
fn axis_number(v: f64) -> String {
    let exponent = v.abs().log10();
    if v != 0.0 && !(-3.1..4.1).contains(&exponent) { format!("{v:.0e}") } else { short(v) }
}

/// The class of a scheme's lines: the ninth starts over.
pub(crate) fn line_class(colour: usize) -> String {
    match colour {
        0 => "line s0".to_owned(),
        n => format!("line s{}", (n - 1) % 8 + 1),
    }
}

/// Lines and names of schemes.
pub(crate) fn legend<'a>(schemes: impl Iterator<Item = (&'a str, usize)>) -> Markup {
    html! {
        p.legend {
            @for (name, colour) in schemes {
                span {
                    svg width="30" height="10" aria-hidden="true" {
                        path class=(line_class(colour)) d="M1 5H29" {}
                    }
                    (name)
                }
            }
        }
    }
}

/// `text`, cut to `most` characters with an ellipsis.
pub(crate) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}
