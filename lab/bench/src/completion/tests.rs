use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_units::Nanos;

use super::judge::verdicts;
use super::*;
use crate::experiment::of;
use crate::verdict::{Outcome, Verdict};

/// A cell by hand: 2 CPUs, 3 s.
fn cell(io: Option<Io>, compute: usize, repetition: u32, iops: f64, rate: f64) -> Cell {
    let n = (iops * 3.0) as u64;
    let result = io.map(|_| IoResult {
        n,
        iops,
        mean_us: 1e6 / iops,
        p50_us: 10.0,
        p99_us: 50.0,
        p999_us: 80.0,
        max_us: 900.0,
        judged: (n >= 1_000)
            .then_some(Judged { percentile: if n >= 10_000 { 99.9 } else { 99.0 }, us: 80.0 }),
        spun: 0.5,
    });
    Cell {
        key: CellKey { io, compute, repetition },
        window_s: 3.0,
        seconds: 3.0,
        result,
        compute_rate: (compute > 0).then_some(rate),
        cpu: CpuSeconds { io: 1.0, compute: 2.0, process: 3.5 },
        cpus: 2,
        machine: Machine { load1: 2.5, busy_cores: 1.5, steal_cores: 0.25 },
        canary: Canary {
            n: 3_000,
            p50: Nanos::from_micros(60),
            p99: Nanos::from_millis(2),
            p999: Nanos::from_millis(2),
            max: Nanos::from_millis(9),
        },
        at: String::new(),
    }
}

fn io(target: Target, mode: Mode, threads: usize) -> Option<Io> {
    Some(Io { target, mode, threads })
}

fn find<'a>(verdicts: &'a [Verdict], words: &str) -> &'a Verdict {
    let found = verdicts.iter().find(|verdict| verdict.why.contains(words));
    found.unwrap_or_else(|| panic!("no verdict with `{words}`: {verdicts:#?}"))
}

#[test]
fn adaptive_beside_poll_alone_is_judged_on_the_median_of_pairs() {
    // Pairs: 0.8, 0.95, 0.92. Of the medians it would be 110 / 125 = 0.88.
    let runs = [(100.0, 80.0), (125.0, 118.75), (150.0, 138.0)];
    let cells: Vec<Cell> = (0..)
        .zip(runs)
        .flat_map(|(repetition, (poll, adaptive))| {
            let of = |mode, iops: f64| {
                cell(io(Target::Emulated, mode, 1), 0, repetition, iops * 1e3, 0.0)
            };
            [of(Mode::Poll, poll), of(Mode::Adaptive, adaptive), of(Mode::Interrupt, 50.0)]
        })
        .collect();
    let all = verdicts(&cells, None);
    let idle = find(&all, "of poll's");
    assert_eq!(idle.outcome, Outcome::Passed);
    assert!(
        idle.mark == "1 emulated T1 C0"
            && idle.why.starts_with("IOPS x 0.920 (0.800 to 0.950, 3 pairs)"),
        "{idle:?}"
    );
    // The same tail; nothing is asked of IOPS beside interrupt's without compute threads.
    assert!(find(&all, "p99.9").why.contains("x 1.000"), "{all:?}");
    assert_eq!(all.len(), 2, "{all:?}");
}

#[test]
fn busy_cells_are_judged_on_iops_compute_rate_and_tail() {
    let busy = |mode, repetition, iops, rate| {
        cell(io(Target::Emulated, mode, 8), 2, repetition, iops, rate)
    };
    let mut cells =
        vec![busy(Mode::Interrupt, 0, 50_000.0, 100.0), busy(Mode::Adaptive, 0, 48_000.0, 90.0)];
    cells[1].result.as_mut().unwrap().p999_us = 161.0;
    let all = verdicts(&cells, None);
    assert_eq!(find(&all, "IOPS x 0.960").outcome, Outcome::Passed);
    assert_eq!(find(&all, "compute rate x 0.900").outcome, Outcome::Lost);
    // 161 / 80.
    let tail = find(&all, "p99.9 x 2.01");
    assert_eq!(tail.outcome, Outcome::Lost);
    // With 9,000 requests only p99 has 10 beyond it, with 900 nothing has.
    cells[1] = busy(Mode::Adaptive, 0, 3_000.0, 90.0);
    let all = verdicts(&cells, None);
    assert_eq!(find(&all, "p99 (too few requests for p99.9) x 1.000").outcome, Outcome::Passed);
    cells[1] = busy(Mode::Adaptive, 0, 300.0, 90.0);
    let all = verdicts(&cells, None);
    assert_eq!(find(&all, "900 requests are too few").outcome, Outcome::NotJudged);
    // One I/O thread on two CPUs: only the tail.
    let few = [Mode::Interrupt, Mode::Adaptive]
        .map(|mode| cell(io(Target::Emulated, mode, 1), 2, 0, 5_000.0, 100.0));
    assert_eq!(verdicts(&few, None).len(), 1);
}

