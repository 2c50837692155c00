//! Tests of the report, and the cells that they are made of.

use std::collections::BTreeMap;

use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::{Canary, Cell, CellKey, Machine, MeasuredAt, Prediction, TaskResult};
use rtvirtio_spec::settings::{Bfq, DeviceSettings, Scheduler, Settings, VmSettings};
use rtvirtio_units::{BytesPerSecond, DeviceName, Nanos, Percentile, TaskName, VmName};

use super::{Context, ReportError, render, table};

/// A task of `vm` whose latencies rise evenly to `slowest_ms` over 2,000 requests.
fn task(vm: &str, name: &str, slowest_ms: u64, target_ms: u64) -> TaskResult {
    let mut histogram = Histogram::new();
    for i in 1..=2_000 {
        histogram.record(Nanos::from_micros(i * slowest_ms / 2), 1);
    }
    let p99 = Percentile::new(99.0).unwrap();
    let judged = histogram.quantile(p99);
    TaskResult {
        vm: VmName::new(vm).unwrap(),
        task: TaskName::new(name).unwrap(),
        measured_at: MeasuredAt::Host,
        requested_iops: 100.0,
        delivered_iops: 99.0,
        passed: judged.is_some_and(|q| q.value <= Nanos::from_millis(target_ms)),
        judged,
        target: Some(Nanos::from_millis(target_ms)),
        prediction: None,
        timeline: (0..300).map(|i| (i * 100, Nanos::from_micros(500 + i))).collect(),
        histogram,
    }
}

/// Two VMs with one task each; vm1 is the more urgent.
pub(crate) fn cell(case: &str, scheme: &str, repetition: u32, slowest_ms: u64) -> Cell {
    let tasks = vec![task("vm0", "M", slowest_ms, 40), task("vm1", "M", slowest_ms, 20)];
    let vms = tasks.iter().map(|t| (t.vm.clone(), VmSettings::default())).collect();
    let device = DeviceSettings { scheduler: Scheduler::Bfq(Bfq::DEFAULT), vms };
    Cell {
        version: 1,
        key: CellKey {
            case: case.to_owned(),
            tier: "strict".to_owned(),
            neighbour: "writer".to_owned(),
            scheme: scheme.to_owned(),
            repetition,
        },
        started: "2026-01-02T03:04:05Z".to_owned(),
        device: "ref-4x250".to_owned(),
        window_s: 30.0,
        settings: Settings(BTreeMap::from([(DeviceName::new("data").unwrap(), device)])),
        ioprio: BTreeMap::new(),
        passed: tasks.iter().all(|t| t.passed),
        tasks,
        background: BTreeMap::from([(
            VmName::new("background").unwrap(),
            BytesPerSecond::from_megabytes(210),
        )]),
        canary: Canary {
            n: 3_000,
            p50: Nanos::from_micros(60),
            p99: Nanos::from_micros(123),
            p999: Nanos::from_micros(123),
            max: Nanos::from_millis(4),
        },
        machine: Machine { load1: 1.5, busy_cores: 1.25, steal_cores: 0.0 },
        noise_floor: None,
        attempts: 1,
        rounds: 1,
        disturbed: None,
    }
}

fn context() -> Context {
    Context {
        title: "A campaign".to_owned(),
        notes: vec!["n = 2".to_owned()],
        ..Context::default()
    }
}

/// What stands in `html` between `from` and the next `to`.
fn between<'a>(html: &'a str, from: &str, to: &str) -> &'a str {
    let rest = html.split_once(from).unwrap_or_else(|| panic!("no {from:?}")).1;
    rest.split_once(to).unwrap_or_else(|| panic!("no {to:?} after {from:?}")).0
}

/// Without what aligns columns.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn render_without_cells_is_an_error() {
    assert_eq!(render(&[], &context()), Err(ReportError::NoCells));
}

#[test]
fn render_has_every_section_and_loads_nothing() {
    let mut cells = vec![cell("2xM", "bfq", 0, 100), cell("2xM", "rtvirtio", 0, 5)];
    cells[1].tasks[0].prediction = Some(Prediction {
        percentile: Percentile::new(99.0).unwrap(),
        predicted: Nanos::from_millis(6),
        bound: Some(Nanos::from_millis(8)),
        paper_bound: None,
        paper: None,
    });
    let html = render(&cells, &context()).unwrap();
    for heading in [
        "Case 2xM, strict targets, neighbour: writer",
        "Summary",
        "Tail latency of each task",
        "Latency distributions",
        "vm1, the most urgent VM",
        "Timelines of vm1",
        "Settings in force",
        "State of the machine",
        "Predictions against measurements",
        "n = 2",
    ] {
        assert!(html.contains(heading), "no {heading:?}");
    }
    assert!(!html.contains("Across cases"));
    assert!(!html.contains("http") && !html.contains("<script") && !html.contains("NaN"));
}

#[test]
fn tail_of_an_even_number_of_runs_is_the_mean_of_the_two_in_the_middle() {
    // 99 % of even rises to 10 and to 30 ms: 9.9 and 29.7 ms.
    let cells = [cell("2xM", "bfq", 0, 10), cell("2xM", "bfq", 1, 30)];
    let groups = super::group::groups(&cells);
    let task = groups[0].tasks()[0];
    let tail = groups[0].schemes[0].task(task).unwrap().tail().unwrap();
    assert_eq!(tail.value, Nanos::from_micros(19_800));
}

