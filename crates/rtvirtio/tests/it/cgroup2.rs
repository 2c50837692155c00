//! cgroup v2 on a real kernel: a guest's, whatever the host has.
//!
//! In one guest: the host crate's own tests on its kernel, the verbs on a disk
//! and two cgroups of it, and whether the limits and weights that `apply` sets
//! act, iocost's among them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::settings::{Bfq, DeviceSettings, IoCost, Limits, Scheduler, VmSettings, diff};
use rtvirtio_units::{BytesPerSecond, VmName, Weight};
use serde_json::Value;

use crate::archive::GuestFile;
use crate::in_guest::{Machine, crate_tests, image, program};
use crate::scratch_disk::{RTVIRTIO, alone};

/// What the disk can do: so little that a guest under TCG is never the limit.
const DISK_IOPS: u32 = 400;
/// The cap on reads that is tried.
const CAP_IOPS: u32 = 100;
const DISK_BYTES: u64 = 1 << 30;

/// The host crate's tests that need a real kernel.
const HOST_TESTS: [&str; 7] = [
    "real_cgroup_with_a_process_is_removed",
    "real_doctor_probes_this_host",
    "real_loop_apply_verify_rollback_restores",
    "real_loop_detached_is_skipped_by_rollback",
    "real_loop_drift_is_found",
    "real_loop_identity_names_the_backing_file",
    "real_loop_killed_at_any_step_is_restored",
];

const SPECIFICATION: &str = r#"
version = 1
[device.data]
path = "/dev/vda"
profile = "profile.json"
[[vm]]
name = "plc"
cgroup = "machine/plc"
[[vm.disk]]
name = "root"
device = "data"
[[vm.task]]
name = "control"
iops = 500
target = { percentile = 99.9, latency_ms = 10 }
[[vm]]
name = "backup"
cgroup = "machine/backup"
[[vm.disk]]
name = "root"
device = "data"
"#;

