//! `rtvirtio-lab bench iocores`.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rtvirtio_engine::testing::{has_io_uring, skipped};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::scratch_disk::{eventually, lab, said};

/// One cell of 4 s, in which disks come and go.
const SMALL: [&str; 12] = [
    "bench",
    "iocores",
    "--policies",
    "dynamic",
    "--seeds",
    "1",
    "--phases",
    "hotplug,small-large",
    "--seconds",
    "2",
    "--compute",
    "0.5",
];

/// Temporary files go to `directory`/tmp, results to `directory`/out.
fn bench(directory: &Path, further: &[&str]) -> Command {
    let mut command = rtvirtio(directory);
    command.args(SMALL).args(further).arg("--out").arg(directory.join("out"));
    command
}

/// Temporary files go to `directory`/tmp.
fn rtvirtio(directory: &Path) -> Command {
    let temporary = directory.join("tmp");
    std::fs::create_dir_all(&temporary).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", &lab()]).env("TMPDIR", temporary);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(directory: &Path, further: &[&str]) -> Output {
    bench(directory, further).output().unwrap()
}

/// Files and processes of a benchmark in this directory.
fn left_behind(directory: &Path) -> Vec<String> {
    let temporary = directory.join("tmp");
    let files = std::fs::read_dir(&temporary).unwrap().flatten();
    let mut left: Vec<String> = files.map(|file| file.path().display().to_string()).collect();
    let temporary = temporary.display().to_string();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let command = std::fs::read_to_string(process.path().join("cmdline")).unwrap_or_default();
        if command.contains(&temporary) {
            left.push(command);
        }
    }
    left
}

/// Whether scenarios can be played here; if not, says so by name.
fn can_play() -> bool {
    let has = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() >= 2);
    if !has {
        skipped("there is one CPU");
    }
    has && has_io_uring()
}

#[test]
fn scenario_that_is_played_is_verified_and_leaves_nothing() {
    if !can_play() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), &["--json"]);
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let verified = |report: &Value| {
        let verdicts = report["verdicts"].as_array().unwrap();
        verdicts.iter().find(|of| of["mark"] == "3 verified").unwrap()["outcome"].clone()
    };
    assert_eq!(verified(&report), "passed", "{report}");
    let rows = report["rows"].as_array().unwrap();
    // Two phases and the whole.
    assert_eq!(rows.len(), 3, "{report}");
    for row in rows {
        assert!(row["IOPS"].as_f64().unwrap() > 100.0, "{row}");
        assert!((1.0..=2.0).contains(&row["cores"].as_f64().unwrap()), "{row}");
        assert!(row["compute"].as_f64().unwrap() > 0.01, "{row}");
    }
    assert_eq!(left_behind(directory.path()), [""; 0]);
    let out = directory.path().join("out");
    let cells = || std::fs::read_to_string(out.join("cells.jsonl")).unwrap();
    let cell: Value = serde_json::from_str(&cells()).unwrap();
    assert!(cell["checked"].as_u64().unwrap() > 1_000 && cell["failed"].is_null(), "{cell}");
    assert_eq!(cell["timeline"]["requests"].as_array().unwrap().len(), 40);
    let pareto = std::fs::read_to_string(out.join("pareto.svg")).unwrap();
    assert!(pareto.starts_with("<svg") && pareto.contains("hotplug"));
    assert!(out.join("timelines.svg").exists() && out.join("commands.txt").exists());

    // What is there is not run again, and is not mixed with anything else.
    let before = cells();
    let again = run(directory.path(), &["--json"]);
    assert!(again.status.success(), "{}", said(&again));
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    // Of figures that were read back the last digit may differ.
    let requests = |report: &Value| -> Vec<Value> {
        report["rows"].as_array().unwrap().iter().map(|row| row["n"].clone()).collect()
    };
    assert_eq!(requests(&again), requests(&report));
    for other in [["--depth", "8"], ["--first-seed", "7"]] {
        let other = run(directory.path(), &other);
        assert_eq!(other.status.code(), Some(1), "{}", said(&other));
        assert!(said(&other).contains("name another --out"), "{}", said(&other));
    }
    assert_eq!(cells(), before);
}

#[test]
fn benchmark_that_is_interrupted_ends_with_130_and_leaves_nothing() {
    if !can_play() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    ends_with_130_and_leaves_nothing(bench(directory.path(), &[]), directory.path(), "vm3.sock");
}

#[test]
fn calibration_of_costs_that_is_interrupted_ends_with_130_and_leaves_nothing() {
    if !can_play() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let costs = directory.path().join("costs.json");
    let mut calibrate = rtvirtio(directory.path());
    calibrate.args(["simulate", "--calibrate"]).arg(&costs);
    ends_with_130_and_leaves_nothing(calibrate, directory.path(), "vm0.sock");
    assert!(!costs.exists());
}

/// Interrupts it a second into its first scenario.
fn ends_with_130_and_leaves_nothing(mut command: Command, directory: &Path, socket: &str) {
    let child = command.spawn().unwrap();
    let is_up = || {
        let mut files = std::fs::read_dir(directory.join("tmp")).unwrap().flatten();
        files.any(|file| file.path().join(socket).exists())
    };
    eventually("the server's sockets", Duration::from_secs(30), is_up);
    std::thread::sleep(Duration::from_secs(3));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert_eq!(left_behind(directory), [""; 0]);
}

#[test]
fn benchmark_that_cannot_be_is_refused_with_1() {
    let directory = tempfile::tempdir().unwrap();
    for (wrong, word) in [
        (["--policies", "static:3"], "static:3"),
        (["--phases", "busy"], "busy"),
        (["--disk", "floppy"], "floppy"),
        (["--depth", "65"], "65"),
        (["--vms", "17"], "17"),
        (["--seconds", "0.1"], "0.1"),
        (["--compute", "nan"], "--compute"),
    ] {
        let output = Command::new(lab())
            .args(["bench", "iocores", wrong[0]])
            .arg(wrong[1])
            .arg("--out")
            .arg(directory.path().join("out"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(word), "{wrong:?}: {}", said(&output));
    }
    assert!(!directory.path().join("out/cells.jsonl").exists());
}