#[test]
fn summary_states_rate_ratio_and_background_of_each_scheme() {
    // 99 % of an even rise to 100 ms is 99 ms: 4.95 of the 20 ms that vm1 has.
    let cells = [cell("2xM", "bfq", 0, 100), cell("2xM", "rtvirtio", 0, 10)];
    let html = render(&cells, &context()).unwrap();
    let summary = between(&html, "<h3>Summary</h3>", "</table>");
    let bfq = between(summary, "bfq", "</tr>");
    assert!(bfq.contains("0/1 (0–79 %)") && bfq.contains("4.95") && bfq.contains("99 %"), "{bfq}");
    let ours = between(summary, "<tr class=\"ours\">", "</tr>");
    assert!(
        ours.contains("1/1 (21–100 %)") && ours.contains("0.495") && ours.contains("210"),
        "{ours}"
    );
}

#[test]
fn schemes_start_with_ours_and_hand_and_go_on_in_the_order_of_baselines() {
    let names = ["none", "bfq", "hand", "data-plane", "rtvirtio", "cap-10"];
    let cells = names.map(|s| cell("2xM", s, 0, 10));
    let html = render(&cells, &context()).unwrap();
    let summary = between(&html, "<h3>Summary</h3>", "</table>");
    let at = |s: &str| summary.find(&format!("<th scope=\"row\">{s}</th>")).unwrap();
    let order = ["rtvirtio", "data-plane", "hand", "bfq", "none", "cap-10"].map(at);
    assert!(order.is_sorted(), "{order:?}");
}

#[test]
fn render_escapes_every_text_of_a_cell_and_of_the_context() {
    const EVIL: &str = "\"><script>alert(1)</script>";
    let mut bad = cell(EVIL, EVIL, 0, 10);
    bad.key.tier = EVIL.to_owned();
    bad.key.neighbour = EVIL.to_owned();
    bad.started = EVIL.to_owned();
    bad.disturbed = Some(EVIL.to_owned());
    bad.ioprio.insert(VmName::new("vm0").unwrap(), EVIL.to_owned());
    let all = Context {
        title: EVIL.to_owned(),
        generated: EVIL.to_owned(),
        machine: EVIL.to_owned(),
        device: EVIL.to_owned(),
        version: EVIL.to_owned(),
        notes: vec![EVIL.to_owned()],
    };
    let html = render(&[bad, cell("2xM", EVIL, 0, 10)], &all).unwrap();
    assert!(!html.contains("<script") && !html.contains("\">&lt;script"));
    assert!(html.contains("&lt;script&gt;"));
}

#[test]
fn disturbed_cell_counts_and_is_listed_with_its_reason() {
    let mut late = cell("2xM", "bfq", 1, 100);
    late.disturbed = Some("the canary was 9 ms late".to_owned());
    let good = |n: u32| (2..2 + n).map(|r| cell("2xM", "bfq", r, 10));
    let cells: Vec<Cell> = good(4).chain([late]).collect();
    let html = render(&cells, &context()).unwrap();
    assert!(html.contains("the canary was 9 ms late") && html.contains("4/5 (38–96 %)"));
    let text = table(&cells);
    assert!(text.contains("the machine was late: bfq repetition 1: the canary was 9 ms late"));
    assert!(text.contains("4/5 (38–96 %)"), "{text}");
}

#[test]
fn cells_all_disturbed_fill_the_table_and_the_report() {
    let mut cells = [cell("2xM", "bfq", 0, 10), cell("2xM", "rtvirtio", 0, 10)];
    cells.iter_mut().for_each(|c| c.disturbed = Some("busy".to_owned()));
    let text = table(&cells);
    let row = words(text.lines().find(|l| l.starts_with("vm1 M")).unwrap());
    assert_eq!(row, "vm1 M 20 9.90 99%✓ 9.90 99%✓", "{text}");
    assert!(text.lines().any(|l| l.starts_with("canary") && l.contains("late")), "{text}");
    assert!(render(&cells, &context()).unwrap().contains("of them 2 while the machine was late"));
    let mut empty = cell("2xM", "bfq", 0, 10);
    empty.tasks.clear();
    let html = render(&[empty], &context()).unwrap();
    assert!(!html.contains("NaN") && !html.contains("inf"));
}

#[test]
fn several_cases_are_compared_by_vms_and_by_mix() {
    let cells = [
        cell("1xM", "rtvirtio", 0, 10),
        cell("2xM", "rtvirtio", 0, 10),
        cell("2xL+M", "rtvirtio", 0, 100),
    ];
    let html = render(&cells, &context()).unwrap();
    let panel = |title: &str| between(&html, &format!("<b>{title}</b>"), "</figure>").to_owned();
    assert!(panel("All cases").contains("2/3 (67 %)"));
    assert!(panel("2 VMs").contains("1/2 (50 %)"));
    assert!(panel("Tasks L+M").contains("0/1 (0 %)"));
}

#[test]
fn table_shows_tail_rate_and_verdict_within_120_columns() {
    let names = ["bfq", "ionice", "rt-xen", "none", "mq-deadline", "kyber", "hand", "rtvirtio"];
    let cells = names.map(|s| cell("2xM", s, 0, if s == "rtvirtio" { 10 } else { 100 }));
    let text = table(&cells);
    let row = words(text.lines().find(|l| l.starts_with("vm1 M")).unwrap());
    assert!(row.starts_with("vm1 M 20 9.90 99%✓ 99.0 99%✗"), "{row}");
    assert!(words(&text).contains("rtvirtio ✓ 1/1 (21–100 %)"), "{text}");
    assert!(text.lines().all(|l| l.chars().count() <= 120), "{text}");
}

#[test]
fn table_replaces_control_characters() {
    let text = table(&[cell("2xM\u{1b}[2J", "b\u{7}fq", 0, 10)]);
    assert!(!text.contains(['\u{1b}', '\u{7}']));
}
