use super::marks::{judge, plot, rows, text};
use super::*;
use crate::verdict::Outcome;

const MACHINE: Machine = Machine { load1: 0.0, busy_cores: 1.0, steal_cores: 0.0 };

fn case(medium: Medium, queues: usize, depth: usize) -> Case {
    Case { medium, operation: Operation::Read, queues, depth }
}

/// A cell with the IOPS, CPU per request and p99.99 that are given.
fn cell(case: Case, server: ServerKind, numbers: (f64, f64, f64)) -> Cell {
    let (iops, cpu_us, p9999_us) = numbers;
    Cell {
        key: CellKey { case, server, iothreads: 1, repetition: 0 },
        n: 1_000_000,
        seconds: 4.0,
        iops,
        mean_us: 1.0,
        p50_us: 1.0,
        p99_us: 1.0,
        p999_us: 1.0,
        p9999_us,
        max_us: 1.0,
        cpu_us: (server != ServerKind::File).then_some(cpu_us),
        client_us: 1.0,
        idle_cores: None,
        machine: MACHINE,
        cpus: 2,
    }
}

fn verdicts(cells: &[Cell]) -> Vec<(char, Outcome)> {
    let judged = judge(&rows(cells));
    judged.iter().map(|verdict| (verdict.mark.chars().nth(1).unwrap(), verdict.outcome)).collect()
}

use ServerKind::{File as OnFile, Qsd, Rtvirtio};

#[test]
fn mark_a_needs_throughput_and_cpu() {
    let judged = |queues, iops, cpu| {
        let case = case(Medium::Ram, queues, 32);
        let ours = cell(case, Rtvirtio, (iops, cpu, 10.0));
        verdicts(&[ours, cell(case, Qsd, (100.0, 10.0, 100.0))])[0]
    };
    assert_eq!(judged(1, 190.0, 5.5), ('a', Outcome::Passed));
    assert_eq!(judged(1, 189.0, 5.5), ('a', Outcome::Lost));
    assert_eq!(judged(4, 240.0, 5.5), ('a', Outcome::Lost));
    assert_eq!(judged(4, 250.0, 5.6), ('a', Outcome::Lost));
}

#[test]
fn mark_b_is_judged_while_cpus_are_idle_only() {
    let case = case(Medium::Tmpfs, 1, 1);
    let ours = cell(case, Rtvirtio, (340.0, 1.0, 1.0));
    let mut peer = cell(case, Qsd, (100.0, 1.0, 1.0));
    assert_eq!(verdicts(&[ours.clone(), peer.clone()]), [('b', Outcome::Passed)]);
    peer.machine.busy_cores = 1.9;
    assert_eq!(verdicts(&[ours, peer]), [('b', Outcome::NotJudged)]);
}

#[test]
fn mark_c_accepts_the_disks_limit_and_wants_quiet() {
    let case = case(Medium::Disk, 1, 32);
    let peer = cell(case, Qsd, (100.0, 10.0, 1.0));
    let mut ours = cell(case, Rtvirtio, (96.0, 10.0, 1.0));
    assert_eq!(verdicts(&[ours.clone(), peer.clone()]), [('c', Outcome::Lost)]);
    let file = cell(case, OnFile, (100.0, 0.0, 1.0));
    assert_eq!(verdicts(&[ours.clone(), peer.clone(), file.clone()]), [('c', Outcome::Passed)]);
    ours.idle_cores = Some(0.02);
    assert_eq!(verdicts(&[ours, peer, file]), [('c', Outcome::Lost)]);
}

#[test]
fn mark_d_needs_a_million_requests() {
    let case = case(Medium::Ram, 4, 32);
    let peer = cell(case, Qsd, (100.0, 10.0, 1000.0));
    let mut ours = cell(case, Rtvirtio, (300.0, 5.0, 100.0));
    assert_eq!(verdicts(&[ours.clone(), peer.clone()])[1], ('d', Outcome::Passed));
    ours.n = 999_999;
    assert_eq!(verdicts(&[ours, peer])[1], ('d', Outcome::NotJudged));
}

#[test]
fn medians_are_of_repetitions() {
    let case = case(Medium::Ram, 1, 1);
    let cells = [100.0, 900.0, 200.0].map(|iops| cell(case, Qsd, (iops, 1.0, 1.0)));
    let rows = rows(&cells);
    assert_eq!((rows.len(), rows[0].key), (1, (case, Qsd, 1)));
    assert_eq!((rows[0].n(), rows[0].median(|cell| cell.iops)), (3, 200.0));
}

#[test]
fn servers_take_turns_and_ram_has_no_fixed_buffers_nor_file() {
    let benchmark: Benchmark = crate::experiment::of(&["--cases=ram", "--repetitions=2"]);
    let keys = benchmark.keys().unwrap();
    assert_eq!(keys.len(), 8 * 2 * 2);
    let first: Vec<_> = keys.iter().step_by(2).take(3).map(|k| k.server).collect();
    assert_eq!(first, [Rtvirtio, Qsd, Rtvirtio]);
    // The second repetition starts with the other one.
    assert_eq!(keys[16].server, Qsd);
}

#[test]
fn cells_of_another_window_are_none_of_these() {
    let of = crate::experiment::of::<Benchmark>;
    let of_4_s = cell(case(Medium::Ram, 1, 1), Qsd, (100.0, 1.0, 1.0));
    assert_eq!(of(&[]).foreign(&of_4_s), None);
    assert_eq!(of(&["--seconds=2"]).foreign(&of_4_s), Some("another --seconds"));
    // Of 4 queues at depth 32 the requests behind p99.99 are waited for.
    let tail = cell(case(Medium::Ram, 4, 32), Qsd, (100.0, 1.0, 1.0));
    let tail = Cell { seconds: 20.0, ..tail };
    assert_eq!(of(&[]).foreign(&tail), None);
    assert_eq!(of(&["--quick"]).foreign(&tail), Some("another --seconds"));
}

#[test]
fn table_and_plot_show_ratios_and_marks() {
    let case = case(Medium::Ram, 1, 32);
    let cells = [cell(case, Rtvirtio, (200.0, 5.0, 10.0)), cell(case, Qsd, (100.0, 10.0, 100.0))];
    let text = text(&rows(&cells));
    assert!(text.contains("pass       (a) ram randread 1q d32     rtvirtio"), "{text}");
    assert!(text.contains("2.00   0.50     0.100"), "{text}");
    let drawing = plot(&rows(&cells));
    assert!(drawing.starts_with("<svg xmlns") && drawing.contains("ram randread 1q d32"));
}