/// All modes at T8 C2 of the file: (kIOPS, compute rate), and C2 alone at a rate of 200.
fn busy_file(figures: [(f64, f64); 7]) -> Vec<Cell> {
    let mut cells: Vec<Cell> = Mode::ALL
        .into_iter()
        .zip(figures)
        .map(|(mode, (kiops, rate))| cell(io(Target::File4k, mode, 8), 2, 0, kiops * 1e3, rate))
        .collect();
    cells.push(cell(None, 2, 0, 0.0, 200.0));
    cells
}

#[test]
fn best_of_the_file_leaves_compute_threads_alone() {
    // sqpoll has most IOPS but not 0.95 of interrupt's 100; pread comes next.
    let figures = [
        (63.8, 96.0),
        (26.8, 30.0),
        (70.0, 94.9),
        (26.8, 118.0),
        (60.0, 100.0),
        (26.0, 29.0),
        (58.0, 104.0),
    ];
    let all = verdicts(&busy_file(figures), None);
    // 58 / 63.8.
    let one = find(&all, "of pread's, the best that leaves compute alone");
    assert!(one.mark == "2 file-4k T8 C2" && one.why.starts_with("IOPS x 0.909"), "{one:?}");
    assert!(one.why.ends_with("its compute rate x 1.040 of interrupt's"), "{one:?}");
    assert_eq!(find(&all, "median of 1 cells x 0.909").outcome, Outcome::Lost);
    assert_eq!(find(&all, "cells below 0.85: none").outcome, Outcome::Passed);
    let named = find(&all, "1 of 1 cells below 0.95, at most 10 %");
    assert_eq!(named.outcome, Outcome::Lost);
    assert!(named.why.ends_with("file-4k T8 C2 (x 0.909, pread)"), "{named:?}");
    // The collapse beside it: 30 / 200 of what compute threads do alone.
    let beside = find(&all, "pread 63.8 and 0.48, peek-spin 26.8 and 0.15");
    assert!(beside.outcome == Outcome::Beside && beside.why.contains("poll 26.0 and 0.14"));
}

#[test]
fn adaptive_far_below_the_best_is_named() {
    let figures = [
        (60.0, 100.0),
        (1.0, 1.0),
        (1.0, 1.0),
        (1.0, 1.0),
        (50.0, 100.0),
        (1.0, 1.0),
        (48.0, 100.0),
    ];
    let all = verdicts(&busy_file(figures), None);
    let worst = find(&all, "cells below 0.85");
    assert_eq!(worst.outcome, Outcome::Lost);
    assert!(worst.why.ends_with("file-4k T8 C2 (x 0.800, pread)"), "{worst:?}");
}

#[test]
fn table_and_page_show_medians_and_hide_percentiles_that_cannot_be_told() {
    let mut cells = busy_file([(40.0, 100.0); 7]);
    cells[0].result.as_mut().unwrap().n = 5_000;
    let all = verdicts(&cells, None);
    let text = table::render(&cells, &all);
    let row = |mode: &str| text.lines().find(|line| line.contains(mode)).unwrap().to_owned();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let pread = words(&row(" pread "));
    assert_eq!(
        pread,
        [
            "file-4k", "2", "8", "pread", "1", "40.00", "25.0", "10.0", "50.0", "-", "900", "5000",
            "0.500", "0.50", "1.00", "2.00", "3.50", "0.33", "0.25", "2.50", "2.00"
        ]
    );
    assert_eq!(words(&row(" adaptive "))[9], "80.0");
    let live = live::Run {
        repetition: 0,
        compute: 2,
        cpus: 2,
        switches: vec![live::Switch { at_s: 0.1, load: true }],
        bins: vec![live::Bin { spun: 1, parked: 3 }; 30],
        machine: cells[0].machine,
        at: String::new(),
    };
    let page = page::render(&cells, &[live], &all, ["<b>"].into_iter());
    for words in ["compute rate of C alone", "peek-spin", "Shaded: 2 threads", "&lt;b&gt;"] {
        assert!(page.contains(words), "no {words}");
    }
    assert!(!page.contains("http"), "it loads nothing");
}

#[test]
fn acceptance_has_the_corners_of_128_kib_and_the_compared_modes() {
    let matrix = Matrix::new(Extent::Acceptance, 2);
    let keys = matrix.keys(1, 1);
    let count =
        |target| keys.iter().filter(|key| key.io.is_some_and(|io| io.target == target)).count();
    // 12 places × 4 modes, 12 × 7, 4 × 7; and C2 and C4 alone.
    assert_eq!(Target::ALL.map(count), [48, 84, 28]);
    assert_eq!(keys.iter().filter(|key| key.io.is_none()).count(), 2);
    // 6 numbers of I/O threads × C of 0, 1, 2, 4 × 7 modes × 3 targets, and three alone.
    assert_eq!(Matrix::new(Extent::Full, 2).keys(1, 1).len(), 504 + 3);
    // On one CPU C is 0, 1, 2.
    assert_eq!(Matrix::new(Extent::Full, 1).keys(1, 1).len(), 378 + 2);
}

