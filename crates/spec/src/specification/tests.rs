//! Tests of parsing, refusing and writing specifications.

use std::path::PathBuf;

use proptest::prelude::*;
use rtvirtio_units::{
    Bytes, Confidence, DeviceName, DiskName, Iops, NameError, Nanos, Percentile, TaskName, VmName,
};

use super::*;

mod fields;
mod keys;
mod limits;
mod names;
mod values;
mod write;

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
