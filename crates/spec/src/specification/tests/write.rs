//! Writing a specification, and reading anything at all.

use super::*;

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
        let vms = proptest::collection::vec(vm(names), 1..6);
        (vms, any::<bool>()).prop_map(move |(mut vms, on_data_plane)| {
            for (i, vm) in vms.iter_mut().enumerate() {
                vm.name = VmName::new(format!("{}{i}", vm.name)).unwrap();
                let own = vm.cgroup.to_string_lossy().into_owned();
                vm.cgroup = if own.is_empty() {
                    PathBuf::from(format!("rtvirtio/{}", vm.name))
                } else {
                    PathBuf::from(format!("{i}.slice/x{own}"))
                };
            }
            if on_data_plane {
                for (i, vm) in vms.iter_mut().enumerate() {
                    vm.backend = Backend::VhostUser;
                    let marked = vm.tasks.iter_mut().filter(|task| task.load.queue_depth % 2 == 0);
                    let ioprio = Recognise::Ioprio("rt/4".parse().unwrap());
                    marked.for_each(|task| task.recognise = ioprio);
                    for disk in &mut vm.disks {
                        let unique = DiskName::new(format!("{}-{i}", disk.name)).unwrap();
                        let old = std::mem::replace(&mut disk.name, unique.clone());
                        let tasks = vm.tasks.iter_mut().filter(|task| task.disk == old);
                        tasks.for_each(|task| task.disk = unique.clone());
                    }
                }
            }
            let data_plane = on_data_plane.then(|| "/run/rtvirtio/control.sock".into());
            Specification { data_plane, devices: devices.clone(), vms }
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
