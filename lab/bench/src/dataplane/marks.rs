//! The table, row by row, and the four marks against qemu-storage-daemon.
//!
//! (a) depth 32, RAM and tmpfs: ≥ 1.9 × its IOPS with 1 queue, ≥ 2.5 × with 4, at
//! ≤ 0.55 × its CPU per request. (b) depth 1, RAM and tmpfs: ≥ 3.3 × its IOPS
//! while CPUs are idle. (c) disk: CPU per request ≤ its own, IOPS ahead or at the
//! disk's limit, < 1 % of a core when idle. (d) p99.99 with 4 queues at depth 32
//! ≤ 0.1 × its own, both of at least 10⁶ requests in each repetition.
//!
//! *At the disk's limit* is 95 % of what io_uring gets from the file without a
//! server. *CPUs are idle* when, while qemu-storage-daemon serves, a quarter of
//! the machine does nothing: a row without is *not judged*.

use rtvirtio_testbed::server::ServerKind;

use super::{Case, Cell, MIN_FOR_TAIL, Medium};
use crate::plot::{Bar, Bars, sheet};
use crate::stats::{Runs, Spread, distinct, runs};
use crate::table::Table;
use crate::verdict::{self, Outcome, Verdict};

/// Of the file's IOPS: at the disk's limit.
const AT_LIMIT: f64 = 0.95;
/// Of all CPUs.
const IDLE_SHARE: f64 = 0.25;
/// Of one IOThread's IOPS: what two are to have.
const SCALING: f64 = 1.7;

/// Cells of one server in one case, with so many IOThreads.
pub(super) type Row<'a> = Runs<'a, (Case, ServerKind, usize), Cell>;

/// All rows, in the order of tables.
pub(super) fn rows(cells: &[Cell]) -> Vec<Row<'_>> {
    let mut rows = runs(cells, |cell| (cell.key.case, cell.key.server, cell.key.iothreads));
    rows.sort_by_key(|row| row.key);
    rows
}

fn find<'a, 'c>(rows: &'a [Row<'c>], of: (Case, ServerKind, usize)) -> Option<&'a Row<'c>> {
    rows.iter().find(|row| row.key == of)
}

/// qemu-storage-daemon in the same case.
fn peer<'a, 'c>(rows: &'a [Row<'c>], row: &Row<'_>) -> Option<&'a Row<'c>> {
    find(rows, (row.key.0, ServerKind::Qsd, 1)).filter(|_| row.key.1 != ServerKind::Qsd)
}

