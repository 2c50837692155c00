//! `rtvirtio-run`: programs behave as without it, whatever they do, and leave nothing behind.
//!
//! fsx and LTP are in no Debian 12 package; the differential test stands for both. It and most others are parts
//! of a C program (run/program.c) that is compiled here, with `_FORTIFY_SOURCE`, as distributions compile theirs.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;

use crate::scratch_disk::{built, eventually, said};

mod slots;

const ENOUGH: Duration = Duration::from_secs(30);

/// All ways to wait; the second takes the short path whatever the machine is doing.
const MODES: [&str; 3] = ["interrupt", "poll", "adaptive"];
/// Runs, at most, until the short path was taken often enough.
const RUNS: usize = 10;

fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A directory whose files do direct I/O, or `test` is skipped by name.
fn directory(test: &str) -> Option<TempDir> {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut options = File::options();
    options.write(true).create(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    match options.open(directory.path().join("probe")) {
        Ok(_) => Some(directory),
        Err(error) => {
            say(&format!(
                "SKIPPED {test}: needs direct I/O in {}: {error}",
                directory.path().display()
            ));
            None
        }
    }
}

/// Whether this machine has rings for the library; without, all calls are plain, and the tests say so.
fn has_rings() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
        let is_new = (numbers.next(), numbers.next()) >= (Some(6), Some(5));
        let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
        let is_allowed = disabled.is_ok_and(|n| n.trim() == "0" || rustix::process::geteuid().is_root() && n.trim() == "1");
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let has = is_new && is_allowed && status.contains("Seccomp:\t0\n");
        if !has {
            say("SKIPPED run: the short path itself: needs Linux 6.5, io_uring, and no seccomp filter");
        }
        has
    })
}

/// The C program.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/run/program.c");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("run-program");
        let mut cc = Command::new("cc");
        cc.args([
            "-O2",
            "-D_FORTIFY_SOURCE=2",
            "-D_FILE_OFFSET_BITS=64",
            "-Wall",
            "-pthread",
            "-o",
        ]);
        let output = cc.arg(&program).arg(source).output().expect("cc is there: it links rtvirtio");
        assert!(output.status.success(), "{}", said(&output));
        program
    })
}

/// `rtvirtio-run` of a program, with statistics as JSON.
fn run(mode: &str, program: &Path) -> Command {
    let mut command = Command::new(built("rtvirtio-run"));
    command.args(["--mode", mode, "--stats", "--json", "--"]).arg(program);
    command.stdin(Stdio::null());
    command
}

/// What the processes counted, by way: the sum over those that said it.
fn counted(output: &Output, way: &str) -> u64 {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines = text.lines().filter(|line| line.starts_with("{\"program\""));
    lines
        .map(|line| {
            let value: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
            value[way]["calls"].as_u64().unwrap()
        })
        .sum()
}

fn short(output: &Output) -> u64 {
    counted(output, "spun") + counted(output, "parked")
}

/// Runs something until so many of its calls were short, where any can be: how often there is a token depends on how
/// idle the machine is.
fn takes_the_short_path(at_least: u64, mut run: impl FnMut() -> Output) {
    let mut taken = 0;
    for count in 1..=RUNS {
        let output = run();
        taken += short(&output);
        if !has_rings() || taken >= at_least {
            return;
        }
        assert!(
            count < RUNS,
            "{taken} calls were short in {count} runs, the last: {}",
            said(&output)
        );
    }
}

/// Runs a part of the C program in each mode; it must succeed, and take the short path so often when it polls.
fn passes(test: &str, part: &str, at_least: u64) {
    for mode in MODES {
        let Some(directory) = directory(test) else { return };
        let run = || {
            let output = run(mode, program()).arg(part).arg(directory.path()).output().unwrap();
            assert!(output.status.success(), "{mode}: {}", said(&output));
            output
        };
        match mode {
            "poll" => takes_the_short_path(at_least, run),
            "interrupt" => assert_eq!(short(&run()), 0),
            _ => drop(run()),
        }
    }
}

/// Random calls on the same files by different descriptors, children and offsets, right and wrong: results,
/// error numbers, positions, memory and files are those of plain calls.
#[test]
fn random_calls_have_the_same_results_as_without() {
    let test = "random_calls_have_the_same_results_as_without";
    let files = ["log", "f0", "f1", "f2"];
    let mut taken = 0;
    for seed in 1..=8 {
        let (Some(plain), Some(with)) = (directory(test), directory(test)) else { return };
        let part = |command: &mut Command, directory: &TempDir| {
            let command = command.arg("differential").arg(directory.path()).arg(seed.to_string());
            let output = command.stdin(Stdio::null()).output().unwrap();
            assert!(output.status.success(), "seed {seed}: {}", said(&output));
            output
        };
        part(&mut Command::new(program()), &plain);
        let mode = if seed % 2 == 0 { "adaptive" } else { "poll" };
        let output = part(&mut run(mode, program()), &with);
        taken += short(&output);
        for file in files {
            let [plain, with] = [&plain, &with].map(|d| fs::read(d.path().join(file)).unwrap());
            if plain == with {
                continue;
            }
            let [plain, with] = [&plain, &with].map(|text| String::from_utf8_lossy(text));
            let differs = plain.lines().zip(with.lines()).find(|(plain, with)| plain != with);
            panic!("seed {seed}, {mode}: {file} differs: {differs:?}");
        }
    }
    say(&format!("{test}: {taken} calls were short"));
    assert!(!has_rings() || taken > 150, "{taken} calls were short");
}

