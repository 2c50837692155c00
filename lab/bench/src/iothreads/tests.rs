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
fn cpu_time_is_read_whatever_the_threads_name() {
    // proc(5): pid (comm) state ppid … cmajflt utime stime cutime …
    let stat =
        |name: &str| format!("17 ({name}) S 1 17 17 0 -1 4194560 5 0 6 0 1200 34 7 8 20 0 9");
    for name in ["IO iothread1", "CPU 0/TCG", "a) R 1 (b", ") ("] {
        assert_eq!(cpu_ticks(&stat(name)), Some(1234), "{name}");
    }
    for odd in [
        "",
        "17 (x",
        "17 (x) S 1 17 17 0 -1 4194560 5 0 6 0 1200",
        "17 (x) S 1 2 3 4 5 6 7 8 9 10 a b",
    ] {
        assert_eq!(cpu_ticks(odd), None, "{odd}");
    }
    // This thread's own, from the kernel: no less after some work.
    let own = || cpu_ticks(&read_to_string("/proc/thread-self/stat").unwrap()).unwrap();
    let before = own();
    let start = Instant::now();
    while own() < before + 2 {
        assert!(start.elapsed() < Duration::from_secs(30), "CPU time stands still");
    }
}

#[test]
fn cpu_time_is_shared_out_over_requests() {
    let cpu = |iothreads: &[u64], vcpus, main_loop, process| Cpu {
        iothreads: iothreads.to_vec(),
        vcpus,
        main_loop,
        process,
    };
    let window = cpu(&[130, 140], 700, 70, 1050).since(&cpu(&[100, 120], 400, 60, 680));
    assert_eq!(window, cpu(&[30, 20], 300, 10, 370));
    // 370 ticks are 3.7 s: 37 µs for each of 100,000.
    let each = CpuMicros { iothreads: 5.0, vcpus: 30.0, main_loop: 1.0, other: 1.0, total: 37.0 };
    assert_eq!(window.for_each(100_000), each);
}

#[test]
fn table_has_medians_and_ranges() {
    let run = |service, depth, iops, total| Run {
        service,
        depth,
        repetition: 0,
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
