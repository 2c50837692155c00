use super::*;

fn lateness(p99_us: f64) -> Lateness {
    Lateness { n: 1, p50_us: 1.0, p99_us, p99_low_us: 1.0, p99_high_us: 1.0, max_us: 1.0 }
}

fn shown(rate: f64, pause_us: f64, wake_us: f64, busy_cores: f64) -> Shown {
    Shown {
        stage: Stage::Heavy,
        seconds: 1.0,
        moves: 1,
        rate,
        idle_moves: 0,
        busy: 0,
        resets: 0,
        churns: 0,
        pause: lateness(pause_us),
        wake: lateness(wake_us),
        machine: Machine { load1: 0.0, busy_cores, steal_cores: 0.0 },
        cpus: 2,
        load: Report::default(),
    }
}

#[test]
fn pause_is_judged_by_its_limit_when_a_core_is_idle_and_else_by_wake_ups() {
    assert!(shown(1000.0, 1000.0, 10.0, 1.0).passed());
    assert!(!shown(1000.0, 1001.0, 900.0, 1.0).passed());
    assert!(shown(1000.0, 2700.0, 900.0, 1.1).passed());
    assert!(!shown(1000.0, 2701.0, 900.0, 1.1).passed());
}

#[test]
fn too_few_moves_do_not_pass() {
    assert!(!shown(999.0, 1.0, 10.0, 1.0).passed());
}

#[test]
fn percentile_has_the_interval_of_its_rank() {
    let mut histogram = rtvirtio_testbed::window::durations().unwrap();
    (1..=10_000).for_each(|us| histogram.record(us * 1000).unwrap());
    let shown = Lateness::of(&histogram);
    // Rank 9,900 +- 1.96 * sqrt(10,000 * 0.99 * 0.01) = 19.5, each to 1 %.
    assert_eq!(shown.n, 10_000);
    assert!((shown.p99_us - 9900.0).abs() < 99.0, "{shown:?}");
    assert!(shown.p99_low_us <= 9881.0 * 1.01 && shown.p99_high_us >= 9919.0, "{shown:?}");
}

#[test]
fn configuration_has_a_control_socket_and_two_iothreads() {
    let engine = "type = \"ram\", size = \"64M\"";
    let text = configuration(Path::new("/a/s"), Path::new("/a/c"), engine);
    let parsed = rtvirtio_spec::serve::parse("serve.toml", &text).unwrap();
    assert_eq!(parsed.control.unwrap().socket, Path::new("/a/c"));
    assert_eq!(parsed.iothreads.len(), 2);
    assert_eq!(parsed.devices[0].queues(), 4);
}
