//! For a terminal.

use super::Campaign;
use super::judge::{Row, judge, name, rows};
use super::simulated::{self, Compared};

/// A row for each phase and policy, what is in doubt, and what came of each mark.
#[must_use]
pub fn table(campaign: &Campaign, compared: Option<&[Compared]>) -> String {
    let Campaign { cells, alone, .. } = campaign;
    let mut text = format!(
        "{:<12} {:<9} {:>4} {:>8} {:>8} {:>6} {:>6} {:>9} {:>9} {:>9} {:>13} {:>8} {:>6} {:>9} {:>5} {:>4} {:>4} {:>7} {:>7}\n",
        "phase",
        "policy",
        "runs",
        "n",
        "IOPS",
        "cores",
        "ran",
        "IOPS/core",
        "p50 us",
        "p99 us",
        "95 %",
        "compute",
        "of",
        "vCPU wait",
        "moves",
        "add",
        "rem",
        "rest ms",
        "utility"
    );
    text.extend(rows(cells).iter().map(line));
    let again = rows(alone);
    if !again.is_empty() {
        text += "Alone, for their p99:\n";
        text.extend(again.iter().map(line));
    }
    text.push('\n');
    for cell in cells.iter().chain(alone) {
        let key = cell.key;
        let label = format!("{}, repetition {}", key.label(), key.repetition);
        if let Some(why) = &cell.failed {
            text += &format!("FAILED {label}: {why}\n");
        } else if let Some(why) = &cell.doubt {
            let machine = &cell.machine;
            text += &format!(
                "In doubt: {label}: {why}; load {:.2}, {:.2} CPUs busy, {:.3} stolen\n",
                machine.load1, machine.busy_cores, machine.steal_cores
            );
        }
    }
    if let Some(compared) = compared {
        text += "\nThe simulator beside it:\n";
        text += &simulated::table(compared);
        text.push('\n');
    }
    let verdicts = judge(campaign).into_iter().chain(compared.map(simulated::judge));
    text.extend(verdicts.map(|verdict| format!("{verdict}\n")));
    text += "\nMedians of runs. n: the least. 95 %: the interval of the p99's rank in a run. cores: IOThreads, mean; ran: what they had of CPUs. \
             compute, of: CPUs' worth of it, and what the VMs would have alone. rest: after the phase's \
             start, until throughput was within 5 % of its second half. utility: I/O and compute as parts \
             of the best run's on that seed, less 0.2 a core. In doubt: a thread that slept woke late, \
             which full CPUs can do too; such cells count.\n";
    text
}

fn line(row: &Row) -> String {
    let latency = |us: f64| if row.n == 0 { "-".to_owned() } else { format!("{us:.0}") };
    format!(
        "{:<12} {:<9} {:>4} {:>8} {:>8.0} {:>6.2} {:>6.2} {:>9.0} {:>9} {:>9} {:>13} {:>8.2} {:>6.2} {:>9.2} {:>5.0} {:>4.0} {:>4.0} {:>7} {:>7.3}\n",
        name(row.kind),
        row.policy,
        row.runs,
        row.n,
        row.iops,
        row.io_cores,
        row.io_ran,
        row.iops_per_core,
        latency(row.p50_us),
        latency(row.p99_us),
        row.p99_interval_us.map(latency).join("-"),
        row.computed,
        row.compute_wanted,
        row.vcpus_waited,
        row.moves,
        row.added,
        row.removed,
        row.rest_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0}")),
        row.utility,
    )
}
