use super::*;

#[test]
fn arguments_are_those_of_a_plan() {
    let mapping = |text: &str| {
        format!(
            r#"{{"driver":"virtio-blk-pci","id":"null","drive":"null","num-queues":4,"iothread-vq-mapping":{text}}}"#
        )
    };
    let one = mapping(r#"[{"iothread":"iothread1","vqs":[0,1,2,3]}]"#);
    assert_eq!(
        Service::OneIoThread.arguments().unwrap(),
        ["-object", "iothread,id=iothread1", "-device", &one]
    );
    let two =
        mapping(r#"[{"iothread":"iothread1","vqs":[0,2]},{"iothread":"iothread2","vqs":[1,3]}]"#);
    let objects = ["-object", "iothread,id=iothread1", "-object", "iothread,id=iothread2"];
    let expected = [&objects[..], &["-device", &two]].concat();
    assert_eq!(Service::TwoIoThreads.arguments().unwrap(), expected);
    let [option, device] = <[String; 2]>::try_from(Service::MainLoop.arguments().unwrap()).unwrap();
    assert_eq!(option, "-device");
    assert_eq!(
        serde_json::from_str::<Value>(&device).unwrap(),
        json!({"driver": "virtio-blk-pci", "id": "null", "drive": "null", "num-queues": 4})
    );

    let queues = |iothread: &str, vqs: &[u16]| MappedQueues {
        iothread: iothread.to_owned(),
        vqs: vqs.to_vec(),
    };
    assert_eq!(Service::MainLoop.mapping().unwrap(), []);
    let expected = [queues("iothread1", &[0, 2]), queues("iothread2", &[1, 3])];
    assert_eq!(Service::TwoIoThreads.mapping().unwrap(), expected);
}

#[test]
fn cpu_time_is_shared_out_over_requests() {
    let look = |ns: [u64; 5]| ProcessCpu::of_threads([1, 2, 3, 4, 5].into_iter().zip(ns));
    let (earlier, later) = (look([60, 100, 120, 400, 0]), look([70, 130, 140, 700, 10]));
    let threads = Threads { process: 1, iothreads: vec![2, 3], vcpus: vec![4] };
    let window = threads.cpu(&earlier, &later);
    let expected = Cpu { iothreads: vec![30, 20], vcpus: 300, main_loop: 10, process: 370 };
    assert_eq!(window, expected);
    let of = CpuMicros { iothreads: 5.0, vcpus: 30.0, main_loop: 1.0, other: 1.0, total: 37.0 };
    let scaled = Cpu {
        iothreads: vec![3_000_000, 2_000_000],
        vcpus: 30_000_000,
        main_loop: 1_000_000,
        process: 37_000_000,
    };
    assert_eq!(scaled.for_each(1_000), of);
}

#[test]
fn runs_of_another_window_are_none_of_these() {
    let cpu_us = CpuMicros { iothreads: 1.0, vcpus: 2.0, main_loop: 3.0, other: 4.0, total: 10.0 };
    let run = Run {
        key: Key { service: Service::MainLoop, depth: 1, repetition: 0 },
        requests: 5_003,
        iops: 1_000.0,
        cpu_us,
        iothread_cores: vec![],
        elsewhere_cores: 0.5,
        machine: Machine { load1: 1.0, busy_cores: 2.0, steal_cores: 0.0 },
    };
    let of = experiment::of::<Benchmark>;
    assert_eq!(of(&[]).foreign(&run), None);
    assert_eq!(of(&["--window=20"]).foreign(&run), Some("another window"));
}

#[test]
fn table_has_medians_and_ranges() {
    let run = |service, depth, iops, total| Run {
        key: Key { service, depth, repetition: 0 },
        requests: 1,
        iops,
        cpu_us: CpuMicros { iothreads: 1.0, vcpus: 2.0, main_loop: 3.0, other: 4.0, total },
        iothread_cores: vec![],
        elsewhere_cores: 0.5,
        machine: Machine { load1: 1.0, busy_cores: 2.0, steal_cores: 0.0 },
    };
    let (one, two) = (Service::OneIoThread, Service::TwoIoThreads);
    let runs = [
        run(two, 32, 900.0, 9.0),
        run(one, 1, 30.0, 7.0),
        run(one, 1, 10.0, 8.0),
        run(one, 1, 20.0, 30.0),
    ];
    let rows = rows(&runs);
    let text = table(&rows, "IOPS").to_string();
    let words =
        |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = text.lines().map(words).collect();
    assert_eq!(
        lines[1..],
        [
            "4 x 1 1 IOThread 3 20 (10–30) 8.0 (7.0–30.0) 1.0 (1.0–1.0) 3.0 (3.0–3.0) 2.0 (2.0–2.0) \
             0.50 (0.50–0.50)",
            "4 x 32 mapping over 2 1 900 (900–900) 9.0 (9.0–9.0) 1.0 (1.0–1.0) 3.0 (3.0–3.0) 2.0 (2.0–2.0) \
             0.50 (0.50–0.50)",
        ]
    );
}

#[test]
fn tcg_is_labelled_and_names_the_lane_it_skips() {
    let labelled =
        |notes: &[String]| [GUEST_BOUND, NO_KVM].map(|text| notes.iter().any(|n| n == text));
    assert_eq!(labelled(&notes(Accelerator::Tcg)), [true, true]);
    assert_eq!(labelled(&notes(Accelerator::Kvm)), [false, false]);
    assert!(GUEST_BOUND.starts_with("guest-bound") && NO_KVM.contains("KVM lane"));
    assert_eq!([Accelerator::Tcg, Accelerator::Kvm].map(iops), ["IOPS, guest-bound", "IOPS"]);
}
