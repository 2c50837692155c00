//! Keys that are unknown, misplaced or missing, and where an error is said to be.

use super::*;

#[test]
fn error_display_has_file_line_column_subject_and_hint() {
    let error = refused(&small("", "target = { latency_ms = -4 }"));
    assert_eq!(
        error.to_string(),
        "s.toml:13:25: vm \"plc\": task \"control\": latency_ms is -4, outside 0.000001 to 3600000"
    );
    assert_eq!(error.hint(), "write latency_ms = 20 (from 0.000001 to 3600000)");
}

#[test]
fn error_column_counts_characters_not_bytes() {
    let error = refused("version = 1\nvm = [{ name = \"é\", \"ü\" = 1 }]\n");
    assert_eq!((error.line, error.column), (2, 21), "{error}");
}

#[test]
fn unknown_key_names_the_nearest_and_the_expected() {
    let error = refused(&small("", "queue_dept = 2"));
    assert_eq!(error.to_string(), "s.toml:13:1: unknown key \"queue_dept\"");
    assert_eq!(
        error.hint(),
        "did you mean `queue_depth`? the keys of this table are name, disk, recognise, iops, \
         block_size, read_percent, queue_depth, target"
    );
}

#[test]
fn unknown_key_of_another_table_is_sent_home() {
    let error = refused(&small("latency_ms = 4", ""));
    assert_eq!(
        error.hint(),
        "`latency_ms` belongs in the task's target = { percentile = 99.99, latency_ms = 20 }; \
         the keys of this table are name, backend, cgroup, vcpus, guest_agent, disk, task"
    );
}

#[test]
fn unknown_key_with_backticks_keeps_its_text() {
    let found = problem("version = 1\n'a`, expected `b' = 1\n");
    let expected = ["version", "data_plane", "device", "vm"].map(str::to_owned).to_vec();
    assert_eq!(found, Problem::UnknownKey { key: "a`, expected `b".to_owned(), expected });
}

#[test]
fn unknown_key_in_every_table_is_refused() {
    let texts = [
        FULL.replacen("version", "x = 1\nversion", 1),
        FULL.replacen("path =", "x = 1\npath =", 1),
        FULL.replacen("backend", "x = 1\nbackend", 1),
        FULL.replacen("device = ", "x = 1\ndevice = ", 1),
        FULL.replacen("iops", "x = 1\niops", 1),
        FULL.replacen("percentile", "x = 1, percentile", 1),
    ];
    for text in texts {
        let found = problem(&text);
        assert!(matches!(&found, Problem::UnknownKey { key, .. } if key == "x"), "{found}");
    }
}

#[test]
fn key_twice_or_device_twice_is_refused() {
    let error = refused("version = 1\nversion = 1\n");
    assert_eq!(error.to_string(), "s.toml:2:1: duplicate key");
    let error = refused("version = 1\n[device.a]\n[device.'a']\n");
    assert_eq!((error.line, error.to_string().ends_with("duplicate key")), (3, true));
    assert!(error.hint().contains("rename or remove"), "{}", error.hint());
}

#[test]
fn version_other_or_absent_is_refused() {
    // A later version's keys must not be called misspelt.
    assert_eq!(problem("version = 2\n[[vmx]]\n"), Problem::UnknownVersion { found: 2 });
    assert_eq!(problem("[[vm]]\n"), Problem::MissingKey { key: "version" });
    assert!(matches!(problem("version = \"1\""), Problem::WrongType { key: "version", .. }));
    assert!(matches!(problem("version = 1.0"), Problem::WrongType { key: "version", .. }));
}

#[test]
fn no_device_no_vm_or_no_disk_is_refused() {
    assert_eq!(problem("version = 1\n"), Problem::NoDevice);
    let device = "version = 1\n[device.a]\npath = \"/dev/a\"\nprofile = \"p\"\n";
    assert_eq!(problem(device), Problem::NoVm);
    let error = refused(&format!("{device}[[vm]]\nname = \"v\"\n"));
    assert_eq!(error.to_string(), "s.toml:5:1: vm \"v\": the vm has no disk");
}
