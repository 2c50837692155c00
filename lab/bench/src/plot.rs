//! Plots: SVG of curves, points and bars, for a page or as a file that stands alone.
//!
//! A [`Chart`] has lines and points over two axes, [`Bars`] a row for each value. Both find their scales by
//! what is drawn. Lengths are px of a drawing's own box. Drawn by hand: a chart library would round points to
//! whole px, and tooltips come from `title` elements.

use std::fmt::Write as _;

use maud::{Markup, PreEscaped, html};

use crate::stats::{Spread, range, short};

/// The style of drawings, which pages have too.
pub(crate) const STYLE: &str = include_str!("plot.css");

/// Lines and fills, by index; they differ for colour-blind readers too (Okabe and Ito). The first is the one
/// that others are compared with.
const COLOURS: [(&str, &str); 9] = [
    ("#0072b2", ""),
    ("#c04f00", ""),
    ("#000000", ""),
    ("#009e73", "7 3"),
    ("#b6559a", ""),
    ("#d98c00", "2 2"),
    ("#3fa0dc", "9 3 2 3"),
    ("#6b7280", ""),
    ("#7a4a21", "4 2"),
];

/// The colour and the dashes of an index; those beyond the last start over behind the first.
const fn colour(index: usize) -> (&'static str, &'static str) {
    match index {
        0 => COLOURS[0],
        n => COLOURS[(n - 1) % (COLOURS.len() - 1) + 1],
    }
}

