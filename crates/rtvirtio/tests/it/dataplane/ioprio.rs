//! Tasks that a guest marks with `ionice`.

use std::time::Duration;

use serde_json::Value;

use super::server::{Image, Kind, Server};
use super::vm::{Disk, Vm, can_run};
use crate::scratch_disk::eventually;

/// Requests of each run of fio.
const READS: u64 = 200;

#[test]
fn requests_of_a_guest_count_for_the_task_that_ionice_gave_them() {
    const TEST: &str = "requests_of_a_guest_count_for_the_task_that_ionice_gave_them";
    if Kind::under_test() == Kind::Qsd {
        eprintln!("SKIPPED {TEST}: needs rtvirtio");
        return;
    }
    let Some(_host) = can_run(TEST) else { return };
    let image = Image::make();
    let server = Server::start(&image);
    let mut vm = Vm::boot(&server, Disk::default());
    let shell = vm.shell();
    let curve = ["--channels", "4", "--request-ns", "212500", "--kib-ns", "9375"];
    server.ctl(&[&["schedule", "set", "device"][..], &curve].concat());
    let promises = ["--deadline-us", "100000", "--iops", "100"];
    let tasks =
        ["--task", "rt/2,deadline-us=50000,iops=50", "--task", "be/7,deadline-us=90000,iops=20"];
    let all = [&["qos", Server::DEVICE, "--schedule", "device"][..], &promises, &tasks].concat();
    server.ctl(&all);
    // Reads of the disk, of its tasks rt/2 and be/7, that have ended.
    let reads = || -> [u64; 3] {
        let snapshot: Value = serde_json::from_str(&server.ctl(&["snapshot", "--json"])).unwrap();
        let qos = &snapshot["devices"][0]["qos"];
        let of = |had: &Value| had["reads"]["requests"].as_u64().unwrap();
        assert_eq!(
            (&qos["tasks"][0]["ioprio"], &qos["tasks"][1]["ioprio"]),
            (&"rt/2".into(), &"be/7".into())
        );
        [of(qos), of(&qos["tasks"][0]), of(&qos["tasks"][1])]
    };
    let mut before = reads();
    for (prefix, expected) in [
        ("ionice -c 1 -n 2", [READS, READS, 0]),
        ("ionice -c 2 -n 7", [READS, 0, READS]),
        // Neither a priority that no task has, nor none.
        ("ionice -c 1 -n 3", [READS, 0, 0]),
        ("", [READS, 0, 0]),
    ] {
        shell.expect(&format!(
            "{prefix} fio --name=reads --filename=/dev/vda --rw=randread --bs=4k --direct=1 \
             --ioengine=psync --number_ios={READS} --size=64m --minimal"
        ));
        let expected: Vec<u64> = before.iter().zip(expected).map(|(a, b)| a + b).collect();
        eventually(&format!("{prefix}: {expected:?}"), Duration::from_secs(60), || {
            reads().as_slice() == expected
        });
        before = reads();
    }
}
