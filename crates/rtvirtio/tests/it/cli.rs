//! The command line without root: help, wrong input, exit codes.

use std::path::Path;

use crate::scratch_disk::{rtvirtio, said};

const NOWHERE: &str = "/nonexistent";

#[test]
fn help_names_every_verb() {
    let output = rtvirtio(Path::new(NOWHERE), &["--help"]);
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let verbs = [
        "doctor",
        "scratch",
        "calibrate",
        "plan",
        "apply",
        "confirm",
        "verify",
        "rollback",
        "bench",
        "report",
        "demo",
        "serve",
        "ctl",
        "tree",
        "simulate",
        "mapping",
        "run",
    ];
    for verb in verbs {
        assert!(text.contains(verb), "{verb}: {text}");
    }
}

#[test]
fn wrong_flag_exits_with_1() {
    let output = rtvirtio(Path::new(NOWHERE), &["plan", "--no-such-flag"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
}

#[test]
fn output_that_nobody_reads_ends_it_quietly() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_rtvirtio"))
        .args(["doctor", "--json"])
        .stdout(writer)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), errors.as_ref()), (Some(141), ""));
}

#[test]
fn completion_benchmark_refuses_what_is_not_in_its_matrix() {
    let refused = |arguments: &[&str], word: &str| {
        let arguments = [&["bench", "completion"], arguments].concat();
        let output = rtvirtio(Path::new(NOWHERE), &arguments);
        let text = said(&output);
        assert!(output.status.code() == Some(1) && text.contains(word), "{arguments:?}: {text}");
    };
    refused(&["--threads", "3"], "--full has T of 1, 2, 4");
    refused(&["--modes", "sleep"], "peek-spin");
    refused(&["--on", "disk"], "file-128k");
    refused(&["--window", "0"], "0.1 to 600 s");
    refused(&["--live", "--full"], "cannot be used with");
}

#[test]
fn doctor_prints_json_that_names_fio() {
    let output = rtvirtio(Path::new(NOWHERE), &["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = findings.as_array().unwrap().iter().map(|f| f["name"].clone()).collect();
    assert!(names.contains(&"fio".into()), "{names:?}");
}

/// Each hostile file, and a word that the complaint must hold.
#[test]
fn hostile_specification_is_refused_with_place_and_hint() {
    const HEAD: &str = "version = 1\n[device.data]\npath = \"/dev/loop0\"\nprofile = \"p.json\"\n";
    const VM: &str = "[[vm]]\nname = \"a\"\n[[vm.disk]]\nname = \"d\"\ndevice = \"data\"\n";
    let task = |line: &str| format!("{HEAD}{VM}[[vm.task]]\nname = \"t\"\n{line}\n");
    let hostile = [
        (format!("{HEAD}{VM}colour = 1\n"), "colour"),
        (task("iops = nan"), "iops"),
        (task("iops = -5"), "iops"),
        (task("target = { latency_ms = inf }"), "latency_ms"),
        (format!("{HEAD}{}", VM.replace("\"a\"", "\"../a\"")), "../a"),
        (format!("{HEAD}{VM}{VM}"), "\"a\""),
        (format!("{HEAD}weight = -1\n{VM}"), "weight"),
    ];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spec.toml");
    for (text, word) in hostile {
        std::fs::write(&path, &text).unwrap();
        let output = rtvirtio(Path::new(NOWHERE), &["plan", path.to_str().unwrap()]);
        let complaint = said(&output);
        assert_eq!(output.status.code(), Some(1), "{complaint}");
        assert!(complaint.contains("spec.toml:"), "{complaint}");
        assert!(complaint.contains("hint: "), "{complaint}");
        assert!(complaint.contains(word), "{complaint}");
    }
}

#[test]
fn huge_specification_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spec.toml");
    std::fs::write(&path, vec![b'#'; 64 << 20]).unwrap();
    let output = rtvirtio(Path::new(NOWHERE), &["plan", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("hint: "), "{}", said(&output));
}

#[test]
fn plan_that_is_no_plan_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plan.json");
    std::fs::write(&path, "{\"version\": 1}").unwrap();
    let output = rtvirtio(Path::new(NOWHERE), &["apply", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("plan.json"), "{}", said(&output));
}
