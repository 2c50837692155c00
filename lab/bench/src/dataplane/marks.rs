//! The four marks against qemu-storage-daemon, row by row.
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

use std::collections::{BTreeMap, BTreeSet};

use super::server::ServerKind;
use super::{Case, Cell, MIN_FOR_TAIL, Medium};

/// Of the file's IOPS: at the disk's limit.
const AT_LIMIT: f64 = 0.95;
/// Of all CPUs.
const IDLE_SHARE: f64 = 0.25;

/// A mark's outcome in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Reached.
    Passed,
    /// Missed.
    Lost,
    /// The run cannot tell.
    NotJudged,
}

/// A mark in a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// `(a)` to `(d)`.
    pub mark: char,
    /// The row.
    pub case: Case,
    /// Ours.
    pub server: ServerKind,
    /// The outcome.
    pub verdict: Verdict,
    /// Measured and wanted.
    pub why: String,
}

/// Medians of one server in one case.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Medians {
    /// Repetitions.
    pub runs: usize,
    /// The least requests of a repetition.
    pub n: u64,
    /// Requests per second.
    pub iops: f64,
    /// Mean latency, µs.
    pub mean_us: f64,
    /// 99 %.
    pub p99_us: f64,
    /// 99.9 %.
    pub p999_us: f64,
    /// 99.99 %.
    pub p9999_us: f64,
    /// CPU of the server for each request, µs.
    pub cpu_us: Option<f64>,
    /// CPU of the client for each request, µs.
    pub client_us: f64,
    /// Cores when idle.
    pub idle_cores: Option<f64>,
    /// Busy cores of the machine.
    pub busy_cores: f64,
    /// Cores that the hypervisor took.
    pub steal_cores: f64,
    /// CPUs of the machine.
    pub cpus: usize,
}

/// By case, then by server and IOThreads.
pub type Rows = BTreeMap<Case, BTreeMap<(ServerKind, usize), Medians>>;

/// Medians of all cells.
#[must_use]
pub fn rows(cells: &[Cell]) -> Rows {
    let mut groups: BTreeMap<(Case, (ServerKind, usize)), Vec<&Cell>> = BTreeMap::new();
    for cell in cells {
        let key = &cell.key;
        groups.entry((key.case, (key.server, key.iothreads))).or_default().push(cell);
    }
    let mut rows = Rows::new();
    for ((case, server), cells) in groups {
        rows.entry(case).or_default().insert(server, medians(&cells));
    }
    rows
}

