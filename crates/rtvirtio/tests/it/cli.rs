//! The command line without root: help, wrong input, exit codes.

use std::path::Path;

use rtvirtio_engine::testing::skipped;
use rustix::process::{Pid, Signal, kill_process};

use crate::scratch_disk::{RTVIRTIO, lab, output, rtvirtio, said};

const NOWHERE: &str = "/nonexistent";

#[test]
fn help_names_every_verb() {
    let operator = ["doctor", "calibrate", "plan", "apply", "confirm", "verify", "rollback"];
    let others = ["boot", "watch", "serve", "ctl", "mapping"];
    let laboratory = ["demo", "scratch", "bench", "report", "simulate"];
    for (program, verbs) in
        [(RTVIRTIO.to_owned(), [&operator[..], &others].concat()), (lab(), laboratory.to_vec())]
    {
        let output = output(&program, Path::new(NOWHERE), &["--help"]);
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let listed: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
            .collect();
        for verb in verbs {
            assert!(listed.contains(&verb), "{program} {verb}: {text}");
        }
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
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let refused = |arguments: &[&str], word: &str| {
        let to = ["bench", "completion", "--out", out.to_str().unwrap()];
        let arguments = [&to, arguments].concat();
        let output = output(&lab(), Path::new(NOWHERE), &arguments);
        let text = said(&output);
        assert!(output.status.code() == Some(1) && text.contains(word), "{arguments:?}: {text}");
        assert!(!out.exists(), "{arguments:?}: what is refused leaves nothing");
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
    for name in ["fio", "nic-irqs", "nic-rps"] {
        assert!(names.contains(&name.into()), "{names:?}");
    }
    // A data plane that is named is asked.
    let output = rtvirtio(Path::new(NOWHERE), &["doctor", "--socket", "/nonexistent/s"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("cannot connect to the data plane"), "{}", said(&output));
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

/// A service manager would start it again for ever.
#[test]
fn wrong_configuration_of_a_data_plane_has_an_exit_code_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    std::fs::write(&path, "version = 1\n[[iothread]]\nname = \"a/b\"\n").unwrap();
    for (arguments, expected) in [(&["serve"][..], 78), (&["serve", "--check"], 1)] {
        let all: Vec<&str> = arguments.iter().copied().chain(path.to_str()).collect();
        let output = rtvirtio(Path::new(NOWHERE), &all);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(expected), "{text}");
        assert!(text.contains("serve.toml:3:") && text.contains("hint: "), "{text}");
    }
    let unit = include_str!("../../../../packaging/rtvirtio-dataplane.service");
    assert!(unit.contains("\nRestartPreventExitStatus=78\n"));
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

/// A specification that plans without a device: the device is asked for first.
fn mapping_file(directory: &Path) -> String {
    let path = directory.join("serve.toml");
    let text = "version = 1\n[[iothread]]\nname = \"iot0\"\n[[device]]\nname = \"d\"\nvm = \"v\"\n\
        socket = \"/run/d.sock\"\nengine = { type = \"ram\", size = \"1M\" }\n";
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_no_panic() {
    let directory = tempfile::tempdir().unwrap();
    let file = mapping_file(directory.path());
    let verbs: [&[&str]; 4] = [
        &["doctor"],
        &["doctor", "--json"],
        &["mapping", &file, "--device", "d"],
        &["serve", "--check", &file],
    ];
    for arguments in verbs {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(RTVIRTIO);
        let output = command.args(arguments).stdout(full).output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.contains("write standard output: No space left"), "{arguments:?}: {text}");
        // Nor is there a panic where neither can be written.
        let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(RTVIRTIO);
        let status = command.args(arguments).stdout(full()).stderr(full()).status().unwrap();
        assert_eq!(status.code(), Some(1), "{arguments:?}");
    }
}

#[test]
fn rollback_whose_output_cannot_be_written_says_by_its_exit_code_what_was_done() {
    let directory = tempfile::tempdir().unwrap();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(RTVIRTIO);
    command.arg("rollback").env("RTVIRTIO_STATE_DIR", directory.path());
    let output = command.stdout(full).output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("the exit code says what was done"), "{text}");
}

#[test]
fn watchdog_of_an_apply_whose_process_died_looks_at_once_and_else_waits_for_the_deadline() {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let seconds_now = || rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec;
    for (phase, seconds, says) in
        [("applying", 3600, ""), ("unconfirmed", 2, "!"), ("unconfirmed", 2, "")]
    {
        let state = tempfile::tempdir().unwrap();
        let journal = state.path().join("journal.json");
        let now = seconds_now();
        let deadline = (now + seconds) * 1_000_000_000;
        // Nothing that it would write to this host.
        let text = format!(
            r#"{{"version": 3, "boot_id": "{}", "original": null, "rolling_back": false,
            "pending": {{"phase": "{phase}", "deadline_ns": {deadline}, "record": {{"devices": {{}},
            "groups": [], "units": [], "guests": [], "data_planes": []}}}}}}"#,
            boot_id.trim()
        );
        std::fs::write(&journal, text).unwrap();
        std::fs::set_permissions(&journal, std::fs::Permissions::from_mode(0o600)).unwrap();
        let mut command = std::process::Command::new(RTVIRTIO);
        command.arg("confirm-watchdog").env("RTVIRTIO_STATE_DIR", state.path());
        let mut watchdog = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        // As long as the apply is under way.
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(watchdog.try_wait().unwrap().is_none() && journal.exists(), "{phase}");
        let mut stdin = watchdog.stdin.take().unwrap();
        stdin.write_all(says.as_bytes()).unwrap();
        drop(stdin);
        assert!(watchdog.wait().unwrap().success(), "{phase}");
        assert!(!journal.exists(), "{phase}");
        let since = seconds_now() - now;
        assert!(phase == "applying" || since >= seconds, "{phase} {says:?}: {since} s");
    }
}