#[test]
fn order_is_the_seeds_and_keeps_modes_together() {
    let matrix = Matrix::new(Extent::Acceptance, 2);
    let keys = matrix.keys(2, 7);
    assert_eq!(keys, matrix.keys(2, 7));
    assert_ne!(keys, matrix.keys(2, 8));
    let place =
        |key: &CellKey| (key.repetition, key.io.map(|io| (io.target, io.threads)), key.compute);
    let places: Vec<_> = keys.chunk_by(|a, b| place(a) == place(b)).map(|c| place(&c[0])).collect();
    let distinct: BTreeSet<_> = places.iter().collect();
    assert_eq!(distinct.len(), places.len(), "a place is in two pieces");
    assert!(keys.windows(2).all(|two| two[0].repetition <= two[1].repetition));
}

/// Threads of this process by the names of a cell's, and what io_uring has for it.
fn left() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    let ours = ["read-", "compute-", "iou-sqp"];
    names.filter(|name| ours.iter().any(|ours| name.starts_with(ours))).collect()
}

#[test]
fn every_mode_reads_on_both_targets_and_leaves_nothing() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let out = directory.path().join("out");
    let (cpus, at) = (usable().unwrap().len().to_string(), directory.path().to_str().unwrap());
    let arguments = ["--full", "--on=emulated,file-4k", "--threads=2", "--repetitions=1"];
    let more = ["--compute", &cpus, "--window=0.2", "--directory", at];
    let benchmark: Benchmark = of(&[&arguments[..], &more].concat());
    let run = Run { out: &out, interrupted: &AtomicBool::new(false) };
    let cells = benchmark.run(&run).unwrap();
    assert_eq!(cells.len(), 2 * 7 + 1);
    for cell in &cells {
        let rate = cell.compute_rate.unwrap();
        assert!(rate > 0.0 && cell.cpu.compute > 0.0, "{cell:?}");
        assert!(cell.cpu.process >= cell.cpu.io + cell.cpu.compute, "{cell:?}");
        let Some(io) = cell.key.io else { continue };
        let result = cell.result.as_ref().unwrap();
        assert!(result.n > 0 && result.iops > 0.0, "{cell:?}");
        assert!(result.p50_us <= result.p99_us && result.p99_us <= result.max_us, "{cell:?}");
        match io.mode {
            Mode::PeekSpin | Mode::Poll => assert_eq!(result.spun, 1.0, "{cell:?}"),
            Mode::Pread | Mode::Sqpoll | Mode::SqpollShared => assert_eq!(result.spun, 0.0),
            Mode::Interrupt | Mode::Adaptive => {}
        }
    }
    // Run again, it adds nothing; with another window it refuses.
    let keys = |cells: &[Cell]| cells.iter().map(|cell| cell.key).collect::<Vec<_>>();
    assert_eq!(keys(&benchmark.run(&run).unwrap()), keys(&cells));
    let other = Benchmark { window: Duration::from_millis(300), ..benchmark };
    let refused = other.run(&run).unwrap_err().to_string();
    assert!(refused.contains("another window"), "{refused}");
    let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(files.len(), 1, "only the results: {files:?}");
    // The kernel ends a ring's poller a little after the ring.
    let begin = std::time::Instant::now();
    while !left().is_empty() && begin.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(left(), Vec::<String>::new());
}

#[test]
fn interrupted_run_ends_and_directory_in_memory_is_refused() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let emulated = ["--full", "--on=emulated", "--threads=1", "--window=600"];
    let mut benchmark: Benchmark = of(&emulated);
    let interrupted = AtomicBool::new(false);
    let run = Run { out: directory.path(), interrupted: &interrupted };
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(400));
            interrupted.store(true, Ordering::Relaxed);
        });
        benchmark.run(&run).unwrap_err()
    });
    assert!(error.is::<rtvirtio_host::interrupt::InterruptedError>(), "{error:#}");
    interrupted.store(false, Ordering::Relaxed);
    benchmark = of(&["--full", "--window=600", "--directory=/dev/shm"]);
    let refused = format!("{:#}", benchmark.run(&run).unwrap_err());
    assert!(refused.contains("--directory"), "{refused}");
}

#[test]
fn switched_load_has_a_timeline_and_switches() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let benchmark = live::Benchmark { repetitions: 1, cycles: 1 };
    let out = Run { out: directory.path(), interrupted: &AtomicBool::new(false) };
    let runs = benchmark.run(&out).unwrap();
    let run = &runs[0];
    assert_eq!(run.switches.iter().map(|switch| switch.load).collect::<Vec<_>>(), [true, false]);
    assert!((290..320).contains(&run.bins.len()), "{}", run.bins.len());
    let waits: u64 = run.bins.iter().map(|bin| u64::from(bin.spun + bin.parked)).sum();
    assert!(waits > 1_000, "{waits}");
    let again = benchmark.run(&out).unwrap();
    assert!(again.len() == 1 && again[0].bins == run.bins);
}
