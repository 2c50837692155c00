//! What a look looks like: a table on a terminal, lines elsewhere.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, List, Row as TableRow, Table};
use ratatui::{DefaultTerminal, Frame};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::run::MeasuredAt;

use rtvirtio_controller::history::Tails;
use rtvirtio_controller::look::{DeviceRow, DiskRow, Look, Row, RowTarget};

use crate::output;

/// How many of the last events are shown.
const EVENTS: usize = 8;

/// How long after a signal a wait may go on.
const STEP: Duration = Duration::from_millis(100);

/// Columns that a narrow terminal has room for, with their widths: 80 columns with spaces and borders.
const NARROW: [(usize, u16); 7] = [(0, 11), (1, 10), (4, 8), (5, 8), (7, 14), (8, 9), (9, 12)];
/// All of them, and what a terminal must be as wide as.
const WIDE: [(usize, u16); 10] =
    [(0, 14), (1, 12), (2, 10), (3, 9), (4, 9), (5, 9), (6, 9), (7, 16), (8, 12), (9, 30)];
const WIDE_FROM: u16 = 120;

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

    /// Draws a look.
    pub(super) fn draw(&mut self, look: &Look) -> Result<()> {
        for event in &look.events {
            self.events.push_back(format!("{:>7.1} s  {event}", look.at_s));
        }
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
        let events = &self.events;
        self.terminal.draw(|frame| draw(frame, look, events))?;
        Ok(())
    }

    /// Waits; true once the user wants to leave, by a key, which Ctrl-C is here, or by a signal.
    pub(super) fn wait(&mut self, time: Duration, interrupted: &Interrupted) -> Result<bool> {
        let end = Instant::now() + time;
        loop {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if event::poll(left.min(STEP))? {
                if leaves(&event::read()?) {
                    return Ok(true);
                }
            } else if left.is_zero() {
                return Ok(false);
            }
        }
    }
}

/// Whether the user wants to leave.
fn leaves(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let is_ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    is_ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}

impl Drop for Display {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn draw(frame: &mut Frame<'_>, look: &Look, events: &VecDeque<String>) {
    let columns: &[(usize, u16)] = if frame.area().width < WIDE_FROM { &NARROW } else { &WIDE };
    let shown = |cells: [String; 10]| {
        TableRow::new(
            columns
                .iter()
                .map(|&(column, _)| Cell::from(cells[column].clone()))
                .collect::<Vec<_>>(),
        )
    };
    let rows = look.tasks.iter().map(|row| {
        let style = if row.misses > 0 { Style::new().fg(Color::Yellow) } else { Style::new() };
        shown(cells(row)).style(style)
    });
    let disks = look.disks.iter().map(|row| shown(disk_cells(row)));
    let devices = look.data_plane.iter().map(|row| shown(device_cells(row)));
    let widths = columns.iter().map(|&(_, width)| Constraint::Length(width));
    let title =
        format!(" rtvirtio watch  {:.0} s  {} VMs  q leaves ", look.at_s, look.present.len());
    let table = Table::new(rows.chain(disks).chain(devices), widths)
        .header(shown(HEADER.map(str::to_owned)).bold())
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
    lines.extend(look.events.iter().map(|e| format!("  * {}", output::visible(e))));
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
    let kept = row.promises.map(|promises| format!("; {promises}")).unwrap_or_default();
    let rate = format!("{:.0}/s, {of}{kept}", row.iops);
    let (vm, device) = (row.vm.to_string(), row.device.to_string());
    let (at, target) = (at(row.measured_at), target_cell(row.target));
    [vm, device, at, p50, p99, p999, p9999, target, misses, rate]
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyEvent;
    use rtvirtio_spec::latency::Histogram;
    use rtvirtio_units::{Nanos, Percentile, TaskName, VmName};

    use super::*;

    fn look() -> Look {
        let mut histogram = Histogram::new();
        histogram.record(Nanos::from_micros(10_510), 100_000);
        let tail = |p: f64| histogram.quantile(Percentile::new(p).unwrap());
        let row = Row {
            vm: VmName::new("database-1").unwrap(),
            task: TaskName::new("checkpoint").unwrap(),
            measured_at: MeasuredAt::Qemu,
            tails: [50.0, 99.0, 99.9, 99.99].map(tail),
            target: Some(RowTarget {
                percentile: Percentile::new(99.9).unwrap(),
                latency: Nanos::from_millis(5),
            }),
            misses: 12,
            requests: 99_999,
            iops: 510.0,
            wanted_iops: Some(500.0),
        };
        Look {
            at_s: 1.0,
            tasks: vec![row],
            disks: vec![],
            host_records_lost: 0,
            data_plane: vec![],
            present: Default::default(),
            change: None,
            events: vec![],
        }
    }

    #[test]
    fn keys_that_leave_are_q_escape_and_ctrl_c() {
        let is_left_by = |code, modifiers| leaves(&Event::Key(KeyEvent::new(code, modifiers)));
        assert!(is_left_by(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(is_left_by(KeyCode::Esc, KeyModifiers::NONE));
        assert!(is_left_by(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!is_left_by(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!leaves(&Event::Resize(80, 24)));
    }

    #[test]
    fn kept_promises_of_the_data_plane_are_shown() {
        use rtvirtio_spec::control::Had;

        let had = Had { kept: 99_988, late: 12, late_in_stalls: 3, ..Had::default() };
        let row = DeviceRow {
            vm: VmName::new("plc").unwrap(),
            device: rtvirtio_units::DiskName::new("root").unwrap(),
            measured_at: MeasuredAt::DataPlane,
            tails: [None; 4],
            target: None,
            misses: 0,
            requests: 100_000,
            iops: 500.0,
            in_flight: 1,
            iothreads: vec![],
            connected: true,
            promises: had.promises(),
        };
        let rate = device_cells(&row)[9].clone();
        // The upper 95 % limit of 12 is 19.4 (Poisson).
        let words = "12 of 100000 promised requests late (3 by stalls), ≥ 99.98";
        assert!(rate.contains(words) && rate.ends_with("% kept"), "{rate}");
        let none = DeviceRow { promises: Had::default().promises(), ..row };
        assert!(!device_cells(&none)[9].contains("promised"));
    }

    #[test]
    fn cells_are_whole_on_a_narrow_terminal_and_a_wide_one() {
        for (width, parts) in [
            (80, &["database-1", "checkpoint", "p99.9 5.00 ms", "12/99999", "510 of 500/s"][..]),
            (150, &["qemu", "p99.99", "p99.9 5.00 ms", "12/99999", "510 of 500/s"]),
        ] {
            let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
            terminal.draw(|frame| draw(frame, &look(), &VecDeque::new())).unwrap();
            let text = terminal.backend().to_string();
            for part in parts {
                assert!(text.contains(part), "{width}: {part}\n{text}");
            }
        }
    }
}
