//! The command line. The system's tests (crates/rtvirtio/tests/it) use the binary that cargo builds for this one.

use std::process::Command;

#[test]
fn help_and_wrong_flags_are_answered() {
    let run = |argument: &str| {
        Command::new(env!("CARGO_BIN_EXE_rtvirtio-tree")).arg(argument).output().expect("it runs")
    };
    let help = run("--help");
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("--socket"));
    assert_eq!(run("--no-such-flag").status.code(), Some(1));
}
