//! Tables: of any rows, a column at a time, for a terminal, a page or a program.

use std::fmt::{self, Display};

use maud::{Markup, html};
use serde_json::{Map, Value};

use crate::verdict::Standing;

/// What a table shows where there is no figure.
pub(crate) const NOTHING: &str = "-";

/// A figure that a column may have.
pub trait Figure {
    /// It, if there is one.
    fn figure(self) -> Option<f64>;
}

impl Figure for f64 {
    fn figure(self) -> Option<f64> {
        self.is_finite().then_some(self)
    }
}

macro_rules! counts {
    ($($count:ty),+) => {
        $(impl Figure for $count {
            fn figure(self) -> Option<f64> {
                Some(self as f64)
            }
        })+
    };
}

counts!(u32, u64, usize);

impl<F: Figure> Figure for Option<F> {
    fn figure(self) -> Option<f64> {
        self.and_then(Figure::figure)
    }
}

/// A value in a column.
#[derive(Debug)]
struct Entry {
    standing: Option<Standing>,
    text: String,
    /// Of a figure: without what rounding takes away.
    value: Option<f64>,
}

impl Entry {
    fn text(text: impl Display) -> Self {
        Self { standing: None, text: printable(&text.to_string()), value: None }
    }

    /// As a terminal shows it.
    fn plain(&self) -> String {
        match self.standing {
            Some(standing) => format!("{} {}", standing.mark(), self.text),
            None => self.text.clone(),
        }
    }
}

#[derive(Debug)]
struct Column {
    title: String,
    is_text: bool,
    is_ours: bool,
    entries: Vec<Entry>,
}

/// A table of rows `R`.
#[derive(Debug)]
pub struct Table<'a, R> {
    rows: &'a [R],
    columns: Vec<Column>,
}

impl<'a, R> Table<'a, R> {
    /// Without columns yet.
    #[must_use]
    pub const fn of(rows: &'a [R]) -> Self {
        Self { rows, columns: Vec::new() }
    }

