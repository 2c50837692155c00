//! Tests of parsing, refusing and writing specifications.

use std::path::PathBuf;

use proptest::prelude::*;
use rtvirtio_units::{
    Bytes, Confidence, DeviceName, DiskName, Iops, NameError, Nanos, Percentile, TaskName, VmName,
};

use super::*;

const FULL: &str = r#"version = 1
[device.data]
path = "/dev/disk/by-id/nvme-x"
profile = "profiles/data.json"

[[vm]]
name = "plc"
backend = "kernel"
cgroup = "machine.slice/plc.scope"
[[vm.disk]]
name = "root"
device = "data"
[[vm.task]]
name = "control"
disk = "root"
recognise = "disk"
iops = 100
block_size = "128k"
read_percent = 29
queue_depth = 8
target = { percentile = 99.9, latency_ms = 20.5, confidence = 0.9 }

[[vm]]
name = "backup"
vcpus = 4
guest_agent = true
[[vm.disk]]
name = "root"
device = "data"
queues = 2
"#;

/// The least that parses, with `vm` below the VM's name and `task` in a task.
fn small(vm: &str, task: &str) -> String {
    format!(
        "version = 1\n[device.data]\npath = \"/dev/vdb\"\nprofile = \"p.json\"\n\
         [[vm]]\nname = \"plc\"\n{vm}\n[[vm.disk]]\nname = \"root\"\ndevice = \"data\"\n\
         [[vm.task]]\nname = \"control\"\n{task}\n"
    )
}

/// `small` ends its task's line here: the line of `task`.
const TASK_LINE: usize = 13;

fn task_of(task: &str) -> Task {
    parse("s.toml", &small("", task)).unwrap().vms.remove(0).tasks.remove(0)
}

fn refused(text: &str) -> SpecificationError {
    parse("s.toml", text).expect_err("must be refused")
}

fn problem(text: &str) -> Problem {
    *refused(text).problem
}

fn task_problem(task: &str) -> Problem {
    let error = refused(&small("", task));
    assert_eq!(error.line, TASK_LINE, "{error}");
    *error.problem
}