#[test]
fn rollback_whose_output_nobody_reads_is_done_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    for json in [&["rollback"][..], &["rollback", "--json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(RTVIRTIO);
        command.args(json).env("RTVIRTIO_STATE_DIR", directory.path());
        let output = command.stdout(writer).output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(text.contains("the exit code says what was done"), "{text}");
    }
}

#[test]
fn wait_for_whoever_writes_to_a_pipe_ends_with_a_signal() {
    let directory = tempfile::tempdir().unwrap();
    let plan = directory.path().join("plan");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &plan, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for signal in [Signal::INT, Signal::TERM] {
        let mut command = std::process::Command::new(RTVIRTIO);
        command.arg("apply").arg(&plan).env("RTVIRTIO_STATE_DIR", directory.path());
        let mut waiting = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut errors = std::io::BufReader::new(waiting.stderr.take().unwrap());
        let mut line = String::new();
        std::io::BufRead::read_line(&mut errors, &mut line).unwrap();
        assert!(line.starts_with("waiting for somebody to write to "), "{line}");
        kill_process(Pid::from_child(&waiting), signal).unwrap();
        let begun = std::time::Instant::now();
        assert_eq!(waiting.wait().unwrap().code(), Some(130));
        assert!(begun.elapsed() < std::time::Duration::from_secs(20));
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut errors, &mut rest).unwrap();
        assert_eq!(rest, "interrupted\n");
    }
}

#[test]
fn output_that_cannot_be_written_is_refused_before_anything_is_watched() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let there = format!("{place}/there");
    std::fs::write(&there, "somebody's").unwrap();
    let below = format!("{there}/profile.json");
    for (arguments, words) in [
        (&["init", "--observe", "3600", "-o", &there][..], "is there already"),
        (&["init", "--observe", "3600", "-o", &format!("{place}/no/site.toml")], "No such file"),
        (&["calibrate", "--in", place, "--observe", "60", "-o", place], "is not a regular file"),
        (&["calibrate", "--in", place, "-o", &below], "Not a directory"),
        (&["calibrate", "/dev/null", "-o", place], "is not a regular file"),
    ] {
        let output = rtvirtio(directory.path(), arguments);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.contains(words), "{arguments:?}: {text}");
    }
    assert_eq!(std::fs::read_dir(place).unwrap().count(), 1);
    assert_eq!(std::fs::read_to_string(&there).unwrap(), "somebody's");
}