/// Every file that a plan may touch; `io.stat` and the like change by themselves.
const KNOBS: &str = "cd /sys/block/vda/queue
    for f in scheduler nr_requests wbt_lat_usec iosched/* \
        /sys/fs/cgroup/machine/*/io.max /sys/fs/cgroup/machine/*/io.bfq.weight
    do echo $f: $(cat $f); done";

#[test]
fn cgroup2_in_a_guest_is_applied_verified_restored_and_acts() {
    const NAME: &str = "cgroup2_in_a_guest_is_applied_verified_restored_and_acts";
    let Some(image) = image(NAME) else { return };
    let files = match files() {
        Ok(files) => files,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {NAME}: {why}");
            return;
        }
    };
    let _host = alone();
    let group = format!(
        r#"{{"qom-type":"throttle-group","id":"slow","limits":{{"iops-total":{DISK_IOPS}}}}}"#
    );
    let disk = format!(
        r#"{{"driver":"throttle","node-name":"disk","throttle-group":"slow",
            "file":{{"driver":"null-co","size":{DISK_BYTES},"read-zeroes":true}}}}"#
    );
    let device = "virtio-blk-pci,drive=disk,serial=slow,num-queues=1";
    // The programs take more of the guest's file system than the usual memory has room for, which is half of it.
    let arguments = ["-object", &group, "-blockdev", &disk, "-device", device, "-m", "1024"];
    let machine = Machine::boot(&image, &files, &arguments);

    host_tests_pass(&machine);
    machine.expect(0, "mkdir -p /sys/fs/cgroup/machine/plc /sys/fs/cgroup/machine/backup");
    machine.expect(0, "echo mq-deadline >/sys/block/vda/queue/scheduler");
    machine.expect(0, "echo 96 >/sys/block/vda/queue/iosched/read_expire");
    io_is_to_be_enabled(&machine);
    machine.expect(
        0,
        "cd /sys/fs/cgroup && for d in . machine; do echo +io >$d/cgroup.subtree_control; done",
    );
    doctor_sees_v2(&machine);
    let plan = plan_is_applied_and_rolled_back(&machine);
    killed_apply_is_rolled_back(&machine);
    limits_and_weights_act(&machine, plan.clone());
    iocost_is_planned_applied_and_rolled_back(&machine);
    iocost_acts_by_weight(&machine, plan);
}

/// The binary, the host crate's tests, and losetup, which busybox has in a smaller form.
fn files() -> Result<Vec<GuestFile>, String> {
    let losetup = ["/usr/sbin/losetup", "/sbin/losetup"].map(PathBuf::from);
    let losetup = losetup.into_iter().find(|p| p.exists()).ok_or("needs losetup")?;
    let programs: [(&Path, &str); 3] = [
        (Path::new(RTVIRTIO), "/usr/bin/rtvirtio"),
        (&crate_tests("host"), "/usr/bin/host-tests"),
        (&losetup, "/usr/sbin/losetup"),
    ];
    let mut files = BTreeMap::new();
    for (source, path) in programs {
        files.extend(program(source, path)?.into_iter().map(|f| (f.path.clone(), f)));
    }
    Ok(files.into_values().collect())
}

fn host_tests_pass(machine: &Machine) {
    // /bin comes first in PATH, and busybox's losetup is there.
    let script = "ln -sf /usr/sbin/losetup /bin/losetup
        host-tests real_ --skip qemu:: --test-threads 1 2>&1";
    let said = machine.shell(script, Duration::from_secs(120));
    assert_eq!(said.code, Some(0), "{}", said.stdout);
    assert!(!said.stdout.contains("SKIPPED"), "{}", said.stdout);
    for test in HOST_TESTS {
        assert!(said.stdout.contains(&format!("test {test} ... ok")), "{test}: {}", said.stdout);
    }
}

/// On v2 a cgroup has io files only if its parents say so: that is an error with a remedy.
fn io_is_to_be_enabled(machine: &Machine) {
    machine.write("/tmp/profile.json", &profile(machine).to_string());
    machine.write("/tmp/spec.toml", SPECIFICATION);
    let complaint = machine.expect(1, "rtvirtio plan /tmp/spec.toml");
    assert!(complaint.contains("machine/backup/io.max"), "{complaint}");
    assert!(complaint.contains("hint: ") && complaint.contains("+io"), "{complaint}");
    assert_eq!(doctor(machine)["limits"], "degraded: io is not enabled below /sys/fs/cgroup");
}

/// A profile of the guest's disk: another one's numbers.
fn profile(machine: &Machine) -> Value {
    let rotational = machine.expect(0, "cat /sys/block/vda/queue/rotational").trim() == "1";
    let mut profile: Value = serde_json::from_str(include_str!("ref-4x250.json")).unwrap();
    profile["device"] = serde_json::json!({
        "kind": "vd", "model": "vd", "serial": "slow", "size": DISK_BYTES, "rotational": rotational,
    });
    profile
}

/// What doctor found: status and detail by name.
fn doctor(machine: &Machine) -> BTreeMap<String, String> {
    let json = machine.expect(0, "rtvirtio doctor --json");
    let findings: Vec<Value> = serde_json::from_str(&json).unwrap();
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let finding =
        |f: &Value| (text(f, "name"), format!("{}: {}", text(f, "status"), text(f, "detail")));
    findings.iter().map(finding).collect()
}

fn doctor_sees_v2(machine: &Machine) {
    let found = doctor(machine);
    assert_eq!(found["cgroup"], "ok: v2 io at /sys/fs/cgroup");
    assert_eq!(found["limits"], "ok: io.max");
    assert_eq!(found["io.cost"], "ok: /sys/fs/cgroup/io.cost.qos");
    for scheduler in ["bfq", "kyber", "mq-deadline"] {
        assert_eq!(found[scheduler], "ok: offered by a block device");
    }
}

/// The kernel's own files against the plan, in its formats (cgroup-v2.rst, bfq-iosched.rst).
fn files_hold(machine: &Machine, plan: &Plan) {
    let number = machine.expect(0, "cat /sys/block/vda/dev").trim().to_owned();
    let knobs = machine.expect(0, KNOBS);
    let line = |l: &str| l.split_once(':').map(|(k, v)| (k.to_owned(), v.trim().to_owned()));
    let lines: BTreeMap<String, String> = knobs.lines().filter_map(line).collect();
    let device = plan.settings.0.values().next().unwrap();
    let selected = format!("[{}]", device.scheduler.name());
    assert!(lines["scheduler"].contains(&selected), "{selected}: {knobs}");
    let is_bfq = if let Scheduler::Bfq(bfq) = device.scheduler {
        assert_eq!(lines["iosched/slice_idle_us"], bfq.slice_idle_us.to_string());
        assert_eq!(lines["iosched/timeout_sync"], bfq.timeout_sync_ms.to_string());
        true
    } else {
        false
    };
    for (vm, settings) in &device.vms {
        let file = |name: &str| &lines[&format!("/sys/fs/cgroup/machine/{vm}/{name}")];
        if is_bfq {
            let expected = format!("default 100 {number} {}", settings.weight.get());
            assert_eq!(*file("io.bfq.weight"), expected);
        }
        let text = |limit: Option<u64>| limit.map_or("max".to_owned(), |l| l.to_string());
        let Limits { read_bps, write_bps, read_iops, write_iops } = settings.limits;
        let expected = format!(
            "{number} rbps={} wbps={} riops={} wiops={}",
            text(read_bps.map(|r| r.get())),
            text(write_bps.map(|r| r.get())),
            text(read_iops),
            text(write_iops)
        );
        let is_free = settings.limits == Limits::default();
        assert_eq!(*file("io.max"), if is_free { "" } else { &expected });
    }
}

fn plan_is_applied_and_rolled_back(machine: &Machine) -> Plan {
    let before = machine.expect(0, KNOBS);
    assert!(before.contains("[mq-deadline]") && before.contains("read_expire: 96"), "{before}");
    machine.expect(2, "rtvirtio plan /tmp/spec.toml -o /tmp/plan.json");
    let plan: Plan = serde_json::from_str(&machine.expect(0, "cat /tmp/plan.json")).unwrap();
    assert_eq!(machine.expect(0, KNOBS), before, "a plan changes nothing");
    machine.expect(0, "rtvirtio apply /tmp/plan.json");
    machine.expect(0, "rtvirtio verify /tmp/plan.json");

    files_hold(machine, &plan);
    machine.expect(0, "rtvirtio rollback");
    assert_eq!(machine.expect(0, KNOBS), before);
    machine.expect(2, "rtvirtio verify /tmp/plan.json");
    plan
}

/// Killed once its journal is there: the change of scheduler behind it takes long.
fn killed_apply_is_rolled_back(machine: &Machine) {
    let before = machine.expect(0, KNOBS);
    machine.expect(
        137,
        "rtvirtio apply /tmp/plan.json & pid=$!
        while kill -0 $pid && [ ! -e /run/rtvirtio-host/journal.json ]; do :; done
        kill -9 $pid; wait $pid",
    );
    machine.expect(0, "test -e /run/rtvirtio-host/journal.json");
    let said = machine.expect(0, "rtvirtio rollback");
    assert!(said.contains("values restored"), "{said}");
    assert_eq!(machine.expect(0, KNOBS), before);
}

fn limits_and_weights_act(machine: &Machine, mut plan: Plan) {
    let before = machine.expect(0, KNOBS);
    let device = plan.devices[0].name.clone();
    let mut apply = |vms: [(u32, Option<u32>); 2]| {
        let vms = ["plc", "backup"].into_iter().zip(vms).map(|(name, (weight, read_iops))| {
            // A limit on writes beside it shares its line.
            let write_bps = read_iops.map(|_| BytesPerSecond::from_megabytes(10));
            let read_iops = read_iops.map(u64::from);
            let limits = Limits { read_iops, write_bps, ..Limits::default() };
            let weight = Weight::new(weight).unwrap();
            (VmName::new(name).unwrap(), VmSettings { weight, limits })
        });
        // bfq-iosched.rst: low_latency off where weights count.
        let bfq = Bfq { low_latency: false, ..Bfq::DEFAULT };
        let settings = DeviceSettings { scheduler: Scheduler::Bfq(bfq), vms: vms.collect() };
        plan.settings.0.insert(device.clone(), settings);
        plan.changes = diff(&plan.observed, &plan.settings.knobs());
        machine.write("/tmp/hand.json", &serde_json::to_string(&plan).unwrap());
        machine.expect(0, "rtvirtio apply /tmp/hand.json");
        files_hold(machine, &plan);
    };

    apply([(100, None), (100, Some(CAP_IOPS))]);
    let free = readers(machine, &["plc"])[0];
    assert!(free > 2.0 * f64::from(CAP_IOPS), "{free} of {DISK_IOPS} requests a second");
    let capped = readers(machine, &["backup"])[0];
    let of_cap = capped / f64::from(CAP_IOPS);
    println!("io.max: {capped:.0} of {CAP_IOPS} requests a second, {free:.0} without it");
    assert!((0.9..1.1).contains(&of_cap), "{capped} of {CAP_IOPS} requests a second");
    machine.expect(0, "rtvirtio rollback");

    apply([(400, None), (100, None)]);
    // Weights divide what is contended for: a guest that gets no CPU for a while does not contend.
    let acts = |attempt: u32| {
        let rates = readers(machine, &["plc", "backup"]);
        let ratio = rates[0] / rates[1];
        println!("{attempt}: io.bfq.weight 400:100: {:.0}:{:.0}, {ratio:.1}:1", rates[0], rates[1]);
        (2.0..8.0).contains(&ratio)
    };
    assert!((1..=3).any(acts), "weights of 400 and 100 do not act");
    machine.expect(0, "rtvirtio rollback");
    assert_eq!(machine.expect(0, KNOBS), before);
}

/// iocost's own files: the device's lines in the root, and each VM's weight for it.
const COST: &str = "device=$(cat /sys/block/vda/dev); cd /sys/fs/cgroup
    for f in io.cost.model io.cost.qos machine/plc/io.weight machine/backup/io.weight
    do echo $f: $(sed -n \"s/^$device //p\" $f); done";

/// Where targets are loose, the plan is iocost: it is set, read back, and off again afterwards.
fn iocost_is_planned_applied_and_rolled_back(machine: &Machine) {
    let before = machine.expect(0, COST);
    let mut profile = profile(machine);
    let setting = serde_json::json!({"bps": 370_000_000, "iops": 14_500, "read_latency_us": 2000, "write_latency_us": 2000});
    profile["structural"]["iocost"] = serde_json::json!([{"setting": setting, "utilisation": 1, "wait": 17_000_000, "left": 0.9}]);
    profile["residuals"]["structural"]["controlled"] = serde_json::json!(vec![0.1; 60]);
    machine.write("/tmp/profile.json", &profile.to_string());
    machine.write("/tmp/spec.toml", &SPECIFICATION.replace("latency_ms = 10", "latency_ms = 60"));
    let said = machine.expect(2, "rtvirtio plan /tmp/spec.toml -o /tmp/cost.json");
    assert!(said.contains("iocost read=2000us write=2000us") && said.contains("met"), "{said}");
    assert!(!said.contains("write limit"), "{said}");
    machine.expect(0, "rtvirtio apply /tmp/cost.json");
    machine.expect(0, "rtvirtio verify /tmp/cost.json");
    let found = machine.expect(0, COST);
    for line in [
        "io.cost.model: ctrl=user model=linear rbps=370000000 rseqiops=14500 rrandiops=14500 \
         wbps=370000000 wseqiops=14500 wrandiops=14500",
        "io.cost.qos: enable=1 ctrl=user rpct=99.00 rlat=2000 wpct=99.00 wlat=2000 min=1.00 \
         max=10000.00",
        "machine/plc/io.weight: 1000",
        "machine/backup/io.weight: 10",
    ] {
        assert!(found.contains(line), "{line}\n{found}");
    }
    machine.expect(0, "rtvirtio rollback");
    let after = machine.expect(0, COST);
    let is_off = |text: &str| !text.contains("enable=1") && !text.contains("ctrl=user");
    assert!(is_off(&before) && is_off(&after), "{before}\n{after}");
    assert!(!after.contains("io.weight: 1"), "{after}");
    // Killed on the way, it is put back all the same.
    machine.expect(
        137,
        "rtvirtio apply /tmp/cost.json & pid=$!
        while kill -0 $pid && [ ! -e /run/rtvirtio-host/journal.json ]; do :; done
        kill -9 $pid; wait $pid",
    );
    machine.expect(0, "rtvirtio rollback");
    assert_eq!(machine.expect(0, COST), after);
}

/// What the disk does 400 times a second is not enough for two readers of depth 8: one waits.
fn iocost_acts_by_weight(machine: &Machine, mut plan: Plan) {
    let device = plan.devices[0].name.clone();
    let vms = [("plc", Weight::MAX), ("backup", Weight::BACKGROUND)].map(|(name, weight)| {
        (VmName::new(name).unwrap(), VmSettings { weight, limits: Limits::default() })
    });
    let bps = BytesPerSecond::from_megabytes(100);
    let cost = IoCost {
        bps,
        iops: DISK_IOPS.into(),
        read_latency_us: 25_000,
        write_latency_us: 25_000,
        vrate: IoCost::ANY_SCALE,
    };
    let settings = DeviceSettings { scheduler: Scheduler::IoCost(cost), vms: vms.into() };
    plan.settings.0.insert(device, settings);
    plan.changes = diff(&plan.observed, &plan.settings.knobs());
    machine.write("/tmp/hand.json", &serde_json::to_string(&plan).unwrap());
    machine.expect(0, "rtvirtio apply /tmp/hand.json");
    let acts = |attempt: u32| {
        let rates = readers(machine, &["plc", "backup"]);
        let ratio = rates[0] / rates[1].max(1.0);
        println!("{attempt}: io.weight 1000:10: {:.0}:{:.0}, {ratio:.1}:1", rates[0], rates[1]);
        ratio > 2.0
    };
    assert!((1..=3).any(acts), "weights of 1000 and 10 do not act under iocost");
    machine.expect(0, "rtvirtio rollback");
}

/// Random reads a second of a saturating fio in each cgroup, by io.stat, while all of them read.
fn readers(machine: &Machine, vms: &[&str]) -> Vec<f64> {
    let script = format!(
        r#"
        device=$(cat /sys/block/vda/dev)
        cd /sys/fs/cgroup/machine
        reads() {{
            count=$(sed -n "s/^$device .*rios=\([0-9]*\).*/\1/p" $1/io.stat)
            echo ${{count:-0}}
        }}
        reader() {{
            echo 0 >$1/cgroup.procs
            exec fio --name=$1 --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=8 \
                --rw=randread --bs=4k --time_based --runtime=60 --thread >/dev/null
        }}
        look() {{
            cut -d' ' -f1 /proc/uptime
            for vm in {0}; do reads $vm; done
        }}
        for vm in {0}; do
            started=$(($(reads $vm) + 50))
            (reader $vm) &
            while kill -0 $! && [ $(reads $vm) -lt $started ]; do sleep 0.1; done
        done
        look; sleep 4; look
        killall fio; wait"#,
        vms.join(" ")
    );
    let said = machine.expect(0, &script);
    // What the shell says of the killed comes after it.
    let words = said.split_whitespace().take(2 * (vms.len() + 1));
    let numbers: Vec<f64> = words.map(|n| n.parse().expect(&said)).collect();
    let (first, last) = numbers.split_at(vms.len() + 1);
    let rate = |i: usize| (last[i] - first[i]) / (last[0] - first[0]);
    (1..=vms.len()).map(rate).collect()
}
