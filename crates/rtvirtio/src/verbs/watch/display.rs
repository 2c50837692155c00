//! What a look looks like: a table on a terminal, lines elsewhere.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Result;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, List, Row as TableRow, Table};
use ratatui::{DefaultTerminal, Frame};
use rtvirtio_spec::run::MeasuredAt;

use super::{DeviceRow, DiskRow, Look, Row, RowTarget, Tails};

/// How many of the last events are shown.
const EVENTS: usize = 8;

const HEADER: [&str; 10] =
    ["VM", "task, disk", "at", "p50", "p99", "p99.9", "p99.99", "target", "misses", "rate"];

/// The terminal, restored when dropped.
pub(super) struct Display {
    terminal: DefaultTerminal,
    events: VecDeque<String>,
}

impl Display {
    pub(super) fn start() -> Result<Self> {
        Ok(Self { terminal: ratatui::try_init()?, events: VecDeque::new() })
    }

    /// Draws a look; true once the user wants to leave.
    pub(super) fn draw(&mut self, look: &Look) -> Result<bool> {
        for event in &look.events {
            self.events.push_back(format!("{:>7.1} s  {event}", look.at_s));
        }
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
        let events = &self.events;
        self.terminal.draw(|frame| draw(frame, look, events))?;
        while event::poll(Duration::ZERO)? {
            if let Event::Key(key) = event::read()? {
                let is_ctrl_c =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                if is_ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn draw(frame: &mut Frame<'_>, look: &Look, events: &VecDeque<String>) {
    let rows = look.tasks.iter().map(|row| {
        let style = if row.misses > 0 { Style::new().fg(Color::Yellow) } else { Style::new() };
        TableRow::new(cells(row).map(Cell::from)).style(style)
    });
    let disks = look.disks.iter().map(|row| TableRow::new(disk_cells(row).map(Cell::from)));
    let devices =
        look.data_plane.iter().map(|row| TableRow::new(device_cells(row).map(Cell::from)));
    let widths = [14, 12, 10, 9, 9, 9, 9, 16, 12, 30].map(Constraint::Length);
    let title =
        format!(" rtvirtio watch  {:.0} s  {} VMs  q leaves ", look.at_s, look.present.len());
    let table = Table::new(rows.chain(disks).chain(devices), widths)
        .header(TableRow::new(HEADER.map(|h| Cell::from(h.bold()))))
        .block(Block::bordered().title(title));
    let parts = Layout::vertical([Constraint::Min(4), Constraint::Length(EVENTS as u16 + 2)]);
    let [top, bottom] = parts.areas(frame.area());
    frame.render_widget(table, top);
    let lines = events.iter().map(|e| Line::from(e.as_str()));
    frame.render_widget(List::new(lines).block(Block::bordered().title(" events ")), bottom);
}

/// A look as lines of text.
pub(super) fn text(look: &Look) -> String {
    let mut lines = vec![format!("{:.0} s", look.at_s)];
    lines.extend(look.events.iter().map(|e| format!("  * {e}")));
    let rows = look.tasks.iter().map(cells).chain(look.disks.iter().map(disk_cells));
    let rows = rows.chain(look.data_plane.iter().map(device_cells));
    for [vm, task, at, p50, p99, p999, p9999, target, misses, rate] in rows {
        lines.push(format!(
            "  {vm:<12} {task:<10} {at:<10} p50 {p50:>9} p99 {p99:>9} p99.9 {p999:>9} p99.99 \
             {p9999:>9} target {target:<14} misses {misses:<10} {rate}"
        ));
    }
    lines.join("\n")
}

/// Percentiles as text.
fn tail_cells(tails: &Tails) -> [String; 4] {
    tails.map(|t| t.map_or_else(|| "too few".to_owned(), |q| q.value.to_string()))
}

/// Where a latency was taken.
fn at(measured_at: MeasuredAt) -> String {
    let at = serde_json::to_value(measured_at).ok();
    at.and_then(|v| v.as_str().map(|at| at.replace('-', " "))).unwrap_or_default()
}

fn target_cell(target: Option<RowTarget>) -> String {
    target.map_or_else(|| "-".to_owned(), |t| format!("p{} {}", t.percentile, t.latency))
}

fn cells(row: &Row) -> [String; 10] {
    let target = target_cell(row.target);
    let rate = match row.wanted_iops {
        Some(wanted) => format!("{:.0} of {wanted:.0}/s", row.iops),
        None => format!("{:.0}/s", row.iops),
    };
    let [p50, p99, p999, p9999] = tail_cells(&row.tails);
    let misses = format!("{}/{}", row.misses, row.requests);
    let (vm, task) = (row.vm.to_string(), row.task.to_string());
    [vm, task, at(row.measured_at), p50, p99, p999, p9999, target, misses, rate]
}

fn disk_cells(row: &DiskRow) -> [String; 10] {
    let [p50, p99, p999, p9999] = tail_cells(&row.tails);
    let none = || "-".to_owned();
    let rate = format!("{:.0}/s", row.iops);
    let (vm, disk) = (row.vm.to_string(), row.disk.to_string());
    [vm, disk, at(row.measured_at), p50, p99, p999, p9999, none(), none(), rate]
}

fn device_cells(row: &DeviceRow) -> [String; 10] {
    let [p50, p99, p999, p9999] = tail_cells(&row.tails);
    let misses = match row.target {
        Some(_) => format!("{}/{}", row.misses, row.requests),
        None => "-".to_owned(),
    };
    let iothreads: Vec<&str> = row.iothreads.iter().map(|n| n.as_str()).collect();
    let of = match row.connected {
        true => format!("{} in flight, {}", row.in_flight, iothreads.join(" ")),
        false => "no front end".to_owned(),
    };
    let rate = format!("{:.0}/s, {of}", row.iops);
    let (vm, device) = (row.vm.to_string(), row.device.to_string());
    let (at, target) = (at(row.measured_at), target_cell(row.target));
    [vm, device, at, p50, p99, p999, p9999, target, misses, rate]
}