    fn column(mut self, title: &str, is_text: bool, entry: impl Fn(&'a R) -> Entry) -> Self {
        let entries = self.rows.iter().map(entry).collect();
        self.columns.push(Column { title: printable(title), is_text, is_ours: false, entries });
        self
    }

    /// A column of words, flush left.
    #[must_use]
    pub fn text<T: Display>(self, title: &str, value: impl Fn(&'a R) -> T) -> Self {
        self.column(title, true, |row| Entry::text(value(row)))
    }

    /// A column of figures with so many digits behind the point; `-` where there is none.
    #[must_use]
    pub fn figure<F: Figure>(self, title: &str, digits: usize, value: impl Fn(&'a R) -> F) -> Self {
        self.column(title, false, |row| match value(row).figure() {
            Some(value) => Entry { value: Some(value), ..Entry::text(format!("{value:.digits$}")) },
            None => Entry::text(NOTHING),
        })
    }

    /// A column of figures that are written otherwise, such as with an interval; `-` for none.
    #[must_use]
    pub fn shown<T: Display>(self, title: &str, value: impl Fn(&'a R) -> Option<T>) -> Self {
        self.column(title, false, |row| value(row).map_or(Entry::text(NOTHING), Entry::text))
    }

    /// A column of marks with a text each.
    #[must_use]
    pub fn marked<T: Display>(
        self,
        title: &str,
        value: impl Fn(&'a R) -> Option<(Standing, T)>,
    ) -> Self {
        self.column(title, false, |row| match value(row) {
            Some((standing, text)) => Entry { standing: Some(standing), ..Entry::text(text) },
            None => Entry::text(NOTHING),
        })
    }

    /// Shows the last column as the one that others are compared with, if `is_ours`.
    pub(crate) fn ours(mut self, is_ours: bool) -> Self {
        if let Some(column) = self.columns.last_mut() {
            column.is_ours = is_ours;
        }
        self
    }

    /// For a page; `class` is a row's.
    pub(crate) fn html(&self, class: impl Fn(&R) -> Option<&'static str>) -> Markup {
        let of = |column: &Column| match (column.is_ours, column.is_text) {
            (true, _) => Some("ours"),
            (false, true) => Some("text"),
            (false, false) => None,
        };
        let entry = |entry: &Entry| {
            html! {
                @if let Some(standing) = entry.standing { (mark(standing)) " " }
                (entry.text)
            }
        };
        html! {
            div.scroll { table {
                thead { tr { @for column in &self.columns { th class=[of(column)] { (column.title) } } } }
                tbody {
                    @for (index, row) in self.rows.iter().enumerate() {
                        tr class=[class(row)] {
                            @for (number, column) in self.columns.iter().enumerate() {
                                @let text = entry(&column.entries[index]);
                                @if number == 0 { th scope="row" { (text) } } @else { td class=[of(column)] { (text) } }
                            }
                        }
                    }
                }
            } }
        }
    }

    /// For a program: an object for each row, with figures as they are before they are rounded.
    #[must_use]
    pub fn json(&self) -> Value {
        let row = |index: usize| {
            let entry = |column: &Column| {
                let entry = &column.entries[index];
                let value = entry.value.map_or_else(|| entry.plain().into(), Value::from);
                let is_nothing = entry.text == NOTHING && !column.is_text;
                (column.title.clone(), if is_nothing { Value::Null } else { value })
            };
            Value::Object(self.columns.iter().map(entry).collect::<Map<_, _>>())
        };
        (0..self.rows.len()).map(row).collect()
    }
}

impl<R> Display for Table<'_, R> {
    /// For a terminal: columns as wide as they have to be, two spaces between them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = (0..=self.rows.len()).map(|line| {
            let cell = |column: &Column| match line {
                0 => column.title.clone(),
                line => column.entries[line - 1].plain(),
            };
            self.columns.iter().map(cell).collect::<Vec<String>>()
        });
        let lines: Vec<Vec<String>> = lines.collect();
        let width =
            |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for line in &lines {
            let mut text = String::new();
            for ((cell, column), &width) in line.iter().zip(&self.columns).zip(&widths) {
                text += &match column.is_text {
                    true => format!("{cell:<width$}  "),
                    false => format!("{cell:>width$}  "),
                };
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// A standing's mark with its colour.
pub(crate) fn mark(standing: Standing) -> Markup {
    let class = match standing {
        Standing::Met => "pass",
        Standing::Missed => "fail",
        _ => "unsure",
    };
    html! { span class=(class) { (standing.mark()) } }
}

/// `text` without control characters, which a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Row = (&'static str, Option<f64>);

    fn table(rows: &[Row]) -> Table<'_, Row> {
        Table::of(rows)
            .text("name", |row| row.0)
            .figure("IOPS", 1, |row| row.1)
            .marked("as asked", |row| Some((Standing::of(row.1? > 1.0), "1.0")))
    }

    #[test]
    fn columns_are_as_wide_as_they_have_to_be_and_what_is_unknown_is_a_dash() {
        let rows = [("b\u{7}d", Some(12_345.678)), ("longer", None)];
        assert_eq!(
            table(&rows).to_string(),
            "name       IOPS  as asked\n\
             b\u{fffd}d     12345.7     ✓ 1.0\n\
             longer        -         -\n"
        );
    }

    #[test]
    fn page_and_program_have_the_same_figures() {
        let rows = [("<b>", Some(0.25))];
        let page = table(&rows).html(|_| Some("ours")).into_string();
        assert!(page.contains("<tr class=\"ours\"><th scope=\"row\">&lt;b&gt;</th><td>0.2</td>"));
        assert!(page.contains("<span class=\"fail\">✗</span> 1.0"), "{page}");
        let expected = serde_json::json!([{"name": "<b>", "IOPS": 0.25, "as asked": "✗ 1.0"}]);
        assert_eq!(table(&rows).json(), expected);
        assert!(table(&[("x", None)]).json()[0]["IOPS"].is_null());
    }
}