/// A row's median by that of qemu-storage-daemon.
fn ratio(rows: &[Row<'_>], row: &Row<'_>, of: fn(&Cell) -> Option<f64>) -> Option<f64> {
    Some(row.known(of)? / peer(rows, row)?.known(of)?)
}

/// Medians of each server in each case, and how they compare with qemu-storage-daemon's.
pub(super) fn table<'a>(rows: &'a [Row<'a>]) -> Table<'a, Row<'a>> {
    Table::of(rows)
        .text("case", |row| row.key.0.name())
        .text("server", |row| super::label(&row.cells[0].key))
        .figure("IOPS", 0, |row| row.median(|cell| cell.iops))
        .figure("mean us", 1, |row| row.median(|cell| cell.mean_us))
        .figure("p99 us", 0, |row| row.median(|cell| cell.p99_us))
        .figure("p99.9 us", 0, |row| row.median(|cell| cell.p999_us))
        .figure("p99.99 us", 0, |row| row.median(|cell| cell.p9999_us))
        .figure("CPU/IO us", 2, |row| row.known(|cell| cell.cpu_us))
        .figure("client us", 2, |row| row.median(|cell| cell.client_us))
        .figure("idle %", 2, |row| row.known(|cell| Some(cell.idle_cores? * 100.0)))
        .figure("busy", 2, |row| row.median(|cell| cell.machine.busy_cores))
        .figure("steal", 2, |row| row.median(|cell| cell.machine.steal_cores))
        .figure("x IOPS", 2, |row| ratio(rows, row, |cell| Some(cell.iops)))
        .figure("x CPU", 2, |row| ratio(rows, row, |cell| cell.cpu_us))
        .figure("x p99.99", 3, |row| ratio(rows, row, |cell| Some(cell.p9999_us)))
}

/// The table with what it says, and the marks.
pub(super) fn text(rows: &[Row<'_>]) -> String {
    let least = rows.iter().map(Runs::n).min().unwrap_or(0);
    format!(
        "{}\nMedians of {least} or more. CPU/IO and idle: of the server; client: CPU of the client for \
         each request; busy and steal: of the machine, cores; x: against qemu-storage-daemon.\n\
         file: io_uring on the file from the client, without a server.\n\n{}",
        table(rows),
        verdict::lines(&judge(rows))
    )
}

/// Bars of IOPS and of CPU for each request.
pub(super) fn plot(rows: &[Row<'_>]) -> String {
    let servers = distinct(rows.iter().map(|row| row.key.1.name()));
    let colour = |row: &Row<'_>| servers.iter().position(|name| *name == row.key.1.name());
    let panel = |x, of: fn(&Cell) -> Option<f64>| {
        let bar = |row: &Row<'_>| Bar {
            name: row.key.0.name(),
            colour: colour(row).unwrap_or(0),
            value: row.known(of).map(|value| Spread::new(value, value, value)),
            hint: super::label(&row.cells[0].key),
            ..Bar::default()
        };
        let rows: Vec<Bar> = rows.iter().map(bar).collect();
        // The least has some length too.
        let least = rows.iter().filter_map(|bar| bar.value).map(|value| value.value / 1.5);
        let ends = vec![least.fold(f64::INFINITY, f64::min)];
        Bars { title: String::new(), x, is_log: true, ends, width: 520.0, rows }.draw()
    };
    let panels = [
        panel("IOPS", |cell| Some(cell.iops)),
        panel("server CPU per request, us", |cell| cell.cpu_us),
    ];
    sheet(&servers.iter().copied().zip(0..).collect::<Vec<_>>(), 2, &panels)
}

/// Judges every row that has ours and qemu-storage-daemon, mark by mark, and what a second IOThread brings.
pub(super) fn judge(rows: &[Row<'_>]) -> Vec<Verdict> {
    let mut all = Vec::new();
    for ours in rows.iter().filter(|row| row.key.1.is_ours() && row.key.2 == 1) {
        let case = ours.key.0;
        if let Some(peer) = peer(rows, ours) {
            let file = find(rows, (case, ServerKind::File, 1));
            all.extend(Compared { case, ours, peer, file }.judge());
        }
        if let Some(two) = find(rows, (case, ours.key.1, 2)).filter(|_| case.medium == Medium::Burn)
        {
            let ratio = two.median(|cell| cell.iops) / ours.median(|cell| cell.iops);
            let why = format!(
                "2 IOThreads have x {ratio:.2} the IOPS of 1 (>= {SCALING}). qemu-storage-daemon is not in this \
                 table: its export cannot use a second IOThread, and none of its drivers costs CPU for a request"
            );
            let mark = format!("Scaling {}", case.name());
            all.push(Verdict::of(mark, Some(ratio >= SCALING), why));
        }
    }
    all.sort_by(|a, b| a.mark.cmp(&b.mark));
    all
}

struct Compared<'a> {
    case: Case,
    ours: &'a Row<'a>,
    peer: &'a Row<'a>,
    file: Option<&'a Row<'a>>,
}

impl Compared<'_> {
    fn judge(&self) -> Vec<Verdict> {
        let in_memory = matches!(self.case.medium, Medium::Ram | Medium::Tmpfs);
        let asked = [
            (in_memory && self.case.depth == 32).then(|| self.throughput()),
            (in_memory && self.case.depth == 1).then(|| self.latency()),
            (self.case.medium == Medium::Disk).then(|| self.disk()),
            self.case.has_tail().then(|| self.tail()),
        ];
        asked.into_iter().flatten().collect()
    }

    fn verdict(&self, mark: char, outcome: Outcome, why: String) -> Verdict {
        let (case, server) = (self.case.name(), self.ours.key.1.name());
        Verdict::new(format!("({mark}) {case:<23} {server:<14}"), outcome, why)
    }

    fn iops(&self) -> f64 {
        self.ours.median(|cell| cell.iops) / self.peer.median(|cell| cell.iops)
    }

    fn cpu(&self) -> f64 {
        let of = |row: &Row<'_>| row.known(|cell| cell.cpu_us).unwrap_or(f64::NAN);
        of(self.ours) / of(self.peer)
    }

    fn throughput(&self) -> Verdict {
        let wanted = if self.case.queues == 1 { 1.9 } else { 2.5 };
        let (iops, cpu) = (self.iops(), self.cpu());
        let why = format!("IOPS x {iops:.2} (>= {wanted}), CPU/IO x {cpu:.2} (<= 0.55)");
        self.verdict('a', Outcome::of(iops >= wanted && cpu <= 0.55), why)
    }

    fn latency(&self) -> Verdict {
        let busy = self.peer.median(|cell| cell.machine.busy_cores);
        let idle = 1.0 - busy / self.peer.cells[0].cpus as f64;
        let iops = self.iops();
        let can_tell = idle >= IDLE_SHARE;
        let outcome = if can_tell { Outcome::of(iops >= 3.3) } else { Outcome::NotJudged };
        let why =
            format!("IOPS x {iops:.2} (>= 3.3), {:.0} % of CPUs idle under qsd", idle * 100.0);
        self.verdict('b', outcome, why)
    }

    fn disk(&self) -> Verdict {
        let (iops, cpu) = (self.iops(), self.cpu());
        let limit = self
            .file
            .map(|file| self.ours.median(|cell| cell.iops) / file.median(|cell| cell.iops));
        let idle = self.ours.known(|cell| cell.idle_cores);
        let fast = iops >= 1.0 || limit.is_some_and(|l| l >= AT_LIMIT);
        let quiet = idle.is_none_or(|cores| cores < 0.01);
        let mut why = format!("CPU/IO x {cpu:.2} (<= 1), IOPS x {iops:.2} (>= 1");
        if let Some(limit) = limit {
            why += &format!(" or {AT_LIMIT} of the file's: {limit:.2}");
        }
        why += ")";
        if let Some(cores) = idle {
            why += &format!(", idle {:.2} % (< 1)", cores * 100.0);
        }
        self.verdict('c', Outcome::of(cpu <= 1.0 && fast && quiet), why)
    }

    fn tail(&self) -> Verdict {
        let p9999 = |row: &Row<'_>| row.median(|cell| cell.p9999_us);
        let ratio = p9999(self.ours) / p9999(self.peer);
        let n = self.ours.cells.iter().chain(&self.peer.cells).map(|cell| cell.n).min();
        let n = n.unwrap_or(0);
        let outcome = if n < MIN_FOR_TAIL { Outcome::NotJudged } else { Outcome::of(ratio <= 0.1) };
        let why = format!("p99.99 x {ratio:.3} (<= 0.1), n = {n} (>= {MIN_FOR_TAIL})");
        self.verdict('d', outcome, why)
    }
}