fn cgroup_fault(cgroup: &str) -> CgroupFault {
    match problem(&small(&format!("cgroup = \"{cgroup}\""), "")) {
        Problem::BadCgroup { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn parse_full_file_gives_every_field() {
    let vm = |name: &str, cgroup: &str, vcpus, queues, tasks| Vm {
        name: VmName::new(name).unwrap(),
        backend: Backend::Kernel,
        cgroup: PathBuf::from(cgroup),
        vcpus,
        // Who says the one in these files says the other.
        guest_agent: vcpus.is_some(),
        disks: vec![Disk {
            name: DiskName::new("root").unwrap(),
            device: DeviceName::new("data").unwrap(),
            queues,
        }],
        tasks,
    };
    let control = Task {
        name: TaskName::new("control").unwrap(),
        disk: DiskName::new("root").unwrap(),
        recognise: Recognise::Disk,
        load: Load {
            iops: Some(Iops::new(100.0).unwrap()),
            block_size: Bytes::new(131_072),
            read_fraction: 0.29,
            queue_depth: 8,
        },
        target: Some(Target {
            percentile: Percentile::new(99.9).unwrap(),
            latency: Nanos::new(20_500_000),
            confidence: Confidence::new(0.9).unwrap(),
        }),
    };
    let expected = Specification {
        devices: vec![Device {
            name: DeviceName::new("data").unwrap(),
            path: PathBuf::from("/dev/disk/by-id/nvme-x"),
            profile: PathBuf::from("profiles/data.json"),
        }],
        vms: vec![
            vm("plc", "machine.slice/plc.scope", None, None, vec![control]),
            vm("backup", "rtvirtio/backup", Some(4), Some(2), vec![]),
        ],
    };
    let parsed = parse("s.toml", FULL).unwrap();
    assert_eq!(parsed, expected);
    assert!(!parsed.vms[0].is_background());
    assert!(parsed.vms[1].is_background());
}

#[test]
fn parse_task_without_keys_has_defaults() {
    let task = task_of("target = { latency_ms = 3 }");
    assert_eq!(task.disk.as_str(), "root");
    assert_eq!(task.recognise, Recognise::Unrecognised);
    assert_eq!(task.load.iops, None);
    assert_eq!(task.load.block_size, Bytes::new(4096));
    assert_eq!(task.load.read_fraction, 0.7);
    assert_eq!(task.load.queue_depth, 1);
    let target = task.target.unwrap();
    assert_eq!(target.percentile.get(), 99.99);
    assert_eq!(target.latency, Nanos::new(3_000_000));
    assert_eq!(target.confidence.get(), 0.95);
    assert_eq!(task_of("").target, None);
}

#[test]
fn parse_devices_keep_the_order_of_the_file() {
    let text = "version = 1\n[device.z]\npath = \"/dev/z\"\nprofile = \"z\"\n\
                [device.a]\npath = \"/dev/a\"\nprofile = \"a\"\n\
                [[vm]]\nname = \"v\"\n[[vm.disk]]\nname = \"d\"\ndevice = \"a\"\n";
    let names: Vec<String> =
        parse("s.toml", text).unwrap().devices.iter().map(|d| d.name.to_string()).collect();
    assert_eq!(names, ["z", "a"]);
}

#[test]
fn parse_inline_tables_is_the_same_as_headers() {
    let text = "version = 1\ndevice.data = { path = \"/dev/vdb\", profile = \"p.json\" }\n\
                vm = [{ name = \"plc\", disk = [{ name = \"root\", device = \"data\" }], \
                task = [{ name = \"control\" }] }]\n";
    assert_eq!(parse("a", text), parse("b", &small("", "")));
}

#[test]
fn parse_windows_line_ends_and_byte_order_mark_are_accepted() {
    let text = format!("\u{feff}{}", FULL.replace('\n', "\r\n"));
    assert_eq!(parse("a", &text), parse("b", FULL));
}

#[test]
fn block_size_texts_and_bytes_are_read() {
    let size = |text: &str| task_of(&format!("block_size = {text}")).load.block_size.get();
    assert_eq!(size("\"512\""), 512);
    assert_eq!(size("512"), 512);
    assert_eq!(size("\"4k\""), 4096);
    assert_eq!(size("\"128K\""), 131_072);
    assert_eq!(size("\"1m\""), 1_048_576);
    assert_eq!(size("16777216"), 16_777_216);
}

#[test]
fn block_size_off_sector_or_out_of_range_is_refused() {
    let bad = [
        "0",
        "-512",
        "513",
        "16777728",
        "\"17m\"",
        "\"\"",
        "\"k\"",
        "\"+4k\"",
        "\"4kb\"",
        "\"é\"",
        "\"99999999999999999999m\"",
        "\"18014398509481984k\"",
    ];
    for text in bad {
        let found = task_problem(&format!("block_size = {text}"));
        assert!(matches!(found, Problem::BadBlockSize { .. }), "{text}: {found}");
    }
    let found = task_problem("block_size = 4.5");
    assert!(matches!(found, Problem::WrongType { key: "block_size", .. }), "{found}");
}

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
    let expected = ["version", "device", "vm"].map(str::to_owned).to_vec();
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

#[test]
fn name_with_traversal_nul_or_control_is_refused() {
    let reason = |name: &str| match problem(&FULL.replacen("\"plc\"", &format!("\"{name}\""), 1)) {
        Problem::BadName { kind: Kind::Vm, reason, .. } => reason,
        other => panic!("{other}"),
    };
    assert_eq!(reason("../plc"), NameError::BadCharacter('/'));
    assert_eq!(reason(".."), NameError::BadStart('.'));
    assert_eq!(reason("a\\u0000b"), NameError::BadCharacter('\0'));
    assert_eq!(reason("a\\nb"), NameError::BadCharacter('\n'));
    assert_eq!(reason("a\\u001bb"), NameError::BadCharacter('\u{1b}'));
    assert_eq!(reason(""), NameError::Empty);

    let error = refused(&FULL.replacen("\"plc\"", "\"a\\nb\"", 1));
    assert!(!error.to_string().contains('\n'), "{error}");
    assert!(error.to_string().starts_with("s.toml:7:8: vm 1: \"a\\nb\" is not a name"), "{error}");

    let other = |text: String| match problem(&text) {
        Problem::BadName { kind, .. } => kind,
        other => panic!("{other}"),
    };
    assert_eq!(other(FULL.replacen("[device.data]", "[device.\"../x\"]", 1)), Kind::Device);
    assert_eq!(other(FULL.replacen("name = \"root\"", "name = \"../x\"", 1)), Kind::Disk);
    assert_eq!(other(FULL.replacen("name = \"control\"", "name = \"../x\"", 1)), Kind::Task);
}

#[test]
fn name_raw_nul_in_text_is_refused() {
    let found = problem(&FULL.replacen("plc", "p\0lc", 1));
    assert!(matches!(found, Problem::Toml { .. }), "{found}");
}

#[test]
fn cgroup_that_leaves_the_mount_is_refused() {
    assert_eq!(cgroup_fault("../x"), CgroupFault::DotComponent);
    assert_eq!(cgroup_fault("a/../../x"), CgroupFault::DotComponent);
    assert_eq!(cgroup_fault("a/./x"), CgroupFault::DotComponent);
    assert_eq!(cgroup_fault(".."), CgroupFault::DotComponent);
    assert_eq!(cgroup_fault("/a"), CgroupFault::Absolute);
    assert_eq!(cgroup_fault("a//b"), CgroupFault::EmptyComponent);
    assert_eq!(cgroup_fault("a/"), CgroupFault::EmptyComponent);
    assert_eq!(cgroup_fault(""), CgroupFault::Path(PathFault::Empty));
    let nul = PathFault::ControlCharacter('\0');
    assert_eq!(cgroup_fault("a\\u0000"), CgroupFault::Path(nul));
    assert_eq!(cgroup_fault(&"a".repeat(256)), CgroupFault::LongComponent);
    assert_eq!(cgroup_fault(&"a/".repeat(2048)), CgroupFault::Path(PathFault::TooLong));
}

#[test]
fn cgroup_of_libvirt_is_accepted() {
    let text = small("cgroup = 'machine.slice/machine-qemu\\x2d1\\x2dplc.scope/..a'", "");
    let expected = "machine.slice/machine-qemu\\x2d1\\x2dplc.scope/..a";
    assert_eq!(parse("s.toml", &text).unwrap().vms[0].cgroup, PathBuf::from(expected));
}

#[test]
fn cgroup_shared_or_nested_is_refused() {
    let vms = |cgroups: &[&str]| {
        let mut text = "version = 1\n[device.d]\npath = \"/dev/d\"\nprofile = \"p\"\n".to_owned();
        for (i, cgroup) in cgroups.iter().enumerate() {
            text.push_str(&format!("[[vm]]\nname = \"v{i}\"\n{cgroup}\n"));
            text.push_str("[[vm.disk]]\nname = \"d\"\ndevice = \"d\"\n");
        }
        text
    };
    let error = refused(&vms(&["cgroup = \"a/b\"", "", "cgroup = \"a/b\""]));
    assert_eq!(
        error.to_string(),
        "s.toml:19:10: vm \"v2\": cgroup \"a/b\" is the cgroup of vm \"v0\" too"
    );
    let error = refused(&vms(&["cgroup = \"a/b/c\"", "cgroup = \"a/b-c\"", "cgroup = \"a/b\""]));
    assert_eq!(
        error.to_string(),
        "s.toml:19:10: vm \"v2\": cgroup \"a/b\" and cgroup \"a/b/c\" of vm \"v0\" lie one inside the other"
    );
    let error = refused(&vms(&["", "cgroup = \"rtvirtio/v0/x\""]));
    assert!(matches!(*error.problem, Problem::CgroupNested { .. }), "{error}");
    assert!(
        parse("s", &vms(&["cgroup = \"a/b\"", "cgroup = \"a/bc\"", "cgroup = \"a/b-\""])).is_ok()
    );
}

#[test]
fn device_path_relative_empty_or_with_control_is_refused() {
    let fault = |path: &str| match problem(&FULL.replacen("/dev/disk/by-id/nvme-x", path, 1)) {
        Problem::BadPath { key: "path", fault, .. } => fault,
        other => panic!("{other}"),
    };
    assert_eq!(fault("dev/vdb"), PathFault::Relative);
    assert_eq!(fault("./vdb"), PathFault::Relative);
    assert_eq!(fault(""), PathFault::Empty);
    assert_eq!(fault("/dev/\\u0000"), PathFault::ControlCharacter('\0'));
    assert_eq!(fault(&"/".repeat(4096)), PathFault::TooLong);
    assert_eq!(
        problem(&FULL.replacen("profile = \"profiles/data.json\"\n", "", 1)),
        Problem::MissingKey { key: "profile" }
    );
}

#[test]
fn device_path_of_two_devices_is_refused() {
    let more = "[device.again]\npath = \"/dev/disk/by-id/nvme-x\"\nprofile = \"p\"\n[[vm]]";
    let error = refused(&FULL.replacen("[[vm]]", more, 1));
    assert_eq!(
        error.to_string(),
        "s.toml:7:8: device \"again\": path \"/dev/disk/by-id/nvme-x\" is the path of device \"data\" too"
    );
}

#[test]
fn name_twice_is_refused() {
    let kind = |text: String| match problem(&text) {
        Problem::DuplicateName { kind, .. } => kind,
        other => panic!("{other}"),
    };
    assert_eq!(kind(FULL.replacen("backup", "plc", 1)), Kind::Vm);
    let disk = "[[vm.disk]]\nname = \"root\"\ndevice = \"data\"\n";
    assert_eq!(kind(format!("{FULL}{disk}")), Kind::Disk);
    let task = "[[vm.task]]\nname = \"t\"\n";
    assert_eq!(kind(format!("{FULL}{task}{task}")), Kind::Task);
}

#[test]
fn reference_to_nothing_is_refused_with_the_nearest() {
    let error = refused(&FULL.replacen("device = \"data\"", "device = \"dat\"", 1));
    assert_eq!(
        error.to_string(),
        "s.toml:12:10: vm \"plc\": disk \"root\": there is no device \"dat\""
    );
    assert!(error.hint().starts_with("did you mean \"data\"?"), "{}", error.hint());
    let error = refused(&FULL.replacen("disk = \"root\"", "disk = \"boot\"", 1));
    assert_eq!(
        error.to_string(),
        "s.toml:15:8: vm \"plc\": task \"control\": the vm has no disk \"boot\""
    );
    assert!(error.hint().ends_with("use one of root"), "{}", error.hint());
}

#[test]
fn task_of_two_disks_without_disk_is_refused() {
    let more = "[[vm.disk]]\nname = \"log\"\ndevice = \"data\"\n[[vm.task]]\nname = \"t\"\n";
    let error = refused(&format!("{FULL}{more}"));
    assert_eq!(error.hint(), "write disk = \"NAME\" with one of root, log");
}

#[test]
fn backend_vhost_user_is_refused_as_not_yet() {
    let error = refused(&small("backend = \"vhost-user\"", ""));
    assert_eq!(
        error.to_string(),
        "s.toml:7:11: vm \"plc\": backend \"vhost-user\" is not in this version"
    );
    assert!(error.hint().contains("backend = \"kernel\""));
    let found = problem(&small("backend = \"virtio\"", ""));
    assert_eq!(found, Problem::UnknownBackend { backend: "virtio".to_owned() });
}

#[test]
fn recognise_ioprio_is_refused_on_the_host_path() {
    let error = refused(&small("", "recognise = \"ioprio:rt/0\""));
    assert!(error.to_string().contains("cannot see a guest's ioprio"), "{error}");
    assert!(error.hint().contains("recognise = \"disk\""));
    assert!(matches!(task_problem("recognise = \"x\""), Problem::UnknownRecognise { .. }));
}

#[test]
fn file_larger_than_the_limit_is_refused_unparsed() {
    // 64 MiB of what would otherwise be a syntax error on its first byte.
    let text = "]".repeat(64 << 20);
    let error = refused(&text);
    assert_eq!(*error.problem, Problem::TooLarge { bytes: 67_108_864 });
    assert_eq!((error.line, error.column), (1, 1));
    // At the limit a file is read.
    let mut text = FULL.to_owned();
    text.push('#');
    text.push_str(&"x".repeat(MAX_FILE_BYTES - text.len()));
    assert_eq!(text.len(), 4_194_304);
    assert!(parse("s.toml", &text).is_ok());
    text.push('x');
    assert_eq!(problem(&text), Problem::TooLarge { bytes: 4_194_305 });
}

#[test]
fn nesting_deep_is_refused_without_overflow() {
    for (open, close) in [("[", "]"), ("{a=", "}")] {
        let closed = format!("x = {}1{}", open.repeat(100_000), close.repeat(100_000));
        assert!(matches!(problem(&closed), Problem::Toml { .. }));
        let error = refused(&format!("version = 1\nx = {}", open.repeat(100_000)));
        assert!(error.hint().contains("levels"), "{error}: {}", error.hint());
    }
    assert_eq!(problem(&format!("{}x = 1", "a.".repeat(100_000))), Problem::KeyTooDeep);
    assert_eq!(problem(&format!("[{}x]", "a.".repeat(100_000))), Problem::KeyTooDeep);
    assert_eq!(problem("a.b.c.d.e.f.g.h.i = 1"), Problem::KeyTooDeep);
    assert!(matches!(problem("a.b.c.d.e.f.g.h = 1"), Problem::UnknownKey { .. }));
}

/// The TOML parser bounds brackets and the parts of a key, not their product.
#[test]
fn nesting_of_dotted_keys_in_tables_does_not_overflow() {
    let key = |parts: usize| vec!["a"; parts].join(".");
    let tables = |parts: usize, depth: usize| {
        let open = format!("{{ {} = ", key(parts)).repeat(depth);
        format!("{open}1{}", "}".repeat(depth))
    };
    let nested = |parts: usize, depth: usize| {
        format!("version = 1\n[{0}]\n{0} = {1}\n", key(parts), tables(parts, depth))
    };
    assert_eq!(problem(&nested(79, 79)), Problem::KeyTooDeep);
    // The deepest that reaches the parser's tree; a test's stack is 2 MiB.
    assert!(matches!(problem(&nested(8, 79)), Problem::UnknownKey { .. }));
    // A table in place of a scalar is dropped unread.
    let found = task_problem(&format!("iops = {}", tables(8, 79)));
    assert!(matches!(found, Problem::WrongType { key: "iops", .. }), "{found}");
}

#[test]
fn more_entries_than_the_limit_are_refused() {
    let head = "version = 1\n[device.d]\npath = \"/dev/d\"\nprofile = \"p\"\n";
    let vms = |n: usize| {
        let mut text = head.to_owned();
        for i in 0..n {
            text.push_str(&format!(
                "[[vm]]\nname = \"v{i}\"\ndisk = [{{ name = \"d\", device = \"d\" }}]\n"
            ));
        }
        text
    };
    assert_eq!(parse("s.toml", &vms(10_000)).unwrap().vms.len(), 10_000);
    let too_many = |kind, count, limit| Problem::TooMany { kind, count, limit };
    assert_eq!(problem(&vms(10_001)), too_many(Kind::Vm, 10_001, 10_000));

    let disks = |n: usize| {
        let mut text = format!("{head}[[vm]]\nname = \"v\"\n");
        for i in 0..n {
            text.push_str(&format!("[[vm.disk]]\nname = \"d{i}\"\ndevice = \"d\"\n"));
        }
        text
    };
    assert!(parse("s.toml", &disks(64)).is_ok());
    assert_eq!(problem(&disks(65)), too_many(Kind::Disk, 65, 64));
    let tasks = |n: usize| {
        let mut text = disks(1);
        for i in 0..n {
            text.push_str(&format!("[[vm.task]]\nname = \"t{i}\"\n"));
        }
        text
    };
    assert!(parse("s.toml", &tasks(64)).is_ok());
    assert_eq!(problem(&tasks(65)), too_many(Kind::Task, 65, 64));
}

#[test]
fn error_of_a_long_hostile_text_stays_short() {
    let error = refused(&format!("version = 1\n{} = 1\n", "k".repeat(1 << 20)));
    assert!(error.to_string().len() < 400 && error.hint().len() < 400);
    let name = format!("name = \"{}\"", "\u{1F600}".repeat(1 << 16));
    let error = refused(&FULL.replacen("name = \"plc\"", &name, 1));
    assert!(error.to_string().len() < 600 && error.hint().len() < 400);
}

#[test]
fn to_toml_writes_decimals_and_escapes() {
    let text = FULL
        .replacen("20.5", "0.0105", 1)
        .replacen("nvme-x", "a\\\"b\\\\c", 1)
        .replacen("\"128k\"", "1536", 1);
    let written = to_toml(&parse("s.toml", &text).unwrap());
    assert!(written.contains("latency_ms = 0.0105,"), "{written}");
    assert!(written.contains(r#"path = "/dev/disk/by-id/a\"b\\c""#), "{written}");
    assert!(written.contains("block_size = 1536\n"), "{written}");
    assert!(written.contains("read_percent = 29\n"), "{written}");
    assert_eq!(parse("w", &written), parse("s.toml", &text));
}

fn name() -> impl Strategy<Value = String> {
    "[A-Za-z0-9_][A-Za-z0-9._@+-]{0,40}"
}

/// Any text that a path may hold.
fn path_text() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{0,40}"
}

fn target() -> impl Strategy<Value = Target> {
    (50.0..=99.9999, 1..=3_600_000_000_000_u64, 0.5..=0.999).prop_map(|(p, ns, c)| Target {
        percentile: Percentile::new(p).unwrap(),
        latency: Nanos::new(ns),
        confidence: Confidence::new(c).unwrap(),
    })
}

fn task(disks: usize) -> impl Strategy<Value = (String, usize, bool, Load, Option<Target>)> {
    let load = (proptest::option::of(0.001..=1e8_f64), 1..=32_768_u64, 0..=100_u32, 1..=1024_u32)
        .prop_map(|(iops, sectors, percent, queue_depth)| Load {
            iops: iops.map(|i| Iops::new(i).unwrap()),
            block_size: Bytes::new(sectors * 512),
            read_fraction: f64::from(percent) / 100.0,
            queue_depth,
        });
    (name(), 0..disks, any::<bool>(), load, proptest::option::of(target()))
}

fn vm(devices: Vec<DeviceName>) -> impl Strategy<Value = Vm> {
    (1..4_usize).prop_flat_map(move |disks| {
        let devices = devices.clone();
        (
            name(),
            proptest::option::of("[^/\\p{Cc}]{0,40}"),
            proptest::option::of(1..=MAX_VCPUS),
            any::<bool>(),
            proptest::collection::vec(
                (name(), 0..devices.len(), proptest::option::of(1..=MAX_QUEUES)),
                disks,
            ),
            proptest::collection::vec(task(disks), 0..4),
        )
            .prop_map(move |(vm, cgroup, vcpus, guest_agent, disks, tasks)| {
                // A number makes names unique within a VM; `specification` does so for VMs.
                let disks: Vec<Disk> = disks
                    .into_iter()
                    .enumerate()
                    .map(|(i, (name, device, queues))| Disk {
                        name: DiskName::new(format!("{name}{i}")).unwrap(),
                        device: devices[device].clone(),
                        queues,
                    })
                    .collect();
                let tasks = tasks
                    .into_iter()
                    .enumerate()
                    .map(|(i, (name, disk, by_disk, load, target))| Task {
                        name: TaskName::new(format!("{name}{i}")).unwrap(),
                        disk: disks[disk].name.clone(),
                        recognise: if by_disk { Recognise::Disk } else { Recognise::Unrecognised },
                        load,
                        target,
                    })
                    .collect();
                let cgroup = cgroup.map(PathBuf::from).unwrap_or_default();
                let name = VmName::new(vm).unwrap();
                Vm { name, backend: Backend::Kernel, cgroup, vcpus, guest_agent, disks, tasks }
            })
    })
}

/// Any specification that `parse` may give.
fn specification() -> impl Strategy<Value = Specification> {
    proptest::collection::vec((name(), path_text(), path_text()), 1..4).prop_flat_map(|devices| {
        let devices: Vec<Device> = devices
            .into_iter()
            .enumerate()
            .map(|(i, (name, path, profile))| Device {
                name: DeviceName::new(format!("{name}{i}")).unwrap(),
                path: PathBuf::from(format!("/{i}/{path}")),
                profile: PathBuf::from(format!("{profile}p")),
            })
            .collect();
        let names = devices.iter().map(|d| d.name.clone()).collect();
        proptest::collection::vec(vm(names), 1..6).prop_map(move |mut vms| {
            for (i, vm) in vms.iter_mut().enumerate() {
                vm.name = VmName::new(format!("{}{i}", vm.name)).unwrap();
                let own = vm.cgroup.to_string_lossy().into_owned();
                vm.cgroup = if own.is_empty() {
                    PathBuf::from(format!("rtvirtio/{}", vm.name))
                } else {
                    PathBuf::from(format!("{i}.slice/x{own}"))
                };
            }
            Specification { devices: devices.clone(), vms }
        })
    })
}

proptest! {
    #[test]
    fn parse_of_to_toml_is_the_same_specification(s in specification()) {
        let text = to_toml(&s);
        let back = parse("s.toml", &text);
        prop_assert!(back.is_ok(), "{}\n{text}", back.unwrap_err());
        prop_assert_eq!(back.unwrap(), s);
    }

    #[test]
    fn parse_of_any_text_returns(text in any::<String>()) {
        let _ = parse("s.toml", &text);
    }

    /// Damage to a valid file: every error has a place in the file, a message and a hint.
    #[test]
    fn parse_of_damaged_file_names_a_place(
        at in 0..FULL.len(),
        cut in 0..40_usize,
        piece in prop_oneof![
            Just(String::new()),
            "[\\[\\]{}=.,\"'#\n\\\\ a-z0-9-]{0,12}",
            any::<String>(),
        ],
    ) {
        let end = (at + cut).min(FULL.len());
        let text = format!("{}{piece}{}", &FULL[..at], &FULL[end..]);
        match parse("s.toml", &text) {
            Ok(s) => prop_assert_eq!(parse("w", &to_toml(&s)), Ok(s)),
            Err(e) => {
                prop_assert!(e.line >= 1 && e.line <= text.matches('\n').count() + 1, "{e}");
                prop_assert!(e.column >= 1);
                prop_assert!(!e.hint().is_empty() && !e.to_string().contains('\n'), "{e}");
            }
        }
    }
}
