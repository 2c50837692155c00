//! Values out of range or of the wrong type.

use super::*;

#[test]
fn number_not_finite_negative_or_zero_is_refused() {
    let bad = [
        ("iops", "nan"),
        ("iops", "inf"),
        ("iops", "-inf"),
        ("iops", "0"),
        ("iops", "-1"),
        ("iops", "1e300"),
        ("read_percent", "-1"),
        ("read_percent", "101"),
        ("queue_depth", "0"),
        ("queue_depth", "1025"),
        ("queue_depth", "18446744073709551616"),
    ];
    for (key, value) in bad {
        let found = task_problem(&format!("{key} = {value}"));
        let fits = matches!(&found, Problem::OutOfRange { key: k, .. } if *k == key);
        assert!(fits, "{key} = {value}: {found}");
    }
    for value in ["nan", "inf", "0", "0.0", "-0.0", "-20", "1e-9", "3600001"] {
        let found = task_problem(&format!("target = {{ latency_ms = {value} }}"));
        let fits = matches!(found, Problem::OutOfRange { key: "latency_ms", .. });
        assert!(fits, "{value}: {found}");
    }
    for value in ["nan", "100", "49", "-99.9"] {
        let found = task_problem(&format!("target = {{ percentile = {value}, latency_ms = 1 }}"));
        let fits = matches!(found, Problem::OutOfRange { key: "percentile", .. });
        assert!(fits, "{value}: {found}");
    }
    for value in ["nan", "1", "0", "-0.95"] {
        let found = task_problem(&format!("target = {{ confidence = {value}, latency_ms = 1 }}"));
        let fits = matches!(found, Problem::OutOfRange { key: "confidence", .. });
        assert!(fits, "{value}: {found}");
    }
}

#[test]
fn number_at_its_limits_is_accepted() {
    assert_eq!(task_of("read_percent = 0").load.read_fraction, 0.0);
    assert_eq!(task_of("read_percent = 100").load.read_fraction, 1.0);
    assert_eq!(task_of("queue_depth = 1024").load.queue_depth, 1024);
    let latency = |ms: &str| {
        task_of(&format!("target = {{ latency_ms = {ms} }}")).target.unwrap().latency.get()
    };
    assert_eq!(latency("0.000001"), 1);
    assert_eq!(latency("3600000"), 3_600_000_000_000);
}

#[test]
fn guest_agent_that_is_no_flag_or_misplaced_is_refused() {
    for value in ["1", "\"true\"", "[true]"] {
        let error = refused(&small(&format!("guest_agent = {value}"), ""));
        let found = &*error.problem;
        assert!(matches!(found, Problem::WrongType { key: "guest_agent", .. }), "{found}");
        assert_eq!((error.line, error.hint().as_str()), (7, "write guest_agent = true"));
    }
    let error = refused(&small("", "guest_agent = true"));
    assert!(error.hint().contains("belongs in [[vm]]"), "{}", error.hint());
    assert!(!parse("s.toml", &small("guest_agent = false", "")).unwrap().vms[0].guest_agent);
}

#[test]
fn vcpus_and_queues_outside_their_limits_are_refused() {
    let disk = |line: &str| FULL.replacen("queues = 2", line, 1);
    let vm = |line: &str| FULL.replacen("vcpus = 4", line, 1);
    for (key, text) in [
        ("vcpus", vm("vcpus = 0")),
        ("vcpus", vm("vcpus = 513")),
        ("vcpus", vm("vcpus = -1")),
        ("queues", disk("queues = 0")),
        ("queues", disk("queues = 1025")),
        ("queues", disk("queues = 18446744073709551616")),
    ] {
        let found = problem(&text);
        let fits = matches!(&found, Problem::OutOfRange { key: k, .. } if *k == key);
        assert!(fits, "{key}: {found}");
    }
    for text in [vm("vcpus = 4.0"), vm("vcpus = \"4\""), disk("queues = [2]")] {
        let found = problem(&text);
        assert!(matches!(found, Problem::WrongType { .. }), "{found}");
    }
    let error = refused(&disk("queues = 0"));
    assert_eq!(
        error.to_string(),
        "s.toml:30:10: vm \"backup\": disk \"root\": queues is 0, outside 1 to 1024"
    );
    assert_eq!(error.hint(), "write queues = 4 (from 1 to 1024)");
    assert!(parse("s.toml", &vm("vcpus = 512")).is_ok());
    assert!(parse("s.toml", &disk("queues = 1024")).is_ok());
}

#[test]
fn queues_left_out_are_one_for_each_vcpu() {
    let queues = |vm: &str, disk: &str| {
        let text = small(vm, "").replacen("device = \"data\"", disk, 1);
        let vm = parse("s.toml", &text).unwrap().vms.remove(0);
        vm.queues_of(&vm.disks[0])
    };
    assert_eq!(queues("vcpus = 8", "device = \"data\""), Some(8));
    assert_eq!(queues("vcpus = 8", "device = \"data\"\nqueues = 2"), Some(2));
    assert_eq!(queues("", "device = \"data\"\nqueues = 2"), Some(2));
    assert_eq!(queues("", "device = \"data\""), None);
}

#[test]
fn value_of_wrong_type_is_named_with_an_example() {
    let error = refused(&small("", "target = { latency_ms = \"20ms\" }"));
    assert_eq!(
        error.to_string(),
        "s.toml:13:25: vm \"plc\": task \"control\": latency_ms is \"20ms\", not a number"
    );
    assert_eq!(error.hint(), "write latency_ms = 20");
    for value in ["[1]", "{ a = 1 }", "true", "2026-01-01", "\"x\""] {
        let found = task_problem(&format!("iops = {value}"));
        assert!(matches!(found, Problem::WrongType { key: "iops", .. }), "{value}: {found}");
    }
    let found = task_problem("read_percent = 70.0");
    assert!(matches!(found, Problem::WrongType { key: "read_percent", .. }), "{found}");
}

#[test]
fn target_without_latency_is_refused() {
    let error = refused(&small("", "target = { percentile = 99 }"));
    assert_eq!(*error.problem, Problem::MissingKey { key: "latency_ms" });
    assert_eq!(error.hint(), "write latency_ms = 20");
    assert_eq!(error.line, TASK_LINE);
}

#[test]
fn table_where_a_list_belongs_is_refused_with_the_shape() {
    let error = refused("version = 1\n[vm]\nname = \"plc\"\n");
    assert_eq!(error.line, 2);
    assert!(error.hint().contains("[[vm.disk]]"), "{}", error.hint());
    assert!(matches!(problem("version = 1\nvm = [1]"), Problem::Toml { .. }));
    assert!(matches!(problem(&small("", "target = 20")), Problem::Toml { .. }));
}