#[test]
fn threads_read_right_while_others_fork_and_vfork() {
    passes("threads_read_right_while_others_fork_and_vfork", "threads", 1_000);
}

#[test]
fn handlers_read_and_jump_while_a_read_waits() {
    passes("handlers_read_and_jump_while_a_read_waits", "signals", 1_000);
}

/// Some are forked while a call waits or has just ended: the child's thread is in that call.
#[test]
fn children_that_handlers_fork_live() {
    passes("children_that_handlers_fork_live", "forking-handlers", 300);
}

/// Closes all it did not open itself, and reuses a number behind the library's back.
#[test]
fn program_that_closes_all_descriptors_gets_its_own_and_no_others() {
    passes("program_that_closes_all_descriptors_gets_its_own_and_no_others", "descriptors", 300);
}

#[test]
fn threads_that_read_are_cancelled() {
    passes("threads_that_read_are_cancelled", "cancellation", 100);
}

#[test]
fn write_beyond_the_limit_of_file_sizes_raises_one_signal() {
    passes("write_beyond_the_limit_of_file_sizes_raises_one_signal", "limit", 1);
}

#[test]
fn program_that_sandboxes_itself_is_not_killed_for_our_calls() {
    passes("program_that_sandboxes_itself_is_not_killed_for_our_calls", "sandbox", 20);
}

