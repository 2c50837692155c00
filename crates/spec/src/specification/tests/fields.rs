//! What a file says, and what is taken if it does not.

use super::*;

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
        data_plane: None,
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