/// A mapping from values to px.
#[derive(Debug, Clone, Copy)]
struct Scale {
    log: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Logarithmic; the ends move out to 1, 2 or 5 times a power of ten.
    fn log((low, high): (f64, f64), from: f64, to: f64) -> Self {
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

    /// Linear over the range exactly.
    fn linear((low, high): (f64, f64), from: f64, to: f64) -> Self {
        let low = if low.is_finite() { low } else { 0.0 };
        let high = if high.is_finite() && high > low { high } else { low + 1.0 };
        Self { log: false, low, high, from, to }
    }

    /// Where `value` is drawn; values outside are drawn at the nearer end.
    fn at(self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn middle(self) -> f64 {
        f64::midpoint(self.from, self.to)
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

/// Two scales.
#[derive(Debug, Clone, Copy)]
struct Axes {
    x: Scale,
    y: Scale,
}

impl Axes {
    /// Vertical grid lines and the labels of the x axis, with its title.
    fn x_axis(&self, title: &str, names: Option<&[String]>) -> Markup {
        let Self { x, y } = *self;
        let (values, minor) = match names {
            Some(names) => ((0..names.len()).map(|at| at as f64).collect(), Vec::new()),
            None => x.ticks(),
        };
        let lines = |ticks: &[f64]| {
            let line = |v: &f64| format!("M{} {}V{}", px(x.at(*v)), px(y.to), px(y.from));
            ticks.iter().map(line).collect::<String>()
        };
        let label = |at: usize| match names {
            Some(names) => names[at].clone(),
            None => axis_number(values[at]),
        };
        html! {
            path.minor d=(lines(&minor)) {}
            path.grid d=(lines(&values)) {}
            @for (at, v) in values.iter().enumerate() {
                text.tick x=(px(x.at(*v))) y=(px(y.from + 13.0)) text-anchor="middle" { (label(at)) }
            }
            text.axis x=(px(x.middle())) y=(px(y.from + 28.0)) text-anchor="middle" { (title) }
        }
    }

    /// Horizontal grid lines and the labels of the y axis, with its title.
    fn y_axis(&self, title: &str) -> Markup {
        let Self { x, y } = *self;
        let (labelled, minor) = y.ticks();
        let lines = |ticks: &[f64]| {
            let line = |v: &f64| format!("M{} {}H{}", px(x.from), px(y.at(*v)), px(x.to));
            ticks.iter().map(line).collect::<String>()
        };
        let turn = format!("translate(12 {}) rotate(-90)", px(y.middle()));
        html! {
            path.minor d=(lines(&minor)) {}
            path.grid d=(lines(&labelled)) {}
            @for v in &labelled {
                text.tick x=(px(x.from - 5.0)) y=(px(y.at(*v) + 3.5)) text-anchor="end" { (axis_number(*v)) }
            }
            text.axis transform=(turn) text-anchor="middle" { (title) }
        }
    }

    /// A curve through `points`, with points closer than half a px left out.
    fn curve(&self, points: &[(f64, f64)]) -> String {
        let mut d = String::new();
        let mut last: Option<(f64, f64)> = None;
        for (index, &(x, y)) in points.iter().enumerate() {
            let point = (self.x.at(x), self.y.at(y));
            let is_near = last.is_some_and(|l| (point.0 - l.0).hypot(point.1 - l.1) < 0.5);
            if is_near && index + 1 < points.len() {
                continue;
            }
            let command = if last.is_some() { "L" } else { "M" };
            let _ = write!(d, "{command}{} {}", px(point.0), px(point.1));
            last = Some(point);
        }
        d
    }
}

/// A coordinate with one digit behind the point.
fn px(x: f64) -> String {
    let text = format!("{x:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// An axis label: powers of ten below 0.001 and above 10,000 in scientific notation.
fn axis_number(v: f64) -> String {
    let exponent = v.abs().log10();
    if v != 0.0 && !(-3.1..4.1).contains(&exponent) { format!("{v:.0e}") } else { short(v) }
}

/// `text`, cut to `most` characters with an ellipsis.
fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// A drawing with its box.
pub(crate) struct Drawing {
    title: String,
    width: f64,
    height: f64,
    content: Markup,
}

impl Drawing {
    /// For a page, with its title and a `note` beside it.
    pub(crate) fn figure(&self, note: Markup) -> Markup {
        let view = format!("0 0 {} {}", px(self.width), px(self.height));
        html! {
            figure {
                figcaption { b { (self.title) } (note) }
                svg viewBox=(view) width=(px(self.width)) height=(px(self.height)) role="img"
                    aria-label=(self.title) { (self.content) }
            }
        }
    }
}

/// A file that stands alone: drawings of one size, so many beside each other, below a legend.
pub(crate) fn sheet(legend: &[(&str, usize)], columns: usize, drawings: &[Drawing]) -> String {
    const TOP: f64 = 30.0;
    const TITLE: f64 = 20.0;
    let of = |length: fn(&Drawing) -> f64| range(drawings.iter().map(length)).1.max(1.0);
    let (width, height) = (of(|d| d.width), of(|d| d.height) + TITLE);
    let place =
        |index: usize| ((index % columns) as f64 * width, TOP + (index / columns) as f64 * height);
    let whole = (width * columns as f64, TOP + height * drawings.len().div_ceil(columns) as f64);
    html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox=(format!("0 0 {} {}", px(whole.0), px(whole.1)))
            width=(px(whole.0)) height=(px(whole.1)) {
            style { (PreEscaped(STYLE)) "svg{background:#fff;font:11px sans-serif}" }
            @for (index, (name, number)) in legend.iter().enumerate() {
                @let x = 60.0 + 120.0 * index as f64;
                path d=(format!("M{} 14h22", px(x))) stroke=(colour(*number).0)
                    stroke-dasharray=(colour(*number).1) stroke-width="3" {}
                text x=(px(x + 28.0)) y="18" { (name) }
            }
            @for (index, drawing) in drawings.iter().enumerate() {
                @let (x, y) = place(index);
                g transform=(format!("translate({} {})", px(x), px(y))) {
                    text.head x="60" y="12" { (drawing.title) }
                    g transform=(format!("translate(0 {})", px(TITLE))) { (drawing.content) }
                }
            }
        }
    }
    .into_string()
}

/// Lines and names, for a page.
pub(crate) fn legend<'a>(names: impl IntoIterator<Item = (&'a str, usize)>) -> Markup {
    html! {
        p.legend {
            @for (name, index) in names {
                span {
                    svg width="30" height="10" aria-hidden="true" {
                        path.line d="M1 5H29" stroke=(colour(index).0) stroke-dasharray=(colour(index).1)
                            stroke-width="2" {}
                    }
                    (name)
                }
            }
        }
    }
}

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weight {
    /// For few points: a line with its dashes.
    Normal,
    /// For many.
    Thin,
    /// Behind others.
    Pale,
}

enum Mark {
    Line { colour: usize, weight: Weight, hint: String, points: Vec<(f64, f64)> },
    Points { colour: usize, radius: f64, hint: String, points: Vec<(f64, Spread)> },
    Vertical { x: f64, labels: Vec<String> },
    Horizontal(f64),
    Diagonal,
    Shade(f64, f64),
}

/// A drawing of lines and points over two axes.
pub(crate) struct Chart<'a> {
    title: String,
    x: &'a str,
    y: &'a str,
    size: (f64, f64),
    logs: (bool, bool),
    x_range: Option<(f64, f64)>,
    y_range: Option<(f64, f64)>,
    names: Option<Vec<String>>,
    marks: Vec<Mark>,
}

impl<'a> Chart<'a> {
    /// With linear axes that begin at 0, and nothing on it.
    pub(crate) fn new(title: impl Into<String>, x: &'a str, y: &'a str, size: (f64, f64)) -> Self {
        let (logs, marks) = ((false, false), Vec::new());
        let title = title.into();
        Self { title, x, y, size, logs, x_range: None, y_range: None, names: None, marks }
    }

    pub(crate) fn log_x(mut self) -> Self {
        self.logs.0 = true;
        self
    }

    pub(crate) fn log_y(mut self) -> Self {
        self.logs.1 = true;
        self
    }

    /// Exactly, or of a logarithmic axis at least.
    pub(crate) fn x_range(mut self, low: f64, high: f64) -> Self {
        self.x_range = Some((low, high));
        self
    }

    /// Exactly, or of a logarithmic axis at least.
    pub(crate) fn y_range(mut self, low: f64, high: f64) -> Self {
        self.y_range = Some((low, high));
        self
    }

    /// Values of x are numbers of these, from 0.
    pub(crate) fn named_x(mut self, names: Vec<String>) -> Self {
        self.x_range = Some((-0.2, names.len() as f64 - 0.8));
        self.names = Some(names);
        self
    }

    /// A line.
    pub(crate) fn line(
        mut self,
        (hint, colour): (impl Into<String>, usize),
        weight: Weight,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        let points = points.into_iter().collect();
        self.marks.push(Mark::Line { colour, weight, hint: hint.into(), points });
        self
    }

    /// Points of one colour and size, with whiskers where values have a range.
    pub(crate) fn points(
        mut self,
        (hint, colour): (impl Into<String>, usize),
        radius: f64,
        points: impl IntoIterator<Item = (f64, Spread)>,
    ) -> Self {
        let points = points.into_iter().collect();
        self.marks.push(Mark::Points { colour, radius, hint: hint.into(), points });
        self
    }

    /// A dashed vertical line, with texts above it.
    pub(crate) fn vertical(mut self, x: f64, labels: &[&str]) -> Self {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        self.marks.push(Mark::Vertical { x, labels });
        self
    }

    /// A dashed horizontal line.
    pub(crate) fn horizontal(mut self, y: f64) -> Self {
        self.marks.push(Mark::Horizontal(y));
        self
    }

    /// Where both values are the same.
    pub(crate) fn diagonal(mut self) -> Self {
        self.marks.push(Mark::Diagonal);
        self
    }

    /// A shaded part of the x axis.
    pub(crate) fn shade(mut self, from: f64, to: f64) -> Self {
        self.marks.push(Mark::Shade(from, to));
        self
    }

    /// Whether a line or a point is on it.
    pub(crate) fn is_empty(&self) -> bool {
        !self.marks.iter().any(|mark| match mark {
            Mark::Line { points, .. } => !points.is_empty(),
            Mark::Points { points, .. } => !points.is_empty(),
            _ => false,
        })
    }

    fn axes(&self) -> Axes {
        let (mut xs, mut ys) = (Vec::new(), Vec::new());
        for mark in &self.marks {
            match mark {
                Mark::Line { points, .. } => {
                    xs.extend(points.iter().map(|point| point.0));
                    ys.extend(points.iter().map(|point| point.1));
                }
                Mark::Points { points, .. } => {
                    xs.extend(points.iter().map(|point| point.0));
                    ys.extend(points.iter().flat_map(|(_, spread)| [spread.low, spread.high]));
                }
                Mark::Vertical { x, .. } => xs.push(*x),
                Mark::Horizontal(y) => ys.push(*y),
                Mark::Shade(from, to) => xs.extend([*from, *to]),
                Mark::Diagonal => {}
            }
        }
        if self.marks.iter().any(|mark| matches!(mark, Mark::Diagonal)) {
            ys.extend(&xs);
        }
        let scale =
            |values: Vec<f64>, log: bool, ends: Option<(f64, f64)>, from, to| match (log, ends) {
                (true, ends) => {
                    let ends = ends.map(|(low, high)| [low, high]).into_iter().flatten();
                    Scale::log(range(values.into_iter().filter(|v| *v > 0.0).chain(ends)), from, to)
                }
                (false, Some(ends)) => Scale::linear(ends, from, to),
                (false, None) => Scale::linear((0.0, range(values).1), from, to),
            };
        let (width, height) = self.size;
        let labels = self.marks.iter().map(|mark| match mark {
            Mark::Vertical { labels, .. } => labels.len(),
            _ => 0,
        });
        let top = 10.0 + 12.0 * labels.max().unwrap_or(0) as f64;
        Axes {
            x: scale(xs, self.logs.0, self.x_range, 54.0, width - 12.0),
            y: scale(ys, self.logs.1, self.y_range, height - 36.0, top),
        }
    }

    pub(crate) fn draw(&self) -> Drawing {
        let axes = self.axes();
        let is_shade = |mark: &&Mark| matches!(mark, Mark::Shade(..));
        let (shades, others): (Vec<_>, Vec<_>) = self.marks.iter().partition(is_shade);
        let content = html! {
            @for mark in shades { (draw(mark, &axes)) }
            (axes.x_axis(self.x, self.names.as_deref()))
            (axes.y_axis(self.y))
            @for mark in others { (draw(mark, &axes)) }
        };
        let (width, height) = self.size;
        Drawing { title: self.title.clone(), width, height, content }
    }
}

fn draw(mark: &Mark, axes: &Axes) -> Markup {
    let Axes { x: to_x, y: to_y } = *axes;
    match mark {
        Mark::Line { colour: index, weight, hint, points } => {
            let (stroke, dashes) = colour(*index);
            let (width, dashes, opacity) = match weight {
                Weight::Normal if *index == 0 => ("3", dashes, "1"),
                Weight::Normal => ("1.7", dashes, "1"),
                Weight::Thin => ("1.3", "", "1"),
                Weight::Pale => ("1", "", ".35"),
            };
            html! {
                path.line d=(axes.curve(points)) stroke=(stroke) stroke-width=(width)
                    stroke-dasharray=(dashes) stroke-opacity=(opacity) { title { (hint) } }
            }
        }
        Mark::Points { colour: index, radius, hint, points } => html! {
            @for (at, Spread { value, low, high, .. }) in points {
                @let x = px(to_x.at(*at));
                @if low < high { path.whisker d=(format!("M{x} {}V{}", px(to_y.at(*low)), px(to_y.at(*high)))) {} }
                circle cx=(x) cy=(px(to_y.at(*value))) r=(px(*radius)) fill=(colour(*index).0) fill-opacity=".75" {
                    title { (hint) ": " (short(*value)) }
                }
            }
        },
        Mark::Vertical { x, labels } => {
            let x = to_x.at(*x);
            html! {
                path.target d=(format!("M{} {}V{}", px(x), px(to_y.to), px(to_y.from))) {}
                @for (line, label) in labels.iter().rev().enumerate() {
                    text.tick x=(px(x + 2.0)) y=(px(to_y.to - 4.0 - 12.0 * line as f64)) { (label) }
                }
            }
        }
        Mark::Horizontal(y) => html! {
            path.target d=(format!("M{} {}H{}", px(to_x.from), px(to_y.at(*y)), px(to_x.to))) {}
        },
        Mark::Diagonal => {
            let ends = [to_x.low.max(to_y.low), to_x.high.min(to_y.high)];
            html! { path.diagonal d=(axes.curve(&ends.map(|end| (end, end)))) {} }
        }
        Mark::Shade(from, to) => {
            let (from, to) = (to_x.at(*from), to_x.at(*to));
            html! {
                rect.region-fail x=(px(from)) y=(px(to_y.to)) width=(px(to - from))
                    height=(px(to_y.from - to_y.to)) {}
            }
        }
    }
}

/// How a value is drawn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A bar from the axis on.
    #[default]
    Bar,
    /// A dot, filled or not.
    Dot {
        /// Whether it is.
        is_filled: bool,
    },
}

/// A row of [`Bars`].
#[derive(Debug, Clone, Default)]
pub(crate) struct Bar {
    /// What it is of; rows that follow each other with one name share it.
    pub(crate) name: String,
    pub(crate) shape: Shape,
    pub(crate) colour: usize,
    /// None: the text alone is there.
    pub(crate) value: Option<Spread>,
    /// Values that it is made of.
    pub(crate) dots: Vec<f64>,
    /// What it is to stay below.
    pub(crate) target: Option<f64>,
    /// Beside it.
    pub(crate) text: String,
    /// For who points at it.
    pub(crate) hint: String,
}

/// A drawing of rows.
pub(crate) struct Bars<'a> {
    pub(crate) title: String,
    pub(crate) x: &'a str,
    pub(crate) is_log: bool,
    /// Ends of the axis that are to be on it.
    pub(crate) ends: Vec<f64>,
    pub(crate) width: f64,
    pub(crate) rows: Vec<Bar>,
}