#[test]
fn exec_from_a_thread_while_others_read_takes_place() {
    let test = "exec_from_a_thread_while_others_read_takes_place";
    for mode in MODES {
        let Some(directory) = directory(test) else { return };
        let output = run(mode, program()).arg("exec").arg(directory.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{mode}: {}", said(&output));
    }
}

#[test]
fn file_in_the_place_of_standard_error_gets_no_statistics() {
    let test = "file_in_the_place_of_standard_error_gets_no_statistics";
    let Some(directory) = directory(test) else { return };
    let output = run("poll", program()).arg("stderr").arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(fs::read(directory.path().join("second")).unwrap(), b"");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn reader_of_standard_error_that_has_gone_does_not_end_the_program() {
    let test = "reader_of_standard_error_that_has_gone_does_not_end_the_program";
    let Some(directory) = directory(test) else { return };
    let mut command = run("poll", program());
    let command = command.arg("limit").arg(directory.path()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn interrupt_ends_the_program_and_kill_9_leaves_nothing_behind() {
    let test = "interrupt_ends_the_program_and_kill_9_leaves_nothing_behind";
    let list = |directory: &str| -> BTreeSet<_> {
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let Some(directory) = directory(test) else { return };
        let before = list("/dev/shm");
        let mark = directory.path().display().to_string();
        let mut command = run("adaptive", program());
        let command =
            command.arg("for-ever").arg(directory.path()).env("RTVIRTIO_TEST_MARK", &mark);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "reading\n");
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal.as_raw()));
        assert!(list("/dev/shm").is_subset(&before), "{:?}", list("/dev/shm"));
        let bears_mark = |pid: &std::ffi::OsStr| {
            let environment = fs::read(Path::new("/proc").join(pid).join("environ"));
            environment.is_ok_and(|e| e.windows(mark.len()).any(|part| part == mark.as_bytes()))
        };
        eventually("no process", ENOUGH, || !list("/proc").iter().any(|pid| bears_mark(pid)));
    }
}

#[test]
fn exit_codes_are_those_of_the_program_or_of_env() {
    let code = |arguments: &[&str]| {
        let output = Command::new(built("rtvirtio-run")).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(code(&["--", "sh", "-c", "exit 7"]), (Some(7), String::new()));
    assert_eq!(code(&["sh", "-c", "exit 0"]), (Some(0), String::new()));
    let (missing, said) = code(&["--", "no-such-program"]);
    assert_eq!(missing, Some(127), "{said}");
    assert!(said.contains("no-such-program"), "{said}");
    assert_eq!(code(&["--", "/"]).0, Some(126));
    assert_eq!(code(&["--"]).0, Some(1));
    assert_eq!(code(&["--mode", "fast", "--", "true"]).0, Some(1));
    assert_eq!(code(&["--json", "--", "true"]).0, Some(1));
}

#[test]
fn libraries_that_were_preloaded_stay() {
    let mut command = Command::new(built("rtvirtio-run"));
    command.args(["--", "sh", "-c", "echo $LD_PRELOAD"]).env("LD_PRELOAD", "libm.so.6");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (ours, others) = text.trim().split_once(':').unwrap();
    assert!(ours.ends_with("/librtvirtio_preload.so") && others == "libm.so.6", "{text}");
}

/// Whether `name` is there to be run; if not, `test` is skipped by name.
fn has(test: &str, name: &str) -> bool {
    let has = Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    if !has {
        say(&format!("SKIPPED {test}: needs {name}"));
    }
    has
}

#[test]
fn fio_verifies_what_it_wrote() {
    let test = "fio_verifies_what_it_wrote";
    let Some(directory) = directory(test) else { return };
    if !has(test, "fio") {
        return;
    }
    let fio = |mode: &str, arguments: &[&str]| {
        let mut command = run(mode, Path::new("fio"));
        command.args(["--ioengine=psync", "--direct=1", "--rw=randrw", "--bsrange=4k-64k"]);
        command.args(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]);
        command.args(["--size=8M", "--numjobs=2"]).args(arguments);
        command.args(["--name=job", "--output-format=json"]).current_dir(directory.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{mode}: {}", said(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        for job in report["jobs"].as_array().unwrap() {
            assert_eq!(job["error"], 0, "{mode}: {job}");
            assert!(job["read"]["total_ios"].as_u64().unwrap() > 100, "{mode}: {job}");
        }
        output
    };
    takes_the_short_path(200, || fio("poll", &["--thread"]));
    // Processes of fio end by _exit and say nothing.
    fio("adaptive", &[]);
}

/// RocksDB writes, compacts, and finds every key again, all by direct I/O.
#[test]
fn db_bench_finds_every_key() {
    let test = "db_bench_finds_every_key";
    let Some(directory) = directory(test) else { return };
    if !has(test, "db_bench") {
        return;
    }
    let db_bench = |mode: &str, benchmarks: &str, existing: bool| {
        let mut command = run(mode, Path::new("db_bench"));
        command.arg(format!("--db={}", directory.path().join("db").display()));
        command.args(["--num=20000", "--key_size=32", "--value_size=200", "--threads=4"]);
        command.args(["--use_direct_reads", "--use_direct_io_for_flush_and_compaction"]);
        command.args(["--cache_size=65536", "--compression_type=none", "--progress_reports=0"]);
        command.arg(format!("--benchmarks={benchmarks}"));
        command.arg(format!("--use_existing_db={existing}"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{mode}: {}", said(&output));
        output
    };
    db_bench("adaptive", "fillrandom,flush,fillseq,compact", false);
    let finds_all = |mode: &str| {
        let output = db_bench(mode, "readrandom", true);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found = text.lines().find_map(|line| line.split_once("(")?.1.strip_suffix(" found)"));
        let (found, of) = found.and_then(|found| found.split_once(" of ")).expect(&text);
        assert_eq!(found, of, "{mode}: {text}");
        output
    };
    finds_all("interrupt");
    takes_the_short_path(1000, || finds_all("poll"));
    finds_all("adaptive");
}

#[test]
fn git_fsck_finds_the_same() {
    let test = "git_fsck_finds_the_same";
    if !has(test, "git") {
        return;
    }
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let git = |command: &mut Command, arguments: &[&str]| {
        command.args(["-c", "user.name=n", "-c", "user.email=e@example.org"]).args(arguments);
        command.current_dir(directory.path()).env("HOME", directory.path());
        let output = command.env("GIT_CONFIG_NOSYSTEM", "1").output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        output
    };
    let plain = |arguments: &[&str]| git(&mut Command::new("git"), arguments);
    plain(&["init", "--quiet"]);
    for i in 0..20 {
        fs::write(directory.path().join(format!("file{}", i % 7)), format!("{i}\n").repeat(500))
            .unwrap();
        plain(&["add", "."]);
        plain(&["commit", "--quiet", "--message", &i.to_string()]);
    }
    let with = |arguments: &[&str]| git(&mut run("poll", Path::new("git")), arguments);
    with(&["gc", "--quiet"]);
    let arguments = ["fsck", "--strict", "--full", "--verbose"];
    let (without, with) = (plain(&arguments), with(&arguments));
    let lines = |output: &Output| -> BTreeSet<String> {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.lines().filter(|l| !l.starts_with("{\"program\"")).map(str::to_owned).collect()
    };
    assert_eq!(lines(&without), lines(&with));
    assert_eq!(without.stdout, with.stdout);
}

#[test]
fn python_forks_and_threads() {
    let test = "python_forks_and_threads";
    if !has(test, "python3") {
        return;
    }
    let Some(directory) = directory(test) else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/run/program.py");
    let is_all_right = |mode: &str| {
        let mut command = run(mode, Path::new("python3"));
        let output = command.arg(&script).current_dir(directory.path()).output().unwrap();
        assert!(output.status.success(), "{mode}: {}", said(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "all right\n");
        output
    };
    is_all_right("interrupt");
    takes_the_short_path(100, || is_all_right("poll"));
    is_all_right("adaptive");
}
