//! Names, cgroups, paths, and what refers to them.

use super::*;

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

    // What a VM's name may hold beyond others' names is said.
    let error = refused(&FULL.replacen("\"plc\"", "\"plc \"", 1));
    let Problem::BadName { reason, .. } = &*error.problem else { panic!("{error}") };
    assert_eq!(reason.to_string(), "a name ends with a space (remove it)");
    assert!(error.problem.hint().contains("spaces between them"), "{}", error.problem.hint());

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
    assert_eq!(cgroup_fault("/"), CgroupFault::Path(PathFault::Empty));
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
fn backend_vhost_user_needs_a_data_plane_and_devices_of_its_own() {
    let on_data_plane = small("backend = \"vhost-user\"", "");
    let error = refused(&on_data_plane);
    assert_eq!(
        error.to_string(),
        "s.toml:7:11: vm \"plc\": backend is \"vhost-user\", and there is no [data_plane]"
    );
    assert!(error.hint().contains("[data_plane], then control = "));
    let plane = "[data_plane]\ncontrol = \"/run/x.sock\"\n";
    let with_plane = on_data_plane.replace("[device.data]", &format!("{plane}[device.data]"));
    let found = parse("s.toml", &with_plane).unwrap();
    assert_eq!(found.data_plane, Some(PathBuf::from("/run/x.sock")));
    assert_eq!(found.vms[0].backend, Backend::VhostUser);
    let other = "[[vm]]\nname = \"b\"\n[[vm.disk]]\nname = \"b\"\ndevice = \"data\"\n";
    let again = other.replace("name = \"b\"\ndevice", "name = \"root\"\ndevice");
    let again = again.replace("[[vm]]\n", "[[vm]]\nbackend = \"vhost-user\"\n");
    let found = problem(&format!("{with_plane}{again}"));
    assert_eq!(found, Problem::ServedTwice { name: "root".to_owned() });
    let error = refused(&format!("{with_plane}{other}"));
    assert!(error.to_string().contains("\"plc\" has the other backend"), "{error}");
    let relative = with_plane.replace("/run/x.sock", "x.sock");
    assert!(matches!(problem(&relative), Problem::BadPath { key: "control", .. }));
    let found = problem(&small("backend = \"virtio\"", ""));
    assert_eq!(found, Problem::UnknownBackend { backend: "virtio".to_owned() });
}

#[test]
fn recognise_ioprio_is_for_the_data_plane() {
    let error = refused(&small("", "recognise = \"ioprio:rt/0\""));
    assert!(error.to_string().contains("cannot see a guest's ioprio"), "{error}");
    assert!(error.hint().contains("recognise = \"disk\""));
    assert!(matches!(task_problem("recognise = \"x\""), Problem::UnknownRecognise { .. }));
    let plane = "[data_plane]\ncontrol = \"/run/x.sock\"\n[device.data]";
    let served = |recognise: &str| {
        let text = small("backend = \"vhost-user\"", &format!("recognise = \"{recognise}\""));
        text.replace("[device.data]", plane)
    };
    let found = parse("s.toml", &served("ioprio:be/3")).unwrap();
    assert_eq!(found.vms[0].tasks[0].recognise, Recognise::Ioprio("be/3".parse().unwrap()));
    assert!(matches!(problem(&served("ioprio:rt/8")), Problem::BadIoprio { .. }));
}