fn medians(cells: &[&Cell]) -> Medians {
    let of = |value: &dyn Fn(&Cell) -> f64| median(cells.iter().map(|c| value(c)).collect());
    let known = |value: &dyn Fn(&Cell) -> Option<f64>| {
        let values: Vec<f64> = cells.iter().filter_map(|c| value(c)).collect();
        (!values.is_empty()).then(|| median(values))
    };
    Medians {
        runs: cells.len(),
        n: cells.iter().map(|c| c.n).min().unwrap_or(0),
        iops: of(&|c| c.iops),
        mean_us: of(&|c| c.mean_us),
        p99_us: of(&|c| c.p99_us),
        p999_us: of(&|c| c.p999_us),
        p9999_us: of(&|c| c.p9999_us),
        cpu_us: known(&|c| c.cpu_us),
        client_us: of(&|c| c.client_us),
        idle_cores: known(&|c| c.idle_cores),
        busy_cores: of(&|c| c.machine.busy_cores),
        steal_cores: of(&|c| c.machine.steal_cores),
        cpus: cells.first().map_or(1, |c| c.cpus),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

/// Judges every row that has ours and qemu-storage-daemon.
#[must_use]
pub fn judge(rows: &Rows) -> Vec<Judgement> {
    let mut all = Vec::new();
    for (case, servers) in rows {
        let Some(peer) = servers.get(&(ServerKind::Qsd, 1)) else { continue };
        let file = servers.get(&(ServerKind::File, 1));
        let ours: BTreeSet<_> = servers.keys().filter(|(s, t)| s.is_ours() && *t == 1).collect();
        for key in ours {
            let row = Row { case: *case, server: key.0, ours: &servers[key], peer, file };
            row.judge(&mut all);
        }
    }
    all.sort_by_key(|j| (j.mark, j.case, j.server));
    all
}

struct Row<'a> {
    case: Case,
    server: ServerKind,
    ours: &'a Medians,
    peer: &'a Medians,
    file: Option<&'a Medians>,
}

impl Row<'_> {
    fn judge(&self, all: &mut Vec<Judgement>) {
        let in_memory = matches!(self.case.medium, Medium::Ram | Medium::Tmpfs);
        if in_memory && self.case.depth == 32 {
            all.push(self.throughput());
        }
        if in_memory && self.case.depth == 1 {
            all.push(self.latency());
        }
        if self.case.medium == Medium::Disk {
            all.push(self.disk());
        }
        if self.case.has_tail() {
            all.push(self.tail());
        }
    }

    fn judgement(&self, mark: char, verdict: Verdict, why: String) -> Judgement {
        Judgement { mark, case: self.case, server: self.server, verdict, why }
    }

    fn iops(&self) -> f64 {
        self.ours.iops / self.peer.iops
    }

    fn cpu(&self) -> Option<f64> {
        Some(self.ours.cpu_us? / self.peer.cpu_us?)
    }

    fn throughput(&self) -> Judgement {
        let wanted = if self.case.queues == 1 { 1.9 } else { 2.5 };
        let (iops, cpu) = (self.iops(), self.cpu().unwrap_or(f64::NAN));
        let why = format!("IOPS x {iops:.2} (>= {wanted}), CPU/IO x {cpu:.2} (<= 0.55)");
        self.judgement('a', passed(iops >= wanted && cpu <= 0.55), why)
    }

    fn latency(&self) -> Judgement {
        let idle = 1.0 - self.peer.busy_cores / self.peer.cpus as f64;
        let iops = self.iops();
        let verdict = if idle < IDLE_SHARE { Verdict::NotJudged } else { passed(iops >= 3.3) };
        let why =
            format!("IOPS x {iops:.2} (>= 3.3), {:.0} % of CPUs idle under qsd", idle * 100.0);
        self.judgement('b', verdict, why)
    }

    fn disk(&self) -> Judgement {
        let (iops, cpu) = (self.iops(), self.cpu().unwrap_or(f64::NAN));
        let limit = self.file.map(|f| self.ours.iops / f.iops);
        let fast = iops >= 1.0 || limit.is_some_and(|l| l >= AT_LIMIT);
        let quiet = self.ours.idle_cores.is_none_or(|cores| cores < 0.01);
        let mut why = format!("CPU/IO x {cpu:.2} (<= 1), IOPS x {iops:.2} (>= 1");
        if let Some(limit) = limit {
            why += &format!(" or {AT_LIMIT} of the file's: {limit:.2}");
        }
        why += ")";
        if let Some(cores) = self.ours.idle_cores {
            why += &format!(", idle {:.2} % (< 1)", cores * 100.0);
        }
        self.judgement('c', passed(cpu <= 1.0 && fast && quiet), why)
    }

    fn tail(&self) -> Judgement {
        let ratio = self.ours.p9999_us / self.peer.p9999_us;
        let n = self.ours.n.min(self.peer.n);
        let verdict = if n < MIN_FOR_TAIL { Verdict::NotJudged } else { passed(ratio <= 0.1) };
        let why = format!("p99.99 x {ratio:.3} (<= 0.1), n = {n} (>= {MIN_FOR_TAIL})");
        self.judgement('d', verdict, why)
    }
}

const fn passed(passed: bool) -> Verdict {
    if passed { Verdict::Passed } else { Verdict::Lost }
}