#[test]
fn state_directory_that_depends_on_where_one_is_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(RTVIRTIO);
    command.arg("rollback").env("RTVIRTIO_STATE_DIR", "here").current_dir(directory.path());
    let output = command.output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("RTVIRTIO_STATE_DIR=here: give an absolute path"), "{text}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn watching_says_what_does_not_run_and_a_profile_that_is_not_there_ends_it_at_once() {
    if rtvirtio_host::Host::new("/").cgroup_version().is_err() {
        return skipped("needs a cgroup hierarchy with the io controller");
    }
    let directory = tempfile::tempdir().unwrap();
    let spec = directory.path().join("spec.toml");
    let text = "version = 1\n[device.d]\npath = \"/dev/loop0\"\nprofile = \"nope.json\"\n\
        [[vm]]\nname = \"off\"\ncgroup = \"machine/off\"\n\
        [[vm.disk]]\nname = \"data\"\ndevice = \"d\"\n\
        [[vm.task]]\nname = \"t\"\niops = 100\n\
        target = { percentile = 99, latency_ms = 10 }\n";
    std::fs::write(&spec, text).unwrap();
    let watch = |more: &[&str]| {
        let mut command = std::process::Command::new(RTVIRTIO);
        command.args(["watch", spec.to_str().unwrap(), "--duration", "1"]).args(more);
        command.output().unwrap()
    };
    let output = watch(&[]);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success() && text.contains("not running: off"), "{}", said(&output));
    let output = watch(&["--control"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("device d (make its profile: rtvirtio calibrate /dev/loop0)"), "{text}");
}

#[test]
fn error_that_nobody_reads_is_still_its_exit_code() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = std::process::Command::new(RTVIRTIO);
    command.args(["plan", "/nonexistent"]).stdout(writer.try_clone().unwrap()).stderr(writer);
    assert_eq!(command.status().unwrap().code(), Some(1));
}

#[test]
fn output_file_that_is_none_is_never_replaced() {
    use std::os::unix::fs::{FileTypeExt as _, symlink};
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("cells.jsonl"), "").unwrap();
    // A report of a real cell of this repository.
    let cells = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/impossible/cells.jsonl");
    std::fs::copy(cells, path("cells.jsonl")).unwrap();
    let report = |to: &Path| {
        let run = directory.path().to_str().unwrap();
        output(&lab(), Path::new(NOWHERE), &["report", run, "-o", to.to_str().unwrap()])
    };
    // A link stays, and what it leads to is written.
    std::fs::write(path("target.html"), "old").unwrap();
    symlink(path("target.html"), path("link.html")).unwrap();
    assert_eq!(report(&path("link.html")).status.code(), Some(0));
    assert!(path("link.html").is_symlink());
    assert!(std::fs::read_to_string(path("target.html")).unwrap().contains("<html"));
    // A link that leads nowhere, a directory and a socket are refused.
    symlink(path("none"), path("dangling.html")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    for refused in [path("dangling.html"), directory.path().to_owned(), path("socket")] {
        let output = report(&refused);
        assert_eq!(output.status.code(), Some(1), "{refused:?}: {}", said(&output));
    }
    // A device is written through: there is still one.
    assert_eq!(report(Path::new("/dev/null")).status.code(), Some(0));
    assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    // So is a FIFO.
    let made = std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap();
    assert!(made.success());
    let reader = std::thread::spawn({
        let fifo = path("fifo");
        move || std::fs::read_to_string(fifo).unwrap()
    });
    assert_eq!(report(&path("fifo")).status.code(), Some(0));
    assert!(reader.join().unwrap().contains("<html"));
    assert!(std::fs::metadata(path("fifo")).unwrap().file_type().is_fifo());
}