impl Bars<'_> {
    const ROW: f64 = 14.0;
    const GAP: f64 = 6.0;
    const TOP: f64 = 6.0;

    pub(crate) fn draw(&self) -> Drawing {
        let spread = |bar: &Bar| bar.value.map(|value| [value.low, value.high]);
        let rows = self.rows.iter();
        let values = rows.clone().filter_map(spread).flatten();
        let values =
            values.chain(rows.clone().filter_map(|bar| bar.target)).chain(self.ends.clone());
        let longest = |of: fn(&Bar) -> &str| {
            rows.clone().map(|bar| of(bar).chars().count()).max().unwrap_or(0)
        };
        let left = Self::CHAR * longest(|bar| &bar.name).min(Self::NAME) as f64 + 12.0;
        // Panels beside each other have one width for their texts, if they have any.
        let text = match longest(|bar| &bar.text) {
            0 => 0,
            longest => longest.max(Self::TEXT),
        };
        let right = self.width - Self::CHAR * text as f64 - 16.0;
        let groups: Vec<&[Bar]> = self.rows.chunk_by(|a, b| a.name == b.name).collect();
        let is_grouped = groups.len() < self.rows.len();
        let gap = if is_grouped { Self::GAP } else { 0.0 };
        let bottom = Self::TOP + Self::ROW * self.rows.len() as f64 + gap * groups.len() as f64;
        let x = match self.is_log {
            true => Scale::log(range(values.filter(|value| *value > 0.0)), left, right),
            false => Scale::linear((0.0, range(values).1), left, right),
        };
        let axes = Axes { x, y: Scale::linear((0.0, 1.0), bottom, Self::TOP) };
        let mut top = Self::TOP;
        let mut placed = Vec::new();
        for group in groups {
            placed.push((group, top));
            top += Self::ROW * group.len() as f64 + gap;
        }
        let content = html! {
            @for (group, top) in &placed {
                @let middle = top + Self::ROW * group.len() as f64 / 2.0 + 3.5;
                text x=(px(left - 6.0)) y=(px(middle)) text-anchor="end" {
                    (cut(&group[0].name, Self::NAME)) title { (group[0].name) }
                }
                @for (index, bar) in group.iter().enumerate() {
                    (below(bar, x, top + Self::ROW * index as f64))
                }
            }
            (axes.x_axis(self.x, None))
            @for (group, top) in &placed {
                @for (index, bar) in group.iter().enumerate() {
                    (above(bar, x, top + Self::ROW * index as f64))
                }
            }
        };
        Drawing { title: self.title.clone(), width: self.width, height: bottom + 34.0, content }
    }

    /// Characters of a name that are shown, and room for a text.
    const NAME: usize = 28;
    const TEXT: usize = 15;
    /// Width of a character.
    const CHAR: f64 = 6.7;
}

