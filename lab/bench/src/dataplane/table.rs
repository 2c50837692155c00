//! The table for a terminal: rows, ratios to qemu-storage-daemon, the marks.

use std::fmt::Write as _;

use super::marks::{Medians, Rows, Verdict, judge, rows};
use super::server::ServerKind;
use super::{Cell, Medium};

/// Widths of the columns; the first two are flush left.
const COLUMNS: [(&str, usize); 15] = [
    ("case", 24),
    ("server", 16),
    ("IOPS", 8),
    ("mean us", 8),
    ("p99 us", 9),
    ("p99.9 us", 9),
    ("p99.99 us", 10),
    ("CPU/IO us", 9),
    ("client us", 9),
    ("idle %", 7),
    ("busy", 6),
    ("steal", 6),
    ("x IOPS", 7),
    ("x CPU", 6),
    ("x p99.99", 8),
];

/// The whole text.
#[must_use]
pub fn render(cells: &[Cell]) -> String {
    let rows = rows(cells);
    let mut text = String::new();
    line(&mut text, COLUMNS.map(|c| c.0.to_owned()));
    for (case, servers) in &rows {
        let peer = servers.get(&(ServerKind::Qsd, 1));
        for (&(server, threads), medians) in servers {
            let mut name = server.name().to_owned();
            if threads > 1 || case.medium == Medium::Burn {
                let _ = write!(name, " x{threads}");
            }
            let peer = peer.filter(|_| server != ServerKind::Qsd);
            line(&mut text, row(&case.name(), &name, medians, peer));
        }
    }
    let runs = rows.values().flat_map(|s| s.values()).map(|m| m.runs).min().unwrap_or(0);
    let _ = writeln!(
        text,
        "\nMedians of {runs} or more. CPU/IO and idle: of the server; client: CPU of the client for \
         each request; busy and steal: of the machine, cores; x: against qemu-storage-daemon.\n\
         file: io_uring on the file from the client, without a server."
    );
    scaling(&mut text, &rows);
    let judged = judge(&rows);
    if !judged.is_empty() {
        text.push_str("\nMarks\n");
    }
    for j in &judged {
        let verdict = match j.verdict {
            Verdict::Passed => "pass",
            Verdict::Lost => "LOST",
            Verdict::NotJudged => "not judged",
        };
        let (case, server) = (j.case.name(), j.server.name());
        let _ = writeln!(text, "({}) {verdict:<10} {case:<24} {server:<16} {}", j.mark, j.why);
    }
    text
}

fn row(case: &str, name: &str, m: &Medians, peer: Option<&Medians>) -> [String; 15] {
    let number = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let ratio = |of: &dyn Fn(&Medians) -> Option<f64>| Some(of(m)? / of(peer?)?);
    [
        case.to_owned(),
        name.to_owned(),
        format!("{:.0}", m.iops),
        format!("{:.1}", m.mean_us),
        format!("{:.0}", m.p99_us),
        format!("{:.0}", m.p999_us),
        format!("{:.0}", m.p9999_us),
        number(m.cpu_us, 2),
        format!("{:.2}", m.client_us),
        number(m.idle_cores.map(|c| c * 100.0), 2),
        format!("{:.2}", m.busy_cores),
        format!("{:.2}", m.steal_cores),
        number(ratio(&|m| Some(m.iops)), 2),
        number(ratio(&|m| m.cpu_us), 2),
        number(ratio(&|m| Some(m.p9999_us)), 3),
    ]
}

fn line(text: &mut String, cells: [String; 15]) {
    let mut line = String::new();
    for (index, (cell, (_, width))) in cells.iter().zip(COLUMNS).enumerate() {
        let _ = if index < 2 {
            write!(line, "{cell:<width$} ")
        } else {
            write!(line, "{cell:>width$} ")
        };
    }
    let _ = writeln!(text, "{}", line.trim_end());
}

/// What a second IOThread brings.
fn scaling(text: &mut String, rows: &Rows) {
    for (case, servers) in rows.iter().filter(|(case, _)| case.medium == Medium::Burn) {
        let iops = |threads| servers.get(&(ServerKind::Rtvirtio, threads)).map(|m| m.iops);
        if let (Some(one), Some(two)) = (iops(1), iops(2)) {
            let verdict = if two / one >= 1.7 { "pass" } else { "LOST" };
            let _ = writeln!(
                text,
                "\nScaling: {verdict}  {}: 2 IOThreads have x {:.2} the IOPS of 1 (>= 1.7). \
                 qemu-storage-daemon is not in this table: its export cannot use a second \
                 IOThread, and none of its drivers costs CPU for a request.",
                case.name(),
                two / one
            );
        }
    }
}