/// A row's regions, bar and text, beneath the grid.
fn below(bar: &Bar, x: Scale, y: f64) -> Markup {
    let height = Bars::ROW;
    let rect = |class: &str, from: f64, to: f64| {
        html! {
            rect class=(class) x=(px(from)) y=(px(y + 0.5)) width=(px((to - from).max(0.0)))
                height=(px(height - 1.0)) {}
        }
    };
    html! {
        @if let Some(target) = bar.target.map(|target| x.at(target)) {
            (rect("region-pass", x.from, target)) (rect("region-fail", target, x.to))
        }
        @if let (Shape::Bar, Some(value)) = (bar.shape, bar.value) {
            rect x=(px(x.from)) y=(px(y + 2.5)) width=(px(x.at(value.value) - x.from))
                height=(px(height - 5.0)) fill=(colour(bar.colour).0) { title { (bar.hint) } }
        }
        text x=(px(x.to + 8.0)) y=(px(y + height / 2.0 + 3.5)) { (bar.text) }
    }
}

/// Target, dot, whisker and what a value is made of, above the grid.
fn above(bar: &Bar, x: Scale, y: f64) -> Markup {
    let middle = y + Bars::ROW / 2.0;
    let stroke = colour(bar.colour).0;
    html! {
        @if let Some(target) = bar.target {
            path.mark d=(format!("M{} {}v{}", px(x.at(target)), px(y + 1.0), px(Bars::ROW - 2.0))) {}
        }
        @if let Some(Spread { value, low, high, .. }) = bar.value {
            @if low < high {
                path.whisker d=(format!("M{low} {top}v6M{low} {mid}H{high}M{high} {top}v6", low = px(x.at(low)),
                    high = px(x.at(high)), mid = px(middle), top = px(middle - 3.0))) { title { (bar.hint) } }
            }
            @if let Shape::Dot { is_filled } = bar.shape {
                circle cx=(px(x.at(value))) cy=(px(middle)) r="3.5" stroke=(stroke)
                    fill=(if is_filled { stroke } else { "#fff" }) { title { (bar.hint) } }
            }
        }
        @if bar.dots.len() > 1 {
            @for dot in &bar.dots { circle.dot cx=(px(x.at(*dot))) cy=(px(middle)) r="1.7" {} }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_hold_what_is_drawn_and_end_at_round_values() {
        let chart = Chart::new("t", "x", "y", (400.0, 200.0)).log_y();
        let chart = chart.line(("a", 0), Weight::Thin, [(0.0, 0.3), (7.0, 42.0)]).horizontal(60.0);
        let Axes { x, y } = chart.axes();
        assert_eq!((x.low, x.high, y.low, y.high), (0.0, 7.0, 0.2, 100.0));
        assert_eq!((x.at(0.0), x.at(7.0), y.at(0.2), y.at(1e9)), (54.0, 388.0, 164.0, 10.0));
        assert_eq!(x.ticks().0, [0.0, 2.0, 4.0, 6.0]);
    }

    #[test]
    fn curve_leaves_out_points_that_are_too_near_but_not_the_last() {
        let scale = |to| Scale::linear((0.0, 100.0), 0.0, to);
        let axes = Axes { x: scale(100.0), y: scale(100.0) };
        let points = [(0.0, 0.0), (0.1, 0.0), (5.0, 0.0), (5.1, 0.0)];
        assert_eq!(axes.curve(&points), "M0 0L5 0L5.1 0");
    }

    #[test]
    fn bars_have_their_names_once_a_group_and_a_sheet_stands_alone() {
        let bar = |name: &str, value| Bar {
            name: name.to_owned(),
            shape: Shape::Dot { is_filled: false },
            colour: 1,
            value: Some(Spread::new(value, value / 2.0, value * 2.0)),
            target: Some(1.0),
            text: "<&>".to_owned(),
            ..Bar::default()
        };
        let rows = vec![bar("one", 1.0), bar("one", 3.0), bar("two", 2.0)];
        let bars =
            Bars { title: "t".into(), x: "x", is_log: true, ends: vec![], width: 300.0, rows };
        let text = sheet(&[("a", 1)], 2, &[bars.draw()]);
        assert!(
            text.starts_with("<svg xmlns") && text.matches(">one<title>").count() == 1,
            "{text}"
        );
        assert!(text.contains("&lt;&amp;&gt;") && !text.contains("NaN"));
    }
}
